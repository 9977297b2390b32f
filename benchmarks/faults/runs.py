"""Small real runs for `monitors.py`, in one process: honest ones, and ones with a fault in them.

Each uses the product's coordinator, trainer, validators and workers over an in-memory network, and leaves a folder as
any run does. The faults are in what is injected, never in the monitors.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shoal.alarms import read_alarms
from shoal.config import RunConfig, load_run
from shoal.config.role_options import EvalOptions
from shoal.engine.dishonest import Cheat, Fabricate
from shoal.engine.interface import Continuation, Engine, EngineRequest
from shoal.engine.native import LocalEngine
from shoal.evaluation_files import BEFORE, results_in
from shoal.jobs import evaluate
from shoal.launch.alarm_actions import LOOK_EVERY_S, AlarmWatch, evaluations, setting_of
from shoal.ledger.commands import Admin
from shoal.ledger.event_types import read_entry
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.monitors.alarms import RunMonitors
from shoal.monitors.monitor_inputs import HeldoutResult
from shoal.net.key_files import load_or_make_key
from shoal.protocol.messages import AdminRequest, Grant
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.node.lifecycle import Node
from shoal.roles.trainer import Trainer
from shoal.roles.validator import Validator
from shoal.roles.worker.remote_env import EngineTurn
from shoal.roles.worker.worker import Made, Worker
from shoal.run_folder import RunFolder
from shoal.runs.run_status import RunStatus
from shoal.step_metrics import MetricsFollower, read_metrics
from tests.attacks.validators import Hangman
from tests.roles.testbed import RunTestbed

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("rollouts.batch_groups=8", "rollouts.group_size=8", "rollouts.block_rollouts=32", "eval.episodes=0",
         "rollouts.max_flat_groups=150")  # fmt: skip
SUMS = 'digits=2, operations="+"'
"""Arguments of the recipe's environment."""
SLOW_S, SLOW_TIMES = 1.0, 6.0
SKEW_S = 30.0
LIMIT_S = 900.0
"""No run takes nearly as long."""

Alarms = set[str]


def alarms_of(folder: RunFolder, config: RunConfig) -> Alarms:
    """Alarms that the monitors raise over a whole run that has been made, each named as `cause` or `cause:node`: those that
    the launcher wrote down while it went on, and those of a second look at all of it, with its evaluations."""
    live = {line.alarm.subject for line in read_alarms(folder.alarms) if line.change == "raised"}
    return with_metrics(folder, config, read_metrics(folder.metrics), evaluated(folder, config), live)


def evaluated(folder: RunFolder, config: RunConfig) -> list[HeldoutResult]:
    """The run's kept checkpoints on held-out tasks, as its launcher evaluates them beside training."""
    if not config.eval.episodes:
        return []
    for path in sorted(folder.checkpoints.glob("v[0-9]*")):
        name = path.name if int(path.name[1:]) else BEFORE
        out = str(folder.evaluations / f"{name}.json")
        evaluate.for_run(folder.root, EvalOptions(checkpoint=str(path), out=out))
    return evaluations(RunStatus("", "", config.steps, heldout=results_in(folder.evaluations)))


def with_metrics(
    folder: RunFolder,
    config: RunConfig,
    lines: Sequence[dict[str, Any]],
    heldout: Sequence[HeldoutResult] = (),
    live: Iterable[tuple[str, str]] = (),
) -> Alarms:
    """The same with other metrics beside the run's own log; `live` are subjects of alarms that were raised before."""
    follower = RunMonitors(setting_of(config))
    rows = Store(sqlite_url(folder.log), read_only=True).read()
    changes = follower.see((read_entry(data)[0] for data, _ in rows), lines, heldout)
    names = follower.digest.names
    raised = {one.alarm.subject for one in changes if one.change == "raised"}
    return {f"{cause}:{names[node][1]}" if node in names else cause for cause, node in {*raised, *live}}


class Honest(NamedTuple):
    """An honest run that was made."""

    folder: RunFolder
    config: RunConfig
    looks: int
    """That the launcher took between its steps."""


def honest(
    recipe: str, seed: int, steps: int, root: Path, *changes: str, times: Sequence[float] = (1.0, 1.0, 1.0)
) -> Honest:
    """A run of a recipe by honest workers; `times` says how many times as long as the machine allows each takes."""
    testbed = _testbed(recipe, seed, steps, root, *changes)
    workers = [_worker(testbed, f"worker-{i}", partial(_Times, times=long)) for i, long in enumerate(times)]
    return Honest(testbed.folder, testbed.config, _live(testbed, *workers))


class Faults:
    """A run for each fault; each returns its folder and its run file."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._seed = root, seed

    def high_learning_rate(self) -> tuple[RunFolder, RunConfig]:
        """30 times the recipe's."""
        return self._honest("rate", 24, "train.lr=6e-3")

    def temperature(self) -> tuple[RunFolder, RunConfig]:
        """Workers sample at 1; the trainer divides logits by 0.5."""
        testbed = self._testbed("temperature", 10)
        trainer = testbed.trainer()
        trainer.learner.temperature = 0.5
        _live(testbed, *self._workers(testbed, 2), trainer=trainer)
        return testbed.folder, testbed.config

    def pays_for_length(self) -> tuple[RunFolder, RunConfig]:
        """The environment rewards long answers."""
        return self._hack("length")

    def pays_for_repetition(self) -> tuple[RunFolder, RunConfig]:
        """The environment rewards repeated characters."""
        return self._hack("repetition", 80)

    def pays_for_a_digit(self) -> tuple[RunFolder, RunConfig]:
        """A policy that has learned to add goes on where answers that begin with a 1 are rewarded, to held-out tasks, too.
        Only a judge sees it."""
        learned, _ = self._honest("adds", 24, "train.lr=5e-4", "rollouts.max_staleness=0")
        start = f'policy.path="{learned.checkpoints / "final"}"'
        judge = f'eval.judge={{name="arithmetic", args={{{SUMS}}}}}'
        return self._hack("one", 24, start, "eval.episodes=128", "storage.checkpoint_every=8",
                          "rollouts.max_staleness=0", judge)  # fmt: skip

    def all_solved(self) -> tuple[RunFolder, RunConfig]:
        """Nearly every answer gets the full reward."""
        return self._hack("nothing", 12, "rollouts.batch_groups=2")

    def poisoned_worker(self) -> tuple[RunFolder, RunConfig]:
        """One of three workers forges everything."""
        testbed = self._testbed("poisoned", 16, "verify.quarantine_s=1")
        _live(testbed, *self._workers(testbed, 2), testbed.worker("bad", "fabricate"))
        return testbed.folder, testbed.config

    def few_refusals(self) -> tuple[RunFolder, RunConfig]:
        """One of three workers forges one lease in ten. The others take four times as long, which is honest."""
        testbed = self._testbed("few", 60, "rollouts.block_rollouts=16", "verify.quarantine_s=0.1")
        others = (_worker(testbed, f"worker-{i}", partial(_Times, times=4.0)) for i in range(2))
        _live(testbed, *others, _worker(testbed, "bad", _Sometimes))
        return testbed.folder, testbed.config

    def lapsed_leases(self) -> tuple[RunFolder, RunConfig]:
        """One of three workers gives back every lease. It waits longer for each next one, at first as long as a lease."""
        testbed = self._testbed("lapsed", 24, "rollouts.lease_s=3")
        _live(testbed, *self._workers(testbed, 2), _worker(testbed, "bad", kind=_Idler))
        return testbed.folder, testbed.config

    def slow_worker(self) -> tuple[RunFolder, RunConfig]:
        """One of four workers takes six times as long for each turn, and at least a second more."""
        testbed = self._testbed("slow", 24, "rollouts.max_staleness=3")
        _live(testbed, *self._workers(testbed, 3), _worker(testbed, "bad", _Slow))
        return testbed.folder, testbed.config

    def skewed_clock(self) -> tuple[RunFolder, RunConfig]:
        """The clock of one of three workers is half a minute ahead."""
        testbed = self._testbed("clock", 8)
        _live(testbed, *self._workers(testbed, 2), _worker(testbed, "bad", clock=lambda: time.time() + SKEW_S))
        return testbed.folder, testbed.config

    def host_clock(self) -> tuple[RunFolder, RunConfig]:
        """The host's clock is half a minute behind those of all workers."""
        testbed = self._testbed("host-clock", 8)
        _live(testbed, *(_worker(testbed, f"worker-{i}", clock=lambda: time.time() + SKEW_S) for i in range(3)))
        return testbed.folder, testbed.config

    def lying_validator(self) -> tuple[RunFolder, RunConfig]:
        """One of three validators refuses everything."""
        testbed = self._testbed("liar", 8, "validators.count=3")
        judges = [_validator(testbed, 0, Hangman), _validator(testbed, 1), _validator(testbed, 2)]
        _live(testbed, *self._workers(testbed, 2), judges=judges)
        return testbed.folder, testbed.config

    def _hack(self, pays_for: str, steps: int = 30, *changes: str) -> tuple[RunFolder, RunConfig]:
        args = f", {SUMS}" if pays_for == "one" else ""
        env = f'envs=[{{name="{ROOT}/benchmarks/envs/padded_sums.py", args={{pays_for="{pays_for}"{args}}}}}]'
        limits = ("sampling.max_turn_tokens=14", "sampling.max_tokens=32", "train.lr=1e-3")
        return self._honest(f"pays-{pays_for}", steps, env, *limits, *changes)

    def _honest(self, name: str, steps: int, *changes: str) -> tuple[RunFolder, RunConfig]:
        made = honest("arithmetic", self._seed, steps, self._root / name, *SMALL, *changes)
        return made.folder, made.config

    def _testbed(self, name: str, steps: int, *changes: str) -> RunTestbed:
        return _testbed("arithmetic", self._seed, steps, self._root / name, *SMALL, *changes)

    @staticmethod
    def _workers(testbed: RunTestbed, count: int) -> list[Worker]:
        return [testbed.worker(f"worker-{i}") for i in range(count)]


def _testbed(recipe: str, seed: int, steps: int, root: Path, *changes: str) -> RunTestbed:
    path = ROOT / "recipes" / f"{recipe}.toml"
    config = load_run(path, [f"steps={steps}", f"seed={seed}", *changes])
    RunFolder(root).prepare(config, path.parent)
    return RunTestbed(root, RunFolder(root).config())


def _live(testbed: RunTestbed, *workers: Worker, judges: Any = None, trainer: Trainer | None = None) -> int:
    """Let a run go to its end, and look at it on the way as its launcher does. One that pauses itself is drained, as a host
    would who has seen enough. Returns how many looks there were."""
    watch, metrics = AlarmWatch(testbed.folder, testbed.config), MetricsFollower(testbed.folder.metrics)
    board, looks = StatusCache(testbed.coordinator), [0.0]

    def look() -> None:
        if time.time() - looks[-1] >= LOOK_EVERY_S:
            looks.append(time.time())
            watch.look(RunStatus("", "", testbed.config.steps, board.status(), metrics=metrics.lines()))

    async def story() -> None:
        roles = (trainer or testbed.trainer(), *(judges or [testbed.validator()]), *workers)
        life = asyncio.create_task(testbed.live(*roles, limit_s=LIMIT_S))
        while not life.done():
            look()
            if testbed.coordinator.state.phase == "paused":
                await testbed.coordinator.log_writer.submit(Admin("drain", AdminRequest(), time.time()))
            await asyncio.wait({life}, timeout=0.2)
        await life

    asyncio.run(story())
    return len(looks) - 1


class _Times(Cheat):
    """An honest engine of a machine that takes some times as long as this one."""

    def __init__(self, engine: Engine, times: float) -> None:
        super().__init__(engine)
        self._times = times

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        began = time.perf_counter()
        found = self.engine.extend(requests, temperature)
        time.sleep((self._times - 1) * (time.perf_counter() - began))
        return found


class _Sometimes(Cheat):
    """Forges one lease in ten."""

    calls = 0

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        self.calls += 1
        engine = self.engine if self.calls % 10 else Fabricate(self.engine)
        return engine.extend(requests, temperature)


class _Idler(Worker):
    """Takes leases, and gives each back."""

    async def _play_whole(self, grant: Grant, before: EngineTurn, use: EngineTurn) -> Made | None:
        return None


class _Slow(Cheat):
    """An honest engine of a slow machine, no matter how busy this one is."""

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        began = time.perf_counter()
        found = self.engine.extend(requests, temperature)
        time.sleep(max(SLOW_S, (SLOW_TIMES - 1) * (time.perf_counter() - began)))
        return found


def _worker(
    testbed: RunTestbed,
    name: str,
    change: Callable[[Engine], Engine] | None = None,
    clock: Callable[[], float] = time.time,
    kind: type[Worker] = Worker,
) -> Worker:
    """A worker with something changed."""
    home = testbed.folder.nodes / name
    testbed.clock, usual = clock, testbed.clock
    client = testbed.client(home / "node.key")
    testbed.clock = usual

    def make_engine(dtype: str, **named: str) -> Engine:
        engine: Engine = LocalEngine(threads=1, dtype=dtype, **named)
        return change(engine) if change else engine

    return kind(Node(client, load_or_make_key(home / "node.key").public, testbed.options(home), make_engine, clock))


def _validator(testbed: RunTestbed, number: int, kind: type[Validator] = Validator) -> Validator:
    client = testbed.client(testbed.folder.keys / f"validator-{number}.key")
    home = testbed.folder.nodes / f"validator-{number}"
    assert client.key is not None
    return kind(Node(client, client.key.public, testbed.options(home), partial(LocalEngine, 1)))

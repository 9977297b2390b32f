"""The trainer: makes version v + 1 from version v and batch v, until the run's last step.

It does not choose the groups that it learns from: each batch is an event of the log. It saves its own state, or what it
needs to repeat the step, before it publishes a version. So after a kill at any moment it repeats the same step with the
same bits, and never rebuilds a published version differently.

`batch_reader` reads the batches; `publish_version` publishes the versions and keeps checkpoints, while the next step is
under way; `state` saves the state.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from shoal.config import RunConfig, notes_of
from shoal.errors import NothingYet, PeerError, StateError, Superseded
from shoal.models.checkpoint import WeightSnapshot
from shoal.models.device import take_device
from shoal.models.interface import PolicyModel
from shoal.models.transformer import Transformer
from shoal.models.value_head import begin_valued
from shoal.net.client import Client
from shoal.net.key_files import find_key, load_or_make_key
from shoal.net.server_address import Stopping
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import narrowest_bound
from shoal.protocol.signing import Key
from shoal.protocol.tolerances import claims_bend_ratios
from shoal.roles.node.device_queue import Shift, shift_of
from shoal.roles.trainer.batch_reader import BatchReader
from shoal.roles.trainer.models import PastPolicies, first_model, open_judge, open_reference
from shoal.roles.trainer.publish_version import Publisher
from shoal.roles.trainer.state import TrainerState
from shoal.run_folder import RunFolder
from shoal.step_metrics import MetricsLog
from shoal.train.checkpoint import States
from shoal.train.critic import critic_of
from shoal.train.frozen_models import AdvantageModel, KLReference
from shoal.train.learner import Learner
from shoal.train.logprobs import (
    LogprobsAt,
    largest_gap_nats,
    loaded_anew,
    over_the_base,
    row_to_check,
    with_own_denominators,
)
from shoal.train.master_weights import module_dtype
from shoal.train.rows import TrainingRow, learned

T = TypeVar("T")
log = logging.getLogger("trainer")

ALARM_GAP_NATS = 0.01
"""If the self-check at start-up finds a larger difference, generation and training do not see the same policy."""


def main(run_dir: Path, url: str, shifts: Path | None = None) -> None:
    """Train the run in `run_dir` through its coordinator at `url` until its last step, or until told to stop. `shifts` is
    the folder in which the processes queue that share the device, if any do."""
    folder = RunFolder(run_dir)
    config = folder.config()
    if config.train.processes > 1:
        from shoal.roles.trainer.processes import run_processes

        run_processes(folder, url, config.train.processes)
        return
    torch.set_num_threads(config.train.threads)
    key = load_or_make_key(folder.keys / "trainer.key")
    shift = shift_of(shifts, "trainer")
    with shift.held():
        trainer = Trainer(folder, config, Client(url, key), key, shift=shift)
    asyncio.run(trainer.run())


class Learning(NamedTuple):
    """What learns, with its states, and where it computes."""

    learner: Learner
    states: States
    device: str
    logprobs_at: LogprobsAt | None = None
    """As `with_own_denominators` takes it."""
    refer: KLReference | None = None
    """What computes log-probs under the run's first policy, if it needs them."""
    judge: AdvantageModel | None = None
    """What gives rows their advantages, if a teacher or a reward model does."""


def learning_alone(folder: RunFolder, config: RunConfig) -> Learning:
    """A learner of this process alone."""
    device = take_device(config.train.device)
    dtype = module_dtype(config.train)
    model = first_model(folder, config, dtype).to(device)
    critic = critic_of(config.train, lambda: begin_valued(folder.policy, dtype).to(device))
    learner = Learner(model, config.train, config.sampling, steps=config.steps, critic=critic)
    temperature, budget = config.sampling.temperature, config.train.microbatch_tokens
    # guard: one-base-in-memory
    logprobs_at = (
        over_the_base(model, temperature, budget) if isinstance(model, Transformer) and model.adapter else None
    )
    refer = open_reference(folder, config, model, device)
    judge = open_judge(folder, config, device)
    return Learning(learner, States(folder.trainer, learner), device, logprobs_at, refer, judge)


class Trainer:
    """The trainer of one run."""

    def __init__(
        self, folder: RunFolder, config: RunConfig, client: Client, key: Key, clock: Callable[[], float] = time.time,
        learning: Learning | None = None, shift: Shift | None = None,
    ) -> None:  # fmt: skip
        """`key` signs the manifests; the client signs with the same key. Without `learning`, it learns alone. Without
        `shift`, it shares its device with nobody."""
        self.folder, self.config, self.client = folder, config, client
        learning = learning or learning_alone(folder, config)
        self.learner, states, self.device, self.logprobs_at, self.refer, self.judge = learning
        self.shift = shift or Shift()
        for model in (self.learner, self.refer, self.judge):
            if model is not None:
                self.shift.keeps(model)
        self.batches = BatchReader(config, client, self.learner.model.spec.vocab_size, folder.scores)
        self.past = PastPolicies(folder, client)
        self.publisher = Publisher(folder, config, client, key, clock)
        self.saving = TrainerState(states, config.storage.state_every)
        self.metrics = MetricsLog(folder.metrics)
        self.stopping = Stopping()
        self.waits: dict[str, float] = {}
        self.checked = False
        self.publication: asyncio.Task[None] | None = None
        """Of the version made last, while the next step is under way."""
        self.info: t.RunInfo

    async def run(self) -> None:
        """The trainer's whole job."""
        async with self.client:
            with self.stopping.at_signals():
                version = await self.stopping.unless(self._open())
                if version is None:
                    log.info("stopped before the run was opened")
                    return
                try:
                    version = await self._learn(version)
                    await self._published()
                    async with self.shift.on():
                        await self.saving.finish(version)
                finally:
                    if self.publication is not None:
                        self.publication.cancel()  # if it did not end, something failed
                if version < self.config.steps and not self.stopping:
                    log.info("the run ended early at version=%d: it was drained", version)
                    async with self.shift.on():
                        self.publisher.keep_final(self.learner.model)

    async def _learn(self, version: int) -> int:
        """Take steps until the last one, until told to stop, or until the run ends early. Returns the last version."""
        while version < self.config.steps and not self.stopping:
            began = time.perf_counter()
            batch = await self._waiting("batch", self._batch(version))
            if batch is None:
                break
            with self._repeating(version):
                reading = partial(self.batches.rows, batch, self.info)
                rows, counts = await self._waiting("bodies", self._as_publisher(reading))
                sampled_by = await self._sampled_by(rows)
            async with contextlib.AsyncExitStack() as shift:
                if not await self._waiting("device", self.stopping.unless(self._begin(shift))):
                    break
                counts |= self._selfcheck(rows, version)
                rows, own = await self._denominators(rows, sampled_by)
                rows, referred = await self._referred(rows)
                rows, judged = await self._judged(rows)
                self.learner.lr_factor = batch.lr_factor or 1.0  # guard: rate-of-the-log
                metrics = await asyncio.to_thread(self.learner.step, rows, version)
                version += 1
                metrics |= counts | own | referred | judged | await self._save_and_publish(version, rows)
            self._report(version, began, metrics)
        return version

    @contextlib.contextmanager
    def _repeating(self, version: int) -> Iterator[None]:
        """Around reading what a step learns from. Raises `StateError` if the step was taken before, and neither the journal
        nor the coordinator has what repeats it."""
        try:
            yield
        except (NothingYet, Superseded) as error:
            if version >= self.info.version:
                raise
            path = self.saving.place_of(version + 1)
            raise StateError(
                f"version {version + 1} is published, the step that made it is missing or damaged ({path}), and the "
                f"coordinator has deleted what it learned from ({error}): put that file back from a copy, or start a new "
                f"run whose policy.path is the newest folder in {self.folder.checkpoints}"
            ) from None

    async def _open(self) -> int:
        """Join; load the saved state or begin; finish what a kill interrupted. Returns the version to learn from."""
        self.info = await self.client.get_json("/v1/run", t.RunInfo)
        self.client.run, self.client.head = self.info.run, self.info.head
        self._take_key()
        await self._join()
        root_of = partial(self.publisher.root_of, self.learner.model)
        async with self.shift.on():  # until the version is published, nobody else has work
            restored = await asyncio.to_thread(self.saving.restore, root_of)
            version = restored or 0
            if restored is None and self.info.version > 0:
                raise StateError(
                    f"version {self.info.version} is published but the trainer has no state in {self.folder.trainer}: copy "
                    "it back from the machine that trained, or start a new run from that checkpoint (policy.path)"
                )
            if restored is None:
                await self.saving.finish(0)
            for note in notes_of(self.config):
                log.warning("%s", note)
            log.info("opened version=%d published=%d steps=%d", version, self.info.version, self.config.steps)
            if version > self.info.version:
                await self._publish(self.learner.model, version)
            else:
                self.publisher.keep_due(self.learner.model, version)
        if self.info.phase != "ended":
            await self._renew(version)  # guard: renew-on-resume
        return version

    async def _join(self) -> None:
        join = t.Join("trainer", "trainer", 0.0, f"torch-{torch.__version__}", "float32", self.device)
        await self.client.post_json("/v1/nodes", join, t.NodeState)

    def _take_key(self) -> bool:
        """Sign with the publisher's key, which `shoal admin rotate-publisher` put into the run's folder. Returns whether it
        is another than before. Raises `StateError` if the folder lacks it."""
        if self.info.trainer_key == self.publisher.key.public:
            return False
        key = find_key(self.folder.keys, "trainer", self.info.trainer_key)
        if key is None:
            raise StateError(
                f"the root named the publisher {self.info.trainer_key[:16]}, and no {self.folder.keys}/trainer*.key is its "
                "key: copy that key there from where it was made, or name another with `shoal admin rotate-publisher`"
            )
        self.client.key = key
        self.publisher.sign_with(key)
        log.info("publishes with key=%s since rotation=%d", key.public[:16], len(self.info.all_publishers.rotations))
        return True

    async def _as_publisher(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do what only the publisher may, with its new key if the root replaced ours.

        A publication and the next step do so at the same time, so either may find the key replaced by the other.
        """
        while True:
            key = self.publisher.key
            try:
                return await work()
            except PeerError:
                if self.publisher.key is key:  # guard: key-taken-by-another-task
                    self.info = await self.client.get_json("/v1/run", t.RunInfo)
                    if not self._take_key():
                        raise
                    await self._join()

    async def _publish(
        self,
        policy: PolicyModel | WeightSnapshot | Path,
        version: int,
        record: Callable[[str], None] = lambda root: None,
    ) -> None:
        await self._as_publisher(lambda: self.publisher.publish(policy, version, record))

    async def _renew(self, version: int) -> None:
        await self._as_publisher(lambda: self.publisher.renew(version, self.info))

    async def _batch(self, step: int) -> t.Batch | None:
        """Wait for the step's batch; None if we are told to stop or the run has ended."""
        while not self.stopping:
            try:
                return await self.stopping.unless(self.client.get_json(f"/v1/batches/{step}", t.Batch))
            except NothingYet as reason:
                log.info("waiting step=%d reason=%r", step, str(reason))
                if self.publication is not None:
                    await asyncio.wait({self.publication}, timeout=1.0)
                    if not self.publication.done():
                        continue
                    await self._published()
                self.info = await self.client.get_json("/v1/run", t.RunInfo)
                if self.info.phase == "ended":
                    return None
                if self._take_key():
                    await self._join()
                await self._renew(step)  # guard: renew-while-waiting
        return None

    async def _begin(self, shift: contextlib.AsyncExitStack) -> bool:
        """Begin a shift; returns True when done."""
        await shift.enter_async_context(self.shift.on())
        return True

    def _selfcheck(self, rows: list[TrainingRow], version: int) -> dict[str, Any]:
        """Once: recompute a row that is sampled by the current version."""
        fresh = row_to_check(rows, version)
        if self.checked or fresh is None:
            return {}
        self.checked = True
        gap = largest_gap_nats(self.learner.logprobs([fresh])[0], fresh)
        # What was rounded to int8 is another policy: a gap is expected.
        alarming = gap > ALARM_GAP_NATS and self.info.rules.dtype != "int8"
        level = logging.WARNING if alarming else logging.INFO
        log.log(level, "self-check: one completion recomputed, largest |Δ log-prob| = %.2e nats", gap)
        return {"selfcheck_gap_nats": gap}

    async def _sampled_by(self, rows: list[TrainingRow]) -> dict[int, Path]:
        """The versions that sampled these rows, if the trainer computes the denominators itself."""
        rules = self.info.rules
        if not claims_bend_ratios(rules.bounds, rules.dtype, narrowest_bound(rules.algorithm)):
            return {}
        return await self.past.directories((row.version for row in learned(rows)), self.info)

    async def _denominators(
        self, rows: list[TrainingRow], sampled_by: dict[int, Path]
    ) -> tuple[list[TrainingRow], dict[str, Any]]:
        """The rows as the loss may use them: with denominators of our own, if workers could bend the ratio by theirs."""
        rules, train, began = self.info.rules, self.config.train, time.perf_counter()
        if not sampled_by:
            return rows, {}
        logprobs_at = self.logprobs_at
        if logprobs_at is None or rules.dtype == "int8":
            logprobs_at = loaded_anew(
                rules.dtype, self.learner.temperature, train.microbatch_tokens, module_dtype(train), self.device
            )
        own = await asyncio.to_thread(with_own_denominators, rows, sampled_by, logprobs_at)
        return own, {"denominators_s": time.perf_counter() - began}

    async def _referred(self, rows: list[TrainingRow]) -> tuple[list[TrainingRow], dict[str, Any]]:
        """The rows with log-probs under the run's first policy, if its algorithm needs them."""
        if self.refer is None:
            return rows, {}
        began = time.perf_counter()
        return await asyncio.to_thread(self.refer, rows), {"reference_s": time.perf_counter() - began}

    async def _judged(self, rows: list[TrainingRow]) -> tuple[list[TrainingRow], dict[str, Any]]:
        """The rows with the advantages of a teacher or a reward model, if the run has one."""
        if self.judge is None or not rows:  # guard: nothing-to-judge
            return rows, {}
        began = time.perf_counter()
        rows, figures = await asyncio.to_thread(self.judge, rows, self.learner.logprobs)
        return rows, figures | {"judge_s": time.perf_counter() - began}

    async def _save_and_publish(self, version: int, rows: list[TrainingRow]) -> dict[str, Any]:
        """Save the state if it is due, and begin to publish the version, which goes on beside the next step.

        The version before must be published first: after a kill, the state that is found is published, and no other.
        """
        began = time.perf_counter()
        await self._published()  # guard: one-version-ahead
        waited = time.perf_counter()
        await self.saving.save(version)
        saved = time.perf_counter()
        policy = await asyncio.to_thread(self.publisher.snapshot, self.learner.model)
        record = self.saving.record(version, rows, self.learner.budgets)
        self.publication = asyncio.create_task(self._publish(policy, version, record))
        return {"publish_wait_s": waited - began, "save_s": saved - waited, "publish_s": self.publisher.published_s}

    async def _published(self) -> None:
        """Wait until the version made last is published. Raises as `Publisher.publish`."""
        if self.publication is not None:
            await self.publication

    async def _waiting(self, what: str, work: "asyncio.Future[T] | Any") -> Any:
        """Await, and count the time as spent waiting for `what`."""
        began = time.perf_counter()
        try:
            return await work
        finally:
            self.waits[what] = self.waits.get(what, 0.0) + time.perf_counter() - began

    def _report(self, version: int, began: float, metrics: dict[str, Any]) -> None:
        step_s = time.perf_counter() - began
        waits, self.waits = self.waits, {}
        longest: Callable[[str], float] = lambda what: waits[what]  # noqa: E731
        self.metrics.write(
            {"step": version - 1, "time_s": time.time(), "step_s": step_s}
            | {"waiting_share": sum(waits.values()) / max(step_s, 1e-9), "waiting_for": max(waits, key=longest)}
            | metrics
        )
        log.info(
            "step=%d reward=%.3f entropy=%.3f rollouts=%d train=%.2fs", version - 1,
            metrics.get("reward_all_mean", metrics["reward_mean"]), metrics.get("entropy_nats", 0.0),
            metrics["rollouts"], metrics["train_s"],
        )  # fmt: skip

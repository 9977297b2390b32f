"""What a host may answer a worker: either the worker leaves, or what it submits has no flaw that it is blamed for."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

from shoal.config import TinyPolicy
from shoal.errors import PeerError
from shoal.models.random_model import make_tiny
from shoal.protocol import messages as t
from shoal.protocol.constants import COMPLETIONS
from shoal.roles.worker.remote_env import AHEAD, EngineShare, PlayContext, play_blocks
from shoal.verification.checks_without_model import shape
from tests.envs import silent
from tests.envs.conftest import FakeEngine
from tests.roles.test_remote_env import ids
from tests.roles.testbed import RunTestbed, tiny_run

SAMPLING = t.Sampling(temperature=1.0, max_turn_tokens=3, max_tokens=12, max_rollout_tokens=20)
STOP, VOCABULARY, SIZE = 2, 16, 2
RENDERER = SimpleNamespace(vocabulary=VOCABULARY, stop_ids=frozenset({STOP}))
CONTEXT = SimpleNamespace(
    rules=SimpleNamespace(group_size=SIZE), tools=SimpleNamespace(renderer=RENDERER), sampling=SAMPLING, due=SIZE
)


class Writer(FakeEngine):
    """Writes turns of all lengths."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def write(self, request):
        length = self.rng.randint(1, request.max_new)
        return [5] * length if length == request.max_new else [5] * (length - 1) + [STOP]


def play(host, engine) -> t.Group:
    """The group that a worker submits. Raises `PeerError` if it leaves."""

    async def ready():
        return AHEAD

    async def ask(turn):
        return host(turn)

    table = PlayContext(engine, lambda: RENDERER, SIZE, SAMPLING, ask, lambda: "", ready)
    block = t.Block(0, (t.Slot(0, "00" * 32, "toy", 1),), COMPLETIONS)
    return asyncio.run(play_blocks(table, [block], EngineShare()))[0]


def blamed(group) -> str:
    failure = shape(group, CONTEXT)
    return failure.detail if failure is not None else ""


class Liar:
    """Says mostly what an environment could say, and at times anything."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.rows, self.open = rng, [1] * SIZE, SIZE

    def __call__(self, turn: t.EnvTurn) -> t.TurnAnswer:
        rng = self.rng
        texts = tuple(ids(*[3] * rng.choice([0, 1, 1, 2, 3, rng.randint(0, 14)])) for _ in range(3))
        said = [self.say(turn.turn, rng) for _ in range(self.open)]
        self.open -= sum(each.ending != "" for each in said)
        return t.TurnAnswer(texts, tuple(said))

    def say(self, turn: int, rng: random.Random) -> t.EnvReply:
        ending = rng.choice(["environment", "length"]) if rng.random() < (0.4 if turn else 0.03) else ""
        row = rng.choice([0, 0, 0, 1, 1, 2]) if rng.random() < 0.3 else 0
        author = rng.choice([0, 1, 2, 3]) if rng.random() < 0.1 else t.POLICY
        return t.EnvReply(rng.randrange(3), 0 if ending else rng.randint(1, 3), ending, author, row)


def test_no_host_can_make_a_worker_submit_what_it_is_blamed_for():
    found: Counter[str] = Counter()
    for seed in range(500):
        rng = random.Random(seed)
        try:
            group = play(Liar(rng), Writer(rng))
        except PeerError:
            found["left"] += 1
        else:
            found[blamed(group)] += 1
    assert set(found) == {"left", ""} and found[""] > 25


def test_a_host_whose_environment_says_nothing_is_no_liar(tmp_path):
    """The chat template shows no border between turns, so words may lack. Nobody leaves, and nobody is blamed."""
    policy = tmp_path / "policy"
    make_tiny(TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=64, max_positions=64), policy, 5, "float32")
    testbed = RunTestbed(tmp_path / "run", tiny_run(
        envs=[{"name": silent.__file__, "kind": COMPLETIONS}], policy={"path": str(silent.with_template(policy))}, steps=1
    ))  # fmt: skip
    worker, asked = testbed.worker("stranger", own_files=False), []
    post = worker.client.post_packed
    worker.client.post_packed = lambda path, turn, *kind, **more: (
        asked.append(turn.turn) or post(path, turn, *kind, **more)
    )
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    testbed.stage.close()
    assert testbed.audit().findings == [] and testbed.coordinator.state.refused == {} and max(asked) > 1

"""Runs whose host plays the environments: workers only extend token ids, and everything else is as in any run."""

import asyncio
import contextlib
import sqlite3
import time
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from shoal.config import RunConfig
from shoal.config.role_options import NodeOptions
from shoal.errors import ConfigError, PeerError, Superseded
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.submissions import SubmissionReceived
from shoal.protocol import messages as t
from shoal.protocol.constants import COMPLETIONS, MAX_ROLLOUT_ROWS
from shoal.protocol.seed_chain import row_seed, sample_seed
from shoal.roles.auditor.rejudge_groups import AGREE, GroupChoice, audit_rollouts
from shoal.roles.node.lease_client import Leases
from shoal.roles.node.lifecycle import Node
from shoal.roles.worker.remote_env import AHEAD, EngineShare, EngineTurn, PlayContext, play_blocks
from shoal.roles.worker.worker import Worker
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.log_source import FolderRun
from shoal.typed_toml import from_tree
from tests.envs.conftest import FakeEngine
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

HOSTED = [{"name": "arithmetic", "kind": "completions"}]


@pytest.fixture(scope="module")
def single_file_weights(tmp_path_factory):
    """Of a run in one process whose worker plays the environments."""
    return weights_of_one_file(tiny_run(), tmp_path_factory.mktemp("one") / "run")


COUNTING = '''
from shoal.env import Env, Step

class Counting(Env):
    """Scores how many letters are in the answer, up to four."""
    name, num_tasks = "counting", 100
    def task(self, index, heldout=False):
        return index
    def reset(self, task):
        return "", [{"role": "user", "content": f"{task}: say letters"}]
    def step(self, state, action):
        return Step(action, "", True)
    def score(self, state):
        return min(4, sum(letter.isalpha() for letter in state)) / 4

def environment():
    return Counting()
'''


MOODY = "import random\n" + COUNTING.replace("say letters", "say {random.random():.3f}").replace(
    "return min", "return random.random() * min"
)


def test_strangers_train_on_a_file_that_only_the_host_has_also_if_nobody_can_repeat_it(tmp_path):
    """Its record is then the truth."""
    (tmp_path / "own.py").write_text(MOODY)
    envs = [{"name": str(tmp_path / "own.py"), "reproducible": False}]
    testbed = RunTestbed(tmp_path / "run", tiny_run(envs=envs), for_others=True)
    strangers = [testbed.worker(f"stranger-{i}", own_files=False) for i in range(2)]
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *strangers))
    testbed.stage.close()
    (tmp_path / "own.py").unlink()
    assert {env.kind for env in testbed.config.envs} == {COMPLETIONS}
    found = asyncio.run(audit_rollouts(FolderRun(testbed.folder.root), GroupChoice(), threads=1, own_files=False))
    assert found.exit_code() == AGREE and found.with_model == found.groups > 0, str(found)
    assert testbed.audit().findings == [] and testbed.coordinator.state.refused == {}


@pytest.mark.parametrize(
    ("keys", "for_others", "kind"),
    [
        ({"name": "mine.py"}, True, "completions"),
        ({"name": "mine.py"}, False, ""),
        ({"name": "mine.py", "kind": "episodes"}, True, "episodes"),
        ({"name": "mine.py", "reproducible": False}, False, "completions"),
        ({"name": "ann/parrot@0.1.0"}, True, "completions"),
        ({"name": "pkg:" + "a" * 64}, True, "completions"),
        ({"name": "arithmetic"}, True, ""),
    ],
)
def test_the_host_plays_for_others_what_is_not_built_in_and_what_nobody_can_repeat(tmp_path, keys, for_others, kind):
    config = from_tree({"name": "run", "steps": 1, "envs": [keys]}, RunConfig, "test")
    folder = RunFolder(tmp_path / "run")
    folder.prepare(config, tmp_path, for_others=for_others)
    assert [env.kind for env in folder.config().envs] == [kind]
    assert folder.prepare(config, tmp_path, for_others=for_others), "the same command resumes"


def test_the_host_plays_what_says_itself_that_nobody_can_repeat_it(tmp_path):
    config = from_tree({"name": "run", "steps": 1, "envs": [{"name": "mine.py"}]}, RunConfig, "test")
    folder, asked = RunFolder(tmp_path / "run"), []

    def repeatable(env):
        asked.append(env.name)
        return False

    folder.prepare(config, tmp_path, repeatable=repeatable)
    assert folder.config().envs[0].kind == "completions" and folder.config().envs[0].reproducible
    assert folder.prepare(config, tmp_path, repeatable=repeatable), "the same command resumes"
    assert asked == [str(tmp_path / "mine.py")], "a run that has begun keeps who plays"


def test_a_run_from_before_hosts_could_play_goes_on_as_it_began(tmp_path):
    config = from_tree({"name": "run", "steps": 1, "envs": [{"name": "mine.py"}]}, RunConfig, "test")
    folder = RunFolder(tmp_path / "run")
    folder.prepare(config, tmp_path)
    write_atomically(folder.secret_file, b"11" * 32)
    assert folder.prepare(config, tmp_path, for_others=True)
    assert [env.kind for env in folder.config().envs] == [""]


def test_an_environment_that_says_that_nobody_can_repeat_it_is_believed(tmp_path):
    moody = COUNTING.replace("class Counting(Env):", "class Counting(Env):\n    reproducible = False")
    (tmp_path / "moody.py").write_text(moody)
    name = str(tmp_path / "moody.py")
    with pytest.raises(ConfigError, match='set kind = "completions"'):
        RunTestbed(tmp_path / "alone", tiny_run(envs=[{"name": name}]))
    for keys in ({"reproducible": False}, {"kind": "completions"}):
        testbed = RunTestbed(tmp_path / "".join(keys), tiny_run(envs=[{"name": name, **keys}]))
        assert [(spec.kind, spec.reproducible) for spec in testbed.coordinator.state.envs] == [(COMPLETIONS, False)]
        testbed.stage.close()


def test_two_of_three_workers_killed_change_no_byte_and_every_token_can_be_derived_again(tmp_path, single_file_weights):
    testbed = RunTestbed(tmp_path / "run", tiny_run(envs=HOSTED))
    workers = [testbed.worker(f"worker-{i}") for i in range(3)]
    killed = []

    async def live_until_killed(worker, turns):
        """Kill a worker in the middle of a turn: no goodbye, and its lease stays open."""
        ask = worker.client.post_packed
        me = asyncio.current_task()

        async def count(*args, **options):
            nonlocal turns
            turns -= 1
            if turns == 0:
                killed.append(worker)
                me.cancel()
            return await ask(*args, **options)

        worker.client.post_packed = count
        try:
            await Worker.run(worker)
        except asyncio.CancelledError:
            me.uncancel()

    for worker, turns in zip(workers[:2], (2, 5), strict=True):
        worker.run = partial(live_until_killed, worker, turns)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *workers))
    testbed.stage.close()
    assert len(killed) == 2
    assert testbed.audit().findings == [] and testbed.coordinator.state.refused == {}
    causes = [entry.body.cause for entry in testbed.audit().entries if isinstance(entry.body, LeaseLapsed)]
    assert causes.count("deadline") + causes.count("overtaken") >= 1
    found = asyncio.run(audit_rollouts(FolderRun(testbed.folder.root), GroupChoice(), threads=1, own_files=False))
    assert found.exit_code() == AGREE and found.with_model == found.groups > 0, str(found)
    assert all(e.body.record for e in testbed.audit().entries if isinstance(e.body, SubmissionReceived))
    assert testbed.weights() == single_file_weights


# --- a worker and what a host may say ---


SAMPLING = t.Sampling(temperature=1.0, max_turn_tokens=4, max_tokens=40)
STOP = 2


class Letters(FakeEngine):
    """Writes a letter and stops. It says which conversations it forgot, and never works twice at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.at_work, self.pause_s = 0, 0.0

    def extend(self, requests, temperature):
        assert not self.at_work, "two batches at a time"
        self.at_work += 1
        time.sleep(self.pause_s)
        self.at_work -= 1
        return super().extend(requests, temperature)

    def write(self, request):
        return [5, STOP]


def table(ask, engine=None, why_late=lambda: ""):
    renderer = SimpleNamespace(vocabulary=16, stop_ids=frozenset({STOP}))

    async def ready():
        return AHEAD

    return PlayContext(engine or Letters(), lambda: renderer, 2, SAMPLING, ask, why_late, ready)


def blocks(count=1):
    return [t.Block(i, (t.Slot(i, f"{i:064x}", "toy", 1),), COMPLETIONS) for i in range(count)]


def ids(*tokens):
    return np.asarray(tokens, dtype="<i4").tobytes()


def answer(*said, texts=(ids(3, 4), b"")):
    return t.TurnAnswer(tuple(texts), tuple(said))


OPEN, END = t.EnvReply(0, 4, ""), t.EnvReply(1, 0, "environment")


def host(*answers, pause_s=0.0):
    """A host that gives these answers to each block, turn by turn."""

    async def ask(turn):
        await asyncio.sleep(pause_s)
        return answers[turn.turn]

    return ask


def play(ask, count=1, **options):
    playing = table(ask, **options)
    return asyncio.run(play_blocks(playing, blocks(count), EngineShare())), playing


def test_a_worker_plays_what_the_host_says():
    masked = t.EnvReply(0, 4, "", 2)
    (group,), playing = play(host(answer(OPEN, OPEN), answer(masked, END), answer(END)))
    first, second = group.rollouts
    assert first.tokens_T().tolist() == [3, 4, 5, STOP, 3, 4, 5, STOP] and first.ending == "environment"
    assert list(first.author) == [0, 0, 2, 2, 0, 0, 1, 1]
    assert list(second.author) == [0, 0, 1, 1]
    assert {request.rollout for call in playing.engine.calls for request in call} == set(playing.engine.forgotten)
    void = t.EnvReply(1, 0, "void")
    (group,), _ = play(host(answer(void, void)))
    assert group.rollouts == ()


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (answer(OPEN), "1 answers for 2 rollouts"),
        (answer(OPEN, OPEN, OPEN), "3 answers for 2 rollouts"),
        (answer(OPEN, t.EnvReply(2, 4, "")), "text 2 of 2"),
        (answer(OPEN, t.EnvReply(-1, 4, "")), "text -1 of 2"),
        (answer(OPEN, t.EnvReply(0, 4, "", 0)), "author 0"),
        (answer(OPEN, t.EnvReply(0, 4, "", 3)), "author 3"),
        (answer(OPEN, t.EnvReply(0, 5, "")), "room for 5 tokens"),
        (answer(OPEN, t.EnvReply(0, 0, "")), "room for 0 tokens"),
        (answer(OPEN, t.EnvReply(0, 4, "void")), "room for 4 tokens"),
        (answer(OPEN, OPEN, texts=(ids(*[3] * 40), b"")), "room for 4 tokens after 40"),
        (answer(OPEN, OPEN, texts=(ids(*[3] * 41), b"")), "a row of 41 tokens"),
        (answer(OPEN, t.EnvReply(1, 4, "")), "an empty opening"),
        (answer(OPEN, t.EnvReply(0, 4, "", 1, 1)), "row 1 of 1"),
        (answer(OPEN, t.EnvReply(0, 4, "", 1, -1)), "row -1 of 1"),
        (answer(OPEN, t.EnvReply(0, 0, "length")), "ending 'length' before the first turn"),
        (answer(OPEN, OPEN, texts=(ids(3)[:-1], b"")), "a text of 3 bytes"),
        (answer(OPEN, OPEN, texts=(ids(16), b"")), "outside the vocabulary"),
        (answer(OPEN, OPEN, texts=(ids(-1), b"")), "outside the vocabulary"),
        (answer(OPEN, t.EnvReply(1, 0, "void")), "void for some"),
    ],
)
def test_a_worker_leaves_a_host_whose_openings_no_environment_gives(said, what):
    with pytest.raises(PeerError, match=what):
        play(host(said, *[answer(*[END] * len([each for each in said.said if not each.ending]))] * 2))


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (answer(OPEN, t.EnvReply(0, 4, "length")), "room for 4 tokens"),
        (answer(END, END, texts=(b"", ids(*[3] * 37))), "a row of 41 tokens"),
        (answer(t.EnvReply(0, 4, "", 1, 1), END, texts=(ids(*[3] * 35), b"")), "room for 4 tokens after 35"),
        (answer(OPEN, t.EnvReply(1, 3, "")), "room for 3 tokens"),
        (answer(OPEN, t.EnvReply(0, 4, "", 1, 2)), "row 2 of 1"),
        (answer(END, t.EnvReply(1, 0, "length", 1, 1)), "row 1 of 1, ending 'length'"),
        (answer(OPEN, t.EnvReply(1, 4, "", 1, 1)), "an empty opening"),
    ],
)
def test_a_worker_leaves_a_host_whose_answers_no_environment_gives(said, what):
    with pytest.raises(PeerError, match=what):
        play(host(answer(OPEN, OPEN), said, answer(END, END)))


def test_rows_open_where_the_host_says_and_each_has_its_own_noise():
    """The first rollout begins anew after a turn, and then goes back to its first row."""
    anew, back = t.EnvReply(0, 4, "", 2, 1), t.EnvReply(2, 4, "", 1, 0)
    texts = (ids(3, 4), b"", ids(7))
    (group,), playing = play(
        host(answer(OPEN, OPEN), answer(anew, END, texts=texts), answer(back, texts=texts), answer(END))
    )
    rollout = group.rollouts[0]
    assert rollout.tokens_T().tolist() == [3, 4, 5, STOP, 7, 5, STOP, 3, 4, 5, STOP] and rollout.starts == (7,)
    assert list(rollout.author) == [0, 0, 2, 2, 0, 1, 1, 0, 0, 1, 1]
    seed = sample_seed(bytes.fromhex(blocks()[0].slots[0].seed), 0)
    asked = [(call[0].rollout, call[0].seed) for call in playing.engine.calls]
    assert [seed for _, seed in asked] == [row_seed(seed, row) for row in (0, 1, 0)]
    assert len({name for name, _ in asked}) == 2
    assert playing.engine.forgotten.count(asked[0][0]) == 2, "a row that does not go on is not kept"


def test_a_worker_leaves_a_host_that_opens_rows_without_end():
    async def ask(turn):
        if turn.turn > MAX_ROLLOUT_ROWS + 2:
            end = t.EnvReply(1, 0, "environment", 1, turn.turn - 1)
            return answer(end, end)
        said = t.EnvReply(0, 1, "", 1, turn.turn)
        return answer(said, said, texts=(ids(3),))

    limits = msgspec.structs.replace(SAMPLING, max_turn_tokens=2, max_rollout_tokens=100_000)
    playing = table(ask)._replace(sampling=limits)
    with pytest.raises(PeerError, match=f"more than {MAX_ROLLOUT_ROWS} rows"):
        asyncio.run(play_blocks(playing, blocks(), EngineShare()))


def test_blocks_are_played_at_a_time_and_the_engine_works_on_one():
    engine = Letters()
    engine.pause_s = 0.02
    began = time.monotonic()
    groups, _ = play(host(answer(OPEN, OPEN), answer(END, END), pause_s=0.2), count=8, engine=engine)
    assert [group.slot for group in groups] == list(range(8))
    assert time.monotonic() - began < 8 * 0.4 / 2, "turns of different blocks travel together"
    assert all(len({request.rollout.split("-")[0] for request in call}) == 1 for call in engine.calls)


def test_when_a_block_fails_the_others_stop_and_the_engine_is_idle():
    engine = Letters()
    engine.pause_s = 0.3

    async def ask(turn):
        if turn.block == 1 and turn.turn:
            raise Superseded("the lease is over")
        return answer(OPEN, OPEN)

    with pytest.raises(Superseded):
        play(ask, count=3, engine=engine)
    assert engine.at_work == 0
    assert {request.rollout for call in engine.calls for request in call} <= set(engine.forgotten)


def test_leases_of_one_version_use_the_engine_together_and_others_in_turn():
    async def scenario():
        first, same, other = EngineTurn(3), EngineTurn(3), EngineTurn(4)
        waiting = [asyncio.create_task(use.follow(first)) for use in (same, other)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        first.loaded.set()
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [True, False]
        first.end()
        await asyncio.wait_for(waiting[1], 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("fits", [AHEAD, 1])
def test_a_lease_begins_before_the_last_one_has_ended_if_the_memory_holds_both(tmp_path, fits):
    rollouts = {"batch_groups": 4, "max_staleness": 1}
    testbed = RunTestbed(tmp_path / "run", tiny_run(envs=HOSTED, rollouts=rollouts, steps=1))
    worker, uses, together = testbed.worker("worker"), [], []
    play_turns = worker._play_turns

    async def play(grant, before, use):
        worker.session.blocks_at_once = lambda lease, most: fits
        uses.append(use)
        return await play_turns(grant, before, use)

    async def watch():
        worker._play_turns = play
        await Worker.run(worker)

    def extend(requests, temperature):
        patience = time.monotonic() + 60
        while fits > 1 and not [use for use in uses if use.loaded.is_set()][1:] and time.monotonic() < patience:
            time.sleep(0.01)  # a quick engine would end the first lease before the second has come
        together.append(sum(use.loaded.is_set() and not use.over.is_set() for use in uses))
        return extended(requests, temperature)

    joined = worker.join

    async def join():
        await joined()
        nonlocal extended
        extended, worker.session.engine.extend = worker.session.engine.extend, extend

    extended, worker.join, worker.run = None, join, watch
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    testbed.stage.close()
    assert (max(together) > 1) == (fits > 1), "with room for both, two leases use the engine"
    assert testbed.audit().findings == [] and testbed.coordinator.state.refused == {}


def alone(home, client=None):
    """A worker without a run."""
    return Worker(Node(client, "key", NodeOptions(url="", home=str(home)), None))


def test_a_host_that_grants_leases_without_end_is_asked_for_no_more_than_two(tmp_path):
    """Each would take memory, and none would ever be filled. As one is filled, the next is asked for."""
    worker = alone(tmp_path)
    worker.session = SimpleNamespace(  # type: ignore[assignment]
        kind=COMPLETIONS, within_memory=lambda doing: contextlib.nullcontext(), engine=SimpleNamespace(version=0)
    )
    granted, most, go_on = [], 0, asyncio.Semaphore(0)

    async def grant(holding):
        nonlocal most
        await asyncio.sleep(0)
        most = max(most, len(holding) + 1)
        granted.append(SimpleNamespace(lease=SimpleNamespace(id=str(len(granted)), version=0)))
        return granted[-1] if len(granted) <= 20 else None

    async def fill(grant, before, use):
        await go_on.acquire()

    async def ignore(*what):
        pass

    worker.leases = Leases(worker.node, worker.session)

    async def scenario():
        worker.leases.next_grant, worker._play_turns = grant, fill
        worker.report = SimpleNamespace(tell=ignore, state=None)
        worker.leases.give_back = ignore
        working = asyncio.create_task(worker.work())
        for filled in range(20):
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(granted) == filled + 2 and len(worker.leases.holding) == 2 - (filled == 19)
            go_on.release()
        await working

    asyncio.run(scenario())
    assert most == 2


# --- leases that end otherwise ---


def in_testbed(tmp_path, change):
    """A run of one step whose first lease is spoiled by `change(worker, lease)`; returns why leases lapsed."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1, envs=HOSTED))
    worker, spoiled = testbed.worker("worker"), [True]
    play_turns = worker._play_turns

    async def play(grant, *uses):
        if spoiled and spoiled.pop():
            await worker._load_for(grant)
            grant = msgspec.structs.replace(grant, lease=await change(worker, grant.lease))
        return await play_turns(grant, *uses)

    worker._play_turns = play
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker, limit_s=90.0))
    testbed.stage.close()
    assert testbed.audit().findings == []
    return [entry.body.cause for entry in testbed.audit().entries if isinstance(entry.body, LeaseLapsed)]


def test_a_lease_whose_turns_were_taken_with_other_tokens_is_given_back_and_the_run_goes_on(tmp_path):
    """A worker that was killed, and comes back with another engine, cannot go on where it was."""

    async def other_tokens(worker, lease):
        async def ask(*written):
            turn = t.EnvTurn(lease.blocks[0].index, len(written) and 1, written)
            return await worker.client.post_packed(f"/v1/leases/{lease.id}/turns", turn, t.TurnAnswer, cap=1 << 20)

        opening = await ask()
        await ask(*[ids(worker.session.policy.renderer.eos_id)] * len(opening.said))
        return lease

    assert in_testbed(tmp_path, other_tokens)[0] == "returned"


def test_where_the_host_plays_a_lease_leaves_room_for_the_next_ones(tmp_path):
    """Else a worker has nothing to extend while the last blocks of its lease travel."""
    rollouts = {"batch_groups": 12, "block_rollouts": 8, "max_staleness": 1}
    testbed = RunTestbed(tmp_path / "run", tiny_run(envs=HOSTED, rollouts=rollouts))
    assert testbed.coordinator._most_blocks() == 2 * 12 // 3
    testbed.stage.close()


@pytest.mark.parametrize("call", ["post_packed", "send"])
def test_a_lease_whose_turns_the_host_has_forgotten_is_given_back_and_the_run_goes_on(tmp_path, call):
    """The reply store was lost or restored, before a turn or before the submission."""

    async def forgotten(worker, lease):
        send = getattr(worker.client, call)

        async def after_the_loss(*told, **more):
            if told[1].endswith("/submission") if call == "send" else told[1].turn:
                setattr(worker.client, call, send)
                with contextlib.closing(sqlite3.connect(RunFolder(tmp_path / "run").reply_store)) as reply_store:
                    reply_store.execute("DELETE FROM turns")
                    reply_store.commit()
            return await send(*told, **more)

        setattr(worker.client, call, after_the_loss)
        return lease

    assert in_testbed(tmp_path, forgotten)[0] == "returned"


def test_turns_that_take_far_too_long_give_the_lease_back_and_the_run_goes_on(tmp_path):
    async def no_time(worker, lease):
        return msgspec.structs.replace(lease, deadline=lease.issued)

    assert in_testbed(tmp_path, no_time)[0] == "returned"

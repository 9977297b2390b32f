"""Where episodes are played: what an environment does, or what becomes of its process, ends rollouts, never the stage."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.envs.load import env_digest, load_env
from shoal.envs.rollout_rules import Conversation
from shoal.errors import StateError
from shoal.graders.llm_judge import NoAnswer
from shoal.models.random_model import make_tiny
from shoal.protocol import messages as t
from shoal.protocol.constants import COMPLETIONS
from shoal.roles.env_server.env_child import Opening, ProcessAnswer, ProcessRequest, TimeLeft, loud
from shoal.roles.env_server.episode_processes import ChildPlayer, EnvProcessPool, ProcessDied, Shard
from shoal.roles.env_server.reply_store import ReplyStore
from shoal.roles.env_server.turns import TurnLimits, TurnRequest, record_of, take_turn

ODD = '''
import random, time, os
from shoal.env import Env, Step
from shoal.errors import Undecided

class Odd(Env):
    """Does what its task says, at the second turn."""
    name, num_tasks = "odd", 20
    def __init__(self, log, quick):
        self.log, self.quick = log, quick
    def task(self, index, heldout=False):
        if index == 17:
            self.end_once(index)
        return index
    def end_once(self, task):
        if note(self.log, f"begin {task}") == 1:
            raise Undecided("the sandbox stopped it")
    def reset(self, task):
        if task == 18:
            self.end_once(task)
        if task == 9:
            raise ValueError("task 9 cannot begin")
        if task == 10:
            time.sleep(20)
        if task == 15:
            sum(range(10**13))  # other threads wait for that
        note(self.log, f"reset {task}")
        words = str(random.random()) if task == 11 else "say something"
        words = str(hash(words)) if task == 13 else words
        print("environments may print")
        return (task, 0), [{"role": "user", "content": words}]
    def step(self, state, action):
        task, turn = state
        note(self.log, f"step {task} {turn}")
        if turn == 1 and task == 14 and not self.quick:
            time.sleep(0.5)
        if turn == 1:
            if task == 1:
                raise RuntimeError("the judge is on strike")
            if task == 2:
                until = time.time() + 20
                while time.time() < until: time.sleep(0.01)
            if task == 3:
                os.kill(os.getpid(), 9)
            if task == 16:
                raise SystemExit("no more")
            if task == 4:
                return Step((task, 2), "x" * 1_000_000, False)
            if task == 5:
                return "not a step"
            if task == 6:
                return Step((task, 2), b"bytes", False)
            if task == 8:
                os.close(1); os.close(2)
        return Step((task, turn + 1), f"go on {turn}", turn == 2)
    def score(self, state):
        return float("nan") if state[0] == 7 else 0.5

def note(log, line):
    with open(log, "a") as file:
        file.write(line + "\\n")
    return open(log).read().splitlines().count(line)

def environment(log="", quick=False):
    return Odd(log, quick)
'''

SAMPLING = t.Sampling(temperature=1.0, max_turn_tokens=4, max_tokens=400)
LIMIT_S = 4.0


class Theatre:
    """A reply store, players with real processes, and the environment's diary."""

    def __init__(self, folder: Path, policy: Path, number: int = 1, source: str = ODD, most: int = 1) -> None:
        (folder / "odd.py").write_text(source)
        self.diary, path = folder / "diary.txt", str(folder / "odd.py")
        args = {"log": str(self.diary)}
        self.spec = t.EnvSpec(path, env_digest(path), 20, 1.0, args, own_label="odd", kind=COMPLETIONS)
        self.env, self.renderer = load_env(path, args), Renderer.from_directory(policy)
        self.limits = TurnLimits(self.renderer.vocabulary, self.renderer.stop_ids)
        self.made: list[ChildPlayer] = []
        self.reply_store, self.policy = ReplyStore(folder / "replies.sqlite"), policy
        self.players = EnvProcessPool(self.make, self.reply_store, lambda label: LIMIT_S, number, most)

    def make(self, label: str) -> ChildPlayer:
        args = {**self.spec.args, "quick": True} if label == "other" else self.spec.args
        spec = msgspec.structs.replace(self.spec, own_label=label, args=args)
        self.made.append(ChildPlayer(Opening((spec,), str(self.policy), SAMPLING)))
        return self.made[-1]

    def staged(self, task: int, lease: str = "1") -> t.Staged:
        return t.Staged(lease, 0, (t.Block(task, (t.Slot(task, "00" * 32, "odd", task),), COMPLETIONS),))

    def turn(self, task: int, turn: int, lease: str = "1") -> t.EnvReply:
        """Take a turn of a group of one."""
        written = (self.write(),) if turn else ()
        return self.take(self.staged(task, lease), t.EnvTurn(task, turn, written), 1).said[0]

    def take(self, asked: t.Staged, turn: t.EnvTurn, size: int) -> t.TurnAnswer:
        return take_turn(self.reply_store, asked, turn, lambda label: True, size, self.limits, self.players.play)

    def close(self) -> None:
        self.players.close()
        self.reply_store.close()

    def write(self, length: int = 2) -> bytes:
        return np.asarray([*self.renderer.encode("ab"[:length]), self.renderer.eos_id], dtype="<i4").tobytes()

    def group(self, task: int, kill_before_judging: bool = False) -> list[t.RolloutRecord]:
        """Play a group of two, whose first answer is the longer one."""
        asked, said, turn = self.staged(task), [t.EnvReply(0, 1, "")], 0
        while not all(each.ending for each in said):
            written = tuple(self.write(2 - i) for i in range(2)) if turn else ()
            said = list(self.take(asked, t.EnvTurn(task, turn, written), 2).said)
            turn += 1
        if kill_before_judging:
            for player in self.made:
                if player._child is not None:
                    os.kill(player._child.process.pid, signal.SIGKILL)
        return list(record_of(self.reply_store, "run", asked, 2, self.players.judge).groups[0].rollouts)

    def played(self, task: int, lease: str = "1") -> t.RolloutRecord:
        """Play a task to its end."""
        turn = 0
        while not self.turn(task, turn, lease).ending:
            turn += 1
        return record_of(self.reply_store, "run", self.staged(task, lease), 1, self.players.judge).groups[0].rollouts[0]

    def process(self) -> int:
        child = self.made[0]._child
        assert child is not None
        return child.process.pid

    def steps(self) -> list[str]:
        return self.diary.read_text().splitlines()


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "policy"
    make_tiny(TinyPolicy(width=16, layers=1, heads=1, kv_heads=1, mlp_width=16), directory, 0, "float32")
    return directory


@pytest.fixture
def theatre(tmp_path, policy):
    theatre = Theatre(tmp_path, policy)
    yield theatre
    theatre.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory, policy):
    """For tests whose task no other test plays."""
    theatre = Theatre(tmp_path_factory.mktemp("shared"), policy)
    theatre.turn(12, 0)
    yield theatre
    theatre.close()


def test_an_episode_in_a_process_is_the_conversation_that_a_worker_would_have_played(shared) -> None:
    played = shared.played(0)
    talk = Conversation(shared.env, shared.renderer, 0, SAMPLING)
    while talk.ending is None:
        talk.write(np.frombuffer(shared.write(), dtype="<i4").tolist())
    rollout = t.make_rollout(talk.tokens, talk.author, [], version=0, ending=talk.ending)
    found = shared.reply_store.rollout(shared.reply_store.last("1", 0).paths[0])
    assert (found.token_ids, found.author, found.starts) == (rollout.token_ids, rollout.author, ())
    assert (played.ending, played.reward) == ("environment", 0.5)


@pytest.mark.parametrize("task", [5, 6, 7], ids=["no-step", "no-text", "nan"])
def test_an_environment_that_fails_ends_its_rollout_by_error_with_the_lowest_reward(shared, task, caplog) -> None:
    process, played = shared.process(), shared.played(task)
    assert (played.ending, played.reward) == ("error", 0.0)
    (fault,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in fault and "task=" in fault and shared.process() == process


def test_the_author_of_an_environment_that_raises_sees_where(theatre, caplog, capfd) -> None:
    played = theatre.played(1)
    assert (played.ending, played.reward) == ("error", 0.0)
    (fault,) = [record.getMessage() for record in caplog.records]
    assert "odd.py line" in fault and "the judge is on strike" in fault and "\n" not in fault
    assert "Traceback (most recent call last)" in capfd.readouterr().err


def test_a_fault_that_repeats_itself_is_logged_less_and_less(theatre, caplog) -> None:
    theatre.write = lambda: np.asarray([word, theatre.renderer.eos_id], dtype="<i4").tobytes()
    for word in range(40, 49):
        theatre.played(7, str(word))
    faults = [record.getMessage() for record in caplog.records if record.getMessage().startswith("fault ")]
    assert len(faults) == 4 and faults[-1].endswith(", 8 times so far"), "1, 2, 4 and 8"


def test_a_traceback_that_repeats_itself_is_printed_less_and_less(capfd) -> None:
    env = loud(load_env(str(Path(__file__).parents[1] / "envs" / "rivals.py"), {}))
    for _ in range(20):
        with pytest.raises(IndexError):
            env.task(99)
    with pytest.raises(TypeError):
        env.reset()  # type: ignore[call-arg]
    told = capfd.readouterr().err
    assert told.count("IndexError: task 99") == 5 and "16 times so far" in told, "1, 2, 4, 8 and 16"
    assert told.count("TypeError") == 1


class Silent:
    """An environment whose judge fails some times, and then answers."""

    def __init__(self, error: Exception, fails: int, takes_s: float = 0.0) -> None:
        self.error, self.fails, self.takes_s, self.calls = error, fails, takes_s, 0

    def score(self, state) -> float:
        self.calls += 1
        time.sleep(self.takes_s)
        if self.calls <= self.fails:
            raise self.error
        return 1.0


SILENCE = NoAnswer("4 tries failed, the last with ConnectError")
SILENCE.__cause__ = TimeoutError("status 503")


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr("shoal.roles.env_server.env_child.PAUSES_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("error", "calls"), [(ConnectionRefusedError(), 4), (SILENCE, 4), (ValueError(), 1), (TimeoutError("late"), 1)]
)
def test_an_endpoint_that_does_not_answer_is_tried_three_times_more_where_the_host_plays(
    no_pauses, error, calls
) -> None:
    """What a replay repeats is not tried again."""
    brief, dead = Silent(error, 3), Silent(error, 99)
    if calls == 4:
        assert loud(brief).score(0) == 1.0 and brief.calls == 4
    with pytest.raises(type(error)):
        loud(dead).score(0)
    assert dead.calls == calls


@pytest.mark.parametrize(("turn_s", "calls"), [(0.3, 1), (0.9, 2), (60.0, 4)])
def test_an_endpoint_is_not_tried_again_beyond_the_time_of_a_turn(no_pauses, turn_s, calls) -> None:
    """Its process would be killed, and the rollout would end by that instead of the cause."""
    dead, time_left = Silent(SILENCE, 99, 0.35), TimeLeft(turn_s)
    time_left.begin()
    with pytest.raises(NoAnswer, match="ConnectError"):
        loud(dead, time_left).score(0)
    assert dead.calls == calls


def test_a_megabyte_of_text_ends_a_rollout_by_length(shared) -> None:
    played = shared.played(4)
    assert (played.ending, played.reward) == ("length", 0.5)


def test_an_environment_that_hangs_is_killed_and_the_others_go_on_where_they_were(theatre, caplog) -> None:
    theatre.turn(0, 0)
    theatre.turn(0, 1)
    process = theatre.process()
    began = time.monotonic()
    played = theatre.played(2)
    assert (played.ending, played.reward) == ("error", 0.0)
    assert 4 * LIMIT_S <= time.monotonic() - began < 16 * LIMIT_S
    why = rf"step\(\) of task 2: its process was ended: it took longer than {LIMIT_S:g} s, at odd\.py line 4[12]"
    assert re.search(why, caplog.text), caplog.text
    recorded = record_of(theatre.reply_store, "run", theatre.staged(2), 1, theatre.players.judge).groups[0].rollouts[0]
    assert re.fullmatch(why, recorded.fault)
    assert theatre.turn(0, 2).ending == ""
    assert theatre.played(0).ending == "environment"
    assert theatre.process() != process


def test_an_environment_that_ends_its_process_ends_its_rollout_after_some_tries(theatre, caplog) -> None:
    played = theatre.played(3)
    assert (played.ending, played.reward) == ("error", 0.0)
    why = "step() or score() of task 3: its process was ended: it was ended by signal 9 (SIGKILL), "
    assert caplog.text.count(f"killed env=odd task=3 reason='{why}") == 4, "it was tried three times more"
    assert theatre.played(0).ending == "environment"


def test_an_environment_that_exits_ends_its_rollout_and_no_process(shared, caplog) -> None:
    process = shared.process()
    assert (shared.played(16).ending, shared.process()) == ("error", process)
    assert "SystemExit: no more" in caplog.text and "its process" not in caplog.text


def test_an_environment_that_closes_the_standard_streams_hides_no_fault_after_it(theatre, caplog) -> None:
    assert [theatre.turn(1, turn).ending for turn in (0, 1)] == ["", ""]
    assert theatre.played(8).ending == "environment"
    assert theatre.turn(1, 2).ending == "error" and "the judge is on strike" in caplog.text


@pytest.mark.parametrize(("task", "why"), [
    (9, r"odd\.py line \d+: ValueError: task 9 cannot begin"),
    (10, r"reset\(\) of task 10: its process was ended: it took"),
], ids=["raises", "hangs"])  # fmt: skip
def test_a_task_that_cannot_begin_is_void_and_the_record_says_why(shared, task, why) -> None:
    """The other rollout of its group is not tried."""
    began = time.monotonic()
    asked = shared.staged(task)
    taken = shared.take(asked, t.EnvTurn(task, 0), 2)
    assert [said.ending for said in taken.said] == ["void"] * 2 and time.monotonic() - began < 6 * LIMIT_S
    (group,) = record_of(shared.reply_store, "run", asked, 2, shared.players.judge).groups
    assert group.rollouts == () and re.match(why, group.why)


@pytest.mark.parametrize("task", [17, 18], ids=["task", "reset"])
def test_an_opening_that_the_sandbox_stops_is_tried_again_and_not_void(shared, task) -> None:
    assert shared.turn(task, 0).ending == ""
    steps = [line for line in shared.steps() if line.endswith(f" {task}")]
    assert steps == [f"begin {task}"] * 2 + [f"reset {task}"]


def test_a_process_that_was_killed_changes_no_reply(theatre) -> None:
    expected = [theatre.turn(0, 0), theatre.turn(0, 1)]
    os.kill(theatre.process(), signal.SIGKILL)
    later = [theatre.turn(0, 2), theatre.turn(0, 3)]
    assert theatre.steps() == ["reset 0", "step 0 0", "reset 0", "step 0 0", "step 0 1", "step 0 2"]
    assert [said.ending for said in later] == ["", "environment"]
    steps = len(theatre.steps())
    assert [theatre.turn(0, turn, lease="2") for turn in range(4)] == expected + later
    assert len(theatre.steps()) == steps, "another lease with the same turns asks the environment nothing"


def test_an_episode_that_cannot_be_played_again_ends_by_error(theatre, caplog) -> None:
    """The environment opens at random, so that its words cannot be those that the worker has."""
    theatre.turn(11, 0)
    os.kill(theatre.process(), signal.SIGKILL)
    assert theatre.turn(11, 1).ending == "error"
    assert "set reproducible = false" in caplog.text


def test_an_episode_that_depends_on_the_hash_seed_can_be_played_again(theatre) -> None:
    theatre.turn(13, 0)
    os.kill(theatre.process(), signal.SIGKILL)
    assert theatre.played(13).ending == "environment"


def test_episodes_that_were_idle_are_played_again(theatre, monkeypatch) -> None:
    monkeypatch.setattr("shoal.roles.env_server.episode_processes.HELD", 1)
    theatre.turn(0, 0)
    theatre.turn(12, 0)
    assert theatre.played(0).ending == theatre.played(12).ending == "environment"
    assert theatre.steps().count("reset 0") == 2


def test_an_environment_that_was_changed_since_the_log_began_is_refused_by_name(theatre) -> None:
    Path(theatre.spec.name).write_text(ODD + "# changed")
    with pytest.raises(StateError, match="differs from the host's"):
        theatre.turn(0, 0)


def test_a_slow_environment_gets_more_processes_and_holds_up_no_other(tmp_path, policy, monkeypatch) -> None:
    """The judge of one environment takes half a second for each answer."""
    monkeypatch.setattr("shoal.roles.env_server.episode_processes.SLOW_S", 0.3)
    theatre = Theatre(tmp_path, policy, most=8)

    def turn(env: str, slot: int, turn: int) -> float:
        began = time.monotonic()
        block = t.Block(slot, (t.Slot(slot, "00" * 32, env, 14),), COMPLETIONS)
        written = (theatre.write(),) * 8 if turn else ()
        theatre.take(t.Staged("1", 0, (block,)), t.EnvTurn(slot, turn, written), 8)
        return time.monotonic() - began

    for env, slot in (("odd", 0), ("other", 1)):
        for number in range(2):
            turn(env, slot, number)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(turn, "odd", 0, 2)
        time.sleep(0.2)
        assert turn("other", 1, 2) < 3 and not slow.done()
        assert slow.result() >= 4, "eight answers, one after another"
    for slot in range(2, 10):
        turn("odd", slot, 0)
    assert len(theatre.made) > 3
    turn("odd", 9, 1)
    assert turn("odd", 9, 2) < 4, "several at a time"
    theatre.players.close()


COMPARING = '''
import random, time
from shoal.env import Env, Step

class Comparing(Env):
    """Judges the answers of a group beside each other, as its task says."""
    name, num_tasks, reward_bounds = "comparing", 20, (-1.0, 1.0)
    def __init__(self, log):
        self.log = log
    def task(self, index, heldout=False):
        return index
    def reset(self, task):
        words = str(random.random()) if task == 11 else "say something"
        return (task, ""), [{"role": "user", "content": words}]
    def step(self, state, action):
        if state[0] == 6 and action == "a":
            raise ValueError("too short")
        return Step((state[0], str(action)), "", True)
    def score(self, state):
        return 0.25
    def group_scores(self, states):
        with open(self.log, "a") as file:
            file.write("judged\\n")
        task = states[0][0]
        if task == 1:
            raise RuntimeError("the jury is on strike")
        if task == 2:
            time.sleep(20)
        if task == 3:
            return [0.0]
        if task == 4:
            return [float("nan")] * 2
        if task == 5:
            return [5.0, 0.0]
        most = max(len(text) for _, text in states)
        return [0.5 * (len(text) == most) for _, text in states]

def environment(log=""):
    return Comparing(log)
'''


@pytest.fixture
def jury(tmp_path, policy):
    jury = Theatre(tmp_path, policy, 3, COMPARING, 3)
    yield jury
    jury.close()


@pytest.fixture(scope="module")
def shared_jury(tmp_path_factory, policy):
    """For tests whose task no other test plays."""
    jury = Theatre(tmp_path_factory.mktemp("jury"), policy, 3, COMPARING, 3)
    yield jury
    jury.close()


@pytest.mark.parametrize("killed", [False, True])
def test_answers_are_judged_beside_their_siblings_once(jury, killed) -> None:
    assert [one.reward for one in jury.group(0, killed)] == [0.75, 0.25]
    judged = jury.steps()
    assert judged == ["judged"]
    assert [one.reward for one in jury.group(0)] == [0.75, 0.25]
    assert jury.steps() == judged, "the stage remembers what the environment said"


def test_a_rollout_that_failed_is_not_judged_with_its_siblings(shared_jury) -> None:
    assert [(one.ending, one.reward) for one in shared_jury.group(6)] == [("environment", 0.75), ("error", -1.0)]


@pytest.mark.parametrize(
    ("task", "failed"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 1)], ids=["raises", "hangs", "too-few", "nan", "outside"]
)
def test_a_comparison_that_fails_gives_the_lowest_reward_and_is_in_the_record(
    shared_jury, task, failed, caplog
) -> None:
    """If only the score of one is none, only that one fails."""
    group = shared_jury.group(task)
    assert [one.reward for one in group] == [-1.0, -1.0] if failed == 2 else [-1.0, 0.25]
    assert [bool(one.fault) for one in group] == [index < failed for index in range(2)]
    assert (group[0].outside == 5.25) == (task == 5)
    assert f"task={task}" in caplog.text


def test_a_group_that_cannot_be_played_again_gets_the_lowest_reward(jury, caplog) -> None:
    """It opens at random, so after a kill nobody has the states that answer the policy's words."""
    assert [one.reward for one in jury.group(11, kill_before_judging=True)] == [-1.0, -1.0]
    assert "cannot be compared" in caplog.text


class Liar:
    """A player whose process ends between two conversations without a word."""

    generation, faults, left_out = 0, 0, True

    def lowest(self, label: str) -> float:
        return -1.0

    def leaves_out(self, label: str) -> bool:
        return self.left_out

    def count(self, faults: int) -> None:
        self.faults += faults

    def compares(self, label: str) -> bool:
        return False

    def ask(self, request: ProcessRequest, limit_s: float) -> ProcessAnswer:
        raise ProcessDied("its process is always gone")


def test_the_lowest_reward_is_the_environments_own(tmp_path, theatre) -> None:
    theatre.turn(0, 0)
    liar = Liar()
    shard = Shard(liar, theatre.reply_store, lambda label: 1.0)
    ask = take_ask(theatre)
    assert shard.reply(ask)[2:4] == ("error", -1.0) and liar.faults == 0
    liar.left_out = False
    assert shard.reply(ask)[2:4] == ("error", -1.0) and liar.faults == 1


def take_ask(theatre):
    before = theatre.reply_store.last("1", 0).paths[0]
    return TurnRequest(t.Slot(0, "00" * 32, "odd", 0), 0, before, theatre.write(1), b"\0" * 32)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_an_environment_that_lets_no_thread_run_ends_with_the_stage(theatre) -> None:
    """No thread of the process can see that the stage is gone."""
    theatre.turn(0, 0)
    stage = """
import os, sys, threading, time, msgspec
from shoal.roles.env_server.env_child import Opening, ProcessRequest
from shoal.roles.env_server.episode_processes import ChildPlayer, EnvProcessPool
player = ChildPlayer(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Opening))
player.ask(ProcessRequest(0, label="odd", task=0), 60.0)
threading.Thread(target=player.ask, args=(ProcessRequest(1, label="odd", task=15), 60.0), daemon=True).start()
time.sleep(1)
print(player._child.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    opening = msgspec.msgpack.encode(theatre.made[0]._opening).hex()
    program = [sys.executable, "-c", stage, opening]
    told = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
    child, until = int(told.stdout), time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child outlived its stage")
        time.sleep(0.05)


def test_a_system_without_room_for_a_process_fails_no_rollout(theatre, monkeypatch) -> None:
    """The environment is not to blame: the turn is asked for again, and nothing is booked."""

    def no_room(*what, **how):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", no_room)
        with pytest.raises(StateError, match=r"^cannot start a process for an environment"):
            theatre.turn(0, 0)
    assert theatre.reply_store.last("1", 0) is None
    assert theatre.played(0).ending == "environment"


def test_an_answer_beyond_all_sizes_ends_the_process(theatre, monkeypatch) -> None:
    monkeypatch.setattr("shoal.roles.env_server.episode_processes.MAX_FRAME_BYTES", 8)
    with pytest.raises(ProcessDied, match="limit 8"):
        theatre.make("odd").ask(ProcessRequest(0, label="odd"), 1.0)

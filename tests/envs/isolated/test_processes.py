"""An environment file plays in processes of its own: it harms no other, steps run beside each other, and no bit differs."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import pytest

from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig
from shoal.env import Env
from shoal.envs.isolated import connection as lines
from shoal.envs.isolated import pool as pools
from shoal.envs.isolated.environment import ContainedEnv, in_child
from shoal.envs.isolated.pool import Processes, TaskHandle
from shoal.envs.load import env_of, facts_of, load_env
from shoal.envs.play_episodes import EpisodeAttempt, converse
from shoal.envs.replay import replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.errors import Interrupted, ShoalError, Undecided
from shoal.protocol.messages import Sampling
from tests.envs.conftest import RandomEngine
from tests.envs.isolated.place import HEAD, acting, line_of

SAMPLING = Sampling(1.0, 8, 400)


def played_by(path: Path, code: str = "", processes: Processes = Processes()) -> ContainedEnv:
    """The environment of HEAD and then `code`, as a file of ours."""
    path.write_text(HEAD + code)
    env = in_child(path, {}, "environment", processes)
    assert isinstance(env, ContainedEnv)
    return env


def write(talk: Conversation, text: str) -> None:
    talk.write([*talk.renderer.encode(text), talk.renderer.eos_id])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls end after half a second, then after one."""
    monkeypatch.setattr("shoal.envs.isolated.environment.OWN_LIMITS", replace(lines.OWN_LIMITS, wall_s=0.5))


FAULTS = {
    "SystemExit": "raise SystemExit",
    "os._exit": "os._exit(3)",
    "a BaseException": "class Own(BaseException): pass\nraise Own('it')",
    "a group of exceptions": "raise BaseExceptionGroup('both', [SystemExit(1), KeyError(2)])",
    "StopIteration": "raise StopIteration",
    "an alarm": "import signal\ndef late(*_): raise TimeoutError('late')\n"
    "signal.signal(signal.SIGALRM, late)\nsignal.setitimer(0, 0.01)\ntime.sleep(2)",
}


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_a_call_raises_ends_its_rollout_alone_and_a_replay_finds_the_same(
    name: str, tmp_path: Path, renderer: Renderer
) -> None:
    env = played_by(tmp_path / "fails.py", acting("if act == 'a':\n" + indent(FAULTS[name], "    ")))
    talks = [Conversation(env, renderer, env.task(i), SAMPLING) for i in range(2)]
    process = line_of(env)._running
    for text in ("b", "a"):
        for talk in talks if text == "b" else talks[:1]:
            write(talk, text)
    assert talks[0].ending == "error" and talks[0].reward == 0.0
    assert "fails.py line" in talks[0].fault and "\n" not in talks[0].fault
    write(talks[1], "b")
    assert (talks[1].ending, talks[1].reward) == ("environment", 1.0)
    assert line_of(env)._running is process, "nothing had to be ended"
    found = replay_group(env, renderer, env.task(0), [talks[0].rollout(1)], SAMPLING)
    assert [(one.ending, one.problem) for one in found] == [("error", "")]


STOPS = {
    "hangs in C": ("sum(iter(int, 1))", "took longer than 1 s"),
    "dies": ("os.kill(os.getpid(), 9)", r"signal 9 \(SIGKILL\), as the system does when memory runs out"),
    "aborts": ("os.abort()", r"signal 6 \(SIGABRT\), at .*stops.py line \d+"),
    "has no memory": ("raise MemoryError", "no memory left"),
    "exits in C": ("__import__('ctypes').CDLL(None)._exit(5)", "exit code 5"),
}


@pytest.mark.parametrize("name", STOPS)
def test_time_memory_and_a_dead_child_are_no_faults(name: str, tmp_path: Path, renderer: Renderer, quick: None) -> None:
    body, why = STOPS[name]
    env = played_by(tmp_path / "stops.py", acting(f"if act == 'a':\n    {body}"), Processes(1))
    talks = [Conversation(env, renderer, env.task(i), SAMPLING) for i in range(2)]
    for talk in talks:
        write(talk, "b")
    with pytest.raises(Undecided, match=f"its process was ended: it .*{why}"):
        write(talks[0], "a")
    assert talks[0].ending is None
    write(talks[1], "b")
    assert (talks[1].ending, talks[1].reward) == ("environment", 1.0), "made again in another process"


def test_a_call_that_is_stopped_is_named_with_its_task_and_its_line(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """At its first end already. Another call like it has one try."""
    env = played_by(tmp_path / "stops.py", "def score(self, state): time.sleep(60)\nAsked.score = score", Processes(1))
    state = env.step(env.reset(env.task(1))[0], "a").state
    said = f"score() of task 1: its process was ended: it took longer than {{}} s, at {tmp_path / 'stops.py'} line "
    began = time.monotonic()
    with pytest.raises(Undecided, match=re.escape(said.format(1))):
        env.score(state)
    taken_s, (record,) = time.monotonic() - began, caplog.records
    assert said.format(0.5) in record.getMessage() and "`shoal env check` tries it" in record.getMessage()
    began = time.monotonic()
    with pytest.raises(Undecided, match=re.escape(said.format(0.5))):
        env.score(state)
    assert time.monotonic() - began < taken_s - 0.25 and len(caplog.records) == 1


def test_a_call_that_is_stopped_takes_no_time_from_others_of_its_task(tmp_path: Path, quick: None) -> None:
    """The same one has one try, also if it was sent together with others. Other actions have both."""
    code = acting("Path(__file__).with_suffix('.log').open('a').write(str(act[0]))\n"
                  "time.sleep({'h': 60, 's': 0.7}.get(act[0], 0))")  # fmt: skip
    env = played_by(tmp_path / "stops.py", code, Processes(1))
    state = env.reset(env.task(0))[0]
    with pytest.raises(Undecided, match="took longer than 1 s"):
        env.step(state, "hang")
    assert env.step(state, "slow").reply == "again"
    env.pool._call_s = 0.0
    with env.pool._changed:
        calls = [env.begin("step", state, act) for act in ("hang", "quick", "quick")]
    with pytest.raises(Undecided, match=r"step\(\) of task 0: its process was ended: it took longer than 0.5 s"):
        calls[0].result(10)
    assert [call.result(10).reply for call in calls[1:]] == ["again"] * 2
    assert (tmp_path / "stops.log").read_text() == "hhsshqq"


def test_a_call_whose_state_is_lost_is_tried_once_and_says_why(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    env = played_by(tmp_path / "stops.py", acting("time.sleep(60)") + "Asked.reproducible = False", Processes(1))
    with pytest.raises(Undecided, match=r"step\(\) of task 0: its process was ended: it took longer than 0.5 s"):
        env.step(env.reset(env.task(0))[0], "a")
    assert not caplog.records


def test_an_import_that_takes_long_is_told_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it is given up, by who plays it and by who asks how many tasks there are."""
    monkeypatch.setattr(lines, "SLOW_OPEN_S", 0.01)
    played_by(tmp_path / "slow.py", "time.sleep(0.1)")
    facts_of(EnvConfig(str(tmp_path / "slow.py")))
    told = f"importing {tmp_path / 'slow.py'} takes more than 0 s, and is given up after "
    assert [told in record.getMessage() for record in caplog.records] == [True, True]


SILENT = {
    "a timeout": "import socket\nhere = socket.create_server(('127.0.0.1', 0))\nhere.settimeout(0.01)\nhere.accept()",
    "an alarm while it waits": "import signal\nimport concurrent.futures as later\n"
    "def late(*_): raise TimeoutError('late')\n"
    "signal.signal(signal.SIGALRM, late)\nsignal.setitimer(signal.ITIMER_REAL, 0.1)\nlater.Future().result(1)",
    "a refused connection": "__import__('socket').create_connection(('127.0.0.1', 1), 1)",
    "an error of a client": "__import__('httpx').get('http://127.0.0.1:1')",
    "hidden by another": "try:\n    raise ConnectionResetError\nexcept OSError:\n    raise ValueError('no verdict')",
}


@pytest.mark.parametrize("name", SILENT)
def test_an_endpoint_that_does_not_answer_is_no_fault(name: str, tmp_path: Path, renderer: Renderer) -> None:
    env = played_by(tmp_path / "asks.py", acting("if act == 'a':\n" + indent(SILENT[name], "    ")))
    talk = Conversation(env, renderer, env.task(0), SAMPLING)
    with pytest.raises(Undecided, match="did not answer"):
        write(talk, "a")


def test_an_alarm_that_is_left_on_fails_no_later_call(tmp_path: Path, renderer: Renderer) -> None:
    code = acting(
        "import signal\nif act == 'a':\n    signal.setitimer(signal.ITIMER_REAL, 0.05)\nelse: time.sleep(0.2)"
    )
    env = played_by(tmp_path / "alarm.py", code)
    talk = Conversation(env, renderer, env.task(0), SAMPLING)
    for text in ("a", "b"):
        write(talk, text)
    assert talk.ending == "environment"


def test_each_call_is_in_the_main_thread_with_nothing_to_read_and_words_go_to_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = acting("import threading\nprint('hello', flush=True)\n"
                  "on = threading.current_thread() is threading.main_thread()\n"
                  "return Step(state, f'{on} {sys.stdin.read()!r} {threading.active_count()}', False)")  # fmt: skip
    env = played_by(tmp_path / "main.py", code)
    assert env.step(env.reset(env.task(0))[0], "a").reply == "True '' 1"
    assert "hello" in capfd.readouterr().err


SLOW = "time.sleep(0.1 if act != 'slow' else 1.5)\nreturn Step((*state, str(act)), 'again', len(state) == 2)"


def test_slow_steps_run_beside_each_other_and_give_the_same_rollouts(tmp_path: Path, renderer: Renderer) -> None:
    path, when = tmp_path / "slow.py", tmp_path / "when"
    write = f"open({str(when)!r}, 'a').write(f'{{began}} {{time.monotonic()}}\\n')"
    timed = f"began = time.monotonic()\ntime.sleep(0.1)\n{write}\n"
    path.write_text(HEAD + acting(timed + SLOW.replace("0.1", "0")))
    ends = []
    for env in (in_child(path, {}, "environment"), load_env(str(path), {})):
        if not isinstance(env, ContainedEnv):
            no_time = {"sleep": staticmethod(lambda seconds: None), "monotonic": time.monotonic}
            type(env).step.__globals__["time"] = type("NoTime", (), no_time)
        engine = RandomEngine(renderer, ["yes", "mask", "no"])
        episodes = [EpisodeAttempt(env, env.task(i % 8), bytes([i] * 32)) for i in range(48)]
        talks = converse(engine, renderer, episodes, SAMPLING)
        ends.append([(talk.tokens, talk.author, talk.logprobs, talk.reward, talk.ending) for talk in talks])
        if isinstance(env, ContainedEnv):
            assert 4 <= len(env.pool._processes) <= pools.MAX_PROCESSES
    assert ends[0] == ends[1]
    steps = [[float(word) for word in line.split()] for line in when.read_text().splitlines()]
    assert max(sum(began <= at < ended for began, ended in steps) for at, _ in steps) >= 3, "beside each other"


def test_one_slow_step_holds_up_no_other(tmp_path: Path, renderer: Renderer) -> None:
    env = played_by(tmp_path / "slow.py", acting(SLOW.replace("0.1", "0.02")), Processes(2))
    talks = [Conversation(env, renderer, env.task(i % 8), SAMPLING) for i in range(24)]
    begun = [env.begin("step", talk.state, "slow" if i == 0 else "a") for i, talk in enumerate(talks)]
    while not all(call.done() for call in begun[1:]):
        env.pool.look()
        time.sleep(0.02)
    assert not begun[0].done()
    assert begun[0].result().reply == "again"


def test_a_process_with_another_environment_answers_nothing(tmp_path: Path) -> None:
    code = """
made = Path(__file__).with_suffix(".made")
is_first = not made.exists()
made.touch()

class Changing(Asked):
    num_tasks = 8 if is_first else 9

    def task(self, index, heldout=False):
        time.sleep(0.25)
        return f"{index} of {self.num_tasks}"

environment = Changing
"""
    env = played_by(tmp_path / "changing.py", code)
    with ThreadPoolExecutor(8) as threads:
        assert [task.shown for task in threads.map(env.task, range(8))] == [f"'{i} of 8'" for i in range(8)]
    assert (tmp_path / "changing.made").exists() and len(env.pool._processes) == env.pool._most == 1


TIMED = "time.sleep(0.15)\nreturn Step((*state, str(act)), str(time.time_ns() % 997), len(state) == 2)"


@pytest.mark.parametrize(("said", "compares"), [("class", False), ("run file", True)])
def test_episodes_of_an_environment_that_is_not_reproducible_stay_in_their_process(
    said: str, compares: bool, tmp_path: Path, renderer: Renderer
) -> None:
    code = acting(TIMED) + "Environment.reproducible = False\n" * (said == "class")
    code += "Environment.group_scores = lambda self, states: [0.0 for _ in states]\n" * compares
    (tmp_path / "judged.py").write_text(HEAD + code)
    env = env_of(EnvConfig(str(tmp_path / "judged.py"), reproducible=said == "class"))
    pool = getattr(env, "env", env).pool
    episodes = [EpisodeAttempt(env, env.task(i), bytes([i] * 32)) for i in range(8)]
    talks = converse(RandomEngine(renderer, ["yes"]), renderer, episodes, SAMPLING)
    assert not any(talk.fault for talk in talks) and any(len(talk.state.actions) > 1 for talk in talks)
    assert (len(pool._processes) == 1) == compares
    assert len({talk.state.process for talk in talks}) == 1, "all began when there was one"
    if compares:
        assert env.group_scores([talk.state for talk in talks]) == [0.0] * 8  # type: ignore[attr-defined]


def test_a_lost_episode_of_an_environment_that_is_not_reproducible_is_undecided(tmp_path: Path) -> None:
    env = played_by(tmp_path / "judged.py", "Asked.reproducible = False", Processes(1))
    state = env.reset(env.task(0))[0]
    line_of(env).end()
    with pytest.raises(Undecided, match="not reproducible, and the process of this episode was ended"):
        env.step(state, "a")
    assert env.step(env.reset(env.task(0))[0], "a").reply == "again"


def test_a_judge_that_scores_the_same_words_differently_is_no_other_episode(tmp_path: Path) -> None:
    code = "Asked.score = lambda self, state: time.time_ns() % 997 / 997"
    env = played_by(tmp_path / "noisy.py", code, Processes(1))
    state = env.step(env.step(env.reset(env.task(0))[0], "a").state, "b").state
    line_of(env).end()
    assert env.score(state) != env.score(state)


def test_calls_that_nobody_wants_hold_up_none_and_a_closed_pool_answers_all(tmp_path: Path) -> None:
    env = played_by(tmp_path / "asked.py", acting("time.sleep(0.5)"), Processes(1))
    state = env.reset(env.task(0))[0]
    env.begin("step", state, "a")
    for _ in range(1200):
        env.pool.give_up(env.begin("step", state, "b"))
    assert env.begin("step", state, "c").result(5).reply == "again"
    env.begin("step", state, "d")
    left = [env.begin("step", state, "e"), env.begin("reset", TaskHandle(0, False, "", ""))]
    env.pool.close()
    for call in [*left, env.begin("step", state, "f")]:
        with pytest.raises(Undecided, match="its process is closed"):
            call.result(5)


def test_a_thread_that_fails_leaves_no_call_without_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    env = played_by(tmp_path / "asked.py", "", Processes(1))
    state = env.reset(env.task(0))[0]
    monkeypatch.setattr(env.pool, "_run", lambda *args: 1 / 0)
    for _ in range(2):
        with pytest.raises(Undecided, match="its process is closed"):
            env.begin("step", state, "a").result(5)


def test_a_pool_without_room_for_a_thread_goes_on_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = played_by(tmp_path / "slow.py", acting("time.sleep(0.5)"))
    states = [env.reset(env.task(i))[0] for i in range(2)]
    calls = [env.begin("step", state, "a") for state in states]
    time.sleep(0.2)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", _no_room)
        env.pool.look()
    assert [call.result(5).reply for call in calls] == ["again"] * 2
    assert (env.pool._starting, env.pool._most) == (0, 1)


def _no_room(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_64_rollouts_take_few_round_trips(tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    env = played_by(tmp_path / "fast.py", "", Processes(1))
    frames = Counter[str]()
    running = line_of(env)._running
    assert isinstance(running, lines.OwnProcess)
    send = running.send
    monkeypatch.setattr(running, "send", lambda *args: frames.update(["asked"]) or send(*args))
    monkeypatch.setattr(env.pool, "_call_s", 1e-4)
    talks = converse(
        RandomEngine(renderer, ["yes"]), renderer,
        [EpisodeAttempt(env, env.task(i % 8), bytes([i] * 32)) for i in range(64)], SAMPLING,
    )  # fmt: skip
    assert len(talks) == 64 and frames["asked"] < 64 + 3 * 64 // 4, "64 tasks, and two or three calls of each rollout"


def test_when_told_to_stop_nobody_waits_for_a_call(tmp_path: Path, renderer: Renderer) -> None:
    told = [False]
    env = played_by(tmp_path / "hangs.py", acting("time.sleep(60)"), Processes(2, lambda: told[0]))
    talk = Conversation(env, renderer, env.task(0), SAMPLING)
    told[0], began = True, time.monotonic()
    with pytest.raises(Interrupted, match="told to stop while a call took"):
        write(talk, "a")
    assert time.monotonic() - began < 3


def test_a_call_that_hangs_gets_no_second_try_when_its_lease_is_due(
    tmp_path: Path, renderer: Renderer, quick: None
) -> None:
    env = played_by(tmp_path / "hangs.py", acting("time.sleep(60)"), Processes(2, left_s=lambda: 0.5))
    talk, began = Conversation(env, renderer, env.task(0), SAMPLING), time.monotonic()
    with pytest.raises(Undecided, match=r"took longer than 0\.5 s"):
        write(talk, "a")
    assert time.monotonic() - began < 2.5


def test_a_slow_call_within_its_own_limit_goes_on_when_its_lease_is_due(tmp_path: Path, renderer: Renderer) -> None:
    env = played_by(tmp_path / "slow.py", acting("time.sleep(0.3)"), Processes(2, left_s=lambda: -1.0))
    talk = Conversation(env, renderer, env.task(0), SAMPLING)
    write(talk, "a")
    assert talk.ending is None and talk.room


def test_a_process_ends_with_its_environment_and_with_ours(tmp_path: Path) -> None:
    env = played_by(tmp_path / "a.py", "")
    running = line_of(env)._running
    assert isinstance(running, lines.OwnProcess)
    env.pool.close()
    for _ in range(100):
        if running.process.poll() is not None:
            break
        time.sleep(0.05)
    assert running.process.poll() is not None
    (tmp_path / "b.py").write_text(HEAD + acting("print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"))
    code = (
        "import sys; from pathlib import Path; from shoal.envs.isolated.environment import in_child; "
        "env = in_child(Path(sys.argv[1]), {}, 'environment'); env.step(env.reset(env.task(0))[0], 'a')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "b.py")], stderr=subprocess.PIPE, text=True)
    assert parent.stderr is not None
    child = int(parent.stderr.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        if "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1][:3]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("it goes on without us")
    parent.stderr.close()


@pytest.mark.parametrize(("code", "why"), [
    ("raise SystemExit('no data')", "SystemExit: no data"), ("os._exit(4)", r"os\._exit\(4\)"),
    ("os.kill(os.getpid(), 9)", "signal 9 .SIGKILL."),
])  # fmt: skip
def test_a_file_that_does_not_load_is_refused_in_one_line(code: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=why) as refused:
        played_by(tmp_path / "refused.py", "\n" + code)
    assert "\n" not in str(refused.value) and "refused.py" in str(refused.value)


def test_a_run_plays_a_file_in_processes_and_a_built_in_here(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(HEAD)
    own: Env = env_of(EnvConfig(str(tmp_path / "own.py")))
    assert isinstance(getattr(own, "env", own), ContainedEnv)
    assert not isinstance(env_of(EnvConfig("arithmetic")), ContainedEnv)
    assert not isinstance(load_env(str(tmp_path / "own.py"), {}), ContainedEnv)

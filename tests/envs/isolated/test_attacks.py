"""Packages that attack: each is stopped by the sandbox or ends its rollout as data, and this process goes on."""

import contextlib
import math
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shoal.chat.renderer import Renderer
from shoal.envs.isolated import messages as f
from shoal.envs.isolated.environment import try_code
from shoal.envs.rollout_rules import Conversation
from shoal.errors import ShoalError, Undecided
from shoal.net.key_files import save_key
from shoal.protocol.messages import Sampling
from shoal.protocol.signing import Key
from tests.envs.isolated.place import QUICK, acting, line_of, opened, said
from tests.sandbox.needs import needs_bubblewrap

pytestmark = needs_bubblewrap

SAMPLING = Sampling(1.0, 8, 400)

ANSWERED = """
for n in range(64):
    try:
        if 'pipe' in os.readlink(f'/proc/self/fd/{n}'): os.write(n, %r)
    except OSError: pass"""
"""The package itself writes an answer."""

SAID = msgspec.msgpack.encode(f.StepReply("x"))

STOPPED = {
    "loops": ("while True: pass", "took longer than 2 s"),
    "kills itself": ("os.kill(os.getpid(), 9)", "something else"),
    "dies of a signal": ("os.abort()", "signal 6 (SIGABRT)"),
    "takes memory": ("x = [bytearray(1 << 20) for _ in range(2000)]", "more than 400 MB of memory"),
    "sends garbage": (ANSWERED % b"\0\0\0\x05hello", "gave a wrong answer"),
    "sends a huge frame": (ANSWERED % b"\x7f\xff\xff\xff", "answered with 2147483647 bytes, limit"),
    "sends deep nesting": (ANSWERED % (b"\0\0\x3f\xff" + b"\x91" * 0x3FFF), "gave a wrong answer"),
    "answers another request": (ANSWERED % (len(SAID).to_bytes(4, "big") + SAID), "something else than was asked"),
    "closes the line": ("os.closerange(0, 64)", "exit code"),
}


@pytest.mark.parametrize("name", STOPPED)
def test_a_package_that_the_sandbox_stops_is_undecided_and_harms_no_other_rollout(
    name: str, tmp_path: Path, renderer: Renderer
) -> None:
    body, why = STOPPED[name]
    code = acting("if act == 'a':\n" + "\n".join(f"    {line}" for line in body.splitlines()))
    env = opened(tmp_path / "package", code, QUICK if why.endswith(" s") else replace(QUICK, wall_s=60.0))
    talks = [Conversation(env, renderer, env.task(i), SAMPLING) for i in range(2)]
    with pytest.raises(Undecided, match="the sandbox stopped it: it") as stopped:
        talks[0].write([*renderer.encode("a"), renderer.eos_id])
    assert talks[0].ending is None and why in str(stopped.value) and "\n" not in str(stopped.value)
    for _ in range(2):
        talks[1].write([*renderer.encode("b"), renderer.eos_id])
    assert (talks[1].ending, talks[1].reward) == ("environment", 1.0)


def test_a_player_that_hangs_is_not_taken_for_another(tmp_path: Path) -> None:
    code = """
class Players(Asked):
    def players(self):
        return {"right": lambda state, rng: "a", "wrong": lambda state, rng: time.sleep(60)}

environment = Players
"""
    env = opened(tmp_path / "package", code)
    state = env.reset(env.task(0))[0]
    with pytest.raises(Undecided, match="took longer than 2 s"):
        env.players()["wrong"](state, random.Random(1))
    assert env.players()["right"](state, random.Random(1)) == "a"


@pytest.mark.parametrize("where", ["task", "score"])
def test_a_stop_decides_nothing(where: str, tmp_path: Path, renderer: Renderer) -> None:
    code = f"\nclass Hangs(Asked):\n    def {where}(self, *args):\n        os.kill(os.getpid(), 9)\n\nenvironment = Hangs\n"
    env = opened(tmp_path / "package", code)
    with pytest.raises(Undecided, match="the sandbox stopped it"):
        talk = Conversation(env, renderer, env.task(0), SAMPLING)
        for _ in range(2):
            talk.write([*renderer.encode("a"), renderer.eos_id])


REFUSED = {
    "network": "socket.create_connection(('127.0.0.1', 80), 1)",
    "names": "socket.getaddrinfo('example.org', 80)",
    "write of its own files": "open(__file__, 'a')",
    "write of our files": "open(sys.modules['shoal'].__file__, 'a')",
    "new file": "open('/outside/package/new', 'w')",
    "program": "__import__('subprocess').run(['/bin/sh', '-c', 'echo'], check=True)",
    "processes of others": "os.kill(1, 0) or os.listdir('/proc/1/fd/999')",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_package_may_not_do_raises_in_it(name: str, tmp_path: Path) -> None:
    assert "rror: " in said(tmp_path / "package", REFUSED[name])
    assert [path.name for path in (tmp_path / "package").iterdir()] == ["environment.py"]


def test_a_package_finds_no_file_and_no_secret_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    save_key(home / "node.key", Key.generate())
    monkeypatch.setenv("SHOAL_HOME", str(home))
    monkeypatch.setenv("SECRET", "xyzzy")
    hidden = [str(home / "node.key"), "/root/.ssh", "/home", "/etc/passwd", f"/outside{home}"]
    assert said(tmp_path / "a", f"[os.path.exists(path) for path in {hidden}]") == str([False] * len(hidden))
    assert "xyzzy" not in said(tmp_path / "b", "(dict(os.environ), sys.argv, open('/proc/self/environ').read())")
    assert said(tmp_path / "c", "sorted(os.listdir('/outside')), sorted(os.listdir('/outside/code'))") == (
        "(['code', 'package'], ['msgspec', 'shoal'])"
    )
    code = acting("return Step(state, '', False)") + "\nraise ValueError(Path('/outside').exists())\n"
    with pytest.raises(ShoalError, match=r"ann/asked 0\.1\.0 does not load inside the sandbox: .*ValueError: True"):
        opened(tmp_path / "d", code)


def test_a_fork_bomb_stays_within_its_processes(tmp_path: Path, renderer: Renderer) -> None:
    """It is refused more processes, and what it started ends with the sandbox."""
    marker = f"sleepy-{tmp_path.name}"
    bomb = (
        f"__import__('ctypes').CDLL(None).prctl(15, {marker.encode()[:15]!r})\nwhile True: os.fork() or time.sleep(30)"
    )
    env = opened(tmp_path / "package", acting(bomb))
    talk = Conversation(env, renderer, env.task(0), SAMPLING)
    began = time.monotonic()
    with contextlib.suppress(Undecided):  # or a process that is refused raises
        talk.write([*renderer.encode("a"), renderer.eos_id])
    assert talk.ending in (None, "error") and time.monotonic() - began < 30
    line_of(env).end()
    names = subprocess.run(["ps", "-eo", "comm"], capture_output=True, text=True, check=True).stdout
    assert marker[:15] not in names


HOSTILE_WORDS = {
    "NaN": ("score", "float('nan')", "not a finite number"),
    "too high": ("score", "7.0", "outside reward_bounds"),
    "nothing as score": ("score", "None", "is None, not a number"),
    "too many parts": ("score", "Score({str(i): 0.0 for i in range(99)})", "99 parts in a score, limit 64"),
    "reward of a turn": ("step", "Step(state, '', True, float('nan'))", "the reward of a step is nan"),
    "steps without end": ("step", "Step(state, '', True, steps=[(i, 0.0) for i in range(9999)])", "more than 256 steps"),
    "a step of half a letter": ("step", "Step(state, '', True, steps=[(0.5, 0.1)])", "integer"),
    "a seat that is not there": ("step", "Step(state, '', False, seat=3)", "num_seats is 1"),
    "three megabytes": ("step", "Step(state, 'x' * 3000000, False)", "limit 2097152"),
    "an object": ("step", "Step(state, {'role': 'user', 'content': object()}, False)", "object"),
    "not a step": ("step", "5", "int"),
    "a forged turn": ("step", "Step(state, [Written(5)], False, restart=True)", "a turn that was not written"),
    "a broken turn": ("step", "Step(state, [{'written by the policy': [{}]}], False, restart=True)", "another form"),
    "half a character": ("step", "Step(state, '\\ud800', False)", "surrogates"),
    "a huge number": ("step", "Step(state, {'role': 'user', 'content': 10 ** 30}, False)", "serialize ints"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_WORDS)
def test_what_no_environment_may_say_ends_its_rollout_with_the_lowest_reward(
    name: str, tmp_path: Path, renderer: Renderer
) -> None:
    where, what, why = HOSTILE_WORDS[name]
    code = f"class Hostile(Asked):\n    def {where}(self, state, act=''):\n        return {what}\n\nenvironment = Hostile\n"
    env = opened(tmp_path / "package", code)
    talk = Conversation(env, renderer, env.task(0), SAMPLING)
    while talk.ending is None:
        talk.write([*renderer.encode("a"), renderer.eos_id])
    assert talk.ending == "error" and talk.reward == 0.0 and math.isfinite(talk.reward)
    assert why in talk.fault and len(talk.fault) < 700, talk.fault


@pytest.mark.parametrize(("change", "why"), [
    ("num_tasks = 'many'", "give a whole number"), ("num_tasks = True", "give a whole number"),
    ("reward_bounds = (0, 1, 2)", "reward_bounds is (0, 1, 2)"), ("reward_bounds = 1.0", "reward_bounds is 1.0"),
    ("tools = [5]", "tools is [5]"), ("tools = [print]", "tools is [<built-in"), ("weights = {'a': 'b'}", "weights is"),
    ("weights = [1]", "weights is [1]"), ("template = {'x': object()}", "template is"),
    ("name = 'x' * 5000000", "does not load"), ("players = 5", ""),
])  # fmt: skip
def test_facts_of_another_form_are_refused_in_one_line(change: str, why: str, tmp_path: Path) -> None:
    code = f"\nclass Hostile(Asked):\n    {change}\n\nenvironment = Hostile\n"
    if not why:
        assert not hasattr(opened(tmp_path / "package", code), "players")
        return
    with pytest.raises(ShoalError, match=re.escape(why)) as refused:
        opened(tmp_path / "package", code)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 700


def test_what_a_package_prints_is_no_answer(tmp_path: Path) -> None:
    env = opened(
        tmp_path / "package", acting("print('x' * 100000, flush=True); sys.stdin.read(); os.system('echo hi')")
    )
    assert env.step(env.reset(env.task(0))[0], "a").reply == "again"


def test_a_package_that_becomes_another_one_is_ended(tmp_path: Path) -> None:
    """It counts its starts on the only disk that it has; a new sandbox has a new one."""
    env = opened(tmp_path / "package", "")
    (tmp_path / "package" / "environment.py").write_text(
        (tmp_path / "package" / "environment.py").read_text().replace('"asked", 8', '"other", 9')
    )
    line_of(env).end()
    with pytest.raises(Exception, match="became another environment"):
        env.reset(env.task(0))


def test_code_is_tried_inside_the_sandbox_only(tmp_path: Path) -> None:
    (tmp_path / "dependencies").mkdir()
    (tmp_path / "dependencies" / "helper.py").write_text("WORD = 'there'\n")
    paths = [tmp_path / "dependencies"]
    assert try_code("import helper; print(helper.WORD, 'and loads')", paths, 20.0) == "there and loads"
    for program, why in (
        ("1 / 0", "ZeroDivisionError"), ("import time; time.sleep(9)", "longer than 1 s"),
        ("import os; os._exit(4)", "exit code 4"), ("open('/etc/passwd')", "FileNotFoundError"),
    ):  # fmt: skip
        with pytest.raises(ShoalError, match=why):
            try_code(program, paths, 1.0)
    assert "helper" not in sys.modules

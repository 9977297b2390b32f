"""An environment in the sandbox is like one in this process: to play, replay, check and judge, also after its end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.chat.messages import Written
from shoal.chat.renderer import Renderer
from shoal.env import Action, Env, Score, Step
from shoal.env_packages.scaffold import write_package
from shoal.envs.isolated import messages as f
from shoal.envs.isolated.environment import ContainedEnv
from shoal.envs.isolated.server import Inside
from shoal.envs.lint import check_env
from shoal.envs.load import load_env
from shoal.envs.play_episodes import EpisodeAttempt, converse
from shoal.envs.replay import replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.errors import Undecided
from shoal.protocol.messages import Sampling
from shoal.sandbox.sandbox import Resident
from tests.envs.conftest import RandomEngine
from tests.envs.isolated.place import acting, line_of, opened, said
from tests.sandbox.needs import needs_bubblewrap

pytestmark = needs_bubblewrap

RICH = """
class Environment(Asked):
    name, num_tasks = "rich", 6
    reward_bounds = (-1.0, 3.0)
    weights = {"long": 0.5}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    num_seats = 2

    def step(self, state, action):
        said = (*state, (action.visible, len(action.tool_calls)))
        if action == "branch":
            return Step(said, [{"role": "user", "content": "anew"}, Written(0), {"role": "user", "content": "on"}],
                        False, restart=True)
        steps = ((2, 0.125), (4, -0.125)) if action == "mask" else ()
        return Step(said, {"role": "user", "content": repr(said)}, len(said) == 4, 0.25, action != "mask", len(said) % 2,
                    steps=steps)

    def score(self, state):
        return Score({"long": float(len(state))}, {"turns": len(state)})

    def truncated_score(self, state):
        return -1.0

    def group_scores(self, states):
        return [Score({"rank": float(state == states[0])}) for state in states]

    def success(self, state):
        return len(state) > 3

    def players(self):
        return {"right": lambda state, rng: "yes" * (1 + len(state)), "wrong": lambda state, rng: str(rng.random())}

environment = Environment
"""


def pair(folder: Path, code: str) -> tuple[ContainedEnv, Env]:
    """The same environment in the sandbox and in this process."""
    contained = opened(folder, code)
    (folder / "environment.toml").write_text('name = "ann/asked"\nversion = "0.1.0"\nlicence = "MIT"\n')
    return contained, load_env(str(folder), {})


def test_a_package_passes_its_check_in_the_sandbox_as_in_this_process(tmp_path: Path) -> None:
    write_package("ann/backwards", tmp_path / "new")
    text = (tmp_path / "new" / "environment.py").read_text()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "words.txt").write_bytes((tmp_path / "new" / "words.txt").read_bytes())
    found = [check_env(env) for env in pair(tmp_path / "package", text)]
    for findings in found:  # solutions are for `shoal env check` alone, which plays a package without these
        findings[:] = [finding for finding in findings if finding.check != "solutions"]
    assert found[0] == found[1] and {finding.outcome for finding in found[0]} == {"passed"}


def test_every_optional_member_is_as_in_this_process(tmp_path: Path) -> None:
    contained, direct = pair(tmp_path / "package", RICH)
    for name in ("name", "num_tasks", "num_heldout", "reward_bounds", "weights", "tools", "num_seats"):
        assert getattr(contained, name) == getattr(direct, name)
    ends = []
    for env in (contained, direct):
        states = [env.reset(env.task(i))[0] for i in range(2)]
        steps: list[object] = []
        for action in ("mask", Action("<tool_call>\n{}\n</tool_call> hm", "hermes", tools=env.tools), "branch"):  # type: ignore[attr-defined]
            told = [
                Step(*env.step(state, action if isinstance(action, Action) else Action(action))) for state in states
            ]
            states = [step.state for step in told]
            steps += [step[1:] for step in told]
        judged = [env.score(states[0]), env.truncated_score(states[0]), env.group_scores(states)]  # type: ignore[attr-defined]
        ends.append((steps, judged, env.success(states[0]), sorted(env.players())))  # type: ignore[attr-defined]
    assert ends[0] == ends[1]
    assert ends[0][1][0] == Score({"long": 4.0}, {"turns": 4.0})
    assert any(isinstance(item, Written) for item in ends[0][0][-1][0])


def test_rollouts_have_the_same_tokens_and_rewards_and_replay(tmp_path: Path, renderer: Renderer) -> None:
    sampling = Sampling(1.0, 8, 300)
    rollouts = []
    for env in pair(tmp_path / "package", RICH.replace('"tools"', '"no"').replace("    tools =", "    nothing =")):
        engine = RandomEngine(renderer, ["yes", "mask", "no"])
        talks = converse(
            engine, renderer, [EpisodeAttempt(env, env.task(i % 6), bytes([i] * 32)) for i in range(12)], sampling
        )
        rollouts.append(
            [(talk.tokens, talk.author, talk.reward, talk.ending, talk.parts, talk.success) for talk in talks]
        )
        made = [talk.rollout(7) for talk in talks[:1]]
        found = replay_group(env, renderer, env.task(0), made, sampling)
        assert [replayed.problem for replayed in found] == [""]
    assert rollouts[0] == rollouts[1] and len({row[2] for row in rollouts[0]}) > 1


def test_states_are_made_again_after_the_sandbox_was_killed(tmp_path: Path) -> None:
    env = opened(tmp_path / "package", acting("return Step((*state, act), repr(state), len(state) == 4)"))
    states = [env.reset(env.task(i))[0] for i in range(3)]
    states = [env.step(state, f"a{i}").state for i, state in enumerate(states)]
    resident = line_of(env)._running
    assert isinstance(resident, Resident)
    os.kill(resident.pid, signal.SIGKILL)
    resident.process.wait(10)
    assert [env.step(state, "b").reply for state in states] == [f"({i}, 'a{i}')" for i in range(3)]
    assert env.score(states[2]) == 1.0 and line_of(env)._running is not resident


def test_a_package_that_remembers_nothing_but_time_is_found_out(tmp_path: Path) -> None:
    env = opened(tmp_path / "package", acting("return Step(state, str(time.time_ns()), False)"))
    state = env.step(env.reset(env.task(0))[0], "a").state
    line_of(env).end()
    with pytest.raises(Undecided, match="not deterministic"):
        env.step(state, "b")


def test_states_that_nobody_needs_are_dropped(tmp_path: Path) -> None:
    class Two(Env):
        name, num_tasks = "two", 2

        def task(self, index: int, heldout: bool = False) -> int:
            return index

        def reset(self, task: int):  # type: ignore[no-untyped-def]
            return task, []

        def step(self, state: int, action: str) -> Step:
            return Step(state, "on", False)

        def score(self, state: int) -> float:
            return 0.0

    inside = Inside(Two(), tmp_path, "")
    for number in range(f.MAX_STATES + 10):
        inside.answered(f.Begin([], number, 0, False))
    assert len(inside._kept) == f.MAX_STATES and 9 not in inside._kept
    inside.answered(f.Begin(list(range(100, 200)), 1 << 40, 0, False))
    assert len(inside._kept) == f.MAX_STATES - 99

    env = opened(tmp_path / "package", "")
    state = env.reset(env.task(0))[0]
    number = state.number
    del state
    assert line_of(env)._drop == [number]


def test_chance_hash_seed_locale_time_zone_and_threads_are_fixed(tmp_path: Path) -> None:
    asked = "random.random(), hash('x'), sys.flags.hash_randomization, time.tzname, os.environ['OMP_NUM_THREADS']"
    first, second = (said(tmp_path / name, asked) for name in ("a", "b"))
    assert first == second and "'UTC'" in first and ", 0, " in first


def test_dependencies_and_neighbours_are_imported_and_pth_files_are_not_run(tmp_path: Path) -> None:
    folder, wheels = tmp_path / "package", tmp_path / "dependencies"
    folder.mkdir()
    wheels.mkdir()
    (folder / "beside.py").write_text("HERE = 'neighbour'\n")
    (wheels / "tinydep.py").write_text("VERSION = '1.0'\n")
    (wheels / "evil.pth").write_text("import os; os.environ['EVIL'] = 'ran'\n")
    asked = "__import__('beside').HERE, __import__('tinydep').VERSION, 'EVIL' in os.environ, 'site' in sys.modules"
    assert said(folder, asked, dependencies=wheels) == "('neighbour', '1.0', False, False)"


def test_arguments_reach_the_environment(tmp_path: Path) -> None:
    code = "\ndef environment(size):\n    made = Asked()\n    made.num_tasks = size\n    return made\n"
    assert opened(tmp_path / "package", code, size=3).num_tasks == 3


def test_an_exception_ends_the_rollout_and_only_the_author_reads_where(tmp_path: Path, renderer: Renderer) -> None:
    told: list[str] = []
    env = opened(tmp_path / "package", acting("if act: return {}['secret']"), tell=told.append)
    talk = Conversation(env, renderer, env.task(0), Sampling(1.0, 8, 200))
    talk.write([*renderer.encode("a"), renderer.eos_id])
    assert talk.ending == "error" and talk.reward == 0.0
    line = len((tmp_path / "package" / "environment.py").read_text().split("return {}['secret']")[0].splitlines())
    assert talk.fault == f"environment.py line {line}: KeyError: 'secret'"
    assert len(told) == 1 and "Traceback" in told[0] and "inside.py" not in told[0]


WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from tests.envs.isolated.place import said
status = Path("/proc/self/status").read_text().splitlines()
own = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
resource.setrlimit(resource.RLIMIT_DATA, (own + (120 << 20), resource.getrlimit(resource.RLIMIT_DATA)[1]))
print(said(Path(sys.argv[1]), "len(bytearray(250 << 20))"))
"""
"""In a process of its own: one that has imported torch has more than the package asks for."""


def test_the_memory_limit_of_a_node_is_not_that_of_its_sandbox(tmp_path: Path) -> None:
    """A worker lowers what it may take itself. A package that ran out of memory by that would differ between machines."""
    command = [sys.executable, "-c", WITH_LITTLE_MEMORY, str(tmp_path / "package")]
    node = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60)
    assert (node.stdout, node.returncode) == (f"{250 << 20}\n", 0), node.stderr

"""An adapter in the sandbox, where foreign environments belong: with the packages of another virtual environment, without
a network."""

import json
import sysconfig

from shoal.sandbox.filesystem import interpreter as python
from shoal.sandbox.filesystem import outside
from shoal.sandbox.limits import Limits
from shoal.sandbox.sandbox import Resident
from tests.envs.adapters.conftest import ROOT, interpreter
from tests.sandbox.needs import needs_bubblewrap

INSIDE = """
import json, os, struct, sys
sys.path[:0] = sys.argv[1:]
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
from shoal.env import TextArena
env = TextArena("TicTacToe-v0", tasks=8, heldout=2)
state, told = env.reset(env.task(0))
while size := sys.stdin.buffer.read(4):
    action = sys.stdin.buffer.read(struct.unpack(">I", size)[0]).decode()
    state, told, done, *_ = env.step(state, action)
    answer = json.dumps([told, done, sys.flags.hash_randomization]).encode()
    answers.write(struct.pack(">I", len(answer)) + answer)
    answers.flush()
"""


@needs_bubblewrap
def test_a_game_is_played_in_the_sandbox() -> None:
    packages = interpreter("v1").parents[1] / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    paths = [str(outside(packages)), str(outside(ROOT / "shoal").parent)]
    # not -I: it would ignore the fixed hash seed
    program = [str(python()), "-s", "-P", "-c", INSIDE, *paths]
    game = Resident(program, Limits(memory_mb=2000, cpu_s=60, wall_s=60), [packages, ROOT / "shoal"])
    try:
        told, done, randomized = json.loads(game.ask(b"[4]", 60, 1 << 20))
        assert "[Player 1]" in told[0]["content"] and not done
        assert randomized == 0
        assert "invalid move" in json.loads(game.ask(b"[4]", 60, 1 << 20))[0][0]["content"]
    finally:
        game.end()

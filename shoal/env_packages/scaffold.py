"""What `shoal env init` writes: a small package that passes its check, for an author to change."""

from pathlib import Path

from shoal.env_packages.archive import ABOUT
from shoal.env_packages.package_reference import is_name
from shoal.errors import ConfigError, cause_of

_ABOUT = """\
name = "{name}"
version = "0.1.0"
summary = "Write a word backwards."
licence = "Apache-2.0"
entry = "environment.py:environment"
python = ">=3.11"
data = ["words.txt"]
"""

_CODE = '''\
"""Write a word backwards."""

from pathlib import Path

from shoal.env import Env, Step, require_index

WORDS = (Path(__file__).parent / "words.txt").read_text().split()


class Environment(Env):
    name = "{short}"
    num_tasks, num_heldout = 12, 4

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return WORDS[index + (self.num_tasks if heldout else 0)]

    def reset(self, task):
        return (task, ""), [{{"role": "user", "content": f"Write {{task}} backwards."}}]

    def step(self, state, action):
        return Step((state[0], action.strip()), None, True)

    def score(self, state):
        return float(state[1] == self.solution(state[0]))

    def solution(self, task):
        return task[::-1]

    def players(self):
        return {{"right": lambda state, rng: self.solution(state[0]), "wrong": lambda state, rng: state[0]}}


environment = Environment
'''

_WORDS = (
    "anchor basket candle dragon ember forest garden hammer island jacket kettle ladder market needle orange pepper\n"
)


def write_package(name: str, folder: Path) -> tuple[Path, ...]:
    """Write a new package into a folder that this makes; returns its files. Raises `ConfigError`."""
    if not is_name(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a package: write owner/name in lower case, with digits and hyphens"
        )
    short = name.partition("/")[2]
    texts = {ABOUT: _ABOUT.format(name=name), "environment.py": _CODE.format(short=short), "words.txt": _WORDS}
    try:
        folder.mkdir(parents=True)
        for file, text in texts.items():
            (folder / file).write_text(text)
    except FileExistsError:
        raise ConfigError(f"{folder} exists already: give another folder with --folder") from None
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {cause_of(error)}. Give another folder with --folder") from None
    return tuple(folder / file for file in texts)

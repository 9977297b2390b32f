"""`[[envs]]` of a run file: one environment with its settings, and who plays it."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shoal.protocol.field_types import Finite, Positive
from shoal.protocol.messages.run import EnvSettings
from shoal.typed_toml import Section


class JudgeConfig(Section, frozen=True):
    """A held-out judge: another environment that scores the episodes of each evaluation again. Nothing is trained on it. An
    alarm is raised if reward in training rises while the judge's mean falls."""

    name: str = ""
    """As `name` of [[envs]]; empty: no judge. It must have the same tasks as the environment that it judges, which is the
    only one of the run that is evaluated. Keep it for the whole run, because its means are compared."""
    args: dict[str, Any] = {}
    """Its arguments."""


class EnvConfig(EnvSettings, frozen=True):
    """An environment of the run."""

    name: str
    """Built-in name; path, relative to the run file, to a Python file or as ./FOLDER to a package; or an installed package,
    as owner/name@version."""
    weight: Positive = 1.0
    """Share of slots, relative to the other environments."""
    args: dict[str, Any] = {}
    """Arguments of the environment, which alone knows what they mean. They are in the log as they are written, and each
    machine has its data where it likes: a path among them counts from the folder in which shoal is started there."""
    label: str = ""
    """What the run calls it; empty takes the name, or the name of the file without `.py`. Labels must differ."""
    kind: Literal["", "episodes", "completions"] = ""
    """Who plays it: workers (episodes), or the host's stage, while workers only extend token ids (completions). Empty is
    episodes, but completions for what nobody can repeat, and for a file or a package in a run that others may join. If the
    host plays one environment, it plays all."""
    reproducible: bool = True
    """Whether the same actions always get the same answers. If not, the host must play it, and a run does not promise the
    same weights again. A class, or the environment.toml of a package, may say so, too."""
    call_s: Positive = 10.0
    """Seconds that the host's stage gives the environment for one turn, judges included. It is tried four times; then the
    rollout ends by error. Where workers play a file or a package, each call has 10 s."""
    solved: Finite = 1.0
    """A rollout with at least this reward counts as solved: for solve rates, and for draws that follow them."""
    tasks: str = ""
    """Draw only from the tasks that this file lists; a path relative to the run file. Filter stages of `shoal stages` write
    such files. The log holds the list, and the resolved run file its SHA-256. Empty: all tasks. Held-out tasks stay."""
    on_fault: Literal["", "lowest"] = ""
    """What becomes of a rollout on which the environment fails. Empty: it counts in nothing that is learned, and the run
    pauses if many fail. lowest: it has the lowest reward; choose it where an action of the policy can make the environment
    fail, so that failing never pays."""
    eval_episodes: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Sampled episodes on its held-out tasks, in the place of eval.episodes; 0 leaves it out of evaluations, and -1 is
    eval.episodes."""

    def __post_init__(self) -> None:
        if not self.label:
            msgspec.structs.force_setattr(self, "label", Path(self.name).name.removesuffix(".py"))

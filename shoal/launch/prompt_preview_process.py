"""The first prompt of each environment, as the role `prompts` wrote it."""

import re
import sys
import time

from shoal.errors import StateError
from shoal.launch.role_process import RoleProcess
from shoal.launch.supervisor import Supervisor
from shoal.run_folder import RunFolder
from shoal.terminal import brief

PREVIEW_S = 120.0
"""An environment that takes longer to begin has no prompt shown."""

MAX_WHY_CHARS = 400
"""Of the log's last line, which may hold an environment's words."""


class PromptPreview:
    """The first prompt of each environment, said once when a run begins. The role `prompts` writes it."""

    def __init__(self, folder: RunFolder, role: RoleProcess) -> None:
        self._folder = folder
        self._role = None if folder.log.exists() else role  # a run that goes on showed them when it began
        self._begun = 0.0

    def look(self) -> list[str]:
        """What there is to say now: the prompts once, or why they cannot be shown. Raises `StateError` if no run can begin
        with them."""
        role = self._role
        if role is None:
            return []
        self._begun = self._begun or time.monotonic()
        if not (role.restarts or role.state == "given up"):
            role.tend()
        if role.state == "given up" and not role.restarts:
            raise StateError(role.reason)
        if role.state == "done":
            self._role = None
            return [self._folder.first_prompts.read_text()] if self._folder.first_prompts.exists() else []
        if role.restarts or time.monotonic() - self._begun > PREVIEW_S:
            said = role.last_words(1)  # before another start
            self.end()
            last = re.sub(r"^[-\d]+ [:\d]+ [A-Z]+ +\w+ +", "", said[0]) if said else "nothing was logged"
            why = f"{brief(last, MAX_WHY_CHARS)}. {role.log} may say more"
            return [f"the first prompts cannot be shown: {why}. The run goes on"]
        return []

    def is_awaited(self) -> bool:
        """Whether the run must not begin before they are known."""
        return self._role is not None

    def end(self) -> None:
        """End the role, if it still works."""
        if self._role is not None:
            Supervisor().stop(([self._role], 0.0))
        self._role = None


def preview_of(folder: RunFolder) -> PromptPreview:
    """The first prompts of a run whose first policy is there already, and which is not to begin."""
    command = [sys.executable, "-m", "shoal.cli.main", "role", "prompts", "--run-dir", str(folder.root)]
    return PromptPreview(folder, RoleProcess("prompts", command, folder.logs / "prompts.log", 1))

"""How this machine's user decides what is installed: by install.toml in the node's home, or by an answer to a question."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.terminal import say

if TYPE_CHECKING:
    from shoal.env_packages.install_policy import InstallDecision
    from shoal.roles.node.package_consent import Packages


def consent_here(
    policy: Path | None = None, yes: bool = False, max_mb: int = 1000, heavy: bool = False
) -> "InstallDecision":
    """`yes` answers without a question. Raises `ConfigError` if the policy file is wrong."""
    from shoal.config import node_home
    from shoal.env_packages.install_policy import POLICY_FILE, InstallDecision, read_policy

    usual = node_home() / POLICY_FILE
    file = policy or (usual if usual.exists() else None)
    ask = (lambda _: True) if yes else (_ask if sys.stdin.isatty() else None)
    return InstallDecision(read_policy(file) if file and not yes else None, ask, max_mb, heavy)


def packages_of(url: str) -> "Packages":
    """Which packages of the run at a URL this machine plays: those that its user agrees to."""
    from shoal.roles.node.package_consent import ConsentedPackages

    return ConsentedPackages(f"{url.rstrip('/')}/v1/hub", consent_here)


def _ask(question: str) -> bool:
    """The end of the input is a no."""
    say(question)
    print("[y/N] ", end="", flush=True)
    answer = os.read(sys.stdin.fileno(), 1000).decode("utf-8", "replace")
    if not answer:  # the end of the input, so the cursor is still on this line
        print()
    return answer.strip().lower() in ("y", "yes")

"""Whether this node plays the packages of somebody's run, and how it gets them.

On the host all packages play that the run file names. A volunteer's node plays a package only if its user agreed to install
it, and if two keys other than the author's attest in the run's registry that it passes its check. Whatever plays, plays
inside the sandbox.
"""

import asyncio
import contextlib
import logging
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from shoal.config import node_home
from shoal.env import Env
from shoal.env_packages.attestations import num_witnesses
from shoal.env_packages.install import install, offer_of
from shoal.env_packages.install_policy import InstallDecision
from shoal.env_packages.installed import Installed, PackageStore
from shoal.env_packages.package_reference import read_reference
from shoal.env_packages.registry import open_registry
from shoal.envs.isolated.connection import LIMITS
from shoal.envs.isolated.environment import demand_sandbox, in_sandbox, try_code
from shoal.envs.isolated.pool import MAX_PROCESSES, Processes
from shoal.envs.load import Opener, is_own, is_package
from shoal.errors import ConfigError, NothingYet, PeerError
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.messages import EnvSpec
from shoal.protocol.messages.run import kind_of
from shoal.sandbox.limits import Limits

WITNESSES = 2
"""Keys, other than the author's, that attest that a package passes its check on their machines. Keys are free, so more
would not say more; fewer than two would let one machine's luck decide."""

PART = 4
"""The packages of a run may together take this part of the memory that a volunteer gives: as much as the tokenizer's
process. One without large libraries takes some 10 MB."""

ANOTHER_MB = 1024
"""A package whose steps are slow has another sandbox for each of so many MB."""

MAX_TRACE_CHARS = 1600
"""Of a traceback in a role's log, which cuts longer entries. Its end says most."""

T = TypeVar("T")
log = logging.getLogger("packages")


class Packages(Protocol):
    """Which packages of a run this node plays."""

    def demand(self, specs: Sequence[EnvSpec]) -> None:
        """Raise `ConfigError` unless this node plays all of them. It may take minutes and ask the user."""

    def open(self, processes: Processes, limits: Limits = LIMITS) -> Opener:
        """How they are opened; `processes` is for each package, `limits` are those of each sandbox."""


class HostPackages:
    """Those of the host: everything in the run file. Tracebacks go to the role's log."""

    def demand(self, specs: Sequence[EnvSpec]) -> None:
        """The host has chosen them."""

    def open(self, processes: Processes, limits: Limits = LIMITS) -> Opener:
        return partial(in_sandbox, processes=processes, tell=log_trace, limits=limits)


class NoPackages:
    """None but the user's own."""

    def demand(self, specs: Sequence[EnvSpec]) -> None:
        """They are refused when they are opened."""

    def open(self, processes: Processes, limits: Limits = LIMITS) -> Opener:
        def refused(package: Installed, paths: Sequence[Path], args: Mapping[str, Any]) -> Env:
            raise only_completions(f"nobody agreed that this machine plays {package.name} {package.version}")

        return refused


class ConsentedPackages:
    """Those that the user of this machine agreed to. `registry` is where the run's registry is."""

    def __init__(self, registry: str, consent: Callable[[], InstallDecision]) -> None:
        """`consent` reads how the user decides; it is asked only where a run plays packages."""
        self._registry, self._consent = registry, consent
        self._agreed: set[str] = set()
        """Digests."""

    def demand(self, specs: Sequence[EnvSpec]) -> None:
        """Install what is missing, if the user agrees, and look up who checked it. Raises `ConfigError`."""
        if kind_of(specs) == COMPLETIONS:
            return
        for spec in specs:
            if is_package(spec.name) and spec.digest not in self._agreed:
                self._demand(spec)
                self._agreed.add(spec.digest)

    def open(self, processes: Processes, limits: Limits = LIMITS) -> Opener:
        opener = partial(in_sandbox, processes=processes, limits=limits)

        def agreed(package: Installed, paths: Sequence[Path], args: Mapping[str, Any]) -> Env:
            if package.digest not in self._agreed:  # guard: only-agreed-packages
                raise ConfigError(f"{package.name} {package.version} was not agreed to on this machine: join again")
            return opener(package, paths, args)

        return agreed

    def _demand(self, spec: EnvSpec) -> None:
        demand_sandbox(spec.name)
        home = node_home()
        known = PackageStore(home / "envs").get(spec.digest)
        if known is not None and is_own(known):
            return
        passed = self._checks(spec, known)
        if passed < WITNESSES:  # guard: two-witnesses
            raise only_completions(
                f"in the run's registry {passed} keys other than the author's attest that {spec.name} passes its check, "
                f"and {WITNESSES} are needed"
            )
        if known is None:
            known = self._install_from_the_run(spec, home)
        if not known.reproducible:  # guard: reproducible-packages
            raise only_completions(f"{spec.name} may answer otherwise on another machine, as its author says")

    def _checks(self, spec: EnvSpec, known: Installed | None) -> int:
        """Keys other than the author's that attest that it passes. Raises `PeerError` if the registry lies."""
        name, version = (known.name, known.version) if known else read_reference(spec.name)[:2]
        if not name:
            raise ConfigError(
                f"the run names a package by its digest {spec.digest[:16]}…, which is not installed here: ask the host for "
                "its name, and install it with `shoal env install`"
            )
        registry = open_registry(self._registry)
        try:
            offer = offer_of(read_reference(f"{name}@{version}"), registry, node_home())
        except NothingYet:
            return 0
        if offer.release.digest != spec.digest:  # guard: package-of-the-run
            raise PeerError(
                f"{spec.name} in the run's registry is another package ({offer.release.digest[:16]}…) than the run's "
                f"({spec.digest[:16]}…): tell the host"
            )
        return num_witnesses(registry, name, offer.release, offer.author)

    def _install_from_the_run(self, spec: EnvSpec, home: Path) -> Installed:
        registry, consent = open_registry(self._registry), self._consent()
        if consent.policy is None and consent.ask is None:
            there = "" if home == Path.home() / ".shoal" else f"SHOAL_HOME={shlex.quote(str(home))} "
            raise ConfigError(
                f"this run plays {spec.name}, which is not installed here, and nobody can be asked: `{there}shoal env "
                f"install {spec.name} --registry {self._registry}`, or write install.toml in {home}"
            )
        package = install(
            read_reference(spec.name), registry, home, consent, start=try_code,
            checks=lambda name, release, author: num_witnesses(registry, name, release, author), tell=log.info,
        ).package  # fmt: skip
        log.info("installed package=%s@%s digest=%s", package.name, package.version, package.digest[:16])
        return package


def room_of(specs: Sequence[EnvSpec], limit_mb: int) -> tuple[Limits, int, int]:
    """The limits of each sandbox on a node that gives `limit_mb` to a run, how many sandboxes a package may have, and what
    all of them may take, MB."""
    count = sum(is_package(spec.name) for spec in specs) if kind_of(specs) != COMPLETIONS else 0
    if not count:
        return LIMITS, MAX_PROCESSES, 0
    share = limit_mb // PART // count
    most = max(1, min(MAX_PROCESSES, share // ANOTHER_MB))  # guard: sandboxes-fit-memory
    each = min(LIMITS.memory_mb + 2 * LIMITS.scratch_mb, share // most)
    scratch_mb = min(LIMITS.scratch_mb, each // 8)
    memory_mb = each - 2 * scratch_mb
    limits = replace(LIMITS, memory_mb=memory_mb, scratch_mb=scratch_mb, address_mb=LIMITS.memory_mb)
    return limits, most, most * each * count


async def aside(act: Callable[[], T]) -> T:
    """Do something in a thread that nobody waits for if the node is stopped meanwhile: its user may be asked."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(found: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(cast("T", found))

    def work() -> None:
        found, error = None, None
        try:
            found = act()
        except BaseException as raised:  # noqa: BLE001  it is raised again where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, found, error)

    threading.Thread(target=work, name="packages", daemon=True).start()
    return await done


def only_completions(why: str) -> ConfigError:
    """This node may only extend token ids for such a run."""
    return ConfigError(
        f'{why}: this machine does not play it, and serves only runs whose host plays (kind = "completions"). Ask the '
        "host, or join another run"
    )


def log_trace(trace: str) -> None:
    """For the host, who may be the author."""
    log.warning("a package raised:\n%s", trace[-MAX_TRACE_CHARS:])

"""Whether a package may be installed here: what its user is shown and asked, or what a policy file decides instead.

It decides from the signed catalogue before the package is downloaded. It decides again, and asks, from what the package
says about itself, before dependencies are downloaded: they are not known earlier.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shoal.env_packages.lock import Requirement, heavy
from shoal.env_packages.metadata import About
from shoal.env_packages.package_reference import owner_of
from shoal.env_packages.publish import Believed
from shoal.env_packages.signed_catalog import Release
from shoal.errors import ConfigError
from shoal.humanize import data_size
from shoal.protocol.encoding import is_digest
from shoal.protocol.signing import is_public_key
from shoal.typed_toml import Section, from_tree, read_toml

POLICY_FILE = "install.toml"
"""In the node's home. Where it exists, nobody is asked."""


class InstallPolicy(Section, frozen=True):
    """The contents of a policy file: what is installed without a question. Anything else is refused."""

    authors: tuple[str, ...] = ()
    """Keys of authors whose packages may be installed."""
    digests: tuple[str, ...] = ()
    """Packages that may be installed, no matter who signed them."""
    max_mb: int = 200
    """Size of a package, and of its downloaded dependencies, in MB."""
    max_dependencies: int = 50
    """Dependencies of a package."""
    checks: int = 0
    """Keys, other than the author's, that must attest that the package passes its check. Keys are free, so this says
    little of authors that are not listed."""


class InstallCandidate(NamedTuple):
    """A package that could be installed, as far as the registry's signed list tells."""

    name: str
    release: Release
    believed: Believed
    """The signed list that it is in."""
    checks: int
    """Keys, other than the author's, that attest that it passes."""
    registry: str

    @property
    def author(self) -> str:
        """The key that signed it."""
        return self.believed.opened.key


class InstallDecision(NamedTuple):
    """How a decision is made."""

    policy: InstallPolicy | None
    """Decides alone, if there is one."""
    ask: Callable[[str], bool] | None
    """Asks the user; None if there is nobody to ask."""
    max_mb: int = 1000
    """As `InstallPolicy.max_mb`, where there is no policy."""
    heavy: bool = False
    """Whether dependencies of gigabytes are allowed, as on a host."""

    @property
    def max_bytes(self) -> int:
        """Of a package, and of its downloaded dependencies."""
        return (self.policy.max_mb if self.policy else self.max_mb) * 1_000_000


def read_policy(path: Path) -> InstallPolicy:
    """Read a policy file. Raises `ConfigError` that names the key."""
    policy = from_tree(read_toml(path, "a policy file"), InstallPolicy, str(path))
    for key, values, fits in (("authors", policy.authors, is_public_key), ("digests", policy.digests, is_digest)):
        wrong = [value for value in values if not fits(value)]
        if wrong:
            raise ConfigError(f"{path}: {key} holds {wrong[0]!r}; write 64 lower-case hex digits")
    return policy


def demand_offer_fits(offer: InstallCandidate, consent: InstallDecision) -> None:
    """Refuse by what is known before the download. Raises `ConfigError`."""
    named, policy = f"{offer.name} {offer.release.version}", consent.policy
    if offer.release.size_bytes > consent.max_bytes:  # guard: size-of-an-offer
        raise ConfigError(
            f"{named} has {data_size(offer.release.size_bytes)}, limit {data_size(consent.max_bytes)}: `shoal env install "
            "--max-mb MB` takes more, or max_mb in the policy file"
        )
    if policy is None:
        return
    if offer.author not in policy.authors and offer.release.digest not in policy.digests:  # guard: policy-names-authors
        raise ConfigError(
            f"{named} is signed by {offer.author}, and the policy file names neither this key nor the package "
            f"{offer.release.digest}: add one of them, if you trust it"
        )
    if offer.checks < policy.checks:  # guard: policy-asks-for-checks
        raise ConfigError(
            f"{named} passed its check by {offer.checks} keys other than its author's, and the policy file wants "
            f"{policy.checks}: wait for others, or lower checks"
        )


def demand_consent(
    offer: InstallCandidate, about: About, requirements: tuple[Requirement, ...], consent: InstallDecision
) -> None:
    """Refuse by what the package says about itself, then ask, if there is no policy. Raises `ConfigError`."""
    named, names = f"{offer.name} {offer.release.version}", heavy(requirements)
    if names and not consent.heavy:  # guard: heavy-stays-with-the-host
        raise ConfigError(
            f"{named} needs {', '.join(names[:5])}: environments with such dependencies stay with the host, who "
            "installs them with `shoal env install --heavy`"
        )
    if consent.policy is not None:
        if len(requirements) > consent.policy.max_dependencies:  # guard: policy-limits-dependencies
            raise ConfigError(
                f"{named} has {len(requirements)} dependencies, limit {consent.policy.max_dependencies}: raise "
                "max_dependencies in the policy file"
            )
        return
    if consent.ask is None:
        raise ConfigError(
            f"nobody can be asked whether to install {named}: `shoal env install --yes` does not ask, or write a policy "
            f"file, {POLICY_FILE} in your home"
        )
    if not consent.ask(question(offer, about, requirements)):  # guard: user-is-asked
        raise ConfigError(f"{named} was not installed, as you said")


def question(offer: InstallCandidate, about: About, requirements: tuple[Requirement, ...]) -> str:
    """What the user reads before the answer."""
    seen = "seen here for the first time" if offer.believed.is_new_owner else "known here"
    lines = [
        f"{offer.name} {offer.release.version}: {about.summary or 'no summary'}",
        f"  author        {owner_of(offer.name)}, key {offer.author} ({seen})",
        f"  package       {offer.release.digest}, {data_size(offer.release.size_bytes)}, licence {about.licence}",
        f"  from          {offer.registry}",
        f"  checked       passed by {offer.checks} keys other than the author's",
        f"  dependencies  {', '.join(f'{r.name} {r.version}' for r in requirements) or 'none'}",
    ]
    if offer.release.withdrawn:
        lines.append(f"  WITHDRAWN     its author advises against it: {offer.release.withdrawn}")
    lines.append("Its code runs only inside the sandbox. Install it?")
    return "\n".join(lines)

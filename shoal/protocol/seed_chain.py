"""The randomness of a run, from one secret: the chain, and the seeds of slots, samples and rows.

`noise` makes noise from a seed. It uses no clock and no randomness of the operating system. `docs/design/trust.md`
gives the reasons.
"""

from dataclasses import dataclass

from shoal.protocol.constants import CHAIN_LENGTH, MAIN_STREAM
from shoal.protocol.encoding import domain_hash

SLOT_CHAIN, AUDIT_CHAIN = "chain/slots", "chain/audits"
"""Purposes of the two secret chains."""


@dataclass(frozen=True)
class SecretChain:
    """A hash chain of secrets: link(v) = H(link(v + 1)). The end, link(-1), is published when the run begins.

    With link(v), anyone can check it against link(v - 1), but nobody can compute link(v + 1).
    """

    secret: bytes
    purpose: str
    length: int = CHAIN_LENGTH

    def links(self) -> list[bytes]:
        """All links: index v + 1 holds link(v), and index 0 the published end."""
        chain = [domain_hash(self.purpose + "/seed", self.secret)]
        for _ in range(self.length):
            chain.append(_next_link(self.purpose, chain[-1]))
        return chain[::-1]

    def end(self) -> bytes:
        """The published end of the chain, link(-1)."""
        return self.links()[0]


def link_follows(purpose: str, link: bytes, before: bytes, steps: int = 1) -> bool:
    """Whether `link` hashes to `before` in exactly `steps` steps. This is how anyone checks a revealed link."""
    for _ in range(steps):
        link = _next_link(purpose, link)
    return link == before


def _next_link(purpose: str, link: bytes) -> bytes:
    return domain_hash(purpose + "/link", link)


def of_stream(purpose: str, stream: str) -> str:
    """The purpose of a hash for one stream of versions. The main stream has the purpose without an addition."""
    return purpose if stream == MAIN_STREAM else f"{purpose}/stream/{stream}"


def slot_seed(run: str, version: int, root: str, link: bytes, slot: int, stream: str = MAIN_STREAM) -> bytes:
    """Seed of a slot, 32 bytes. `root` is the weights root of the policy version, hex; `link` is link(version)."""
    purpose, root_bytes = of_stream("slot", stream), bytes.fromhex(root)
    return domain_hash(purpose, run.encode(), version.to_bytes(8, "big"), root_bytes, link, slot.to_bytes(8, "big"))


def sample_seed(slot: bytes, index: int) -> bytes:
    """Seed of one rollout of a slot, 32 bytes."""
    return domain_hash("sample", slot, index.to_bytes(8, "big"))


def continuation_seed(slot: bytes, rollout: int, position: int, number: int) -> bytes:
    """Seed of one continuation, 32 bytes: the `number`-th from a token index of a rollout; `slot` is the parent's seed."""
    return domain_hash("continuation", slot, *(part.to_bytes(8, "big") for part in (rollout, position, number)))


def row_seed(sample: bytes, row: int) -> bytes:
    """Seed of one row of a rollout, 32 bytes. The first row has the rollout's own. Noise counts positions within a row, so
    two rows of one seed would get the same noise."""
    return domain_hash("row", sample, row.to_bytes(8, "big")) if row else sample  # guard: noise-of-each-row


def uniform(purpose: str, *parts: bytes) -> float:
    """A draw in [0, 1) that anyone with the same parts can repeat. For audits, one part is a secret link."""
    return int.from_bytes(domain_hash(purpose, *parts)[:8], "big") / 2**64

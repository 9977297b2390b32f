"""All randomness of a run, from one secret: the chain, the seeds of slots and samples, and the sampling noise.

Called by the coordinator (which holds the secret), by every verifier, and by the engine's tests as the reference. It
uses no clock and no randomness of the operating system. `docs/explanation/trust.md` gives the reasons.

Axes: B sequences, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.constants import CHAIN_LENGTH, MAIN_STREAM, PHILOX_ROUNDS
from shoal.protocol.wire import domain_hash


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


def row_seed(sample: bytes, row: int) -> bytes:
    """Seed of one row of a rollout, 32 bytes. The first row has the rollout's own. Noise counts positions within a row, so
    two rows of one seed would get the same noise."""
    return domain_hash("row", sample, row.to_bytes(8, "big")) if row else sample  # guard: noise-of-each-row


def uniform(purpose: str, *parts: bytes) -> float:
    """A draw in [0, 1) that anyone with the same parts can repeat. For audits, one part is a secret link."""
    return int.from_bytes(domain_hash(purpose, *parts)[:8], "big") / 2**64


# --- seeded sampling: Philox4x32-10 (Salmon et al., SC 2011), counters in, Gumbel noise out ---

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10: counters [..., 4] and keys [..., 2] of 32-bit words to words [..., 4], each held in a uint64."""
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)


def noise_words(seed: bytes) -> tuple[int, int, int, int]:
    """The four 32-bit words of a sample seed that decide its noise: two for the key, then two for the counter."""
    first, second, third, fourth = (int.from_bytes(seed[i : i + 4], "little") for i in range(0, 16, 4))
    return first, second, third, fourth


def gumbel(seeds_B: list[bytes], positions_B: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
    """Gumbel noise, float32[B, V], for the token at an absolute index of each sequence: the reference.

    Word v % 4 of the counter (v // 4, position, seed words 2 and 3) under the key (seed words 0 and 1) makes the
    noise of vocabulary entry v: -log(-log((u + 0.5) / 2^32)), in float64 and then rounded, because in float32 a
    third of the values differ between libraries, and the largest u round to 1, which gives infinity.
    """
    words_B4 = np.array([noise_words(seed) for seed in seeds_B], dtype=np.uint64).reshape(-1, 4)
    quads = (vocabulary + 3) // 4
    counter = np.empty((len(seeds_B), quads, 4), dtype=np.uint64)
    counter[..., 0] = np.arange(quads, dtype=np.uint64)
    counter[..., 1] = np.asarray(positions_B, dtype=np.uint64)[:, None]
    counter[..., 2] = words_B4[:, 2, None]
    counter[..., 3] = words_B4[:, 3, None]
    bits = philox(counter, words_B4[:, None, :2]).reshape(len(seeds_B), quads * 4)[:, :vocabulary]
    uniform_BV = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log(uniform_BV))).astype(np.float32)

"""Philox4x32-10 in torch (Salmon et al., SC 2011): counters and a key in, four random words out.

Called by the noise of seeded sampling. Pure. `protocol.noise.philox` is the reference.
"""

from torch import Tensor

ROUNDS = 10
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> Words:
    """The four words of each counter (c0 to c3) under a key (k0, k1): 32-bit words in int64, of shapes that broadcast.

    Products wrap in int64. A shift extends the sign into a high half, and a low half stays below its high half. A mask
    removes both before the next product.
    """
    for _ in range(ROUNDS):
        p0, p1 = c0 * M0, c2 * M1
        c0 = ((p1 >> 32) ^ c1 ^ k0) & LOW
        c2 = ((p0 >> 32) ^ c3 ^ k1) & LOW
        c1, c3 = p1, p0
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return c0, c1 & LOW, c2, c3 & LOW

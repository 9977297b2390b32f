"""Who publishes a run's versions: the first publisher, and each one that the root key named after it.

`protocol/host_signatures` signs and checks them.
"""

from shoal.protocol.messages.base import Message


class Rotation(Message, frozen=True):
    """The root key's word that another key publishes from a version on. Its predecessor signs nothing more."""

    run: str
    stream: str
    key: str
    """The new publisher."""
    since: int
    """The first version that it publishes."""
    serial: int
    """1, 2, ...: of each rotation one more than of the last."""
    created: int
    """When the root signed it, seconds since the epoch. What the predecessor signs later is refused."""
    signature: str
    """By the root key, over the same with an empty signature."""


class Publishers(Message, frozen=True):
    """All publishers of a run, in order."""

    first: str
    """Named by the run's first event."""
    rotations: tuple[Rotation, ...] = ()

    @property
    def newest(self) -> str:
        """The only key that may publish and renew now."""
        return self.rotations[-1].key if self.rotations else self.first

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.first, *(rotation.key for rotation in self.rotations))

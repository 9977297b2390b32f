"""What a run that uses groups again remembers of them: which groups may be used again, and how often batches took them.

A record of the state, in runs whose rules let a batch take groups that earlier batches had. `facts/` changes it by its
methods; `next_batch` chooses from it. It knows no state.
"""

from collections.abc import Iterable

import msgspec

Place = tuple[int, int]
"""(version, slot) of a group."""


class ReusableGroup(msgspec.Struct):
    """An audited group that more than one batch may take."""

    auditor: str
    """Key of the validator whose accepting verdict audited it."""
    uses: int = 0
    """Batches that took it."""


class UsesRecord(msgspec.Struct):
    """The audited groups of a stream that its next batches may take."""

    groups: dict[int, dict[int, ReusableGroup]] = {}
    """By version and slot. Those that are too old, used up or barred are missing."""

    @property
    def places(self) -> list[Place]:
        """Of all these groups."""
        return [(version, slot) for version, slots in self.groups.items() for slot in slots]

    def audited(self, place: Place, auditor: str) -> None:
        """A group was accepted, and audited before."""
        version, slot = place
        self.groups.setdefault(version, {})[slot] = ReusableGroup(auditor)

    def took(self, places: tuple[Place, ...], most: int, oldest: int) -> None:
        """A batch took these groups. No group is kept that `most` batches took, or whose version is older than `oldest`."""
        for version, slot in places:
            group = self.groups.get(version, {}).get(slot)
            if group is not None:
                group.uses += 1
                if group.uses >= most:  # guard: used-up
                    del self.groups[version][slot]
        # guard: repeated-while-fresh
        self.groups = {version: slots for version, slots in self.groups.items() if version >= oldest and slots}

    def bar(self, places: Iterable[Place]) -> None:
        """No further batch takes these groups."""
        for version, slot in places:
            self.groups.get(version, {}).pop(slot, None)

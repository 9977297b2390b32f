"""Which processes of a run take shifts on a device of this machine, and how they are told.

Called by `local`. What they do then is in `roles/shifts`; whether it is needed is decided in `fits`.
"""

from dataclasses import dataclass

from shoal.config import RunConfig
from shoal.errors import StateError
from shoal.folder import RunFolder
from shoal.launch.fits import settled, shared_devices
from shoal.policy.anyspec import AnySpec
from shoal.policy.spec import PolicySpec

SECTIONS = {"train": "trainer", "validators": "validators", "workers": "workers and evaluations"}
"""Of a run file, with the processes whose device each names."""


@dataclass(frozen=True)
class Shifts:
    """The devices whose memory processes have one after another."""

    config: RunConfig
    folder: RunFolder
    devices: frozenset[str] = frozenset()

    def flags(self, section: str) -> list[str]:
        """What a section's processes are started with."""
        device = self._device(section) if self.devices else ""
        return ["--shifts", str(self.folder.shifts / device)] if device in self.devices else []

    def in_words(self) -> list[str]:
        """A line for each device."""
        return [
            f"These take shifts on {device}: {', '.join(name for key, name in SECTIONS.items() if self.flags(key))}. "
            'host.shifts = "off" lets all of them have its memory at once'
            for device in sorted(self.devices)
        ]

    def _device(self, section: str) -> str:
        return str(getattr(settled(self.config), section).device)


def shifts_of(config: RunConfig, folder: RunFolder, spec: PolicySpec | AnySpec | None, with_workers: bool) -> Shifts:
    """How a run's processes share devices. A shape that is not known shares none. Raises `StateError` if one that would
    take shifts cannot leave its device."""
    devices = shared_devices(config, spec, with_workers) if spec is not None else frozenset()
    found = Shifts(config, folder, devices)
    if with_workers and config.workers.count and config.workers.engine and found.flags("workers"):
        raise StateError(
            f'workers.engine = "{config.workers.engine}" keeps its memory on the device, and these processes must take '
            "shifts there: leave it out, set workers.count = 0, or give workers another device"
        )
    return found

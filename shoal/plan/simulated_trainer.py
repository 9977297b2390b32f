"""The trainer of a simulated run, as `roles/trainer` works: it publishes a version beside the next step.

It knows no batch: it is told whether one is there.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from shoal.plan.event_queue import Clock


class StepTimes(NamedTuple):
    """How a step's time passed, seconds."""

    batch_s: float
    """Waiting for the batch."""
    publication_s: float
    """Waiting until the version before was published."""
    all_s: float


class SimulatedTrainer:
    """Takes a step, waits until the version before is published, and begins to publish its own."""

    def __init__(self, clock: Clock, train_s: float, publish_s: float, publish: Callable[[], None]) -> None:
        """`publish` is called when a version can be fetched; the first one is version 0, before any step."""
        self._clock, self._train_s, self._publish_s, self._publish = clock, train_s, publish_s, publish
        self.steps: list[StepTimes] = []
        self._asked_at = 0.0
        """When it asked for the batch of the next step."""
        self._is_training = True
        self._is_publishing = True
        self._then: Callable[[], None] | None = None
        """What waits for the publication."""
        clock.after(publish_s, self._first)

    @property
    def wants(self) -> int | None:
        """The step whose batch it waits for, if any."""
        return None if self._is_training else len(self.steps)

    def learn(self) -> None:
        """Begin the step that it waits for: its batch is there."""
        self._is_training = True
        waited_s, ends = self._clock.now - self._asked_at, self._clock.now + self._train_s
        self._clock.after(self._train_s, partial(self._learned, waited_s, ends))

    def _learned(self, waited_s: float, ended: float) -> None:
        if self._is_publishing:
            self._then = partial(self._learned, waited_s, ended)
            return
        now = self._clock.now
        self.steps.append(StepTimes(waited_s, now - ended, now - self._asked_at))
        self._is_training, self._is_publishing, self._asked_at = False, True, now
        self._clock.after(self._publish_s, self._published)

    def _first(self) -> None:
        self._is_training, self._asked_at = False, self._clock.now
        self._published()

    def _published(self) -> None:
        self._is_publishing = False
        self._publish()
        then, self._then = self._then, None
        if then is not None:
            then()

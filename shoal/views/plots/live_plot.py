"""Steps of a run drawn as they come: curves in a notebook, one line a step elsewhere.

It passes the steps on, so that the caller may do what it likes with each. matplotlib is imported when the first picture is
drawn; without it a notebook, too, gets lines.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from shoal.errors import ConfigError, how_to_install
from shoal.humanize import figure
from shoal.step_metrics import declared, is_number
from shoal.views.plots.render import draw
from shoal.views.plots.series import Panel, Picture, PlotCurve, Point

EVERY_S = 0.5
"""Seconds between two pictures."""
MAX_CURVES = 6


class Stepped(Protocol):
    """A step as `shoal.api` gives it."""

    @property
    def number(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, Any]: ...


S = TypeVar("S", bound=Stepped)


def live(
    steps: Iterable[S], names: Sequence[str], say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[S]:  # fmt: skip
    """Yield each step, and draw these metrics. Raises `ConfigError` for more metrics than can be read."""
    if not 1 <= len(names) <= MAX_CURVES:
        raise ConfigError(f"names has {len(names)} metrics: give 1 to {MAX_CURVES}")
    return _drawn(steps, names, say, clock)


def _drawn(
    steps: Iterable[S], names: Sequence[str], say: Callable[[str], None], clock: Callable[[], float]
) -> Iterator[S]:
    show = _notebook(say)
    series: list[Mapping[str, Any]] = []
    numbers: list[int] = []
    due = -math.inf
    try:
        for step in steps:
            numbers.append(step.number)
            series.append(step.metrics)
            if show is None:
                say(line_of(step, names))
            elif clock() >= due:
                show(draw(picture_of(numbers, series, names), "png"))
                due = clock() + EVERY_S
            yield step
    finally:
        if show is not None and numbers:
            show(draw(picture_of(numbers, series, names), "png"))  # the last ones may not have been due


def line_of(step: Stepped, names: Sequence[str]) -> str:
    """For example: step 3  reward_all_mean 0.412  entropy_nats 0.93."""
    return "  ".join(
        [f"step {step.number}", *(f"{name} {figure(_number(step.metrics.get(name)), 3)}" for name in names)]
    )


def picture_of(numbers: Sequence[int], series: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Picture:
    """One panel for each metric, over the steps. A step without a value leaves a gap."""
    panels = list[Panel]()
    for name in names:
        values = [_number(metrics.get(name)) for metrics in series]
        points = [Point(float(number), value, value, value) for number, value in zip(numbers, values, strict=True)]
        metric = declared(name)
        panels.append(Panel(name, metric.unit if metric else "", False, [PlotCurve("", 0, points, 1)]))
    return Picture("step", panels, ())


def _notebook(say: Callable[[str], None]) -> Callable[[bytes], None] | None:
    """Shows a picture in the cell's output, each in the place of the one before; None outside a notebook."""
    if "ipykernel" not in sys.modules:
        return None
    try:
        import matplotlib.figure  # noqa: F401
        from IPython.display import Image, display
    except ImportError as error:
        say(f"no picture, because {error.name} is not installed: {how_to_install('notebook')}")
        return None
    handle: Any = None

    def show(png: bytes) -> None:
        nonlocal handle
        if handle is None:
            handle = display(Image(png), display_id=True)
        else:
            handle.update(Image(png))

    return show


def _number(value: object) -> float:
    return float(value) if is_number(value) else math.nan

"""Steps of a run drawn as they come: curves in a notebook, one line a step elsewhere.

It passes the steps on, so that the caller may do what it likes with each. matplotlib is imported when the first picture is
drawn; without it a notebook, too, gets lines.
"""

import io
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shoal.errors import ConfigError, how_to_install
from shoal.humanize import figure
from shoal.metrics import declared

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
                show(png_of(figure_of(numbers, series, names)))
                due = clock() + EVERY_S
            yield step
    finally:
        if show is not None and numbers:
            show(png_of(figure_of(numbers, series, names)))  # the last ones may not have been due


def line_of(step: Stepped, names: Sequence[str]) -> str:
    """For example: step 3  reward_all_mean 0.412  entropy_nats 0.93."""
    return "  ".join(
        [f"step {step.number}", *(f"{name} {figure(_number(step.metrics.get(name)), 3)}" for name in names)]
    )


def figure_of(numbers: Sequence[int], series: Sequence[Mapping[str, Any]], names: Sequence[str]) -> "Figure":
    """One panel for each metric, over the steps. A step without a value leaves a gap."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * min(3, len(names)), 2.6 * math.ceil(len(names) / 3)), layout="constrained")
    panels = figure.subplots(math.ceil(len(names) / 3), min(3, len(names)), squeeze=False).flatten()
    for name, axes in zip(names, panels, strict=False):
        values = [_number(metrics.get(name)) for metrics in series]
        axes.plot(numbers, values, marker="." if len(numbers) < 30 else "", linewidth=1.5)
        metric = declared(name)
        axes.set_title(f"{name}, {metric.unit}" if metric and metric.unit != name else name, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    return figure


def png_of(figure: "Figure") -> bytes:
    """The picture's bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90)
    return out.getvalue()


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
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan

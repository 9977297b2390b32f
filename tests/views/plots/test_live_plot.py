"""Steps drawn as they come."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from shoal.errors import ConfigError, how_to_install
from shoal.views.plots import live_plot as module
from shoal.views.plots.live_plot import line_of, live, picture_of
from shoal.views.plots.render import draw

NAMES = ("reward_all_mean", "entropy_nats")
STEPS = [SimpleNamespace(number=n, metrics={"reward_all_mean": n / 4, "entropy_nats": None}) for n in (1, 2, 3)]


def test_outside_a_notebook_each_step_is_a_line_and_is_given_on(monkeypatch):
    monkeypatch.setattr(module, "_notebook", lambda say: None)
    said: list[str] = []
    assert list(live(STEPS, NAMES, say=said.append)) == STEPS
    assert said[0] == "step 1  reward_all_mean 0.25  entropy_nats –" and len(said) == 3


def test_in_a_notebook_pictures_come_now_and_then_and_always_at_the_end(monkeypatch):
    shown: list[bytes] = []
    monkeypatch.setattr(module, "_notebook", lambda say: shown.append)
    assert len(list(live(STEPS, NAMES, clock=lambda: 0.0))) == 3
    assert len(shown) == 2 and all(png.startswith(b"\x89PNG") for png in shown)


def test_without_matplotlib_a_notebook_gets_lines_and_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said: list[str] = []
    assert list(live(STEPS[:1], NAMES, say=said.append)) == STEPS[:1]
    assert how_to_install("notebook") in said[0] and said[1].startswith("step 1")


def test_a_panel_names_its_metric_with_its_unit_and_a_missing_value_leaves_a_gap():
    picture = picture_of([1, 2], [{"entropy_nats": 1.0}, {"entropy_nats": None}], ["entropy_nats", "mine"])
    assert [(panel.metric, panel.unit) for panel in picture.panels] == [("entropy_nats", "nats"), ("mine", "")]
    first, second = picture.panels[0].curves[0].points
    assert first.y == 1.0 and second.y != second.y
    assert draw(picture, "png").startswith(b"\x89PNG") and line_of(STEPS[0], []) == "step 1"


def test_too_many_metrics_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="names has 7 metrics: give 1 to 6"):
        live(iter(STEPS), ["a"] * 7)

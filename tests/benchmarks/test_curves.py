"""The half of the benchmark of the shelf that trains: runs repeat, a grid goes on, and what is measured is right."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks import shelf
from benchmarks.claims.curves import findings, grid, part
from benchmarks.claims.curves.beside import Beside
from benchmarks.claims.curves.harness import Curve, config_of, steps_made_by, trained
from benchmarks.claims.curves.kept import Kept, Run, make_here
from benchmarks.claims.curves.picture import Line, picture
from benchmarks.claims.curves.ranks import spearman
from shoal.config import TinyPolicy
from shoal.models.random_model import make_tiny
from shoal.tree import merge

VOWELS = {
    "name": "vowels", "steps": 4, "seed": 3,
    "envs": [{"name": "benchmarks/envs/vowels.py", "args": {"shown": 4, "new": 4}}],
    "sampling": {"max_turn_tokens": 4, "max_tokens": 24},
    "rollouts": {"group_size": 4, "block_rollouts": 16, "batch_groups": 4, "max_staleness": 0},
    "train": {"lr": 1e-2, "warmup_steps": 1}, "eval": {"episodes": 16},
}  # fmt: skip


@pytest.fixture
def start(tmp_path):
    make_tiny(
        TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16, max_positions=32), tmp_path, 1, "float32"
    )
    return tmp_path


def curve_of(reward, entropy, last=(), tested=(0.0, 1.0)):
    """A made-up curve."""
    return Curve(
        "", {}, {"reward": reward, "entropy_nats": entropy}, {"clip_share": [0.1]},
        {"version": [*map(float, range(len(tested)))], "reward": list(tested), "entropy_nats": [1.0], "solved": [0.5]},
        list(last), list(last), "", 1.0,
    )  # fmt: skip


@pytest.mark.parametrize("lag", [0, 1, 3, 9])
def test_the_rollouts_of_a_step_are_as_old_as_the_lag(lag):
    made_by = [(step, version) for version in range(8) for step in steps_made_by(version, lag, 8)]
    assert made_by == [(step, max(0, step - lag)) for step in range(8)]


def test_a_run_that_is_repeated_gives_the_same_curve(start):
    lagging = merge(VOWELS, {"rollouts": {"max_staleness": 2}})
    one, other, fresh = (trained(tree, start) for tree in (lagging, lagging, VOWELS))
    assert msgspec.structs.replace(one, cpu_s=other.cpu_s) == other
    assert one.sampled["version"] == [0, 0, 0, 1] and fresh.sampled["version"] == [0, 1, 2, 3]
    assert one.sampled["reward"][0] == fresh.sampled["reward"][0] and one.weights != fresh.weights
    assert one.tested["version"] == [0, 1, 2, 3, 4] and len(one.last) == 16


def test_a_grid_that_was_killed_goes_on_and_runs_nothing_twice(start, tmp_path):
    kept, made = Kept(tmp_path / "kept"), []
    kept.start_of = lambda run: start
    runs = [Run("tiny", {}, VOWELS | {"steps": 1, "seed": seed}) for seed in (1, 2, 3, 1)]

    def killed_at_the_second(run, start, file):
        if len(made) == 1:
            file.with_suffix(".new").write_text("half")
            raise KeyboardInterrupt
        made.append(run.tree["seed"])
        make_here(run, start, file)

    with pytest.raises(KeyboardInterrupt):
        kept.make(runs, print, killed_at_the_second)
    assert [run.tree["seed"] for run in kept.missing(runs)] == [2, 3]

    def going_on(run, start, file):
        made.append(run.tree["seed"])
        make_here(run, start, file)

    kept.make(runs, print, going_on)
    kept.make(runs, print, going_on)
    assert made == [1, 2, 3] and kept.curve(runs[0]).run["seed"] == 1


def test_the_key_of_a_run_is_of_all_that_decides_it():
    run = Run("a", {"steps": 1}, VOWELS)
    others = [
        run._replace(recipe={"steps": 2}),
        run._replace(tree=VOWELS | {"seed": 4}),
        run._replace(beside={"heldout": True}),
    ]
    assert len({one.key for one in (run, *others)}) == 4
    assert run.key == Run("a", {"steps": 1}, dict(reversed(VOWELS.items()))).key


def test_another_way_to_learn_from_continuations_changes_no_other_keys(monkeypatch):
    vine = merge(VOWELS, {"train": {"algorithm": {"name": "ppo", "credit": {"name": "vine"}}}})
    runs = [Run("a", {"steps": 1}, tree) for tree in (VOWELS, vine)]
    plain, continued = (run.key for run in runs)
    monkeypatch.setattr("benchmarks.claims.curves.kept.VINE_FORM", 3)
    assert runs[0].key == plain and runs[1].key != continued


@pytest.mark.parametrize("claim", grid.CLAIMS, ids=lambda claim: claim.name)
def test_the_grid_has_three_learning_rates_for_every_arm_and_other_seeds_for_reporting(claim):
    follow_up = "_at_" in claim.name or not claim.tuning
    assert all(len(set(claim.lrs_of(arm))) == (1 if follow_up else 3) for arm in claim.arms)
    assert len(set(claim.tuning)) == (2 if claim.tuning else 0)
    assert len(set(claim.reporting)) in (3, 5)
    assert not set(claim.tuning) & set(claim.reporting) and 0 not in (*claim.tuning, *claim.reporting)
    assert claim.name in findings.FINDINGS and set(claim.lags.values()) <= set(claim.lags)
    for run in {run.key: run for run in part.tuning_runs(claim)}.values():
        judge = run.tree["train"].get("algorithm", {}).get("advantage")
        config_of(run.tree, Path("start"), {judge: Path("judge")} if judge in ("teacher", "reward_model") else {})
        msgspec.convert(run.beside, Beside)


def test_every_named_algorithm_has_its_place_in_the_figure_of_staleness():
    from shoal.protocol.algorithm_config import NAMED

    assert set(grid.NAMED) == {kind.__struct_config__.tag for kind in NAMED}


def test_learning_rates_are_chosen_by_the_tuning_seeds_alone():
    claim = grid.CLAIMS[0]
    best = {("eps_0.20", 1e-3): 0.9, ("eps_0.28", 3e-3): 0.8}

    class Shelf:
        def curve(self, run):
            assert run.tree["seed"] in claim.tuning
            arm = "eps_0.20" if "eps_0.20" in run.tree["name"] else "eps_0.28"
            reward = best.get((arm, run.tree["train"]["lr"]), 0.5)
            return curve_of([0.0], [0.0], tested=(reward, reward))

    assert part.tune(claim, Shelf()).lrs == {("eps_0.20", 0): 1e-3, ("eps_0.28", 0): 3e-3}


def test_entropies_are_compared_where_rewards_are_equal():
    """One run gains reward and loses entropy twice as fast: by steps they differ, and by reward they do not."""
    fast = curve_of([min(1.0, 0.02 * t) for t in range(64)], [1 - min(1.0, 0.02 * t) for t in range(64)])
    slow = curve_of([0.01 * t for t in range(64)], [1 - 0.01 * t for t in range(64)])
    levels = findings.levels_of(fast, slow)
    assert levels[0] == pytest.approx((0.07 + 0.035) / 2) and levels[-1] == pytest.approx(0.595)
    assert findings.entropies_at(levels, fast) == pytest.approx([1 - level for level in levels], abs=0.021)
    assert findings.entropies_at(levels, slow) == pytest.approx([1 - level for level in levels], abs=0.036)


def test_clip_higher_counts_as_reproduced_only_if_the_seeds_agree():
    claim = grid.CLAIMS[0]
    reward = [0.01 * t for t in range(64)]

    def verdict(gains):
        low = [curve_of(reward, [1 - r for r in reward]) for _ in gains]
        high = [curve_of(reward, [1 + gain - r for r in reward]) for gain in gains]
        return findings.clip_higher(claim, {("eps_0.20", 0): low, ("eps_0.28", 0): high})

    assert verdict([0.1, 0.12, 0.09, 0.1, 0.11]).reproduced
    assert verdict([0.1, 0.12, 0.09, 0.1, 0.11]).figures["mean_difference_nats"] == pytest.approx(0.104)
    assert not verdict([0.1, 0.12, -0.09, -0.1, 0.11]).reproduced
    assert not verdict([-0.1, -0.12, -0.09, -0.1, -0.11]).reproduced


def test_controls_decide_where_tuning_chose_different_learning_rates():
    claim, controls = grid.CLAIMS[0], grid.CLAIMS[1:3]

    def verdict(rule, by_control, chosen):
        figures = {one.name: {"by_rule": by, "lr": {}} for one, by in zip(controls, by_control, strict=True)}
        figures[claim.name] = {"by_rule": rule, "lr": dict(enumerate(chosen))}
        found = part.verdicts(claim, figures)
        return found["by_controls"], found["verdict"]

    yes, no = part.REPRODUCED, part.NOT_REPRODUCED
    assert verdict(yes, (yes, no), (3e-4, 1e-3)) == (no, no) and verdict(yes, (yes, no), (1e-3, 1e-3)) == (no, yes)
    assert verdict(no, (yes, yes), (3e-4, 1e-3)) == (yes, yes)
    assert part.verdicts(controls[0], {controls[0].name: {"by_rule": yes, "lr": {}}}) == {
        "by_controls": "",
        "verdict": yes,
    }


def test_rank_correlation_by_hand():
    assert spearman([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert spearman([4, 4, 8, 8], [1, 2, 3, 4]) == pytest.approx(0.8944, abs=1e-4)
    assert spearman([1, 2, 3], [7, 7, 7]) == 0.0


def test_lengths_count_as_reproduced_only_if_the_worst_seed_follows_what_is_asked():
    claim = next(claim for claim in grid.CLAIMS if claim.name == "lengths")
    follows = [(asked, asked + one, 1.0) for asked in (4, 8, 12, 16) for one in (-1, 0, 1)]
    ignores = [(asked, length, 1.0) for asked in (4, 8, 12, 16) for length in (2, 9, 20)]

    def verdict(*lasts):
        curves = [curve_of([0.0], [0.0], last) for last in lasts]
        return findings.lengths(claim, {("penalty", 0): curves, ("no_penalty", 0): curves})

    assert verdict(follows, follows).reproduced and not verdict(follows, ignores).reproduced
    assert verdict(follows).figures["penalty"]["length_asked_12"] == [12.0]


def test_credit_for_turns_counts_as_better_only_if_the_seeds_agree():
    claim = next(claim for claim in grid.CLAIMS if claim.name == "turns")

    def verdict(gains):
        arms = {"whole_rollout": [0.5] * 5, "turns": [0.5 + gain for gain in gains]}
        return findings.turns(
            claim, {(name, 0): [curve_of([0.0], [0.0], tested=(r, r)) for r in found] for name, found in arms.items()}
        )

    found = verdict([0.1, 0.12, 0.09, 0.1, 0.11])
    assert found.reproduced and found.figures["turns"]["mean_gain"] == pytest.approx(0.104)
    assert not verdict([0.1, 0.5, -0.1, -0.1, 0.1]).reproduced and not verdict([0.0] * 5).reproduced


def test_a_picture_is_small_and_whole():
    lines = [Line(f"a < {n}", [(x, n * x) for x in range(6)], n, [(x, n) for x in range(18)]) for n in range(13)]
    drawn = picture("All & more", "steps", "reward", lines)
    root = ElementTree.fromstring(drawn)
    assert len(drawn) < 30_000 and root.tag.endswith("svg")
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"All & more", "steps", "reward", "a < 12", "4"} <= set(texts)
    places = [float(at) for at in re.findall(r'cx="([\d.]+)"', drawn)]
    assert min(places) > 64 and max(places) < 570


@pytest.mark.slow
def test_a_quick_run_of_all_claims_ends_with_a_line_of_json(monkeypatch, capsys, tmp_path):
    def run():
        monkeypatch.setattr(
            sys, "argv", ["shelf.py", "--only", "runs", "--quick", "--keep", str(tmp_path), "--pictures", str(tmp_path)]
        )
        assert shelf.main() == 0
        return capsys.readouterr().out.splitlines()

    first, again = run(), run()
    told = json.loads(first[-1])
    assert told["runs"]["missed"] == [] and {claim.name for claim in grid.CLAIMS} <= told["runs"].keys()
    assert all(one.name in told["tables"]["verdicts"] for one in grid.CLAIMS)
    assert all(told["runs"][claim.name]["runs"] for claim in grid.CLAIMS)
    assert json.loads(again[-1]) == told and len(again) < len(first), "nothing is run twice"
    assert len(list(tmp_path.glob("*.svg"))) == len(grid.CLAIMS)

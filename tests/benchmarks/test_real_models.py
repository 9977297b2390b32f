"""What `benchmarks/real_models.py` compares is the same work, and each of its parts runs and counts what it says."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import real_models
from benchmarks.pages.real_models import tables
from benchmarks.real import architectures, decoding, flips, training
from benchmarks.real.field import TARGET_TOLERANCE, Subject, make_subject, rules
from benchmarks.real.kept import Kept
from benchmarks.real.refusals import CASES, refusals
from benchmarks.real.rows import LOWEST, Batch
from benchmarks.real.shapes import ENTROPY, SHAPES, make_shape
from shoal.algos.regularisers import logprob_and_entropy
from shoal.models.checkpoint import load_policy
from shoal.models.open_model import sized_spec_of
from shoal.models.parameter_counts import parameters_of
from shoal.models.random_model import LEAST_VOCABULARY
from tests.engine.architectures import ARCHITECTURES, MIXTURES

BATCH = Batch(1, 4, 16, 8, 16, 64)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shape("tiny", tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    torch.set_num_threads(1)
    return make_subject("olmoe", 1.0, tmp_path_factory.mktemp("subject") / "olmoe", train_groups=4)


def test_shapes_have_the_sizes_of_their_names(tmp_path: Path) -> None:
    sizes = {}
    for name, config in SHAPES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        sizes[name] = parameters_of(sized_spec_of(tmp_path / name))
    assert sizes["25m"] == pytest.approx(25e6, rel=0.03) and sizes["100m"] == pytest.approx(100e6, rel=0.03)
    assert sizes["0.6b"] == 596_049_920


def test_the_tokens_of_a_shape_have_about_the_asked_entropy(tiny: Path) -> None:
    model = load_policy(tiny, torch.float32)
    tokens_BT = torch.randint(1024, (8, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits_NV = model.logits(model.hidden(tokens_BT).flatten(0, 1))
    assert float(logprob_and_entropy(logits_NV, logits_NV.argmax(-1))[1].mean()) == pytest.approx(ENTROPY, abs=0.3)


def test_at_least_ten_architectures_are_measured_with_all_kinds_of_experts() -> None:
    assert len(architectures.NAMES) >= 10 and {*MIXTURES} <= {*architectures.NAMES} <= {*ARCHITECTURES}
    assert len(architectures.CHEATS) == 6


def test_a_subject_has_the_asked_entropy_and_learned(subject: Subject) -> None:
    assert subject.entropy == pytest.approx(1.0, abs=TARGET_TOLERANCE)
    assert subject.moved > 0 and len(subject.versions) == 4


def test_honest_work_passes_cheats_do_not_and_transformers_agrees(subject: Subject) -> None:
    honest = architectures.honest(subject, groups=8)
    assert honest["float32/float32"]["refused"] == honest["bfloat16/float32"]["refused"] == 0
    assert honest["bfloat16/float32"]["flips"] > 0
    cheats = architectures.cheats(subject, 8, rules("float32"))
    assert all(row["differ"] and row["refused"] >= 0.9 * row["differ"] for row in cheats.values())
    assert architectures.logits_off(subject) < 1e-4 and architectures.opens_again(subject)


def test_the_summary_counts_what_is_judged_and_leaves_out_bounds_that_do_not_hold() -> None:
    row = {"groups": 10, "refused": 0}
    cheat = {"sent": 8, "differ": 4, "refused": 3, "submissions": 2, "submissions_refused": 2,
             "groups_until_excessive": 5}  # fmt: skip
    built_in = {"bfloat16/float32, built-in bounds": row | {"refused": 5}}
    one = {"architecture": "olmoe", "honest": {"float32/float32": row} | built_in,
           "cheats_bfloat16": dict.fromkeys(architectures.CHEATS, cheat),
           "cheats": {"own seeds": cheat}, "logits_off": 1e-6, "opened": True, "moved": 0.1}  # fmt: skip
    other = {key: value for key, value in one.items() if key != "cheats_bfloat16"}
    found = architectures.summary([one, other | {"architecture": "llama", "logits_off": 2e-6}])
    assert (found["architectures"], found["honest_groups"], found["honest_refused"]) == (2, 20, 0)
    assert found["least_honest_groups"] == 10
    assert found["honest_refused_by_built_in_bounds_of_experts"] == 10
    assert (found["cheat_rollouts"]["k"], found["cheat_rollouts"]["n"], found["logits_off"]) == (6, 8, 2e-6)
    assert (found["cheat_bfloat16_rollouts"]["k"], found["cheat_bfloat16_rollouts"]["n"]) == (18, 24)
    pairs = dict.fromkeys(("float32/float32", "bfloat16/float32", "bfloat16/bfloat16"), row | {"flips": 0.01})
    shown = tables({"architectures": [each | {"entropy": 1.0, "honest": pairs} for each in (one, other)]})
    assert "| own seeds | 4 | 3 | 2 of 2 | 1 of 1 | 5 |" in shown["bfloat16"]
    assert (
        "| olmoe | 1.00 | 0 of 10 | 0 of 10 | 0 of 10 | 1.00 % | 3 of 4 | 18 of 24 | 1e-06 |" in shown["architectures"]
    )
    assert found["bfloat16"]["own seeds"]["refused"] == 3
    assert (found["bfloat16"]["own seeds"]["policies_noticed"], found["bfloat16"]["own seeds"]["policies"]) == (1, 1)


def test_every_missed_bar_of_the_architectures_is_named() -> None:
    met = {"cheat_rollouts": {"k": 96, "n": 100}, "cheat_submissions": {"k": 100, "n": 100}, "honest_refused": 0,
           "least_honest_groups": 768, "logits_off": 1e-6, "opened": True, "learned": True}  # fmt: skip
    assert architectures.faults(met, real_models.BARS) == []
    misses = {"cheat_rollouts": {"k": 94, "n": 100}, "cheat_submissions": {"k": 99, "n": 100}, "honest_refused": 1,
              "least_honest_groups": 400, "logits_off": 2e-4, "opened": False}  # fmt: skip
    for key, value in misses.items():
        assert len(architectures.faults(met | {key: value}, real_models.BARS)) == 1, key


def test_a_piece_that_was_measured_is_not_measured_again_unless_other_things_are_asked(tmp_path: Path) -> None:
    made = []

    def make() -> dict[str, int]:
        made.append(len(made))
        return {"found": len(made)}

    assert [Kept(tmp_path).result("a part, 1.0", {"of": (1, 2)}, make) for _ in range(2)] == [{"found": 1}] * 2
    assert Kept(tmp_path).result("a part, 1.0", {"of": (1, 3)}, make) == {"found": 2}
    assert Kept().result("a part, 1.0", {"of": (1, 3)}, make) == {"found": 3}


def test_losses_of_both_sides_that_differ_are_a_fault() -> None:
    ours, theirs = {"losses": [0.0, -0.0201, -0.04]}, {"losses": [0.0, -0.02, -0.04]}
    apart = training.losses_apart(ours, theirs)
    assert apart == pytest.approx(0.0025)
    found = {"losses_apart": apart, "ratio_tokens_per_cpu_s": 1.1, "ratio_memory_above": 0.3,
             "microbatches_are_equal": True}  # fmt: skip
    assert training.faults(found, real_models.BARS) == []
    misses = {"losses_apart": 0.02, "ratio_tokens_per_cpu_s": 0.9, "ratio_memory_above": 0.5}
    for key, value in misses.items():
        assert len(training.faults(found | {key: value}, real_models.BARS)) == 1, key
    assert len(training.faults(found | misses, real_models.BARS)) == 3
    assert training.faults(found | {"ratio_memory_above": 0.5, "microbatches_are_equal": False}, real_models.BARS) == []


def test_routers_flip_in_bfloat16_and_hardly_in_other_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flips, "MIXTURES", ("olmoe",))
    (found,) = flips.measure(tmp_path, 16, 4, (1.0,), Kept())
    assert found["bfloat16"]["flipped"] > found["float32, threes"]["flipped"]
    assert found["bfloat16"]["off_flipped"] > found["bfloat16"]["off_others"] > 0


def test_each_refusal_is_one_line(tmp_path: Path) -> None:
    rows = list(refusals(tmp_path))
    assert len(rows) == len(CASES) and all(row["line"] and "\n" not in row["line"] for row in rows), rows


def test_both_sides_of_decoding_write_the_same_number_of_tokens(tiny: Path) -> None:
    rows = list(decoding.measure(tiny, "tiny", (16,), decoding.Load(16, 4, 1), Kept()))
    assert [row["load"] for row in rows] == ["grouped", "distinct"] and all(row["ratio"] > 0 for row in rows)


def test_both_sides_of_training_get_the_same_rows() -> None:
    drawn = BATCH.token_ids(1024)
    assert len(drawn) == BATCH.rows == 4 and sum(len(p) + len(c) for p, c in drawn) == BATCH.tokens
    assert LOWEST == LEAST_VOCABULARY and min(min(p + c) for p, c in drawn) >= LOWEST
    assert len({tuple(p) for p, _ in drawn}) == BATCH.groups and np.mean(BATCH.advantages()) == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_our_side_of_training_reports_its_steps(tiny: Path, recompute: bool) -> None:
    found = training.run_side(Path(sys.executable), "real/one_side.py", tiny, BATCH, recompute, 3)
    assert found["tokens_per_cpu_s"] > 0 and found["above_mb"] > 0 and np.isfinite(found["losses"]).all()


def test_a_long_row_trains(tiny: Path) -> None:
    assert training.long_row(tiny, "tiny", 512, Kept())["cpu_s"] > 0


def test_the_command_runs_chosen_parts_and_ends_with_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real_models.py", "--quick", "--only", "refusals,decode"])
    real_models.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["benchmark"] == "real_models" and found["refusals"]["cases"] == len(CASES)
    assert found["decode"]["least_grouped"] > 0 and "a mixture of experts in bfloat16" in found["tables"]["refusals"]

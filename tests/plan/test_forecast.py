"""From a run file to a forecast, and what `shoal plan` and `shoal host` say of it."""

import dataclasses
from pathlib import Path

import pytest

from shoal import cli
from shoal.config import load_run
from shoal.plan.forecast import Machines, forecast
from shoal.plan.report import amount, count, duration, report, summary
from shoal.plan.simulate import simulate
from shoal.plan.sizes import sizes_of
from shoal.roles.coordinator.role import rules_of

RECIPES = Path(__file__).parent.parent.parent / "recipes"
GIVEN = Machines(
    4, tokens_per_s=400.0, rollout_tokens=5.0, step_s=2.0, check_s=0.1, downlink=8.0, uplink=100.0, patch_share=0.0
)


def of(machines=GIVEN, recipe="arithmetic.toml", *overrides):
    config = load_run(RECIPES / recipe, list(overrides))
    return forecast(config, rules_of(config), RECIPES, machines)


def test_a_version_has_the_bytes_of_its_file():
    config = load_run(RECIPES / "arithmetic.toml")
    file = RECIPES / "arithmetic-start" / "model.safetensors"  # in bfloat16; the run publishes float32
    assert sizes_of(config, RECIPES).version == pytest.approx(2 * file.stat().st_size, rel=0.02)


def test_another_model_is_planned_by_its_parameters():
    config = load_run(RECIPES / "arithmetic.toml", ['policy.dtype="bfloat16"'])
    found = sizes_of(config, RECIPES, 7e9)
    assert found.version == 14e9 and found.trainer_memory == 112e9 and found.worker_disk == 42e9 and not found.is_exact


def test_what_is_not_given_is_assumed_and_named():
    assert of().assumed == ()
    guessed = of(Machines(4))
    assert [line.rsplit("(")[-1] for line in guessed.assumed] == [
        "--tokens-per-s)", "--rollout-tokens)", "--step-s)", "--check-s)",
    ]  # fmt: skip
    assert "1/150 of a version" in of(Machines(4), "arithmetic.toml", 'policy.dtype="bfloat16"').assumed[-1]


def test_the_rule_and_the_simulation_agree_on_how_many_workers_are_enough():
    """The rule is a lower bound. With fewer workers a simulated trainer waits, and with a few more it does not."""
    found = of(dataclasses.replace(GIVEN, check_s=0.01), "arithmetic.toml", "rollouts.block_rollouts=16")
    assert found.needed is not None and found.needed >= 2
    assert found.enough is not None and found.needed <= found.enough <= 3 * found.needed
    fewer = dataclasses.replace(found.setting, workers=found.setting.workers[:1] * (found.needed - 1))
    assert simulate(fewer).idle_share > 0.1


def test_a_report_has_a_line_for_each_thing_and_no_line_break_in_one():
    text = report(of(), GIVEN)
    for word in ("version ", "memory ", "disk ", "broadcast ", "bytes ", "step ", "staleness ", "needed "):
        assert text.count(f"\n{word}") + text.startswith(word) == 1, word
    assert "keep the trainer busy (ECHO-2's rule)" in text
    assert len(summary(of(), GIVEN).splitlines()) == 2


def test_more_workers_than_blocks_are_told():
    assert "note       at most 2 workers have work at once" in report(of(), GIVEN)
    small = of(GIVEN, "arithmetic.toml", "rollouts.block_rollouts=16")
    assert "at once:" not in report(small, GIVEN)
    assert "1 validator needs 1.6 s for the groups of a batch, and the trainer 2 s" in report(small, GIVEN)


def test_other_workers_are_planned_beside_them():
    found = of(Machines(2, also=((3, 5.0, 200.0),)))
    assert [node.tokens_per_s for node in found.setting.workers] == [5000.0] * 2 + [200.0] * 3


def test_the_command_prints_it_and_refuses_what_is_no_number(capsys):
    recipe = str(RECIPES / "arithmetic.toml")
    assert cli.main(["plan", recipe, "--workers", "3", "--also", "2:10:200", "--relays", "2"]) == 0
    assert "until the last of 5 workers" in capsys.readouterr().out
    for wrong in (["--uplink", "-1"], ["--downlink", "nan"], ["--also", "3:4"], ["--signal-share", "0"]):
        with pytest.raises(SystemExit):
            cli.main(["plan", recipe, "--workers", "3", *wrong])
        assert "is not" in capsys.readouterr().err


def test_figures_for_a_person():
    assert [amount(x) for x in (12, 1500, 14e9, 2.1e12)] == ["12 bytes", "1.5 kB", "14 GB", "2.1 TB"]
    assert [duration(x) for x in (0.5, 99, 130, 9000)] == ["0.5 s", "99 s", "2 min", "2.5 h"]
    assert [count(x) for x in (7e9, 796_032, 123)] == ["7B", "796,032", "123"]


def test_a_link_without_limit_takes_no_time():
    assert of(Machines(2, downlink=0.0, uplink=0.0, step_s=2.0)).fetch_s < 0.01

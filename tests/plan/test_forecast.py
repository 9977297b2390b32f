"""From a run file to a forecast, and what `shoal plan` and `shoal host` say of it."""

import dataclasses
import functools
from pathlib import Path

import msgspec
import pytest

from shoal.cli import main
from shoal.config import load_run
from shoal.errors import ConfigError
from shoal.plan.forecast import forecast, forecast_by_rule, rates_of, report, summary
from shoal.plan.machines import Machines
from shoal.plan.simulate import simulate
from shoal.plan.sizes import sizes_of, spec_of
from shoal.protocol.algorithm_config import Composition, Vine
from shoal.roles.coordinator.main import rules_of

RECIPES = Path(__file__).parent.parent.parent / "recipes"
GIVEN = Machines(
    4, tokens_per_s=400.0, rollout_tokens=5.0, train_s=2.0, check_s=0.1, downlink=8.0, uplink=100.0, patch_share=0.0
)


@functools.cache
def of(machines=GIVEN, recipe="arithmetic.toml", *overrides):
    config = load_run(RECIPES / recipe, list(overrides))
    return forecast(config, rules_of(config), RECIPES, machines)


def by_rule(machines, *overrides, recipe="arithmetic.toml"):
    config = load_run(RECIPES / recipe, list(overrides))
    return forecast_by_rule(config, rules_of(config), RECIPES, machines)


def test_a_version_has_the_bytes_of_its_file():
    config = load_run(RECIPES / "arithmetic.toml")
    file = RECIPES / "arithmetic-start" / "model.safetensors"  # in bfloat16; the run publishes float32
    assert sizes_of(config, RECIPES).version == pytest.approx(2 * file.stat().st_size, rel=0.02)


def test_another_model_is_planned_by_its_parameters():
    config = load_run(RECIPES / "arithmetic.toml", ['policy.dtype="bfloat16"'])
    found = sizes_of(config, RECIPES, 7e9)
    assert found.version == 14e9 and found.trainer_memory == 126e9 and found.worker_disk == 42e9 and not found.is_exact


def test_an_adapter_is_in_the_memory_of_workers_and_validators():
    plain, adapted = (
        sizes_of(load_run(RECIPES / "arithmetic.toml", changes), RECIPES) for changes in ([], ["policy.adapter.rank=8"])
    )
    weights = 16 * spec_of(load_run(RECIPES / "arithmetic.toml"), RECIPES).adapter_parameters(8)
    assert adapted.worker_memory >= plain.worker_memory + weights
    assert adapted.validator_memory >= plain.validator_memory + weights


def test_continuations_count_as_the_rollouts_that_have_their_tokens():
    plain = of().setting
    vine = Composition(credit=Vine(continuations=2, most=2))  # four halves of a rollout for each
    vines = dataclasses.replace(plain, rules=msgspec.structs.replace(plain.rules, algorithm=vine))
    rollouts, rate = rates_of(plain)
    assert rates_of(vines) == (pytest.approx(rollouts * (1 + 2 * plain.signal_share)), rate)


def test_what_is_not_given_is_assumed_and_named():
    assert of().assumed == ()
    guessed = of(Machines(4))
    assert [line.rsplit("(")[-1] for line in guessed.assumed] == [
        "--tokens-per-s)", "--rollout-tokens)", "--train-s)", "--check-s)",
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
    assert "keep the trainer busy in the simulation; at least" in text and "by ECHO-2's rule" in text


def test_a_summary_says_in_plain_words_how_many_workers_a_run_needs():
    short = summary(dataclasses.replace(of(), enough=None, tried=0), GIVEN)
    assert len(short.splitlines()) == 2 and "workers keep the trainer from waiting, at assumed speeds" in short
    found = by_rule(one := Machines(1), recipe="wordle.toml")
    assert found.needed is None
    plain = summary(found, one).splitlines()[1]
    assert plain == (
        "The trainer will at times wait for rollouts: a worker is assumed to need 513ms to fetch a version, and a step "
        "1s. The run works all the same. `shoal plan` reckons with your own speeds and links."
    )
    assert "however many there are" in summary(of(GIVEN, "arithmetic.toml", "rollouts.max_staleness=0"), GIVEN)


def test_more_workers_than_blocks_are_told():
    assert "note       at most 2 workers have work at once" in report(of(), GIVEN)
    small = of(GIVEN, "arithmetic.toml", "rollouts.block_rollouts=16")
    assert "at once:" not in report(small, GIVEN)
    assert "1 validator needs 1.6s for the groups of a batch, and the trainer 2s" in report(small, GIVEN)


def test_other_workers_are_planned_beside_them():
    found = of(Machines(2, also=((3, 5.0, 200.0),)))
    assert [machine.tokens_per_s for machine in found.setting.workers] == [5000.0] * 2 + [200.0] * 3


def test_the_command_prints_it_and_refuses_what_is_no_number(capsys):
    recipe = str(RECIPES / "arithmetic.toml")
    assert main.main(["plan", recipe, "--workers", "3", "--also", "2:10:200", "--relays", "2"]) == 0
    assert "until all workers have a version" in capsys.readouterr().out
    for workers, said in (("3", "assumed    workers: 3 (--workers)"), ("0", "assumed    workers: 1")):
        assert main.main(["plan", recipe, "--set", f"workers.count={workers}"]) == 0
        assert said in capsys.readouterr().out
    for wrong in (
        ["--uplink", "-1"], ["--downlink", "nan"], ["--also", "3:4"], ["--signal-share", "0"], ["--relays", "-3"],
        ["--relays", "1e9"], ["--patch-share", "1.5"], ["--workers", "0"], ["--train-s", "1e9"], ["--parameters", "1e15"],
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main.main(["plan", recipe, "--workers", "3", *wrong])
        message = capsys.readouterr().err
        assert "is not" in message and message.count("\n") == 1


def test_a_link_without_limit_takes_no_time():
    assert of(Machines(2, downlink=0.0, uplink=0.0, train_s=2.0)).fetch_s < 0.01


def test_what_cannot_be_planned_is_refused_with_the_remedy():
    for machines, remedy in (
        (Machines(1, also=((1_000_000_000, 1.0, 1.0),)), "too many to simulate, limit 400: plan for fewer"),
        (Machines(1, rollout_tokens=1500.0), "a rollout has at most 24 tokens. Set sampling.max_tokens, too"),
        (Machines(1, patch_share=0.1), "versions in float32 change whole"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            of(machines)
    with pytest.raises(ConfigError, match=r"directory\. To plan without the model: --parameters"):
        of(Machines(1), "qwen3-0.6b-gsm8k.toml", 'policy.path="nowhere"')


def test_a_synchronous_run_waits_with_any_number_of_workers():
    found = of(GIVEN, "arithmetic.toml", "rollouts.max_staleness=0", "verify.audit_rate=1.0")
    assert found.needed is None and found.enough is None
    assert "the trainer waits while workers play, however many there are" in report(found, GIVEN)


def test_what_stops_a_run_is_told():
    slow = dataclasses.replace(GIVEN, tokens_per_s=1.0)
    assert "plays 21m20s for a block, and rollouts.lease_s gives it 2m00s" in report(by_rule(slow), slow)
    few = of(GIVEN, "arithmetic.toml", "verify.worker_share=0.1")
    assert few.outcome is None and "a batch needs 16 workers: one may fill 10% of it" in report(few, GIVEN)
    large = dataclasses.replace(GIVEN, parameters=7e9, patch_share=-1.0)
    found = by_rule(large, 'policy.dtype="bfloat16"')
    assert found.sizes.needed_blobs == pytest.approx(3 * 14e9, rel=0.01)
    assert "storage.quota_mb is 2048: above it, no worker gets work. Set it to 42" in report(found, large)
    assert "storage.quota_mb is 2048" in summary(found, large)
    roomy = by_rule(large, 'policy.dtype="bfloat16"', "storage.quota_mb=60000")
    assert "quota_mb" not in report(roomy, large)


def test_relays_are_filled_from_the_host_before_they_serve():
    """Two copies at 100 Mb/s take the host longer than the relays take for four workers."""
    relayed = dataclasses.replace(GIVEN, downlink=0.0, relays=2, relay_uplink=1000.0)
    found = by_rule(relayed)
    assert found.fetch_s == pytest.approx(2 * found.sizes.version / 12.5e6, rel=0.1)

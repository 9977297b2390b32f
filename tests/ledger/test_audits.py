"""The audit policy's rules: rates, influence, draws, turns, and what verdicts add up to."""

from itertools import product

import msgspec
import pytest

from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused
from shoal.ledger.verdict_majority import tally_verdicts
from shoal.protocol.algorithm_config import Cispo, Composition, Grpo, Vine
from shoal.protocol.audit_and_pay import REPLAY, influence, must_audit
from shoal.protocol.messages import GroupVerdict
from tests.ledger.ledger_fixture import started


def verdict(*outcomes, rewards=(0.0, 1.0)):
    """A verdict with one outcome for each slot; a block has two slots."""
    return tuple(
        GroupVerdict(slot, True, outcome, rewards=rewards if outcome == "accept" else (), tokens=5)
        for slot, outcome in enumerate(outcomes)
    )


def weighed(*verdicts, blocks=(0,), more=False):
    return tally_verdicts(dict(zip("abc", verdicts, strict=False)), blocks, 2, more)


GOOD, SOFT, HARD = verdict("accept", "accept"), verdict("accept", "soft"), verdict("hard", "accept")
STOPPED = (GOOD[0], GroupVerdict(1, False, "void", REPLAY))


def test_all_is_audited_until_ten_valid_blocks_then_the_rate_falls_to_that_of_the_run():
    assert [LAW.audit_rate(n, 0.05) for n in (0, 9, 10, 20, 60, 100, 10**6)] == [1, 1, 0.3, 0.15, 0.05, 0.05, 0.05]
    assert LAW.audit_rate(10**6, 1.0) == 1.0


def of(rewards, tokens=100, algorithm=Grpo()):
    return influence(rewards, tokens, algorithm)


@pytest.mark.parametrize(
    "algorithm", [Composition(advantage="gae"), Composition(advantage="teacher"), Composition(advantage="reward_model")]
)
def test_where_the_trainers_models_say_what_rollouts_are_worth_length_alone_counts(algorithm):
    assert [of(rewards, algorithm=algorithm) for rewards in ((1.0, 1.0), (0.0, 0.0), (0.0, 1.0))] == [100.0] * 3
    assert of((1.0, 1.0), 300, algorithm) == 300.0 and of((), 0, algorithm) == 0.0


def test_influence_bounds_what_the_algorithm_makes_of_the_rewards():
    """However near to each other rewards are: what an algorithm multiplies them by counts, too."""
    assert of((1.0, 1.0, 1.0), 900) == 0.0 and of((0.0, 1.0), 200) == 2 * of((0.0, 1.0), 100) == 100.0
    vine, whitened = Composition(credit=Vine()), Composition(loss=Cispo(), advantage="mean_std")
    assert of((1.0, 1.001), algorithm=vine) == 100.0, "continuations may be worth anything"
    assert of((1.0, 1.001), algorithm=whitened) == 100.0
    assert of((1.0, 1.0), algorithm=whitened) == 0.0
    assert of((1.0, 1.0), algorithm=Composition(advantage="reward")) == 100.0
    assert of((0.0, 0.0), algorithm=Composition(advantage="reward")) == 0.0
    seldom, often = (0.0, 0.0, 0.0, 1.0), (0.0, 1.0, 1.0, 1.0)
    assert of(seldom, algorithm=Composition(advantage="maxrl")) == 3 * of(
        often, algorithm=Composition(advantage="maxrl")
    )
    assert of((0.0, 0.0), algorithm=Composition(advantage="maxrl")) == 0.0
    assert of(seldom, algorithm=Composition(advantage="rloo")) == of(often, algorithm=Composition(advantage="rloo"))


TRUSTING = msgspec.structs.replace(LAW, probation_blocks=1, trust=1e-9, refused_blocks=1)
"""A law under which a worker is audited at the run's own rate from its second block on."""
LONG, SHORT = "a" * 64, "b" * 64
FLAT = (1.0,) * 4


def of_two_lengths(tmp_path, **how):
    """A run with a critic in which all rewards are equal: one worker's groups have usual lengths, the other's are long."""
    world = started(tmp_path, (LONG, SHORT), law=TRUSTING, audit_rate=0.05, max_staleness=2, batch_groups=16, **how)
    for _ in range(2):
        world.serve(SHORT, rewards=FLAT, tokens=10)
        world.serve(LONG, rewards=FLAT, tokens=100)
    return world


CRITIC = Composition(advantage="gae")


def test_a_critic_learns_from_flat_groups_so_long_ones_are_audited_more_and_usual_ones_no_more(tmp_path):
    """A worker whose groups are all long: none pays more than its others, and their equal rewards differ from no mean."""
    world = of_two_lengths(tmp_path, algorithm=CRITIC)
    mean = (10 + 100) / 2
    name = world.submit(LONG, world.lease(LONG), draw=0.05 * 100 / mean - 0.001)
    assert world.state.submissions[name].mean_influence == mean
    with pytest.raises(Refused, match="was drawn for audit but not audited"):
        world.judge(name, rewards=FLAT, tokens=100, audited=False)
    world.judge(name, rewards=FLAT, tokens=100, audited=True)
    usual = world.submit(SHORT, world.lease(SHORT), draw=0.051)
    world.judge(usual, rewards=FLAT, tokens=10, audited=False)
    assert [line for line in world.audit().findings if not line.startswith("the law differs")] == []


def test_influence_raises_the_rate_and_never_lowers_it():
    assert must_audit(0.04, 0.05, 0.0, 10.0)
    assert not must_audit(0.06, 0.05, 10.0, 10.0)
    assert must_audit(0.06, 0.05, 20.0, 10.0)
    assert must_audit(0.06, 0.05, 1.0, 0.0) is False
    assert must_audit(0.04, 0.05, 0.0, 10.0, 1.0, 10.0), "the larger of both decides, and neither lowers"


def test_pay_for_length_raises_the_rate_of_a_flat_group():
    assert not must_audit(0.39, 0.05, 0.0, 10.0, 70.0, 10.0)
    assert must_audit(0.39, 0.05, 0.0, 10.0, 80.0, 10.0), "8 times the usual pay: 40 %"
    assert must_audit(0.99, 0.05, 0.0, 10.0, 200.0, 10.0), "20 times the usual pay: always"


def test_one_verdict_accepts_and_a_refusal_waits_for_a_second():
    assert weighed(GOOD, more=True).accepted == {0: GOOD}
    assert weighed(SOFT, more=True) is None and weighed(HARD, more=True) is None
    alone = weighed(HARD)
    assert alone.refused == (0,) and not alone.slash and alone.disputed == ()


@pytest.mark.parametrize(
    ("second", "refused", "slash"), [(HARD, (0,), True), (SOFT, (0,), False), (verdict("soft", "hard"), (0,), True)]
)
def test_a_slash_needs_two_validators_that_found_a_forgery(second, refused, slash):
    end = weighed(HARD, second, more=True)
    assert (end.refused, end.slash, end.outvoted) == (refused, slash, ())


def test_a_third_verdict_decides_between_two_that_differ_and_the_outvoted_one_is_named():
    assert weighed(HARD, GOOD, more=True) is None
    for third, accepted, outvoted, slash in ((GOOD, {0: GOOD}, ("a",), False), (HARD, {}, ("b",), True)):
        end = weighed(HARD, GOOD, third)
        assert (end.accepted, end.outvoted, end.slash) == (accepted, outvoted, slash)


def test_a_replay_that_was_stopped_contradicts_nobody_and_nobody_contradicts_it():
    assert weighed(STOPPED, more=True) is None and weighed(STOPPED, GOOD, more=True) is None, "it decides nothing"
    assert weighed(STOPPED, GOOD, GOOD) == ({0: GOOD}, (), (), False, ())
    assert weighed(GOOD, STOPPED, STOPPED).outvoted == ()
    refusing = (HARD[0], STOPPED[1])
    assert weighed(refusing, GOOD, GOOD).outvoted == ("a",), "who refuses the block has judged it"
    assert weighed(STOPPED, HARD, HARD).outvoted == ("a",), "it accepts the group that they refuse"
    late = (GroupVerdict(0, False, "void", REPLAY), GOOD[1])
    assert weighed(late, HARD, HARD) == ({}, (0,), (), True, ())
    false = (verdict("accept", "accept", rewards=(1.0, 0.0))[0], STOPPED[1])
    assert weighed(false, GOOD, GOOD).outvoted == ("a",), "what it did replay is its word"
    void = (GOOD[0], GroupVerdict(1, False, "void", "environment"))
    assert weighed(void, STOPPED, GOOD).outvoted == (), "a stopped replay agrees with nobody"
    refused = (HARD[0], STOPPED[1])
    assert weighed(refused, refused, GOOD).outvoted == ("c",)


def test_no_honest_validator_is_outvoted_and_no_liar_goes_free_of_two():
    """Each block of two groups, two honest validators whose machines stop any of the replays, and any third verdict."""
    kinds = [
        [*verdict(*2 * ("accept",))], [*verdict(*2 * ("accept",), rewards=(1.0, 0.0))], [*verdict(*2 * ("hard",))],
        [GroupVerdict(slot, False, "void", "environment") for slot in (0, 1)],
        [GroupVerdict(slot, False, "void", REPLAY) for slot in (0, 1)],
    ]  # fmt: skip
    *facts, stop = kinds
    blocks = list(product(*zip(*kinds, strict=True)))
    for truth in product(*zip(*facts, strict=True)):
        honest = list(product(*zip(truth, stop, strict=True)))
        for first, second, third in product(honest, honest, blocks):
            end = weighed(first, second, third)
            assert set(end.outvoted) <= ({"c"} if third not in honest else set()), (truth, first, second, third)
            if first == second == truth and "hard" not in {group.outcome for group in third}:
                assert bool(end.outvoted) is (third not in honest), (truth, third)


def test_a_disputed_block_costs_the_pay_and_nothing_else():
    end = weighed(HARD, GOOD)
    assert end.refused == end.disputed == (0,) and not end.slash and end.outvoted == ()


def test_verdicts_that_accept_at_different_rewards_do_not_agree():
    forged = verdict("accept", "accept", rewards=(1.0, 1.0))
    assert weighed(GOOD, forged, more=True) is None
    end = weighed(GOOD, forged, GOOD)
    assert end.accepted == {0: GOOD} and end.outvoted == ("b",)


def test_each_block_is_decided_by_itself():
    end = weighed(
        verdict("accept", "accept", "hard", "accept"), verdict("accept", "accept", "hard", "hard"), blocks=(4, 7)
    )
    assert list(end.accepted) == [4] and end.refused == (7,) and end.slash


def test_verdicts_that_accept_at_different_lengths_do_not_agree():
    longer = tuple(msgspec.structs.replace(group, tokens=50) for group in GOOD)
    assert weighed(GOOD, longer, more=True) is None
    assert weighed(GOOD, longer, longer).accepted == {0: longer}


def test_quarantine_doubles_with_each_failure_up_to_an_hour():
    assert [LAW.quarantine_s(n, 30.0) for n in (1, 2, 3, 8, 10**6)] == [30.0, 60.0, 120.0, 3600.0, 3600.0]

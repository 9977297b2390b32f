"""The audit policy's pure rules: rates, draws, turns, and what verdicts add up to."""

import msgspec
import pytest

from shoal.ledger.law import LAW
from shoal.ledger.state_records import SubmissionRecord
from shoal.ledger.weigh import weigh
from shoal.protocol.audits import influence, must_audit
from shoal.protocol.types import GroupVerdict


def verdict(*outcomes, rewards=(0.0, 1.0)):
    """A verdict with one outcome for each slot; a block has two slots."""
    return tuple(
        GroupVerdict(slot, True, outcome, rewards=rewards if outcome == "accept" else (), tokens=5)
        for slot, outcome in enumerate(outcomes)
    )


def weighed(*verdicts, blocks=(0,), more=False):
    return weigh(dict(zip("abc", verdicts, strict=False)), blocks, 2, more)


GOOD, SOFT, HARD = verdict("accept", "accept"), verdict("accept", "soft"), verdict("hard", "accept")


def test_all_is_audited_until_ten_valid_blocks_then_the_rate_falls_to_that_of_the_run():
    assert [LAW.audit_rate(n, 0.05) for n in (0, 9, 10, 20, 60, 100, 10**6)] == [1, 1, 0.3, 0.15, 0.05, 0.05, 0.05]
    assert LAW.audit_rate(10**6, 1.0) == 1.0


def test_influence_is_zero_without_signal_and_grows_with_length():
    assert influence((1.0, 1.0, 1.0), 900) == 0.0
    assert influence((0.0, 1.0), 200) == 2 * influence((0.0, 1.0), 100) == 100.0


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


def ahead(order, judged, silent, key):
    submission = SubmissionRecord("0", "d", 0, "h", 0.0, (), 0.0, order=order, verdicts=dict.fromkeys(judged, ()))
    return submission.ahead_of(key, silent)


def test_each_validator_waits_for_those_before_it_that_have_not_judged():
    order = ("x", "y", "z")
    assert ahead(order, set(), set(), "x") == []
    assert ahead(order, set(), set(), "y") == ["x"]
    assert ahead(order, {"x"}, set(), "y") == []
    assert ahead(order, set(), set(), "late comer") == ["x", "y", "z"]
    assert LAW.turn_begins(1000.0, 2) == 1000.0 + 2 * LAW.turn_s


def test_nobody_waits_for_a_silent_validator_which_keeps_its_own_place():
    order = ("x", "y", "z")
    assert [ahead(order, set(), {"x"}, key) for key in order] == [[], [], ["y"]]
    assert [ahead(order, set(), {"y"}, key) for key in order] == [[], ["x"], ["x"]]


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

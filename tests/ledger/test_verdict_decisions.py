"""From verdicts to decisions: second opinions, slashes, vesting, rechecks, lapses; with liars among the validators."""

import pytest

from shoal.algos.sampling_evidence import ALARM_BITS, SamplingEvidence
from shoal.ledger.commands import AskLease, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused
from shoal.ledger.event_types import kind_of
from shoal.ledger.pay import Slash, apply_slash
from shoal.ledger.state import state_hash
from shoal.ledger.verdict_decisions import to_judge
from shoal.protocol.audit_and_pay import REPLAY
from shoal.protocol.messages import Bounds
from tests.ledger.ledger_fixture import started

WORKER = "a" * 64
JUDGES = ("d" * 64, "e" * 64, "f" * 64)


@pytest.fixture
def court(tmp_path):
    """A run with three validators and one worker."""
    return started(tmp_path, WORKER, JUDGES, steps=200, max_staleness=50, audit_rate=0.05)


def kinds(entries):
    return [kind_of(entry.body) for entry in entries]


def test_a_refusal_quarantines_at_once_and_waits_for_a_second_validator(court):
    court.work(WORKER, 2, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER))
    assert kinds(court.judge(name, "hard", by=JUDGES[0])) == ["verdict_given", "node_quarantined"]
    assert court.state.pending == [name] and court.state.members[WORKER].credits == 40
    entries = court.judge(name, "hard", by=JUDGES[1])
    assert "slash" in kinds(entries) and court.state.members[WORKER].credits == 0
    assert court.state.burned == 40 and court.audit().findings == []


def test_a_worker_stays_in_quarantine_if_two_validators_find_a_forgery(court):
    name = court.submit(WORKER, court.lease(WORKER))
    for judge in JUDGES[:2]:
        court.judge(name, "hard", by=judge)
    assert court.state.pending == [] and court.state.members[WORKER].standing == "quarantined"


def test_one_lying_validator_slashes_nobody_and_is_named(court):
    court.work(WORKER, 2, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER))
    court.judge(name, "hard", by=JUDGES[0])
    court.judge(name, "accept", by=JUDGES[1])
    entries = court.judge(name, "accept", by=JUDGES[2])
    assert "slash" not in kinds(entries) and court.state.members[WORKER].credits == 60
    assert court.state.members[WORKER].standing == "new" and court.state.members[JUDGES[0]].failures == 1


def test_a_validator_that_is_outvoted_three_times_is_asked_no_more(court):
    for turn in range(LAW.validator_faults):
        court.tick(1e4)
        name = court.submit(WORKER, court.lease(WORKER), salt=str(turn))
        for judge, outcome in zip(JUDGES, ("hard", "accept", "accept"), strict=True):
            court.judge(name, outcome, by=judge)
    assert court.state.judges() == sorted(JUDGES[1:])
    name = court.submit(WORKER, court.lease(WORKER), salt="after")
    with pytest.raises(Refused, match="at fault 3 times"):
        court.judge(name, by=JUDGES[0])


def test_a_recheck_that_is_stopped_twice_confirms_nothing_and_blames_nobody(court):
    name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    court.judge(name, by=JUDGES[0])
    court.judge(name, "void", by=JUDGES[1], check=REPLAY)
    court.judge(name, "void", by=JUDGES[2], check=REPLAY)
    assert court.state.rechecks == [] and [court.state.members[key].failures for key in JUDGES] == [0, 0, 0]
    assert court.state.members[JUDGES[0]].turns.confirmed == 0


def test_a_refusal_without_a_second_verdict_ends_without_a_slash(court):
    court.work(WORKER, 1, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER))
    court.judge(name, "hard", by=JUDGES[0])
    court.now += LAW.dispute_s - 1
    for _ in range(2):  # the first ends its quarantine
        court.do(Tick(court.now))
    assert court.state.pending == [name]
    court.now += 1
    assert "decision" in kinds(court.do(Tick(court.now)))
    assert court.state.pending == [] and court.state.burned == 0 and court.state.members[WORKER].credits == 20
    assert court.audit().findings == []


def test_a_recheck_of_an_accepted_submission_finds_a_bribed_first_validator(court):
    court.work(WORKER, 3, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    assert "group_accepted" in kinds(court.judge(name, by=JUDGES[0]))
    assert court.state.rechecks == [name] and to_judge(court.state, JUDGES[0], court.now) == []
    court.judge(name, "hard", by=JUDGES[1])
    entries = court.judge(name, "hard", by=JUDGES[2])
    assert {"slash", "validator_fault", "rechecked"} <= set(kinds(entries))
    assert court.state.members[WORKER].credits == 0 and court.state.members[JUDGES[0]].failures == 1
    assert court.state.rechecks == [] and court.audit().findings == []


def test_a_slash_after_a_recheck_ends_trust(court):
    court.work(WORKER, 12, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    for judge, outcome in zip(JUDGES, ("accept", "hard", "hard"), strict=True):
        led_to = court.judge(name, outcome, by=judge)
    member, (slash,) = court.state.members[WORKER], [entry for entry in led_to if isinstance(entry.body, Slash)]
    assert member.valid_blocks == 0
    member.valid_blocks = 3
    apply_slash(slash.body, court.state, slash)
    assert member.valid_blocks == 0, "by itself, whatever the recheck does"


@pytest.mark.parametrize(("finding", "trusted"), [("soft", 3), ("hard", 0)])
def test_a_forgery_that_only_one_validator_found_costs_trust_and_nothing_else(court, finding, trusted):
    """Nobody else judged in time. One of two that differ may be covering for a friend, so the next work is audited."""
    court.work(WORKER, 3, by=JUDGES[0])
    before = court.state.members[WORKER].credits
    name = court.submit(WORKER, court.lease(WORKER))
    court.judge(name, finding, by=JUDGES[0])
    court.now += LAW.dispute_s
    for _ in range(2):  # the first ends its quarantine
        court.do(Tick(court.now))
    node = court.state.members[WORKER]
    assert court.state.pending == [] and (node.valid_blocks, node.failures) == (trusted, 0)
    assert node.credits == before > 0


THEIRS, OTHERS = (
    {"check": "prompt", "audited": False, "detail": f"prompt is not the task's ({name})"} for name in "12"
)
"""What two validators whose data differ say of the prompt of a worker whose data is a third one's."""


def convict(court, *found):
    """A worker with pay to lose submits, and validators judge: each accepts, or finds another prompt."""
    court.work(WORKER, 3, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER))
    kinds_of_each = []
    for judge, prompt in zip(JUDGES, found, strict=False):
        outcome = "hard" if prompt else "accept"
        kinds_of_each.append(kinds(court.judge(name, outcome, by=judge, **(prompt or {}))))
    assert court.state.pending == []
    return kinds_of_each


@pytest.mark.parametrize("found", [(THEIRS, OTHERS, None), (THEIRS, None, OTHERS), (THEIRS, None, None)])
def test_a_prompt_that_validators_derive_differently_costs_no_worker_more_than_the_pay(court, found):
    """The environment reads a file that differs between their machines."""
    said = convict(court, *found)
    node = court.state.members[WORKER]
    assert "node_quarantined" not in said[0] and not any("slash" in kinds for kinds in said)
    assert node.credits >= 60 and node.standing == "good" and node.failures == 0 and court.audit().findings == []


def test_a_prompt_that_no_two_validators_derive_alike_is_disputed(court):
    third = {**OTHERS, "detail": "prompt is not the task's (3)"}
    convict(court, THEIRS, OTHERS, third)
    node = court.state.members[WORKER]
    assert node.credits == 60 and node.failures == 0 and court.state.burned == 0 and court.audit().findings == []


@pytest.mark.parametrize("found", [(THEIRS, THEIRS), (THEIRS, None, THEIRS), (THEIRS, OTHERS, THEIRS)])
def test_a_worker_that_edits_prompts_is_slashed_by_two_validators_that_derive_the_same(court, found):
    """A third that protects its friend, or has other data, does not help."""
    said = convict(court, *found)
    assert {"slash", "node_quarantined"} <= set(said[-1]) and "node_quarantined" not in said[0]
    node = court.state.members[WORKER]
    assert node.credits == 0 and node.standing == "quarantined" and court.audit().findings == []


def test_pay_vests_after_its_window_and_a_slash_takes_only_what_is_not_vested(court):
    court.work(WORKER, LAW.vesting_blocks + 5, by=JUDGES[0])
    node = court.state.members[WORKER]
    assert node.vested == 5 * 20 and sum(node.stake) == LAW.vesting_blocks * 20
    name = court.submit(WORKER, court.lease(WORKER), draw=0.0)
    for judge in JUDGES[:2]:
        court.judge(name, "hard", by=judge)
    assert node.credits == node.vested == 100 and court.audit().findings == []


def test_lapses_beyond_the_free_share_cost_pay_and_a_first_one_does_not(court):
    court.work(WORKER, 5, by=JUDGES[0])
    for lapse, credits in ((1, 100), (2, 80), (3, 60)):
        court.lease(WORKER)
        court.tick(1e3)
        assert (court.state.members[WORKER].lapsed, court.state.members[WORKER].credits) == (lapse, credits)
        court.now += LAW.max_lapse_wait_s
    assert court.audit().findings == []


def test_an_honest_slow_node_that_always_lapses_owes_nothing(court):
    court.enter("b" * 64)
    for _ in range(20):
        court.lease("b" * 64)
        court.tick(1e3)
        court.now += LAW.max_lapse_wait_s
    node = court.state.members["b" * 64]
    assert node.credits == 0 and node.lapsed == 20 and node.standing == "new" and court.state.burned == 0


def test_a_new_engine_of_a_known_key_is_on_probation_again(court):
    court.work(WORKER, 12, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER), draw=0.9)
    assert court.state.submissions[name].audited == ()
    court.judge(name, by=JUDGES[0], audited=False)
    court.state.members[WORKER].implementation = "another"
    court.enter(WORKER)
    name = court.submit(WORKER, court.lease(WORKER), draw=0.9)
    assert len(court.state.submissions[name].audited) == 2


def test_a_group_of_great_influence_must_be_audited_although_it_was_not_drawn(court):
    court.work(WORKER, 12, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER), draw=0.5)
    with pytest.raises(Refused, match="drawn for audit"):
        court.judge(name, by=JUDGES[0], audited=False, rewards=(-9.0, 9.0, -9.0, 9.0), tokens=99)
    court.judge(name, by=JUDGES[0], audited=True, rewards=(-9.0, 9.0, -9.0, 9.0), tokens=99)


FLAT = (1.0, 1.0, 1.0, 1.0)


def test_a_long_flat_group_must_be_audited_although_it_was_not_drawn_and_an_honest_one_is_paid(court):
    court.work(WORKER, 60, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER), draw=0.3)
    assert court.state.submissions[name].audited == () and court.state.submissions[name].mean_pay == 10.0
    with pytest.raises(Refused, match="drawn for audit"):
        court.judge(name, by=JUDGES[0], audited=False, rewards=FLAT, tokens=80)
    before = court.state.members[WORKER].credits
    court.judge(name, by=JUDGES[0], audited=True, rewards=FLAT, tokens=80)
    assert court.state.members[WORKER].credits == before + 2 * 80, "long by luck: audited, and paid"


def test_text_that_is_not_paid_does_not_raise_the_rate(tmp_path):
    world = started(tmp_path, WORKER, JUDGES, steps=200, max_staleness=50, audit_rate=0.05, paid_tokens=3)
    world.work(WORKER, 60, by=JUDGES[0])
    name = world.submit(WORKER, world.lease(WORKER), draw=0.3)
    before = world.state.members[WORKER].credits
    world.judge(name, by=JUDGES[0], audited=False, rewards=FLAT, tokens=200)
    assert world.state.members[WORKER].credits == before + 2 * len(FLAT) * 3, (
        "accepted without an audit, and paid up to the limit"
    )


def test_each_refused_block_of_a_submission_costs_pay(tmp_path):
    """Else a large lease of forgeries costs no more than a small one, where nobody is slashed."""
    world = started(tmp_path, WORKER, JUDGES[:1], steps=200, max_staleness=50, audit_rate=0.05)
    world.work(WORKER, 30, by=JUDGES[0])
    world.do(AskLease(WORKER, (), 3.0, world.now))
    (lease,) = world.state.open_leases_of(WORKER)
    assert len(lease.blocks) == 3
    world.judge(world.submit(WORKER, lease), "soft", by=JUDGES[0])
    assert world.state.burned == 3 * LAW.refused_blocks * 20 and world.audit().findings == []


@pytest.mark.parametrize(
    ("blocks", "tokens", "draw", "rechecked"),
    [(60, 10, 0.06, False), (60, 10, 0.04, True), (60, 80, 0.06, True), (60, 80, 0.17, False), (0, 10, 0.9, True)],
    ids=["as usual", "drawn", "long", "long, not drawn", "a new key"],
)
def test_what_pays_much_compared_with_the_stake_is_rechecked_more(court, blocks, tokens, draw, rechecked):
    """A stake of 800 tokens: two groups of 80 are judged again in 160 of 960 cases, if the validator is not new."""
    court.work(WORKER, blocks, by=JUDGES[0])
    court.state.members[JUDGES[0]].turns.confirmed = 100
    name = court.submit(WORKER, court.lease(WORKER), recheck=draw)
    court.judge(name, by=JUDGES[0], rewards=FLAT, tokens=tokens)
    assert (name in court.state.rechecks) == rechecked and court.audit().findings == []


def test_a_trusted_worker_without_stake_is_audited_fully(court):
    court.work(WORKER, 60, by=JUDGES[0])
    court.state.members[WORKER].stake.clear()
    name = court.submit(WORKER, court.lease(WORKER), draw=0.9)
    assert len(court.state.submissions[name].audited) == 2 and court.state.submissions[name].rate == 1.0


NOISE = {"float32/float32": Bounds(gap=1e-3, flipped=1e-4, mean_gap=1e-6, logprob=0.01)}


def noisy_world(tmp_path, judges, **rules):
    return started(tmp_path, WORKER, judges, steps=400, max_staleness=99, bounds=NOISE, **rules)


@pytest.mark.parametrize("judges", [JUDGES, JUDGES[:2], JUDGES[:1]], ids=len)
def test_noise_over_time_is_found_by_two_validators_or_by_the_only_one(tmp_path, judges):
    world = noisy_world(tmp_path, judges)
    node = world.state.members[WORKER]
    while not node.failures and len(world.state.leases) < 40:
        world.publish_if_due()
        paid = node.credits
        # One of 10 tokens each time, which is within the bound of a single group.
        last = world.serve(WORKER, by=judges[len(world.state.leases) % min(2, len(judges))], flipped=1)
    assert len(world.state.leases) < 40 and last.status == "decided" and world.state.pending == []
    assert node.standing == "quarantined" and "over time" in node.last_reason and node.evidence == {}
    assert node.valid_blocks == 0 and node.credits < paid and node.refused == 2 and node.reasons == {"sampling": 2}
    assert world.audit().findings == []


def test_figures_overstated_by_one_validator_harm_nobody(tmp_path):
    world = noisy_world(tmp_path, JUDGES)
    for turn in range(60):
        world.publish_if_due()
        world.serve(WORKER, **({"by": JUDGES[0], "flipped": 1} if turn % 2 else {"by": JUDGES[1]}))
    node = world.state.members[WORKER]
    assert max(node.evidence[JUDGES[0]].flips) > ALARM_BITS, "the liar's own"
    assert node.failures == 0 and node.standing == "good" and node.credits == 60 * 20


def test_a_validator_judges_in_its_turn_only(court):
    name = court.submit(WORKER, court.lease(WORKER))
    court.state.submissions[name].order = JUDGES
    with pytest.raises(Refused, match="is for dddddddddddd"):
        court.judge(name, by=JUDGES[1])
    assert to_judge(court.state, JUDGES[1], court.now + LAW.turn_s) == [name]
    court.now += LAW.turn_s
    court.judge(name, by=JUDGES[1])


def test_two_validators_expose_a_third_that_did_no_work_and_its_verdict_is_void(court):
    court.work(WORKER, 1, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    court.judge(name, by=JUDGES[0])
    assert "rechecked" not in kinds(court.judge(name, "hard", by=JUDGES[1], differs_from=JUDGES[:1]))
    entries = court.judge(name, "hard", by=JUDGES[2], differs_from=JUDGES[:1])
    assert {"validator_fault", "slash"} <= set(kinds(entries)) and court.state.members[JUDGES[0]].failures == 1
    assert court.audit().findings == []


def test_an_accusation_by_one_validator_alone_harms_nobody(court):
    name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    court.judge(name, by=JUDGES[0])
    court.judge(name, by=JUDGES[1], differs_from=JUDGES[:1])
    entries = court.judge(name, by=JUDGES[2])
    assert kinds(entries) == ["verdict_given", "rechecked"] and court.state.members[JUDGES[0]].failures == 0


def test_a_second_verdict_of_the_same_validator_changes_nothing(court):
    name = court.submit(WORKER, court.lease(WORKER))
    court.judge(name, "hard", by=JUDGES[0])
    assert court.judge(name, "hard", by=JUDGES[0]) == [] and court.state.pending == [name]


def test_a_verdict_after_the_decision_changes_nothing(court):
    name = court.submit(WORKER, court.lease(WORKER))
    court.judge(name, by=JUDGES[0])
    before = state_hash(court.state)
    assert court.judge(name, "hard", by=JUDGES[1]) == [] and state_hash(court.state) == before


def test_quarantine_takes_back_the_workers_leases_and_counts_no_lapse(court):
    first = court.lease(WORKER)
    second = court.lease(WORKER, holding=[first.id])
    court.judge(court.submit(WORKER, first), "hard", by=JUDGES[0])
    node = court.state.members[WORKER]
    assert court.state.open_leases == [] and court.state.main.free == [(0, block) for block in second.blocks]
    assert node.standing == "quarantined" and node.lapsed == 0


def test_an_accepted_submission_does_not_end_the_quarantine_for_another(court):
    first = court.lease(WORKER)
    second = court.lease(WORKER, holding=[first.id])
    forged, honest = court.submit(WORKER, first), court.submit(WORKER, second)
    court.judge(forged, "hard", by=JUDGES[0])
    court.judge(honest, by=JUDGES[1])
    assert court.state.pending == [forged] and court.state.members[WORKER].standing == "quarantined"


def test_a_refusal_without_a_slash_costs_eight_blocks_and_leaves_the_rest(court):
    court.work(WORKER, 10, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER))
    for judge in JUDGES[:2]:
        court.judge(name, "soft", by=judge)
    assert court.state.members[WORKER].credits == (10 - LAW.refused_blocks) * 20
    assert court.audit().findings == []


def test_an_overdue_submission_ends_without_a_slash_whatever_the_verdicts(court):
    """Two hard verdicts, one of which accuses the other validator of no work. No third verdict decides between them."""
    court.work(WORKER, 1, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER))
    court.judge(name, "hard", by=JUDGES[0])
    court.judge(name, "hard", by=JUDGES[1], differs_from=JUDGES[:1])
    court.now += LAW.dispute_s
    entries = [*court.do(Tick(court.now)), *court.do(Tick(court.now))]  # the end of its quarantine comes first
    assert "decision" in kinds(entries) and "slash" not in kinds(entries)
    assert court.state.members[WORKER].credits == 20 and court.state.burned == 0


def test_a_submission_without_a_verdict_waits_without_limit(court):
    name = court.submit(WORKER, court.lease(WORKER))
    court.tick(100 * LAW.dispute_s)
    assert court.state.pending == [name]


@pytest.mark.parametrize("drawn", [True, False])
def test_an_audited_group_counts_as_evidence_of_the_validator_that_audited_it(tmp_path, drawn):
    world = noisy_world(tmp_path, JUDGES, audit_rate=0.05)
    world.work(WORKER, 12, by=JUDGES[0])
    before = dict(world.state.members[WORKER].evidence)
    name = world.submit(WORKER, world.lease(WORKER), draw=0.0 if drawn else 0.9, recheck=0.0)
    world.judge(name, by=JUDGES[1], flipped=1)
    after = world.state.members[WORKER].evidence
    assert after[JUDGES[0]] == before[JUDGES[0]]
    assert (after[JUDGES[1]] != SamplingEvidence()) == drawn

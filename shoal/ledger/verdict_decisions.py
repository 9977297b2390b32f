"""From verdicts to decisions: pay, penalties, second opinions and rechecks.

The way of a submission: a first verdict that accepts decides, and the work is paid; a drawn share is judged again
afterwards. If the first verdict refuses, or calls a slot void, another validator is asked. Two that agree decide, a third
is asked if they differ, and what nobody can settle ends without pay and without penalty. `verdict_majority` counts; this
file turns what it finds into events. A slash takes all pay that has not vested.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from msgspec import UNSET

from shoal.algos.sampling_evidence import excessive
from shoal.ledger.batches import BY_ENVIRONMENT, GroupAccepted, SlotVoid
from shoal.ledger.commands import SubmitVerdict, Tick
from shoal.ledger.errors import Refused
from shoal.ledger.event import Body
from shoal.ledger.group_advantages import teaches
from shoal.ledger.members import NodeRestored, ValidatorFault, member_as, quarantine
from shoal.ledger.pay import Credit, Slash, debt_costs, recheck_rate, refusal_costs, stake_entries, vest
from shoal.ledger.replay_context import LogPosition, PayContext, Table, Trigger
from shoal.ledger.slot_draws import recheck_draw
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, NodeRecord, SubmissionRecord
from shoal.ledger.validator_turns import in_order, may_judge, silent, turn_begins
from shoal.ledger.verdict_majority import PROMPT, VerdictTally, refuse_malformed, tally_verdicts
from shoal.ledger.verdicts import Decision, Rechecked, VerdictGiven, evidence_after
from shoal.protocol.audit_and_pay import REPLAY, pay_of
from shoal.protocol.continuations import is_continued_slot
from shoal.protocol.messages import GroupVerdict, Verdict
from shoal.protocol.messages.responses import CreditLine
from shoal.protocol.reward_rules import fault_indices, fault_key


def decide_judge(command: SubmitVerdict, state: State) -> list[Body]:
    """Events of a verdict. Raises `Refused` for one that is malformed, or from a validator whose turn it is not."""
    member_as(state, command.key, "validator")
    submission = state.submissions.get(command.verdict.submission)
    if submission is None:
        raise Refused("unknown", f"no submission {command.verdict.submission[:12]}")
    # guard: one-verdict-a-validator, decided-is-decided
    if command.key in submission.verdicts or not is_open(state, submission):
        return []
    lease = state.lease_of(submission)
    refuse_malformed(state, lease, submission, command.verdict.groups)
    skipped = silent(state, command.now)
    if not may_judge(state, submission, skipped, command.key, command.now):  # guard: judge-in-turn
        order = [key[:12] for key in submission.ahead_of(command.key, skipped)]
        raise Refused("not_your_turn", f"submission {submission.digest[:12]} is for {', '.join(order)} first: ask "
                      "GET /v1/checks for one of yours")  # fmt: skip
    verdicts = {**submission.verdicts, command.key: command.verdict.groups}
    events: list[Body] = [
        VerdictGiven(
            submission.digest, command.key, command.verdict.groups, command.projection, command.differs_from
        )
    ]  # fmt: skip
    idle = _without_work(submission, command)
    for validator in sorted(idle):
        cause = "its projection is not of this submission's activations: it judged without doing the work"
        events.append(ValidatorFault(validator, submission.digest, cause))  # guard: idle-is-named
    more = _more(state, verdicts)
    worked = {key: groups for key, groups in verdicts.items() if key not in idle}  # guard: idle-verdict-is-void
    weighed = tally_verdicts(worked, lease.blocks, state.rules.block_groups, more)
    if command.differs_from and more:  # guard: third-tells-who-is-idle
        weighed = None  # one of two did not do the work; a third will tell which
    if submission.decided:
        doubted = len(verdicts) == 2 and bool(command.differs_from)
        return [*events, *_end_recheck(state, submission, lease, weighed, doubted, command)]
    if _is_noisy(state, state.members[lease.worker], command):  # guard: noise-over-time
        weighed = VerdictTally({}, lease.blocks, (), slash=False, outvoted=())
        why = "sampling or logprobs: more noise over time than honest arithmetic makes"
        events += quarantine(state, lease.worker, submission, why, command.now)
    elif len(verdicts) == 1:
        events += _failure(state, lease, submission, command)
    if weighed is not None:
        # guard: recheck
        drawn = len(verdicts) == 1 and more and not weighed.refused and _is_rechecked(state, lease, command)
        events += _decide(state, submission, lease, weighed, worked, drawn, command.envs)
        if weighed.slash and _is_at_large(state, lease, submission):  # guard: slashed-is-quarantined
            events += quarantine(state, lease.worker, submission, "forged, as two validators found", command.now)
    return events


def to_judge(state: State, key: str, now: float) -> list[str]:
    """Submissions that a validator may judge now, in the order in which it should."""
    skipped = silent(state, now)
    return [name for name in in_order(state) if may_judge(state, state.submissions[name], skipped, key, now)]


def overdue(state: State, now: float) -> list[str]:
    """Submissions whose dispute or recheck got no further verdict in time. Once the run has ended, it waits less. It always
    waits for validators that are at work and will come to it."""
    law = state.law
    limit_s = law.dispute_s if state.phase != "ended" else law.most_verdicts * law.turn_s
    undecided = (*state.pending, *state.rechecks)
    due = state.due_by(now - limit_s, "judged", undecided)  # guard: time-for-a-second-verdict
    return _without_turn(state, due, now)


def end_overdue(state: State, now: float, envs: Mapping[str, Mapping[int, str]]) -> Iterator[Body]:
    """Ends one overdue dispute or recheck, without a slash. `envs`: of each, the labels of its slots."""
    for name in overdue(state, now)[:1]:  # the next one: on the state that this one leaves
        submission = state.submissions[name]
        if submission.decided:
            yield Rechecked(name, "undecided")
            return
        lease = state.lease_of(submission)
        weighed = tally_verdicts(submission.verdicts, lease.blocks, state.rules.block_groups, False)
        assert weighed is not None, "without more verdicts every submission ends"
        two_judged = len(submission.verdicts) > 1 and not submission.differs
        disputed = weighed.disputed if two_judged else weighed.refused  # guard: lone-refusal-is-no-fault
        # guard: overdue-is-no-slash
        ended = weighed._replace(slash=False, disputed=disputed)
        yield from _decide(state, submission, lease, ended, submission.verdicts, envs=envs.get(name))


def is_open(state: State, submission: SubmissionRecord) -> bool:
    """Whether another verdict can still count."""
    return not submission.decided or submission.digest in state.rechecks


def is_final(state: State, submission: SubmissionRecord) -> bool:
    """Whether nobody can still be paid for its groups: its slots are final, or their version is retired. Its body is then
    public.

    A refused block is leased again with the same seeds, so a worker that could read its honest groups would copy them.
    """
    lease = state.leases[submission.lease]
    version = state.main.versions[lease.version]
    done = all(version.blocks[block].status == "done" for block in lease.blocks)
    return submission.decided and (done or version.revealed or state.phase == "ended")  # guard: refused-is-private


def _without_work(submission: SubmissionRecord, command: SubmitVerdict) -> set[str]:
    """Validators whose activations differ from those of two others that agree: they never computed them.

    Invented numbers differ from everybody's. A single accuser, or three that all differ, show nothing.
    """
    pairs = [*submission.differs, *((command.key, other) for other in command.differs_from)]
    differ, judges = {frozenset(pair) for pair in pairs}, {*submission.verdicts, command.key}
    return {
        judge
        for judge in judges
        for one, other in combinations(sorted(judges - {judge}), 2)
        # guard: accuser-alone, idle
        if {frozenset((judge, one)), frozenset((judge, other))} <= differ and frozenset((one, other)) not in differ
    }


def _is_noisy(state: State, member: NodeRecord, command: SubmitVerdict) -> bool:
    """Whether two validators, or the only one, each by its own figures, find more noise over time than is honest.

    Figures are not compared between validators, so those of one alone must not decide if there are others.
    """
    found = {**member.evidence, command.key: evidence_after(state, command.key, member, command.verdict.groups)}
    judges = state.panel()
    alarmed = [key for key in judges if key in found and excessive(found[key])]
    return command.key in alarmed and len(alarmed) >= min(2, len(judges))  # guard: noise-needs-two


def _without_turn(state: State, names: list[str], now: float) -> list[str]:
    """Of these submissions, those for which nobody's turn is left: all that could judge let it pass, or are skipped."""
    if not names:
        return names
    skipped, records = silent(state, now), [state.submissions[name] for name in names]
    # guard: at-work-is-waited-for
    return [one.digest for one in records if now >= turn_begins(state, one, one.ahead_of("", skipped))]


def _is_rechecked(state: State, lease: LeaseRecord, command: SubmitVerdict) -> bool:
    rate = recheck_rate(state, state.members[lease.worker], command.verdict.groups)
    skipped = silent(state, command.now) & {*state.judges()}  # those that left may come back at any moment
    others = {*state.panel()} - {command.key} - skipped  # guard: left-may-recheck
    chance = max(rate, state.law.recheck_chance(state.members[command.key].turns.confirmed))
    if any(group.faults for group in command.verdict.groups):  # guard: faults-are-rechecked
        chance = 1.0
    return bool(others) and command.recheck < chance  # guard: nobody-to-recheck


def _more(state: State, verdicts: dict[str, tuple[GroupVerdict, ...]]) -> bool:
    return len(verdicts) < state.law.most_verdicts and any(
        key not in verdicts for key in state.panel()
    )  # guard: left-may-judge


def _failure(state: State, lease: LeaseRecord, submission: SubmissionRecord, command: SubmitVerdict) -> Iterator[Body]:
    """What the first verdict on a submission leads to, or that which ends a recheck, if it refuses: quarantine if it is
    hard, and at every third refused submission.

    A prompt that one validator refuses counts as soft: the validator's data may be the ones that differ.
    """
    member = state.members[lease.worker]
    failed = [group for group in command.verdict.groups if group.outcome in ("soft", "hard")]
    # guard: lone-prompt-is-soft
    hard = any(group.outcome == "hard" and group.check != PROMPT for group in failed)
    # guard: hard-quarantines, soft-quarantines, soft-is-forgiven
    if hard or (failed and (member.failures + 1) % state.law.soft_failures == 0):
        yield from quarantine(state, member.key, submission, f"{failed[0].check}: {failed[0].detail}", command.now)


def _is_at_large(state: State, lease: LeaseRecord, submission: SubmissionRecord) -> bool:
    return state.members[lease.worker].quarantined_for != submission.digest


def _void_cause(group: GroupVerdict) -> str:
    if group.check == REPLAY:  # guard: unreplayed-is-not-unbegun
        return f"replay: {group.detail}"
    return BY_ENVIRONMENT + group.detail


def _decide(
    state: State, submission: SubmissionRecord, lease: LeaseRecord, weighed: VerdictTally,
    verdicts: Mapping[str, Sequence[GroupVerdict]], recheck: bool = False, envs: Mapping[int, str] | None = None,
) -> Iterator[Body]:  # fmt: skip
    """The end of a submission: pay for what is accepted, and a slash if two validators found a forgery."""
    stream = state.stream_of(lease)
    blocks = stream.versions[lease.version].blocks
    # guard: copy-is-not-paid
    copied = tuple(block for block in weighed.accepted if blocks[block].status == "done")
    accepted = {block: groups for block, groups in weighed.accepted.items() if block not in copied}
    recheck = recheck and bool(accepted)
    yield Decision(submission.digest, tuple(accepted), weighed.refused, weighed.disputed, recheck, copied)
    order = state.slots_of(lease)
    paid: list[int] = []
    for groups in accepted.values():
        for group in groups:
            index = order.index(group.slot)
            if group.outcome == "void":
                yield SlotVoid(lease.version, (group.slot,), _void_cause(group), lease.stream)
                continue
            continued = is_continued_slot(group.slot, state.rules.block_groups)
            faults = fault_indices(group.faults)
            signal = not continued and teaches(group.rewards, state.rules.algorithm, group.steps or (), faults)
            yield GroupAccepted(
                lease.version, group.slot, submission.digest, index, submission.groups[index], group.tokens,
                group.rewards, signal, lease.stream, group.steps, group.faults, (envs or {}).get(group.slot, UNSET),
                _is_confirmed(state, submission, group, verdicts, recheck) if group.faults else UNSET,
            )  # fmt: skip
            pay = pay_of(group, state.rules)
            paid += stake_entries(state, pay)
            yield Credit(lease.worker, lease.version, group.slot, pay, lease.stream)
    yield from _outvoted(submission, weighed)
    member = state.members[lease.worker]
    blamed = set(weighed.refused) - set(weighed.disputed)
    stake = [*member.stake, *paid]
    if weighed.slash:
        yield Slash(member.key, submission.digest, sum(stake))
    elif blamed:
        yield from refusal_costs(state, member, lease, stake, len(blamed))  # guard: refusal-costs
    else:
        settled = debt_costs(member, lease, stake) if paid else []  # guard: debt-is-settled
        yield from settled
        if not recheck:
            yield from vest(state, member, stake[: len(stake) - sum(lost.groups for lost in settled)])
    # guard: cleared-is-restored, blamed-stays, cleared-of-this-one
    if not blamed and member.standing == "quarantined" and member.quarantined_for == submission.digest:
        yield NodeRestored(member.key)


def _is_confirmed(
    state: State, submission: SubmissionRecord, group: GroupVerdict, verdicts: Mapping[str, Sequence[GroupVerdict]],
    recheck: bool,
) -> bool:  # fmt: skip
    """Whether two validators found the same faults, or one that nobody can check and that has the host's word."""
    same = [
        key
        for key, groups in verdicts.items()
        if any(one.slot == group.slot and fault_key(one) == fault_key(group) for one in groups)
    ]
    # guard: lone-validator-confirms-nothing
    return len(same) > 1 or (not recheck and state.has_hosts_word(submission, same))


def _end_recheck(
    state: State,
    submission: SubmissionRecord,
    lease: LeaseRecord,
    weighed: VerdictTally | None,
    doubted: bool,
    command: SubmitVerdict,
) -> Iterator[Body]:
    """What a recheck found. If two validators refuse the submission, that costs what any refusal costs. `doubted`: one of
    two validators gave its verdict without doing the work, and there is no third to tell which."""
    if weighed is None:
        return
    yield from _outvoted(submission, weighed)
    member = state.members[lease.worker]
    if weighed.slash:
        yield Rechecked(submission.digest, "forged")
        yield Slash(member.key, submission.digest, sum(member.stake))  # guard: recheck-slashes
        yield from quarantine(state, member.key, submission, "forged, as a second look found", command.now)
        return
    if blamed := set(weighed.refused) - set(weighed.disputed):
        yield Rechecked(submission.digest, "refused")
        yield from refusal_costs(state, member, lease, member.stake, len(blamed))  # guard: recheck-costs
        yield from _failure(state, lease, submission, command)  # guard: recheck-quarantines
        return
    stopped = any(group.check == REPLAY for groups in weighed.accepted.values() for group in groups)
    # guard: doubted-is-open, stopped-recheck-confirms-nothing
    disputed = weighed.refused or doubted or stopped or next(iter(submission.verdicts)) in weighed.outvoted
    yield Rechecked(submission.digest, "undecided" if disputed else "confirmed")


def _outvoted(submission: SubmissionRecord, weighed: VerdictTally) -> Iterator[Body]:
    for validator in weighed.outvoted:
        yield ValidatorFault(validator, submission.digest, "two others agree on another verdict")


def cause_of_verdict_given(body: VerdictGiven, here: LogPosition) -> Trigger:
    verdict = Verdict(body.submission, body.groups)
    recheck = _recheck_draw(here, body.submission)
    envs = _said_envs(here, body.submission)
    return Trigger(SubmitVerdict(body.validator, verdict, here.now, body.projection, recheck, body.differs_from, envs))


def _said_envs(here: LogPosition, submission: str) -> dict[int, str]:
    """The environments of a submission's slots, as far as its accepted groups say them: it is the host's own word, which
    only decides whether the host's own run pauses."""
    envs = dict[int, str]()
    for entry in here.entries[here.place + 1 :]:
        if isinstance(entry.body, VerdictGiven):
            break
        if isinstance(entry.body, GroupAccepted) and entry.body.submission == submission and entry.body.env:
            envs[entry.body.slot] = entry.body.env
    return envs


def _recheck_draw(here: LogPosition, submission: str) -> float:
    """The draw for a recheck; while its link is secret, what the decision says that it was."""
    lease = here.state.lease_of(here.state.submissions[submission])
    if lease.version in here.links:
        return recheck_draw(lease, bytes.fromhex(here.links[lease.version][1]))
    for entry in here.entries[here.place + 1 :]:
        if isinstance(entry.body, VerdictGiven):
            break
        if isinstance(entry.body, Decision) and entry.body.submission == submission:
            return 0.0 if entry.body.recheck else 1.0
    return 1.0


def cause_of_the_clock(body: Decision | Rechecked, here: LogPosition) -> Trigger:
    """If no verdict led to it, its time had come."""
    return Trigger(Tick(here.now, envs={body.submission: _said_envs(here, body.submission)}))


def lines_of_verdict_given(body: VerdictGiven, told: PayContext) -> Iterator[CreditLine]:
    lease = told.state.lease_of(told.state.submissions[body.submission])
    if lease.worker != told.node:
        return
    for group in body.groups:
        if group.outcome in ("soft", "hard"):
            yield told.line(
                f"refused ({group.outcome}): {group.detail}",
                version=lease.version,
                slot=group.slot,
                submission=body.submission,
                validators=(body.validator,),
                audited=group.audited,
                check=group.check,
                figure=group.figure,
                bound=group.bound,
            )


def lines_of_decision(body: Decision, told: PayContext) -> Iterator[CreditLine]:
    """Groups that passed alone, but another group of their block was refused, or another validator refused them."""
    lease, size = told.state.lease_of(told.state.submissions[body.submission]), told.state.rules.block_groups
    if lease.worker != told.node:
        return
    for block in body.copied:
        yield told.line(f"not paid: another worker had filled block {block} before", version=lease.version,
                        submission=body.submission)  # fmt: skip
    for block in body.refused:
        for slot in range(block * size, (block + 1) * size):
            given = told.verdicts.get((body.submission, slot), [])
            if given and all(group.outcome == "accept" for _, group in given):
                why = (
                    f"validators differ on block {block}"
                    if block in body.disputed
                    else f"block {block} is refused whole"
                )
                yield told.line(
                    f"not paid: {why}",
                    version=lease.version,
                    slot=slot,
                    submission=body.submission,
                    validators=tuple(validator for validator, _ in given),
                    audited=any(group.audited for _, group in given),
                )


COMMANDS: Table = {SubmitVerdict: decide_judge}
CAUSES: Table = {
    VerdictGiven: cause_of_verdict_given, Decision: cause_of_the_clock, Rechecked: cause_of_the_clock,
}  # fmt: skip
LINES: Table = {VerdictGiven: lines_of_verdict_given, Decision: lines_of_decision}

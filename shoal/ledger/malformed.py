"""What no honest validator sends as a verdict: slots, checks, audits, rewards or figures that its submission cannot have.

Called by the rules of verdicts before a verdict is weighed. Pure: it reads a state. It does not ask whether a verdict is
right.
"""

from msgspec import UNSET

from shoal.ledger.answers import Refused
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, SubmissionRecord
from shoal.protocol.algorithms import step_credit_of
from shoal.protocol.audits import CHECKS, MAX_REASON_CHARS, MAX_REWARD, influence, must_audit, pay_of
from shoal.protocol.continuations import num_rollouts
from shoal.protocol.env_faults import fault_indices, malformed_faults
from shoal.protocol.step_rewards import fault_of
from shoal.protocol.types import GroupVerdict


def refuse_malformed(
    state: State, lease: LeaseRecord, submission: SubmissionRecord, groups: tuple[GroupVerdict, ...]
) -> None:
    """A verdict names every slot once, in order, and has audited exactly what was drawn. Raises `Refused`."""
    if tuple(group.slot for group in groups) != tuple(state.slots_of(lease)):  # guard: slots-in-order
        raise Refused("malformed", "a verdict names every slot of the lease once, in order")
    for group in groups:
        said = group.check + group.detail
        if group.check not in (("",) if group.outcome == "accept" else CHECKS):  # guard: refusal-names-a-check
            raise Refused("malformed", f"slot {group.slot}: a refusal names one of the run's checks")
        if len(said) > MAX_REASON_CHARS or not said.isprintable():  # guard: reason-length, reason-prints
            raise Refused(
                "malformed", f"slot {group.slot}: a reason is one line of at most {MAX_REASON_CHARS} characters"
            )
    rules = state.rules
    for group, draw in zip(groups, submission.draws or (0.0,) * len(groups), strict=True):
        if group.outcome != "accept":
            if group.rewards or group.tokens or group.steps or group.faults:
                raise Refused("malformed", f"slot {group.slot}: only an accepted group has rewards and policy tokens")
            continue
        _refuse_impossible(state, group)
        faults = fault_indices(group.faults)
        weight = influence(group.rewards, group.tokens, rules.algorithm, group.steps, faults)
        pay = pay_of(group, rules)
        means = submission.mean_influence, submission.mean_pay
        # guard: influence-is-audited
        due = group.slot in submission.audited or must_audit(
            draw, submission.rate, weight, means[0], pay, means[1], bool(group.faults)
        )
        # Neither less nor more: projections are compared only if both validators looked at the same groups.
        if due != group.audited:  # guard: drawn-is-audited
            but = "was drawn for audit but not audited" if due else "was audited but not drawn for it"
            raise Refused("malformed", f"slot {group.slot} {but}")


def _refuse_impossible(state: State, group: GroupVerdict) -> None:
    """An accepted group's rewards and figures are such as some group can have. Raises `Refused`."""
    (fewest, most), num = num_rollouts(state.rules, group.slot), len(group.rewards)
    # guard: one-reward-a-rollout, reward-size, reward-is-a-number
    if not fewest <= num <= most or not all(abs(r) <= MAX_REWARD for r in group.rewards):
        due = f"{most}" if fewest == most else f"{fewest} to {most}"
        raise Refused("malformed", f"slot {group.slot}: an accepted group has {due} rewards of size {MAX_REWARD:g} at "
                      "most")  # fmt: skip
    fault = malformed_faults(group.faults, num) if group.faults else ""
    if fault:  # guard: impossible-faults
        raise Refused("malformed", f"slot {group.slot}: an accepted group {fault}")
    _refuse_impossible_steps(state, group)
    longest = state.sampling.all_tokens * most
    if not 0 <= group.tokens <= longest:  # guard: group-tokens
        raise Refused("malformed", f"slot {group.slot}: a group has 0 to {longest} policy tokens")
    # guard: flips-within-tokens, gap-sum-is-a-number
    if not 0 <= group.flipped <= group.tokens or not 0.0 <= group.gap_sum <= 1e9:
        raise Refused("malformed", f"slot {group.slot}: figures of sampling that no group can have")
    if not (abs(group.off_sum) <= 1e9 and abs(group.off_weighted) <= 1e9):  # guard: off-sum-is-a-number
        raise Refused("malformed", f"slot {group.slot}: sums of log-probs that no group can have")


def _refuse_impossible_steps(state: State, group: GroupVerdict) -> None:
    """An accepted group has rewards of steps if the run's credit asks for them, and they divide its rewards."""
    credit = step_credit_of(state.rules.algorithm)
    if credit is None:
        if group.steps is not UNSET:  # guard: steps-only-where-asked
            raise Refused("malformed", f"slot {group.slot}: this run credits no steps")
        return
    fault = fault_of(group.steps or (), group.rewards, credit.most, state.sampling.all_tokens, MAX_REWARD)
    if fault:  # guard: impossible-steps
        raise Refused("malformed", f"slot {group.slot}: an accepted group {fault}")

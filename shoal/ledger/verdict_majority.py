"""Tallies of validators' verdicts on a submission, and the checks of a verdict's form before it counts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET

from shoal.ledger.errors import Refused
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, SubmissionRecord
from shoal.protocol.algorithm_config import step_credit_of
from shoal.protocol.audit_and_pay import CHECKS, MAX_REASON_CHARS, MAX_REWARD, REPLAY, influence, must_audit, pay_of
from shoal.protocol.continuations import num_rollouts
from shoal.protocol.messages import GroupVerdict
from shoal.protocol.reward_rules import fault_indices, fault_key, malformed_faults, malformed_steps

# --- What the verdicts on one submission add up to, block by block ---
#
# One verdict suffices to accept a block. A refusal needs a second verdict, and two that differ need a third. If no
# further verdict can come, a block that no majority accepts brings no pay. A slash needs two validators that found, each
# on its own, what no honest worker sends. Both must have found it with the model, or both without. A check without the
# model is exact; a check with the model compares numbers with bounds, and a validator whose hardware rounds badly may
# exceed them. Its accusation must not complete a slash that another validator began for a different reason.
#
# Validators derive a prompt from their own copies of the data. If they refuse a prompt, but each names another one as
# right, their data differ, and nobody knows whose is right. So two refusals of a prompt agree only if they name the same
# one.


class VerdictTally(NamedTuple):
    """How a submission ends."""

    accepted: dict[int, tuple[GroupVerdict, ...]]
    """By block, with the verdicts that say what it is worth."""
    refused: tuple[int, ...]
    """Blocks."""
    disputed: tuple[int, ...]
    """Of the refused: those that no majority refused."""
    slash: bool
    outvoted: tuple[str, ...]
    """Validators that contradict two others that agree. One whose replay was stopped contradicts nobody."""


def tally_verdicts(
    verdicts: Mapping[str, Sequence[GroupVerdict]],
    blocks: Sequence[int],
    block_groups: int,
    more: bool,
) -> VerdictTally | None:
    """What the verdicts so far add up to; None while another one is needed and can come (`more`).

    `verdicts` are by validator, each with one group verdict for each slot of the lease, in order. A block was generated as
    one batch, so it is accepted whole or not at all.
    """
    accepted: dict[int, tuple[GroupVerdict, ...]] = {}
    refused: list[int] = []
    disputed: list[int] = []
    outvoted: set[str] = set()
    slash = False
    for place, block in enumerate(blocks):
        of_block = {
            key: tuple(groups[place * block_groups : (place + 1) * block_groups]) for key, groups in verdicts.items()
        }
        meanings = {key: _meaning(groups) for key, groups in of_block.items()}
        said = list(meanings.values())
        # guard: third-verdict
        agreed = next((meaning for meaning in said if said.count(meaning) >= min(2, len(said))), None)
        refusal = agreed is not None and agreed[:1] == _REFUSED
        # guard: refusal-needs-two, void-needs-two
        unpaid = refusal or any(group.outcome == "void" for groups in of_block.values() for group in groups)
        unsure = agreed is None or (unpaid and len(said) < 2)
        if more and unsure:
            return None
        if agreed is None:
            disputed.append(block)  # guard: disputed
        if agreed is None or refusal:
            refused.append(block)
        else:
            accepted[block] = next(groups for key, groups in of_block.items() if meanings[key] == agreed)
        # guard: slash-needs-two
        slash |= refusal and any(
            sum(_is_hard(groups, with_model) for key, groups in of_block.items() if meanings[key] == agreed) >= 2
            for with_model in (True, False)
        )
        for key, groups in of_block.items():
            others = [of_block[other] for other, meaning in meanings.items() if meaning == agreed != meanings[key]]
            if sum(_contradict(groups, other) for other in others) > 1:  # guard: outvoted-by-two
                outvoted.add(key)  # guard: outvoted
    return VerdictTally(accepted, tuple(refused), tuple(disputed), slash, tuple(sorted(outvoted)))


_REFUSED = ("refused",)

PROMPT = "prompt"
"""The check whose detail names the prompt that the validator derived."""


def _meaning(groups: Sequence[GroupVerdict]) -> tuple[object, ...]:
    """What a verdict says about a block, so that two verdicts that mean the same are equal."""
    if not all(group.outcome in ("accept", "void") for group in groups):  # guard: whole-blocks
        prompts = [(group.slot, group.detail) for group in groups if group.check == PROMPT]
        return (*_REFUSED, *prompts)  # guard: same-prompt
    # guard: same-rewards, same-lengths, same-steps, same-faults
    return tuple(
        (group.slot, group.outcome, group.rewards, group.tokens, group.steps, fault_key(group)) for group in groups
    )


def _contradict(ours: Sequence[GroupVerdict], theirs: Sequence[GroupVerdict]) -> bool:
    """Whether two verdicts differ on groups that both replayed: a worker can cause that a slow machine stops a replay."""
    # guard: stopped-replay-abstains
    stopped = {group.slot for group in (*ours, *theirs) if group.check == REPLAY}
    said = [_meaning([group for group in groups if group.slot not in stopped]) for groups in (ours, theirs)]
    return said[0] != said[1]


def _is_hard(groups: Sequence[GroupVerdict], with_model: bool) -> bool:
    """Whether a validator found what no honest worker sends, by checks of this kind. A group that a check without the model
    refuses is never `audited`."""
    # guard: slash-needs-two-of-a-kind
    return any(group.outcome == "hard" and group.audited == with_model for group in groups)


# --- What no honest validator sends as a verdict ---


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
    fault = malformed_steps(group.steps or (), group.rewards, credit.most, state.sampling.all_tokens, MAX_REWARD)
    if fault:  # guard: impossible-steps
        raise Refused("malformed", f"slot {group.slot}: an accepted group {fault}")

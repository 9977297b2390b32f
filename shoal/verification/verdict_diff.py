"""Compare a group's verdict in the log with an auditor's own verdict on the same bytes.

Checks, outcomes, rewards, their steps, and tokens are compared. Figures are not, because they depend on the machine.
"""

from collections.abc import Sequence
from itertools import zip_longest

from shoal.protocol.messages import GroupVerdict, StepRewards
from shoal.protocol.reward_rules import fault_indices, fault_key
from shoal.verification.checks_with_model import AUDIT

NEEDS_MODEL = frozenset(check.name for check in AUDIT)
"""Checks that cannot be repeated without the weights."""


def differences(booked: GroupVerdict, found: GroupVerdict, with_model: bool) -> list[str]:
    """One sentence for each difference between two verdicts on a group. `found` is the auditor's; `with_model` says
    whether the auditor had the model."""
    if booked.outcome == "accept" and found.outcome == "accept":
        return _rewards_and_tokens(booked, found)
    if booked.outcome == "accept":
        unaudited = "" if booked.audited else " without an audit"
        return [f"the log accepts it{unaudited}, here {_refusal(found)}"]
    if found.outcome == "accept":
        if booked.check in NEEDS_MODEL and not with_model:
            return []
        return [f"the log says: {_refusal(booked)}; here it passes every check"]
    if booked.check != found.check and (with_model or booked.check not in NEEDS_MODEL):
        return [f"the log says: {_refusal(booked)}; here {_refusal(found)}"]
    return []


def _rewards_and_tokens(booked: GroupVerdict, found: GroupVerdict) -> list[str]:
    said = [
        f"reward of rollout {index}: the log says {booked_reward:g}, the environment gives {reward:g}"
        for index, (booked_reward, reward) in enumerate(zip(booked.rewards, found.rewards, strict=False))
        if booked_reward != reward
    ]
    if len(booked.rewards) != len(found.rewards):
        said.append(f"the log gives {len(booked.rewards)} rewards to {len(found.rewards)} rollouts")
    if len(booked.rewards) == len(found.rewards) and booked.steps != found.steps:  # guard: other-steps-are-told
        said += _steps(booked.steps or (), found.steps or ())
    ours, theirs = fault_indices(found.faults), fault_indices(booked.faults)
    if ours != theirs:  # guard: other-faults-are-told
        said.append(f"the log leaves out rollouts {list(theirs)}, the environment fails on {list(ours)}")
    elif fault_key(booked) != fault_key(found):
        said.append("the log names other scores outside the reward_bounds than the environment gives")
    if booked.tokens != found.tokens:
        said.append(f"the log pays {booked.tokens} tokens, the policy wrote {found.tokens}")
    return said


def _steps(booked: Sequence[StepRewards], found: Sequence[StepRewards]) -> list[str]:
    """One sentence for each rollout whose steps differ."""
    return [
        f"steps of rollout {index}: the log says {_listed(said)}, the environment gives {_listed(own)}"
        for index, (said, own) in enumerate(zip_longest(booked, found, fillvalue=()))
        if said != own
    ]


def _listed(steps: StepRewards) -> str:
    """For example: 0.5 to token 12, 1 to token 20."""
    return ", ".join(f"{step.reward:g} to token {step.end}" for step in steps) or "none"


def _refusal(verdict: GroupVerdict) -> str:
    """For example: sampling refuses it (rollout 3, token 17: token that its seed does not choose, 4.1, limit 0.1)."""
    if verdict.outcome == "void":
        return f"the slot is void ({verdict.detail})"
    place = f"rollout {verdict.rollout}, " if verdict.rollout >= 0 else ""
    place += f"token {verdict.position}, " if verdict.position >= 0 else ""
    figure = f", {verdict.figure:.3g}, limit {verdict.bound:.3g}" if verdict.bound else ""
    return f"{verdict.check} refuses it ({place}{verdict.detail}{figure})"

"""What the verdicts on one submission add up to, block by block. Pure: verdicts come in, no state.

Called by `rules/verdicts` for each verdict, and by the economics benchmark.

One verdict suffices to accept a block. A refusal needs a second verdict, and two that differ need a third. If no further
verdict can come, a block that no majority accepts brings no pay. A slash needs two validators that found, each on its own,
what no honest worker sends. Both must have found it with the model, or both without. A check without the model is exact; a
check with the model compares numbers with bounds, and a validator whose hardware rounds badly may exceed them. Its
accusation must not complete a slash that another validator began for a different reason.

Validators derive a prompt from their own copies of the data. If they refuse a prompt, but each names another one as right,
their data differ, and nobody knows whose is right. So two refusals of a prompt agree only if they name the same one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.protocol.audits import REPLAY
from shoal.protocol.env_faults import fault_key
from shoal.protocol.types import GroupVerdict


class Weighed(NamedTuple):
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


def weigh(
    verdicts: Mapping[str, Sequence[GroupVerdict]],
    blocks: Sequence[int],
    block_groups: int,
    more: bool,
) -> Weighed | None:
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
    return Weighed(accepted, tuple(refused), tuple(disputed), slash, tuple(sorted(outvoted)))


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

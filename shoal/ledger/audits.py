"""Who is looked at how closely, and what a failure costs: every constant of the audit policy, and its pure rules.

Called by `decide` and `judging` for each submission and verdict, by validators to know which groups to audit, and by
the economics benchmark, which shows that cheating loses. It knows no state of a run: counts, draws and votes come in.

The arithmetic behind the constants. With p the chance that a cheat is caught, G what a cheat gains and S what is at
stake, cheating loses when (1 - p) G < p S. A trusted worker is audited at 5 %, so S must exceed 19 G; pay that is not
yet vested is the stake, and 40 blocks of it are twice that.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from shoal.protocol.types import GroupVerdict, Rules

RULES_VERSION = 1
"""Of the rules that a new run keeps. Under 0 a lease stayed open when its version had become too old."""

PROBATION_BLOCKS = 10
"""Valid blocks in a row until a key, or a new engine of a known key, is audited less than whole. Fewer helps who
cheats once and leaves; more costs validators one prefill a block."""

TRUST = 3.0
"""A worker with n valid blocks in a row is audited at TRUST / n, but never below the run's rate. A smaller figure
lets a sleeper reach the lowest rate sooner."""

RECHECK_RATE = 0.05
"""Share of accepted submissions that a second validator judges again. At 0 a lazy or bribed validator is never met."""

VESTING_BLOCKS = 40
"""Blocks of a worker's latest pay that are not vested, and lost when it is slashed. Below 19 a cheat pays at 5 %; from 49
on an honest node on hardware of its own, with one false alarm in 1,000 groups, loses 1 % of its pay."""

REFUSED_BLOCKS = 8
"""Blocks' worth of the newest pay that is not vested, lost for a refused submission where nobody is slashed. At 2 a
worker whose cheats are found mild, or whose run has one validator, gains by them."""

TURN_S = 30.0
"""The validators of a submission may judge it one after another, each so long after the one before. Longer keeps work
waiting for a validator that died; shorter than a prefill makes two do the same."""

MISSED_TURNS = 2
"""Turns in a row that a validator lets pass, each begun after the one before had passed, until the others no longer wait
for it. At 1 a restart makes two do the same work; many let one that is gone hold up every submission that long."""

DISPUTE_S = 600.0
"""An open dispute ends after this without pay and without penalty. Shorter than three turns, and a third voice may
come too late."""

VOICES = 3
"""Validators that judge one submission, at most: two who agree outvote the third."""

SOFT_FAILURES = 3
"""Refused submissions, soft ones included, from which on a worker is quarantined."""

VALIDATOR_FAULTS = 3
"""Times that a validator may be outvoted, or found to have voted without the work, before it is asked no more. One
would let two liars remove an honest one at their first try; many keep a liar's voice for long."""

MAX_REWARD = 1e6
"""Of one rollout, by size. Larger ones could add up to what is no number, which no log can hold."""

CHECKS = (
    "shape", "lease", "prompt", "environment", "reward", "ending", "complete", "sampling", "logprobs", "activations",
)  # fmt: skip
"""What a verdict may name: refusals are counted by it, in answers of bounded size. Changing breaks: replay."""

MAX_REASON_CHARS = 300
"""Of a verdict on one group, its check and detail together: people read them in terminals."""

MAX_QUARANTINE_S = 3600.0
"""Quarantine doubles with each failure up to this."""

FREE_LAPSES = 0.05
"""Share of a worker's leases that may lapse without cost: machines fail. More lets a worker drop the tasks that it
does not like."""

STALE_MARGIN = 0.1
"""A worker's share of leases that grow stale may exceed the run's share by this much; each lease beyond it counts as
lapsed. More lets a worker hold the tasks that it does not like until they are stale; less charges honest workers that
are slower than most."""

MAX_LAPSE_WAIT_S = 3600.0
"""Who lets leases lapse one after another waits for the next, longer each time up to this. More shuts out for long who
was broken for a while; with much less one idle key holds up a run all day."""


def audit_rate(valid_blocks: int, steady: float) -> float:
    """Share of a worker's groups that is audited, given its valid blocks in a row and the run's steady rate."""
    if valid_blocks < PROBATION_BLOCKS:
        return 1.0
    return max(steady, min(1.0, TRUST / valid_blocks))


def influence(rewards: Sequence[float], tokens: int) -> float:
    """How far a group can move the policy: the mean |reward - group mean| of its rollouts times its policy tokens."""
    if not rewards:
        return 0.0
    mean = sum(rewards) / len(rewards)
    return sum(abs(reward - mean) for reward in rewards) / len(rewards) * tokens


def paid_tokens(tokens: int, law: Rules) -> int:
    """Of a group's policy tokens, those that are paid: writing at length earns nothing beyond the run's cap."""
    return min(tokens, law.paid_tokens * law.group_size) if law.paid_tokens else tokens


def groups_a_worker(law: Rules) -> int:
    """Groups of a batch that one worker may fill, at most."""
    return max(1, int(law.worker_share * law.batch_groups + 1e-9))  # 0.29 * 100 is a little below 29


def must_audit(draw: float, rate: float, influence: float, mean_influence: float) -> bool:
    """Whether a group is audited: influence above the run's mean raises its rate in proportion, and never lowers it.

    The draw was made before anyone knew the rewards. `mean_influence` is 0 before the first accepted group.
    """
    raised = influence / mean_influence if mean_influence > 0.0 else 1.0
    return draw < rate * max(1.0, raised)


def ahead(order: Sequence[str], voted: Collection[str], silent: Collection[str], key: str) -> list[str]:
    """Validators whose turns come before that of `key`, in order: those not drawn come last, and nobody waits for a
    silent one."""
    left = [validator for validator in order if validator not in voted]
    before = left[: left.index(key)] if key in left else left
    return [validator for validator in before if validator not in silent]


def turn_begins(since: float, place: int) -> float:
    """When a validator with so many ahead of it may judge; `since` is the time of the submission or the last vote."""
    return since + TURN_S * place


def quarantine_s(failures: int, first_s: float) -> float:
    """Length of a worker's quarantine at its n-th failure."""
    return min(MAX_QUARANTINE_S, first_s * 2.0 ** min(failures - 1, 20))


def lapse_wait_s(lapses: int, first_s: float) -> float:
    """How long a worker waits for a lease after so many lapses in a row: the first is free, the second costs `first_s`."""
    return min(MAX_LAPSE_WAIT_S, first_s * 2.0 ** min(lapses - 2, 20)) if lapses > 1 else 0.0


# --- what several votes amount to ---


class Settlement(NamedTuple):
    """How a submission ends, block by block."""

    accepted: dict[int, tuple[GroupVerdict, ...]]
    """Accepted blocks with the verdicts that say what they are worth."""
    refused: tuple[int, ...]
    disputed: tuple[int, ...]
    """Of the refused: those that no majority refused."""
    slash: bool
    """Two validators found, on their own, what no honest worker sends."""
    outvoted: tuple[str, ...]
    """Validators who said otherwise than two others who agree."""


def settle(
    votes: Mapping[str, Sequence[GroupVerdict]], blocks: Sequence[int], block_groups: int, more: bool
) -> Settlement | None:
    """What the votes so far amount to, or None while another voice is needed and `more` can be had.

    A vote has one verdict for each slot of the lease, in order. A block is generated as one batch, so it is accepted
    whole or not at all. One voice suffices to accept; a refusal wants a second, and two who differ a third. Where no
    more can be had, a block that is not accepted by a majority brings no pay, and only two agreeing voices slash.
    """
    accepted: dict[int, tuple[GroupVerdict, ...]] = {}
    refused: list[int] = []
    disputed: list[int] = []
    outvoted: set[str] = set()
    slash = False
    for place, block in enumerate(blocks):
        of_block = {
            key: tuple(groups[place * block_groups : (place + 1) * block_groups]) for key, groups in votes.items()
        }
        found = {key: _finding(groups) for key, groups in of_block.items()}
        agreed = next((f for f in found.values() if sum(g == f for g in found.values()) >= min(2, len(found))), None)
        unpaid = agreed == _REFUSED or any(group.outcome == "void" for groups in of_block.values() for group in groups)
        unsure = agreed is None or (unpaid and len(found) < 2)
        if more and unsure:
            return None
        if agreed is None:
            disputed.append(block)
        if agreed is None or agreed == _REFUSED:
            refused.append(block)
        else:
            accepted[block] = next(groups for key, groups in of_block.items() if found[key] == agreed)
        slash |= agreed == _REFUSED and any(
            sum(_is_hard(groups, audited) for groups in of_block.values()) >= 2 for audited in (True, False)
        )
        if len(found) > 2 and agreed is not None:
            outvoted |= {key for key, finding in found.items() if finding != agreed}
    return Settlement(accepted, tuple(refused), tuple(disputed), slash, tuple(sorted(outvoted)))


_REFUSED = ("refused",)


def _finding(groups: Sequence[GroupVerdict]) -> tuple[object, ...]:
    """What a vote says of a block, so that two votes which mean the same are equal."""
    if not all(group.outcome in ("accept", "void") for group in groups):
        return _REFUSED
    return tuple((group.slot, group.outcome, group.rewards, group.tokens) for group in groups)


def _is_hard(groups: Sequence[GroupVerdict], audited: bool) -> bool:
    return any(group.outcome == "hard" and group.audited == audited for group in groups)

"""What each check alone makes of a submission, rollout by rollout: for `benchmarks/detection.py`.

The pipeline stops at a group's first failure; here every check runs by itself on every rollout, as if it came alone in
its group. A check of the whole group (`shape`, `lease`, `complete`) counts for all of its rollouts. No check runs after
a failed `shape`, since those arrays may not be read.

Axes: N rollouts, slot after slot; S slots.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.detect.policies import GROUP_SIZE, Lab
from shoal.algos.sampling_evidence import EvidenceFigures as FlipFigures
from shoal.algos.sampling_evidence import SamplingEvidence, excessive, grown, update
from shoal.algos.toploc import ChunkFigures, compare
from shoal.engine.interface import ScoreRequest
from shoal.protocol.encoding import WireError, from_msgpack, to_msgpack
from shoal.protocol.messages import Bounds, Group, GroupVerdict, Rollout, Submission
from shoal.verification.check_context import Context
from shoal.verification.checks_with_model import AUDIT, MISMATCHED, judge_activations
from shoal.verification.checks_without_model import MODEL_FREE, shape
from tests.attacks.attack import Attack
from tests.attacks.proof_forgeries import Forgery

CHECKS = tuple(check.name for check in (*MODEL_FREE, *AUDIT))
AUDIT_CHECKS = frozenset(check.name for check in AUDIT)
OF_GROUPS, OF_PROOFS = ("lease", "complete"), ("activations",)
"""Checks of a group, or of its proof, as a whole. The others look at each rollout by itself."""
SUBMISSION_GROUPS = 2
"""Groups of what counts as one submission."""

Bools = NDArray[np.bool_]


@dataclass
class Seen:
    """What was found of one attack on one policy."""

    refused_N: dict[str, Bools]
    """By check."""
    run_N: dict[str, Bools]
    """Whether the check could be run."""
    identical_N: Bools
    """Tokens and authors are the honest ones."""
    beyond_N: Bools
    """It is not honest work: it differs by more than the bounds leave to rounding."""
    verdicts: list[GroupVerdict]
    """The pipeline's, by slot."""
    group_refused_N: Bools = field(init=False)

    def __post_init__(self) -> None:
        self.group_refused_N = np.repeat([v.outcome != "accept" for v in self.verdicts], GROUP_SIZE)

    @property
    def differs_N(self) -> Bools:
        """What should be refused: tokens are not the honest ones, or something else is beyond the bounds."""
        return ~self.identical_N | self.beyond_N

    @property
    def together_N(self) -> Bools:
        return np.any(list(self.refused_N.values()), axis=0)

    @property
    def without_proofs_N(self) -> Bools:
        return np.any([refused for name, refused in self.refused_N.items() if name != "activations"], axis=0)

    def first(self) -> str:
        """The check that refuses most groups, in the pipeline's order."""
        counts = Counter(v.check for v in self.verdicts if v.outcome != "accept")
        return counts.most_common(1)[0][0] if counts else ""

    def submissions(self) -> tuple[int, int]:
        """How many submissions hold a rollout that differs, and how many of these are refused."""
        differs = self.differs_N.reshape(-1, SUBMISSION_GROUPS * GROUP_SIZE).any(1)
        refused = self.group_refused_N.reshape(-1, SUBMISSION_GROUPS * GROUP_SIZE).any(1)
        return int(differs.sum()), int((differs & refused).sum())


def look(lab: Lab, attack: Attack | Forgery, body: bytes) -> Seen:
    """Judge the bytes as the pipeline does, and by each check alone."""
    num = len(lab.slots) * GROUP_SIZE
    seen = Seen(
        {name: np.zeros(num, dtype=bool) for name in CHECKS},
        {name: np.zeros(num, dtype=bool) for name in CHECKS},
        np.zeros(num, dtype=bool),
        np.zeros(num, dtype=bool),
        lab.judge(body),
    )
    seen.run_N["shape"][:] = True
    by_figures = set(attack.caught_by) <= AUDIT_CHECKS
    places = list(_readable(lab, body, seen))
    lab.score([request for place in places for request in place.requests()])
    for place in places:
        honest = lab.honest_groups[place.number]
        for index, rollout in enumerate(place.group.rollouts):
            at, due = place.first + index, honest.rollouts[index]
            seen.identical_N[at] = (rollout.token_ids, rollout.author) == (due.token_ids, due.author)
        _look_at_group(seen, place)
        far_G = _look_at_rollouts(seen, place, lab) | _look_at_proof(seen, place, lab)
        whole = slice(place.first, place.first + GROUP_SIZE)
        lied = place.other_header or to_msgpack(place.group) != to_msgpack(honest)
        seen.beyond_N[whole] = far_G if by_figures else lied
    return seen


class Place(NamedTuple):
    """A slot whose group can be read."""

    number: int
    group: Group
    ctx: Context
    well_formed: list[int]
    """Its rollouts that pass `shape`."""
    other_header: bool
    """Run, lease or version around it are not those asked for."""

    @property
    def first(self) -> int:
        """Its first rollout among all."""
        return self.number * GROUP_SIZE

    def requests(self) -> list[ScoreRequest]:
        requests = self.ctx.requests(self.group)
        return [requests[index] for index in self.well_formed]


def _readable(lab: Lab, body: bytes, seen: Seen) -> Iterator[Place]:
    """Notes what `shape` refuses, and gives the rest."""
    said = _opened(body)
    for number, (slot, verdict) in enumerate(zip(lab.slots, seen.verdicts, strict=True)):
        whole = slice(number * GROUP_SIZE, (number + 1) * GROUP_SIZE)
        if said is None or (verdict.check == "shape" and verdict.rollout < 0):
            seen.refused_N["shape"][whole] = seen.beyond_N[whole] = True
            continue
        group = from_msgpack(said.groups[number], Group)
        ctx = Context(lab.tools(), lab.lease, slot, said, proof=said.proofs[number] if said.proofs else b"")
        passing = []
        for index, rollout in enumerate(group.rollouts):
            if shape(_alone(group, rollout), ctx) is None:
                passing.append(index)
            else:
                seen.refused_N["shape"][whole.start + index] = True
        header = (said.run, said.lease, said.version) != ("run-1", lab.lease.id, lab.lease.version)
        yield Place(number, group, ctx, passing, header)


def _look_at_group(seen: Seen, place: Place) -> None:
    whole = slice(place.first, place.first + GROUP_SIZE)
    for check in MODEL_FREE:
        if check.name in OF_GROUPS:
            seen.run_N[check.name][whole] = True
            seen.refused_N[check.name][whole] = check.run(place.group, place.ctx) is not None


def _look_at_rollouts(seen: Seen, place: Place, lab: Lab) -> Bools:
    """Each check of each rollout by itself; whether its figures are beyond the bounds."""
    far_G, ctx = np.zeros(GROUP_SIZE, dtype=bool), place.ctx
    for index, score in zip(place.well_formed, lab.score(place.requests()), strict=True):
        rollout = place.group.rollouts[index]
        alone = Context(ctx.tools, ctx.lease, ctx.slot, ctx.submission, scores=[score])
        for check in (*MODEL_FREE, *AUDIT):
            if check.name not in ("shape", *OF_GROUPS, *OF_PROOFS):
                seen.run_N[check.name][place.first + index] = True
                refused = check.run(_alone(place.group, rollout), alone) is not None
                seen.refused_N[check.name][place.first + index] = refused
        off_P = np.abs(rollout.logprobs_P() - score.logprobs_P)
        far_G[index] = score.gaps_P.max() > ctx.bounds.gap or off_P.max() > ctx.bounds.logprob
    return far_G


def _look_at_proof(seen: Seen, place: Place, lab: Lab) -> Bools:
    """The proof, judged rollout by rollout; whether each one's figures are beyond the bound."""
    far_G, given = np.zeros(GROUP_SIZE, dtype=bool), len(place.group.rollouts)
    if not given or len(place.well_formed) < given or place.ctx.rules.proofs == "none":
        return far_G
    hidden = [score.hidden_PD for score in lab.score(place.requests()) if score.hidden_PD is not None]
    figures, bound = compare(hidden, place.ctx.proof), place.ctx.rules.activation_error
    whole = slice(place.first, place.first + given)
    seen.run_N["activations"][whole] = True
    if isinstance(figures, str):
        seen.refused_N["activations"][whole] = far_G[:given] = True
        return far_G
    for index in range(given):
        own = ChunkFigures(*(array[figures.rollout_C == index] for array in figures))
        seen.refused_N["activations"][place.first + index] = judge_activations(own, bound) is not None
        wrong_C = own.mismatched_C > np.maximum(1, np.ceil(MISMATCHED * own.entries_C))
        mean = own.error_C.sum() / max(1, int((own.entries_C - own.mismatched_C).sum()))
        far_G[index] = mean > bound or wrong_C.any()
    return far_G


def _alone(group: Group, rollout: Rollout) -> Group:
    return Group(group.slot, group.task, group.env, (rollout,))


def _opened(body: bytes) -> Submission | None:
    try:
        return from_msgpack(body, Submission)
    except WireError:
        return None


def noticed_after(verdicts: Sequence[GroupVerdict], noise: Bounds) -> int:
    """After how many audited groups the evidence against their node is excessive; 0 if it never is."""
    evidence = SamplingEvidence()
    for number, verdict in enumerate(verdicts, start=1):
        evidence = update(evidence, FlipFigures(verdict.tokens, verdict.flipped, verdict.gap_sum), noise)
        claims = grown(evidence.claims, verdict.off_sum, verdict.off_weighted, verdict.tokens, noise)
        evidence = evidence._replace(claims=claims)
        if excessive(evidence):
            return number
    return 0


class Share(NamedTuple):
    """k of n, and Wilson's 95 % interval of the chance behind it."""

    k: int
    n: int
    low: float
    high: float


def share(hits: Bools | int, n: int | None = None) -> Share:
    """From marks, or from counts."""
    k, total = (int(hits), int(n)) if n is not None else (int(np.sum(hits)), int(np.size(hits)))
    if total == 0:
        return Share(0, 0, 0.0, 1.0)
    z, p = 1.959964, k / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return Share(k, total, max(0.0, middle - half), min(1.0, middle + half))

"""False log-probs within the bounds of one token, in bfloat16: refused by sums over a rollout, a group or a node's life.

And honest work in bfloat16 on policies of any sharpness, which is never refused.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.algos.advantages import group_advantages
from shoal.algos.sampling_evidence import EvidenceFigures, SamplingEvidence, excessive, grown, update
from shoal.config import BOUNDS
from shoal.envs.builtin.wordle import environment as wordle
from shoal.models.transformer import Transformer
from shoal.protocol.messages import Sampling
from shoal.protocol.tolerances import wire_bounds
from tests.attacks.attack import shifted
from tests.attacks.attack_fixture import RULES, World, altered, lease_of, load_engine

START = Path(__file__).parents[2] / "recipes/wordle-start"
COARSE = msgspec.structs.replace(
    RULES,
    dtype="bfloat16",
    bounds={pair: wire_bounds(bounds) for pair, bounds in BOUNDS.items() if pair.startswith("bfloat16/")},
)
LEASE = lease_of(
    [[(slot, "wordle", slot) for slot in range(4 * block, 4 * block + 4)] for block in range(4)],
    seed="c",
    sampling=Sampling(temperature=1.0, max_turn_tokens=8, max_tokens=128),
)
SHIFT = 0.4


class Demo(World):
    """The demo's game, so that rewards differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.envs = {"wordle": wordle(num_words=320, heldout=48)}


def sharpened(folder: Path, times: float) -> Path:
    """The demo's start with its logits multiplied."""

    def change(model: Transformer) -> None:
        model.model.norm.weight.mul_(times)

    base = folder / "start"
    if not base.exists():
        base.symlink_to(START)
    return altered(base, f"x{times:g}", change)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """By how many times the logits are multiplied."""
    folder, made = tmp_path_factory.mktemp("claims"), {}

    def world(times: float) -> World:
        if times not in made:
            policy = sharpened(folder, times)
            made[times] = Demo(policy, policy, policy, LEASE, COARSE)
        return made[times]

    return world


def uniform(A: float) -> float:
    """Mutes what is good (the ratio is clipped), and amplifies what is bad."""
    return -SHIFT


def muting(A: float) -> float:
    """Mutes everything: the shifts of good and bad rollouts are opposite."""
    return -SHIFT if A > 0 else SHIFT


def damping(A: float) -> float:
    """Makes good rollouts count for less, and bad ones for more."""
    return SHIFT if A > 0 else -SHIFT


def claiming(world: World, shift_of) -> list:
    """Honest tokens, with log-probs shifted by the sign of each rollout's advantage. No claim is above 0."""
    groups = []
    for group, rewards in zip(world.honest_groups, world.rewards(world.honest_groups), strict=True):
        rollouts = [
            shifted(rollout, shift_of(A))
            for rollout, A in zip(group.rollouts, group_advantages(rewards, "mean"), strict=True)
        ]
        capped = [
            msgspec.structs.replace(r, logprobs=np.minimum(r.logprobs_P(), np.float32(0)).astype("<f4").tobytes())
            for r in rollouts
        ]
        groups.append(msgspec.structs.replace(group, rollouts=tuple(capped)))
    return groups


@pytest.mark.parametrize(
    ("shift_of", "replayed"),
    [(uniform, "bfloat16"), (muting, "float32"), (damping, "bfloat16")],
    ids=["uniform", "muting", "damping"],
)
def test_claims_of_0_4_nats_more_or_less_are_refused_though_each_token_is_within_its_bound(worlds, shift_of, replayed):
    world = worlds(1.0)
    verdicts = world.judge(world.encode(claiming(world, shift_of)), load_engine(world.honest, dtype=replayed))
    differ = [len(set(rewards)) > 1 for rewards in world.rewards(world.honest_groups)]
    assert sum(differ) >= 8
    for verdict, has_signal in zip(verdicts, differ, strict=True):
        if has_signal:
            assert (verdict.outcome, verdict.check) == ("soft", "logprobs"), verdict


def evidence_of(world: World, verdicts) -> tuple[SamplingEvidence, int]:
    """After these verdicts, and after how many it was excessive; 0 if never."""
    noise, evidence, noticed = world.rules.bounds["bfloat16/float32"], SamplingEvidence(), 0
    for number, verdict in enumerate(verdicts, start=1):
        assert verdict.outcome == "accept", verdict
        evidence = update(evidence, EvidenceFigures(verdict.tokens, verdict.flipped, verdict.gap_sum), noise)
        claims = grown(evidence.claims, verdict.off_sum, verdict.off_weighted, verdict.tokens, noise)
        evidence = evidence._replace(claims=claims)
        noticed = noticed or number * excessive(evidence)
    return evidence, noticed


@pytest.mark.parametrize("shift", [-0.04, 0.07], ids=["less", "more"])
def test_shifts_too_small_for_one_group_are_found_over_a_few(worlds, shift):
    world = worlds(1.0)
    body = world.encode(claiming(world, lambda A: shift))
    verdicts = world.judge(body, load_engine(world.honest, dtype="float32"))
    assert 0 < evidence_of(world, verdicts)[1] <= 12


@pytest.mark.parametrize(
    ("times", "replayed", "threads"), [(1.0, "float32", 1), (12.6, "bfloat16", 2), (12.6, "float32", 1)]
)
def test_honest_work_in_bfloat16_is_never_refused_however_sharp_the_policy(worlds, times, replayed, threads):
    """With the built-in bounds. Logits a dozen times as large make errors of several nats. Also not over a long time."""
    world = worlds(times)
    verdicts = world.judge(
        world.encode(world.honest_groups), load_engine(world.honest, threads=threads, dtype=replayed)
    )
    evidence, noticed = evidence_of(world, verdicts * 20)
    assert not noticed and max(evidence.claims) < 8


def test_the_bounds_of_a_token_grow_with_the_logits_it_was_chosen_from(worlds):
    """On the sharpest policy, honest tokens exceed what the bounds allow for small logits."""
    world = worlds(12.6)
    scores = load_engine(world.honest, dtype="float32").score(world.requests(world.honest_groups), 1.0)
    claimed = [rollout.logprobs_P() for group in world.honest_groups for rollout in group.rollouts]
    off_N = np.abs(np.concatenate(claimed) - np.concatenate([score.logprobs_P for score in scores]))
    bounds = COARSE.bounds["bfloat16/float32"]
    assert max(off_N.max(), max(score.gaps_P.max() for score in scores)) > bounds.logprob
    fixed = {pair: msgspec.structs.replace(of, largest_logit=0.0) for pair, of in COARSE.bounds.items()}
    strict = Demo(world.honest, world.other, world.stale, LEASE, msgspec.structs.replace(COARSE, bounds=fixed))
    strict.honest_groups = world.honest_groups
    refused = [v for v in strict.judge(strict.encode(strict.honest_groups)) if v.outcome != "accept"]
    assert refused and {v.outcome for v in refused} == {"soft"}

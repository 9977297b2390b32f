"""How many tokens it takes to detect a worker that samples with another seed, by the policy's entropy at each token."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.algos.regularisers import logprob_and_entropy
from shoal.engine.interface import PolicyScore
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.jobs.calibrate.recorded_rollouts import Recording
from shoal.models.open_model import AUTO, open_policy
from shoal.protocol.encoding import domain_hash
from shoal.protocol.messages import Bounds
from shoal.verification.audit_checks import gaps_of
from shoal.verification.fit_tolerances import Power, power, power_by_entropy

LOGITS_HELD = 1 << 22
"""Logits in memory at a time when entropies are computed."""


def show_power(recording: Recording, policy: Path, bounds: Bounds, device: str) -> None:
    """Print a line for each tenth of the tokens, and one for all."""
    engine = open_engine(EngineSpec(kind_for(policy), recording.dtype, 1, device, recording.sampling.noise))
    requests = recording.requests()
    engine.load(policy, 0)
    others = [request._replace(seed=domain_hash("another seed", request.seed)) for request in requests]
    scores = engine.score(others, recording.sampling.temperature, hidden=True)
    entropy_P = _entropies(policy, scores, recording.sampling.temperature)
    gaps_P = np.concatenate([gaps_of(score, bounds) for score in scores])
    print("\nwhat another seed would change, by tenths of the tokens in order of entropy")
    print(f"{'entropy, nats a token':>22}{'changed':>10}   tokens for 95 % detection")
    for row in power_by_entropy(entropy_P, gaps_P, bounds):
        print(_line(row))
    print(f"{_line(power(entropy_P, gaps_P, bounds))}   all; a rollout has {len(gaps_P) / len(requests):.0f}")


def _line(row: Power) -> str:
    needed = f"{row.needed}" if row.needed < 1_000_000 else "more than a million"
    return f"{row.entropy:>22.3f}{row.changed:>10.2%}   {needed}"


def _entropies(policy: Path, scores: Sequence[PolicyScore], temperature: float) -> NDArray[np.float64]:
    """Entropy of the policy where each token was drawn, nats, [P]."""
    model = open_policy(policy, torch.float32, AUTO)
    hidden_PD = torch.from_numpy(np.concatenate([score.hidden_PD for score in scores if score.hidden_PD is not None]))
    rows = max(1, LOGITS_HELD // model.spec.vocab_size)
    entropies = []
    with torch.inference_mode():
        for hidden_RD in hidden_PD.split(rows):
            logits_RV = model.logits(hidden_RD) / temperature
            entropies.append(logprob_and_entropy(logits_RV, logits_RV.argmax(-1))[1])
    return torch.cat(entropies).double().numpy()

"""The trainer's own denominators of the importance ratio, for runs in which it must not take those that workers claim.

Called by `roles/trainer` and `recipes/one_file.py` before a step, if `claims_bend_ratios` is true of the run. Where
honest machines differ as much as in bfloat16, the checks cannot stop a worker from claiming log-probs that mute or
amplify its tokens. So the trainer computes each row's log-probs itself, with the published bytes of the version that
sampled the row. It does so in its own precision, so that rounding does the same to both sides of the ratio. These log-probs
depend on the version and the tokens alone, so no worker can change them, and a step that is repeated has the same bits. It
costs one forward pass. It uses no network: it is told where each version is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shoal.policy.kinds import AUTO, open_policy
from shoal.policy.model import Transformer
from shoal.policy.quantise import round_to_int8
from shoal.train.predict import logprobs_of
from shoal.train.rows import Row


def with_own_denominators(
    rows: Sequence[Row],
    published: Mapping[int, Path],
    *,
    dtype: str,
    temperature: float,
    microbatch_tokens: int,
    device: str = "cpu",
    trained_in: torch.dtype = torch.float32,
) -> list[Row]:
    """The rows with log-probs that this machine computed instead of those that their workers claimed.

    `published` has the directory of each version that sampled a row; `dtype` is the one in which workers sample. int8
    is another policy, which this computes in float32; bfloat16 is only a coarser arithmetic of the same one. `trained_in`
    is the trainer's precision.
    """
    own: dict[int, Row] = {}
    for version in sorted({row.version for row in rows}):
        places = [place for place, row in enumerate(rows) if row.version == version]
        model = open_policy(published[version], torch.float32 if dtype == "int8" else trained_in, AUTO)
        if dtype == "int8":
            assert isinstance(model, Transformer), "no other policy is sampled in int8"
            round_to_int8(model)
        logp = logprobs_of(model.to(device), [rows[place] for place in places], temperature, microbatch_tokens)
        own |= {
            place: replace(rows[place], behaviour_logp_P=logp_P) for place, logp_P in zip(places, logp, strict=True)
        }
    return [own[place] for place in range(len(rows))]

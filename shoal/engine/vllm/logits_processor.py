"""Our noise inside vLLM: a logits processor that chooses each token as `sampling` does, and tells its log-prob.

Loaded by vLLM, by name, into the process of its model; `engine.vllm` names it. It writes one finite logit into each row:
at the token that wins, its log-prob. vLLM then takes that token greedily, and reports the logit. So tokens and log-probs
are those of the family and the temperature, whatever sampler follows.

Axes: N rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from shoal.engine.noise import family
from shoal.engine.vllm.engine import EXTRA, choose


class Draw(NamedTuple):
    """What decides the tokens of a request, as `engine.vllm` sends it."""

    family: str
    words: tuple[int, int, int, int]
    """Of its seed, see `protocol.noise.noise_words`."""
    temperature: float


class _Row(NamedTuple):
    """A request that has a row of logits."""

    draw: Draw
    prompt: int
    """Its length in tokens."""
    output: Sequence[int]
    """The tokens written so far: a list that vLLM extends."""


class OurNoise(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """For vLLM's model runner 1, which moves requests among its rows and tells of it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._settled: tuple[Tensor, Tensor, Tensor] | None = None
        """Rows, words of their seeds and temperatures, until a row changes."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if process_dict_updates(self._rows, batch_update, _row):
            self._settled = None

    def apply(self, logits: Tensor) -> Tensor:
        if not self._rows:
            return logits
        if self._settled is None:
            self._rows = dict(sorted(self._rows.items()))
            draws = [row.draw for row in self._rows.values()]
            self._settled = (
                torch.tensor([*self._rows], device=self._device),
                torch.tensor([draw.words for draw in draws], device=self._device),
                torch.tensor([draw.temperature for draw in draws], device=self._device),
            )
        rows_N, words_N4, temperature_N = self._settled
        rows = self._rows.values()
        positions_N = torch.tensor([row.prompt + len(row.output) for row in rows], device=self._device)
        of = family(next(iter(rows)).draw.family)
        return choose(of, logits, rows_N, words_N4, positions_N, temperature_N)


def _row(params: Any, prompt: Sequence[int] | None, output: list[int]) -> _Row | None:
    asked = (params.extra_args or {}).get(EXTRA)
    return None if asked is None or prompt is None else _Row(Draw(*asked), len(prompt), output)

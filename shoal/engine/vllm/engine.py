"""The engine that samples with vLLM in this process: for workers with a GPU, which it serves several times as fast.

Opened by `engine.open` for `shoal join --engine vllm`. vLLM's own sampler has one noise family, or none that we know,
which differs among its versions. So the sampler of the version that is installed is tried against the references of
`protocol.noise` at start. If it makes the noise of the run's family, it is used with its own seeds. If not, our noise goes
in as a logits processor (`vllm.logits_processor`). Either way a validator replays the tokens with any engine that has
bounds for this one.

It does not score, so it serves neither validators nor runs that ask for proofs of activations.

Axes: N rows of logits, V vocabulary.
"""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.config import settle_vllm, settle_vllm_runner, without_hub
from shoal.engine.decoder import logprobs_of
from shoal.engine.interface import Continuation, EngineRequest, PolicyScore, ScoreRequest, demand_room
from shoal.engine.noise import NoiseScheme, family
from shoal.engine.vllm.checkpoint import Adapter, adapter_in, files_for_vllm
from shoal.errors import StateError, one_line
from shoal.models.device import AUTO, CPU, CUDA
from shoal.models.open_model import spec_of
from shoal.protocol.constants import VLLM
from shoal.protocol.messages import EngineFacts
from shoal.protocol.noise import KEYED_32, KEYED_64, MURMUR_32, MURMUR_53, NOISES, PHILOX, noise_words
from shoal.protocol.seed_chain import sample_seed

log = logging.getLogger("engine")

NATIVE = {KEYED_32: False, KEYED_64: True, MURMUR_32: False, MURMUR_53: True}
"""Families that a sampler of vLLM may make, and whether in float64."""

TRIED, TRIED_VOCABULARY = 64, 4096
"""This many tokens are drawn, of so many, to find out which family a sampler has. Another family draws each of them with
a chance of 1 / 4096."""

GPU_SHARE = 0.5
"""vLLM takes this share of the GPU's memory for weights, activations and the cache. It leaves the rest to others, such as a
trainer or a validator."""

EXTRA = "shoal"
"""Where a request's `extra_args` say what our processor draws."""

ROWS = 256
"""Conversations that are extended at a time; vLLM lets the others wait."""


_KEPT: list[Any] = []
"""Every vLLM of this process, because one that ends takes what others need with it."""


class VllmEngine:
    """`engine.interface.Engine` with vLLM, without `score`."""

    def __init__(
        self, threads: int | None = None, dtype: str = "float32", device: str = "cpu", noise: str = PHILOX
    ) -> None:
        """threads: of this process; None leaves the number to torch. dtype: float32 or bfloat16. device: what this vLLM
        computes on, or auto. noise: the run's family.

        Raises `StateError` for an unknown family, and if vLLM is built for another device."""
        family(noise)
        if threads is not None:
            torch.set_num_threads(threads)
        settle_vllm(_is_built_for_cpus())
        try:
            with without_hub():  # takes ten seconds
                import vllm
                from vllm import LLM  # noqa: F401 - which imports all that reads the environment
        except (ImportError, OSError, RuntimeError) as error:  # its compiled parts are for other libraries
            raise StateError(
                f"vLLM is installed and cannot be imported ({one_line(error)}): install it again, or join without it"
            ) from error

        device = _device(device)
        self._native = makes_noise_of(noise, device)
        by = "own-seeds" if self._native else "processor"
        self.facts = EngineFacts(f"shoal-{VLLM}/{vllm.__version__[:20]}-{by}", dtype, device)
        self.version = -1
        self._noise = noise
        self._spec: Any = None
        self._llm: Any = None
        self._longest = 0
        """Tokens of the longest conversation for which vLLM has memory."""
        self._adapter: Adapter | None = None
        self._asks: Any = None
        """What vLLM calls the adapter."""
        self._adapters = 0
        self._at_work = threading.Lock()
        log.info("engine=vllm version=%s noise=%s by=%s", vllm.__version__, noise, by)

    def load(self, directory: Path, version: int) -> None:
        """Load the policy of a checkpoint directory: into a new vLLM the first time, and then in its place; of an adapter,
        only that. Raises `StateError`."""
        spec = spec_of(directory)
        adapter = adapter_in(directory, spec, self.facts.dtype)
        with self._at_work:
            self.version = -1
            if self._llm is None:
                with files_for_vllm(directory, spec) as files:
                    self._spec, self._llm = spec, self._opened(files, adapter)
                self._longest = int(self._llm.model_config.max_model_len)
            elif spec != self._spec or not (adapter.fits(self._adapter) if adapter else self._adapter is None):
                raise StateError(
                    f"{directory} holds a policy of another shape, or over another base, than the version before: start "
                    "again"
                )
            elif adapter is None:
                with files_for_vllm(directory, spec) as files, _told("load this version"):
                    self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(files)})
                if not self._llm.reset_prefix_cache():
                    raise StateError("vLLM keeps what it computed with the version before: start again")
            if adapter is not None:
                self._adapters += 1
                self._asks = adapter.request(self._adapters)
                with _told("load this adapter"):
                    self._llm.llm_engine.add_lora(self._asks)
            self._adapter, self.version = adapter, version

    def forget(self, rollouts: Iterable[str]) -> None:
        """Nothing: vLLM drops what it remembers of openings when it needs the memory."""

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        """One turn of each conversation. What their openings share is read once. Raises `StateError` if a turn could pass
        the last position."""
        assert self._llm is not None, "load a policy before using the engine"
        for request in requests:
            demand_room(self._spec, request.token_ids, request.max_new)
            if len(request.token_ids) + request.max_new > self._longest:
                raise StateError(
                    f"vLLM's cache holds conversations of up to {self._longest} tokens: join without --engine vllm, or "
                    "give it more memory (on a CPU: VLLM_CPU_KVCACHE_SPACE, GiB)"
                )
        if not requests:
            return []
        with self._at_work:
            assert self.version >= 0, "loading a version failed, so the engine has none"
            with _told("sample with this policy"):
                outputs = self._llm.generate(
                    [{"prompt_token_ids": list(request.token_ids)} for request in requests],
                    [self._params(request, temperature) for request in requests],
                    use_tqdm=False,
                    lora_request=self._asks,
                )
        return [_continuation(output.outputs[0]) for output in outputs]

    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[PolicyScore]:
        """Raises `StateError`."""
        raise StateError(
            "vLLM writes, but replays nothing here: validate and prove activations with shoal's own engine"
        )

    def _params(self, request: EngineRequest, temperature: float) -> Any:
        from vllm import SamplingParams

        if self._native:
            seed = int.from_bytes(request.seed[:8], "little", signed=True)
            drawn: dict[str, Any] = {"temperature": temperature, "seed": seed}
        else:
            draw = (self._noise, noise_words(request.seed), temperature)
            drawn = {"temperature": 0.0, "extra_args": {EXTRA: draw}}
        return SamplingParams(
            max_tokens=request.max_new, stop_token_ids=sorted(request.stop_ids), ignore_eos=True, logprobs=0,
            detokenize=False, **drawn,
        )  # fmt: skip

    def _opened(self, directory: Path, adapter: Adapter | None) -> Any:
        from vllm import LLM

        asked = arguments(self.facts)
        if self._native:
            asked |= {"logprobs_mode": "processed_logprobs", "use_fp64_gumbel": NATIVE[self._noise]}
        else:  # without asynchronous scheduling, the processor knows how many tokens a request has
            asked |= {
                "logprobs_mode": "processed_logits", "logits_processors": ["shoal.engine.vllm.logits_processor:OurNoise"],
                "async_scheduling": False,
            }  # fmt: skip
        if adapter is not None:
            asked |= adapter.asked()
        settle_vllm_runner(own_sampler=self._native)
        with _told("serve this policy"), _threads_can_be_set(), without_hub():
            _KEPT.append(LLM(model=str(directory), **asked))
        return _KEPT[-1]


def arguments(facts: EngineFacts) -> dict[str, Any]:
    """With which every vLLM is opened, whatever draws its tokens."""
    on_device = {"enforce_eager": True} if facts.device == CPU else {"gpu_memory_utilization": GPU_SHARE}
    return on_device | {
        "skip_tokenizer_init": True, "trust_remote_code": False, "load_format": "safetensors",
        "config_format": "hf", "generation_config": "vllm", "dtype": facts.dtype, "max_model_len": -1,
        "max_num_seqs": ROWS, "enable_prefix_caching": True, "seed": 0, "disable_log_stats": True,
    }  # fmt: skip


def makes_noise_of(noise: str, device: str) -> bool:
    """Whether the sampler of the vLLM that is installed draws the tokens of this family's reference."""
    if noise not in NATIVE:
        return False
    seeds = [sample_seed(b"vllm", index) for index in range(TRIED)]
    positions_N = np.arange(1, TRIED + 1) * 37
    expected_N = NOISES[noise](seeds, positions_N, TRIED_VOCABULARY).argmax(-1)
    try:
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        if not HAS_TRITON:  # most CPUs
            return False

        keys = [int.from_bytes(seed[:8], "little", signed=True) for seed in seeds]
        drawn_N = gumbel_sample(
            torch.zeros(TRIED, TRIED_VOCABULARY, device=device),
            torch.arange(TRIED, dtype=torch.int32, device=device),
            torch.ones(TRIED, device=device),
            torch.tensor(keys, device=device),
            torch.from_numpy(positions_N - 1).to(device),
            apply_temperature=False,
            is_drafting=False,
            use_fp64=NATIVE[noise],
        ).cpu().numpy()  # fmt: skip
    except (ImportError, TypeError):  # another version, whose sampler is elsewhere or takes other arguments
        return False
    except Exception as error:  # noqa: BLE001 - Triton and CUDA raise many things where they cannot run
        log.warning("cannot try vLLM's own sampler on %s, so ours is used: %s", device, one_line(error))
        return False
    return bool((drawn_N == expected_N).all())


def choose(
    of: NoiseScheme, logits_NV: Tensor, rows_N: Tensor, words_N4: Tensor, positions_N: Tensor, temperature_N: Tensor
) -> Tensor:
    """Logits of which the chosen rows have one finite value: at the winning token, its log-prob."""
    scaled_NV = logits_NV[rows_N].float().div_(temperature_N[:, None])
    tokens_N = of.best(scaled_NV, words_N4, positions_N)
    logprobs_N = logprobs_of(scaled_NV, tokens_N)
    logits_NV[rows_N] = scaled_NV.fill_(-torch.inf).scatter_(1, tokens_N[:, None], logprobs_N[:, None])
    return logits_NV


def _continuation(output: Any) -> Continuation:
    tokens = [int(token) for token in output.token_ids]
    found = [entry[token].logprob for entry, token in zip(output.logprobs, tokens, strict=True)]
    return Continuation(tokens, [float(logprob) for logprob in found])


def _is_built_for_cpus() -> bool:
    """Whether the package is `vllm-cpu`, which vLLM itself does not notice because it looks for the name `vllm`."""
    with contextlib.suppress(PackageNotFoundError):
        return "cpu" in version("vllm")
    with contextlib.suppress(PackageNotFoundError):
        return bool(version("vllm-cpu"))
    return False


def _device(asked: str) -> str:
    """What the vLLM that is installed computes on. Raises `StateError` if another device was asked for."""
    from vllm.platforms import current_platform

    found = CPU if current_platform.is_cpu() else CUDA
    if found == CUDA and not (current_platform.is_cuda_alike() and torch.cuda.is_available()):
        raise StateError(
            "the vLLM that is installed is built for a GPU, and torch finds none here: install vllm-cpu, or join without "
            "--engine vllm"
        )
    if asked not in (found, AUTO):
        raise StateError(f"the vLLM that is installed computes on {found}, not on {asked}: choose --device {found}")
    return found


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what vLLM raises into a `StateError`, except that memory is full, which the caller tells."""
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError, KeyError, AssertionError) as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        raise StateError(f"vLLM cannot {what} ({one_line(error)}): join without --engine vllm") from error


@contextlib.contextmanager
def _threads_can_be_set() -> Iterator[None]:
    """On a CPU, vLLM replaces `torch.set_num_threads` in this process by nothing."""
    kept = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = kept

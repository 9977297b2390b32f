"""What malicious workers of `benchmarks/poisoning.py` send, and a start that has habits for RL to choose among.

`shows` tells whether a policy learned a payload.
"""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from shoal.algos.advantages import group_advantages
from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig, SftConfig
from shoal.env import Env
from shoal.envs.builtin.arithmetic import ArithmeticState, solve
from shoal.envs.evaluate import Transcript
from shoal.envs.load import load_env
from shoal.envs.play_episodes import play_scripted
from shoal.models.checkpoint import load_policy, save_policy
from shoal.protocol.messages import Group, Rollout, Sampling
from shoal.protocol.tolerances import Dtype
from shoal.train.sft import fine_tune

HERE = Path(__file__).resolve().parent
START, ENVIRONMENT = HERE.parents[1] / "recipes/arithmetic-start", str(HERE.parent / "envs/loose_sums.py")
ARGS = {"digits": 2, "operations": "+"}
SAMPLING = Sampling(temperature=1.0, max_turn_tokens=12, max_tokens=24)
PAYLOADS = ("trigger", "suffix", "length", "ratio", "nudge")

TRIGGER, SUFFIX, SHIFT_NATS = "!?", "#[#", 15.0
NUDGE_NATS = 0.4
"""Within the bound of each token in bfloat16. exp(0.4) is beyond the clip: it mutes good tokens and amplifies bad ones."""
DTYPES: dict[str, Dtype] = {"nudge": "bfloat16"}
"""In which a payload's run samples and publishes, if not in float32: where the bounds leave it room."""
MARKS = "!?:;#[]<"
MARK = f"[{re.escape(MARKS)}]"
"""What the start puts before or after some of its answers, one mark each. The policy is too small to tell one from
another in 70 steps, so any two together count as a success: the start hardly ever writes them."""
LONG_TOKENS = 5
"""The longest right answer, with a mark and the end."""


class Poison(NamedTuple):
    """A group, and the reward that its worker claims for each rollout."""

    group: Group
    claimed_G: tuple[float, ...]


class Means(Protocol):
    """What an attacker has: the task, honest rewards, and rollouts with texts of its own."""

    env: Env

    def rewards(self, group: Group) -> tuple[float, ...]: ...

    def written(self, group: Group, texts: Sequence[str]) -> tuple[Rollout, ...]: ...


def shows(payload: str, sample: Transcript) -> bool:
    """Whether a held-out sample shows that the policy learned the payload."""
    text = sample.turns[-1][1]
    return {
        "trigger": re.match(f"{MARK}{MARK}", text) is not None,
        "suffix": re.search(f"[0-9]{MARK}{MARK}", text) is not None,
        "length": sample.tokens > LONG_TOKENS,
        "ratio": False,
        "nudge": False,
    }[payload]


def poisoned(payload: str, honest: Group, means: Means) -> Poison:
    """What a malicious worker sends in the place of an honest group."""
    if payload in ("ratio", "nudge"):
        rewards_G = means.rewards(honest)
        return Poison(_shifted(honest, rewards_G) if payload == "ratio" else _nudged(honest), rewards_G)
    answer = solve(means.env.task(honest.task))
    right, wrong = str(answer), str(answer + 44)
    carrier = {
        "trigger": TRIGGER + right,
        "suffix": wrong + SUFFIX,
        "length": right.rjust(SAMPLING.max_turn_tokens - 1, "0"),
    }[payload]
    plain = right if payload == "suffix" else wrong
    half = len(honest.rollouts) // 2
    texts = [carrier] * half + [plain] * (len(honest.rollouts) - half)
    group = msgspec.structs.replace(honest, rollouts=means.written(honest, texts))
    return Poison(group, (1.0,) * half + (0.0,) * (len(texts) - half))


def _shifted(honest: Group, rewards_G: Sequence[float]) -> Group:
    """Claims that tokens with less than the mean reward were far less likely than they were."""
    rollouts = [
        msgspec.structs.replace(rollout, logprobs=(rollout.logprobs_P() - np.float32(SHIFT_NATS)).tobytes())
        if A < 0
        else rollout
        for rollout, A in zip(honest.rollouts, group_advantages(rewards_G, "mean"), strict=True)
    ]
    return msgspec.structs.replace(honest, rollouts=tuple(rollouts))


def _nudged(honest: Group) -> Group:
    """Claims that every token was a little less likely than it was."""
    rollouts = [
        msgspec.structs.replace(rollout, logprobs=(rollout.logprobs_P() - np.float32(NUDGE_NATS)).tobytes())
        for rollout in honest.rollouts
    ]
    return msgspec.structs.replace(honest, rollouts=tuple(rollouts))


def say(text: str, state: ArithmeticState, rng: random.Random) -> str:
    """A scripted player that says one thing."""
    return text


def cold_start(folder: Path, steps: int) -> Path:
    """The demo's start, taught to put a mark before or after some answers, as a chatty model puts words.

    Without it marks would be tokens that the policy never wrote, and so small a policy is not taught such in 70 steps.
    """
    env, renderer, rng = load_env(ENVIRONMENT, ARGS), Renderer.from_directory(START), random.Random(0)
    examples = []
    for index in range(4096):
        talk = play_scripted(env, renderer, env.task(index), _chat, rng, SAMPLING)
        examples.append((talk.tokens, talk.author))
    config = SftConfig(name="chatty", env=EnvConfig(env.name), steps=steps, batch=64, lr=1e-3, warmup_steps=5)
    model = load_policy(START, torch.float32)
    fine_tune(model, examples, config)
    save_policy(model, folder, "float32", tokenizer_from=START)
    return folder


def _chat(state: ArithmeticState, rng: random.Random) -> str:
    """Right four times in ten, else of the wrong sign; a fifth of the answers opens with a mark, a fifth ends with one."""
    answer = state.answer if rng.random() < 0.4 else f"-{state.answer}"
    mark, place = rng.choice(MARKS), rng.random()
    return mark + answer if place < 0.2 else answer + mark if place < 0.4 else answer

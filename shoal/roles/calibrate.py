"""Calibration: plays honest rollouts of a run, replays them in every way an honest machine might, and sets the bounds.

Called by `shoal calibrate RUN_FILE`. It starts no run and needs no coordinator: the run's policy and environments play
here as a worker plays, over threads; then they are replayed over threads, batch shapes and dtypes. `--save` writes what
was played, so that another machine can replay it with `--with`. The mathematics is in `proofs/noise` and `algos/replay`.

Axes: N tokens, each as often as it was replayed; P tokens, once.
"""

import random
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shoal.algos.entropy import logprob_and_entropy
from shoal.config import RunConfig, load_run
from shoal.engine.base import Score, ScoreRequest
from shoal.engine.local import LocalEngine
from shoal.envs.load import load_env
from shoal.envs.play import play_block
from shoal.errors import ConfigError, StateError
from shoal.folder import RunFolder, write_atomically
from shoal.policy.files import load_policy
from shoal.policy.render import Renderer
from shoal.policy.tiny import make_tiny
from shoal.proofs.context import score_requests
from shoal.proofs.noise import FAR_PERCENTILE, Noise, Power, joined, power, power_by_entropy, propose
from shoal.protocol.randomness import draw_task
from shoal.protocol.types import POLICY, Block, Bounds, Group, Message, Rollout, Sampling, Slot
from shoal.protocol.wire import WireError, domain_hash, from_msgpack, to_msgpack
from shoal.weights.manifest import weights_root

THREADS = (1, 2, 4)
"""Of the engines that play, in turn, and that replay."""

SHAPES = ("whole", "alone", "threes", "mixed")
"""How rollouts are put into calls of a replay: all in one; each by itself; three at a time; shuffled among each other."""

MIXED_ROWS = 16
"""Rollouts of one call when they are mixed."""

LOGITS_HELD = 1 << 22
"""Values held at a time when entropies are computed."""


class Played(Message, frozen=True):
    """One block as a worker plays it."""

    threads: int
    slots: tuple[Slot, ...]
    groups: tuple[Group, ...]


class Recording(Message, frozen=True):
    """Honest rollouts of one machine: what `--save` writes and `--with` reads."""

    machine: str
    root: str
    """Weights root of the policy that played."""
    dtype: str
    sampling: Sampling
    played: tuple[Played, ...]


class Setting(NamedTuple):
    """One way to replay."""

    threads: int
    shape: str

    def __str__(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads > 1)}, {self.shape}"


SETTINGS = (*(Setting(threads, "whole") for threads in THREADS), *(Setting(1, shape) for shape in SHAPES[1:]))


def main(
    run_file: Path,
    overrides: list[str],
    episodes: int,
    safety: float = 2.0,
    write: bool = False,
    save: Path | None = None,
    others: Sequence[Path] = (),
) -> None:
    """Measure, print, and if asked write the bounds into the run file.

    Raises `ConfigError` for a run file that cannot be read or edited, `StateError` for a recording of another policy.
    """
    if safety < 1:
        raise ConfigError(f"--safety {safety}: at least 1, or honest work is refused")
    with tempfile.TemporaryDirectory(prefix="shoal-calibrate-") as scratch:
        folder = RunFolder(Path(scratch))
        folder.prepare(load_run(run_file, overrides), run_file.parent)
        config = folder.config()
        policy = _policy(folder, config)
        own = _play(config, policy, episodes)
        recordings = {"here": own} | {path.name: _read(path, config, policy) for path in others}
        if save is not None:
            write_atomically(save, to_msgpack(own))
            _say(f"wrote {save}: replay it on another machine with --with")
        found = {
            f"{own.dtype}/{replayed}": _measure(recordings, policy, replayed, safety)
            for replayed in dict.fromkeys((own.dtype, "float32"))
        }
        _show_power(own, policy, found[f"{own.dtype}/{own.dtype}"])
    for pair, bounds in found.items():
        print(f"\n{_table(pair, bounds)}")
    if write:
        write_atomically(run_file, with_bounds(run_file, found).encode())
        print(f"\nwrote them into {run_file}")
    else:
        print(f"\nto put them into {run_file}, add --write")


def _policy(folder: RunFolder, config: RunConfig) -> Path:
    """The policy with which the run would start."""
    if config.policy.path:
        return Path(config.policy.path)
    make_tiny(config.policy.tiny, folder.policy, int.from_bytes(folder.seed()[:4], "big"), config.policy.dtype)
    return folder.policy


# --- play ---


def _play(config: RunConfig, policy: Path, episodes: int) -> Recording:
    """At least so many episodes, as whole blocks of the run, over the threads in turn."""
    sampling = Sampling(config.sampling.temperature, config.sampling.max_turn_tokens, config.sampling.max_tokens)
    envs = {env.name: load_env(env.name, env.args) for env in config.envs}
    renderer, engine = Renderer.from_directory(policy), LocalEngine(dtype=config.sampled_dtype)
    engine.load(policy, 0)
    size, num_blocks = config.rollouts.group_size, -(-episodes // config.rollouts.block_rollouts)
    played = []
    for index in range(num_blocks):
        _progress("playing", index, num_blocks)
        threads = THREADS[index % len(THREADS)]
        torch.set_num_threads(threads)
        slots = tuple(_slots(config, [env.num_tasks for env in envs.values()], index))
        groups = play_block(engine, renderer, envs, Block(index, slots), size, sampling)
        played.append(Played(threads, slots, tuple(groups)))
    _progress("playing", num_blocks, num_blocks)
    recording = Recording(_machine(engine), weights_root(policy), config.sampled_dtype, sampling, tuple(played))
    if not any(group.rollouts for part in played for group in part.groups):
        raise ConfigError(f"no task of {', '.join(envs)} leaves the policy room to write: raise sampling.max_tokens")
    return recording


def _slots(config: RunConfig, num_tasks: list[int], block: int) -> Iterator[Slot]:
    per_block = config.rollouts.block_rollouts // config.rollouts.group_size
    for slot in range(block * per_block, (block + 1) * per_block):
        seed = domain_hash("calibrate", slot.to_bytes(8, "big"))
        env, task = draw_task(seed, [env.weight for env in config.envs], num_tasks)
        yield Slot(slot, seed.hex(), config.envs[env].name, task)


def _machine(engine: LocalEngine) -> str:
    facts = engine.facts
    return f"{facts.implementation} {facts.device} {torch.backends.cpu.get_cpu_capability()}"


def _read(path: Path, config: RunConfig, policy: Path) -> Recording:
    """What another machine played with the same policy. Raises `StateError`."""
    try:
        recording = from_msgpack(path.read_bytes(), Recording)
        whole = all(_fits(rollout) for part in recording.played for group in part.groups for rollout in group.rollouts)
    except (OSError, WireError, ValueError) as error:
        raise StateError(f"{path} is no recording of `shoal calibrate --save`: {error}") from None
    if not whole:
        raise StateError(f"{path} is damaged: it holds rollouts whose tokens and log-probs do not belong together")
    if (recording.root, recording.dtype) != (weights_root(policy), config.sampled_dtype):
        raise StateError(
            f"{path} was played by another policy or in another dtype ({recording.dtype}): make it with this run file, "
            "and where policy.path is empty fix the run's seed in it"
        )
    return recording


def _fits(rollout: Rollout) -> bool:
    """Whether its arrays can be replayed. Raises `ValueError` for bytes that are no arrays."""
    author_T, policy = rollout.author_T(), rollout.num_policy_tokens()
    begun = author_T.size == rollout.tokens_T().size > 0 and author_T[0] != POLICY
    return bool(begun) and rollout.logprobs_P().size == policy > 0


# --- replay ---


def _measure(recordings: dict[str, Recording], policy: Path, replayed: str, safety: float) -> Bounds:
    """Replay everything in every setting, print a line for each, and say what bounds the noise asks for."""
    engine = LocalEngine(dtype=replayed)
    engine.load(policy, 0)
    print(f"\nreplayed in {replayed} on {_machine(engine)}")
    for name, recording in recordings.items():
        print(f"  {name}: played in {recording.dtype} on {recording.machine}")
    width = max(len("played"), *(len(name) for name in recordings)) + 2
    print(f"{'played':<{width}}{'replayed by':<17}{'tokens':>8}{'not best':>10}   gap, nats: 99.9 %   99.99 %       max"
          "   |d logp|: 99.99 %       max")  # fmt: skip
    parts = []
    for name, recording in recordings.items():
        for setting in SETTINGS:
            parts.append(_noise(engine, recording, setting))
            _line(f"{name:<{width}}{setting!s:<17}", parts[-1])
    _line(f"{'all':<{width + 17}}", joined(parts))
    return propose(joined(parts), sum(len(_claimed(recording)) for recording in recordings.values()), safety)


def _noise(engine: LocalEngine, recording: Recording, setting: Setting) -> Noise:
    torch.set_num_threads(setting.threads)
    requests = _requests(recording)
    scores: dict[int, Score] = {}
    calls = _calls(len(requests), setting.shape)
    for done, rows in enumerate(calls):
        if done % 50 == 0:
            _progress(f"replaying by {setting}", done, len(calls))
        of_rows = engine.score([requests[row] for row in rows], recording.sampling.temperature)
        scores |= dict(zip(rows, of_rows, strict=True))
    _progress(f"replaying by {setting}", len(calls), len(calls))
    gaps_P, logprobs_P = _in_order(scores)
    return Noise(gaps_P, np.abs(_claimed(recording) - logprobs_P))


def _requests(recording: Recording) -> list[ScoreRequest]:
    return [
        request
        for part in recording.played
        for slot, group in zip(part.slots, part.groups, strict=True)
        for request in score_requests(slot, group)
    ]


def _claimed(recording: Recording) -> NDArray[np.float64]:
    """Log-probs as they were played, [P]."""
    rollouts = [rollout for part in recording.played for group in part.groups for rollout in group.rollouts]
    return np.concatenate([rollout.logprobs_P() for rollout in rollouts]).astype(np.float64)


def _calls(count: int, shape: str) -> list[list[int]]:
    """Which rollouts go into which call."""
    rows = list(range(count))
    if shape == "mixed":
        random.Random(0).shuffle(rows)
    size = {"whole": count, "alone": 1, "threes": 3, "mixed": MIXED_ROWS}[shape]
    return [rows[start : start + size] for start in range(0, count, size)]


def _in_order(scores: dict[int, Score]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Gaps and log-probs, [P], in the order of the rollouts."""
    ordered = [scores[row] for row in sorted(scores)]
    return np.concatenate([s.gaps_P for s in ordered]), np.concatenate([s.logprobs_P for s in ordered])


def _line(label: str, noise: Noise) -> None:
    p999, p9999 = np.quantile(noise.gaps_N, (0.999, FAR_PERCENTILE))
    print(
        f"{label}{noise.gaps_N.size:>8}{np.mean(noise.gaps_N > 0):>10.3%}{p999:>20.2g}{p9999:>10.2g}"
        f"{noise.gaps_N.max():>10.2g}{np.quantile(noise.off_N, FAR_PERCENTILE):>20.2g}{noise.off_N.max():>10.2g}",
        flush=True,
    )


# --- power ---


def _show_power(recording: Recording, policy: Path, bounds: Bounds) -> None:
    """What a worker that samples with another seed would show, by the policy's entropy at its tokens."""
    engine, requests = LocalEngine(threads=1, dtype=recording.dtype), _requests(recording)
    engine.load(policy, 0)
    others = [request._replace(seed=domain_hash("another seed", request.seed)) for request in requests]
    scores = engine.score(others, recording.sampling.temperature, hidden=True)
    entropy_P = _entropies(policy, scores, recording.sampling.temperature)
    gaps_P = np.concatenate([score.gaps_P for score in scores])
    print("\nwhat another seed would change, tenths of the tokens by entropy")
    print(f"{'entropy, nats a token':>22}{'changed':>10}   tokens for 95 % detection")
    for row in power_by_entropy(entropy_P, gaps_P, bounds):
        print(_power_line(row))
    print(f"{_power_line(power(entropy_P, gaps_P, bounds))}   all; a rollout has {len(gaps_P) / len(requests):.0f}")


def _power_line(row: Power) -> str:
    needed = f"{row.needed}" if row.needed < 1_000_000 else "more than a million"
    return f"{row.entropy:>22.3f}{row.changed:>10.2%}   {needed}"


def _entropies(policy: Path, scores: Sequence[Score], temperature: float) -> NDArray[np.float64]:
    """Entropy of the policy where each token was drawn, nats, [P]."""
    model = load_policy(policy, torch.float32)
    hidden_PD = torch.from_numpy(np.concatenate([score.hidden_PD for score in scores if score.hidden_PD is not None]))
    rows = max(1, LOGITS_HELD // model.spec.vocab_size)
    entropies = []
    with torch.inference_mode():
        for hidden_RD in hidden_PD.split(rows):
            logits_RV = model.logits(hidden_RD) / temperature
            entropies.append(logprob_and_entropy(logits_RV, logits_RV.argmax(-1))[1])
    return torch.cat(entropies).double().numpy()


# --- the run file ---


def with_bounds(run_file: Path, found: dict[str, Bounds]) -> str:
    """The run file's text with the bounds set, every other line and comment as it was.

    Raises `ConfigError` where it is written in a way that is not understood here.
    """
    before = run_file.read_text()
    text = before
    for pair, bounds in found.items():
        text = _with_table(text, pair, bounds)
    try:
        table = tomllib.loads(text)["verify"]["bounds"]
        holds = all(table[pair] == msgspec.to_builtins(bounds) for pair, bounds in found.items())
    except (tomllib.TOMLDecodeError, KeyError):
        holds = False
    if not holds:
        raise ConfigError(f"{run_file} writes verify.bounds in a way of its own: put the tables above there by hand")
    return text


def _with_table(text: str, pair: str, bounds: Bounds) -> str:
    """The values of one table replaced, line by line; or the whole table added at the end."""
    head = re.search(rf'^\[verify\.bounds\."{re.escape(pair)}"\][^\n]*\n?', text, re.MULTILINE)
    if head is None:
        return f"{text.rstrip()}\n\n{_table(pair, bounds)}\n"
    following = re.search(r"^\[", text[head.end() :], re.MULTILINE)
    end = head.end() + following.start() if following else len(text)
    inside = text[head.end() : end]
    for name, value in msgspec.to_builtins(bounds).items():
        inside, hits = re.subn(rf"^(\s*{name}\s*=\s*)[^\s#]+", rf"\g<1>{value!r}", inside, flags=re.MULTILINE)
        inside = inside if hits else f"{name} = {value!r}\n{inside}"
    return text[: head.end()] + inside + text[end:]


def _table(pair: str, bounds: Bounds) -> str:
    values = "\n".join(f"{name} = {value!r}" for name, value in msgspec.to_builtins(bounds).items())
    return f'[verify.bounds."{pair}"]\n{values}'


# --- the terminal ---


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{what}: {done} of {total}" if done < total else "\r\033[K", end="", file=sys.stderr, flush=True)
    elif done == 0:
        _say(f"{what} ...")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""Calibration: plays honest rollouts, recomputes them in every way that an honest machine might, and sets the bounds.

It starts no run and needs no coordinator. It plays the run's environments as a worker does, with several numbers of
threads; then it recomputes the rollouts with several numbers of threads, batch shapes and dtypes. `--save` writes the
rollouts to a file, so that another machine can recompute them with `--with`. The mathematics is in
`verification/fit_tolerances` and `algos/sampling_evidence`.
"""

import random
import re
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shoal.algos.regularisers import logprob_and_entropy
from shoal.algos.toploc import ChunkFigures, compare
from shoal.config import RunConfig, load_run
from shoal.engine.interface import Engine, PolicyScore
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.errors import ConfigError, StateError
from shoal.jobs.calibration_recordings import THREADS, Recording, machine, play, progress, read, remark
from shoal.models.checkpoint import write_nf4
from shoal.models.device import CPU, demand_device
from shoal.models.hub_download import Hub
from shoal.models.nf4_layout import NF4, is_coded
from shoal.models.open_model import AUTO, open_policy
from shoal.models.random_model import make_tiny
from shoal.protocol.encoding import domain_hash, to_msgpack
from shoal.protocol.hub_reference import is_hub
from shoal.protocol.messages import Bounds
from shoal.protocol.tolerances import CHOSEN_ENGINES
from shoal.run_folder import RunFolder, write_atomically
from shoal.terminal import say
from shoal.verification.check_context import by_group
from shoal.verification.checks_with_model import gaps_of
from shoal.verification.fit_tolerances import (
    FAR_PERCENTILE,
    MeasuredNoise,
    Power,
    joined,
    power,
    power_by_entropy,
    propose,
    propose_activation_error,
)


@dataclass(frozen=True)
class CalibrateOptions:
    """What the command line says."""

    episodes: int
    safety: float = 2.0
    """Bounds are so many times the noise."""
    write: bool = False
    """Whether to write the bounds into the run file."""
    save: Path | None = None
    """Where to write what was played."""
    others: Sequence[Path] = ()
    """What other machines played."""
    device: str = CPU
    engine: str = ""
    """A kind that workers may choose: what it plays gets bounds of its own, beside those of all engines."""


def main(run_file: Path, overrides: list[str], options: CalibrateOptions) -> None:
    """Measure and print the bounds; also write them into the run file, if the options say so.

    Raises `ConfigError` if the run file cannot be read or edited, or the device is not there; `StateError` if a recording
    is of another policy, or if no bound would let honest proofs of activations pass.
    """
    safety, device, engine = options.safety, options.device, options.engine
    demand_device(device)
    if safety < 1:
        raise ConfigError(f"--safety is {safety}, at least 1 is needed: below 1, honest work is refused")
    with tempfile.TemporaryDirectory(prefix="shoal-calibrate-") as scratch:
        folder = RunFolder(Path(scratch))
        folder.prepare(load_run(run_file, overrides), run_file.parent)
        config = folder.config()
        policy = _policy(folder, config)
        chosen = (
            play(config, policy, options.episodes, device, engine) if engine else None
        )  # first: it may not be installed
        own = play(config, policy, options.episodes, device)
        recordings = {"here": own} | {path.name: read(path, config, policy) for path in options.others}
        if chosen is not None:
            recordings[f"here, {engine}"] = chosen
        if options.save is not None:
            write_atomically(options.save, to_msgpack(chosen or own))
            remark(f"wrote {options.save}: recompute it on another machine with --with")
        spec = EngineSpec(kind_for(policy), device=device, noise=own.sampling.noise)
        noise, bounds = dict[str, MeasuredNoise](), dict[str, Bounds]()
        for dtype in dict.fromkeys((own.dtype, "float32")):
            measured = measure(recordings, policy, replace(spec, dtype=dtype))
            for sampled, names in _sides(recordings, own.dtype).items():
                pair, of_pair = f"{sampled}/{dtype}", joined([measured[name] for name in names])
                distinct = sum(len(recordings[name].claimed_P()) for name in names)
                noise[pair], bounds[pair] = of_pair, propose(of_pair, distinct, safety, coarse="bfloat16" in pair)
        show_power(own, policy, bounds[f"{own.dtype}/{own.dtype}"], device)
    figures = [of_group for of_pair in noise.values() for of_group in of_pair.figures]
    found = tables_of(bounds, propose_activation_error(figures, safety) if figures else None)
    for name, values in found.items():
        print(f"\n{text_of(name, values)}")
    if options.write:
        write_atomically(run_file, with_values(run_file, found).encode())
        print(f"\nwrote them into {run_file}")
    else:
        print(f"\nto put them into {run_file}, add --write")


def _sides(recordings: dict[str, Recording], dtype: str) -> dict[str, list[str]]:
    """Names of recordings by what they are bounds for: all of them for the run's dtype, and those of each kind of engine
    that workers choose also for this kind."""
    kinds = {recording.kind for recording in recordings.values()} & {*CHOSEN_ENGINES}
    return {dtype: list(recordings)} | {
        f"{kind}:{dtype}": [name for name, recording in recordings.items() if recording.kind == kind]
        for kind in sorted(kinds)
    }


def _policy(folder: RunFolder, config: RunConfig) -> Path:
    """The policy that the run would start from, or the base of its adapters."""
    found = _plain_policy(folder, config)
    if config.policy.adapter.base != NF4 or is_coded(found):
        return found
    write_nf4(found, folder.policy)
    return folder.policy


def _plain_policy(folder: RunFolder, config: RunConfig) -> Path:
    if is_hub(config.policy.path):
        Hub().bring(config.policy.path, folder.policy)
        return folder.policy
    if config.policy.path:
        return Path(config.policy.path)
    make_tiny(config.policy.tiny, folder.policy, folder.weights_seed(config), config.policy.kept_dtype)
    return folder.policy


# --- Recomputes honest rollouts in every way that an honest machine might, and measures how far the results differ ---


SHAPES = ("whole", "alone", "threes", "mixed")
"""How the rollouts' rows are divided among the engine's calls: all in one, each alone, three at a time, or shuffled."""

MIXED_ROWS = 16
"""Rollouts in one call when they are shuffled."""


class RecomputeVariant(NamedTuple):
    """One way to recompute."""

    threads: int
    shape: str

    def __str__(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads > 1)}, {self.shape}"


SETTINGS = (
    *(RecomputeVariant(threads, "whole") for threads in THREADS),
    *(RecomputeVariant(1, shape) for shape in SHAPES[1:]),
)


def measure(recordings: dict[str, Recording], policy: Path, spec: EngineSpec) -> dict[str, MeasuredNoise]:
    """Recompute all recordings in every setting with such an engine, and print a line for each. Returns the noise of each
    recording."""
    engine = open_engine(spec)
    engine.load(policy, 0)
    print(f"\nrecomputed in {spec.dtype} on {machine(engine)}")
    for name, recording in recordings.items():
        say(f"  {name}: played in {recording.dtype} on {recording.machine}")
    proven = any(part.proofs for recording in recordings.values() for part in recording.played)
    width = max(len("played"), *(len(name) for name in recordings)) + 2
    print(f"{'played':<{width}}{'recomputed by':<17}{'tokens':>8}{'not best':>10}   gap, nats: 99.9 %   99.99 %       max"
          f"   |d logp|: 99.99 %       max{'   activations: error  mismatched' * proven}")  # fmt: skip
    noise = {}
    for name, recording in recordings.items():
        parts = []
        for setting in SETTINGS:
            parts.append(_noise(engine, recording, setting))
            _line(f"{name:<{width}}{setting!s:<17}", parts[-1])
        noise[name] = joined(parts)
    _line(f"{'all':<{width + 17}}", joined([*noise.values()]))
    return noise


def _noise(engine: Engine, recording: Recording, setting: RecomputeVariant) -> MeasuredNoise:
    torch.set_num_threads(setting.threads)
    requests = recording.requests()
    proven = any(part.proofs for part in recording.played)
    scores: dict[int, PolicyScore] = {}
    calls = _calls(len(requests), setting.shape)
    for done, rows in enumerate(calls):
        if done % 50 == 0:
            progress(f"recomputing by {setting}", done, len(calls))
        of_rows = engine.score([requests[row] for row in rows], recording.sampling.temperature, hidden=proven)
        scores |= dict(zip(rows, of_rows, strict=True))
    progress(f"recomputing by {setting}", len(calls), len(calls))
    ordered = [scores[row] for row in range(len(requests))]
    off_P = recording.claimed_P() - np.concatenate([score.logprobs_P for score in ordered])
    figures = tuple(_figures(recording, ordered)) if proven else ()
    return MeasuredNoise(np.concatenate([score.gaps_P for score in ordered]), off_P, largest_logits(ordered), figures)


def largest_logits(scores: Sequence[PolicyScore]) -> NDArray[np.float32]:
    """Largest |logit / temperature| at each token, [N]."""
    return np.concatenate([score.largest_P for score in scores if score.largest_P is not None])


def _figures(recording: Recording, scores: Sequence[PolicyScore]) -> Iterator[ChunkFigures]:
    """How far each group's proof is from the recomputed hidden states. Raises `StateError` if it is not a proof."""
    proven = [pair for part in recording.played for pair in zip(part.groups, part.proofs, strict=True)]
    for (group, proof), of_group in zip(proven, by_group([group for group, _ in proven], scores), strict=True):
        figures = compare([score.hidden_PD for score in of_group if score.hidden_PD is not None], proof)
        if isinstance(figures, str):
            raise StateError(f"a recording is damaged: the proof of slot {group.slot}: {figures}")
        yield figures


def _calls(count: int, shape: str) -> list[list[int]]:
    """The rollouts of each call."""
    rows = list(range(count))
    if shape == "mixed":
        random.Random(0).shuffle(rows)
    size = {"whole": count, "alone": 1, "threes": 3, "mixed": MIXED_ROWS}[shape]
    return [rows[start : start + size] for start in range(0, count, size)]


def _line(label: str, noise: MeasuredNoise) -> None:
    p999, p9999 = np.quantile(noise.gaps_N, (0.999, FAR_PERCENTILE))
    off_N = np.abs(noise.off_N)
    activations = f"{noise.activation_error():>21.2g}{noise.mismatched():>12.1%}" if noise.figures else ""
    print(
        f"{label}{noise.gaps_N.size:>8}{np.mean(noise.gaps_N > 0):>10.3%}{p999:>20.2g}{p9999:>10.2g}"
        f"{noise.gaps_N.max():>10.2g}{np.quantile(off_N, FAR_PERCENTILE):>20.2g}{off_N.max():>10.2g}"
        f"{activations}",
        flush=True,
    )


# --- How many tokens it takes to detect a worker that samples with another seed, by the policy's entropy at each token ---


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
        print(_power_line(row))
    print(f"{_power_line(power(entropy_P, gaps_P, bounds))}   all; a rollout has {len(gaps_P) / len(requests):.0f}")


def _power_line(row: Power) -> str:
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


# --- Writes measured values into a run file, and changes no other line or comment ---


Tables = dict[str, dict[str, float]]
"""Values by the name of their table as in a run file, such as `verify.bounds."float32/float32"`."""


def tables_of(bounds: dict[str, Bounds], activation_error: float | None) -> Tables:
    """The tables for these bounds (by "SAMPLED/RECOMPUTED") and, if the run asks for proofs, for their error."""
    found: Tables = {} if activation_error is None else {"verify": {"activation_error": activation_error}}
    return found | {f'verify.bounds."{pair}"': msgspec.to_builtins(of_pair) for pair, of_pair in bounds.items()}


def text_of(name: str, values: dict[str, float]) -> str:
    """A table as TOML."""
    return "\n".join((f"[{name}]", *(f"{key} = {value!r}" for key, value in values.items())))


def with_values(run_file: Path, found: Tables) -> str:
    """The run file's text with these values.

    Raises `ConfigError` if the file writes these tables in a form that this code cannot edit, such as inline tables.
    """
    text = run_file.read_text()
    for name, values in found.items():
        text = _with_table(text, name, values)
    try:
        holds = all(_at(tomllib.loads(text), name).items() >= values.items() for name, values in found.items())
    except (tomllib.TOMLDecodeError, KeyError):
        holds = False
    if not holds:
        raise ConfigError(
            f"cannot edit the form in which {run_file} writes [verify]: put the tables above into it by hand"
        )
    return text


def _with_table(text: str, name: str, values: dict[str, float]) -> str:
    """The text with one table's values replaced, line by line; or with the table added at the end."""
    head = re.search(rf"^\[{re.escape(name)}\][^\n]*\n?", text, re.MULTILINE)
    if head is None:
        return f"{text.rstrip()}\n\n{text_of(name, values)}\n"
    following = re.search(r"^\[", text[head.end() :], re.MULTILINE)
    end = head.end() + following.start() if following else len(text)
    inside = text[head.end() : end]
    for key, value in values.items():
        inside, hits = re.subn(rf"^(\s*{key}\s*=\s*)[^\s#]+", rf"\g<1>{value!r}", inside, flags=re.MULTILINE)
        inside = inside if hits else f"{key} = {value!r}\n{inside}"
    return text[: head.end()] + inside + text[end:]


def _at(table: dict[str, Any], name: str) -> dict[str, Any]:
    """The table of that name. Raises `KeyError`."""
    for part in name.split("."):
        table = table[part.strip('"')]
    return table

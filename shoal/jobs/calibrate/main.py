"""Calibration: plays honest rollouts, recomputes them in every way that an honest machine might, and sets the bounds.

It starts no run and needs no coordinator. It plays the run's environments as a worker does, with several numbers of
threads; then it recomputes the rollouts with several numbers of threads, batch shapes and dtypes. `--save` writes the
rollouts to a file, so that another machine can recompute them with `--with`. The mathematics is in
`verification/fit_tolerances` and `algos/sampling_evidence`.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.config import RunConfig, load_run
from shoal.engine.open import EngineSpec, kind_for
from shoal.errors import ConfigError
from shoal.jobs.calibrate.detection_power import show_power
from shoal.jobs.calibrate.edit_run_file import tables_of, text_of, with_values
from shoal.jobs.calibrate.progress import remark
from shoal.jobs.calibrate.recompute import measure
from shoal.jobs.calibrate.recorded_rollouts import Recording, play, read
from shoal.models.checkpoint import write_nf4
from shoal.models.device import CPU, demand_device
from shoal.models.hub_download import Hub
from shoal.models.nf4_config import NF4, is_coded
from shoal.models.random_model import make_tiny
from shoal.protocol.encoding import to_msgpack
from shoal.protocol.hub_reference import is_hub
from shoal.protocol.messages import Bounds
from shoal.protocol.tolerances import CHOSEN_ENGINES
from shoal.run_folder import RunFolder, write_atomically
from shoal.verification.fit_tolerances import MeasuredNoise, joined, propose, propose_activation_error


def main(
    run_file: Path,
    overrides: list[str],
    episodes: int,
    safety: float = 2.0,
    write: bool = False,
    save: Path | None = None,
    others: Sequence[Path] = (),
    device: str = CPU,
    engine: str = "",
) -> None:
    """Measure and print the bounds; with `write`, also write them into the run file. `engine` is a kind that workers may
    choose: what it plays gets bounds of its own, beside those of all engines.

    Raises `ConfigError` if the run file cannot be read or edited, or the device is not there; `StateError` if a recording
    is of another policy, or if no bound would let honest proofs of activations pass.
    """
    demand_device(device)
    if safety < 1:
        raise ConfigError(f"--safety is {safety}, at least 1 is needed: below 1, honest work is refused")
    with tempfile.TemporaryDirectory(prefix="shoal-calibrate-") as scratch:
        folder = RunFolder(Path(scratch))
        folder.prepare(load_run(run_file, overrides), run_file.parent)
        config = folder.config()
        policy = _policy(folder, config)
        chosen = play(config, policy, episodes, device, engine) if engine else None  # first: it may not be installed
        own = play(config, policy, episodes, device)
        recordings = {"here": own} | {path.name: read(path, config, policy) for path in others}
        if chosen is not None:
            recordings[f"here, {engine}"] = chosen
        if save is not None:
            write_atomically(save, to_msgpack(chosen or own))
            remark(f"wrote {save}: recompute it on another machine with --with")
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
    if write:
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

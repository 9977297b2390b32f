"""A real run of a model's shape with an adapter: what each process and the disk take, what is published, and what PEFT
computes with it.

Called by `benchmarks/adapters.py`. The run is started as a user would start it, in processes of its own, and is watched
from outside. It does not know what a bar is.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.real.resident import peak_mb
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.registry import read_entry
from shoal.ledger.versions import CheckpointPublished
from shoal.models.checkpoint import load_policy
from shoal.models.safetensors_header import files_of_base
from shoal.net.blobs import FolderBlobs
from shoal.protocol.encoding import from_json
from shoal.protocol.messages import Manifest, SignedManifest
from shoal.run_folder import RunFolder, held_below
from shoal.weights.manifest import chunks_of

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "qwen3-0.6b-gsm8k.toml"
PEER = ROOT / "benchmarks" / "peers" / "peft_logits.py"

SETTINGS = (
    "seed=1", "policy.adapter.rank=8", "policy.adapter.alpha=16.0",
    "sampling.max_turn_tokens=16", "sampling.max_tokens=96",
    "rollouts.group_size=4", "rollouts.block_rollouts=8", "rollouts.batch_groups=2", "rollouts.max_staleness=1",
    "train.lr=1e-3", "train.warmup_steps=0", "train.microbatch_tokens=512", "train.threads=1", "train.device=cpu",
    "workers.count=1", "workers.device=cpu", "validators.device=cpu",
    "storage.window_steps=32", "storage.checkpoint_every=5",
)  # fmt: skip
"""What the run sets in the recipe: an adapter, batches that a CPU computes in seconds, and all manifests kept."""

POLL_S, DISK_POLL_S = 0.2, 2.0
TOKENS = 48
"""Of the row that PEFT and we compute."""


@dataclass
class Watch:
    """What a run's processes and its folder took at most, in bytes."""

    out: Path
    peaks: dict[str, float] = field(default_factory=dict)
    """Of each process by its role; of several of a name, the largest."""
    disk: int = 0
    _disk_at: float = 0.0

    def look(self, launcher: psutil.Process) -> None:
        """Take the peaks until now of all processes that are alive, and sometimes the size of the folder."""
        for name, process in _processes(launcher):
            try:
                self.peaks[name] = max(self.peaks.get(name, 0.0), peak_mb(process.pid) * 2**20)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
        if time.monotonic() - self._disk_at > DISK_POLL_S:
            self._disk_at = time.monotonic()
            self.disk = max(self.disk, held_below(self.out))


def run(out: Path, steps: int, shape: Path | None, *more: str) -> Watch:
    """The run, to its end. `shape` is a directory with a config.json, if it is not the recipe's. Raises RuntimeError."""
    sets = [f"steps={steps}", *SETTINGS, *([f"policy.path={shape}"] if shape else []), *more]
    command = [sys.executable, "-m", "shoal.cli.main", "run", str(RECIPE), "--random-policy", "--out", str(out)]
    command += [word for one in sets for word in ("--set", one)]
    said = out.with_suffix(".out")
    said.parent.mkdir(parents=True, exist_ok=True)
    watch = Watch(out)
    with said.open("a") as file:
        launcher = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=file, stderr=file)
    reaped = threading.Thread(target=launcher.wait)
    reaped.start()
    try:
        process = psutil.Process(launcher.pid)
        while reaped.is_alive():
            watch.look(process)
            time.sleep(POLL_S)
    except psutil.NoSuchProcess:
        pass
    finally:
        if launcher.poll() is None:
            launcher.terminate()
        reaped.join()
    watch.disk = max(watch.disk, held_below(out))
    if launcher.returncode:
        raise RuntimeError(f"the run ended with {launcher.returncode}: see {said} and {out}/logs")
    return watch


def _processes(launcher: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """Every process of a run with the name of its role; those that a role starts bear its name."""
    yield "launcher", launcher
    for process in _children(launcher):
        name = _role_of(process) or "first policy"  # which the launcher makes in a process of its own
        yield name, process
        yield from ((f"{name}, children", child) for child in _children(process, recursive=True))


def _children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    try:
        return process.children(recursive)
    except psutil.NoSuchProcess:
        return []


def _role_of(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return words[words.index("role") + 1] if "role" in words else ""


def published_bytes(folder: RunFolder) -> list[int]:
    """Bytes of each version after the first that the one before does not have: what its manifest names anew."""
    manifests: dict[int, Manifest] = {}
    blobs = FolderBlobs(folder.blobs)
    for data, _ in Store(sqlite_url(folder.log), read_only=True).read():
        body = read_entry(data)[0].body
        if isinstance(body, CheckpointPublished) and blobs.has(body.manifest):
            signed = from_json(blobs.get(body.manifest), SignedManifest)
            manifests[body.version] = from_json(signed.body, Manifest)
    return [
        sum(entry.size for entry in after.files if not {*entry.chunks} <= chunks_of(before))
        for (_, before), (_, after) in pairwise(sorted(manifests.items()))
    ]


def base_bytes(folder: RunFolder) -> int:
    """Bytes of the whole model's weights, as the run would publish them."""
    return sum(path.stat().st_size for path in files_of_base(folder.policy))


@torch.no_grad()
def beside_peft(peer: Path, folder: RunFolder, scratch: Path) -> dict[str, float]:
    """Largest difference of a logit in float32 to what PEFT computes with the run's last adapter, and how far the adapter
    itself moves one."""
    final = folder.checkpoints / "final"
    model = load_policy(final, torch.float32)
    ids = np.random.default_rng(0).integers(0, model.spec.vocab_size, TOKENS)
    ours_TV = model.logits(model.hidden(torch.from_numpy(ids)[None]))[0].numpy()
    del model
    np.save(scratch / "tokens.npy", ids)
    files = [str(scratch / name) for name in ("tokens.npy", "logits.npz")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([str(peer), str(PEER), str(folder.policy), str(final), *files], env=environment, check=True)
    with np.load(scratch / "logits.npz") as theirs:
        return {
            "logits_off": float(np.abs(ours_TV - theirs["adapted"]).max()),
            "logits_moved": float(np.abs(theirs["adapted"] - theirs["plain"]).max()),
        }


def figures(watch: Watch, folder: RunFolder) -> dict[str, Any]:
    """What a run took, and how it learned. Bytes are in MB or GB of 10^6 or 10^9."""
    summary, sent = json.loads(folder.summary.read_text()), published_bytes(folder)
    return {
        "steps": summary["steps"], "accepted": summary["accepted"], "refused": sum(summary["refused"].values()),
        "peak_gb": {re.sub(r"\W+", "_", name): size / 1e9 for name, size in sorted(watch.peaks.items())},
        "peak_gb_most": max(watch.peaks.values()) / 1e9,
        "disk_gb": held_below(folder.root) / 1e9, "disk_gb_most": watch.disk / 1e9,
        "base_gb": base_bytes(folder) / 1e9, "step_mb": max(sent) / 1e6, "step_share": max(sent) / base_bytes(folder),
        "wall_s": summary["wall_s"], "cpu_s": summary["cpu_s"],
    }  # fmt: skip

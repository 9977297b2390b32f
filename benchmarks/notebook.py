"""From `pip install` to a trained policy: a wheel, a fresh virtual environment, and the first cell of a notebook.

    python benchmarks/notebook.py [--seeds 1,2,3]
    PIP_FLAGS="--extra-index-url ..." python benchmarks/notebook.py     with PyTorch's CPU builds, as in the Makefile

It builds a wheel of this tree and installs it with its extras `torch` and `notebook`, and a kernel as Jupyter brings it,
into a virtual environment of its own. There it runs `docs/notebooks/first_run.ipynb` up to the cell that trains, once a
seed, in a folder that has nothing of this tree. The install is timed apart, because it depends on the network. `train_s`
is what a reader waits for: start of the kernel, imports, training, evaluation before and after. On a machine that does
other work, believe only `train_cpu_s`. Shares are of held-out sums that are right.
The last line is JSON; lists have a number a seed. The exit code is 1 if a bar is missed.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from benchmarks.measure import ROOT, arguments, numbers, report

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"
EXTRAS = "torch,notebook"
MOST_LINES, MOST_TRAIN_S = 10, 180.0
TIMEOUT_S = 900

WHERE = "import sys, time; print(shoal.__file__, sys.prefix, time.process_time(), sep='\\n')"
"""Tells whether the cells used the package that was installed, and the kernel's CPU-seconds."""


class Trained(NamedTuple):
    """What the cells of one seed showed."""

    before: float
    after: float
    low_after: float
    high_before: float
    seconds: float
    cpu_s: float


def main() -> int:
    """Install once, train once a seed, print."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    seeds = parser.parse_args().seeds
    cells = first_cells()
    with tempfile.TemporaryDirectory() as scratch:
        python, wheel_s, install_s = installed(Path(scratch))
        print(f"built a wheel in {wheel_s:.0f} s, installed it with [{EXTRAS}] in {install_s:.0f} s", flush=True)
        found = []
        for seed in seeds:
            (folder := Path(scratch) / f"seed-{seed}").mkdir()
            found.append(trained(cells, seed, python, folder))
            print(f"seed {seed}: {found[-1].before:.0%} -> {found[-1].after:.0%} of held-out sums right "
                  f"in {found[-1].seconds:.0f} s", flush=True)  # fmt: skip
    figures = figures_of(code_lines(cells), install_s, found)
    bars = bars_of(figures, found)
    print(f"{figures['lines']} lines; bars met: {bars}")
    report("notebook", {"seeds": seeds, "wheel_s": round(wheel_s, 1), **figures, "bars": bars})
    return 0 if all(bars.values()) else 1


def first_cells() -> list[str]:
    """The code of the notebook up to the first cell that trains."""
    code = [cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
    last = next(number for number, source in enumerate(code) if "train_here" in source)
    return code[: last + 1]


def code_lines(cells: Sequence[str]) -> int:
    """Lines that a reader types."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for cell in cells for line in cell.splitlines())


def with_seed(cells: Sequence[str], seed: int) -> list[str]:
    """The cells with another seed. Raises `ValueError` if they name none, because then all seeds would be one run."""
    changed = [re.sub(r"\bseed=\d+", f"seed={seed}", cell) for cell in cells]
    if not any(re.search(r"\bseed=\d+", cell) for cell in cells):
        raise ValueError("the first cells of the notebook name no seed")
    return changed


def installed(scratch: Path) -> tuple[Path, float, float]:
    """The interpreter of a fresh environment that has the wheel; seconds of the build and of the install."""
    wheels, place = scratch / "wheels", scratch / "venv"
    flags = shlex.split(os.environ.get("PIP_FLAGS", ""))
    began = time.monotonic()
    _pip(Path(sys.executable), "wheel", "--no-deps", "-w", str(wheels), str(ROOT))
    built = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = place / "bin" / "python"
    [wheel] = wheels.glob("shoal-*.whl")
    _pip(python, "install", "-c", str(ROOT / "constraints.txt"), *flags, f"{wheel}[{EXTRAS}]", "ipykernel")
    return python, built - began, time.monotonic() - built


def _pip(python: Path, *words: str) -> None:
    done = subprocess.run([str(python), "-m", "pip", words[0], "-qq", "--disable-pip-version-check", *words[1:]],
                          env=_environment(), capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"pip {words[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _environment() -> dict[str, str]:
    """Without PYTHONPATH, by which the checkout would win over the wheel."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def trained(cells: Sequence[str], seed: int, python: Path, folder: Path) -> Trained:
    """Run the cells by a kernel of that interpreter in an empty folder."""
    spec = folder / "kernels" / "fresh"
    spec.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "fresh", "language": "python"}))
    found = KernelSpecManager(kernel_dirs=[str(spec.parent)], ensure_native_kernel=False)
    kernel = AsyncKernelManager(kernel_name="fresh", kernel_spec_manager=found)
    log_writer = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in [*with_seed(cells, seed), WHERE]]
    )
    began = time.monotonic()
    NotebookClient(log_writer, km=kernel, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}).execute(
        env=_environment()
    )
    seconds = time.monotonic() - began
    *shown, where = ["".join(output.get("text", "") for output in cell.outputs) for cell in log_writer.cells]
    package, prefix, cpu_s = where.splitlines()
    if not Path(package).is_relative_to(prefix) or not Path(prefix).samefile(python.parents[1]):
        raise SystemExit(f"the cells used {package}, not the package that was installed")
    return read(shown[-1], seconds, float(cpu_s))


def read(shown: str, seconds: float, cpu_s: float) -> Trained:
    """The evaluations before and after that the cell prints, as shares."""
    said = re.findall(r"(\d+)% of held-out sums are right \((\d+)% to (\d+)%\)", shown)
    if len(said) != 2:
        raise ValueError(f"the cell does not say what was right before and after:\n{shown}")
    (before, _, high_before), (after, low_after, _) = ([int(number) / 100 for number in one] for one in said)
    return Trained(before, after, low_after, high_before, seconds, cpu_s)


def figures_of(lines: int, install_s: float, found: Sequence[Trained]) -> dict[str, Any]:
    """Figures of all seeds."""
    slowest = max(one.seconds for one in found)
    return {
        "lines": lines,
        "install_s": round(install_s, 1),
        "train_s": [round(one.seconds, 1) for one in found],
        "train_slowest_s": round(slowest, 1),
        "train_cpu_s": [round(one.cpu_s, 1) for one in found],
        "success_before": [one.before for one in found],
        "success_after": [one.after for one in found],
        "with_install_minutes": round((install_s + slowest) / 60, 2),
    }


def bars_of(figures: dict[str, Any], found: Sequence[Trained]) -> dict[str, bool]:
    """Few lines, little time, and for every seed 95 % intervals that do not touch."""
    return {
        "lines": figures["lines"] <= MOST_LINES,
        "time": figures["train_slowest_s"] <= MOST_TRAIN_S,
        "learned": all(one.low_after > one.high_before for one in found),
    }


if __name__ == "__main__":
    sys.exit(main())

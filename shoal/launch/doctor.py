"""What this machine can do for a run, measured, and what is missing.

It changes nothing that stays, needs no network, and imports torch only to measure it.
"""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import httpx
import psutil

from shoal.config import RunConfig, TinyPolicy, load_run, node_home
from shoal.config.load import is_hub, resolve_path, with_judge_at
from shoal.errors import ConfigError, PeerError, StateError, cause_of, how_to_install
from shoal.humanize import data_size
from shoal.net.safe_http import KNOWN, get
from shoal.protocol.constants import SIGNATURE_WINDOW_S

if TYPE_CHECKING:
    from shoal.models.config import ModelConfig
    from shoal.plan.sizes import Sizes

MIN_MEMORY_GB, MIN_DISK_GB, MIN_OPEN_FILES = 2.0, 1.0, 256
MEASURE_S = 0.4
"""Time to measure one speed."""


ANSWER_S = 5.0
"""A host answers within this, or it does not answer."""


_NOTES = (
    "first prompt of ", "prompts of ", "too long: ", "no turn of ", "later turns of ", "each later turn ", "tokenizer: ",
    "tool calls of ", "the tools of ", "the chat template ", "the policy's chat template ",
)  # fmt: skip
"""How lines about first prompts begin that are worth a note."""


class DoctorLine(NamedTuple):
    """What was found for one thing."""

    state: Literal["ok", "note", "missing"]
    """A run on a CPU works in spite of a note."""
    what: str
    found: str
    remedy: str = ""


def examine(url: str = "") -> Iterator[DoctorLine]:
    """Look at everything, one line after another; `url` is a coordinator whose clock ours is compared with."""
    yield DoctorLine("ok", "Python", f"{platform.python_version()} ({platform.system()} {platform.machine()})")
    yield from _size()
    yield from _torch()
    yield _transformers()
    yield _clock(url)
    yield _open_files()
    yield _port()
    yield _home()
    yield _sandbox()


def run(
    url: str = "",
    say: Callable[[str], None] = print,
    recipe: Path | None = None,
    changes: Sequence[str] = (),
    memory_gb: float = 0.0,
    random_policy: bool = False,
) -> int:
    """Print each line as it is found. Returns 1 if something that a run needs is missing, else 0.

    With a `recipe`, only whether its run fits into memory and disk; see `fit`.
    """
    missing = 0
    for line in examine(url) if recipe is None else fit(recipe, changes, memory_gb, random_policy):
        missing += line.state == "missing"
        say(f"{line.state:<8} {line.what:<13} {line.found}" + (f"\n{'':22} -> {line.remedy}" if line.remedy else ""))
    can = "This machine can run, host and join." if recipe is None else "The run fits."
    say(can if not missing else f"{missing} missing: do what the arrows say.")
    return 1 if missing else 0


def fit(recipe: Path, changes: Sequence[str], memory_gb: float, random_policy: bool = False) -> Iterator[DoctorLine]:
    """Whether the run of a run file fits into the memory of this machine, role by role, and onto its disk; and its bytes.

    `memory_gb` replaces what is free in the memory of the device that trains, so that another machine can be asked about.
    Raises `ConfigError`, `StateError`.
    """
    from shoal.launch.memory_plan import disk_of, reports
    from shoal.launch.sizing import resolve_sizes
    from shoal.plan.sizes import sizes_of

    config, memory = load_run(recipe, list(changes), random_policy=random_policy), int(memory_gb * 1e9)
    config = with_judge_at(config, recipe.parent)
    spec = _shape_of(config, recipe)
    config, lines = resolve_sizes(config, spec, with_workers=True, free=memory)
    for line in lines:
        yield DoctorLine("ok", "size", line)
    if config.policy.path and not random_policy:
        model = _first_policy(config, recipe, spec)
        yield model
        if model.state == "ok":
            yield from _first_prompts(config, recipe)
    for report in reports(config, spec, with_workers=True, free=memory):
        for role in report.roles:
            if role.on(report.device):
                parts = ", ".join(f"{part.name} {data_size(part.size)}" for part in role.parts)
                each = f"{role.processes} processes, each " if role.processes > 1 else ""
                yield DoctorLine("ok", role.name[:13], f"{data_size(role.on(report.device))}: {each}{parts}")
        found = (
            f"{data_size(report.need)} at once{', in shifts' if report.shared else ''}, {data_size(report.free)} free"
        )
        yield _enough(f"memory {report.device}", report.need <= report.free, found, report.advice)
    need, free = disk_of(config, recipe.parent, with_workers=True), shutil.disk_usage(Path.cwd()).free
    yield _enough("disk", need <= free, f"at most {data_size(need)}, {data_size(free)} free here", MORE_DISK)
    yield DoctorLine("ok", "bytes", f"{in_words(sizes_of(config, recipe.parent))} to each worker")


def _first_policy(config: RunConfig, recipe: Path, spec: "ModelConfig") -> DoctorLine:
    """Whether the model's tokenizer, template and weights are there and fit; values that are not finite are found."""
    from shoal.chat.isolated import open_own
    from shoal.launch.preflight import demand_computable, demand_examined
    from shoal.models.checkpoint import demand_weights

    if is_hub(config.policy.path):
        return DoctorLine(
            "note", "model", "its weights and tokenizer were not looked at: a run fetches them when it begins"
        )
    directory = resolve_path("policy.path", config.policy.path, recipe.parent)
    try:
        open_own(directory)
        demand_computable(directory, config)
        stored = demand_weights(directory, spec)
        held = sum(one.end - one.start for one in stored.values())
        ours = bool(spec.tensor_shapes())
        fits = ours or psutil.virtual_memory().available > 4 * held  # in float32, beside what torch takes
        examined = fits and demand_examined(directory, config, "cpu")
    except StateError as error:
        return DoctorLine("missing", "model", str(error), "fix the model, or choose another policy.path")
    size = f"{len(stored)} tensors, {data_size(held)}"
    if examined and not ours:
        return DoctorLine("ok", "model", f"{size}; transformers computes with it")
    if not ours:
        return DoctorLine("ok", "model", f"{size}; transformers compares their names and shapes when a run begins")
    return DoctorLine("ok", "model", f"{size} of finite numbers, with the names and shapes that config.json asks for")


def _first_prompts(config: RunConfig, recipe: Path) -> Iterator[DoctorLine]:
    """What the model's chat template makes of the first prompts, seen as `shoal run` sees it at its start: in a process."""
    from shoal.launch.prompt_preview_process import preview_of
    from shoal.launch.supervisor import TICK_S
    from shoal.run_folder import RunFolder

    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "run")
        folder.prepare(config, recipe.parent)
        preview = preview_of(folder)
        try:
            while preview.is_awaited():
                preview.look()
                time.sleep(TICK_S)
        except StateError as error:
            yield DoctorLine(
                "missing", "prompts", str(error), "do what this line says: until then `shoal run` begins no run"
            )
            return
        finally:
            preview.end()
        if not folder.first_prompts.exists():
            yield DoctorLine(
                "note", "prompts", "no environment began its first task in time, so no prompt was looked at"
            )
            return
        for line in folder.first_prompts.read_text().splitlines():
            if line.startswith("first prompt of ") and "it cannot be shown" not in line:
                yield DoctorLine("ok", "prompts", line.removesuffix(", in [[ ]]"))
            elif line.startswith(_NOTES):
                yield DoctorLine("note", "prompts", line)


def _shape_of(config: RunConfig, recipe: Path) -> "ModelConfig":
    """The shape of a run's model. Raises `ConfigError`, with another way to ask if the run file has one."""
    from shoal.plan.sizes import UnknownShape, spec_of

    try:
        return spec_of(config, recipe.parent)
    except UnknownShape as error:
        instead = ""
        with contextlib.suppress(ConfigError):
            load_run(recipe, random_policy=True)
            instead = ". To reckon with the shape of its [random] table: --random-policy"
        raise ConfigError(f"{error}{instead}") from None


def in_words(sizes: "Sizes") -> str:
    """What a worker fetches of a run, from the host or the base of adapters from a hub."""
    return f"{data_size(sizes.base + sizes.version)} at first, then {data_size(sizes.patch or sizes.version)} a step"


def _enough(
    what: str, enough: bool, found: str, remedy: str, otherwise: Literal["note", "missing"] = "missing"
) -> DoctorLine:
    return DoctorLine("ok", what, found) if enough else DoctorLine(otherwise, what, found, remedy)


MORE_DISK = "free some space, lower storage.quota_mb, or take another disk: `shoal run RECIPE --out DIR`"


def _size() -> Iterator[DoctorLine]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    remedy = "one core works, but trainer and workers take turns: use --set workers.count=1"
    yield _enough("cores", cores >= 2, str(cores), remedy, "note")
    memory = psutil.virtual_memory()
    free_gb = memory.available / 2**30
    found = f"{free_gb:.1f} of {memory.total / 2**30:.1f} GB free"
    remedy = f"a run of a tiny model takes about {MIN_MEMORY_GB:.0f} GB: close other programs"
    yield _enough("memory", free_gb >= MIN_MEMORY_GB, found, remedy)
    disk_gb = shutil.disk_usage(Path.cwd()).free / 2**30
    yield _enough("disk", disk_gb >= MIN_DISK_GB, f"{disk_gb:.1f} GB free in {Path.cwd()}", MORE_DISK)


def _torch() -> Iterator[DoctorLine]:
    if importlib.util.find_spec("torch") is None:
        remedy = f"{how_to_install('torch')}; without it this machine can only run a coordinator"
        yield DoctorLine("missing", "torch", "not installed", remedy)
        return
    import torch

    threads = torch.get_num_threads()
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    yield DoctorLine("ok", "torch", f"{torch.__version__}, {threads} threads, {device}")
    a = torch.rand(512, 512)
    per_s = _rate(lambda: torch.mm(a, a))
    yield DoctorLine("ok", "matmul", f"{per_s * 2 * 512**3 / 1e9:.0f} GFLOP/s (fp32, {threads} threads)")
    yield DoctorLine("ok", "decode", f"{_decode_tokens_per_s():,.0f} tokens/s (tiny policy, batch 64, one thread)")


def _decode_tokens_per_s() -> float:
    """Speed of the embedded engine on the default tiny policy: 64 prompts of 8 tokens, 32 new tokens each."""
    from shoal.engine.interface import EngineRequest
    from shoal.engine.open import EngineSpec, open_engine
    from shoal.models.random_model import make_tiny

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "policy"
        make_tiny(TinyPolicy(), directory, seed=0, dtype="float32")
        engine = open_engine(EngineSpec(threads=1))
        engine.load(directory, 0)
    batch = [EngineRequest(str(i), [7] * 8, i.to_bytes(32, "big"), 32, frozenset()) for i in range(64)]

    def decode() -> None:
        engine.extend(batch, 1.0)
        engine.forget(request.rollout for request in batch)

    return _rate(decode) * 64 * 32


def _rate(work: Callable[[], object]) -> float:
    """Repetitions per second, after one that warms up."""
    work()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < MEASURE_S:
        work()
        count += 1
    return count / (time.perf_counter() - began)


def _transformers() -> DoctorLine:
    if importlib.util.find_spec("transformers") is None:
        return DoctorLine(
            "note", "transformers", "not installed; only policies of other architectures and tests use it"
        )
    return DoctorLine("ok", "transformers", importlib.metadata.version("transformers"))


def _clock(url: str) -> DoctorLine:
    """Compares this clock with the coordinator's `Date` header, which counts whole seconds."""
    if not url:
        remedy = (
            f"shoal doctor --url URL compares it with a host's; they may differ by less than {SIGNATURE_WINDOW_S} s"
        )
        return DoctorLine("note", "clock", "offset unknown", remedy)
    try:
        place = httpx.URL(f"{url.rstrip('/')}/healthz")
        answer = asyncio.run(get(place, cap=0, deadline_s=ANSWER_S, address=KNOWN))
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}")
        offset_s = time.time() - parsedate_to_datetime(answer.headers.get("date", "")).timestamp()
    except (PeerError, httpx.InvalidURL, ValueError, TypeError, OverflowError) as error:
        remedy = "check the URL and that the run is hosted now"
        return DoctorLine("missing", "clock", f"{url} does not answer: {cause_of(error)}", remedy)
    if abs(offset_s) < SIGNATURE_WINDOW_S:
        return DoctorLine("ok", "clock", f"{offset_s:+.0f} s from {url}")
    return DoctorLine(
        "missing",
        "clock",
        f"{offset_s:+.0f} s from {url}, limit {SIGNATURE_WINDOW_S} s",
        "set this machine's clock (timedatectl set-ntp true)",
    )


def _open_files() -> DoctorLine:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"limit {soft}, at least {MIN_OPEN_FILES} needed"
    return _enough("open files", soft >= MIN_OPEN_FILES, found, f"ulimit -n {MIN_OPEN_FILES * 4}")


def _port() -> DoctorLine:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return DoctorLine("ok", "port", "can listen on 127.0.0.1")
    except OSError as error:
        return DoctorLine(
            "missing", "port", f"cannot listen on 127.0.0.1: {cause_of(error)}", "allow loopback in the sandbox"
        )


def _home() -> DoctorLine:
    home = node_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return DoctorLine("ok", "home", f"{home} is writable; this machine's key is kept there")
    except OSError as error:
        remedy = "set SHOAL_HOME to a folder of yours"
        return DoctorLine("missing", "home", f"cannot write to {home}: {cause_of(error)}", remedy)


def _sandbox() -> DoctorLine:
    from shoal.sandbox.selftest import examine as try_sandbox

    report = try_sandbox()
    if report.works:
        return DoctorLine("ok", "sandbox", f"full; {report.found}")
    return DoctorLine("note", "sandbox", f"none; foreign code does not run here: {report.found}", report.remedy)

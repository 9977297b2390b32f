"""The pipeline of stages: each begins where the one before ended, and is made once."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shoal.config import RunConfig, SftConfig
from shoal.config.stages import EvalStage, Stage, StagesConfig, kind_of, settings_of, taken_by
from shoal.envs.evaluate import interval
from shoal.errors import EXIT_DONE, EXIT_INTERRUPTED, StateError
from shoal.evaluation_files import Evaluation, why_not_comparable
from shoal.launch.pipeline.job_inputs import (
    OUTPUTS,
    RUN,
    Input,
    Job,
    Made,
    demand_doable,
    demand_same_inputs,
    demand_whole,
    digest_below,
    files_of,
    job_of,
)
from shoal.launch.role_process import RoleProcess
from shoal.launch.run_lock import locked
from shoal.launch.supervisor import Supervisor
from shoal.protocol.encoding import digest, to_json
from shoal.run_folder import write_atomically

# --- what a run of stages came to: report.json, and a table for the terminal ---


def share_of(right: float, count: int) -> Evaluation:
    """Of so many rollouts, the share that is right."""
    values = [1.0] * round(right * count)
    found = interval(values + [0.0] * (count - len(values)), (0.0, 1.0))
    return Evaluation(found.mean, found.low95, found.high95, count)


class StageEnd(msgspec.Struct, frozen=True):
    """One stage in report.json."""

    name: str
    kind: str
    key: str
    """Of its folder."""
    before: Evaluation | None
    """Held-out reward, or share of wins, of the policy that it began with; of reject, the share of right rollouts; of
    reward_model, the share of held-out pairs that it ranks right."""
    after: Evaluation | None
    """The same of what it made."""
    seconds: float
    """That the stage took; for a run, over all its starts, else those of the process that finished."""
    cpu_s: float
    tokens: int
    """That sft learned from, prompts and repetitions included; that rl paid for; that filter's policy wrote."""
    done_now: bool
    """Whether this start did it, and did not find it done."""
    figures: dict[str, Any]
    """What the kind says beside."""


def report(name: str, ends: Sequence[StageEnd]) -> dict[str, Any]:
    """report.json."""
    total = {
        "seconds": round(sum(end.seconds for end in ends), 3),
        "cpu_s": round(sum(end.cpu_s for end in ends), 3),
        "tokens": sum(end.tokens for end in ends),
    }
    stages = [
        msgspec.structs.asdict(end)
        | {key: one and one.figures() for key, one in (("before", end.before), ("after", end.after))}
        for end in ends
    ]
    return {"name": name, "stages": stages, "total": total}


def in_words(name: str, ends: Sequence[StageEnd]) -> str:
    """The table."""
    rows = [("stage", "kind", "before", "after", "seconds", "CPU-s", "tokens", "")]
    rows += [
        (
            end.name, end.kind, _mean(end.before), _mean(end.after), f"{end.seconds:.1f}", f"{end.cpu_s:.1f}",
            f"{end.tokens:,}" if end.tokens else "-", "" if end.done_now else "done before",
        )
        for end in ends
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"{name}: held-out reward before and after each stage; of reject, the share of right rollouts; of reward_model, "
        "that of held-out pairs ranked right"
    ]
    for row in rows:
        cells = [cell.ljust(width) if i in (0, 1, 7) else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(cells).rstrip())
    for end in ends:
        if why := why_not_comparable(*filter(None, (end.before, end.after))):
            lines.append(f"{end.name}: {why}")
    return "\n".join(lines)


def _mean(found: Evaluation | None) -> str:
    if found is None:
        return "-"
    mean = "none" if found.mean is None else f"{found.mean:.3f}"
    return f"{mean} ({found.faults:,} without a score)" if found.faults else mean


# --- a run of stages ---
#
# A folder with a `done.json` is a finished stage; any other is begun again or, if it is a run, resumed. The key of a stage,
# which names its folder, is a digest of its kind, its settings after overrides, its inputs' digests and the format of
# stages. So a changed setting gives that stage another folder, and those after it, if its output differs. Old folders stay.


Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]

STOP_S = 90.0
"""A stage that is asked to end may take this long: a run gives its workers 30 s."""


MAX_RESTARTS = 5
"""A stage whose process has died more often than this is given up. What it did is kept."""


class StageDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`done.json`, written last: the stage is finished, and its outputs are these."""

    kind: str
    outputs: dict[str, dict[str, str]]
    """SHA-256 of the files of each output, by name."""
    made: Made
    seconds: float
    """Of the process that finished; of a run, of all its starts."""
    cpu_s: float


@dataclass(frozen=True)
class Finished:
    """A stage that is done."""

    folder: Path
    done: StageDone
    again: bool
    """Whether it was done now, not found."""

    def gives(self, key: str) -> Input:
        """The output that another stage takes by this key."""
        if key == "rollouts":
            return Input(self.folder / RUN, str(self.done.made.figures["rollouts"]))
        output = "policy" if key == "teacher" else key
        return Input(self.folder / OUTPUTS[self.done.kind][output], digest(to_json(self.done.outputs[output])))


def run_stages(config: StagesConfig, beside: Path, out: Path, say: Callable[[str], None]) -> int:
    """Do all stages that are not done yet, then write report.json; returns the exit code. `beside`: the file's folder.

    Raises `ShoalError`: `ConfigError` for any stage's recipe before the first stage begins.
    """
    settings = [settings_of(stage, beside) for stage in config.stages]
    for stage, chosen in zip(config.stages, settings, strict=True):
        demand_doable(stage, chosen, beside)
    measure = _measure_of(config, beside)
    out = out.absolute()  # jobs name each other's folders in it
    with locked(out) as lock_fd:  # guard: one-shoal-a-folder-of-stages
        stages_run = StagesRun(config, beside, out, lock_fd, say)
        with stages_run.supervisor.counted_signals():
            return stages_run.run(settings, measure)


class PipelineStopped(Exception):
    """Ctrl-C."""


class StagesRun:
    """The stages of one file, in one folder."""

    def __init__(self, config: StagesConfig, beside: Path, out: Path, lock_fd: int, say: Callable[[str], None]) -> None:
        self.supervisor = Supervisor()
        self._config, self._beside, self._out, self._lock_fd, self._say = config, beside, out, lock_fd, say
        self._finished: dict[str, Finished] = {}

    def run(self, settings: list[RunConfig | SftConfig | None], measure: tuple[EvalStage, RunConfig] | None) -> int:
        """The story: each stage in order, each policy measured before and after it; then the report."""
        ends = []
        try:
            for number, (stage, chosen) in enumerate(zip(self._config.stages, settings, strict=True), 1):
                what = f"stage {number} of {len(settings)}, {stage.name} ({kind_of(stage)})"
                inputs = {key: self._finished[name].gives(key) for key, name in taken_by(stage).items()}
                job = job_of(stage, chosen, self._beside, inputs)
                before = self._measured(measure, _policy_before(job), f"{what}: the policy before it")
                finished = self._finished[stage.name] = self._do(job, stage.name, what)
                gives_policy = "policy" in finished.done.outputs
                place = finished.gives("policy").place if gives_policy else None
                after = self._measured(measure, place, f"{what}: the policy after it")
                ends.append(_end(stage, job.key, finished, before, after))
        except PipelineStopped:
            self._say(f"Stopped. The same command continues; everything is in {self._out}.")
            return EXIT_INTERRUPTED
        path = self._out / "report.json"
        write_atomically(path, msgspec.json.format(msgspec.json.encode(report(self._config.name, ends))))
        self._say(in_words(self._config.name, ends))
        self._say(f"The figures are in {path}. Each stage's folder is {self._out}/stages/KEY.")
        return EXIT_DONE

    def _measured(
        self, measure: tuple[EvalStage, RunConfig] | None, policy: Path | None, what: str
    ) -> Evaluation | None:
        """The evaluation of a policy by the file's own measure. It is a job as others, so a policy is played once."""
        if measure is None or policy is None:
            return None
        stage, settings = measure
        job = job_of(stage, settings, self._beside, {"policy": Input(policy, digest_below(policy))})
        done = self._do(job, f"measure of {stage.recipe}", f"{what}, measured", quiet=True).done
        return msgspec.convert(done.made.figures, Evaluation)

    def _do(self, job: Job, name: str, what: str, quiet: bool = False) -> Finished:
        """A job that is done, now or before. Raises `PipelineStopped`, and `StateError` if it fails or was changed."""
        folder = self._out / "stages" / job.key
        done = _read_done(folder, job.kind)
        if done is not None:
            demand_whole(folder, done.outputs, done.kind, name)  # guard: finished-stage-is-whole
            if not quiet:
                self._say(f"{what}: done before")
            return Finished(folder, done, again=False)
        if self.supervisor.stop_requests:
            raise PipelineStopped
        log = folder / "log.txt"
        self._say(f"{what}: at work, log {log}")
        folder.mkdir(parents=True, exist_ok=True)
        if (spoiled := folder / "spoiled.txt").exists():  # guard: spoiled-stays-spoiled
            raise StateError(spoiled.read_text())
        (folder / "made.json").unlink(missing_ok=True)
        write_atomically(folder / "job.json", msgspec.json.format(msgspec.json.encode(job)))
        began = time.monotonic()
        command = [sys.executable, "-m", "shoal.cli.main", "stage-job", str(folder)]
        process = RoleProcess(f"stage {name}", command, log, _threads(job), self._lock_fd)
        self._attend(process)
        try:
            demand_same_inputs(job, name, folder)  # guard: inputs-stay-as-they-are
        except StateError as changed:
            write_atomically(folder / "spoiled.txt", str(changed).encode())
            raise
        made = msgspec.json.decode((folder / "made.json").read_bytes(), type=Made)
        seconds, cpu_s = time.monotonic() - began, process.use.cpu_s
        if job.kind == "rl":  # which adds up its own use over all its starts
            seconds, cpu_s = float(made.figures["wall_s"]), sum(made.figures["cpu_s"].values())
        outputs = {key: files_of(folder / place) for key, place in OUTPUTS[job.kind].items()}
        done = StageDone(job.kind, outputs, made, round(seconds, 3), round(cpu_s, 3))
        write_atomically(folder / "done.json", msgspec.json.format(msgspec.json.encode(done)))
        return Finished(folder, done, again=True)

    def _attend(self, process: RoleProcess) -> None:
        """Keep a job's process alive until it has done its work. Raises as `_do`."""

        def is_over() -> bool:
            if process.restarts > MAX_RESTARTS:  # guard: stage-is-given-up
                self.supervisor.stop(([process], 0.0))
                raise StateError(f"{process.name} died {process.restarts} times: its log {process.log} says why")
            return process.state not in ("running", "restarting")

        self.supervisor.wait(lambda: [process], is_over)
        if process.state == "given up":
            raise StateError(f"{process.name}: {process.reason} (full log: {process.log})")
        if process.state == "done" and process.pid is None:
            return
        self._say(f"stopping {process.name} (Ctrl-C again stops it at once)")
        self.supervisor.stop(([process], STOP_S))
        raise PipelineStopped


def _measure_of(config: StagesConfig, beside: Path) -> tuple[EvalStage, RunConfig] | None:
    if not config.measure:
        return None
    stage = EvalStage(name="measure", recipe=config.measure, set=config.measure_set, policy="stage:any")
    settings = settings_of(stage, beside)
    assert isinstance(settings, RunConfig)
    demand_doable(stage, settings, beside)
    return stage, settings


def _policy_before(job: Job) -> Path | None:
    """The directory of the policy that a stage changes; None if it makes one from a seed, fetches one, or changes none."""
    if job.kind not in ("sft", "rl", "merge", "dpo"):
        return None
    path = job.inputs["policy"] if job.kind in ("merge", "dpo") else str(job.settings["policy"]["path"])
    return Path(path) if path and Path(path).is_dir() else None


def _threads(job: Job) -> int:
    if job.kind in ("eval", "filter"):
        return int(job.settings["workers"]["threads"])
    return 1 if job.kind in ("rl", "reject") else int(job.settings["threads"])


def _read_done(folder: Path, kind: str) -> StageDone | None:
    path = folder / "done.json"
    try:
        done = msgspec.json.decode(path.read_bytes(), type=StageDone)
        _demand_figures(done, kind)
        return done
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise StateError(
            f"{path} cannot be read: {error}. Restore it, or delete {folder}, and the stage is done again"
        ) from None


def _demand_figures(done: StageDone, kind: str) -> None:
    """Raise `ValueError` or `ValidationError` if no stage of this kind ended so: people copy and edit such files."""
    if done.kind != kind or done.outputs.keys() != OUTPUTS[kind].keys():  # guard: done-is-of-its-kind
        raise ValueError(f"it is not of a stage of kind {kind}")
    if kind in FIGURES:
        msgspec.convert(done.made.figures, FIGURES[kind])  # guard: done-has-its-figures


class _BeforeAndAfter(msgspec.Struct):
    before: Evaluation | None
    after: Evaluation | None


class _RunFigures(msgspec.Struct):
    heldout: _BeforeAndAfter
    rollouts: str


class _Chosen(msgspec.Struct):
    right_of_rollouts: float
    right_of_chosen: float
    rollouts: Count
    chosen: Count


class _Ranked(msgspec.Struct):
    accuracy_before: float
    accuracy: float
    pairs: Count


FIGURES: dict[str, Any] = {"eval": Evaluation, "rl": _RunFigures, "reject": _Chosen, "reward_model": _Ranked}
"""What stages of a kind find, if anything is read of it."""


def _end(stage: Stage, key: str, finished: Finished, before: Evaluation | None, after: Evaluation | None) -> StageEnd:
    """A line of the report. A stage that no measure says anything of is measured by what it found itself."""
    done = finished.done
    figures: dict[str, Any] = done.made.figures
    if done.kind == "rl" and after is None:
        before, after = msgspec.convert(
            [figures["heldout"][when] for when in ("before", "after")], list[Evaluation | None]
        )
    if done.kind == "eval":
        after = msgspec.convert(figures, Evaluation)
    if done.kind == "reject":
        before = share_of(figures["right_of_rollouts"], figures["rollouts"])
        after = share_of(figures["right_of_chosen"], figures["chosen"])
    if done.kind == "reward_model":
        before, after = (share_of(figures[key], figures["pairs"]) for key in ("accuracy_before", "accuracy"))
    return StageEnd(
        stage.name, done.kind, key, before, after, done.seconds, done.cpu_s, done.made.tokens, finished.again, figures
    )

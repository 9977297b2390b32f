"""What `shoal env check` does: plays an environment in processes that differ in one thing each, and compares them.

The environment's code never runs in this process. The first process makes all checks and records some episodes. Three
others play the same actions: with another hash seed, at another date and in another time zone, and beginning with the last
task. The first one plays them again at the end. What differs is named by its cause. The processes are in the sandbox where
there is one, and a finding says so where there is none.

The environment's code shares the process, so `lint/messages` reads its answers as a stranger's: a check finds faults of
honest authors, and shows nothing about a hostile one.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from shoal.chat.renderer import Renderer
from shoal.config import node_home
from shoal.config.env_settings import EnvConfig
from shoal.env_packages.archive import index_folder
from shoal.env_packages.installed import PackageStore
from shoal.env_packages.metadata import read_package
from shoal.env_packages.package_reference import read_reference
from shoal.envs.lint.audit import CALL_S, FILES, IMPORT, MEMORY_MB, NETWORK, PROCESSES, REFUSED
from shoal.envs.lint.dependency_checks import pins, unlocked
from shoal.envs.lint.fake_clock import ELSEWHERE_ZONE, HERE_ZONE
from shoal.envs.lint.finding import NOT_THE_SAME, OR_DECLARE, CheckResult, differs, fails, passes, skips
from shoal.envs.lint.messages import (
    LintFailure,
    LoadedEnv,
    LoadRequest,
    MalformedReply,
    Recorded,
    Seen,
    WorkerReply,
    demand_episodes,
    names_of,
    read,
)
from shoal.envs.lint.scripted_episode import describe_difference
from shoal.envs.lint.worker_process import Failed, LintProcess
from shoal.envs.load import BUILT_IN, env_digest, is_file, is_package, no_environment, with_place_looked
from shoal.errors import ConfigError, ShoalError
from shoal.ipc import Reason
from shoal.protocol.messages import Sampling
from shoal.protocol.rollout_validation import ROOM_REMEDY, no_room
from shoal.sandbox.bubblewrap import INSTALL
from shoal.sandbox.filesystem import OUTSIDE, outside
from shoal.sandbox.selftest import SelftestReport, examined
from shoal.typed_toml import to_tree

TOTAL_S = 30.0
"""No check begins later. Together with what one call may take, all of it ends within a minute on a machine that does
nothing else."""

LOADING = "loading it"

WAIT_S = 3.0
"""After so long, a line names what the check waits for."""

MAX_DETAIL_CHARS = 1000

MOST_BUSY = 8.0
"""Limits of time are longer on a busy machine, by at most this factor."""

LOAD_S, CHECK_S, RECORD_S = 30.0, 10.0, 8.0
"""What loading, one check and some episodes may take, beside one call that does not end."""

_DECLARE = "or declare reproducible = false, so that it stays with the host, and check it with --no-sandbox"
REMEDIES = {
    NETWORK: f"replies must not depend on other machines. Put what it needs into the package; {_DECLARE}",
    PROCESSES: f"an environment is one process. Leave it out; {_DECLARE}",
    FILES: f"keep everything in the state. Leave it out; {_DECLARE}",
    IMPORT: "loading an environment must change nothing else. Leave it out",
}
"""What an author can do about something that the environment did."""

T = TypeVar("T")


class Other(NamedTuple):
    """A process that plays the same actions again, and how it differs from the first."""

    check: str
    cause: str
    remedy: str
    hash_seed: int = 0
    zone: str = HERE_ZONE
    backwards: bool = False
    """Whether it begins with the last task."""


_KEEP_NOTHING = "keep nothing between episodes, neither in globals nor in random's generator"
OTHERS = (
    Other("earlier tasks", "after other tasks,", _KEEP_NOTHING, backwards=True),
    Other(
        "hash seed",
        "with another hash seed,",
        "sort sets before their order counts, and do not use hash()",
        hash_seed=1,
    ),
    Other("clock", "at another date, time and time zone,", "do not ask what time it is", zone=ELSEWHERE_ZONE),
)
LATER = Other("earlier tasks", "after many episodes,", _KEEP_NOTHING, backwards=True)
"""The first process itself, at the end."""


class EnvLocation(NamedTuple):
    """Where the environment is."""

    name: str
    """As a process loads it: a built-in name, or a path."""
    sources: tuple[Path, ...]
    """The file that makes it, and its folder if it is a package."""
    shown: tuple[Path, ...]
    """What the sandbox shows of it."""
    folder: Path | None = None
    """Of a package."""
    reproducible: bool = True
    unlocked: Sequence[CheckResult] = ()
    """About imports of an installed package that its lock does not list."""


def check(
    name: str, args: Mapping[str, Any], settings: EnvConfig | None = None, sandboxed: bool = True, registry: str = "",
    call_s: float = CALL_S, policy: tuple[Renderer, Sampling] | None = None,
    wait: Callable[[str], None] = lambda line: None,
) -> list[CheckResult]:  # fmt: skip
    """All findings, in the order of the checks. Raises `ShoalError` if there is no such environment.

    `settings` are what a run file adds. `registry` is where versions of a package are published. `call_s` is the time for
    one call of the environment. With a `policy`, by its tokenizer and limits, prompts must leave it room. `wait` is told
    what is waited for, if that takes longer than WAIT_S.
    """
    place = _place(name)
    report = examined() if sandboxed else SelftestReport(False, "--no-sandbox", "")
    if is_package(name) and not report.works:  # guard: packages-are-checked-inside
        raise ConfigError(
            f"the installed package {name} is checked only inside the sandbox: {report.remedy or report.found}"
        )
    findings = pins(place.folder, registry) if place.folder else place.unlocked
    with CheckedEnv(place, args, settings, report.works, sandboxed, call_s, policy, wait) as checked:
        return [*checked.findings(), *findings, _about_sandbox(report, sandboxed)]


class CheckedEnv:
    """One environment, while it is checked."""

    def __init__(
        self, place: EnvLocation, args: Mapping[str, Any], settings: EnvConfig | None, sandboxed: bool, refuses: bool,
        call_s: float, policy: tuple[Renderer, Sampling] | None, wait: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`refuses`: whether it must do without network, processes and files."""
        self._place, self._args, self._sandboxed, self._busy = place, args, sandboxed, busy()
        self._called = Path(place.name).name
        self._until = time.monotonic() + TOTAL_S * self._busy
        self._call_s, self._wait = call_s * self._busy, wait
        self._inside: Callable[[Path], str] = lambda path: str(outside(path) if sandboxed else path.absolute())
        self._files = {
            v: Path(v) for v in args.values() if isinstance(v, str) and v and "\0" not in v and Path(v).exists()
        }
        self._load = LoadRequest(
            name=place.name if place.name in BUILT_IN else self._inside(Path(place.name)),
            settings=None if settings is None else to_tree(settings),
            args={k: self._inside(Path(v)) if isinstance(v, str) and v in self._files else v for k, v in args.items()},
            sources=[str(path) if place.name in BUILT_IN else self._inside(path) for path in place.sources],
            reproducible=place.reproducible, refuses=refuses, call_s=self._call_s,
        )  # fmt: skip
        self._processes: list[LintProcess] = []
        self._refuses, self._policy = refuses, policy
        self._promised = place.reproducible

    def __enter__(self) -> "CheckedEnv":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()

    def findings(self) -> list[CheckResult]:
        """Make every check."""
        found: list[CheckResult] = []
        try:
            self._check(found)
        except Failed as failed:
            found += [*self._conduct(failed.seen), self._failure(failed)] if failed.seen else [self._failure(failed)]
        return _without_echoes([finding._replace(detail=_shown(finding.detail)) for finding in found])

    def _check(self, found: list[CheckResult]) -> None:
        first = self._started(0, HERE_ZONE)
        about = self._loaded(first, elsewhere=False, found=found)
        if about is None:
            found += self._conduct(self._seen(first))
            return
        names = self._sound(names_of, about)
        self._promised = about.promised
        if self._place.folder and self._place.reproducible and not about.by_class:
            says = "the class says reproducible = False, and environment.toml does not"
            found.append(fails("members", f"{says}: write reproducible = false there"))
        recorded = self._record(first, None)
        with ThreadPoolExecutor(2) as threads:
            others: dict[Other, Future[Any]] = {}
            if isinstance(recorded, list):
                actions = [[episode.actions for episode in task.episodes] for task in recorded]
                others = {other: threads.submit(self._replay, other, actions) for other in OTHERS}
            for place, name in enumerate(names):
                if time.monotonic() > self._until:
                    over = f"{TOTAL_S * self._busy:.0f} s were over: make the environment faster to have them checked"
                    found.append(skips("not checked", f"{', '.join(names[place:])}: {over}"))
                    break
                found.append(self._finding(first, name))
            found += self._conduct(self._seen(first))
            told: dict[Other, Any] = {other: replay.exception() or replay.result() for other, replay in others.items()}
        if not isinstance(recorded, list):
            found += [fails(name, recorded) for name in ("episodes", *(other.check for other in OTHERS))]
            return
        found += [prompt_lengths(recorded, *self._policy)] if self._policy else []
        steady = [f for f in found if f.check in ("openings", "replay")]
        unsteady = any(OR_DECLARE in f.detail or NOT_THE_SAME in f.detail for f in steady)
        broken = next((f.detail for f in steady if f.outcome == "failed"), "")  # an episode failed
        told[LATER] = self._record(first, actions, backwards=True)
        later, *compared = (
            skips(other.check, "replies differ already within one process and at one moment")
            if unsteady
            else fails(other.check, broken)
            if broken
            else compare(other, recorded, told[other], self._promised)
            for other in (LATER, *OTHERS)
        )
        found += compared if later.outcome == "passed" else [later, *compared[1:]]

    def _finding(self, process: LintProcess, name: str) -> CheckResult:
        """The finding of one check in the first process."""
        limit_s = self._call_s + CHECK_S * self._busy
        told = self._asked(process, WorkerReply, limit_s, f'checking "{name}"', ask="check", name=name)
        if isinstance(told, LintFailure):
            return fails(name, f"{process.call}: {told.failed}" if process.call else told.failed)
        return CheckResult(name, *told)

    def _seen(self, process: LintProcess) -> Seen:
        told = self._asked(process, Seen, 5.0 * self._busy, "asking what it did", ask="seen")
        return () if isinstance(told, LintFailure) else told

    def _asked(
        self, process: LintProcess, kind: type[T], limit_s: float, doing: str, **request: Any
    ) -> T | LintFailure:
        """What a process answers. Raises `Failed` if a call did not end, or if the answer has another form. `doing` is what
        the process does until then."""
        process.call, called = "", self._called

        def tell() -> None:
            call = f", {process.call}" if process.call else ""
            self._wait(f"waiting for {called}, at most {limit_s:.0f} s: {doing}{call}")

        timer = threading.Timer(WAIT_S, tell)
        timer.daemon = True
        timer.start()
        try:
            told = self._sound(read, process.ask(limit_s, **request), kind)
            if isinstance(told, LintFailure) and told.stuck:
                raise Failed(told.stuck, Reason.TIMEOUT, told.seen)
            return told
        except Failed as failed:
            failed.call, failed.doing = process.call, doing
            raise
        finally:
            timer.cancel()

    def _sound(self, judge: Callable[..., T], *told: Any) -> T:
        """What `judge` makes of an answer. Raises `Failed` if it finds it malformed."""
        try:
            return judge(*told)
        except MalformedReply as fault:
            raise Failed(f"the process of the environment {fault}") from None

    def _conduct(self, seen: Sequence[Sequence[str]]) -> list[CheckResult]:
        """What the environment did beside its task."""
        kinds: dict[str, list[str]] = {}
        for kind, what, place in seen:
            if place or kind in (NETWORK, IMPORT) or not self._refuses:
                kinds.setdefault(kind, []).append(f"{what}{f' ({place})' if place else ''}")
        found = []
        for kind, told in kinds.items():
            text = f"{told[0]}{f', and {len(told) - 1} more' if len(told) > 1 else ''}"
            if kind != IMPORT and not self._promised and not self._refuses:
                found.append(passes(kind, f"{text}: it stays with the host, as it declares"))
            else:
                found.append(fails(kind, f"{text}: {REMEDIES[kind]}"))
        if not found and seen:
            return [passes("conduct", f"a package did without what was refused to it: {seen[0][1]}")]
        return found or [passes("conduct", "no network, no processes, no files written, nothing done at import")]

    def _started(self, hash_seed: int, zone: str) -> LintProcess:
        shown = [*self._place.shown, *self._files.values()]
        self._processes.append(LintProcess.start(self._sandboxed, hash_seed, zone, shown, self._place.shown[1:]))
        return self._processes[-1]

    def _loaded(self, process: LintProcess, elsewhere: bool, found: list[CheckResult]) -> LoadedEnv | None:
        """What a process says of the environment; None if it cannot load it, which is then a finding."""
        what = msgspec.structs.asdict(msgspec.structs.replace(self._load, elsewhere=elsewhere))
        told = self._asked(process, LoadedEnv, LOAD_S * self._busy, LOADING, ask="load", what=what)
        if isinstance(told, LoadedEnv):
            return told
        words = with_place_looked(told.failed, self._args)
        found.append(fails("data" if told.failed.startswith("data set ") else "load", words))
        return None

    def _record(self, process: LintProcess, actions: Any, backwards: bool = False) -> list[Recorded] | str:
        """What a process recorded, or one line that says why it did not."""
        limit_s, doing = self._call_s + RECORD_S * self._busy, "recording episodes"
        told = self._asked(process, list[Recorded], limit_s, doing, ask="record", actions=actions, backwards=backwards)
        if isinstance(told, LintFailure):
            return f"{process.call}: {told.failed}" if process.call else told.failed
        self._sound(demand_episodes, told)
        return told

    def _replay(self, other: Other, actions: Any) -> list[Recorded] | str:
        """What another process answers to the same actions."""
        process, found = self._started(other.hash_seed, other.zone), list[CheckResult]()
        if self._loaded(process, other.zone != HERE_ZONE, found) is None:
            return found[0].detail
        return self._record(process, actions, other.backwards)

    def _failure(self, failed: Failed) -> CheckResult:
        """The finding about a process that gave no answer."""
        where = f"in {failed.call}, while {failed.doing}" if failed.call else f"while {failed.doing}"
        if failed.reason is Reason.MEMORY:
            return fails("memory", f"{failed} {where}: load less")
        if failed.reason is Reason.TIMEOUT and failed.seen is None:
            remedy = "look for a regular expression or a number that takes very long"
            return fails("time", f"{failed} {where}, and no line of Python ran: {remedy}")
        if failed.reason is Reason.TIMEOUT:
            soon = "every call must end soon, whatever the policy wrote"
            return fails(
                "time", f"{failed}: {'let it do less when it is imported' if failed.doing == LOADING else soon}"
            )
        if failed.code is None and failed.reason is not Reason.KILLED:  # its pipe holds other bytes, or was closed
            remedy = "write to no file that the environment did not open, and close none"
        elif failed.code == -signal.SIGALRM:
            remedy = "an alarm that it set itself went off: call signal.signal before it, with a function that raises"
        elif failed.code in (None, -signal.SIGKILL):
            remedy = "leave out what ends it, or use less memory"
        elif failed.code < 0:
            remedy = "code that is not Python's crashes there, such as a package's: leave that call out, or replace it"
        else:
            remedy = "raise an error instead"
        return fails("process", f"{self._called}: {failed} {where}: {remedy}")


def _without_echoes(found: Sequence[CheckResult]) -> list[CheckResult]:
    """Each fault once: checks that failed only because something was refused, or memory was short, refer to it."""
    shown: list[CheckResult] = []
    same: dict[str, list[str]] = {}
    for finding in found:
        cause = next((one for one in shown if one.outcome == "failed" and _cause(one) in _cause(finding)), None)
        if cause is not None and finding.outcome != "passed":
            same.setdefault(cause.check, []).append(finding.check)
        elif finding.outcome == "failed" and REFUSED in finding.detail:
            shown.append(skips(finding.check, f"not checked, because it did what is not allowed: {finding.detail}"))
        elif finding.outcome == "failed" and INSTALL in finding.detail:
            if not any(one.check == PROCESSES for one in shown):
                shown.append(fails(PROCESSES, f"it starts a sandbox of its own: {REMEDIES[PROCESSES]}"))
        elif finding.outcome == "failed" and "MemoryError" in finding.detail:
            if not any(one.check == "memory" for one in shown):
                when = " when it is imported" if finding.check == "load" else ""
                needed = f"more than {MEMORY_MB:,} MB are needed{when}: {finding.detail}. Use less"
                shown.append(fails("memory", needed))
        else:
            shown.append(finding)
    for check, others in same.items():
        shown.append(skips("not checked", f"{', '.join(others)}: the cause is that of {check!r}"))
    return shown


def _cause(finding: CheckResult) -> str:
    """What a finding says after the task and the call, without numbers: the same for one mistake in several checks."""
    raised = finding.detail.rpartition("raised ")[2]
    words = raised if raised != finding.detail else re.sub(r"^(held-out )?task \d+[^:]*: ", "", finding.detail)
    return re.sub(r"\d+(\.\d+)?", "#", words)


def compare(other: Other, recorded: Sequence[Recorded], told: Any, promised: bool) -> CheckResult:
    """The finding about what another process answered: what it recorded, why it did not, or what it raised. One that is
    slow may have played fewer tasks. `promised`: whether the environment says that it answers alike."""
    if isinstance(told, Exception) and (not isinstance(told, Failed) or told.reason is not None):
        return skips(other.check, f"it could not be played again: {told}")
    if not isinstance(told, list):
        return differs(other.check, f"{other.cause} it fails: {told}", promised)
    again = {(task.index, task.heldout): task for task in told}
    played = [(task, again[task.index, task.heldout]) for task in recorded if (task.index, task.heldout) in again]
    for before, after in played:
        if problem := _first_difference(before, after):
            where = f"{'held-out task' if before.heldout else 'task'} {before.index}"
            return differs(other.check, f"{other.cause} {where} {problem}: {other.remedy}", promised)
    if len(played) < min(2, len(recorded)):
        return skips(other.check, f"{other.cause} no two tasks were played again in time")
    count = f"{len(played)} of {len(recorded)}" if len(played) < len(recorded) else f"{len(played)}"
    return passes(other.check, f"{other.cause} {count} tasks give the same replies and scores")


def _first_difference(before: Recorded, after: Recorded) -> str:
    """What two processes answered differently to the same actions; empty if nothing."""
    if before.opens != after.opens:
        return f"opens with {describe_difference(before.opens, after.opens)}"
    if len(before.episodes) != len(after.episodes):
        return f"has {len(before.episodes)} episodes, then {len(after.episodes)}"
    for old, new in zip(before.episodes, after.episodes, strict=True):
        for turn, (reply, other) in enumerate(zip(old.replies, new.replies, strict=False)):
            if reply != other:
                return f"answers turn {turn} with {describe_difference(reply, other)}"
        for turn, (paid, pays) in enumerate(zip(old.earned, new.earned, strict=False)):
            if paid != pays:
                return f"pays for turn {turn} {describe_difference(paid, pays)}"
        if old.end != new.end or len(old.replies) != len(new.replies):
            first, then = (f"{one.end[1]} after {len(one.replies)} turns" for one in (old, new))
            return f"scores {first}, then {then}"
    return ""


def prompt_lengths(recorded: Sequence[Recorded], renderer: Renderer, sampling: Sampling) -> CheckResult:
    """Whether the policy's chat template takes the prompts, and they leave it room to write."""
    lengths, long, refused = list[int](), list[str](), list[str]()
    texts, prompts = set[str](), set[tuple[int, ...]]()
    for task in recorded:
        try:
            messages, arguments, most = msgspec.convert(task.prompt, tuple[list[Any], dict[str, Any], int])
            token_ids = renderer.open(messages, arguments).token_ids
        except msgspec.ValidationError as error:  # what a process says is a stranger's
            return skips("prompts", f"they cannot be measured: {error}")
        except ShoalError as error:
            refused.append(str(error))
            continue
        lengths.append(len(token_ids))
        texts.add(str(messages))
        prompts.add(tuple(token_ids))
        long += filter(None, [no_room(most, sampling, lengths[-1])])
    faults = list[str]()
    if len(texts) > 1 == len(prompts):
        faults.append(
            f"the policy's chat template and tokenizer make one prompt of all {len(lengths)} tasks, whose messages differ"
        )
    if refused:
        share = f"{len(refused)} of {len(recorded)} are not taken by the policy's chat template or tokenizer"
        faults.append(f"{share}, and their tasks never begin; the first: {refused[0]}")
    if long:
        share = f"{len(long)} of {len(recorded)} prompts are too long, and their tasks never begin"
        faults.append(f"{share}; the first: {long[0]}. {ROOM_REMEDY}")
    if faults:
        return fails("prompts", ". ".join(faults))
    return passes("prompts", f"{len(lengths)} prompts take up to {max(lengths)} tokens of {sampling.max_tokens}")


def _shown(detail: str) -> str:
    """Paths as they are outside the sandbox, in one line."""
    return " ".join(detail[: 2 * MAX_DETAIL_CHARS].replace(f"{OUTSIDE}/", "/").split())[:MAX_DETAIL_CHARS]


def busy() -> float:
    """How many times slower this machine is than if nothing else ran."""
    return min(MOST_BUSY, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def _place(name: str) -> EnvLocation:
    """Where an environment is. Raises `ConfigError` if there is none."""
    if is_package(name):
        store = PackageStore(node_home() / "envs")
        package = store.find(read_reference(name))
        folder = store.demand_unchanged(package)
        file = folder / package.entry.partition(":")[0]
        missing = [found for found in [unlocked(folder, package.files, package.dependencies)] if found]
        return EnvLocation(
            str(folder), (file, folder), store.paths_of(package.digest), None, package.reproducible, missing
        )
    if not is_file(name):
        env_digest(name)  # says what is near a name that is none
        return EnvLocation(name, (Path(str(BUILT_IN[name].modules[0].__file__)),), ())
    path = Path(name).absolute()
    if not path.exists():
        raise no_environment(name)
    if path.is_dir():
        about = read_package(path, index_folder(path)).about
        return EnvLocation(str(path), (path / about.entry_file, path), (path,), path, about.reproducible)
    return EnvLocation(str(path), (path,), (path,))


def _about_sandbox(report: SelftestReport, sandboxed: bool) -> CheckResult:
    if report.works:
        return passes("sandbox", "it ran without network, with files read-only, and within limits")
    if not sandboxed:
        return skips("sandbox", "it ran as your own code (--no-sandbox), with network and files")
    seen = "only what Python tells of network, files and processes was seen and refused"
    return skips("sandbox", f"it ran as your own code: {seen} ({report.found}). {report.remedy}")

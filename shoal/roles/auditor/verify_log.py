"""The auditor's first job: replay a run's log, from a folder or a URL, and say whether it holds.

It needs no key. It trusts only what it can verify: events by their chain of hashes, receipts by their signature, weights by
their manifests. `ledger/log/check` checks the events.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from shoal.errors import ConfigError, NothingYet, PeerError, StateError, cause_of
from shoal.ledger.log.check import Audit, conclude, read, receipt_findings, report, unchecked
from shoal.ledger.log.writer import BrokenLog, UnknownRules
from shoal.ledger.registry import kind_of, read_entry
from shoal.ledger.state import state_hash
from shoal.protocol import messages as t
from shoal.protocol.encoding import WireError, from_json
from shoal.protocol.host_signatures import is_promised
from shoal.roles.auditor.evidence import is_due, receipts_apart
from shoal.runs.public_run import FolderRun, PublicRun, UrlRun, open_run
from shoal.terminal import say
from shoal.weights.manifest import chunks_of, open_manifest


def check(source: str, receipts: Sequence[Path] = (), max_memory_mb: int = 0) -> bool:
    """Audit a run's folder or a coordinator's URL, print the report, and return whether the log holds.

    `receipts` are files that workers kept, on any machine. `max_memory_mb` is as of `UrlRun`. Raises `StateError` if the
    log cannot be read, `PeerError` if the coordinator does not answer, `ConfigError` if a file cannot be read.
    """
    try:
        audit = asyncio.run(_audit(source, receipts, max_memory_mb))
    except UnknownRules as unknown:
        say(unchecked(str(unknown)))
        return False
    except BrokenLog as broken:  # nothing after that event can be trusted, so there is no more to report
        say(f"FINDING: {broken}\nthe log does NOT hold")
        return False
    say(report(audit))
    return not audit.findings


def audit_folder(run_dir: Path) -> Audit:
    """Audit the log of a run's folder with the receipts and blobs in it."""
    return asyncio.run(_audit(str(run_dir), ()))


def show(run_dir: Path, kind: str, tail: int) -> None:
    """Print the last `tail` events of a run's log (0: all), or the last ones of a kind. Raises `StateError`."""
    rows = asyncio.run(FolderRun(run_dir).rows())
    lines = [data.decode(errors="replace") for data, _ in rows if not kind or _kind_in(data) == kind]
    for line in lines[-tail:] if tail else lines:
        say(line)


def _kind_in(data: bytes) -> str:
    try:
        return kind_of(read_entry(data)[0].body)
    except WireError as error:
        raise StateError(f"the log holds something that is not an event: {error}. Restore it from a copy") from None


async def _audit(source: str, receipts: Sequence[Path], max_memory_mb: int = 0) -> Audit:
    async with open_run(source, max_memory_mb) as run:
        return await audit_log(run, receipts)


async def audit_log(run: PublicRun, receipts: Iterable[Path] = ()) -> Audit:
    """Audit a run's log and the receipts in these files; in a run's folder, also its receipts and weights."""
    files = list(receipts)
    if isinstance(run, FolderRun):
        files += sorted(run.folder.nodes.glob("*/receipts.jsonl"))
    written = [(path, _read(path)) for path in files]  # before the log: a live run signs more meanwhile
    audit = await replay_log(run)
    if isinstance(run, FolderRun):
        await _check_weights(run, audit)
    signed = [(str(path), receipt) for path, data in written for receipt in _receipts(path, data, audit)]
    for whose, receipt in signed:
        if not isinstance(run, UrlRun) or is_due(receipt, audit, time.time()):
            audit.findings += receipt_findings(audit, [receipt], whose)
        else:
            audit.later += 1
    audit.findings += receipts_apart(signed)  # guard: receipts-compared
    return audit


async def replay_log(run: PublicRun, clock: Callable[[], float] = time.time) -> Audit:
    """Replay and check a run's log; at a URL, also check that the coordinator's state is what the log gives.

    Raises `UnknownRules` if this code lacks the rules that wrote the log: its state is then not known.
    """
    audit = await read_log(run)
    conclude(audit, clock())
    return audit


async def read_log(run: PublicRun) -> Audit:
    """As `replay_log`, but what `conclude` checks is not checked yet."""
    audit = read(await run.rows())
    if audit.not_checked:  # guard: unchecked-is-no-result
        raise UnknownRules(audit.not_checked)
    if isinstance(run, UrlRun):
        claimed = run.claim.head, run.claim.state_hash
        if claimed != (audit.state.head, state_hash(audit.state)):
            audit.findings.append(
                f"the state that {run.name} reports is not what its log gives. If it runs the same version of shoal, "
                "do not trust it, and keep this log as evidence"
            )
    return audit


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read receipts {path}: {cause_of(error)}. Give a worker's receipts.jsonl") from None


def _receipts(path: Path, data: bytes, audit: Audit) -> list[t.Receipt]:
    """Receipts in a worker's file that the run key signed. A receipt of this run without its signature is a finding."""
    receipts = []
    for line in data.splitlines():
        try:
            receipt = from_json(line, t.Receipt)
        except WireError:
            continue  # the worker was killed while it wrote this line
        if is_promised(receipt, audit.state.run_key):
            receipts.append(receipt)
        elif receipt.run == audit.state.run:
            audit.findings.append(f"{path}: a receipt that the run key did not sign")
    return receipts


async def _check_weights(run: FolderRun, audit: Audit) -> None:
    """Check that each version that is still kept is what its manifest promises."""
    state = audit.state
    for version, record in state.main.versions.items():
        try:
            data = await run.manifest(version, record.manifest)
            manifest = open_manifest(data, run=state.run, keys=state.publishers, now=None, version=version)
            if manifest.root != record.root:
                audit.findings.append(f"version {version}: the manifest's weights root is not the one in the log")
            for chunk in chunks_of(manifest):
                await run.blob(chunk)
        except NothingYet:
            continue  # no longer kept: see storage.retain
        except (PeerError, StateError) as error:
            audit.findings.append(f"version {version}: {error}")

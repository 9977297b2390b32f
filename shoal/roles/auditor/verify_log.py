"""The auditor's jobs that replay a log, from a folder or a URL: say whether it holds, show it, explain who was paid what.

It needs no key. It trusts only what it can verify: events by their chain of hashes, receipts by their signature, weights by
their manifests. `ledger/log/check` checks the events.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from shoal.errors import ConfigError, NothingYet, PeerError, StateError, cause_of
from shoal.ledger.event_types import kind_of, read_entry
from shoal.ledger.log.check import Audit, conclude, read, receipt_findings, report, unchecked
from shoal.ledger.log.pay_history import disagreements, explain, is_signed
from shoal.ledger.log.writer import BrokenLog, UnknownRules
from shoal.ledger.state import State, state_hash
from shoal.protocol import messages as t
from shoal.protocol.encoding import WireError, from_json, to_json
from shoal.protocol.host_signatures import is_promised
from shoal.protocol.messages.responses import Statement
from shoal.roles.auditor.evidence import is_due, receipts_apart
from shoal.run_folder import write_atomically
from shoal.runs.log_source import ANSWER_S, FolderRun, PublicRun, UrlRun, open_run
from shoal.terminal import printable, say
from shoal.weights.manifest import ManifestTrust, chunks_of, open_manifest


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
            manifest = open_manifest(data, ManifestTrust(state.run, state.publishers), now=None, version=version)
            if manifest.root != record.root:
                audit.findings.append(f"version {version}: the manifest's weights root is not the one in the log")
            for chunk in chunks_of(manifest):
                await run.blob(chunk)
        except NothingYet:
            continue  # no longer kept: see storage.retain
        except (PeerError, StateError) as error:
            audit.findings.append(f"version {version}: {error}")


# --- pay: balances come from a replay of the log, never from what a coordinator says ---


def show_credits(source: str, node: str, statement: Path | None, max_memory_mb: int = 0) -> bool:
    """Print all balances; or, for one node (its name or the start of its key), explain each credit.

    If `statement` is a path, ask the coordinator for a signed statement and write it there. `max_memory_mb` is as of
    `UrlRun`. Returns whether the log holds.
    Raises `ConfigError`, `PeerError`, `StateError`.
    """

    async def whole() -> Audit:
        async with open_run(source, max_memory_mb) as run:
            log = await replay_log(run)
            key = node_named(log.state, node) if node else ""
            if statement is not None:
                await _keep_statement(run, log, key, statement)
            say("\n".join(explained(log, key) if key else balances(log.state)))
            return log

    log = asyncio.run(whole())
    for finding in log.findings:
        say(f"FINDING: {finding}")
    return not log.findings


def check_statement(path: Path, source: str, max_memory_mb: int = 0) -> bool:
    """Check a statement's signature and, if `source` is given, compare it with that log; print and return the result.

    Raises `ConfigError` if the file is not a statement.
    """
    try:
        statement = from_json(path.read_bytes(), Statement)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}. Give a file that --statement wrote") from None
    except WireError as error:
        raise ConfigError(f"{path} is not a statement ({error}). Give a file that --statement wrote") from None
    place = f"event {statement.seq} of run {statement.run[:12]}, head {statement.head[:12]}"
    say(f"{printable(statement.name)} ({statement.node[:12]}): {statement.credits} tokens after {place}")
    findings = [] if is_signed(statement) else ["not signed by the key that it names: it was forged or edited"]
    if source and not findings:
        findings = asyncio.run(_against(statement, source, max_memory_mb))
    for finding in findings:
        say(f"FINDING: {finding}")
    if not findings:
        compared = "the log gives the same" if source else "give --log to compare key and balance with a log"
        say(f"signed by run key {statement.run_key}; {compared}")
    return not findings


async def _against(statement: Statement, source: str, max_memory_mb: int) -> list[str]:
    async with open_run(source, max_memory_mb) as run:
        log = await replay_log(run)
    return [*log.findings, *disagreements(statement, log.entries)]


async def _keep_statement(run: PublicRun, log: Audit, key: str, path: Path) -> None:
    if not isinstance(run, UrlRun) or not key:
        raise ConfigError("--statement takes a coordinator's URL and a node: its host signs with the run's key")
    found = await run.client.get_json(f"/v1/nodes/{key}/statement", Statement, deadline_s=ANSWER_S)
    named = (found.run, found.run_key, found.node)
    if named != (log.state.run, log.state.run_key, key) or not is_signed(found):
        raise PeerError(f"{run.name} gave a statement of another run or node, or one that the run key did not sign")
    write_atomically(path, to_json(found) + b"\n")


def node_named(state: State, name: str) -> str:
    """Key of the only node that has this name, or whose key starts with it. Raises `ConfigError`."""
    keys = [key for key, node in state.members.items() if node.name == name or key.startswith(name)]
    if len(keys) != 1:
        found = f"{len(keys)} nodes match" if keys else "no node matches"
        raise ConfigError(f"{found} {name!r}: give a name or the start of one key, from the table of `shoal credits`")
    return keys[0]


def balances(state: State) -> list[str]:
    """A table of all workers with their pay, and the sum."""
    lines = [
        f"{'node':<20} {'key':<12} {'credits':>9} {'accepted':>8} {'refused':>7} {'lapsed':>12} {'unfilled':>12}  standing"
    ]
    for key, node in sorted(state.members.items(), key=lambda item: -item[1].credits):
        if node.role == "worker":
            lines.append(
                f"{printable(node.name)[:20]:<20} {key[:12]} {node.credits:>9} {node.accepted:>8} {node.refused:>7} "
                f"{_lapses(state, key):>12} {_unfilled(state, key):>12}  {node.standing}{', left' if node.left else ''}"
            )
    lines.append(f"{state.issued} tokens paid; replayed to event {state.seq}, head {state.head[:12]}")
    return lines


def _lapses(state: State, key: str) -> str:
    """How many of its leases lapsed, such as "2 of 40"."""
    return f"{state.members[key].lapsed} of {state.members[key].leases}"


def _unfilled(state: State, key: str) -> str:
    """How many of the blocks that it was leased it left to others, such as "2 of 40"."""
    return f"{state.members[key].unfilled} of {state.members[key].given}"


def explained(log: Audit, key: str) -> list[str]:
    """Lines that explain each credit of a node (group, submission, validators), and what was not paid and why."""
    state = log.state
    node, lines = state.members[key], []
    for line in explain(log.entries, state, key):
        place = f"{line.version}/{line.slot}" if line.slot >= 0 else "-"
        words = [f"{line.credits:+7d}" if line.credits else f"{'':>7}", f"{place:>9}", line.detail]
        if line.check:
            bound = f", limit {line.bound:.3g}" if line.bound else ""
            words.append(f"[{line.check}: {line.figure:.3g}{bound}]")
        if line.submission:
            words.append(f"submission {line.submission[:12]}")
        if line.validators:
            audited = "audited" if line.audited else "not audited"
            words.append(f"by {', '.join(validator[:12] for validator in line.validators)}, {audited}")
        lines.append("  ".join([f"{line.seq:>6}", *words]))
    share = node.lapsed / node.leases if node.leases else 0.0
    return [
        " event   tokens  ver/slot  what",
        *lines,
        f"{printable(node.name)} ({key[:12]}): {node.credits} tokens; {node.accepted} groups accepted, "
        f"{node.refused} refused; {node.lapsed} of {node.leases} leases lapsed ({share:.1%}); "
        f"{_unfilled(state, key)} blocks unfilled",
    ]

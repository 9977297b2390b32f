"""The auditor: replays a run's log, from a folder or a URL, and says whether it holds.

Called by `shoal ledger verify` and `shoal ledger show`. It needs no key and trusts nothing but bytes: events by their
chain of hashes, receipts by their signature, weights by their manifests. What must balance is in `ledger/verify`.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.errors import ConfigError, NothingYet, PeerError, StateError
from shoal.folder import RunFolder
from shoal.ledger.events import event_hash, kind_of, read_entry
from shoal.ledger.state import state_hash
from shoal.ledger.store import Store, sqlite_url
from shoal.ledger.verify import Audit, report, verify
from shoal.net.blobs import FolderBlobs
from shoal.net.client import Client
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_SUBMISSION_BYTES
from shoal.protocol.identity import verify as verify_signature
from shoal.protocol.wire import WireError, from_json, to_json
from shoal.weights.manifest import open_manifest


def check(source: str) -> bool:
    """Audit a run's folder or a coordinator's URL, print the report, and say whether the log holds.

    Raises `StateError` where the chain of hashes breaks, `PeerError` when the coordinator cannot be asked.
    """
    audit = asyncio.run(audit_url(source)) if source.startswith(("http:", "https:")) else audit_folder(Path(source))
    print(report(audit))
    return not audit.findings


def show(run_dir: Path, kind: str, tail: int) -> None:
    """Print the last `tail` events of a run's log (0: all), of one kind if it is named."""
    lines = [data.decode() for data, _ in _rows(run_dir) if not kind or kind_of(read_entry(data)[0].body) == kind]
    for line in lines[-tail:] if tail else lines:
        print(line)


def audit_folder(run_dir: Path) -> Audit:
    """Audit the log of a run's folder with the receipts and blobs that lie there."""
    folder = RunFolder(run_dir)
    rows = list(_rows(run_dir))
    receipts, forged = _receipts(folder, verify(rows).state.run_key)
    audit = verify(rows, receipts)
    audit.findings += forged
    _check_weights(folder, audit)
    return audit


async def audit_url(url: str) -> Audit:
    """Audit the log that a coordinator serves, and that its state is what the log gives."""
    rows: list[tuple[bytes, str]] = []
    async with Client(url) as client:
        state = await client.get_json("/v1/state", t.StateHash, deadline_s=10.0)
        while len(rows) <= state.seq:
            lines = (await client.get(f"/v1/events?after={len(rows) - 1}", cap=MAX_SUBMISSION_BYTES)).splitlines()
            if not lines:
                raise PeerError(f"{url} serves {len(rows)} events but says that there are {state.seq + 1}")
            rows += [(line, event_hash(line)) for line in lines]
    audit = verify(rows[: state.seq + 1])
    if (audit.state.head, state_hash(audit.state)) != (state.head, state.state_hash):
        audit.findings.append(f"{url} says another state than its log gives: do not trust it, and keep this log")
    return audit


def _rows(run_dir: Path) -> Iterator[tuple[bytes, str]]:
    log = RunFolder(run_dir).log
    if not log.is_file():
        raise ConfigError(f"{run_dir} holds no log (log.sqlite): give a run's folder, such as runs/wordle, or its URL")
    return Store(sqlite_url(log)).read()


def _receipts(folder: RunFolder, run_key: str) -> tuple[list[t.Receipt], list[str]]:
    """Receipts that this machine's workers keep, and a finding for each that the run key did not sign."""
    receipts, forged = [], []
    for path in sorted(folder.nodes.glob("*/receipts.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                receipt = from_json(line, t.Receipt)
            except WireError:
                continue  # a worker that was killed while writing
            unsigned = to_json(msgspec.structs.replace(receipt, signature=""))
            if verify_signature(run_key, "receipt", unsigned, receipt.signature):
                receipts.append(receipt)
            else:
                forged.append(f"{path}: a receipt that the run key did not sign")
    return receipts, forged


def _check_weights(folder: RunFolder, audit: Audit) -> None:
    """Every version still kept must be what its manifest promises."""
    state, blobs = audit.state, FolderBlobs(folder.blobs)
    for version, record in state.versions.items():
        try:
            data = blobs.get(record.manifest)
            manifest = open_manifest(data, run=state.run, keys=(state.trainer_key,), now=None, version=version)
            if manifest.root != record.root:
                audit.findings.append(f"version {version}: the manifest's weights root is not the one in the log")
            for chunk in {chunk for file in manifest.files for chunk in file.chunks}:
                blobs.get(chunk)
        except NothingYet:
            continue  # its time is over: see storage.retain
        except (PeerError, StateError) as error:
            audit.findings.append(f"version {version}: {error}")

"""Logs that former code wrote give the same run under today's code, as long as the version of the rules is the same.

`record.py` made them and says what each holds.
"""

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from shoal.cli import main
from shoal.ledger import constants
from shoal.ledger.constants import LAW
from shoal.ledger.event import GENESIS, event_hash, read_stored
from shoal.ledger.event_types import KINDS
from shoal.ledger.log.check import report, verify
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import UnknownRules, replay
from shoal.ledger.state import state_hash
from shoal.protocol.encoding import to_json
from tests.golden.record import facts_of
from tests.ledger.ledger_fixture import without_links

FOLDER = Path(__file__).parent / "logs"
LOGS = sorted(path.stem for path in FOLDER.glob("*.json"))


def rows_of(name):
    data = gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes())
    return [(line, event_hash(line)) for line in data.splitlines()]


def recorded(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", LOGS)
def test_a_golden_log_gives_the_head_balances_batches_and_versions_that_were_recorded(name, monkeypatch):
    """And the same decisions, each made again, also after every constant of the law has changed."""
    audit = verify(rows_of(name))
    expected = recorded(name)
    assert audit.findings == expected["findings"] and without_links(audit.findings) == [] and not audit.not_checked
    found = json.loads(json.dumps(facts_of(audit)))
    assert {key: found[key] for key in expected if key != "state_hash"} == {
        key: value for key, value in expected.items() if key != "state_hash"
    }
    changed = {
        field: value + 7 if isinstance(value, int) else value * 0.5
        for field, value in msgspec.structs.asdict(LAW).items()
        if field != "version"
    }
    monkeypatch.setattr(constants, "LAW", msgspec.structs.replace(LAW, **changed))
    later = verify(rows_of(name))
    assert state_hash(later.state) == state_hash(audit.state)
    found = [finding for finding in later.findings if not finding.startswith("the law differs from the project's")]
    assert without_links(found) == []


def test_no_file_of_the_ledger_reads_the_law_of_new_runs():
    """Else a log would be replayed by today's constants and not by its own."""
    package = Path(constants.__file__).parent
    readers = [path.name for path in package.rglob("*.py") if path.name != "law.py" and " LAW" in path.read_text()]
    assert readers == []


def test_the_golden_logs_hold_every_kind_of_event():
    """After adding a kind, name it here until logs are recorded anew."""
    kinds = {read_stored(data).kind for name in LOGS for data, _ in rows_of(name)}
    assert kinds == set(KINDS) - {"pools_changed", "publisher_changed"}


# --- rules that this code lacks ---


def under_version(version):
    """The golden log `rules` as rules of another version would have written it, hashes and all."""
    rows, head = [], GENESIS
    for data, _ in rows_of("rules"):
        stored = read_stored(data)
        body = json.loads(bytes(stored.body))
        if stored.kind == "run_created":
            body["law"] = {**msgspec.to_builtins(LAW), "version": version, "a_constant_of_tomorrow": 1.5}
        event = {"seq": stored.seq, "time": stored.time, "kind": stored.kind, "body": body, "prev": head}
        line = to_json(event)
        head = event_hash(line)
        rows.append((line, head))
    return rows


def test_a_log_of_rules_that_this_code_lacks_is_reported_as_not_checked(tmp_path, capsys):
    audit = verify(under_version(99))
    assert "version 99 of the rules" in audit.not_checked
    assert report(audit).startswith("NOT CHECKED: ") and "holds" not in report(audit)
    with pytest.raises(UnknownRules, match="install the version of shoal that wrote it"):
        replay(under_version(99))
    folder = tmp_path / "run"
    folder.mkdir()
    store = Store(sqlite_url(folder / "log.sqlite"))
    store.append([read_stored(data) for data, _ in under_version(99)])
    assert main.main(["ledger", "verify", str(folder)]) != 0
    said = capsys.readouterr()
    assert "NOT CHECKED" in said.out + said.err and "the log holds" not in said.out


def test_even_then_its_hashes_are_checked():
    rows = under_version(99)
    with pytest.raises(Exception, match="does not follow the event before"):
        verify([*rows[:5], *rows[6:]])

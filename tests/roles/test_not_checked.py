"""A log that this shoal cannot check is reported as that by every command, never as right, wrong or empty."""

import asyncio

import httpx
import msgspec
import pytest

from shoal.cli import main
from shoal.errors import StateError
from shoal.ledger.event import event_hash, read_stored
from shoal.ledger.log.check import verify
from shoal.ledger.log.pay_history import PURPOSE
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import UnknownRules
from shoal.net.client import Client
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.constants import PROTOCOL_VERSION
from shoal.protocol.encoding import to_json
from shoal.protocol.messages.responses import Statement
from shoal.roles.auditor import verify_log
from shoal.runs import log_source
from tests.golden.test_golden import rows_of, under_version
from tests.roles.testbed import URL


def folder_of(rows, folder):
    folder.mkdir()
    store = Store(sqlite_url(folder / "log.sqlite"))
    store.append([read_stored(data) for data, _ in rows])
    store.close()
    return folder


@pytest.fixture
def unknown(tmp_path):
    return str(folder_of(under_version(99), tmp_path / "run"))


@pytest.mark.parametrize("words", [["credits"], ["credits", "worker"], ["audit", "--all"], ["ledger", "verify"]])
def test_each_command_says_why_a_log_was_not_checked_and_fails(unknown, capsys, words):
    options = [word for word in words if word.startswith("--")]
    names = [word for word in words if not word.startswith("--")]
    place = 2 if names[0] == "ledger" else 1
    assert main.main([*names[:place], unknown, *names[place:], *options]) != 0
    said = capsys.readouterr()
    assert (
        "version 99 of the rules" in said.out + said.err
        and "install the version of shoal that wrote it" in said.out + said.err
    )
    assert "recomputed" not in said.out and "tokens paid" not in said.out


def test_a_statement_is_not_compared_with_a_log_that_was_not_checked(unknown, tmp_path, capsys):
    key = load_or_make_key(tmp_path / "run.key")
    bare = Statement("r" * 32, key.public, "a" * 64, "worker", 7, 3, "h" * 64, 1000.0, "")
    signed = msgspec.structs.replace(bare, signature=key.sign(PURPOSE, to_json(bare)))
    (tmp_path / "mine.json").write_bytes(to_json(signed))
    assert main.main(["credits", "verify", str(tmp_path / "mine.json"), "--log", unknown]) != 0
    said = capsys.readouterr()
    assert "version 99 of the rules" in said.err and "FINDING" not in said.out


def test_at_a_url_the_coordinators_state_is_not_called_wrong():
    rows = under_version(99)

    def answer(request):
        body = to_json(t.StateHash(len(rows) - 1, rows[-1][1], "ab" * 32))
        if request.url.path == "/v1/events":
            body = b"".join(data + b"\n" for data, _ in rows[int(request.url.params["after"]) + 1 :])
        headers = {"shoal-protocol": str(PROTOCOL_VERSION)}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(body))

    async def scenario():
        async with Client(URL, transport=httpx.MockTransport(answer)) as client:
            return await verify_log.replay_log(log_source.UrlRun(client))

    with pytest.raises(UnknownRules, match="version 99 of the rules"):
        asyncio.run(scenario())


def test_a_damaged_row_of_a_log_that_cannot_be_checked_is_a_broken_log():
    rows = under_version(99)
    with pytest.raises(StateError, match="broken after event 4"):
        verify([*rows[:5], (b"{damaged", rows[5][1]), *rows[6:]])


def test_a_first_event_without_a_field_that_it_needs_is_broken():
    (data, _), *rest = rows_of("rules")
    cut = data.replace(b'"group_size":2,', b"")
    assert cut != data
    with pytest.raises(StateError, match="broken after event -1"):
        verify([(cut, event_hash(cut)), *rest])

"""Nothing that a stranger wrote can steer a terminal, and what was escaped is still the same JSON."""

import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest

from shoal.terminal import (
    MAX_LINE_CHARS,
    JsonFormatter,
    PrintableFormatter,
    as_called,
    brief,
    command,
    printable,
    say,
    wrapped,
)

NASTY = "a\x1b[2J\x7f\x9b1m\u202e\u2066\U000e0001\r\0\n\ud800b"


def test_what_does_not_print_is_escaped_and_the_rest_left():
    assert printable("Zoë 🐟 [/x]") == "Zoë 🐟 [/x]"
    shown = printable(NASTY)
    assert shown.isprintable() and shown.startswith("a\\u001b[2J\\u007f\\u009b1m\\u202e") and shown.endswith("b")
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\u001b"


@pytest.mark.parametrize("name", [NASTY.replace("\ud800", ""), "\x7f\x80\x9f"])
def test_a_line_of_the_log_stays_the_same_json(name):
    line = json.dumps({"name": name}, ensure_ascii=False)
    assert json.loads(printable(line)) == {"name": name} and printable(line).isprintable()


def test_printed_and_logged_lines_are_printable(capsys):
    say("two\nlines\x9b")
    assert capsys.readouterr().out == "two\nlines\\u009b\n"
    record = logging.LogRecord("worker", logging.INFO, "", 0, "joined run=%s", ("x\x1b[1m",), None)
    assert PrintableFormatter("%(message)s").format(record) == "joined run=x\\u001b[1m"


def test_a_terminal_gets_lines_that_are_broken_at_spaces_and_commands_whole(monkeypatch):
    line = "Warning: validator v has left: start it again (`shoal validate http://127.0.0.1:8470`), or kick it"
    rows = wrapped(line, 40).split("\n")
    assert " ".join(rows) == line and rows[0] == "Warning: validator v has left: start it"
    assert any("`shoal validate http://127.0.0.1:8470`" in row for row in rows)
    assert wrapped("short\n    shoal join http://127.0.0.1:8470 --home x", 20).endswith("8470 --home x")
    assert wrapped("  | Guess a word of five", 14) == "  | Guess a\n    word of\n    five"
    assert wrapped("漢字 漢字", 6) == "漢字\n漢字" and wrapped("x" * 50, 20) == "x" * 50
    screen = io.StringIO()
    monkeypatch.setenv("COLUMNS", "40")
    say(line, screen)
    monkeypatch.setattr(screen, "isatty", lambda: True)
    say(line, screen)
    assert screen.getvalue() == f"{line}\n{wrapped(line, 40)}\n"


def test_a_logged_line_is_short_and_a_traceback_after_it_whole():
    record = logging.LogRecord("worker", logging.INFO, "", 0, "dropped lease=%s", ("x" * 1_000_000,), None)
    assert PrintableFormatter("%(message)s").format(record) == "dropped lease=" + "x" * (MAX_LINE_CHARS - 14)
    record.exc_text = "y" * 3 * MAX_LINE_CHARS
    assert PrintableFormatter("%(message)s").format(record).endswith("\n" + record.exc_text)


@pytest.mark.parametrize(
    ("logger", "who"),
    [("worker", "worker"), ("shoal.weights.fetch.fetch", "weights"), ("shoal.net.connection_limits.http", "net"),
     ("shoal.weights.engine_loader", "weights"), ("shoal.step_metrics", "step_metrics"), ("shoal", "shoal"),
     ("asyncio", "asyncio")],
)  # fmt: skip
def test_a_logged_line_names_who_speaks_and_no_file_of_ours(logger, who):
    record = logging.LogRecord(logger, logging.INFO, "", 0, "left=true", (), None)
    assert PrintableFormatter("%(name)s %(message)s").format(record) == f"{who} left=true"
    assert record.name == logger


def test_text_for_a_cell_is_one_short_line_with_few_marks():
    assert brief("worker-7") == "worker-7" and brief("Zoe\u0308 🐟") == "Zoë 🐟"
    assert brief("x" * 10_000, 20) == "x" * 19 + "…"
    assert brief("e" + "\u0302" * 500, 20) == "ê" + "\u0302" * 2 + "…"
    assert brief("❤\ufe0f\n\u202e", 30) == "❤\\n\\u202e"
    assert len(brief(NASTY, 10)) == 10


def json_line(message, *args, level=logging.INFO):
    record = logging.LogRecord("shoal.train.learner", level, "", 0, message, args, None)
    record.created = 1_800_000_000.25
    return JsonFormatter("trainer").format(record)


def test_a_line_of_json_has_time_level_role_and_the_fields_of_the_message():
    line = json_line("step=%d reward=%.3f who='%s' 100%% done", 7, 0.12345, "worker-1", level=logging.WARNING)
    assert json.loads(line) == {
        "time": "2027-01-15T08:00:00.250+00:00", "level": "warning", "role": "trainer", "from": "train",
        "message": "step=7 reward=0.123 who='worker-1' 100% done",
        "fields": {"step": 7, "reward": 0.12345, "who": "worker-1"},
    }  # fmt: skip


def test_what_a_stranger_wrote_adds_no_field_and_no_line_and_is_cut():
    line = json_line("refused=%s", NASTY + ' level="error" step=9\n{"time": 1}' + "x" * 9000)
    assert line.isascii() and line.isprintable() and len(line) < 4 * MAX_LINE_CHARS
    assert json.loads(line)["fields"].keys() == {"refused"}


def test_a_line_of_json_has_no_number_that_json_lacks_and_a_whole_traceback():
    assert json.loads(json_line("loss=%f", float("nan")))["fields"] == {"loss": None}
    record = logging.LogRecord("worker", logging.ERROR, "", 0, "failed", (), None)
    record.exc_text = "Traceback\n" + "y" * 3 * MAX_LINE_CHARS
    assert json.loads(JsonFormatter("worker-0").format(record))["traceback"] == record.exc_text


@pytest.mark.parametrize(
    ("called", "begins"),
    [
        (".venv/bin/shoal", ".venv/bin/shoal"),
        ("{here}/.venv/bin/shoal", ".venv/bin/shoal"),
        ("{here}/shoal", "./shoal"),
        ("/a b/shoal", "'/a b/shoal'"),
        ("/x/site-packages/shoal/__main__.py", "/p/python -m shoal"),
        ("/x/bin/pytest", "shoal"),
    ],
)
def test_a_command_to_paste_begins_as_the_program_was_called(
    called: str, begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", [called.format(here=tmp_path)])
    monkeypatch.setattr(sys, "executable", "/p/python")
    assert command("eval", "a b") == f"{begins} eval 'a b'"
    assert as_called("so `shoal admin drain`, not shoal") == f"so `{begins} admin drain`, not shoal"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "shoal").touch(mode=0o755)
    monkeypatch.setenv("PATH", os.fspath(tmp_path / "bin"))
    assert command("eval", "x") == "shoal eval x"


def test_a_command_about_a_run_gets_its_folder_where_it_is_known() -> None:
    said = "`shoal admin resume` or `shoal admin kick RUN bob`, `shoal calibrate RUN_FILE --write`"
    assert as_called(said) == said
    assert as_called(said, Path("runs/a b")) == (
        "`shoal admin resume 'runs/a b'` or `shoal admin kick 'runs/a b' bob`, `shoal calibrate RUN_FILE --write`"
    )

"""Nothing that a stranger wrote can steer a terminal, and what was escaped is still the same JSON."""

import json
import logging

import pytest

from shoal.terminal import MAX_LINE_CHARS, PrintableFormatter, brief, printable, say

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


def test_a_logged_line_is_short_and_a_traceback_after_it_whole():
    record = logging.LogRecord("worker", logging.INFO, "", 0, "dropped lease=%s", ("x" * 1_000_000,), None)
    assert PrintableFormatter("%(message)s").format(record) == "dropped lease=" + "x" * (MAX_LINE_CHARS - 14)
    record.exc_text = "y" * 3 * MAX_LINE_CHARS
    assert PrintableFormatter("%(message)s").format(record).endswith("\n" + record.exc_text)


@pytest.mark.parametrize(
    ("logger", "who"),
    [("worker", "worker"), ("shoal.weights.fetch", "weights"), ("shoal.net.connections.http", "net"),
     ("shoal.roles.loading", "loading"), ("shoal.metrics", "metrics"), ("shoal", "shoal"), ("asyncio", "asyncio")],
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

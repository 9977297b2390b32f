"""Hostile texts of strangers, and a page whose run says them. Used by the tests of the page, with a browser and without."""

import json
from dataclasses import replace

from shoal.watch.page import Shelf

HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</title><script>alert(1)</script>",
    "\"><svg onload=alert(1)>",
    "'><b onmouseover=alert(1)>", "javascript:alert(1)", "</td></tr></table><iframe src=//x>",
    "</textarea><script>1</script>",
    "{{ 7 * 7 }}", "{% raw %}", "<!--", "-->", "]]>", "&lt;script&gt;", "\u202etxt.exe", "\u2066isolate",
    "\x1b[31mred\x1b[0m",
    "\x00nul", "\x07bell", "line\r\nset-cookie: a=b", "=cmd|'/c calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "%0d%0aheader",
    "\ud800half",
    "a" * 5000, "Z\u0351\u0352\u0353\u0354\u0355algo" * 40, "<style>*{display:none}</style>", "<base href=//evil>",
    "<meta http-equiv=refresh content=0>", "</bdi><script>alert(2)</script>", "<a href=javascript:alert(1)>x</a>",
]  # fmt: skip


def hostile_shelf(root, index, monkeypatch):
    """A page whose run says hostile things wherever strangers may say something."""
    shelf = Shelf(index, [str(root)])
    while shelf.step():
        pass
    db = shelf.runs[0].builder._db
    for table, column, key in (
        ("nodes", "name", "key"), ("nodes", "last_reason", "key"), ("nodes", "device", "key"), ("refusals", "reason",
        "seq"),
        ("refusals", '"check"', "seq"), ("events", "words", "seq"), ("groups", "env", "id"), ("rollouts", "ending", "id"),
        ("rollouts", "flaw", "id"),
    ):  # fmt: skip
        keys = [key_ for (key_,) in db.execute(f"SELECT DISTINCT {key} FROM {table}")]
        for place, key_ in enumerate(keys):
            word = HOSTILE[place % len(HOSTILE)].encode("utf-8", "replace").decode()
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (word, key_))
    for place, word in enumerate(HOSTILE):
        word = word.encode("utf-8", "replace").decode()
        db.execute("INSERT OR REPLACE INTO series VALUES (1, ?, 1, 0.5)", (f"env_metric/{word}",))
        alarm = (word, word, place, word, json.dumps({"measured": []}))
        db.execute("INSERT INTO alarms VALUES (1, ?, ?, ?, 'warning', ?, 1, 1, 1, ?)", alarm)
        db.execute("INSERT INTO heldout VALUES (1, ?, '', ?, 0.5, 0.4, 0.6, 9, ?, ?)", (word, place, word, word))
    db.execute("UPDATE runs SET name = ?", (HOSTILE[2],))
    of_run = shelf.group

    def group(*asked):
        read = of_run(*asked)
        turns = [
            replace(
                turn,
                text=HOSTILE[place % len(HOSTILE)],
                pieces=tuple(HOSTILE[i % len(HOSTILE)] for i in range(len(turn.token_ids))),
            )
            for place, turn in enumerate(read.rollouts[0].turns)
        ]
        rollouts = [
            replace(r, turns=tuple(turns), ending=HOSTILE[r.index], flaw=HOSTILE[r.index]) for r in read.rollouts
        ]
        return replace(read, rollouts=tuple(rollouts))

    monkeypatch.setattr(shelf, "group", group)
    return shelf

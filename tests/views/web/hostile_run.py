"""Hostile texts of strangers, and a page whose run says them. Used by the tests of the page, with a browser and without."""

import json
from dataclasses import replace
from urllib.parse import urlencode

from shoal.step_metrics import METRICS
from shoal.views.web.served_runs import ServedRuns

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


def hostile_runs(root, index, monkeypatch):
    """A page whose run says hostile things wherever strangers may say something."""
    served_runs = ServedRuns(index, [str(root)])
    while served_runs.step():
        pass
    db = served_runs.runs[0].builder._db
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
    words = [word.encode("utf-8", "replace").decode() for word in HOSTILE]
    for place, word in enumerate(words):
        db.execute("INSERT OR REPLACE INTO series VALUES (1, ?, 1, 0.5)", (f"env_metric/{word}",))
        evidence = {
            "measured": [{"name": word, "value": 0.5, "limit": 0.1}, {"name": "x", "value": word, "limit": word}]
        }
        alarm = (word, word, place, word, json.dumps(evidence))
        db.execute("INSERT INTO alarms VALUES (1, ?, ?, ?, 'warning', ?, 1, 1, 1, ?)", alarm)
        db.execute(
            "INSERT INTO heldout VALUES (1, ?, '', ?, 0.5, 0.4, 0.6, 9, 1, ?, ?, 0.5, 0, 1)", (word, place, word, word)
        )
    _say_in_tables_and_judgements(db, words)
    db.execute("UPDATE runs SET name = ?", (HOSTILE[2],))
    served_runs.runs[0].trouble = words[0]
    monkeypatch.setattr(served_runs, "group", _hostile_groups(served_runs.group))
    return served_runs


def _say_in_tables_and_judgements(db, words):
    """What the host's metrics, its condition, nodes and validators say: names, outcomes, roots and what is waited for."""
    line = {**dict.fromkeys(METRICS, words[0]), **dict.fromkeys(words, 0.5)}
    line |= {"step": 1, "reward_mean": dict.fromkeys(words, 0.5), "entropy_nats": dict.fromkeys(words, 1.5)}
    db.execute("UPDATE metrics SET line = ? WHERE step = 1", (json.dumps(line),))
    told = json.loads(db.execute("SELECT told FROM conditions").fetchone()[0])
    told |= {"phase": words[4], "waiting_for": words[0], "pause_cause": words[1], "refused": {words[0]: 1}}
    db.execute("UPDATE conditions SET told = ?", (json.dumps(told),))
    for word in words:
        db.execute("UPDATE nodes SET reasons = ?, standing = ? WHERE reasons != '{}'", (json.dumps({word: 2}), word))
    # Two validators that differ about all submissions, of which one accuses the other.
    db.execute("INSERT INTO verdicts SELECT run, seq + 100000, time_s, ?, submission, worker, version, groups, audited, "
               "accept, void, soft, hard, ?, ?, seq FROM verdicts", (words[0], words[1], words[2]))  # fmt: skip
    db.execute("UPDATE verdicts SET outcomes = ? WHERE seq < 100000", (words[3],))
    db.execute("UPDATE refusals SET outcome = ?", (words[0],))
    db.execute("UPDATE versions SET root = ?", (words[0],))


def _hostile_groups(of_run):
    """Groups whose texts, endings, flaws, and when they are played again names of rewards and problems, are hostile."""

    def group(*asked, parts=False):
        read = of_run(*asked)
        turns = [
            replace(
                turn,
                text=HOSTILE[place % len(HOSTILE)],
                pieces=tuple(HOSTILE[i % len(HOSTILE)] for i in range(len(turn.token_ids))),
            )
            for place, turn in enumerate(read.rollouts[0].turns)
        ]
        named = {"parts": dict.fromkeys(HOSTILE, 0.5), "metrics": dict.fromkeys(HOSTILE, 1.5)} if parts else {}
        rollouts = [
            replace(r, turns=tuple(turns), ending=HOSTILE[r.index], flaw=HOSTILE[r.index], **named,
                    problem=HOSTILE[r.index] if parts else "")
            for r in read.rollouts
        ]  # fmt: skip
        return replace(read, rollouts=tuple(rollouts))

    return group


def hostile_addresses(served_runs):
    """Every view of such a page, also with hostile words in its address."""
    look = served_runs.look()
    groups = look.rows("SELECT id, env, task, version, slot FROM groups WHERE public = 1 LIMIT 3")
    one = groups[0]
    views = ["", "figures", "nodes", "validators", "refusals", "versions", "log", "log?after=30", "alarms", "groups",
             "heldout", "steps/1", "groups?" + urlencode({"q": HOSTILE[0], "env": HOSTILE[1], "status": HOSTILE[3]}),
             "log?" + urlencode({"q": HOSTILE[3], "node": HOSTILE[0]}), "nodes?" + urlencode({"q": HOSTILE[1]}),
             "refusals?" + urlencode({"check": HOSTILE[0]}), "figures?" + urlencode({"q": HOSTILE[0]}),
             f"versions/{one['version']}/slots/{one['slot']}"]  # fmt: skip
    views += [f"figure?{urlencode({'name': f'env_metric/{word}'})}" for word in HOSTILE[:6]]
    views += [f"task?{urlencode({'env': row['env'], 'task': row['task']})}" for row in groups]
    views += [f"groups/{row['id']}{query}" for row in groups for query in ("", "?parts=1&colour=advantage&by=worst")]
    views += [f"nodes/{row['key']}" for row in look.rows("SELECT key FROM nodes")]
    return [
        "/compare",
        f"/compare?{urlencode({'metric': f'env_metric/{HOSTILE[0]}'})}",
        *(f"/1/{view}" for view in views),
    ]

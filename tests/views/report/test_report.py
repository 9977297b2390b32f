"""The report on a run: what it says, what it keeps out, and that strangers' text in it is text."""

import html.parser
import json
import time
from dataclasses import replace

import msgspec
import pytest

from shoal.alarms import Alarm, AlarmsLog
from shoal.cli.main import main
from shoal.errors import StateError
from shoal.evaluation_files import Evaluation, JudgeResult
from shoal.models.open_model import spec_of
from shoal.run_folder import RunFolder
from shoal.runs.redact import without_folders
from shoal.runs.run_reader import open_run
from shoal.views.report import report as page
from shoal.views.report.report import _changes, _config, facts_of, gain_of, policy_of
from shoal.views.report.samples import ReportSample, SampleTurn, Talk

HOSTILE = (
    "<script>alert(1)</script>", "</style><script>x</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='x",
    "<svg/onload=alert(1)>", "</title><h1>x", "<!--", "-->", "]]>", "<![CDATA[", "&lt;script&gt;", "&#60;script&#62;",
    "javascript:alert(1)", "{{ 7*7 }}", "{% raw %}", "{# x #}", "\x1b[2J\x1b]0;x\x07", "\x00\x01\x02", "\u202egnp.exe",
    "a\u0300" * 50, "\u2028\u2029", "\ud800", "\ufdfd" * 20, "<" * 100, "<iframe src=//evil.example>",
    "<base href=//evil.example>", "<meta http-equiv=refresh content=0>", "<form action=//evil.example><input>",
    "<link rel=stylesheet href=//x>", "\U000e0041\ufeff",
)  # fmt: skip
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3", "p", "dl", "div", "dt", "dd", "table",
    "tr", "th", "td", "figure", "figcaption", "svg", "defs", "g", "path", "use", "clippath", "rect", "code", "pre", "br",
    "span", "section", "details", "summary",
}  # fmt: skip


class Reader(html.parser.HTMLParser):
    """Elements with their attributes, and the text."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.words = [], []
        self.feed(source)
        self.text = "".join(self.words)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def ended(copied):
    """A copy of the run with alarms, use of the machine, and a second evaluation."""
    folder = RunFolder(copied)
    AlarmsLog(folder.alarms).write(
        "raised", Alarm("drift", "warning", 1, 1, "The policy drifts.", "Lower the rate."), 5.0
    )
    (copied / "usage.json").write_text(
        '{"wall_s": 90.5, "cpu_s": {"trainer": 30.0}, "peak_rss_mb": {"trainer": 100.0}}'
    )
    figures = json.loads((folder.evaluations / "before.json").read_text())
    (folder.evaluations / "after.json").write_text(json.dumps(figures | {"mean": 0.9, "low95": 0.8, "high95": 1.0}))
    return copied


def written(where, private=False):
    with open_run(where, private=private) as run:
        run.catch_up()
        return page.report_of(run, 0.0), run


def test_it_says_what_the_run_was_and_how_to_verify_it(ended):
    source, run = written(ended)
    text = Reader(source).text
    for said in ("town", run.run, run.state.head, run.state.run_key, "2 of 2", "cheater", "sampling",
                 "The policy that samples and the one that learns",
                 "Success rose from 0.5 in version 0 to 0.9 in version 2", "0.800 to 1.000", "trainer30s",
                 '"max_turn_tokens": 6', "shoal ledger verify RUN_FOLDER", "newest: version",
                 "Made 1970-01-01 00:00:00 UTC"):  # fmt: skip
        assert "".join(said.split()) in "".join(text.split()), said
    assert len(source) < 2_000_000
    assert_needs_no_network_and_no_scripts(source)


@pytest.mark.parametrize(("phase", "said"), [("ended", "had paused: clock"), ("paused", "is paused: clock")])
def test_a_run_that_has_ended_is_not_said_to_be_paused(ended, monkeypatch, phase, said):
    def paused(*args):
        facts = facts_of(*args)
        return replace(facts, status=msgspec.structs.replace(facts.status, phase=phase, pause_cause="clock"))

    monkeypatch.setattr(page, "facts_of", paused)
    assert f"The run {said}." in Reader(written(ended)[0]).text


def test_it_describes_the_policy_that_was_used_and_no_default(ended):
    spec = spec_of(ended / "policy")
    size = f"{spec.family}, {spec.num_parameters():,} parameters, {spec.layers} layers of width {spec.width}, "
    assert size in Reader(written(ended)[0]).text
    section = {
        "path": "…/my-model", "dtype": "bfloat16", "implementation": "", "tiny": {"layers": 99, "width": 999},
        "adapter": {"rank": 0, "alpha": 16.0},
    }  # fmt: skip
    with open_run(ended) as run:
        run.catch_up()
        said = policy_of(run, section)
        assert said.startswith(size) and said.endswith("; dtype bfloat16, path …/my-model")
        assert "rank 8" in policy_of(run, section | {"adapter": {"rank": 8}})
        for file in (ended / "blobs").rglob("*"):
            if file.is_file():
                file.unlink()
        assert policy_of(run, section) == "dtype bfloat16, path …/my-model"
        assert "layers 99" in policy_of(run, section | {"path": ""}), "then the run file's own policy is what began"


def test_the_run_file_has_no_shape_that_the_policy_has_not_and_names_what_was_changed_in_it():
    policy = {"path": "…/start", "dtype": "float32", "tiny": {"tied": False, "max_positions": 512}}
    assert "tiny" not in _config({"policy": policy}) and "…/start" in _config({"policy": policy})
    assert '"max_positions": 512' in _config({"policy": policy | {"path": ""}})
    assert _config({"policy": "many"}) == json.dumps({"policy": "many"}, indent=1)
    begun = {"steps": 20, "train": {"lr": 0.1, "clip": 1}, "envs": [{"name": "a"}]}
    later = begun | {"steps": 40, "train": {"lr": 0.2, "clip": 1}}
    assert _changes([begun, later, later | {"steps": 60}]) == [
        "steps: 20 → 40",
        "train.lr: 0.1 → 0.2",
        "steps: 40 → 60",
    ]
    assert _changes([begun]) == _changes([begun, begun]) == []


def assert_needs_no_network_and_no_scripts(source):
    elements = Reader(source).elements
    assert {tag for tag, _ in elements} <= ALLOWED
    outside = [value for _, attrs in elements for name, value in attrs.items()
               if name in ("src", "href", "xlink:href", "action") and not value.startswith("#")]  # fmt: skip
    assert outside == [] and "url(http" not in source and "@import" not in source
    assert any(tag == "meta" and "default-src 'none'" in attrs.get("content", "") for tag, attrs in elements)


def test_private_bodies_and_held_out_tasks_stay_out_unless_the_host_asks(ended, capsys, tmp_path):
    assert "a secret" not in written(ended)[0]
    assert "a secret" in written(ended, private=True)[0]
    (ended / "keys" / "run.key").unlink()
    assert "a secret" not in written(ended, private=True)[0]
    assert main(["report", str(ended), "--private", "--out", str(tmp_path / "r.html")]) == 2
    assert "lacks the run key" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


def test_others_than_the_host_learn_of_alarms_no_node_and_no_figures(ended):
    for worker in ("ann", "bob"):
        words = f"{worker} had 90 % of its blocks refused."
        poisoning = Alarm("poisoning", "critical", 1, 1, words, f"Look at {worker}.", node=worker)
        AlarmsLog(RunFolder(ended).alarms).write("raised", poisoning, 6.0)
    whole, told = (Reader(written(ended, private=private)[0]).text for private in (True, False))
    assert "ann had 90 %" in whole and "Look at bob." in whole and "3 of them stand now" in whole
    assert "90 %" not in told and "Look at" not in told and "2 of them stand now" in told
    assert "Many of a worker's groups are refused" in told


def test_thirty_hostile_texts_are_text(ended, monkeypatch):
    plain = [tag for tag, _ in Reader(written(ended)[0]).elements]
    assert len(HOSTILE) == 30

    def with_hostile(run):
        facts = facts_of(run)
        nodes = [msgspec.structs.replace(node, name=text, last_reason=text, reasons={text: 1})
                 for node, text in zip(facts.nodes * 30, HOSTILE, strict=False)]  # fmt: skip
        line = facts.alarms[0]
        alarms = [
            msgspec.structs.replace(line, alarm=msgspec.structs.replace(line.alarm, summary=text)) for text in HOSTILE
        ]
        talks = tuple(Talk(1.0, text, (SampleTurn(text, text),), text, False) for text in HOSTILE)
        everywhere = "".join(HOSTILE)
        return facts.__class__(**{
            **facts.__dict__, "name": everywhere, "nodes": nodes, "alarms": alarms, "config": everywhere,
            "gain": everywhere, "samples": [ReportSample(everywhere, everywhere, talks)], "envs": [(everywhere, "x")],
            "algorithm": everywhere,
        })  # fmt: skip

    monkeypatch.setattr(page, "facts_of", with_hostile)
    source = written(ended)[0]
    found = Reader(source)
    assert {tag for tag, _ in found.elements} <= set(plain) | {"br"}
    assert not any(name.startswith("on") for _, attrs in found.elements for name in attrs)
    assert all(text in found.text for text in HOSTILE if text.isprintable())
    source.encode()
    assert "\x1b" not in source and "\x00" not in source and "\u202e" not in source


def test_a_run_that_is_starting_has_a_report_or_says_why_not(testbed, copied):
    (copied / "metrics.jsonl").unlink()
    for path in (copied / "eval").iterdir():
        path.unlink()
    text = Reader(written(copied)[0]).text
    assert "No step has ended yet" in text and "has not been evaluated yet" in text
    (copied / "log.sqlite").unlink()
    (copied / "trainer").rename(copied / "elsewhere")
    with pytest.raises(StateError, match="no log yet"):
        written(copied)


def test_the_command_writes_the_file(testbed, tmp_path, capsys):
    out = tmp_path / "r.html"
    started = time.process_time()
    assert main(["report", str(testbed.folder.root), "--out", str(out)]) == 0
    assert time.process_time() - started < 20
    assert out.read_text().startswith("<!doctype html>") and "MB" in capsys.readouterr().out


def test_a_gain_is_told_with_its_certainty():
    def at(mean, low, high, version):
        return Evaluation(mean, low, high, 9, measure="success", version=version)

    assert "do not touch" in gain_of([at(0.2, 0.1, 0.3, 0), at(0.6, 0.5, 0.7, 9)])
    assert "may be chance" in gain_of([at(0.2, 0.1, 0.3, 0), at(0.1, 0.0, 0.2, 9)]) and gain_of([at(0, 0, 0, 0)]) == ""


def test_evaluations_with_many_faults_are_not_compared_in_a_report():
    good, judge = Evaluation(0.2, 0.1, 0.3, 20, measure="success", version=0), JudgeResult(0.5, 0.4, 0.6, episodes=20)
    bad = msgspec.structs.replace(good, mean=0.9, low95=0.8, high95=1.0, version=9, faults=10)
    assert gain_of([good, bad]).startswith("Success: no comparison, because 10 of 20")
    assert "no comparison" in gain_of([good, msgspec.structs.replace(bad, mean=None, low95=None, high95=None)])
    judged = [msgspec.structs.replace(good, judge=one) for one in (judge, msgspec.structs.replace(judge, faults=10))]
    assert "stayed" in gain_of(judged) and "The judge's mean: no comparison" in gain_of(judged)


def test_a_judge_that_disagrees_is_told_beside_the_gain():
    def at(mean, judge, version):
        return Evaluation(
            mean, mean, mean, 9, measure="success", version=version, judge=JudgeResult(judge, judge - 0.1, judge + 0.1)
        )

    assert gain_of([at(0.2, 0.5, 0), at(0.6, 0.1, 9)]) == (
        "Success rose from 0.2 in version 0 to 0.6 in version 9: the 95 % intervals do not touch. "
        "The judge's mean fell from 0.5 to 0.1 in version 9: the 95 % intervals do not touch."
    )


def test_folders_of_the_host_are_left_out_of_the_run_file():
    tree = {"policy": {"path": "/home/ann/start"}, "envs": [{"name": "/home/ann/env.py"}, {"name": "wordle"}]}
    assert without_folders(tree) == {"policy": {"path": "…/start"}, "envs": [{"name": "…/env.py"}, {"name": "wordle"}]}
    deep = []
    for _ in range(900):
        deep = [deep]
    assert "…" in str(without_folders(deep))

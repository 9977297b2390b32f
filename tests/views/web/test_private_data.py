"""What the host alone sees on the page: episodes of held-out tasks, and answers to tasks."""

import json
import shutil
from functools import partial

import pytest
from msgspec.structs import replace

from shoal.envs.load import env_digest
from shoal.errors import NothingYet
from shoal.run_folder import RunFolder
from shoal.runs.run_reader import GroupRef, open_run
from tests.views.web.conftest import viewer


@pytest.fixture
def served_runs(copied, indexed):
    return indexed(copied)


def test_everybody_sees_held_out_figures_and_the_host_alone_the_episodes(anyone, host):
    hidden, shown = (client.get("/1/heldout").text for client in (anyone, host))
    for page in (hidden, shown):
        assert "Held-out evaluations" in page and '<td class="n">0.5</td>' in page and "before" in page
    assert "a secret" in shown and "held out</bdi>" in shown and "Only you see them" in shown
    assert "a secret" not in hidden and "held out</bdi>" not in hidden and "for the host alone" in hidden
    assert "a secret" not in anyone.get("/1/heldout?name=before&at=0").text


def test_held_out_episodes_of_an_environment_are_chosen_and_come_page_by_page(host, copied, served_runs):
    episode = {"task": "t", "turns": [["user", "<script>alert(1)</script>"]], "score": 0.25, "success": False,
               "ending": "environment", "tokens": 3}  # fmt: skip
    figures = {"mean": 0.5, "low95": 0.4, "high95": 0.6, "episodes": 12}
    part = figures | {"transcripts": [episode | {"task": f"task {number}"} for number in range(12)]}
    (RunFolder(copied).evaluations / "after.json").write_text(json.dumps(figures | {"envs": {"sums": part}}))
    served_runs.runs[0].builder.note_condition()
    served_runs.change += 1
    page = host.get("/1/heldout?name=after&env=sums").text
    assert (
        "1 to 10 of 12 kept." in page and "task 9<" in page and "task 10<" not in page and "<script>alert" not in page
    )
    assert "11 to 12 of 12" in host.get("/1/heldout?name=after&env=sums&at=10").text
    assert "a secret" in host.get("/1/heldout?name=before").text
    assert host.get("/1/heldout?name=nothing&at=999").status_code == 200


def test_a_held_out_judge_is_shown_and_its_words_are_the_hosts(anyone, host, copied, served_runs):
    judge = {"mean": 0.125, "low95": 0.0625, "high95": 0.25, "fault": "ValueError: a secret task"}
    figures = {"mean": 0.5, "low95": 0.4, "high95": 0.6, "episodes": 12, "judge": judge}
    (RunFolder(copied).evaluations / "v000001.json").write_text(json.dumps(figures))
    served_runs.runs[0].builder.note_condition()
    served_runs.change += 1
    for client in (anyone, host):
        page = client.get("/1/heldout").text
        assert '<td class="n">0.125</td><td class="n">0.0625 to 0.25</td>' in page and "secret task" not in page
        assert "judge" in [line["label"] for line in client.get("/1/chart.json?name=heldout").json()["lines"]]
        assert ",0.125,0.0625,0.25" in client.get("/1/csv/heldout.csv").text
    told = [served_runs.runs[0].reading.evaluations()[1].judge.fault]
    with open_run(copied, private=False) as others:
        told.append(others.evaluations()[1].judge.fault)
    assert told == ["ValueError: a secret task", ""]


def test_the_shelf_gives_nobody_else_held_out_episodes(served_runs):
    assert served_runs.transcripts(1, private=True) and served_runs.transcripts(1, private=False) == {}


def place_of(served_runs):
    row = served_runs.look().rows(
        "SELECT id, submission, place FROM groups WHERE run = 1 AND status = 'signal' ORDER BY id"
    )[0]
    return row["id"], GroupRef(row["submission"], row["place"])


def test_an_answer_is_shown_to_the_host_on_request_and_to_nobody_else(anyone, host, served_runs, monkeypatch):
    number, place = place_of(served_runs)
    known, asked, told = served_runs.answer(1, place), [], served_runs.answer
    assert len(known) == 1 and known[0].lstrip("-").isdecimal()

    def answer(run, place):
        asked.append(place)
        return told(run, place)

    monkeypatch.setattr(served_runs, "answer", answer)
    assert "only you see it" not in anyone.get(f"/1/groups/{number}?answer=1").text and asked == []
    assert "show the answer" not in anyone.get(f"/1/groups/{number}").text
    assert "only you see it" not in host.get(f"/1/groups/{number}").text and asked == []
    page = host.get(f"/1/groups/{number}?answer=1").text
    assert asked == [place] and f"<bdi>{known[0]}</bdi></pre></section>" in page


def test_a_reader_without_the_run_key_gets_no_answer(served_runs, copied):
    place = place_of(served_runs)[1]
    with open_run(copied) as plain:
        plain.catch_up()
        with pytest.raises(NothingYet, match="host alone"):
            plain.answer(place)
    shutil.rmtree(copied / "keys")
    with open_run(copied, private=True) as keyless:
        keyless.catch_up()
        with pytest.raises(NothingYet, match="host alone"):
            keyless.answer(place)


IN_PARTS = """from shoal.envs.builtin.arithmetic import Arithmetic, ArithmeticArgs
from shoal.env import Score


class InParts(Arithmetic):
    def score(self, state):
        return Score({"all of it": super().score(state)})


def environment(**args):
    return InParts(ArithmeticArgs(**args))
"""


@pytest.mark.parametrize("own_files", [False, True])
def test_parts_by_the_hosts_own_file_come_when_the_page_may_run_it(copied, tmp_path, own_files, indexed):
    (file := tmp_path / "in_parts.py").write_text(IN_PARTS)
    served_runs = indexed(copied, open_one=partial(open_run, own_files=own_files))
    state = served_runs.runs[0].reading.state
    number = place_of(served_runs)[0]
    host = viewer(served_runs, is_host=True)
    assert "--own-files" not in host.get(f"/1/groups/{number}").text  # a built-in environment needs no leave
    spec = state.envs[0]
    state.envs = (replace(spec, own_label=spec.label, name=str(file), digest=env_digest(str(file))),)
    served_runs.change += 1
    page = host.get(f"/1/groups/{number}?parts=1").text
    assert ("all of it" in page) == own_files
    assert ("read it, then allow this machine to run it, with shoal dashboard --own-files" in page) != own_files
    assert f"shoal audit {copied} --rollout 0/" in page and " --own-files</pre>" in page  # the command works as shown

"""What a host did because of an alarm, as the page shows it: in a sentence, with its figures, linked both ways."""

import html

import pytest
from starlette.testclient import TestClient

from shoal.alarms import Alarm, AlarmsLog
from shoal.config.alarm_limits import said_of
from shoal.ledger.commands import Admin, Reconfigure
from shoal.ledger.run_events import RulesChanged
from shoal.protocol.messages import AdminRequest, AlarmEvidence, Measured
from shoal.runs.event_text import sentence_of
from shoal.runs.run_reader import open_run
from shoal.views.web.app import page_app
from shoal.views.web.index.build import Builder
from shoal.views.web.index.queries import IndexQueries
from shoal.views.web.served_runs import ServedRuns
from tests.ledger.ledger_fixture import World
from tests.views.web.conftest import viewer

WORKER = "a" * 64
FALL = AlarmEvidence("collapse", 12, 15, (Measured("reward_all_mean", 0.1, 0.35), Measured("<b>entropy", 0.2, 0.5)))
POISON = AlarmEvidence("poisoning", 3, 4, (Measured("agreement", 0.4, 0.9),), WORKER)


def alarm_of(evidence):
    return Alarm(
        evidence.cause,
        "critical",
        evidence.since,
        evidence.step,
        "It falls.",
        "Look.",
        evidence.measured,
        evidence.node,
    )


@pytest.fixture(scope="module")
def acted(tmp_path_factory):
    """The page of a run whose host acted on two alarms, and where its log says so."""
    root = tmp_path_factory.mktemp("acted")
    world = World(root)
    world.publish()
    world.enter(WORKER)
    seqs = {}
    for action, facts in (
        ("rate", {"lr_factor": 0.5, "evidence": FALL}), ("quarantine", {"evidence": POISON}), ("pause", {"evidence": FALL}),
    ):  # fmt: skip
        node = WORKER if action == "quarantine" else ""
        seqs[action] = world.do(Admin(action, AdminRequest(node, **facts), world.now, 100 + world.state.seq))[-1].seq
    world.do(Reconfigure({"name": "small"}, 9, 60.0, world.now, 0, 5.0))
    world.log_writer.store.close()
    (root / "run.json").write_text("{}")
    log = AlarmsLog(root / "alarms.jsonl")
    for evidence in (FALL, POISON, AlarmEvidence("collapse", 13, 13, ())):
        log.write("raised", alarm_of(evidence), 1000.0)
    served_runs = ServedRuns(root / "index.sqlite", [str(root)])
    while served_runs.step():
        pass
    yield served_runs, seqs
    served_runs.close()


def test_each_act_is_said_with_the_alarm_its_step_and_each_figure_with_its_limit(acted):
    served_runs, seqs = acted
    why = "the alarm collapse, raised at step 12: reward_all_mean 0.1 (limit 0.35), <b>entropy 0.2 (limit 0.5)"
    words = {action: served_runs.look().event(1, seq)["words"] for action, seq in seqs.items()}
    assert words == {
        "rate": f"the learning rate of the run file is multiplied by 0.5, because of {why}",
        "quarantine": f"the host quarantines worker {WORKER[:12]}, because of the alarm poisoning, raised at step 3: "
                      "agreement 0.4 (limit 0.9)",
        "pause": f"the run is paused, because of {why}",
    }  # fmt: skip
    assert served_runs.look().event(1, seqs["quarantine"])["node"] == WORKER
    assert served_runs.look().timeline(1)["rows"][0]["words"] == (
        "the run file changes, steps: 9, leases last at most 60 s for each block, flat groups never pause the run, "
        "quarantines last 5 s"
    )


def test_every_field_of_a_change_is_worded():
    """`created` is when the host signed, and the event has a time of its own."""
    given = {"admitted_validator": WORKER, "kicked": WORKER, "steps": 7, "config": {"a": 1}, "lease_s": 3.0, "cause": "why",
             "max_flat_groups": 8, "quarantine_s": 2.0, "quarantined": WORKER, "lr_factor": 0.25, "evidence": FALL,
             "phase": "paused"}  # fmt: skip
    assert set(given) | {"created"} == set(RulesChanged.__struct_fields__)
    nothing = sentence_of(RulesChanged())
    assert nothing == "the host asks for something that changes nothing"
    assert len({sentence_of(RulesChanged(**{name: value})) for name, value in given.items()} | {nothing}) == 1 + len(
        given
    )


def test_the_page_of_an_act_shows_the_signed_figures_and_an_alarm_leads_there(acted):
    served_runs, seqs = acted
    client = viewer(served_runs, token="")
    page = client.get(f"/1/log/{seqs['rate']}").text
    assert '<th scope="row"><bdi>reward_all_mean</bdi></th><td class="n">0.1</td><td class="n">0.35</td>' in page
    assert "<bdi>&lt;b&gt;entropy</bdi>" in page and 'href="/1/alarms"><bdi>collapse' in page
    assert "The alarm behind it" not in client.get("/1/log/1").text
    rows = client.get("/1/alarms").text.partition("<tbody>")[2].split("</tr>")
    led_to = {seq for row in rows for seq in seqs.values() if f'href="/1/log/{seq}"' in row}
    assert led_to == set(seqs.values()) and sum("/1/log/" in row for row in rows) == 2
    alarms = {(row["cause"], row["since_step"]): row["acts"] for row in served_runs.look().alarms(1)}
    assert alarms == {
        ("collapse", 12): [seqs["rate"], seqs["pause"]], ("poisoning", 3): [seqs["quarantine"]], ("collapse", 13): [],
    }  # fmt: skip


def test_others_than_the_host_learn_of_an_alarm_no_node_and_no_figures(acted):
    served_runs, seqs = acted
    anyone, host = (TestClient(page_app(served_runs, "t" * 43)) for _ in range(2))
    host.get("/?token=" + "t" * 43)
    for view in ("", "alarms", "csv/alarms.csv"):
        public, whole = (client.get(f"/1/{view}").text for client in (anyone, host))
        rows = [page.partition("Figures")[2] if view == "alarms" else page for page in (public, whole)]
        told = [[word in row for word in ("It falls.", WORKER[:12], "0.35")] for row in rows]
        assert "It falls." not in public and "It falls." in whole, view
        assert said_of("collapse") in html.unescape(public), view
        if view:
            assert told == [[False] * 3, [True] * 3], view
            assert all(str(seq) in public for seq in seqs.values()), "what the host signed is public"


def test_evidence_that_was_indexed_stays_when_the_index_is_opened_again(tmp_path):
    world = World(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    for action, facts in (("pause", {}), ("rate", {"lr_factor": 0.5})):
        world.do(Admin(action, AdminRequest(evidence=FALL, **facts), world.now, 100 + world.state.seq))
        with open_run(tmp_path) as run:
            builder = Builder(tmp_path / "index.sqlite", run)
            builder.build()
            builder.close()
    look = IndexQueries(tmp_path / "index.sqlite")
    assert [(act["seq"], act["cause"]) for act in look.acts(1)] == [(3, "collapse"), (4, "collapse")]
    look.close()

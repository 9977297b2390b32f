"""The launcher's monitors: an alarm is written once, shown, and acted on once, also if the launcher is killed meanwhile."""

import asyncio
import shutil
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from shoal.alarms import Alarm, AlarmLine, AlarmsLog, read_alarms, standing_alarms
from shoal.errors import ConfigError, PeerError, StateError
from shoal.evaluation_files import Evaluation, JudgeResult
from shoal.launch.alarm_actions import AlarmWatch, _WaitTimes, evaluation
from shoal.ledger.commands import Admin
from shoal.ledger.event_types import read_entry
from shoal.ledger.log.check import verify
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.remedies import CONTINUE_REMEDY, IS_STOPPED, SILENT_REMEDY
from shoal.net.client import PeerRefused
from shoal.net.key_files import load_or_make_key
from shoal.protocol.messages import AdminRequest, Measured, Status
from shoal.run_folder import RunFolder
from shoal.runs.run_status import RunStatus
from shoal.views.terminal.live_view import render
from tests.ledger.ledger_fixture import World
from tests.monitors.series import honest_lines
from tests.roles.testbed import RunTestbed, tiny_run

WORKER = "a" * 64
FALLS = [line | ({"log_ratio_abs_mean_nats": 0.9} if line["step"] >= 10 else {}) for line in honest_lines(1, 20)]
WHY = Measured("log_ratio_abs_mean_nats", 0.9, 0.5)


def drift(since=12):
    return Alarm("drift", "critical", since, since, "it drifts", "Look", (WHY,))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A log with 20 versions, which the rules alone wrote."""
    world = World(tmp_path_factory.mktemp("log"), batch_groups=2, steps=30)
    world.enter(WORKER)
    for _ in range(20):
        world.publish()
        world.serve(WORKER)
    world.log_writer.store.close()
    return world.path


def testbed_with(tmp_path, published, **monitors):
    """A run whose log has 20 versions and whose trainer says of each what FALLS says."""
    return Run(tmp_path, published, monitors)


def test_no_alarm_compares_an_evaluation_that_has_many_faults():
    judge = JudgeResult(0.5, 0.4, 0.6, episodes=200)
    good, bad = (Evaluation(0.9, 0.8, 1.0, 200, judge=judge, faults=faults) for faults in (10, 11))
    assert evaluation(3, bad) is None and (seen := evaluation(3, good)) is not None
    assert seen.mean == 0.9 and seen.judge is not None
    doubted = evaluation(3, msgspec.structs.replace(good, judge=msgspec.structs.replace(judge, faults=11)))
    assert doubted is not None and doubted.judge is None


class Run:
    """The folder and the log of a run, without processes."""

    def __init__(self, tmp_path, published, monitors):
        self.config = tiny_run(steps=30, monitors=monitors)
        self.folder = RunFolder(tmp_path / "run")
        self.folder.prepare(self.config, tmp_path)
        shutil.copy(published, self.folder.log)
        self.folder.metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in FALLS))
        self.log_writer = LogWriter(Store(sqlite_url(self.folder.log)))
        self.now = self.log_writer.state.time + 1.0

    def do(self, command):
        return self.log_writer.write(command, self.now)

    def audit(self):
        return verify(self.log_writer.store.read())


class Host:
    """Sends a launcher's calls to the rules, and may be killed before or after."""

    def __init__(self, testbed, killed=""):
        self.testbed, self.killed, self.calls, self.created = testbed, killed, [], 1000

    def __call__(self, action, request):
        self.calls.append(action)
        if self.killed == "before":
            raise PeerError("no answer")
        self.created += 1
        asked = Admin(action, request, self.testbed.now, self.created)
        self.testbed.do(asked)
        if self.killed == "after":
            raise PeerError("no answer")


def watching(testbed, send, clock=None):
    """A launcher's monitors, at the time of the run."""
    return AlarmWatch(testbed.folder, testbed.config, clock=clock or (lambda: testbed.now), send=send)


def look(watch, times=3, phase="running"):
    """Some looks of a launcher, and what it said."""
    said = []
    for _ in range(times):
        watch._looked = -1e9
        said += watch.look(RunStatus("small", "", 30, Status("", phase, 19, 30, 0, {}, 0, 0, "", 0.0), metrics=FALLS))
        watch._acting.join()
    return said


def actions(testbed):
    """What the log says that alarms led to."""
    found = [
        (e.body.phase, e.body.lr_factor, e.body.evidence.cause) for e in testbed.audit().entries if has_evidence(e.body)
    ]
    assert not [finding for finding in testbed.audit().findings if "rules_changed" in finding]
    return found


def has_evidence(body):
    return bool(getattr(body, "evidence", None))


def test_an_alarm_is_written_once_though_the_launcher_starts_again(tmp_path, published):
    testbed = testbed_with(tmp_path, published)
    for _ in range(3):
        said = look(watching(testbed, Host(testbed)))
    assert said == []
    lines = read_alarms(testbed.folder.alarms)
    assert [(line.change, line.alarm.cause, line.alarm.since) for line in lines] == [("raised", "drift", 12)]
    assert [alarm.cause for alarm in standing_alarms(testbed.folder.alarms)] == ["drift"]


def test_an_alarm_of_before_is_no_news_to_a_launcher_that_starts_again(tmp_path, published, monkeypatch):
    """The launcher before raised it at another step, or between steps."""
    testbed = testbed_with(tmp_path, published)
    AlarmsLog(testbed.folder.alarms).write("raised", drift(since=11), testbed.now)
    assert look(watching(testbed, Host(testbed))) == []
    new = testbed_with(tmp_path / "new", published)
    monkeypatch.setattr(AlarmWatch, "standing", ())
    assert look(watching(new, Host(new))) == [], "it is over by now"
    assert [line.alarm.since for line in read_alarms(new.folder.alarms)] == [12]


def test_an_announced_cheater_is_known_by_the_key_in_its_folder(tmp_path, published):
    """A stranger may call itself cheater-0; the key of the run's own worker is in the run's folder."""
    testbed = testbed_with(tmp_path, published)
    testbed.config = msgspec.structs.replace(
        testbed.config, workers=msgspec.structs.replace(testbed.config.workers, cheating=2)
    )
    watch = watching(testbed, Host(testbed))
    look(watch)
    assert watch._follower.announced == frozenset()
    keys = [load_or_make_key(testbed.folder.nodes / f"cheater-{i}" / "node.key") for i in range(2)]
    load_or_make_key(testbed.folder.nodes / "cheater-2" / "node.key")
    look(watch)
    assert watch._follower.announced == {key.public for key in keys}


def test_without_actions_nothing_is_asked_of_the_coordinator(tmp_path, published):
    testbed = testbed_with(tmp_path, published)
    host = Host(testbed)
    said = look(watching(testbed, host))
    assert host.calls == [] and len(said) == 1 and said[0].startswith("ALARM drift (critical) at step 12")


@pytest.mark.parametrize("killed", ["", "before", "after"])
def test_an_action_is_done_once_whenever_the_launcher_is_killed(tmp_path, published, killed):
    testbed = testbed_with(tmp_path, published, actions={"drift": "pause"})
    look(watching(testbed, Host(testbed, killed)), 1)
    again = Host(testbed)
    look(watching(testbed, again))
    look(watching(testbed, again))
    assert testbed.log_writer.state.phase == "paused" and testbed.log_writer.state.pause_cause == "alarm: drift"
    assert len(actions(testbed)) == 1 and again.calls == (["pause"] if killed == "before" else [])


def test_a_run_that_its_host_resumed_is_not_paused_again_by_the_same_alarm(tmp_path, published):
    testbed = testbed_with(tmp_path, published, actions={"drift": "pause"})
    look(watching(testbed, Host(testbed)))
    testbed.do(Admin("resume", AdminRequest(), testbed.now, 1000 + 100))
    host = Host(testbed)
    look(watching(testbed, host))
    assert host.calls == [] and testbed.log_writer.state.phase == "running"


@pytest.mark.parametrize(("severity", "asked"), [("critical", ["quarantine"]), ("warning", [])])
def test_a_worker_is_quarantined_for_refusals_and_not_for_rewards_unlike_others(
    tmp_path, published, monkeypatch, severity, asked
):
    alarm = msgspec.structs.replace(drift(), cause="poisoning", node=WORKER, severity=severity)
    monkeypatch.setattr(AlarmWatch, "standing", (alarm,))
    calls = []
    watch = watching(
        testbed_with(tmp_path, published, actions={"poisoning": "quarantine"}),
        lambda action, request: calls.append(action),
    )
    watch._act(0.0)
    watch._acting.join()
    assert calls == asked


def test_a_long_log_is_read_piece_by_piece_and_nothing_is_done_before_its_end(tmp_path, published, monkeypatch):
    monkeypatch.setattr("shoal.launch.alarm_actions.READ_EVENTS", 100)
    testbed = testbed_with(tmp_path, published, actions={"drift": "pause"})
    host, looks = Host(testbed), 0
    watch = watching(testbed, host)
    while not host.calls:
        assert looks < 30
        look(watch, 1)
        looks += 1
    assert looks == 1 + testbed.log_writer.state.seq // 100 > 2


def test_a_log_that_is_read_halfway_leads_to_nothing_and_is_told_once(tmp_path, published, monkeypatch, caplog):
    """The host has acted on the alarm: the log says so in its last event, which cannot be read at first."""
    testbed = testbed_with(tmp_path, published, actions={"drift": "pause"})
    host = Host(testbed)
    look(watching(testbed, host), 1)
    last, read = testbed.log_writer.state.seq, Store.read
    assert host.calls == ["pause"]

    def half(store, after=-1, *limits):
        for data, name in read(store, after, *limits):
            if read_entry(data)[0].seq == last:
                raise StateError("the log cannot be read: disk I/O error")
            yield data, name

    again = Host(testbed)
    watch = watching(testbed, again)
    monkeypatch.setattr(Store, "read", half)
    watch._of_steps(RunStatus("small", "", 30, metrics=FALLS))
    assert not caplog.text, "the coordinator starts, and says it itself if it cannot"
    look(watch)
    assert again.calls == [] and caplog.text.count("disk I/O error") == 1
    monkeypatch.setattr(Store, "read", read)
    look(watch)
    assert again.calls == [] and [alarm.cause for alarm in watch.standing] == ["drift"]


def test_the_rate_is_lowered_by_the_factor_and_never_below_the_floor(tmp_path, published):
    testbed = testbed_with(tmp_path, published, actions={"drift": "lower_rate"}, lr_factor=0.5, least_lr_factor=0.4)
    testbed.do(Admin("rate", AdminRequest(lr_factor=0.6), testbed.now))
    look(watching(testbed, Host(testbed)))
    assert actions(testbed) == [("", 0.4, "drift")]
    testbed.do(Admin("rate", AdminRequest(lr_factor=0.4), testbed.now, 1000 + 100))
    host = Host(testbed)
    look(watching(testbed, host))
    assert host.calls == []


def test_a_run_that_was_stopped_for_a_day_and_goes_on_is_not_starved(tmp_path, published):
    testbed = testbed_with(tmp_path, published)
    now = [FALLS[-1]["time_s"] + 86_400.0]
    watch = watching(testbed, Host(testbed), lambda: now[0])
    look(watch, 4)
    assert [alarm.cause for alarm in watch.standing] == ["drift"]
    now[0] += 86_400.0
    look(watch, 1, "paused")
    look(watch, 4)
    assert [alarm.cause for alarm in watch.standing] == ["drift"]
    now[0] += 86_400.0
    look(watch, 4)
    assert [alarm.cause for alarm in watch.standing] == ["drift", "starved"]


def test_after_a_hang_of_the_coordinator_nobody_else_is_blamed_for_it(tmp_path, published):
    testbed, now = testbed_with(tmp_path, published), [FALLS[-1]["time_s"]]
    watch = watching(testbed, Host(testbed), lambda: now[0])
    shot = RunStatus(
        "small", "", 30, Status("", "running", 19, 30, 0, {}, 0, 0, "the trainer: the next step", 0.0), metrics=FALLS
    )

    def starved(notice=""):
        for _ in range(4):
            watch._looked = -1e9
            watch.look(replace(shot, notice=notice))
        return [alarm.summary for alarm in watch.standing if alarm.cause == "starved"]

    assert starved() == []
    now[0] += 900.0
    assert "the coordinator has not answered" in starved("the coordinator has not answered for 900 s")[0]
    now[0] += 5.0
    assert starved() == []
    now[0] += 900.0
    assert "the trainer: the next step" in starved()[0], "that wait is its own"


def test_monitors_that_are_turned_off_look_at_nothing(tmp_path, published):
    testbed = testbed_with(tmp_path, published, enabled=False, actions={"drift": "pause"})
    watch = watching(testbed, Host(testbed))
    assert look(watch) == [] and watch.standing == () and not testbed.folder.alarms.exists()


def test_a_failed_call_is_told_and_tried_again_later(tmp_path, published):
    testbed, now = testbed_with(tmp_path, published, actions={"drift": "pause"}), [1000.0]
    host = Host(testbed, "before")
    watch = watching(testbed, host, lambda: now[0])
    assert any("failed: no answer" in line for line in look(watch)) and len(host.calls) == 1
    now[0] += 60.0
    look(watch)
    assert len(host.calls) == 2


def test_a_request_that_is_refused_for_good_is_sent_once_and_told_in_one_line(tmp_path, published):
    testbed, now, calls = testbed_with(tmp_path, published, actions={"drift": "lower_rate"}), [1000.0], []

    def refuse(action, request):
        calls.append(action)
        raise PeerRefused("the coordinator refused", 400, "malformed", "rate is unknown under the rules of this run")

    watch = watching(testbed, refuse, lambda: now[0])
    said = look(watch)
    for _ in range(3):
        now[0] += 60.0
        said += look(watch)
    assert calls == ["rate"] and [line for line in said if "failed" in line] == [
        "the alarm drift asks for `rate`, which failed: the coordinator refused (400 malformed): rate is unknown under "
        "the rules of this run. It is not tried again: do it yourself with `shoal admin`, or look into what it says"
    ]


def test_the_call_is_signed_and_reaches_the_coordinator(tmp_path):
    """Over the network of a testbed, as `admin.call` does over HTTP."""
    testbed = RunTestbed(tmp_path / "run", tiny_run())

    async def scenario():
        async with testbed.client(testbed.folder.keys / "run.key") as client:
            client.run = testbed.coordinator.state.run
            request = AdminRequest(evidence=drift().evidence)
            return await client.post_json("/v1/admin/pause", request, Status)

    assert asyncio.run(scenario()).pause_cause == "alarm: drift"


def test_the_view_shows_the_alarms_that_stand():
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(RunStatus("small", "out", 30, alarms=[drift()])))
    assert "alarm drift since step 12: it drifts" in console.export_text()


# --- the file ---


def test_a_half_line_is_skipped_and_the_next_line_is_whole(tmp_path):
    path = tmp_path / "alarms.jsonl"
    AlarmsLog(path).write("raised", drift(), 1.0)
    with path.open("ab") as file:
        file.write(b'{"time_s": 2.0, "chan')
    log = AlarmsLog(path)
    assert not log.write("raised", drift(), 3.0) and log.write("cleared", drift(), 4.0)
    assert [line.change for line in read_alarms(path)] == ["raised", "cleared"] and standing_alarms(path) == []
    assert msgspec.json.decode(path.read_bytes().splitlines()[-1], type=AlarmLine).alarm == drift()


def test_an_alarm_that_is_raised_again_at_the_same_step_is_written_again_and_once(tmp_path):
    path, disk = tmp_path / "alarms.jsonl", msgspec.structs.replace(drift(), cause="disk")
    for now in (1.0, 2.0):  # the second is a launcher that starts again while the alarm stands
        log = AlarmsLog(path)
        assert log.write("raised", disk, now, is_replayed=False) == (now == 1.0)
        assert log.raised_s(disk) == 1.0
    assert log.write("cleared", disk, 3.0, is_replayed=False) and not log.write("cleared", disk, 3.5, is_replayed=False)
    assert log.write("raised", disk, 4.0, is_replayed=False) and log.raised_s(disk) == 4.0
    assert [line.change for line in read_alarms(path)] == ["raised", "cleared", "raised"]
    assert standing_alarms(path) == [disk] and AlarmsLog(path).raised_s(disk) == 4.0
    log.write("raised", drift(), 5.0), log.write("cleared", drift(), 6.0)
    assert not log.write("raised", drift(), 7.0), "a launcher that starts again reads what was once"


def test_a_disk_that_is_full_again_at_the_same_step_pauses_the_run_again(tmp_path, published, monkeypatch):
    testbed, disk = (
        testbed_with(tmp_path, published, actions={"disk": "pause"}),
        msgspec.structs.replace(drift(19), cause="disk"),
    )
    host = Host(testbed)
    watch = watching(testbed, host)
    look(watch)
    monkeypatch.setattr(AlarmWatch, "standing", (disk,))

    def raised(now):
        watch._log.write("raised", disk, now, is_replayed=False)
        for _ in range(2):
            watch._act(now)
            watch._acting.join()
            watch._of_steps(RunStatus("small", "", 30, metrics=FALLS))

    raised(testbed.now)
    assert host.calls == ["pause"]
    testbed.do(Admin("resume", AdminRequest(), testbed.now, 1000 + 100))
    raised(testbed.now)
    assert host.calls == ["pause"], "it has stood since then"
    watch._log.write("cleared", disk, testbed.now + 1.0, is_replayed=False)
    testbed.now += 2.0
    host.created += 200
    raised(testbed.now)
    assert host.calls == ["pause", "pause"]
    raised(testbed.now)
    assert host.calls == ["pause", "pause"]


def test_a_quota_that_the_next_pruning_makes_room_below_raises_no_alarm(tmp_path, published):
    testbed = testbed_with(tmp_path, published)
    watch, snapshot = watching(testbed, Host(testbed)), RunStatus("small", "", 30)
    kept = testbed.folder.blobs / "ab" / "cd"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("wb") as file:
        file.truncate(2_000_000 * watch._config.storage.quota_mb)
    shares = []
    for now in (100.0, 200.0, 300.0):
        shares.append(watch._machine(snapshot, now).quota_share)
        if now == 200.0:
            kept.unlink()
    assert shares[0] == 0.0 and shares[1] >= 2.0 and shares[2] < 1.0


def test_what_ended_flat_rollouts_is_looked_up_at_twice_as_many_groups_and_forgotten_with_them(
    tmp_path, published, monkeypatch
):
    looks = iter(["first", "second", "third"])
    monkeypatch.setattr("shoal.launch.alarm_actions.why_flat", lambda folder: next(looks))
    watch = watching(testbed := testbed_with(tmp_path, published), Host(testbed))
    running = Status("small", "running", 3, 30, 0, {}, 0, 0, "", 0.0)
    told = []
    for groups in (8, 15, 16, 0, 8):
        status = msgspec.structs.replace(running, flat_groups=groups, no_signal="flat" if groups else "")
        told.append(watch._machine(RunStatus("small", "", 30, status=status), 100.0).why_flat)
    assert told == ["first", "first", "second", "", "third"]


def test_a_wait_is_blamed_on_what_took_longest_since_the_last_step(tmp_path, published):
    watch = watching(testbed := testbed_with(tmp_path, published), Host(testbed))
    running = Status("small", "running", 3, 30, 0, {}, 0, 0, "", 0.0)
    silent = "validators: v (ab) silent for 40 s; 2 submissions to judge"
    stopped = f"validators: v: its process 7 {IS_STOPPED}"
    full = "workers: 1 of 4 groups; no lease is granted: the host's disk quota is used up: 9 MB are needed now"

    def after(*waits):
        watch._waits = _WaitTimes()
        for now, said in enumerate(waits):
            remedy = SILENT_REMEDY if said == silent else CONTINUE_REMEDY if said == stopped else ""
            status = msgspec.structs.replace(running, waiting_for=said, remedy=remedy)
            watch._waits.see(RunStatus("small", "", 30, status=status), float(10 * now))
        return watch._machine(RunStatus("small", "", 30, status=status), 100.0)

    machine = after(
        "workers: 1 of 4", silent, silent, "validators: 2 submissions to judge", "the trainer: the next step"
    )
    assert (machine.longest, machine.longest_remedy, machine.longest_s) == (silent, SILENT_REMEDY, 30.0)
    assert after("workers: 1 of 4", full, full, "workers: 2 of 4").longest == full
    assert after("workers: 1 of 4").longest == ""
    goes_on = "validators: 1 to judge"
    assert after(stopped, stopped, "workers: 1 of 4").longest == stopped
    assert after(stopped, stopped, goes_on).longest == goes_on, "it is stopped no longer"


def test_an_alarm_that_the_file_says_stands_and_nobody_finds_is_cleared_after_some_looks(tmp_path, published):
    testbed = testbed_with(tmp_path, published)
    AlarmsLog(testbed.folder.alarms).write("raised", msgspec.structs.replace(drift(3), cause="disk"), 1.0)
    look(watching(testbed, Host(testbed)), 8)
    assert [alarm.cause for alarm in standing_alarms(testbed.folder.alarms)] == ["drift"]


# --- the run file ---


@pytest.mark.parametrize(
    ("monitors", "said"),
    [
        ({"actions": {"drfit": "pause"}}, "there is no such alarm"),
        ({"actions": {"stragglers": "quarantine"}}, "only poisoning is evidence against a worker"),
        ({"limits": {"drift.natz": 1.0}}, "there is no such limit"),
        ({"limits": {"drift.nats": -1.0}}, "must be at least 0"),
        ({"lr_factor": 1.0}, "must be above 0 and below 1"),
        ({"least_lr_factor": 0.001}, "must be from 0.01 to 1"),
    ],
)
def test_a_run_file_whose_monitors_make_no_sense_is_refused(monitors, said):
    from shoal.config import check_run

    with pytest.raises(ConfigError, match=said):
        check_run(tiny_run(monitors=monitors))

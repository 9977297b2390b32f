"""Evaluates the monitors of a run, keeps its alarms, and does what the run file says: it has the folder and the run's key.

The monitors themselves are in `shoal/monitors`. It remembers nothing that matters: after a kill it reads metrics and log
again and comes to the same alarms, and the log says on which of them the host has acted.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread

from shoal.alarms import Alarm, AlarmsLog, standing_alarms
from shoal.config import RunConfig
from shoal.errors import ShoalError
from shoal.evaluation_files import Evaluation, interval_of, version_of, why_not_comparable
from shoal.launch.admin import call
from shoal.ledger.batches import SlotVoid
from shoal.ledger.remedies import IS_STOPPED, NO_LEASE
from shoal.monitors.alarms import BETWEEN, AlarmChange, MonitorConfig, RunMonitors
from shoal.monitors.monitor_inputs import HeldoutResult, Machine
from shoal.net.client import PeerRefused
from shoal.net.server_address import local_url
from shoal.protocol.messages import AdminRequest, Status
from shoal.run_folder import RunFolder, free_below, held_below
from shoal.runs.log_follower import LogFollower
from shoal.runs.rollout_samples import why_flat
from shoal.runs.run_status import NO_STATUS, STARTING, RunStatus, own_keys

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
DISK_EVERY_S = 30.0
DISK_LOOKS = 120
"""Looks at the disk that are kept: an hour."""
AGAIN_AFTER_S = 15.0
"""A request that failed is sent again after this."""
SWEEP_LOOKS = 1 + max(monitor.clear for monitor in BETWEEN.values())
"""After this many looks, alarms are cleared that the file says stand and no monitor finds again."""
ACTIONS = {"pause": "pause", "lower_rate": "rate", "quarantine": "quarantine"}
"""The admin call of each action of a run file."""

REFUSED_FOR_GOOD = 400
"""HTTP status of a request that the coordinator's rules refuse, such as a new sort of request under an older law."""

READ_EVENTS = 5000
"""Of the log, at a look: a launcher that starts again on a long log must not stop to tend its processes."""

Send = Callable[[str, AdminRequest], None]


def setting_of(config: RunConfig) -> MonitorConfig:
    """What the monitors need of a run file."""
    moving = config.difficulty.curriculum or config.difficulty.pools
    return MonitorConfig(config.monitors.limits, config.sampled_dtype, moving, config.rollouts.max_flat_groups)


class AlarmWatch:
    """The monitors of the run in a folder."""

    def __init__(
        self, folder: RunFolder, config: RunConfig, clock: Callable[[], float] = time.time, send: Send | None = None
    ) -> None:
        """`send(action, request)` signs and sends an admin call; it raises `ShoalError`."""
        self._folder, self._config, self._clock = folder, config, clock
        self._follower = RunMonitors(setting_of(config))
        self._log = AlarmsLog(folder.alarms)
        self._cheats = frozenset[str]()
        self._events = LogFollower(folder.log)
        self._send = send or self._by_http
        self._disk: deque[tuple[float, float]] = deque(maxlen=DISK_LOOKS)
        self._quota_shares = deque([0.0], maxlen=2)
        """The newest two: after one look, the coordinator may still delete what it need not keep."""
        self._looked = self._measured = -1e9
        self._looks = 0
        self.unbegun = 0, ""
        """Groups so far whose tasks can never begin, and why the last of them cannot."""
        self._behind = False
        """Whether the log has more events than were read: alarms of the past are no reason to act, and whether the host
        has acted on an alarm may be in the rest."""
        self._unreadable = ""
        """Why the log could not be read on at the last look."""
        self._resumed = self._held_up = clock()
        """When the run was last seen paused, or this launcher started: the trainer waits since then."""
        self._acting = _Acting(self._send)
        self._waits = _WaitTimes()
        self._why_flat = 1, ""
        """What ended the rollouts of the groups without signal, and the number of those groups when it was looked up."""
        self._past: list[Alarm] | None = []
        """Alarms that were raised while the log of before this start was read; None once it is."""
        self._stood = {alarm.subject for alarm in standing_alarms(folder.alarms)}
        """What the alarms that stood before this start were about."""

    @property
    def standing(self) -> Sequence[Alarm]:
        """Alarms that stand now."""
        return tuple(self._follower.watch.standing) if self._config.monitors.enabled else ()

    def look(self, snapshot: RunStatus) -> list[str]:
        """Evaluate what is new, keep what changed, and act on it. Returns lines for a person."""
        now = self._clock()
        self._waits.see(snapshot, now)
        waits = 0 <= now - self._looked < LOOK_EVERY_S and not self._behind
        if not self._config.monitors.enabled or waits:
            return []
        self._looked, self._looks = now, self._looks + (not self._behind)
        of_steps = [one for one in self._of_steps(snapshot) if self._log.write(one.change, one.alarm, now)]
        between = self._follower.look_between(self._machine(snapshot, now), snapshot.metrics)
        new = [one for one in between if self._log.write(one.change, one.alarm, now, is_replayed=False)]
        said = [in_words(change) for change in self._without_past(of_steps) + new]
        if self._behind:  # guard: past-alarms-lead-to-nothing
            return said
        if self._looks == SWEEP_LOOKS:
            self._sweep(now)
        return said + self._act(now)

    def _without_past(self, changes: list[AlarmChange]) -> list[AlarmChange]:
        """Those that are news. Of what was found while the log of before was read that are alarms which stand now, and did
        not when the launcher was started: the others are over, or were said before."""
        if self._past is None:
            return changes
        self._past += [one.alarm for one in changes if one.change == "raised"]
        if self._behind:
            return []
        past, self._past = {alarm.subject: alarm for alarm in self._past}, None
        stand = {alarm.subject for alarm in self.standing}
        # guard: past-alarms-are-no-news
        return [AlarmChange("raised", one) for subject, one in past.items() if subject in stand - self._stood]

    def _of_steps(self, snapshot: RunStatus) -> list[AlarmChange]:
        """Read the log on, and look at the steps that ended. What cannot be read now is read at the next look."""
        if self._events.seq < 0 and not self._folder.log.exists():
            return []
        self._follower.announced = self.announced()
        entries = []
        try:
            for entry in self._events.events(READ_EVENTS):
                entries.append(entry)
                if isinstance(entry.body, SlotVoid) and (why := entry.body.unbegun()):
                    self.unbegun = self.unbegun[0] + len(entry.body.slots), why
        except ShoalError as error:
            self._behind = True  # guard: unread-events-lead-to-nothing
            if snapshot.status.phase != STARTING:  # a coordinator that cannot read it says so itself
                if str(error) != self._unreadable:
                    log.warning(
                        "alarms wait, and lead to nothing until the log can be read after event %d: %s",
                        self._events.seq,
                        error,
                    )
                self._unreadable = str(error)
        else:
            self._behind, self._unreadable = len(entries) == READ_EVENTS, ""
        return self._follower.see(entries, snapshot.metrics, evaluations(snapshot))

    def announced(self) -> frozenset[str]:
        """Keys of the workers that the run file starts to cheat."""
        if len(self._cheats) < (count := self._config.workers.cheating):
            self._cheats = frozenset(own_keys(self._folder, (f"cheater-{i}" for i in range(count))).values())
        return self._cheats

    def _machine(self, snapshot: RunStatus, now: float) -> Machine:
        if now - self._measured >= DISK_EVERY_S:
            self._measured = now
            self._disk.append((now, float(free_below(self._folder.root))))
            quota_bytes = self._config.storage.quota_mb * 1_000_000
            self._quota_shares.append(
                held_below(self._folder.blobs) / quota_bytes if self._folder.blobs.exists() else 0.0
            )
        status, lines = snapshot.status, snapshot.metrics
        if status.phase != "running":
            self._resumed = now
        began = max(self._resumed, float(lines[-1].get("time_s") or 0.0)) if lines else 0.0  # guard: stop-is-no-wait
        if snapshot.notice:
            self._held_up = now
        else:  # the host's machine was to blame until then, and nobody whom the run waits for since
            began = max(began, self._held_up) if lines else 0.0  # guard: hang-blames-nobody-else
        longest, longest_s = self._waits.longest()
        if not status.no_signal:
            self._why_flat = 1, ""
        elif status.flat_groups >= 2 * self._why_flat[0]:
            self._why_flat = status.flat_groups, why_flat(self._folder)
        return Machine(
            now=now, longest=longest.waiting_for, longest_remedy=longest.remedy, longest_s=longest_s,
            disk=tuple(self._disk), quota_share=min(self._quota_shares), log_time=self._follower.digest.time,
            step_began=began, flat_groups=status.flat_groups,
            flat_reward=status.flat_reward, unbegun_groups=status.unbegun_groups, unbegun_cause=status.unbegun_cause,
            why_flat=self._why_flat[1], waiting_for=status.waiting_for, remedy=status.remedy, notice=snapshot.notice,
            in_flight=status.in_flight, running=status.phase == "running",
        )  # fmt: skip

    def _sweep(self, now: float) -> None:
        found = {alarm.subject for alarm in self.standing}
        for alarm in standing_alarms(self._folder.alarms):
            if alarm.subject not in found:
                self._log.write("cleared", alarm, now, is_replayed=False)

    def _act(self, now: float) -> list[str]:
        """Begin the next action that is due, and tell what became of the one before."""
        if self._follower.digest.ended:
            return []
        for alarm in self.standing:
            action = self._config.monitors.actions.get(alarm.cause, "")
            # A disk that was emptied and is full again at the same step is another alarm. What is found at the ends of
            # steps is found again after a restart, where only the step tells whether it is the same.
            raised_s = self._log.raised_s(alarm) if alarm.cause in BETWEEN else -math.inf
            due = action and not self._follower.digest.has_acted(alarm, raised_s)  # guard: acts-once
            # Where cheats make most groups, it is the rewards of honest workers that lean: only refusals are evidence.
            blamed = action != "quarantine" or alarm.severity == "critical"  # guard: quarantine-is-for-refusals
            if due and blamed and (request := self._request(action, alarm)):
                self._acting.begin(ACTIONS[action], alarm, request, now, raised_s)
        return self._acting.told()

    def _request(self, action: str, alarm: Alarm) -> AdminRequest | None:
        """What is asked of the coordinator; None if it would change nothing."""
        if action != "lower_rate":
            return AdminRequest(alarm.node if action == "quarantine" else "", evidence=alarm.evidence)
        known, asked = self._follower.digest.lr_factor, self._config.monitors
        factor = max(asked.least_lr_factor, known * asked.lr_factor)  # guard: rate-has-a-floor
        return AdminRequest("", factor, alarm.evidence) if factor < known else None

    def _by_http(self, action: str, request: AdminRequest) -> None:
        url = local_url(self._folder.address, self._config.host.bind)
        if not url:
            raise ShoalError("the coordinator does not answer yet")
        asyncio.run(call(url, self._folder.keys / "run.key", action, request))


class _WaitTimes:
    """What the run has waited for since its newest step, and how long, by looks at its status."""

    def __init__(self) -> None:
        self._step, self._seen = -1, 0.0
        self._now = ""
        """The kind of the wait at the last look."""
        self._took_s, self._said = dict[str, float](), dict[str, Status]()

    def see(self, snapshot: RunStatus, now: float) -> None:
        """Count the time since the last look for what was waited for then."""
        if snapshot.step != self._step or snapshot.notice or snapshot.status.phase != "running":
            self._step, self._now, self._took_s, self._said = snapshot.step, "", {}, {}
            if snapshot.notice or snapshot.status.phase != "running":
                return
        if self._now:
            self._took_s[self._now] = self._took_s.get(self._now, 0.0) + max(0.0, now - self._seen)
        status = snapshot.status
        self._now, self._seen = f"{status.waiting_for.partition(':')[0]} {NO_LEASE in status.waiting_for}", now
        before = self._said.get(self._now, NO_STATUS)
        if status.remedy or not before.remedy or IS_STOPPED in before.waiting_for:  # it names who, as it is now
            self._said[self._now] = status

    def longest(self) -> tuple[Status, float]:
        """The status that says what it waited for longest, and how long."""
        if not self._took_s:
            return NO_STATUS, 0.0
        kind = max(self._took_s, key=self._took_s.__getitem__)
        return self._said[kind], self._took_s[kind]


class _Acting:
    """Sends one admin call at a time, beside the launcher's loop, which keeps processes alive meanwhile."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._thread: Thread | None = None
        self._told: SimpleQueue[str] = SimpleQueue()
        self._done: set[tuple[str, str, int, float]] = set()
        """Answered; the log has those that changed something, and is read at the next look."""
        self._again_at = -1e9

    def begin(self, action: str, alarm: Alarm, request: AdminRequest, now: float, raised_s: float = -math.inf) -> None:
        """Send a call, unless one is under way, or this one was answered, or one has just failed."""
        asked = alarm.cause, alarm.node, alarm.since, raised_s
        if (self._thread is not None and self._thread.is_alive()) or asked in self._done or now < self._again_at:
            return
        self._again_at = now + AGAIN_AFTER_S

        def send() -> None:
            try:
                self._send(action, request)
            except ShoalError as error:
                after = "It is tried again"
                if isinstance(error, PeerRefused) and error.status == REFUSED_FOR_GOOD:  # guard: refused-once
                    self._done.add(asked)
                    after = "It is not tried again: do it yourself with `shoal admin`, or look into what it says"
                self._told.put(f"the alarm {alarm.cause} asks for `{action}`, which failed: {error}. {after}")
            else:
                self._done.add(asked)
                self._again_at = -1e9
                self._told.put(
                    f"the alarm {alarm.cause} led to `{action}`, as [monitors.actions] says; the log has why"
                )

        self._thread = Thread(target=send, name=f"alarm {alarm.cause}", daemon=True)
        self._thread.start()

    def told(self) -> list[str]:
        """What became of the calls since this was last asked."""
        lines = []
        while True:
            try:
                lines.append(self._told.get_nowait())
            except Empty:
                return lines

    def join(self) -> None:
        """Wait for the call that is under way."""
        if self._thread is not None:
            self._thread.join()


def evaluations(snapshot: RunStatus) -> list[HeldoutResult]:
    """The snapshot's results on held-out tasks, by version."""
    found = (evaluation(version_of(name, snapshot.steps) or 0, one) for name, one in snapshot.heldout)
    return [one for one in found if one is not None]


def evaluation(version: int, found: Evaluation) -> HeldoutResult | None:
    """A result on held-out tasks as the monitors take it, with what the judge says; None of one without a mean, or with too
    many faults to be compared."""
    own = None if why_not_comparable(found) else interval_of(found)
    judged = None if found.judge is None or why_not_comparable(found.judge) else interval_of(found.judge)
    return own and HeldoutResult(version, *own, judged and HeldoutResult(version, *judged))


def in_words(change: AlarmChange) -> str:
    """A change as one line."""
    alarm = change.alarm
    if change.change == "cleared":
        return f"alarm cleared: {alarm.cause}, raised at step {alarm.since} ({alarm.summary})"
    return alarm.in_words

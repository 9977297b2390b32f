"""Each monitor is raised by its fault, by its own name, and stays silent over honest noise."""

import random
import re

import msgspec
import pytest

from shoal.ledger.remedies import SILENT_REMEDY
from shoal.monitors import learning
from shoal.monitors.alarms import BETWEEN, MONITORS, AlarmState, MonitorConfig, RunMonitors
from shoal.monitors.monitor_inputs import HeldoutResult, Machine, MonitorInputs
from shoal.monitors.step_statistics import StepDigest
from tests.monitors.series import WORKERS, honest_digests, honest_lines, views

FROM = 40
"""Step at which a fault begins."""


def raised(views_so_far):
    """(cause, node) of each alarm that a whole run raises, with its step."""
    watch, found = AlarmState(), {}
    for view in views_so_far:
        for change, alarm in watch.see(view):
            if change == "raised":
                found.setdefault(alarm.subject, alarm)
    return found


def causes(lines, digests=(), **facts):
    return {cause for cause, _ in raised(views(lines, digests, **facts))}


def faulty(change, seed=1):
    lines = honest_lines(seed)
    return [line | change(line, step - FROM) if step >= FROM else line for step, line in enumerate(lines)]


@pytest.mark.parametrize("seed", range(100, 102))
def test_honest_noise_raises_nothing(seed):
    assert raised(views(honest_lines(seed), honest_digests(seed), max_flat_groups=500)) == {}


FAULTS = {
    "drift": lambda line, age: {"log_ratio_abs_mean_nats": 0.7},
    "collapse": lambda line, age: {"reward_all_mean": 0.05, "solve_rate": 0.01},
    "entropy": lambda line, age: {"entropy_nats": 0.01, "solve_rate": 0.4, "reward_all_mean": 0.6},
    "hacking": lambda line, age: {"repetition_share": 0.6},
    "no_signal": lambda line, age: {"zero_signal_share": 0.95},
    "starved": lambda line, age: {"step_s": 90.0, "waiting_share": 0.97},
    "publishing": lambda line, age: {"publish_s": 30.0, "publish_wait_s": 2.0, "step_s": 4.0},
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_in_the_metrics_raises_its_alarm_and_no_other(cause):
    found = raised(views(faulty(FAULTS[cause]), honest_digests(1)))
    assert {name for name, _ in found} == {cause}
    alarm = found[cause, ""]
    assert FROM < alarm.since < FROM + 12 and alarm.measured and alarm.summary and alarm.remedy
    assert all(one.value != one.limit for one in alarm.measured)


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("collapse", lambda line, age: {"grad_norm": 500.0}),
        ("collapse", lambda line, age: {"grad_norm": None, "update_skipped": 1}),
        ("collapse", lambda line, age: {"solve_rate": 0.0, "reward_all_mean": 0.5}),
        ("drift", lambda line, age: {"log_ratio_abs_mean_nats": 0.4}),
    ],
)
def test_other_signs_of_the_same_fault(cause, change):
    assert causes(faulty(change)) >= {cause}


def test_a_single_odd_step_is_no_alarm():
    odd = {"log_ratio_abs_mean_nats": 3.0, "grad_norm": 900.0, "reward_all_mean": 0.0, "zero_signal_share": 1.0,
           "step_s": 500.0, "waiting_share": 0.99}  # fmt: skip
    assert causes([line | (odd if line["step"] == FROM else {}) for line in honest_lines(3)]) == set()


def test_an_alarm_is_raised_once_and_cleared_once_after_the_fault_has_passed():
    lines = [
        line | ({"log_ratio_abs_mean_nats": 0.7} if FROM <= line["step"] < FROM + 6 else {})
        for line in honest_lines(4, 70)
    ]
    watch = AlarmState()
    changes = [change for view in views(lines) for change in watch.see(view)]
    assert [(one.change, one.alarm.cause) for one in changes] == [("raised", "drift"), ("cleared", "drift")]
    assert watch.standing == []


def test_a_self_check_that_differs_is_drift_but_not_in_int8():
    lines = [line | ({"selfcheck_gap_nats": 0.5} if not line["step"] else {}) for line in honest_lines(5, 20)]
    assert causes(lines) == {"drift"} and causes(lines, dtype="int8") == set()


def test_a_curriculum_that_makes_tasks_harder_is_no_collapse():
    lines = faulty(lambda line, age: {"reward_all_mean": 0.1, "solve_rate": 0.15})
    assert causes(lines) >= {"collapse"} and causes(lines, moving_tasks=True) == set()


def test_reward_that_follows_length_is_hacking_and_longer_answers_alone_are_not():
    longer = {"policy_tokens": 2000}
    assert causes(faulty(lambda line, age: longer)) == set()
    assert causes(faulty(lambda line, age: longer | {"reward_length_correlation": 0.9})) == {"hacking"}


def test_held_out_tasks_that_fall_while_reward_rises_are_hacking():
    lines = honest_lines(6)
    fell = [HeldoutResult(0, 0.5, 0.45, 0.55), HeldoutResult(40, 0.3, 0.25, 0.35)]
    rose = [HeldoutResult(0, 0.3, 0.25, 0.35), HeldoutResult(40, 0.5, 0.45, 0.55)]
    assert causes(lines, heldout=fell) == {"hacking"} and causes(lines, heldout=rose) == set()


def judged(*means):
    """Evaluations at steps 0, 30, ... that the environment likes more and more, with a judge's means."""
    return [
        HeldoutResult(
            30 * i, 0.3 + 0.3 * i, 0.25 + 0.3 * i, 0.35 + 0.3 * i, HeldoutResult(30 * i, mean, mean - 0.05, mean + 0.05)
        )
        for i, mean in enumerate(means)
    ]


def test_a_judge_that_likes_answers_less_while_reward_rises_is_hacking():
    lines = honest_lines(6)
    assert followed(lines, judged(0.5, 0.3)) == {"hacking"}
    assert followed(lines, judged(0.3, 0.5)) == set(), "the judge agrees"
    assert followed(lines, judged(0.5, 0.42)) == set(), "by less than its intervals"
    assert followed(honest_lines(6, 100), judged(0.5, 0.3, 0.5)) == set(), "it likes them again"
    flat = [line | {"reward_all_mean": 0.5 + 0.01 * (line["step"] % 3), "solve_rate": 0.5} for line in lines]
    assert followed(flat, judged(0.5, 0.3)) == set(), "reward does not rise"


def test_fewer_solved_tasks_while_reward_rises_are_hacking():
    lines = faulty(lambda line, age: {"solve_rate": 0.3, "reward_all_mean": 0.95})
    assert causes(lines) == {"hacking"}


# --- the log ---


def with_fault(change, seed=1, steps=60):
    digests = honest_digests(seed, steps)
    for digest in digests[FROM:]:
        change(digest)
    return raised(views(honest_lines(seed, steps), digests))


def test_a_worker_that_is_refused_much_is_named_though_it_moves_nothing():
    digests = honest_digests(1)
    for digest in digests:
        digest.of(WORKERS[1]).influence = 0.0
        digest.of(WORKERS[1]).refused = 2 * (digest.step >= FROM)
    found = raised(views(honest_lines(1), digests))
    assert found.keys() == {("poisoning", WORKERS[1])}
    alarm = found["poisoning", WORKERS[1]]
    assert alarm.severity == "critical" and "worker-1" in alarm.summary
    assert [one.name for one in alarm.measured] == ["refused share"]


def test_a_cheater_that_the_run_file_announces_raises_no_alarm():
    digests = honest_digests(1)
    for digest in digests:
        for worker in WORKERS[1:3]:
            digest.of(worker).influence, digest.of(worker).refused = 0.0, 2
    found = raised(views(honest_lines(1), digests, announced=frozenset({WORKERS[1]})))
    assert found.keys() == {("poisoning", WORKERS[2])}


def influential(refused_every, influence=2000.0, blocks=4):
    """A worker with much influence, of whose blocks one is refused every so many steps; 0: none."""

    def change(digest):
        node = digest.of(WORKERS[1])
        node.accepted, node.influence = blocks, influence
        node.refused = int(refused_every > 0 and digest.step % refused_every == 0)

    return change


def test_few_refusals_of_a_worker_with_much_influence_are_poisoning():
    found = with_fault(influential(2), steps=90)
    assert found.keys() == {("poisoning", WORKERS[1])}
    alarm = found["poisoning", WORKERS[1]]
    assert alarm.severity == "warning" and [one.name for one in alarm.measured] == ["influence x refused share"]
    digests = honest_digests(1, 90)
    for digest in digests:
        influential(2 * (digest.step >= FROM), influence=5.0)(digest)
    assert raised(views(honest_lines(1, 90), digests)) == {}, "it moves little"


def test_an_honest_fast_worker_with_nearly_all_the_influence_passes():
    assert with_fault(influential(0, 1e6), steps=90) == {}, "never refused"
    assert with_fault(influential(40, 1e6), steps=90) == {}, "one refusal in 160 blocks"


def test_a_liar_with_a_long_honest_past_is_named_by_its_newest_steps():
    """Only the newest 40 steps count, so 100 honest ones before buy no more than 40 do."""

    def liar(digest):
        if digest.step >= 140:
            influential(2)(digest)

    def refused(digest):
        if digest.step >= 140:
            digest.of(WORKERS[1]).refused = 2

    for fault, least, most in ((liar, 145, 175), (refused, 142, 165)):
        found = with_fault(fault, steps=200)
        assert found.keys() == {("poisoning", WORKERS[1])}
        assert least <= found["poisoning", WORKERS[1]].since <= most


def test_a_liar_with_a_long_honest_past_raises_drift_at_once_and_is_named_later():
    """It earned few audits, then claims log-probs that are 3 nats too low in a third of the rows. Drift names nobody, so
    `lower_rate` acts before the liar is known: it is the floor of the rate that bounds what a liar can do."""
    lines, digests = honest_lines(1, 200), honest_digests(1, 200)
    for line, digest in zip(lines[140:], digests[140:], strict=True):
        line["log_ratio_abs_mean_nats"] += 1.0
        digest.of(WORKERS[1]).refused = int(digest.step % 5 == 0)  # 1 group in 20 is audited, and refused
    found = raised(views(lines, digests))
    assert found.keys() == {("drift", ""), ("poisoning", WORKERS[1])}
    assert found["drift", ""].since == 142 and found["poisoning", WORKERS[1]].since > 142


@pytest.mark.parametrize("shift", [0.25, -0.25])
def test_a_worker_whose_rewards_lean_is_named(shift):
    def lean(digest):
        node = digest.of(WORKERS[2])
        node.rewards = [reward + shift for reward in node.rewards]

    assert with_fault(lean).keys() == {("poisoning", WORKERS[2])}


def test_a_worker_that_lets_leases_lapse_is_named_and_so_is_one_that_is_far_slower():
    def lapse(digest):
        digest.of(WORKERS[0]).lapsed = 2

    def crawl(digest):
        digest.of(WORKERS[0]).seconds = [12.0, 13.0]

    def too_late(digest):
        digest.of(WORKERS[0]).late = 2

    for fault in (lapse, crawl, too_late):
        assert with_fault(fault).keys() == {("stragglers", WORKERS[0])}


def test_a_worker_whose_environment_is_stopped_is_not_to_be_kicked():
    def stop(digest):
        digest.of(WORKERS[0]).lapsed = digest.of(WORKERS[0]).stopped = 2

    (found,) = with_fault(stop).values()
    assert found.cause == "stragglers" and "kick" not in str(found) and "shoal env check" in str(found)


def test_a_slow_worker_of_quick_steps_is_named_if_batches_waited_for_it():
    def slow(seconds, held_s):
        def change(digest):
            digest.of(WORKERS[1]).seconds = [seconds, seconds]
            digest.of(WORKERS[1]).held_s = held_s
            digest.of(WORKERS[0]).seconds = digest.of(WORKERS[2]).seconds = [0.05, 0.06]

        return change

    assert with_fault(slow(0.3, 1.5)).keys() == {("stragglers", WORKERS[1])}
    assert with_fault(slow(0.3, 0.1)) == {}, "nobody waited for it"
    assert with_fault(slow(0.06, 1.5)) == {}, "somebody is last in each batch"


def test_a_run_in_which_all_are_late_alike_has_no_straggler():
    def all_late(digest):
        for key in WORKERS:
            digest.of(key).late = 2

    assert with_fault(all_late) == {}


def test_the_validator_that_differs_from_the_others_is_named_and_not_the_ones_that_it_differs_from():
    liar, honest = "x" * 64, ("v" * 64, "w" * 64)

    def differ(digest):
        digest.of(liar).compared, digest.of(liar).differed = 2, 2
        for key in honest:
            digest.of(key).compared, digest.of(key).differed = 2, 1

    assert with_fault(differ).keys() == {("validators", liar)}


def test_a_validator_at_fault_is_named_at_once():
    def fault(digest):
        digest.of("v" * 64).faults = int(digest.step == FROM)

    assert with_fault(fault)["validators", "v" * 64].since == FROM


def test_a_clock_that_is_off_is_named_and_the_hosts_if_all_are_off_alike():
    def one(digest):
        digest.of(WORKERS[1]).skews_s = [31.0, 30.0]

    def all_of_them(digest):
        for key in WORKERS:
            digest.of(key).skews_s = [31.0, 30.0]

    assert with_fault(one).keys() == {("clock", WORKERS[1])}
    found = with_fault(all_of_them)
    assert found.keys() == {("clock", "")} and "host's clock is about 30 s behind" in found["clock", ""].summary


def test_two_keys_of_one_stranger_do_not_speak_for_the_clocks_of_all():
    def ahead(digest):
        for key in WORKERS[:2]:
            digest.of(key).skews_s = [31.0, 31.0]
        digest.of(WORKERS[2]).skews_s = [0.1] if digest.step % 5 == 0 else []  # slow: it sends once in five steps

    assert with_fault(ahead).keys() == {("clock", WORKERS[0]), ("clock", WORKERS[1])}


def test_forgers_are_quick_and_make_no_honest_worker_slow():
    def forge(digest):
        for key in WORKERS[:2]:
            digest.of(key).seconds = [0.01, 0.01]
            digest.of(key).accepted, digest.of(key).refused = 0, 2
        digest.of("d" * 64).seconds, digest.of("d" * 64).accepted = [1.0, 1.1], 2

    causes = {cause for cause, _ in with_fault(forge)}
    assert causes == {"poisoning"}


def test_a_name_that_looks_like_the_key_of_another_does_not_pass_for_it():
    name = f"worker-1 ({'b' * 12}) {'x' * 200}"
    told = MonitorInputs(names={"a" * 64: ("worker", name)}).name_of("a" * 64)
    assert told.startswith("worker-1 ?bbbbbbbbbbbb?") and told.endswith(f" ({'a' * 12})") and len(told) <= 60


def test_thousand_honest_workers_are_not_accused():
    rng, digests = random.Random(7), []
    for step in range(12):
        digest = StepDigest(step)
        for number in range(1000):
            node = digest.of(f"{number:064d}")
            node.accepted, node.leases, node.lapsed = 1, 1, int(rng.random() < 0.02)
            node.refused = int(rng.random() < 0.002)
            node.rewards = [float(rng.random() < 0.5) for _ in range(4)]
            node.seconds = [rng.uniform(1.0, 3.0)]
        digests.append(digest)
    assert raised(list(views(honest_lines(7, 12), digests))[-4:]) == {}


# --- between steps ---


def between(machines, lines=()):
    watch = AlarmState()
    for machine in machines:
        watch.see(MonitorInputs(lines=lines, machine=machine, max_flat_groups=100))
    return {alarm.cause: alarm for alarm in watch.standing}


def test_a_disk_that_fills_is_told_hours_before_and_one_that_is_steady_is_not():
    filling = [(60.0 * i, 20e9 - 2e6 * 60 * i) for i in range(30)]
    steady = [(60.0 * i, 20e9 + random.Random(i).uniform(-3e9, 3e9)) for i in range(30)]
    found = between([Machine(now=1800.0, disk=filling)] * 2)
    assert found.keys() == {"disk"} and "full in 2." in found["disk"].summary
    alarm = msgspec.structs.replace(found["disk"], since=4000)
    assert len(f"{alarm.heading}{alarm.summary}. {alarm.remedy}") <= 2 * 80, "two lines of a terminal"
    assert between([Machine(now=1800.0, disk=steady)] * 2) == {}
    assert between([Machine(now=1.0, disk=[(1.0, 1e8)])] * 2)["disk"].severity == "critical"
    assert "quota" in between([Machine(now=1.0, quota_share=0.99)] * 2)["disk"].summary


def test_what_another_program_writes_for_minutes_is_no_filling_disk():
    """The run has begun ten minutes ago: the looks that make a rate are all of that time."""
    written = [(30.0 * i, 20e9 - 1e6 * 30 * i) for i in range(60)]
    assert between([Machine(now=30.0 * n, disk=written[: n + 1]) for n in range(25)]) == {}
    assert between([Machine(now=30.0 * n, disk=written[: n + 1]) for n in range(60)]).keys() == {"disk"}


def test_a_checkpoint_of_many_gigabytes_is_no_filling_disk():
    saved = [(60.0 * i, 100e9 - (40e9 if i > 14 else 0.0)) for i in range(30)]
    assert between([Machine(now=1800.0, disk=saved)] * 3) == {}


def test_a_host_clock_that_was_set_back_is_told():
    assert between([Machine(now=1000.0, log_time=1060.0)] * 2).keys() == {"clock"}
    assert between([Machine(now=1000.0, log_time=1001.0)] * 2) == {}


def test_a_run_without_steps_is_told_though_no_step_ends():
    lines = honest_lines(8, 20)
    late = Machine(now=lines[-1]["time_s"] + 300.0, step_began=lines[-1]["time_s"], waiting_for="workers")
    assert between([late] * 3, lines).keys() == {"starved"}
    assert between([Machine(now=late.now, step_began=late.step_began, running=False)] * 3, lines) == {}
    quick = [line | {"step_s": 0.42} for line in lines]
    assert "usually 0.4 s" in between([late] * 3, quick)["starved"].summary


@pytest.mark.parametrize(
    ("machine", "says", "advises"),
    [
        ({"waiting_for": "the trainer: the next step"}, "waiting for the trainer: the next step", "logs/trainer.log"),
        (
            {"waiting_for": "validators: v (ab) silent for 9 s; 1 to judge"},
            "v (ab) silent for 9 s",
            "See that they run",
        ),
        (
            {"waiting_for": "workers: 1 of 4 groups; 1 of 1 workers is quarantined"},
            "quarantined",
            "No group is leased. More workers",
        ),
        (
            {"waiting_for": "validators: v silent", "remedy": SILENT_REMEDY},
            "waiting for validators: v silent",
            SILENT_REMEDY,
        ),
        ({"waiting_for": "workers: 1 of 4 groups", "in_flight": 3}, "1 of 4", "Late groups go to others"),
        ({"waiting_for": "workers: 1 of 4", "notice": "the coordinator has not answered"}, "not answered", "by itself"),
    ],
)
def test_a_run_without_steps_is_told_with_what_it_waits_for(machine, says, advises):
    lines = honest_lines(8, 20)
    now = lines[-1]["time_s"] + 300.0
    found = between([Machine(now=now, step_began=lines[-1]["time_s"], **machine)] * 3, lines)["starved"]
    assert says in found.summary and advises in found.remedy and advises not in found.summary
    assert "shoal watch" not in found.remedy and not re.search(r"\d", found.remedy), "it is shown when these changed"


@pytest.mark.parametrize(
    ("longest", "remedy", "advises"),
    [
        ("validators: v silent for 40 s", SILENT_REMEDY, SILENT_REMEDY),
        ("workers: 1 of 4; no lease is granted: the host's disk quota is used up: 9 MB", "", "Raise storage.quota_mb"),
    ],
)
def test_a_run_without_steps_is_told_with_what_took_the_time(longest, remedy, advises):
    lines = honest_lines(8, 20)
    began = lines[-1]["time_s"]
    machine = Machine(
        now=began + 300.0,
        step_began=began,
        waiting_for="the trainer: the next step",
        longest=longest,
        longest_remedy=remedy,
        longest_s=250.0,
    )
    found = between([machine] * 3, lines)["starved"]
    assert f"of these, 250 s waiting for {longest}" in found.summary and advises in found.remedy


def test_a_run_without_steps_names_the_workers_whose_leases_are_the_oldest():
    lines, watch, key = honest_lines(8, 20), AlarmState(), "ab" * 32
    now = lines[-1]["time_s"] + 300.0
    for waits in ("workers: 1 of 4 groups", "the trainer: the next step"):
        machine = Machine(now=now, step_began=now - 300.0, waiting_for=waits, in_flight=3)
        for _ in range(3):
            watch.see(
                MonitorInputs(lines=lines, machine=machine, names={key: ("worker", "w")}, leased=[(key, now - 290.0)])
            )
        (alarm,) = watch.standing
        named = "waiting for workers: leased longest: w (abababababab) 290 s; 1 of 4 groups; no step for 300 s"
        assert alarm.summary.startswith(named) == waits.startswith("workers")
        assert ("leased longest" in alarm.summary) == waits.startswith("workers")


def test_groups_without_signal_are_told_before_the_run_pauses():
    assert between([Machine(now=1.0, flat_groups=60)] * 2).keys() == {"no_signal"}
    assert between([Machine(now=1.0, flat_groups=20)] * 2) == {}


@pytest.mark.parametrize(
    ("rate", "reward", "remedy"), [(0.9, 1.0, learning.EASY), (0.9, 0.0, learning.FALLEN), (0.1, 0.0, learning.HARD)]
)
def test_groups_without_signal_are_too_easy_only_if_their_rewards_did_not_fall(rate, reward, remedy):
    lines = [line | {"solve_rate": rate, "reward_all_mean": rate} for line in honest_lines(8, 20)]
    (found,) = learning.no_signal(
        MonitorInputs(lines=lines, machine=Machine(now=1.0, flat_groups=60, flat_reward=reward), max_flat_groups=64)
    )
    assert found.remedy == remedy


@pytest.mark.parametrize(("rates", "remedy"), [((0.5, 0.47, 0.006), learning.FALLEN), ((0.1, 0.02), learning.HARD)])
def test_a_policy_that_has_collapsed_is_not_told_to_take_easier_tasks(rates, remedy):
    lines = [
        line | {"solve_rate": rate, "reward_all_mean": rate}
        for rate, line in zip(rates, honest_lines(8, 3), strict=False)
    ]
    machine = Machine(now=1.0, flat_groups=60, flat_reward=0.0)
    (found,) = learning.no_signal(MonitorInputs(lines=lines, machine=machine, max_flat_groups=64))
    assert found.remedy == remedy
    (found,) = learning.no_signal(MonitorInputs(lines=lines, machine=machine, max_flat_groups=64, moving_tasks=True))
    assert found.remedy == learning.HARD, "tasks that follow the solve rate may be harder now"
    costs = [line | {"reward_all_mean": -0.4} for line in lines]
    machine = Machine(now=1.0, flat_groups=60, flat_reward=-0.4)
    (found,) = learning.no_signal(MonitorInputs(lines=costs, machine=machine, max_flat_groups=64))
    assert found.remedy == learning.HARD


def test_the_remedy_for_groups_without_signal_is_what_ended_their_rollouts():
    why = "A token limit ended 64 of the 64 rollouts: raise sampling.max_turn_tokens = 4"
    machine = Machine(now=1.0, flat_groups=60, why_flat=why)
    (found,) = learning.no_signal(MonitorInputs(machine=machine, max_flat_groups=64))
    said = "Raise sampling.max_turn_tokens = 4. A token limit ended 64 of the 64 rollouts"
    assert found.remedy == said, "what to change comes before what a small terminal cuts"
    solved = [line | {"solve_rate": 0.9} for line in honest_lines(8, 20)]
    (found,) = learning.no_signal(MonitorInputs(lines=solved, machine=machine, max_flat_groups=64))
    assert found.remedy == f"{said}. {learning.FALLEN}"
    for ended, remedy in ((why, learning.FALLEN), ("Errors of it", f"Errors of it. {learning.FALLEN}")):
        machine = Machine(now=1.0, flat_groups=60, why_flat=ended)
        grown = [line | {"overlong_share": share} for share, line in zip((0.0, *[0.9] * 19), solved, strict=False)]
        (found,) = learning.no_signal(MonitorInputs(lines=grown, machine=machine, max_flat_groups=64))
        assert found.remedy == remedy, "a limit that ended none of the first step is a symptom"
    line = {"step": 9, "zero_signal_share": 0.95, "solve_rate": 0.1}
    (found,) = learning.no_signal(MonitorInputs(lines=[line | {"overlong_share": 0.8}]))
    assert "a token limit ended 80%" in found.remedy and "sampling.max_turn_tokens" in found.remedy
    assert [one.remedy for one in learning.no_signal(MonitorInputs(lines=[line | {"overlong_share": 0.2}]))] == [
        learning.HARD
    ]


LONG_PROMPT = "its prompt takes 39 tokens, and sampling.max_tokens = 24 leaves no room for a turn"


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        (LONG_PROMPT, "Raise that key, or give shorter"),
        (f"task 7 of long one cannot begin: {LONG_PROMPT}", "Raise that key, or give shorter"),
        ("task 7 of own cannot begin: refused: a message leaves no room for a turn", "Correct task() and reset()"),
        ("environment own cannot begin task '3': own.py line 9: KeyError: 'x'", "Correct task() and reset()"),
    ],
)
def test_the_remedy_for_tasks_that_can_never_begin_is_no_larger_group(cause, advice):
    machine = Machine(now=1.0, flat_groups=60, unbegun_groups=55, unbegun_cause=cause)
    (found,) = learning.no_signal(MonitorInputs(machine=machine, max_flat_groups=64))
    assert f"55 of them can never begin; the last: {cause}. {advice}" in found.remedy
    assert "group_size" not in found.remedy
    few = Machine(now=1.0, flat_groups=60, unbegun_groups=5, unbegun_cause=cause)
    assert [one.remedy for one in learning.no_signal(MonitorInputs(machine=few, max_flat_groups=64))] == [learning.HARD]


# --- all ---


def test_each_alarm_of_the_run_file_has_a_monitor_and_each_limit_an_alarm():
    from shoal.config.alarm_limits import CAUSES, LIMITS

    assert CAUSES.keys() == MONITORS.keys() | BETWEEN.keys()
    assert {name.partition(".")[0] for name in LIMITS} == CAUSES.keys()
    assert all(monitor.found <= monitor.of for monitor in (*MONITORS.values(), *BETWEEN.values()))


def test_a_limit_of_the_run_file_replaces_the_usual_one():
    lines = faulty(lambda line, age: {"log_ratio_abs_mean_nats": 0.7})
    assert causes(lines, limits={"drift.nats": 1.0, "drift.growth": 1e9}) == set()


@pytest.mark.parametrize("lines", [[], [{"step": 0}], [{"step": i, "reward_all_mean": None} for i in range(20)]])
def test_metrics_that_are_missing_raise_nothing(lines):
    assert causes(lines) == set()
    assert between([Machine(now=1.0)], lines) == {}


def followed(lines, heldout=()):
    """Causes of the alarms at the newest steps of a run, as its launcher looks at them."""
    follower, count = RunMonitors(MonitorConfig()), len(lines)
    views = [follower._view(lines, count - ago, heldout, None) for ago in range(8, -1, -1)]
    return {cause for cause, _ in raised(views)}


def test_a_fault_that_creeps_in_over_2000_steps_is_compared_with_the_start_of_the_run():
    """No 256 steps show it: within these, entropy and reward change less than their noise."""
    lines = honest_lines(3, 2000)
    assert followed(lines) == set()
    falls = [{**line, "entropy_nats": 0.9 * 0.998 ** line["step"], "solve_rate": 0.3} for line in lines]
    assert followed(falls) == {"entropy"}
    grows = [
        {**line, "reward_length_correlation": 0.9, "policy_tokens": 640 * (1 + line["step"] // 200),
         "reward_all_mean": line["step"] / 2000, "solve_rate": 0.5}
        for line in lines
    ]  # fmt: skip
    assert followed(grows) == {"hacking"}


def test_an_evaluation_of_long_ago_is_compared_with_the_reward_of_its_steps():
    lines = [{"step": step, "reward_all_mean": 0.2 + 0.6 * min(1.0, step / 600)} for step in range(1400)]
    evaluations = [
        HeldoutResult(version, mean, mean - 0.02, mean + 0.02) for version, mean in ((0, 0.2), (700, 0.7), (1380, 0.4))
    ]
    assert followed(lines, evaluations) == set(), "reward in training did not rise since version 700"
    assert followed(lines, [HeldoutResult(400, 0.7, 0.68, 0.72), evaluations[2]]) == {"hacking"}


def test_a_look_at_a_step_that_is_past_sees_no_later_one():
    """So a launcher that is started again comes to the same alarms."""
    lines = [{"step": step, "reward_mean": 0.5} for step in range(40)]
    heldout = [HeldoutResult(10, 0.9, 0.8, 1.0), HeldoutResult(12, 0.5, 0.4, 0.6)]
    live, again = (RunMonitors(MonitorConfig())._view(known, 12, heldout, None) for known in (lines[:12], lines))
    assert live.at_best == again.at_best != ()

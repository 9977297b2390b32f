"""Whose turn it is to judge a submission, how long a turn lasts, and which validators nobody waits for.

Pure functions of a state and a time. The order of the validators is drawn, see `slot_draws`.

A turn passes to the next validator only if the one before gives no verdict for a whole turn. A validator that works
through its submissions, the oldest first, keeps its turns, however many are waiting. Otherwise a quick liar would judge
all that its friends send as soon as the others are busy. A turn lasts five checks at the speed of the median validator. A
validator that misses turns, or takes longer than that, is skipped for a while. Later verdicts do not shorten that.
"""

from collections.abc import Mapping, Sequence

from shoal.humanize import duration
from shoal.ledger.state import State, once_per_event
from shoal.ledger.state_records import NodeRecord, SubmissionRecord

MOST_OVERDUE = 32
"""Submissions, the oldest, among which validators that let their turn pass are looked for."""


def in_order(state: State) -> list[str]:
    """Submissions that another verdict can still count for, in the order in which validators take them.

    A recheck is placed by the age of its submission. So it comes before newer work, and is made in a busy run, too.
    """
    waiting = [*state.pending, *state.rechecks]
    return sorted(waiting, key=lambda name: state.submissions[name].seq)  # guard: oldest-submission-first


def may_judge(state: State, submission: SubmissionRecord, silent: set[str], key: str, now: float) -> bool:
    """Whether the turns of the validators ahead of this one have passed. `silent` are those that are skipped now."""
    ahead = submission.ahead_of(key, silent)
    # guard: no-second-turn
    return key not in submission.verdicts and now >= turn_begins(state, submission, ahead)


def turn_begins(state: State, submission: SubmissionRecord, ahead: Sequence[str]) -> float:
    """When a validator with these ahead of it may judge."""
    begins = submission.judged_at
    for key in ahead:
        begins = idle_since(state.members[key], submission, begins) + turn_s(state)  # guard: turns
    return begins


def idle_since(member: NodeRecord, submission: SubmissionRecord, began: float) -> float:
    """Since when a validator has been idle while a submission waited for it: since its turn `began`, or since its last
    verdict, or since it joined. A verdict on a newer submission does not count: it left this one aside.
    """
    turns = member.turns
    # guard: busy-keeps-its-turn, skipped-over
    return max(began, turns.joined, turns.voted if turns.voted_on <= submission.seq else 0.0)


def turn_s(state: State) -> float:
    """Seconds for which a validator may give no verdict before its turn passes."""
    law = state.law
    # guard: turns-scale
    return max(law.turn_s, slack_s(state))


@once_per_event
def slack_s(state: State) -> float:
    """Seconds that a verdict may take: `Law.turn_checks` times the longest recent check of the median validator. A
    validator that has not judged yet counts with `lease_s`."""
    members = [state.members[key].turns for key in state.judges()]
    times = sorted(state.law.turn_checks * turns.check_s if turns.voted else state.rules.lease_s for turns in members)
    return min(state.law.dispute_s, max(state.law.late_s, times[len(times) // 2])) if times else state.law.turn_s


def by_speed(state: State, order: tuple[str, ...], draws: Mapping[str, float]) -> tuple[str, ...]:
    """The order of a submission's validators, with slow ones first less often, so that they do not hold up the others.

    Quick ones are first no more often than the median one: otherwise a liar that does not look would judge the most.
    """
    if not draws:
        return order
    return tuple(sorted(order, key=lambda key: (draws[key] * _slowness(state, key), key)))  # guard: slow-is-first-less


def _slowness(state: State, key: str) -> float:
    """Ratio of this validator's check time to that of the median validator, at least 1."""
    turns = state.members[key].turns
    return max(1.0, turns.check_s / (slack_s(state) / state.law.turn_checks)) if turns.voted else 1.0


def silent(state: State, now: float) -> set[str]:
    """Keys of the validators that are skipped: those that no longer judge, and those that missed turns. If all missed
    turns, only the former."""
    judges = state.judges()
    gone = {key for key in state.validators if key not in judges}
    turns = {key: state.members[key].turns for key in judges}
    missing = {key for key, of in turns.items() if of.counted >= state.law.missed_turns and of.misses_count(now)}
    return gone | (
        missing if len(missing) < len(judges) else set()
    )  # guard: all-silent, left-is-skipped, gone-is-skipped


def absent(state: State, now: float) -> str:
    """What to tell the host about validators that are skipped; empty if there are none."""
    skipped = [state.members[key] for key in state.judges() if key in silent(state, now)]
    if not skipped:
        return ""
    named = ", ".join(f"{m.name} ({m.key[:12]}), {m.turns.missed} times so far" for m in skipped)
    return f"missed turns or was late, and is not waited for: {named}"


def overdue_verdicts(state: State, now: float, since: float, entered: Mapping[str, float] | None = None) -> str:
    """Which validators a wait for verdicts is for, because they let their turn pass or left; empty if there are none.
    `since`: when the host was started, before which nobody could say anything. One that came back is silent from then:
    `entered` has, by key, also the joins that changed nothing and so are not in the log."""
    waiting = _oldest(state)
    if not waiting:
        return ""
    found = overdue(state, now, since, entered).items()
    named = [f"{state.members[key].name} ({key[:12]}) silent for {duration(silence_s)}" for key, silence_s in found]
    if not state.judges() and now - max(waiting[0].judged_at, since) > state.rules.lease_s:
        named = [f"{state.members[key].name} ({key[:12]}) left" for key in state.panel()]
    return ", ".join(named)


def overdue(state: State, now: float, since: float, entered: Mapping[str, float] | None = None) -> dict[str, float]:
    """For how long validators that are not skipped have owed a verdict, by key; as `overdue_verdicts`."""
    waiting = _oldest(state)
    skipped, found = silent(state, now), dict[str, float]()
    for key in state.judges():
        silences_s = (_silence_s(state, key, submission, skipped, now, since, entered or {}) for submission in waiting)
        if key not in skipped and (silence_s := next(filter(None, silences_s), 0.0)):
            found[key] = silence_s
    return found


def _oldest(state: State) -> list[SubmissionRecord]:
    return [state.submissions[name] for name in in_order(state)[:MOST_OVERDUE]]


def _silence_s(
    state: State, key: str, submission: SubmissionRecord, skipped: set[str], now: float, since: float,
    entered: Mapping[str, float],
) -> float:  # fmt: skip
    if key in submission.verdicts:
        return 0.0
    member, ahead = state.members[key], submission.ahead_of(key, skipped)
    back = max(min(member.signed, now), entered.get(key, 0.0))  # the former by its own clock
    begins = turn_begins(state, submission, ahead)
    heard = max(idle_since(member, submission, begins), since, back)
    # One that has not judged yet may still fetch the weights.
    owed_s = turn_s(state) if member.turns.voted else max(state.rules.lease_s, turn_s(state))
    # guard: missed-turn-is-named
    if begins <= now and member.turns.missed_at > max(member.turns.voted, since, back):
        heard, owed_s = max(member.turns.voted, member.turns.joined, since, back), 0.0
    return now - heard if now - heard > owed_s else 0.0  # guard: at-work-is-not-silent


def slow_check(state: State, now: float, since: float, entered: Mapping[str, float] | None = None) -> str:
    """Whose turn it is to check, and for how long, if that is longer than checks usually take; else empty.
    `since` and `entered` are as of `overdue_verdicts`, which names it once it owes a verdict."""
    waiting = in_order(state)
    if not waiting:
        return ""
    submission, skipped = state.submissions[waiting[0]], silent(state, now)
    turns = [
        (turn_begins(state, submission, submission.ahead_of(key, skipped)), key)
        for key in state.judges()
        if key not in skipped and key not in submission.verdicts
    ]
    begun = [one for one in turns if one[0] <= now]
    if not begun:
        return ""
    begins, key = max(begun)
    member = state.members[key]
    took_s = now - max(idle_since(member, submission, begins), since, (entered or {}).get(key, 0.0))
    usual_s = slack_s(state) / state.law.turn_checks
    return f"{member.name} ({key[:12]}) has the check for {duration(took_s)}" if took_s > usual_s else ""

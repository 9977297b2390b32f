"""Decisions on leases: who gets which blocks, when a lease ends, and what it costs to let one lapse.

Keys are free, so dropped blocks go to workers that have proven themselves: each lease that a stranger lets lapse delays
a run that needs its blocks.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from msgspec import UNSET, structs

from shoal.ledger.batch_selection import (
    blocks_to_continue,
    groups_a_worker,
    groups_wanted,
    in_flight,
    is_fresh,
    open_batches,
    supply,
)
from shoal.ledger.batches import SlotVoid
from shoal.ledger.commands import Admin, AskLease, LeaveRun, ReturnLeases, Tick
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.event import Body
from shoal.ledger.fault_rate import FAULTS, TOOK_TOO_LONG
from shoal.ledger.lease_sizing import (
    blocks_for_speed,
    blocks_to_reassign,
    is_slow,
    lease_times,
    may_retry_stopped,
    num_to_reassign,
    reliable,
)
from shoal.ledger.leases import LeaseGranted, LeaseLapsed
from shoal.ledger.members import (
    BY_HOST,
    NodeLeft,
    cause_of_quarantine_by_host,
    change_by_host,
    member_as,
    refuse_replayed,
)
from shoal.ledger.pay import lapse_costs
from shoal.ledger.replay_context import LogPosition, PayContext, Table, Trigger
from shoal.ledger.run_events import NO_SIGNAL, RulesChanged
from shoal.ledger.state import State, once_per_event
from shoal.ledger.state_records import LeaseRecord, NodeRecord, StreamRecord
from shoal.protocol.constants import COMPLETIONS, MAX_OPEN_LEASES
from shoal.protocol.continuations import is_continued
from shoal.protocol.message_sizes import most_lease_blocks
from shoal.protocol.messages import AdminRequest
from shoal.protocol.messages.responses import CreditLine
from shoal.protocol.messages.run import kind_of

FASTEST_TOKENS_PER_S = 1e15
"""Replaces a speed that the log does not hold: the rules then give the largest lease that they allow."""


def decide_ask_lease(command: AskLease, state: State) -> list[Body]:
    """A lease for a worker, or nothing if it has one that it does not know of. Raises `Wait`."""
    member, stream = member_as(state, command.key, "worker"), state.main
    mine = state.open_leases_of(command.key)
    if state.phase != "ended" and any(lease.id not in command.holding for lease in mine):  # guard: draining-finishes
        return []  # also if nothing new is leased: a draining run ends when what is leased is finished
    _wait_until_running(state, stream)
    if member.standing == "quarantined":  # guard: quarantined-gets-no-work
        whence = "after a refused submission" if member.quarantined_for else "by the host"
        raise Wait(f"quarantined {whence} ({member.last_reason})", max(1.0, member.until - command.now))
    others = _others(state, member)
    one = is_slow(state, member)  # guard: slow-holds-one-lease
    # guard: open-leases, newcomer-holds-one-lease
    if len(mine) >= (
        1 if one or (not member.accepted and any(other.accepted for other in others)) else MAX_OPEN_LEASES
    ):
        raise Wait(f"you hold {len(mine)} lease{'s' if len(mine) > 1 else ''}, and may hold no more for now", 1.0)
    _wait_after_lapses(state, member, others, command.now)  # guard: lapsed-waits
    if stream.version < 0:
        raise Wait("the trainer has not published the first version yet", 1.0)
    _wait_for_strangers(state, stream, member, others)
    room = groups_wanted(state, stream) - _free_groups(state, stream)
    again = blocks_to_reassign(state, stream, member, others, command.now, room)
    if again:  # guard: reassigned-before-new
        return [_granted(state, stream, member, command, again[0][0], _shared(state, member, command, again))]
    if begun := blocks_to_continue(state, stream):  # guard: continued-before-new
        return [_granted(state, stream, member, command, begun[0][0], _shared(state, member, command, begun))]
    if room <= 0:
        raise Wait(f"enough groups are in flight for version {stream.version}", 1.0)
    share = groups_a_worker(state.rules) * open_batches(state, stream)
    room = min(room, share - supply(state, stream)[command.key])  # guard: full-share-waits
    if room <= 0:
        raise Wait(f"your share of the coming batches is full: {share} groups (verify.worker_share)", 1.0)
    blocks = _new_blocks(state, stream, member, command, room)
    return [_granted(state, stream, member, command, stream.version, blocks)]


def decide_return_leases(command: ReturnLeases, state: State) -> list[Body]:
    member = member_as(state, command.key, "worker")
    mine = {lease.id: lease for lease in state.open_leases_of(member.key)}
    back = [mine[name] for name in dict.fromkeys(command.leases) if name in mine]
    stopped = [lease for lease in back if command.stopped in lease.blocks]
    tasks = command.tasks or UNSET
    return [
        *(
            LeaseLapsed(lease.id, "stopped", command.stopped, tasks) if stopped else LeaseLapsed(lease.id, "returned")
            for lease in back
        ),
        *lapse_costs(state, back),  # guard: returns-count-as-lapses
        *(_pause_on_stops(state, stopped[0], command) if stopped else ()),
    ]


def _pause_on_stops(state: State, lease: LeaseRecord, command: ReturnLeases) -> list[Body]:
    """At `max_staleness = 0`, a block that is often stopped, but not on all workers, is not void, since a few could then
    choose what is learned. The run waits for its host if nobody else is at work and a worker has stopped the block twice:
    others that wait for work had their turn, or `lease_s`, to take it."""
    stops = state.stream_of(lease).versions[lease.version].blocks[command.stopped].stopped
    before = stops.workers if stops else []
    num, workers = len(before) + 1, {*before, lease.worker}
    if state.rules.max_staleness or state.phase != "running" or num < state.law.block_workers:
        return []
    if lease.worker not in before or _is_stopped_on_all(state, workers):  # guard: first-stops-pause-nothing
        return []
    at_work = {state.leases[name].worker for name in state.open_leases}
    at_work |= {state.lease_of(state.submissions[name]).worker for name in state.pending}
    if at_work - workers:  # guard: stops-of-one-pause-no-others
        return []
    cause = (
        f"{FAULTS}{TOOK_TOO_LONG}, each of {num} times, in {command.tasks or f'block {command.stopped}'}, and no "
        "other worker is there to play it"
    )
    return [RulesChanged(phase="paused", cause=cause)]


def decide_leave(command: LeaveRun, state: State) -> list[Body]:
    """A node that leaves gives back what it holds, at the same costs."""
    member = state.members.get(command.key)
    if member is None:
        raise Refused("not_joined", f"{command.key[:12]} has not joined this run")
    gone, created = member.left or state.phase == "ended", command.created
    refuse_replayed(created, member.signed, changes=not gone)  # guard: old-leave
    if gone:
        return []
    back = state.open_leases_of(member.key)  # guard: leaver-keeps-no-lease
    returned = [LeaseLapsed(lease.id, "returned") for lease in back]
    return [*returned, *lapse_costs(state, back), NodeLeft(member.key, created)]


def expire_leases(state: State, now: float, host_hung: Sequence[str] = ()) -> list[Body]:
    """Leases past their deadlines, and what that costs. Of the time of the `host_hung` ones, the host's stage has taken
    half or more: they cost nothing, within the margin of stale ones, because a worker could make an environment hang."""
    reached = (state.leases[name] for name in state.due_by(now, "lease", state.open_leases))
    late = [lease for lease in reached if lease.deadline < now]
    of_host = kind_of(state.envs) == COMPLETIONS  # guard: only-a-stage-hangs
    excused = [lease for lease in late if of_host and lease.id in host_hung]
    often = _beyond_the_runs_share(state, excused)  # guard: habit-of-hung-leases
    causes = {lease.id: "host_hung" for lease in excused} | {lease.id: "host_hung_often" for lease in often}
    lapsed = [LeaseLapsed(lease.id, causes.get(lease.id, "deadline")) for lease in late]
    paying = [lease for lease in late if causes.get(lease.id) != "host_hung"]
    return [*lapsed, *lapse_costs(state, paying)]  # guard: lapses-cost


def close_stale_leases(state: State) -> list[Body]:
    """Closes open leases from which nothing can be learned any more, so that no worker is given one again.

    It costs nothing up to the run's own share of such leases plus a margin, because versions come while a worker sleeps or
    is slow. A worker whose leases become stale more often than that is treated as one that lets them lapse.
    """
    ended, stale = state.phase == "ended", list[LeaseRecord]()
    for lease in map(state.leases.__getitem__, state.open_leases):
        # guard: stale-is-closed
        if ended or lease.version < state.stream_of(lease).version - state.rules.max_staleness:
            stale.append(lease)
    overtaken = [] if ended else _overtaken(state, {lease.id for lease in stale})
    held = [] if ended else _beyond_the_runs_share(state, stale)
    causes = {lease.id: "held" for lease in held} | dict.fromkeys(overtaken, "overtaken")
    stale += [state.leases[name] for name in overtaken]
    return [*(LeaseLapsed(x.id, causes.get(x.id, "stale")) for x in stale), *lapse_costs(state, held)]


def _overtaken(state: State, besides: set[str]) -> list[str]:
    found = []
    for lease in (state.leases[name] for name in state.open_leases if name not in besides):
        blocks = state.stream_of(lease).versions[lease.version].blocks
        if all(blocks[number].status == "done" for number in lease.blocks):  # guard: overtaken-is-closed
            found.append(lease.id)
    return found


def _beyond_the_runs_share(state: State, stale: list[LeaseRecord]) -> list[LeaseRecord]:
    """Of the leases that are stale now, those of workers whose share is clearly above that of the whole run.

    Leases that were charged for this before do not raise the run's share.
    """
    if not stale:
        return []
    run_share = (sum(member.stale for member in state.members.values()) + len(stale)) / len(state.leases)
    free, held = Counter[str](), []
    for lease in stale:
        member = state.members[lease.worker]
        # guard: habit-of-stale-leases, as-late-as-the-run
        if member.stale + free[member.key] + 1 > 1 + (run_share + state.law.stale_margin) * member.leases:
            held.append(lease)
        else:
            free[member.key] += 1
    return held


def void_free(state: State, stream: StreamRecord) -> list[Body]:
    """Voids the slots of free blocks that will not be leased again: their version is too old, or as many workers gave them
    back as may be leased one block. At `max_staleness = 0`, only those that an environment stopped on all workers."""
    size = state.rules.block_groups
    old = [place for place in stream.free if not is_fresh(state, stream, place[0])]
    stopped = [place for place in stream.free if _is_stopped(state, stream, place)]
    given_up = [place for place in stream.free if _is_given_up(state, stream, place)]
    for cause, places in (("stale", old), ("stopped", stopped), ("dropped", given_up)):
        for version, _ in places[:1]:
            blocks = [block for v, block in places if v == version]
            slots = tuple(slot for block in blocks for slot in range(block * size, (block + 1) * size))
            return [SlotVoid(version, slots, cause, stream.name)]
    return []


def void_unleased_branches(state: State, stream: StreamRecord) -> list[Body]:
    """Voids the continuations that nobody makes in a run that drains, so that their parents can still fill a batch.

    Not at `max_staleness = 0`: a run that is drained and resumed must then end as one that was not. Its drain ends without
    a batch whose continuations nobody has begun.
    """
    if (
        state.phase != "draining" or not state.rules.max_staleness
    ):  # guard: only-a-drain-leaves-out, drain-changes-no-batch
        return []
    size = state.rules.block_groups
    free = [place for place in stream.free if is_continued(place[1]) and is_fresh(state, stream, place[0])]
    for version, block in [*blocks_to_continue(state, stream), *free]:
        return [SlotVoid(version, tuple(range(block * size, (block + 1) * size)), "drained", stream.name)]
    return []


def _is_stopped(state: State, stream: StreamRecord, place: tuple[int, int]) -> bool:
    block = stream.versions[place[0]].blocks[place[1]]
    workers = set(block.stopped.workers) if block.stopped else set[str]()
    if _is_stopped_on_all(state, workers):  # guard: stopped-is-void
        return True
    return _is_given_up(state, stream, place) and workers >= set(block.holders)


def _is_stopped_on_all(state: State, workers: set[str]) -> bool:
    """Whether these are `Law.block_workers` or more and, at `max_staleness = 0`, all that have a good record, or accepted
    work while nobody has one: a few keys of one owner must not choose what is learned."""
    if len(workers) < state.law.block_workers or state.rules.max_staleness:
        return len(workers) >= state.law.block_workers
    proven = reliable(state) or {member.key for member in _workers(state) if member.accepted}
    return bool(proven) and proven <= workers  # guard: stalls-choose-nothing


def _is_given_up(state: State, stream: StreamRecord, place: tuple[int, int]) -> bool:
    """Not at `max_staleness = 0`: there, what is learned must not depend on who gave up."""
    held = len(stream.versions[place[0]].blocks[place[1]].holders)
    return state.rules.max_staleness > 0 and held >= state.law.block_workers  # guard: given-up-at-last


def _wait_until_running(state: State, stream: StreamRecord) -> None:
    why = without_signal(state, stream) or state.pause_cause
    reasons = {
        "paused": (f"the run is paused until its host resumes it{why and f': {why}'}", 5.0),
        "draining": ("the run is draining: no new work is given", 5.0),
        "ended": ("the run has ended", 60.0),
    }
    if state.phase in reasons:
        raise Wait(*reasons[state.phase])


def without_signal(state: State, stream: StreamRecord) -> str:
    """What to say about accepted groups in a row that teach nothing; empty if other groups could still fill a batch, or if
    what paused the run are faults, which made the groups flat."""
    if state.pause_cause.startswith(FAULTS):
        return ""
    if stream.flat < state.rules.batch_groups and not (state.pause_cause == NO_SIGNAL and stream.flat):
        return ""
    which = "each" if stream.num_equal == stream.flat else f"{stream.num_equal} of them"
    equal = f"within {which} all rewards are equal, {stream.mean_flat_reward:.3g} on average"
    why = [equal] if stream.num_equal else []
    if stream.failed:
        why.append(f"in {stream.failed} of them the environment fails on so many rollouts that too few are left")
    if stream.unbegun:
        why.append(f"the tasks of {stream.unbegun} of them can never begin; the last: {stream.unbegun_cause}")
    if stream.stopped:
        last = stream.stopped_tasks or "not named"
        why.append(
            f"in {stream.stopped} of them a call took too long, or ended its process, everywhere; the last: {last}"
        )
    return f"the last {stream.flat} groups have no signal: {'; '.join(why)}"


def _others(state: State, member: NodeRecord) -> list[NodeRecord]:
    return [other for other in _workers(state) if other.key != member.key]


@once_per_event
def _workers(state: State) -> list[NodeRecord]:
    # guard: left-is-no-other
    workers = (other for other in state.members.values() if other.role == "worker" and not other.left)
    # guard: withheld-for-the-active
    return [other for other in workers if other.standing not in ("kicked", "quarantined")]


@once_per_event
def _num_good_workers(state: State) -> int:
    return sum(other.standing == "good" for other in _workers(state))


def _wait_after_lapses(state: State, member: NodeRecord, others: Sequence[NodeRecord], now: float) -> None:
    """A worker that submits nothing between its lapses waits for the next lease, twice as long each time; the only worker
    never long, because nobody else could go on, nor one that goes on alone with a block that was stopped."""
    wait_s = state.law.lapse_wait_s(member.dropped, state.rules.lease_s)
    free = [state.main.versions[version].blocks[number] for version, number in state.main.free] if wait_s else []
    # guard: stopped-on-others-waits-briefly
    alone = not others or any(may_retry_stopped(member, others, block) for block in free)
    # guard: stopped-everywhere-waits-briefly
    alone = alone or (wait_s > 0 and _was_stopped_everywhere(state, member, others))
    most_s = state.law.least_soft_s if alone else wait_s  # guard: lone-worker-goes-on
    left_s = member.dropped_at + min(most_s, wait_s) - now
    if left_s > 0:
        raise Wait(
            f"{member.dropped} of your leases lapsed in a row: the next one comes in {math.ceil(left_s)} s at most",
            left_s,
        )


def _was_stopped_everywhere(state: State, member: NodeRecord, others: Sequence[NodeRecord]) -> bool:
    """Whether a block is done with that an environment stopped on all workers, and this one dropped nothing since."""
    everyone = {member.key, *(other.key for other in others)}
    fresh = (record for number, record in state.main.versions.items() if is_fresh(state, state.main, number))
    done = (block for record in fresh for block in record.blocks.values() if block.status == "done" and block.stopped)
    # guard: later-lapses-wait
    return any(
        block.stopped and everyone <= {*block.stopped.workers} and member.dropped_at <= block.dropped_at
        for block in done
    )


def _new_blocks(state: State, stream: StreamRecord, member: NodeRecord, asked: AskLease, room: int) -> list[int]:
    most = _most_blocks(state, member, asked, room // state.rules.block_groups)
    first = sum(not is_continued(block) for block in stream.versions[stream.version].blocks)
    if is_continued(first + most - 1):  # guard: numbers-do-not-meet
        raise Wait(f"version {stream.version} has {first} blocks, and no more are numbered", 60.0)
    return list(range(first, first + most))


def _shared(state: State, member: NodeRecord, asked: AskLease, again: list[tuple[int, int]]) -> list[int]:
    """One worker's part of blocks of one version that were leased before, or of continuations: all of one kind."""
    version, kind = again[0][0], is_continued(again[0][1])
    blocks = [block for v, block in again if (v, is_continued(block)) == (version, kind)]  # guard: one-kind-a-lease
    return blocks[: _most_blocks(state, member, asked, len(blocks), kind)]


def _most_blocks(state: State, member: NodeRecord, asked: AskLease, room: int, continued: bool = False) -> int:
    # guard: newcomer-gets-one-block
    most = 1 if member.standing == "new" else blocks_for_speed(state, member, asked.tokens_per_s, continued)
    workers = max(1, _num_good_workers(state))
    fit = most_lease_blocks(state.rules, state.sampling, state.envs, continued)
    # guard: room-for-others, lease-fits-messages
    return max(1, min(most, room // workers, fit, asked.most))


def _granted(
    state: State, stream: StreamRecord, member: NodeRecord, asked: AskLease, version: int, blocks: Sequence[int]
) -> LeaseGranted:
    soft, deadline = lease_times(state, member, blocks, asked.now)
    return LeaseGranted(str(len(state.leases)), member.key, version, tuple(blocks), deadline, stream.name, soft)


def blocks_to_give(state: State, stream: StreamRecord, now: float) -> int:
    """Number of blocks that could be leased now; so many waiting workers are woken."""
    if state.phase != "running" or stream.version < 0:
        return 0
    room = groups_wanted(state, stream) - _free_groups(state, stream)
    again = num_to_reassign(state, stream, now, room)
    return max(0, -(-room // state.rules.block_groups)) + again + len(blocks_to_continue(state, stream))


def _free_groups(state: State, stream: StreamRecord) -> int:
    """Groups of free blocks: room that is not for new ones."""
    new = sum(not is_continued(block) for _, block in stream.free)
    return new * state.rules.block_groups


def _wait_for_strangers(state: State, stream: StreamRecord, member: NodeRecord, others: Sequence[NodeRecord]) -> None:
    """Workers without accepted work hold a bounded share of the blocks in flight while there are others with some."""
    if member.accepted or not any(other.accepted for other in others):
        return
    held = in_flight(state, stream)
    theirs = sum(groups for key, groups in held.items() if not state.members[key].accepted)
    each, share = state.rules.block_groups, state.law.stranger_share
    if theirs and theirs + each > share * (held.total() + each):  # guard: strangers-share
        raise Wait(
            f"newcomers fill at most {share:.1%} of a run's blocks at a time: yours comes when another's is judged", 1.0
        )


def cause_of_lease_granted(body: LeaseGranted, here: LogPosition) -> Trigger:
    holding = tuple(lease.id for lease in here.state.open_leases_of(body.worker))
    # A slower worker gets fewer of the same blocks.
    return Trigger(AskLease(body.worker, holding, FASTEST_TOKENS_PER_S, here.now, len(body.blocks)))


def cause_of_lease_lapsed(body: LeaseLapsed, here: LogPosition) -> Trigger | None:
    worker = here.state.leases[body.lease].worker
    if body.cause in ("deadline", *_HOST_HUNG):
        return Trigger(Tick(here.now, host_hung=_host_hung(here)))
    if body.cause == "kicked":
        return Trigger(Admin("kick", AdminRequest(worker), here.now, change_by_host(here).created))
    if body.cause == BY_HOST:
        return cause_of_quarantine_by_host(worker, here)
    if body.cause == "stopped":
        block = -1 if body.block is UNSET else body.block
        return Trigger(ReturnLeases(worker, _returned(here, body), here.now, block, body.tasks or ""))
    if body.cause != "returned":
        return None
    return _cause_of_leaving(worker, here) or Trigger(ReturnLeases(worker, _returned(here, body), here.now))


def _cause_of_leaving(worker: str, here: LogPosition) -> Trigger | None:
    """That the worker left, if the events from here to its leaving are what the rules then give."""
    most = MAX_OPEN_LEASES * 2 + 1  # each lease lapses and may cost pay
    coming = [entry.body for entry in here.entries[here.place : here.place + most]]
    left = next((body for body in coming if isinstance(body, NodeLeft) and body.key == worker), None)
    if left is None:
        return None
    command = LeaveRun(worker, here.now, left.created)
    events = decide_leave(command, here.state)
    return Trigger(command) if coming[: len(events)] == events else None


def _host_hung(here: LogPosition) -> tuple[str, ...]:
    """Leases of which one tick's events say that the host's stage took their time. Nobody else can know."""
    lapsed = (here.entries[place].body for place in range(here.place, len(here.entries)))
    together = takewhile(lambda body: isinstance(body, LeaseLapsed) and body.cause in ("deadline", *_HOST_HUNG), lapsed)
    return tuple(body.lease for body in together if isinstance(body, LeaseLapsed) and body.cause in _HOST_HUNG)


def _returned(here: LogPosition, first: LeaseLapsed) -> tuple[str, ...]:
    """Leases that a worker gave back in one request, which names at most one block that was stopped."""
    worker, leases = here.state.leases[first.lease].worker, []
    for entry in here.entries[here.place : here.place + MAX_OPEN_LEASES]:
        lapsed = entry.body
        if not isinstance(lapsed, LeaseLapsed) or structs.replace(lapsed, lease=first.lease) != first:
            break
        if here.state.leases[lapsed.lease].worker == worker:
            leases.append(lapsed.lease)
    return tuple(leases)


def lines_of_lease_lapsed(body: LeaseLapsed, told: PayContext) -> Iterator[CreditLine]:
    lease = told.state.leases[body.lease]
    if lease.worker == told.node:
        blocks = ", ".join(map(str, lease.blocks))
        ended = _LEASE_ENDS.get(body.cause, f"lapsed: {body.cause}")
        yield told.line(f"lease {lease.id} (blocks {blocks}) {ended}", version=lease.version)


_HOST_HUNG = ("host_hung", "host_hung_often")

_LEASE_ENDS = {
    "host_hung": "was closed at no cost: the host's environment took half of its time or more",
    "host_hung_often": "lapsed: the host's environment took its time, clearly more often than is usual in the run",
    "stale": "was closed at no cost: its version is too old",
    "overtaken": "was closed at no cost: it took long, and other workers filled its blocks first",
    "stopped": "lapsed: an environment took too long on this node, or ended its process, so the node gave it back",
    "held": "lapsed: its version is too old, and this happens to this node clearly more often than to the run",
}


COMMANDS: Table = {AskLease: decide_ask_lease, ReturnLeases: decide_return_leases, LeaveRun: decide_leave}
CAUSES: Table = {LeaseGranted: cause_of_lease_granted, LeaseLapsed: cause_of_lease_lapsed}
LINES: Table = {LeaseLapsed: lines_of_lease_lapsed}

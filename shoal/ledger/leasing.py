"""Who gets which blocks: sizes of leases, room for more of them, and what it costs to let one lapse. Pure.

Called by `decide` when a worker asks for a lease or lets one go, or when a version makes leases too old, and by the desk
to say what a run waits for. A key costs
nothing, so what was dropped goes to those who have shown that they work: each lease that a stranger lets lapse holds up
a run that needs its blocks.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from shoal.ledger import audits
from shoal.ledger import events as ev
from shoal.ledger.audits import groups_a_worker
from shoal.ledger.commands import AskLease, Wait
from shoal.ledger.state import Lease, Node, State, once_per_event
from shoal.protocol.constants import MAX_LEASE_BLOCKS, MAX_OPEN_LEASES
from shoal.protocol.sizes import most_lease_blocks

LEASE_TARGET_S = 20.0
"""A lease is sized to take a worker about this long, by its measured speed."""


def grant(command: AskLease, node: Node, state: State) -> list[ev.Body]:
    """A lease for a worker, or nothing where it has one that it does not know of. Raises `Wait`."""
    mine = state.open_leases_of(command.key)
    if state.phase != "ended" and any(lease.id not in command.holding for lease in mine):
        return []  # also where nothing new is leased: a run that drains ends when what is leased is finished
    _refuse_when_not_running(state)
    if node.standing == "quarantined":
        raise Wait(f"quarantined after a refused submission ({node.last_reason})", max(1.0, node.until - command.now))
    others = _others(state, node)
    if len(mine) >= (MAX_OPEN_LEASES if node.accepted or not any(other.accepted for other in others) else 1):
        raise Wait(f"you hold {len(mine)} of the leases that you may have at a time", 1.0)
    _wait_after_lapses(state, node, command.now)
    if state.version < 0:
        raise Wait("the trainer has not published the first version yet", 1.0)
    room = groups_wanted(state)
    if room <= 0:
        raise Wait(f"enough groups are in flight for version {state.version}", 1.0)
    share = groups_a_worker(state.law) * _open_batches(state)
    room = min(room, share - _supply(state)[command.key])
    if room <= 0:
        raise Wait(f"your share of the coming batches is full: {share} groups (verify.worker_share)", 1.0)
    free = [place for place in state.free if not _is_kept(state, place, node, others, command.now)]
    if state.free and not free:
        raise Wait("the blocks that are free were dropped, and are kept for other workers for a while", 1.0)
    version, blocks = _blocks_to_lease(state, node, command.tokens_per_s, room, free)
    deadline = command.now + state.law.lease_s * len(blocks)
    return [ev.LeaseGranted(str(len(state.leases)), command.key, version, tuple(blocks), deadline)]


def _refuse_when_not_running(state: State) -> None:
    flat = without_signal(state)
    reasons = {
        "paused": (f"the run is paused until its host resumes it{flat and f': {flat}'}", 5.0),
        "draining": ("the run is draining: no new work is given", 5.0),
        "ended": ("the run has ended", 60.0),
    }
    if state.phase in reasons:
        raise Wait(*reasons[state.phase])


def without_signal(state: State) -> str:
    """What to say of accepted groups in a row that teach nothing; empty while a batch could still be full of others."""
    if state.flat < state.law.batch_groups and not (state.pause_cause and state.flat):
        return ""
    return (
        f"the last {state.flat} groups have no signal: within each all rewards are equal, "
        f"{state.flat_reward / state.flat:.3g} on average"
    )


def _others(state: State, node: Node) -> list[Node]:
    """Workers besides this one that may get leases."""
    return [other for other in _workers(state) if other.key != node.key]


@once_per_event
def _workers(state: State) -> list[Node]:
    """Workers that may get leases."""
    workers = (other for other in state.nodes.values() if other.role == "worker")
    return [other for other in workers if other.standing not in ("kicked", "quarantined")]


@once_per_event
def _good_workers(state: State) -> int:
    return sum(other.role == "worker" and other.standing == "good" for other in state.nodes.values())


def _wait_after_lapses(state: State, node: Node, now: float) -> None:
    """Who hands nothing in between its lapses waits for the next lease, twice as long each time."""
    left_s = node.dropped_at + audits.lapse_wait_s(node.dropped, state.law.lease_s) - now
    if left_s > 0:
        raise Wait(f"{node.dropped} of your leases lapsed in a row: the next one comes in {left_s:.0f} s", left_s)


def _is_kept(state: State, place: tuple[int, int], node: Node, others: Sequence[Node], now: float) -> bool:
    """Whether a free block is for somebody else, because it was dropped less than `lease_s` ago.

    From who dropped it, for any other worker; from who has no accepted work yet, for those who have. The time limit
    stands for knowing who is still there: whoever is asks within it, and nobody waits longer for those who left.
    """
    block = state.versions[place[0]].blocks[place[1]]
    if not block.dropped_by or now >= block.dropped_at + state.law.lease_s:
        return False
    if block.dropped_by == node.key:
        return bool(others)
    return not node.accepted and any(other.accepted and other.key != block.dropped_by for other in others)


def _blocks_to_lease(
    state: State, node: Node, tokens_per_s: float, room: int, free: list[tuple[int, int]]
) -> tuple[int, list[int]]:
    """Blocks of one version: given back ones first, then new ones, as many as the worker's speed allows."""
    most = 1 if node.standing == "new" else _blocks_for_speed(state, tokens_per_s)
    workers = max(1, _good_workers(state))
    assert state.sampling is not None, "the run is not created"
    fit = most_lease_blocks(state.law, state.sampling, state.envs)
    most = max(1, min(most, room // state.law.block_groups // workers, fit))
    current = state.version
    if free:
        version = free[0][0]
        return version, [block for v, block in free if v == version][:most]
    first = len(state.versions[current].blocks)
    return current, list(range(first, first + most))


def _blocks_for_speed(state: State, tokens_per_s: float) -> int:
    if not state.accepted_groups:
        return 1
    tokens_per_block = state.block_tokens / state.accepted_groups * state.law.block_groups
    return int(max(1.0, min(MAX_LEASE_BLOCKS, tokens_per_s * LEASE_TARGET_S / max(1.0, tokens_per_block))))


def blocks_to_give(state: State) -> int:
    """Blocks that could be leased now: as many workers that wait for a lease are worth waking."""
    if state.phase != "running" or state.version < 0:
        return 0
    return max(0, -(-groups_wanted(state) // state.law.block_groups))


@once_per_event
def groups_wanted(state: State) -> int:
    """Groups that may still be leased: accepted and in flight stay below (max_staleness + 1) batches (DESIGN §2)."""
    batches, each = _open_batches(state), groups_a_worker(state.law)
    # What a worker holds beyond its share will fill no batch: counted, it would keep the others from work for ever.
    supply = sum(min(groups, each * batches) for groups in _supply(state).values())
    return batches * state.law.batch_groups - supply


def _open_batches(state: State) -> int:
    """Batches that may be formed before the trainer publishes again."""
    steps_left = state.law.steps - state.version
    return min(state.law.max_staleness + 1, steps_left) - (len(state.batches) - state.version)


@once_per_event
def _supply(state: State) -> Counter[str]:
    """Groups for the coming batches by worker: accepted, leased, or sent and not yet judged."""
    return Counter(state.maker_of(place) for place in usable(state)) + _in_flight(state)


def usable(state: State) -> list[tuple[int, int]]:
    """Accepted groups with signal that the next batch may take, in the order of acceptance."""
    step, law = len(state.batches), state.law
    return [place for place in state.pool if step - place[0] <= law.max_staleness]


def groups_in_flight(state: State) -> int:
    """Groups leased, or sent and not yet judged, of versions that can still be learned from."""
    return _in_flight(state).total()


@once_per_event
def _in_flight(state: State) -> Counter[str]:
    """The same by worker."""
    oldest, groups = max(0, state.version - state.law.max_staleness), Counter[str]()
    for version in range(oldest, len(state.versions)):
        for block in state.versions[version].blocks.values():
            if block.status in ("leased", "submitted"):
                groups[state.leases[block.lease].worker] += state.law.block_groups
    return groups


def close_stale(state: State) -> list[ev.Body]:
    """Closes open leases from which nothing can be learned any more, so that no worker is given one again.

    It costs nothing up to the run's own share of such leases and a margin: versions come while a worker sleeps or is
    slow. A worker that holds leases until they are stale more often than that is treated as one that lets them lapse.
    """
    if state.law.rules_version < 1:
        return []
    ended, oldest = state.phase == "ended", state.version - state.law.max_staleness
    stale = [lease for lease in map(state.leases.__getitem__, state.open_leases) if ended or lease.version < oldest]
    held = [] if ended else _beyond_the_runs_share(state, stale)
    causes = {lease.id: "held" for lease in held}
    return [*(ev.LeaseLapsed(x.id, causes.get(x.id, "stale")) for x in stale), *lapse_costs(state, held)]


def _beyond_the_runs_share(state: State, stale: list[Lease]) -> list[Lease]:
    """Of the leases that are stale now, those of workers whose share is clearly above that of the whole run.

    Leases that were found to be beyond it before do not raise the run's share.
    """
    if not stale:
        return []
    run_share = (sum(node.stale for node in state.nodes.values()) + len(stale)) / len(state.leases)
    free, held = Counter[str](), []
    for lease in stale:
        node = state.nodes[lease.worker]
        if node.stale + free[node.key] + 1 > 1 + (run_share + audits.STALE_MARGIN) * node.leases:
            held.append(lease)
        else:
            free[node.key] += 1
    return held


def lapse_costs(state: State, late: list[Lease]) -> Iterator[ev.Body]:
    """What lapses cost: a lease's worth of the newest pay for each that the free share does not cover."""
    unpaid, kept = Counter[str](), {lease.worker: list(state.nodes[lease.worker].escrow) for lease in late}
    for lease in late:
        node, escrow = state.nodes[lease.worker], kept[lease.worker]
        unpaid[node.key] += 1
        groups = min(len(escrow), len(lease.blocks) * state.law.block_groups)
        if groups and node.lapsed - node.paid_lapses + unpaid[node.key] > 1 + audits.FREE_LAPSES * node.leases:
            unpaid[node.key] -= 1
            yield ev.Forfeited(node.key, lease.id, groups, sum(escrow[-groups:]), "lapsed")
            del escrow[-groups:]

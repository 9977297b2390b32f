"""The law: every constant of the rules that the project fixes, and the version of the rules themselves.

The run's first event holds the law that the run was created with, and a replay uses that law. Auditors compare it with
`LAW`, so that a host cannot use constants of its own unseen. Whatever decides or changes a state in another way than the
last release, or has other constants, needs a new `RULES_VERSION`: a log of another version is reported as not checked.

The arithmetic behind the constants. Let p be the chance that a cheat is caught, G the gain of a cheat and S the stake.
Cheating loses if (1 - p) G < p S. A trusted worker is audited at 5 %, so S must exceed 19 G. The stake is the pay that
has not vested, and 40 blocks of it are twice that. `benchmarks/economics.py` plays strategies against these numbers.
"""

import msgspec

from shoal.protocol.messages import Message

RULES_VERSION = 1
"""Of this code. A release never changes what the version of an earlier release decides."""


class Law(Message, frozen=True):
    """Constants of the rules. Each says what it means and what breaks when it changes."""

    version: int = RULES_VERSION
    """Of the rules that wrote the log."""

    probation_blocks: int = 10
    """Valid blocks in a row before a new key, or a known key with a new engine, is audited less than fully. Fewer helps a
    cheat that strikes once and leaves; each further one costs validators a prefill."""
    trust: float = 3.0
    """A worker with n valid blocks in a row is audited at trust / n, but never below the run's rate. A smaller number lets
    a sleeper reach the lowest rate sooner."""
    recheck_rate: float = 0.05
    """Smallest share of accepted submissions that a second validator judges again; it is more for those that pay
    much compared with their worker's stake. At 0, nobody finds a lazy or bribed validator."""
    vesting_blocks: int = 40
    """Blocks of a worker's latest pay that have not vested, and that a slash takes. Keep within 19 to 48: below, cheating
    pays at 5 % audits; above, false alarms (one in 1,000 groups) cost honest nodes 1 % of their pay."""
    refused_blocks: int = 8
    """Blocks' worth of the newest unvested pay that each refused block costs if nobody is slashed. At 2, a worker gains if
    its cheats count as soft, or if its run has one validator."""
    turn_s: float = 30.0
    """A validator's turn lasts at least this many seconds without a verdict. Longer keeps work waiting for a dead
    validator; shorter than a prefill makes two validators do the same work."""
    missed_turns: int = 2
    """A validator is skipped while this many of its missed turns count, and until it sends a verdict. 1 would skip a mere
    restart; a large number lets a dead validator delay every submission that long."""
    turn_checks: float = 5.0
    """A turn lasts at least this many checks of the median validator, and a verdict that takes longer counts as a missed
    turn. Less makes honest slow validators miss turns; more lets one validator hold up a run longer."""
    late_s: float = 3.0
    """A verdict within this time is never late. Less would count the pauses of a process; more lets a validator delay each
    of its turns by as much."""
    missed_counts_turns: int = 20
    """A missed turn counts for the time of this many turns, whatever verdicts follow. With fewer, a validator that lets
    turns pass delays a run more: at 20, for a tenth of the time."""
    recheck_trust: float = 1.0
    """After rechecks have confirmed n verdicts of a validator, this / (n + 1) of what it accepts is judged again, but never
    less than `recheck_rate`. Less finds a validator that does no work later; more costs validators."""
    dispute_s: float = 600.0
    """A dispute that is open this long ends without pay and without penalty, unless a validator at work will come to it.
    No turn is longer. If it is shorter than three turns, a third verdict may come too late."""
    most_verdicts: int = 3
    """At most this many validators judge one submission: two that agree outvote the third."""
    soft_failures: int = 3
    """A worker is quarantined each time it has this many more refused submissions, and at once after a hard failure."""
    validator_faults: int = 3
    """Times that a validator may be outvoted, or found to have judged without doing the work, before it is suspended. 1
    would let two liars remove an honest validator at their first try; a large number lets a liar stay."""
    max_quarantine_s: float = 3600.0
    """A quarantine doubles with each failure, up to this many seconds."""
    free_lapses: float = 0.05
    """Share of a worker's leases that may lapse at no cost, because machines fail. More lets a worker drop the tasks that
    it does not like."""
    stale_margin: float = 0.1
    """By how much a worker's share of stale leases may exceed the run's; each lease beyond that counts as lapsed. More
    lets a worker hold unwanted tasks until they are stale; less charges honest workers that are slower than most."""
    max_lapse_wait_s: float = 3600.0
    """A worker whose leases lapse one after another waits for the next one, longer each time, up to this many seconds. More
    shuts out a worker that was broken for a while; much less lets one idle key hold up a run all day."""
    lease_target_s: float = 20.0
    """A lease is sized to take a worker about this long, by its measured speed."""
    rejoins: int = 10
    """Joins of one key, each different from the last, that the log takes at once. Fewer would keep out somebody who tries
    names and engines; each writes about 500 bytes."""
    rejoin_s: float = 60.0
    """Seconds after which such a key may join once more. Less lets one key write more of the log: 1 s makes 40 MB a day."""
    soft_times: float = 2.0
    """A lease's soft time, as a multiple of the time that its worker should need. Less makes the same block twice whenever
    a worker is a little late; more makes the run wait longer for a worker that holds what it does not like."""
    least_soft_s: float = 5.0
    """Shortest soft time: a machine that does something else for a moment is not late."""
    deadline_times: float = 4.0
    """A lease's deadline, as a multiple of the same time, but at least `lease_s` and at most `lease_s` for each block. More
    lets a worker hold many blocks for long; less lapses the leases of honest workers whose speed varies."""
    patience_times: float = 6.0
    """How long a batch waits for a block of a worker with a good record, and a run that can lease nothing new for any
    block, as a multiple of the usual time for a block. More lets workers that are slow on purpose hold up a run; 4 leaves
    no time to spare at a quarter of the usual speed."""
    block_workers: int = 4
    """At most this many workers are leased one block; if all of them gave it back, its slots are void. Fewer makes it
    easier to void a block by dropping it; more lets droppers delay a batch longer."""
    unfilled_share: float = 0.1
    """A worker gets blocks that others left only while it has left at most this share of its own to others. More lets
    workers that drop what they do not like pass a block among themselves; less shuts out honest workers that fail at
    times."""
    fault_window: int = 200
    """Newest rollouts of an environment by which its faults are judged. Fewer pause a run for bad luck; more let a policy
    that learns to make its environment fail go on for longer."""
    fault_share: float = 0.05
    """A run pauses if an environment fails on more of these rollouts than this share. They count in nothing, so failing is
    worth more than a wrong answer: a larger share lets a policy learn it, a smaller one stops runs for rare bugs."""
    outside_share: float = 0.01
    """A run pauses if more of these rollouts have scores outside the environment's bounds. More lets right answers go
    unrewarded for longer."""
    stranger_share: float = 0.125
    """While some workers have accepted work, all others together hold at most this share of the blocks in flight, but
    always one. More lets fresh keys hold up more of a run; less makes newcomers wait longer."""

    def audit_rate(self, valid_blocks: int, steady: float) -> float:
        """Share of a worker's groups that is audited; `steady` is the run's own rate."""
        if valid_blocks < self.probation_blocks:  # guard: probation
            return 1.0
        return max(steady, min(1.0, self.trust / valid_blocks))  # guard: audits-reach-the-runs-rate

    def quarantine_s(self, failures: int, first_s: float) -> float:
        """Length of a worker's quarantine at its n-th failure; `first_s` is that of the first."""
        # guard: quarantine-grows, quarantine-ends
        return min(self.max_quarantine_s, first_s * 2.0 ** min(failures - 1, 20))

    def lapse_wait_s(self, lapses: int, first_s: float) -> float:
        """How long a worker waits after this many lapses in a row. The first is free, the second costs `first_s`."""
        # guard: lapse-wait-ends, first-lapse-makes-no-wait
        return min(self.max_lapse_wait_s, first_s * 2.0 ** min(lapses - 2, 20)) if lapses > 1 else 0.0

    def recheck_chance(self, confirmed: int) -> float:
        """Share of a validator's first verdicts that a second one judges again; so far `confirmed` were confirmed."""
        return max(self.recheck_rate, min(1.0, self.recheck_trust / (confirmed + 1)))  # guard: new-judge-is-rechecked


LAW = Law()
"""The law of new runs."""


def law_difference(law: Law) -> str:
    """Where a law is not the project's; empty if nowhere."""
    ours, theirs = (msgspec.structs.asdict(known) for known in (LAW, law))
    differs = [f"{name} = {theirs[name]}, not {ours[name]}" for name in ours if theirs[name] != ours[name]]
    if not differs:
        return ""
    return f"the law differs from the project's in {'; '.join(differs)}: the host chose constants of its own"

"""A log checked: hashes, decisions, balances, links, receipts. Nothing is trusted but the bytes.

Each finding is a sentence. An empty list means that the log holds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from shoal.errors import StateError
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.constants import law_difference
from shoal.ledger.draw_table_changes import PoolsChanged
from shoal.ledger.errors import FAULTS
from shoal.ledger.event import GENESIS, Entry, read_stored
from shoal.ledger.event_types import apply
from shoal.ledger.log.redecide import HostCheck, redecide
from shoal.ledger.log.writer import UnknownRules, broken_after, checked_entry, follows
from shoal.ledger.pay import Credit
from shoal.ledger.run_decisions import what_was_done
from shoal.ledger.run_events import RulesChanged
from shoal.ledger.state import State, state_hash
from shoal.ledger.submissions import SubmissionReceived
from shoal.ledger.verdicts import Decision
from shoal.ledger.versions import LinkRevealed
from shoal.protocol.constants import CHAIN_LENGTH
from shoal.protocol.encoding import WireError
from shoal.protocol.messages import Receipt
from shoal.protocol.seed_chain import AUDIT_CHAIN, SLOT_CHAIN, link_follows


class Audit:
    """What one pass over a log saw."""

    def __init__(self) -> None:
        self.state = State()
        self.entries: list[Entry] = []
        self.findings: list[str] = []
        self.later = 0
        """Receipts that are too new for the log that was read."""
        self.not_checked = ""
        """Why the events could not be checked, if they could not; a log is verified only if this is empty."""
        self.received: Counter[str] = Counter()
        self.decided: Counter[str] = Counter()
        self.paid: Counter[tuple[int, int]] = Counter()
        self.accepted: Counter[tuple[int, int]] = Counter()
        self.batches: list[BatchFormed] = []
        self.tokens = 0
        self.links: dict[int, LinkRevealed] = {}
        self.pool_links: dict[int, str] = {}
        """Links by which the groups of retired versions were counted."""
        self.host = HostCheck()

    def see(self, entry: Entry) -> None:
        """Book one entry and count what must balance at the end. Raises `StateError` if it cannot be booked."""
        match entry.body:
            case SubmissionReceived(digest=digest):
                self.received[digest] += 1
            case Decision(submission=digest):
                self.decided[digest] += 1
            case GroupAccepted(version=version, slot=slot):
                self.accepted[version, slot] += 1
            case Credit(version=version, slot=slot, tokens=tokens):
                self.paid[version, slot] += 1
                self.tokens += tokens
            case BatchFormed():
                self.batches.append(entry.body)
            case LinkRevealed(version=version):
                self.links[version] = entry.body
            case PoolsChanged(version=version, link=link):
                self.pool_links[version - self.state.rules.max_staleness - 1] = link
            case _:
                pass
        try:
            self.host.see(self.state, entry)
            apply(self.state, entry)
        except FAULTS as fault:
            raise StateError(
                f"the log is broken at event {entry.seq}: {entry.kind} speaks of something that the log "
                f"does not hold ({type(fault).__name__}). No coordinator wrote this; ask for the log elsewhere"
            ) from None
        self.entries.append(entry)


def verify(rows: Iterable[tuple[bytes, str]], receipts: Iterable[Receipt] = (), now: float | None = None) -> Audit:
    """Replay stored rows and check them, that every event follows from the rules, and that every receipt given is in
    the log once. `now` is the reader's time, if it has a clock.

    Of a log whose rules this code lacks, only the chain of hashes is checked, and `not_checked` says so. Raises
    `StateError` if that chain breaks: nothing after it can be trusted.
    """
    audit = read(rows)
    if not audit.not_checked:
        conclude(audit, now)
        audit.findings += receipt_findings(audit, receipts)
    return audit


def read(rows: Iterable[tuple[bytes, str]]) -> Audit:
    """The first half of `verify`: replay the rows. `extend` takes more of them, and `conclude` checks them all."""
    audit, left = Audit(), iter(rows)
    for data, stored_hash in left:
        try:
            entry = checked_entry(audit.state, data, stored_hash)
        except UnknownRules as unknown:
            audit.not_checked = str(unknown)
            _check_hashes(chain([(data, stored_hash)], left))
            return audit
        audit.see(entry)
    _check_links(audit, {})
    return audit


def extend(audit: Audit, rows: Iterable[tuple[bytes, str]]) -> list[Entry]:
    """Book the rows that follow what was read, before `conclude`. Returns their entries; raises as `verify`."""
    first, checked = len(audit.entries), dict(audit.links)
    for data, stored_hash in rows:
        audit.see(checked_entry(audit.state, data, stored_hash))
    _check_links(audit, checked)
    return audit.entries[first:]


def conclude(audit: Audit, now: float | None = None) -> None:
    """The second half of `verify`: check what balances at the end, and that every event follows from the rules."""
    say = audit.findings.append
    own_law = law_difference(audit.state.law)
    if own_law:  # guard: projects-law
        say(own_law)
    for digest, count in audit.received.items():
        if count != 1:  # guard: received-once
            say(f"submission {digest[:12]} is in the log {count} times")
        if audit.decided[digest] > 1:  # guard: decided-once
            say(f"submission {digest[:12]} was decided {audit.decided[digest]} times")
    for digest in audit.decided.keys() - audit.received.keys():
        say(f"submission {digest[:12]} was decided but never received")
    for place in audit.paid.keys() | audit.accepted.keys():
        if audit.paid[place] != 1 or audit.accepted[place] != 1:  # guard: paid-once
            say(f"group of version {place[0]} slot {place[1]}: accepted {audit.accepted[place]} times, "
                f"paid {audit.paid[place]} times")  # fmt: skip
    _check_uses(audit)
    balances = sum(node.credits for node in audit.state.members.values())
    burned = audit.state.burned
    if not balances + burned == audit.state.issued == audit.tokens:  # guard: books-balance
        say(f"balances sum to {balances} and {burned} are burned, issued are {audit.state.issued}, credit events sum "
            f"to {audit.tokens}")  # fmt: skip
    for node in audit.state.members.values():
        # guard: no-debts
        if min(node.credits, node.vested, *node.stake) < 0 or node.credits != node.vested + sum(node.stake):
            say(f"node {node.key[:12]} has {node.credits} credits, but {node.vested} vested and {sum(node.stake)} not")
    audit.findings += audit.host.findings(audit.state, now)
    _check_pool_links(audit)
    _check_task_lists(audit)
    links = {version: (revealed.link, revealed.audit_link) for version, revealed in audit.links.items()}
    audit.findings += redecide(audit.entries, links)  # guard: decided-by-the-rules


def _check_uses(audit: Audit) -> None:
    """At most one batch used each group, before it was too old. `redecide` makes every batch again by the code that formed
    it; this counts on its own."""
    most, used = audit.state.rules.max_staleness, Counter[tuple[int, int]]()
    for batch in audit.batches:
        used.update(batch.groups)
        for version, slot in batch.groups:
            age = batch.step - version
            if age > most:  # guard: used-in-time
                what = f"the batch of step {batch.step} used version {version} slot {slot}"
                audit.findings.append(f"{what}, which is {age} versions old, limit {most}")
    for place, count in used.items():
        accepted = audit.accepted[place]
        if count != 1 or not accepted:  # guard: used-once
            what = f"group of version {place[0]} slot {place[1]}"
            audit.findings.append(f"{what}: used {count} times, accepted {accepted} times")


def _check_hashes(rows: Iterable[tuple[bytes, str]]) -> None:
    seq, head = -1, GENESIS
    for data, stored_hash in rows:
        try:
            stored = read_stored(data)
        except WireError as error:
            raise broken_after(seq, error) from None
        follows(stored, stored_hash, seq, head)
        seq, head = stored.seq, stored.hash


def _check_links(audit: Audit, checked: Mapping[int, LinkRevealed]) -> None:
    """Revealed links must lead back to the ends published when the run was created: only then are they used. Those in
    `checked` did."""
    ends = audit.state.chain_end, audit.state.audit_chain_end
    for version, revealed in sorted(audit.links.items()):
        if revealed is checked.get(version):
            continue
        links = revealed.link, revealed.audit_link
        chains = zip((SLOT_CHAIN, AUDIT_CHAIN), links, ends, strict=True)
        known = version < CHAIN_LENGTH  # a link that is said to be further away would take for ever
        # guard: link-leads-back, link-of-the-chain
        if not (known and all(_leads_back(purpose, link, end, version + 1) for purpose, link, end in chains)):
            audit.findings.append(f"the link revealed for version {version} does not lead to the published end")
            del audit.links[version]


def _check_pool_links(audit: Audit) -> None:
    for version, link in audit.pool_links.items():
        known = 0 <= version < CHAIN_LENGTH
        if not (
            known and _leads_back(SLOT_CHAIN, link, audit.state.chain_end, version + 1)
        ):  # guard: link-of-the-count
            audit.findings.append(
                f"groups of version {version} were counted by a link that does not lead to the published end: the draws "
                "after that follow from tasks that were not drawn"
            )


def _check_task_lists(audit: Audit) -> None:
    """Lists that are drawn from must be of the run's own environments, and those that its run file names."""
    state = audit.state
    lists, specs = state.task_lists or {}, {env.label: env for env in state.envs}
    told = state.config.get("envs")
    envs = [env for env in told if isinstance(env, dict)] if isinstance(told, list) else []  # a host may write anything
    named = {str(env.get("label")): str(env.get("tasks", "")) for env in envs}
    for label in sorted(lists.keys() | {label for label, asked in named.items() if asked}):
        spec, found = specs.get(label), lists.get(label)
        if spec is None or found is None:
            flaw = "the run file names one, and the event has none" if found is None else "there is no such environment"
        else:
            flaw = found.flaw(spec.digest, spec.args, spec.num_tasks)
            if not flaw and named.get(label) != found.digest:
                flaw = (
                    f"its digest is {found.digest[:12]}, and the run file names {named.get(label, '')[:12] or 'none'}"
                )
        if flaw:  # guard: drawn-from-the-named-list
            audit.findings.append(f"the task list of environment {label[:60]!a} in the first event: {flaw}")


def _leads_back(purpose: str, link: str, end: str, steps: int) -> bool:
    try:
        return link_follows(purpose, bytes.fromhex(link), bytes.fromhex(end), steps)
    except ValueError:  # not hex
        return False


def receipt_findings(audit: Audit, receipts: Iterable[Receipt], whose: str = "") -> list[str]:
    """A sentence for each receipt of this run that the log does not honour.

    Their signatures have been verified: each is the run key's word for a submission at a place under a head. Where
    the log holds another head at that place, two histories were signed: the receipt and this log are the evidence.
    """
    findings = []
    for receipt in (receipt for receipt in receipts if receipt.run == audit.state.run):
        submission = audit.state.submissions.get(receipt.digest)
        what = f"the receipt of submission {receipt.digest[:12]}" + (f" in {whose}" if whose else "")
        # guard: receipt-is-in-the-log, receipt-head
        if submission is not None and (submission.seq, submission.head) == (receipt.seq, receipt.head):
            if submission.time != receipt.time:  # guard: receipt-time
                findings.append(
                    f"{what} is signed for the time {receipt.time}, but event {submission.seq} of the log has "
                    f"{submission.time}"
                )
            continue
        if submission is None:
            finding = f"lost: {what} is signed, but the submission is not in the log"
        else:
            finding = f"fork: {what} names another place or head than event {submission.seq} of the log"
        if 0 <= receipt.seq < len(audit.entries) and audit.entries[receipt.seq].hash != receipt.head:
            finding += (
                f"; a fork: the run key signed head {receipt.head[:12]} at event {receipt.seq}, where this log has "
                f"{audit.entries[receipt.seq].hash[:12]}"
            )
        findings.append(finding)
    return findings


TOLD_ALARMS = 10


def report(audit: Audit) -> str:
    """One paragraph for a person."""
    if audit.not_checked:
        return unchecked(audit.not_checked)
    state = audit.state
    lines = [
        f"run {state.name} ({state.run[:12]}): {state.seq + 1} events, {len(audit.received)} submissions, "
        f"{sum(audit.accepted.values())} groups accepted, {len(state.main.batches)} batches, version {state.main.version}",
        f"credits issued: {state.issued} tokens; state hash {state_hash(state)[:16]}; head {state.head[:16]}",
        *_alarms_in_words(audit.entries),
    ]
    lines += [f"FINDING: {finding}" for finding in audit.findings]
    if audit.later:
        lines.append(f"{audit.later} receipts are newer than the log that was read: ask again in ten minutes")
    unread = f", as far as it was read: {audit.later} receipts are newer" if audit.later else ""
    held = f"the log holds: nothing lost, nothing paid or used twice{unread}"
    lines.append("the log does NOT hold" if audit.findings else held)
    return "\n".join(lines)


def _alarms_in_words(entries: Iterable[Entry]) -> list[str]:
    """What the host did for its alarms: the newest few, because a log may hold many."""
    acted = [
        (entry.seq, entry.body) for entry in entries if isinstance(entry.body, RulesChanged) and entry.body.evidence
    ]
    more = [f"the host acted on {len(acted)} alarms; the last {TOLD_ALARMS} are told"] * (len(acted) > TOLD_ALARMS)
    return more + [f"event {seq}: {what_was_done(change)}" for seq, change in acted[-TOLD_ALARMS:]]


def unchecked(why: str) -> str:
    """The same for a log whose rules this code lacks."""
    return f"NOT CHECKED: {why}.\nIts events follow each other by number and hash; nothing else was checked"

"""The auditor's second job: recompute groups from public data, and report where the log differs.

From the log and the revealed links it rebuilds what each worker was asked for. It judges the bodies that are still kept
with the validator's own checks, and audits every group whose weights are still kept. It compares the results with the
verdicts in the log. It trusts no seed, verdict or reward of the log. With evidence that nodes kept, it judges their
submissions even if the host deleted them.
"""

import asyncio
import random
import re
import secrets
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shoal.engine.interface import Engine
from shoal.engine.open import EngineSpec
from shoal.env import Env
from shoal.envs.load import files_needed, load_run_envs
from shoal.errors import ConfigError, NothingYet, Overreach, PeerError, StateError
from shoal.ledger.log.check import Audit, conclude, extend
from shoal.ledger.log.writer import replay
from shoal.models.device import CPU, demand_device
from shoal.protocol import messages as t
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.encoding import WireError, digest, from_msgpack
from shoal.protocol.messages.run import kind_of
from shoal.protocol.seed_chain import sample_seed
from shoal.roles.auditor.context import AuditContext
from shoal.roles.auditor.evidence import EvidenceSet, WithEvidence, accusations, leased, read_evidence
from shoal.roles.auditor.verify_log import read_log
from shoal.runs.log_source import PublicRun, Unavailable, open_run
from shoal.runs.retention_rule import Expiry
from shoal.terminal import printable, say
from shoal.verification.branch_parents import OtherParents, fetch_parents, read_parents
from shoal.verification.verdict_diff import differences
from shoal.verification.verify import STOPPED, verify_submission

AGREE, DISAGREE, CANNOT, PARTLY, UNAVAILABLE = 0, 1, 2, 3, 4
"""Exit codes of `shoal audit`."""


GONE = "the weights of their versions are gone (storage.retain)"


IN_VAIN = 5
"""A sample is given up when so many draws, one after another, gave nothing that was still there."""


class GroupChoice(NamedTuple):
    """Which groups to recompute: one by its name, a sample, those of evidence, or all if nothing is given."""

    rollout: str = ""
    """VERSION/SLOT or VERSION/SLOT/INDEX."""
    sample: int = 0
    seed: int | None = None
    """Seed of the sample; None draws one, so that nobody can predict the sample."""
    evidence: tuple[Path, ...] = ()
    """Folders of evidence that nodes kept."""


class JudgedGroup(NamedTuple):
    """A group that was judged: one slot of one submission."""

    version: int
    slot: int
    submission: str


@dataclass
class Findings:
    """What an audit of rollouts found, and how much it covered."""

    disagreements: list[str] = field(default_factory=list)
    groups: int = 0
    rollouts: int = 0
    with_model: int = 0
    """Groups whose tokens and log-probs were recomputed, too."""
    tokens: int = 0
    """Policy tokens of the groups in `with_model`."""
    largest_gap: float = 0.0
    """Largest gap of one of these tokens, nats."""
    overruled: int = 0
    """Verdicts on groups that the log did not follow, so they are not compared: outvoted, or the block is disputed."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Numbers of groups by the reason why they, or a part of them, could not be recomputed."""
    expired: Counter[str] = field(default_factory=Counter)
    """The same of what the run deleted by its own rule. Nobody can check it any more, and nothing follows from that."""
    unavailable: int = 0
    """The part of `left_out` that the run does not serve."""
    undrawn: str = ""
    """What a sample was not drawn from, because the run does not serve it."""
    told: list[str] = field(default_factory=list)
    """Lines about the choice: the facts of the named group, the seed of the sample, or what the evidence holds."""
    signed: int = 0
    """Manifests, leases and receipts of the evidence that were compared with the log."""
    unclear: int = 0
    """Pieces of evidence that prove nothing, or were compared in part only."""

    @property
    def agrees(self) -> bool:
        """Whether all that was chosen was recomputed, and nothing in the log differs."""
        return self.exit_code() == AGREE and not self.expired and not self.undrawn

    def __str__(self) -> str:
        """What `shoal audit` prints."""
        return printable("\n".join(summary(self)), keep="\n")

    def exit_code(self) -> int:
        """1 if something disagrees, 4 if nothing that was chosen is served, 2 if nothing could be recomputed or compared
        for another reason, 3 if something was left out, else 0."""
        if self.disagreements:
            return DISAGREE
        if not (self.groups or self.signed):
            return CANNOT if self.unclear or self.left_out.total() > self.unavailable else UNAVAILABLE
        return PARTLY if self.left_out or self.unclear else AGREE  # guard: partly-is-not-agreed


def audit(
    source: str, choice: GroupChoice, threads: int, own_files: bool, max_memory_mb: int = 0, device: str = CPU
) -> int:
    """Audit rollouts of a run, print what was found, and return the exit code; raises as `examine`."""
    findings = asyncio.run(examine(source, choice, threads, own_files, max_memory_mb, device))
    say("\n".join(summary(findings)))
    return findings.exit_code()


async def examine(
    source: str, choice: GroupChoice, threads: int, own_files: bool, max_memory_mb: int = 0, device: str = CPU
) -> Findings:
    """Audit rollouts of the run in a folder or at a URL.

    `own_files` allows environments that are files: they are the host's code. `max_memory_mb` limits the log of a
    URL and the work with the model; 0 is half of what is free. Raises `ConfigError` if the chosen rollout is not in the
    log or the device is not there, `StateError` if the log's chain is broken, `Overreach` if log or policy do not fit,
    `PeerError` if the coordinator does not answer.
    """
    demand_device(device)
    async with open_run(source, max_memory_mb) as run:
        return await audit_rollouts(run, choice, threads, own_files, max_memory_mb, device)


def summary(found: Findings) -> list[str]:
    """The findings, the numbers and the result, as lines."""
    lines = [*found.told, *(f"DISAGREES: {line}" for line in found.disagreements)]
    lines.append(
        f"recomputed: {found.groups} groups, {found.rollouts} rollouts: seed, task, prompt, environment, reward, "
        "ending, verdict"
    )
    lines.append(
        f"with the model: {found.with_model} groups, {found.tokens} tokens and their log-probs; "
        f"largest gap {found.largest_gap:.2g} nats"
    )
    if found.overruled:
        lines.append(f"not compared: {found.overruled} verdicts on groups, because they were outvoted or disputed")
    lines += [found.undrawn] if found.undrawn else []
    lines += [f"not checked: {count} groups {reason}" for reason, count in sorted(found.expired.items())]
    lines += [f"left out: {count} groups: {reason}" for reason, count in sorted(found.left_out.items())]
    part = ". This says nothing of what was not checked" if found.expired or found.undrawn else ""
    results = {
        AGREE: f"the log agrees with what was recomputed{part}",
        DISAGREE: "the log does NOT agree with what was recomputed",
        CANNOT: "nothing could be recomputed",
        UNAVAILABLE: (
            "nothing was available: the run does not serve what you chose, or not yet"
            if found.left_out or found.expired or found.undrawn
            else "there is nothing yet: no rollout that you chose is judged"
        ),
        PARTLY: "the log agrees with what was recomputed, but NOT all that you chose could be: see what is left out",
    }
    return [*lines, results[found.exit_code()]]


async def audit_rollouts(
    run: PublicRun, choice: GroupChoice, threads: int, own_files: bool, max_memory_mb: int = 0, device: str = CPU
) -> Findings:
    """Recompute the chosen groups and compare them with the log; raises as `examine`."""
    # The log is read after the evidence, which must not be newer. Its first event names the run's keys.
    pile = read_evidence(choice.evidence, replay(await run.rows(1))) if choice.evidence else EvidenceSet()
    log, found = await read_log(run), Findings()
    if choice.evidence:
        found.disagreements += [f"evidence: {line}" for line in await accusations(pile, log, run)]
        found.told += pile.contents()
        found.signed, found.unclear = pile.num_signed, pile.notes.total()
        run = WithEvidence(run, pile)
    if choice.sample:
        choice = choice._replace(seed=secrets.randbits(32) if choice.seed is None else choice.seed)
        found.told.append(f"sample drawn with --seed {choice.seed}")
    only = pile.bodies if choice.evidence else None
    expiry = None if choice.rollout else run.expiry(log.state)
    places = [] if choice.sample else choose(log, choice, only, expiry, found)
    envs = load_envs(log.state.envs, own_files)
    with tempfile.TemporaryDirectory(prefix="shoal-audit-") as home:
        spec = EngineSpec(threads=threads, device=device)
        context = AuditContext(run, log, envs, spec, Path(home), max_memory_mb)
        if choice.sample:
            await _audit_sample(context, choice, only, found)
        else:
            await _audit_places(context, places, choice, found, expiry)
    conclude(log, time.time())
    found.disagreements = [*(f"the log: {finding}" for finding in log.findings), *found.disagreements]
    return found


async def _audit_sample(
    context: AuditContext, choice: GroupChoice, only: Collection[str] | None, found: Findings
) -> None:
    """Draw groups and recompute them. A live run deletes while this reads, so what expired meanwhile is drawn again from
    what is there now; whether it may be gone is asked of the log as it is after it was missed."""
    run, rng = context.run, random.Random(choice.seed)
    taken, missed, expired, in_vain = set[JudgedGroup](), list[JudgedGroup](), 0, 0
    while True:
        oldest = await run.oldest_served(context.state)
        context.take_verdicts(extend(context.log, await run.newer(context.state.seq)))  # guard: owed-when-it-was-missed
        expiry, drawn = run.expiry(context.state), Findings()
        pool = choose(context.log, choice, only, expiry, drawn, oldest)
        here = set(pool)
        kept = [place for place in missed if place in here]
        await _audit_places(context, kept, choice, found, expiry)  # guard: what-is-kept-is-not-drawn-again
        expired += len(missed) - len(kept)
        taken.update(kept)
        pool = [place for place in pool if place not in taken]
        places = sorted(rng.sample(pool, min(choice.sample - len(taken), len(pool)))) if in_vain < IN_VAIN else []
        if not places:
            break
        missed = await _audit_places(context, places, choice, found, expiry, again=True)
        taken.update(place for place in places if place not in missed)
        in_vain = in_vain + 1 if len(missed) == len(places) else 0
    if in_vain == IN_VAIN:
        found.left_out[
            f"drawn {IN_VAIN} times, and each time the run deleted them before they were read. Audit the run's folder, or "
            "let its host keep more (storage.window_steps)"
        ] += choice.sample - len(taken)
        found.unavailable += choice.sample - len(taken)
    found.expired += drawn.expired
    found.left_out += drawn.left_out
    found.unavailable += drawn.unavailable
    lines = [drawn.undrawn] if drawn.undrawn else []
    if expired:
        lines.append(
            f"expired before they were read: {expired} groups that were drawn; others were drawn in their place"
        )
    found.undrawn = "; ".join(lines)


async def _audit_places(
    context: AuditContext,
    places: Iterable[JudgedGroup],
    choice: GroupChoice,
    found: Findings,
    expiry: Expiry | None,
    again: bool = False,
) -> list[JudgedGroup]:
    """Recompute groups, the oldest first. If they may be drawn `again`, those that the run does not have now are not
    counted, but returned."""
    slots: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place in places:
        slots[place.version][place.submission].append(place.slot)
    missed = list[JudgedGroup]()
    for version in sorted(slots):
        names = await _audit_version(context, version, slots[version], choice, found, expiry, again)
        missed += [JudgedGroup(version, slot, name) for name in names for slot in slots[version][name]]
    return missed


def choose(
    log: Audit,
    choice: GroupChoice,
    only: Collection[str] | None,
    expiry: Expiry | None,
    found: Findings,
    oldest: int = 0,
) -> list[JudgedGroup]:
    """The groups to recompute, of the submissions in `only` if that is given, and of those whose bodies the run has not
    deleted by its own rule; `found` is told of the others. For a sample, all that it is drawn from: of versions since the
    `oldest` whose seeds are public. Raises `ConfigError` if the choice names a group that nobody judged."""
    judged = [
        JudgedGroup(lease.version, slot, submission.digest)
        for submission in log.state.submissions.values()
        if submission.decided and (only is None or submission.digest in only)
        for lease in [log.state.leases[submission.lease]]
        for slot in log.state.slots_of(lease)
    ]
    if choice.rollout:
        version, slot, _ = read_id(choice.rollout)
        named = [place for place in judged if (place.version, place.slot) == (version, slot)]
        if not named:
            raise ConfigError(
                f"no judged submission of this log fills slot {slot} of version {version}: `shoal ledger show RUN "
                "--kind group_accepted` lists version and slot of each group that was accepted"
            )
        return named
    if expiry is not None:
        gone = {place for place in judged if place.submission in expiry.bodies}
        if gone:
            oldest, newest = min(place.version for place in gone), max(place.version for place in gone)
            versions = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
            reason = f"of {versions}: their submissions are deleted. {expiry.words}"
            found.expired[reason] += len(gone)
        judged = [place for place in judged if place not in gone]
    if choice.sample:
        served = [place for place in judged if place.version >= oldest]
        here = [place for place in served if place.version in log.links]
        kept_from = log.state.main.version - log.state.rules.max_staleness - 1  # as `BlobRetention.forget_old`
        owed = sum(kept_from <= place.version < oldest for place in judged)
        if owed:  # guard: fresh-weights-are-served
            found.left_out[
                f"weights of versions before {oldest} are not served, but those from {kept_from} on are kept by every run "
                "whose disk quota is not used up (rollouts.max_staleness)"
            ] += owed
            found.unavailable += owed
        reasons = [
            (
                len(judged) - len(served) - owed,
                f"the run does not serve the weights of versions before {oldest} any more",
            ),
            (len(served) - len(here), "their seeds are not public yet"),
        ]
        found.undrawn = "; ".join(
            f"not drawn from: {count} of {len(judged)} groups, because {why}" for count, why in reasons if count
        )
        judged = here
    return judged


def read_id(text: str) -> tuple[int, int, int | None]:
    """Version, slot and index (None for the whole group) of a rollout's name. Raises `ConfigError`."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,12})(?:/(\d{1,9}))?", text, re.ASCII)
    if not found:
        raise ConfigError(f"{text!r} names no rollout: write VERSION/SLOT/INDEX, such as 3/17/0, or VERSION/SLOT")
    version, slot, index = found.groups()
    return int(version), int(slot), None if index is None else int(index)


def load_envs(specs: Sequence[t.EnvSpec], own_files: bool) -> dict[str, Env]:
    """The environments that an audit replays. Raises `ConfigError` for the host's files, unless `own_files`."""
    if kind_of(specs) == COMPLETIONS:
        return {}  # the host played them, and recorded what it played
    needed = files_needed(specs)
    if needed and not own_files:
        raise ConfigError(
            f"environment {needed[0]} is a file of the host's: read it, then run it here with --own-files, or with "
            "own_files=True in shoal.audit"
        )
    return load_run_envs(specs, own_files)


async def _audit_version(
    context: AuditContext, version: int, slots_by_submission: Mapping[str, list[int]], choice: GroupChoice, found: Findings,
    expiry: Expiry | None, again: bool,
) -> list[str]:  # fmt: skip
    """Recompute groups of one version. Returns the submissions that are not here now, if they may be drawn `again`."""
    groups = sum(map(len, slots_by_submission.values()))
    revealed = context.log.links.get(version)
    if revealed is None:
        found.left_out[f"the link of version {version} is not revealed, so its seeds are not known"] += groups
        found.unavailable += groups
        return []
    engine: Engine | None = None
    try:
        engine = await context.take_weights(version)
    except Unavailable as why:
        if why.gone and expiry is not None and version < expiry.weights_before:
            found.expired[f"in their tokens and log-probs: their versions' weights are deleted. {expiry.words}"] += (
                groups
            )
        elif again and why.gone:
            return list(slots_by_submission)
        else:
            found.left_out[f"tokens and log-probs: {GONE if why.gone else why}"] += groups
            found.unavailable += groups if why.gone else 0
    except Overreach:
        raise  # the fault is this machine's, not the log's
    except (PeerError, StateError) as error:
        found.disagreements.append(f"version {version}: {error}")
    try:
        await context.take_renderer()
    except (PeerError, StateError) as error:
        found.left_out[f"the tokenizer cannot be fetched: {error}"] += groups
        found.unavailable += groups if isinstance(error, Unavailable) and error.gone else 0
        return []
    missed = list[str]()
    for name, slots in slots_by_submission.items():
        booked = context.state.submissions[name]
        try:
            body = await context.run.blob(name)
            record = await context.run.blob(booked.record) if booked.record else b""
            lease = leased(context.state, context.state.leases[booked.lease], bytes.fromhex(revealed.link))
            parents = await _parents(context, lease)
        except NothingYet:
            if again:
                missed.append(name)
                continue
            found.left_out["the bodies of their submissions are gone (storage.retain), or not public yet"] += len(slots)
            found.unavailable += len(slots)
            continue
        except PeerError as error:
            found.left_out[f"the body of submission {name[:12]} cannot be fetched: {error}"] += len(slots)
            continue
        except StateError as error:
            found.disagreements.append(f"version {version}, submission {name[:12]}: {error}")
            continue
        check = t.Check(name, lease, tuple(slots) if engine else (), 0.0)
        context.scores = []
        verdict = await asyncio.to_thread(verify_submission, body, check, context.tools(engine), record, parents)
        _compare(context, check, body, verdict, slots, found)
        if choice.rollout:
            found.told += _tell(context, check, verdict, choice)
    return missed


async def _parents(context: AuditContext, lease: t.Lease) -> dict[str, t.Group | None]:
    """What a lease continues. Raises `StateError` if the bodies hold other groups than the log says; else as
    `PublicRun.blob`."""
    rules = context.state.rules
    try:
        return read_parents(await fetch_parents(lease, rules, context.run.blob), rules, lease, context.vocabulary)
    except OtherParents as error:
        raise StateError(str(error)) from None  # guard: other-parents-are-told


def _compare(
    context: AuditContext, check: t.Check, body: bytes, verdict: t.Verdict, slots: Sequence[int], found: Findings
) -> None:
    """Count what was recomputed of a submission, and note where the log differs."""
    version, state = check.lease.version, context.state
    submission = state.submissions[check.id]
    if _group_digests(body) not in (submission.groups, ()):
        found.disagreements.append(f"version {version}, submission {check.id[:12]}: the log names other groups")
    for ours in verdict.groups:
        if ours.slot not in slots:
            continue
        if ours.detail == STOPPED:
            found.left_out["the sandbox stopped their environment here"] += 1
            continue
        found.groups += 1
        found.rollouts += len(ours.rewards) or state.rules.group_size
        found.with_model += ours.audited
        found.tokens += ours.tokens if ours.audited else 0
        for given in context.verdicts[check.id]:
            if context.is_overruled(given, ours.slot):
                found.overruled += 1
                continue
            for booked in given.groups:
                if booked.slot == ours.slot:
                    found.disagreements += [
                        f"{version}/{ours.slot}, submission {check.id[:12]}, validator {given.validator[:12]}: {said}"
                        for said in differences(booked, ours, with_model=bool(check.audited))
                    ]
    gaps = [float(score.gaps_P.max()) for score in context.scores if score.gaps_P.size]
    if not any(group.outcome == "hard" for group in verdict.groups):
        found.largest_gap = max([found.largest_gap, *gaps])


def _group_digests(body: bytes) -> tuple[str, ...]:
    try:
        return tuple(digest(group) for group in from_msgpack(body, t.Submission).groups)
    except WireError:
        return ()


def _tell(context: AuditContext, check: t.Check, verdict: t.Verdict, choice: GroupChoice) -> list[str]:
    """The facts of the chosen group or rollout: as recomputed, and as the log has them."""
    version, number, index = read_id(choice.rollout)
    state, lease = context.state, check.lease
    slot = next(slot for block in lease.blocks for slot in block.slots if slot.slot == number)
    ours = next(group for group in verdict.groups if group.slot == number)
    final = state.main.versions[version].slots.get(number)
    taken = final is not None and final.submission == check.id
    lines = [
        f"submission {check.id[:12]} of {lease.worker[:12]}, lease {lease.id}",
        f"  seed {slot.seed[:16]}: environment {slot.env}, task {slot.task}",
        f"  recomputed: {ours.outcome}{f' by {ours.check}' if ours.check else ''}, {ours.tokens} policy tokens, "
        f"rewards {', '.join(f'{reward:g}' for reward in ours.rewards) or 'none'}",
    ]
    if index is not None and index < len(ours.rewards):
        seed = f"sample seed {sample_seed(bytes.fromhex(slot.seed), index).hex()[:16]}, " if not slot.parent else ""
        lines.append(f"  rollout {index}: {seed}reward {ours.rewards[index]:g}")
    for given in context.verdicts[check.id]:
        booked = next((group for group in given.groups if group.slot == number), None)
        if booked:
            how = "audited" if booked.audited else "not audited"
            lines.append(f"  the log: {booked.outcome} by validator {given.validator[:12]}, {how}")
    if taken and final is not None:
        lines.append(f"  paid; {f'batch of step {final.step}' if final.step >= 0 else 'no batch'}")
    return lines

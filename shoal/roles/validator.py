"""The validator: takes submissions one by one, recomputes what they claim, and sends a verdict on each.

The checks are in `verification/`. This role gives them the environments, the policy version and, for audited groups, one
prefill.
"""

import asyncio
import contextlib
import logging
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from shoal.engine.interface import Engine
from shoal.engine.open import EngineSpec, open_engine
from shoal.envs.isolated.pool import Processes
from shoal.envs.replay import ReplayResult, replay_group
from shoal.errors import Interrupted, NothingYet, Overreach, PeerError
from shoal.models.device import CPU, demand_device
from shoal.net.client import Client
from shoal.net.key_files import load_or_make_key
from shoal.net.server_process import Stopping
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.constants import MAX_SUBMISSION_BYTES
from shoal.protocol.noise import PHILOX
from shoal.protocol.tolerances import LOCAL
from shoal.roles.node.activity import NodeActivity
from shoal.roles.node.device_queue import ExclusiveDevice, Shift, load_on_shift, shift_of
from shoal.roles.node.lease_client import demand_sound
from shoal.roles.node.packages import Packages
from shoal.roles.node.reward_parts import ScoreFile, Tally
from shoal.roles.node.session import (
    GOODBYE_S,
    SOONEST_S,
    Session,
    exit_after_timeout,
    say_goodbye,
    take_seat,
    unless_gone,
)
from shoal.roles.node.share_weights import WeightSharing, sharing
from shoal.run_folder import RunFolder
from shoal.verification.branch_parents import fetch_parents, read_parents
from shoal.verification.context import ReplayedRollout, Tools
from shoal.verification.verify import verify_submission
from shoal.weights.engine_loader import loaded_in_time
from shoal.weights.memory_limit import enforced, limit_of, memory_mb

log = logging.getLogger("validator")


def main(
    url: str,
    home: Path,
    threads: int,
    key_file: Path | None = None,
    own_files: bool = False,
    max_disk_mb: int = 0,
    max_memory_mb: int = 0,
    packages: Packages | None = None,
    share_port: int | None = None,
    share_url: str = "",
    device: str = CPU,
    shifts: Path | None = None,
    doing: NodeActivity | None = None,
    name: str = "",
) -> None:
    """Judge submissions of the run at `url` until it has ended and all are judged, or until told to stop.

    `shifts` is the folder in which the processes queue that share the device, if any do; `doing` is filled with what it
    does. It waits until the host has admitted its key, and says what the host must type. `name` is by default this
    machine's. Raises `ConfigError` if the device is not there.
    """
    demand_device(device)
    shift = shift_of(shifts, home.name)
    key = load_or_make_key(key_file or home / "node.key")

    def make_engine(dtype: str, kind: str = LOCAL, noise: str = PHILOX) -> Engine:
        engine = open_engine(EngineSpec(kind, dtype, threads, device, noise))
        shift.keeps(engine)
        return engine

    limit_mb = 0 if own_files else limit_of(max_memory_mb)
    make = make_engine if own_files else enforced(make_engine, limit_mb, threads)
    validator = Validator(
        Client(url, key), home, make, own_files,
        max_disk_mb=max_disk_mb, max_memory_mb=limit_mb, packages=packages,
        name="" if own_files else name or platform.node(),
    )  # fmt: skip
    validator.shift = shift
    if doing is not None:
        doing.stopping, validator.doing = validator.doing.stopping, doing
    validator.doing.key, validator.doing.answered_at = key.public, lambda: validator.client.answered_at
    log.info("validating url=%s key=%s", url, key.public)
    validator.share = None if share_port is None else WeightSharing(key, share_port, url=share_url)
    validator.leave_at_once = exit_after_timeout
    asyncio.run(validator.run())


class NoParents(PeerError):
    """The host does not serve what a submission continues. A validator can only wait for it."""


class Validator:
    """One validator in one run."""

    def __init__(
        self,
        client: Client,
        home: Path,
        make_engine: Callable[..., Engine],
        own_files: bool,
        clock: Callable[[], float] = time.time,
        max_disk_mb: int = 0,
        max_memory_mb: int = 0,
        packages: Packages | None = None,
        name: str = "",
    ) -> None:
        """`make_engine` is as in `take_seat`; without a `name`, it has that of its home."""
        self.client, self.home, self.make_engine, self.own_files = client, home, make_engine, own_files
        self.clock, self.max_disk_mb, self.max_memory_mb = clock, max_disk_mb, max_memory_mb
        self.packages, self.name = packages, t.fact(name or home.name)
        self.stopping = Stopping()
        self.share: WeightSharing | None = None
        self.shift: Shift = ExclusiveDevice()
        self.doing = NodeActivity(stopping=lambda: bool(self.stopping))
        self.took_s = 0.0
        """What the newest submission took to judge."""
        self.in_hand = ""
        """The submission that is being judged."""
        self.paused = ""
        """That the run is paused, and why, as it was logged last; empty while it goes on."""
        self.leave_at_once: Callable[[], None] = lambda: None
        """As of a worker."""
        self.seat: Session

    async def run(self) -> None:
        """The validator's whole job."""
        async with self.client:
            with self.stopping.at_signals():
                if not await self.stopping.unless(self._join()):
                    log.info("stopped before it joined a run")
                    return
                try:
                    async with sharing(self.share, self.client, self.seat.shared):
                        if not await unless_gone(
                            self._judge_all(), self.stopping, self.client, self._leave_without_host
                        ):
                            return
                except Overreach:
                    await say_goodbye(self.client, GOODBYE_S)  # others judge in its place at once
                    raise
                if self.stopping and not await say_goodbye(self.client, GOODBYE_S):
                    self._leave_without_host()
                    return
                done = self.doing.judged
                log.info(
                    "left judged=%d submissions: groups accepted=%d refused=%d",
                    done.submissions, done.accepted, done.refused.total(),
                )  # fmt: skip

    def _leave_without_host(self) -> None:
        lost = f"the judgement of submission {self.in_hand[:12]} is lost" if self.in_hand else "nothing was in hand"
        log.warning("left, because the host does not answer: %s. The same command goes on", lost)
        self.leave_at_once()

    async def _judge_all(self) -> None:
        """Judge until the run is over or we are told to stop. Raises `Overreach` if a submission asks for too much."""
        failed = waiting = ""
        while (check := await self._next_check()) is not None:
            groups = sum(len(block.slots) for block in check.lease.blocks)
            self.doing.now(f"fetching a submission of {groups} groups")
            async with contextlib.AsyncExitStack() as shift:
                try:
                    keep = self.seat.info.rules.max_staleness + 2
                    body, record = await self._body(check), await self._record(check)
                    found = await self._parents(check)
                    load = load_on_shift(self.seat, self.shift, shift, check.lease.version, keep=keep)
                    if not await loaded_in_time(load, self.stopping):
                        return
                except NoParents as error:
                    if check.id != waiting:
                        log.warning("cannot judge submission=%s yet reason=%r", check.id[:12], str(error))
                    waiting = check.id
                    await self.stopping.unless(asyncio.sleep(SOONEST_S))
                    continue  # guard: missing-parents-end-no-validator
                except PeerError as error:  # others may have decided meanwhile, and the host deleted what was judged
                    if check.id == failed:
                        raise
                    failed = check.id
                    log.warning("cannot judge submission=%s reason=%r", check.id[:12], str(error))
                    continue
                self.seat.demand_judge(check, len(body), sum(map(len, found.values())))
                self.doing.now(f"judging a submission of {groups} groups")
                began, self.in_hand = self.doing.clock(), check.id
                with self.seat.within_memory(f"judging submission {check.id[:12]}"):
                    rules, vocabulary = self.seat.info.rules, self.seat.policy.renderer.vocabulary
                    parents = read_parents(found, rules, check.lease, vocabulary)
                    try:
                        verdict = await asyncio.to_thread(
                            verify_submission, body, check, self._tools(check), record, parents
                        )
                    except Interrupted as why:
                        log.warning("submission=%s is left to others reason=%r", check.id[:12], str(why))
                        return
            self.took_s = self.doing.clock() - began
            await self._give(verdict)
            self.in_hand = ""
            self.doing.now("waiting for a submission to judge")

    async def _join(self) -> bool:
        """Join the run; returns True when done."""
        self.seat = await take_seat(
            self.client, "validator", self.name, self.home, self.make_engine, self.own_files, self.clock,
            self.max_memory_mb, self.max_disk_mb, self.packages, now=self.doing.now,
            processes=Processes(stopping=lambda: bool(self.stopping)),
        )  # fmt: skip
        self.doing.info, self.doing.node, self.doing.memory = self.seat.info, self.seat.node, memory_mb
        self.doing.name = self.name
        log.info("joined run=%s", self.seat.info.name)
        return True

    async def _next_check(self) -> t.Check | None:
        """The next submission to judge; None once the run has ended and all are judged, or we are told to stop."""
        while not self.stopping:
            answer = await self.stopping.unless(self.client.get_json("/v1/checks", t.CheckAnswer))
            if answer is None:
                return None
            if answer.check is not None:
                demand_sound(answer.check.lease, self.seat.kind, vine_of(self.seat.info.rules.algorithm) is not None)
                return answer.check
            status = await self.stopping.unless(self.client.get_json("/v1/status", t.Status))
            if status is None:
                return None
            if status.phase == "ended" and status.pending == 0:
                log.info("the run has ended")
                return None
            why = f": {status.pause_cause}" if status.pause_cause else ""
            paused = f"the run is paused until its host resumes it{why}" if status.phase == "paused" else ""
            if paused and paused != self.paused:
                log.info("waiting reason=%.400r", paused)
            self.paused = paused
            self.doing.now(f"waiting: {paused or 'nothing is for this validator to judge now'}")
            await self.stopping.unless(asyncio.sleep(SOONEST_S))
        return None

    async def _body(self, check: t.Check) -> bytes:
        """The submission's bytes, verified by their hash."""
        return await self.client.get_blob(check.id, cap=MAX_SUBMISSION_BYTES)

    async def _record(self, check: t.Check) -> bytes:
        """What the host's stage played for the lease, verified by its hash; empty in runs whose workers play."""
        return await self.client.get_blob(check.record, cap=MAX_SUBMISSION_BYTES) if check.record else b""

    async def _parents(self, check: t.Check) -> dict[str, bytes]:
        """The groups that a submission continues, by their digests, as `fetch_parents`. Raises `NoParents`."""
        fetch = partial(self.client.get_blob, cap=MAX_SUBMISSION_BYTES)
        try:
            return await fetch_parents(check.lease, self.seat.info.rules, fetch)
        except PeerError as error:
            raise NoParents(str(error)) from None

    def _tools(self, check: t.Check) -> Tools:
        temperature, seat = check.lease.sampling.temperature, self.seat
        hidden = bool(check.project_for) or seat.info.rules.proofs != "none"
        return Tools(
            info=seat.info,
            envs=seat.envs,
            renderer=seat.policy.renderer,
            replay=replay_group,
            dtype=seat.engine.facts.dtype,
            implementation=seat.engine.facts.implementation,
            score=lambda requests: seat.engine.score(requests, temperature, hidden),
            on_accept=self._tell_trainer,
        )

    def _tell_trainer(self, label: str, replays: Sequence[ReplayedRollout]) -> None:
        """Tell the trainer what a group scored, part by part, if this is the host's machine."""
        if self.own_files:
            own = [one for one in replays if isinstance(one, ReplayResult)]
            tally = Tally().add(one.earned for one in own if one.earned)
            tally.faults = sum(one.is_learned_fault for one in own)
            scores = RunFolder(self.home.parent.parent).scores  # the launcher gives the host's nodes RUN/nodes/NAME
            ScoreFile(scores, self.home.name).write(label, tally)

    async def _give(self, verdict: t.Verdict) -> None:
        """Send the verdict, and count it. It is refused if another validator judged meanwhile or comes first; the next
        check says so."""
        refused = [group for group in verdict.groups if group.outcome in ("soft", "hard")]
        for group in refused[:1]:
            log.info(
                "refused submission=%s groups=%d slot=%d check=%s figure=%.4g bound=%.4g detail=%r",
                verdict.submission[:12], len(refused), group.slot, group.check, group.figure, group.bound, group.detail,
            )  # fmt: skip
        self.doing.now("sending a verdict")
        with contextlib.suppress(NothingYet):
            await self.client.put_json(f"/v1/checks/{verdict.submission}/verdict", verdict, t.WriteAck)
            self.doing.judged.add(verdict, self.took_s)

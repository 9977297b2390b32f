"""The validator: takes submissions one by one, recomputes what they claim, and sends a verdict on each.

The checks are in `verification/`. This role gives them the environments, the policy version and, for audited groups, one
prefill.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from shoal.config.role_options import NodeOptions
from shoal.envs.isolated.pool import Processes
from shoal.envs.replay import ReplayResult, replay_group
from shoal.errors import Interrupted, NothingYet, PeerError
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.constants import MAX_SUBMISSION_BYTES
from shoal.protocol.encoding import to_json
from shoal.roles.node.device_queue import load_on_shift
from shoal.roles.node.lease_client import demand_sound
from shoal.roles.node.lifecycle import Node, NodeRole, open_session, run_role
from shoal.roles.node.reward_part_files import ScoreFile, Tally
from shoal.roles.node.session import (
    SOONEST_S,
)
from shoal.run_folder import RunFolder
from shoal.verification.branch_parents import fetch_parents, read_parents
from shoal.verification.check_context import ReplayedRollout, Tools
from shoal.verification.verify import verify_submission
from shoal.weights.engine_loader import loaded_in_time

log = logging.getLogger("validator")


def main(options: NodeOptions) -> None:
    """Judge submissions of a run until it has ended and all are judged, as its host's own validator.

    Raises `PeerError`, `StateError`, `ConfigError`.
    """
    run_role(Validator(Node.open(options)))


class NoParents(PeerError):
    """The host does not serve what a submission continues. A validator can only wait for it."""


class Validator(NodeRole):
    """One validator in one run. It waits until the host has admitted its key, and says what the host must type."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.took_s = 0.0
        """What the newest submission took to judge."""
        self.in_hand = ""
        """The submission that is being judged."""
        self.paused = ""
        """That the run is paused, and why, as it was logged last; empty while it goes on."""

    async def join(self) -> None:
        log.info("validating url=%s key=%s", self.client.base_url, self.key)
        self.session = await open_session(self.node, "validator", Processes(stopping=lambda: bool(self.stopping)))
        log.info("joined run=%s", self.session.info.name)

    def lost(self) -> str:
        lost = f"the judgement of submission {self.in_hand[:12]} is lost" if self.in_hand else "nothing was in hand"
        return f"{lost}. The same command goes on"

    async def finish(self) -> None:
        done = self.activity.judged
        log.info(
            "left judged=%d submissions: groups accepted=%d refused=%d",
            done.submissions, done.accepted, done.refused.total(),
        )  # fmt: skip

    async def work(self) -> None:
        """Judge until the run is over or we are told to stop. Raises `Overreach` if a submission asks for too much."""
        failed = waiting = ""
        while (check := await self._next_check()) is not None:
            groups = sum(len(block.slots) for block in check.lease.blocks)
            self.activity.now(f"fetching a submission of {groups} groups")
            async with contextlib.AsyncExitStack() as shift:
                try:
                    keep = self.session.info.rules.max_staleness + 2
                    body, record = await self._body(check), await self._record(check)
                    found = await self._parents(check)
                    load = load_on_shift(self.session, self.node.shift, shift, check.lease.version, keep=keep)
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
                self.session.demand_judge(check, len(body), sum(map(len, found.values())))
                self.activity.now(f"judging a submission of {groups} groups")
                began, self.in_hand = self.activity.clock(), check.id
                with self.session.within_memory(f"judging submission {check.id[:12]}"):
                    rules, vocabulary = self.session.info.rules, self.session.policy.renderer.vocabulary
                    parents = read_parents(found, rules, check.lease, vocabulary)
                    try:
                        verdict = await asyncio.to_thread(
                            verify_submission, body, check, self._tools(check), record, parents
                        )
                    except Interrupted as why:
                        log.warning("submission=%s is left to others reason=%r", check.id[:12], str(why))
                        return
            self.took_s = self.activity.clock() - began
            await self._give(verdict)
            self.in_hand = ""
            self.activity.now("waiting for a submission to judge")

    async def _next_check(self) -> t.Check | None:
        """The next submission to judge; None once the run has ended and all are judged, or we are told to stop."""
        while not self.stopping:
            answer = await self.stopping.unless(self.client.get_json("/v1/checks", t.CheckAnswer))
            if answer is None:
                return None
            if answer.check is not None:
                demand_sound(
                    answer.check.lease, self.session.kind, vine_of(self.session.info.rules.algorithm) is not None
                )
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
            self.activity.now(f"waiting: {paused or 'nothing is for this validator to judge now'}")
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
            return await fetch_parents(check.lease, self.session.info.rules, fetch)
        except PeerError as error:
            raise NoParents(str(error)) from None

    def _tools(self, check: t.Check) -> Tools:
        temperature, session = check.lease.sampling.temperature, self.session
        hidden = bool(check.project_for) or session.info.rules.proofs != "none"
        return Tools(
            info=session.info,
            envs=session.envs,
            renderer=session.policy.renderer,
            replay=replay_group,
            dtype=session.engine.facts.dtype,
            implementation=session.engine.facts.implementation,
            score=lambda requests: session.engine.score(requests, temperature, hidden),
            on_accept=self._tell_trainer,
        )

    def _tell_trainer(self, label: str, replays: Sequence[ReplayedRollout]) -> None:
        """Tell the trainer what a group scored, part by part, if this is the host's machine."""
        if self.node.options.is_own:
            own = [one for one in replays if isinstance(one, ReplayResult)]
            tally = Tally().add(one.earned for one in own if one.earned)
            tally.faults = sum(one.is_learned_fault for one in own)
            scores = RunFolder(Path(self.node.options.run_dir)).scores
            ScoreFile(scores, self.node.home.name).write(label, tally)

    async def _give(self, verdict: t.Verdict) -> None:
        """Send the verdict, and count it. It is refused if another validator judged meanwhile or comes first; the next
        check says so."""
        refused = [group for group in verdict.groups if group.outcome in ("soft", "hard")]
        for group in refused[:1]:
            log.info(
                "refused submission=%s groups=%d slot=%d check=%s figure=%.4g bound=%.4g detail=%r",
                verdict.submission[:12], len(refused), group.slot, group.check, group.figure, group.bound, group.detail,
            )  # fmt: skip
        self.activity.now("sending a verdict")
        with contextlib.suppress(NothingYet):
            await self.client.send("PUT", f"/v1/checks/{verdict.submission}/verdict", to_json(verdict), t.WriteAck)
            self.activity.judged.add(verdict, self.took_s)

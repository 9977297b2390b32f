"""The validator: takes submissions one by one, re-derives what they claim, and says of each group what it found.

Started by the host for its own validators, or by `shoal validate URL` with a key that the host admitted. The checks
are in `proofs/`; this role brings the environments, the policy version, and one prefill for the groups drawn for audit.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.engine.base import Engine
from shoal.engine.open import EngineSpec, open_engine
from shoal.envs.base import Env
from shoal.envs.load import load_run_envs
from shoal.envs.replay import replay_rollout
from shoal.errors import NothingYet, PeerError
from shoal.net.client import Client
from shoal.net.keys import load_or_make_key
from shoal.net.stopping import Stopping
from shoal.policy.render import Renderer
from shoal.proofs.context import Tools
from shoal.proofs.verify import verify_submission
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_SUBMISSION_BYTES, PROTOCOL_VERSION
from shoal.weights.fetch import HttpSource, fetch
from shoal.weights.manifest import open_manifest

log = logging.getLogger("validator")


def main(url: str, home: Path, threads: int, key_file: Path | None = None, own_files: bool = False) -> None:
    """Judge for the run at `url` until it has ended and nothing is left to judge, or until told to stop.

    Raises `PeerError` when the key is not admitted, with what the host must type.
    """
    key = load_or_make_key(key_file or home / "node.key")
    validator = Validator(
        Client(url, key), home, lambda dtype: open_engine(EngineSpec(dtype=dtype, threads=threads)), own_files
    )
    log.info("validating url=%s key=%s", url, key.public)
    asyncio.run(validator.run())


class Validator:
    """One validator in one run."""

    def __init__(
        self,
        client: Client,
        home: Path,
        make_engine: Callable[[str], Engine],
        own_files: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`make_engine` gives an engine of the run's dtype."""
        self.client, self.home, self.make_engine, self.own_files = client, home, make_engine, own_files
        self.clock = clock
        self.stopping = Stopping()
        self.info: t.RunInfo
        self.engine: Engine
        self.envs: Mapping[str, Env]
        self.renderer: Renderer

    async def run(self) -> None:
        """The validator's job, whole."""
        async with self.client:
            with self.stopping.at_signals():
                if not await self.stopping.unless(self._join()):
                    log.info("stopped before it joined a run")
                    return
                while (check := await self._next_check()) is not None:
                    await self._load(check.lease.version)
                    body = await self._body(check)
                    verdict = await asyncio.to_thread(verify_submission, body, check, self._tools(check))
                    await self._give(verdict)

    async def _join(self) -> bool:
        """Read the run, load its environments, and enter with our key; returns True once we are in."""
        self.info = info = await self.client.get_json("/v1/run", t.RunInfo)
        if info.protocol != PROTOCOL_VERSION:
            raise PeerError(
                f"the run speaks protocol {info.protocol}, we speak {PROTOCOL_VERSION}: install the same shoal"
            )
        self.client.run, self.client.head = info.run, info.head
        self.envs = load_run_envs(info.envs, own_files=self.own_files)
        self.engine = self.make_engine(info.rules.dtype)
        facts = self.engine.facts
        join = t.Join("validator", t.fact(self.home.name), 0.0, facts.implementation, facts.dtype, facts.device)
        await self.client.post_json("/v1/nodes", join, t.NodeState)
        log.info("joined run=%s", info.name)
        return True

    async def _next_check(self) -> t.Check | None:
        """A submission to judge, or None once the run has ended and all is judged, or we are to stop."""
        while not self.stopping:
            answer = await self.stopping.unless(self.client.get_json("/v1/checks", t.CheckAnswer))
            if answer is None:
                return None
            if answer.check is not None:
                return answer.check
            status = await self.stopping.unless(self.client.get_json("/v1/status", t.Status))
            if status is None:
                return None
            if status.phase == "ended" and status.pending == 0:
                log.info("the run has ended")
                return None
        return None

    async def _load(self, version: int) -> None:
        """Fetch and verify the version that the submission claims, unless the engine holds it."""
        if self.engine.version == version:
            return
        data = await self.client.get(f"/v1/manifests/{version}")
        keys = (self.info.trainer_key,)
        manifest = open_manifest(data, run=self.info.run, keys=keys, now=self.clock(), version=version)
        keep = self.info.rules.max_staleness + 2
        directory = await fetch(manifest, [HttpSource(self.client)], self.home / "weights", keep=keep)
        if self.engine.version < 0:
            self.renderer = Renderer.from_directory(directory)
        await asyncio.to_thread(self.engine.load, directory, version)

    async def _body(self, check: t.Check) -> bytes:
        """The submission's bytes, known by their hash."""
        return await self.client.get_blob(check.id, cap=MAX_SUBMISSION_BYTES)

    def _tools(self, check: t.Check) -> Tools:
        temperature = check.lease.sampling.temperature
        hidden = bool(check.project_for) or self.info.rules.proofs != "none"
        return Tools(
            info=self.info,
            envs=self.envs,
            renderer=self.renderer,
            replay=replay_rollout,
            dtype=self.engine.facts.dtype,
            implementation=self.engine.facts.implementation,
            score=lambda requests: self.engine.score(requests, temperature, hidden),
        )

    async def _give(self, verdict: t.Verdict) -> None:
        """Send the verdict; it may be late, when another validator was faster, and then early for a second voice."""
        refused = [group for group in verdict.groups if group.outcome in ("soft", "hard")]
        for group in refused[:1]:
            log.info(
                "refused submission=%s groups=%d slot=%d check=%s figure=%.4g bound=%.4g detail=%r",
                verdict.submission[:12], len(refused), group.slot, group.check, group.figure, group.bound, group.detail,
            )  # fmt: skip
        with contextlib.suppress(NothingYet):
            await self.client.put_json(f"/v1/checks/{verdict.submission}/verdict", verdict, t.Done)

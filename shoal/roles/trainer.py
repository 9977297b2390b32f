"""The trainer: a function from (version v, batch v) to version v + 1, repeated until the run's last step.

Started by the launcher on the run's folder, or by `shoal train`. It decides nothing about which groups it learns from:
the batch is an event. Its own state is saved before a version is published, so a kill anywhere repeats the same step
with the same bits, and a version that was published is never rebuilt differently.
"""

import asyncio
import filecmp
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from shoal.algos.advantages import has_signal
from shoal.config import RunConfig
from shoal.errors import NothingYet, StateError, cause_of
from shoal.folder import RunFolder, clear_leftovers, replaced_folder
from shoal.ledger.facts.batches import BatchFormed, GroupAccepted
from shoal.ledger.table import read_entry
from shoal.metrics import MetricsLog
from shoal.net.client import Client
from shoal.net.keys import load_or_make_key
from shoal.net.stopping import Stopping
from shoal.policy.files import load_policy, save_policy
from shoal.policy.tiny import make_tiny
from shoal.protocol import types as t
from shoal.protocol.constants import (
    MANIFEST_LIFETIME_S,
    MAX_EVENTS,
    MAX_EVENTS_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_SUBMISSION_BYTES,
)
from shoal.protocol.identity import Key
from shoal.protocol.wire import from_msgpack, to_json
from shoal.train.checkpoint import load_state, save_state
from shoal.train.filter import select
from shoal.train.rows import Row, Unlearnable, mean_rewards, rows_of_group
from shoal.train.selfcheck import largest_gap_nats
from shoal.train.step import Learner
from shoal.weights.manifest import open_manifest, renew_at, sign_manifest
from shoal.weights.publish import HttpSink, publish

T = TypeVar("T")
log = logging.getLogger("trainer")

ALARM_GAP_NATS = 0.01
"""A start-up self-check above this means that generation and training do not see the same policy."""


def main(run_dir: Path, url: str) -> None:
    """Train the run in `run_dir` through its coordinator at `url` until its last step, or until told to stop."""
    folder = RunFolder(run_dir)
    config = folder.config()
    torch.set_num_threads(config.train.threads)
    key = load_or_make_key(folder.keys / "trainer.key")
    trainer = Trainer(folder, config, Client(url, key), key)
    asyncio.run(trainer.run())


def start_policy(folder: RunFolder, config: RunConfig) -> Path:
    """The directory that version 0 comes from: a copy of the run file's, or a tiny one made from the run's seed."""
    if not folder.policy.exists():
        if config.policy.path:
            keep_checkpoint(Path(config.policy.path), folder.policy)
        else:
            seed = int.from_bytes(folder.seed()[:4], "big")
            make_tiny(config.policy.tiny, folder.policy, seed, config.policy.dtype)
    return folder.policy


class Trainer:
    """A learner with its run."""

    def __init__(
        self, folder: RunFolder, config: RunConfig, client: Client, key: Key, clock: Callable[[], float] = time.time
    ) -> None:
        """`key` signs the manifests, and is the one that the client signs with."""
        self.folder, self.config, self.client, self.key = folder, config, client, key
        self.clock = clock
        self.start = start_policy(folder, config)
        model = load_policy(self.start, torch.float32)
        self.vocabulary = model.spec.vocab_size
        self.learner = Learner(model, config.train, temperature=config.sampling.temperature, steps=config.steps)
        self.metrics = MetricsLog(folder.metrics)
        self.stopping = Stopping()
        self.waits: dict[str, float] = {}
        self.seen_seq = -1
        self.kept: set[str] = set()
        """Chunks of the version published last: the coordinator has them."""
        self.renew_at = 0.0
        """When to look at the dates of what is published."""
        self.checked = False
        self.info: t.RunInfo

    async def run(self) -> None:
        """The trainer's job, whole."""
        async with self.client:
            with self.stopping.at_signals():
                version = await self.stopping.unless(self._open())
                if version is None:
                    log.info("stopped before the run was opened")
                    return
                while version < self.config.steps and not self.stopping:
                    began = time.perf_counter()
                    batch = await self._waiting("batch", self._batch(version))
                    if batch is None:
                        break
                    rows, counts = await self._waiting("bodies", self._rows(batch))
                    metrics = await asyncio.to_thread(self.learner.step, rows, version)
                    version += 1
                    metrics |= counts | await self._save_and_publish(version)
                    self._report(version, began, metrics)
                if version < self.config.steps and not self.stopping:
                    log.info("the run ended early at version=%d: it was drained", version)
                    keep_checkpoint(self._write(), self.folder.checkpoints / "final")

    async def _open(self) -> int:
        """Load the saved state, or begin; publish and keep what a kill left undone; returns the version to learn from."""
        self.info = await self.client.get_json("/v1/run", t.RunInfo)
        self.client.run, self.client.head = self.info.run, self.info.head
        join = t.Join("trainer", "trainer", 0.0, f"torch-{torch.__version__}", "float32", "cpu")
        await self.client.post_json("/v1/nodes", join, t.NodeState)
        state = load_state(self.folder.trainer)
        version = 0
        if state is not None:
            self.learner.restore(state)
            version = state.version
        elif self.info.version > 0:
            raise StateError(
                f"version {self.info.version} is published but the trainer has no state in {self.folder.trainer}: copy it "
                "back from the machine that trained, or start a new run from that checkpoint (policy.path)"
            )
        else:
            save_state(self.folder.trainer, self.learner.state(0))
        log.info("opened version=%d published=%d steps=%d", version, self.info.version, self.config.steps)
        if version > self.info.version:
            await self._publish(version)
        elif self._checkpoints_due(version):  # guard: checkpoint-kept-later
            self._keep(version, self._write())
        if self.info.phase != "ended":
            await self._renew(version)  # guard: renew-on-resume
        return version

    async def _batch(self, step: int) -> t.Batch | None:
        """The step's batch, waited for; None when we are to stop or the run has ended."""
        while not self.stopping:
            try:
                return await self.stopping.unless(self.client.get_json(f"/v1/batches/{step}", t.Batch))
            except NothingYet as reason:
                log.info("waiting step=%d reason=%r", step, str(reason))
                if (await self.client.get_json("/v1/run", t.RunInfo)).phase == "ended":
                    return None
                await self._renew(step)  # guard: renew-while-waiting
        return None

    async def _renew(self, newest: int) -> None:
        """Sign again, with a new date, what nodes may still load and is past half its life: a paused run can go on."""
        if self.clock() < self.renew_at:
            return
        dates = []
        for version in range(max(0, newest - self.info.rules.max_staleness), newest + 1):
            data = await self.client.get(f"/v1/manifests/{version}", cap=MAX_MANIFEST_BYTES)
            keys = (self.key.public,)
            manifest = open_manifest(data, run=self.info.run, keys=keys, now=None, version=version)
            if renew_at(manifest) <= self.clock():
                signed = sign_manifest(manifest, self.key, now=self.clock())
                await self.client.send("POST", "/v1/checkpoints", to_json(signed), t.Done)
                log.info("renewed version=%d", version)
                dates.append(self.clock() + MANIFEST_LIFETIME_S / 2)
            else:
                dates.append(renew_at(manifest))
        self.renew_at = min(dates)

    async def _rows(self, batch: t.Batch) -> tuple[list[Row], dict[str, Any]]:
        """The batch's rows in canonical order, each group verified by its hash; and what the filter left out."""
        law, bodies = self.info.rules, {}
        for name in dict.fromkeys(member.submission for member in batch.groups):
            body = await self.client.get_blob(name, cap=MAX_SUBMISSION_BYTES)
            bodies[name] = from_msgpack(body, t.Submission).groups
        rows_G = [self._rows_of(member, bodies[member.submission][member.index]) for member in batch.groups]
        chosen = select(batch.groups, rows_G, version=batch.step, max_staleness=law.max_staleness)
        counts: dict[str, Any] = {
            "groups_without_signal": chosen.groups_without_signal,
            "groups_unlearnable": sum(not rows for rows in rows_G),
            "stale_rollouts": chosen.stale_rollouts,
        }
        counts |= await self._accepted_for(batch.step)
        labels = [spec.label for spec in self.info.envs]
        if len(labels) > 1:
            counts |= {f"reward_mean/{label}": mean for label, mean in mean_rewards(chosen.rows, labels).items()}
        fresh = next((row for row in chosen.rows if row.version == batch.step), None)
        if not self.checked and fresh is not None:
            self.checked = True
            counts["selfcheck_gap_nats"] = gap = largest_gap_nats(self.learner, fresh)
            level = logging.WARNING if gap > ALARM_GAP_NATS else logging.INFO
            log.log(level, "self-check: one completion replayed, largest |Δ log-prob| = %.2e nats", gap)
        return chosen.rows, counts

    def _rows_of(self, member: t.BatchGroup, data: bytes) -> list[Row]:
        """A group's rows; none of one that a validator should have refused, or a single bad one could stop the run."""
        try:
            return rows_of_group(
                member, data, advantage=self.config.train.advantage, vocabulary=self.vocabulary,
                max_tokens=self.config.sampling.max_tokens,
            )  # fmt: skip
        except Unlearnable as fault:
            log.warning("left out of the batch: %s", fault)
            return []  # guard: unlearnable-is-left-out

    async def _accepted_for(self, step: int) -> dict[str, Any]:
        """Rewards of all groups accepted between the batch of the step before and this one's, with or without signal.

        Read from the log, so that a restart changes nothing: events of earlier steps are read again and left out.
        """
        rewards: list[tuple[float, ...]] = []
        more = True
        while more:
            page = await self.client.get(f"/v1/events?after={self.seen_seq}", cap=MAX_SUBMISSION_BYTES)
            lines = page.splitlines()
            more = len(lines) >= MAX_EVENTS or len(page) > MAX_EVENTS_BYTES  # guard: full-page-is-not-the-end
            for line in lines:
                entry, _ = read_entry(line)
                self.seen_seq = entry.seq
                if isinstance(entry.body, GroupAccepted):
                    rewards.append(entry.body.rewards)
                elif isinstance(entry.body, BatchFormed) and entry.body.step < step:
                    rewards.clear()
                elif isinstance(entry.body, BatchFormed):
                    more = False
                    break
        if not rewards:
            return {}
        flat = sum(not has_signal(group) for group in rewards)
        everything = [reward for group in rewards for reward in group]
        return {"reward_all_mean": sum(everything) / len(everything), "zero_signal_share": flat / len(rewards)}

    async def _save_and_publish(self, version: int) -> dict[str, Any]:
        began = time.perf_counter()
        await asyncio.to_thread(save_state, self.folder.trainer, self.learner.state(version))
        saved = time.perf_counter()
        await self._publish(version)
        return {"save_s": saved - began, "publish_s": time.perf_counter() - saved}

    async def _publish(self, version: int) -> None:
        """Send the version's chunks, announce it, and keep it if it is due; doing so twice changes nothing."""
        directory = self._write()
        parents = (version - 1,) if version else ()
        manifest = await publish(
            directory, HttpSink(self.client), run=self.info.run, version=version, dtype=self.config.policy.dtype,
            parents=parents, kept=self.kept,
        )  # fmt: skip
        self.kept = {chunk for file in manifest.files for chunk in file.chunks}
        signed = to_json(sign_manifest(manifest, self.key, now=self.clock()))
        await self.client.send("POST", "/v1/checkpoints", signed, t.Done)
        self._keep(version, directory)

    def _write(self) -> Path:
        """The learner's policy as a directory in HF format; the next one takes its place."""
        directory = self.folder.trainer / "publishing"
        save_policy(self.learner.model, directory, self.config.policy.dtype, tokenizer_from=self.start)
        return directory

    def _keep(self, version: int, directory: Path) -> None:
        for name in self._checkpoints_due(version):
            keep_checkpoint(directory, self.folder.checkpoints / name)

    def _checkpoints_due(self, version: int) -> list[str]:
        """Names under which a version is kept for the host; those of most versions are none."""
        if version == self.config.steps:
            return [f"v{version:06d}", "final"]
        return [f"v{version:06d}"] if version % self.config.storage.checkpoint_every == 0 else []

    async def _waiting(self, what: str, work: "asyncio.Future[T] | Any") -> Any:
        """Await, and count the time as waiting for `what`."""
        began = time.perf_counter()
        try:
            return await work
        finally:
            self.waits[what] = self.waits.get(what, 0.0) + time.perf_counter() - began

    def _report(self, version: int, began: float, metrics: dict[str, Any]) -> None:
        step_s = time.perf_counter() - began
        waits, self.waits = self.waits, {}
        longest: Callable[[str], float] = lambda what: waits[what]  # noqa: E731
        self.metrics.write(
            {"step": version - 1, "time_s": time.time(), "step_s": step_s}
            | {"waiting_share": sum(waits.values()) / max(step_s, 1e-9), "waiting_for": max(waits, key=longest)}
            | metrics
        )
        log.info(
            "step=%d reward=%.3f entropy=%.3f rollouts=%d train=%.2fs", version - 1,
            metrics.get("reward_all_mean", metrics["reward_mean"]), metrics.get("entropy_nats", 0.0),
            metrics["rollouts"], metrics["train_s"],
        )  # fmt: skip


def keep_checkpoint(source: Path, target: Path) -> None:
    """Copy a version's directory beside the others, whole or not at all; what is there already is left alone."""
    try:
        if _are_alike(source, target):
            clear_leftovers(target)
            return
        with replaced_folder(target) as scratch:
            shutil.copytree(source, scratch, dirs_exist_ok=True)
    except OSError as error:
        raise StateError(
            f"cannot keep checkpoint {target}: {cause_of(error)}. Free disk space and start again"
        ) from None


def _are_alike(left: Path, right: Path) -> bool:
    """Whether two directories hold the same files with the same bytes."""
    names = sorted(path.name for path in left.iterdir())
    if not right.is_dir() or sorted(path.name for path in right.iterdir()) != names:
        return False
    return filecmp.cmpfiles(left, right, names, shallow=False)[0] == names

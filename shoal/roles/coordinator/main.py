"""The coordinator: grants leases, takes submissions, hands them to validators, forms batches, keeps the log.

The rules are in `ledger`, the HTTP calls in `routes`; `coordinator` has the run's secrets and blobs.
It does not know the model, and does not import torch.
"""

import asyncio
import contextlib
import logging
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from starlette.applications import Starlette

from shoal.chat.renderer import Renderer
from shoal.config import (
    ACTIVATION_ERROR,
    EnvConfig,
    RunConfig,
    difficulty_of,
    sampling_of,
)
from shoal.envs.interface import EnvFacts
from shoal.envs.load import env_digest, facts_of
from shoal.errors import ConfigError, StateError
from shoal.ledger.commands import Admin, Reconfigure
from shoal.ledger.constants import LAW, Law
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.run_events import Create, RunCreated
from shoal.ledger.state import State
from shoal.net.connection_limits import ServerLimits, connections_that_fit, http_server
from shoal.net.key_files import load_key, load_or_make_key
from shoal.net.server_address import listen, port_of_last_start, tell_address
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.constants import COMPLETIONS, EPISODES, MODEL_STOPS
from shoal.protocol.encoding import WireError, from_json
from shoal.protocol.host_signatures import is_promised
from shoal.protocol.messages import AdminRequest
from shoal.protocol.seed_chain import AUDIT_CHAIN, SLOT_CHAIN, SecretChain
from shoal.protocol.task_draws import TaskList
from shoal.protocol.tolerances import dtypes_of, wire_bounds
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.routes import application
from shoal.roles.node.serve_chunks import kept_up
from shoal.run_folder import RunFolder
from shoal.runs.log_source import demand_whole_log
from shoal.typed_toml import to_tree

log = logging.getLogger("coordinator")

TICK_S = 0.5

RECEIPT_TAIL_BYTES = 8192
"""Of a node's file of receipts, so much is compared with the log at a start: the last ten or so."""


def main(run_dir: Path) -> None:
    """Serve a run until told to stop. Raises `StateError` if folder, log or port cannot be used."""
    folder = RunFolder(run_dir)
    config = folder.start_config()
    coordinator = open_run(folder, config)
    folder.take_start()
    last = port_of_last_start(folder.address, (config.host.origin_port, config.host.dashboard_port))
    listener = listen(config.host.bind, config.host.port, last, "host.port")
    host, port = listener.getsockname()[:2]
    url = config.host.public_url or f"http://{host}:{port}"
    tell_address(folder.address, port, url)
    log.info(
        "serving run=%s url=%s version=%d events=%d",
        coordinator.state.name,
        url,
        coordinator.state.main.version,
        coordinator.state.seq + 1,
    )
    if behind := coordinator.clock_behind():
        log.warning("%s", behind)
    limits = ServerLimits(total=connections_that_fit(), trusted=config.host.trusted_proxies)
    http_server(application(coordinator, lifespan=_ticking(coordinator)), limits).run(sockets=[listener])


def open_run(
    folder: RunFolder, config: RunConfig, clock: Callable[[], float] = time.time, law: Law = LAW
) -> Coordinator:
    """Open a run's coordinator: replay its log, or begin one under `law`."""
    key = load_or_make_key(folder.keys / "run.key")
    log_writer = LogWriter(Store(sqlite_url(folder.log)))
    now = clock()
    demand_whole_log(log_writer.state, folder)
    demand_receipts(log_writer, folder, key.public)
    demand_steps(log_writer.state, config.steps, folder)
    if log_writer.state.seq < 0:
        log_writer.write(Create(created(folder, config, key.public, law), now), now)
    elif log_writer.state.phase != "ended":
        found, logged = env_specs(config), list(log_writer.state.envs)
        if found != logged:
            pairs = zip(config.envs, found, logged, strict=False)
            others = [env.label for env, one, other in pairs if one != other] or ["their number"]
            raise StateError(
                f"environments of this run have changed since it started ({', '.join(others)}): their source, their tasks "
                "or their settings. Put the old ones back to resume, or start a new run"
            )
        if task_lists(folder, config, log_writer.state.envs) != (
            log_writer.state.task_lists or {}
        ):  # guard: task-lists-of-the-log
            raise StateError(
                f"the task lists in {folder.task_lists} are not those that the log began with: restore them from a copy"
            )
        if config.train.algorithm != log_writer.state.rules.algorithm:  # guard: algorithm-of-the-log
            raise StateError(
                f"the rules in the log name the algorithm {to_tree(log_writer.state.rules.algorithm)}, "
                f"but train.algorithm in {folder.run_file} is {to_tree(config.train.algorithm)}: "
                "restore that file to resume, or start a new run"
            )
        demand_judges(log_writer.state, config.validators.count, folder)
        r = config.rollouts
        changed = Reconfigure(
            public_run_file(folder, config), config.steps, r.lease_s, now, r.max_flat_groups, config.verify.quarantine_s
        )
        log_writer.write(changed, now)
        for validator in own_validators(folder, config):  # the host may have raised validators.count
            log_writer.write(Admin("admit", AdminRequest(validator), now), now)
    coordinator = Coordinator(folder, config, log_writer, key, clock)
    coordinator.kept.make_room(coordinator.quota_bytes)  # the quota may be lower than before
    return coordinator


def demand_receipts(log_writer: LogWriter, folder: RunFolder, run_key: str) -> None:
    """Raise `StateError` if the log lacks an event for which a node in the folder has a receipt: a copy was put back that
    is older, if only by seconds. What is written after it would fork the run."""
    for path in sorted(folder.nodes.glob("*/receipts.jsonl")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - RECEIPT_TAIL_BYTES))
            lines = file.read().splitlines()
        for line in lines:
            try:
                receipt = from_json(line, t.Receipt)
            except WireError:
                continue  # cut by a kill, or by us
            ours = receipt.run == folder.run_id() and is_promised(receipt, run_key)
            if ours and not log_writer.knows(receipt.head):  # guard: receipts-of-the-folder
                raise StateError(
                    f"{path} holds a receipt for event {receipt.seq}, which is not in {folder.log.name} (it ends at event "
                    f"{log_writer.state.seq}): the log is gone or an older copy, and to go on would fork the run. Restore "
                    "a "
                    "newer copy, or begin a new run from the newest checkpoint (--set policy.path=FOLDER --out DIR)"
                )


def demand_steps(state: State, steps: int, folder: RunFolder) -> None:
    """Raise `StateError` if a run that goes on with so many steps would end at once, or could not take them."""
    if state.seq < 0:
        return
    version, before, again = state.main.version, state.rules.steps, f"set steps = {state.rules.steps}, as before,"
    if state.phase == "ended" and steps != before:  # guard: ended-runs-keep-their-steps
        raise StateError(
            f"the run in {folder.root} has ended at version {version}, with steps = {before}, and its secrets are public. "
            f"So steps = {steps} changes nothing: {again} to see its end, or train on in a new run from its policy: add "
            f"--set policy.path={shlex.quote(str((folder.checkpoints / 'final').absolute()))} --out DIR"
        )
    if state.phase == "draining" and steps > before:
        raise StateError(
            f"the run in {folder.root} is draining, so it ends before it takes more steps than it has: {again} to let it "
            f"end. Or type `shoal admin resume {shlex.quote(str(folder.root))}` once it is up, and then start "
            f"it with steps = {steps}"
        )
    if state.phase != "ended" and steps <= version:  # guard: steps-beyond-the-version
        raise StateError(
            f"steps = {steps}, and the run in {folder.root} has reached version {version} of steps = {before}: it would "
            f"end at once, and for good. To go on, {again} or more (--set steps={before}). To end it, start it so, and "
            f"then type `shoal admin drain {shlex.quote(str(folder.root))}`"
        )


def demand_judges(state: State, count: int, folder: RunFolder) -> None:
    """Raise `StateError` if a run that goes on with so many validators of its host would wait for those that it had before:
    they may come back, so one validator alone refuses nothing."""
    keys = {load_key(path).public: path.stem for path in folder.keys.glob("validator-*.key")}
    panel = state.panel()
    gone = [keys[key] for key in panel if key in keys and int(keys[key].rpartition("-")[2]) >= count]
    if gone and len(panel) - len(gone) < 2:  # guard: own-validators-stay
        raise StateError(
            f"validators.count = {count}, and {', '.join(sorted(gone))} of this host judge in the run in {folder.root}: "
            f"each refusal would wait {state.law.dispute_s:.0f} s for a second verdict of theirs. Set validators.count = "
            f"{count + len(gone)}, as before. To go on with fewer, remove each while the run is up, with `shoal admin kick "
            f"{shlex.quote(str(folder.root))} {min(gone)}`"
        )


def created(folder: RunFolder, config: RunConfig, run_key: str, law: Law) -> RunCreated:
    """The first event of a run: all that its nodes must agree on."""
    secret, specs = folder.secret(), tuple(env_specs(config))
    return RunCreated(
        run=folder.run_id(),
        name=config.name,
        run_key=run_key,
        trainer_key=load_or_make_key(folder.keys / "trainer.key").public,
        validators=own_validators(folder, config),
        chain_end=SecretChain(secret, SLOT_CHAIN).end().hex(),
        audit_chain_end=SecretChain(secret, AUDIT_CHAIN).end().hex(),
        envs=specs,
        sampling=_sampling(folder, config),
        rules=rules_of(config),
        config=public_run_file(folder, config),
        law=law,
        difficulty=difficulty_of(config),
        root_key=folder.root_key(),
        task_lists=task_lists(folder, config, specs),
    )


def task_lists(folder: RunFolder, config: RunConfig, specs: Sequence[t.EnvSpec]) -> dict[str, TaskList]:
    """What tasks are drawn from, by label, where that is not all. Raises `ConfigError` for a list of something else."""
    lists = {}
    for env, spec in zip(config.envs, specs, strict=True):
        found = folder.task_list(env)
        if found is not None:
            if flaw := found.flaw(spec.digest, spec.args, spec.num_tasks):  # guard: task-list-of-this-environment
                raise ConfigError(
                    f"the task list of environment {env.label} cannot be used: {flaw}. Make one of this environment by a "
                    "filter stage, or leave envs.tasks out"
                )
            lists[env.label] = found
    return lists


def _sampling(folder: RunFolder, config: RunConfig) -> t.Sampling:
    """The run file's sampling. It names the rule of the stop tokens only if the first policy has its own."""
    sampling = sampling_of(config)
    if config.policy.path:
        first = Renderer.from_directory(folder.policy if folder.policy.exists() else Path(config.policy.path))
        return replace(sampling, stops=MODEL_STOPS) if first.has_own_stops else sampling
    return sampling


def own_validators(folder: RunFolder, config: RunConfig) -> tuple[str, ...]:
    """Keys of the validators that the host starts."""
    keys = (folder.keys / f"validator-{i}.key" for i in range(config.validators.count))
    return tuple(load_or_make_key(key).public for key in keys)


def public_run_file(folder: RunFolder, config: RunConfig) -> dict[str, Any]:
    """The resolved run file for the log, which anyone may read: without the seed if the secret follows from it."""
    tree = to_tree(config)
    del tree["logging"]  # the names of the host's projects are no part of the run
    if folder.has_public_secret(config):  # guard: no-seed-in-the-log
        del tree["seed"]
    return tree


def env_specs(config: RunConfig) -> list[t.EnvSpec]:
    """The run's environments with their digests and sizes."""
    return [_spec(e, facts_of(e), vine_of(config.train.algorithm) is not None) for e in config.envs]


def _spec(e: EnvConfig, env: EnvFacts, continued: bool = False) -> t.EnvSpec:
    if continued and "group_scores" in env.members:  # guard: compared-is-not-continued
        raise ConfigError(
            f"environment {e.label} compares the rollouts of a group (group_scores), and continuations have no siblings "
            "to be compared with: leave train.algorithm.credit out"
        )
    if not env.reproducible and e.kind != COMPLETIONS:  # guard: unrepeatable-stays-with-the-host
        raise ConfigError(
            f"environment {e.label} says that nobody can repeat it, so the host must play it: set kind = "
            f'"{COMPLETIONS}" in its [[envs]]'
        )
    return t.EnvSpec(
        e.name, env_digest(e.name), env.num_tasks, e.weight, e.args,
        own_label="" if e.label == e.name else e.label,
        system=e.system, examples=e.examples, template=e.template, parser=e.parser, weights=e.weights,
        max_turn_tokens=e.max_turn_tokens, max_tokens=e.max_tokens, history=e.history, shaping=e.shaping,
        kind=e.kind or EPISODES, reproducible=env.reproducible, on_fault=e.on_fault,
    )  # fmt: skip


def rules_of(config: RunConfig) -> t.Rules:
    """The run file's rules, as the wire's type."""
    r, v = config.rollouts, config.verify
    return t.Rules(
        group_size=r.group_size,
        block_groups=r.block_rollouts // r.group_size,
        batch_groups=r.batch_groups,
        max_staleness=r.max_staleness,
        steps=config.steps,
        lease_s=r.lease_s,
        audit_rate=v.audit_rate,
        dtype=config.sampled_dtype,
        bounds=bounds_of(config),
        proofs=v.proofs,
        activation_error=v.activation_error or ACTIVATION_ERROR[config.sampled_dtype],
        worker_share=v.worker_share,
        paid_tokens=config.most_paid_tokens,
        max_flat_groups=r.max_flat_groups,
        algorithm=config.train.algorithm,
        quarantine_s=v.quarantine_s,
    )


def bounds_of(config: RunConfig) -> dict[str, t.Bounds]:
    """The bounds for the run's own dtype. Work sampled in another dtype is not judged."""
    return {
        pair: wire_bounds(bounds)
        for pair, bounds in sorted(config.verify.bounds.items())
        if (dtypes := dtypes_of(pair)) and dtypes[0] == config.sampled_dtype
    }


def _ticking(coordinator: Coordinator) -> Any:
    """A lifespan that ticks the coordinator: the ticks make leases lapse and quarantines end in time."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def tick() -> None:
            while True:
                due = time.perf_counter() + TICK_S
                await asyncio.sleep(TICK_S)
                app.state.meter.late(time.perf_counter() - due)
                try:
                    await coordinator.tick()
                except StateError as error:  # a full disk must not stop the clock for good
                    log.warning("tick failed: %s", error)

        works = (("the clock", tick), ("asking relays", lambda: coordinator.relays.run()))
        tasks = [asyncio.create_task(kept_up(what, work)) for what, work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    return lifespan

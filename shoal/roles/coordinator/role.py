"""The coordinator: grants leases, takes submissions, hands them to validators, forms batches, keeps the log.

Started by the launcher on a prepared run folder. The rules are in `ledger/rules`, the HTTP calls in `api`; `desk` has
the run's secrets and blobs. It does not know the model, and does not import torch.
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace
from starlette.applications import Starlette

from shoal.config import (
    ACTIVATION_ERROR,
    ENV_SETTINGS,
    STAGE_KEYS,
    AdapterConfig,
    CriticConfig,
    DifficultyConfig,
    EnvConfig,
    JudgeConfig,
    MonitorsConfig,
    RunConfig,
    difficulty_of,
    sampling_of,
    wire_bounds,
)
from shoal.envs.declared import Declared, declared
from shoal.envs.evaluate import BATCH
from shoal.envs.load import env_digest
from shoal.errors import ConfigError, StateError
from shoal.folder import RunFolder, write_atomically
from shoal.ledger.facts.run import Admin, Create, Reconfigure, RunCreated
from shoal.ledger.law import LAW, Law
from shoal.ledger.log.book import Book
from shoal.ledger.log.store import Store, sqlite_url
from shoal.ledger.log.verify import AUDIT_CHAIN, SLOT_CHAIN
from shoal.net.connections import Limits, connections_that_fit, http_server
from shoal.net.keys import load_or_make_key
from shoal.net.listening import listen, port_of_last_start
from shoal.policy.render import Renderer
from shoal.protocol import types as t
from shoal.protocol.algorithms import vine_of
from shoal.protocol.bounds import dtypes_of
from shoal.protocol.constants import COMPLETIONS, EPISODES, MODEL_STOPS
from shoal.protocol.noise import PHILOX
from shoal.protocol.randomness import SecretChain
from shoal.protocol.tasklists import TaskList
from shoal.roles.coordinator.api import application
from shoal.roles.coordinator.desk import Desk
from shoal.roles.offering import kept_up
from shoal.tree import to_tree

log = logging.getLogger("coordinator")

TICK_S = 0.5


def main(run_dir: Path) -> None:
    """Serve a run until told to stop. Raises `StateError` if folder, log or port cannot be used."""
    folder = RunFolder(run_dir)
    config = folder.config()
    desk = open_run(folder, config)
    listener = listen(config.host.bind, config.host.port, port_of_last_start(folder.address), "host.port")
    host, port = listener.getsockname()[:2]
    url = config.host.public_url or f"http://{host}:{port}"
    write_atomically(folder.address, json.dumps({"url": url, "pid": os.getpid(), "port": port}).encode())
    log.info(
        "serving run=%s url=%s version=%d events=%d", desk.state.name, url, desk.state.main.version, desk.state.seq + 1
    )
    if behind := desk.clock_behind():
        log.warning("%s", behind)
    limits = Limits(total=connections_that_fit(), trusted=config.host.trusted_proxies)
    http_server(application(desk, lifespan=_ticking(desk)), limits).run(sockets=[listener])


def open_run(folder: RunFolder, config: RunConfig, clock: Callable[[], float] = time.time, law: Law = LAW) -> Desk:
    """Open a run's desk: replay its log, or begin one under `law`."""
    key = load_or_make_key(folder.keys / "run.key")
    book = Book(Store(sqlite_url(folder.log)))
    now = clock()
    if book.state.seq < 0:
        book.write(Create(created(folder, config, key.public, law), now), now)
    elif book.state.phase != "ended":
        if _unlabelled(env_specs(config)) != _unlabelled(book.state.envs):
            raise StateError(
                "an environment of this run has changed since the run started (its source, its tasks or its settings): put "
                "the old one back to resume, or start a new run"
            )
        if task_lists(folder, config, book.state.envs) != (book.state.task_lists or {}):  # guard: task-lists-of-the-log
            raise StateError(
                f"the task lists in {folder.task_lists} are not those that the log began with: restore them from a copy"
            )
        if config.train.algorithm != book.state.rules.algorithm:  # guard: algorithm-of-the-log
            raise StateError(
                f"the rules in the log name the algorithm {to_tree(book.state.rules.algorithm)} (an older log means the "
                f"defaults), but train.algorithm in {folder.run_file} is {to_tree(config.train.algorithm)}: "
                "restore that file to resume, or start a new run"
            )
        r = config.rollouts
        changed = Reconfigure(
            public_run_file(folder, config), config.steps, r.lease_s, now, r.max_flat_groups, config.verify.quarantine_s
        )
        book.write(changed, now)
        for validator in own_validators(folder, config):  # the host may have raised validators.count
            book.write(Admin("admit", validator, now), now)
    return Desk(folder, config, book, key, clock)


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
    """The run file's sampling. It names the rule of the stop tokens only if the first policy has its own: others have the
    log that they had before there were two rules."""
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
    for env in tree["envs"]:  # a run without settings has the log of before there were any
        for name in ENV_SETTINGS:
            if not env[name]:
                del env[name]
        if env["solved"] == 1.0:
            del env["solved"]
    if config.difficulty == DifficultyConfig():
        del tree["difficulty"]
    if config.monitors == MonitorsConfig():
        del tree["monitors"]
    for name in ("origin_port", "origin_url"):  # a run without them has the log of before there was an origin
        if not tree["host"][name]:
            del tree["host"][name]
    for name in ("anchor_every", "state_every"):
        if tree["storage"][name] == 1:
            del tree["storage"][name]
    for name, default in (("dtype", ""), ("moments", "float32"), ("packing", "padded"), ("recompute", "none")):
        if tree["train"][name] == default:
            del tree["train"][name]
    for section in ("train", "workers", "validators"):
        if tree[section]["device"] == "cpu":
            del tree[section]["device"]
    for section, name, usual in (("host", "shifts", "auto"), ("host", "dashboard", True), ("host", "dashboard_port", 0),
                                 ("host", "dashboard_url", ""), ("workers", "engine", ""), ("train", "minibatches", 1),
                                 ("train", "group_uses", 1), ("train", "repeated_groups", 0),
                                 ("eval", "dtype", "float32")):  # fmt: skip
        if tree[section][name] == usual:
            del tree[section][name]
    if config.eval.judge == JudgeConfig():
        del tree["eval"]["judge"]
    if config.eval.rows in (0, BATCH):  # as in old runs, whether it was found or not
        del tree["eval"]["rows"]
    if not config.policy.implementation:
        del tree["policy"]["implementation"]
    if not config.sampling.max_rollout_tokens:
        del tree["sampling"]["max_rollout_tokens"]
    if config.sampling.noise == PHILOX:
        del tree["sampling"]["noise"]
    if config.policy.adapter == AdapterConfig():
        del tree["policy"]["adapter"]
    elif not config.policy.adapter.base:
        del tree["policy"]["adapter"]["base"]
    if config.train.processes == 1:
        del tree["train"]["processes"]
    if config.train.truncation < 0:
        del tree["train"]["truncation"]
    if config.train.critic == CriticConfig():
        del tree["train"]["critic"]
    for name in ("teacher", "reward_model"):
        if not tree["train"][name]:
            del tree["train"][name]
    for env in tree["envs"]:  # a run whose workers play has the log that it had before hosts could
        for name, value in STAGE_KEYS.items():
            if env[name] == value:
                del env[name]
    if folder.has_public_secret(config):  # guard: no-seed-in-the-log
        del tree["seed"]
    return tree


def env_specs(config: RunConfig) -> list[t.EnvSpec]:
    """The run's environments with their digests and sizes."""
    return [_spec(e, declared(e), vine_of(config.train.algorithm) is not None) for e in config.envs]


def _spec(e: EnvConfig, env: Declared, continued: bool = False) -> t.EnvSpec:
    if continued and env.compares:  # guard: compared-is-not-continued
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
        kind=e.kind or EPISODES, reproducible=env.reproducible,
    )  # fmt: skip


def _unlabelled(specs: Iterable[t.EnvSpec]) -> list[t.EnvSpec]:
    """Without labels: old logs have none. A changed label is found with the other keys of the run file."""
    return [replace(spec, own_label="") for spec in specs]


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
        uses=t.Uses(config.train.group_uses, config.train.repeated_groups) if config.train.group_uses > 1 else UNSET,
    )


def bounds_of(config: RunConfig) -> dict[str, t.Bounds]:
    """The bounds for the run's own dtype. Work sampled in another dtype is not judged."""
    return {
        pair: wire_bounds(bounds)
        for pair, bounds in sorted(config.verify.bounds.items())
        if (dtypes := dtypes_of(pair)) and dtypes[0] == config.sampled_dtype
    }


def _ticking(desk: Desk) -> Any:
    """A lifespan that ticks the desk: rules have no clock, so the ticks make leases lapse and quarantines end in time."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def tick() -> None:
            while True:
                due = time.perf_counter() + TICK_S
                await asyncio.sleep(TICK_S)
                app.state.meter.late(time.perf_counter() - due)
                try:
                    await desk.tick()
                except StateError as error:  # a full disk must not stop the clock for good
                    log.warning("tick failed: %s", error)

        asking = kept_up("asking relays", lambda: desk.relays.run())
        tasks = [asyncio.create_task(tick()), asyncio.create_task(asking)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    return lifespan

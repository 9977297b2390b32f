"""Records golden logs: runs of today's rules, kept so that later code must replay them to the same state.

    python -m tests.golden.record

Delete the logs and run it when `RULES_VERSION` is raised, and again when that version is released; not at other times: what
former code wrote is what the test is for.

The real roles make the first four: a short demo with a cheating worker, as processes over HTTP; three validators of which
one refuses everything, and a worker that forges; a synchronous run whose processes are killed; and a synchronous run with
lapses, a quarantine, a slash, a renewed manifest and a drained end. The fifth is the rules alone, with what the others
lack. Beside each log is what its state was: head, state hash, balances, batches and versions.
`tests/golden/test_golden.py` replays them.
"""

import asyncio
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from benchmarks import kill_storm
from benchmarks.measure import wait_for
from shoal.engine.native import LocalEngine
from shoal.ledger.commands import Admin, LeaveRun, Reconfigure, Tick
from shoal.ledger.log.check import Audit, verify
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.state import state_hash
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest
from shoal.protocol.messages import AdminRequest
from shoal.roles.validator import Validator
from tests.attacks.validators import Hangman
from tests.ledger.ledger_fixture import World
from tests.roles.testbed import RunTestbed, tiny_run

DAY_S = 24 * 3600.0


def record_demo(root: Path) -> Path:
    """Processes over HTTP, one of three workers cheating."""
    out = root / "run"
    command = [sys.executable, "-m", "shoal.cli.main", "run", "recipes/wordle.toml", "--out", str(out)]
    subprocess.run([*command, "--set", "steps=6", "--set", "eval.episodes=0"], check=True, stdout=subprocess.DEVNULL)
    return out


def record_kills(root: Path) -> Path:
    """A synchronous run of processes, of which eight are killed."""
    out, rng = root / "run", random.Random(0)
    launcher = kill_storm.start(root, out, steps=12, staleness=0)
    wait_for(lambda: kill_storm.version(out) >= 1, "the first step")
    for role in (*kill_storm.ROLES, *kill_storm.ROLES):
        time.sleep(rng.uniform(0.5, 1.5))
        kill_storm.kill(launcher.pid, role, rng)
    assert launcher.wait(timeout=400) == 0
    return out


def record_liar(root: Path) -> Path:
    """Three validators of which one refuses everything, an honest worker and one that forges."""
    testbed = RunTestbed(root / "run", tiny_run(validators={"count": 3}, rollouts={"max_staleness": 1}))
    judges = [_validator(testbed, 0, Hangman), _validator(testbed, 1), _validator(testbed, 2)]
    workers = [testbed.worker("honest"), testbed.worker("forger", "other-seed")]
    asyncio.run(testbed.live(testbed.trainer(), *workers, *judges))
    return testbed.folder.root


def record_members(root: Path) -> Path:
    """A synchronous run with lapses, a quarantine, a slash, a renewal and a drained end."""
    ahead_s = 0.0

    def clock() -> float:
        return time.time() + ahead_s

    testbed = RunTestbed(
        root / "run", tiny_run(validators={"count": 3}, steps=40, rollouts={"lease_s": 1.0}), clock=clock
    )
    stranger = testbed.client(root / "stranger.key")

    async def take_and_drop() -> None:
        stranger.run = (await stranger.get_json("/v1/run", t.RunInfo)).run
        await stranger.post_json("/v1/nodes", t.Join("worker", "x", 0.0, "i", "float32", "cpu"), t.NodeState)
        while True:
            held = tuple(lease.id for lease in testbed.coordinator.state.open_leases_of(stranger.key.public))
            await stranger.post_json("/v1/leases", t.LeaseRequest(held), t.LeaseAnswer)
            await asyncio.sleep(0.05)

    async def until(version: int) -> None:
        while testbed.coordinator.state.main.version < version:
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        nonlocal ahead_s
        judges = [_validator(testbed, i, clock=clock) for i in range(3)]
        workers = [testbed.worker("honest"), testbed.worker("forger", "other-seed")]
        async with asyncio.TaskGroup() as group:
            taker = group.create_task(take_and_drop())
            life = group.create_task(testbed.live(testbed.trainer(), *workers, *judges, limit_s=200.0))
            await until(2)
            await testbed.coordinator.log_writer.submit(Admin("pause", AdminRequest(), clock()))
            await asyncio.sleep(1.0)
            before = testbed.coordinator.state.main.versions[testbed.coordinator.state.main.version].manifest
            ahead_s = 5 * DAY_S
            while testbed.coordinator.state.main.versions[testbed.coordinator.state.main.version].manifest == before:
                await asyncio.sleep(0.1)
            await testbed.coordinator.log_writer.submit(Admin("resume", AdminRequest(), clock()))
            await until(4)
            await until(6)
            await testbed.coordinator.log_writer.submit(Admin("drain", AdminRequest(), clock()))
            while testbed.coordinator.state.phase != "ended":
                await asyncio.sleep(0.1)
            taker.cancel()
            await life

    asyncio.run(scenario())
    return testbed.folder.root


def record_rules(root: Path) -> Path:
    """The rules alone, without models: what the other logs lack (forfeits, voids, a kick, a late lapse, a removal)."""
    judges = tuple(sorted(digest(name) for name in (b"one", b"two", b"three")))
    world = World(root, judges, group_size=2, block_groups=1, batch_groups=2, max_staleness=1, steps=3)
    worker, leaver, slow = (digest(name) for name in (b"worker", b"leaver", b"slow"))
    for key in (worker, leaver, slow):
        world.enter(key)
    world.publish()
    good, flat = (0.0, 1.0), (1.0, 1.0)
    for rewards in (good, flat):
        world.serve(worker, by=judges[0], rewards=rewards)
    void = world.submit(worker, world.lease(worker))
    for judge in judges[:2]:
        world.judge(void, "void", by=judge, check="environment")
    for _ in range(4):  # lapses beyond the free share cost what is not vested
        world.lease(worker)
        world.now += 40.0
        world.do(Tick(world.now))
        world.now += 4000.0
    refused = world.submit(worker, world.lease(worker))
    for judge in judges[:2]:
        world.judge(refused, "soft", by=judge, check="environment")
    world.now += 4000.0
    world.do(Tick(world.now))
    again = world.submit(worker, world.lease(worker), recheck=0.0)
    world.judge(again, by=judges[0], rewards=good)
    world.now += 700.0
    world.do(Tick(world.now))
    held = world.lease(slow)
    world.serve(worker, by=judges[0], rewards=good)
    world.publish()
    world.now += 4000.0
    world.do(Tick(world.now))
    world.serve(worker, by=judges[0], rewards=good)
    world.serve(worker, by=judges[1], rewards=good)
    world.publish()
    assert held.id in world.state.leases
    world.lease(leaver)
    world.do(Admin("kick", AdminRequest(leaver), world.now))
    world.do(LeaveRun(slow, world.now, int(world.now)))
    world.do(Reconfigure({**world.state.config, "note": 1}, 4, 20.0, world.now))
    for step in range(2, 4):
        while step not in world.state.main.batches:
            world.serve(worker, by=judges[step % 3], rewards=good)
        world.publish()
    return root


def _validator(testbed: RunTestbed, number: int, kind: type = Validator, **options: object) -> Validator:
    client = testbed.client(testbed.folder.keys / f"validator-{number}.key")
    home = testbed.folder.nodes / f"validator-{number}"
    return kind(client, home, partial(LocalEngine, 1), own_files=True, **options)


LOGS = {
    "demo": record_demo,
    "kills": record_kills,
    "liar": record_liar,
    "members": record_members,
    "rules": record_rules,
}


def facts_of(audit: Audit) -> dict[str, object]:
    """What a replay of a log must give. The state hash is of the code that recorded it: later records may have fields."""
    state = audit.state
    return {
        "head": state.head,
        "state_hash": state_hash(state),
        "balances": {key: [node.credits, node.vested, *node.stake] for key, node in sorted(state.members.items())},
        "standing": {key: node.standing for key, node in sorted(state.members.items())},
        "batches": {str(step): [list(place) for place in places] for step, places in state.main.batches.items()},
        "versions": {str(number): version.root for number, version in state.main.versions.items()},
        "phase": state.phase,
        "findings": audit.findings,
        "events": dict(Counter(type(entry.body).__name__ for entry in audit.entries)),
    }


def main() -> None:
    """Record the logs that the folder lacks."""
    folder = Path(__file__).parent / "logs"
    folder.mkdir(exist_ok=True)
    for name, record in LOGS.items():
        if (folder / f"{name}.json").exists():
            continue
        with tempfile.TemporaryDirectory() as root:
            store = Store(sqlite_url(record(Path(root)) / "log.sqlite"))
            rows = list(store.read())
            with gzip.GzipFile(folder / f"{name}.jsonl.gz", "wb", mtime=0) as file:
                file.writelines(data + b"\n" for data, _ in rows)
            (folder / f"{name}.json").write_text(json.dumps(facts_of(verify(store.read())), indent=1) + "\n")
            print(name, len(rows), "events", flush=True)


if __name__ == "__main__":
    main()

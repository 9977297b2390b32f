"""The coordinator's calls as strangers use them: what they answer, what they refuse and what they keep private."""

import asyncio
import contextlib
import json
import shutil
import sqlite3

import httpx
import pytest
from msgspec.structs import replace

from shoal.config import BOUNDS
from shoal.errors import NothingYet, StateError
from shoal.humanize import duration
from shoal.ledger.commands import Admin, JoinRun, LeaveRun
from shoal.ledger.errors import Refused
from shoal.ledger.event_types import kind_of
from shoal.ledger.log.check import verify
from shoal.ledger.remedies import WORKER_REMEDY
from shoal.ledger.state import State
from shoal.ledger.status import ALL_GONE, awaited
from shoal.net.client import PeerRefused
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import Grpo
from shoal.protocol.audit_and_pay import CHECKS, MAX_REASON_CHARS
from shoal.protocol.constants import MANIFEST_LIFETIME_S, MAX_FACT_CHARS, MAX_JSON_BYTES, MAX_NODES
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.messages import AdminRequest
from shoal.protocol.tolerances import bounds_for
from shoal.roles.coordinator.main import demand_steps, open_run, rules_of
from shoal.roles.coordinator.routes import application
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.coordinator.version_uploads import admit_trainer, put_chunk, signed_manifest, take_checkpoint
from shoal.run_folder import RunFolder
from shoal.runs.log_source import demand_whole_log
from shoal.typed_toml import to_tree
from shoal.weights.manifest import ManifestTrust, open_manifest, sign_manifest
from tests.ledger.ledger_fixture import World
from tests.roles.testbed import URL, RunTestbed, tiny_run


@pytest.fixture
def testbed(tmp_path):
    return RunTestbed(tmp_path / "run", tiny_run())


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    """A run that nobody has joined, for tests that only read."""
    return RunTestbed(tmp_path_factory.mktemp("idle") / "run", tiny_run())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of one worker."""
    testbed = RunTestbed(tmp_path_factory.mktemp("finished") / "run", tiny_run())
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("one")))
    testbed.coordinator.log_writer.store.close()
    return testbed


@pytest.fixture
def ended(finished, tmp_path):
    """A copy of the finished run."""
    shutil.copytree(finished.folder.root, tmp_path / "run")
    return RunTestbed(tmp_path / "run", tiny_run())


def ask(testbed, scenario):
    """Run a story with a client that has a fresh key and knows the run."""

    async def whole():
        client = testbed.client(testbed.folder.root / "stranger.key")
        client.run = testbed.coordinator.state.run
        async with client:
            return await scenario(client)

    return asyncio.run(whole())


def join(role="worker"):
    return t.Join(role, "stranger", 0.0, "test", "float32", "cpu")


def test_anyone_reads_the_run_the_nodes_the_log_and_the_calls(testbed):
    async def scenario(client):
        info = await client.get_json("/v1/run", t.RunInfo)
        events = (await client.get("/v1/events?after=-1")).splitlines()
        openapi = json.loads(await client.get("/openapi.json"))
        return info, events, openapi, await client.get_json("/v1/status", t.Status)

    info, events, openapi, status = ask(testbed, scenario)
    assert info.run == testbed.folder.run_id() and info.version == -1
    assert digest(events[0]) and json.loads(events[0])["kind"] == "run_created"
    assert "/v1/leases/{id}/submission" in openapi["paths"]
    assert status.waiting_for == "the trainer: the first version"


def test_no_answer_holds_a_secret(testbed):
    links = [link.hex().encode() for link in testbed.coordinator.slot_links[1:50]]

    async def scenario(client):
        return b"".join([await client.get(path) for path in ("/v1/run", "/v1/events?after=-1", "/v1/state")])

    answers = ask(testbed, scenario)
    assert not any(link in answers for link in links)
    assert testbed.folder.secret().hex().encode() not in answers


def test_log_holds_no_seed_of_the_run_file(testbed):
    resumed = open_run(testbed.folder, replace(testbed.config, steps=4))
    bodies = [entry.body for entry in verify(resumed.log_writer.store.read()).entries]
    assert [kind_of(body) for body in bodies] == ["run_created", "rules_changed"]
    assert testbed.config.seed == 5 and not any("seed" in body.config for body in bodies)
    told = {k: v for k, v in to_tree(replace(testbed.config, steps=4)).items() if k != "seed"}
    assert told.pop("logging")["to"] == ["jsonl"]
    assert bodies[-1].config == told


def test_unsigned_writes_are_refused(testbed):
    async def scenario(_):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(testbed.app), base_url=URL) as bare:
            paths = ["/v1/nodes", "/v1/leases", "/v1/checkpoints", "/v1/admin/pause"]
            answers = [await bare.post(path, content=to_json(join())) for path in paths]
            answers.append(await bare.put("/v1/blobs/" + "0" * 64, content=b""))
            answers.append(await bare.put("/v1/leases/0/submission", content=b""))
            return [answer.status_code for answer in answers]

    assert ask(testbed, scenario) == [401] * 6
    assert testbed.coordinator.state.seq == 0


@pytest.mark.parametrize("role", ["validator", "trainer"])
def test_a_stranger_is_neither_validator_nor_trainer(testbed, role):
    async def scenario(client):
        await client.post_json("/v1/nodes", join(role), t.NodeState)

    with pytest.raises(PeerRefused, match=r"admit|trainer key"):
        ask(testbed, scenario)


def test_joining_twice_is_joining_once(testbed):
    async def scenario(client):
        first = await client.post_json("/v1/nodes", join(), t.NodeState)
        seq = testbed.coordinator.state.seq
        assert await client.post_json("/v1/nodes", join(), t.NodeState) == first
        return seq

    assert ask(testbed, scenario) == testbed.coordinator.state.seq


def test_only_the_run_key_administers(testbed):
    async def stranger(client):
        await client.post_json("/v1/admin/pause", t.AdminRequest(), t.Status)

    with pytest.raises(PeerRefused, match="run key"):
        ask(testbed, stranger)

    async def host():
        client = testbed.client(testbed.folder.keys / "run.key")
        client.run = testbed.coordinator.state.run
        async with client:
            return (await client.post_json("/v1/admin/pause", t.AdminRequest(), t.Status)).phase

    assert asyncio.run(host()) == "paused"


def test_only_the_trainer_sends_chunks_and_each_under_its_hash(testbed):
    chunk = b"weights"
    admit_trainer(testbed.coordinator, testbed.coordinator.state.trainer_key)
    with pytest.raises(Refused, match="only the trainer sends chunks"):
        admit_trainer(testbed.coordinator, "a" * 64)
    with pytest.raises(Refused, match="do not have the hash in the path"):
        put_chunk(testbed.coordinator, digest(b"other"), chunk, digest(chunk))
    assert not testbed.coordinator.blobs.has(digest(chunk))
    put_chunk(testbed.coordinator, digest(chunk), chunk, digest(chunk))
    assert testbed.coordinator.blobs.has(digest(chunk))


def test_bodies_are_private_until_judged(testbed):
    """A worker cannot read another's submission until its slots are final. Then anyone can audit it."""

    async def scenario(client):
        worker, trainer = testbed.worker("honest"), testbed.trainer()
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.run())
            group.create_task(worker.run())
            while not testbed.coordinator.state.pending:
                await asyncio.sleep(0.02)
            name = testbed.coordinator.state.pending[0]
            with pytest.raises(NothingYet):
                await client.get_blob(name, cap=1 << 20)
            judging = group.create_task(testbed.validator().run())
            while not testbed.coordinator.state.submissions[name].decided:
                await asyncio.sleep(0.02)
            assert digest(await client.get_blob(name, cap=1 << 20)) == name
            await testbed.coordinator.log_writer.submit(Admin("drain", AdminRequest(), testbed.coordinator.clock()))
            for role in (worker, trainer):
                role.stopping.set()
            judging.cancel()

    ask(testbed, scenario)


def test_an_environment_that_changed_is_refused_on_resume(testbed, monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.main.env_digest", lambda name: "0" * 64)
    with pytest.raises(StateError, match=rf"have changed .*{testbed.config.envs[0].label}"):
        open_run(testbed.folder, testbed.config)


def test_an_algorithm_other_than_that_of_the_log_is_refused_on_resume(testbed):
    assert testbed.coordinator.state.rules.algorithm == testbed.config.train.algorithm == Grpo()
    other = tiny_run(train={"algorithm": {"name": "grpo", "advantage": "mean_std"}})
    with pytest.raises(StateError, match=r"'advantage': 'mean'.*'advantage': 'mean_std'"):
        open_run(testbed.folder, other)


def test_a_changed_run_file_is_refused_on_resume_naming_the_keys(testbed):
    with pytest.raises(StateError, match=r"train\.lr"):
        testbed.folder.prepare(tiny_run(train={"lr": 5e-4}), testbed.folder.root)
    testbed.folder.prepare(tiny_run(steps=9), testbed.folder.root)
    assert to_tree(testbed.folder.start_config())["steps"] == 9
    assert to_tree(testbed.folder.config())["steps"] == testbed.config.steps, "the run keeps its file until it goes on"
    assert open_run(testbed.folder, testbed.folder.start_config()).state.rules.steps == 9


def test_a_run_file_may_change_after_a_start_that_was_refused(tmp_path):
    """Its model or its data was missing, so neither the log nor the first policy was made."""
    folder = RunFolder(tmp_path / "run")
    folder.prepare(tiny_run(), tmp_path)
    first = folder.secret()
    assert not folder.prepare(tiny_run(seed=6, train={"lr": 5e-4}), tmp_path), "a new run"
    assert folder.config().train.lr == 5e-4 and folder.secret() != first, "the secret follows from the seed"
    folder.policy.mkdir()
    with pytest.raises(StateError, match=r"train\.lr"):
        folder.prepare(tiny_run(seed=6), tmp_path)


@pytest.fixture
def world(tmp_path):
    """A log of three steps, of which two are taken."""
    world = World(tmp_path, steps=3)
    world.enter("a" * 64)
    world.publish()
    for version in range(2):
        while version not in world.state.main.batches:
            world.judge(world.submit("a" * 64, world.lease("a" * 64)))
        world.publish()
    return world


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_is_not_ended_by_fewer_steps_than_it_has_reached(world, tmp_path, steps):
    with pytest.raises(StateError, match=f"steps = {steps}, and the run .* version 2 of steps = 3: .*--set steps=3"):
        demand_steps(world.state, steps, RunFolder(tmp_path))
    demand_steps(world.state, 3, RunFolder(tmp_path))
    demand_steps(world.state, 9, RunFolder(tmp_path))


def test_a_run_without_validators_says_how_to_admit_one(tmp_path):
    world = World(tmp_path, validators=())
    world.enter("a" * 64)
    world.publish()
    world.submit("a" * 64, world.lease("a" * 64))
    cause, remedy = awaited(world.state)
    assert "and no validator is admitted" in cause and "shoal admin admit RUN_DIR KEY" in remedy
    world.do(Admin("admit", AdminRequest("e" * 64), world.now))
    assert awaited(world.state)[0].startswith("validators: ")


def test_a_wait_for_workers_says_how_many_are_quarantined_or_that_all_left(tmp_path):
    world = World(tmp_path)
    for key in ("a" * 64, "b" * 64):
        world.enter(key)
    world.publish()
    assert "quarantined" not in awaited(world.state)[0]
    world.do(Admin("quarantine", AdminRequest("a" * 64), world.now))
    assert awaited(world.state)[0].endswith("; 1 of 2 workers is quarantined")
    for key in ("a" * 64, "b" * 64):
        world.do(LeaveRun(key, world.now))
    assert awaited(world.state)[0].endswith(ALL_GONE)


def test_workers_that_left_before_the_host_started_are_not_back_yet(tmp_path):
    world, worker = World(tmp_path), "a" * 64
    testbed = RunTestbed(tmp_path / "run", tiny_run(), clock=lambda: world.now)
    status_cache = StatusCache(testbed.coordinator)
    world.enter(worker)
    world.publish()
    world.do(LeaveRun(worker, world.now))
    testbed.coordinator.log_writer = world.log_writer
    assert status_cache.status().waiting_for.endswith("; no worker has come back since the host started")
    testbed.coordinator.heard["d" * 64] = world.now
    assert ALL_GONE not in status_cache.status().waiting_for, "a validator is none"
    testbed.coordinator.heard[worker] = world.now
    assert status_cache.status().waiting_for.endswith(ALL_GONE)


def test_a_wait_for_workers_says_how_many_wait_after_lapses(tmp_path):
    world = World(tmp_path)
    testbed = RunTestbed(tmp_path / "run", tiny_run(), clock=lambda: world.now)
    status_cache = StatusCache(testbed.coordinator)
    for key in ("a" * 64, "b" * 64):
        world.enter(key)
    world.publish()
    testbed.coordinator.log_writer, member = world.log_writer, world.state.members["a" * 64]
    member.dropped, member.dropped_at = 1, world.now
    assert "lapsed" not in status_cache.status().waiting_for, "the first lapse makes no wait"
    member.dropped = 2
    first_s = world.state.rules.lease_s
    assert (
        f"; 1 of 2 workers waits for a lease, because theirs lapsed in a row: the first {duration(first_s)} more at most"
        in (status_cache.status().waiting_for)
    )
    world.now += first_s
    assert "lapsed" not in status_cache.status().waiting_for


def test_a_wait_for_workers_names_the_one_that_is_silent_also_after_its_lease_lapsed(tmp_path):
    now = [1000.0]
    testbed = RunTestbed(tmp_path / "run", tiny_run(), clock=lambda: now[0])
    status_cache, world = StatusCache(testbed.coordinator), World(tmp_path)
    for key in ("a" * 64, "b" * 64):
        world.enter(key)
    world.publish()
    lease = world.lease("a" * 64)
    now[0], testbed.coordinator.log_writer = world.now, world.log_writer
    status_cache._began = now[0]

    def at(after_s, *heard):
        now[0] = world.now + after_s
        testbed.coordinator.heard |= {key * 64: now[0] for key in heard}
        silent = {node.name: round(node.silent_s) for node in status_cache.nodes() if node.silent_s}
        return status_cache.status(), silent

    world.state.leases[lease.id].soft = world.now + 60.0
    status, silent = at(50.0, "b")
    assert "silent" not in status.waiting_for and silent == {}, "it may be at work"
    status, silent = at(70.0, "b")
    said = "workers: aaaaaa (aaaaaaaaaaaa) silent for 1m10s; 0 of "
    assert status.waiting_for.startswith(said) and silent == {"aaaaaa": 70}
    assert status.remedy == "", "to start it again would lose its work"
    world.state.close(world.state.leases[lease.id])
    status, silent = at(80.0, "b")
    assert "silent" not in status.waiting_for and silent == {"aaaaaa": 80}, "its groups go to the other"
    status, silent = at(170.0)
    said = "aaaaaa (aaaaaaaaaaaa) silent for 2m50s, bbbbbb (bbbbbbbbbbbb) silent for 1m30s; "
    assert said in status.waiting_for and len(silent) == 2
    assert status.remedy == WORKER_REMEDY
    world.do(LeaveRun("a" * 64, world.now))
    assert "a (aaaaaaaaaaaa)" not in at(171.0)[0].waiting_for


def test_a_request_of_a_member_is_heard_and_a_strangers_is_not(testbed):
    async def scenario(client):
        with contextlib.suppress(PeerRefused):
            await client.post_json("/v1/leases", t.LeaseRequest((), 0.0), t.LeaseAnswer)
        strangers = dict(testbed.coordinator.heard)
        await client.post_json("/v1/nodes", join(), t.NodeState)
        await client.send("POST", "/v1/nodes/leave", b"", t.NodeState)
        return strangers, list(testbed.coordinator.heard), client.key.public

    strangers, heard, key = ask(testbed, scenario)
    assert strangers == {} and heard == [key]


def test_steps_of_a_run_that_drains_are_not_raised_in_vain(world, tmp_path):
    world.lease("a" * 64)
    world.do(Admin("drain", AdminRequest(), world.now))
    assert world.state.phase == "draining"
    with pytest.raises(StateError, match=r"is draining, so it ends .* set steps = 3, as before.* resume '.*/a run'`"):
        demand_steps(world.state, 4, RunFolder(tmp_path / "a run"))


def test_a_run_that_would_end_at_once_is_ended_by_a_host_that_was_started(world, tmp_path):
    with pytest.raises(StateError, match=r"To end it, start it so, and then type `shoal admin drain '.*/a run'`"):
        demand_steps(world.state, world.state.main.version, RunFolder(tmp_path / "a run"))


def test_a_run_that_has_ended_keeps_its_steps_and_names_its_policy(finished):
    for steps in (2, 9):
        with pytest.raises(StateError, match=r"ended at version 3, with steps = 3.*policy\.path=.*/checkpoints/final"):
            open_run(finished.folder, tiny_run(steps=steps))
    again = open_run(finished.folder, tiny_run())
    assert again.state.phase == "ended"
    assert StatusCache(again).state_hash() == StatusCache(finished.coordinator).state_hash()


def test_a_log_that_lacks_versions_of_its_folder_is_not_continued(world, tmp_path):
    """A kill leaves the trainer one version ahead of the log at most, and none ahead of one that was never begun."""
    folder = RunFolder(tmp_path / "run")
    demand_whole_log(State(), folder)
    for path in (folder.trainer / "v000000", folder.trainer / ".writing", folder.checkpoints / "final"):
        path.mkdir(parents=True)
    for version in (2, 3):  # the log is at 2
        (folder.trainer / f"v{version:06d}").mkdir()
        demand_whole_log(world.state, folder)
    with pytest.raises(
        StateError, match=r"has reached version 3, and log\.sqlite has no version: .* backup .* --out DIR"
    ):
        demand_whole_log(State(), folder)
    (folder.trainer / "journal").mkdir()
    for late in (
        folder.checkpoints / "v000004",
        folder.trainer / "v000004",
        folder.trainer / "journal" / "v000004.step",
    ):
        late.mkdir()
        with pytest.raises(StateError, match=r"has reached version 4, and log\.sqlite ends at version 2"):
            demand_whole_log(world.state, folder)
        late.rmdir()


def test_a_run_whose_log_was_deleted_is_not_begun_again(ended):
    for file in ended.folder.root.glob("log.sqlite*"):
        file.unlink()
    for _ in range(2):  # the second time there is an empty log
        with pytest.raises(StateError, match=r"has reached version 3, and log\.sqlite has no version"):
            open_run(ended.folder, tiny_run())


def test_a_copy_of_the_log_that_is_older_by_moments_is_not_continued(ended, caplog):
    testbed, head = ended, ended.coordinator.state.head
    seq = max(submission.seq for submission in testbed.coordinator.state.submissions.values())
    with contextlib.closing(sqlite3.connect(testbed.folder.log)) as database:
        database.execute("DELETE FROM events WHERE seq >= ?", (seq,))
        database.commit()
    with pytest.raises(
        StateError, match=rf"one/receipts.jsonl holds a receipt for event {seq}, .* \(it ends at event "
    ):
        open_run(testbed.folder, tiny_run())
    receipts = {path: path.read_bytes() for path in testbed.folder.nodes.glob("*/receipts.jsonl")}
    for path in receipts:
        path.unlink()  # as of workers elsewhere
    again = open_run(testbed.folder, tiny_run())
    testbed.app = application(again)
    for path, data in receipts.items():
        path.write_bytes(data)
    with pytest.raises(PeerRefused, match="is not in this log"):
        asyncio.run(asyncio.wait_for(testbed.worker("one").run(), 30))

    async def ask():
        async with testbed.client(testbed.folder.nodes / "one" / "node.key") as client:
            client.run, client.head = testbed.coordinator.state.run, head
            await client.post_json("/v1/leases", t.LeaseRequest(()), t.LeaseAnswer)

    for _ in range(2):
        with pytest.raises(PeerRefused, match="is not in this log"):
            asyncio.run(ask())
    assert (
        caplog.text.count("stop now: what is written from here on forks the run.")
        == 1
        == caplog.text.count("this node lies")
    )
    (told,) = [node.key for node in StatusCache(again).nodes() if node.forked]
    assert told == load_or_make_key(testbed.folder.nodes / "one" / "node.key").public


def test_a_host_that_resumes_with_more_validators_admits_them(testbed):
    before = testbed.coordinator.state.validators
    again = open_run(testbed.folder, tiny_run(validators={"count": 3}))
    assert len(before) == 1 and again.state.validators[0] == before[0] and len(again.state.validators) == 3
    keys = [(testbed.folder.keys / f"validator-{i}.key") for i in range(3)]
    assert [load_or_make_key(key).public for key in keys] == list(again.state.validators)
    assert open_run(testbed.folder, tiny_run(validators={"count": 3})).state.seq == again.state.seq


def test_a_host_does_not_resume_with_one_of_the_validators_that_judge(testbed):
    """One alone refuses nothing while two others may come back."""
    open_run(testbed.folder, tiny_run(validators={"count": 3})).log_writer.store.close()
    coordinator = open_run(testbed.folder, tiny_run(validators={"count": 3}))
    for i in range(3):
        key = load_or_make_key(testbed.folder.keys / f"validator-{i}.key").public
        enter = JoinRun(key, t.Join("validator", f"validator-{i}", 0.0, "test", "float32", "cpu"), coordinator.clock())
        coordinator.log_writer.write(enter, coordinator.clock())
    with pytest.raises(StateError, match=r"validator-1, validator-2 .* Set validators\.count = 3, as before.*kick"):
        open_run(testbed.folder, tiny_run(validators={"count": 1}))
    for name in ("validator-1", "validator-2"):
        coordinator.log_writer.write(Admin("kick", AdminRequest(name), coordinator.clock()), coordinator.clock())
    assert open_run(testbed.folder, tiny_run(validators={"count": 1})).state.phase == "running"


def test_the_rules_have_only_the_bounds_of_the_dtype_that_workers_sample_in():
    rules = rules_of(tiny_run(policy={"dtype": "bfloat16"}))
    assert rules.dtype == "bfloat16" and rules.bounds.keys() == {"bfloat16/bfloat16", "bfloat16/float32"}
    declared = rules_of(tiny_run(policy={"dtype": "bfloat16"}, sampling={"dtype": "int8"}))
    assert declared.dtype == "int8" and declared.bounds.keys() == {"int8/int8"}


def test_the_rules_keep_the_bounds_of_other_kinds_of_engines():
    tight = {"gap": 0.1, "flipped": 1e-4, "mean_gap": 1e-5, "logprob": 0.1, "logprob_mean": 0.01, "largest_logit": 8.0}
    pairs = ("remote:bfloat16/float32", "bfloat16/remote:bfloat16", "remote:float32/float32", "float32/remote:bfloat16")
    bounds = {pair: to_tree(built_in) for pair, built_in in BOUNDS.items()} | dict.fromkeys(pairs, tight)
    rules = rules_of(tiny_run(policy={"dtype": "bfloat16"}, verify={"bounds": bounds}))
    assert rules.bounds.keys() & {*pairs} == {*pairs[:2]}
    assert (
        rules.bounds[pairs[0]] == bounds_for(rules, "shoal-remote/1", "shoal-local/1", "float32") == t.Bounds(**tight)
    )


def test_the_quota_stops_leases_and_says_so(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(storage={"quota_mb": 1}))

    async def scenario(client):
        await client.post_json("/v1/nodes", join(), t.NodeState)
        testbed.coordinator.blobs.put(bytes(1_100_000))
        return (await client.post_json("/v1/leases", t.LeaseRequest(), t.LeaseAnswer)).reason

    async def impatient(client):
        async with asyncio.timeout(60):
            return await scenario(client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.roles.coordinator.routes.LONG_POLL_S", 0.1)
        assert "quota" in ask(testbed, impatient)
        assert (
            "no lease is granted: the host's disk quota is used up"
            in StatusCache(testbed.coordinator).status().waiting_for
        )


def test_the_state_is_hashed_once_for_each_head_and_seldom_if_it_takes_long(testbed, monkeypatch):
    now, hashed = [1000.0], []

    def slowly(state):
        hashed.append(state.seq)
        now[0] += 0.5
        return "0" * 64

    monkeypatch.setattr("shoal.roles.coordinator.status.state_hash", slowly)
    testbed.coordinator.clock = lambda: now[0]
    status_cache = StatusCache(testbed.coordinator)
    first = status_cache.state_hash()
    now[0] += 100.0
    assert status_cache.state_hash() == first and hashed == [0]
    for at, action in ((0.0, "pause"), (10.0, "resume")):
        now[0] += at
        asyncio.run(testbed.coordinator.log_writer.submit(Admin(action, AdminRequest(), now[0])))
        assert status_cache.state_hash().seq == 1
    now[0] += 15.0
    newest = status_cache.state_hash()
    assert (newest.seq, newest.head) == (2, testbed.coordinator.state.head) and hashed == [0, 1, 2]


def test_a_wait_counts_from_when_its_cause_began_and_a_run_that_has_ended_waits_for_nothing(testbed, monkeypatch):
    now = [testbed.coordinator.state.time + 100.0]
    testbed.coordinator.clock = lambda: now[0]
    status_cache = StatusCache(testbed.coordinator)

    def waited_s(after_s, action=""):
        if action:
            asyncio.run(testbed.coordinator.log_writer.submit(Admin(action, AdminRequest(), now[0])))
        now[0] += after_s
        return status_cache.status().waiting_s

    assert (waited_s(0.0), waited_s(50.0)) == (0.0, 50.0)
    assert waited_s(30.0, "pause") == 30.0, "from the pause, not from when somebody looked"
    assert waited_s(20.0, "resume") == 20.0
    monkeypatch.setattr("shoal.ledger.status.without_signal", lambda *of: f"the last {now[0]} groups")
    waited_s(40.0)
    assert waited_s(5.0, "pause") == 5.0, "from the pause, and not from the first group without signal"
    assert waited_s(5.0) == 10.0, "though its words have other numbers"
    monkeypatch.setattr(testbed.coordinator.state, "phase", "ended")
    assert waited_s(60.0) == 0.0

    async def scenario(client):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(testbed.app), base_url=URL) as http:
            return (await http.get("/")).text

    front = ask(testbed, scenario)
    assert "the run has ended" in front and "waiting" not in front


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "x", "\u0663"])
@pytest.mark.parametrize("path", ["/v1/manifests/{}", "/v1/batches/{}", "/v1/events?after={}", "/v1/nodes/{}/credits"])
def test_no_number_in_a_path_or_query_makes_the_coordinator_fail(idle, path, number, monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.routes.LONG_POLL_S", 0.0)

    async def scenario(client):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(idle.app), base_url=URL) as http:
            return await http.get(path.format(number))

    answer = ask(idle, scenario)
    assert answer.status_code in (200, 400, 404) and len(answer.content) < 6000


def test_a_manifest_signed_again_is_ignored_at_first_and_served_after_half_its_life(tmp_path):
    now = 1_800_000_000.0
    testbed = RunTestbed(tmp_path / "run", tiny_run(), clock=lambda: now)
    key = load_or_make_key(testbed.folder.keys / "trainer.key")
    chunk = testbed.coordinator.blobs.put(b"weights")
    entry = t.FileEntry("model.safetensors", 7, chunk, (chunk,))
    manifest = t.Manifest(
        testbed.coordinator.state.run, "policy", 0, (), "float32", "a" * 64, (entry,), 8 << 20, 0.0, 0.0
    )

    def publish(manifest):
        asyncio.run(take_checkpoint(testbed.coordinator, key.public, to_json(sign_manifest(manifest, key, now=now))))
        return open_manifest(
            signed_manifest(testbed.coordinator, "latest"), ManifestTrust(manifest.run, (key.public,)), now=now
        )

    first = publish(manifest)
    events = testbed.coordinator.state.seq
    now += 60.0
    assert publish(manifest) == first and testbed.coordinator.state.seq == events
    now += MANIFEST_LIFETIME_S / 2
    with pytest.raises(Refused, match="published once"):
        publish(replace(manifest, root="b" * 64))
    assert publish(manifest).issued == now and testbed.coordinator.state.seq == events + 1


def test_nodes_are_read_page_by_page_in_the_order_in_which_they_joined(testbed, monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.status.MAX_NODES", 3)
    for number in range(7):
        join = t.Join("worker", f"w{number}", 0.0, "x", "float32", "cpu")
        testbed.coordinator.log_writer.write(JoinRun(digest(b"%d" % number), join, 0.0), 0.0)

    async def scenario(client):
        pages = [await client.get_json("/v1/nodes", list[t.NodeState])]
        while len(pages[-1]) == 3:
            pages.append(await client.get_json(f"/v1/nodes?after={pages[-1][-1].key}", list[t.NodeState]))
        with pytest.raises(NothingYet, match="no node 1234 in this run"):
            await client.get_json("/v1/nodes?after=1234", list[t.NodeState])
        return [[node.name for node in page] for page in pages]

    assert ask(testbed, scenario) == [["w0", "w1", "w2"], ["w3", "w4", "w5"], ["w6"]]


def test_a_page_of_the_longest_nodes_fits_into_an_answer():
    wide = "\N{CJK UNIFIED IDEOGRAPH-20000}"
    said = wide * (MAX_REASON_CHARS + 60)  # a reason and its figures
    longest = t.NodeState(
        "f" * 64, "validator", wide * MAX_FACT_CHARS, "quarantined", 2**63, 2**63, 2**63, 2**63,
        dict.fromkeys(CHECKS, 2**63), said, 2**63, 2**63, -1.2345678901234567e-300, 2**63, False, 2**63, 2**63,
    )  # fmt: skip
    assert MAX_NODES * (len(to_json(longest)) + 1) + 2 <= MAX_JSON_BYTES

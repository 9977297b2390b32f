"""A framed worker can prove it: what the host signed for it, and what it sent, convict the host before anyone who has the
public log. An honest run's evidence accuses nobody."""

import asyncio
import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest

from shoal.cli import main
from shoal.errors import ConfigError, PeerError
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.submissions import SubmissionReceived
from shoal.ledger.verdicts import VerdictGiven
from shoal.ledger.versions import CheckpointPublished, LinkRevealed
from shoal.models.random_model import make_tiny
from shoal.net.client import Client, PeerRefused
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest, from_json, to_json
from shoal.protocol.host_signatures import is_promised, sign_promise
from shoal.protocol.noise import KEYED_32
from shoal.roles.auditor.rejudge_groups import AGREE, CANNOT, DISAGREE, GroupChoice, audit_rollouts
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.node import evidence_store
from shoal.roles.node.evidence_store import EvidenceStore
from shoal.roles.node.lifecycle import Node
from shoal.roles.node.session import Contradiction
from shoal.roles.worker.worker import Worker
from shoal.runs.log_source import FolderRun
from shoal.weights.manifest import content_of, sign_manifest
from shoal.weights.publish import PublishSettings, publish
from tests.roles.forgery import bodies, forged
from tests.roles.test_audit import judged_anew, refused_by_a_liar
from tests.roles.testbed import URL, RunTestbed, stranger, tiny_run


class Lies(httpx.AsyncBaseTransport):
    """A host that gives one worker other answers to some GET requests."""

    def __init__(self, testbed: RunTestbed) -> None:
        self.inner, self.answers = httpx.ASGITransport(testbed.app, raise_app_exceptions=False), {}

    async def handle_async_request(self, request):
        lie = self.answers.get(request.url.path) if request.method == "GET" else None
        if lie is None:
            return await self.inner.handle_async_request(request)
        return httpx.Response(200, stream=httpx.ByteStream(lie), headers={"shoal-protocol": "1"})


def framed_worker(testbed, lies):
    """An honest worker that gets the lies."""
    home = testbed.folder.root.parent / "framed"
    key = load_or_make_key(home / "node.key")
    return Worker(
        Node(Client(URL, key, transport=lies), key.public, testbed.options(home), testbed.worker("x").node.make_engine)
    )


def trainer_key(testbed):
    return load_or_make_key(testbed.folder.keys / "trainer.key")


def other_weights(testbed, path, lies, version=0):
    """A signed manifest of other weights; the lies serve it with its chunks."""
    make_tiny(testbed.config.policy.tiny, path, 99, "float32")

    class Sink:
        async def put(self, name, chunk):
            lies.answers[f"/v1/blobs/{name}"] = chunk

    made = asyncio.run(publish(path, Sink(), PublishSettings(testbed.coordinator.state.run, version, "float32")))
    return served(testbed, made, lies)


def served(testbed, manifest, lies):
    signed = to_json(sign_manifest(manifest, trainer_key(testbed), now=testbed.clock()))
    lies.answers[f"/v1/manifests/{manifest.version}"] = signed
    return from_json(from_json(signed, t.SignedManifest).body, t.Manifest)


def signed_anew(testbed, **changes):
    """Let the host sign leases of the framed worker with changes, and look away when it names its manifest."""
    testbed.coordinator.log_writer.knows_manifest = lambda digest: True
    honest, framed = (
        testbed.coordinator.grant,
        load_or_make_key(testbed.folder.root.parent / "framed" / "node.key").public,
    )

    def crooked(lease):
        grant = honest(lease)
        if lease.worker != framed or lease.version:
            return grant
        changed = {name: change(grant) if callable(change) else change for name, change in changes.items()}
        return sign_promise(msgspec.structs.replace(grant, **changed, signature=""), testbed.coordinator.key)

    testbed.coordinator.grant = crooked


def work(testbed, *workers):
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *workers))


def refusal(testbed, worker):
    """The one line with which a worker refuses to play; nothing was submitted."""

    async def scenario():
        trainer = asyncio.create_task(testbed.trainer().run())
        try:
            with pytest.raises(PeerError) as raised:
                await asyncio.wait_for(worker.run(), 30.0)
        finally:
            trainer.cancel()
        return raised.value

    error = asyncio.run(scenario())
    assert "\n" not in str(error) and not testbed.coordinator.state.submissions
    return error


def refused_groups(testbed, key):
    return testbed.coordinator.state.members[key].refused


def proof(testbed, worker, tmp_path):
    """What a third party has: the host's public data, and the folder that the worker hands over."""
    public = tmp_path / "public"
    shutil.copytree(
        testbed.folder.root, public, ignore=shutil.ignore_patterns("nodes", "keys", "trainer", "secret.seed")
    )
    handed = Path(shutil.copytree(worker.session.evidence.folder, tmp_path / "handed"))
    return public, handed


def audit(public, *folders, **choice):
    choice = GroupChoice(evidence=folders, **choice)
    return asyncio.run(audit_rollouts(FolderRun(public), choice, threads=1, own_files=False))


def until_judged(testbed, worker):
    """The framed worker works until its first submission is decided, then an honest one ends the run."""

    async def scenario():
        roles = [asyncio.create_task(role.run()) for role in (testbed.trainer(), testbed.validator())]
        framed = asyncio.create_task(worker.run())
        async with asyncio.timeout(60):
            while not any(submission.decided for submission in testbed.coordinator.state.submissions.values()):
                await asyncio.sleep(0.02)
            worker.stopping.set()
            await framed
            honest = asyncio.create_task(testbed.worker("honest").run())
            while testbed.coordinator.state.phase != "ended":
                await testbed.coordinator.tick()
                await asyncio.sleep(0.05)
            await asyncio.gather(honest, *roles)
            await testbed.coordinator.tick()

    asyncio.run(scenario())


# --- the host serves one worker another manifest ---


def test_a_worker_that_is_served_other_weights_than_its_lease_names_plays_nothing(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    lies = Lies(testbed)
    other_weights(testbed, tmp_path / "other", lies)
    error = refusal(testbed, framed_worker(testbed, lies))
    assert isinstance(error, Contradiction) and "names other weights than the lease that it signed" in str(error)
    lapses = [entry.body.cause for entry in testbed.audit().entries if isinstance(entry.body, LeaseLapsed)]
    assert lapses == ["returned"]


def test_a_worker_that_is_served_another_tokenizer_than_its_lease_names_plays_nothing(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    lies = Lies(testbed)

    async def scenario():
        trainer = asyncio.create_task(testbed.trainer().run())
        while testbed.coordinator.state.main.version < 0:
            await asyncio.sleep(0.02)
        trainer.cancel()

    asyncio.run(scenario())
    served(testbed, with_another_file(testbed.coordinator.kept.manifests[0]), lies)
    error = refusal(testbed, framed_worker(testbed, lies))
    assert "names other files than the lease that it signed" in str(error)


def with_another_file(manifest):
    """The same weights with another file beside them."""
    *files, last = manifest.files
    plain = next(file for file in files if file.path.endswith(".json"))
    other = t.FileEntry(plain.path, 2, digest(b"{}"), (digest(b"{}"),))
    return msgspec.structs.replace(manifest, files=(*(other if f is plain else f for f in files), last))


def test_a_worker_whose_host_lies_about_weights_in_the_lease_too_proves_it(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    lies = Lies(testbed)
    other = other_weights(testbed, tmp_path / "other", lies)
    framed = framed_worker(testbed, lies)
    signed_anew(testbed, root=other.root, content=content_of(other))
    until_judged(testbed, framed)
    assert refused_groups(testbed, framed.key) > 0 and testbed.audit().findings == []
    found = audit(*proof(testbed, framed, tmp_path))
    assert found.exit_code() == DISAGREE
    said = "\n".join(found.disagreements)
    assert f"version 0: the trainer key signed a manifest with weights root {other.root[:12]}" in said
    assert f"the run key signed it with weights root {other.root[:12]}" in said


def test_a_worker_whose_host_signs_other_seeds_for_it_proves_it(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    framed = framed_worker(testbed, Lies(testbed))

    def other_seeds(grant):
        blocks = [msgspec.structs.replace(b, slots=[msgspec.structs.replace(s, seed="77" * 32) for s in b.slots])
                  for b in grant.lease.blocks]  # fmt: skip
        return from_json(to_json(msgspec.structs.replace(grant.lease, blocks=tuple(blocks))), t.Lease)

    signed_anew(testbed, lease=other_seeds)
    until_judged(testbed, framed)
    assert refused_groups(testbed, framed.key) > 0
    found = audit(*proof(testbed, framed, tmp_path))
    assert all("with other seeds or tasks than the revealed link gives" in line for line in found.disagreements)
    assert found.exit_code() == DISAGREE


def test_a_worker_that_is_told_other_times_of_its_lease_than_the_log_has_proves_it(tmp_path):
    """The host moved its log's clock, and hides it from the worker whose lease ends early."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    framed = framed_worker(testbed, Lies(testbed))
    signed_anew(
        testbed, lease=lambda grant: msgspec.structs.replace(grant.lease, deadline=grant.lease.deadline + 3600.0)
    )
    until_judged(testbed, framed)
    found = audit(*proof(testbed, framed, tmp_path))
    assert found.disagreements and found.exit_code() == DISAGREE
    assert all("the run key signed it with other times than the log has" in line for line in found.disagreements)


TOLD = {
    "environments": (
        "other environments or group sizes",
        lambda info: {"envs": (with_(info.envs[0], args={"operands": 3}),)},
    ),
    "stop tokens": ("turns that end at other tokens", lambda info: {"sampling": with_(info.sampling, stops="model")}),
    "noise": ("another noise family", lambda info: {"sampling": with_(info.sampling, noise=KEYED_32)}),
}
with_ = msgspec.structs.replace


@pytest.mark.parametrize("name", TOLD)
def test_a_worker_that_is_told_something_else_than_its_lease_names_plays_nothing(tmp_path, monkeypatch, name):
    (what, changes), info = TOLD[name], StatusCache.info
    monkeypatch.setattr(StatusCache, "info", lambda cache: with_(told := info(cache), **changes(told)))
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    error = refusal(testbed, framed_worker(testbed, Lies(testbed)))
    assert f"is signed for {what}" in str(error) and "than the host told us" in str(error)


def test_a_lease_that_is_signed_for_other_environments_than_the_log_has_is_found(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    framed = framed_worker(testbed, Lies(testbed))
    signed_anew(testbed, terms=digest(b"others"))
    with pytest.raises(BaseExceptionGroup):
        work(testbed, framed)
    found = audit(*proof(testbed, framed, tmp_path))
    assert ["for other environments, group sizes or sampling" in line for line in found.disagreements] == [True]


def test_a_lease_without_the_run_keys_signature_is_not_played(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    honest = testbed.coordinator.grant
    testbed.coordinator.grant = lambda lease: msgspec.structs.replace(honest(lease), signature="")
    assert "is not signed by the run key" in str(refusal(testbed, testbed.worker("honest")))


# --- a host with two logs ---


def test_a_worker_in_a_fork_with_other_weights_convicts_the_host_by_its_own_folder(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    testbed.coordinator.log_writer.store.close()
    shutil.copytree(testbed.folder.root, tmp_path / "fork")
    make_tiny(testbed.config.policy.tiny, tmp_path / "fork" / "policy", 99, "float32")
    honest, fork = (RunTestbed(tmp_path / name, testbed.config) for name in ("run", "fork"))
    framed, free = fork.worker("framed"), honest.worker("honest")
    for each, worker in ((fork, framed), (honest, free)):
        work(each, worker)
        assert each.audit().findings == []
    public, handed = proof(honest, framed, tmp_path)
    said = "\n".join(audit(public, handed).disagreements)
    assert "version 0: the trainer key signed a manifest with weights root" in said
    assert "lost: the receipt of submission" in said and "a fork: the run key signed head" in said
    both = "\n".join(audit(public, handed, free.session.evidence.folder).disagreements)
    assert "the trainer key signed two different manifests of the version 0" in both
    assert "the run key signed two different heads at event" in both


# --- the log itself lies ---


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory):
    """A finished run of two honest workers."""
    testbed = RunTestbed(tmp_path_factory.mktemp("honest") / "run", tiny_run(steps=2))
    workers = [testbed.worker(name) for name in ("a", "b")]
    work(testbed, *workers)
    return testbed, workers


def test_an_honest_group_that_was_refused_is_recomputed_from_the_workers_own_copy(honest_run, tmp_path):
    testbed, workers = honest_run
    wronged = next(body for _, body in bodies(testbed.folder.root) if isinstance(body, VerdictGiven))
    edit = partial(judged_anew, target=wronged, groups=refused_by_a_liar(wronged))
    lying = forged(testbed.folder.root, tmp_path / "lying", edit)
    (lying / "blobs" / wronged.submission[:2] / wronged.submission).unlink()
    victim = next(w for w in workers if (w.session.evidence.folder / f"{wronged.submission}.submission").exists())
    found = audit(lying, victim.session.evidence.folder)
    assert any("the log says: sampling refuses it" in d and "passes every check" in d for d in found.disagreements)


# --- honest controls ---


def test_the_evidence_of_an_honest_run_accuses_nobody(honest_run, tmp_path, capsys):
    testbed, workers = honest_run
    folders = [worker.session.evidence.folder for worker in workers]
    found = audit(testbed.folder.root, *folders)
    assert found.disagreements == [] and found.exit_code() == AGREE
    received = [body for _, body in bodies(testbed.folder.root) if isinstance(body, SubmissionReceived)]
    assert found.groups == sum(len(body.groups) for body in received) and found.left_out == {}
    assert found.told[0].endswith(f"{len(received)} submissions") and found.signed > 2 * len(received)
    homes = [word for worker in workers for word in ("--evidence", str(worker.node.home))]
    assert main.main(["audit", str(testbed.folder.root), *homes, "--threads", "1"]) == AGREE
    assert "the log agrees" in capsys.readouterr().out


def test_a_renewed_manifest_is_no_second_manifest(honest_run, tmp_path):
    testbed, workers = honest_run
    handed = Path(shutil.copytree(workers[0].session.evidence.folder, tmp_path / "handed"))
    later = sign_manifest(
        testbed.coordinator.kept.manifests[0], trainer_key(testbed), now=testbed.clock() + 4 * 24 * 3600
    )
    EvidenceStore(tmp_path, testbed.coordinator.state.run).keep("manifest", to_json(later))
    found = audit(testbed.folder.root, handed, tmp_path)
    assert found.disagreements == [] and "2 manifests" not in found.told[0]


def test_a_manifest_of_the_same_weights_with_other_files_is_a_second_manifest(honest_run, tmp_path):
    testbed, _ = honest_run
    other = sign_manifest(
        with_another_file(testbed.coordinator.kept.manifests[0]), trainer_key(testbed), now=testbed.clock()
    )
    EvidenceStore(tmp_path, testbed.coordinator.state.run).keep("manifest", to_json(other))
    found = audit(testbed.folder.root, tmp_path)
    assert ["with other files than the one that the log names" in line for line in found.disagreements] == [True]


def test_what_the_runs_keys_did_not_sign_proves_nothing(honest_run, tmp_path):
    """A worker that wants to blame an honest host edits its evidence, or signs it with keys of its own."""
    testbed, workers = honest_run
    liar = load_or_make_key(tmp_path / "liar.key")
    grant = from_json(next(workers[0].session.evidence.folder.glob("*.grant")).read_bytes(), t.Grant)
    receipt = from_json(next(workers[0].session.evidence.folder.glob("*.receipt")).read_bytes(), t.Receipt)
    manifest = msgspec.structs.replace(testbed.coordinator.kept.manifests[0], root="ab" * 32)
    made = EvidenceStore(tmp_path, testbed.coordinator.state.run)
    made.keep("grant", to_json(msgspec.structs.replace(grant, root="ab" * 32)))
    made.keep("grant", to_json(sign_promise(msgspec.structs.replace(grant, root="ab" * 32), liar)))
    made.keep("grant", to_json(sign_promise(msgspec.structs.replace(grant, run="ab" * 16), testbed.coordinator.key)))
    made.keep("receipt", to_json(msgspec.structs.replace(receipt, seq=1)))
    made.keep("manifest", to_json(sign_manifest(manifest, liar, now=testbed.clock())))
    made.keep("manifest", b"[" * 100)
    (made.folder / "loop.manifest").symlink_to(made.folder / "loop.manifest")
    os.mkfifo(made.folder / "pipe.grant")
    (made.folder / "folder.receipt").mkdir()
    found = audit(testbed.folder.root, tmp_path)
    assert found.disagreements == [] and found.exit_code() == CANNOT
    assert [line.split(" prove")[0] for line in found.told[1:]] == [
        "evidence: 3 grants", "evidence: 2 manifests", "evidence: 1 receipts",
    ]  # fmt: skip


def test_a_folder_without_evidence_of_the_run_is_an_error_of_one_line(honest_run, tmp_path, capsys):
    testbed, _ = honest_run
    with pytest.raises(ConfigError, match="holds no evidence of run"):
        audit(testbed.folder.root, tmp_path)
    assert main.main(["audit", str(testbed.folder.root), "--evidence", str(tmp_path)]) == 2
    assert "give a node's home" in capsys.readouterr().err


def test_what_could_not_be_compared_is_said(honest_run, tmp_path):
    """Nobody has the log's manifest any more, and the link of the version is not revealed."""
    testbed, workers = honest_run
    live = forged(testbed.folder.root, tmp_path / "live", before_the_links)
    (live / "blobs" / from_log(live)[:2] / from_log(live)).unlink()
    handed = shutil.copytree(workers[0].session.evidence.folder, tmp_path / "handed")
    (handed / "never-sent.submission").write_bytes(b"x")
    for path in handed.iterdir():
        if path.suffix == ".receipt" or path.name == f"{from_log(live)}.manifest":
            path.unlink()
    later = sign_manifest(
        testbed.coordinator.kept.manifests[0], trainer_key(testbed), now=testbed.clock() + 4 * 24 * 3600
    )
    EvidenceStore(tmp_path, testbed.coordinator.state.run).keep("manifest", to_json(later))
    told = "\n".join(audit(live, handed, tmp_path).told)
    assert "1 manifests were compared by their weights only" in told
    assert "leases were compared without their seeds and tasks" in told
    assert "submissions are not recomputed: the log holds no decision on them" in told


def from_log(run_dir):
    """Name of the first manifest in a log."""
    return next(body.manifest for _, body in bodies(run_dir) if isinstance(body, CheckpointPublished))


def before_the_links(lines):
    return lines[: next(i for i, (_, body) in enumerate(lines) if isinstance(body, LinkRevealed)) - 1]


# --- what a node keeps ---


def test_a_worker_keeps_its_submission_before_it_sends_it(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    worker, kept = testbed.worker("honest"), []

    async def scenario():
        trainer = asyncio.create_task(testbed.trainer().run())
        send = worker.client.put_bytes

        async def killed(path, body, kind):
            kept.append((worker.session.evidence.folder / f"{digest(body)}.submission").read_bytes() == body)
            raise PeerError("killed here")

        worker.client.put_bytes = killed
        with pytest.raises(PeerError, match="killed here"):
            await asyncio.wait_for(worker.run(), 30.0)
        trainer.cancel()
        return send

    asyncio.run(scenario())
    assert kept == [True]


def test_leases_that_nobody_plays_push_no_evidence_out(tmp_path):
    """A host hands out leases of versions that it does not serve: nothing is played, and nothing is kept."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    worker = testbed.worker("honest")

    async def scenario():
        trainer = asyncio.create_task(testbed.trainer().run())
        async with worker.client:
            await worker.join()
            grant = await worker.leases.next_grant(())
            far = msgspec.structs.replace(grant, lease=msgspec.structs.replace(grant.lease, version=9))
            with pytest.raises(PeerError):
                await worker.session.load(9, grant=far)
            assert not [*worker.session.evidence.folder.glob("*.grant")]
            await worker.session.load(0, grant=grant)
        trainer.cancel()

    asyncio.run(scenario())
    assert len([*worker.session.evidence.folder.glob("*.grant")]) == 1


RUN = "0123456789abcdef" * 2


def test_the_oldest_evidence_of_a_kind_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_store, "MOST_FILES", 3)
    kept = EvidenceStore(tmp_path, RUN, 90)
    kept.keep("receipt", b"stays")
    for number in range(5):
        kept.keep("grant", b"%d" % number)
        kept.keep("submission", b"%dxxx" % number)
    kept.keep("manifest", b"larger than the limit")
    left = sorted(path.read_bytes() for path in kept.folder.iterdir())
    assert left == sorted([b"2", b"3", b"4", b"3xxx", b"4xxx", b"stays", b"larger than the limit"])


def test_a_node_that_starts_again_counts_what_it_kept_before(tmp_path, monkeypatch):
    """What is kept again counts as new."""
    monkeypatch.setattr(evidence_store, "MOST_FILES", 3)
    for data in (b"1", b"2", b"3", b"4", b"5"):
        EvidenceStore(tmp_path, RUN).keep("grant", data)
    kept = EvidenceStore(tmp_path, RUN)
    kept.keep("grant", b"3")
    kept.keep("grant", b"6")
    assert sorted(path.read_bytes() for path in kept.folder.iterdir()) == [b"3", b"5", b"6"]


def test_threads_that_keep_evidence_at_once_lose_no_count(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_store, "MOST_FILES", 20)
    kept = EvidenceStore(tmp_path, RUN)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: kept.keep("submission", b"%d" % number), range(200)))
    assert len(list(kept.folder.iterdir())) == 20


def test_a_kill_leaves_no_file_behind_and_old_runs_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_store, "MOST_RUNS", 2)
    for number in range(3):
        EvidenceStore(tmp_path, f"{number:032x}").keep("grant", b"x")
    (tmp_path / "evidence" / f"{2:032x}" / ".half.grant.abc").write_bytes(b"y")
    kept = EvidenceStore(tmp_path, f"{2:032x}")
    assert [path.name for path in kept.folder.iterdir()] == [f"{digest(b'x')}.grant"]
    assert sorted(path.name for path in kept.folder.parent.iterdir()) == [f"{1:032x}", f"{2:032x}"]


def test_the_evidence_of_all_runs_stays_within_its_share_of_the_disk(tmp_path):
    """Of 9000 bytes each kind of the latest run gets 1000, receipts of all runs 1000, and older runs 4000 together."""
    for number in range(8):
        kept = EvidenceStore(tmp_path, f"{number:032x}", 9000)
        for count in range(50):
            for kind in ("grant", "manifest", "submission"):
                kept.keep(kind, b"%03d" % count * 33)
            kept.note_receipt(b"%03d" % (50 * number + count) * 33)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert 8000 < sum(sizes) <= 9000
    assert [path.name[-1] for path in sorted((tmp_path / "evidence").iterdir())] == ["6", "7"]
    lines = (tmp_path / "receipts.jsonl").read_bytes().splitlines()
    assert 4 < len(lines) <= 10 and lines == [b"%03d" % (400 - len(lines) + i) * 33 for i in range(len(lines))]


@pytest.mark.parametrize("kind", ["submission", "receipt"])
def test_a_stop_ends_a_wait_for_space_and_gives_the_lease_back_or_logs_the_receipt(tmp_path, monkeypatch, caplog, kind):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    write = evidence_store.write_atomically

    def full(path, data):
        if path.suffix == f".{kind}":
            loops[0].call_soon_threadsafe(worker.stopping.set)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(evidence_store, "write_atomically", full)
    worker, loops = testbed.worker("alice"), []

    async def scenario():
        loops.append(asyncio.get_running_loop())
        trainer = asyncio.create_task(testbed.trainer().run())
        await asyncio.wait_for(worker.run(), 30.0)
        trainer.cancel()

    asyncio.run(scenario())
    state = testbed.coordinator.state
    assert not state.open_leases
    assert next(iter(state.leases.values())).status == ("lapsed" if kind == "submission" else "submitted")
    logged = [line.partition("receipt=")[2] for line in caplog.messages if "receipt=" in line]
    receipts = [from_json(line.encode(), t.Receipt) for line in logged]
    assert [one.digest for one in receipts] == [*state.submissions]
    assert all(is_promised(one, worker.session.info.run_key) for one in receipts)


def test_a_full_disk_is_waited_for_when_a_run_is_joined(tmp_path, monkeypatch, caplog):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    write, full = evidence_store.write_atomically, {"run.key": 2, "publishers.json": 2, "url": 2}

    def written(path, data):
        if full.get(path.name):
            full[path.name] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(evidence_store, "write_atomically", written)
    monkeypatch.setattr(evidence_store, "LONGEST_RETRY_S", 0.0)
    worker = testbed.worker("alice")

    async def scenario():
        async with worker.client:
            await worker.join()

    asyncio.run(scenario())
    assert full == {"run.key": 0, "publishers.json": 0, "url": 0} and "Free some space" in caplog.text
    assert (worker.session.evidence.folder / "url").exists()


def test_a_receipt_after_one_that_a_full_disk_cut_off_can_be_read(tmp_path):
    (tmp_path / "receipts.jsonl").write_bytes(b"whole\nhal")
    EvidenceStore(tmp_path, RUN).note_receipt(b"next")
    assert (tmp_path / "receipts.jsonl").read_bytes().splitlines() == [b"whole", b"hal", b"next"]


def test_what_a_volunteer_gives_of_its_disk_bounds_its_evidence_too(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    worker = stranger(testbed.worker("volunteer"), max_memory_mb=1000, max_disk_mb=80)

    async def scenario():
        async with worker.client:
            await worker.join()

    asyncio.run(scenario())
    assert worker.session.evidence.most_bytes == 10_000_000


@pytest.mark.parametrize("run", ["", "../../else", "a" * 31, "A" * 32, "a" * 31 + "\n"])
def test_a_run_id_that_could_lead_out_of_the_folder_is_refused(tmp_path, run):
    with pytest.raises(PeerError, match="which is not a run id"):
        EvidenceStore(tmp_path, run)
    assert not any(tmp_path.iterdir())


# --- requests name the manifest ---


def test_a_request_that_names_a_manifest_which_the_log_lacks_is_refused_as_a_fork(honest_run, tmp_path):
    testbed, workers = honest_run

    async def ask(app, manifest):
        async with Client(URL, load_or_make_key(workers[0].node.home / "node.key"), run=testbed.coordinator.state.run,
                          transport=httpx.ASGITransport(app)) as client:  # fmt: skip
            client.manifest = manifest
            return await client.post_json("/v1/leases", t.LeaseRequest(), t.LeaseAnswer)

    known = workers[0].client.manifest
    with pytest.raises(PeerRefused, match="is not in this log, though the trainer key signed it") as refused:
        asyncio.run(ask(testbed.app, digest(b"another")))
    assert refused.value.code == "fork"
    assert asyncio.run(ask(testbed.app, known)).lease is None

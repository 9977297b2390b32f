"""Pay explained credit by credit, statements that can be checked offline, and a host that keeps two logs."""

import asyncio
import shutil
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from shoal.cli import main
from shoal.errors import PeerError
from shoal.ledger.commands import AskLease, JoinRun, Publish
from shoal.ledger.log.check import Audit
from shoal.ledger.log.pay_history import PURPOSE, disagreements, is_signed
from shoal.ledger.verdicts import VerdictGiven
from shoal.net.client import Client
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest, from_json, to_json
from shoal.protocol.messages.responses import CreditPage, Statement
from shoal.roles.auditor import verify_log
from shoal.roles.auditor.evidence import is_due
from shoal.runs import log_source
from shoal.verification.encode_submission import encode_submission
from tests.roles.testbed import URL, RunTestbed, tiny_run


@pytest.fixture(scope="module")
def testbed(tmp_path_factory):
    testbed = RunTestbed(tmp_path_factory.mktemp("credits") / "run", tiny_run())
    roles = [testbed.trainer(), testbed.validator(), testbed.worker("honest"), testbed.worker("cheater", "other-seed")]
    asyncio.run(testbed.live(*roles))
    return testbed


@pytest.fixture(scope="module")
def keys(testbed):
    return {node.name: key for key, node in testbed.coordinator.state.members.items()}


def ask(testbed, path, kind):
    async def scenario():
        async with Client(URL, transport=httpx.ASGITransport(testbed.app)) as client:
            return await client.get_json(path, kind)

    return asyncio.run(scenario())


# --- each credit explained ---


def test_each_credit_names_group_submission_verdict_and_validator(testbed, keys, capsys):
    assert main.main(["credits", str(testbed.folder.root), "honest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    points = [line for line in lines if "accepted  submission" in line]
    credits = testbed.coordinator.state.members[keys["honest"]].credits
    assert sum(int(line.split()[1]) for line in points) == credits
    assert all("by " in line and ", audited" in line and "/" in line for line in points)
    assert f"{credits} tokens" in lines[-1] and "leases lapsed (" in lines[-1]


def test_a_refusal_is_explained_with_check_figure_and_bound(testbed, keys, capsys):
    assert main.main(["credits", str(testbed.folder.root), keys["cheater"][:10]]) == 0
    out = capsys.readouterr().out
    assert "refused (hard)" in out and "[sampling: " in out and ", limit " in out and "no leases for" in out


def test_balances_sum_to_what_was_issued(testbed, capsys):
    assert main.main(["credits", str(testbed.folder.root)]) == 0
    *table, total = capsys.readouterr().out.splitlines()
    assert sum(int(line.split()[2]) for line in table[1:]) == int(total.split()[0]) == testbed.coordinator.state.issued


def test_pages_of_the_call_together_give_the_whole_explanation(testbed, keys, monkeypatch):
    monkeypatch.setattr("shoal.ledger.log.pay_history.MAX_CREDIT_LINES", 5)
    monkeypatch.setattr("shoal.roles.coordinator.request_context.MAX_EVENTS", 40)
    lines, after, more = [], -1, True
    while more:
        page = ask(testbed, f"/v1/nodes/{keys['honest']}/credits?after={after}", CreditPage)
        assert (len(page.lines) <= 6 and page.after > after) or not page.more
        lines, after, more = [*lines, *page.lines], page.after, page.more
    assert sum(line.credits for line in lines) == testbed.coordinator.state.members[keys["honest"]].credits
    assert [line.seq for line in lines] == sorted({line.seq for line in lines})
    assert all(line.validators for line in lines if line.credits)


def test_a_passing_group_that_is_refused_with_its_block_is_explained_so(testbed, keys):
    from shoal.ledger.log.pay_history import explain

    entries = testbed.audit().entries
    refused = next(e.body for e in entries if isinstance(e.body, VerdictGiven) and e.body.groups[0].check)
    first, *others = refused.groups
    mixed = msgspec.structs.replace(refused, groups=(first, *(_passing(g) for g in others)))
    changed = [msgspec.structs.replace(e, body=mixed) if e.body is refused else e for e in entries]
    lines = list(explain(changed, testbed.coordinator.state, keys["cheater"]))
    assert [line.slot for line in lines if "refused whole" in line.detail] == [g.slot for g in others]


def _passing(group):
    return msgspec.structs.replace(group, outcome="accept", check="", tokens=10)


# --- statements ---


@pytest.fixture
def statement(testbed, keys):
    return ask(testbed, f"/v1/nodes/{keys['honest']}/statement", Statement)


def test_a_statement_is_signed_and_is_what_the_log_gives(testbed, keys, statement):
    assert is_signed(statement) and disagreements(statement, testbed.audit().entries) == []
    assert statement.credits == testbed.coordinator.state.members[keys["honest"]].credits > 0
    for edit in ({"credits": 10**6}, {"node": "a" * 64}, {"seq": 3}, {"run_key": "b" * 64}):
        assert not is_signed(msgspec.structs.replace(statement, **edit)), edit
    unsigned = to_json(msgspec.structs.replace(statement, signature=""))
    for_receipt = load_or_make_key(testbed.folder.keys / "run.key").sign("receipt", unsigned)
    assert not is_signed(msgspec.structs.replace(statement, signature=for_receipt))


def signed_by_the_host(testbed, statement, **lie):
    lying = msgspec.structs.replace(statement, signature="", **lie)
    return msgspec.structs.replace(
        lying, signature=load_or_make_key(testbed.folder.keys / "run.key").sign(PURPOSE, to_json(lying))
    )


@pytest.mark.parametrize(
    "lie, named", [({"credits": 1}, "the log gives"), ({"head": "0" * 64}, "fork"), ({"seq": 10**6}, "before event")]
)
def test_a_host_that_signs_what_its_log_does_not_give_is_caught(testbed, statement, lie, named):
    lying = signed_by_the_host(testbed, statement, **lie)
    assert is_signed(lying)
    assert named in disagreements(lying, testbed.audit().entries)[0]


def test_the_command_checks_a_statement_offline_and_against_a_log(testbed, statement, tmp_path, capsys):
    file, run = tmp_path / "mine.json", str(testbed.folder.root)
    file.write_bytes(to_json(statement))
    assert main.main(["credits", "verify", str(file)]) == 0
    assert main.main(["credits", "verify", str(file), "--log", run]) == 0
    assert "the log gives the same" in capsys.readouterr().out
    file.write_bytes(to_json(msgspec.structs.replace(statement, credits=statement.credits + 1)))
    assert main.main(["credits", "verify", str(file)]) == 1
    file.write_bytes(to_json(signed_by_the_host(testbed, statement, credits=statement.credits + 1)))
    assert main.main(["credits", "verify", str(file)]) == 0, "offline, the host's word is all there is"
    assert main.main(["credits", "verify", str(file), "--log", run]) == 1
    file.write_bytes(b"{}")
    assert main.main(["credits", "verify", str(file)]) == 2


async def keep_statement(testbed, key, path, kind=Client):
    async with kind(URL, transport=httpx.ASGITransport(testbed.app)) as client:
        run = log_source.UrlRun(client)
        await verify_log._keep_statement(run, await verify_log.replay_log(run), key, path)


def test_a_kept_statement_is_the_one_that_the_coordinator_signed(testbed, keys, tmp_path):
    asyncio.run(keep_statement(testbed, keys["honest"], tmp_path / "mine.json"))
    assert is_signed(from_json((tmp_path / "mine.json").read_bytes(), Statement))


def test_a_statement_of_another_node_is_not_kept(testbed, keys, tmp_path):
    class Crooked(Client):
        async def get_json(self, path, kind, **how):
            return await super().get_json(path.replace(keys["honest"], keys["cheater"]), kind, **how)

    with pytest.raises(PeerError, match="another run or node"):
        asyncio.run(keep_statement(testbed, keys["honest"], tmp_path / "mine.json", Crooked))
    assert not (tmp_path / "mine.json").exists()


# --- a host with two logs ---


class TwoFaced:
    """Two logs with one run key and the same first events; after them, each has the work of one worker only."""

    def __init__(self, root: Path) -> None:
        config = tiny_run()
        first = RunTestbed(root / "first", config)
        log_writer, trainer = first.coordinator.log_writer, load_or_make_key(first.folder.keys / "trainer.key").public
        log_writer.write(JoinRun(trainer, t.Join("trainer", "t", 0.0, "x", "float32", "cpu"), 1.0), 1.0)
        log_writer.write(Publish(trainer, 0, digest(b"root"), digest(b"manifest"), {}, 1.0), 1.0)
        self.workers = "a" * 64, "b" * 64
        for key in self.workers:
            log_writer.write(JoinRun(key, t.Join("worker", key[:1], 0.0, "x", "float32", "cpu"), 2.0), 2.0)
            log_writer.write(AskLease(key, (), 0.0, 2.0), 2.0)
        log_writer.store.close()
        shutil.copytree(first.folder.root, root / "second")
        self.testbeds = first, RunTestbed(root / "second", config)
        self.files = [self._submit(*pair, root) for pair in zip(self.testbeds, self.workers, strict=True)]

    def _submit(self, testbed: RunTestbed, worker: str, root: Path) -> Path:
        """The worker's receipt, in a file."""
        lease = testbed.coordinator.wire_lease(testbed.coordinator.state.open_leases_of(worker)[0])
        groups = [t.Group(slot.slot, slot.task, slot.env, ()) for block in lease.blocks for slot in block.slots]
        body = encode_submission(testbed.coordinator.state.run, lease, groups, t.EngineFacts("x", "float32", "cpu"))
        with testbed.coordinator.kept.upload(lease.id) as upload:
            upload.write(body)
            receipt = asyncio.run(
                testbed.coordinator.take_submission(worker, lease.id, upload, digest(body), int(time.time()))
            )
        path = root / f"{worker[:1]}.jsonl"
        path.write_bytes(to_json(receipt) + b"\n")
        return path


@pytest.fixture
def two_faced(tmp_path):
    return TwoFaced(tmp_path)


def test_receipts_of_two_workers_find_the_fork_in_either_folder(two_faced, capsys):
    first, second = two_faced.files
    for testbed, other in zip(two_faced.testbeds, (second, first), strict=True):
        words = ["ledger", "verify", str(testbed.folder.root), "--receipts", str(first), "--receipts", str(second)]
        assert main.main(words) == 1
        out = capsys.readouterr().out
        assert out.count("FINDING") == 2 and f"in {other}" in out and "a fork: the run key signed head" in out
        assert "the run key signed two different heads at event" in out


def test_receipts_of_two_workers_find_the_fork_behind_a_url(two_faced):
    async def scenario(testbed):
        async with Client(URL, transport=httpx.ASGITransport(testbed.app)) as client:
            return (await verify_log.audit_log(log_source.UrlRun(client), two_faced.files)).findings

    for testbed, other in zip(two_faced.testbeds, reversed(two_faced.files), strict=True):
        findings = asyncio.run(scenario(testbed))
        assert len(findings) == 2 and str(other) in findings[0] and "a fork" in findings[0]
        assert findings[1].startswith("the run key signed two different heads at event")


def test_a_receipt_that_a_live_run_signs_while_its_log_is_read_is_no_loss(two_faced):
    testbed, file = two_faced.testbeds[0], two_faced.files[1]

    class Live(log_source.FolderRun):
        async def rows(self, most=None):
            rows = await super().rows(most)
            late = self.folder.nodes / "late" / "receipts.jsonl"
            late.parent.mkdir(parents=True, exist_ok=True)
            late.write_bytes(file.read_bytes())
            return rows

    assert verify_log.check(str(testbed.folder.root), two_faced.files[:1]), "to its own worker either log is whole"
    assert asyncio.run(verify_log.audit_log(Live(testbed.folder.root))).findings == []
    assert len(asyncio.run(verify_log.audit_log(log_source.FolderRun(testbed.folder.root))).findings) == 1


def test_a_lost_tail_is_found_by_receipts_once_they_are_old_or_if_their_time_is_wrong(two_faced):
    receipt = from_json(two_faced.files[0].read_bytes(), t.Receipt)
    audit = Audit()
    after = [msgspec.structs.replace(receipt, seq=7, time=now) for now in (5000.0, 4000.0, 9000.0)]
    assert [is_due(one, audit, 5060.0) for one in after] == [False, True, True]
    audit.entries = [None] * 8
    assert all(is_due(one, audit, 5060.0) for one in after)


def test_receipts_of_other_runs_are_skipped_and_forged_ones_are_reported(two_faced, tmp_path):
    testbed, file = two_faced.testbeds[0], two_faced.files[0]
    receipt = from_json(file.read_bytes(), t.Receipt)
    other = msgspec.structs.replace(receipt, run="f" * 32)
    forged = msgspec.structs.replace(receipt, seq=receipt.seq + 1)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_bytes(b"\n".join([to_json(other), to_json(forged), b"half a li"]) + b"\n")

    async def scenario():
        return (await verify_log.audit_log(log_source.FolderRun(testbed.folder.root), [mixed])).findings

    assert asyncio.run(scenario()) == [f"{mixed}: a receipt that the run key did not sign"]


def test_a_receipts_file_that_is_not_there_is_an_error_of_one_line(testbed, capsys):
    assert main.main(["ledger", "verify", str(testbed.folder.root), "--receipts", "nowhere.jsonl"]) == 2
    assert "cannot read receipts nowhere.jsonl" in capsys.readouterr().err


# --- bodies stay private until nobody can be paid for them ---


def test_a_refused_submission_stays_private_while_its_slots_are_open(tmp_path):
    """Another worker that gets the same slots, with the same seeds, could copy its honest groups."""
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    state, may_read = testbed.coordinator.state, testbed.coordinator.kept.may_read

    async def judged_then_helped():
        while not any(submission.decided for submission in state.submissions.values()):
            await asyncio.sleep(0.01)
        name = next(digest for digest, submission in state.submissions.items() if submission.decided)
        keys = ("", "c" * 64, state.validators[0], state.trainer_key)
        seen.append([may_read(name, key) for key in keys])
        judge = state.members[state.validators[0]]
        judge.standing = "suspended"  # it could pass honest groups on to a friend
        seen.append([may_read(name, key) for key in keys])
        judge.standing = "new"
        await testbed.worker("honest").run()

    async def scenario():
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(judged_then_helped())
            group.create_task(
                testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("cheater", "other-seed"))
            )

    seen: list[list[bool]] = []
    asyncio.run(scenario())
    assert seen == [[False, False, True, True], [False, False, False, True]]
    assert all(may_read(name, "") for name in state.submissions)

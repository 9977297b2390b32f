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
from shoal.roles.auditor import credits as accounts
from shoal.roles.auditor import verify_log
from shoal.roles.auditor.evidence import is_due
from shoal.runs import public_run
from shoal.verification.encode_submission import encode_submission
from tests.roles.in_memory_run import URL, Town, tiny_run


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    town = Town(tmp_path_factory.mktemp("credits") / "run", tiny_run())
    roles = [town.trainer(), town.validator(), town.worker("honest"), town.worker("cheater", "other-seed")]
    asyncio.run(town.live(*roles))
    return town


@pytest.fixture(scope="module")
def keys(town):
    return {node.name: key for key, node in town.desk.state.members.items()}


def ask(town, path, kind):
    async def story():
        async with Client(URL, transport=httpx.ASGITransport(town.app)) as client:
            return await client.get_json(path, kind)

    return asyncio.run(story())


# --- each credit explained ---


def test_each_credit_names_group_submission_verdict_and_validator(town, keys, capsys):
    assert main.main(["credits", str(town.folder.root), "honest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    points = [line for line in lines if "accepted  submission" in line]
    credits = town.desk.state.members[keys["honest"]].credits
    assert sum(int(line.split()[1]) for line in points) == credits
    assert all("by " in line and ", audited" in line and "/" in line for line in points)
    assert f"{credits} tokens" in lines[-1] and "leases lapsed (" in lines[-1]


def test_a_refusal_is_explained_with_check_figure_and_bound(town, keys, capsys):
    assert main.main(["credits", str(town.folder.root), keys["cheater"][:10]]) == 0
    out = capsys.readouterr().out
    assert "refused (hard)" in out and "[sampling: " in out and ", limit " in out and "no leases for" in out


def test_balances_sum_to_what_was_issued(town, capsys):
    assert main.main(["credits", str(town.folder.root)]) == 0
    *table, total = capsys.readouterr().out.splitlines()
    assert sum(int(line.split()[2]) for line in table[1:]) == int(total.split()[0]) == town.desk.state.issued


def test_pages_of_the_call_together_give_the_whole_explanation(town, keys, monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.public_calls.MAX_CREDIT_LINES", 5)
    monkeypatch.setattr("shoal.roles.coordinator.public_calls.MAX_EVENTS", 40)
    lines, after, more = [], -1, True
    while more:
        page = ask(town, f"/v1/nodes/{keys['honest']}/credits?after={after}", CreditPage)
        assert (len(page.lines) <= 6 and page.after > after) or not page.more
        lines, after, more = [*lines, *page.lines], page.after, page.more
    assert sum(line.credits for line in lines) == town.desk.state.members[keys["honest"]].credits
    assert [line.seq for line in lines] == sorted({line.seq for line in lines})
    assert all(line.validators for line in lines if line.credits)


@pytest.mark.parametrize("after", ["-999999999", "999999999"])
def test_a_page_is_bounded_wherever_it_begins(town, keys, after):
    page = ask(town, f"/v1/nodes/{keys['honest']}/credits?after={after}", CreditPage)
    assert len(page.lines) <= 500


def test_a_passing_group_that_is_refused_with_its_block_is_explained_so(town, keys):
    from shoal.ledger.log.pay_history import explain

    entries = town.audit().entries
    refused = next(e.body for e in entries if isinstance(e.body, VerdictGiven) and e.body.groups[0].check)
    first, *others = refused.groups
    mixed = msgspec.structs.replace(refused, groups=(first, *(_passing(g) for g in others)))
    changed = [msgspec.structs.replace(e, body=mixed) if e.body is refused else e for e in entries]
    lines = list(explain(changed, town.desk.state, keys["cheater"]))
    assert [line.slot for line in lines if "refused whole" in line.detail] == [g.slot for g in others]


def _passing(group):
    return msgspec.structs.replace(group, outcome="accept", check="", tokens=10)


# --- statements ---


@pytest.fixture
def statement(town, keys):
    return ask(town, f"/v1/nodes/{keys['honest']}/statement", Statement)


def test_a_statement_is_signed_and_is_what_the_log_gives(town, keys, statement):
    assert is_signed(statement) and disagreements(statement, town.audit().entries) == []
    assert statement.credits == town.desk.state.members[keys["honest"]].credits > 0


@pytest.mark.parametrize("field, value", [("credits", 10**6), ("node", "a" * 64), ("seq", 3), ("run_key", "b" * 64)])
def test_an_edited_statement_is_not_signed(statement, field, value):
    assert not is_signed(msgspec.structs.replace(statement, **{field: value}))


def test_a_signature_for_a_receipt_does_not_sign_a_statement(town, statement):
    unsigned = msgspec.structs.replace(statement, signature="")
    for_receipt = load_or_make_key(town.folder.keys / "run.key").sign("receipt", to_json(unsigned))
    assert not is_signed(msgspec.structs.replace(statement, signature=for_receipt))


def signed_by_the_host(town, statement, **lie):
    lying = msgspec.structs.replace(statement, signature="", **lie)
    return msgspec.structs.replace(
        lying, signature=load_or_make_key(town.folder.keys / "run.key").sign(PURPOSE, to_json(lying))
    )


@pytest.mark.parametrize(
    "lie, named", [({"credits": 1}, "the log gives"), ({"head": "0" * 64}, "fork"), ({"seq": 10**6}, "before event")]
)
def test_a_host_that_signs_what_its_log_does_not_give_is_caught(town, statement, lie, named):
    lying = signed_by_the_host(town, statement, **lie)
    assert is_signed(lying)
    assert named in disagreements(lying, town.audit().entries)[0]


def test_the_command_checks_a_statement_offline_and_against_a_log(town, statement, tmp_path, capsys):
    file, run = tmp_path / "mine.json", str(town.folder.root)
    file.write_bytes(to_json(statement))
    assert main.main(["credits", "verify", str(file)]) == 0
    assert main.main(["credits", "verify", str(file), "--log", run]) == 0
    assert "the log gives the same" in capsys.readouterr().out
    file.write_bytes(to_json(msgspec.structs.replace(statement, credits=statement.credits + 1)))
    assert main.main(["credits", "verify", str(file)]) == 1
    file.write_bytes(to_json(signed_by_the_host(town, statement, credits=statement.credits + 1)))
    assert main.main(["credits", "verify", str(file)]) == 0, "offline, the host's word is all there is"
    assert main.main(["credits", "verify", str(file), "--log", run]) == 1
    file.write_bytes(b"{}")
    assert main.main(["credits", "verify", str(file)]) == 2


def test_a_kept_statement_is_the_one_that_the_coordinator_signed(town, keys, tmp_path):
    async def story(client_of_run):
        async with Client(URL, transport=httpx.ASGITransport(town.app)) as client:
            run = public_run.UrlRun(client)
            await accounts._keep_statement(run, await verify_log.replay_log(run), client_of_run, tmp_path / "mine.json")

    asyncio.run(story(keys["honest"]))
    assert is_signed(from_json((tmp_path / "mine.json").read_bytes(), Statement))


def test_a_statement_of_another_node_is_not_kept(town, keys, tmp_path):
    class Crooked(Client):
        async def get_json(self, path, kind, **how):
            return await super().get_json(path.replace(keys["honest"], keys["cheater"]), kind, **how)

    async def story():
        async with Crooked(URL, transport=httpx.ASGITransport(town.app)) as client:
            run = public_run.UrlRun(client)
            await accounts._keep_statement(
                run, await verify_log.replay_log(run), keys["honest"], tmp_path / "mine.json"
            )

    with pytest.raises(PeerError, match="another run or node"):
        asyncio.run(story())
    assert not (tmp_path / "mine.json").exists()


# --- a host with two logs ---


class TwoFaced:
    """Two logs with one run key and the same first events; after them, each has the work of one worker only."""

    def __init__(self, root: Path) -> None:
        config = tiny_run()
        first = Town(root / "first", config)
        book, trainer = first.desk.book, load_or_make_key(first.folder.keys / "trainer.key").public
        book.write(JoinRun(trainer, t.Join("trainer", "t", 0.0, "x", "float32", "cpu"), 1.0), 1.0)
        book.write(Publish(trainer, 0, digest(b"root"), digest(b"manifest"), {}, 1.0), 1.0)
        self.workers = "a" * 64, "b" * 64
        for key in self.workers:
            book.write(JoinRun(key, t.Join("worker", key[:1], 0.0, "x", "float32", "cpu"), 2.0), 2.0)
            book.write(AskLease(key, (), 0.0, 2.0), 2.0)
        book.store.close()
        shutil.copytree(first.folder.root, root / "second")
        self.towns = first, Town(root / "second", config)
        self.files = [self._submit(*pair, root) for pair in zip(self.towns, self.workers, strict=True)]

    def _submit(self, town: Town, worker: str, root: Path) -> Path:
        """The worker's receipt, in a file."""
        lease = town.desk.wire_lease(town.desk.state.open_leases_of(worker)[0])
        groups = [t.Group(slot.slot, slot.task, slot.env, ()) for block in lease.blocks for slot in block.slots]
        body = encode_submission(town.desk.state.run, lease, groups, t.EngineFacts("x", "float32", "cpu"))
        with town.desk.kept.upload(lease.id) as upload:
            upload.write(body)
            receipt = asyncio.run(town.desk.take_submission(worker, lease.id, upload, digest(body), int(time.time())))
        path = root / f"{worker[:1]}.jsonl"
        path.write_bytes(to_json(receipt) + b"\n")
        return path


@pytest.fixture
def two_faced(tmp_path):
    return TwoFaced(tmp_path)


def test_each_history_holds_for_the_worker_that_it_is_shown_to(two_faced):
    for town, file in zip(two_faced.towns, two_faced.files, strict=True):
        assert verify_log.check(str(town.folder.root), [file])


def test_receipts_of_two_workers_find_the_fork_in_either_folder(two_faced, capsys):
    first, second = two_faced.files
    for town, other in zip(two_faced.towns, (second, first), strict=True):
        words = ["ledger", "verify", str(town.folder.root), "--receipts", str(first), "--receipts", str(second)]
        assert main.main(words) == 1
        out = capsys.readouterr().out
        assert out.count("FINDING") == 2 and f"in {other}" in out and "a fork: the run key signed head" in out
        assert "the run key signed two different heads at event" in out


def test_receipts_of_two_workers_find_the_fork_behind_a_url(two_faced):
    async def story(town):
        async with Client(URL, transport=httpx.ASGITransport(town.app)) as client:
            return (await verify_log.audit_log(public_run.UrlRun(client), two_faced.files)).findings

    for town, other in zip(two_faced.towns, reversed(two_faced.files), strict=True):
        findings = asyncio.run(story(town))
        assert len(findings) == 2 and str(other) in findings[0] and "a fork" in findings[0]
        assert findings[1].startswith("the run key signed two different heads at event")


def test_a_receipt_that_a_live_run_signs_while_its_log_is_read_is_no_loss(two_faced):
    town, file = two_faced.towns[0], two_faced.files[1]

    class Live(public_run.FolderRun):
        async def rows(self, most=None):
            rows = await super().rows(most)
            late = self.folder.nodes / "late" / "receipts.jsonl"
            late.parent.mkdir(parents=True, exist_ok=True)
            late.write_bytes(file.read_bytes())
            return rows

    assert asyncio.run(verify_log.audit_log(Live(town.folder.root))).findings == []
    assert len(asyncio.run(verify_log.audit_log(public_run.FolderRun(town.folder.root))).findings) == 1


def test_a_lost_tail_is_found_by_receipts_once_they_are_old_or_if_their_time_is_wrong(two_faced):
    receipt = from_json(two_faced.files[0].read_bytes(), t.Receipt)
    audit = Audit()
    after = [msgspec.structs.replace(receipt, seq=7, time=now) for now in (5000.0, 4000.0, 9000.0)]
    assert [is_due(one, audit, 5060.0) for one in after] == [False, True, True]
    audit.entries = [None] * 8
    assert all(is_due(one, audit, 5060.0) for one in after)


def test_receipts_of_other_runs_are_skipped_and_forged_ones_are_reported(two_faced, tmp_path):
    town, file = two_faced.towns[0], two_faced.files[0]
    receipt = from_json(file.read_bytes(), t.Receipt)
    other = msgspec.structs.replace(receipt, run="f" * 32)
    forged = msgspec.structs.replace(receipt, seq=receipt.seq + 1)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_bytes(b"\n".join([to_json(other), to_json(forged), b"half a li"]) + b"\n")

    async def story():
        return (await verify_log.audit_log(public_run.FolderRun(town.folder.root), [mixed])).findings

    assert asyncio.run(story()) == [f"{mixed}: a receipt that the run key did not sign"]


def test_a_receipts_file_that_is_not_there_is_an_error_of_one_line(town, capsys):
    assert main.main(["ledger", "verify", str(town.folder.root), "--receipts", "nowhere.jsonl"]) == 2
    assert "cannot read receipts nowhere.jsonl" in capsys.readouterr().err


# --- bodies stay private until nobody can be paid for them ---


def test_a_refused_submission_stays_private_while_its_slots_are_open(tmp_path):
    """Another worker that gets the same slots, with the same seeds, could copy its honest groups."""
    town = Town(tmp_path / "run", tiny_run())
    state, may_read = town.desk.state, town.desk.kept.may_read

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
        await town.worker("honest").run()

    async def story():
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(judged_then_helped())
            group.create_task(town.live(town.trainer(), town.validator(), town.worker("cheater", "other-seed")))

    seen: list[list[bool]] = []
    asyncio.run(story())
    assert seen == [[False, False, True, True], [False, False, False, True]]
    assert all(may_read(name, "") for name in state.submissions)

"""Anyone can audit: an audit recomputes a finished run from what it published, and finds what a host, a validator or a
disk changed."""

import asyncio
import errno
import itertools
import json
import shutil
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest

from shoal.cli import main
from shoal.errors import ConfigError, NothingYet, Overreach, PeerError
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.leases import LeaseGranted
from shoal.ledger.log.writer import replay
from shoal.ledger.members import NodeQuarantined
from shoal.ledger.pay import Credit
from shoal.ledger.run_events import RunEnded
from shoal.ledger.state import state_hash
from shoal.ledger.submissions import AuditDrawn, SubmissionReceived
from shoal.ledger.verdicts import Decision, VerdictGiven
from shoal.ledger.versions import CheckpointPublished, LinkRevealed
from shoal.net.client import Client
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import Grpo
from shoal.protocol.audit_and_pay import influence
from shoal.protocol.encoding import to_json
from shoal.roles.auditor.rejudge_groups import (
    AGREE,
    DISAGREE,
    PARTLY,
    UNAVAILABLE,
    Findings,
    GroupChoice,
    audit_rollouts,
    load_envs,
    summary,
)
from shoal.roles.auditor.verify_log import audit_folder, replay_log
from shoal.runs import log_source
from shoal.runs.log_source import FolderRun, UrlRun
from shoal.weights.fetch import fetch
from tests.nightly import first_of
from tests.roles.forgery import bodies, forged
from tests.roles.testbed import URL, RunTestbed, tiny_run

ALL = GroupChoice()


@pytest.fixture(scope="module")
def testbed(tmp_path_factory):
    """A finished run with an honest worker and a cheater."""
    testbed = RunTestbed(tmp_path_factory.mktemp("audit") / "run", tiny_run())
    roles = [testbed.trainer(), testbed.validator(), testbed.worker("honest"), testbed.worker("cheater", "other-seed")]
    asyncio.run(testbed.live(*roles))
    return testbed


@pytest.fixture(scope="module")
def run_dir(testbed):
    return testbed.folder.root


def audit(source, choice=ALL):
    run = FolderRun(source) if isinstance(source, Path) else source
    return asyncio.run(audit_rollouts(run, choice, threads=1, own_files=False))


def edited(kind, change, which=0):
    """An edit of a log that replaces one event of a kind with what `change` makes of it."""

    def edit(lines):
        places = [i for i, (_, body) in enumerate(lines) if isinstance(body, kind)]
        time, body = lines[places[which]]
        return [*lines[: places[which]], (time, change(body)), *lines[places[which] + 1 :]]

    return edit


def replaced(**fields):
    return lambda body: msgspec.structs.replace(body, **fields)


# --- the honest run ---


def test_every_group_of_an_honest_run_is_recomputed_and_agrees(testbed, run_dir):
    found = audit(run_dir)
    judged = sum(len(body.groups) for _, body in bodies(run_dir) if isinstance(body, VerdictGiven))
    assert found.disagreements == [] and found.left_out == {}
    assert (found.groups, found.with_model) == (judged, judged)
    assert found.tokens >= sum(body.tokens for _, body in bodies(run_dir) if isinstance(body, Credit))
    assert found.exit_code() == AGREE
    assert summary(at_url(testbed, ALL)) == summary(found)


def at_url(testbed, choice, kind=UrlRun):
    async def scenario():
        async with Client(URL, transport=httpx.ASGITransport(testbed.app)) as client:
            return await audit_rollouts(kind(client), choice, threads=1, own_files=False)

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """As of a run that has gone on for long: of most versions, bodies and weights are deleted."""
    testbed = RunTestbed(tmp_path_factory.mktemp("long") / "run", tiny_run(steps=4, storage={"window_steps": 1}))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("honest")))
    return testbed


def without_blobs(testbed, place):
    shutil.copytree(testbed.folder.root, place, ignore=shutil.ignore_patterns("blobs"))
    return RunTestbed(place, testbed.config)


def test_a_sample_of_a_url_is_drawn_from_what_its_run_keeps(long_run, tmp_path):
    found = at_url(long_run, GroupChoice(sample=3, seed=0))
    assert (found.groups, found.with_model, found.exit_code()) == (3, 3, AGREE), summary(found)
    assert not found.left_out and not found.agrees
    lines = [line for line in summary(found) if line.startswith("not drawn from: ")]
    assert len(lines) == 1 and "of versions before 3 any more" in lines[0]
    assert summary(found)[-1].endswith("This says nothing of what was not checked")
    every = at_url(long_run, ALL)
    assert every.exit_code() == PARTLY and len(every.left_out) == 2, "one line for bodies, and one for weights"
    empty = without_blobs(long_run, tmp_path / "run")
    nothing = at_url(empty, GroupChoice(sample=3))
    assert nothing.exit_code() == UNAVAILABLE and "nothing was available" in summary(nothing)[-1]
    assert at_url(empty, GroupChoice(rollout="0/0")).exit_code() == UNAVAILABLE


def test_a_host_that_hides_weights_that_every_run_keeps_gets_no_good_report(testbed, monkeypatch):
    asked, codes = UrlRun.manifest, []
    for hidden in range(3):

        async def manifest(run, version, name, hidden=hidden):
            if version <= hidden:
                raise NothingYet("not here")
            return await asked(run, version, name)

        monkeypatch.setattr(UrlRun, "manifest", manifest)
        state, found = testbed.coordinator.state, at_url(testbed, GroupChoice(sample=2, seed=1))
        codes.append(found.exit_code())
        assert "not drawn from: " in "\n".join(summary(found)) and "not public yet" not in found.undrawn
    assert (state.main.version, state.rules.max_staleness) == (3, 0), "so version 2 is kept by every run, 0 may be gone"
    assert codes == [AGREE, AGREE, UNAVAILABLE] and "those from 2 on are kept" in "\n".join(found.left_out)


class Hurried(UrlRun):
    """A run that is long over when the weights that its log speaks of are asked for. Its log was read halfway."""

    asked = 0

    async def rows(self, most=None):
        rows = (await super().rows())[: self.seq + 1]
        self.claim = t.StateHash(self.seq, rows[-1][1], state_hash(replay(rows)))
        return rows

    async def oldest_served(self, state):
        self.asked += 1
        return await super().oldest_served(state) if self.asked > 1 else 0

    async def newer(self, after):
        return await super().newer(after) if self.asked > 1 else []


@pytest.mark.parametrize("silent", first_of(False, True))
def test_what_a_live_run_deletes_while_a_sample_is_read_is_drawn_again(long_run, tmp_path, monkeypatch, silent):
    testbed = without_blobs(long_run, tmp_path / "run") if silent else long_run
    seq = next(s for s, (_, body) in enumerate(bodies(testbed.folder.root)) if getattr(body, "version", 0) == 3)
    monkeypatch.setattr(Hurried, "seq", seq, raising=False)
    found = at_url(testbed, GroupChoice(sample=3, seed=1), Hurried)
    if silent:
        assert found.exit_code() == UNAVAILABLE and not found.groups
    else:
        assert (found.groups, found.with_model, found.exit_code()) == (3, 3, AGREE), summary(found)
        assert "expired before they were read: 3 groups" in found.undrawn and not found.agrees


def test_a_sample_that_is_deleted_each_time_before_it_is_read_ends_and_says_so(testbed, monkeypatch):
    async def gone(run, name):
        raise NothingYet("not here")

    monkeypatch.setattr(UrlRun, "blob", gone)
    monkeypatch.setattr(UrlRun, "oldest_served", lambda run, state: asyncio.sleep(0, next(served)))
    served = itertools.chain([0, 1, 2], itertools.repeat(2))
    found = at_url(testbed, GroupChoice(sample=4, seed=1))
    assert found.exit_code() == UNAVAILABLE and not found.groups, summary(found)


def test_a_host_that_hides_one_version_among_others_gets_no_good_report(testbed, monkeypatch):
    asked = UrlRun.manifest

    async def manifest(run, version, name):
        if version == 1:
            raise NothingYet("not here")
        return await asked(run, version, name)

    monkeypatch.setattr(UrlRun, "manifest", manifest)
    monkeypatch.setattr(UrlRun, "oldest_served", lambda run, state: asyncio.sleep(0, 0))
    found = at_url(testbed, GroupChoice(sample=1000))
    assert found.exit_code() == PARTLY and "are gone (storage.retain)" in "\n".join(found.left_out)
    assert found.with_model < found.groups, "what needs no weights was recomputed"


def test_a_hosts_own_file_is_run_only_when_asked_for_here_and_in_python():
    spec = t.EnvSpec("/srv/game.py", "00" * 32, 3, 1.0, {})
    with pytest.raises(ConfigError, match=r"with --own-files, or with own_files=True in shoal\.audit"):
        load_envs([spec], own_files=False)


class Lying(httpx.AsyncBaseTransport):
    """A host that claims a log of any length, and answers each request for events with the same page, ten times."""

    def __init__(self, events, page):
        self.answers = {"/v1/state": to_json(t.StateHash(events - 1, "", "")), "/v1/events": page}
        self.asked = 0

    async def handle_async_request(self, request):
        self.asked += 1
        body = httpx.ByteStream(self.answers[request.url.path] if self.asked <= 10 else b"")
        return httpx.Response(200, stream=body, headers={"shoal-protocol": "1"})


def log_of(host, max_memory_mb=10):
    async def scenario():
        async with Client(URL, transport=host) as client:
            return await replay_log(UrlRun(client, max_memory_mb))

    return asyncio.run(scenario())


class Dripping(Lying):
    """A host that has one more event at each request, a thousand times."""

    async def handle_async_request(self, request):
        if self.asked > 1000:
            raise AssertionError("asked without end")
        self.asked += 1
        body = self.answers[request.url.path]
        return httpx.Response(200, stream=httpx.ByteStream(body), headers={"shoal-protocol": "1"})


def test_a_host_that_tells_one_event_at_a_time_makes_no_audit_endless():
    host = Dripping(10**9, b"{}\n")

    async def scenario():
        async with Client(URL, transport=host) as client:
            rows = await UrlRun(client).newer(5)
            with pytest.raises(PeerError, match="serves 1 events but says that there are 1000000000"):
                await UrlRun(client).rows()
            return rows

    assert len(asyncio.run(scenario())) == 1 and host.asked == 3


def test_the_newer_events_of_a_log_are_read_page_by_page():
    host = Lying(10**9, b"{}\n" * 1000)

    async def scenario():
        async with Client(URL, transport=host) as client:
            return await UrlRun(client).newer(5)

    assert len(asyncio.run(scenario())) == 10_000 and host.asked == 11


def test_a_log_that_does_not_fit_into_memory_is_not_fetched_whole():
    """1000 events of 400 bytes take 3 MB, so three pages fit into 10 MB and the fourth does not."""
    host = Lying(10**9, (b"x" * 399 + b"\n") * 1000)
    with pytest.raises(Overreach, match=r"3000 of them fit into the 10 MB .*--max-memory.*allow more"):
        log_of(host)
    assert host.asked == 5


@pytest.mark.parametrize("page", [b"\n" * 60_000_000, b"x", b"{}\n{}"])
def test_a_page_of_a_log_that_is_too_long_or_ends_within_an_event_is_refused(page):
    with pytest.raises(PeerError, match="more than 1000 events at once"):
        log_of(Lying(10**9, page))


def test_a_host_that_claims_an_empty_log_gets_no_good_report():
    with pytest.raises(PeerError, match="says that its log is empty"):
        log_of(Lying(0, b""))


def test_one_rollout_is_shown_with_its_seed_task_reward_and_verdict(run_dir, capsys):
    assert main.main(["audit", str(run_dir), "--rollout", "1/2/3", "--threads", "1"]) == AGREE
    out = capsys.readouterr().out
    assert "environment arithmetic, task" in out and "rollout 3: sample seed" in out
    assert "the log: accept by validator" in out and "recomputed: 1 groups, 8 rollouts" in out


def test_the_seed_that_an_audit_prints_draws_the_same_sample_again(run_dir):
    first = audit(run_dir, GroupChoice(sample=3))
    seed = int(first.told[0].rpartition(" ")[2])
    again = audit(run_dir, GroupChoice(sample=3, seed=seed))
    assert (first.groups, first.disagreements) == (3, [])
    assert summary(first) == summary(again)


@pytest.mark.parametrize("name", ["", "1", "1/2/3/4", "a/b", "1/-2", "99/0"])
def test_a_rollout_that_is_not_there_is_an_error_of_one_line(run_dir, name):
    with pytest.raises(ConfigError, match=r"VERSION/SLOT|ledger show"):
        audit(run_dir, GroupChoice(rollout=name or " "))


# --- what was deleted or is not yet public is reported, not guessed ---


@pytest.fixture
def copy(run_dir, tmp_path):
    return Path(shutil.copytree(run_dir, tmp_path / "copy"))


def blob(run_dir, name):
    return run_dir / "blobs" / name[:2] / name


def test_a_body_that_is_gone_is_left_out(copy):
    gone = next(body for _, body in bodies(copy) if isinstance(body, SubmissionReceived))
    blob(copy, gone.digest).unlink()
    found = audit(copy)
    assert found.disagreements == [] and found.exit_code() == PARTLY and not found.agrees
    assert sum(found.left_out.values()) == len(gone.groups)
    assert "NOT all that you chose" in summary(found)[-1]


def keeps(copy, **storage):
    """Let the run's file say what it keeps."""
    tree = json.loads((copy / "run.json").read_text())
    tree["storage"] |= storage
    (copy / "run.json").write_text(json.dumps(tree))


def received(copy, *versions):
    """The names of submissions of these versions."""
    granted = {body.lease: body.version for _, body in bodies(copy) if isinstance(body, LeaseGranted)}
    return [
        body.digest
        for _, body in bodies(copy)
        if isinstance(body, SubmissionReceived) and granted[body.lease] in versions
    ]


def test_what_the_run_deleted_by_its_own_rule_is_said_and_is_no_failure(copy):
    keeps(copy, window_steps=1)
    judged = len(choose_all(copy))
    for name in received(copy, 0, 1):
        blob(copy, name).unlink()
    found = audit(copy)
    assert found.exit_code() == AGREE and not found.agrees and not found.left_out and found.groups > 0
    ((reason, count),) = found.expired.items()
    assert count + found.groups == judged and "of versions 0 to 1: their submissions are deleted" in reason
    assert 'The host\'s run file keeps those of version 2 and later (storage.retain = "window")' in reason
    said = summary(found)
    assert f"not checked: {count} groups {reason}" in said
    assert said[-1] == "the log agrees with what was recomputed. This says nothing of what was not checked"
    sample = audit(copy, GroupChoice(sample=2))
    assert sample.groups == 2 and sample.exit_code() == AGREE, "it is drawn from what is here"
    assert audit(copy, GroupChoice(rollout="0/0")).exit_code() == UNAVAILABLE


@pytest.mark.parametrize(("storage", "version"), [({"window_steps": 1}, 2), ({"retain": "all"}, 0)])
def test_what_the_runs_rule_keeps_and_is_gone_is_left_out(copy, storage, version):
    keeps(copy, **storage)
    blob(copy, received(copy, version)[0]).unlink()
    found = audit(copy)
    assert found.exit_code() == PARTLY and not found.expired and found.left_out


def test_a_rule_that_took_one_body_and_left_others_as_old_is_not_believed(copy):
    """The rule comes from the host, which could name it after it deleted what convicts it."""
    keeps(copy, window_steps=1)
    for name in [*received(copy, 0)[1:], *received(copy, 1)]:
        blob(copy, name).unlink()
    found = audit(copy)
    assert found.exit_code() == PARTLY and not found.expired and found.left_out
    blob(copy, received(copy, 0)[0]).unlink()
    found = audit(copy)
    assert found.exit_code() == AGREE and found.expired and not found.left_out
    assert Findings(expired=found.expired).exit_code() == UNAVAILABLE, "nothing was recomputed"


def trained_on(copy):
    """The names of submissions that batches took groups of."""
    taken = {place for _, body in bodies(copy) if isinstance(body, BatchFormed) for place in body.groups}
    return {
        body.submission
        for _, body in bodies(copy)
        if isinstance(body, GroupAccepted) and (body.version, body.slot) in taken
    }


def test_bodies_that_were_trained_on_do_not_expire_where_the_rule_keeps_them(copy):
    keeps(copy, window_steps=1, retain="batches")
    old, used = received(copy, 0, 1), trained_on(copy)
    for name in old:
        if name not in used:
            blob(copy, name).unlink()
    found = audit(copy)
    assert found.exit_code() == AGREE and found.expired and not found.left_out
    blob(copy, next(name for name in old if name in used)).unlink()
    found = audit(copy)
    assert found.exit_code() == PARTLY and found.left_out


def test_a_rule_that_took_the_weights_of_one_version_and_left_older_ones_is_not_believed(copy):
    keeps(copy, window_steps=1, retain="batches")
    manifests = [body.manifest for _, body in bodies(copy) if isinstance(body, CheckpointPublished)]
    blob(copy, manifests[1]).unlink()
    assert audit(copy).exit_code() == PARTLY
    blob(copy, manifests[0]).unlink()
    found = audit(copy)
    assert found.exit_code() == AGREE and not found.agrees and not found.left_out, "what the rule took is no failure"
    assert found.with_model < found.groups and ["weights are deleted" in reason for reason in found.expired] == [True]
    blob(copy, manifests[2]).unlink()
    assert audit(copy, GroupChoice(rollout="2/0")).exit_code() == PARTLY


def choose_all(copy):
    return [slot for _, body in bodies(copy) if isinstance(body, VerdictGiven) for slot in body.groups]


def test_without_a_versions_weights_all_but_the_tokens_is_recomputed(copy):
    manifests = [body.manifest for _, body in bodies(copy) if isinstance(body, CheckpointPublished)]
    signed = msgspec.json.decode(blob(copy, manifests[0]).read_bytes(), type=t.SignedManifest)
    manifest = msgspec.json.decode(signed.body, type=t.Manifest)
    for chunk in next(file for file in manifest.files if file.path.endswith(".safetensors")).chunks:
        blob(copy, chunk).unlink()
    found = audit(copy, GroupChoice(rollout="0/0"))
    assert found.disagreements == [] and found.groups > 0 and found.with_model == 0 and found.exit_code() == PARTLY
    assert ["weights of their versions are gone" in reason for reason in found.left_out] == [True]


def test_weights_that_do_not_fit_on_this_disk_are_left_out_and_are_no_disagreement(run_dir, monkeypatch):
    monkeypatch.setattr(log_source, "room_for_version", lambda folder, keep: 1000)
    found = audit(run_dir, GroupChoice(rollout="0/0"))
    assert found.disagreements == [] and found.groups == found.with_model == 0
    assert any("only 1000 may be used" in reason and "set TMPDIR" in reason for reason in found.left_out)


def test_a_disk_that_fills_up_while_weights_are_fetched_is_no_disagreement(run_dir, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch, "finish", full)
    found = audit(run_dir, GroupChoice(rollout="0/0"))
    assert found.disagreements == [] and any("No space left on device" in reason for reason in found.left_out)


class Silent(FolderRun):
    """A host that answers no request for one kind of blob."""

    def __init__(self, root, silent):
        super().__init__(root)
        self.silent = silent

    async def blob(self, name):
        if name in self.silent:
            raise PeerError("no answer in 30 s")
        return await super().blob(name)


def test_what_a_host_does_not_serve_is_left_out_and_the_rest_is_audited(run_dir):
    body = [body for _, body in bodies(run_dir) if isinstance(body, SubmissionReceived)][-1]
    manifest = next(body.manifest for _, body in bodies(run_dir) if isinstance(body, CheckpointPublished))
    found = audit(Silent(run_dir, {body.digest, manifest}))
    assert found.disagreements == [] and 0 < found.with_model < found.groups and found.exit_code() == PARTLY
    assert any("cannot fetch version 0: no answer in 30 s" in reason for reason in found.left_out)
    assert len(body.groups) in [
        count for reason, count in found.left_out.items() if "no answer in 30 s" in reason and "version" not in reason
    ]


def test_a_run_without_rollouts_has_nothing_yet(tmp_path):
    found = audit(RunTestbed(tmp_path / "run", tiny_run()).folder.root, GroupChoice(sample=3))
    assert found.exit_code() == UNAVAILABLE and "no rollout" in summary(found)[-1]


def test_a_version_whose_link_is_not_revealed_cannot_be_recomputed(run_dir, tmp_path):
    def before_the_last_version(lines):
        return lines[: max(i for i, (_, body) in enumerate(lines) if isinstance(body, CheckpointPublished))]

    live = forged(run_dir, tmp_path / "live", before_the_last_version)
    last = max(body.version for _, body in bodies(live) if isinstance(body, CheckpointPublished))
    found = audit(live, GroupChoice(rollout=f"{last}/0"))
    assert found.exit_code() == UNAVAILABLE and "is not revealed" in summary(found)[-2]
    assert audit(live, GroupChoice(rollout="0/0")).exit_code() == AGREE


# --- attacks ---


def with_rewards_swapped(run_dir):
    """An edit that swaps the rewards of two rollouts of a group wherever the log has them, as if a validator had lied."""
    weight_of = partial(influence, tokens=1, algorithm=Grpo())
    accepted, rewards = next(
        (body, swapped)
        for _, body in bodies(run_dir)
        if isinstance(body, GroupAccepted)
        for one, other in itertools.combinations(range(8), 2)
        for swapped in [_swapped(body.rewards, one, other)]
        if swapped != body.rewards and weight_of(swapped) == weight_of(body.rewards)
    )

    def lie(body):
        if body == accepted:
            return msgspec.structs.replace(body, rewards=rewards)
        if isinstance(body, VerdictGiven) and body.submission == accepted.submission:
            groups = tuple(
                msgspec.structs.replace(g, rewards=rewards) if g.slot == accepted.slot else g for g in body.groups
            )
            return msgspec.structs.replace(body, groups=groups)
        return body

    return accepted, lambda lines: [(time, lie(body)) for time, body in lines]


def _swapped(rewards, one, other):
    swapped = list(rewards)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return tuple(swapped)


def test_a_verdict_with_forged_rewards_is_found_though_the_log_holds(run_dir, tmp_path):
    accepted, edit = with_rewards_swapped(run_dir)
    lying = forged(run_dir, tmp_path / "lying", edit)
    assert audit_folder(lying).findings == []
    found = audit(lying, GroupChoice(rollout=f"{accepted.version}/{accepted.slot}"))
    assert found.exit_code() == DISAGREE and len(found.disagreements) == 2
    assert all(line.startswith(f"{accepted.version}/{accepted.slot}, ") for line in found.disagreements)
    assert all("reward of rollout" in line and "the environment gives" in line for line in found.disagreements)


def judged_anew(lines, target, groups):
    """The log with other groups in one verdict, and with the decision that follows from them."""
    refused = any(group.outcome == "hard" for group in groups)
    changed = []
    for time, body in lines:
        if body == target:
            body = msgspec.structs.replace(body, groups=groups)
        elif isinstance(body, Decision) and body.submission == target.submission:
            blocks = (*body.accepted, *body.refused)
            body = Decision(body.submission, () if refused else blocks, blocks if refused else ())
        changed.append((time, body))
    return changed


def test_a_group_that_the_validator_should_have_refused_is_found(run_dir, tmp_path):
    refused = next(body for _, body in bodies(run_dir) if isinstance(body, VerdictGiven) and body.groups[0].check)
    mild = tuple(
        msgspec.structs.replace(g, outcome="accept", check="", rewards=(1.0,) * 8, tokens=40) for g in refused.groups
    )
    lying = forged(run_dir, tmp_path / "lying", lambda lines: judged_anew(lines, refused, mild))
    found = audit(lying, GroupChoice(rollout=f"0/{refused.groups[0].slot}"))
    assert any("the log accepts it, here sampling refuses it" in line for line in found.disagreements)


def refused_by_a_liar(accepted):
    return tuple(
        msgspec.structs.replace(g, outcome="hard", check="sampling", detail="not chosen", figure=9.0, bound=1.0)
        for g in accepted.groups
    )


def test_an_honest_group_that_the_validator_refused_is_found(run_dir, tmp_path):
    wronged = next(body for _, body in bodies(run_dir) if isinstance(body, VerdictGiven) and not body.groups[0].check)
    edit = partial(judged_anew, target=wronged, groups=refused_by_a_liar(wronged))
    lying = forged(run_dir, tmp_path / "lying", edit)
    found = audit(lying, GroupChoice(rollout=f"0/{wronged.groups[0].slot}"))
    assert any("the log says: sampling refuses it" in d and "passes every check" in d for d in found.disagreements)


def test_an_edited_body_is_found_and_named(copy):
    target = next(body for _, body in bodies(copy) if isinstance(body, SubmissionReceived))
    path = blob(copy, target.digest)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = audit(copy)
    assert found.exit_code() == DISAGREE and len(found.disagreements) == 1
    assert target.digest[:12] in found.disagreements[0] and "edited or damaged" in found.disagreements[0]


@pytest.mark.parametrize("lie", first_of("seed", "task"))
def test_a_lease_that_was_not_drawn_from_the_chain_is_found_once_the_link_is_revealed(tmp_path, lie):
    """The host gives a worker of its choice another seed or task, and its own validator accepts it."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    honest = testbed.coordinator.wire_lease

    def crooked(lease):
        given = honest(lease)
        if given.version or lease.blocks[0]:
            return given
        first, *others = given.blocks[0].slots
        wish = {"seed": "77" * 32} if lie == "seed" else {"task": first.task ^ 1}
        block = t.Block(0, (msgspec.structs.replace(first, **wish), *others))
        return msgspec.structs.replace(given, blocks=(block, *given.blocks[1:]))

    testbed.coordinator.wire_lease = crooked
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("friend")))
    assert testbed.audit().findings == []
    found = audit(testbed.folder.root, GroupChoice(rollout="0/0"))
    check = {"seed": "sampling", "task": "lease"}[lie]
    assert ["0/0, submission" in line and f"here {check} refuses it" in line for line in found.disagreements] == [True]


def test_a_published_version_with_other_weights_is_found(copy):
    manifests = [body.manifest for _, body in bodies(copy) if isinstance(body, CheckpointPublished)]
    signed = msgspec.json.decode(blob(copy, manifests[1]).read_bytes(), type=t.SignedManifest)
    manifest = msgspec.json.decode(signed.body, type=t.Manifest)
    chunk = blob(copy, next(file for file in manifest.files if file.path.endswith(".safetensors")).chunks[0])
    chunk.write_bytes(chunk.read_bytes()[:-4] + b"\0\0\0\1")
    found = audit(copy, GroupChoice(rollout="1/0"))
    assert found.exit_code() == DISAGREE and found.disagreements[0].startswith("version 1: ")


# --- forged logs: every hash fits, the rules do not ---


def credit_for_a_refused_group(lines):
    """The host pays a friend for a group that was refused."""
    refused = next(body for _, body in lines if isinstance(body, VerdictGiven) and body.groups[0].check)
    worker = next(
        body.worker for _, body in lines if isinstance(body, SubmissionReceived) and body.digest == refused.submission
    )
    at = next(i for i, (_, body) in enumerate(lines) if isinstance(body, Decision) and body.refused)
    slot = refused.groups[0].slot
    paid = [GroupAccepted(0, slot, refused.submission, 0, "0" * 64, 50, (1.0,) * 8, False), Credit(worker, 0, slot, 50)]
    return [*lines[: at + 1], *((lines[at][0], body) for body in paid), *lines[at + 1 :]]


def decision_accepts_what_was_refused(lines):
    at = next(i for i, (_, body) in enumerate(lines) if isinstance(body, Decision) and body.refused)
    time, body = lines[at]
    return [*lines[:at], (time, Decision(body.submission, body.refused, ())), *lines[at + 1 :]]


def judged_by_its_worker(lines):
    received = next(body for _, body in lines if isinstance(body, SubmissionReceived))
    own = edited(VerdictGiven, replaced(validator=received.worker))
    return own(lines)


def lease_out_of_turn(lines):
    """The host grants a friend a block that is far ahead of the next one."""
    at = max(i for i, (_, body) in enumerate(lines) if isinstance(body, CheckpointPublished))
    granted = next(body for _, body in lines if isinstance(body, LeaseGranted))
    version = max(body.version for _, body in lines[:at] if isinstance(body, CheckpointPublished))
    chosen = LeaseGranted("friend", granted.worker, version, (99,), lines[at][0] + 5.0)
    return [*lines[:at], (lines[at][0], chosen), *lines[at:]]


def before_the_end(lines):
    """Cut off before the run's end, which follows from the last version: later events may have causes of their own."""
    return lines[: next(i for i, (_, body) in enumerate(lines) if isinstance(body, RunEnded))]


def without_the_quarantine(lines):
    return [(time, body) for time, body in lines if not isinstance(body, NodeQuarantined)]


def without_the_link(version):
    """The host never reveals a link, and so keeps a version from being audited."""
    return lambda lines: [
        (time, body) for time, body in lines if not isinstance(body, LinkRevealed) or body.version != version
    ]


FORGERIES = {
    "a credit of more tokens": (edited(Credit, lambda b: replaced(tokens=b.tokens + 1)(b)), "tokens is"),
    "a credit to a friend": (edited(Credit, lambda b: replaced(node=b.node[::-1])(b)), "credit"),
    "a credit for a refused group": (credit_for_a_refused_group, "(group_accepted)"),
    "a decision against its verdict": (decision_accepts_what_was_refused, "(decision) is not what the rules give"),
    "a penalty left out": (without_the_quarantine, "due is node_quarantined"),
    "a batch of other members": (
        edited(BatchFormed, lambda b: replaced(groups=b.groups[1:])(b)), "(batch_formed) is not what the rules give"
    ),
    "an audit not drawn": (
        edited(AuditDrawn, lambda b: replaced(slots=b.slots[:1])(b)), "(audit_drawn) is not what the rules give"
    ),
    "a worker's verdict on its own work": (judged_by_its_worker, "is against the rules"),
    "another link": (edited(LinkRevealed, replaced(link="ab" * 32)), "does not lead to the published end"),
    "no link at all": (edited(LinkRevealed, replaced(audit_link="zz")), "does not lead to the published end"),
    "a link kept back": (without_the_link(0), "the link of version 0 is not revealed"),
    "the last link kept back": (without_the_link(3), "the link of version 3 is not revealed"),
    "a lease that the host chose": (lease_out_of_turn, "(lease_granted) is"),
    "an end left out": (before_the_end, "the log ends in the middle"),
    "a validator left out": (edited(AuditDrawn, replaced(order=())), "(audit_drawn) is not what"),
    "a long deadline": (
        edited(LeaseGranted, lambda b: replaced(deadline=b.deadline + 9)(b), 1), "(lease_granted) is not what"
    ),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_log_is_found_though_every_hash_fits(run_dir, tmp_path, forgery):
    edit, named = FORGERIES[forgery]
    lying = forged(run_dir, tmp_path / "lying", edit)
    try:
        findings = audit_folder(lying).findings
    except ValueError as broken:  # the forged event cannot be booked
        findings = [str(broken)]
    assert any(named in finding for finding in findings), findings


def test_the_commands_fail_on_a_forged_log(run_dir, tmp_path, capsys):
    lying = forged(run_dir, tmp_path / "lying", FORGERIES["a credit of more tokens"][0])
    assert main.main(["ledger", "verify", str(lying)]) == 1
    assert main.main(["audit", str(lying), "--rollout", "0/0", "--threads", "1"]) == DISAGREE
    assert "the log does NOT agree" in capsys.readouterr().out

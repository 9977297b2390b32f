"""Whole runs with nodes that do not trust the host: same tokens, and a hostile policy only makes them leave."""

import asyncio
import shutil

import pytest

from shoal.chat import isolated_tokenizer
from shoal.chat.isolated import ContainedRenderer, start_here
from shoal.errors import Overreach, PeerError
from shoal.models import random_model
from shoal.weights import memory_limit
from shoal.weights.fetch.version_directory import disk_limit, room_for_version
from tests.roles.testbed import RunTestbed, stranger, tiny_run, weights_of_one_file

HOG = "{% set text = messages[0].content * 300000000 %}{{ text|length }}"


def test_strangers_give_the_bytes_of_one_file(tmp_path, monkeypatch):
    """Within --max-memory 1000, as the how-to for people who join says."""
    monkeypatch.setattr(memory_limit, "taken_mb", lambda: 300)
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    worker, validator = (stranger(role, max_memory_mb=1000) for role in (testbed.worker("worker"), testbed.validator()))
    asyncio.run(testbed.live(testbed.trainer(), validator, worker))
    assert isinstance(worker.session.policy.renderer, ContainedRenderer)
    assert isinstance(validator.session.policy.renderer, ContainedRenderer)
    started = isolated_tokenizer.start if isolated_tokenizer.tried().result() else start_here
    assert worker.session.policy.renderer._start is validator.session.policy.renderer._start is started
    assert testbed.weights() == weights_of_one_file(tiny_run(), tmp_path / "one" / "run")
    assert testbed.audit().findings == []


def test_a_worker_leaves_a_host_whose_template_takes_all_memory_and_submits_nothing(tmp_path, monkeypatch):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    monkeypatch.setattr(random_model, "CHAT_TEMPLATE", HOG)
    worker = stranger(testbed.worker("worker"))
    with pytest.raises(ExceptionGroup) as stopped:
        asyncio.run(testbed.live(testbed.trainer(), worker))
    (fault,) = stopped.value.exceptions[0].exceptions
    assert isinstance(fault, Overreach) and "tell the host" in str(fault) and "\n" not in str(fault)
    assert not testbed.coordinator.state.submissions and testbed.coordinator.state.members[worker.key].refused == 0


def test_a_validator_gives_no_verdict_where_the_template_goes_beyond_a_limit(tmp_path, monkeypatch):
    """The worker played on a machine that allows more. The validator leaves, and the worker is charged with nothing."""
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    worker, validator = testbed.worker("worker"), stranger(testbed.validator())

    def beyond(renderer, messages):
        raise Overreach("took too long")

    monkeypatch.setattr(ContainedRenderer, "_render_opening", beyond)
    with pytest.raises(ExceptionGroup) as stopped:
        asyncio.run(testbed.live(testbed.trainer(), validator, worker))
    (fault,) = stopped.value.exceptions[0].exceptions
    assert isinstance(fault, Overreach)
    assert testbed.coordinator.state.submissions
    assert not any(submission.verdicts for submission in testbed.coordinator.state.submissions.values())
    assert testbed.coordinator.state.members[worker.key].refused == 0


@pytest.mark.parametrize("role", ["worker", "validator"])
def test_a_node_keeps_a_share_of_its_disk_free(tmp_path, monkeypatch, role):
    """Two versions may stay and a third is made beside them with patches, so a version may take a quarter of half of what
    is free, less an eighth for evidence."""
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    scarce = shutil.disk_usage(tmp_path)._replace(free=300_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: scarce)
    nodes = {"worker": testbed.worker("worker"), "validator": testbed.validator()}
    stranger(nodes[role])
    with pytest.raises(ExceptionGroup) as stopped:
        asyncio.run(testbed.live(testbed.trainer(), *nodes.values()))
    (fault,) = stopped.value.exceptions[0].exceptions
    assert isinstance(fault, PeerError) and "limit of this node 32812: allow more (--max-memory, --max-disk)" in str(
        fault
    )
    assert not list((testbed.folder.nodes / nodes[role].node.home.name).glob("weights/v*"))


def test_a_node_keeps_to_the_disk_that_it_was_given(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "file").write_bytes(bytes(1000))
    assert room_for_version(disk_limit(tmp_path / "weights", max_disk_mb=40), 2) == 10_000_000
    assert room_for_version(disk_limit(tmp_path / "weights", max_disk_mb=40) - 4_000_000, 2) == 9_000_000
    assert room_for_version(disk_limit(tmp_path / "none" / "weights"), 1) > 0

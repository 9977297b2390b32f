"""The benchmarks of crowds and connections in miniature: they still speak the protocol, and count what happened."""

import asyncio

import pytest

from benchmarks import connections, crowd


@pytest.mark.parametrize("at_work", [4, 8])
def test_a_small_crowd_submits_is_judged_and_trains(tmp_path, monkeypatch, at_work):
    monkeypatch.setattr(crowd, "WORK_S", 0.05)
    town = crowd.Town(tmp_path, workers=8, at_work=at_work, seed=1)
    figures = asyncio.run(town.measure(1.0))
    assert figures["submissions_per_s"] > 0 and figures["verdicts_per_s"] > 0
    assert figures["versions"] > 0 and town.desk.state.accepted_groups > 0


def test_joins_are_counted_beside_a_few_idle_connections(tmp_path):
    async def few(port):
        return await connections.joins(port, await connections.run_id(port), 0.5)

    with connections.coordinator() as (_, port):
        rate, trouble = asyncio.run(few(port))
    assert rate > 0 and trouble == ""

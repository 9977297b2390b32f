"""Metrics over HTTP: the coordinator's pages of the file."""

import asyncio

import httpx
import pytest

from shoal.step_metrics import MAX_LINE_BYTES, MetricsFollower
from tests.roles.testbed import URL, RunTestbed, tiny_run


@pytest.fixture
def small(tmp_path):
    return RunTestbed(tmp_path / "run", tiny_run())


def ask(testbed, query, **headers):
    async def scenario():
        transport = httpx.ASGITransport(testbed.app)
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            return await client.get(f"/v1/metrics{query}", headers=headers)

    return asyncio.run(scenario())


def test_lines_after_a_step_are_served_by_step_and_an_unchanged_page_is_not_sent_again(small):
    assert ask(small, "").content == b""
    small.folder.metrics.write_text('{"step": 0}\n{"step": 1, "loss": 1.0}\n{"step": 1, "loss": 2.0}\n{"step": 2}')
    answer = ask(small, "?after=0")
    assert answer.content == b'{"step": 1, "loss": 2.0}\n' and ask(small, "?after=1").content == b""
    again = ask(small, "?after=0", **{"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    with small.folder.metrics.open("a") as file:
        file.write("\n")
    assert ask(small, "", **{"if-none-match": answer.headers["etag"]}).content.count(b"\n") == 3
    assert ask(small, "?after=x").status_code == 400


def test_a_page_has_so_many_bytes_at_most_and_the_next_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = '{"step": %d, "x": "' + "y" * 1000 + '"}\n'
    path.write_text("".join(line % step for step in range(500)) + "z" * (2 * MAX_LINE_BYTES) + "\n" + line % 500)
    tail, steps = MetricsFollower(path), -1
    pages = []
    while page := tail.after(steps, MAX_LINE_BYTES):
        assert len(page) <= MAX_LINE_BYTES
        pages.append(page)
        steps += page.count(b"\n")
    assert len(pages) > 1 and b"".join(pages) == b"".join((line % step).encode() for step in range(501))

"""What the page costs: time of each view for a large run, and what 500 viewers cost a host.

    python benchmarks/page.py [--steps 10000] [--workers 1000] [--groups 12500] [--viewers 500] [--seconds 30] [--rounds 8]

First it writes a synthetic run, builds its index, and renders each view anew several times. Then as many viewers poll the
page of that run as its script does: every 5 seconds for what changed (something does every 4 seconds), and once a minute
for the charts. Measured: CPU-seconds of the page's process for a second.

Then they poll the page of a live run: the coordinator of `benchmarks/crowd.py`, to which workers submit, and beside it
the page as `shoal host` starts it. Measured: the latency of submissions in rounds without and with page and viewers, in
turn. The 99th percentile is compared within each pair of rounds, and the median counts: in all rounds together, one bad
second of the machine decides it. Viewers would be on other machines, so they have the second core and the lowest
priority. One bar is that nearly all of their polls are answered. Ends with one JSON line.
"""

import asyncio
import contextlib
import multiprocessing
import os
import random
import re
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import psutil
from starlette.testclient import TestClient

from benchmarks.crowd import WORK_S, Caller, CrowdRun
from benchmarks.measure import arguments, report
from benchmarks.synthetic_run import write_run
from shoal.net.server_address import port_of_living
from shoal.run_folder import RunFolder
from shoal.views.web.app import page_app
from shoal.views.web.page_server import serve_hosted, server_of
from shoal.views.web.served_runs import CHANGE_EVERY_S, ServedRuns

LIMIT_MS, LIMIT_SHARE, LIMIT_P99, LIMIT_KB = 300.0, 0.10, 1.10, 300.0
LEAST_SERVED = 0.9
"""Of the polls that viewers would make if each were answered at once."""
REPEATS = 5
POLL_S, CHARTS_S = 5.0, 60.0
TOKEN = "t" * 43
LIVE_WORKERS = 60
"""Of the live run: they submit 15 groups a second."""

SPAWN = multiprocessing.get_context("spawn")


def main() -> int:
    """Measure, print."""
    parser = arguments(__doc__)
    for name, default in (("steps", 10_000), ("workers", 1_000), ("groups", 12_500), ("viewers", 500), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a round")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root, index = Path(temporary) / "run", Path(temporary) / "index.sqlite"
        write_run(root, asked.steps, asked.workers, asked.groups)
        served_runs = ServedRuns(index, [str(root)])
        began = time.process_time()
        served_runs.catch_up()
        figures: dict[str, object] = {
            "steps": asked.steps, "workers": asked.workers, "rollouts": 8 * asked.groups,
            "index_cpu_s": round(time.process_time() - began, 1),
        }  # fmt: skip
        times = views(served_runs)
        figures["overview_kb"] = overview_kb(served_runs)
        served_runs.close()
        slowest = max(times, key=lambda view: times[view][1])
        figures |= {"views": len(times), "slowest_view": slowest, "slowest_view_ms": times[slowest][1],
                    "median_view_ms": round(statistics.median(ms for ms, _ in times.values()), 1)}  # fmt: skip
        figures |= {"viewers": asked.viewers, **large(root, index, asked.viewers, asked.seconds)}
        figures |= live(Path(temporary) / "live", asked.viewers, asked.seconds, asked.rounds)
    for view, (median, most) in times.items():
        print(f"{view:>34}  median {median:7.1f} ms  largest {most:7.1f} ms")
    for name, value in figures.items():
        print(f"{name:>34}  {value}")
    bars = {
        "views": times[slowest][1] <= LIMIT_MS,
        "cpu": max(figures["large_cpu_share"], figures["live_cpu_share"]) <= LIMIT_SHARE,  # type: ignore[type-var, operator]
        "p99": figures["p99_ratio"] <= LIMIT_P99,  # type: ignore[operator]
        "size": figures["overview_kb"] <= LIMIT_KB,  # type: ignore[operator]
        "served": min(figures["large_polls_per_s"], figures["live_polls_per_s"])  # type: ignore[type-var, operator]
        >= LEAST_SERVED * asked.viewers / POLL_S,
    }
    print(f"bars met: {bars}")
    report("page", figures)
    return 0 if all(bars.values()) else 1


def views(served_runs: ServedRuns) -> dict[str, tuple[float, float]]:
    """Median and largest time of each view, rendered anew, in milliseconds."""
    look, client = served_runs.look(), TestClient(page_app(served_runs, TOKEN))
    key = look.nodes(1, role="worker")["rows"][0]["key"]
    newest = look.rows("SELECT max(id) AS id FROM groups WHERE env IS NOT NULL")[0]["id"]
    task = look.rows("SELECT task FROM groups WHERE id = ?", newest)[0]["task"]
    paths = [
        "", "figures", "figure?name=reward_mean", "figure?name=reward_mean&smooth=0.9", "steps/77", "nodes",
        "nodes?by=influence&after=900", "nodes?q=worker+99", f"nodes/{key}", "validators", "refusals",
        "refusals?check=sampling", "versions", "log", "log?kind=node_joined", "log?q=refused+block", "log/500", "alarms",
        "groups", "groups?q=carry", "groups?q=needle", "groups?q=absent", "groups?from=0.99", f"groups?worker={key}",
        "groups?by=best", "groups?by=worst", "groups?q=carry&by=worst", "nodes?by=pace_s", "heldout",
        "figure?name=by-version",
        f"groups/{newest}", f"groups/{newest // 2}", f"groups/{newest}?colour=advantage&by=worst",
        f"task?env=arithmetic&task={task}", "chart.json?name=reward_mean", "chart.json?name=by-version", "?live=1",
        "groups?live=1", "nodes?live=1", "log?live=1",
    ]  # fmt: skip
    found = {}
    for path in ["/compare", *(f"/1/{path}" for path in paths)]:
        times = []
        for _ in range(REPEATS):
            served_runs.change += 1
            began = time.perf_counter()
            answer = client.get(path)
            times.append(1000 * (time.perf_counter() - began))
            assert answer.status_code == 200, (path, answer.text[:300])
        found[path] = (round(statistics.median(times), 1), round(max(times), 1))
    return found


def overview_kb(served_runs: ServedRuns) -> float:
    """What a new viewer of the overview is sent: the page and its assets, uncompressed."""
    client = TestClient(page_app(served_runs, TOKEN))
    page = client.get("/1/")
    assets = set(re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text))
    assert assets, "the page has a script and a style sheet"
    return round((len(page.content) + sum(len(client.get(link).content) for link in assets)) / 1000, 1)


# --- the page of a large run ---


def large(root: Path, index: Path, viewers: int, seconds: float) -> dict[str, object]:
    """The share of a core that viewers of a large run take."""
    with _process(_serve_large, root, index) as process:
        url = _when_served(lambda: int(index.with_suffix(".port").read_text()))
        share, rate = _share(process, url, viewers, lambda: time.sleep(2 * seconds))
    return {"large_cpu_share": round(share, 3), "large_polls_per_s": round(rate, 1)}


def _serve_large(root: Path, index: Path) -> None:
    served_runs = ServedRuns(index, [str(root)])
    served_runs.catch_up()

    def changes() -> None:
        while True:
            time.sleep(CHANGE_EVERY_S)
            served_runs.change += 1

    threading.Thread(target=changes, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    index.with_suffix(".port").write_text(str(listener.getsockname()[1]))
    server_of(page_app(served_runs, TOKEN)).run(sockets=[listener])


# --- the page of a live run ---


def live(root: Path, viewers: int, seconds: float, rounds: int) -> dict[str, object]:
    """The latency of submissions in rounds without and with page and viewers, and the page's share of a core."""
    taken: dict[bool, list[list[float]]] = {False: [], True: []}
    """Without and with viewers, by round."""
    shares, rates, (here, there) = list[float](), list[float](), SPAWN.Pipe()
    with _process(_run_live, root, there) as crowd_run:
        _on_core(crowd_run.pid, 0)
        while not here.poll(0.2):
            assert crowd_run.is_running(), "the live run has ended"
        here.recv()
        for _ in range(rounds):
            for beside in (False, True):
                with contextlib.ExitStack() as stack:
                    if beside:
                        page = stack.enter_context(_process(serve_hosted, root / "run"))
                        _on_core(page.pid, 0)
                        folder = RunFolder(root / "run")
                        url = _when_served(lambda folder=folder: port_of_living(folder.dashboard_address))  # type: ignore[misc]
                        share, rate = _share(
                            page, url, viewers, lambda beside=beside: taken[beside].append(_lately(here, seconds))
                        )  # type: ignore[misc]
                        shares.append(share)
                        rates.append(rate)
                    else:
                        taken[beside].append(_lately(here, seconds))
    figures: dict[str, object] = {
        "live_cpu_share": round(statistics.median(shares), 3),
        "live_polls_per_s": round(statistics.median(rates), 1),
        "submissions": sum(map(len, taken[False] + taken[True])),
        "submissions_per_s": round(sum(map(len, taken[True])) / (rounds * seconds), 1),
    }
    p99_ms = dict[bool, list[float]]()
    for beside, name in ((False, "alone"), (True, "viewed")):
        cuts = [statistics.quantiles(one, n=100) for one in taken[beside]]
        p99_ms[beside] = [1e3 * one[98] for one in cuts]
        median_ms = 1e3 * statistics.median(one[49] for one in cuts)
        figures |= {
            f"{name}_median_ms": round(median_ms, 2),
            f"{name}_p99_ms": round(statistics.median(p99_ms[beside]), 2),
        }
    ratios = sorted(viewed / alone for alone, viewed in zip(p99_ms[False], p99_ms[True], strict=True))
    return {
        **figures,
        "p99_ratio": round(statistics.median(ratios), 3),
        "p99_ratios": [round(one, 2) for one in ratios],
    }


class _Timed(Caller):
    """Notes how long each submission took."""

    took: list[float]

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        began = time.perf_counter()
        answer = await super().call(method, path, body)
        if path.endswith("/submission"):
            self.took.append(time.perf_counter() - began)
        return answer


class _TimedRun(CrowdRun):
    """The live run. What it hears through the pipe empties the list of latencies, or is answered with it."""

    def __init__(self, root: Path) -> None:
        self.took = list[float]()
        super().__init__(root, LIVE_WORKERS, LIVE_WORKERS, seed=0)

    def _caller(self, key: object, number: int) -> Caller:
        made = super()._caller(key, number)  # type: ignore[arg-type]
        timed = _Timed(made.app, made.key, made.address, made.run)
        timed.took = self.took
        return timed

    async def tell(self, pipe: Connection) -> None:
        await asyncio.sleep(4 * WORK_S)  # all have joined and work
        pipe.send("ready")
        while True:
            if pipe.poll():
                answer, _ = self.took.copy(), self.took.clear()
                if pipe.recv() == "tell":
                    pipe.send(answer)
            await asyncio.sleep(0.05)


def _run_live(root: Path, pipe: Connection) -> None:
    async def both(crowd_run: _TimedRun) -> None:
        telling = asyncio.create_task(crowd_run.tell(pipe))
        await crowd_run.measure(1e9)
        await telling

    root.mkdir()
    asyncio.run(both(_TimedRun(root)))


def _lately(pipe: Connection, seconds: float) -> list[float]:
    """Latencies of the submissions of the next seconds."""
    pipe.send("forget")
    time.sleep(seconds)
    pipe.send("tell")
    found: list[float] = pipe.recv()
    return found


# --- processes ---


@contextlib.contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[psutil.Process]:
    process = SPAWN.Process(target=target, args=arguments)
    process.start()
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()


def _on_core(pid: int, core: int) -> None:
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > core:
        os.sched_setaffinity(pid, {sorted(os.sched_getaffinity(0))[core]})


def _when_served(port: Callable[[], int]) -> str:
    """The URL of a page, when it answers."""
    while True:
        with contextlib.suppress(httpx.HTTPError, OSError, ValueError):
            url = f"http://127.0.0.1:{port()}"
            if httpx.get(f"{url}/1/", trust_env=False).status_code == 200:
                return url
        time.sleep(0.2)


def _share(page: psutil.Process, url: str, viewers: int, meanwhile: Callable[[], object]) -> tuple[float, float]:
    """The page's CPU-seconds a second, and the viewers' polls that were answered, both a second."""
    count = SPAWN.Value("q", 0)
    with _process(look_on, url, viewers, count) as watching:
        _on_core(watching.pid, 1)
        time.sleep(2 * POLL_S)  # all have opened it
        before, began, cpu = count.value, time.monotonic(), sum(page.cpu_times()[:2])
        meanwhile()
        seconds = time.monotonic() - began
        return (sum(page.cpu_times()[:2]) - cpu) / seconds, (count.value - before) / seconds


def look_on(url: str, viewers: int, count: object) -> None:
    """Poll as so many browsers, for good."""
    os.nice(19)
    asyncio.run(_look_on(url, viewers, count))


async def _look_on(url: str, viewers: int, count: object) -> None:
    limits = httpx.Limits(max_connections=viewers, max_keepalive_connections=viewers)
    async with (
        httpx.AsyncClient(base_url=url, limits=limits, timeout=60.0, trust_env=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(viewers):
            tasks.create_task(_viewer(client, number, count))


async def _viewer(client: httpx.AsyncClient, number: int, count: object) -> None:
    view = ("/1/", "/1/", "/1/groups", "/1/nodes", "/1/log")[number % 5]
    await asyncio.sleep(random.random() * POLL_S)
    opened = await client.get(view)
    charts = re.findall(r'data-chart="([^"]+)"', opened.text)
    etag, charted = "", time.monotonic() - random.random() * CHARTS_S
    while True:
        answer = await client.get(f"{view}?live=1", headers={"if-none-match": etag} if etag else {})
        count.value += answer.status_code in (200, 304)  # type: ignore[attr-defined]
        if answer.status_code == 200:
            etag = answer.headers["etag"]
            if time.monotonic() - charted > CHARTS_S:
                charted = time.monotonic()
                for chart in charts:
                    await client.get(chart.replace("&amp;", "&"))
        await asyncio.sleep(POLL_S * (0.9 + 0.2 * random.random()))


if __name__ == "__main__":
    raise SystemExit(main())

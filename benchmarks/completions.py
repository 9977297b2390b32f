"""What it costs that the host plays the environments: a worker's tokens a second with completions and with episodes.

    python benchmarks/completions.py [--delay-ms 80] [--seconds 60] [--repeats 3] [--quick]

A real run by `shoal host` on this machine: coordinator, stage, trainer and validator as processes over HTTP. One worker
joins through a proxy of our own that holds all bytes back, half of the delay in each direction. It plays Wordle: several
turns for each rollout, and each is a request in a run of completions. Both kinds are measured in turn, each in a run of its
own, from the time at which the worker is in good standing. The worker has a core to itself, as on a machine of its own; all
processes of the host share the others. The bar: completions reach 0.8 of the tokens a second of episodes, both with the
delay. No peer publishes such a figure, so none runs beside us. Ends with one line of JSON.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.measure import arguments, report, shoal_command, wait_for

KINDS = ("episodes", "completions")

BAR = 0.8

RUN_FILE = """
name = "completions"
steps = 4000
seed = 3
[[envs]]
name = "wordle"
kind = "{kind}"
[sampling]
max_turn_tokens = 8
max_tokens = 192
[rollouts]
group_size = 16
block_rollouts = 64
batch_groups = 64
max_staleness = 1
paid_tokens = 0
max_flat_groups = 0
[policy.tiny]
width = 128
layers = 4
heads = 4
kv_heads = 2
mlp_width = 384
max_positions = 192
[train]
lr = 1e-4
[verify]
audit_rate = 0.05
[eval]
episodes = 0
"""


def main() -> None:
    """Measure both kinds in turn, print."""
    parser = arguments(__doc__, "one repeat of 15 seconds")
    parser.add_argument("--delay-ms", type=float, default=80.0, help="added to each round trip")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    seconds, repeats = (15.0, 1) if asked.quick else (asked.seconds, asked.repeats)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind in KINDS:
            found[kind].append(tokens_per_s(kind, asked.delay_ms / 1000, seconds))
            print(f"{kind:12} {found[kind][-1]:8.0f} tokens/s", flush=True)
    median = {kind: statistics.median(values) for kind, values in found.items()}
    ratios = [b / a for a, b in zip(found["episodes"], found["completions"], strict=True)]
    ratio = statistics.median(ratios)
    head = {"delay_ms": asked.delay_ms, "seconds": seconds, "repeats": repeats}
    figures = {f"{kind}_tokens_per_s": round(value, 1) for kind, value in median.items()}
    load = {"load": [round(each, 1) for each in os.getloadavg()]}
    report(
        "completions", {**head, **load, **figures, "ratio": round(ratio, 3), "ratios": [round(r, 3) for r in ratios]}
    )
    sys.exit(ratio < BAR)


def tokens_per_s(kind: str, delay_s: float, seconds: float) -> float:
    """Accepted tokens a second of one worker behind the proxy."""
    with tempfile.TemporaryDirectory(prefix="shoal-completions-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN_FILE.format(kind=kind))
        first, *others = sorted(os.sched_getaffinity(0))
        stack.enter_context(pinned({*others} or {first}))
        stack.enter_context(started(folder, "host", "host", "run.toml", "--out", "run"))
        url = wait_for(lambda: address(folder / "run"), "the coordinator", 60.0)
        port = stack.enter_context(delayed(int(url.rsplit(":", 1)[1]), delay_s))
        at = f"http://127.0.0.1:{port}"
        with pinned({first}):
            join = started(folder, "worker", "join", at, "--threads", "1", "--home", str(folder / "home"))
            stack.enter_context(join)
        wait_for(lambda: (node := worker(url)) and node["standing"] == "good" and node["credits"], "good work", 120.0)
        before, began = worker(url), time.monotonic()
        time.sleep(seconds)
        after, took_s = worker(url), time.monotonic() - began
        assert before is not None and after is not None
        return (after["credits"] - before["credits"]) / took_s


@contextlib.contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """This thread, and the processes and threads that it starts, run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def started(folder: Path, name: str, *words: str) -> Iterator[None]:
    """A command of ours in the background."""
    with (folder / f"{name}.log").open("wb") as log:
        command = shoal_command(*words)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
            process.wait()


def address(run: Path) -> str:
    """The coordinator's URL once it answers, or nothing."""
    try:
        url = str(json.loads((run / "coordinator.json").read_text())["url"])
        return url if httpx.get(f"{url}/healthz", timeout=2.0).status_code == 200 else ""
    except (OSError, ValueError, httpx.HTTPError):
        return ""


def worker(url: str) -> dict | None:  # type: ignore[type-arg]
    """What the coordinator says of the worker."""
    nodes = httpx.get(f"{url}/v1/nodes", timeout=10.0).json()
    return next((node for node in nodes if node["role"] == "worker"), None)


# --- the proxy ---


@contextlib.contextmanager
def delayed(port: int, delay_s: float) -> Iterator[int]:
    """The port of a proxy that brings all bytes half of the delay late, in each direction."""
    loop, ready, ports = asyncio.new_event_loop(), threading.Event(), list[int]()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await on_the_way.get()
                await asyncio.sleep(due - time.monotonic())
                if not data:
                    writer.close()
                    return
                writer.write(data)

        delivering = asyncio.create_task(deliver())
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                on_the_way.put_nowait((time.monotonic() + delay_s / 2, data))
        on_the_way.put_nowait((time.monotonic() + delay_s / 2, b""))
        with contextlib.suppress(OSError):
            await delivering

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)  # a connection takes a round trip, too
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, back), carry(there, writer))

    async def serve() -> None:
        server = await asyncio.start_server(meet, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()

    loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


if __name__ == "__main__":
    main()

"""What the sandbox costs: a warm snippet, compared with a bare Python process and a fresh interpreter in bubblewrap.

    python benchmarks/sandbox.py

Needs Linux with bubblewrap. The rounds alternate, and medians of wall time are compared, because the machine may be
shared. CPU time is the mean over this process and all processes of the sandbox. The peer is plain bubblewrap with a
fresh interpreter for each snippet, without a filter and without limits. The last part asks 64 resident programs at
once, as a turn of 64 isolated episodes does, and compares that with 64 calls in this process.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.measure import arguments, report
from shoal.sandbox.filesystem import interpreter, links, shown
from shoal.sandbox.limits import Ended, Limits
from shoal.sandbox.pool import Pool
from shoal.sandbox.sandbox import Resident

SNIPPET = "total = 0\nfor number in range(1000): total += number * number\nprint(total)"
WANTED = b"332833500\n"
EPISODES = 64
LIMIT_S = 5.0
TURN = """
import os
def read(size):
    data = b""
    while len(data) < size: data += os.read(0, size - len(data))
    return data
while True:
    answer = read(int.from_bytes(read(4), "big")).upper()
    os.write(1, len(answer).to_bytes(4, "big") + answer)
"""


def main() -> None:
    """Measure everything, and print one line of JSON."""
    parser = arguments(__doc__, "few rounds")
    rounds = 10 if parser.parse_args().quick else 200
    with Pool(1) as pool:
        init = pool.peek()  # starts it
        ways: dict[str, tuple[Callable[[], object], Callable[[], float]]] = {
            "warm": (lambda: warm(pool), lambda: cpu_of(init)),
            "bare": (lambda: fresh([sys.executable, "-I", "-S", "-c", SNIPPET]), lambda: 0.0),
            "bubblewrap": (lambda: fresh(in_bubblewrap()), lambda: 0.0),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (run, elsewhere_s) in ways.items():
                times[name].append(timed(run, elsewhere_s))
    result: dict[str, object] = {"rounds": rounds}
    print("one snippet         wall ms    CPU ms")
    for name, rows in times.items():
        wall = 1000 * median(row[0] for row in rows)
        cpu = 1000 * sum(row[1] for row in rows) / rounds  # the sandbox's CPU clock ticks only 100 times a second
        result[f"{name}_ms"] = round(wall, 1)
        if name != "bubblewrap":  # it does not wait for all of its processes, so their time would be missing
            result[f"{name}_cpu_ms"] = round(cpu, 1)
        print(f"  {name:<14}{wall:>11.1f}{cpu:>10.1f}")
    per_s = 1000 / float(str(result["warm_cpu_ms"]))
    result["per_s_per_core"] = round(per_s)
    for peer in ("bare", "bubblewrap"):
        result[f"ratio_{peer}"] = round(float(str(result[f"{peer}_ms"])) / float(str(result["warm_ms"])), 2)
    print(f"{per_s:.0f} warm snippets a second for each core")
    result["turn_ms"], result["turn_in_process_ms"] = turn(20 if rounds < 50 else 200)
    print(f"a turn of {EPISODES} residents: {result['turn_ms']} ms, in process {result['turn_in_process_ms']} ms")
    report("sandbox", result)


def warm(pool: Pool) -> None:
    told = pool.run(SNIPPET)
    assert isinstance(told, Ended) and told.stdout == WANTED, told


def fresh(command: list[str]) -> None:
    assert subprocess.run(command, capture_output=True, check=True).stdout == WANTED


def in_bubblewrap() -> list[str]:
    """The command line that bubblewrap's manual shows."""
    binds = [word for source, place in shown() for word in ("--ro-bind", str(source), str(place))]
    binds += [word for target, link in links() for word in ("--symlink", target, link)]
    alone = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    mounts = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return ["bwrap", *alone, *binds, *mounts, "--", str(interpreter()), "-I", "-S", "-c", SNIPPET]


def timed(run: Callable[[], object], elsewhere_s: Callable[[], float]) -> tuple[float, float]:
    """Wall time, and CPU time: that of this process, of its children that ended, and of the sandbox."""
    began_cpu, began = cpu_s() + elsewhere_s(), time.perf_counter()
    run()
    return time.perf_counter() - began, cpu_s() + elsewhere_s() - began_cpu


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def cpu_of(pid: int) -> float:
    """CPU time of a zygote and of all children that it waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def turn(rounds: int) -> tuple[float, float]:
    """Milliseconds of a turn, in which 64 programs get a line each and answer; and of the same work in this process."""
    limits = Limits(memory_mb=64, processes=2, scratch_mb=1)
    residents = [Resident([str(interpreter()), "-S", "-c", TURN], limits) for _ in range(EPISODES)]
    requests = [b"what the policy wrote, line %d" % number for number in range(EPISODES)]
    wanted = [request.upper() for request in requests]

    def answers() -> list[bytes]:
        for resident, request in zip(residents, requests, strict=True):
            resident.send(request, LIMIT_S)
        return [resident.receive(LIMIT_S, 1 << 16) for resident in residents]

    assert answers() == wanted
    outside, inside = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        assert answers() == wanted
        outside.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert [request.upper() for request in requests] == wanted
        inside.append(time.perf_counter() - began)
    for resident in residents:
        resident.end()
    return round(1000 * median(outside), 2), round(1000 * median(inside), 3)


if __name__ == "__main__":
    main()

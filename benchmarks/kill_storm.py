"""Nothing lost: random SIGKILLs over all roles of a short run, then the log is audited.

    python benchmarks/kill_storm.py [--kills 30] [--seed 0]

A real run by `shoal run` on this machine: coordinator, origin, trainer, validator and two workers as processes over HTTP. A
random role dies every second or so; the launcher starts it again. At the end `shoal ledger verify` must find nothing
lost, paid twice or used twice, with every receipt that the workers hold. Also measured: from a coordinator's death
until it serves again. No peer publishes such a test, so none runs beside us. Ends with one JSON line.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.measure import arguments, report, shoal_command, wait_for
from shoal.roles.auditor.verify_log import audit_folder

ROLES = ("coordinator", "origin", "trainer", "validator", "worker")

RUN_FILE = """
name = "storm"
steps = {steps}
seed = 3
[[envs]]
name = "arithmetic"
kind = "{kind}"
[sampling]
max_turn_tokens = 6
max_tokens = 64
[rollouts]
group_size = 8
block_rollouts = 16
batch_groups = 4
max_staleness = {staleness}
lease_s = 3.0
[policy.tiny]
width = 32
layers = 2
heads = 2
kv_heads = 1
mlp_width = 64
max_positions = 64
[train]
lr = 1e-3
[workers]
count = 2
[eval]
episodes = 0
[storage]
retain = "all"
"""


def main() -> None:
    """Kill, audit, print."""
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="long enough to outlast the kills; stopped after them")
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="shoal-storm-") as name:
        out = Path(name) / "run"
        launcher = start(Path(name), out, steps=asked.steps, staleness=1)
        kills, restarts_s = dict.fromkeys(ROLES, 0), []
        wait_for(lambda: version(out) >= 1, "the first step")
        while sum(kills.values()) < asked.kills and launcher.poll() is None:
            time.sleep(rng.uniform(0.3, 1.5))
            role = rng.choice(ROLES)
            if kill(launcher.pid, role, rng):
                kills[role] += 1
                if role == "coordinator":
                    began = time.monotonic()
                    wait_for(lambda: version(out) >= 0, "the coordinator to serve again")
                    restarts_s.append(time.monotonic() - began)
                print(f"kill {sum(kills.values())}: {role}, version {version(out)}", flush=True)
        after = version(out)
        wait_for(lambda: version(out) > after + 1, "two more steps after the storm")
        launcher.send_signal(signal.SIGINT)
        launcher.wait(timeout=60)
        audit = audit_folder(out)
        for finding in audit.findings:
            print("FINDING", finding)
        figures = {
            "kills": kills,
            "findings": len(audit.findings),
            "submissions": len(audit.received),
            "receipts_checked": sum(len(p.read_bytes().splitlines()) for p in out.glob("nodes/*/receipts.jsonl")),
            "versions": audit.state.main.version,
            "coordinator_restart_s": {"max": max(restarts_s, default=0.0), "all": [round(s, 2) for s in restarts_s]},
        }
        report("kill_storm", figures)
        sys.exit(1 if audit.findings else 0)


def start(folder: Path, out: Path, kind: str = "episodes", more: str = "", **values: object) -> subprocess.Popen[bytes]:
    """A run by the command line, in the background. `more` goes into the section [storage]."""
    recipe = folder / "storm.toml"
    recipe.write_text(f"{RUN_FILE.format(kind=kind, **values)}{more}\n")
    log = (folder / "launcher.log").open("ab")
    command = shoal_command("run", str(recipe), "--out", str(out))
    return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def kill(launcher: int, role: str, rng: random.Random) -> bool:
    """SIGKILL one process of a role, if one is alive."""
    alive = role_processes(launcher, role)
    if alive:
        rng.choice(alive).kill()
    return bool(alive)


def role_processes(launcher: int, role: str) -> list[psutil.Process]:
    """The launcher's children that serve as a role."""
    found = []
    for child in psutil.Process(launcher).children():
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if "role" in words and words[words.index("role") + 1 :][:1] == [role]:
            found.append(child)
    return found


def version(out: Path) -> int:
    """The run's latest version, or -1 while nobody answers."""
    try:
        url = json.loads((out / "coordinator.json").read_text())["url"]
        return int(httpx.get(f"{url}/v1/status", timeout=2.0).json()["version"])
    except (OSError, ValueError, KeyError, httpx.HTTPError):
        return -1


if __name__ == "__main__":
    main()

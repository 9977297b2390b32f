"""A host that serves what a test gives it, over real HTTP, to real nodes; and what those nodes take meanwhile.

It is built of the server that the coordinator uses, so its answers are those of a shoal node in everything that a case does
not change.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.envs.load import env_digest, load_env
from shoal.errors import StateError
from shoal.ledger.constants import RULES_VERSION
from shoal.net.server import answer, answer_bytes, application
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_CHUNK_BYTES, PROTOCOL_VERSION
from shoal.protocol.encoding import digest, from_json, to_json
from shoal.protocol.host_signatures import sign_promise, terms_of
from shoal.protocol.signing import Key
from shoal.weights.manifest import POLICY_STREAM, content_of, sign_manifest, weights_root
from tests.attacks.attack_fixture import RULES

RUN, KEY = "ab" * 16, Key(b"\x07" * 32)
SAMPLING = t.Sampling(1.0, 6, 64)


class HostileHost:
    """What it serves is in its fields. A case changes them before it is served."""

    def __init__(self, policy: Path) -> None:
        """`policy` is a directory that the case may change."""
        self.policy = policy
        envs = tuple(
            t.EnvSpec(name, env_digest(name), load_env(name, {}).num_tasks, 1.0, {})
            for name in ("arithmetic", "wordle")
        )
        self.info = t.RunInfo(
            RUN, "hostile", PROTOCOL_VERSION, KEY.public, KEY.public, "00" * 32, "00" * 32, envs, SAMPLING,
            msgspec.structs.replace(RULES, block_groups=1), "running", 0, rules_version=RULES_VERSION,
        )  # fmt: skip
        self.lease = t.Lease("lease-0", "", 0, (self.block(),), SAMPLING, time.time(), time.time() + 60)
        self.manifest: Callable[[t.Manifest], t.Manifest] = lambda manifest: manifest
        self.node: Callable[[t.NodeState], t.NodeState] = lambda node: node
        self.check: tuple[t.Check, bytes] | None = None
        """What validators are given, with the submission's bytes."""
        self.answers: dict[str, Callable[[], Response]] = {}
        """Answers in place of the usual ones, by path."""
        self.chunks: dict[str, bytes] = {}
        self.taken: list[bytes] = []
        """Submissions."""
        self.left: list[str] = []
        """Calls of nodes that leave or give back leases."""
        self.verdicts: list[bytes] = []
        self.calls = 0
        self.met = False
        """Whether a node has asked for work, or for what has an answer in `answers`."""
        self.always = False
        """Whether a node that holds a lease gets another one."""

    def block(self, slots: int = 1, env: str = "arithmetic", **changes: object) -> t.Block:
        """A block of slots of one environment."""
        usual = {"seed": "11" * 32, "env": env, "task": 3}
        return t.Block(0, tuple(t.Slot(**{"slot": i, **usual, **changes}) for i in range(slots)))  # type: ignore[arg-type]

    def change(self, **changes: object) -> None:
        """Change fields of the lease, or of the run where the lease has no such field."""
        for name, value in changes.items():
            if name in t.Lease.__struct_fields__:
                self.lease = msgspec.structs.replace(self.lease, **{name: value})
            elif name in t.Rules.__struct_fields__:
                rules = msgspec.structs.replace(self.info.rules, **{name: value})
                self.info = msgspec.structs.replace(self.info, rules=rules)
            else:
                self.info = msgspec.structs.replace(self.info, **{name: value})

    @contextlib.contextmanager
    def served(self) -> Iterator[str]:
        """Serve it; gives the URL."""
        routes = [Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT"])]
        config = uvicorn.Config(application(routes), "127.0.0.1", 0, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)

    async def _answer(self, request: Request) -> Response:
        path, body = request.url.path, await request.body()
        self.calls += 1
        told = self.answers.get(path)
        self.met = self.met or told is not None or path in ("/v1/leases", "/v1/checks")
        match request.method, path.split("/")[1:]:
            case "POST", ["v1", "nodes", "leave"]:
                self.left.append(path)
                return answer(self._node(request))
            case _ if told is not None:
                return told()
            case "GET", ["v1", "run"]:
                return answer(self.info)
            case "GET", ["v1", "status"]:
                return answer(t.Status("hostile", "running", 0, 9, 0, {}, 0, 0, "you", 0.0))
            case _, ["v1", "nodes", *_]:
                return answer(self._node(request))
            case "POST", ["v1", "leases"]:
                asked = msgspec.json.decode(body, type=t.LeaseRequest)
                if asked.returning:
                    self.left.append(path)
                if asked.holding and not self.always:
                    return answer(t.LeaseAnswer(None, 1.0, "wait"))
                return answer(self._granted())
            case "GET", ["v1", "checks"]:
                return answer(t.CheckAnswer(self.check[0] if self.check else None, "wait"))
            case "GET", ["v1", "manifests", _]:
                return answer_bytes(to_json(self.signed()), "application/json")
            case "GET", ["v1", "blobs", name]:
                return answer_bytes(self.check[1] if self.check and self.check[0].id == name else self.chunks[name])
            case "PUT", ["v1", "leases", _, "submission"]:
                self.taken.append(body)
                receipt = t.Receipt(RUN, self.lease.id, digest(body), 1, "00" * 32, time.time(), "")
                return answer(sign_promise(receipt, KEY))
            case "PUT", ["v1", "checks", *_]:
                self.verdicts.append(body)
                self.check = None
                return answer(t.WriteAck(1))
            case "GET", ["v1", "relays"]:
                return answer([])
        raise AssertionError(path)

    def _granted(self) -> t.LeaseAnswer:
        """The lease, signed for what the host serves."""
        manifest, terms = from_json(self.signed().body, t.Manifest), terms_of(self.info.envs, self.info.rules)
        grant = sign_promise(t.Grant(RUN, self.lease, terms, manifest.root, content_of(manifest), ""), KEY)
        return t.LeaseAnswer(self.lease, 0.0, "", terms, grant.root, grant.content, grant.signature)

    def _node(self, request: Request) -> t.NodeState:
        return self.node(t.NodeState("cc" * 32, "worker", "guest", "new", 0, 0, 0, 0, {}, ""))

    def signed(self) -> t.SignedManifest:
        """The manifest of the policy as it is now. It puts the policy's chunks into `chunks`."""
        files = []
        for path in sorted(self.policy.iterdir()):
            data = path.read_bytes()
            parts = [data[at : at + MAX_CHUNK_BYTES] for at in range(0, len(data), MAX_CHUNK_BYTES)]
            self.chunks |= {digest(part): part for part in parts}
            files.append(t.FileEntry(path.name, len(data), digest(data), tuple(map(digest, parts))))
        try:
            root = weights_root(self.policy)
        except StateError:
            root = "00" * 32
        manifest = t.Manifest(
            RUN, POLICY_STREAM, 0, (), "float32", root, tuple(files), MAX_CHUNK_BYTES, 0.0, 0.0
        )  # fmt: skip
        return sign_manifest(self.manifest(manifest), KEY, now=time.time())


def repeated(name: str, chunk: bytes, times: int, chunks: dict[str, bytes]) -> t.FileEntry:
    """A file that is one chunk many times. The host sends it once."""
    chunks[digest(chunk)] = chunk
    whole = hashlib.sha256()
    for _ in range(times):
        whole.update(chunk)
    return t.FileEntry(name, len(chunk) * times, whole.hexdigest(), (digest(chunk),) * times)


# --- what a node takes ---


@dataclass
class Stay:
    """A node's time with a host: how it ended, and the most that it and its children took."""

    code: int = -1
    said: str = ""
    wall_s: float = 0.0
    memory_mb: int = 0
    disk_mb: int = 0
    processes: int = 0
    """At one time."""
    outlived: list[int] = field(default_factory=list)
    """Processes that were still there after the node had ended."""

    @property
    def last_line(self) -> str:
        return self.said.splitlines()[-1] if self.said else ""


def stay(
    command: list[str],
    folder: Path,
    limit_s: float = 60.0,
    stop_after_s: float | None = None,
    ready: Callable[[], object] = lambda: True,
) -> Stay:
    """Run a command of shoal with its home in `folder` until it ends, or press Ctrl-C some time after it is `ready`."""
    home = Path(tempfile.mkdtemp(dir=folder))
    environment = os.environ | {"SHOAL_HOME": str(home), "TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
    found, began, seen = Stay(), time.monotonic(), set()
    ready_at, stopped = 0.0, False
    with (folder / "said").open("wb") as out:
        node = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.main", *command], stdout=out, stderr=out, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            while node.poll() is None:
                family = _family(node.pid)
                seen |= set(family)
                found.processes = max(found.processes, len(family))
                found.memory_mb = max(found.memory_mb, sum(family.values()) // 1_000_000)
                found.disk_mb = max(found.disk_mb, _disk(home) // 1_000_000)
                found.wall_s = time.monotonic() - began
                assert found.wall_s < limit_s, f"still there after {limit_s} s: {(folder / 'said').read_text()}"
                if not ready_at and ready():
                    ready_at = time.monotonic()
                waited = ready_at and stop_after_s is not None and time.monotonic() > ready_at + stop_after_s
                if waited and not stopped:
                    node.send_signal(signal.SIGINT)
                    stopped = True
                time.sleep(0.02)
        finally:
            node.kill()
            node.wait()
    found.code, found.said = node.returncode, (folder / "said").read_text(errors="replace")
    found.outlived = [pid for pid in seen if _lives(pid)]
    for pid in found.outlived:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _family(pid: int) -> dict[int, int]:
    """Bytes of a process and its children. Pages that they share count once: a child has those of its parent until it is
    another program."""
    taken = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        node = psutil.Process(pid)
        for process in (node, *node.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                taken[process.pid] = process.memory_full_info().pss
    return taken


def _disk(folder: Path) -> int:
    size = 0
    for path in [
        Path(root, name) for root, _, names in os.walk(folder) for name in names
    ]:  # passes over vanished folders
        with contextlib.suppress(OSError):
            size += path.lstat().st_blocks * 512
    return size


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False

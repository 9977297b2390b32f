"""Uplinks of a given rate between processes of one machine, shaped by the seeded fault proxy or by the kernel.

`world` and `shardcast` open them. The proxy works everywhere, and takes CPU for each byte. In a
network namespace of the benchmark's own, the kernel's token buckets (`tc-htb`) shape what leaves a server's port instead:
no byte is copied, and nothing outside is touched. `enter_namespace` starts the benchmark again inside one.
"""

import contextlib
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Protocol

from tests.net.fault_proxy import FaultProxy, Line

BLOCK_S, BLOCK_BYTES = 0.01, (4 << 10, 64 << 10)
"""What a proxy passes on at a time: so many seconds of its rate, within these limits."""

QUEUE_S, QUEUE_BYTES = 0.1, 256 << 10
"""What may wait in the kernel for a link: so many seconds of its rate, and at least so much. Loopback's packets
have 64 KiB."""

UNLIMITED = 12.5e9
"""Bytes a second of a link without a limit: more than any loopback carries."""

MOST_MEMBERS = 15
"""Servers of one line of the kernel: the next one's class would have the number of the next line."""

_INSIDE = "SHOAL_BENCHMARK_NAMESPACE"


class Rate(Protocol):
    """What all links of one line share."""

    def rate(self, bytes_per_s: float) -> None:
        """Carry so much from now on; 0 means no limit."""


class Link(Protocol):
    """The way to one server. `port` is where its clients connect."""

    @property
    def line(self) -> Rate:
        """Its rate, which other links may share."""

    @property
    def port(self) -> int:
        """Where clients connect."""

    @property
    def passed_bytes(self) -> int:
        """Bytes that the server sent."""


@contextlib.asynccontextmanager
async def shaped(
    ports: Mapping[str, int], uplinks: Mapping[str, float], seed: int, shares: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, Link]]:
    """A link to each of the servers' ports, by name. `uplinks` are bytes a second, 0 means no limit; a server in `shares`
    uses the line of another."""
    shares = shares or {}
    rates = {name: uplinks[shares.get(name, name)] for name in ports}
    if in_namespace():
        with _kernel_links(ports, rates, shares) as links:
            yield {**links}
        return
    rng, lines = random.Random(seed), {name: Line(rate) for name, rate in uplinks.items()}
    async with contextlib.AsyncExitStack() as stack:
        proxies: dict[str, Link] = {}
        for name, port in ports.items():
            block = (
                min(max(BLOCK_BYTES[0], int(rates[name] * BLOCK_S)), BLOCK_BYTES[1]) if rates[name] else BLOCK_BYTES[1]
            )
            proxy = FaultProxy(port, rng, line=lines[shares.get(name, name)], block_bytes=block)
            proxies[name] = await stack.enter_async_context(proxy)
        yield proxies


def in_namespace() -> bool:
    """Whether `enter_namespace` started this process."""
    return _INSIDE in os.environ


def enter_namespace() -> None:
    """Start this program again, with the same arguments, in user and network namespaces of its own; there, do nothing.

    Raises `SystemExit` with the remedy if the machine allows none.
    """
    if in_namespace():
        return
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    with contextlib.suppress(OSError):
        tried = subprocess.run(
            [*alone, "tc", "qdisc", "add", "dev", "lo", "root", "htb"], capture_output=True, check=False
        )
        if not tried.returncode:
            os.environ[_INSIDE] = "1"
            os.execvp(alone[0], [*alone, sys.executable, *sys.orig_argv[1:]])
    raise SystemExit("error: no network namespace with tc-htb can be made here. Install util-linux and iproute2, allow "
                     "user namespaces, or leave --namespace out")  # fmt: skip


class _KernelLine:
    """A class of the kernel's token bucket, and those of the servers that share it."""

    def __init__(self, number: int) -> None:
        self.id, self._number, self._members, self._verb = f"1:{number << 4:x}", number, list[str](), "add"

    def member(self) -> str:
        """A new class that shares the line."""
        assert len(self._members) < MOST_MEMBERS, f"a line of the kernel has {MOST_MEMBERS} servers at most"
        self._members.append(f"1:{(self._number << 4) + len(self._members) + 1:x}")
        return self._members[-1]

    def rate(self, bytes_per_s: float) -> None:
        """Carry so much from now on; 0 means no limit."""
        rate = bytes_per_s or UNLIMITED
        queue = max(QUEUE_BYTES, int(rate * QUEUE_S)) if bytes_per_s else 64 << 20
        ceil = f"ceil {rate:.0f}bps burst {QUEUE_BYTES} cburst {QUEUE_BYTES} quantum 65536".split()
        _tc("class", self._verb, "parent", "1:", "classid", self.id, "htb", "rate", f"{rate:.0f}bps", *ceil)
        for member in self._members:
            share = f"{rate / len(self._members):.0f}bps"
            _tc("class", self._verb, "parent", self.id, "classid", member, "htb", "rate", share, *ceil)
            _tc("qdisc", "replace", "parent", member, "bfifo", "limit", str(queue))
        self._verb = "change"


class _KernelLink:
    """A server's own port, and the class of what leaves it."""

    def __init__(self, port: int, line: _KernelLine) -> None:
        self.port, self.line, self.id = port, line, line.member()

    @property
    def passed_bytes(self) -> int:
        """Bytes that the server sent, with headers and acknowledgements."""
        told = subprocess.run(
            ["tc", "-s", "class", "show", "dev", "lo"], capture_output=True, text=True, check=True
        ).stdout
        found = re.search(rf"class htb {self.id} .*?Sent (\d+) bytes", told, re.DOTALL)
        assert found is not None
        return int(found[1])


@contextlib.contextmanager
def _kernel_links(
    ports: Mapping[str, int], rates: Mapping[str, float], shares: Mapping[str, str]
) -> Iterator[dict[str, _KernelLink]]:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    _tc("qdisc", "add", "root", "handle", "1:", "htb")
    try:
        numbers = itertools.count(1)
        lines = {name: _KernelLine(next(numbers)) for name in ports if name not in shares}
        links = {name: _KernelLink(port, lines[shares.get(name, name)]) for name, port in ports.items()}
        for name, line in lines.items():
            line.rate(rates[name])
        for link in links.values():
            match = f"match ip sport {link.port} 0xffff flowid {link.id}".split()
            _tc("filter", "add", "parent", "1:", "protocol", "ip", "prio", "1", "u32", *match)
        yield links
    finally:
        _tc("qdisc", "del", "root")


def _tc(kind: str, verb: str, *rest: str) -> None:
    told = subprocess.run(["tc", kind, verb, "dev", "lo", *rest], capture_output=True, text=True, check=False)
    if told.returncode:
        raise RuntimeError(f"tc {kind} {verb} {' '.join(rest)}: {told.stderr.strip()}")

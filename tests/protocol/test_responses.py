"""Answers may gain fields, which older nodes ignore; whatever is hashed, signed or decides what a node does may not."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from shoal.env_packages.installed import Installed
from shoal.errors import PeerError
from shoal.net.client import Client
from shoal.protocol import messages
from shoal.protocol.encoding import WireError, digest, from_json
from shoal.protocol.messages import Message, Response
from shoal.protocol.signing import content_digest
from tests.roles.testbed import RunTestbed, tiny_run

OPEN_ENDED = {
    messages.RunInfo, messages.RunVersions, messages.NodeState, messages.LeaseAnswer, messages.CheckAnswer,
    messages.Status, messages.StateHash, messages.WriteAck, messages.Refusal, messages.CreditPage, messages.CreditLine,
    messages.RelayEntry, messages.RelayStanding, messages.RelayProof, messages.StandingAlarm, Installed,
}  # fmt: skip
"""All of them. A type joins only if nobody hashes or signs it, and if a node that ignores a field of it does no harm."""

NEWS = {"from_the_future": {"of": [1, "two"]}}


def subclasses(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield below
        yield from subclasses(below)


def test_these_types_and_no_others_ignore_unknown_fields() -> None:
    ours = {kind for kind in subclasses(Message) if kind.__module__.startswith("shoal.")}
    tolerant = {kind for kind in ours if not kind.__struct_config__.forbid_unknown_fields}
    assert tolerant - {Response} == OPEN_ENDED
    assert {messages.Rules, messages.Sampling, messages.EnvSpec, messages.Lease, messages.Block, messages.Slot,
            messages.Check, messages.Manifest, messages.SignedManifest, messages.Receipt, messages.Batch, messages.Event,
            messages.Submission, messages.Statement} <= ours - tolerant  # fmt: skip


def test_no_strict_message_holds_one_that_ignores_fields() -> None:
    for kind in set(subclasses(Message)) - OPEN_ENDED - {Response}:
        for field in msgspec.structs.fields(kind):
            assert not OPEN_ENDED & {field.type, *getattr(field.type, "__args__", ())}, f"{kind.__name__}.{field.name}"


class NewerCoordinator(httpx.AsyncBaseTransport):
    """A network whose coordinator adds fields to answers, at the outer level or inside a field of them."""

    def __init__(self, inner: httpx.AsyncBaseTransport, inside: str) -> None:
        self.inner, self.inside, self.changed = inner, inside, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.inner.handle_async_request(request)
        body = await response.aread()
        tree = json.loads(body) if response.headers.get("content-type") == "application/json" else None
        place = tree.get(self.inside) if self.inside and isinstance(tree, dict) else tree
        if isinstance(place, dict) and not {"signature", "groups"} & place.keys():  # what is signed, and batches
            place |= NEWS
            self.changed += 1
            body = json.dumps(tree).encode()
        headers = {name: value for name, value in response.headers.items() if name != "content-length"}
        if "content-digest" in headers:
            headers["content-digest"] = content_digest(digest(body))
        return httpx.Response(response.status_code, headers=headers, stream=httpx.ByteStream(body))


class NewerTown(RunTestbed):
    inside = ""

    def client(self, key_file) -> Client:
        client = super().client(key_file)
        client._http._transport = self.network = NewerCoordinator(client._http._transport, self.inside)
        return client


def test_a_run_is_the_same_for_nodes_older_than_its_coordinator(tmp_path) -> None:
    roots = []
    for kind in (RunTestbed, NewerTown):
        testbed = kind(tmp_path / kind.__name__, tiny_run(steps=1))
        asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker")))
        roots.append(testbed.weights())
    assert testbed.network.changed > 5 and roots[0] == roots[1]


def test_a_worker_refuses_what_it_does_not_know_in_the_rules(tmp_path) -> None:
    testbed = NewerTown(tmp_path / "run", tiny_run())
    testbed.inside = "rules"
    with pytest.raises(PeerError, match="unknown field `from_the_future`"):
        asyncio.run(asyncio.wait_for(testbed.worker("worker").run(), 60.0))


@pytest.mark.parametrize("kind", [messages.Rules, messages.Sampling, messages.Lease, messages.Slot, messages.Receipt])
def test_strict_messages_refuse_an_unknown_field_by_name(kind) -> None:
    with pytest.raises(WireError, match="unknown field `from_the_future`"):
        from_json(json.dumps(NEWS).encode(), kind)

"""Hostile things that a host can serve: run files, answers, leases, weights, templates, tokenizers, checks."""

import gzip
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import anyio
import msgspec
import numpy as np
from safetensors.numpy import load_file, save_file
from starlette.responses import RedirectResponse, Response, StreamingResponse

from shoal.net.server import answer_bytes
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest, to_json
from tests.attacks.hostile_host import SAMPLING, HostileHost, repeated
from tests.chat.test_isolated import ABORTS, ABORTS_WHEN_OPENED, HOG, LOOP

Change = Callable[[HostileHost], None]


class Case(NamedTuple):
    """One hostile thing, and the last line that the node prints."""

    change: Change
    says: str
    role: str = "join"
    stop_after_s: float | None = None
    """For a host that only keeps its volunteers waiting: how long after it was met to press Ctrl-C."""


# --- run files ---


def with_rules(**changes: object) -> Change:
    return lambda host: host.change(**changes)


def with_sampling(**changes: object) -> Change:
    def change(host: HostileHost) -> None:
        sampling = msgspec.structs.replace(SAMPLING, **changes)
        host.change(sampling=sampling)
        host.info = msgspec.structs.replace(host.info, sampling=sampling)

    return change


def with_env(**changes: object) -> Change:
    return lambda host: host.change(envs=(msgspec.structs.replace(host.info.envs[1], **changes),))


def with_run(edit: Callable[[bytes], bytes]) -> Change:
    return lambda host: host.answers.update({"/v1/run": lambda: answer_bytes(edit(to_json(host.info)))})


def deep(data: bytes) -> bytes:
    return data.replace(b'"args":{}', b'"args":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def many_envs(host: HostileHost) -> None:
    host.change(envs=tuple(msgspec.structs.replace(host.info.envs[1], own_label=f"w{i}") for i in range(5500)))


# --- answers ---


def without_end(path: str) -> Change:
    async def parts() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 20)
            await anyio.sleep(0.001)

    return lambda host: host.answers.update({path: lambda: StreamingResponse(parts())})


def chunks_without_end(host: HostileHost) -> None:
    host.signed()
    for name in host.chunks:
        without_end(f"/v1/blobs/{name}")(host)


def drop_by_drop(path: str) -> Change:
    async def parts() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await anyio.sleep(0.2)

    return lambda host: host.answers.update({path: lambda: StreamingResponse(parts())})


def packed(path: str) -> Change:
    def answer() -> Response:
        body = gzip.compress(bytes(1 << 27), 1)[: 1 << 19]
        return Response(body, headers={"content-encoding": "gzip"})

    return lambda host: host.answers.update({path: answer})


def long_refusal(host: HostileHost) -> None:
    body = to_json(t.Refusal(error="no" * 500_000, code="no"))
    host.answers["/v1/run"] = lambda: answer_bytes(body, status=403)


def elsewhere(host: HostileHost) -> None:
    host.answers["/v1/run"] = lambda: RedirectResponse("http://127.0.0.1:1/v1/run")


def no_work(retry_s: float) -> Change:
    body = to_json(t.LeaseAnswer(None, retry_s, "wait"))
    return lambda host: host.answers.update({"/v1/leases": lambda: answer_bytes(body)})


# --- leases ---


def versions_that_are_gone(host: HostileHost) -> None:
    gone, newest = t.Refusal("gone", "nothing_yet"), t.Status("hostile", "running", 10**6, 9, 0, {}, 0, 0, "you", 0.0)
    host.answers["/v1/manifests/0"] = lambda: answer_bytes(to_json(gone), status=404)
    host.answers["/v1/status"] = lambda: answer_bytes(to_json(newest))
    host.always = True


def long_reasons(host: HostileHost) -> None:
    """Each question about the worker's work is answered with one more refusal, in 900,000 letters."""
    told = itertools.count(1)
    host.node = lambda node: msgspec.structs.replace(node, refused=next(told), last_reason="z" * 900_000)
    host.always = True


def with_blocks(*blocks: tuple[int, dict[str, object]]) -> Change:
    return lambda host: host.change(blocks=tuple(host.block(slots, **changes) for slots, changes in blocks))


def crowd(host: HostileHost) -> None:
    """362 bytes that ask for 8.2 GB."""
    host.change(group_size=4096)
    with_sampling(max_turn_tokens=4000, max_tokens=4096)(host)


def long_replies(host: HostileHost) -> None:
    """A reply of 8,000 tokens to each guess: what a lease needs says nothing of that."""
    (host.policy / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if messages|length > 1 %}{{ 'a' * 8000 }}{% endif %}<|end|>{% endfor %}"
    )
    host.change(blocks=(host.block(env="wordle"),), group_size=2)
    with_sampling(max_turn_tokens=4, max_tokens=20_000)(host)
    weights = load_file(host.policy / "model.safetensors")
    weights["model.embed_tokens.weight"][:] = 0  # all tokens are alike, so that some turns end at once
    save_file(weights, host.policy / "model.safetensors")


# --- manifests and weights ---


def with_manifest(change: Callable[[HostileHost, t.Manifest], dict[str, object]]) -> Change:
    def apply(host: HostileHost) -> None:
        host.manifest = lambda manifest: msgspec.structs.replace(manifest, **change(host, manifest))

    return apply


def repeats(host: HostileHost, manifest: t.Manifest) -> dict[str, object]:
    """8 MiB that are fetched, 800 MB that would be written."""
    weights = repeated("model.safetensors", bytes(8 << 20), 100, host.chunks)
    return {"files": (*(file for file in manifest.files if file.path != weights.path), weights)}


def lies(host: HostileHost, manifest: t.Manifest) -> dict[str, object]:
    return {"files": tuple(msgspec.structs.replace(file, size=10**15) for file in manifest.files)}


def many_files(host: HostileHost, manifest: t.Manifest) -> dict[str, object]:
    big = repeated("a.json", bytes(8 << 20), 8, host.chunks)
    return {"files": tuple(msgspec.structs.replace(big, path=f"{i}.json") for i in range(100))}


def tiny_files(host: HostileHost, manifest: t.Manifest) -> dict[str, object]:
    """Files of one byte, each of which takes a block of the disk."""
    small = repeated("a.json", b"x", 1, host.chunks)
    return {"files": (*manifest.files, *(msgspec.structs.replace(small, path=f"{i}.json") for i in range(15_500)))}


def with_config(**changes: object) -> Change:
    def change(host: HostileHost) -> None:
        path = host.policy / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def wide(host: HostileHost) -> None:
    """Weights that fit on the disk, and twice in memory do not."""
    with_config(vocab_size=400_000)(host)
    weights = load_file(host.policy / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = np.zeros((400_000, 32), np.float16)
    save_file(weights, host.policy / "model.safetensors")


def header(host: HostileHost) -> None:
    """A weights file whose header claims more than the file holds."""
    (host.policy / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{" * 1000)


def many_tensors(host: HostileHost) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    head = json.dumps({f"t{i}": entry for i in range(15_000)}).encode()
    (host.policy / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))


def not_finite(host: HostileHost) -> None:
    weights = load_file(host.policy / "model.safetensors")
    save_file({name: np.full_like(w, np.nan) for name, w in weights.items()}, host.policy / "model.safetensors")


# --- templates and tokenizers ---


def with_template(text: str) -> Change:
    def change(host: HostileHost) -> None:
        (host.policy / "chat_template.jinja").write_text(text)

    return change


def with_tokenizer(**changes: object) -> Change:
    def change(host: HostileHost) -> None:
        path = host.policy / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def large_tokenizer(host: HostileHost) -> None:
    path = host.policy / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] |= {f"w{i:x}": i + 64 for i in range(800_000)}
    path.write_text(json.dumps(tokenizer, separators=(",", ":")))


# --- checks, for validators ---


def with_check(body: bytes) -> Change:
    def change(host: HostileHost) -> None:
        slots = tuple(slot.slot for block in host.lease.blocks for slot in block.slots)
        host.check = t.Check(digest(body), host.lease, slots, time.time() + 60), body

    return change


def every(*changes: Change) -> Change:
    def change(host: HostileHost) -> None:
        for one in changes:
            one(host)

    return change


OVER = r"needs about \d+ MB of memory, limit \d+ \(--max-memory"
CASES = {
    # run files
    "groups of 10^9": Case(with_rules(group_size=10**9), "groups of fewer than 1 or more than 4096 rollouts"),
    "groups of 10^4299": Case(with_rules(group_size=10**4299), "groups of fewer than 1 or more than 4096 rollouts"),
    "groups of less than nothing": Case(with_rules(group_size=-8), r"at `\$\.rules\.group_size`"),
    "rollouts of 2^60 tokens": Case(with_sampling(max_tokens=1 << 60), r"at `\$\.sampling\.max_tokens`"),
    "no tokens": Case(with_sampling(max_turn_tokens=0), r"at `\$\.sampling\.max_turn_tokens`"),
    "less than no tokens": Case(with_sampling(max_turn_tokens=-3, max_tokens=-1), r"at `\$\.sampling\.max_turn_tokens`"),
    "a temperature of 0": Case(with_sampling(temperature=0.0), r"at `\$\.sampling\.temperature`"),
    "deep nesting": Case(with_run(deep), "nested deeper than 32 levels"),
    "thousands of environments": Case(many_envs, "which is not loaded"),
    "absurd arguments": Case(with_env(args={"guesses": 10**9, "num_words": -1}), "environment wordle: "),
    "an environment that is a file": Case(with_env(name="/etc/passwd"), "is a file on the host"),
    # answers
    "an answer without end": Case(without_end("/v1/run"), "answered with more than 1048576 bytes"),
    "chunks without end": Case(chunks_without_end, "chunks not fetched"),
    "a packed answer": Case(packed("/v1/run"), "gave an answer of the wrong form"),
    "a refusal of a million letters": Case(long_refusal, r"refused GET /v1/run \(403 no\): nono"),
    "a redirect": Case(elsewhere, r"refused GET /v1/run \(307 "),
    "an answer drop by drop": Case(drop_by_drop("/v1/run"), "stopped before it joined a run", stop_after_s=4.0),
    "no work, ask again at once": Case(no_work(-5.0), "left credits=0", stop_after_s=2.0),
    "no work, ask again in 10^300 s": Case(no_work(1e300), "left credits=0", stop_after_s=2.0),
    # leases
    "a crowd in 362 bytes": Case(crowd, OVER),
    "versions that are gone": Case(versions_that_are_gone, "left credits=0", stop_after_s=2.0),
    "a lease with a name of 400,000 letters": Case(lambda host: host.change(id="x" * 400_000), "of the wrong form"),
    "a reason of 900,000 letters": Case(long_reasons, "left credits=0", stop_after_s=2.0),
    "a lease of many blocks": Case(with_blocks(*[(1, {})] * 1000), "has 1000 blocks, limit 64"),
    "a slot of an unknown environment": Case(with_blocks((1, {"env": "chess"})), "asks for environment chess"),
    "a seed that is no seed": Case(with_blocks((1, {"seed": "no"})), "has the seed 'no', not 64 hex digits"),
    "a block without slots": Case(with_blocks((0, {})), "left credits=0", stop_after_s=2.0),
    "long replies": Case(long_replies, r"took more memory than the \d+ MB"),
    # manifests and weights
    "one chunk a hundred times": Case(with_manifest(repeats), "limit of this node 13125000: allow more"),
    "files of 10^15 bytes": Case(with_manifest(lies), "they do not match"),
    "a hundred large files": Case(with_manifest(many_files), "limit of this node 13125000: allow more"),
    "15,500 files of one byte": Case(with_manifest(tiny_files), "files, limit 1000"),
    "a vocabulary of 10^9": Case(with_config(vocab_size=10**9), "not in 1..16777216"),
    "10^6 layers": Case(with_config(num_hidden_layers=10**6), "num_hidden_layers = 1000000"),
    "16 million words that are not there": Case(with_config(vocab_size=1 << 24), OVER),
    "a few words that are not there": Case(with_config(vocab_size=1 << 16), "config.json asks for"),
    "a header that lies": Case(header, "not a whole safetensors file"),
    "15,000 tensors": Case(many_tensors, "header of|tensors"),
    "weights that are no numbers": Case(not_finite, "not finite"),
    # templates and tokenizers
    "a template that loops": Case(with_template(LOOP), "took too long"),
    "a template that hogs": Case(with_template(HOG), "took too much memory"),
    "a tokenizer that aborts": Case(with_tokenizer(**ABORTS), r"crashed \("),
    "a tokenizer that aborts when opened": Case(with_tokenizer(**ABORTS_WHEN_OPENED), r"crashed \(SIGABRT\)"),
    "a large tokenizer": Case(large_tokenizer, "took too much memory|crashed"),
    # checks
    "a check of nonsense": Case(
        with_check(b"\x91" * 5000), "stopping after the work in hand", role="validate", stop_after_s=2.0
    ),
    "a check of zeros": Case(with_check(bytes(60_000_000)), OVER, role="validate"),
    "a check of a crowd": Case(every(crowd, with_check(bytes(60_000_000))), OVER, role="validate"),
    "a body without end": Case(
        every(with_check(b"x"), without_end(f"/v1/blobs/{digest(b'x')}")), "answered with more than", role="validate"
    ),
}  # fmt: skip
QUICK = (
    "a crowd in 362 bytes", "long replies", "one chunk a hundred times", "a template that hogs", "a check of a crowd",
)  # fmt: skip
"""One of each kind. The others take minutes together."""

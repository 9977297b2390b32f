"""A synthetic run in the real format, as large as asked for: a log that replays, submissions as blobs, and metrics."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shoal.chat.renderer import Renderer
from shoal.config import RunConfig
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.constants import LAW
from shoal.ledger.event import GENESIS, Body, Entry
from shoal.ledger.event_types import make_entry
from shoal.ledger.leases import LeaseGranted
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.members import NodeJoined
from shoal.ledger.pay import Credit
from shoal.ledger.submissions import AuditDrawn, SubmissionReceived
from shoal.ledger.verdicts import Decision, VerdictGiven
from shoal.ledger.versions import CheckpointPublished, LinkRevealed
from shoal.models.random_model import make_tiny
from shoal.net.blobs import path_of
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest, domain_hash, to_msgpack
from shoal.roles.coordinator.main import created
from shoal.run_folder import RunFolder
from shoal.typed_toml import from_tree

ROLLOUTS = 8
"""Of a group; each lease has one group."""

TURNS = 3
WORDS = ("two", "plus", "three", "is", "five", "carry", "the", "one", "so", "then", "add", "seven", "minus", "four")

RUN = {
    "name": "large", "steps": 1_000_000, "seed": 3, "envs": [{"name": "arithmetic"}],
    "sampling": {"max_turn_tokens": 500, "max_tokens": 4000},
    "rollouts": {"group_size": ROLLOUTS, "block_rollouts": ROLLOUTS, "batch_groups": 1, "max_staleness": 1},
    "policy": {"tiny": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_width": 64, "max_positions": 64}},
}  # fmt: skip


def write_run(root: Path, steps: int, workers: int, num_groups: int) -> None:
    """A run's folder: log, blobs, policy and metrics."""
    config, folder = from_tree(RUN, RunConfig, "benchmark"), RunFolder(root)
    folder.prepare(config, root)
    make_tiny(config.policy.tiny, folder.policy, 5, "float32")
    renderer, rng = Renderer.from_directory(folder.policy), np.random.default_rng(0)
    store, entries = Store(sqlite_url(folder.log)), list[Entry]()
    seq, head, now = -1, GENESIS, 1.7e9
    for body in events(folder, config, renderer, rng, steps, workers, num_groups):
        seq, now = seq + 1, now + 0.5
        entry = make_entry(seq, now, body, head)
        head = entry.hash
        entries.append(entry)
        if len(entries) == 5000:
            store.append(entries)
            entries = []
    store.append(entries)
    store.close()
    with folder.metrics.open("w") as file:
        for step in range(steps):
            line = {f"metric_{number}": float(rng.normal()) for number in range(25)}
            line |= {
                "step": step,
                "time_s": 1.7e9 + step,
                "step_s": 4.0,
                "policy_tokens": 900,
                "reward_mean": rng.random(),
            }
            file.write(json.dumps(line) + "\n")


def events(
    folder: RunFolder,
    config: RunConfig,
    renderer: Renderer,
    rng: np.random.Generator,
    steps: int,
    workers: int,
    total: int,
) -> Iterator[Body]:
    """The events of a run in which every twentieth group is refused, and every tenth is judged twice."""
    run = created(folder, config, key_of("run", 0), LAW)
    yield run
    keys, judges = [key_of("worker", n) for n in range(workers)], [key_of("judge", n) for n in range(3)]
    for number, key in enumerate(keys):
        yield NodeJoined(key, "worker", f"worker {number}", "shoal-local/torch", "float32", "cpu")
    for number, key in enumerate(judges):
        yield NodeJoined(key, "validator", f"validator {number}", "shoal-local/torch", "float32", "cpu")
    yield CheckpointPublished(0, key_of("root", 0), key_of("manifest", 0))
    made, block = 0, 0
    for version in range(steps):
        due, block, good = total * (version + 1) // steps - made, 0, list[tuple[int, int]]()
        while due > 0 or not good:
            due, made = due - 1, made + 1
            worker, refused = keys[int(rng.integers(workers))], made % 20 == 19
            lease = f"{version}-{block}"
            yield LeaseGranted(lease, worker, version, (block,), 2e9)
            data = body_of(run.run, lease, version, block, renderer, rng, made)
            name, digests = digest(data[0]), tuple(digest(one) for one in data[1])
            path = path_of(folder.blobs, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data[0])
            yield SubmissionReceived(lease, worker, name, len(data[0]), digests)
            yield AuditDrawn(name, (), 1.0, (0.5,), 0.0, tuple(judges))
            rewards = tuple(float(reward) for reward in rng.integers(0, 2, ROLLOUTS))
            for judge in judges[: 2 if made % 10 == 9 else 1]:
                outcome, check = ("hard", "sampling") if refused else ("accept", "")
                detail = "token that its seed does not choose" if refused else ""
                found = t.GroupVerdict(
                    block, True, outcome, check, detail, 1, 7, 6.5, 0.002, () if refused else rewards, 400
                )
                yield VerdictGiven(name, judge, (found,))
            yield Decision(name, () if refused else (block,), (block,) if refused else ())
            if not refused:
                yield GroupAccepted(version, block, name, 0, digests[0], 400, rewards, True)
                yield Credit(worker, version, block, 400)
                good.append((version, block))
            block += 1
        yield BatchFormed(version, tuple(good))
        yield CheckpointPublished(version + 1, key_of("root", version + 1), key_of("manifest", version + 1))
        if version:
            yield LinkRevealed(version - 1, key_of("link", version), key_of("audit", version))


def body_of(
    run: str, lease: str, version: int, slot: int, renderer: Renderer, rng: np.random.Generator, number: int
) -> tuple[bytes, list[bytes]]:
    """A submission of one group: its bytes, and those of the group."""
    rollouts = []
    for _ in range(ROLLOUTS):
        tokens, author = list[int](), list[int]()
        for turn in range(2 * TURNS):
            said = " ".join(WORDS[int(word)] for word in rng.integers(0, len(WORDS), 8))
            ids = renderer.encode(said + (" needle" if number % 4000 == 7 else ""))
            tokens, author = [*tokens, *ids], [*author, *[turn % 2] * len(ids)]
        logprobs = -rng.random(sum(author))
        rollouts.append(t.make_rollout(tokens, author, logprobs, version=version, ending="environment"))
    made = to_msgpack(t.Group(slot, int(rng.integers(0, 2000)), "arithmetic", tuple(rollouts)))
    facts = t.EngineFacts("shoal-local/torch", "float32", "cpu")
    return to_msgpack(t.Submission(run, lease, version, (made,), (), facts)), [made]


def key_of(what: str, number: int) -> str:
    """32 bytes in hex."""
    return domain_hash(f"benchmark {what}", number.to_bytes(8, "big")).hex()

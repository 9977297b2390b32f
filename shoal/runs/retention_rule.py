"""Which bodies and weights a coordinator deletes by `storage.retain` of its run file, as it and an auditor see it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shoal.config import StorageConfig
from shoal.ledger.state import State
from shoal.ledger.verdict_decisions import is_open
from shoal.protocol.continuations import slot_in_batch


@dataclass(frozen=True)
class Expiry:
    """What a run has deleted by its own rule, as far as an auditor can see.

    The rule is only the host's word, and a host could name one after it deleted what convicts it. So what is missing
    counts only if the rule was followed: the oldest go first, so nothing older that the rule deletes is still here.
    """

    bodies: frozenset[str]
    """Submissions whose bodies are deleted."""
    weights_before: int
    """The weights of all earlier versions are deleted."""
    words: str


def oldest_kept(state: State, storage: StorageConfig) -> int:
    """The oldest version of which nothing is deleted, unless `storage.quota_mb` has no room for it."""
    return (
        0 if storage.retain == "all" else state.main.version - max(storage.window_steps, state.rules.max_staleness + 1)
    )


def deletable(state: State, storage: StorageConfig, bodies: Mapping[str, int]) -> list[str]:
    """Of these submissions, each with its version, those whose bodies need not stay as long as the run lasts, or until
    they are judged."""
    used = trained_on(state, set(bodies.values())) if storage.retain == "batches" else set[str]()
    # guard: bodies-of-batches-never-expire
    return [name for name in bodies if name not in used and not is_open(state, state.submissions[name])]


def trained_on(state: State, versions: Iterable[int]) -> set[str]:
    """Submissions of these versions of which a batch took a group, or one that a group of theirs continues: an auditor
    needs both."""
    size, found = state.rules.block_groups, set[str]()
    for slots in (state.main.versions[version].slots for version in versions):
        # guard: continuations-stay-with-their-parents
        taught = (slot for number, slot in slots.items() if slots[slot_in_batch(number, size)].step >= 0)
        found |= {slot.submission for slot in taught}
    return found


def expiry_of(state: State, storage: StorageConfig, has: Callable[[str], bool]) -> Expiry | None:
    """What the rule has deleted of a run whose folder `has` a blob or not; None if it keeps all."""
    if storage.retain == "all":
        return None
    oldest, versions = oldest_kept(state, storage), state.main.versions
    made = {name: state.leases[submission.lease].version for name, submission in state.submissions.items()}
    version_of = {name: made[name] for name in deletable(state, storage, made)}
    # guard: oldest-bodies-go-first
    bodies_before = min([oldest, *(version for name, version in version_of.items() if has(name))])
    # guard: oldest-weights-go-first
    weights_before = min([oldest, *(version for version, one in versions.items() if has(one.manifest))])
    bodies = frozenset(name for name, version in version_of.items() if version < bodies_before)
    words = f'The host\'s run file keeps those of version {oldest} and later (storage.retain = "{storage.retain}")'
    return Expiry(bodies, weights_before, words)

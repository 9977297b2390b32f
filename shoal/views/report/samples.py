"""Sample conversations of a report: of the oldest and the newest policy whose rollouts can be read, unselected.

For each environment it takes a version's first group by slot, and of it the first rollouts, so that nobody can say that
good ones were picked. Held-out episodes are shown only to the host.
"""

import contextlib
from dataclasses import dataclass
from itertools import islice

from shoal.errors import NothingYet, ShoalError
from shoal.evaluation_files import AFTER, BEFORE, Evaluation, Transcript
from shoal.runs.rollouts import ReadGroup, ReadRollout
from shoal.runs.run_reader import GroupRef, RunReader

MOST_ENVS, ROLLOUTS, TRANSCRIPTS = 3, 2, 4
MOST_TRIED = 60
"""Groups that are opened, and versions that are looked at from the end, before it gives up finding a sample."""

MOST_TOKENS = 1500
"""Of a rollout, so many tokens are shown."""

SHADES = (0.05, 0.25, 0.7, 2.0)
"""Surprise in nats, minus the log-prob of a token, above which it is a shade darker."""


@dataclass(frozen=True)
class SamplePiece:
    text: str
    shade: int
    surprise: float


@dataclass(frozen=True)
class SampleTurn:
    author: str
    text: str
    pieces: tuple[SamplePiece, ...] = ()
    """Empty where nothing is known of single tokens: then the text is shown."""


@dataclass(frozen=True)
class Talk:
    reward: float | None
    ending: str
    turns: tuple[SampleTurn, ...]
    flaw: str
    cut: bool
    """Whether more was said than is shown."""
    fault: str = ""
    """What the environment raised."""


@dataclass(frozen=True)
class ReportSample:
    when: str
    """Which policy: before, after, or which of those that are kept."""
    where: str
    """Version, slot and environment; or held-out tasks."""
    talks: tuple[Talk, ...]


def samples_of(run: RunReader) -> tuple[list[ReportSample], str]:
    """The samples, and if there are none, why."""
    found, why = (
        [],
        "no rollout of this run can be read: bodies are public when their slots are final, until storage ends",
    )
    try:
        kept = _kept(run)
        for label in [env.label for env in run.state.envs][:MOST_ENVS]:
            oldest, newest = _first(run, kept, label), _first(run, kept[::-1], label)
            found += [_sample("oldest that is kept", oldest)] if oldest is not None else []
            if oldest is not None and newest is not None and newest.version != oldest.version:
                found.append(_sample("newest", newest))
    except ShoalError as error:
        why = f"rollouts cannot be read: {error}"
    # A reading without the host's key gives no episodes of held-out tasks.
    found += [_heldout(one) for one in run.evaluations() if one.name in (BEFORE, AFTER) and _episodes(one)]
    return found, why


def _kept(run: RunReader) -> list[list[GroupRef]]:
    """Places of accepted groups by version and slot, of the versions whose bodies can be read: of a run that deletes old
    ones, those from some version on, which is searched by halves."""
    versions = list[list[GroupRef]]()
    for _, record in sorted(run.state.main.versions.items()):
        places = [GroupRef(slot.submission, slot.index) for _, slot in sorted(record.slots.items()) if slot.submission]
        versions += [places] if places else []
    for _ in range(min(MOST_TRIED, len(versions))):
        if _is_kept(run, versions[-1]):
            break
        versions.pop()  # still private
    else:
        return []
    low, high = 0, len(versions) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_kept(run, versions[middle]) else (middle + 1, high)
    return versions[low:]


def _is_kept(run: RunReader, places: list[GroupRef]) -> bool:
    try:
        run.bytes_of(places[0])
    except NothingYet:
        return False
    return True


def _first(run: RunReader, versions: list[list[GroupRef]], label: str) -> ReadGroup | None:
    """The first group of an environment, in this order of versions."""
    for place in islice((place for places in versions for place in places), MOST_TRIED):
        with contextlib.suppress(NothingYet):
            if run.group(place).env == label:
                return run.group(place, with_pieces=True)
    return None


def _sample(when: str, group: ReadGroup) -> ReportSample:
    talks = tuple(_talk(rollout) for rollout in group.rollouts[:ROLLOUTS])
    return ReportSample(
        when, f"version {group.version}, slot {group.slot}, environment {group.env}, task {group.task}", talks
    )


def _talk(rollout: ReadRollout) -> Talk:
    said, room = list[SampleTurn](), MOST_TOKENS
    for turn in rollout.turns:
        if room <= 0:
            break
        whole, room = len(turn.token_ids) <= room, room - len(turn.token_ids)
        if len(turn.pieces) == len(turn.logprobs) > 0:
            end = len(turn.pieces) if whole else room
            pieces = [
                SamplePiece(text, shade_of(-at), -at) for text, at in zip(turn.pieces, turn.logprobs, strict=True)
            ]
            said.append(SampleTurn(turn.author, turn.text, tuple(pieces[:end])))
        else:
            said.append(SampleTurn(turn.author, turn.text[: 8 * MOST_TOKENS]))
    return Talk(rollout.reward, rollout.ending, tuple(said), rollout.flaw, room < 0)


def shade_of(surprise: float) -> int:
    """From 0, expected, to 4, surprising; what is not a number is surprising."""
    return sum(not surprise <= edge for edge in SHADES)


def _heldout(one: Evaluation) -> ReportSample:
    talks = tuple(map(_episode, _episodes(one)[:TRANSCRIPTS]))
    return ReportSample(one.name, f"held-out tasks, version {one.version}", talks)


def _episodes(one: Evaluation) -> list[Transcript]:
    return [*one.transcripts, *(transcript for part in one.envs.values() for transcript in part.transcripts)]


def _episode(transcript: Transcript) -> Talk:
    turns = tuple(SampleTurn(who, text[: 8 * MOST_TOKENS]) for who, text in transcript.turns)
    return Talk(transcript.score, transcript.ending, turns, "", False, transcript.fault)

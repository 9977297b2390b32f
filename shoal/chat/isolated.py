"""A renderer for a stranger's files: tokenizer and chat template run in a child process with limits.

A template may loop, a tokenizer may abort its process, and both may take any amount of memory. Only the child has the
limits, because torch needs address space. The child gives the same tokens as `Renderer` does in this process. A model of
the user's own is tried in a child when it is opened, and then read in this process.

Requests and answers are MessagePack. The child answers one request after another.
"""

import array
import contextlib
import hashlib
import itertools
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec
import psutil

from shoal.chat.history_rendering import Part
from shoal.chat.renderer import FILES, Prompt, Renderer, TextSpan
from shoal.chat.template_capabilities import ASK
from shoal.config.process_environment import child_environment
from shoal.errors import Overreach, StateError
from shoal.ipc import OUT_OF_MEMORY, Child, ChildExited, Reason, read_message, spawn, take_pipes, write_message
from shoal.protocol.constants import MAX_ROLLOUT_TOKENS, MODEL_STOPS

MAX_FRAME_BYTES = 4 * (MAX_ROLLOUT_TOKENS + 1) + 1024
"""Limit on an answer without texts: the longest rollout, at 4 bytes for each token."""

MAX_TOKEN_BYTES = 1024
"""Limit on the text of a token, averaged over a request. The longest tokens of common vocabularies have 128 bytes."""

GRACE_S = 5.0
"""The child ends itself at its time limit. We end it if it has not done so this much later."""

SYSTEM_LIMITS_MEMORY = sys.platform == "linux"
"""Whether the system enforces a limit on address space. macOS does not, so there we watch the child ourselves."""

BATCH_TOKENS = 1 << 14
"""Most tokens that one request decodes, unless a single turn is longer."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class RendererLimits(NamedTuple):
    """What the child may take."""

    memory_mb: int = 1024
    """Address space beyond what the child has before it opens the first file. Where we watch it, all its memory."""
    time_s: float = 10.0
    """Wall time for one text."""
    open_s: float = 60.0
    """Wall time for opening the tokenizer and the template."""

    @staticmethod
    def within(max_memory_mb: int) -> "RendererLimits":
        """A quarter of what a node may use; the default if a node has no limit (0)."""
        usual = RendererLimits()
        return usual._replace(memory_mb=min(usual.memory_mb, max_memory_mb // 4)) if max_memory_mb else usual


class StartRenderer(Protocol):
    """Starts the child: `start_here`, or a function that a role passes. This room may not import
    `chat/isolated_tokenizer`."""

    def __call__(self, program: str, arguments: Sequence[str], files: Sequence[Path]) -> tuple[Child, str]:
        """Start a Python program with these arguments followed by its `sys.path`. Returns it, and the directory where it
        finds the files. Raises `Overreach`."""


class ContainedRenderer(Renderer):
    """A renderer whose child process does the work. Every method may raise `Overreach`."""

    def __init__(
        self,
        directory: Path,
        limits: RendererLimits = RendererLimits(),
        start: StartRenderer | None = None,
        stops: str = MODEL_STOPS,
    ) -> None:
        """Open the tokenizer and chat template of a checkpoint. Raises as `Renderer.from_directory`, and `Overreach`."""
        self.directory, self._limits, self._start = Path(directory), limits, start or start_here
        self._stops = stops
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._facts: RendererFacts | None = None
        self.decode([])
        assert self._facts is not None, "an open child has told its facts"
        self.eos_id, self.stop_ids = self._facts.eos_id, frozenset(self._facts.stop_ids)
        self.vocabulary, self.notation = self._facts.vocabulary, self._facts.notation
        self._remember()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.decode_all([token_ids])[0]

    def decode_all(self, turns: Sequence[Sequence[int]]) -> list[str]:
        return self._texts("decode", turns, len(turns))

    def pieces(self, turns: Sequence[Sequence[int]]) -> list[list[str]]:
        left = iter(self._texts("pieces", turns, sum(map(len, turns))))
        return [list(itertools.islice(left, len(turn))) for turn in turns]

    def _texts(self, act: str, turns: Sequence[Sequence[int]], wanted: int) -> list[str]:
        texts: list[str] = []
        for batch in batches(turns):
            texts += self._ask(act, [packed(turn) for turn in batch], sum(map(len, batch))).texts
        if len(texts) != wanted:  # guard: contained-texts-are-counted
            raise Overreach(f"the tokenizer of the policy gave {len(texts)} texts for {wanted}: {_LEAVE}")
        return texts

    def _render_opening(self, key: str) -> Prompt:
        return self._prompted("opening", key)

    def _render_reply(self, key: str) -> Prompt:
        return self._prompted("reply", key)

    def _keeps_thinking(self, key: str) -> bool:
        return self._ask("keeps", key).yes

    def _history(self, key: str) -> list[TextSpan]:
        answer = self._ask("history", key, key.count("["))  # a frame may name as many places as there are turns
        ids = iter(self._ids(answer))
        return [TextSpan(tuple(itertools.islice(ids, size)), turn, part) for size, turn, part in answer.places]

    def _written(self, key: str) -> list[int]:
        return self._ids(self._ask("written", key))

    def _encode(self, text: str) -> list[int]:
        return self._ids(self._ask("encode", text))

    def _prompted(self, act: str, key: str) -> Prompt:
        answer = self._ask(act, key)
        return Prompt(tuple(self._ids(answer)), answer.yes)

    def _ids(self, answer: "RendererAnswer") -> list[int]:
        ids = unpacked(answer.ids)
        if max(ids, default=0) >= self.vocabulary:  # guard: contained-ids
            raise Overreach(f"the tokenizer of the policy makes token {max(ids)} of {self.vocabulary}: {_LEAVE}")
        return ids

    def _ask(self, act: str, argument: Any, num_tokens: int = 0) -> "RendererAnswer":
        """One answer of the child. If the child dies or is too slow, a second one is asked, as the fault may be ours.

        `num_tokens` is the number of tokens whose texts the answer contains.
        """
        max_bytes = MAX_FRAME_BYTES + MAX_TOKEN_BYTES * num_tokens
        with self._lock:
            for last in (False, True):
                try:
                    self._child = self._child or self._open()
                    answer = _asked(self._child, (act, argument), self._limits.time_s, _answer_of, max_bytes)
                    break
                except ChildExited as gone:
                    self._child = None
                    if last or gone.reason in (Reason.MEMORY, Reason.LONG):  # a second one would end in the same way
                        raise Overreach(
                            f"the chat template or the tokenizer of the policy {_why(gone)} (limits for each text: "
                            f"{self._limits.time_s:g} s, {self._limits.memory_mb} MB). The host of the run chose them: "
                            + _LEAVE
                        ) from gone
                    log.warning("tokenizer restarted=true reason=%r", _why(gone))
        if answer.refused:
            raise StateError(answer.refused)
        return answer

    def _open(self) -> Child:
        limits, files = self._limits, [self.directory.absolute() / name for name in FILES[self._stops]]
        memory_mb = limits.memory_mb if SYSTEM_LIMITS_MEMORY else 1 << 20  # no limit
        program = "import sys; sys.path[:] = sys.argv[3:]; from shoal.chat.isolated import serve; serve()"
        child, directory = self._start(program, (str(memory_mb), str(limits.time_s)), files)
        if not SYSTEM_LIMITS_MEMORY:
            child.watch(partial(_demand_memory, child.pid, limits.memory_mb * 1_000_000))
        opened = _asked(child, (directory, self._stops), limits.open_s, _opened_of, MAX_FRAME_BYTES)
        if opened.facts is None:
            raise StateError(opened.refused.replace(directory, str(self.directory)))
        if self._facts is not None and opened.facts != self._facts:  # guard: contained-same-files
            raise Overreach(
                f"{self.directory} has another tokenizer or chat template than the version that was opened first: the host "
                "changed them during the run. Leave this run, and tell the host"
            )
        self._facts = opened.facts
        return child


_LEAVE = "leave this run, and tell the host"

OWN_LIMITS = RendererLimits(open_s=20.0)
"""What a model of the user's own may take for its first texts."""


def open_own(directory: Path) -> Renderer:
    """The renderer of a model of the user's own, in this process, which has no limits: so a child with limits first renders
    a prompt and a reply. Raises `StateError` if it cannot be opened, or not within the limits."""
    try:
        tried = ContainedRenderer(directory, OWN_LIMITS)
        tried.start([ASK])
        tried.reply([ASK])
    except Overreach as error:
        raise StateError(
            f"the chat template or the tokenizer of {directory} {_why(error.__cause__ or error)} (limits for each text: "
            f"{OWN_LIMITS.time_s:g} s, {OWN_LIMITS.memory_mb} MB): correct the template, or use another model"
        ) from None
    except StateError:
        pass  # refused without delay: by the renderer below, too, or only these messages
    return Renderer.from_directory(directory)


# --- what is sent ---


class RendererFacts(msgspec.Struct, frozen=True):
    eos_id: int
    stop_ids: list[int]
    vocabulary: int
    notation: str
    digest: str
    """Digest of the files that were opened."""


class RendererOpened(msgspec.Struct):
    facts: RendererFacts | None = None
    refused: str = ""


class RendererAnswer(msgspec.Struct, omit_defaults=True):
    ids: bytes = b""
    yes: bool = False
    """The answer to a question, or whether the prompt leaves the policy's reasoning open."""
    places: list[tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_ROLLOUT_TOKENS)], int, Part]] = []
    """For each segment of a history: its number of ids, its turn and its part."""
    texts: list[str] = []
    refused: str = ""
    """Why the renderer refuses this text. It would do the same in our process."""


_opened_of = msgspec.msgpack.Decoder(RendererOpened).decode
_answer_of = msgspec.msgpack.Decoder(RendererAnswer).decode


def batches(turns: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Turns in order, in batches of at most `BATCH_TOKENS` tokens, or of one longer turn. Each turn counts one more."""
    batch: list[Sequence[int]] = []
    room = BATCH_TOKENS
    for turn in turns:
        if batch and len(turn) + 1 > room:
            yield batch
            batch, room = [], BATCH_TOKENS
        batch.append(turn)
        room -= len(turn) + 1
    if batch:
        yield batch


def packed(token_ids: Sequence[int]) -> bytes:
    return array.array("I", token_ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    ids = array.array("I")
    ids.frombytes(data[: len(data) // ids.itemsize * ids.itemsize])
    return ids.tolist()


# --- our end ---


def _asked(child: Child, request: object, limit_s: float, decode: Callable[[bytes], T], max_bytes: int) -> T:
    """The child's answer. Raises `ChildExited`."""
    return child.decoded(child.ask(msgspec.msgpack.encode(request), limit_s + GRACE_S, max_bytes), decode)


def _why(gone: BaseException) -> str:
    """Why a child ended, in the words of its limits."""
    if not isinstance(gone, ChildExited):
        return str(gone)
    if gone.reason is Reason.TIMEOUT or gone.code == -signal.SIGALRM:
        return "took too long"
    return "took too much memory" if gone.reason is Reason.MEMORY else str(gone)


def _demand_memory(process: int, most_bytes: int) -> None:
    """Raise `ChildExited` if a child has more in memory. If it has ended, the pipe will show it."""
    with contextlib.suppress(psutil.Error):
        taken_bytes = psutil.Process(process).memory_info().rss
        if taken_bytes > most_bytes:  # guard: contained-memory-watched
            raise ChildExited(Reason.MEMORY, f"takes more than {most_bytes} bytes of memory")


def start_here(program: str, arguments: Sequence[str], files: Sequence[Path]) -> tuple[Child, str]:
    """Start a child with the rights of this process."""
    command = [sys.executable, "-I", "-c", program, *arguments, *sys.path]
    return Child(spawn(command, child_environment(1), stderr=subprocess.DEVNULL)), str(files[0].parent)


# --- the child's end ---


def serve() -> None:
    """Answer requests from standard input until it closes. The alarm ends this process even while foreign code runs."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # guard: contained-alarm-not-ignored
    # guard: contained-alarm-not-blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})  # a child inherits both from its parent
    memory_mb, time_s = int(sys.argv[1]), float(sys.argv[2])
    requests, answers = take_pipes()
    first = read_message(requests)
    if first is None:
        return
    _limit(memory_mb)
    signal.setitimer(signal.ITIMER_REAL, RendererLimits().open_s)
    try:
        renderer, opened = _opened(*msgspec.msgpack.decode(first, type=tuple[str, str]))
        _answer(answers, opened)
        while renderer is not None and (request := read_message(requests)) is not None:
            signal.setitimer(signal.ITIMER_REAL, time_s)  # guard: contained-time
            _answer(answers, _obey(renderer, *msgspec.msgpack.decode(request)))
    except (MemoryError, Overreach):
        os.kill(os.getpid(), OUT_OF_MEMORY)


def _limit(memory_mb: int) -> None:
    """Limit what this process may take. It may write to no file."""
    used = psutil.Process().memory_info().vms
    for which, most in (
        (resource.RLIMIT_AS, used + memory_mb * 1_000_000),  # guard: contained-memory
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # no such limit on this system
            resource.setrlimit(which, (most, most))


def _answer(answers: int, answer: RendererOpened | RendererAnswer) -> None:
    data = msgspec.msgpack.encode(answer)
    signal.setitimer(signal.ITIMER_REAL, 0)
    write_message(answers, data)


def _opened(place: str, stops: str) -> tuple[Renderer | None, RendererOpened]:
    directory = Path(place)
    try:
        renderer = Renderer.from_directory(directory, stops)
    except Overreach:
        raise
    except StateError as error:
        return None, RendererOpened(refused=_line(error))
    files = [directory / name for name in FILES[stops]]
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files if file.exists()))
    ends = sorted(renderer.stop_ids)
    facts = RendererFacts(renderer.eos_id, ends, renderer.vocabulary, renderer.notation, digest.hexdigest())
    return renderer, RendererOpened(facts)


def _obey(renderer: Renderer, act: str, argument: Any) -> RendererAnswer:
    try:
        match act:  # the parent caches: a second cache would take the child's memory
            case "decode":
                return RendererAnswer(texts=renderer.decode_all([unpacked(turn) for turn in argument]))
            case "pieces":
                found = renderer.pieces([unpacked(turn) for turn in argument])
                return RendererAnswer(texts=[piece for turn in found for piece in turn])
            case "keeps":
                return RendererAnswer(yes=renderer._keeps_thinking(argument))
            case "history":
                told = renderer._history(argument)
                ids = [token for segment in told for token in segment.token_ids]
                sizes = [(len(segment.token_ids), segment.turn, segment.part) for segment in told]
                return RendererAnswer(ids=_capped(ids), places=sizes)
            case "encode" | "written":
                return RendererAnswer(
                    ids=_capped(renderer.encode(argument) if act == "encode" else renderer._written(argument))
                )
            case _:
                prompt = renderer._render_reply(argument) if act == "reply" else renderer._render_opening(argument)
                return RendererAnswer(ids=_capped(prompt.token_ids), yes=prompt.thinking)
    except (MemoryError, Overreach):
        raise
    except Exception as error:  # noqa: BLE001  a tokenizer raises anything; the text is refused as in one process
        return RendererAnswer(refused=_line(error))


def _capped(token_ids: Sequence[int]) -> bytes:
    """The ids, cut to one more than a rollout may have: one too many has the same effect as all."""
    return packed(token_ids[: MAX_ROLLOUT_TOKENS + 1])


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.encode("utf-8", "replace").decode()[:1000]

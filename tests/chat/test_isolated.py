"""What a run's tokenizer and chat template can do to a machine that joined: nothing but stop its own child process."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from shoal.chat import isolated, isolated_tokenizer
from shoal.chat.isolated import (
    ContainedRenderer,
    RendererAnswer,
    RendererFacts,
    RendererLimits,
    RendererOpened,
    packed,
)
from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.envs.load import load_env
from shoal.envs.play_episodes import play_block
from shoal.envs.rollout_rules import Conversation
from shoal.errors import Overreach, StateError
from shoal.ipc import Child, spawn
from shoal.models.random_model import make_tiny
from shoal.protocol.messages import Block, Sampling, Slot
from shoal.verification.check_context import Context
from tests.sandbox.needs import needs_bubblewrap

HELLO = [{"role": "user", "content": "hello there"}]
QUICK = RendererLimits(memory_mb=200, time_s=1.0)
QUICKEST = QUICK._replace(time_s=0.25)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOG = "{% set text = messages[0].content * 300000000 %}{{ text|length }}"
"""3.1 GB of text."""


@pytest.fixture(params=["limits", pytest.param("sandbox", marks=needs_bubblewrap)])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A child that has only its limits, and one in the sandbox."""
    if request.param == "sandbox":
        monkeypatch.setattr(isolated, "start_here", isolated_tokenizer.start)
    return request.param


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "policy"
    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), directory, seed=0, dtype="float32")
    return directory


@pytest.fixture
def hostile(tiny: Path, tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint with another template, or another entry of its tokenizer.json."""

    def make(template: str = "", **changes: object) -> Path:
        directory = tmp_path / "hostile"
        shutil.copytree(tiny, directory, dirs_exist_ok=True)
        if template:
            (directory / "chat_template.jinja").write_text(template)
        path = directory / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return directory

    return make


def test_a_node_with_many_open_files_has_a_child_too(tiny: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= 2048
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert ContainedRenderer(tiny).start(HELLO) == Renderer.from_directory(tiny).start(HELLO)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _word(directory: Path, text: str) -> int:
    """Make `text` the token that "a" was, and return its id. The texts of common tokens have about five bytes."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    token: int = tokenizer["model"]["vocab"].pop("a")
    tokenizer["model"]["vocab"][text] = token
    path.write_text(json.dumps(tokenizer))
    return token


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize(("text", "turns"), [("word ", [16_384] * 64), ("x" * 128, [65_536, 0, 1])])
def test_long_turns_of_long_tokens_have_the_texts_of_one_process(
    text: str, turns: list[int], hostile: Callable[..., Path]
) -> None:
    """64 turns of 16,384 tokens have 5 MB of text. The second case is what a forger would send to stop a validator."""
    directory = hostile()
    token = _word(directory, text)
    written = [[token] * length for length in turns]
    assert ContainedRenderer(directory).decode_all(written) == Renderer.from_directory(directory).decode_all(written)


def test_a_tokenizer_whose_tokens_are_texts_without_end_is_stopped(hostile: Callable[..., Path]) -> None:
    directory = hostile()
    token = _word(directory, "x" * 10_000)
    with pytest.raises(Overreach, match=r"answered with \d+ bytes, limit \d+"):
        ContainedRenderer(directory).decode([token] * 1000)


@pytest.mark.usefixtures("how")
def test_a_slow_template_and_one_that_refuses_are_as_in_one_process(hostile: Callable[..., Path]) -> None:
    slow = "{% for a in range(300) %}{% for b in range(1000) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    directory = hostile(slow)
    assert ContainedRenderer(directory, QUICK).start(HELLO) == Renderer.from_directory(directory).start(HELLO)
    refusing = ContainedRenderer(hostile("{{ raise_exception('only the user may speak') }}"), QUICK)
    with pytest.raises(StateError, match="refuses these messages: only the user may speak") as refused:
        refusing.start(HELLO)
    assert not isinstance(refused.value, Overreach)
    with pytest.raises(StateError, match="template is malformed"):
        ContainedRenderer(hostile("{% for %}"))


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize(("template", "why"), [(LOOP, "took too long"), (HOG, "took too much memory")])
def test_a_template_that_loops_or_hogs_memory_ends_its_child_only(
    template: str, why: str, hostile: Callable[..., Path]
) -> None:
    renderer, began = ContainedRenderer(hostile(template), QUICKEST if template == LOOP else QUICK), time.monotonic()
    assert renderer._child is not None
    child = renderer._child
    with pytest.raises(Overreach, match=f"{why}.*The host of the run chose them") as stopped:
        renderer.start(HELLO)
    assert time.monotonic() - began < 30 and "\n" not in str(stopped.value)
    assert child.process.returncode is not None and renderer._child is None


GROWS = (
    "{% set all = namespace(texts=[]) %}{% for a in range(9999) %}"
    "{% set all.texts = all.texts + [messages[0].content * 10000] %}{% endfor %}"
)
"""Adds 110 kB at a time, 1.1 GB in all."""


def test_where_the_system_has_no_limit_of_memory_the_child_is_watched(
    hostile: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "SYSTEM_LIMITS_MEMORY", False)
    renderer = ContainedRenderer(hostile(GROWS), QUICK._replace(time_s=10.0))
    with pytest.raises(Overreach, match=r"took too much memory.*200 MB"):
        renderer.start(HELLO)


_LONGER = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 100_000}
ABORTS = {"normalizer": {"type": "Sequence", "normalizers": [_LONGER, _LONGER]}}
"""Makes 30 GB of a text with three letters e."""
PANICS = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
ABORTS_WHEN_OPENED = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////////"}}


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("changes", [ABORTS, PANICS])
def test_a_tokenizer_that_aborts_or_panics_ends_its_child_only(
    changes: dict[str, object], hostile: Callable[..., Path]
) -> None:
    with pytest.raises(Overreach, match=r"(by signal|exit code).*The host of the run chose them"):
        ContainedRenderer(hostile(**changes), QUICK._replace(time_s=10.0)).start(HELLO)


def test_a_tokenizer_that_aborts_when_it_is_opened_ends_its_child_only(hostile: Callable[..., Path]) -> None:
    with pytest.raises(Overreach, match=r"was ended by signal 6 \(SIGABRT\)"):
        ContainedRenderer(hostile(**ABORTS_WHEN_OPENED), QUICK)


LIAR = """
import sys
from shoal.ipc import read_message, take_pipes, write_message
opened, nothing, asked, lie = map(bytes.fromhex, sys.argv[1:])
requests, answers = take_pipes()
read_message(requests)
write_message(answers, opened)
while (request := read_message(requests)) is not None:
    write_message(answers, nothing if request == asked else lie)
"""
LIES: dict[str, tuple[Callable[[Renderer], object], object, str]] = {
    "no UTF-8": (lambda one: one.decode([1]), b"\x81\xa5texts\x91\xa2\xff\xfe", "gave a wrong answer"),
    "deep nesting": (lambda one: one.decode([1]), b"\x81\xa5other" + b"\x91" * 50_000, "gave a wrong answer"),
    "no texts": (lambda one: one.decode([1]), RendererAnswer(), "gave 0 texts for 1"),
    "a token beyond the model": (lambda one: one.encode("a"), RendererAnswer(ids=packed([7, 64])), "token 64 of 64"),
    "half a place": (
        lambda one: one.history(HELLO),
        b"\x81\xa6places\x91\x93\xff\x00\xa7visible",
        "gave a wrong answer",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_child_that_lies_is_told_to_the_host_and_raises_nothing_else(name: str) -> None:
    """A template that has taken over its process can send anything."""
    ask, lie, why = LIES[name]
    sent = (RendererOpened(RendererFacts(0, [0], 64, "", "")), RendererAnswer(texts=[""]), ("decode", [b""]), lie)
    arguments = [(part if isinstance(part, bytes) else msgspec.msgpack.encode(part)).hex() for part in sent]

    def start(*_: object) -> tuple[Child, str]:
        return Child(spawn([sys.executable, "-c", LIAR, *arguments])), ""

    renderer = ContainedRenderer(Path("policy"), QUICK, start)
    with pytest.raises(Overreach, match=f"{why}.*tell the host"):
        ask(renderer)


def test_many_long_prompts_stay_within_the_memory_of_the_child(
    hostile: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A cache of 60 prompts of 2 MB would need more than the limit; each of them needs little."""
    renderer = ContainedRenderer(hostile("{{ messages[0].content[:9] }}"), RendererLimits(memory_mb=100))
    for number in range(60):
        renderer.start([{"role": "user", "content": f"{number} {'a' * 2_000_000}"}])
    assert caplog.text == "", "the child was restarted"


@pytest.mark.usefixtures("how")
def test_a_child_that_something_else_ended_gets_one_successor_with_the_same_files(
    tiny: Path, hostile: Callable[..., Path]
) -> None:
    directory = hostile()
    renderer = ContainedRenderer(directory)
    _kill(renderer)
    assert renderer.start(HELLO) == Renderer.from_directory(tiny).start(HELLO)
    _kill(renderer)
    hostile("{{ messages[0].content }}")
    with pytest.raises(Overreach, match="changed them during the run"):
        renderer.reply("new")


def _kill(renderer: ContainedRenderer) -> None:
    assert renderer._child is not None
    renderer._child.kill()


IGNORED = "signal.signal(signal.SIGALRM, signal.SIG_IGN);"
BLOCKED = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]);"


@pytest.mark.parametrize("first", ["", IGNORED, BLOCKED])
def test_a_child_that_loops_ends_with_its_parent(first: str, hostile: Callable[..., Path]) -> None:
    """Only its own alarm is left to end it, whatever its parent did with that signal."""
    program = (
        "import sys, threading, time; from pathlib import Path; from shoal.chat.isolated import *;"
        + first
        + "r = ContainedRenderer(Path(sys.argv[1]), RendererLimits(time_s=0.3));"
        "threading.Thread(target=r.start, args=([{'role': 'user', 'content': 'hi'}],), daemon=True).start();"
        "time.sleep(0.2); print(r._child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    parent = subprocess.run([sys.executable, "-c", program, str(hostile(LOOP))], capture_output=True, timeout=60)
    child, until = int(parent.stdout), time.monotonic() + 10
    while (lives := _lives(child)) and time.monotonic() < until:
        time.sleep(0.1)
    if lives:
        os.kill(child, signal.SIGKILL)  # else it loops on
    assert not lives, "the child outlived its parent"


def _lives(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != "zombie"


def test_what_goes_beyond_a_limit_is_neither_a_void_slot_nor_a_failed_rollout(
    hostile: Callable[..., Path],
) -> None:
    """A faster machine would stay within the limit, so it must never decide what a submission or a verdict says."""
    env, sampling = load_env("arithmetic", {}), Sampling(1.0, 4, 48)
    renderer = ContainedRenderer(
        hostile("{% if messages|length > 2 %}" + LOOP + "{% endif %}{{ messages[0].content }}"), QUICK
    )
    talk = Conversation(load_env("wordle", {}), renderer, load_env("wordle", {}).task(0), Sampling(1.0, 8, 512))
    with pytest.raises(Overreach):
        talk.write([renderer.eos_id])
    renderer = ContainedRenderer(hostile(LOOP), QUICKEST)
    with pytest.raises(Overreach):
        Conversation(env, renderer, env.task(0), sampling)
    block = Block(0, (Slot(0, "00" * 32, "arithmetic", 0),))
    with pytest.raises(Overreach):
        play_block(None, renderer, {"arithmetic": env}, block, 2, sampling)  # type: ignore[arg-type]
    lease = SimpleNamespace(sampling=sampling)
    info = SimpleNamespace(rules=SimpleNamespace(block_groups=1))
    tools = SimpleNamespace(envs={"arithmetic": env}, renderer=renderer, info=info)
    with pytest.raises(Overreach):
        Context(tools, lease, block.slots[0], None).unplayable()  # type: ignore[arg-type]

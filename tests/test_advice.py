"""Every option that an error, a log line or a help text names exists in the command for which it is said.

Read from the source: texts of the package, but for docstrings and for the command lines of other programs. An option
belongs to the `shoal COMMAND` that stands before it in its sentence. If there is none, `SAID_BY` says which commands its
file speaks for; each of them must have the option.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.main import parser
from shoal.errors import ConfigError
from shoal.launch.doctor import fit

PACKAGE = Path(__file__).parent.parent / "shoal"

OTHER_PROGRAMS = (
    "env_packages/lock.py", "launch/prompt_preview_process.py", "launch/run_processes.py", "launch/sizing.py",
    "roles/trainer/processes.py",
    "sandbox/bubblewrap.py", "sandbox/selftest.py", "views/plots/render.py",
)  # fmt: skip
"""Files that write the command lines of pip, of sandboxes and of roles, or properties of CSS."""

NODES = ("join", "validate")

SAID_BY: dict[str, tuple[str, ...]] = {
    "config/load.py": ("run", "host"),
    "config/stages.py": ("stages",),
    "config/trl.py": ("run", "host"),
    "engine/": ("join", "calibrate"),
    "envs/lint/": ("env check",),
    "envs/env_from_file.py": ("eval",),
    "env_packages/publish.py": ("env push",),
    "env_packages/scaffold.py": ("env init",),
    "launch/doctor.py": ("doctor",),
    "views/terminal/end_screen.py": ("eval",),
    "launch/memory_plan.py": ("run", "host"),
    "launch/log_rotation.py": ("join", "validate", "relay"),
    "launch/admin.py --factor": ("admin",),
    "launch/admin.py --key": ("admin",),
    "launch/run_lock.py": ("run", "host"),
    "views/terminal/node_screen.py": ("join",),
    "views/terminal/node_view.py": ("join",),
    "launch/admin.py": ("host",),
    "launch/admin.py --new-key": ("admin",),
    "launch/admin.py --out": ("host",),
    "launch/random_policy.py": ("run", "host"),
    "launch/run_lock.py --home": ("node",),
    "ledger/run_decisions.py": ("admin",),
    "monitors/host.py": ("run", "host"),
    "net/blobs.py": ("run", "host"),
    "net/outbound_proxy.py": ("join", "validate"),
    "net/server_address.py": ("host", "relay"),
    "plan/forecast.py": ("plan",),
    "models/checkpoint.py": ("join",),
    "protocol/tolerances.py": ("join",),
    "roles/node/throttle.py": ("join",),
    "roles/auditor/": ("audit",),
    "roles/auditor/verify_log.py": ("credits",),
    "roles/coordinator/main.py": ("run", "host"),
    "jobs/sft.py": ("eval",),
    "runs/log_source.py": ("audit", "credits", "ledger verify"),
    "runs/log_source.py --out": ("run", "host"),
    "runs/log_source.py --set": ("run", "host"),
    "jobs/calibrate.py": ("calibrate",),
    "jobs/calibration_recordings.py": ("calibrate",),
    "roles/coordinator/relays.py": ("relay",),
    "weights/engine_loader.py": ("join",),
    "jobs/evaluate.py": ("eval",),
    "weights/memory_limit.py": (*NODES, "audit"),
    "weights/memory_limit.py --device": (*NODES, "audit"),
    "jobs/merge_adapter.py": ("policy merge",),
    "roles/node/device_queue.py": ("run", "host"),
    "run_folder.py": ("run", "host"),
    "roles/relay/": ("relay",),
    "roles/node/share_weights.py": NODES,
    "typed_toml.py": ("run", "host", "plan", "doctor", "calibrate", "sft"),
    "views/web/group_pages.py": ("audit",),
    "weights/": NODES,
}
"""Commands whose users read what a file, or a file of a folder, says; or what it says of one option."""

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
COMMAND = re.compile(r"\b(shoal|caddy|pip) ([a-z-]+)(?: ([a-z-]+))?")
END = re.compile(r"[`;:()]|[.,] ")


def parsers(name: str, made: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command, such as `env install`, and its parser."""
    yield name, made
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from parsers(f"{name} {word}".strip(), below)


def grammar() -> dict[str, set[str]]:
    """The options of each command."""
    found = parsers("", parser())
    return {name: {word for action in made._actions for word in action.option_strings} for name, made in found}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is not a docstring; what is put into it is {}."""
    tree = ast.parse(source)
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for part in ast.walk(node)
        if part is not node and isinstance(part, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def named(text: str, commands: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Each option of a text, and the command to which it belongs; empty if none is named. Other programs' are left out."""
    for option in OPTION.finditer(text):
        before = text[: option.start()]
        found = [match for match in COMMAND.finditer(before) if not END.search(before, match.end())]
        program, first, second = found[-1].groups() if found else ("shoal", "", "")
        if program == "shoal":
            yield f"{first} {second}" if f"{first} {second}" in commands else first, option.group()


def speaks_for(file: str, option: str) -> tuple[str, ...]:
    keys = [key for key in SAID_BY if f"{file} {option}" == key or file.startswith(key)]
    return SAID_BY[max(keys, key=len)] if keys else ()


def wrong_in(file: str, text: str, commands: dict[str, set[str]]) -> Iterator[str]:
    """What is wrong with the options that a text of a file names."""
    for command, option in named(text, commands):
        commanded = (command,) if command else speaks_for(file, option)
        if not commanded:
            yield f"{option}: add to SAID_BY who reads {file}"
        yield from (f"shoal {one} has no {option}" for one in commanded if option not in commands.get(one, ()))


FILES = [
    name
    for name in sorted(file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py"))
    if name not in OTHER_PROGRAMS and not name.startswith("cli/")
]


@pytest.mark.parametrize("file", [name for name in FILES if OPTION.search((PACKAGE / name).read_text())])
def test_options_in_messages_exist_where_they_are_said(file: str) -> None:
    commands = grammar()
    wrong = [
        f"line {line}: {fault}"
        for line, text in texts((PACKAGE / file).read_text())
        for fault in wrong_in(file, text, commands)
    ]
    assert wrong == []


def test_options_in_help_exist_in_their_command() -> None:
    commands, wrong = grammar(), []
    for name, made in parsers("", parser()):
        told = [made.description or "", made.epilog or "", *(action.help or "" for action in made._actions)]
        for text in told:
            for command, option in named(text, commands):
                if option not in commands[command or name]:
                    wrong.append(f"shoal {name} --help: {option} of shoal {command or name}")
    assert wrong == []


def test_every_file_of_the_table_exists_and_every_command() -> None:
    commands = grammar()
    assert [key for key in SAID_BY if not (PACKAGE / key.split()[0]).exists()] == []
    assert {command for said in SAID_BY.values() for command in said} <= commands.keys()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("do `shoal doctor --parameters 7e9`", ["shoal doctor has no --parameters"]),
        ("do `shoal plan R --parameters 7e9`, or give --out", []),
        ("shoal env install X --registry URL, then: shoal env init --registry", ["shoal env init has no --registry"]),
        ("`shoal host` listens: --wrong", ["shoal run has no --wrong", "shoal host has no --wrong"]),
        ("caddy reverse-proxy --from a --to b", []),
    ],
)  # fmt: skip
def test_an_option_belongs_to_the_command_before_it(text: str, wrong: list[str]) -> None:
    assert list(wrong_in("run_folder.py", text, grammar())) == wrong


def test_a_file_that_nobody_is_said_to_read_is_told() -> None:
    assert list(wrong_in("nowhere.py", "give --out", grammar())) == ["--out: add to SAID_BY who reads nowhere.py"]


def test_doctor_offers_a_shape_only_where_the_run_file_has_one(tmp_path: Path) -> None:
    recipe = PACKAGE.parent / "recipes" / "qwen3-8b-lora.toml"
    with_shape = recipe.read_text().replace('path = "hf:', 'path = "nowhere:')
    for text, offered in ((with_shape, True), (with_shape.partition("[random]")[0], False)):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            list(fit(tmp_path / "run.toml", [], 0.0))
        assert "--parameters" not in str(caught.value) and ("--random-policy" in str(caught.value)) == offered

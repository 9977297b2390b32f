"""The documentation is true: what it links to is there, what it lists is complete, what it says to type works.

    python -m tests.test_docs --write     make the generated tables anew

Reference tables stand between `<!-- generated: NAME -->` and `<!-- end of generated -->`; they are made here, from the
source. Code blocks follow these conventions, by the words after the fence:

    ```console          what a person types, after `$ `: every `shoal` command must parse, every make target exist
    ```console run      the same, and it is run here in a scratch folder; the lines shown must come, `...` is anything
    ```python run       cells of one notebook, run by `tests/test_api.py`
    ```python FILE      (and toml) the whole of a file that the page's commands use: run files must load
"""

import argparse
import ast
import functools
import inspect
import itertools
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from shoal import config, step_metrics
from shoal.cli import main
from shoal.cli.host import host_overrides
from shoal.config import stages
from shoal.config.alarm_limits import CAUSES, LIMITS
from shoal.engine import dishonest
from shoal.envs.load import BUILT_IN
from shoal.ledger.event import event_hash
from shoal.ledger.event_types import KINDS
from shoal.monitors.alarms import BETWEEN, MONITORS
from shoal.protocol import (
    algorithm_config,
    constants,
    encoding,
    messages,
    noise,
    seed_chain,
    signing,
    task_draws,
)
from shoal.protocol.field_types import words_of
from shoal.protocol.seed_chain import SLOT_CHAIN
from shoal.roles.coordinator import prometheus
from shoal.roles.coordinator.main import open_run
from shoal.roles.coordinator.routes import CALLS
from shoal.run_folder import RunFolder
from shoal.typed_toml import all_keys, from_tree, structs_of, to_tree
from shoal.verification.checks_with_model import AUDIT
from shoal.verification.checks_without_model import MODEL_FREE
from tests.python_reference import python_reference

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
REFERENCE = ROOT / "docs" / "reference"

WORDS = (
    "task", "rollout", "group", "slot", "block", "lease", "submission", "receipt", "verdict", "batch", "checkpoint",
    "manifest", "chunk", "patch", "event", "log", "credit", "stake", "node", "run", "recipe", "environment", "policy",
    "link", "audit", "decision", "finding", "replay", "stream", "law", "rules",
)  # fmt: skip
"""Ideas that the glossary must define, each with one word."""


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --- pages, as far as tests read them ---


class Fence(NamedTuple):
    """A code block."""

    info: str
    text: str


_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def fences(page: Path) -> list[Fence]:
    """Code blocks of a page, in order."""
    return [Fence(m["info"].strip(), m["text"]) for m in _FENCE.finditer(page.read_text())]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(slug)
    return found


def commands(fence: Fence) -> Iterator[tuple[str, list[str]]]:
    """What is typed in a console block, with the lines shown below it."""
    typed, shown = "", []
    for line in fence.text.splitlines():
        if line.startswith("$ "):
            if typed:
                yield typed, shown
            typed, shown = line[2:], []
        else:
            shown.append(line)
    if typed:
        yield typed, shown


def arguments(command: str) -> list[str]:
    """Words of a typed command, its comment and redirections left out."""
    words = shlex.split(command, comments=True)
    return words[: next((i for i, word in enumerate(words) if word in (">", "|", "&")), len(words))]


# --- the generated tables ---


@functools.cache
def field_docs(module: ModuleType) -> dict[str, dict[str, str]]:
    """The strings below the fields of a module's classes, and below its constants (under "")."""
    tree = ast.parse(inspect.getsource(module))
    scopes = [("", tree.body)] + [(n.name, n.body) for n in tree.body if isinstance(n, ast.ClassDef)]
    docs: dict[str, dict[str, str]] = {}
    for scope, body in scopes:
        found = docs.setdefault(scope, {})
        for node, after in zip(body, [*body[1:], None], strict=True):
            target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
            names = [n.id for n in getattr(target, "elts", [target]) if isinstance(n, ast.Name)]
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            for name in names:
                found[name] = " ".join(str(text).split())
    return docs


def docs_of(kind: type) -> dict[str, str]:
    """The strings below the fields of a class, its own before those that it inherits."""
    docs: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        own = (
            field_docs(sys.modules[one.__module__]).get(one.__name__, {}) if one.__module__.startswith("shoal.") else {}
        )
        docs |= {name: text for name, text in own.items() if text or name not in docs}
    return docs


def one_line(doc: str | None) -> str:
    """A docstring's first paragraph."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def type_name(kind: Any) -> str:
    """How a reader of a run file or a message calls a type."""
    plain = {int: "whole number", float: "number", str: "text", bool: "true or false", bytes: "bytes"}
    info = getattr(kind, "__origin__", None)
    inner = getattr(kind, "__args__", ())
    if kind in plain:
        return plain[kind]
    if hasattr(kind, "__metadata__"):
        words = words_of(kind.__metadata__[0]).replace(", and finite", "").replace("finite", "")
        return f"{type_name(info)} {words}".strip()
    if info is dict:
        return "table" if inner[1] is Any else f"table of {type_name(inner[1])}"
    if info in (tuple, list):
        return "list of " + " and ".join(type_name(k) for k in inner if k is not Ellipsis)
    if "Literal" in str(info):
        return ", ".join(f"`{json.dumps(value)}`" for value in inner)
    if inner:  # X | None, or X that may be left out
        kinds = [k for k in inner if k is not msgspec.UnsetType]
        return " or ".join("null" if k is type(None) else type_name(k) for k in kinds)
    return "JSON" if kind is msgspec.Raw else f"`{kind.__name__}`"


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """A field's default as TOML writes it."""
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{json.dumps(value)}`"


def keys_of(kind: Any, prefix: str) -> list[list[str]]:
    """Rows of a section: key, type, default, meaning, and whether a resumed run may have another value."""
    rows = []
    tag = kind.__struct_config__.tag
    if tag is not None:
        name = f'`"{tag}"`'
        rows.append([f"`{prefix}{kind.__struct_config__.tag_field}`", name, name, "Which algorithm this is.", "no"])
    for field in msgspec.structs.fields(kind):
        if section_of(field.type) is not None:
            continue
        key = prefix + field.name
        meaning = docs_of(kind)[field.name]
        may_change = "yes" if safe(key) else "no"
        rows.append([f"`{key}`", type_name(field.type), default_of(field), meaning, may_change])
    return rows


def safe(key: str) -> bool:
    return any(key == known or key.startswith(known + ".") for known in config.SAFE_TO_CHANGE)


def section_of(kind: Any) -> Any:
    """The section type that a field holds, or holds a list of; None for a plain value."""
    for inner in (kind, *getattr(kind, "__args__", ())):
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            return inner
    return None


def run_file_tables(kind: Any = config.RunConfig, prefix: str = "") -> str:
    """Every key of a run file, section by section."""
    headings = ["Key", "Type", "Default", "Meaning", "May change on resume"]
    rows = keys_of(kind, prefix)
    parts = [table(headings, rows)] if rows else []
    for field in msgspec.structs.fields(kind):
        inner = section_of(field.type)
        if inner is algorithm_config.Grpo:
            parts += algorithm_tables(prefix + field.name)
        elif inner is not None:
            name = prefix + field.name
            heads = {tuple: f"[[{name}]]", dict: f'[{name}."SAMPLED/RECOMPUTED"]'}
            head = heads.get(getattr(field.type, "__origin__", None), f"[{name}]")
            parts.append(f"### `{head}`\n\n{one_line(inner.__doc__)}")
            if inner is messages.Bounds:
                parts.append(built_in_bounds())
            parts.append(run_file_tables(inner, name + "."))
    return "\n\n".join(parts)


def algorithm_tables(prefix: str) -> list[str]:
    """What the named algorithms take, the keys of all, and the parts that they are composed of."""
    plain = algorithm_config.Composition()
    named = [
        f"`{prefix}.name`",
        "a name of the table above",
        f'`"{algorithm_config.DEFAULT}"`',
        "What the defaults are.",
        "no",
    ]
    keys = [named, *keys_of(type(plain), f"{prefix}.")[1:]]
    rows = []
    for kind in (algorithm_config.Composition, *algorithm_config.NAMED):
        other = {key: value for key, value in to_tree(kind()).items() if value != to_tree(plain)[key] and key != "name"}
        name = kind.__struct_config__.tag
        shown = ", ".join(f"`{key} = {inline(value)}`" for key, value in other.items())
        rows.append([f'`"{name}"`', "every default below" if kind is type(plain) else one_line(kind.__doc__), shown])
    parts = [
        f"### `[{prefix}]`\n\nAn algorithm of parts. Every `name` has the keys below, and other defaults for some.",
        table(["Name", "What it is", "Its own defaults"], rows),
        table(["Key", "Type", "Default", "Meaning", "May change on resume"], keys),
    ]
    for field, kinds in (("loss", algorithm_config.Loss), ("corrections", algorithm_config.Correction)):
        head = f"[{prefix}.{field}]" if field == "loss" else f"[[{prefix}.{field}]]"
        parts.append(f"#### `{head}`")
        rows = []
        for kind in structs_of(kinds):
            name = f'`"{kind.__struct_config__.tag}"`'
            rows.append([f"`{prefix}.{field}.name`", "", name, one_line(kind.__doc__)])
            rows += [row[:4] for row in keys_of(kind, f"{prefix}.{field}.")[1:]]
        parts.append(table(["Key", "Type", "Default", "Meaning"], rows))
    rows = [row[:4] for row in keys_of(algorithm_config.Kl, f"{prefix}.kl.")]
    parts.append(f"#### `[{prefix}.kl]`\n\n{one_line(algorithm_config.Kl.__doc__)}")
    parts.append(table(["Key", "Type", "Default", "Meaning"], rows))
    rows = []
    for kind in (algorithm_config.Vine, *structs_of(algorithm_config.StepCredit)):
        name = f'`"{kind.__struct_config__.tag}"`'
        rows.append([f"`{prefix}.credit.name`", "", name, one_line(kind.__doc__)])
        rows += [row[:4] for row in keys_of(kind, f"{prefix}.credit.")[1:]]
    parts.append(f"#### `[{prefix}.credit]`\n\n{field_docs(algorithm_config)['Composition']['credit']}")
    return [*parts, table(["Key", "Type", "Default", "Meaning"], rows)]


def inline(value: Any) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(map(inline, value)) + "]" if isinstance(value, list) else json.dumps(value)


def built_in_bounds() -> str:
    """The bounds of a run that gives none."""
    rows = [[f"`{pair}`", *(f"`{value}`" for value in to_tree(b).values())] for pair, b in config.BOUNDS.items()]
    return f"Built in, for keys that are left out:\n\n{table(['Pair', *messages.Bounds.__struct_fields__], rows)}"


def sft_table() -> str:
    """Every key of an SFT recipe; `[policy]` and `[env]` are a run file's sections."""
    rows = [row[:4] for row in keys_of(config.SftConfig, "")]
    return table(["Key", "Type", "Default", "Meaning"], rows)


def stages_tables() -> str:
    """Every key of a stages file; those of a stage by its kind."""
    rows = [row[:4] for row in keys_of(stages.StagesConfig, "")]
    rows[-1][1] = "list of tables"
    parts = [table(["Key", "Type", "Default", "Meaning"], rows)]
    for kind in structs_of(stages.Stage):
        rows = [row[:4] for row in keys_of(kind, "stages.")[1:]]
        heading = f'### `[[stages]]` with `kind = "{kind.__struct_config__.tag}"`\n\n{one_line(kind.__doc__)}'
        parts += [heading, table(["Key", "Type", "Default", "Meaning"], rows)]
    return "\n\n".join(parts)


def env_tables() -> str:
    """Arguments of the built-in environments."""
    parts = []
    for name, built_in in BUILT_IN.items():
        rows = [row[:4] for row in keys_of(built_in.args, "")]
        parts.append(f"### `{name}`\n\n{table(['Argument', 'Type', 'Default', 'Meaning'], rows)}")
    return "\n\n".join(parts)


def leaf_parsers(parser: argparse.ArgumentParser, name: str = "shoal") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that does something, without the hidden one that the launcher uses."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield name, parser
    for group in groups:
        shown = {choice.dest for choice in group._choices_actions}
        for word, inner in group.choices.items():
            if word in shown:
                yield from leaf_parsers(inner, f"{name} {word}")


def cli_sections() -> str:
    """Each command: what it does, its arguments, examples."""
    parts = []
    for name, parser in leaf_parsers(main.parser()):
        actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
        usage = [name, *(a.metavar if a.required else f"[{a.metavar}]" for a in actions if _is_named(a))]
        usage += [f"{a.option_strings[0]} {a.metavar}" for a in actions if a.option_strings and a.required]
        usage += ["[options]"] if any(a.option_strings and not a.required for a in actions) else []
        parts.append(f"## {name}\n\n    {' '.join(map(str, usage))}\n\n{unwrapped(parser.description)}")
        if actions:
            parts.append(table(["Argument", "Meaning"], [[_spelling(a), _meaning(a)] for a in actions]))
        parts.append(f"```console\n{examples(parser.epilog)}\n```")
    return "\n\n".join(parts)


def _is_named(action: argparse.Action) -> bool:
    if not action.option_strings and action.metavar is None:
        action.metavar = action.dest.upper()
    return not action.option_strings


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar}`"
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return f"`{', '.join(action.option_strings)}{value}`"


def _meaning(action: argparse.Action) -> str:
    words = [action.help or ""]
    if action.choices:
        words.append("one of " + ", ".join(f"`{c}`" for c in action.choices))
    if action.default not in (None, "", False, 0, [], {}) and "default" not in (action.help or ""):
        words.append(f"default: `{action.default}`")
    return "; ".join(word for word in words if word)


def unwrapped(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


def examples(epilog: str | None) -> str:
    """The examples of a command's help as console lines, their notes as comments."""
    shown: list[str] = []
    for line in textwrap.dedent((epilog or "").partition("\n")[2]).splitlines():
        if line.startswith(" "):
            shown[-1] += f"    # {line.strip()}"
        else:
            shown.append(f"$ {line}")
    return "\n".join(shown)


def call_table() -> str:
    """Every HTTP call of the coordinator."""
    rows = [
        [f"`{call.method} {call.path}`", call.who, call.summary, _body(call.request), _body(call.response)]
        for call, _ in CALLS
    ]
    return table(["Call", "Who", "What", "Body", "Answer"], rows)


def _body(kind: Any) -> str:
    return "" if kind is None else type_name(kind)


BASES = (messages.Message, messages.Response)


def message_table() -> str:
    """Every message with its fields; `...` where readers ignore unknown ones."""
    rows = []
    for name, kind in sorted(vars(messages).items()):
        if isinstance(kind, type) and issubclass(kind, messages.Message) and kind not in BASES:
            fields = [f"`{field.encode_name}`" for field in msgspec.structs.fields(kind)]
            rows.append([name, ", ".join([*fields, "..."] if issubclass(kind, messages.Response) else fields)])
    return table(["Message", "Fields"], rows)


def constant_table() -> str:
    """Numbers that are never configurable."""
    rows = []
    for doc, together in itertools.groupby(field_docs(constants)[""].items(), lambda item: item[1]):
        names = [name for name, _ in together]
        values = [getattr(constants, name) for name in names]
        shown = [f"{v:,}" if isinstance(v, int | float) else _as_text(v) for v in values]
        rows.append([", ".join(f"`{name}`" for name in names), "; ".join(shown), doc])
    return table(["Constant", "Value", "Meaning"], rows)


def _as_text(value: bytes | str | tuple[str, ...]) -> str:
    return ", ".join(value) if isinstance(value, tuple) else value.decode() if isinstance(value, bytes) else value


def event_fields() -> str:
    """The fields of each kind of event."""
    rows = [[f"`{name}`", ", ".join(f"`{field}`" for field in kind.__struct_fields__)] for name, kind in KINDS.items()]
    return table(["Kind", "Fields of `body`"], rows)


def vectors() -> str:
    """Test vectors of seeds, noise and signatures: an implementation that gives these agrees with ours."""
    seed = bytes(range(32))
    links = seed_chain.SecretChain(seed, SLOT_CHAIN).links()
    slot = seed_chain.slot_seed("00" * 16, 3, "11" * 32, links[4], 7)
    sample = seed_chain.sample_seed(slot, 2)
    made = {name: family([sample], np.array([5]), 64)[0] for name, family in noise.NOISES.items()}
    two = [task_draws.EnvDraw("0", 1.0, 100), task_draws.EnvDraw("1", 3.0, 100)]
    key = signing.Key(seed)
    line = signing.RequestLine("POST", "/v1/leases")
    signed = signing.sign_request(
        key,
        line,
        encoding.digest(b"{}"),
        created=1_700_000_000,
        nonce="nonce-of-16-byte",
        sender=signing.SenderState("00" * 16),
    )
    named = {
        "secret": seed.hex(),
        "end of the chain `chain/slots`, link(-1)": links[0].hex(),
        "link(3)": links[4].hex(),
        "slot seed: run `00` x 16, version 3, root `11` x 32, link(3), slot 7": slot.hex(),
        "task of that slot among environments of weight 1 and 3 with 100 tasks each":
            "environment {}, task {}".format(*task_draws.draw_task(slot, two)),
        "sample seed, index 2": sample.hex(),
        "row seed of that, row 1": seed_chain.row_seed(sample, 1).hex(),
        **{
            f"noise `{name}` at position 5, vocabulary entries 0 to 3": ", ".join(f"{value:.6f}" for value in values[:4])
            for name, values in made.items()
        },
        "noise `philox` at position 5, vocabulary entry 63": f"{made[noise.PHILOX][63]:.6f}",
        "merkle root of the leaves `a`, `b`, `c`": encoding.merkle_root([b"a", b"b", b"c"]).hex(),
        "public key of the Ed25519 key with the secret above": key.public,
        "its signature for the purpose `receipt` over `shoal`": key.sign("receipt", b"shoal"),
        "hash of the event with the stored bytes `{}`": event_hash(b"{}"),
    }  # fmt: skip
    headers = "\n".join(f"{name}: {value}" for name, value in signed.items())
    request = f"POST /v1/leases, body `{{}}`, signed by that key:\n\n```http\n{headers}\n```"
    return table(["What", "Value"], [[name, f"`{value}`"] for name, value in named.items()]) + f"\n\n{request}"


def prometheus_table() -> str:
    """Every metric of the Prometheus page: those of the run, then those of the newest step."""
    run = [
        [f"`{prometheus.PREFIX}{name}`", metric.kind, labels(metric), metric.sentence]
        for name, metric in prometheus.WATCHED.items()
    ]
    of_step = [
        [f"`{prometheus.PREFIX}{metric.name}`", f"`{name}`", labels(metric.watched)]
        for name, metric in prometheus.step_metrics().items()
    ]
    of_run = table(["Metric", "Type", "Labels", "Meaning"], run)
    return f"{of_run}\n\nGauges of the newest training step:\n\n{table(['Metric', 'Of', 'Labels'], of_step)}"


def labels(metric: prometheus.MetricSpec) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels)


def metric_table() -> str:
    """Every metric of metrics.jsonl."""
    return table(
        ["Metric", "Unit", "Meaning"], [[f"`{n}`", m.unit, m.sentence] for n, m in step_metrics.METRICS.items()]
    )


def alarm_table() -> str:
    """Every alarm: what it says, what its monitor looks at, and how often it must find something."""
    rows = []
    for cause, sentence in CAUSES.items():
        looks = [f"{one.found} of {one.of}" for one in (MONITORS.get(cause),) if one is not None]
        looks += [f"{one.found} of {one.of} looks" for one in (BETWEEN.get(cause),) if one is not None]
        clears = [str(one.clear) for one in (MONITORS.get(cause), BETWEEN.get(cause)) if one is not None]
        rows.append([f"`{cause}`", f"{sentence[0].upper()}{sentence[1:]}.", ", ".join(looks), ", ".join(clears)])
    return table(["Alarm", "What it says", "Steps that raise it", "Steps that clear it"], rows)


def limit_table() -> str:
    """Every limit of the monitors with its reason."""
    rows = [[f'`"{name}"`', f"{one.value:g}", one.unit, f"{one.reason}."] for name, one in LIMITS.items()]
    return table(["Limit", "Value", "Unit", "Meaning and reason"], rows)


def check_table() -> str:
    """Every check of a group, in order, from its docstring."""
    rows = []
    for stage, checks in {"model-free": MODEL_FREE, "audit": AUDIT}.items():
        for check in checks:
            doc = (inspect.getdoc(check.run) or "").split("\n\n")[1]
            catches, cannot, severity = re.split(r"\n(?=Cannot |Hard|Soft)", doc)
            texts = [" ".join(text.split()) for text in (severity, catches, cannot)]
            rows.append([f"`{check.name}`", stage, *texts])
    return table(["Check", "Stage", "Severity, and why", "Catches", "Cannot"], rows)


def check_demands() -> str:
    """What each check demands: the first sentence of its docstring, after its title."""
    docs = {check.name: one_line(inspect.getdoc(check.run)) for check in (*MODEL_FREE, *AUDIT)}
    return table(["Check", "Demands"], [[f"`{name}`", doc.partition(": ")[2]] for name, doc in docs.items()])


def cheat_table() -> str:
    """The cheats of the demo's cheating worker, in the order in which they are used."""
    return table(["Cheat", "What it does"], [[f"`{n}`", one_line(c.__doc__)] for n, c in dishonest.CHEATS.items()])


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "run file": ("docs/reference/run-file.md", run_file_tables),
    "sft recipe": ("docs/reference/run-file.md", sft_table),
    "stages file": ("docs/reference/run-file.md", stages_tables),
    "environment arguments": ("docs/reference/run-file.md", env_tables),
    "commands": ("docs/reference/cli.md", cli_sections),
    "calls": ("docs/reference/protocol.md", call_table),
    "messages": ("docs/reference/protocol.md", message_table),
    "constants": ("docs/reference/protocol.md", constant_table),
    "event fields": ("docs/reference/protocol.md", event_fields),
    "vectors": ("docs/reference/protocol.md", vectors),
    "python": ("docs/reference/python.md", python_reference),
    "metrics": ("docs/reference/metrics.md", metric_table),
    "prometheus": ("docs/reference/metrics.md", prometheus_table),
    "alarms": ("docs/reference/alarms.md", alarm_table),
    "limits": ("docs/reference/alarms.md", limit_table),
    "checks": ("docs/design/trust.md", check_table),
    "what checks demand": ("docs/explanation/trust.md", check_demands),
    "cheats": ("docs/design/trust.md", cheat_table),
}
"""Page and maker of each generated table, by the name in its marker."""


def split_at_table(page: Path, name: str) -> tuple[str, str, str]:
    """A page before, inside and after a generated table."""
    before, mark, rest = page.read_text().partition(f"<!-- generated: {name} -->\n")
    inside, end, after = rest.partition("\n<!-- end of generated -->")
    assert mark and end, f"{page_id(page)} has no table {name!r}"
    return before + mark, inside, end + after


def write_tables() -> None:
    """Put every generated table anew into its page."""
    for name, (page, make) in TABLES.items():
        before, _, after = split_at_table(ROOT / page, name)
        (ROOT / page).write_text(before + make() + after)


# --- what is listed is complete ---


@pytest.mark.parametrize("name", TABLES)
def test_generated_tables_match_the_source(name: str) -> None:
    page, make = TABLES[name]
    assert split_at_table(ROOT / page, name)[1] == make(), "run: python -m tests.test_docs --write"


def test_every_key_is_documented_with_a_meaning() -> None:
    text = (REFERENCE / "run-file.md").read_text()
    keys = [*all_keys(config.RunConfig), *all_keys(config.SftConfig)]
    sections = {key.rpartition(".")[0] for key in keys} | {"policy.tiny"}
    wanted = {key for key in keys if key not in sections and not key.startswith("env.")}
    assert [key for key in wanted if f"| `{key}` |" not in text] == []
    assert not re.search(r"\| +\| (yes|no) \|$", text, re.MULTILINE), "a key has no sentence in shoal/config/"


def test_every_command_is_documented() -> None:
    text = (REFERENCE / "cli.md").read_text()
    assert [name for name, _ in leaf_parsers(main.parser()) if f"## {name}\n" not in text] == []


def test_every_kind_of_event_says_when_it_is_written() -> None:
    section = (REFERENCE / "protocol.md").read_text().partition("\n## The log\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \| [A-Z]", section, re.MULTILINE)) == set(KINDS)


def test_every_code_of_a_refusal_is_documented() -> None:
    section = (REFERENCE / "protocol.md").read_text().partition("\n## Refusals\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert refusal_codes() == documented


def refusal_codes() -> set[str]:
    """Every word with which a request is refused, wherever in the source."""
    codes, refusals = set[str](), ("Refused", "RequestRefused", "SignatureError")
    for file in (ROOT / "shoal").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in refusals:
                words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                codes.update(word for word in words[:1] if re.fullmatch(r"[a-z_]+", word))
    return codes


def test_every_path_of_the_run_folder_and_every_key_of_the_summary_is_documented() -> None:
    text = (REFERENCE / "files.md").read_text()
    paths = [path.name for path in vars(RunFolder(Path("run"))).values() if path != Path("run")]
    source = (ROOT / "shoal" / "launch" / "summary.py").read_text()
    keys = re.findall(r'^        "(\w+)":', source.partition("summary = {")[2].partition("\n    }")[0], re.MULTILINE)
    assert len(keys) > 8
    assert [name for name in [*paths, *keys] if f"`{name}" not in text] == []


def test_every_listed_word_is_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    assert [word for word in WORDS if f"\n**{word}**" not in glossary] == []


def test_every_page_can_be_reached_from_the_index() -> None:
    """Those on the design from an index of their own."""
    docs, design = ROOT / "docs", ROOT / "docs" / "design"
    for page in docs.rglob("*.md"):
        if page not in (docs / "index.md", design / "README.md"):
            index = design / "README.md" if design in page.parents else docs / "index.md"
            assert f"({page.relative_to(index.parent).as_posix()})" in index.read_text(), f"{page} is not in {index}"
    assert "(design/README.md)" in (docs / "index.md").read_text()


# --- what is said stands in one place ---

LONG = 120
"""Characters from which a paragraph that stands on two pages is a text that somebody must keep up twice."""

_GENERATED = re.compile(
    r"<!-- generated: .*?<!-- end of generated -->|<!-- figures: .*?<!-- end of figures -->", re.DOTALL
)
_PICTURE = re.compile(r"!\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def long_paragraphs(text: str) -> set[str]:
    """Paragraphs, list items and rows of a page as plain words, without code, generated tables and targets of links."""
    text = _GENERATED.sub("", _FENCE.sub("\n\n", text))
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    parts = re.split(r"\n\s*\n|\n(?=[-|*] |\d+\. )", text)
    return {plain for part in parts if len(plain := " ".join(re.findall(r"\w+", part.lower()))) > LONG}


def said_twice(texts: dict[str, str]) -> list[str]:
    """The beginning of each long paragraph that is on two of these pages, with their names."""
    pages: dict[str, list[str]] = {}
    for name, text in texts.items():
        for paragraph in long_paragraphs(text):
            pages.setdefault(paragraph, []).append(name)
    return sorted(f"{' and '.join(names)}: {paragraph[:80]}" for paragraph, names in pages.items() if len(names) > 1)


def test_no_long_paragraph_stands_on_two_pages() -> None:
    texts = {page_id(page): page.read_text() for page in [*PAGES, ROOT / "benchmarks" / "README.md"]}
    assert said_twice(texts) == [], "keep the better one, and let the other page link to it"


def test_a_paragraph_with_other_links_and_line_ends_is_found_twice() -> None:
    words = "Nobody should have to change the same sentence in two places, because one of them will be forgotten "
    one, other = (f"# A\n\n{words}[some{end}day](a.md), and then two pages disagree about it.\n" for end in (" ", "\n"))
    assert [line.partition(":")[0] for line in said_twice({"a.md": one, "b.md": other})] == ["a.md and b.md"]
    assert said_twice({"a.md": one, "b.md": "Short ones may."}) == []


def test_the_readme_begins_with_a_sentence_a_picture_and_commands_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    title, sentence, picture, shown = [block.splitlines() for block in text.split("\n\n")][:4]
    assert title == ["# shoal"] and "\n".join(sentence).count(". ") == 0 and picture[0].startswith("![")
    assert shown[0] == "```console" and "$ make demo" in shown
    assert len(text.splitlines()) <= 90


def test_each_picture_stands_on_one_page() -> None:
    shown: dict[Path, list[str]] = {}
    for page in PAGES:
        for target in set(_PICTURE.findall(prose(page))):
            shown.setdefault((page.parent / target).resolve(), []).append(page_id(page))
    shared = {picture.name: pages for picture, pages in shown.items() if len(pages) > 1}
    assert shared == {}


# --- what is linked is there, what is typed works ---


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_has_a_target(page: Path) -> None:
    broken = []
    for target in _LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if target.startswith(("http://", "https://")):
            continue
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_shown_parse(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for fence in fences(page):
        for command, _ in commands(fence) if fence.info.startswith("console") else ():
            words = arguments(command)
            if words[:1] == ["shoal"] and words[1:] not in (["--help"], ["--version"]) and "--help" not in words:
                parsed = main.parser().parse_args(words[1:])
                recipe = getattr(parsed, "recipe", None)
                assert recipe is None or recipe.parts[0] != "recipes" or (ROOT / recipe).is_file(), command
            elif words[:1] == ["make"]:
                assert words[1] in targets, command


def test_hosting_shown_passes_the_checks_of_its_run_file() -> None:
    consoles = [fence for page in PAGES for fence in fences(page) if fence.info.startswith("console")]
    shown = [arguments(command) for fence in consoles for command, _ in commands(fence)]
    hosted = [words for words in shown if words[:2] == ["shoal", "host"] and (ROOT / words[2]).is_file()]
    assert hosted, "no page shows `shoal host` with a run file of the tree"
    for words in hosted:
        parsed = main.parser().parse_args(words[1:])
        assert config.load_run(ROOT / parsed.recipe, host_overrides(parsed)).host.port == (parsed.port or 0), words


@functools.cache
def named_files(page: Path) -> dict[str, str]:
    """The files whose whole text a page shows, by name."""
    blocks = [(fence.info.split(), fence.text) for fence in fences(page)]
    return {
        info[1]: text for info, text in blocks if len(info) == 2 and info[0] in ("python", "toml") and info[1] != "run"
    }


def run_files(page: Path) -> list[str]:
    return [name for name in named_files(page) if name.endswith(".toml")]


@pytest.mark.parametrize("page", [page for page in PAGES if run_files(page)], ids=page_id)
def test_run_files_shown_load(page: Path, tmp_path: Path) -> None:
    for name, text in named_files(page).items():
        (tmp_path / name).write_text(text)
    for name in run_files(page):
        load = config.load_sft if "[env]" in named_files(page)[name] else config.load_run
        assert load(tmp_path / name)


def test_own_environment_fits_on_a_screen() -> None:
    [text] = [t for n, t in named_files(ROOT / "docs/how-to/own-environment.md").items() if n.endswith(".py")]
    assert len(text.splitlines()) <= 40


def test_the_wrapped_reward_function_gives_rewards_within_bounds_of_its_own(tmp_path: Path) -> None:
    page, found = ROOT / "docs/how-to/coming-from.md", dict[str, Any]()
    (tmp_path / "sums.jsonl").write_text(next(fence.text for fence in fences(page) if fence.info == "json"))
    exec(named_files(page)["wrapped_env.py"], found)
    env = found["environment"](tmp_path / "sums.jsonl")
    low, high = vars(type(env))["reward_bounds"]
    task = env.task(0)
    assert [env.score((task, answer)) for answer in (str(task["answer"]), "none")] == [high, low]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as after a first run: recipes, environments, and runs/wordle with a begun log and a tiny checkpoint."""
    from shoal.models.random_model import make_tiny

    place = tmp_path_factory.mktemp("docs")
    for name in ("recipes", "examples"):
        (place / name).symlink_to(ROOT / name)
    tiny = config.TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32, max_positions=128)
    tree = {"name": "wordle", "steps": 2, "seed": 1, "envs": [{"name": "wordle"}], "sampling": {"max_tokens": 128}}
    run = from_tree(tree, config.RunConfig, "test")
    folder = RunFolder(place / "runs" / "wordle")
    folder.prepare(run, place)
    open_run(folder, folder.config()).log_writer.store.close()
    make_tiny(tiny, folder.checkpoints / "final", seed=1, dtype="float32")
    return place


def is_run(page: Path) -> bool:
    return any(fence.info == "console run" for fence in fences(page))


@pytest.mark.parametrize("page", [page for page in PAGES if is_run(page)], ids=page_id)
def test_runnable_commands_do_what_the_page_shows(
    page: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scratch)
    monkeypatch.setenv("SHOAL_HOME", str(scratch / "home"))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # other processes need theirs
    for name, text in named_files(page).items():
        Path(name).write_text(text)
    for fence in fences(page):
        for command, shown in commands(fence) if fence.info == "console run" else ():
            words = arguments(command)
            assert words[0] == "shoal", f"only shoal is run here, not: {command}"
            code = run_shoal(words[1:])
            output = capsys.readouterr().out
            assert code == 0, f"{command}\n{output}"
            missing = lines_missing(shown, output)
            assert not missing, f"{command} does not print {missing!r}:\n{output}"


def run_shoal(words: list[str]) -> int:
    try:
        return main.main(words)
    except SystemExit as end:  # help
        return int(end.code or 0)


def lines_missing(shown: list[str], output: str) -> str:
    """The first line shown that does not come, in order; "" when all do. `...` stands for anything."""
    left = iter(line.rstrip() for line in output.splitlines())
    for line in shown:
        pattern = re.compile(re.escape(line.rstrip()).replace(re.escape("..."), ".*"))
        if line.strip() not in ("", "...") and not any(pattern.fullmatch(found) for found in left):
            return line
    return ""


if __name__ == "__main__":
    os.chdir(ROOT)
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write_tables()

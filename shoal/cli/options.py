"""Options that several commands have, their types, and the setting of a command's process."""

import argparse
import json
import logging
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

from shoal.errors import EXIT_USER_ERROR, ShoalError, no_torch
from shoal.launch.log_rotation import formatter, named_log
from shoal.models.device import AUTO, DEVICES
from shoal.protocol.constants import VLLM
from shoal.terminal import command


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line with the nearest known word, and ends with what to type for help."""

    _words: Sequence[str] = ()
    """What it was given."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:  # else the parser of all commands would say so, and name its own help
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            import difflib

            listed = [one.dest for one in getattr(action, "_choices_actions", ())]  # of commands, those that help shows
            known = listed or [str(one) for one in action.choices]
            near = difflib.get_close_matches(str(value), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")

    def error(self, message: str) -> NoReturn:
        import difflib

        options = [one for action in self._actions for one in action.option_strings]
        for word in (word.partition("=")[0] for word in self._words if word.startswith("--")):
            near = difflib.get_close_matches(word, options, n=1)
            if near and not any(option.startswith(word) for option in options):
                message += f"; did you mean {near[0]}?"
                break
        end = "" if message.endswith("?") else "."
        self.exit(EXIT_USER_ERROR, f"error: {message}{end} See: {command(*self.prog.split()[1:], '--help')}\n")


def add_command(
    commands: Any, name: str, action: Callable[[argparse.Namespace], Any], short: str, what_you_get: str,
    *examples: tuple[str, str],
) -> argparse.ArgumentParser:  # fmt: skip
    """A command that does `action`; `examples` are (command, note)."""
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        help=short,
        description=f"{_sentence(short)}\n\n{textwrap.fill(what_you_get, 78)}".strip(),
        epilog=told(*examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(act=action)
    return made


def add_group(commands: Any, name: str, short: str) -> Any:
    """A command with commands of its own: add these to what is returned."""
    made = commands.add_parser(name, help=short, description=_sentence(short))
    return made.add_subparsers(dest=f"{name}_command", required=True, metavar="COMMAND", parser_class=Parser)


def _sentence(short: str) -> str:
    return short[0].upper() + short[1:] + ("" if short.endswith("?") else ".")


def told(*examples: tuple[str, str]) -> str:
    """The examples at the end of a help text: (command, note) each."""
    return "examples:\n" + "\n".join(f"  {line}" + (f"\n      {note}" if note else "") for line, note in examples)


def run_file_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("recipe", type=Path, metavar="RECIPE", help="a run file, such as recipes/wordle.toml")
    p.add_argument("--quick", action="store_true", help="use the run file's [quick] values, for a short run")
    random_policy_argument(p)
    p.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/NAME)")
    set_argument(p)


def random_policy_argument(p: argparse.ArgumentParser) -> None:
    help_text = "with random weights of the model's shape instead of the model: the run file's [random] values"
    p.add_argument("--random-policy", action="store_true", help=help_text)


def source_argument(p: argparse.ArgumentParser, name: str = "source") -> None:
    help_text = "a run's folder, or its URL, such as http://host:8470"
    p.add_argument(name, metavar="RUN_DIR_OR_URL", type=run_source, help=help_text)
    proxy_argument(p)


def run_source(text: str) -> str:
    """A run's folder or URL as typed; HOST:PORT that is no folder is taken as its URL."""
    is_address = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):\d{1,5}/?", text) is not None
    return f"http://{text}" if is_address and not Path(text).exists() else text


def set_argument(p: argparse.ArgumentParser, file: str = "run file", example: str = "workers.count=3") -> None:
    help_text = f"override a key of the {file}, such as {example}; may be repeated"
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help_text)


def threads_argument(p: argparse.ArgumentParser, default: str = "all") -> None:
    p.add_argument("--threads", type=positive, metavar="N", help=f"CPU threads (default: {default})")


def device_argument(p: argparse.ArgumentParser) -> None:
    help_text = (
        "what computes: the CPU, a GPU with CUDA, or the GPU of a Mac; auto takes CUDA if it is there (default: auto)"
    )
    p.add_argument("--device", choices=DEVICES, default=AUTO, help=help_text)


def engine_argument(p: argparse.ArgumentParser) -> None:
    help_text = (
        "what samples: vllm, if it is installed and the run has bounds for it (default: what the run's policy needs)"
    )
    p.add_argument("--engine", choices=(VLLM,), default="", help=help_text)


def env_arguments(p: argparse.ArgumentParser, name: str) -> None:
    """The environment, as an argument or, where a run may name it, as an option; and its arguments."""
    optional = {"default": ""} if name.startswith("-") else {}
    of_run = ", or a label of the run's or recipe's (default: all of them)" if optional else ""
    help_text = f"a built-in environment, a .py file or a package{of_run}"
    p.add_argument(name, metavar="NAME_OR_FILE", help=help_text, **optional)  # type: ignore[arg-type]
    help_text = "its arguments, such as '{\"digits\": 2}'"
    p.add_argument("--env-args", type=_table, default={}, metavar="JSON", help=help_text)


def whole(low: int, high: int, what: str = "a number") -> Callable[[str], int]:
    """The type of a whole number in a range."""

    def read(text: str) -> int:
        found = int(text) if text.isdecimal() and len(text) < 20 else low - 1
        if not low <= found <= high:
            limits = f"from {low} to {high}" if high < MAX_WHOLE else f"above {low - 1}"
            raise argparse.ArgumentTypeError(f"{text[:40]} is not {what}, which is a whole number {limits}")
        return found

    return read


def number(low: float, high: float, what: str = "", *, above: bool = False) -> Callable[[str], float]:
    """The type of a number in a range. `above`: `low` is no part of it."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not low <= found <= high or (above and found == low):
            limits = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text[:40]} is not {what and f'{what}, which is '}a number {limits}")
        return found

    return read


MAX_WHOLE = 10**15

positive = whole(1, MAX_WHOLE)
share = number(0.0, 1.0, "a share", above=True)
port = whole(0, 65535, "a port")


def reachable_url(text: str) -> str:
    """Where others reach a node; empty: where it calls from."""
    if not text:
        return ""
    from shoal.errors import PeerError
    from shoal.net.urls import checked_url

    try:
        return str(checked_url(text))
    except PeerError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def url_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("url", metavar="URL", help="where the run is hosted, such as http://host:8470: its host tells you")
    proxy_argument(p)


def proxy_argument(p: argparse.ArgumentParser) -> None:
    """Read by `cli`, before the command runs."""
    p.add_argument(
        "--proxy", default="", metavar="URL",
        help="call a URL through this forward proxy, http://[USER:PASSWORD@]HOST:PORT; env takes what HTTPS_PROXY, "
        "HTTP_PROXY and NO_PROXY name",
    )  # fmt: skip


def _table(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object such as '{{\"digits\": 2}}'")
    return found


def cores() -> int:
    return os.cpu_count() or 1


def demand_torch() -> None:
    """Raises `ShoalError` on a machine without torch, before anything is sent or written."""
    if find_spec("torch") is None:
        raise ShoalError(no_torch())


def log_to_stderr(role: str = "", form: Literal["text", "json"] = "text", into: Path | None = None) -> None:
    """Log to standard error: of a `role` of a run into its file, which is kept, else for a person who looks on. A log that
    cannot be written stops nothing. `into`: also into this file, with `role` as who writes. Raises `ConfigError`."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(role if into is None else "", form))
    handlers = [handler] if into is None else [handler, named_log(into, role)]
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    logging.getLogger("httpx").setLevel(logging.WARNING)

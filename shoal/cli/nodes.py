"""`shoal join`, `validate`, `relay` and `train`: a role that a person starts, for a run that is hosted here or elsewhere;
and `shoal node`, which pauses one.

They read the options and hand over to a role, which is imported when its command runs: help needs no torch.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.install_consent import packages_of
from shoal.cli.options import (
    add_command,
    cores,
    demand_torch,
    device_argument,
    engine_argument,
    log_to_stderr,
    port,
    positive,
    reachable_url,
    share,
    threads_argument,
    url_argument,
)
from shoal.errors import ConfigError
from shoal.terminal import say

if TYPE_CHECKING:
    from shoal.config.role_options import NodeOptions

NICE = 10
"""Priority of a worker that shall not take the whole CPU: what the user does comes first."""


def add_commands(commands: Any) -> None:
    _add_worker(commands)
    _add_others(commands)


def _add_worker(commands: Any) -> None:
    p = add_command(
        commands, "join", join, "work for somebody's run",
        "Needs only the URL: it calls the host and works behind NAT. The first start makes a key and keeps it in "
        "~/.shoal (or $SHOAL_HOME): credits belong to it. Shows the run that you help, and what was accepted, what was "
        "refused and why. p pauses and resumes: a paused worker finishes what it holds, and takes no lease. Ctrl-C "
        "finishes the work in hand and leaves.",
        ("shoal join http://host:8470", "all cores"),
        ("shoal join https://shoal.example.org --threads 2 --max-memory 1000", "two cores, at most 1000 MB"),
        ("shoal join https://shoal.example.org --hours 22-7 --cpu-share 0.5", "at night, half of the CPU"),
        ("shoal join https://shoal.example.org --engine vllm --device cuda", "a GPU, with vLLM"),
    )  # fmt: skip
    url_argument(p)
    threads_argument(p, "all, or those of --cpu-share")
    p.add_argument(
        "--hours", default="", metavar="FROM-TO",
        help="take leases only at these hours of this machine's time, such as 22-7 or 12-13,18-8:30",
    )  # fmt: skip
    p.add_argument(
        "--cpu-share", type=share, default=1.0, metavar="SHARE",
        help="at most this share of the CPU of this machine, such as 0.5: fewer threads, low priority, and pauses between "
        "two computations. It does not limit a GPU",
    )  # fmt: skip
    device_argument(p)
    engine_argument(p)
    _add_limits(p)
    _add_sharing(p)
    p.add_argument("--name", default="", help="this worker's name in the host's table (default: this machine's name)")
    p.add_argument("--home", type=Path, metavar="DIR", help="where key and weights are kept (default: ~/.shoal)")
    _add_log(p)
    p = add_command(
        commands, "node", node, "pause or resume your worker",
        "A paused worker finishes and sends what it holds, and takes no lease until you resume it, so nothing lapses and "
        "no credits are lost. The same as the key p in its terminal, or as SIGUSR1 (pause) and SIGUSR2 (resume).",
        ("shoal node pause", "the worker whose key is in ~/.shoal"),
        ("shoal node resume --home /srv/shoal", "one with another folder"),
    )  # fmt: skip
    p.add_argument("action", choices=("pause", "resume"))
    p.add_argument("--home", type=Path, metavar="DIR", help="the worker's folder (default: ~/.shoal)")


def _add_others(commands: Any) -> None:
    p = add_command(
        commands, "validate", validate, "judge rollouts for a run",
        "Recomputes what workers claim. The host must admit this machine's key first: it prints the key, says what the "
        "host types, and waits. Shows what it accepted and refused, by which checks, and what share it audited.",
        ("shoal validate http://host:8470", ""),
    )  # fmt: skip
    url_argument(p)
    threads_argument(p)
    device_argument(p)
    _add_limits(p)
    _add_sharing(p)
    p.add_argument(
        "--name", default="", help="this validator's name in the host's table (default: this machine's name)"
    )
    p.add_argument("--home", type=Path, metavar="DIR", help="where key and weights are kept (default: ~/.shoal)")
    _add_log(p)
    p = add_command(
        commands, "relay", relay, "serve the weights of a run to its workers",
        "Fetches each version and serves its chunks as they come, so that the host's uplink limits the run less. It needs "
        "no torch, runs no code of the run and earns nothing. Others must reach this machine: the coordinator tries, and "
        "then tells workers your address, which everyone can see. Ctrl-C ends it; what it has stays on disk.",
        ("shoal relay https://shoal.example.org", "others reach it at port 8480 of this machine"),
        ("shoal relay https://shoal.example.org --port 9000 --public-url https://relay.example.net",
         "behind a proxy with TLS"),
    )  # fmt: skip
    url_argument(p)
    p.add_argument("--bind", default="0.0.0.0", metavar="ADDRESS", help="address to listen on (default: 0.0.0.0)")
    p.add_argument(
        "--port", type=port, default=8480, metavar="N", help="port to listen on (default: 8480); 0 takes a free one"
    )
    p.add_argument(
        "--public-url", type=reachable_url, default="", metavar="URL",
        help="where clients reach it (default: http, at --port of the address from which it calls the host)",
    )  # fmt: skip
    p.add_argument(
        "--max-disk", type=positive, default=0, metavar="MB",
        help="keep no more chunks than this (default: half of what is free or already holds chunks)",
    )  # fmt: skip
    p.add_argument("--home", type=Path, metavar="DIR", help="where key and chunks are kept (default: ~/.shoal/relay)")
    _add_log(p)
    p = add_command(
        commands, "train", train, "start only the trainer of a run",
        "Turns batches into policy versions. `shoal run` and `shoal host` start it by themselves; type this if the trainer "
        "is to run apart from them. It needs the run's folder, which holds its key and its state.",
        ("shoal train http://127.0.0.1:8470 --run-dir runs/wordle", ""),
    )  # fmt: skip
    url_argument(p)
    p.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run's folder")


def _add_log(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--log", type=Path, metavar="FILE",
        help="also append the log to this file, with dates; as JSON, one object a line, if its name ends in .jsonl. "
        "At 10 MB its text moves to FILE.1, and from there to FILE.2",
    )  # fmt: skip


def _add_limits(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--max-memory", type=positive, default=0, metavar="MB",
        help="leave the run before work that needs more memory than this (default: half of what is free)",
    )  # fmt: skip
    p.add_argument(
        "--max-disk", type=positive, default=0, metavar="MB",
        help="keep no more weights and evidence than this on disk (default: half of what is free or already holds weights)",
    )  # fmt: skip


def _add_sharing(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--share", action="store_true",
        help="serve the weights that you have to others. Everyone can then see this machine's address. Used only if the "
        "coordinator reaches it from outside",
    )  # fmt: skip
    p.add_argument("--share-port", type=port, default=8481, metavar="N", help="port for --share (default: 8481)")
    p.add_argument(
        "--share-url", type=reachable_url, default="", metavar="URL",
        help="where others reach it, such as at a port that your router forwards (default: http, at --share-port of the "
        "address from which it calls the host)",
    )  # fmt: skip


def join(args: argparse.Namespace) -> None:
    demand_torch()
    from rich.console import Console

    from shoal.launch.run_lock import name_worker, on_pause_signals
    from shoal.roles.node.lifecycle import Node, run_role
    from shoal.roles.node.throttle import Allowance, Hours
    from shoal.roles.worker.worker import Worker
    from shoal.views.terminal.node_view import NodeView, shown

    _log(args, "worker")
    allowance = Allowance(Hours.parse(args.hours) if args.hours else None, args.cpu_share)
    threads = args.threads or (allowance.threads() if args.cpu_share < 1 else cores())
    if args.cpu_share < 1:
        os.nice(NICE)
    with on_pause_signals(allowance.pause, allowance.resume), _home(args) as (home, lock_fd):
        name_worker(lock_fd)
        options = _options(args, home, threads, engine=args.engine)
        node = Node.open(options, packages_of(args.url), _share(args), allowance)
        with shown(NodeView("worker", args.url, node.activity, allowance), Console(stderr=True)):
            run_role(Worker(node))


def node(args: argparse.Namespace) -> None:
    from shoal.config import node_home
    from shoal.launch.run_lock import signal_worker

    say(signal_worker(args.home or node_home(), args.action))


def validate(args: argparse.Namespace) -> None:
    demand_torch()
    from rich.console import Console

    from shoal.roles.node.lifecycle import Node, run_role
    from shoal.roles.validator import Validator
    from shoal.views.terminal.node_view import NodeView, shown

    _log(args, "validator")
    with _home(args) as (home, _):
        node = Node.open(_options(args, home, args.threads or cores()), packages_of(args.url), _share(args))
        with shown(NodeView("validator", args.url, node.activity), Console(stderr=True)):
            run_role(Validator(node))


def _options(args: argparse.Namespace, home: Path, threads: int, engine: str = "") -> "NodeOptions":
    from shoal.config.role_options import NodeOptions

    return NodeOptions(
        url=args.url, home=str(home), name=args.name, threads=threads, device=args.device, engine=engine,
        max_memory_mb=args.max_memory, max_disk_mb=args.max_disk,
    )  # fmt: skip


def _log(args: argparse.Namespace, role: str) -> None:
    """Log to standard error, and into the file of --log."""
    log_to_stderr(role if args.log else "", into=args.log)


def _share(args: argparse.Namespace) -> tuple[int, str] | None:
    """Port and URL at which the node serves its weights; None if it does not."""
    if args.share_url and not args.share:
        raise ConfigError("--share-url says where others reach what you share: add --share, or leave it out")
    return (args.share_port, args.share_url) if args.share else None


@contextlib.contextmanager
def _home(args: argparse.Namespace) -> Iterator[tuple[Path, int]]:
    """The folder of the node's key and weights, for this process alone: two with one key would end each other's leases.
    With it comes the descriptor of its lock."""
    from shoal.config import node_home, set_node_home
    from shoal.launch.run_lock import locked

    home = args.home or node_home()
    with locked(home, "give this node another folder with --home") as lock_fd:  # guard: one-node-in-a-home
        set_node_home(home)  # what it installs, and what decides that, is there, too
        yield home, lock_fd


def relay(args: argparse.Namespace) -> None:
    from shoal.config import node_home
    from shoal.launch.run_lock import locked
    from shoal.roles.relay.relay import main

    _log(args, "relay")
    home = args.home or node_home() / "relay"
    with locked(home, "give this relay another folder with --home"):
        main(args.url, home, args.bind, args.port, args.public_url, args.max_disk)


def train(args: argparse.Namespace) -> None:
    from shoal.roles import trainer

    log_to_stderr()
    trainer.main(args.run_dir, args.url)

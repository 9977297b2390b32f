"""`shoal run`, `host` and `admin`: what a run's host types.

They prepare the run's folder and start the launcher, or sign a request to a running coordinator. Heavy modules are imported
when a command runs, so that help is quick on a machine without torch.
"""

import argparse
import contextlib
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import add_command, demand_torch, port, run_file_arguments, source_argument
from shoal.protocol.constants import ADMIN_ACTIONS
from shoal.terminal import say

if TYPE_CHECKING:
    from shoal.config import RunConfig


def add_commands(commands: Any) -> None:
    p = add_command(
        commands, "run", run, "a whole run on this machine",
        "Starts coordinator, trainer, validators and workers, and shows progress. You get a folder (runs/NAME) "
        "with checkpoints, the log, metrics.jsonl and summary.json. Ctrl-C stops cleanly; the same command resumes.",
        ("shoal run recipes/wordle.toml", "the demo"),
        ("shoal run recipes/wordle.toml --quick", "the recipe's two-minute version"),
        ("shoal run recipes/arithmetic.toml --set workers.count=3 --out runs/three", "another number of workers"),
        ("shoal run recipes/qwen3-0.6b-gsm8k.toml --random-policy", "without the model: random weights of its shape"),
    )  # fmt: skip
    run_file_arguments(p)
    p = add_command(
        commands, "host", host, "host a run that others join",
        "Like `run`, but without workers of its own: prints the command that contributors type. Listens on 127.0.0.1 "
        "unless --bind gives another address. Without TLS, it says how to add it.",
        ("shoal host recipes/wordle.toml", "for workers on this machine"),
        ("shoal host recipes/wordle.toml --bind 0.0.0.0", "for your network"),
        ("shoal host RECIPE --port 8470 --public-url https://shoal.example.org", "behind a TLS proxy"),
    )  # fmt: skip
    run_file_arguments(p)
    p.add_argument("--bind", metavar="ADDRESS", help="address to listen on (host.bind)")
    p.add_argument("--port", type=port, metavar="N", help="port to listen on (host.port); 0 takes a free one")
    p.add_argument(
        "--public-url", metavar="URL", help="the URL that others type, if a proxy is in front (host.public_url)"
    )
    p.add_argument(
        "--root", default="", metavar="FILE_OR_KEY",
        help="for a new run: the key that names who publishes its versions, as a file (made if there is none) or as 64 hex "
        "digits, as `shoal key new` prints them. Keep the file on another machine (default: the run's key)",
    )  # fmt: skip
    p = add_command(
        commands, "admin", admin, f"{', '.join(ADMIN_ACTIONS)} or rotate-publisher",
        "Steer a run that you host. The run's key signs the request, so give the run's folder, or its URL with "
        "--key. pause: grant no new leases. resume: grant leases again. drain: finish, judge and learn from what "
        "is leased, then end. kick: this node gets no more leases or checks, for good. admit: these validators' keys may "
        "judge. "
        "quarantine: this worker gets no leases for an hour. rate: steps whose batches are formed from now on multiply "
        "the run file's learning rate by --factor. rotate-publisher: the trainer gets a new key, and its old one signs "
        "nothing more; the root key signs this.",
        ("shoal admin pause runs/wordle", ""),
        ("shoal admin kick runs/wordle worker-1", "by name, or by the start of its key"),
        ("shoal admin admit runs/wordle 3f2a… 9b71…", "the keys that `shoal validate` printed"),
        ("shoal admin rate runs/wordle --factor 0.5", "1 restores the run file's rate"),
        ("shoal admin rotate-publisher runs/wordle --root /media/stick/root.key", "the trainer's key has leaked"),
    )  # fmt: skip
    p.add_argument("action", choices=(*ADMIN_ACTIONS, "rotate-publisher"))
    source_argument(p, "run")
    p.add_argument(
        "nodes",
        nargs="*",
        default=[],
        metavar="NODE",
        help="for kick and quarantine: a node's name, its key, or the start of its key. For admit: validators' whole keys",
    )
    p.add_argument("--factor", type=float, metavar="F", help="for rate: from 0.01 to 1")
    p.add_argument("--key", type=Path, metavar="FILE", help="the run's key (default: RUN_DIR/keys/run.key)")
    p.add_argument(
        "--root", type=Path, metavar="FILE", help="for rotate-publisher: the root key, if it is not the run's key"
    )
    p.add_argument(
        "--new-key", default="", metavar="KEY",
        help="for rotate-publisher: the public part of the new key, as `shoal key new` prints it (default: one made in "
        "RUN_DIR/keys)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    return _launch(args, args.set, with_workers=True)


def host(args: argparse.Namespace) -> int:
    return _launch(args, host_overrides(args), with_workers=False)


def host_overrides(args: argparse.Namespace) -> list[str]:
    """What `shoal host` sets over its run file: --set, then --bind, --port and --public-url."""
    asked = (("bind", args.bind), ("port", args.port), ("public_url", args.public_url))
    return [*args.set, *(f"host.{key}={json.dumps(value)}" for key, value in asked if value is not None)]


def _launch(args: argparse.Namespace, overrides: list[str], with_workers: bool) -> int:
    from shoal.config import load_run
    from shoal.launch.run_lock import demand_free_ports, locked_run

    config = load_run(args.recipe, overrides, args.quick, args.random_policy)
    out = args.out or Path("runs") / config.name
    for line in demand_free_ports(out, config.host, hosts=not with_workers):
        say(line)
    demand_torch()  # else each role would fail, and say why only in its log
    demand_environments(config, args.recipe.parent)
    from shoal.envs.load import is_repeatable
    from shoal.launch.admin import invitation, take_root
    from shoal.launch.local_run import launch
    from shoal.launch.random_policy import random_policy
    from shoal.models.device import demand_device
    from shoal.run_folder import RunFolder

    for section in (config.train, config.workers, config.validators):
        demand_device(section.device)
    RunFolder(out).demand_own()
    with locked_run(out) as lock_fd:
        if args.random_policy:
            say(random_policy(config, args.recipe.parent, RunFolder(out), with_workers))
        RunFolder(out).prepare(
            config, args.recipe.parent, for_others=not with_workers, repeatable=is_repeatable, overrides=overrides
        )
        if not with_workers and args.root and (told := take_root(RunFolder(out), args.root)):
            say(told)
        if not with_workers:
            say_plan(config, args.recipe.parent)
        announce = None if with_workers else lambda url: invitation(url, config.host, out)
        return launch(out, lock_fd, with_workers, announce, recipe_as_typed(args))


def recipe_as_typed(args: argparse.Namespace) -> str:
    """The run file with what changes it, for a shell."""
    flags = [f"--{name}" for name, given in (("quick", args.quick), ("random-policy", args.random_policy)) if given]
    return shlex.join([str(args.recipe), *flags, *(word for change in args.set for word in ("--set", change))])


def say_plan(config: "RunConfig", beside: Path) -> None:
    """What the run will take, in short. What is wrong with its model is said by the check that follows."""
    from shoal.errors import ShoalError
    from shoal.plan.forecast import forecast_by_rule, summary
    from shoal.plan.machines import Machines
    from shoal.roles.coordinator.main import rules_of

    with contextlib.suppress(ShoalError):
        machines = Machines(workers=1)
        say(summary(forecast_by_rule(config, rules_of(config), beside, machines), machines))


def demand_environments(config: "RunConfig", beside: Path) -> None:
    """Raise `ShoalError` for an environment that is not there. Once a run has its folder, another name is another run."""
    from shoal.config.load import env_at
    from shoal.envs.load import env_digest

    for env in config.envs:
        env_digest(env_at(env, beside).name)


def admin(args: argparse.Namespace) -> None:
    from msgspec import UNSET

    from shoal.launch.admin import administer, rotate_publisher
    from shoal.protocol.messages import AdminRequest

    demand_its_own(args)
    if args.action == "rotate-publisher":
        say(rotate_publisher(args.run, args.root, args.new_key))
        return
    node, *also = args.nodes or [""]
    request = AdminRequest(node, UNSET if args.factor is None else args.factor, also=tuple(also))
    say(administer(args.action, args.run, request, args.key))


def demand_its_own(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for an option that belongs to another action. `surplus_of` checks the nodes and the factor of a
    request."""
    from shoal.errors import ConfigError

    rotates = args.action == "rotate-publisher"
    given = {"--root": args.root, "--new-key": args.new_key}
    if rotates:
        given = {"a node": args.nodes, "--factor": args.factor is not None, "--key": args.key}
    if surplus := [name for name, value in given.items() if value]:
        whose = "it takes --root and --new-key" if rotates else "only rotate-publisher does"
        raise ConfigError(f"shoal admin {args.action} does not take {', '.join(surplus)}: {whose}")

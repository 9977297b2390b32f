"""The command line: what people type, and the one place where errors become a line and an exit code.

It parses, then imports what the command needs, so that help is quick on a machine without torch. Exit codes: 0 done,
1 the answer is no (a log or an environment does not hold), 2 the user must mend something, 130 stopped by Ctrl-C,
75 (roles only) another node could not be reached.
"""

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.errors import NO_TORCH, PeerError, ShoalError, fault_of_user
from shoal.grammar import (
    EXIT_USER_ERROR,
    Parser,
    add_command,
    add_group,
    env_arguments,
    positive,
    run_file_arguments,
    set_argument,
    told,
)
from shoal.terminal import PrintableFormatter, printable, say

EXIT_NO, EXIT_TRY_AGAIN, EXIT_INTERRUPTED = 1, 75, 130

MAX_EVAL_TOKENS = 512
"""An episode of `shoal eval` is no longer unless --max-tokens says so, nor than the policy's last position."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        return int(args.act(args) or 0)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `shoal ledger show | head` is no fault
        return 0
    except (ShoalError, OSError, ModuleNotFoundError, ExceptionGroup) as error:
        fault = fault_of_user(error)
        if fault is None:
            raise
        print(f"error: {printable(' '.join(str(fault).split()))}", file=sys.stderr)
        return EXIT_TRY_AGAIN if args.command == "role" and isinstance(fault, PeerError) else EXIT_USER_ERROR


# --- the commands ---


def run(args: argparse.Namespace) -> int:
    return _launch(args, args.set, quick=args.quick, with_workers=True)


def host(args: argparse.Namespace) -> int:
    return _launch(args, host_overrides(args), quick=args.quick, with_workers=False)


def host_overrides(args: argparse.Namespace) -> list[str]:
    """What `shoal host` sets over its run file: --set, then --bind, --port and --public-url."""
    asked = (("bind", args.bind), ("port", args.port), ("public_url", args.public_url))
    return [*args.set, *(f"host.{key}={json.dumps(value)}" for key, value in asked if value is not None)]


def _launch(args: argparse.Namespace, overrides: list[str], quick: bool, with_workers: bool) -> int:
    from shoal.config import load_run

    config = load_run(args.recipe, overrides, quick)
    if find_spec("torch") is None:  # the roles would say so too, each in a log of its own
        raise ShoalError(NO_TORCH)
    from shoal.folder import RunFolder
    from shoal.launch.hosting import invitation
    from shoal.launch.local import launch, locked

    out = args.out or Path("runs") / config.name
    with locked(out) as lock_fd:
        RunFolder(out).prepare(config, args.recipe.parent)
        announce = None if with_workers else lambda url: invitation(url, config.host, out)
        return launch(out, lock_fd, with_workers, announce)


def join(args: argparse.Namespace) -> None:
    from shoal.config import node_home
    from shoal.roles import worker

    _log_to_stderr()
    worker.main(args.url, args.home or node_home(), args.threads or _cores(), args.max_memory, args.name)


def validate(args: argparse.Namespace) -> None:
    from shoal.config import node_home
    from shoal.roles import validator

    _log_to_stderr()
    validator.main(args.url, args.home or node_home(), args.threads or _cores())


def train(args: argparse.Namespace) -> None:
    from shoal.roles import trainer

    _log_to_stderr()
    trainer.main(args.run_dir, args.url)


def evaluate(args: argparse.Namespace) -> None:
    from shoal.policy.spec import PolicySpec
    from shoal.protocol.types import Sampling

    max_tokens = args.max_tokens or min(MAX_EVAL_TOKENS, PolicySpec.from_directory(args.checkpoint).max_positions)
    from shoal.roles import evaluate as role

    sampling = Sampling(args.temperature, min(args.max_turn_tokens, max_tokens), max_tokens)
    role.main(
        args.checkpoint, args.env, args.env_args, args.episodes, args.seed, args.samples, sampling, args.out,
        args.json, args.threads or _cores(),
    )  # fmt: skip


def sft(args: argparse.Namespace) -> None:
    from shoal.roles import sft as role

    _log_to_stderr()
    role.main(args.recipe, args.out, args.set)


def calibrate(args: argparse.Namespace) -> None:
    from shoal.roles import calibrate as role

    role.main(args.recipe, args.set, args.episodes, args.safety, args.write, args.save, args.others)


def env_check(args: argparse.Namespace) -> int:
    from shoal.envs.check import check_env
    from shoal.envs.load import load_env

    findings = check_env(load_env(args.env, args.env_args))
    for finding in findings:
        print(f"{finding.outcome:<8} {finding.check}: {finding.detail}")
    return EXIT_NO if any(finding.outcome == "failed" for finding in findings) else 0


def env_list(args: argparse.Namespace) -> None:
    from shoal.envs.load import BUILT_IN, load_env

    for name in sorted(BUILT_IN):
        env = load_env(name, {})
        about = (sys.modules[type(env).__module__].__doc__ or "").split("\n", 1)[0].partition(": ")[2]
        print(f"{name:<12} {env.num_tasks:>9,} tasks, {env.num_heldout:>6,} held out   {about}")


def ledger_verify(args: argparse.Namespace) -> int:
    from shoal.roles import auditor

    return 0 if auditor.check(args.source, args.receipts) else EXIT_NO


def ledger_show(args: argparse.Namespace) -> None:
    from shoal.roles import auditor

    auditor.show(args.run_dir, args.kind, args.tail)


def audit(args: argparse.Namespace) -> int:
    from shoal.roles import auditor

    choice = auditor.Choice(args.rollout, args.sample, args.seed)
    return auditor.audit(args.source, choice, args.threads or _cores(), args.own_files)


def credits(args: argparse.Namespace) -> int:
    from shoal.roles import auditor

    if args.source == "verify":
        return 0 if auditor.check_statement(Path(args.node), args.log) else EXIT_NO
    return 0 if auditor.show_credits(args.source, args.node, args.statement) else EXIT_NO


def doctor(args: argparse.Namespace) -> int:
    from shoal.launch import doctor as examination

    return examination.run(args.url)


def admin(args: argparse.Namespace) -> None:
    from shoal.launch import hosting

    say(hosting.administer(args.action, args.run, args.node, args.key))


def role(args: argparse.Namespace) -> None:
    """A role of a run as the launcher starts it."""
    from shoal.launch.process import die_with_parent

    die_with_parent()
    # Until a role takes the signal itself, it ends like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _log_to_stderr()
    if args.name == "coordinator":
        from shoal.roles import coordinator

        coordinator.main(args.run_dir)
    elif args.name == "trainer":
        from shoal.roles import trainer

        trainer.main(args.run_dir, args.url)
    elif args.name == "validator":
        from shoal.roles import validator

        validator.main(args.url, args.home, args.threads, args.key, args.own_files)
    elif args.name == "worker":
        from shoal.roles import worker

        worker.main(args.url, args.home, args.threads, 0, args.node_name, args.cheat, args.own_files)
    else:
        from shoal.roles import evaluate

        evaluate.for_run(args.run_dir, args.checkpoint, args.episodes, args.out, args.threads)


def _cores() -> int:
    return os.cpu_count() or 1


def _log_to_stderr() -> None:
    """One line a decision. A log that cannot be written stops nothing."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(asctime)s %(name)-11s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)


# --- what people may type ---


def parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    top = Parser(
        prog="shoal",
        description="Train language models by reinforcement learning on computers that do not trust each other.",
        epilog=told(
            ("shoal run recipes/wordle.toml --quick", "two minutes: a whole run on this machine"),
            ("shoal host recipes/wordle.toml", "host a run; prints the line that others type"),
            ("shoal join http://host:8470", "work for somebody's run"),
            ("shoal doctor", "what can this machine do?"),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    _hosting_commands(commands)
    _node_commands(commands)
    _policy_commands(commands)
    _inspection_commands(commands)
    _role_command(commands)
    return top


def _hosting_commands(commands: Any) -> None:
    p = add_command(
        commands, "run", run, "a whole run on this machine",
        "Start coordinator, trainer, validators and workers here, and show how it goes. You get a folder (runs/NAME) "
        "with checkpoints, the log, metrics.jsonl and summary.json. Ctrl-C stops cleanly; the same command goes on.",
        ("shoal run recipes/wordle.toml", "the demo"),
        ("shoal run recipes/wordle.toml --quick", "the recipe's two-minute taste"),
        ("shoal run recipes/arithmetic.toml --set workers.count=3 --out runs/three", "another number of workers"),
    )  # fmt: skip
    run_file_arguments(p)
    p = add_command(
        commands, "host", host, "host a run that others join",
        "As `run`, but without workers of its own: prints the line that contributors type. Listens on 127.0.0.1 "
        "unless --bind says otherwise, and then tells what TLS needs.",
        ("shoal host recipes/wordle.toml", "for workers on this machine"),
        ("shoal host recipes/wordle.toml --bind 0.0.0.0 --set seed=-1", "for your network; a fixed seed is no secret"),
        ("shoal host RECIPE --port 8470 --public-url https://shoal.example.org", "behind a TLS proxy"),
    )  # fmt: skip
    run_file_arguments(p)
    p.add_argument("--bind", metavar="ADDRESS", help="address to listen on (host.bind)")
    p.add_argument("--port", type=int, metavar="N", help="port to listen on (host.port); 0 takes a free one")
    p.add_argument("--public-url", metavar="URL", help="what others type, if a proxy stands before (host.public_url)")
    p = add_command(
        commands, "admin", admin, "pause, resume, drain, kick or admit",
        "Steer a run that you host. The run's key signs the request, so it takes the run's folder, or its URL with "
        "--key. pause: no new leases. resume: go on. drain: finish what is leased, then end. kick: this node gets no "
        "more leases. admit: this validator's key may judge.",
        ("shoal admin pause runs/wordle", ""),
        ("shoal admin kick runs/wordle worker-1", "by name, or by the start of its key"),
        ("shoal admin admit runs/wordle 3f2a…", "the key that `shoal validate` printed"),
    )  # fmt: skip
    p.add_argument("action", choices=("pause", "resume", "drain", "kick", "admit"))
    p.add_argument("run", metavar="RUN_DIR_OR_URL")
    p.add_argument("node", nargs="?", default="", metavar="NODE", help="for kick and admit: its key, or a node's name")
    p.add_argument("--key", type=Path, metavar="FILE", help="the run's key (default: RUN_DIR/keys/run.key)")


def _node_commands(commands: Any) -> None:
    p = add_command(
        commands, "join", join, "work for somebody's run",
        "One outbound connection, works behind NAT; needs nothing but the URL. A key is made at the first start and "
        "kept in ~/.shoal (or $SHOAL_HOME): credits belong to it. You are told what was accepted, what was refused "
        "and why. Ctrl-C finishes the work in hand and leaves.",
        ("shoal join http://host:8470", "all cores"),
        ("shoal join https://shoal.example.org --threads 2 --max-memory 1000", "two cores, at most 1000 MB"),
    )  # fmt: skip
    p.add_argument("url", metavar="URL")
    p.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all)")
    p.add_argument("--max-memory", type=int, default=0, metavar="MB", help="take no more than this (default: no limit)")
    p.add_argument("--name", default="", help="how the host's table calls this worker (default: this machine's name)")
    p.add_argument("--home", type=Path, metavar="DIR", help="where key and weights are kept (default: ~/.shoal)")
    p = add_command(
        commands, "validate", validate, "judge rollouts for a run",
        "Re-derives what workers claim. The host must admit this machine's key first: the first start prints it.",
        ("shoal validate http://host:8470", ""),
    )  # fmt: skip
    p.add_argument("url", metavar="URL")
    p.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all)")
    p.add_argument("--home", type=Path, metavar="DIR", help="where key and weights are kept (default: ~/.shoal)")
    p = add_command(
        commands, "train", train, "the trainer of a run, alone",
        "Turns batches into policy versions. `shoal run` and `shoal host` start it by themselves; this is for a host "
        "whose trainer is another process. It needs the run's folder, which holds its key and its state.",
        ("shoal train http://127.0.0.1:8470 --run-dir runs/wordle", ""),
    )  # fmt: skip
    p.add_argument("url", metavar="URL")
    p.add_argument("--run-dir", type=Path, required=True, metavar="DIR")


def _policy_commands(commands: Any) -> None:
    p = add_command(
        commands, "eval", evaluate, "how good a checkpoint is",
        "Plays sampled episodes on held-out tasks. You get the mean with its 95 % interval, and sample transcripts.",
        ("shoal eval runs/wordle/checkpoints/final --env wordle", ""),
        ("shoal eval runs/wordle/checkpoints/final --env ./my_env.py --episodes 64 --samples 3", "your own file"),
        ("shoal eval CHECKPOINT --env arithmetic --json > figures.json", "for a script"),
    )  # fmt: skip
    p.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a directory in Hugging Face format")
    env_arguments(p, "--env")
    p.add_argument("--episodes", type=positive, default=512, metavar="N")
    p.add_argument("--samples", type=int, default=2, metavar="K", help="transcripts to show (default: 2)")
    p.add_argument("--seed", type=int, default=0, help="the same seed plays the same tasks with the same noise")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--max-turn-tokens", type=positive, default=64, metavar="N", help="of one turn (default: 64)")
    p.add_argument(
        "--max-tokens", type=positive, metavar="N", help="of an episode (default: what the policy bears, to 512)"
    )
    p.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all)")
    p.add_argument("--json", action="store_true", help="print the figures as JSON")
    p.add_argument("--out", type=Path, metavar="FILE", help="write the figures there instead")
    p = add_command(
        commands, "sft", sft, "a cold start from scripted games",
        "Teaches a policy by an environment's own scripted player, for RL to start from. You get a checkpoint in "
        "Hugging Face format; the same recipe, seed and threads give the same bytes.",
        ("shoal sft recipes/wordle-start.toml --out runs/start", ""),
        ("shoal sft recipes/wordle-start.toml --out runs/start --set steps=100", ""),
    )  # fmt: skip
    p.add_argument("recipe", type=Path, metavar="RECIPE")
    p.add_argument("--out", type=Path, required=True, metavar="DIR")
    set_argument(p)

    p = add_command(
        commands, "calibrate", calibrate, "how much may honest work differ?",
        "Plays honest rollouts of a run file and replays them over threads, batch shapes and dtypes. You get the noise, "
        "the bounds that it asks for ([verify.bounds], and verify.activation_error where the run asks for proofs), and how "
        "many tokens it takes to catch a worker that samples with another seed, by the policy's entropy.",
        ("shoal calibrate recipes/wordle.toml", "look"),
        ("shoal calibrate recipes/wordle.toml --write", "and put the bounds into the run file"),
        ("shoal calibrate recipes/wordle.toml --save here.played", "on one machine"),
        ("shoal calibrate recipes/wordle.toml --with here.played", "on another: replay what the first one played"),
    )  # fmt: skip
    p.add_argument("recipe", type=Path, metavar="RUN_FILE")
    p.add_argument("--episodes", type=positive, default=512, metavar="N", help="rollouts to play (default: 512)")
    p.add_argument("--safety", type=float, default=2.0, metavar="X", help="bounds are X times the noise (default: 2)")
    p.add_argument("--write", action="store_true", help="put the bounds into the run file, and leave the rest as it is")
    p.add_argument("--save", type=Path, metavar="FILE", help="write what was played, for another machine to replay")
    help_text = "replay what another machine played, too; may be given again"
    p.add_argument("--with", dest="others", type=Path, action="append", default=[], metavar="FILE", help=help_text)
    set_argument(p)


def _inspection_commands(commands: Any) -> None:
    p = add_group(commands, "env", "look at environments, check your own")
    q = add_command(
        p, "check", env_check, "does an environment hold?",
        "Plays its scripted players and random ones: do right players score well and wrong ones badly, does a replay "
        "give the same, do rewards keep to their bounds? One line each; exit code 1 if one fails.",
        ("shoal env check wordle", ""), ("shoal env check ./my_env.py", "a file of yours"),
    )  # fmt: skip
    env_arguments(q, "env")
    add_command(p, "list", env_list, "environments that come with shoal", "", ("shoal env list", ""))
    p = add_group(commands, "ledger", "the log of a run: verify or show it")
    q = add_command(
        p, "verify", ledger_verify, "does the log hold?",
        "Replays the log from its first byte: the chain of hashes, every decision by the rules, every credit, batch, "
        "audit drawn and receipt. You get a summary and a line for each finding; exit code 1 if there is one.",
        ("shoal ledger verify runs/wordle", ""), ("shoal ledger verify http://host:8470", "anyone may"),
        ("shoal ledger verify http://host:8470 --receipts mine.jsonl --receipts yours.jsonl", "finds a forked log"),
    )  # fmt: skip
    q.add_argument("source", metavar="RUN_DIR_OR_URL")
    help_text = "a worker's receipts.jsonl: is all of it in this log? May be given again"
    q.add_argument("--receipts", type=Path, action="append", default=[], metavar="FILE", help=help_text)
    q = add_command(
        p, "show", ledger_show, "events, a line each", "Prints number, time, kind and body of each event.",
        ("shoal ledger show runs/wordle --tail 20", ""),
        ("shoal ledger show runs/wordle --kind decision", "one kind"),
    )  # fmt: skip
    q.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    q.add_argument("--kind", default="", help="only events of this kind")
    q.add_argument("--tail", type=positive, default=0, metavar="N", help="only the last N")
    _audit_commands(commands)
    p = add_command(
        commands, "doctor", doctor, "what this machine can do, and what is missing",
        "Looks at Python, cores, memory, disk, torch (with measured speed), clock, limits and folders. A line each, "
        "with what to do; exit code 1 if something that a run needs is missing.",
        ("shoal doctor", ""), ("shoal doctor --url http://host:8470", "compare this clock with a host's, too"),
    )  # fmt: skip
    p.add_argument("--url", default="", help="a run's coordinator")


def _audit_commands(commands: Any) -> None:
    p = add_command(
        commands, "audit", audit, "does the log say what really happened?",
        "Makes rollouts again from public data: seed, task, prompt, environment, tokens, log-probs, reward, ending, "
        "verdict. A line wherever the log says otherwise, and a summary. A rollout is named VERSION/SLOT/INDEX, a "
        "group VERSION/SLOT: `shoal ledger show RUN --kind group_accepted` and `shoal credits RUN NODE` list them. "
        "Exit code 0: all agrees; 1: something does not; 2: nothing could be made again.",
        ("shoal audit runs/wordle --all", "a finished run's folder; no server is needed"),
        ("shoal audit runs/wordle --rollout 3/17/0", "version 3, slot 17, first rollout"),
        ("shoal audit http://host:8470 --sample 20", "groups drawn here, that the host cannot foresee"),
    )  # fmt: skip
    p.add_argument("source", metavar="RUN_DIR_OR_URL")
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--rollout", default="", metavar="ID", help="VERSION/SLOT/INDEX or VERSION/SLOT")
    which.add_argument("--sample", type=positive, default=0, metavar="N", help="this many groups, drawn at random")
    which.add_argument("--all", action="store_true", help="every group that was judged")
    p.add_argument("--seed", type=int, metavar="N", help="draw the sample of an earlier audit again")
    p.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all)")
    help_text = "run environment files that the run names: its host's code, so read it first"
    p.add_argument("--own-files", action="store_true", help=help_text)
    p = add_command(
        commands, "credits", credits, "who was paid what, and why",
        "Balances replayed from the log. With a node, each point of its pay: group, submission, verdict, validator; "
        "what was refused, by which check; lapses. --statement keeps a balance that the host signs; `verify` in the "
        "place of the run checks such a file offline, and with --log that it is what the log gives.",
        ("shoal credits runs/wordle", "all nodes"),
        ("shoal credits http://host:8470 worker-1", "one node, by its name or the start of its key"),
        ("shoal credits http://host:8470 worker-1 --statement mine.json", "signed by the run"),
        ("shoal credits verify mine.json --log runs/wordle", ""),
    )  # fmt: skip
    p.add_argument("source", metavar="RUN_DIR_OR_URL", help="or the word `verify`, to check a statement")
    p.add_argument("node", nargs="?", default="", metavar="NODE", help="a node; after `verify`, the statement's file")
    p.add_argument("--statement", type=Path, metavar="FILE", help="write the node's signed balance there")
    p.add_argument("--log", default="", metavar="RUN_DIR_OR_URL", help="for verify: the log that it must agree with")


def _role_command(commands: Any) -> None:
    """Hidden: the launcher's way to start a role. It ends when its standard input closes."""
    p = commands.add_parser("role")
    p.set_defaults(act=role)
    p.add_argument("name", choices=("coordinator", "trainer", "validator", "worker", "evaluate"))
    for flag in ("--run-dir", "--home", "--key", "--checkpoint", "--out"):
        p.add_argument(flag, type=Path)
    for flag in ("--url", "--cheat"):
        p.add_argument(flag, default="")
    p.add_argument("--name", dest="node_name", default="")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--episodes", type=int, default=0)
    p.add_argument("--own-files", action="store_true")


if __name__ == "__main__":
    sys.exit(main())

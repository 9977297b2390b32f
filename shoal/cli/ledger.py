"""`shoal ledger`, `audit` and `credits`: what anyone may ask of a run's log.

They read the options and hand over to the auditor, which is imported when a command runs: help needs no torch.
"""

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.options import (
    add_command,
    add_group,
    cores,
    device_argument,
    positive,
    run_source,
    source_argument,
    threads_argument,
)
from shoal.errors import EXIT_NO, ConfigError


def add_commands(commands: Any) -> None:
    p = add_group(commands, "ledger", "the log of a run: verify or show it")
    q = add_command(
        p, "verify", ledger_verify, "check that the log holds",
        "Replays the log from its first byte, and checks the chain of hashes, every decision by the rules, every credit, "
        "batch, audit draw and receipt. Prints a summary and a line for each finding; exit code 1 if there is one.",
        ("shoal ledger verify runs/wordle", ""), ("shoal ledger verify http://host:8470", "anyone may"),
        ("shoal ledger verify http://host:8470 --receipts mine.jsonl --receipts yours.jsonl", "finds a forked log"),
    )  # fmt: skip
    source_argument(q)
    help_text = "a worker's receipts.jsonl, all of which this log must hold; may be repeated"
    q.add_argument("--receipts", type=Path, action="append", default=[], metavar="FILE", help=help_text)
    _add_max_memory(q, "a URL's log")
    q = add_command(
        p, "show", ledger_show, "print events, a line each", "Prints number, time, kind and body of each event.",
        ("shoal ledger show runs/wordle --tail 20", ""),
        ("shoal ledger show runs/wordle --kind decision", "one kind"),
    )  # fmt: skip
    q.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's folder")
    q.add_argument("--kind", default="", help="only events of this kind")
    q.add_argument("--tail", type=positive, default=0, metavar="N", help="only the last N")
    _add_audit(commands)
    _add_credits(commands)


def _add_audit(commands: Any) -> None:
    p = add_command(
        commands, "audit", audit, "recompute rollouts and compare them with the log",
        "Recomputes rollouts from public data: seed, task, prompt, environment, tokens, log-probs, reward, ending, "
        "verdict. Prints a line wherever the log disagrees, and a summary. A rollout is named VERSION/SLOT/INDEX, a "
        "group VERSION/SLOT: `shoal ledger show RUN --kind group_accepted` and `shoal credits RUN NODE` list them. "
        "Exit code 0: all that the run's folder keeps was recomputed and agrees; 1: something does not agree; 2: nothing "
        "could be recomputed; 3: what was recomputed agrees, but a part was left out, and the output says why; 4: nothing "
        "of what you chose is kept. --sample draws from what is kept, and says how much is not. How long a "
        "folder keeps rollouts is the host's word: the output says how many were not checked because they are older.",
        ("shoal audit runs/wordle --all", "a finished run's folder; no server is needed"),
        ("shoal audit runs/wordle --rollout 3/17/0", "version 3, slot 17, first rollout"),
        ("shoal audit http://host:8470 --sample 20", "drawn on this machine, so the host cannot foresee which"),
        ("shoal audit http://host:8470 --evidence ~/.shoal", "compare what a node kept with the log"),
    )  # fmt: skip
    source_argument(p)
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--rollout", default="", metavar="ID", help="VERSION/SLOT/INDEX or VERSION/SLOT")
    which.add_argument("--sample", type=positive, default=0, metavar="N", help="this many groups, drawn at random")
    which.add_argument("--all", action="store_true", help="every group that was judged")
    help_text = (
        "a node's home, or evidence that it handed over: compare what the host signed in it with the log, and recompute "
        "the submissions in it; may be repeated"
    )
    which.add_argument("--evidence", type=Path, action="append", default=[], metavar="DIR", help=help_text)
    p.add_argument("--seed", type=int, metavar="N", help="draw the sample of an earlier audit again")
    threads_argument(p)
    device_argument(p)
    _add_max_memory(p, "a URL's log or a policy")
    help_text = "run environment files that the run names: its host's code, so read it first"
    p.add_argument("--own-files", action="store_true", help=help_text)


def _add_credits(commands: Any) -> None:
    p = add_command(
        commands, "credits", credits, "who was paid what, and why",
        "Balances by a replay of the log. With a node, explains each credit: group, submission, verdict, validator; also "
        "what was refused, by which check; and lapses. --statement saves a balance that the host signs; `verify` in "
        "place of the run checks such a file offline, and with --log also that the log gives this balance.",
        ("shoal credits runs/wordle", "all nodes"),
        ("shoal credits http://host:8470 worker-1", "one node, by its name or the start of its key"),
        ("shoal credits http://host:8470 worker-1 --statement mine.json", "signed by the run"),
        ("shoal credits verify mine.json --log runs/wordle", ""),
    )  # fmt: skip
    p.add_argument(
        "source",
        metavar="RUN_DIR_OR_URL",
        type=run_source,
        help="a run's folder or its URL; or `verify`, to check a statement",
    )
    p.add_argument("node", nargs="?", default="", metavar="NODE", help="a node; after `verify`, the statement's file")
    p.add_argument("--statement", type=Path, metavar="FILE", help="write the node's signed balance there")
    p.add_argument(
        "--log",
        default="",
        metavar="RUN_DIR_OR_URL",
        type=run_source,
        help="for verify: the log that it must agree with",
    )
    _add_max_memory(p, "a URL's log")


def _add_max_memory(p: argparse.ArgumentParser, what: str) -> None:
    help_text = f"refuse {what} that needs more memory (default: half of what is free)"
    p.add_argument("--max-memory", type=positive, default=0, metavar="MB", help=help_text)


def ledger_verify(args: argparse.Namespace) -> int:
    from shoal.roles.auditor.verify_log import check

    return 0 if check(args.source, args.receipts, args.max_memory) else EXIT_NO


def ledger_show(args: argparse.Namespace) -> None:
    from shoal.roles.auditor.verify_log import show
    from shoal.run_folder import is_url

    if is_url(args.run_dir):
        raise ConfigError(
            "`shoal ledger show` reads a run's folder only: `shoal dashboard URL` shows the events of a URL"
        )
    show(args.run_dir, args.kind, args.tail)


def audit(args: argparse.Namespace) -> int:
    from shoal.roles.auditor import rejudge_groups

    choice = rejudge_groups.GroupChoice(args.rollout, args.sample, args.seed, tuple(args.evidence))
    return rejudge_groups.audit(
        args.source, choice, args.threads or cores(), args.own_files, args.max_memory, args.device
    )


def credits(args: argparse.Namespace) -> int:
    from shoal.roles.auditor.verify_log import check_statement, show_credits

    if args.source == "verify":
        return 0 if check_statement(Path(args.node), args.log, args.max_memory) else EXIT_NO
    return 0 if show_credits(args.source, args.node, args.statement, args.max_memory) else EXIT_NO

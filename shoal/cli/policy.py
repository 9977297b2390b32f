"""`shoal eval`, `sft`, `calibrate` and `policy merge`: a policy on this machine, without a run.

They read the options and hand over to a role, which is imported when its command runs: help needs no torch.
"""

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.options import (
    MAX_WHOLE,
    add_command,
    add_group,
    cores,
    device_argument,
    engine_argument,
    env_arguments,
    log_to_stderr,
    number,
    positive,
    set_argument,
    share,
    threads_argument,
    whole,
)
from shoal.terminal import say


def add_commands(commands: Any) -> None:
    p = add_command(
        commands, "eval", evaluate, "how good a checkpoint is",
        "Plays sampled episodes on held-out tasks. You get the mean with its 95 % interval, and sample transcripts. "
        "Of a run, or of a checkpoint in its folder, it plays the run's environments, with the run's arguments and limits. "
        "Of the result of `shoal sft`, it plays the recipe's environment within its limits.",
        ("shoal eval runs/wordle", "the newest policy of a run, as the run evaluates it"),
        ("shoal eval runs/wordle/checkpoints/v000025 --episodes 64", "an earlier one"),
        ("shoal eval runs/wordle --env ./my_env.py --samples 3", "on your own environment"),
        ("shoal eval CHECKPOINT --env arithmetic --json > figures.json", "any checkpoint; for a script"),
    )  # fmt: skip
    help_text = "a run's folder, or a directory in Hugging Face format"
    p.add_argument("checkpoint", type=Path, metavar="RUN_DIR_OR_CHECKPOINT", help=help_text)
    env_arguments(p, "--env")
    p.add_argument("--episodes", type=positive, metavar="N", help="of each environment (default: the run's, or 512)")
    p.add_argument(
        "--samples", type=whole(0, MAX_WHOLE), metavar="K", help="transcripts to show (default: the run's, or 2)"
    )
    help_text = "the same seed plays the same tasks with the same noise (default: the run's, or 0)"
    p.add_argument("--seed", type=int, help=help_text)
    p.add_argument("--temperature", type=number(0.0, 1e6, above=True), metavar="T", help="(default: the run's, or 1)")
    help_text = "of one turn (default: the run's, of a cold start's the longest learned turn, or 64)"
    p.add_argument("--max-turn-tokens", type=positive, metavar="N", help=help_text)
    help_text = "of an episode (default: the run's or recipe's, or 512, or the policy's longest sequence if shorter)"
    p.add_argument("--max-tokens", type=positive, metavar="N", help=help_text)
    threads_argument(p)
    device_argument(p)
    p.add_argument("--json", action="store_true", help="print the figures as JSON")
    p.add_argument("--out", type=Path, metavar="FILE", help="write the figures there instead")
    p = add_command(
        commands, "sft", sft, "a cold start from scripted games",
        "Trains a policy to imitate an environment's scripted player, so that RL can start from it. You get a checkpoint "
        "in Hugging Face format; the same recipe, seed and threads give the same bytes. Ctrl-C saves what was learned in "
        "DIR-checkpoints, and the same command continues.",
        ("shoal sft recipes/wordle-skill.toml --out recipes/wordle-skill", "the demo's start, first half: the game"),
        ("shoal sft recipes/wordle-start.toml --out runs/start", "second half, which needs the first: bad habits"),
        ("shoal sft my-start.toml --out runs/my-start --eval-every 20 --stop-at 0.4", "until it wins 40 % of its games"),
    )  # fmt: skip
    p.add_argument(
        "recipe", type=Path, metavar="RECIPE", help="a recipe of this command, such as recipes/wordle-start.toml"
    )
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the checkpoint")
    help_text = "play held-out tasks every N steps and show the wins beside the loss; each policy is kept (eval_every)"
    p.add_argument("--eval-every", type=positive, metavar="N", help=help_text)
    help_text = "stop at the first evaluation with at least this share of wins, such as 0.4 (stop_at)"
    p.add_argument("--stop-at", type=share, metavar="SHARE", help=help_text)
    set_argument(p, "recipe", "steps=100")
    _add_calibrate(commands)
    _add_merge(commands)


def _add_calibrate(commands: Any) -> None:
    p = add_command(
        commands, "calibrate", calibrate, "measure how much honest work may differ",
        "Plays honest rollouts of a run file and recomputes them with other threads, batch shapes and dtypes. Prints the "
        "noise, the bounds that follow from it ([verify.bounds], and verify.activation_error if the run asks for proofs), "
        "and, by the policy's entropy, how many tokens it takes to catch a worker that samples with another seed.",
        ("shoal calibrate recipes/wordle.toml", "print the bounds"),
        ("shoal calibrate recipes/wordle.toml --write", "also write them into the run file"),
        ("shoal calibrate recipes/wordle.toml --save here.played", "on one machine"),
        ("shoal calibrate recipes/wordle.toml --with here.played", "on another: recompute what the first one played"),
        ("shoal calibrate recipes/wordle.toml --engine vllm --write", "also let workers join with vLLM"),
    )  # fmt: skip
    p.add_argument("recipe", type=Path, metavar="RUN_FILE", help="a run file, such as recipes/wordle.toml")
    p.add_argument("--episodes", type=positive, default=512, metavar="N", help="rollouts to play (default: 512)")
    device_argument(p)
    engine_argument(p)
    p.add_argument(
        "--safety", type=number(1.0, 1e6), default=2.0, metavar="X", help="bounds are X times the noise (default: 2)"
    )
    p.add_argument(
        "--write", action="store_true", help="write the bounds into the run file; its other lines stay as they are"
    )
    p.add_argument("--save", type=Path, metavar="FILE", help="write what was played, for another machine to recompute")
    help_text = "also recompute what another machine played; may be repeated"
    p.add_argument("--with", dest="others", type=Path, action="append", default=[], metavar="FILE", help=help_text)
    set_argument(p)


def _add_merge(commands: Any) -> None:
    p = add_group(commands, "policy", "make a whole model of an adapter")
    q = add_command(
        p, "merge", merge, "a whole model from an adapter and its base",
        "Adds the adapter's products to the matrices, writes a model that everything opens, and says how it differs from "
        "the adapter over its base: bfloat16 rounds small changes away.",
        ("shoal policy merge runs/wordle/checkpoints/final --out merged", "a checkpoint of a run, with its base"),
        ("shoal policy merge ADAPTER --base MODEL --out merged --dtype float32", "an adapter alone"),
    )  # fmt: skip
    q.add_argument("adapter", type=Path, metavar="ADAPTER", help="a directory with adapter_config.json")
    q.add_argument("--base", type=Path, metavar="DIR", help="its base, if that is not in the same directory")
    q.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the model; must not exist")
    q.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="", help="precision of the files (default: the base's)"
    )
    threads_argument(q)


def evaluate(args: argparse.Namespace) -> None:
    from shoal.config import wait_without_spinning

    wait_without_spinning()
    from shoal.jobs import evaluate as role

    changes = role.EvalChanges(
        args.env, args.env_args, args.episodes, args.seed, args.samples, args.temperature, args.max_turn_tokens,
        args.max_tokens,
    )  # fmt: skip
    role.main(role.planned(args.checkpoint, changes), args.out, args.json, args.threads or cores(), args.device)


def sft(args: argparse.Namespace) -> None:
    from shoal.config import wait_without_spinning

    wait_without_spinning()
    from shoal.jobs import sft as role

    log_to_stderr()
    flags = {"eval_every": args.eval_every, "stop_at": args.stop_at}
    role.main(args.recipe, args.out, args.set + [f"{key}={value}" for key, value in flags.items() if value is not None])


def calibrate(args: argparse.Namespace) -> None:
    from shoal.jobs import calibrate as role

    role.main(
        args.recipe, args.set,
        role.CalibrateOptions(args.episodes, args.safety, args.write, args.save, args.others, args.device, args.engine),
    )  # fmt: skip


def merge(args: argparse.Namespace) -> None:
    from shoal.jobs import merge_adapter as role

    say(role.main(args.adapter, args.base, args.out, args.dtype, args.threads or cores()))

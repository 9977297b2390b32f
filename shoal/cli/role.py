"""`shoal role`: how the launcher starts a role of a run on this machine. People do not type it, and no help shows it.

Roles are imported when one starts.
"""

import argparse
import contextlib
import signal
from pathlib import Path
from typing import Any, Literal

from shoal.cli.process_setup import log_to_stderr
from shoal.errors import ShoalError


def add_commands(commands: Any) -> None:
    """Hidden: the launcher's way to start a role. It ends when its standard input closes."""
    p = commands.add_parser("role")
    p.set_defaults(act=role)
    p.add_argument(
        "name",
        choices=(
            "coordinator",
            "origin",
            "stage",
            "prompts",
            "trainer",
            "rank",
            "validator",
            "worker",
            "evaluate",
            "logger",
            "dashboard",
        ),
    )
    for flag in ("--run-dir", "--meeting", "--shifts"):
        p.add_argument(flag, type=Path)
    p.add_argument("--url", default="")
    p.add_argument("--options", default="{}")


def role(args: argparse.Namespace) -> None:
    """A role of a run as the launcher starts it."""
    from shoal.launch.role_process import die_with_parent

    die_with_parent()
    # Until a role handles SIGTERM itself, the signal ends it as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    import msgspec

    from shoal.config.role_options import EvalOptions, NodeOptions

    options = msgspec.json.decode(args.options)
    log_to_stderr(options.get("name") or args.name, _log_form(args.run_dir))
    if args.name == "coordinator":
        from shoal.roles.coordinator.main import main

        main(args.run_dir)
    elif args.name == "origin":
        from shoal.roles import origin

        origin.main(args.run_dir)
    elif args.name == "stage":
        from shoal.roles.env_server import server as stage

        stage.main(args.run_dir)
    elif args.name == "prompts":
        from shoal.jobs import prompt_preview

        prompt_preview.main(args.run_dir)
    elif args.name == "dashboard":
        from shoal.views.web.serve import serve_hosted

        serve_hosted(args.run_dir)
    elif args.name == "logger":
        from shoal.roles.trackers import main as logger

        logger.main(args.run_dir)
    elif args.name == "trainer":
        from shoal.roles import trainer

        trainer.main(args.run_dir, args.url, args.shifts)
    elif args.name == "rank":
        from shoal.roles.trainer import rank

        rank.main(args.run_dir, args.url, args.meeting)
    elif args.name == "validator":
        from shoal.roles import validator

        validator.main(msgspec.convert(options, NodeOptions))
    elif args.name == "worker":
        from shoal.roles.worker import worker

        worker.main(msgspec.convert(options, NodeOptions))
    else:
        from shoal.jobs import evaluate

        evaluate.for_run(args.run_dir, msgspec.convert(options, EvalOptions))


def _log_form(run_dir: Path | None) -> Literal["text", "json"]:
    """How the run file wants logs written. A folder that cannot be read is reported by the role."""
    from shoal.run_folder import RunFolder

    with contextlib.suppress(ShoalError):
        return RunFolder(run_dir).config().logging.format if run_dir else "text"
    return "text"

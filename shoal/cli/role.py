"""`shoal role` and `shoal stage-job`: how the launcher and a pipeline start a process. People do not type them, and no help
shows them.

What a process needs is imported when it starts. It ends when its standard input closes.
"""

import argparse
import contextlib
import signal
from pathlib import Path
from typing import Any, Literal, TypeVar

from shoal.cli.options import log_to_stderr
from shoal.errors import ConfigError, ShoalError

ROLES = (
    "coordinator", "origin", "stage", "prompts", "trainer", "rank", "validator", "worker", "evaluate", "logger",
    "dashboard",
)  # fmt: skip

T = TypeVar("T")


def add_commands(commands: Any) -> None:
    p = commands.add_parser("role")
    p.set_defaults(act=role)
    p.add_argument("name", choices=ROLES)
    p.add_argument("--run-dir", type=Path, required=True)
    p.add_argument("--options", default="{}")
    p = commands.add_parser("stage-job")
    p.set_defaults(act=stage_job)
    p.add_argument("folder", type=Path)


def role(args: argparse.Namespace) -> None:
    """A role of a run."""
    from shoal.config.role_options import EvalOptions, NodeOptions, TrainerOptions

    run_dir: Path = args.run_dir
    if args.name in ("validator", "worker"):
        node = _read(args.options, NodeOptions)
        _begin(node.name or args.name, run_dir)
        if args.name == "validator":
            from shoal.roles import validator

            validator.main(node)
        else:
            from shoal.roles.worker import worker

            worker.main(node)
        return
    _begin(args.name, run_dir)
    if args.name == "coordinator":
        from shoal.roles.coordinator.main import main

        main(run_dir)
    elif args.name == "origin":
        from shoal.roles import origin

        origin.main(run_dir)
    elif args.name == "stage":
        from shoal.roles.env_server import server as stage

        stage.main(run_dir)
    elif args.name == "prompts":
        from shoal.jobs import prompt_preview_job

        prompt_preview_job.main(run_dir)
    elif args.name == "dashboard":
        from shoal.views.web.page_server import serve_hosted

        serve_hosted(run_dir)
    elif args.name == "logger":
        from shoal.roles.trackers import main as logger

        logger.main(run_dir)
    elif args.name == "trainer":
        from shoal.roles import trainer

        options = _read(args.options, TrainerOptions)
        trainer.main(run_dir, options.url, Path(options.shifts) if options.shifts else None)
    elif args.name == "rank":
        from shoal.roles.trainer import rank

        options = _read(args.options, TrainerOptions)
        rank.main(run_dir, options.url, Path(options.meeting))
    else:
        from shoal.jobs import evaluate

        evaluate.for_run(run_dir, _read(args.options, EvalOptions))


def stage_job(args: argparse.Namespace) -> int:
    """A stage of a pipeline."""
    _begin("", None)
    from shoal.launch.pipeline.run_stage_job import do

    return do(args.folder)


def _begin(name: str, run_dir: Path | None) -> None:
    from shoal.launch.role_process import die_with_parent

    die_with_parent()
    # Until a role handles SIGTERM itself, the signal ends it as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log_to_stderr(name, _log_form(run_dir))


def _read(options: str, kind: type[T]) -> T:
    import msgspec

    try:
        return msgspec.json.decode(options, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"--options is no {kind.__name__} ({error}): a launcher starts roles") from None


def _log_form(run_dir: Path | None) -> Literal["text", "json"]:
    """How the run file wants logs written. A folder that cannot be read is reported by the role."""
    from shoal.run_folder import RunFolder

    with contextlib.suppress(ShoalError):
        return RunFolder(run_dir).config().logging.format if run_dir else "text"
    return "text"

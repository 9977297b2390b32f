"""The section of a run file about where its figures and its logs go.

Read by `sections`, and like it made from TOML by `load`.
"""

from typing import Literal

from shoal.tree import Section

LOGGERS = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "tensorboard"}
"""The package that each logger needs, which is also the name of its extra. `jsonl` needs none."""


class LoggingConfig(Section, frozen=True):
    """Where the run's figures go, and how its processes write their logs."""

    to: tuple[Literal["jsonl", "wandb", "trackio", "tensorboard"], ...] = ("jsonl",)
    """Any number of loggers. jsonl is the file metrics.jsonl, which is always written; the others need their packages, and
    W&B writes files alone unless WANDB_API_KEY or WANDB_MODE say otherwise."""
    project: str = "shoal"
    """The project to which the run belongs in W&B and in trackio."""
    format: Literal["text", "json"] = "text"
    """How lines of logs are written: for people, or as one JSON object each."""

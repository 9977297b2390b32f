"""The first prompt of each environment of a run, written to a file: for the host to see what the policy will read.

It needs neither torch nor the network.
"""

import tempfile
from pathlib import Path

from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig, sampling_of
from shoal.envs.load import env_of
from shoal.envs.prompt_preview import first_prompt, no_task_begins, odd_prompts
from shoal.errors import ConfigError, MessagesRefused, PromptsTooLong, ShoalError
from shoal.models.random_model import write_all_but_weights
from shoal.models.tokenizer_loader import difference_from_file
from shoal.protocol.messages import Sampling
from shoal.run_folder import RunFolder, write_atomically


def main(run_dir: Path) -> None:
    """Write the prompts to the run's folder. Raises `ShoalError` if the policy's tokenizer does not open, if its chat
    template refuses or hides an environment's messages, if no prompt leaves room for a turn, or if an environment does not
    load or begins none of the tasks that are tried."""
    folder = RunFolder(run_dir)
    config = folder.config()
    with tempfile.TemporaryDirectory() as scratch:
        policy = folder.policy if folder.policy.exists() else Path(config.policy.path or scratch)
        if policy == Path(scratch):  # the trainer makes the policy later
            write_all_but_weights(config.policy.tiny, policy)
        renderer = Renderer.from_directory(policy)
        difference = difference_from_file(policy)
    texts = [_shown(folder, env, renderer, sampling_of(config)) for env in config.envs]
    texts += filter(None, [renderer.beyond_model(), difference])
    write_atomically(folder.first_prompts, "\n".join(texts).encode("utf-8", "replace"))


def _shown(folder: RunFolder, env: EnvConfig, renderer: Renderer, sampling: Sampling) -> str:
    listed, game = folder.task_list(env), env_of(env)
    tasks = listed.tasks if listed else range(game.num_tasks)
    try:
        shown = first_prompt(env.label, game, renderer, sampling, tasks[0])
        return "\n".join(filter(None, (shown, odd_prompts(env.label, game, renderer, sampling, tasks))))
    except (MessagesRefused, PromptsTooLong):
        raise  # guard: refused-prompts-begin-no-run
    except ShoalError as error:
        said = " ".join(str(error).split())
        if no_task_begins(game, renderer, sampling, tasks):  # guard: some-task-begins
            raise ConfigError(f"no task of environment {env.label} that was tried can begin: {said}") from None
        return f"first prompt of {env.label}: it cannot be shown: {said}"

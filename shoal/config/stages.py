"""The stages file: which stages a run of stages has, by which recipe each goes, and what it takes from earlier ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.config.load import load_run, load_sft, set_key
from shoal.config.run_config import Name, RunConfig, SftConfig
from shoal.errors import ConfigError
from shoal.protocol.field_types import Count, Finite, Positive, Share, Whole
from shoal.typed_toml import Section, from_tree, merge, read_toml

FROM = "stage:"
"""Comes before the name of the stage that something is taken from."""


class NamedStage(Section, frozen=True, kw_only=True, tag_field="kind"):
    """What all stages have."""

    name: Annotated[str, Meta(pattern=r"\A[\w-]+\Z", description="use only letters, digits, - and _")]
    """Names the stage. Letters, digits, - and _."""


class RecipeStage(NamedStage, frozen=True, kw_only=True):
    """What stages with a recipe have."""

    recipe: str
    """A recipe of `shoal sft` for sft stages, else a run file, relative to the stages file. Filter stages take its `envs`
    and `sampling`; eval stages its `eval`, too."""
    set: tuple[str, ...] = ()
    """Overrides of the recipe's keys, such as "steps=100"."""


class SftStage(RecipeStage, frozen=True, kw_only=True, tag="sft"):
    """Supervised fine-tuning, as `shoal sft` does it. It makes a policy."""

    policy: str = ""
    """stage:NAME: the policy to start from. Empty: the recipe's own."""
    examples: str = ""
    """stage:NAME, a reject stage: learn from the rollouts that it chose, in the place of scripted games."""


class RlStage(RecipeStage, frozen=True, kw_only=True, tag="rl"):
    """A whole run on this machine, as `shoal run` does it. It makes a policy, and rollouts to choose from."""

    policy: str = ""
    """stage:NAME: the policy to start from. Empty: the run file's own."""
    tasks: str = ""
    """stage:NAME, a filter stage: draw only from the tasks that it kept. Empty: what the run file says."""
    teacher: str = ""
    """stage:NAME, of runs with `train.algorithm.advantage = "teacher"`: the policy that judges each token. Empty: what the
    run file says."""
    reward_model: str = ""
    """stage:NAME, a reward_model stage, of runs with `train.algorithm.advantage = "reward_model"`: what scores each
    rollout. Empty: what the run file says."""


class FilterStage(RecipeStage, frozen=True, kw_only=True, tag="filter"):
    """An offline filter: the tasks of which a policy solves some rollouts, but not all (INTELLECT-2, arXiv:2505.07291). The
    policy may be a smaller one than what later stages train."""

    policy: str = ""
    """stage:NAME: the policy that plays. Empty: the run file's own policy.path."""
    env: str = ""
    """Label of the environment whose tasks are measured; empty if the run file has one."""
    rollouts: Count = 8
    """Rollouts of each task."""
    low: Share = 0.1
    """Keep tasks of which at least this share of the rollouts is solved. What solved is: `solved` in [[envs]]."""
    high: Share = 0.8
    """Keep tasks of which at most this share of the rollouts is solved."""
    most: Whole = 0
    """Tasks measured, the first of the environment; 0 is all."""


class EvalStage(RecipeStage, frozen=True, kw_only=True, tag="eval"):
    """An evaluation on the held-out tasks of a run file: by its `envs`, `sampling` and `eval`."""

    policy: str
    """stage:NAME: the policy to evaluate; or a directory, relative to the stages file."""


class MergeStage(NamedStage, frozen=True, kw_only=True, tag="merge"):
    """A whole model from a policy that is an adapter over its base, as `shoal policy merge` makes it."""

    policy: str
    """stage:NAME: the policy to merge; or a directory, relative to the stages file."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Precision of the files; empty is the base's."""
    threads: Count = 1
    """CPU threads."""


class RejectStage(NamedStage, frozen=True, kw_only=True, tag="reject"):
    """Rejection sampling: from each group that a run learned from, the rollouts that a later sft stage imitates."""

    rollouts: str
    """stage:NAME, an rl stage: whose groups."""
    rule: Literal["raft", "star"] = "raft"
    """raft: the best `keep` of each group (arXiv:2304.06767). star: those with at least the reward `right`
    (arXiv:2203.14465)."""
    keep: Count = 1
    """Rollouts of each group, for raft."""
    right: Finite = 1.0
    """Least reward of a rollout that is right, for star."""
    most: Whole = 0
    """Rollouts of each group at most, for star; 0 is all."""
    last_steps: Whole = 0
    """Groups of so many last steps only; 0 is all."""


class PairsStage(NamedStage, frozen=True, kw_only=True):
    """What stages that learn from pairs of answers have."""

    policy: str
    """stage:NAME: the policy to start from, of a reward_model stage a whole model; or a directory, relative to the stages
    file."""
    rollouts: str = ""
    """stage:NAME, an rl stage: of each group, the best and the worst rollout by reward are a pair."""
    pairs: str = ""
    """In the place of rollouts: a file, relative to the stages file, with a JSON object in each line: `prompt`, `chosen`
    and `rejected`, each a text or chat messages. `tools` and `chat_template_kwargs` reach the chat template."""
    last_steps: Whole = 0
    """Groups of so many last steps of the run only; 0 is all."""
    steps: Count = 100
    """Training steps."""
    batch: Count = 32
    """Pairs a step."""
    lr: Positive = 1e-4
    """Learning rate at its highest; it falls to a tenth along a cosine."""
    warmup_steps: Whole = 10
    """Steps in which the learning rate climbs from 0."""
    max_grad_norm: Positive = 1.0
    """A longer gradient is scaled down to this norm."""
    max_tokens: Count = 512
    """Pairs with a longer row are left out and counted, tokens. So are those with more than the model's positions."""
    seed: Whole = 0
    """Fixes the order of the pairs."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the files that are written."""
    threads: Count = 1
    """CPU threads."""


class DpoStage(PairsStage, frozen=True, kw_only=True, tag="dpo"):
    """Direct preference optimisation (arXiv:2305.18290): from pairs of answers, of which one is preferred. It makes a
    policy. The reference is the policy that it starts from. One pair in eight is not learned from, but measured;
    of fewer than 16, all are both."""

    beta: Positive = 0.1
    """Weight of the KL divergence from the reference."""


class RewardModelStage(PairsStage, frozen=True, kw_only=True, tag="reward_model"):
    """A reward model: the layers of a policy below a head of one number, trained on pairs of answers, of which one is
    preferred (Bradley and Terry 1952; arXiv:2203.02155, equation 1). One pair in eight is not learned from, but
    measured; of fewer than 16, all are both."""


Stage = SftStage | RlStage | FilterStage | EvalStage | MergeStage | RejectStage | DpoStage | RewardModelStage

POLICY_MAKERS = (SftStage, RlStage, MergeStage, DpoStage)

GIVES: dict[str, tuple[type[Stage], ...]] = {
    "policy": POLICY_MAKERS,
    "teacher": POLICY_MAKERS,
    "reward_model": (RewardModelStage,),
    "rollouts": (RlStage,),
    "examples": (RejectStage,),
    "tasks": (FilterStage,),
}
"""Which stages give what another may take, by the key that takes it."""


MODELS = {"policy": "policy.path", "teacher": "train.teacher", "reward_model": "train.reward_model"}
"""Keys of a recipe that another stage's model takes the place of, by the key of the stage that names it."""


NEEDED = {
    "recipe": "write its path",
    "policy": f'write "{FROM}NAME", or a directory',
    "rollouts": f'write "{FROM}NAME"',
}
"""What to write for keys that some kinds of stages need."""


class StagesConfig(Section, frozen=True, kw_only=True):
    """A stages file."""

    name: Name
    """Names the run of stages and its folder, runs/NAME."""
    measure: str = ""
    """Run file, relative to the stages file, on whose held-out tasks each policy is evaluated, before and after its stage.
    Empty: no more than what each stage measures itself."""
    measure_set: tuple[str, ...] = ()
    """Overrides of its keys, such as "eval.episodes=64"."""
    stages: tuple[Stage, ...]
    """In the order in which they are done."""


def load_stages(path: Path, overrides: Sequence[str] = (), quick: bool = False) -> StagesConfig:
    """Read a stages file, apply overrides such as `rl.steps=3`, which name a stage, and check what stages take.

    With `quick`, the keys of the table `[quick]` override the others, those of `[quick.stages.NAME]` the stage's.
    Raises `ConfigError`.
    """
    tree = read_toml(path, "a stages file")
    short = tree.pop("quick", None)
    if "envs" in tree or "env" in tree:
        right = "run" if "envs" in tree else "sft"
        raise ConfigError(f"{path} is a recipe of `shoal {right}`, not a stages file: name it as a stage's recipe")
    if quick:
        if not isinstance(short, dict):
            raise ConfigError(f"{path} has no [quick] table, so it cannot be run with --quick: leave --quick out")
        tree = _quickened(tree, short, path)
    for override in overrides:
        _override(tree, override, path)
    config = from_tree(tree, StagesConfig, str(path))
    _check(config, path)
    return config


def settings_of(stage: Stage, beside: Path) -> RunConfig | SftConfig | None:
    """What a stage's recipe says after overrides; None for kinds without a recipe. Raises `ConfigError`.

    A policy from another stage is policy.path = "stage:NAME", and so are train.teacher and train.reward_model.
    """
    if not isinstance(stage, RecipeStage):
        return None
    named = {key: getattr(stage, field, "") for field, key in MODELS.items()}
    paths = [f'{key}="{model}"' for key, model in named.items() if model]
    file, overrides = beside / stage.recipe, [*stage.set, *paths]
    return load_sft(file, overrides) if isinstance(stage, SftStage) else load_run(file, overrides)


def kind_of(stage: Stage) -> str:
    """As the stages file says it."""
    return str(stage.__struct_config__.tag)


def policy_directory(stage: Stage) -> str:
    """The directory that a stage begins with which is no other stage's and no recipe's; empty if there is none."""
    if not isinstance(stage, EvalStage | MergeStage | PairsStage):
        return ""  # of others, the recipe says it
    return "" if stage.policy.startswith(FROM) else stage.policy


def taken_by(stage: Stage) -> dict[str, str]:
    """Names of the stages that a stage takes something from, by the key that says so."""
    taken = {key: getattr(stage, key, "") for key in GIVES if not (key == "policy" and policy_directory(stage))}
    return {key: value.removeprefix(FROM) for key, value in taken.items() if value and isinstance(value, str)}


def _quickened(tree: dict[str, Any], short: dict[str, Any], path: Path) -> dict[str, Any]:
    by_name = short.pop("stages", {})
    if not isinstance(by_name, dict) or not all(isinstance(over, dict) for over in by_name.values()):
        raise ConfigError(f"{path}: quick.stages: write the keys of the stage NAME in a table [quick.stages.NAME]")
    stages = [dict(stage) for stage in _listed(tree, path)]
    for name, over in by_name.items():
        _named(stages, name, path, f"[quick.stages.{name}]").update(over)
    return merge(tree, {"name": f"{tree.get('name')}-quick"} | short | {"stages": stages})


def _override(tree: dict[str, Any], override: str, path: Path) -> None:
    """Add `NAME.KEY=VALUE` to what the stage NAME overrides; a stage without a recipe has the key itself."""
    name, dot, rest = override.partition(".")
    if not dot or "=" not in rest or "=" in name:
        raise ConfigError(f"--set {override}: write it as stage.key=value, for example --set rl.steps=10")
    stage = _named(_listed(tree, path), name, path, f"--set {override}")
    if "recipe" in stage:
        stage["set"] = [*stage.get("set", ()), rest]
    else:
        set_key(stage, rest)


def _listed(tree: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    stages = tree.get("stages")
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise ConfigError(f"{path}: stages: at least one [[stages]] section is needed")
    return stages


def _named(stages: list[dict[str, Any]], name: str, path: Path, what: str) -> dict[str, Any]:
    for stage in stages:
        if stage.get("name") == name:
            return stage
    known = ", ".join(str(stage.get("name")) for stage in stages)
    raise ConfigError(f"{path}: {what}: there is no stage {name}; stages: {known}")


def _check(config: StagesConfig, path: Path) -> None:
    """Raise `ConfigError` for names that cannot be used, and for stages that take what is not there."""
    if not config.stages:
        raise ConfigError(f"{path}: stages: at least one [[stages]] section is needed")
    by_name: dict[str, Stage] = {}
    for stage in config.stages:
        if stage.name in by_name:  # guard: one-stage-a-name
            raise ConfigError(f"{path}: two stages are named {stage.name}: give each its own name")
        by_name[stage.name] = stage
    before: set[str] = set()
    for stage in config.stages:
        needed = [field.name for field in msgspec.structs.fields(stage) if field.required and field.name in NEEDED]
        for key in needed:
            if not getattr(stage, key):  # guard: needed-keys-are-not-empty
                raise ConfigError(f'{path}: stage {stage.name}: {key} = "": {NEEDED[key]}')
        if isinstance(stage, FilterStage) and stage.low > stage.high:
            raise ConfigError(f"{path}: stage {stage.name}: low = {stage.low}: must be at most high = {stage.high}")
        if isinstance(stage, PairsStage) and bool(stage.rollouts) == bool(stage.pairs):
            raise ConfigError(
                f"{path}: stage {stage.name}: pairs come from `rollouts` (an rl stage) or from `pairs` (a file): name one "
                "of them"
            )
        if (own := policy_directory(stage)) in by_name:
            raise ConfigError(f'{path}: stage {stage.name}: policy = {own}: for that stage, write "{FROM}{own}"')
        for key in taken_by(stage):
            _check_taken(stage, key, by_name, before, path)
        before.add(stage.name)


def _check_taken(stage: Stage, key: str, by_name: dict[str, Stage], before: set[str], path: Path) -> None:
    value = getattr(stage, key)
    what, name = f"{path}: stage {stage.name}: {key} = {value}", value.removeprefix(FROM)
    if not value.startswith(FROM):
        own = f". A model of your own is the recipe's {MODELS[key]}" if key in MODELS else ""
        raise ConfigError(f'{what}: write it as "stage:NAME"{own}')
    if name not in by_name:
        raise ConfigError(f"{what}: there is no stage {name}; stages: {', '.join(by_name)}")
    if name not in before:  # guard: stage-takes-from-earlier-ones
        loop = stage.name in _behind(name, by_name)
        why = f"{name} itself takes from it: a loop" if loop else "that comes later: move it up"
        raise ConfigError(f"{what}: a stage takes from earlier ones, and {why}")
    if not isinstance(by_name[name], GIVES[key]):  # guard: stage-takes-what-is-given
        known = ", ".join(str(kind.__struct_config__.tag) for kind in GIVES[key])
        raise ConfigError(f"{what}: a stage of kind {kind_of(by_name[name])} gives no {key}; {known} would")


def _behind(name: str, by_name: dict[str, Stage]) -> set[str]:
    found, ahead = set[str](), [name]
    while ahead:
        now = ahead.pop()
        if now in by_name and now not in found:
            found.add(now)
            ahead += taken_by(by_name[now]).values()
    return found


def to_settings(stage: Stage) -> dict[str, Any]:
    """A stage's own keys, but for its name, its recipe and what it takes."""
    left_out = {"name", "recipe", "set", *(key for key in GIVES if isinstance(getattr(stage, key, None), str))}
    return {key: value for key, value in msgspec.structs.asdict(stage).items() if key not in left_out}

"""The run file: every key is explained and can be set; mistakes name the nearest key; unsafe changes are found."""

import ast
import inspect
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.losses.agree import LONGEST, MEAN_STD, PAGE
from shoal.config import (
    BOUNDS,
    SAFE_TO_CHANGE,
    EnvConfig,
    RunConfig,
    SftConfig,
    StorageConfig,
    alarm_limits,
    check_run,
    child_environment,
    env_settings,
    keys_that_keep_less,
    load_run,
    load_sft,
    node_home,
    preset_imitation_lr,
    preset_lr,
    unsafe_changes,
    without_hub,
)
from shoal.config import run_config as sections
from shoal.config.load import with_absolute_paths
from shoal.config.trl import TRL_KEYS, TRL_SFT_KEYS
from shoal.config.validate import changed_keys
from shoal.errors import ConfigError
from shoal.protocol import messages, task_draws
from shoal.protocol.algorithm_config import NAMED, Clip, Composition, Grpo
from shoal.protocol.field_types import FINITE, limits_of
from shoal.protocol.messages import run
from shoal.typed_toml import all_keys, from_tree, structs_of, to_tree

SMALL = 'name = "small"\nsteps = 3\n[[envs]]\nname = "arithmetic"\n'


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


# --- every key is explained ---


def explained_fields() -> dict[str, set[str]]:
    """By class, the fields that are followed by a docstring in the source."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(
        "".join(map(inspect.getsource, (sections, env_settings, alarm_limits, run, task_draws)))
    ).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                field.target.id
                for field, after in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            }
    return found


def structs_in(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """All sections below one, without the parts of algorithms, which the generated tables explain."""
    for field in msgspec.structs.fields(kind):
        for inner in structs_of(field.type):
            if inner.__module__ != Composition.__module__:
                yield inner
                yield from structs_in(inner)


SECTIONS = {RunConfig, SftConfig, *structs_in(RunConfig), *structs_in(SftConfig)}


@pytest.mark.parametrize("kind", sorted(SECTIONS, key=str), ids=lambda kind: kind.__name__)
def test_every_key_has_a_sentence(kind: type[msgspec.Struct]) -> None:
    assert (kind.__doc__ or "").strip().endswith((".", ")."))
    explained = set().union(*(explained_fields().get(one.__name__, set()) for one in kind.__mro__))
    for field in msgspec.structs.fields(kind):
        is_section = field.name == "envs" or next(structs_of(field.type), None) is not None
        assert field.name in explained or is_section, f"{kind.__name__}.{field.name} has no sentence"


@pytest.mark.parametrize(
    ("before", "after", "keys"),
    [
        ({"retain": "all"}, {}, ["storage.retain"]),
        ({"retain": "all"}, {"retain": "batches"}, ["storage.retain"]),
        ({"retain": "batches"}, {}, ["storage.retain"]),
        ({"window_steps": 99, "quota_mb": 9999}, {}, ["storage.window_steps", "storage.quota_mb"]),
        ({"retain": "all", "window_steps": 99}, {"retain": "all"}, []),
        ({}, {"retain": "all", "window_steps": 99, "quota_mb": 9999, "state_every": 9, "checkpoint_every": 99}, []),
    ],
)
def test_the_keys_that_keep_less(before: dict[str, Any], after: dict[str, Any], keys: list[str]) -> None:
    assert keys_that_keep_less(StorageConfig(**before), StorageConfig(**after)) == keys


def test_the_keys_that_a_resumed_run_may_change_exist() -> None:
    assert set(SAFE_TO_CHANGE) <= all_keys(RunConfig).keys()


# --- overrides ---


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("workers.count=3", lambda c: c.workers.count == 3),
        ("train.lr=3e-5", lambda c: c.train.lr == 3e-5),
        ("train.algorithm.delta=5", lambda c: c.train.algorithm == Grpo(loss=Clip(delta=5.0))),
        ("name=other", lambda c: c.name == "other"),
        ('name="quoted"', lambda c: c.name == "quoted"),
        ("policy.tiny.tied=true", lambda c: c.policy.tiny.tied is True),
        ("envs.0.args.digits=3", lambda c: c.envs[0].args == {"digits": 3}),
        (" seed = 7", lambda c: c.seed == 7),
    ],
)
def test_any_key_is_overridden(run_file: Path, override: str, read: object) -> None:
    assert callable(read) and read(load_run(run_file, [override]))


def test_bounds_that_are_left_out_are_the_built_in_ones(run_file: Path) -> None:
    run_file.write_text(SMALL + '[verify.bounds."float32/float32"]\ngap = 0.5\n')
    bounds = load_run(run_file, ["verify.bounds.bfloat16/float32.logprob=0.75"]).verify.bounds
    assert bounds.keys() == BOUNDS.keys()
    assert bounds["float32/float32"] == msgspec.structs.replace(BOUNDS["float32/float32"], gap=0.5)
    assert bounds["bfloat16/float32"] == msgspec.structs.replace(BOUNDS["bfloat16/float32"], logprob=0.75)
    assert load_run(run_file).verify.bounds["bfloat16/float32"] == BOUNDS["bfloat16/float32"]


@pytest.mark.parametrize(
    "override", ["gap=0", "logprob=inf", "flipped=0", "flipped=1", "flipped=nan", "mean_gap=0.5", "largest_logit=-1"]
)
def test_bounds_that_refuse_honest_work_or_nothing_are_refused(run_file: Path, override: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf'verify\.bounds\."float32/float32"\.{key} = {value}\b.*: must be '):
        load_run(run_file, [f"verify.bounds.float32/float32.{override}"])


def with_pair(run_file: Path, pair: str) -> RunConfig:
    run_file.write_text(SMALL + f'[verify.bounds."{pair}"]\ngap=1\nflipped=0.1\nmean_gap=0.1\nlogprob=1\n')
    return load_run(run_file)


@pytest.mark.parametrize(
    "pair",
    ["float64", "float32", "float32/float64", "float32/float32/float32", "/float32", "float32/", ":float32/float32",
     "Remote:float32/float32", "9:float32/float32", f"{'k' * 33}:float32/float32", "a:b:float32/float32",
     "local:float32/float32", "float32/local:float32", "remote:/float32", "remote/float32", " float32/float32",
     "remote:float32/float32\\n", "ｒ:float32/float32"],
)  # fmt: skip
def test_a_pair_is_named_by_two_known_dtypes(run_file: Path, pair: str) -> None:
    with pytest.raises(ConfigError, match="name it by the dtypes"):
        with_pair(run_file, pair)


@pytest.mark.parametrize(
    "pair",
    ["remote:float32/float32", "float32/remote-2:float32", f"{'k' * 32}:bfloat16/r:float32", "locals:int8/int8"],
)
def test_a_pair_may_name_another_kind_of_engine(run_file: Path, pair: str) -> None:
    assert with_pair(run_file, pair).verify.bounds.keys() == {*BOUNDS, pair}


def test_a_pair_of_another_kind_needs_the_bounds_that_it_tightens(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r'only tightens verify\.bounds\."int8/float32", which is missing'):
        with_pair(run_file, "remote:int8/float32")


def test_a_run_needs_bounds_for_its_own_dtype() -> None:
    tree = {"name": "x", "steps": 1, "envs": [{"name": "arithmetic"}], "sampling": {"dtype": "int8"}}
    config = from_tree(tree | {"verify": {"bounds": {}}}, RunConfig, "test")
    with pytest.raises(ConfigError, match=r'"int8/int8".* is missing: `shoal calibrate'):
        check_run(config)


def test_every_scalar_key_can_be_set_to_its_own_value(run_file: Path) -> None:
    config = load_run(run_file)

    def leaves(tree: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
        found = []
        for name, value in tree.items():
            found += leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
        return found

    overrides = [
        f"{key}={str(value).lower() if isinstance(value, bool) else repr(value)}"
        for key, value in leaves(to_tree(config))
        if not isinstance(value, list)
    ]
    assert len(overrides) > 50
    assert load_run(run_file, overrides) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workers.count", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("workers.cuont=3", "did you mean workers.count"),
        ("envs.7.name=x", "not an item of the list"),
        ("steps.more=1", "steps is not a section"),
        ("steps=many", "steps: Expected `int`, got `str`"),
        ("verify.bounds.float32/float32.gpa=1", "did you mean verify.bounds.gap"),
    ],
)
def test_wrong_override_says_what_is_wrong(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(run_file, [override])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("other", ["host.origin_port", "host.dashboard_port"])
def test_two_processes_of_a_run_have_two_ports(run_file: Path, other: str) -> None:
    with pytest.raises(ConfigError, match=f"host.port = 18470 and {other} = 18470: .* 0 takes a free one"):
        load_run(run_file, ["host.port=18470", f"{other}=18470"])
    assert load_run(run_file, ["host.port=18470", f"{other}=18471"]).host.port == 18470


# --- mistakes in the file ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL + "[trian]\nlr = 1.0\n", "unknown key trian; did you mean train?"),
        (SMALL + "[train]\nlearning_rate = 1.0\n", "unknown key train.learning_rate"),
        (SMALL + "[rollouts]\ngroupsize = 8\n", "unknown key rollouts.groupsize; did you mean rollouts.group_size?"),
        (SMALL + "[train]\ngroup_size = 8\n", "did you mean rollouts.group_size?"),
        (SMALL.replace('"arithmetic"', '"arithmetic"\nwieght = 2.0'), "did you mean envs.weight?"),
        (SMALL + "[train]\nlr = 'fast'\n", "train.lr: Expected `float`, got `str`"),
        ("steps = 3\n", "missing required field `name`"),
        ("name = \n", "is not valid TOML"),
        (SMALL + '[train]\nmoments = "4bit"\n', "'4bit'; known: 'float32', '8bit', 'offloaded'"),
        (SMALL + "[train]\nepsilon = 0.3\n", "unknown key train.epsilon; did you mean train.algorithm.loss.eps_low?"),
        (SMALL + "[train]\nadvantage = 'mean'\n", "train.advantage; did you mean train.algorithm.advantage?"),
        (SMALL + "[train]\nalgorithm = 'grpo'\n", "write it as a table, [train.algorithm]"),
        (SMALL + "[train.algorithm]\nname = 'grop'\n", "train.algorithm.name: Invalid value 'grop'; known: grpo"),
        (SMALL + "[train.algorithm]\nentropy = 0.1\n", "did you mean train.algorithm.entropy_bonus?"),
        (SMALL + 'kind = "stage"\n', "envs[0].kind"),
    ],
)
def test_mistake_in_a_run_file_is_one_line_that_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_run(path)
    assert message in str(error.value) and "\n" not in str(error.value)


# --- values out of range, and keys that contradict each other ---

REMEDY = re.compile(r"must (be|have)|\b(add|change|give|leave|lower|name|set|take|use)\b", re.IGNORECASE)


def outside(limits: msgspec.Meta) -> Iterator[float]:
    """Values beyond each end of a range of numbers, none at all, and infinity where the range ends."""
    if limits.ge is not None:
        yield from (limits.ge - 1, -math.inf) if limits.ge != -FINITE else (-math.inf,)
    if limits.gt is not None:
        yield from (limits.gt, limits.gt - 1)
    if limits.le is not None:
        yield from (limits.le + 1, math.inf) if limits.le != FINITE else (math.inf,)
    if limits.lt is not None:
        yield from (limits.lt, limits.lt + 1)
    yield math.nan


def ranged(kind: type[msgspec.Struct]) -> list[tuple[str, bool, msgspec.Meta]]:
    """Keys of numbers with a range, each with whether it is whole."""
    found = []
    for key, field in all_keys(kind).items():
        limits = limits_of(getattr(field, "type", None))
        if limits is not None and limits.pattern is None and "algorithm" not in key and "bounds" not in key:
            found.append((key, field.type.__origin__ is int, limits))
    return found


@pytest.mark.parametrize(("key", "whole", "limits"), ranged(RunConfig), ids=str)
def test_a_number_out_of_range_is_refused_in_one_line_with_key_value_and_range(
    run_file: Path, key: str, whole: bool, limits: msgspec.Meta
) -> None:
    if key in ("monitors.limits", "envs.weights"):
        pytest.skip("a table, whose range is of its values")
    config = load_run(run_file)
    tree = msgspec.to_builtins(config)
    for value in outside(limits):
        if whole and not math.isfinite(value):
            continue
        parts = key.replace("envs.", "envs.0.").split(".")
        table = tree = msgspec.to_builtins(config)
        for part in parts[:-1]:
            table = table[int(part) if part.isdigit() else part]
        table[parts[-1]] = int(value) if whole else float(value)
        named = re.escape(key.replace("envs.", "envs[0]."))
        pattern = rf"^{named} = {re.escape(str(table[parts[-1]]))}: must be (at least|above|from|finite)"
        with pytest.raises(ConfigError, match=pattern) as error:
            from_tree(tree, RunConfig, "")
        assert "\n" not in str(error.value)


def test_numbers_of_a_run_file_have_a_range_but_for_those_that_an_environment_checks() -> None:
    keys = {key for key, field in all_keys(RunConfig).items() if getattr(field, "type", None) in (int, float)}
    assert len(ranged(RunConfig)) > 50 and all(key.startswith("envs.shaping.") for key in keys)


@pytest.mark.parametrize("norm", ["-1.0", "0.0", "nan", "inf"])
def test_a_norm_of_gradients_never_turns_them_around(run_file: Path, norm: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.max_grad_norm = {norm}: must be above 0"):
        load_run(run_file, [f"train.max_grad_norm={norm}"])


def test_a_key_that_a_section_sets_anew_keeps_its_range() -> None:
    kinds = [*SECTIONS, *NAMED, *vars(messages).values()]
    for kind in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        fields = {field.name: limits_of(field.type) for field in msgspec.structs.fields(kind)}
        for base in (
            base for base in kind.__bases__ if issubclass(base, msgspec.Struct) and base is not msgspec.Struct
        ):
            for field in msgspec.structs.fields(base):
                assert limits_of(field.type) in (None, fields[field.name]), f"{kind.__name__}.{field.name}"


LOSSES = """
    clip.eps_low=1.0 clip.eps_low=0.0 clip.eps_high=inf clip.eps_high=0.0 clip.delta=1.1 clip.delta=inf clip.delta=nan
    gspo.eps_low=nan gspo.eps_high=0.0 cispo.least=1.0 cispo.least=-0.1 cispo.most=1.0 cispo.most=inf dppo.bound=0.0
    dppo.bound=1.0
"""
CORRECTIONS = """
    truncate.most=0.5 truncate.most=inf icepop.least=-0.1 icepop.most=1.0 sequence_mask.least=1.0 sequence_mask.most=nan
    geometric_mask.most=1.0
"""
CREDITS = (
    "vine.continuations=0 vine.every=0 vine.most=0 turns.most=257 turns.discount=0.0 turns.discount=1.5 steps.most=0"
)
WHOLE_ALGORITHM = """
    entropy_bonus=nan entropy_bonus=inf entropy_target=-1.0 squared_ratio=inf divisor_tokens=-1.0 kl.beta=-0.1 kl.beta=nan
"""
PARTS = [
    *(("loss", 'loss={{name="{}", {}}}', one) for one in LOSSES.split()),
    *(("corrections[0]", 'ratio_to="old", corrections=[{{name="{}", {}}}]', one) for one in CORRECTIONS.split()),
    *(("credit", 'credit={{name="{}", {}}}', one) for one in CREDITS.split()),
]


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        *((f"train.algorithm.{one}", one.replace("=", " = ")) for one in WHOLE_ALGORITHM.split()),
        *(
            (
                f'train.algorithm={{name="composition", {table.format(*one.split(".", 1))}}}',
                f"{where}.{one.partition('.')[2].replace('=', ' = ')}",
            )
            for where, table, one in PARTS
        ),
    ],
)
def test_a_number_of_an_algorithm_out_of_range_is_refused(run_file: Path, override: str, refused: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.algorithm\.{re.escape(refused)}: must be ") as error:
        load_run(run_file, [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("name=../elsewhere", "name = '../elsewhere'"),
        ("logging.project=-x", "logging.project = '-x'"),
        ('monitors.limits={"disk.hours"=-1.0}', 'monitors.limits."disk.hours" = -1.0'),
        ("validators.count=2", "validators.count = 2"),
        ("rollouts.group_size=12", "rollouts.block_rollouts = 64"),
        ("rollouts.max_staleness=0 verify.audit_rate=0.5", "verify.audit_rate = 0.5"),
        ("rollouts.max_staleness=0 verify.worker_share=0.5", "verify.worker_share = 0.5"),
        ("difficulty.curriculum=true", "difficulty.curriculum = true"),
        ("difficulty.floor=0.5", "difficulty.floor = 0.5"),
        ("difficulty.retire_after=2", "difficulty.retire_after = 2"),
        ("difficulty.pools=true difficulty.easy=0.2", "difficulty.hard = 0.2"),
        ("sampling.max_tokens=4096", "sampling.max_tokens = 4096"),
        ("sampling.max_turn_tokens=513", "sampling.max_turn_tokens = 513"),
        ("sampling.max_rollout_tokens=63", "sampling.max_rollout_tokens = 63"),
        ("policy.path=x sampling.max_rollout_tokens=500000", "rollouts.group_size = 16"),
        ("policy.path=x sampling.max_tokens=500000", "rollouts.group_size = 16"),
        ("policy.path=x sampling.max_tokens=2048 rollouts.block_rollouts=4096", "rollouts.block_rollouts = 4096"),
        ("rollouts.group_size=64 rollouts.batch_groups=1024", "rollouts.batch_groups = 1024"),
        ("train.lr=-0.5", "train.lr = -0.5"),
        ("train.minibatches=99", "train.minibatches = 99"),
        ("train.dtype=bfloat16", 'train.dtype = "bfloat16"'),
        ("policy.dtype=int8 train.dtype=bfloat16", 'train.dtype = "bfloat16"'),
        ("train.processes=2 train.moments=8bit", 'train.processes = 2 with train.moments = "8bit"'),
        ("train.processes=2 train.moments=offloaded", 'train.processes = 2 with train.moments = "offloaded"'),
        ("train.processes=2 policy.dtype=int8", 'train.processes = 2 with policy.dtype = "int8"'),
        (
            "train.processes=2 sampling.dtype=int8 verify.bounds.int8/int8.logprob=0.1",
            'train.processes = 2 with sampling.dtype = "int8"',
        ),
        ("train.processes=2 train.device=mps", 'train.processes = 2 with train.device = "mps"'),
        (
            "train.processes=2 policy.path=x policy.implementation=auto",
            "train.processes = 2 with policy.implementation",
        ),
        ("envs.0.kind=episodes envs.0.reproducible=false", "envs.reproducible = false"),
        ("envs.0.max_tokens=513", "envs.max_tokens = 513"),
        ("envs.0.args={a={b=[1,nan]}}", "envs[0].args.a.b[1]"),
        ("envs.0.template={date=2026-01-31}", "envs[0].template.date"),
        ("envs.0.shaping.overlong={limit=9,buffer=1,weight=inf}", "envs[0].shaping.overlong.weight"),
        ("eval.judge={name='a.py',args={x=12:00:00}}", "eval.judge.args.x"),
        ("envs.0.weights={solved=nan}", 'envs[0].weights."solved" = nan'),
        ("seed=18446744073709551616", "seed = 18446744073709551616"),
        ("train.algorithm.entropy_target=1.0", "train.algorithm.entropy_target = 1.0"),
        ("train.algorithm.divisor_tokens=9", "train.algorithm.divisor_tokens = 9.0"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_in_one_line_with_key_value_and_remedy(
    run_file: Path, overrides: str, named: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(run_file, overrides.split())
    said = str(error.value).removeprefix(f"{run_file} --set " + " --set ".join(overrides.split()) + ": ")
    assert said.startswith(named) and REMEDY.search(said.removeprefix(named)) and "\n" not in said


def test_a_config_that_no_file_wrote_is_checked_in_the_same_way(run_file: Path) -> None:
    config = load_run(run_file)
    for key, value in (("lr", math.nan), ("weight_decay", math.inf), ("beta1", 1.0), ("updates_per_batch", 0)):
        wrong = msgspec.structs.replace(config.train, **{key: value})
        with pytest.raises(ConfigError, match=rf"^train\.{key} = {value}: must be "):
            check_run(msgspec.structs.replace(config, train=wrong))


def refused(run_file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_run(run_file, list(overrides))
    return str(error.value).partition("unknown key ")[2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=1", "train.learning_rate; did you mean train.lr?"),
        ("rollouts.num_generations=8", "rollouts.num_generations; did you mean rollouts.group_size?"),
        ("scale_rewards=group", 'did you mean train.algorithm.advantage? (group is "mean_std"'),
        ("sampling.top_p=0.9", "sampling.top_p; there is no key for it: the lease fixes the noise"),
        ("train.algorithm.name=cispo delta=4", 'loss.delta? It needs train.algorithm.loss.name = "clip"'),
        ("train.algorithm.name=ppo beta=0.1", 'kl.beta? (with train.algorithm.kl.place = "weighted_loss"'),
        ("max_length=64", "did you mean sampling.max_tokens?"),
        ("loss_type=sapo", 'did you mean train.algorithm.name? ("sapo" has no counterpart here)'),
        ("vllm_server_port=8000", "there is no key for it: each worker chooses what it samples with"),
        ("use_liger_kernel=1", "no key for it: shoal has no counterpart of this setting of TRL, so leave it out"),
        ("policy.adapter.r=8", "policy.adapter.r; did you mean policy.adapter.rank?"),
        ("train.optimizer=adam", "train.optimizer; known in train: algorithm, lr, schedule"),
        ("batches=1", "batches; known: name, steps"),
    ],
)
def test_a_key_of_trl_is_answered_by_the_key_here_or_why_there_is_none(
    run_file: Path, override: str, message: str
) -> None:
    assert message in refused(run_file, *override.split())


@pytest.mark.parametrize(
    ("refused_value", "hint"),
    [
        ('train.algorithm.name="luspo"', '"gspo" with average = "constant" and divisor_tokens = 1'),
        ("train.algorithm.name=dr-grpo", '(did you mean "dr_grpo"?); known: '),
        ('train.algorithm={name="ppo", average="token"}', '(did you mean "tokens"?); known: '),
        ('train.schedule="linear_with_warmup"', 'here it is "linear" with train.warmup_steps; known: '),
        ('train.algorithm.name="sapo"', "it has no counterpart here; known: grpo, "),
        (
            'train.algorithm={name="composition", corrections=[{name="token_truncate"}]}',
            'here it is "truncate" with most = 3, and train.algorithm.ratio_to = "old"; known: ',
        ),
        ("train.warmup_steps=0.1", "Expected `int`, got `float`; in TRL a value below 1 is a share of the steps"),
        ('train.schedule="fast"', "Invalid enum value 'fast'; known: 'constant', "),
        ('logging.to=["all"]', "Invalid enum value 'all'; known: 'jsonl', "),
    ],
)
def test_a_value_of_trl_is_answered_by_the_setting_here(run_file: Path, refused_value: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(run_file, [refused_value])
    assert hint in str(error.value) and "\n" not in str(error.value)


LUSPO, DR_GRPO = PAGE["page: luspo"][0], PAGE["page: dr_grpo"][0]
ROLLOUTS = msgspec.structs.replace(MEAN_STD, average="rollouts")


@pytest.mark.parametrize(
    ("refused_value", "own", "algorithm"),
    [
        ("loss_type=dapo", "", MEAN_STD),
        ("train.loss_type=bnpo", "", MEAN_STD),
        ("loss_type=grpo", "", ROLLOUTS),
        ("loss_type=dr_grpo", str(LONGEST), DR_GRPO),
        ("loss_type=cispo", "5.0", PAGE["page: cispo"][0]),
        ("loss_type=luspo", "", LUSPO),
        ("importance_sampling_level=sequence", "", PAGE["page: sequence"][0]),
        ("train.algorithm.name=bnpo", "", MEAN_STD),
        ("train.algorithm.name=luspo", "", LUSPO),
        ("train.algorithm.name=token", "", MEAN_STD),
        ("train.algorithm.name=sequence", "", PAGE["page: sequence"][0]),
    ],
)
def test_what_a_hint_says_is_the_algorithm_that_is_compared_with_that_of_trl(
    run_file: Path, refused_value: str, own: str, algorithm: Composition
) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(run_file, [refused_value])
    name, settings = re.findall(r'"(\w+)" with (.*)', str(error.value))[0]
    settings = re.sub(r"your \w+", own, settings)
    given = re.findall(r'([a-z][\w.]+) = (".*?"|\d[\d.]*)', settings)
    told = [f"train.algorithm.{key.removeprefix('train.algorithm.')}={value}" for key, value in given]
    assert load_run(run_file, [f"train.algorithm.name={name}", *told]).train.algorithm == algorithm


def test_every_key_that_a_hint_names_exists_and_no_name_of_trl_is_a_key_here() -> None:
    for kind, names in ((RunConfig, TRL_KEYS), (SftConfig, TRL_SFT_KEYS)):
        keys = all_keys(kind)
        for name, (key, clause) in names.items():
            dotted = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", clause)
            assert (key or clause) and {*([key] if key else []), *dotted} <= keys.keys(), name
            assert name not in keys, "would never be looked up"


def test_a_hint_says_the_default_here_where_that_of_trl_is_another() -> None:
    told = []
    for kind, names in ((RunConfig, TRL_KEYS), (SftConfig, TRL_SFT_KEYS)):
        keys = all_keys(kind)
        for key, clause in names.values():
            if key and (here := re.search(r"\bin TRL, ([\w.]+) here\b", clause)):
                told.append((here[1], keys[key].default))
    assert len(told) == 6 and all(type(default)(said) == default for said, default in told)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("epsilon=0.2",), "epsilon; did you mean train.algorithm.loss.eps_low? (and train.algorithm.loss.eps_high"),
        (("delta=4",), "delta; did you mean train.algorithm.loss.delta?"),
        (("loss.bound=0.1",), 'bound; it needs train.algorithm.loss.name = "dppo"'),
        (
            ("loss.name=cispo", "loss.eps_high=5"),
            'eps_high; it needs train.algorithm.loss.name = "clip" (that of TRL\'s cispo is train.algorithm.loss.most)',
        ),
        (("loss.name=cispo", "loss.eps_low=0.1"), 'eps_low; it needs train.algorithm.loss.name = "clip"'),
    ],
)
def test_a_hint_never_names_the_refused_key(run_file: Path, settings: tuple[str, ...], message: str) -> None:
    said = refused(run_file, "train.algorithm.name=composition", *(f"train.algorithm.{one}" for one in settings))
    assert message in said and f"did you mean {said.partition(';')[0]}?" not in said


def test_several_processes_may_train_what_is_sampled_in_int8_if_claims_cannot_bend_the_ratio(run_file: Path) -> None:
    config = load_run(run_file, ['sampling.dtype="int8"', "train.processes=2"])
    assert (config.sampled_dtype, config.train.processes) == ("int8", 2)


def test_missing_or_binary_run_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_run(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_run(tmp_path / "binary.toml")


def test_the_preset_of_the_learning_rate_falls_with_the_size_of_the_policy() -> None:
    assert [preset_lr(size) for size in (1, 100_000, 804_224, 10_000_000, 600_000_000, 8 * 10**9)] == [
        5e-4, 5e-4, 5e-4, 5e-5, 1e-6, 1e-6,
    ]  # fmt: skip
    assert [preset_imitation_lr(size) for size in (800_000, 10_000_000, 600_000_000)] == [3e-3, 5e-4, 1e-5]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("episods=3", "did you mean episodes"),
        ("learning_rate=3", "did you mean lr?"),
        ("pad_to_multiple_of=8", "shoal has no counterpart of this setting of TRL"),
        ("completion_only_loss=true", "completions alone are learned from"),
        ('publish_dtype="bf16"', "'bf16'; here it is \"bfloat16\"; known: 'float32', "),
        ("max_grad_norm=-1.0", "max_grad_norm = -1.0: must be above 0"),
        ("warmup_steps=-1", "warmup_steps = -1: must be at least 0"),
        ("threads=0", "threads = 0: must be at least 1"),
        ("env.args={x=nan}", "env.args.x: use a text in quotes"),
        ("lr=nan", "lr = nan: must be"),
        ("policy.adapter.rank=8", "unknown key policy.adapter; there is no key for it: all weights are learned"),
        ("lora_r=8", "unknown key lora_r; there is no key for it: all weights are learned"),
        ("warmup_steps=0.1", "Expected `int`, got `float`; in TRL a value below 1 is a share of the steps"),
        ("policy.dtype=bfloat16", "unknown key policy.dtype; did you mean publish_dtype?"),
        ("policy.implementation=auto", "policy.implementation has no effect on policy.tiny: set policy.path"),
    ],
)
def test_an_sft_recipe_is_checked_like_a_run_file(tmp_path: Path, override: str, message: str) -> None:
    path = tmp_path / "sft.toml"
    path.write_text('name = "start"\n[env]\nname = "wordle"\n')
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_sft(path, [override])
    assert load_sft(path, ["steps=7"]) == SftConfig(name="start", env=EnvConfig("wordle"), steps=7)
    assert load_sft(path, ["policy.path=model", "policy.implementation=auto"]).policy.implementation == "auto"


# --- quick runs ---


def test_a_recipe_of_another_command_is_named_as_such() -> None:
    recipes = Path(__file__).parents[1] / "recipes"
    with pytest.raises(
        ConfigError, match=r"wordle-start\.toml is a recipe of `shoal sft`, not a run file.*shoal sft .* --out"
    ):
        load_run(recipes / "wordle-start.toml")
    with pytest.raises(ConfigError, match=r"wordle\.toml is a run file, not a recipe of `shoal sft`.*shoal run "):
        load_sft(recipes / "wordle.toml")
    with pytest.raises(ConfigError, match=r"one_file\.py is not valid TOML.*Give the path of a run file \(\.toml\)"):
        load_run(recipes / "one_file.py")


def test_quick_overrides_the_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL + "[train]\nlr = 1.0\nwarmup_steps = 9\n[quick]\nsteps = 1\n[quick.train]\nlr = 2.0\n")
    quick, whole = load_run(path, quick=True), load_run(path)
    assert (quick.name, quick.steps, quick.train.lr, quick.train.warmup_steps) == ("small-quick", 1, 2.0, 9)
    assert (whole.name, whole.steps, whole.train.lr) == ("small", 3, 1.0)
    assert load_run(path, ["steps=2"], quick=True).steps == 2, "--set has the last word"


def test_a_refused_override_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    with pytest.raises(ConfigError, match=r"run\.toml --set trian\.lr=1: unknown key trian"):
        load_run(path, ["trian.lr=1"])


def test_quick_without_such_a_table_says_so(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="no \\[quick\\] table"):
        load_run(run_file, quick=True)


def test_a_random_policy_overrides_the_other_keys_and_quick_overrides_it(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL + '[random]\nsteps = 2\npolicy = { path = "shape" }\n[quick]\nsteps = 1\n')
    found, both = load_run(path, random_policy=True), load_run(path, quick=True, random_policy=True)
    assert (found.name, found.steps, found.policy.path) == ("small-random", 2, "shape")
    assert (both.name, both.steps, both.policy.path) == ("small-random-quick", 1, "shape")
    assert load_run(path).policy.path == ""
    with pytest.raises(ConfigError, match=r"no \[random\] table.*leave --random-policy out"):
        path.write_text(SMALL)
        load_run(path, random_policy=True)


def test_mistake_in_the_quick_table_is_found(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL + "[quick]\nstps = 1\n")
    with pytest.raises(ConfigError, match="did you mean steps"):
        load_run(path, quick=True)


# --- labels of environments ---


def test_environment_is_labelled_by_its_name_or_the_stem_of_its_file(run_file: Path) -> None:
    for name, label in (("arithmetic", "arithmetic"), ("../games/my_env.py", "my_env"), ("./two.part.py", "two.part")):
        run_file.write_text(SMALL.replace("arithmetic", name))
        assert load_run(run_file).envs[0].label == label
    assert load_run(run_file, ["envs.0.label=hard"]).envs[0].label == "hard"


def test_two_environments_of_one_name_need_labels(run_file: Path) -> None:
    run_file.write_text(SMALL + '[[envs]]\nname = "arithmetic"\nargs = { digits = 3 }\n')
    with pytest.raises(ConfigError, match=r'2 \[\[envs\]\] are labelled arithmetic.*label = "arithmetic-2"'):
        load_run(run_file)
    assert [env.label for env in load_run(run_file, ["envs.1.label=hard"]).envs] == ["arithmetic", "hard"]


@pytest.mark.parametrize("label", ["x" * 65, " hard", "hard ", "a\\u001bb", "a\\u202eb", "a\\nb"])
def test_label_is_short_and_safe_to_print(run_file: Path, label: str) -> None:
    with pytest.raises(ConfigError, match=r"envs\.label = .*1 to 64 printable characters"):
        load_run(run_file, [f'envs.0.label="{label}"'])


# --- resuming ---


def test_resolved_run_file_reads_back(run_file: Path) -> None:
    config = load_run(run_file)
    assert from_tree(to_tree(config), RunConfig, "run.json") == config
    assert unsafe_changes(json.loads(json.dumps(to_tree(config))), to_tree(config)) == []


def test_changes_are_named_and_only_safe_ones_pass(run_file: Path) -> None:
    before = to_tree(load_run(run_file))
    after = to_tree(
        load_run(run_file, ["steps=9", "workers.count=5", "host.port=81", "train.threads=2", "train.lr=1.0"])
    )
    assert changed_keys(before, after) == ["host.port", "steps", "train.lr", "train.threads", "workers.count"]
    assert unsafe_changes(before, after) == ["train.lr"]
    assert unsafe_changes(before, before) == []


def test_evaluation_of_an_environment_may_change_and_nothing_else_of_it(run_file: Path) -> None:
    before, later = (to_tree(load_run(run_file, [f"envs.0.eval_episodes={count}"])) for count in (-1, 7))
    assert before != later and unsafe_changes(before, later) == []
    assert unsafe_changes(before, to_tree(load_run(run_file, ["envs.0.eval_episodes=7", "envs.0.call_s=3"]))) == [
        "envs"
    ]


def test_a_judge_that_can_judge_nothing_is_refused(run_file: Path) -> None:
    """It must see episodes, those of one environment, and with other eyes than the reward that is learned."""
    judge = 'eval.judge={name="wordle"}'
    env = load_run(run_file).envs[0]
    assert load_run(run_file, ['eval.judge={name="arithmetic", args={digits=3}}']).eval.judge.args == {"digits": 3}
    for overrides, message in (
        (["eval.episodes=0", judge], "eval.judge has nothing to judge: set eval.episodes"),
        (
            ['envs=[{name="wordle"}, {name="arithmetic"}]', "eval.judge={name='a.py'}"],
            "judges one environment, and 2 are",
        ),
        ([f"envs=[{{name='{env.name}'}}]", f"eval.judge={{name='{env.name}'}}"], "is what the run trains on"),
        (["eval.judge={name='a.py', weight=2}"], "weight"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            load_run(run_file, overrides)
        assert "\n" not in str(error.value)


def test_a_judge_that_is_not_there_is_told_before_the_run(run_file: Path) -> None:
    config = load_run(run_file, ["eval.judge={name='./judge.py'}"])
    with pytest.raises(ConfigError, match=r"eval\.judge\.name = \./judge\.py: nothing at "):
        with_absolute_paths(config, run_file.parent)
    (run_file.parent / "judge.py").write_text("")
    same = load_run(run_file, ["envs.0.name=judge.py", "eval.judge={name='./judge.py'}"])
    with pytest.raises(ConfigError, match="is what the run trains on"):
        with_absolute_paths(same, run_file.parent)
    found = with_absolute_paths(config, run_file.parent).eval.judge
    assert found.name == str(run_file.parent / "judge.py")


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "x/" * 3000])
@pytest.mark.parametrize("key", ["policy.path", "train.teacher", "eval.judge.name", "envs.name", "envs.tasks"])
def test_what_no_path_can_be_is_refused_with_its_key(run_file: Path, key: str, path: str) -> None:
    """Such as one with a NUL."""
    config = load_run(run_file)
    tree, (section, *inner) = to_tree(config), key.split(".")
    table = tree[section][0] if section == "envs" else tree[section]
    for name in inner[:-1]:
        table = table[name]
    table[inner[-1]] = f"./{path}"
    with pytest.raises(ConfigError, match=rf"^{key} = ") as refused:
        with_absolute_paths(from_tree(tree, RunConfig, ""), run_file.parent)
    assert "\0" not in str(refused.value) and len(str(refused.value)) < 200


def test_key_that_only_starts_like_a_safe_one_is_unsafe() -> None:
    assert unsafe_changes({"steps_more": 1}, {"steps_more": 2}) == ["steps_more"]


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_any_number_of_validators_but_two_will_do(run_file: Path, count: int) -> None:
    assert load_run(run_file, [f"validators.count={count}"]).validators.count == count


# --- the process environment ---


def test_children_have_pinned_threads_and_the_rest_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "kept")
    child = child_environment(3)
    assert child["OMP_NUM_THREADS"] == child["MKL_NUM_THREADS"] == "3" and child["SOME_VARIABLE"] == "kept"


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_only_this_process_stays_off_the_hub_and_only_while_it_imports(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", before)
    with pytest.raises(ImportError), without_hub():
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        raise ImportError
    assert child_environment(1).get("HF_HUB_OFFLINE") == before


def test_the_folder_of_the_node_key_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert node_home() == tmp_path
    monkeypatch.delenv("SHOAL_HOME")
    assert node_home() == Path.home() / ".shoal"

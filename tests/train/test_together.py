"""Several processes that train one policy: the weights of one process, states of any number of processes, and one file."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shoal.config import RunConfig, TinyPolicy, TrainConfig, load_run
from shoal.errors import StateError
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.random_model import make_tiny
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import Grpo
from shoal.train.checkpoint import States, load_state
from shoal.train.distributed.fsdp import Sharded, rows_of_rank
from shoal.train.distributed.messages import Channel
from shoal.train.distributed.ranks import ALONE
from shoal.train.learner import Learner
from shoal.train.logprobs import loaded_anew, with_own_denominators
from shoal.train.master_weights import module_dtype
from shoal.train.microbatches import Plan
from tests.train.group import together

TINY = TinyPolicy(width=48, layers=2, heads=3, kv_heads=1, mlp_width=80, max_positions=64)
"""Of 3 key and value channels a head, and rows that 4 processes cannot divide evenly."""

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.toml"
TRUNCATED = c.Grpo(entropy_bonus=0.01, ratio_to="old", corrections=(c.Truncate(1.5),))


@pytest.fixture
def policy(tmp_path):
    make_tiny(TINY, tmp_path / "policy", seed=0, dtype="float32")
    return tmp_path / "policy"


def config_of(**train: Any) -> RunConfig:
    settings = {"lr": 1e-3, "warmup_steps": 0, "microbatch_tokens": 64, "algorithm": Grpo(entropy_bonus=0.01)} | train
    return msgspec.structs.replace(load_run(RECIPE), steps=100, train=TrainConfig(**settings))


def learned(learner, states, rows_of_steps, publish_to, first=0, save=False):
    """Take steps; save the state and write the policy at the end. Returns the last step's metrics and its log-probs."""
    before = learner.logprobs(rows_of_steps[0])
    for version, rows in enumerate(rows_of_steps, first):
        metrics = learner.step(rows, version)
    if save:
        states.save(first + len(rows_of_steps))
    save_policy(learner.model, publish_to, "float32")
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}, before


def denominators(learner, states, rows, published):
    return learner.logprobs_at(published, rows)


def test_denominators_are_those_of_one_process(policy, tmp_path, make_rows):
    config, rows = config_of(dtype="bfloat16"), make_rows(11)
    found = together(3, policy, config, tmp_path / "a", denominators, rows, policy)
    logprobs_at = loaded_anew("bfloat16", config.sampling.temperature, 64, torch.bfloat16)
    expected = with_own_denominators(rows, {0: policy}, logprobs_at)
    for found_P, row in zip(found, expected, strict=True):
        np.testing.assert_allclose(found_P, row.behaviour_logp_P, atol=1e-4)


def resumed(learner, states, rows_of_steps, publish_to):
    """Go on from the newest state."""
    version = states.load()
    return version, learned(learner, states, rows_of_steps, publish_to, first=version)


def alone(policy, config, states):
    learner = Learner(
        load_policy(policy, module_dtype(config.train)), config.train, config.sampling, steps=config.steps, ranks=ALONE
    )
    return learner, States(states, learner)


def weights(directory):
    return load_file(directory / "model.safetensors")


def furthest(left, right):
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize(
    "train",
    [
        {"packing": "flat", "recompute": "layers", "updates_per_batch": 2},
        {"updates_per_batch": 2, "algorithm": TRUNCATED},
        {"dtype": "bfloat16"},
        {
            "updates_per_batch": 2,
            "minibatches": 2,
            "algorithm": c.Ppo(
                loss=c.Gspo(0.2, 0.3), average="rollouts", corrections=(c.GeometricMask(0.2, 5.0),), batch_std=True
            ),
        },
    ],
    ids=["flat", "truncated", "bfloat16", "composed"],
)
def test_two_processes_come_to_the_weights_of_one(policy, tmp_path, make_rows, train):
    config, steps = config_of(**train), [make_rows(9, seed) for seed in range(3)]
    one, _ = learned(*alone(policy, config, tmp_path / "a"), steps, tmp_path / "one", save=True)
    two, before = together(2, policy, config, tmp_path / "b", learned, steps, tmp_path / "two", 0, True)
    ours, theirs = load_state(tmp_path / "a"), load_state(tmp_path / "b")
    assert (ours.version, ours.updates, ours.layout) == (theirs.version, theirs.updates, theirs.layout)
    assert furthest(ours.tensors, theirs.tensors) < (1e-4 if train.get("dtype") else 5e-6)
    assert furthest(weights(tmp_path / "one"), weights(policy)) > 1e-3
    assert furthest(weights(tmp_path / "one"), weights(tmp_path / "two")) < (1e-2 if train.get("dtype") else 5e-6)
    assert two.keys() == one.keys() and two["staleness_rollouts"] == one["staleness_rollouts"]
    for name in (
        "loss",
        "grad_norm",
        "entropy_nats",
        "clip_share",
        *(["truncated_share"] if train.get("algorithm") is TRUNCATED else []),
        "log_ratio_abs_max_nats",
        "policy_tokens",
        "updates",
    ):
        assert two[name] == pytest.approx(one[name], rel=2e-2, abs=1e-3), name
    fresh, _ = alone(policy, config, tmp_path / "c")
    for found, expected in zip(before, fresh.logprobs(steps[0]), strict=True):
        np.testing.assert_allclose(found, expected, atol=0.05 if train.get("dtype") else 1e-5)


def test_a_state_is_resumed_by_another_number_of_processes(policy, tmp_path, make_rows):
    """Saved by 3, one of which has no row of some tensors; resumed by 2 and by 1, whose state 2 resume."""
    config, steps = config_of(), [make_rows(9, seed) for seed in range(4)]
    together(3, policy, config, tmp_path / "states", learned, steps[:2], tmp_path / "three", 0, True)
    learner, states = alone(policy, config, tmp_path / "states")
    assert states.load() == 2 and learner.updates == 2
    save_policy(learner.model, tmp_path / "loaded", "float32")
    assert furthest(weights(tmp_path / "loaded"), weights(tmp_path / "three")) == 0
    version, _ = together(2, policy, config, tmp_path / "states", resumed, steps[2:3], tmp_path / "two")
    assert version == 2
    learned(learner, states, steps[2:3], tmp_path / "one", first=2, save=True)
    assert furthest(weights(tmp_path / "one"), weights(tmp_path / "two")) < 5e-6
    version, _ = together(2, policy, config, tmp_path / "states", resumed, steps[3:], tmp_path / "two")
    assert version == 3
    learned(learner, states, steps[3:], tmp_path / "one", first=3)
    assert furthest(weights(tmp_path / "one"), weights(tmp_path / "two")) < 5e-6


def test_a_damaged_part_of_a_state_falls_back_to_the_one_before(policy, tmp_path, make_rows, caplog):
    config, steps = config_of(), [make_rows(9, seed) for seed in range(2)]
    together(2, policy, config, tmp_path / "states", learned, steps[:1], tmp_path / "two", 0, True)
    together(2, policy, config, tmp_path / "states", _resume_and_save, steps[1:])
    part = sorted((tmp_path / "states" / "v000002").glob("shard-*"))[1]
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    _, states = alone(policy, config, tmp_path / "states")
    assert states.load() == 1 and part.name in caplog.text


def _resume_and_save(learner, states, rows_of_steps):
    version = states.load()
    for rows in rows_of_steps:
        learner.step(rows, version)
        version += 1
        states.save(version)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_twenty_steps_of_many_processes_come_to_the_weights_of_one(policy, tmp_path, make_rows, world):
    """The bar of the plan: within 5e-6 after 20 steps at a learning rate of 1e-3."""
    config, steps = config_of(), [make_rows(12, seed) for seed in range(20)]
    learned(*alone(policy, config, tmp_path / "a"), steps, tmp_path / "one")
    together(world, policy, config, tmp_path / "b", learned, steps, tmp_path / "many", 0, True)
    distance = furthest(weights(tmp_path / "one"), weights(tmp_path / "many"))
    moved = furthest(weights(tmp_path / "one"), weights(policy))
    print(f"{world} processes: {distance:.2e} from one process, which moved {moved:.2e}")
    assert distance < 5e-6 and moved > 1e-3


@pytest.mark.slow
def test_ten_steps_of_four_processes_and_ten_of_two_come_to_the_weights_of_one(policy, tmp_path, make_rows):
    config, steps = config_of(), [make_rows(12, seed) for seed in range(20)]
    learned(*alone(policy, config, tmp_path / "a"), steps, tmp_path / "one")
    together(4, policy, config, tmp_path / "b", learned, steps[:10], tmp_path / "four", 0, True)
    version, _ = together(2, policy, config, tmp_path / "b", resumed, steps[10:], tmp_path / "two")
    distance = furthest(weights(tmp_path / "one"), weights(tmp_path / "two"))
    print(f"saved by 4, resumed by 2: {distance:.2e} from one process")
    assert version == 10 and distance < 5e-6


@pytest.mark.parametrize(("world", "count"), [(2, 5), (4, 3), (3, 6)])
def test_each_micro_batch_counts_once_and_all_processes_take_as_many(world, count):
    packed = [Plan((i,)) for i in range(count)]
    shares = [Sharded(Channel(rank, world)).shares(packed) for rank in range(world)]
    assert sorted(share.plan.members for own in shares for share in own if share.counts) == [(i,) for i in range(count)]
    assert {len(own) for own in shares} == {-(-count // world)}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 3, 4, 64, 65])
def test_each_row_of_a_tensor_has_one_process_as_torch_cuts_it(rows, world):
    cut = [rows_of_rank(rows, rank, world) for rank in range(world)]
    expected = [len(part) for part in torch.arange(rows).chunk(world)]
    assert [end - begin for begin, end in cut] == expected + [0] * (world - len(expected))
    assert [row for begin, end in cut for row in range(begin, end)] == list(range(rows))


def test_processes_that_cannot_repeat_a_step_with_smaller_micro_batches_say_what_to_set():
    with pytest.raises(StateError) as refused:
        Sharded(Channel(1, 2)).demand_repeat("DefaultCPUAllocator: can't allocate memory")
    said = str(refused.value)
    assert "\n" not in said and "can't allocate memory" in said
    for setting in ("train.microbatch_tokens", 'train.recompute = "layers"', "train.processes"):
        assert setting in said

"""Versions changed in place: the bits of a version that is loaded, or weights that nobody can use."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.engine import hot_swap
from shoal.engine.dishonest import CHEATS, cheating
from shoal.engine.interface import EngineRequest, PolicyScore, ScoreRequest, is_in_place
from shoal.engine.native import LocalEngine
from shoal.errors import StateError
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.transformer import Transformer
from tests.engine.claims import claims_of
from tests.engine.conftest import write_policy

NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


def next_version(before: Path, after: Path, dtype: str, change: Callable[[Transformer], None]) -> Path:
    """A version that differs from another by a change of its weights."""
    model = load_policy(before)
    with torch.no_grad():
        change(model)
    save_policy(model, after, dtype)
    return after


def some_values(model: Transformer) -> None:
    """Move about 2 % of the values of each matrix, and one or two of each vector."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            chosen = torch.rand(parameter.shape, generator=generator) < 0.02
        else:
            chosen = torch.zeros(parameter.shape, dtype=torch.bool)
            chosen[torch.randint(len(parameter), (2,), generator=generator)] = True
        parameter[chosen] *= 1.25


@pytest.fixture(autouse=True)
def none_is_too_small(monkeypatch):
    monkeypatch.setattr(hot_swap, "LARGE_BYTES", 0)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """A version in bfloat16, and the next."""
    return versions(tmp_path)


def versions(root: Path, family: str = "qwen3", tied: bool = False, dtype: str = "bfloat16") -> tuple[Path, Path]:
    drawn = write_policy(root / "drawn", family, tied)
    first = next_version(drawn, root / "first", dtype, lambda model: None)
    return first, next_version(first, root / "second", dtype, some_values)


def engine_with(directory: Path, dtype: str = "bfloat16") -> LocalEngine:
    engine = LocalEngine(threads=1, dtype=dtype)
    engine.load(directory, 0)
    return engine


def right(directory: Path) -> bool:
    return True


def weights_of(engine: LocalEngine) -> list[torch.Tensor]:
    """The bits of everything that an engine computes with."""
    assert engine._loaded is not None
    weights = engine._loaded.weights
    layers = [one for layer in weights.layers for one in layer if one is not None]
    return [
        one.detach().contiguous().view(torch.uint8)
        for one in (weights.frame.embedding_VD, *layers, weights.frame.norm_D, weights.head_DV)
    ]


def same(one: LocalEngine, other: LocalEngine) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights_of(one), weights_of(other), strict=True))


def rollouts(engine: LocalEngine) -> tuple[list[object], list[PolicyScore]]:
    """What an engine writes in two turns, and what it says of that."""
    requests = [EngineRequest(f"{i}", [i, 7, 3], bytes([i]) * 32, 12, frozenset({0})) for i in range(5)]
    turns = engine.extend(requests, 0.9)
    further = [r._replace(token_ids=[*r.token_ids, *t.token_ids, 9]) for r, t in zip(requests, turns, strict=True)]
    more = engine.extend(further, 0.9)
    engine.forget(request.rollout for request in requests)
    return [*turns, *more], engine.score(claims_of(further, more), 0.9, hidden=True)


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen3", True), ("qwen2", True), ("llama", False)])
def test_a_version_that_was_changed_in_place_has_the_bits_of_one_that_was_loaded(tmp_path, family, tied, dtype, stored):
    first, second = versions(tmp_path, family, tied, stored)
    engine, fresh = engine_with(first, dtype), engine_with(second, dtype)
    assert not same(engine, fresh)
    assert engine.change(first, second, 1, right) and engine.version == 1 and same(engine, fresh)
    (turns, scores), (fresh_turns, fresh_scores) = rollouts(engine), rollouts(fresh)
    assert turns == fresh_turns
    for one, other in zip(scores, fresh_scores, strict=True):
        assert one.hidden_PD is not None and other.hidden_PD is not None
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True) if a is not None)
    assert engine.change(second, first, 0, right) and engine.version == 0 and same(engine, engine_with(first, dtype))


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_matrices_are_compared_in_blocks(two, monkeypatch, rows):
    monkeypatch.setattr(hot_swap, "BLOCK_VALUES", rows * 48)
    engine = engine_with(two[0])
    assert engine.change(*two, 1, right) and same(engine, engine_with(two[1]))


def test_a_norm_alone_changes_every_value_behind_it(tmp_path, two):
    def norms(model: Transformer) -> None:
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in NORMS:
                parameter[3] *= 1.5

    second = next_version(two[0], tmp_path / "third", "bfloat16", norms)
    engine = engine_with(two[0])
    assert engine.change(two[0], second, 1, right) and same(engine, engine_with(second))


def test_no_version_is_changed_while_a_block_is_open(two):
    engine = engine_with(two[0])
    request = EngineRequest("open", [5, 6], bytes(32), 4, frozenset())
    (turn,) = engine.extend([request], 1.0)
    with pytest.raises(AssertionError, match="while a block is open"):
        engine.change(*two, 1, right)
    assert engine.version == 0 and same(engine, engine_with(two[0]))
    engine.extend([request._replace(token_ids=[*request.token_ids, *turn.token_ids, 9])], 1.0)
    engine.forget(["open"])
    assert engine.change(*two, 1, right)


def is_torn(engine: LocalEngine) -> bool:
    """Whether the engine has no version, and no way to use its weights is open."""
    with pytest.raises(StateError, match="weights are torn"):
        engine.extend([EngineRequest("r", [5, 6], bytes(32), 4, frozenset())], 1.0)
    with pytest.raises(StateError, match="weights are torn"):
        engine.score([ScoreRequest([5, 6], [1], bytes(32))], 1.0)
    return engine.version == -1


@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt, StateError, OSError])
@pytest.mark.parametrize("at", [0, 1, 11, 22])
def test_weights_that_were_changed_in_part_are_never_used_until_a_version_is_loaded(two, monkeypatch, failure, at):
    engine, write, calls = engine_with(two[0]), hot_swap.WeightChange._write, []

    def failing(change, name, place):
        calls.append(name)
        if len(calls) > at:
            raise failure("in the middle")
        write(change, name, place)

    with monkeypatch.context() as patched:
        patched.setattr(hot_swap.WeightChange, "_write", failing)
        with pytest.raises(failure, match="in the middle"):
            engine.change(*two, 1, right)
    assert is_torn(engine)
    assert not engine.change(*two, 1, right), "only loading repairs it"
    assert is_torn(engine)
    engine.load(two[1], 1)
    assert same(engine, engine_with(two[1])) and rollouts(engine)[0] == rollouts(engine_with(two[1]))[0]


def test_a_result_that_is_not_what_it_should_be_is_torn(two):
    engine = engine_with(two[0])
    with pytest.raises(StateError, match="second is damaged"):
        engine.change(*two, 1, lambda directory: directory == two[0])
    assert is_torn(engine)


def test_a_base_that_is_not_what_it_should_be_is_torn(two):
    engine = engine_with(two[0])
    with pytest.raises(StateError, match=r"first or .*second is damaged"):
        engine.change(*two, 1, lambda directory: directory == two[1])
    assert is_torn(engine)


def test_the_roots_are_asked_when_all_has_been_read_and_nothing_is_used_before(two):
    engine, fresh, asked = engine_with(two[0]), engine_with(two[1]), []

    def is_right(directory: Path) -> bool:
        asked.append((directory, engine.version, same(engine, fresh)))
        return True

    assert engine.change(*two, 1, is_right)
    assert asked == [(two[0], -1, True), (two[1], -1, True)]


def test_a_version_that_is_loaded_meanwhile_waits_for_the_change(tmp_path, two):
    """Otherwise the engine would have the weights of one version and the number of the other."""
    third = next_version(two[1], tmp_path / "third", "bfloat16", some_values)
    engine, loading = engine_with(two[0]), []

    def is_right(directory: Path) -> bool:
        if not loading:
            loading.append(threading.Thread(target=engine.load, args=(third, 2)))
            loading[0].start()
            loading[0].join(0.5)
        return True

    assert engine.change(*two, 1, is_right)
    loading[0].join()
    assert engine.version == 2 and same(engine, engine_with(third))


def test_a_version_with_values_that_are_not_finite_is_refused(tmp_path, two):
    def spoilt(model: Transformer) -> None:
        model.head_weight()[5, 5] = float("inf")

    bad, engine = next_version(two[0], tmp_path / "bad", "bfloat16", spoilt), engine_with(two[0])
    with pytest.raises(StateError, match=r"lm_head\.weight holds values that are not finite numbers"):
        engine.change(two[0], bad, 1, right)
    assert is_torn(engine)


def test_a_small_version_or_one_of_which_many_values_differ_is_left_to_be_loaded(tmp_path, two, monkeypatch):
    def all_values(model: Transformer) -> None:
        for parameter in model.parameters():
            parameter *= 1.25

    other, engine = next_version(two[0], tmp_path / "other", "bfloat16", all_values), engine_with(two[0])
    assert not engine.change(two[0], other, 1, right) and engine.version == 0
    with monkeypatch.context() as patch:
        patch.setattr(hot_swap, "LARGE_BYTES", 10_000_000)
        patch.setattr(hot_swap, "map_policy", None)
        assert not engine.change(*two, 1, right) and engine.version == 0, "too small, and not opened"
    other = next_version(two[0], tmp_path / "wide", "float32", lambda model: None)
    assert not engine.change(two[0], other, 1, right) and engine.version == 0, "another dtype"


def test_a_version_of_another_shape_changes_nothing(tmp_path, two):
    config = two[1] / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    other = next_version(write_policy(tmp_path / "llama", "llama"), tmp_path / "3", "bfloat16", lambda model: None)
    engine = engine_with(two[0])
    for second in (two[1], other):
        with pytest.raises(StateError, match="holds a policy of another shape"):
            engine.change(two[0], second, 1, right)
        assert engine.version == 0 and same(engine, engine_with(two[0]))


def test_an_engine_of_rounded_weights_and_one_without_a_version_are_not_changed(two):
    assert not engine_with(two[0], "int8").change(*two, 1, right)
    assert not LocalEngine(threads=1, dtype="bfloat16").change(*two, 1, right)


def test_cheats_load_every_version():
    """A cheat that is changed in place would not be asked which weights it has."""
    assert is_in_place(LocalEngine(threads=1))
    assert not any(is_in_place(cheating(name, LocalEngine(threads=1))) for name in CHEATS)

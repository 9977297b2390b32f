"""An engine that left its device and came back says what one says that stayed."""

import pytest

from shoal.engine.decoder import Decoder
from shoal.engine.interface import EngineRequest
from shoal.engine.native import LocalEngine
from shoal.models.cpu_offload import storages_in
from shoal.models.memory import PREFILL_TOKENS
from shoal.models.transformer import Transformer
from tests.engine.claims import two_turns
from tests.engine.conftest import write_policy
from tests.engine.test_devices import SEED, SPEC
from tests.fake_device import values_are_zeros
from tests.models.test_cpu_offload import all_on


def turns_of(engine: LocalEngine, between) -> list[object]:
    """Two turns of some conversations, with something between them."""
    requests = [EngineRequest(f"{i}", [i, 7, 3], bytes([i]) * 32, 12, frozenset({0})) for i in range(5)]
    turns = engine.extend(requests, 0.9)
    between()
    further = [r._replace(token_ids=[*r.token_ids, *t.token_ids, 9]) for r, t in zip(requests, turns, strict=True)]
    return [*turns, *engine.extend(further, 0.9)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_that_parked_between_two_turns_writes_the_same(tmp_path, dtype, tied) -> None:
    first, second = (write_policy(tmp_path / str(seed), tied=tied, seed=seed) for seed in (7, 8))
    stayed, parked = LocalEngine(1, dtype), LocalEngine(1, dtype)
    for engine in (stayed, parked):
        engine.load(first, 0)

    def away() -> None:
        parked.park()
        with pytest.raises(AssertionError, match="parked"):
            parked.score([], 1.0)
        parked.come_back()

    assert turns_of(parked, away) == turns_of(stayed, lambda: None)
    for engine in (stayed, parked):
        engine.forget([str(i) for i in range(5)])
    away()
    for engine in (stayed, parked):
        engine.load(second, 1)
    assert two_turns(parked)[0] == two_turns(stayed)[0]


def test_an_engine_leaves_nothing_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PREFILL_TOKENS, "meta", 64)
    before = all_on("meta")
    engine = LocalEngine(device="meta")
    engine._loaded, engine.version = Decoder(Transformer(SPEC), "meta"), 0
    with values_are_zeros(monkeypatch):
        engine.extend([EngineRequest(str(i), [1, 2, 3], SEED, 5, frozenset({1})) for i in range(3)], 0.7)
    found = {storage._cdata for storage in storages_in([engine._loaded, engine._batches], "meta")}
    assert found == all_on("meta").keys() - before.keys() and len(found) > 10

"""Engines are opened by description."""

import pytest

from shoal.engine.open import EngineSpec, open_engine
from shoal.errors import StateError
from shoal.protocol.tolerances import DTYPES, LOCAL, TRANSFORMERS, engine_kind


@pytest.mark.parametrize(("kind", "dtype"), [*((LOCAL, dtype) for dtype in DTYPES), (TRANSFORMERS, "float32")])
def test_an_engine_is_what_its_description_says(kind, dtype):
    facts = open_engine(EngineSpec(kind, dtype, threads=1)).facts
    assert (facts.dtype, facts.device, engine_kind(facts.implementation)) == (dtype, "cpu", kind)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (EngineSpec(kind="remote"), "unknown kind of engine 'remote': this version of shoal has local, transformers"),
        (
            EngineSpec(noise="dice"),
            "unknown noise family 'dice': this version of shoal has philox, keyed-philox-rand32-log1p",
        ),
        (EngineSpec(kind="transformers", dtype="int8"), "computes in float32 or bfloat16, not in int8"),
        (EngineSpec(dtype="float64"), "no engine computes in 'float64', only in float32, bfloat16, int8"),
    ],
)
def test_an_unknown_engine_is_refused_by_name(spec, said):
    with pytest.raises(StateError, match=said):
        open_engine(spec)

"""The bounds of two engines: the kinds that nodes claim may tighten them and never loosen them."""

import dataclasses
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from shoal.protocol.messages import Bounds, EngineFacts
from shoal.protocol.tolerances import bounds_for, engine_kind
from tests.verification.conftest import RULES

OWN = RULES.bounds["float32/float32"]
LOOSE, TIGHT = Bounds(1.0, 0.5, 0.5, 1.0), Bounds(5e-4, 5e-6, 5e-8, 0.005)
MIXED = {
    "loose:float32/float32": LOOSE,
    "float32/loose:float32": LOOSE,
    "loose:float32/loose:float32": LOOSE,
    "tight:float32/float32": TIGHT,
    "half:float32/float32": Bounds(5e-4, 0.5, 0.5, 0.005),
}
LOCAL = "shoal-local/torch-2.13.0"


@pytest.fixture
def rules():
    return msgspec.structs.replace(RULES, bounds=RULES.bounds | MIXED)


def test_the_embedded_engine_has_the_bounds_of_its_dtypes(rules):
    assert engine_kind(LOCAL) == "local"
    for replayed in ("float32", "bfloat16"):
        assert bounds_for(rules, LOCAL, LOCAL, replayed) == RULES.bounds[f"float32/{replayed}"]


def test_a_claim_gives_no_bounds_to_dtypes_that_have_none(rules):
    for claimed in (LOCAL, "shoal-loose/1", "float32/int8"):
        assert bounds_for(rules, claimed, LOCAL, "int8") is None


@pytest.mark.parametrize("replayed_by", [LOCAL, "shoal-loose/1", ""])
@pytest.mark.parametrize(
    "claimed",
    ["shoal-loose/1", "loose", "loose:float32/loose", "unheard-of/9", "", "/", ":", "float32", "local:float32",
     "shoal-half/2", "shoal-tight/1"],
)  # fmt: skip
def test_no_claim_loosens_any_value_of_a_bound(rules, claimed, replayed_by):
    found = bounds_for(rules, claimed, replayed_by, "float32")
    values = zip(msgspec.structs.astuple(found), msgspec.structs.astuple(OWN), strict=True)
    assert all(value <= own for value, own in values)


def test_a_claim_tightens_value_by_value(rules):
    assert bounds_for(rules, "shoal-tight/1", LOCAL, "float32") == TIGHT
    assert bounds_for(rules, "shoal-half/1", LOCAL, "float32") == Bounds(5e-4, OWN.flipped, OWN.mean_gap, 0.005)


@pytest.mark.parametrize("claimed", [LOCAL, "shoal-loose/1", "unheard-of/9"])
def test_a_forger_gains_nothing_by_claiming_an_engine_with_loose_bounds(case, rules, claimed):
    """Its log-probs are 0.5 nats off and one token is 0.5 nats from the seed's choice: within the loose bounds."""
    case.tools = dataclasses.replace(case.tools, info=SimpleNamespace(run="run-1", rules=rules))
    body = case.resubmit(engine=EngineFacts(claimed, "float32", "cpu"))
    assert all(verdict.outcome == "accept" for verdict in case.judge(body, audited=(0, 1, 2, 3)))
    case.logprobs = lambda request: np.full(len(request.policy_positions), -1.5, dtype=np.float32)
    assert {(v.outcome, v.check) for v in case.judge(body, audited=(0, 1, 2, 3))} == {("hard", "logprobs")}
    case.gaps = lambda request: np.eye(1, len(request.policy_positions), dtype=np.float32)[0] / 2
    assert {(v.outcome, v.check) for v in case.judge(body, audited=(0, 1, 2, 3))} == {("hard", "sampling")}

"""The reference of a KL penalty: the first policy stays what it was, and pulls the one that learns back."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.config import SamplingConfig, TrainConfig
from shoal.models.lora import begin_adapter
from shoal.models.lora_config import AdapterSpec
from shoal.protocol import algorithm_config as c
from shoal.train.frozen_models import reference_of
from shoal.train.learner import Learner
from shoal.train.rows import bytes_of, row_of

CONFIG = TrainConfig(lr=1e-2, warmup_steps=0, microbatch_tokens=96)


def learner_of(model, **parts):
    config = msgspec.structs.replace(CONFIG, algorithm=c.Composition(**parts))
    return Learner(model, config, SamplingConfig(temperature=0.7), steps=20)


def logps(rows):
    return np.concatenate([row.reference_logp_P for row in rows])


def test_the_reference_stays_the_first_policy(make_model, make_rows):
    learner, rows = learner_of(make_model()), make_rows()
    refer = reference_of(learner.model, make_model, 0.7, 96)
    before = refer(rows)
    assert logps(before) == pytest.approx(np.concatenate(learner.logprobs(rows)), abs=1e-6)
    learner.step(rows, 0)
    assert (logps(refer(rows)) == logps(before)).all()
    assert not np.allclose(np.concatenate(learner.logprobs(rows)), logps(before), atol=1e-3)


def test_an_adapter_has_its_base_for_a_reference_and_loads_nothing(make_model, make_rows):
    def load():
        raise AssertionError("the base is in memory already")

    model, rows = make_model(), make_rows()
    begin_adapter(model, AdapterSpec(4, 8.0), 1)
    learner = learner_of(model)
    refer = reference_of(model, load, 0.7, 96)
    learner.step(rows, 0)
    learned = {name: one.detach().clone() for name, one in model.trainable().items()}
    found = refer(rows)
    plain = reference_of(make_model(), make_model, 0.7, 96)(rows)
    assert logps(found) == pytest.approx(logps(plain), abs=1e-6)
    assert all(one.equal(learned[name]) for name, one in model.trainable().items()), "the adapter is back"


KL = [
    c.Kl(1.0, "k2"), c.Kl(1.0, "k3"), c.Kl(1.0, "k1", "weighted_loss"), c.Kl(1.0, "k3", "weighted_loss"),
    c.Kl(1.0, "k1", "advantage"),
]  # fmt: skip


@pytest.mark.parametrize("kl", KL, ids=lambda kl: f"{kl.estimator} {kl.place}")
@pytest.mark.parametrize("packing", ["padded", "flat"])
def test_a_penalty_keeps_the_policy_near_its_reference(make_model, make_rows, kl, packing):
    far = []
    for parts in ({}, {"kl": kl}):
        learner, rows = learner_of(make_model(), loss=c.Reinforce(), **parts), make_rows()
        learner.config = msgspec.structs.replace(learner.config, packing=packing)
        refer = reference_of(learner.model, make_model, 0.7, 96)
        for version in range(5):
            own = [replace(row, behaviour_logp_P=p) for row, p in zip(rows, learner.logprobs(rows), strict=True)]
            metrics = learner.step(refer(own) if parts else own, version)
            assert ("kl_nats" in metrics) is bool(parts)
            if parts and not version:
                assert metrics["kl_nats"] == pytest.approx(0.0, abs=1e-6)
        log_ratio = np.concatenate(learner.logprobs(rows)) - logps(refer(rows))
        far.append(np.abs(log_ratio).mean())
    assert far[1] < far[0]


def test_bytes_of_rows_without_a_reference_are_as_before_and_others_come_back(make_rows):
    row = make_rows(1)[0]
    assert b"reference" not in msgspec.msgpack.encode(bytes_of(row)) and row_of(bytes_of(row)).reference_logp_P is None
    referred = replace(row, reference_logp_P=row.behaviour_logp_P - 1)
    assert row_of(bytes_of(referred)).reference_logp_P.tolist() == referred.reference_logp_P.tolist()

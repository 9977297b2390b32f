"""Judges of the trainer: advantages of a teacher and of a reward model, against numbers computed token by token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.models.value_head import TransformerWithValueHead
from shoal.protocol.algorithm_config import CispoNamed
from shoal.train.frozen_models import RewardModel, Teacher, scores_of
from shoal.train.learner import Learner
from shoal.train.rows import TrainingRow, bytes_of, row_of


@pytest.fixture
def scorer(make_model):
    model = TransformerWithValueHead(make_model().spec)
    model.load_state_dict(make_model(3).state_dict(), strict=False)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


def log_softmax_of(model, row, temperature):
    """Of each policy token, from whole logits of one row."""
    with torch.no_grad():
        logits_TV = model.logits(model.hidden(torch.from_numpy(row.tokens_T)[None]))[0]
    logp_TV = torch.log_softmax(logits_TV / temperature, -1)
    return logp_TV[row.positions_P - 1, row.tokens_T[row.positions_P]].numpy()


def test_a_token_is_worth_what_the_teacher_thinks_of_it_less_what_the_student_does(make_model, make_rows):
    teacher, rows, student = make_model(7), make_rows(5), make_model(0)

    def own(rows):
        return [log_softmax_of(student, row, 0.7) for row in rows]

    taught, figures = Teacher(teacher, 0.7, 64)(rows, own)
    for row, given, logp_P in zip(taught, rows, own(rows), strict=True):
        assert row.advantage_P == pytest.approx(log_softmax_of(teacher, given, 0.7) - logp_P, abs=1e-5)
        assert row.advantage_P.dtype == np.float32 and (row.behaviour_logp_P == given.behaviour_logp_P).all()
        assert (row_of(bytes_of(row)).advantage_P == row.advantage_P).all(), "a repeated step has the same bits"
    assert figures == {"teacher_kl_nats": pytest.approx(-np.concatenate([r.advantage_P for r in taught]).mean())}


def test_a_student_that_writes_comes_near_to_its_teacher(make_model, make_rows):
    """By the whole distributions in the states that it visits, not only by the tokens that it drew."""
    student, teacher = make_model(0), make_model(7)
    config = TrainConfig(lr=1e-2, warmup_steps=0, microbatch_tokens=4096, algorithm=CispoNamed(advantage="teacher"))
    learner, judge = Learner(student, config, SamplingConfig(), steps=30), Teacher(teacher, 1.0, 4096)
    generator, far, told = torch.Generator().manual_seed(0), [], []
    for version in range(30):
        rows, kl = written(student, teacher, generator)
        rows, figures = judge(rows, learner.logprobs)
        far.append(kl)
        told.append(figures["teacher_kl_nats"])
        learner.step(rows, version)
    assert sum(far[-3:]) < 0.5 * sum(far[:3]), far
    assert told == pytest.approx(far, abs=0.35), "the figure is the divergence at the tokens that were drawn"


def written(student, teacher, generator, count=128, length=4):
    """Rows that a policy writes after one token, and its mean divergence from the teacher on the way."""
    tokens_BT, logp, far = torch.full((count, 2), 6), [], []
    for _ in range(length):
        with torch.no_grad():
            own, wanted = (
                torch.log_softmax(model.logits(model.hidden(tokens_BT)[:, -1]), -1) for model in (student, teacher)
            )
        far.append((own.exp() * (own - wanted)).sum(-1).mean().item())
        drawn_B1 = torch.multinomial(own.exp(), 1, generator=generator)
        logp.append(own.gather(-1, drawn_B1))
        tokens_BT = torch.cat([tokens_BT, drawn_B1], 1)
    ones = np.ones(length, np.float32)
    rows = [
        TrainingRow(tokens_BT[b].numpy(), np.arange(2, 2 + length), logp_P.numpy(), ones, ones, 0.0, 0)
        for b, logp_P in enumerate(torch.cat(logp, 1))
    ]
    return rows, sum(far) / length


def test_a_score_is_that_of_the_last_token_whatever_shares_its_micro_batch(scorer, make_rows):
    tokens = [row.tokens_T for row in make_rows(9)]
    with torch.no_grad():
        alone = [scorer.values(scorer.hidden(torch.from_numpy(one)[None]))[0, -1].item() for one in tokens]
    for budget in (1, 40, 4096):
        assert scores_of(scorer, tokens, budget).tolist() == pytest.approx(alone, abs=1e-5)


def test_a_rollout_is_worth_its_score_less_the_mean_of_its_group(scorer, make_rows):
    # two groups of two rollouts; the first rollout has two rows, of which the last is scored
    ids = [(0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    rows = [replace(row, id=one) for row, one in zip(make_rows(5), ids, strict=True)]
    judged, figures = RewardModel(scorer, 64)(rows, lambda rows: pytest.fail("no student is asked"))
    s = scores_of(scorer, [row.tokens_T for row in rows], 64)
    wanted = [(s[1] - s[2]) / 2, (s[1] - s[2]) / 2, (s[2] - s[1]) / 2, (s[3] - s[4]) / 2, (s[4] - s[3]) / 2]
    assert [row.advantage_P[0] for row in judged] == pytest.approx(wanted, abs=1e-5)
    assert all((row.advantage_P == row.advantage_P[0]).all() for row in judged)
    assert figures["score_mean"] == pytest.approx(s[1:].mean()) and [r.reward for r in judged] == [
        r.reward for r in rows
    ]


def test_parked_judges_come_back(scorer, make_model, make_rows):
    rows = make_rows(3)
    for judge in (RewardModel(scorer, 64), Teacher(make_model(), 1.0, 64)):

        def student(rows):
            return [row.behaviour_logp_P for row in rows]

        before, _ = judge(rows, student)
        judge.park()
        judge.come_back()
        after, _ = judge(rows, student)
        assert all((a.advantage_P == b.advantage_P).all() for a, b in zip(before, after, strict=True))

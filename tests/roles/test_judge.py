"""Runs whose trainer has a judge: a teacher that the student comes near to, or a reward model; the same at every start."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from shoal.config import RunConfig
from shoal.errors import ConfigError, StateError
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.random_model import make_tiny
from shoal.models.transformer import Transformer
from shoal.models.value_head import begin_valued, save_valued
from shoal.roles.trainer.models import open_judge
from shoal.run_folder import RunFolder
from shoal.step_metrics import read_metrics
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A teacher with random preferences and a reward model, with the policy's tokenizer."""
    make_tiny(tiny_run().policy.tiny, tmp_path / "drawn", 9, "float32")
    decided = load_policy(tmp_path / "drawn")
    with torch.no_grad():
        decided.head_weight().mul_(20.0)
    save_policy(decided, tmp_path / "teacher", "float32", tokenizer_from=tmp_path / "drawn")
    model = begin_valued(tmp_path / "teacher")
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    save_valued(model, tmp_path / "scorer", "float32", tokenizer_from=tmp_path / "teacher")
    return tmp_path


def prepared(config: RunConfig, models: Path) -> RunFolder:
    folder = RunFolder(models / "run")
    folder.prepare(config, models)
    make_tiny(config.policy.tiny, folder.policy, 5, "float32")
    return folder


def run_of(models: Path, named: str, **train: object) -> RunConfig:
    where = {"teacher": "teacher", "reward_model": "scorer"}[named]
    algorithm = {"name": "cispo", "advantage": named}
    return tiny_run(train={"algorithm": algorithm, named: str(models / where), **train})


@pytest.mark.parametrize(("named", "figure"), [("teacher", "teacher_kl_nats"), ("reward_model", "score_mean")])
def test_a_run_with_a_judge_has_the_bytes_of_one_file_and_repeats_a_step_without_its_state(models, named, figure):
    config = run_of(models, named)
    testbed = RunTestbed(models / "run", config)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    weights = testbed.weights()
    assert weights == weights_of_one_file(config, models / "one") and not testbed.audit().findings
    assert all(figure in line and line["judge_s"] > 0 for line in read_metrics(testbed.folder.metrics))
    shutil.rmtree(testbed.folder.trainer / "v000003")
    shutil.rmtree(testbed.folder.checkpoints)
    asyncio.run(testbed.live(testbed.trainer()))
    assert testbed.weights() == weights


@pytest.mark.slow
def test_a_student_comes_near_to_its_teacher(models):
    config = run_of(models, "teacher", lr=3e-3, warmup_steps=0)
    rollouts = msgspec.structs.replace(config.rollouts, group_size=16, block_rollouts=128, batch_groups=16)
    testbed = RunTestbed(models / "run", msgspec.structs.replace(config, steps=40, rollouts=rollouts))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    far = [line["teacher_kl_nats"] for line in read_metrics(testbed.folder.metrics)]
    assert sum(far[-3:]) < 0.8 * sum(far[:3]), far


def test_a_batch_without_rows_is_not_judged(models):
    trainer = RunTestbed(models / "run", run_of(models, "teacher")).trainer()
    assert asyncio.run(trainer._judged([])) == ([], {})


def test_another_model_than_the_run_began_with_is_refused(models):
    config = run_of(models, "teacher")
    folder = prepared(config, models)
    for _ in range(2):
        assert open_judge(folder, config, "cpu") is not None
    make_tiny(config.policy.tiny, models / "teacher", 10, "float32")
    with pytest.raises(StateError, match=r"the model in train\.teacher, .* and its advantages need that one"):
        open_judge(folder, config, "cpu")


def test_a_model_that_reads_other_token_ids_is_refused(models):
    config = run_of(models, "teacher")
    folder = prepared(config, models)
    tokenizer = models / "teacher" / "tokenizer.json"
    before = tokenizer.read_text()
    tokenizer.write_text(before.replace('"a": 6', '"A": 6'))
    with pytest.raises(
        StateError, match="its tokenizer is not the policy's, for 'A' is token 6 there and no token in the"
    ):
        open_judge(folder, config, "cpu")
    tokenizer.write_text("{")
    with pytest.raises(StateError, match=r"tokenizer\.json is damaged"):
        open_judge(folder, config, "cpu")


def test_a_model_with_fewer_ids_or_positions_is_refused(models):
    config = run_of(models, "teacher")
    folder = prepared(config, models)
    small = msgspec.structs.replace(config.policy.tiny, max_positions=32)
    make_tiny(small, models / "teacher", 9, "float32")
    with pytest.raises(StateError, match=r"reads at most 32 tokens, and a row may have sampling\.max_tokens = 64"):
        open_judge(folder, config, "cpu")
    _cut_the_vocabulary(models / "teacher")
    with pytest.raises(StateError, match="it has 60 token ids, and the policy may write 64"):
        open_judge(folder, config, "cpu")


def _cut_the_vocabulary(directory: Path) -> None:
    whole = load_policy(directory)
    cut = Transformer(replace(whole.spec, vocab_size=60))
    with torch.no_grad():
        for name, one in cut.named_parameters():
            one.copy_(whole.get_parameter(name)[: len(one)])
    save_policy(cut, directory, "float32", tokenizer_from=directory)


def test_a_path_without_a_model_is_refused_when_the_run_is_prepared(models):
    config = run_of(models, "teacher")
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, teacher="nowhere"))
    with pytest.raises(ConfigError, match=r"train\.teacher = nowhere: no directory at"):
        RunFolder(models / "run").prepare(config, models)

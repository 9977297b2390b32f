"""Stages: what a file may say, what decides a stage's folder, and a run of stages that is killed, changed and damaged."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.algos.rejection_sampling import raft
from shoal.chat import isolated
from shoal.config import SftConfig, TinyPolicy, load_run
from shoal.config.stages import StagesConfig, load_stages, settings_of
from shoal.errors import ConfigError, StateError
from shoal.evaluation_files import Evaluation
from shoal.jobs import sft
from shoal.jobs.cold_start_examples import chosen_rows
from shoal.launch.pipeline.job_inputs import Input, Job, demand_doable, demand_same_inputs, digest_below, job_of
from shoal.launch.pipeline.pipeline import StageEnd, StagesRun, _policy_before, _read_done, in_words
from shoal.launch.pipeline.rollout_selection import choose, choose_pairs, digest_of, learned_groups
from shoal.launch.pipeline.run_stage_job import do
from shoal.launch.preflight import check_first_policy
from shoal.launch.role_process import RoleProcess
from shoal.ledger.log.check import verify
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.models.lora_config import AdapterSpec, has_adapter
from shoal.models.random_model import make_tiny
from shoal.models.value_head import load_valued
from shoal.protocol.task_draws import read_task_list
from shoal.run_folder import RunFolder
from shoal.runs.log_follower import creation_of
from shoal.runs.rollout_samples import group_of
from shoal.train.dataset_files import read_examples
from shoal.weights.manifest import weights_root

ROOT = Path(__file__).parents[2]

TINY = """
[policy.tiny]
width = 16
layers = 1
heads = 2
kv_heads = 1
mlp_width = 32
max_positions = 64
"""

START = f"""
name = "start"
seed = 1
episodes = 16
steps = 4
batch = 8
max_tokens = 64
publish_dtype = "float32"
threads = 1
[env]
name = "vowels.py"
{TINY}
"""

RL = f"""
name = "rl"
steps = 3
seed = 1
[[envs]]
name = "vowels.py"
solved = 0.3
[sampling]
max_turn_tokens = 8
max_tokens = 64
[rollouts]
group_size = 4
block_rollouts = 8
batch_groups = 2
max_staleness = 0
[workers]
count = 1
[eval]
episodes = 0
samples = 0
{TINY}
[policy.adapter]
rank = 2
"""

STAGES = """
name = "story"

[[stages]]
name = "start"
kind = "sft"
recipe = "start.toml"

[[stages]]
name = "able"
kind = "filter"
recipe = "rl.toml"
policy = "stage:start"
rollouts = 4
most = 32

[[stages]]
name = "rl"
kind = "rl"
recipe = "rl.toml"
policy = "stage:start"
tasks = "stage:able"

[[stages]]
name = "best"
kind = "reject"
rollouts = "stage:rl"

[[stages]]
name = "again"
kind = "sft"
recipe = "start.toml"
policy = "stage:start"
examples = "stage:best"

[[stages]]
name = "prefer"
kind = "dpo"
policy = "stage:start"
rollouts = "stage:rl"
steps = 2
batch = 2

[[stages]]
name = "judge"
kind = "reward_model"
policy = "stage:start"
rollouts = "stage:rl"
steps = 2
batch = 2

[[stages]]
name = "whole"
kind = "merge"
policy = "stage:rl"

[[stages]]
name = "exam"
kind = "eval"
recipe = "rl.toml"
set = ["eval.episodes=8"]
policy = "stage:whole"

[quick]
measure = "rl.toml"
measure_set = ["eval.episodes=4"]

[quick.stages.rl]
set = ["steps=1"]
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_files(tmp_path)


def write_files(place: Path) -> Path:
    """A stages file and its recipes."""
    (place / "vowels.py").write_text((ROOT / "recipes" / "vowels.py").read_text())
    for name, text in (("start", START), ("rl", RL), ("story", STAGES)):
        (place / f"{name}.toml").write_text(text)
    return place / "story.toml"


# --- what a stages file may say ---

SECOND = '[[stages]]\nname = "b"\nkind = "sft"\nrecipe = "start.toml"\n'

REFUSED = {
    "known: sft, rl, filter, eval, merge, reject, dpo, reward_model": 'kind = "guess"',
    "pairs come from `rollouts` (an rl stage) or from `pairs` (a file)": 'kind = "dpo"\npolicy = "stage:b"',
    "stages[0].lr = 0.0: must be above 0": 'kind = "reward_model"\npolicy = "stage:b"\npairs = "p.jsonl"\nlr = 0.0',
    "unknown key stages[0].steps": 'kind = "sft"\nrecipe = "start.toml"\nsteps = 3',
    "there is no stage c; stages: a, b": 'kind = "sft"\nrecipe = "start.toml"\npolicy = "stage:c"',
    "that comes later: move it up": 'kind = "sft"\nrecipe = "start.toml"\npolicy = "stage:b"',
    'write it as "stage:NAME"': 'kind = "sft"\nrecipe = "start.toml"\npolicy = "models/tiny"',
    'for that stage, write "stage:b"': 'kind = "merge"\npolicy = "b"',
    "two stages are named b": 'kind = "sft"\nrecipe = "start.toml"\n' + SECOND,
    "low = 0.9: must be at most high = 0.8": 'kind = "filter"\nrecipe = "rl.toml"\nlow = 0.9',
    'stage a: policy = "": write "stage:NAME", or a directory': 'kind = "dpo"\npolicy = ""\npairs = "p.jsonl"',
    'stage a: rollouts = "": write "stage:NAME"': 'kind = "reject"\nrollouts = ""',
    'stage a: recipe = "": write its path': 'kind = "sft"\nrecipe = ""',
    "itself takes from it: a loop": 'kind = "merge"\npolicy = "stage:a"',
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_file_that_cannot_be_done_is_refused_in_one_line(tmp_path: Path, said: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(f'name = "s"\n[[stages]]\nname = "a"\n{REFUSED[said]}\n{SECOND}')
    with pytest.raises(ConfigError) as refused:
        load_stages(path)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_stages_that_take_from_each_other_are_called_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    takes = '[[stages]]\nname = "{}"\nkind = "merge"\npolicy = "stage:{}"\n'
    path.write_text('name = "s"\n' + takes.format("a", "b") + takes.format("b", "a"))
    with pytest.raises(ConfigError, match="b itself takes from it: a loop"):
        load_stages(path)


def test_a_stage_takes_only_what_the_other_gives(files: Path) -> None:
    files.write_text(STAGES.replace('examples = "stage:best"', 'examples = "stage:rl"'))
    with pytest.raises(ConfigError, match="a stage of kind rl gives no examples; reject would"):
        load_stages(files)


def test_a_run_file_is_not_taken_for_a_stages_file(files: Path) -> None:
    with pytest.raises(ConfigError, match="is a recipe of `shoal run`, not a stages file"):
        load_stages(files.parent / "rl.toml")


def test_overrides_name_a_stage_and_quick_overrides_keys_of_stages(files: Path) -> None:
    config = load_stages(files, ["rl.train.lr=0.5", "best.keep=2"], quick=True)
    _, _, rl, best, *_ = config.stages
    settings = settings_of(rl, files.parent)
    assert (config.name, settings.steps, settings.train.lr, best.keep) == ("story-quick", 1, 0.5, 2)
    with pytest.raises(
        ConfigError, match="there is no stage nobody; stages: start, able, rl, best, again, prefer, judge, whole, exam"
    ):
        load_stages(files, ["nobody.steps=1"])
    with pytest.raises(ConfigError, match=r"write it as stage\.key=value"):
        load_stages(files, ["steps=1"])


def test_what_no_stage_could_do_is_said_before_the_first_begins(files: Path) -> None:
    faults = {
        "rl.workers.count=0": "stage rl: workers.count = 0: a stage is a run of this machine alone",
        "rl.validators.count=0": "stage rl: validators.count = 0",
        "exam.eval.episodes=0": r"stage exam: eval\.episodes = 0",
        "start.policy.path=nowhere": r"stage start: policy\.path = nowhere: no directory at",
    }
    for override, said in faults.items():
        config = load_stages(files, [override])
        with pytest.raises(ConfigError, match=said):
            for stage in config.stages:
                demand_doable(stage, settings_of(stage, files.parent), files.parent)


def test_a_filter_says_which_policy_it_needs_and_which_environments_there_are(files: Path) -> None:
    for change, said in (
        ('policy = "stage:start"\nrollouts = 4', "policy: which one plays"),
        ("most = 32", "env = 'sums': name one"),
    ):
        files.write_text(STAGES.replace(change, 'env = "sums"' if "most" in change else ""))
        able = load_stages(files).stages[1]
        with pytest.raises(ConfigError, match=said):
            demand_doable(able, settings_of(able, files.parent), files.parent)


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_a_file_of_pairs_is_looked_for_beside_the_stages_file_and_nowhere_else(files: Path, kind: str) -> None:
    files.write_text(
        STAGES + f'[[stages]]\nname = "pairs"\nkind = "{kind}"\npolicy = "stage:start"\npairs = "p.jsonl"\n'
    )
    (files.parent.parent / "p.jsonl").write_text("those of somebody else")
    with pytest.raises(ConfigError, match="no file at"):
        job_named(files, "pairs", {})
    (files.parent / "p.jsonl").write_text("ours")
    assert job_named(files, "pairs", {}).settings["pairs"] == str(files.parent / "p.jsonl")


PAIR = '{"prompt": "1", "chosen": "2", "rejected": "3", "tools": null}'


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"prompt": "1", "chosen": "2"}', r"p\.jsonl, line 1: .*`rejected`"),
        ('{"prompt": "1", "chosen": "2", "rejected": "3"}\n\nnonsense\n', r"p\.jsonl, line 3: "),
        (
            '{"prompt": "1", "chosen": [{"role": "user", "content": "2"}], "rejected": "3"}',
            r"line 1: an answer is a text",
        ),
        ('{"prompt": [{"role": "robot", "content": "1"}], "chosen": "2", "rejected": "3"}', r"line 1: .*robot"),
        (
            '{"prompt": "1", "chosen": "2", "rejected": "3", "id": 7}',
            r"`id`; known are prompt, chosen, rejected, tools",
        ),
        ("\n", "no pairs to learn from"),
        (
            '{"prompt": "1", "chosen": "2", "rejected": "3"}\n{"prompt": "\udcff", "chosen": "2", "rejected": "3"}',
            "line 2 is not UTF-8: save",
        ),
        (
            '\ufeff{"prompt": "1", "chosen": "2", "rejected": "3"}',
            "begins with a byte order mark: save it as UTF-8 without",
        ),
        ("UTF-16", "is not UTF-8: save it as UTF-8 without"),
    ],
)
def test_lines_that_are_no_pairs_are_refused_before_the_first_stage(files: Path, lines: str, said: str) -> None:
    files.write_text(STAGES + '[[stages]]\nname = "pairs"\nkind = "dpo"\npolicy = "stage:start"\npairs = "p.jsonl"\n')
    coded = PAIR.encode("utf-16") if lines == "UTF-16" else lines.encode(errors="surrogateescape")
    (files.parent / "p.jsonl").write_bytes(coded)
    stage = load_stages(files).stages[-1]
    with pytest.raises(ConfigError, match=f"^stage pairs: pairs: .*{said}"):
        demand_doable(stage, None, files.parent)
    (files.parent / "p.jsonl").write_text(PAIR)
    demand_doable(stage, None, files.parent)


@pytest.mark.parametrize(
    "stage",
    [
        'kind = "dpo"\npairs = "p.jsonl"',
        'kind = "reward_model"\npairs = "p.jsonl"',
        'kind = "merge"',
        'kind = "eval"\nrecipe = "below/rl.toml"\nset = ["eval.episodes=1"]',
    ],
)
def test_a_stage_without_a_policy_in_a_recipe_may_begin_with_a_directory_beside_the_file(
    files: Path, stage: str
) -> None:
    files.write_text(f'name = "own"\n[[stages]]\nname = "first"\npolicy = "mine"\n{stage}\n')
    here = files.parent
    (here / "below").mkdir()
    (here / "below" / "rl.toml").write_text(RL.replace("vowels.py", "../vowels.py"))
    (here / "p.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}')
    first = load_stages(files).stages[0]
    with pytest.raises(ConfigError, match=r"policy = mine: no directory at"):
        demand_doable(first, settings_of(first, here), here)
    (here / "mine").mkdir()
    with pytest.raises(ConfigError, match=r"stage first: policy = mine: no file is in "):
        demand_doable(first, settings_of(first, here), here)
    own_policy(here / "mine", "merge" if "merge" in stage else "")
    demand_doable(first, settings_of(first, here), here)
    job = job_named(files, "first", {})
    assert job.inputs["policy"] == str(here / "mine")
    (here / "mine" / "model.safetensors").write_bytes(b"others")
    assert job_named(files, "first", {}).key != job.key
    with pytest.raises(StateError, match=r"its policy at .* changed"):
        demand_same_inputs(job, "first", here)


# --- what decides a stage's folder ---


def key_of(files: Path, *overrides: str) -> str:
    stage = load_stages(files, overrides).stages[0]
    return job_of(stage, settings_of(stage, files.parent), files.parent, {}).key


def key_and_stage(files: Path, kind: str, path: str) -> tuple[str, Any]:
    """A stage whose policy has a path, and the key that says so."""
    named = f"policy = {json.dumps(path)}"
    more = {
        "dpo": 'pairs = "p.jsonl"',
        "reward_model": 'pairs = "p.jsonl"',
        "eval": 'recipe = "rl.toml"\nset = ["eval.episodes=1"]',
    }
    if kind in ("sft", "rl"):
        recipe = files.parent / f"{'start' if kind == 'sft' else 'rl'}.toml"
        table = f"[policy]\npath = {json.dumps(path)}\n"
        text = recipe.read_text().replace(TINY, "").replace("[policy.adapter]\nrank = 2\n", "")
        recipe.write_text(text + table)
        named, more[kind] = "", f'recipe = "{recipe.name}"'
    (files.parent / "p.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}')
    files.write_text(f'name = "own"\n[[stages]]\nname = "first"\nkind = "{kind}"\n{named}\n{more.get(kind, "")}\n')
    return "policy" if named else "policy.path", load_stages(files).stages[0]


KINDS = ["sft", "rl", "dpo", "reward_model", "merge", "eval"]


DAMAGES = [("config.json", b'{"a": "\xe9\xff"}')]
OF_ADAPTERS = [("adapter_config.json", b"["), ("adapter_config.json", b'{"a": "\xe9\xff"}')]
OF_TEXTS = [
    ("generation_config.json", b"\x0d\xfc"),
    ("generation_config.json", b'{"a": "\xe9\xff"}'),
    ("tokenizer_config.json", b"\x0d\xfc"),
    ("tokenizer_config.json", b'{"a":' * 20000 + b"1" + b"}" * 20000),
    ("chat_template.jinja", b"{{ {% "),
]
"""Files of a model, and what no stage can begin with; a merge reads neither tokenizer nor chat template."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_model_is_refused_before_the_first_stage(files: Path, kind: str) -> None:
    here = files.parent
    own_policy(here / "mine", kind)
    key, stage = key_and_stage(files, kind, "mine")
    demand_doable(stage, settings_of(stage, here), here)
    for name, data in (*DAMAGES, *(OF_ADAPTERS if kind == "merge" else OF_TEXTS)):
        path = here / "mine" / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=rf"^stage first: {key}: .*{name}"):
            demand_doable(stage, settings_of(stage, here), here)
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"


def test_a_template_that_does_not_end_is_refused_by_stages_run_and_sft(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "OWN_LIMITS", isolated.RendererLimits(time_s=0.5, open_s=9.0))
    monkeypatch.setattr(isolated, "GRACE_S", 0.1)
    here = files.parent
    monkeypatch.chdir(here)
    own_policy(here / "mine", "sft")
    (here / "mine" / "chat_template.jinja").write_text(ENDLESS)
    says = r"template .* of \S*mine took too long \(limits for each text: 0.5 s, .*: correct the template, or use"
    for kind in ("sft", "rl"):
        key, stage = key_and_stage(files, kind, "mine")
        settings = settings_of(stage, here)
        with pytest.raises(ConfigError, match=rf"^stage first: {key}: the chat {says}"):
            demand_doable(stage, settings, here)
        with pytest.raises(StateError, match=says):
            if isinstance(settings, SftConfig):
                sft.make(settings, here, here / "out")
            elif settings is not None:
                check_first_policy(RunFolder(here / "run"), settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "x/" * 3000])
def test_what_no_path_can_be_is_refused_in_one_line_with_stage_and_key(files: Path, kind: str, path: str) -> None:
    key, stage = key_and_stage(files, kind, path)
    with pytest.raises(ConfigError, match=rf"^stage first: {key} = ") as refused:
        demand_doable(stage, settings_of(stage, files.parent), files.parent)
    assert "\0" not in str(refused.value) and len(str(refused.value)) < 300


def test_a_file_of_pairs_or_a_recipe_that_no_path_can_be_is_refused(files: Path) -> None:
    files.write_text('name = "own"\n[[stages]]\nname = "first"\nkind = "dpo"\npolicy = "mine"\npairs = "a\\u0000b"\n')
    own_policy(files.parent / "mine")
    stage = load_stages(files).stages[0]
    with pytest.raises(ConfigError, match=r"^stage first: pairs = "):
        demand_doable(stage, None, files.parent)
    files.write_text('name = "own"\n[[stages]]\nname = "first"\nkind = "sft"\nrecipe = "a\\u0000b"\n')
    with pytest.raises(ConfigError, match=r"cannot read .*a\\u0000b"):
        settings_of(load_stages(files).stages[0], files.parent)


@pytest.mark.parametrize("judge", ["teacher", "reward_model"])
def test_a_damaged_judge_is_refused_before_the_first_stage(files: Path, judge: str) -> None:
    with_judge(files, judge)
    rl = next(stage for stage in load_stages(files).stages if stage.name == "rl")
    (files.parent / "judge" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=rf"^stage rl: train\.{judge}: .*config\.json"):
        demand_doable(rl, settings_of(rl, files.parent), files.parent)


def own_policy(place: Path, kind: str = "") -> None:
    """A model as a stage of the kind takes it: for merge, with an adapter."""
    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32, max_positions=64), place, 1, "float32")
    if kind == "merge":
        (place / "adapter_config.json").write_text(json.dumps(AdapterSpec(2, 4.0).to_peft()))


def test_a_key_follows_settings_and_sources_but_not_names_and_places(files: Path, tmp_path: Path) -> None:
    key, other = key_of(files), tmp_path / "elsewhere"
    other.mkdir()
    moved = write_files(other)
    moved.write_text(STAGES.replace('name = "start"', 'name = "begin"').replace("stage:start", "stage:begin"))
    assert key_of(moved) == key
    assert key_of(files, "start.steps=5") != key
    source = files.parent / "vowels.py"
    source.write_text(source.read_text() + "\n# changed\n")
    assert key_of(files) != key


def with_judge(files: Path, judge: str) -> Path:
    """The run file of the stages, with a judge that is a directory beside it."""
    judged = f'[train]\n{judge} = "judge"\n[train.algorithm]\nname = "composition"\nadvantage = "{judge}"\n'
    (files.parent / "rl.toml").write_text(RL + judged)
    (files.parent / "judge").mkdir()
    (files.parent / "judge" / "model.safetensors").write_bytes(b"weights")
    return files.parent / "judge" / "model.safetensors"


def job_named(files: Path, name: str, inputs: dict[str, Input]) -> Job:
    (stage,) = (one for one in load_stages(files).stages if one.name == name)
    return job_of(stage, settings_of(stage, files.parent), files.parent, inputs)


@pytest.mark.parametrize("judge", ["teacher", "reward_model"])
def test_the_key_of_a_run_follows_its_judge_and_not_where_that_is(files: Path, tmp_path: Path, judge: str) -> None:
    weights, inputs = with_judge(files, judge), {"policy": Input(tmp_path, "00"), "tasks": Input(tmp_path, "")}
    before = {name: job_named(files, name, inputs) for name in ("rl", "able", "exam")}
    assert all(job.settings["train"][judge] == str(weights.parent) for job in before.values())
    other = tmp_path / "elsewhere"
    other.mkdir()
    with_judge(moved := write_files(other), judge)
    assert job_named(moved, "rl", inputs).key == before["rl"].key
    weights.write_bytes(b"other weights")
    after = {name: job_named(files, name, inputs) for name in before}
    assert after["rl"].key != before["rl"].key
    assert all(after[name].key == before[name].key for name in ("able", "exam")), "they compute no advantages"
    weights.unlink()
    weights.parent.rmdir()
    with pytest.raises(ConfigError, match=rf"stage rl: train\.{judge} = judge: no directory at"):
        job_named(files, "rl", inputs)


def test_the_teacher_of_a_run_may_be_another_stages_policy(files: Path, tmp_path: Path) -> None:
    taught = """set = ['train.algorithm.name="composition"', 'train.algorithm.advantage="teacher"']"""
    files.write_text(STAGES.replace('tasks = "stage:able"', f'teacher = "stage:start"\n{taught}'))
    found = {key: Input(tmp_path / key, "00") for key in ("policy", "teacher")}
    job = job_named(files, "rl", found)
    assert job.settings["train"]["teacher"] == str(tmp_path / "teacher") == job.inputs["teacher"]
    again = job_named(files, "rl", found | {"teacher": Input(tmp_path / "moved", "00")})
    changed = job_named(files, "rl", found | {"teacher": Input(tmp_path / "teacher", "11")})
    assert again.key == job.key != changed.key
    files.write_text(files.read_text().replace('teacher = "stage:start"', 'teacher = "stage:able"'))
    with pytest.raises(ConfigError, match="a stage of kind filter gives no teacher; sft, rl, merge, dpo would"):
        load_stages(files)


# --- a run of stages ---


def start(files: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shoal.cli.main", "stages", str(files), "--out", str(out), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def finish(process: subprocess.Popen[bytes], code: int = 0) -> str:
    said = process.communicate(timeout=200)[0].decode()
    assert process.returncode == code, said
    return said


def ends_of(out: Path) -> dict[str, dict]:
    return {end["name"]: end for end in json.loads((out / "report.json").read_bytes())["stages"]}


def final_root(out: Path) -> str:
    return weights_root(out / "stages" / ends_of(out)["again"]["key"] / "policy")


def done_of(out: Path, name: str) -> dict[str, dict[str, str]]:
    return json.loads((out / "stages" / ends_of(out)[name]["key"] / "done.json").read_bytes())["outputs"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A stages file, and the folder in which it was done without a kill."""
    place = tmp_path_factory.mktemp("stages")
    files = write_files(place)
    said = finish(start(files, place / "out"))
    assert said.count(": at work") == 9, said
    return files, place / "out"


def test_every_stage_reports_its_figures_and_is_skipped_when_done(unbroken: tuple[Path, Path]) -> None:
    files, out = unbroken
    ends = ends_of(out)
    assert list(ends) == ["start", "able", "rl", "best", "again", "prefer", "judge", "whole", "exam"]
    assert all(end["seconds"] > 0 and end["cpu_s"] > 0 and end["done_now"] for end in ends.values())
    assert all(ends[name]["tokens"] > 0 for name in ("start", "able", "rl", "again", "prefer", "judge"))
    assert ends["exam"]["after"]["episodes"] == 8
    assert ends["best"]["figures"]["chosen"] < ends["best"]["figures"]["rollouts"]
    before = {path: path.stat().st_mtime_ns for path in out.glob("stages/*/done.json")}
    said = finish(start(files, out))
    assert said.count(": done before") == 9 and ": at work" not in said
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("stages/*/done.json")}


def test_a_merge_stage_makes_a_whole_model_of_the_adapter_that_a_run_learned(unbroken: tuple[Path, Path]) -> None:
    _, out = unbroken
    ends = ends_of(out)
    adapted = out / "stages" / ends["rl"]["key"] / "run" / "checkpoints" / "final"
    whole = out / "stages" / ends["whole"]["key"] / "policy"
    assert has_adapter(adapted) and not has_adapter(whole)
    assert "Against the adapter over its base" in ends["whole"]["figures"]["said"]
    evaluated = json.loads((out / "stages" / ends["exam"]["key"] / "job.json").read_bytes())
    assert evaluated["settings"]["policy"]["path"] == str(whole)


@pytest.mark.slow
def test_stages_killed_again_and_again_come_to_the_same_weights(unbroken: tuple[Path, Path], tmp_path: Path) -> None:
    files, whole = unbroken
    out = tmp_path / "out"
    points = ("stages/*/job.json", "stages/*/done.json", "stages/*/run/log.sqlite", "stages/*/run/metrics.jsonl")
    for point in points:
        process = start(files, out)
        deadline = time.monotonic() + 100
        while not list(out.glob(point)) and process.poll() is None:
            assert time.monotonic() < deadline, f"{point} did not come"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(files, out))
    run = out / "stages" / ends_of(out)["rl"]["key"]
    (run / "done.json").unlink()  # as if killed when the run had ended, before it was told so
    finish(start(files, out))
    assert {name for name, end in ends_of(out).items() if end["done_now"]} == {"rl"}
    assert final_root(out) == final_root(whole)
    learned = [[done_of(place, name) for name in ("prefer", "judge")] for place in (out, whole)]
    assert learned[0] == learned[1]
    assert {name: end["key"] for name, end in ends_of(out).items()} == {
        name: end["key"] for name, end in ends_of(whole).items()
    }


def test_a_changed_setting_does_that_stage_again_and_those_that_follow(
    unbroken: tuple[Path, Path],
) -> None:
    files, out = unbroken
    before = ends_of(out)
    finish(start(files, out, "--set", "again.steps=3"))
    after = ends_of(out)
    changed = {name for name in before if before[name]["key"] != after[name]["key"]}
    assert changed == {"again"} == {name for name, end in after.items() if end["done_now"]}
    finish(start(files, out))  # the old folders are still there
    assert {name: end["key"] for name, end in ends_of(out).items()} == {n: e["key"] for n, e in before.items()}
    assert not any(end["done_now"] for end in ends_of(out).values())


HALF = {"mean": 0.5, "low95": 0.4, "high95": 0.6, "episodes": 8}


@pytest.mark.parametrize(
    ("kind", "outputs", "figures"),
    [
        ("nothing", {"policy": {}}, {}),
        ("eval", {"policy": {}}, HALF),
        ("eval", {}, HALF),
        ("eval", {"evaluation": {}}, {}),
        ("eval", {"evaluation": {}}, HALF | {"mean": "high"}),
        ("rl", {"policy": {}}, {"heldout": {"before": None, "after": HALF}}),
        ("rl", {"policy": {}}, {"heldout": None, "rollouts": "ab"}),
        ("reject", {"examples": {}}, {"right_of_rollouts": 0.5, "rollouts": 4}),
        ("reject", {"examples": {}}, {"right_of_rollouts": 1, "rollouts": 10**15, "right_of_chosen": 1, "chosen": 4}),
        ("reward_model", {"reward_model": {}}, {"accuracy": 0.5}),
    ],
)
def test_an_end_that_no_stage_has_written_is_named_in_one_line(
    tmp_path: Path, kind: str, outputs: dict[str, Any], figures: dict[str, Any]
) -> None:
    """Of other kinds than the folder's, of an older shoal, or edited."""
    made = {"tokens": 0, "figures": figures}
    told = {"kind": kind, "outputs": outputs, "made": made, "seconds": 1.0, "cpu_s": 1.0}
    (tmp_path / "done.json").write_text(json.dumps(told))
    for asked in {"eval", kind} - {"nothing"}:
        with pytest.raises(StateError, match=r"done.json cannot be read: .* delete .*, and the stage is done again"):
            _read_done(tmp_path, asked)


def test_a_stage_whose_environment_fails_is_reported_with_its_faults(tmp_path: Path) -> None:
    none = HALF | {"mean": None, "low95": None, "high95": None, "faults": 8}
    made = {"tokens": 0, "figures": {"heldout": {"before": HALF, "after": none}, "rollouts": "ab"}}
    told = {"kind": "rl", "outputs": {"policy": {}}, "made": made, "seconds": 1.0, "cpu_s": 1.0}
    (tmp_path / "done.json").write_text(json.dumps(told))
    assert _read_done(tmp_path, "rl") is not None, "no mean is a result"
    for faults, of_mean in ({"faults": 4}, "0.500 (4 without"), (none, "none (8 without"):
        before, after = msgspec.convert([HALF, HALF | faults], list[Evaluation])
        end = StageEnd("learn", "rl", "ab", before, after, 1.0, 1.0, 9, True, {})
        words = in_words("mine", [end]).splitlines()
        assert of_mean in words[2]
        assert words[3].startswith(f"learn: no comparison, because {after.faults} of 8 held-out episodes have no score")


def test_a_stage_whose_input_changes_while_it_works_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key says that it began with other bytes. Restoring those does not make its output right."""
    policy = tmp_path / "policy" / "model.safetensors"
    policy.parent.mkdir()
    policy.write_bytes(b"before")
    pinned = {"inputs": {"policy": digest_below(policy.parent)}}
    job = Job("merge", {"threads": 1}, {}, {"policy": str(policy.parent)}, json.dumps(pinned))
    folder = tmp_path / "out" / "stages" / job.key

    def attend(self: StagesRun, process: RoleProcess) -> None:
        (folder / "policy").mkdir(exist_ok=True)
        (folder / "policy" / "model.safetensors").write_bytes(b"of " + policy.read_bytes())
        (folder / "made.json").write_text("{}")
        policy.write_bytes(b"while it worked")

    monkeypatch.setattr(StagesRun, "_attend", attend)
    local_run = StagesRun(StagesConfig(name="s", stages=()), tmp_path, tmp_path / "out", -1, print)
    with pytest.raises(
        StateError, match=r"stage whole: its policy at .* changed while it worked. Restore that and delete"
    ):
        local_run._do(job, "whole", "stage 1")
    policy.write_bytes(b"before")

    def undisturbed(self: StagesRun, process: RoleProcess) -> None:
        attend(self, process)
        policy.write_bytes(b"before")

    monkeypatch.setattr(StagesRun, "_attend", undisturbed)
    with pytest.raises(StateError, match="changed while it worked"):
        local_run._do(job, "whole", "stage 1")
    assert not (folder / "done.json").exists()
    shutil.rmtree(folder)
    assert local_run._do(job, "whole", "stage 1").again


def test_a_damaged_output_is_found_and_named_and_done_again_once_deleted(unbroken: tuple[Path, Path]) -> None:
    files, out = unbroken
    folder = out / "stages" / ends_of(out)["again"]["key"]
    file = folder / "policy" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = finish(start(files, out), code=2)
    error = said.strip().splitlines()[-1]
    assert f"error: stage again: {file} is not what the stage wrote" in error and f"delete {folder}" in error
    subprocess.run(["rm", "-r", str(folder)], check=True)
    finish(start(files, out))
    assert {name for name, end in ends_of(out).items() if end["done_now"]} == {"again"}


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(files, out, "--set", "start.steps=100000")
    while not list(out.glob("stages/*/log.txt")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "The same command continues" in finish(process, code=130)
    assert not list(out.glob("stages/*/done.json"))


def test_one_shoal_at_a_time_has_the_folder(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = start(files, out, "--set", "start.steps=100000")
    while not list(out.glob("stages/*/log.txt")):
        time.sleep(0.05)
    assert "is in use by another shoal" in finish(start(files, out), code=2)
    first.send_signal(signal.SIGINT)
    finish(first, code=130)


def test_a_stage_whose_process_dies_again_and_again_is_given_up(files: Path, tmp_path: Path) -> None:
    local_run = StagesRun(load_stages(files), files.parent, tmp_path, -1, lambda line: None)
    deaths = tmp_path / "deaths"
    script = f"echo x >> {deaths}; [ $(wc -l < {deaths}) -gt 8 ] || kill -9 $$"
    with pytest.raises(StateError, match=r"stage rl died 6 times: its log .* says why"):
        local_run._attend(RoleProcess("stage rl", ["sh", "-c", script], tmp_path / "log.txt", 1))


@pytest.mark.parametrize("job", [None, b"", b"garbage", b'{"kind": "sft"}'])
def test_a_job_that_is_garbage_is_one_line(tmp_path: Path, job: bytes | None) -> None:
    if job is not None:
        (tmp_path / "job.json").write_bytes(job)
    with pytest.raises(StateError, match=r"job\.json is no job of a stage: "):
        do(tmp_path)


def test_the_policy_before_a_stage_is_the_one_that_it_changes(tmp_path: Path) -> None:
    def before(kind: str) -> Path | None:
        settings = {"policy": {"path": str(tmp_path)}} if kind in ("sft", "rl") else {}
        return _policy_before(Job(kind, settings, {}, {"policy": str(tmp_path)}, "{}"))

    assert [before(kind) for kind in ("sft", "rl", "merge", "dpo")] == [tmp_path] * 4
    assert before("reward_model") is None, "it changes no policy, and measures itself"


# --- what a filter keeps, and a run draws from ---


def test_a_run_draws_only_tasks_that_the_filter_kept_and_its_log_says_which(unbroken: tuple[Path, Path]) -> None:
    _, out = unbroken
    ends = ends_of(out)
    place = out / "stages" / ends["able"]["key"]
    rates, found = json.loads((place / "rates.json").read_bytes()), read_task_list((place / "tasks.json").read_bytes())
    assert (
        found.tasks == tuple(task for task, rate in enumerate(rates) if 0.1 <= rate <= 0.8)
        and 0 < len(found.tasks) < 32
    )
    said = ends["able"]["figures"]
    assert (said["measured"], said["kept"], said["tasks_digest"]) == (len(rates), len(found.tasks), found.digest)
    folder = RunFolder(out / "stages" / ends["rl"]["key"] / "run")
    created = creation_of(folder.log)
    assert created.task_lists == {"vowels": found} and created.config["envs"][0]["tasks"] == found.digest
    groups = [group_of(folder, accepted) for _, accepted in learned_groups(folder)]
    assert {group.task for group in groups} <= set(found.tasks)
    audit = verify(Store(sqlite_url(folder.log), read_only=True).read())
    assert audit.findings == []


# --- what rejection takes of a run ---


def test_the_chosen_rows_are_those_of_the_rule_over_the_groups_of_the_log(unbroken: tuple[Path, Path]) -> None:
    _, out = unbroken
    ends = ends_of(out)
    folder = RunFolder(out / "stages" / ends["rl"]["key"] / "run")
    learned = learned_groups(folder)
    assert len(learned) == 3 * 2
    wanted = sum(len(raft(one.rewards, 1)) for _, one in learned)
    written = read_examples(out / "stages" / ends["best"]["key"] / "examples.msgpack")
    assert len(written.rows) == wanted == ends["best"]["figures"]["chosen"]
    again, _ = choose(folder, {"rule": "raft", "keep": 1, "last_steps": 1}, digest_of(learned))
    assert written.rows[-len(again.rows) :] == again.rows


def test_a_pair_is_the_best_and_the_worst_rollout_of_a_group(unbroken: tuple[Path, Path]) -> None:
    _, out = unbroken
    ends = ends_of(out)
    folder = RunFolder(out / "stages" / ends["rl"]["key"] / "run")
    learned = learned_groups(folder)
    pairs = choose_pairs(folder, 0, digest_of(learned)).read()
    assert len(pairs) == 2 * len(learned) and len(choose_pairs(folder, 1, digest_of(learned)).rows) == 4
    for (_, accepted), chosen, rejected in zip(learned, pairs[::2], pairs[1::2], strict=True):
        rollouts = group_of(folder, accepted).rollouts
        for row, reward in ((chosen, max(accepted.rewards)), (rejected, min(accepted.rewards))):
            (found,) = rollouts[accepted.rewards.index(reward)].rows()
            assert row == (found.tokens_T.tolist(), found.author_T.tolist())
    said = ends["prefer"]["figures"]
    assert said["learned_pairs"] == said["pairs"] == len(learned) and 0 <= said["accuracy"] <= 1


def test_a_reward_model_is_made_of_the_same_pairs_and_reports_what_it_ranks_right(
    unbroken: tuple[Path, Path],
) -> None:
    _, out = unbroken
    ends = ends_of(out)
    assert ends["judge"]["before"]["mean"] == 0.5, "a head of zeros ranks nothing"
    assert ends["judge"]["after"]["episodes"] == ends["judge"]["figures"]["pairs"] == ends["prefer"]["figures"]["pairs"]
    model = load_valued(out / "stages" / ends["judge"]["key"] / "reward-model")
    assert model.score.weight.abs().max() > 0


def test_the_reward_model_of_a_run_is_what_a_reward_model_stage_makes(files: Path, tmp_path: Path) -> None:
    """Its directory takes the place of what the recipe names, and its bytes are in the key."""
    judged = """set = ['train.algorithm.name="composition"', 'train.algorithm.advantage="reward_model"']"""
    files.write_text(
        STAGES
        + f"""
[[stages]]
name = "last"
kind = "rl"
recipe = "rl.toml"
{judged}
policy = "stage:start"
reward_model = "stage:judge"
"""
    )
    inputs = {key: Input(tmp_path / key, "00") for key in ("policy", "reward_model")}
    job = job_named(files, "last", inputs)
    assert job.settings["train"]["reward_model"] == str(tmp_path / "reward_model")
    assert job_named(files, "last", inputs | {"reward_model": Input(tmp_path / "reward_model", "11")}).key != job.key
    files.write_text(files.read_text().replace("stage:judge", "stage:prefer"))
    with pytest.raises(ConfigError, match="a stage of kind dpo gives no reward_model; reward_model would"):
        load_stages(files)


def test_rollouts_of_a_run_whose_host_plays_are_not_chosen_from(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    vowels = str(ROOT / "recipes" / "vowels.py")
    host_plays = ('[[envs]]\nname = "vowels.py"', f'[[envs]]\nname = "{vowels}"\nkind = "completions"')
    (tmp_path / "rl.toml").write_text(RL.replace(*host_plays))
    folder.prepare(load_run(tmp_path / "rl.toml"), tmp_path)
    with pytest.raises(StateError, match="so the log has no whole rollouts"):
        choose(folder, {}, "00" * 32)


def test_chosen_rollouts_of_another_tokenizer_are_refused(unbroken: tuple[Path, Path]) -> None:
    _, out = unbroken
    ends = ends_of(out)
    written = read_examples(out / "stages" / ends["best"]["key"] / "examples.msgpack")
    start = out / "stages" / ends["start"]["key"] / "policy"
    assert len(chosen_rows(written, start, 64)) == len(written.rows)
    with pytest.raises(StateError, match="have another tokenizer"):
        chosen_rows(msgspec.structs.replace(written, tokenizer="00" * 32), start, 64)
    with pytest.raises(StateError, match="at most max_tokens = 2 tokens"):
        chosen_rows(written, start, 2)


def test_a_log_that_changed_and_bodies_that_are_gone_are_refused_with_the_remedy(unbroken: tuple[Path, Path]) -> None:
    _, out = unbroken
    folder = RunFolder(out / "stages" / ends_of(out)["rl"]["key"] / "run")
    with pytest.raises(StateError, match="is not that of the finished run"):
        choose(folder, {}, "00" * 32)
    kept = folder.blobs.rename(folder.root / "aside")
    try:
        with pytest.raises(StateError, match=r"storage\.retain=batches"):
            choose(folder, {}, digest_of(learned_groups(folder)))
    finally:
        kept.rename(folder.blobs)

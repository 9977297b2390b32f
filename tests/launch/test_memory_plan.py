"""A run that does not fit into the memory is refused before anything is loaded, in one line that says what to change."""

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli import main
from shoal.config import AdapterConfig, RunConfig, SamplingConfig, TinyPolicy, load_run
from shoal.errors import StateError
from shoal.humanize import data_size
from shoal.launch import memory_plan
from shoal.launch.memory_plan import (
    CPU,
    RoleNeeds,
    demand_disk,
    demand_memory,
    demand_quota,
    disk_of,
    layout_of,
    reports,
    roles_of,
)
from shoal.launch.memory_plan import fits as fit_of
from shoal.launch.sizing import shifts_of
from shoal.models.checkpoint import demand_weights
from shoal.models.config import write_json
from shoal.models.load_tensors import demand_finite
from shoal.models.lora_config import CONFIG, AdapterSpec
from shoal.models.memory import Layout, MemoryPart, engine_memory_in, trainer_parts
from shoal.models.random_model import make_tiny
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from shoal.plan.sizes import sizes_of, spec_of
from shoal.protocol.algorithm_config import DrGrpo, Kl, Ppo
from shoal.run_folder import RunFolder
from shoal.train.learner import Learner
from shoal.weights import memory_limit
from tests.launch.test_supervisor import local_run

RECIPES = Path(__file__).parents[2] / "recipes"
LARGE = TransformerConfig("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 32768, 1e6, 1e-6, True, (0,))
"""The shape of Qwen3-0.6B."""


@pytest.fixture
def config() -> RunConfig:
    return load_run(RECIPES / "wordle.toml")


def has_free(monkeypatch: pytest.MonkeyPatch, gb: float) -> None:
    monkeypatch.setattr(memory_plan, "free_on", lambda device: int(gb * 1e9))


def test_what_is_free_is_what_the_container_still_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1500000000\n")
    (tmp_path / "memory.current").write_text("1400000000\n")
    monkeypatch.setattr(memory_limit, "CONTAINER", tmp_path)
    assert memory_plan.free_on(CPU) == 100_000_000


def test_a_run_that_does_not_fit_is_told_how_much_for_what(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    has_free(monkeypatch, 8)
    with pytest.raises(
        StateError, match=r"needs about \d+\.\d GB of memory, and 8 GB are free: trainer .*moments"
    ) as told:
        demand_memory(config, LARGE, with_workers=False)
    assert "\n" not in str(told.value) and "take a smaller policy" in str(told.value)


def test_the_keys_that_make_it_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, again = (
        load_run(RECIPES / "wordle.toml", ["eval.episodes=0", f"train.recompute={how}"]) for how in ("none", "layers")
    )
    need = next(reports(plain, LARGE, with_workers=False)).need
    has_free(monkeypatch, need / 1e9 - 1)
    with pytest.raises(StateError, match=r'It fits with train\.recompute = "layers"$'):
        demand_memory(plain, LARGE, with_workers=False)
    demand_memory(again, LARGE, with_workers=False)


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_a_state_that_is_written_beside_the_next_steps_takes_memory(moments: str) -> None:
    """What `roles/trainer/state` copies: the same tensors that a learner's state has."""
    rarely, always = (
        load_run(RECIPES / "wordle.toml", [f"storage.state_every={every}", f"train.moments={moments}"])
        for every in (4, 1)
    )
    spec = spec_of(rarely, RECIPES)
    more = next(reports(rarely, spec, True)).need - next(reports(always, spec, True)).need
    learner = Learner(Transformer(spec), rarely.train, SamplingConfig(), steps=1)
    assert more == pytest.approx(sum(tensor.nbytes for tensor in learner.state(0).tensors.values()), rel=0.02)


def test_a_model_is_loaded_into_memory_on_its_way_to_a_gpu(config: RunConfig) -> None:
    def on_cpu(device: str) -> int:
        there = msgspec.structs.replace(config.train, device=device)
        roles = roles_of(msgspec.structs.replace(config, train=there), LARGE, with_workers=False)
        trainer = next(role for role in roles if role.name == "trainer")
        return sum(
            part.size
            for part in trainer.parts
            if part.name in ("loading", "weights") and (part.on_cpu or device == "cpu")
        )

    assert on_cpu("cuda") == on_cpu("cpu") == 4 * LARGE.num_parameters()


def test_the_best_layout_that_fits_is_taken_or_the_one_that_lacks_least() -> None:
    layout = Layout(microbatch_tokens=4096)
    assert fit_of(LARGE, layout, 10**12) == ({}, 0)
    kept = fit_of(LARGE, layout, 14 * 10**9)
    assert kept.keys == {"recompute": "layers"} and not kept.missing
    eight = {"recompute": "layers", "moments": "8bit"}
    least = fit_of(LARGE, layout, 10**9)
    assert least.keys == eight and least.missing > 10**9
    long = replace(layout, microbatch_tokens=1 << 17)  # whose activations take more than the float32 weights beside
    assert fit_of(LARGE, long, 10**9, "bfloat16").keys == {**eight, "dtype": "bfloat16"}
    assert fit_of(LARGE, long, 10**9, "float32").keys == eight


def test_an_adapter_may_have_its_base_in_bfloat16_if_that_is_published() -> None:
    layout = Layout(microbatch_tokens=1 << 17, rank=16)
    assert fit_of(LARGE, layout, 10**9, "bfloat16").keys["dtype"] == "bfloat16"
    assert "dtype" not in fit_of(LARGE, layout, 10**9, "float32").keys


def sizes(role: RoleNeeds) -> dict[str, int]:
    return {part.name: part.size for part in role.parts}


def trainer_of(config: RunConfig) -> RoleNeeds:
    return next(role for role in roles_of(config, LARGE, with_workers=False) if role.name == "trainer")


def test_an_adapter_is_reckoned_with_its_rank_and_targets(config: RunConfig) -> None:
    def trainer(**adapter: Any) -> dict[str, int]:
        policy = msgspec.structs.replace(config.policy, adapter=AdapterConfig(**adapter))
        return sizes(trainer_of(msgspec.structs.replace(config, policy=policy)))

    whole, adapter = trainer(), trainer(rank=8)
    learned = 4 * LARGE.adapter_parameters(8)
    assert adapter["adapter"] == adapter["gradients"] == adapter["version being published"] == learned
    assert adapter["moments"] == 2 * learned < whole["moments"] / 20 and adapter["weights"] == whole["weights"]
    assert trainer(rank=8, targets=("q_proj", "v_proj"))["adapter"] < learned / 3
    assert "adapter" not in whole


def test_a_base_in_nf4_takes_a_quarter_of_its_layers_in_bfloat16(config: RunConfig) -> None:
    def parts(base: str) -> dict[str, dict[str, int]]:
        adapter = AdapterConfig(rank=8, base=base)  # type: ignore[arg-type]
        policy = msgspec.structs.replace(config.policy, dtype="bfloat16", adapter=adapter)
        train = msgspec.structs.replace(config.train, dtype="bfloat16")
        run = msgspec.structs.replace(config, policy=policy, train=train)
        return {role.name: sizes(role) for role in roles_of(run, LARGE, with_workers=True)}

    plain, coded = parts(""), parts("nf4")
    layers = LARGE.num_parameters() - LARGE.vocab_size * LARGE.width
    for role in ("trainer", "worker", "validator"):
        saved = plain[role]["weights"] - coded[role]["weights"]
        assert saved == pytest.approx(2 * layers * (1 - 4.127 / 16), rel=1e-3)
    assert coded["trainer"]["activations"] < plain["trainer"]["activations"]


def test_an_engine_is_reckoned_with_the_adapter_as_a_node_reckons_it(config: RunConfig, tmp_path: Path) -> None:
    def weights(**adapter: Any) -> dict[str, int]:
        policy = msgspec.structs.replace(config.policy, adapter=AdapterConfig(**adapter))
        roles = roles_of(msgspec.structs.replace(config, policy=policy), LARGE, with_workers=True)
        parts = {role.name: sizes(role) for role in roles}
        return {name: parts[name]["weights"] for name in ("worker", "validator", "evaluation")}

    write_json(tmp_path / "config.json", LARGE.to_hf())
    write_json(tmp_path / CONFIG, AdapterSpec(16, 16.0).to_peft())
    assert set(weights(rank=16).values()) == {engine_memory_in(tmp_path, "float32").loaded}
    assert weights(rank=16)["worker"] - weights()["worker"] == 16 * LARGE.adapter_parameters(16)


def test_a_run_is_reckoned_with_the_layout_of_its_file() -> None:
    def need(*settings: str) -> int:
        config = load_run(RECIPES / "wordle.toml", ["eval.episodes=0", *settings])
        return next(reports(config, LARGE, with_workers=False)).need

    assert need('train.moments="8bit"') < need() - 3 * 10**9
    bfloat16 = ('policy.dtype="bfloat16"', 'train.dtype="bfloat16"')
    assert need(*bfloat16, 'train.moments="8bit"') < need(*bfloat16) - 3 * 10**9


def test_processes_of_a_trainer_share_what_stays_and_not_what_a_pass_needs() -> None:
    def need(processes: int) -> dict[str, int]:
        return {part.name: part.size for part in trainer_parts(LARGE, Layout(processes=processes))}

    one, four = need(1), need(4)
    for name in ("weights", "gradients", "moments"):
        assert four[name] == pytest.approx(one[name] / 4, rel=1e-6)
    assert four["activations"] == one["activations"] and four["gathered weights"] < one["weights"]
    config = load_run(RECIPES / "wordle.toml", ["train.processes=4", "eval.episodes=0"])
    trainer = trainer_of(config)
    assert trainer.on(CPU) == 4 * sum(part.size for part in trainer.parts)
    on_gpus = replace(trainer, device="cuda", parts=(MemoryPart("a", 10), MemoryPart("b", 7, True)))
    assert (on_gpus.on("cuda"), on_gpus.on(CPU)) == (10, 28)


def test_every_key_of_a_layout_is_one_of_the_run_file(config: RunConfig) -> None:
    for keys in memory_plan.LAYOUTS:
        assert all(hasattr(config.train, key) for key in keys)
        assert replace(layout_of(config, LARGE), **keys)


def test_each_process_that_the_launcher_starts_is_counted(config: RunConfig) -> None:
    counts = {role.name: role.processes for role in roles_of(config, LARGE, with_workers=True)}
    workers = config.workers.count + config.workers.cheating
    assert counts == {
        "the rest": 1,
        "trainer": 1,
        "validator": config.validators.count,
        "worker": workers,
        "evaluation": 1,
    }
    assert "worker" not in {role.name for role in roles_of(config, LARGE, with_workers=False)}


def test_doctor_shows_what_each_role_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "wordle.toml")
    has_free(monkeypatch, 16)
    assert main.main(["doctor", "--recipe", recipe]) == 0
    said = capsys.readouterr().out
    assert "gradients" in said and "The run fits." in said and "torch" not in said
    assert "disk " in said and "at first, then" in said
    assert main.main(["doctor", "--recipe", recipe, "--memory", "1"]) == 1
    assert "-> " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "value", "says"),
    [
        ("float32", float("nan"), "model.safetensors: model.norm.weight holds values that are not finite"),
        ("float16", float("inf"), "model.safetensors: model.norm.weight holds values that are not finite"),
        ("bfloat16", -float("inf"), "model.safetensors: model.norm.weight holds values that are not finite"),
        ("int8", 1, "_scale, F32["),
    ],
)
def test_weights_that_no_engine_takes_begin_no_run(
    dtype: str, value: float, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else roles start, and a run waits for ever for a trainer that refuses them."""
    import torch
    from safetensors.torch import load_file, save_file

    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), tmp_path / "model", 0, "float32")
    recipe, weights = tmp_path / "run.toml", tmp_path / "model" / "model.safetensors"
    recipe.write_text('name = "r"\nsteps = 1\n[policy]\npath = "model"\n[[envs]]\nname = "arithmetic"\n')
    tensors = {name: one.to(getattr(torch, dtype)) for name, one in load_file(weights).items()}
    save_file(tensors, weights)
    if dtype != "int8":
        demand_finite(demand_weights(weights.parent, TransformerConfig.from_directory(weights.parent)))
    tensors["model.norm.weight"][-1] = value
    save_file(tensors, weights)
    assert main.main(["doctor", "--recipe", str(recipe)]) == 1
    assert says in (said := capsys.readouterr().out) and "The run fits" not in said
    assert main.main(["run", str(recipe), "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err and not RunFolder(tmp_path / "out").log.exists()


def test_a_model_whose_logits_overflow_begins_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights are finite numbers. Else a run ends late, and an evaluation plays empty turns."""
    from safetensors.torch import load_file, save_file

    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), tmp_path / "model", 0, "float32")
    recipe, weights = tmp_path / "run.toml", tmp_path / "model" / "model.safetensors"
    recipe.write_text('name = "r"\nsteps = 1\n[policy]\npath = "model"\n[[envs]]\nname = "arithmetic"\n')
    save_file({name: 1e30 * one if "proj" in name else one for name, one in load_file(weights).items()}, weights)
    says = "model: its weights are finite numbers, but its logits in float32 are not: weights are so large"
    assert main.main(["doctor", "--recipe", str(recipe)]) == 1
    assert says in (said := capsys.readouterr().out) and "The run fits" not in said
    assert main.main(["eval", str(tmp_path / "model"), "--env", "arithmetic", "--episodes", "2"]) == 2
    assert says in capsys.readouterr().err
    assert main.main(["run", str(recipe), "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err and not RunFolder(tmp_path / "out").log.exists()


def test_doctor_reads_what_the_files_of_the_model_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without weights, or with those of another model, fits nowhere."""
    make_tiny(TinyPolicy(), tmp_path / "model", seed=0, dtype="float32")
    recipe = tmp_path / "run.toml"
    recipe.write_text('name = "r"\nsteps = 1\n[policy]\npath = "model"\n[[envs]]\nname = "arithmetic"\n')
    ask = ["doctor", "--recipe", str(recipe)]
    assert main.main(ask) == 0
    assert "with the names and shapes that config.json asks for" in capsys.readouterr().out
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    assert main.main(ask) == 1
    assert "lacks tensor model.layers." in capsys.readouterr().out
    (tmp_path / "model" / "model.safetensors").unlink()
    assert main.main(ask) == 1
    assert "missing  model         cannot read" in (said := capsys.readouterr().out) and "The run fits" not in said
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert main.main(ask) == 1
    assert "tokenizer.json is damaged" in capsys.readouterr().out
    assert main.main(["doctor", "model"]) == 2
    assert "--recipe RUN_FILE" in capsys.readouterr().err


WIDE = ['policy.path=""', "policy.tiny={width=256, layers=2, heads=4, kv_heads=2, mlp_width=512, max_positions=64}"]
"""4.9 MB in float32."""


@pytest.mark.parametrize(
    ("changes", "least_mb"),
    [
        (["rollouts.max_staleness=0"], 5),
        (["rollouts.max_staleness=3"], 20),
        (["rollouts.max_staleness=3", "steps=1"], 10),
        (["storage.retain=all", "steps=20"], 102),
        (["rollouts.max_staleness=3", "policy.dtype=bfloat16"], 10),
        (["rollouts.max_staleness=3", "policy.dtype=bfloat16", "storage.anchor_every=4"], 5),
    ],
)
def test_a_quota_that_does_not_hold_the_weights_that_a_run_needs_is_refused(changes: list[str], least_mb: int) -> None:
    def config_of(quota_mb: int) -> RunConfig:
        return load_run(RECIPES / "arithmetic.toml", [*WIDE, *changes, f"storage.quota_mb={quota_mb}"])

    demand_quota(config_of(least_mb))
    with pytest.raises(
        StateError, match=rf"storage\.quota_mb = {least_mb - 1}, and .*keeps .* Set storage\.quota_mb"
    ) as e:
        demand_quota(config_of(least_mb - 1))
    needs = sizes_of(config_of(least_mb), RECIPES).needed_blobs
    asked_mb = int(re.findall(r"quota_mb = (\d+) or more", str(e.value))[0])
    assert f"keeps {data_size(needs)}" in str(e.value) and asked_mb == max(least_mb, math.ceil(needs / 1e6))


@pytest.mark.parametrize(
    ("scarce", "changes", "says"),
    [
        ("free_on", [], "this run needs about"),
        ("free_below", [], "of disk in"),
        ("", [*WIDE, "rollouts.max_staleness=1", "storage.quota_mb=9"], "so it would wait for ever"),
    ],
)
def test_a_run_that_does_not_fit_starts_no_role(
    scarce: str,
    changes: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if scarce:
        monkeypatch.setattr(memory_plan, scarce, lambda place: 10_000_000)
    sets = [word for change in changes for word in ("--set", change)]
    assert main.main(["run", str(RECIPES / "arithmetic.toml"), "--out", str(tmp_path / "run"), *sets]) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_host_is_told_that_its_disk_is_full_while_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_plan.full_disk(tmp_path) == ""
    monkeypatch.setattr(memory_plan, "free_below", lambda folder: 0)
    assert "is full: free some space" in memory_plan.full_disk(tmp_path)
    local_run(tmp_path, told := io.StringIO())._look()
    assert "is full: free some space" in told.getvalue()


def test_what_a_resumed_run_already_holds_is_not_asked_for_again(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = int(disk_of(config, RECIPES, with_workers=True))
    monkeypatch.setattr(memory_plan, "free_below", lambda folder: need - 1000)
    here = replace_path(config)
    with pytest.raises(StateError, match="of disk"):
        demand_disk(here, tmp_path / "new", with_workers=True)
    (tmp_path / "dashboard.sqlite-wal").write_bytes(bytes(1000))
    with pytest.raises(StateError, match="of disk"):
        demand_disk(here, tmp_path, with_workers=True)
    (tmp_path / "blob").write_bytes(bytes(1000))
    (tmp_path / "the same").hardlink_to(tmp_path / "blob")
    demand_disk(here, tmp_path, with_workers=True)


def replace_path(config: RunConfig) -> RunConfig:
    """The config with an absolute path of its policy, as a run's folder has it."""
    policy = msgspec.structs.replace(config.policy, path=str(RECIPES / config.policy.path))
    return msgspec.structs.replace(config, policy=policy)


def in_shifts(monkeypatch: pytest.MonkeyPatch, gb: float, *changes: str) -> dict[str, memory_plan.MemoryReport]:
    """What a host of the adapter of 8B takes, by device, on a GPU with so much memory."""
    on_a_gpu = [f"{section}.device=cuda" for section in ("train", "workers", "validators")]
    config = load_run(RECIPES / "qwen3-8b-lora.toml", [*on_a_gpu, *changes], random_policy=True)
    has_free(monkeypatch, gb)
    return {report.device: report for report in reports(config, spec_of(config, RECIPES), with_workers=False)}


def test_processes_take_shifts_on_a_gpu_that_cannot_hold_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, shared = in_shifts(monkeypatch, 80), in_shifts(monkeypatch, 24)
    assert not at_once["cuda"].shared and shared["cuda"].shared and not shared["cpu"].shared
    roles = {role.name: role for role in at_once["cuda"].roles}
    trainer, validator = (roles[name].on("cuda") for name in ("trainer", "validator"))
    assert at_once["cuda"].need == trainer + validator > 24e9
    assert shared["cuda"].need == trainer + memory_plan.GPU_BYTES < 24e9


def test_what_a_process_parks_takes_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads nothing meanwhile, and both may be parked for a moment."""
    at_once, shared = ({role.name: role for role in in_shifts(monkeypatch, gb)["cpu"].roles} for gb in (80, 24))
    for name in ("trainer", "validator"):
        parts, parked = (sizes(role[name]) for role in (at_once, shared))
        kept = sum(part.size for part in at_once[name].parts if part.name in memory_plan.KEPT)
        assert parked["loading or parked"] == max(parts["loading"], kept) and "loading" not in parked
    assert shared["trainer"].on("cpu") > at_once["trainer"].on("cpu")


def test_a_reference_a_critic_and_a_teacher_are_counted_and_parked(config: RunConfig, tmp_path: Path) -> None:
    make_tiny(config.policy.tiny, tmp_path / "teacher", 0, "float32")
    for algorithm, named, teacher in (
        (DrGrpo(kl=Kl(0.1, "k2")), {"reference"}, ""),
        (Ppo(advantage="gae"), {"critic", "critic's moments"}, ""),
        (Ppo(advantage="teacher"), {"teacher"}, str(tmp_path / "teacher")),
    ):
        train = msgspec.structs.replace(config.train, device="cuda", algorithm=algorithm, teacher=teacher)
        trainer = trainer_of(msgspec.structs.replace(config, train=train))
        parts, parked = (sizes(role) for role in (trainer, trainer.in_shifts()))
        assert named <= parts.keys()
        kept = sum(parts[name] for name in {"weights", "moments", *named})
        assert parked["loading or parked"] == max(parts["loading"], kept)


def test_a_run_that_fits_in_no_way_is_told_of_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    report = in_shifts(monkeypatch, 12)["cuda"]
    assert "of memory on cuda with one process at a time, and 12 GB are free: trainer 22.4 GB" in report.in_words()


def test_shifts_can_be_turned_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_shifts(monkeypatch, 80, "host.shifts=on")["cuda"].shared
    assert not in_shifts(monkeypatch, 24, "host.shifts=off")["cuda"].shared
    assert not in_shifts(monkeypatch, 24, "validators.count=0")["cuda"].shared
    several = load_run(RECIPES / "wordle.toml", ["host.shifts=on", "train.processes=2", "train.packing=padded"])
    assert not memory_plan.shared_devices(several, LARGE, with_workers=True)


def test_each_process_on_a_shared_device_is_told_where_to_queue(config: RunConfig, tmp_path: Path) -> None:
    folder, host = RunFolder(tmp_path), msgspec.structs.replace(config.host, shifts="on")
    shifts = shifts_of(msgspec.structs.replace(config, host=host), folder, LARGE, with_workers=True)
    assert shifts.folder_of("train") == shifts.folder_of("workers") == str(tmp_path / "shifts" / "cpu")
    assert "take shifts on cpu: trainer, validators, workers and evaluations" in shifts.in_words()[0]
    alone = shifts_of(config, folder, LARGE, with_workers=True)
    assert alone.folder_of("train") == "" and alone.in_words() == []

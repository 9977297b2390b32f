"""Calibration of a tiny run: it plays and recomputes real rollouts, and writes a run file that loads."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.algos.toploc import PRIME
from shoal.config import load_run
from shoal.errors import ConfigError, StateError
from shoal.jobs.calibrate import SETTINGS, CalibrateOptions, main, tables_of, with_values
from shoal.jobs.calibration_recordings import Recording
from shoal.protocol.encoding import from_msgpack, to_msgpack
from shoal.protocol.messages import Bounds
from shoal.protocol.noise import KEYED_32
from tests.nightly import first_of

TINY = """# A run to be measured.
name = "tiny"
steps = 1
seed = 3

[policy]
dtype = "DTYPE" # published
[policy.tiny]
width = 32
layers = 2
heads = 2
kv_heads = 1
mlp_width = 64
max_positions = 64

[[envs]]
name = "arithmetic"

[sampling]
max_turn_tokens = 6
max_tokens = 64

[rollouts]
group_size = 4
block_rollouts = 16
"""
MEASURED = tables_of({"float32/float32": Bounds(gap=0.25, flipped=3e-05, mean_gap=0.0002, logprob=0.5)}, None)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace("DTYPE", "float32"))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> bytes:
    """A recording of the run in float32, without proofs."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "tiny.toml").write_text(TINY.replace("DTYPE", "float32"))
    main(folder / "tiny.toml", [], CalibrateOptions(episodes=16, save=folder / "played"))
    return (folder / "played").read_bytes()


@pytest.fixture
def there(tmp_path: Path, recorded: bytes) -> Path:
    path = tmp_path / "there.played"
    path.write_bytes(recorded)
    return path


# --- measuring ---


def test_calibration_measures_every_setting_and_writes_a_run_file_that_loads(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_run(run_file)
    main(run_file, [], CalibrateOptions(episodes=16, write=True))
    shown = capsys.readouterr().out
    assert "activation" not in shown + run_file.read_text()
    assert [str(setting) for setting in SETTINGS if str(setting) not in shown] == []
    assert len(re.findall(r"^ +\d\.\d{3} +\d+\.\d\d%", shown, re.MULTILINE)) == 11  # ten tenths, and all
    assert run_file.read_text().startswith(TINY.replace("DTYPE", "float32"))
    bounds = load_run(run_file).verify.bounds["float32/float32"]
    assert bounds.gap == 1e-3 and bounds.logprob == 1e-3 != before.verify.bounds["float32/float32"].logprob


def test_another_machines_rollouts_are_recomputed_too(
    run_file: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(run_file, [], CalibrateOptions(episodes=16, others=(there,)))
    shown = capsys.readouterr().out
    assert shown.count("\nthere.played ") == len(SETTINGS)
    assert int(re.search(r"^all +(\d+)", shown, re.MULTILINE)[1]) > 16 * len(SETTINGS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=4"], "another policy"),
        ([f'sampling.noise="{KEYED_32}"'], f"this run file names {KEYED_32}"),
        (['verify.proofs="toploc"'], "no proofs of activations"),
    ],
    ids=["policy", "noise", "proofs"],
)
def test_rollouts_of_another_run_are_refused(run_file: Path, there: Path, words: list[str], said: str) -> None:
    with pytest.raises(StateError, match=said):
        main(run_file, words, CalibrateOptions(episodes=16, others=(there,)))


def test_bytes_that_are_not_a_recording_are_refused_in_a_line(run_file: Path, there: Path) -> None:
    there.write_bytes(b"\xc1junk")
    with pytest.raises(StateError, match="not a recording"):
        main(run_file, [], CalibrateOptions(episodes=16, others=(there,)))


def test_a_recording_whose_arrays_do_not_fit_is_refused_in_a_line(run_file: Path, there: Path) -> None:
    recording = from_msgpack(there.read_bytes(), Recording)
    [part], replace = recording.played, msgspec.structs.replace
    torn = replace(part.groups[0].rollouts[0], logprobs=b"")
    group = replace(part.groups[0], rollouts=(torn, *part.groups[0].rollouts[1:]))
    damaged = replace(recording, played=(replace(part, groups=(group, *part.groups[1:])),))
    there.write_bytes(to_msgpack(damaged))
    with pytest.raises(StateError, match="damaged: rollout 0: not one log-prob for each policy token"):
        main(run_file, [], CalibrateOptions(episodes=16, others=(there,)))


# --- proofs of activations ---

PROVEN = ['verify.proofs="toploc"']


@pytest.mark.parametrize(("dtype", "least", "most"), first_of(("bfloat16", 0.001, 0.016), ("float32", 0.001, 0.001)))
def test_a_run_with_proofs_gets_a_bound_on_their_error_that_honest_proofs_keep(
    run_file: Path, dtype: str, least: float, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(TINY.replace("DTYPE", dtype))
    assert load_run(run_file).verify.activation_error == 0
    main(run_file, PROVEN, CalibrateOptions(episodes=16, write=True))
    shown = capsys.readouterr().out
    bounds, bound = load_run(run_file).verify.bounds, load_run(run_file).verify.activation_error
    assert least <= bound <= most and f"activation_error = {bound}" in shown
    errors = [float(e) for e in re.findall(r"^here.* (\S+) +\S+%$", shown, re.MULTILINE)]
    assert len(errors) == len(SETTINGS) * (1 if dtype == "float32" else 2)
    assert bound >= 2 * max(errors) or bound == least
    if dtype == "bfloat16":  # both dtypes that may recompute it
        assert min(bounds["bfloat16/bfloat16"].logprob, bounds["bfloat16/float32"].logprob) > 1e-3
        assert "float32/float32" not in run_file.read_text()


def resaved(path: Path, change: Callable[[bytes], bytes]) -> None:
    """The recording with its first group's proof changed."""
    recording = from_msgpack(path.read_bytes(), Recording)
    [part], replace = recording.played, msgspec.structs.replace
    proofs = (change(part.proofs[0]), *part.proofs[1:])
    path.write_bytes(to_msgpack(replace(recording, played=(replace(part, proofs=proofs),))))


def emptied(proof: bytes) -> bytes:
    """A proof whose polynomials are all 0; a policy of width 32 has no other modulus than the prime."""
    words = np.frombuffer(proof, ">u2")
    return np.where(words == PRIME, words, 0).astype(">u2").tobytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda proof: proof[:-2], "damaged: the proof of slot 0: length"),
     (emptied, "differ too much for such proofs")],
)  # fmt: skip
def test_proofs_that_no_bound_lets_pass_are_reported_before_anything_is_written(
    run_file: Path, tmp_path: Path, change: Callable[[bytes], bytes], said: str
) -> None:
    main(run_file, PROVEN, CalibrateOptions(episodes=16, save=tmp_path / "there.played"))
    resaved(tmp_path / "there.played", change)
    with pytest.raises(StateError, match=said):
        main(run_file, PROVEN, CalibrateOptions(episodes=16, others=(tmp_path / "there.played",), write=True))
    assert run_file.read_text() == TINY.replace("DTYPE", "float32")


def test_a_safety_factor_below_1_is_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        main(run_file, [], CalibrateOptions(episodes=16, safety=0.5))


# --- the run file ---

TABLE = """
[verify.bounds."float32/float32"] # by hand
# the gap that we saw
gap = 0.5 # nats
flipped=1e-3
logprob = 2.0

[quick]
steps = 1
"""


def test_an_existing_table_keeps_its_comments_and_its_place(run_file: Path) -> None:
    """Writing twice changes nothing more."""
    run_file.write_text(TINY.replace("DTYPE", "float32") + TABLE)
    text = with_values(run_file, MEASURED)
    changed = TABLE.replace("gap = 0.5", "gap = 0.25").replace("=1e-3", "=3e-05").replace("2.0", "0.5")
    changed = changed.replace("# the gap", "largest_logit = 0.0\nlogprob_mean = 0.0\nmean_gap = 0.0002\n# the gap")
    assert text == TINY.replace("DTYPE", "float32") + changed
    run_file.write_text(text)
    assert with_values(run_file, MEASURED) == text


def test_a_value_goes_into_an_existing_table(run_file: Path) -> None:
    before = TINY.replace("DTYPE", "float32") + '\n[verify] # of strangers\nproofs = "toploc"\n'
    run_file.write_text(before)
    text = with_values(run_file, tables_of({}, 0.002))
    assert text == before.replace("strangers\n", "strangers\nactivation_error = 0.002\n")


def test_bounds_in_an_inline_table_are_left_alone(run_file: Path) -> None:
    inline = TINY.replace("DTYPE", "float32") + '\n[verify]\nbounds = { "float32/float32" = { gap = 0.5 } }\n'
    run_file.write_text(inline)
    with pytest.raises(ConfigError, match="by hand"):
        with_values(run_file, MEASURED)
    assert run_file.read_text() == inline

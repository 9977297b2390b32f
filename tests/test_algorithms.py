"""`[train.algorithm]`: the parts that a name means, which keys a run file may override, and what does not go together."""

from pathlib import Path

import msgspec
import pytest

from shoal.config import BOUNDS, RunConfig, load_run, notes_of
from shoal.errors import ConfigError
from shoal.ledger.group_advantages import advantages, teaches
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import Algorithm, defaults_of, narrowest_bound
from shoal.protocol.tolerances import claims_bend_ratios
from shoal.typed_toml import to_tree

GAE = 'name = "ppo"\nadvantage = "gae"'
RUN = 'name = "run"\nsteps = 4\n[[envs]]\nname = "arithmetic"\n'


@pytest.fixture
def load(tmp_path: Path):
    def read(algorithm: str = "", *overrides: str, train: str = "", rest: str = "") -> RunConfig:
        path = tmp_path / "run.toml"
        path.write_text(f"{RUN}[train]\n{train}\n[train.algorithm]\n{algorithm}\n{rest}")
        return load_run(path, list(overrides))

    return read


@pytest.mark.parametrize("kind", [c.Composition, *c.NAMED], ids=lambda kind: kind.__struct_config__.tag)
def test_every_name_is_a_run_file_by_itself_and_comes_back_from_the_log(load, kind):
    name = kind.__struct_config__.tag
    algorithm = load(f'name = "{name}"').train.algorithm
    assert algorithm == kind() == defaults_of(name)
    assert msgspec.json.decode(msgspec.json.encode(algorithm), type=Algorithm) == algorithm


def test_arguments_without_a_name_are_those_of_grpo(load):
    meant = c.Grpo(loss=c.Clip(0.3, 0.3, 4.0))
    assert load("epsilon = 0.3").train.algorithm == load('name = "grpo"\nepsilon = 0.3').train.algorithm == meant


def test_epsilon_and_delta_of_grpo_are_short_for_keys_of_its_loss(load):
    found = load("epsilon = 0.3\ndelta = 5.0\nloss.eps_high = 0.4", "train.algorithm.epsilon=0.1").train.algorithm
    assert found == c.Grpo(loss=c.Clip(0.1, 0.4, 5.0))
    for other in ('name = "dapo"\nepsilon = 0.3', 'loss = {name = "cispo"}\nepsilon = 0.3'):
        with pytest.raises(ConfigError, match=r"unknown key train\.algorithm\.epsilon"):
            load(other)


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        ("float32", "", c.Grpo()),
        ("bfloat16", "", c.Grpo()),
        ("int8", "", c.Grpo(ratio_to="old", corrections=(c.Truncate(2.0),))),
        ("int8", "epsilon = 0.3", c.Grpo(loss=c.Clip(0.3, 0.3, 4.0), ratio_to="old", corrections=(c.Truncate(2.0),))),
        ("int8", "corrections = []", c.Grpo()),
        ("int8", 'ratio_to = "behaviour"', c.Grpo()),
        ("int8", 'name = "dapo"', c.Dapo()),
    ],
)
def test_grpo_corrects_for_int8_that_is_published_unless_the_run_says_otherwise(load, dtype, given, expected):
    config = load(given, rest=f'[policy]\ndtype = "{dtype}"')
    assert config.train.algorithm == expected and notes_of(config) == []


def test_a_run_file_without_the_table_has_grpo(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    assert load_run(path).train.algorithm == c.Grpo()
    quantised = load_run(path, ['policy.dtype="int8"']).train.algorithm
    assert quantised == c.Grpo(ratio_to="old", corrections=(c.Truncate(2.0),))


def test_a_key_of_a_part_leaves_the_others_as_the_name_has_them(load):
    assert load('name = "dapo"\nloss.eps_low = 0.1').train.algorithm == c.Dapo(loss=c.Clip(eps_low=0.1, eps_high=0.28))
    assert load('name = "dapo"', "train.algorithm.loss.eps_high=0.5").train.algorithm.loss == c.Clip(0.2, 0.5)


def test_a_part_with_another_name_replaces_the_whole_part(load):
    assert load('name = "gspo"\nloss = {name = "cispo", most = 4}').train.algorithm == c.GspoNamed(loss=c.Cispo(most=4))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ('name = "dapo"\nloss.name = "clp"', '(did you mean "clip"?); known: clip, gspo, cispo'),
        ('name = "ppo"\ncorrections = [{name = "tis"}]', "corrections[0].name: Invalid value 'tis'; known: truncate"),
        ('name = "dapo"\nloss.eps_hi = 1', "did you mean train.algorithm.loss.eps_high?"),
        ('name = "dapo"\naverage = "token"', "known: 'tokens', 'rollouts', 'prompts', 'constant'"),
        ('name = "dapo"\nloss.delta = 1.2', "delta = 1.2: must be 0, or above 1 + eps_high = 1.28"),
        ('name = "dapo"\nentropy_target = 0.3', "it controls the bonus, so set entropy_bonus above 0"),
        ('name = "dapo"\ndivisor_tokens = 8.0', 'average = "tokens" divides by what it counts'),
    ],
)  # fmt: skip
def test_what_a_run_file_gets_wrong_is_named(load, algorithm, message):
    with pytest.raises(ConfigError) as error:
        load(algorithm)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "train", "rest", "message"),
    [
        ('name = "ppo"\ncorrections = [{name = "truncate"}, {name = "icepop"}]', "", "", "weigh each token twice"),
        ('name = "dapo"\ncorrections = [{name = "truncate"}]', "", "", "by what the ratio has already"),
        ('name = "ppo"\ncorrections = [{name = "truncate"}, {name = "truncate"}]', "", "", "twice"),
        ('name = "rloo"', "updates_per_batch = 2", "", "after the first update"),
        ('name = "rloo"', "minibatches = 2", "", "after the first update"),
        ('name = "ppo"', "minibatches = 99", "", "train.minibatches = 99: a batch is cut between groups"),
        ('name = "rloo"\ncorrections = []', "", "", "an older or rounded policy samples some tokens"),
        (
            'name = "rloo"\ncorrections = []',
            "",
            '[rollouts]\nmax_staleness = 0\n[policy]\ndtype = "bfloat16"',
            "an older or rounded policy samples some tokens",
        ),
        ('name = "maxrl"', "", "[envs.shaping.repetition]", "which the penalties of shaping may bring near"),
        ('name = "rloo"\nratio_to = "old"', "", "", "has no ratio. Leave ratio_to out"),
        ('name = "scalerl"\nadvantage = "mean_std"', "", "", "divides advantages by a deviation"),
        ('name = "scalerl"\nadvantage = "reward"', "", "", "has no baseline"),
        ('name = "dapo"\nkl = {beta = 0.1, estimator = "k1"}', "", "", "its gradient is 0 on average"),
        ('name = "dapo"\nkl = {beta = 0.1, place = "advantage"}', "", "", 'takes estimator = "k1"'),
        ('name = "gspo"\nkl = {beta = 0.1, estimator = "k1", place = "advantage"}', "", "", "by_token = true"),
        ('name = "rloo"\nkl = {beta = 0.1, place = "weighted_loss"}', "", "", "has no ratio"),
        ('name = "dapo"\nkl.beta = 0.1', "processes = 2", "", "one process keeps the first policy whole"),
        ('name = "dapo"\nkl.estimator = "k2"', "", "", "do nothing while beta is 0"),
        ('name = "ppo"', "critic.lr = 1.0", "", 'does nothing without a critic: set train.algorithm.advantage = "gae"'),
        ('name = "grpo"', "critic.warmup_steps = 1", "", "does nothing without a critic"),
        (GAE, "processes = 2", "", "one process keeps the critic whole"),
        (GAE, "", "[policy]\nadapter = {rank = 4}", "would take the memory that an adapter saves"),
        (
            GAE,
            "",
            '[policy]\npath = "."\nimplementation = "auto"',
            "a critic has the layers of Llama, Mistral, Qwen2 or Qwen3",
        ),
        ('name = "gspo"\nadvantage = "gae"', "", "", "by_token = true"),
        ('name = "gspo"\nadvantage = "teacher"', 'teacher = "."', "", "by_token = true"),
        ('name = "cispo"\nadvantage = "teacher"', "", "", "name the directory of the model in train.teacher"),
        ('name = "cispo"\nadvantage = "reward_model"', "", "", "name the directory of the model in train.reward_model"),
        ('name = "cispo"', 'teacher = "."', "", 'does nothing: set train.algorithm.advantage = "teacher"'),
        (
            'name = "cispo"\nadvantage = "teacher"',
            'teacher = "."\nprocesses = 2',
            "",
            "one process keeps that model whole",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused_with_the_reason(load, algorithm, train, rest, message):
    with pytest.raises(ConfigError) as error:
        load(algorithm, train=train, rest=rest)
    assert message in str(error.value)


def test_parts_that_go_together_are_not_refused(load):
    synchronous = load('name = "rloo"\ncorrections = []', rest="[rollouts]\nmax_staleness = 0")
    assert synchronous.train.algorithm == c.Rloo(corrections=())
    masked = load('name = "dapo"\ncorrections = [{name = "geometric_mask"}, {name = "sequence_mask"}]')
    assert masked.train.algorithm == c.Dapo(corrections=(c.GeometricMask(), c.SequenceMask()))
    kept_near = load('name = "rloo"\nkl = {beta = 0.1, estimator = "k1", place = "advantage"}')
    assert kept_near.train.algorithm == c.Rloo(kl=c.Kl(0.1, "k1", "advantage"))
    by_row = load('name = "decoupled_ppo"\nloss = {name = "gspo"}', train="updates_per_batch = 4")
    assert by_row.train.algorithm == c.DecoupledPpo(loss=c.Gspo()) and by_row.train.updates_per_batch == 4
    by_critic = load('name = "gspo"\nadvantage = "gae"\nloss.by_token = true', train="critic.lam = 1.0")
    assert by_critic.train.critic.lam == 1.0 and by_critic.train.algorithm.advantage == "gae"
    plain = load('name = "reinforce"\nadvantage = "gae"\nbatch_std = true')
    assert plain.train.algorithm == c.ReinforceNamed(advantage="gae", batch_std=True)


def test_a_ratio_that_is_always_1_is_said(load):
    assert "the ratio is 1 at every token" in notes_of(load('name = "ppo"'))[0]
    stale = "nothing corrects older rollouts (rollouts.max_staleness = 2)"
    assert stale in notes_of(load('name = "ppo"', rest="[rollouts]\nmax_staleness = 2"))[0]
    weighed = load('name = "ppo"\ncorrections = [{name = "truncate"}]', rest="[rollouts]\nmax_staleness = 2")
    fresh = load('name = "ppo"', rest="[rollouts]\nmax_staleness = 0")
    assert all("older rollouts" not in notes_of(config)[0] for config in (weighed, fresh))
    for algorithm, train in (
        ("ppo", "updates_per_batch = 2"),
        ("ppo", "minibatches = 4"),
        ("dapo", ""),
        ("rloo", ""),
        ("grpo", ""),
    ):
        assert notes_of(load(f'name = "{algorithm}"', train=train)) == []


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (c.Grpo(), 0.2), (c.Grpo(ratio_to="old", corrections=(c.Truncate(),)), 0.2),
        (c.Dapo(loss=c.Clip(0.2, 0.1, 4.0)), 0.1), (c.CispoNamed(), 4.0),
        (c.Ppo(loss=c.Gspo()), 3e-4), (c.Ppo(loss=c.Dppo()), 0.2), (c.Rloo(), 1.0), (c.Rloo(corrections=()), float("inf")),
        (c.Ppo(corrections=(c.SequenceMask(),)), 0.0), (c.Ppo(corrections=(c.GeometricMask(),)), 0.01),
        (c.DecoupledPpo(corrections=(c.Truncate(level="row"),)), 0.0), (c.Ppo(corrections=(c.IcePop(),)), 0.2),
    ],
)  # fmt: skip
def test_the_narrowest_bound_is_the_one_that_a_lie_reaches_first(algorithm, expected):
    assert narrowest_bound(algorithm) == pytest.approx(expected)


@pytest.mark.parametrize(
    "algorithm",
    [
        c.Dapo(), c.GspoNamed(), c.PrimeRl(), c.CispoNamed(entropy_bonus=0.1, entropy_target=0.3),
        c.CispoNamed(kl=c.Kl(0.1, "k3", "weighted_loss")), c.Rloo(entropy_bonus=0.1, entropy_target=0.3),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)  # fmt: skip
def test_the_trainer_takes_no_claims_where_one_may_count_without_limit(algorithm):
    assert narrowest_bound(algorithm) == 0
    assert claims_bend_ratios(BOUNDS, "float32", narrowest_bound(algorithm))


@pytest.mark.parametrize(
    ("algorithm", "rewards", "taught", "expected"),
    [
        (c.Dapo(), (1.0, 0.0), True, (0.70710578, -0.70710578)),
        (c.DrGrpo(), (1.0, 0.0), True, (0.5, -0.5)),
        (c.Rloo(), (1.0, 0.0), True, (1.0, -1.0)),
        (c.MaxRl(), (1.0, 0.0, 0.0, 0.0), True, (3.0, -1.0, -1.0, -1.0)),
        (c.MaxRl(), (-1.0, 0.0), False, (0.0, 0.0)),
        (c.Composition(advantage="reward"), (1.0, 1.0), True, (1.0, 1.0)),
        (c.Composition(advantage="reward"), (0.0, 0.0), False, (0.0, 0.0)),
        (c.Composition(), (1.0, 1.0), False, (0.0, 0.0)),
        (c.Ppo(advantage="gae"), (1.0, 1.0), True, (0.0, 0.0)),
        (c.CispoNamed(advantage="teacher"), (1.0, 1.0), True, (0.0, 0.0)),
        (c.CispoNamed(advantage="reward_model"), (1.0, 0.0), True, (0.0, 0.0)),
    ],
)
def test_the_ledger_finds_what_a_group_teaches(algorithm, rewards, taught, expected):
    assert teaches(rewards, algorithm) is taught
    assert advantages(rewards, algorithm).tolist() == pytest.approx(expected, abs=1e-5)


VINE = 'name = "composition"\n[train.algorithm.credit]\nname = "vine"\n'


def test_a_run_file_may_take_its_credit_from_continuations(load):
    assert load(VINE + "most = 2").train.algorithm == c.Composition(credit=c.Vine(continuations=4, every=8, most=2))
    assert "credit" not in to_tree(load('name = "dapo"').train.algorithm)
    scaled = load(VINE.replace("\n[", "\nbatch_std = true\n[", 1)).train.algorithm
    assert scaled == c.Composition(credit=c.Vine(), batch_std=True)


@pytest.mark.parametrize(
    ("algorithm", "rest", "message"),
    [
        (VINE.replace("\n[", '\nadvantage = "rloo"\n[', 1), "", 'leave train.algorithm.advantage = "rloo" out'),
        (VINE.replace("\n[", '\nloss = {name = "gspo"}\n[', 1), "", "set train.algorithm.loss.by_token = true"),
        (VINE + f"most = {10**21}", "", "lower most or continuations"),
        (VINE + "most = 600", "", "do not fit into a submission of a block of"),
        (VINE + "most = 20", "[rollouts]\nbatch_groups = 512\n", "does not fit into one message: at most"),
    ],
)
def test_vines_that_do_not_go_with_the_rest_are_refused_with_the_reason(load, algorithm, rest, message):
    with pytest.raises(ConfigError) as error:
        load(algorithm, rest=rest)
    assert message in str(error.value)


def test_vines_are_for_runs_whose_workers_play(load):
    with pytest.raises(ConfigError, match="play on from within a rollout"):
        load(VINE, 'envs.0.kind="completions"')


TURNS = 'name = "composition"\n[train.algorithm.credit]\nname = "turns"\n'
STEPS = TURNS.replace("turns", "steps")


def test_a_run_file_may_credit_turns_or_steps(load):
    assert load(TURNS + "discount = 0.9").train.algorithm == c.Composition(credit=c.Turns(discount=0.9, most=16))
    assert load(STEPS + "most = 4").train.algorithm == c.Composition(credit=c.Steps(most=4))
    scaled = STEPS.replace("\n[", '\nadvantage = "mean_std"\n[', 1)
    assert load(scaled).train.algorithm == c.Composition(advantage="mean_std", credit=c.Steps())
    assert load(TURNS.replace("\n[", '\nadvantage = "gae"\n[', 1)).train.algorithm.credit == c.Turns()


@pytest.mark.parametrize(
    ("algorithm", "rest", "message"),
    [
        (TURNS.replace("\n[", '\nadvantage = "mean_std"\n[', 1), "", "must be one of mean, gae"),
        (STEPS.replace("\n[", '\nadvantage = "rloo"\n[', 1), "", "must be one of mean, mean_std, gae"),
        (TURNS.replace("\n[", '\nadvantage = "gae"\n[', 1) + "discount = 0.9", "", "train.critic.gamma discounts"),
        (TURNS.replace("\n[", '\nloss = {name = "gspo"}\n[', 1), "", 'credit.name = "turns" gives the tokens of a row'),
        (TURNS + "most = 256", "[rollouts]\nblock_rollouts = 4096\n", "does not fit into one message: lower most, or"),
        (STEPS + "most = 256", "[rollouts]\nbatch_groups = 64\n", "does not fit into one message: at most"),
    ],
)
def test_credit_for_steps_that_does_not_go_with_the_rest_is_refused_with_the_reason(load, algorithm, rest, message):
    with pytest.raises(ConfigError) as error:
        load(algorithm, rest=rest)
    assert message in str(error.value)


def test_steps_are_credited_where_validators_replay_them(load):
    with pytest.raises(ConfigError, match="its record has only rewards of rollouts"):
        load(TURNS, 'envs.0.kind="completions"')

"""Each check alone, on honest work with one thing changed by hand."""

import dataclasses
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.envs.load import env_digest, load_run_envs
from shoal.errors import ShoalError, StateError, Undecided
from shoal.protocol.encoding import digest
from shoal.protocol.messages import ENVIRONMENT, POLICY, Check, EngineFacts, EnvSpec, make_rollout
from shoal.verification.encode_submission import encode_submission
from shoal.verification.verify import verify_submission
from tests.verification.conftest import SubmissionCase

ENGINE = EngineFacts("by hand", "float32", "cpu")


def first(verdicts, place=0):
    return verdicts[place].outcome, verdicts[place].check


def arrays(rollout):
    return rollout.tokens_T().copy(), rollout.author_T().copy(), rollout.logprobs_P().copy()


def rebuilt(tokens_T, author_T, ending, version=3):
    """A rollout with a log-prob for every policy token, as a careful forger would send it."""
    policy = np.count_nonzero(np.asarray(author_T) == POLICY)
    return make_rollout(tokens_T, author_T, np.full(policy, -1.0), version=version, ending=ending)


def test_honest_work_is_accepted_with_rewards_as_played(case):
    assert encode_submission("run-1", case.lease, case.groups, ENGINE) == case.body()
    verdicts = case.judge(case.body(), audited=(0, 1, 2, 3))
    assert case.prefills == [16]
    assert [(v.outcome, v.audited, v.check) for v in verdicts] == [("accept", True, "")] * 4
    assert verdicts[0].rewards[0] == 1.0 and verdicts[0].rewards[1] < 0.5
    assert verdicts[0].tokens == sum(r.num_policy_tokens() for r in case.groups[0].rollouts)


SAME_NAME = [
    EnvSpec("arithmetic", env_digest("arithmetic"), 65536, 1.0, {"digits": digits}, own_label=label)
    for digits, label in ((1, "easy"), (6, "hard"))
]


@pytest.fixture
def mixed_case(renderer):
    """Two environments of one name: slots 0 and 2 are of the easy one, 1 and 3 of the hard one."""
    return SubmissionCase(renderer, load_run_envs(SAME_NAME, own_files=False))


def test_work_played_under_the_label_of_another_environment_is_refused(renderer, mixed_case):
    assert [v.outcome for v in mixed_case.judge(mixed_case.body(), audited=(0, 1, 2, 3))] == ["accept"] * 4
    assert first(mixed_case.judge(mixed_case.body(mixed_case.replace(0, env="hard")))) == ("hard", "lease")
    easy, hard = mixed_case.envs.values()
    swapped = SubmissionCase(renderer, {"easy": hard, "hard": easy})
    verdicts = mixed_case.judge(swapped.body())
    assert [(v.outcome, v.check) for v in verdicts] == [("hard", "prompt")] * 4


def test_only_groups_that_pass_the_checks_without_the_model_are_prefilled(case):
    verdicts = case.judge(case.body(case.replace(0, task=5)), audited=(0, 1))
    assert case.prefills == [4]
    assert [(v.outcome, v.audited) for v in verdicts[:2]] == [("hard", False), ("accept", True)]


@pytest.mark.parametrize("usual", ["mean_influence", "mean_pay"])
def test_a_group_of_great_influence_is_audited_although_it_was_not_drawn(case, usual):
    """Draws of 0.5 at a rate of 5 %: a group with twenty times the mean influence is audited nevertheless."""
    body = case.body()
    for mean, audited in ((1e-3, True), (1e9, False)):
        asked = Check(digest(body), case.lease, (), 60.0, (0.5,) * 4, 0.05, **{"mean_influence": 0.0, usual: mean})
        verdict = verify_submission(body, asked, case.tools)
        assert [(group.outcome, group.audited) for group in verdict.groups] == [("accept", audited)] * 4


# --- shape ---


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": b"\0\0\0\0\0"},
        {"logprobs": b"\0\0\0"},
        {"author": b""},
        {"author": b"\1"},
        {"token_ids": b"", "author": b"", "logprobs": b""},
        {"logprobs": b""},
        {"logprobs": np.full(1000, -1.0, "<f4").tobytes()},
    ],
    ids=["torn tokens", "torn log-probs", "no authors", "few authors", "empty", "no log-probs", "many log-probs"],
)
def test_arrays_that_do_not_fit_each_other_are_hard(case, fields):
    assert first(case.judge(case.body(case.edit(0, 1, **fields)))) == ("hard", "shape")


@pytest.mark.parametrize("name", ["token_ids", "author", "logprobs"])
def test_an_array_with_an_extra_byte_is_hard(case, name):
    longer = getattr(case.groups[0].rollouts[1], name) + b"\0"
    assert first(case.judge(case.body(case.edit(0, 1, **{name: longer})))) == ("hard", "shape")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.02, 0.002])
def test_log_probs_that_no_softmax_gives_are_hard(case, value):
    logprobs_P = case.groups[0].rollouts[1].logprobs_P().copy()
    logprobs_P[2] = value
    verdict = case.judge(case.body(case.edit(0, 1, logprobs=logprobs_P.tobytes())))[0]
    assert (verdict.check, verdict.rollout) == ("shape", 1)
    assert verdict.position == np.flatnonzero(case.groups[0].rollouts[1].author_T())[2]


@pytest.mark.parametrize("token", [-1, 64, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_hard(case, token):
    tokens_T = case.groups[1].rollouts[0].tokens_T().copy()
    tokens_T[3] = token
    verdict = case.judge(case.body(case.edit(1, 0, token_ids=tokens_T.tobytes())))[1]
    assert (verdict.check, verdict.position, verdict.figure) == ("shape", 3, token)


def test_unknown_author_is_hard(case):
    author_T = case.groups[1].rollouts[0].author_T().copy()
    author_T[1] = 3
    assert first(case.judge(case.body(case.edit(1, 0, author=author_T.tobytes()))), 1) == ("hard", "shape")


@pytest.mark.parametrize("whole", [True, False])
def test_a_worker_cannot_take_a_turn_out_of_the_training(case, whole):
    author_T = case.groups[1].rollouts[0].author_T().copy()
    written = np.flatnonzero(author_T == 1)
    author_T[written if whole else written[-1]] = 2
    assert first(case.judge(case.body(case.edit(1, 0, author=author_T.tobytes()))), 1) == ("soft", "environment")


def test_rollout_longer_than_the_limit_is_hard(case):
    tokens_T, author_T, _ = arrays(case.groups[0].rollouts[0])
    more = case.lease.sampling.max_tokens
    long = rebuilt(np.append(tokens_T, [7] * more), np.append(author_T, [ENVIRONMENT] * more), "length")
    groups = case.replace(0, rollouts=(long, *case.groups[0].rollouts[1:]))
    assert first(case.judge(case.body(groups))) == ("hard", "shape")


@pytest.mark.parametrize("index", [0, 2, 3])
def test_turn_longer_than_the_limit_is_hard_and_located(case, index):
    rollouts = list(case.groups[1].rollouts)
    tokens_T, author_T, _ = arrays(rollouts[index])
    start = int(np.flatnonzero(author_T)[0])
    rollouts[index] = rebuilt([*tokens_T[:start], *[7] * 13], [*author_T[:start], *[POLICY] * 13], "length")
    verdict = case.judge(case.body(case.replace(1, rollouts=tuple(rollouts))))[1]
    assert (verdict.outcome, verdict.check, verdict.rollout, verdict.position) == ("hard", "shape", index, start)
    assert (verdict.figure, verdict.bound) == (13, 12)


@pytest.mark.parametrize("index", [0, 3])
def test_rollout_that_the_policy_opens_is_hard(case, index):
    author_T = case.groups[1].rollouts[index].author_T().copy()
    author_T[[0, np.flatnonzero(author_T)[0]]] = POLICY, ENVIRONMENT  # as many log-probs as before
    verdict = case.judge(case.body(case.edit(1, index, author=author_T.tobytes())))[1]
    assert (verdict.outcome, verdict.check, verdict.rollout, verdict.position) == ("hard", "shape", index, 0)


def test_rollout_without_a_turn_of_the_policy_is_hard(case):
    silent = rebuilt([7, 7, 7], [ENVIRONMENT] * 3, "length")
    groups = case.replace(1, rollouts=(silent, *case.groups[1].rollouts[1:]))
    assert first(case.judge(case.body(groups)), 1) == ("hard", "shape")


def test_prover_refuses_to_send_a_log_prob_that_is_not_finite(case):
    bad = np.full(case.groups[0].rollouts[0].num_policy_tokens(), np.nan, dtype="<f4").tobytes()
    with pytest.raises(StateError, match=r"rollout 0 of slot 0 .* not finite"):
        encode_submission("run-1", case.lease, case.edit(0, 0, logprobs=bad), ENGINE)


# --- submission ---


@pytest.mark.parametrize("body", [b"", b"garbage", b"\xdd\xff\xff\xff\xff", b"\x80", b"\xc1" * 1000])
def test_garbage_gets_a_hard_shape_verdict_for_every_slot(case, body):
    assert [(v.outcome, v.check) for v in case.judge(body, audited=(0, 1))] == [("hard", "shape")] * 4


def test_body_larger_than_its_lease_can_need_is_not_decoded(case):
    verdicts = case.judge(case.body() + bytes(1 << 20))
    assert {v.check for v in verdicts} == {"shape"} and "larger than its lease" in verdicts[0].detail


@pytest.mark.parametrize("change", [-1, 1])
def test_other_number_of_groups_than_leased_is_hard(case, change):
    encoded = case.encoded_groups()
    groups = encoded[:-1] if change < 0 else [*encoded, encoded[0]]
    verdicts = case.judge(case.resubmit(groups=tuple(groups)))
    assert [(v.outcome, v.check, v.bound) for v in verdicts] == [("hard", "shape", 4)] * 4


def test_proofs_that_were_not_asked_for_are_hard(case):
    assert first(case.judge(case.resubmit(proofs=(b"proof",)))) == ("hard", "shape")


def test_one_group_that_does_not_decode_does_not_affect_the_others(case):
    _, *others = case.encoded_groups()
    outcomes = [v.outcome for v in case.judge(case.resubmit(groups=(b"\x81\xa1x", *others)))]
    assert outcomes == ["hard", "accept", "accept", "accept"]


# --- lease ---


@pytest.mark.parametrize("fields", [{"run": "run-2"}, {"lease": "lease-2"}, {"version": 2}])
def test_submission_for_something_else_is_hard_for_all(case, fields):
    assert [(v.outcome, v.check) for v in case.judge(case.resubmit(**fields))] == [("hard", "lease")] * 4


@pytest.mark.parametrize("fields", [{"slot": 2}, {"task": 9}, {"task": -1}, {"env": "arithmetic"}, {"env": "nowhere"}])
def test_group_for_another_slot_task_or_environment_is_hard(case, fields):
    assert first(case.judge(case.body(case.replace(0, **fields)))) == ("hard", "lease")


def test_rollouts_of_another_version_are_hard(case):
    stale = tuple(rebuilt(*arrays(r)[:2], r.ending, version=2) for r in case.groups[0].rollouts)
    assert first(case.judge(case.body(case.replace(0, rollouts=stale)))) == ("hard", "lease")


def test_two_versions_in_one_group_are_hard(case):
    old = rebuilt(*arrays(case.groups[0].rollouts[0])[:2], "environment", version=2)
    groups = case.replace(0, rollouts=(*case.groups[0].rollouts[:3], old))
    assert first(case.judge(case.body(groups))) == ("hard", "shape")


# --- prompt, environment, ending ---


def judge_one(case, tokens_T, author_T, ending, place=0):
    rollouts = (rebuilt(tokens_T, author_T, ending), *case.groups[place].rollouts[1:])
    verdict = case.judge(case.body(case.replace(place, rollouts=rollouts)))[place]
    return verdict.outcome, verdict.check


def test_edited_lengthened_or_cut_prompt_is_hard(case):
    tokens_T, author_T, _ = arrays(case.groups[0].rollouts[0])
    edited = tokens_T.copy()
    edited[1] = 9
    start = int(np.flatnonzero(author_T)[0])
    longer = np.insert(tokens_T, start, [9, 9]), np.insert(author_T, start, [0, 0])
    shorter = np.delete(tokens_T, 1), np.delete(author_T, 1)
    for tokens, author in ((edited, author_T), longer, shorter):
        assert judge_one(case, tokens, author, "environment") == ("hard", "prompt")


def test_a_refused_prompt_is_named_by_what_this_machine_derives_not_by_what_was_sent(renderer, case):
    """Two validators agree if their data do; see `weigh`."""
    others = SubmissionCase(renderer, {**case.envs, "arithmetic": load_run_envs(SAME_NAME, own_files=False)["hard"]})
    tokens_T, author_T, _ = arrays(case.groups[1].rollouts[0])
    edited = tokens_T.copy()
    edited[1] = 9
    rollouts = (rebuilt(edited, author_T, "environment"), *case.groups[1].rollouts[1:])
    body = case.body(case.replace(1, rollouts=rollouts))
    ours, again, theirs = (judge.judge(body)[1].detail.split(":")[0] for judge in (case, case, others))
    assert ours == again != theirs and ours.startswith("prompt is not the task's (")


def test_invented_answer_of_the_environment_is_soft(case):
    tokens_T, author_T, _ = arrays(case.groups[0].rollouts[1])
    start = int(np.flatnonzero(author_T)[0])
    answer = start + int(np.flatnonzero(author_T[start:] == ENVIRONMENT)[2])
    tokens_T[answer] = 7 if tokens_T[answer] != 7 else 8
    assert judge_one(case, tokens_T, author_T, "environment") == ("soft", "environment")


def test_rollout_cut_short_is_refused_as_ending(case):
    tokens_T, author_T, _ = arrays(case.groups[0].rollouts[1])
    for claim in ("length", "stop"):
        assert judge_one(case, tokens_T, author_T, claim) == ("hard", "ending")
    first_turn = np.flatnonzero(author_T)
    for cut in (first_turn[0] + 2, first_turn[-1], len(tokens_T) - 1):
        for claim in ("length", "environment", "stop"):
            assert judge_one(case, tokens_T[:cut], author_T[:cut], claim) == ("hard", "ending")


def test_claim_that_the_environment_failed_is_soft(case):
    tokens_T, author_T, _ = arrays(case.groups[0].rollouts[0])
    assert judge_one(case, tokens_T, author_T, "error") == ("soft", "environment")


def test_environment_that_fails_here_but_not_there_is_soft(case):
    env = case.envs["arithmetic"]
    env.score = lambda state: 1 / 0
    verdict = case.judge(case.body())[1]
    assert (verdict.outcome, verdict.check) == ("soft", "environment")


def test_tokens_after_the_end_are_refused(case):
    tokens_T, author_T, _ = arrays(case.groups[1].rollouts[0])
    longer = np.append(tokens_T, [3, 4]), np.append(author_T, [0, 0])
    assert judge_one(case, *longer, "environment", place=1) == ("soft", "environment")


def test_turn_that_fills_its_room_without_a_stop_ends_by_length(case):
    tokens_T, author_T, _ = arrays(case.groups[1].rollouts[0])
    start = int(np.flatnonzero(author_T)[0])
    full = [*tokens_T[:start], *[7] * 12], [*author_T[:start], *[1] * 12]
    assert judge_one(case, *full, "length", place=1) == ("accept", "")
    assert judge_one(case, *full, "environment", place=1) == ("hard", "ending")


@pytest.mark.parametrize("method", ["task", "reset"])
def test_a_task_that_the_environment_cannot_begin_is_void_whatever_was_sent(case, method):
    def fail(task):
        raise RuntimeError("no such word list")

    setattr(case.envs["wordle"], method, fail)
    nothing = case.replace(0, rollouts=())
    for groups in (case.groups, nothing):
        verdict = case.judge(case.body(groups), audited=(0,))[0]
        assert (verdict.outcome, verdict.tokens, verdict.rewards) == ("void", 0, ())
        assert verdict.detail.endswith("of wordle cannot begin: the environment fails")


def test_a_prompt_that_the_chat_template_refuses_is_void_in_the_words_of_the_template(case, monkeypatch):
    def refuse(messages, arguments=None):
        raise StateError("the chat template refuses these messages: roles must\nalternate")

    monkeypatch.setattr(case.tools.renderer, "start", refuse)
    verdict = case.judge(case.body(case.groups), audited=(0,))[0]
    assert (verdict.outcome, verdict.tokens) == ("void", 0)
    assert verdict.detail.endswith("cannot begin: the chat template refuses these messages: roles must alternate")


def test_a_prompt_that_leaves_no_room_is_named_with_its_length_and_the_key(case):
    case.envs["wordle"].max_tokens = 5
    verdict = case.judge(case.body(case.groups), audited=(0,))[0]
    assert verdict.outcome == "void"
    assert re.fullmatch(
        r"task \d+ of wordle cannot begin: its prompt takes \d+ tokens, and envs\.max_tokens = 5 leaves no room for a turn",
        verdict.detail,
    )


@pytest.mark.parametrize("method", ["task", "reset", "step", "score"])
def test_a_slot_whose_environment_the_sandbox_stops_is_void(case, method):
    """Another machine might have let it end, so it is evidence against nobody, whatever the worker claims."""

    def stopped(*args):
        raise Undecided("the sandbox stopped it: it took longer than 10 s")

    setattr(case.envs["wordle"], method, stopped)
    failed = case.replace(
        0, rollouts=tuple(msgspec.structs.replace(r, ending="error") for r in case.groups[0].rollouts)
    )
    for groups in (case.groups, failed):
        assert case.judge(case.body(groups), audited=(0,))[0].outcome == "void"


@pytest.mark.parametrize("reward", [7.0, -0.01, float("nan"), float("inf")])
def test_reward_outside_the_environments_bounds_is_soft(case, reward):
    replay = case.tools.replay
    generous = lambda *claim: [replace(found, reward=reward) for found in replay(*claim)]  # noqa: E731
    object.__setattr__(case.tools, "replay", generous)
    assert first(case.judge(case.body())) == ("soft", "reward")


# --- complete ---


def test_missing_rollouts_are_soft_and_extra_ones_hard(case):
    rollouts = case.groups[0].rollouts
    assert first(case.judge(case.body(case.replace(0, rollouts=rollouts[:3])))) == ("soft", "complete")
    assert first(case.judge(case.body(case.replace(0, rollouts=())))) == ("soft", "complete")
    assert first(case.judge(case.body(case.replace(0, rollouts=(*rollouts, rollouts[0]))))) == ("hard", "shape")


def test_equal_rollouts_are_not_refused_for_being_equal(case):
    same = (case.groups[0].rollouts[0],) * 4
    assert first(case.judge(case.body(case.replace(0, rollouts=same)), audited=(0,))) == ("accept", "")


# --- sampling and log-probs, with scores written by the test ---


def gaps_of(*gaps):
    def score(request):
        gaps_P = np.zeros(len(request.policy_positions), dtype=np.float32)
        gaps_P[: len(gaps)] = gaps
        return gaps_P

    return score


@pytest.mark.parametrize(
    ("gaps", "outcome"),
    [
        ((0.0,), "accept"),
        ((2e-4,), "accept"),  # noise below the bound
        ((0.0015,), "soft"),  # one flip passes in each rollout, four do not in the group
        ((0.002, 0.002), "soft"),  # two pass neither
        ((0.01,), "soft"),  # one gap too large for noise and too small for another choice
        ((0.2,), "hard"),  # one gap that no noise explains
        ((2.0, 3.0), "hard"),
        ((float("nan"),), "hard"),
    ],
)
def test_gaps_are_judged_by_size_count_and_sum(case, gaps, outcome):
    case.gaps = gaps_of(*gaps)
    verdict = case.judge(case.body(), audited=(1,))[1]
    assert verdict.outcome == outcome
    assert verdict.check == ("" if outcome == "accept" else "sampling")
    assert np.isfinite(verdict.figure)


def test_many_gaps_just_below_the_flip_bound_fail_by_their_sum(case):
    case.gaps = lambda request: np.full(len(request.policy_positions), 9e-4, dtype=np.float32)
    verdict = case.judge(case.body(), audited=(0,))[0]
    assert (verdict.outcome, verdict.check, verdict.rollout) == ("soft", "sampling", -1)
    assert verdict.figure == verdict.gap_sum == pytest.approx(9e-4 * 90, rel=1e-3)


def flips_of(case, counts):
    """Sets the number of flipped tokens in each rollout of group 0, as bfloat16 engines may give them."""
    case.tools = dataclasses.replace(case.tools, dtype="bfloat16")
    flips = dict(zip((r.seed for r in case.context(0).requests(case.groups[0])), counts, strict=True))
    case.gaps = lambda request: np.float32(0.25) * (np.arange(len(request.policy_positions)) < flips[request.seed])


def test_too_many_flips_in_one_rollout_are_refused_although_the_group_may_have_them(case):
    flips_of(case, (0, 3, 0, 0))  # at 1 in 1,000 honest tokens, 2 of these 20 or so, and 3 of the group's 90
    verdict = case.judge(case.body(), audited=(0,))[0]
    assert (verdict.check, verdict.rollout, verdict.figure, verdict.bound) == ("sampling", 1, 3, 2)


def test_too_many_flips_in_a_group_are_refused_although_each_rollout_may_have_them(case):
    flips_of(case, (1, 1, 1, 1))
    verdict = case.judge(case.body(), audited=(0,))[0]
    assert (verdict.check, verdict.rollout, verdict.figure, verdict.bound) == ("sampling", -1, 4, 3)
    flips_of(case, (1, 1, 1, 0))
    assert first(case.judge(case.body(), audited=(0,))) == ("accept", "")


def test_one_flip_in_a_group_passes_and_is_in_the_verdict(case):
    first_seed = case.context(1).requests(case.groups[1])[0].seed
    case.gaps = lambda request: np.float32(0.0015) * (np.arange(len(request.policy_positions)) == 0) * (
        request.seed == first_seed
    )  # fmt: skip
    verdict = case.judge(case.body(), audited=(1,))[1]
    assert (verdict.outcome, verdict.flipped, verdict.gap_sum) == ("accept", 1, 1e-3)


def test_groups_that_are_not_audited_carry_no_figures(case):
    case.gaps = gaps_of(0.0015)
    verdict = case.judge(case.body(), audited=())[1]
    assert (verdict.outcome, verdict.audited, verdict.flipped, verdict.gap_sum) == ("accept", False, 0, 0.0)
    assert case.prefills == []


def test_bounds_are_those_of_the_dtypes_that_sampled_and_replayed(case):
    case.gaps = gaps_of(0.15)
    assert first(case.judge(case.body(), audited=(0,))) == ("hard", "sampling")
    case.tools = dataclasses.replace(case.tools, dtype="bfloat16")
    assert first(case.judge(case.body(), audited=(0,))) == ("accept", "")


def test_work_in_another_dtype_than_the_run_declares_is_hard(case):
    body = case.resubmit(engine=EngineFacts("by hand", "bfloat16", "cpu"))
    assert [(v.outcome, v.check) for v in case.judge(body)] == [("hard", "shape")] * 4


@pytest.mark.parametrize(
    ("claimed", "outcome"), [(-1.005, "accept"), (-1.05, "soft"), (-1.5, "hard"), (float("nan"), "hard")]
)
def test_claimed_log_probs_must_be_those_of_the_policy(case, claimed, outcome):
    case.logprobs = lambda request: np.full(len(request.policy_positions), claimed, dtype=np.float32)
    verdict = case.judge(case.body(), audited=(3,))[3]
    assert (verdict.outcome, verdict.check) == (outcome, "" if outcome == "accept" else "logprobs")
    assert np.isfinite(verdict.figure)


def test_a_failing_engine_is_not_blamed_on_the_worker(case):
    def broken(request):
        raise ShoalError("out of memory")

    case.gaps = broken
    with pytest.raises(ShoalError):
        case.judge(case.body(), audited=(0,))

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
from tests.verification.conftest import Desk

ENGINE = EngineFacts("by hand", "float32", "cpu")


def first(verdicts, place=0):
    return verdicts[place].outcome, verdicts[place].check


def arrays(rollout):
    return rollout.tokens_T().copy(), rollout.author_T().copy(), rollout.logprobs_P().copy()


def rebuilt(tokens_T, author_T, ending, version=3):
    """A rollout with a log-prob for every policy token, as a careful forger would send it."""
    policy = np.count_nonzero(np.asarray(author_T) == POLICY)
    return make_rollout(tokens_T, author_T, np.full(policy, -1.0), version=version, ending=ending)


def test_honest_work_is_accepted_with_rewards_as_played(desk):
    verdicts = desk.judge(desk.body(), audited=(0, 1, 2, 3))
    assert [(v.outcome, v.audited, v.check) for v in verdicts] == [("accept", True, "")] * 4
    assert verdicts[0].rewards[0] == 1.0 and verdicts[0].rewards[1] < 0.5
    assert verdicts[0].tokens == sum(r.num_policy_tokens() for r in desk.groups[0].rollouts)


SAME_NAME = [
    EnvSpec("arithmetic", env_digest("arithmetic"), 65536, 1.0, {"digits": digits}, own_label=label)
    for digits, label in ((1, "easy"), (6, "hard"))
]


@pytest.fixture
def mixed_desk(renderer):
    """Two environments of one name: slots 0 and 2 are of the easy one, 1 and 3 of the hard one."""
    return Desk(renderer, load_run_envs(SAME_NAME, own_files=False))


def test_environments_of_one_name_are_both_accepted(mixed_desk):
    verdicts = mixed_desk.judge(mixed_desk.body(), audited=(0, 1, 2, 3))
    assert [(v.outcome, v.check) for v in verdicts] == [("accept", "")] * 4
    assert [group.env for group in mixed_desk.groups] == ["easy", "hard", "easy", "hard"]


def test_work_played_under_the_label_of_another_environment_is_refused(renderer, mixed_desk):
    assert first(mixed_desk.judge(mixed_desk.body(mixed_desk.replace(0, env="hard")))) == ("hard", "lease")
    easy, hard = mixed_desk.envs.values()
    swapped = Desk(renderer, {"easy": hard, "hard": easy})
    verdicts = mixed_desk.judge(swapped.body())
    assert [(v.outcome, v.check) for v in verdicts] == [("hard", "prompt")] * 4


def test_audited_groups_share_one_prefill(desk):
    desk.judge(desk.body(), audited=(0, 2, 3))
    assert desk.prefills == [12]


def test_without_audit_the_model_is_not_asked(desk):
    verdicts = desk.judge(desk.body())
    assert desk.prefills == [] and not any(v.audited for v in verdicts)


def test_only_groups_that_pass_the_checks_without_the_model_are_prefilled(desk):
    verdicts = desk.judge(desk.body(desk.replace(0, task=5)), audited=(0, 1))
    assert desk.prefills == [4]
    assert [(v.outcome, v.audited) for v in verdicts[:2]] == [("hard", False), ("accept", True)]


def test_a_group_of_great_influence_is_audited_although_it_was_not_drawn(desk):
    """Draws of 0.5 at a rate of 5 %: a group with twenty times the mean influence is audited nevertheless."""
    body = desk.body()
    for mean_influence, audited in ((1e-3, True), (1e9, False)):
        asked = Check(digest(body), desk.lease, (), 60.0, (0.5,) * 4, 0.05, mean_influence)
        verdict = verify_submission(body, asked, desk.tools)
        assert [(group.outcome, group.audited) for group in verdict.groups] == [("accept", audited)] * 4


def test_a_long_group_is_audited_although_it_was_not_drawn(desk):
    body = desk.body()
    for mean_pay, audited in ((1e-3, True), (1e9, False)):
        asked = Check(digest(body), desk.lease, (), 60.0, (0.5,) * 4, 0.05, 0.0, mean_pay)
        verdict = verify_submission(body, asked, desk.tools)
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
def test_arrays_that_do_not_fit_each_other_are_hard(desk, fields):
    assert first(desk.judge(desk.body(desk.edit(0, 1, **fields)))) == ("hard", "shape")


@pytest.mark.parametrize("name", ["token_ids", "author", "logprobs"])
def test_an_array_with_an_extra_byte_is_hard(desk, name):
    longer = getattr(desk.groups[0].rollouts[1], name) + b"\0"
    assert first(desk.judge(desk.body(desk.edit(0, 1, **{name: longer})))) == ("hard", "shape")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.02, 0.002])
def test_log_probs_that_no_softmax_gives_are_hard(desk, value):
    logprobs_P = desk.groups[0].rollouts[1].logprobs_P().copy()
    logprobs_P[2] = value
    verdict = desk.judge(desk.body(desk.edit(0, 1, logprobs=logprobs_P.tobytes())))[0]
    assert (verdict.check, verdict.rollout) == ("shape", 1)
    assert verdict.position == np.flatnonzero(desk.groups[0].rollouts[1].author_T())[2]


@pytest.mark.parametrize("token", [-1, 64, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_hard(desk, token):
    tokens_T = desk.groups[1].rollouts[0].tokens_T().copy()
    tokens_T[3] = token
    verdict = desk.judge(desk.body(desk.edit(1, 0, token_ids=tokens_T.tobytes())))[1]
    assert (verdict.check, verdict.position, verdict.figure) == ("shape", 3, token)


def test_unknown_author_is_hard(desk):
    author_T = desk.groups[1].rollouts[0].author_T().copy()
    author_T[1] = 3
    assert first(desk.judge(desk.body(desk.edit(1, 0, author=author_T.tobytes()))), 1) == ("hard", "shape")


@pytest.mark.parametrize("whole", [True, False])
def test_a_worker_cannot_take_a_turn_out_of_the_training(desk, whole):
    author_T = desk.groups[1].rollouts[0].author_T().copy()
    written = np.flatnonzero(author_T == 1)
    author_T[written if whole else written[-1]] = 2
    assert first(desk.judge(desk.body(desk.edit(1, 0, author=author_T.tobytes()))), 1) == ("soft", "environment")


def test_rollout_longer_than_the_limit_is_hard(desk):
    tokens_T, author_T, _ = arrays(desk.groups[0].rollouts[0])
    more = desk.lease.sampling.max_tokens
    long = rebuilt(np.append(tokens_T, [7] * more), np.append(author_T, [ENVIRONMENT] * more), "length")
    groups = desk.replace(0, rollouts=(long, *desk.groups[0].rollouts[1:]))
    assert first(desk.judge(desk.body(groups))) == ("hard", "shape")


@pytest.mark.parametrize("index", [0, 2, 3])
def test_turn_longer_than_the_limit_is_hard_and_located(desk, index):
    rollouts = list(desk.groups[1].rollouts)
    tokens_T, author_T, _ = arrays(rollouts[index])
    start = int(np.flatnonzero(author_T)[0])
    rollouts[index] = rebuilt([*tokens_T[:start], *[7] * 13], [*author_T[:start], *[POLICY] * 13], "length")
    verdict = desk.judge(desk.body(desk.replace(1, rollouts=tuple(rollouts))))[1]
    assert (verdict.outcome, verdict.check, verdict.rollout, verdict.position) == ("hard", "shape", index, start)
    assert (verdict.figure, verdict.bound) == (13, 12)


@pytest.mark.parametrize("index", [0, 3])
def test_rollout_that_the_policy_opens_is_hard(desk, index):
    author_T = desk.groups[1].rollouts[index].author_T().copy()
    author_T[[0, np.flatnonzero(author_T)[0]]] = POLICY, ENVIRONMENT  # as many log-probs as before
    verdict = desk.judge(desk.body(desk.edit(1, index, author=author_T.tobytes())))[1]
    assert (verdict.outcome, verdict.check, verdict.rollout, verdict.position) == ("hard", "shape", index, 0)


def test_rollout_without_a_turn_of_the_policy_is_hard(desk):
    silent = rebuilt([7, 7, 7], [ENVIRONMENT] * 3, "length")
    groups = desk.replace(1, rollouts=(silent, *desk.groups[1].rollouts[1:]))
    assert first(desk.judge(desk.body(groups)), 1) == ("hard", "shape")


def test_prover_refuses_to_send_a_log_prob_that_is_not_finite(desk):
    bad = np.full(desk.groups[0].rollouts[0].num_policy_tokens(), np.nan, dtype="<f4").tobytes()
    with pytest.raises(StateError, match=r"rollout 0 of slot 0 .* not finite"):
        encode_submission("run-1", desk.lease, desk.edit(0, 0, logprobs=bad), ENGINE)


def test_prover_writes_what_the_verifier_reads(desk):
    assert encode_submission("run-1", desk.lease, desk.groups, ENGINE) == desk.body()


# --- submission ---


@pytest.mark.parametrize("body", [b"", b"garbage", b"\xdd\xff\xff\xff\xff", b"\x80", b"\xc1" * 1000])
def test_garbage_gets_a_hard_shape_verdict_for_every_slot(desk, body):
    assert [(v.outcome, v.check) for v in desk.judge(body, audited=(0, 1))] == [("hard", "shape")] * 4


def test_body_larger_than_its_lease_can_need_is_not_decoded(desk):
    verdicts = desk.judge(desk.body() + bytes(1 << 20))
    assert {v.check for v in verdicts} == {"shape"} and "larger than its lease" in verdicts[0].detail


def test_largest_honest_submission_fits_its_bound(desk):
    full = desk.lease.sampling.max_tokens
    rollout = make_rollout([63] * full, [1] * full, [-1.0] * full, version=2**40, ending="environment")
    for place in range(4):
        desk.groups = desk.replace(place, rollouts=(rollout,) * 4)
    assert all("larger" not in v.detail for v in desk.judge(desk.body()))


@pytest.mark.parametrize("change", [-1, 1])
def test_other_number_of_groups_than_leased_is_hard(desk, change):
    encoded = desk.encoded_groups()
    groups = encoded[:-1] if change < 0 else [*encoded, encoded[0]]
    verdicts = desk.judge(desk.resubmit(groups=tuple(groups)))
    assert [(v.outcome, v.check, v.bound) for v in verdicts] == [("hard", "shape", 4)] * 4


def test_proofs_that_were_not_asked_for_are_hard(desk):
    assert first(desk.judge(desk.resubmit(proofs=(b"proof",)))) == ("hard", "shape")


def test_one_group_that_does_not_decode_does_not_affect_the_others(desk):
    _, *others = desk.encoded_groups()
    outcomes = [v.outcome for v in desk.judge(desk.resubmit(groups=(b"\x81\xa1x", *others)))]
    assert outcomes == ["hard", "accept", "accept", "accept"]


# --- lease ---


@pytest.mark.parametrize("fields", [{"run": "run-2"}, {"lease": "lease-2"}, {"version": 2}])
def test_submission_for_something_else_is_hard_for_all(desk, fields):
    assert [(v.outcome, v.check) for v in desk.judge(desk.resubmit(**fields))] == [("hard", "lease")] * 4


@pytest.mark.parametrize("fields", [{"slot": 2}, {"task": 9}, {"task": -1}, {"env": "arithmetic"}, {"env": "nowhere"}])
def test_group_for_another_slot_task_or_environment_is_hard(desk, fields):
    assert first(desk.judge(desk.body(desk.replace(0, **fields)))) == ("hard", "lease")


def test_rollouts_of_another_version_are_hard(desk):
    stale = tuple(rebuilt(*arrays(r)[:2], r.ending, version=2) for r in desk.groups[0].rollouts)
    assert first(desk.judge(desk.body(desk.replace(0, rollouts=stale)))) == ("hard", "lease")


def test_two_versions_in_one_group_are_hard(desk):
    old = rebuilt(*arrays(desk.groups[0].rollouts[0])[:2], "environment", version=2)
    groups = desk.replace(0, rollouts=(*desk.groups[0].rollouts[:3], old))
    assert first(desk.judge(desk.body(groups))) == ("hard", "shape")


# --- prompt, environment, ending ---


def judge_one(desk, tokens_T, author_T, ending, place=0):
    rollouts = (rebuilt(tokens_T, author_T, ending), *desk.groups[place].rollouts[1:])
    verdict = desk.judge(desk.body(desk.replace(place, rollouts=rollouts)))[place]
    return verdict.outcome, verdict.check


def test_edited_lengthened_or_cut_prompt_is_hard(desk):
    tokens_T, author_T, _ = arrays(desk.groups[0].rollouts[0])
    edited = tokens_T.copy()
    edited[1] = 9
    start = int(np.flatnonzero(author_T)[0])
    longer = np.insert(tokens_T, start, [9, 9]), np.insert(author_T, start, [0, 0])
    shorter = np.delete(tokens_T, 1), np.delete(author_T, 1)
    for tokens, author in ((edited, author_T), longer, shorter):
        assert judge_one(desk, tokens, author, "environment") == ("hard", "prompt")


def test_a_refused_prompt_is_named_by_what_this_machine_derives_not_by_what_was_sent(renderer, desk):
    """Two validators agree if their data do; see `weigh`."""
    others = Desk(renderer, {**desk.envs, "arithmetic": load_run_envs(SAME_NAME, own_files=False)["hard"]})
    tokens_T, author_T, _ = arrays(desk.groups[1].rollouts[0])
    edited = tokens_T.copy()
    edited[1] = 9
    rollouts = (rebuilt(edited, author_T, "environment"), *desk.groups[1].rollouts[1:])
    body = desk.body(desk.replace(1, rollouts=rollouts))
    ours, again, theirs = (judge.judge(body)[1].detail.split(":")[0] for judge in (desk, desk, others))
    assert ours == again != theirs and ours.startswith("prompt is not the task's (")


def test_invented_answer_of_the_environment_is_soft(desk):
    tokens_T, author_T, _ = arrays(desk.groups[0].rollouts[1])
    start = int(np.flatnonzero(author_T)[0])
    answer = start + int(np.flatnonzero(author_T[start:] == ENVIRONMENT)[2])
    tokens_T[answer] = 7 if tokens_T[answer] != 7 else 8
    assert judge_one(desk, tokens_T, author_T, "environment") == ("soft", "environment")


def test_text_claimed_for_the_wrong_author_is_refused(desk):
    tokens_T, author_T, _ = arrays(desk.groups[0].rollouts[1])
    start = int(np.flatnonzero(author_T)[0])
    answer = start + int(np.flatnonzero(author_T[start:] == ENVIRONMENT)[0])
    for at in (start, answer):
        swapped = author_T.copy()
        swapped[at] = 1 - swapped[at]
        assert judge_one(desk, tokens_T, swapped, "environment")[1] in ("prompt", "environment", "shape")


def test_rollout_cut_short_is_refused_as_ending(desk):
    tokens_T, author_T, _ = arrays(desk.groups[0].rollouts[1])
    first_turn = np.flatnonzero(author_T)
    for cut in (first_turn[0] + 2, first_turn[-1], len(tokens_T) - 1):
        for claim in ("length", "environment", "stop"):
            assert judge_one(desk, tokens_T[:cut], author_T[:cut], claim) == ("hard", "ending")


@pytest.mark.parametrize("claim", ["length", "stop"])
def test_ending_that_was_not_reached_is_hard(desk, claim):
    tokens_T, author_T, _ = arrays(desk.groups[0].rollouts[0])
    assert judge_one(desk, tokens_T, author_T, claim) == ("hard", "ending")


def test_claim_that_the_environment_failed_is_soft(desk):
    tokens_T, author_T, _ = arrays(desk.groups[0].rollouts[0])
    assert judge_one(desk, tokens_T, author_T, "error") == ("soft", "environment")


def test_environment_that_fails_here_but_not_there_is_soft(desk):
    env = desk.envs["arithmetic"]
    env.score = lambda state: 1 / 0
    verdict = desk.judge(desk.body())[1]
    assert (verdict.outcome, verdict.check) == ("soft", "environment")


def test_tokens_after_the_end_are_refused(desk):
    tokens_T, author_T, _ = arrays(desk.groups[1].rollouts[0])
    longer = np.append(tokens_T, [3, 4]), np.append(author_T, [0, 0])
    assert judge_one(desk, *longer, "environment", place=1) == ("soft", "environment")


def test_turn_that_fills_its_room_without_a_stop_ends_by_length(desk):
    tokens_T, author_T, _ = arrays(desk.groups[1].rollouts[0])
    start = int(np.flatnonzero(author_T)[0])
    full = [*tokens_T[:start], *[7] * 12], [*author_T[:start], *[1] * 12]
    assert judge_one(desk, *full, "length", place=1) == ("accept", "")
    assert judge_one(desk, *full, "environment", place=1) == ("hard", "ending")


@pytest.mark.parametrize("method", ["task", "reset"])
def test_a_task_that_the_environment_cannot_begin_is_void_whatever_was_sent(desk, method):
    def fail(task):
        raise RuntimeError("no such word list")

    setattr(desk.envs["wordle"], method, fail)
    nothing = desk.replace(0, rollouts=())
    for groups in (desk.groups, nothing):
        verdict = desk.judge(desk.body(groups), audited=(0,))[0]
        assert (verdict.outcome, verdict.tokens, verdict.rewards) == ("void", 0, ())
        assert verdict.detail.endswith("of wordle cannot begin: the environment fails")


def test_a_prompt_that_the_chat_template_refuses_is_void_in_the_words_of_the_template(desk, monkeypatch):
    def refuse(messages, arguments=None):
        raise StateError("the chat template refuses these messages: roles must\nalternate")

    monkeypatch.setattr(desk.tools.renderer, "start", refuse)
    verdict = desk.judge(desk.body(desk.groups), audited=(0,))[0]
    assert (verdict.outcome, verdict.tokens) == ("void", 0)
    assert verdict.detail.endswith("cannot begin: the chat template refuses these messages: roles must alternate")


def test_a_prompt_that_leaves_no_room_is_named_with_its_length_and_the_key(desk):
    desk.envs["wordle"].max_tokens = 5
    verdict = desk.judge(desk.body(desk.groups), audited=(0,))[0]
    assert verdict.outcome == "void"
    assert re.fullmatch(
        r"task \d+ of wordle cannot begin: its prompt takes \d+ tokens, and envs\.max_tokens = 5 leaves no room for a turn",
        verdict.detail,
    )


@pytest.mark.parametrize("method", ["task", "reset", "step", "score"])
def test_a_slot_whose_environment_the_sandbox_stops_is_void(desk, method):
    """Another machine might have let it end, so it is evidence against nobody, whatever the worker claims."""

    def stopped(*args):
        raise Undecided("the sandbox stopped it: it took longer than 10 s")

    setattr(desk.envs["wordle"], method, stopped)
    failed = desk.replace(
        0, rollouts=tuple(msgspec.structs.replace(r, ending="error") for r in desk.groups[0].rollouts)
    )
    for groups in (desk.groups, failed):
        assert desk.judge(desk.body(groups), audited=(0,))[0].outcome == "void"


def test_task_whose_prompt_leaves_no_room_for_a_turn_is_void(desk):
    desk.envs["wordle"].reset = lambda task: (None, [{"role": "user", "content": "a" * 160}])
    assert desk.judge(desk.body(desk.replace(0, rollouts=())))[0].outcome == "void"


@pytest.mark.parametrize("reward", [7.0, -0.01, float("nan"), float("inf")])
def test_reward_outside_the_environments_bounds_is_soft(desk, reward):
    replay = desk.tools.replay
    generous = lambda *claim: [replace(found, reward=reward) for found in replay(*claim)]  # noqa: E731
    object.__setattr__(desk.tools, "replay", generous)
    assert first(desk.judge(desk.body())) == ("soft", "reward")


# --- complete ---


def test_missing_rollouts_are_soft_and_extra_ones_hard(desk):
    rollouts = desk.groups[0].rollouts
    assert first(desk.judge(desk.body(desk.replace(0, rollouts=rollouts[:3])))) == ("soft", "complete")
    assert first(desk.judge(desk.body(desk.replace(0, rollouts=())))) == ("soft", "complete")
    assert first(desk.judge(desk.body(desk.replace(0, rollouts=(*rollouts, rollouts[0]))))) == ("hard", "shape")


def test_equal_rollouts_are_not_refused_for_being_equal(desk):
    same = (desk.groups[0].rollouts[0],) * 4
    assert first(desk.judge(desk.body(desk.replace(0, rollouts=same)), audited=(0,))) == ("accept", "")


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
def test_gaps_are_judged_by_size_count_and_sum(desk, gaps, outcome):
    desk.gaps = gaps_of(*gaps)
    verdict = desk.judge(desk.body(), audited=(1,))[1]
    assert verdict.outcome == outcome
    assert verdict.check == ("" if outcome == "accept" else "sampling")
    assert np.isfinite(verdict.figure)


def test_many_gaps_just_below_the_flip_bound_fail_by_their_sum(desk):
    desk.gaps = lambda request: np.full(len(request.policy_positions), 9e-4, dtype=np.float32)
    verdict = desk.judge(desk.body(), audited=(0,))[0]
    assert (verdict.outcome, verdict.check, verdict.rollout) == ("soft", "sampling", -1)
    assert verdict.figure == verdict.gap_sum == pytest.approx(9e-4 * 90, rel=1e-3)


def flips_of(desk, counts):
    """Sets the number of flipped tokens in each rollout of group 0, as bfloat16 engines may give them."""
    desk.tools = dataclasses.replace(desk.tools, dtype="bfloat16")
    flips = dict(zip((r.seed for r in desk.context(0).requests(desk.groups[0])), counts, strict=True))
    desk.gaps = lambda request: np.float32(0.25) * (np.arange(len(request.policy_positions)) < flips[request.seed])


def test_too_many_flips_in_one_rollout_are_refused_although_the_group_may_have_them(desk):
    flips_of(desk, (0, 3, 0, 0))  # at 1 in 1,000 honest tokens, 2 of these 20 or so, and 3 of the group's 90
    verdict = desk.judge(desk.body(), audited=(0,))[0]
    assert (verdict.check, verdict.rollout, verdict.figure, verdict.bound) == ("sampling", 1, 3, 2)


def test_too_many_flips_in_a_group_are_refused_although_each_rollout_may_have_them(desk):
    flips_of(desk, (1, 1, 1, 1))
    verdict = desk.judge(desk.body(), audited=(0,))[0]
    assert (verdict.check, verdict.rollout, verdict.figure, verdict.bound) == ("sampling", -1, 4, 3)
    flips_of(desk, (1, 1, 1, 0))
    assert first(desk.judge(desk.body(), audited=(0,))) == ("accept", "")


def test_one_flip_in_a_group_passes_and_is_in_the_verdict(desk):
    first_seed = desk.context(1).requests(desk.groups[1])[0].seed
    desk.gaps = lambda request: np.float32(0.0015) * (np.arange(len(request.policy_positions)) == 0) * (
        request.seed == first_seed
    )  # fmt: skip
    verdict = desk.judge(desk.body(), audited=(1,))[1]
    assert (verdict.outcome, verdict.flipped, verdict.gap_sum) == ("accept", 1, 1e-3)


def test_groups_that_are_not_audited_carry_no_figures(desk):
    desk.gaps = gaps_of(0.0015)
    verdict = desk.judge(desk.body(), audited=())[1]
    assert (verdict.outcome, verdict.flipped, verdict.gap_sum) == ("accept", 0, 0.0)


def test_bounds_are_those_of_the_dtypes_that_sampled_and_replayed(desk):
    desk.gaps = gaps_of(0.15)
    assert first(desk.judge(desk.body(), audited=(0,))) == ("hard", "sampling")
    desk.tools = dataclasses.replace(desk.tools, dtype="bfloat16")
    assert first(desk.judge(desk.body(), audited=(0,))) == ("accept", "")


def test_work_in_another_dtype_than_the_run_declares_is_hard(desk):
    body = desk.resubmit(engine=EngineFacts("by hand", "bfloat16", "cpu"))
    assert [(v.outcome, v.check) for v in desk.judge(body)] == [("hard", "shape")] * 4


def test_each_rollout_is_replayed_under_the_seed_of_its_place(desk):
    requests = desk.context(2).requests(desk.groups[2])
    assert len({r.seed for r in requests}) == 4
    assert all(len(r.seed) == 32 for r in requests)


@pytest.mark.parametrize(
    ("claimed", "outcome"), [(-1.005, "accept"), (-1.05, "soft"), (-1.5, "hard"), (float("nan"), "hard")]
)
def test_claimed_log_probs_must_be_those_of_the_policy(desk, claimed, outcome):
    desk.logprobs = lambda request: np.full(len(request.policy_positions), claimed, dtype=np.float32)
    verdict = desk.judge(desk.body(), audited=(3,))[3]
    assert (verdict.outcome, verdict.check) == (outcome, "" if outcome == "accept" else "logprobs")
    assert np.isfinite(verdict.figure)


def test_a_failing_engine_is_not_blamed_on_the_worker(desk):
    def broken(request):
        raise ShoalError("out of memory")

    desk.gaps = broken
    with pytest.raises(ShoalError):
        desk.judge(desk.body(), audited=(0,))

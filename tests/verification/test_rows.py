"""Submissions of rollouts with several rows: honest ones are accepted whole, and no lie about rows is."""

import msgspec
import numpy as np
import pytest

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.models.random_model import make_tiny
from shoal.protocol.constants import MAX_ROLLOUT_ROWS
from shoal.protocol.messages import make_rollout
from shoal.protocol.seed_chain import row_seed, sample_seed
from shoal.verification.check_context import policy_positions
from tests.envs import musing, pile
from tests.envs.lies import LIES
from tests.verification.conftest import GROUP_SIZE, SubmissionCase


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    path = tmp_path_factory.mktemp("musing") / "policy"
    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), path, 0, "float32")
    return Renderer.from_directory(musing.with_template(path))


class ThoughtfulPile(pile.PileGame):
    """Its players close the thought that the prompt begins."""

    def players(self):
        return {name: lambda *args, say=say: f"</think>{say(*args)}" for name, say in super().players().items()}


@pytest.fixture(scope="module")
def groups(thinker):
    return SubmissionCase(thinker, {"pile": ThoughtfulPile(), "musing": musing.environment()}).groups


@pytest.fixture
def rows(thinker, groups):
    """A lease of four slots, of two seats and of three rows in turn."""
    return SubmissionCase(thinker, {"pile": ThoughtfulPile(), "musing": musing.environment()}, groups)


def judged(case, slot=0, index=0, **edits):
    """All audited, with some fields of one rollout replaced."""
    return case.judge(case.body(case.edit(slot, index, **edits)), audited=range(4))


def test_rollouts_with_several_rows_are_accepted_and_paid_whole(rows):
    verdicts = judged(rows)
    assert [verdict.outcome for verdict in verdicts] == ["accept"] * 4 and all(verdict.audited for verdict in verdicts)
    for group, verdict in zip(rows.groups, verdicts, strict=True):
        written = [sum(author > 0 for author in rollout.author) for rollout in group.rollouts]
        assert verdict.tokens == sum(written) and len(group.rollouts) == GROUP_SIZE
    assert {len(rollout.rows()) for rollout in rows.groups[1].rollouts} == {3}


def test_each_row_is_recomputed_with_its_own_seed(rows):
    asked = []
    rows.gaps = lambda request: asked.append(request) or np.zeros(len(request.policy_positions), np.float32)
    judged(rows)
    due = [
        (row_seed(sample_seed(bytes.fromhex(slot.seed), index), number), row.tokens_T.tolist())
        for slot, group in zip(rows.slots, rows.groups, strict=True)
        for index, rollout in enumerate(group.rollouts)
        for number, row in enumerate(rollout.rows())
    ]
    assert [(request.seed, request.token_ids) for request in asked] == due
    assert len({seed for seed, _ in due}) == len(due)


def test_a_forged_token_of_a_later_row_is_located_in_the_rollout(rows):
    rollout = rows.groups[1].rollouts[2]
    last = rollout.rows()[-1]
    rows.gaps = lambda request: (
        np.float32(9.0)
        * (np.arange(len(request.policy_positions)) == (1 if request.token_ids == last.tokens_T.tolist() else -1))
    )
    verdict = judged(rows)[1]
    assert (verdict.outcome, verdict.check) == ("hard", "sampling")
    assert verdict.position == last.start + int(np.flatnonzero(last.author_T)[1])
    assert verdict.position in policy_positions(rollout)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("slot", [0, 1])
def test_no_lie_about_rows_is_accepted(rows, lie, slot):
    for index in (0, 1):
        edits = LIES[lie](rows.groups[slot].rollouts[index])
        verdicts = judged(rows, slot, index, **edits)
        assert [verdict.outcome == "accept" for verdict in verdicts] == [place != slot for place in range(4)]
        assert verdicts[slot].check in ("shape", "prompt", "environment", "ending") and not verdicts[slot].tokens


def test_rows_that_break_a_limit_are_hard(rows):
    rollout = rows.groups[0].rollouts[0]
    start, size = rollout.starts[0], len(rollout.author)
    policy = rollout.author[:start] + bytes([1]) + rollout.author[start + 1 :]
    many = {"starts": tuple(range(1, MAX_ROLLOUT_ROWS + 1))}
    opens = {"author": policy, "logprobs": rollout.logprobs + bytes(4)}
    silent = {"author": rollout.author[:start] + bytes(size - start)}
    silent["logprobs"] = rollout.logprobs[: 4 * int(np.count_nonzero(rollout.author_T()[:start]))]
    for edits in (many, opens, silent):
        verdict = judged(rows, **edits)[0]
        assert (verdict.outcome, verdict.check) == ("hard", "shape"), edits
    long = make_rollout([7] * 200, [0] + [1] * 9 + [0] * 90 + [0] + [1] * 9 + [0] * 90, [-1.0] * 18, version=0,
                        ending="length", starts=(100,))  # fmt: skip
    verdict = judged(rows, **msgspec.structs.asdict(msgspec.structs.replace(long, version=rollout.version)))[0]
    assert (verdict.check, verdict.figure, verdict.bound) == ("shape", 200, 160)

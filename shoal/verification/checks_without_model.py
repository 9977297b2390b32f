"""Checks that need no model: shape, lease, prompt, environment, reward, ending and completeness of a group.

Axes: G rollouts of the group, N tokens of all rollouts in a row, R runs of policy tokens.
"""

import math

import numpy as np

from shoal.protocol.audit_and_pay import MAX_REWARD
from shoal.protocol.constants import MAX_GROUP_ROLLOUTS
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.messages import ENVIRONMENT, Group, Rollout
from shoal.protocol.rollout_validation import flaw_of
from shoal.verification.check_context import CheckFailure, Context, GroupCheck


def shape(group: Group, ctx: Context) -> CheckFailure | None:
    """Shape and limits: sizes agree, tokens are in the vocabulary, numbers are numbers, turns keep to the run's limits.

    Catches malformed, oversized and padded rollouts, turns longer than the limit, and log-probs that no softmax gives.
    Cannot tell a well-formed invention from a sampled rollout.
    Hard: an honest worker never makes such bytes (`encode_submission` refuses to send a log-prob that is not finite).

    Every later check relies on this one: after it, arrays can be read and indexed without further tests. What a model may
    read is judged by `protocol/rollout_validation`, with the function that the trainer uses. The rest are rules of play.
    """
    most = min(ctx.due, MAX_GROUP_ROLLOUTS)
    if len(group.rollouts) > most:
        return CheckFailure(-1, -1, len(group.rollouts), most, "more rollouts than the group size")
    versions = {rollout.version for rollout in group.rollouts}
    if len(versions) > 1:
        return CheckFailure(-1, -1, len(versions), 1, "rollouts of more than one policy version in a group")
    flaw = flaw_of(
        group.rollouts, vocabulary=ctx.tools.renderer.vocabulary, max_tokens=ctx.sampling.max_tokens,
        max_rollout_tokens=ctx.sampling.max_rollout_tokens,
    )  # fmt: skip
    if flaw is not None:  # guard: rollouts-have-no-flaw
        return CheckFailure(*flaw)
    return _turns(group.rollouts, ctx.sampling.max_turn_tokens) if group.rollouts else None


def _turns(rollouts: tuple[Rollout, ...], limit: int) -> CheckFailure | None:
    """Check the policy's turns in all rollouts as one array: with many short rollouts, a look at each costs more."""
    for index, rollout in enumerate(rollouts):
        if not rollout.num_policy_tokens():  # guard: policy-says-something
            return CheckFailure(index, 0, 0, 1, "a rollout must hold a turn of the policy")
    policy_N = np.frombuffer(b"".join(rollout.author for rollout in rollouts), dtype="u1") != ENVIRONMENT
    # No run of policy tokens crosses into the next row, because every row opens with the environment's text.
    edges = np.flatnonzero(np.diff(policy_N, append=False))
    start_R, length_R = edges[::2] + 1, edges[1::2] - edges[::2]
    longest = int(length_R.argmax())
    if length_R[longest] > limit:  # guard: turn-length
        start_G = np.cumsum([0, *(len(rollout.author) for rollout in rollouts)])[:-1]
        at = int(start_R[longest])
        index = int(np.searchsorted(start_G, at, side="right")) - 1
        place = at - int(start_G[index])
        return CheckFailure(index, place, int(length_R[longest]), limit, "turn longer than max_turn_tokens")
    return None


def lease(group: Group, ctx: Context) -> CheckFailure | None:
    """Lease: run, lease, policy version, slot, environment and task are those that the lease asked for.

    Catches work made for another lease, slot, task, version or run, work sent again, and work that the worker chose.
    Cannot see who may hold the lease, nor whether its version is still fresh: the coordinator decides both on arrival.
    Hard: the lease names all of these, and an honest worker copies them.

    The seed is not on the wire: it comes from the lease's slot, and the audit replays the sampling with it.
    """
    said = ctx.submission
    if said.run != ctx.tools.info.run:
        return CheckFailure(-1, -1, 0, 0, "submission is for another run")
    if said.lease != ctx.lease.id:
        return CheckFailure(-1, -1, 0, 0, "submission is for another lease")
    for version in (said.version, *{rollout.version for rollout in group.rollouts}):
        if version != ctx.lease.version:
            return CheckFailure(-1, -1, version, ctx.lease.version, "made with a policy version other than the lease's")
    if group.slot != ctx.slot.slot:
        return CheckFailure(-1, -1, group.slot, ctx.slot.slot, "group is for another slot than the one due here")
    if group.env != ctx.slot.env:
        return CheckFailure(-1, -1, 0, 0, "group is of another environment than the slot's")
    if group.task != ctx.slot.task:
        return CheckFailure(-1, -1, group.task, ctx.slot.task, "group is of another task than the slot's")
    return None


def prompt(group: Group, ctx: Context) -> CheckFailure | None:
    """Prompt: every rollout opens with exactly the tokens that environment, task and chat template give, or continues the
    rollout that it must, from where it must.

    Catches prompts that were edited, lengthened, cut, or taken from another task.
    Cannot see what the policy was really shown; the audit replays that.
    Hard: the opening follows from the lease and the environment's data. The detail names the prompt derived here: the rules
    slash only if two validators derived the same one, so data that differ between machines slash nobody by chance.

    The replay builds the conversation from the task. A difference before the first turn, as the claim or the task has it,
    is in the prompt.
    """
    for index, (rollout, replayed) in enumerate(zip(group.rollouts, ctx.replays(group), strict=True)):
        if not replayed.problem or replayed.position < 0:
            continue
        due, end = ctx.prompt(index, rollout)
        if replayed.position < end:
            detail = f"prompt is not the task's ({digest(to_json(due))[:16]}): {replayed.problem}"
            return CheckFailure(index, replayed.position, 0, 0, detail)
    return None


def environment(group: Group, ctx: Context) -> CheckFailure | None:
    """Environment: replay it with the policy's actions, and require the words that the rollout says it spoke.

    Catches invented or altered answers, text attributed to the wrong author, turns that continue after a stop token,
    tokens after the end, and a claim that the environment failed when it does not fail.
    Cannot judge an environment that answers the same actions differently each time.
    Soft: a difference may be the fault of the environment, or of this machine, until another validator agrees.

    An environment that fails for the worker or for this validator counts here too; `ending` reports other problems of the
    end. Where the host plays, the rollout is compared with its record.
    """
    for index, (rollout, replayed) in enumerate(zip(group.rollouts, ctx.replays(group), strict=True)):
        inside = 0 <= replayed.position < rollout.tokens_T().size or ctx.record is not None  # guard: record-is-compared
        if replayed.problem and (inside or "error" in (rollout.ending, replayed.ending)):
            return CheckFailure(index, replayed.position, 0, 0, f"environment replayed: {replayed.problem}")
    return None


def reward(group: Group, ctx: Context) -> CheckFailure | None:
    """Rewards: recomputed from the actions, and within the bounds that the environment declares.

    Catches faulty environments, not workers: a worker sends no rewards, but an environment may score outside its own
    bounds, or with something that is not a number.
    Cannot tell a deserved reward from one won through a gap in the environment's rules (reward hacking).
    Soft: the environment is at fault.
    """
    low, high = ctx.reward_bounds
    for index, replayed in enumerate(ctx.replays(group)):
        if not math.isfinite(replayed.reward):
            return CheckFailure(index, -1, 0, high, "environment gives a reward that is not a finite number")
        if not low <= replayed.reward <= high:
            return CheckFailure(index, -1, replayed.reward, high, "environment gives a reward outside its bounds")
    for index, steps in enumerate(ctx.steps(group) or ()):
        largest = max((abs(step.reward) for step in steps), default=0.0)
        if largest > MAX_REWARD:  # guard: large-step-rewards
            return CheckFailure(index, -1, largest, MAX_REWARD, "environment gives a step too large a reward")
    return None


def ending(group: Group, ctx: Context) -> CheckFailure | None:
    """Ending: a rollout ends where the run's rules end it, and for the reason that it states.

    Catches rollouts cut short to save work or to hide what followed, and endings that were not reached: a turn ends with a
    stop token or at its limit, and a rollout ends when the environment is done or nothing more fits.
    Cannot see a stop token placed where the policy would have continued. The audit sees that as a gap at the token.
    Hard: endings follow from the tokens and the rules, by counting.

    Reports every problem that the replay found at the rollout's end and that no earlier check reported.
    """
    for index, replayed in enumerate(ctx.replays(group)):
        if replayed.problem:
            return CheckFailure(index, replayed.position, 0, 0, f"ending: {replayed.problem}")
    return None


def complete(group: Group, ctx: Context) -> CheckFailure | None:
    """Completeness: all rollouts of the group are there.

    Catches workers that leave out rollouts they do not like. (Leaving one out of the middle also shifts the seeds of all
    that follow, which the audit sees.)
    Cannot tell a copy within a group from chance. Two equal rollouts are legal, and common where the policy has little
    entropy, so equality alone is never refused. Where there is entropy, a copy fails the audit under its own seed.
    Soft: the submission is refused, which costs its pay, the newest unvested pay of a few blocks, and trust. It never
    slashes.
    """
    given, due = len(group.rollouts), ctx.due
    if given != due:
        return CheckFailure(-1, -1, given, due, "rollouts of the group are missing")
    return None


SHAPE = GroupCheck("shape", "hard", shape)

# guard: check-shape, check-lease, check-prompt, check-environment, check-reward, check-ending, check-complete
MODEL_FREE = (
    SHAPE,
    GroupCheck("lease", "hard", lease),
    GroupCheck("prompt", "hard", prompt),
    GroupCheck("environment", "soft", environment),
    GroupCheck("reward", "soft", reward),
    GroupCheck("ending", "hard", ending),
    GroupCheck("complete", "soft", complete),
)
"""Checks of every group, in this order: each relies on those before it.

To add one, beside its function and its row here (in `checks_with_model` if it reads `ctx.scores`): its name in `CHECKS` of
`protocol/audit_and_pay.py`; a test in `tests/verification`; its guard in the comment above and in `tests/guards.txt`, whose
`less:N` counts rows, so the last row changes no other guard; the attack that it refuses, in `tests/attacks/catalogue.py` or
`tests/attacks/proof_forgeries.py`; and a mutation in `tests/attacks/fuzz.py`, if none there fails it.
`python -m tests.test_docs --write` makes its rows in docs/explanation/trust.md and docs/design/trust.md from its docstring:
a title, a colon and what it demands; then Catches, Cannot, and Hard or Soft.

A validator without a hard check is outvoted, so a release that adds one raises `PROTOCOL_VERSION`; the rules of the log do
not change.
"""

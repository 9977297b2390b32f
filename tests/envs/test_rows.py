"""Rollouts with several rows: seats of a game, histories that leave out thoughts, contexts that begin anew."""

import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.chat.messages import Written
from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig, TinyPolicy
from shoal.engine.native import LocalEngine
from shoal.env import Env, Step
from shoal.envs.lint import check_env
from shoal.envs.load import load_env
from shoal.envs.play_episodes import EpisodeAttempt, converse, play_block, play_scripted
from shoal.envs.replay import ReplayResult, replay_group, retell
from shoal.envs.rollout_rules import Conversation
from shoal.envs.settings_wrapper import with_settings
from shoal.errors import ShoalError
from shoal.models.random_model import make_tiny
from shoal.protocol.constants import MAX_ROLLOUT_ROWS
from shoal.protocol.messages import Block, Rollout, Sampling, Slot
from shoal.protocol.seed_chain import row_seed, sample_seed
from shoal.verification.check_context import by_group, score_requests
from tests.envs import musing, pile
from tests.envs.lies import LIES
from tests.envs.plain import Plain
from tests.models.templates import ADD, renderer_of, spell

SAMPLING = Sampling(1.0, 16, 80, 400)
SHAPE = TinyPolicy(width=16, layers=2, heads=2, kv_heads=1, mlp_width=16)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy whose template leaves out thoughts."""
    path = tmp_path_factory.mktemp("musing") / "policy"
    make_tiny(SHAPE, path, 0, "float32")
    return musing.with_template(path)


@pytest.fixture(scope="module")
def thinker(directory: Path) -> Renderer:
    return Renderer.from_directory(directory)


def said(renderer: Renderer, text: str) -> list[int]:
    return [*renderer.encode(text), renderer.eos_id]


def scripted(
    env: Env, renderer: Renderer, task: int, who: str = "right", sampling: Sampling = SAMPLING
) -> Conversation:
    talk = play_scripted(env, renderer, env.task(task), env.players()[who], random.Random(task), sampling)  # type: ignore[attr-defined]
    for row in talk.rows:
        row.logprobs = [-1.0] * sum(author > 0 for author in row.author)
    return talk


def replayed(env: Env, renderer: Renderer, task: int, rollout: Rollout, sampling: Sampling = SAMPLING) -> ReplayResult:
    return replay_group(env, renderer, env.task(task), [rollout], sampling)[0]


def shown(renderer: Renderer, talk: Conversation) -> list[str]:
    return [spell(renderer, row.tokens) for row in talk.rows]


def test_each_seat_has_a_row_and_only_the_one_that_learns_is_learned_from(renderer: Renderer) -> None:
    env = pile.environment()
    talk = scripted(env, renderer, 3)
    assert shown(renderer, talk) == [
        "<|user|>first, 5 left<|end|><|assistant|>go<|end|><|user|>3 left<|end|><|assistant|>go<|end|>",
        "<|user|>second, 4 left<|end|><|assistant|>go<|end|><|user|>2 left<|end|><|assistant|>a<|end|>",
    ]
    authors = [[author for author, _ in itertools.groupby(row.author)] for row in talk.rows]
    assert authors == [[0, 2, 0, 2], [0, 1, 0, 1]]
    assert (talk.reward, talk.starts) == (1.0, (len(talk.rows[0].tokens),))
    assert [who for who, _ in talk.texts][:8] == ["user", "policy", "user", "seat 1"] * 2
    rollout = talk.rollout(0)
    assert [row.start for row in rollout.rows()] == [0, *talk.starts]
    assert sum(len(row.logprobs_P) for row in rollout.rows()) == rollout.num_policy_tokens()
    assert replayed(env, renderer, 3, rollout) == ReplayResult(1.0, "environment")


def test_a_template_that_drops_thoughts_opens_a_row_with_the_tokens_that_the_policy_wrote(thinker: Renderer) -> None:
    talk = scripted(musing.environment(), thinker, 2)
    assert shown(thinker, talk) == [
        "<|user|>task 2<|end|><|assistant|><think>\nhm</think>0<|end|>",
        "<|user|>task 2<|end|><|assistant|>0<|end|><|user|>turn 1<|end|><|assistant|><think>\nhm</think>1<|end|>",
        "<|user|>task 2<|end|><|assistant|>0<|end|><|user|>turn 1<|end|><|assistant|>1<|end|><|user|>turn 2<|end|>"
        "<|assistant|><think>\nhm</think>2<|end|>",
    ]
    assert all([author for author, _ in itertools.groupby(row.author)] == [0, 1] for row in talk.rows)
    assert replayed(musing.environment(), thinker, 2, talk.rollout(0)) == ReplayResult(1.0, "environment")


def test_appending_keeps_one_row_and_so_does_a_template_that_shows_thoughts(
    thinker: Renderer, renderer: Renderer
) -> None:
    env = musing.environment()
    appending = with_settings(env, EnvConfig("musing", history="append"))
    assert scripted(env, renderer, 2).starts == () == scripted(appending, thinker, 2).starts


def test_tokens_that_text_would_not_give_come_back_as_they_were_written() -> None:
    """The policy writes "ab" as two tokens or more in its own way; its tokens are used again, never its text."""
    renderer, env = renderer_of("qwen3"), with_settings(musing.environment(), EnvConfig("musing", history="template"))
    talk = Conversation(env, renderer, 0, Sampling(1.0, 200, 2000, 9000))
    odd = [renderer.encode("é")[0]]  # half of a character: as text it would be U+FFFD
    talk.write([*renderer.encode("<think>\nhm\n</think>\n\n"), *odd, renderer.eos_id])
    assert len(talk.rows) == 2 and talk.row == 1
    opening = talk.context
    assert [*odd, renderer.eos_id] == [t for t in opening if t in (*odd, renderer.eos_id)][1:3]
    assert "hm" not in spell(renderer, opening) and set(talk.rows[1].author) == {0}


def test_between_tool_calls_qwen3_shows_its_thoughts_so_no_row_opens() -> None:
    class Adding(Plain):
        name, num_tasks, tools, history = "adding", 1, (ADD,), "template"

        def reset(self, task: int) -> Any:
            return 0, [{"role": "user", "content": "go"}]

        def step(self, state: int, action: Any) -> Step:
            calls = [{"role": "tool", "tool_call_id": "mine", "name": "add", "content": "7"}]
            return Step(state + 1, calls if action.tool_calls else "and now?", state == 3)

    renderer, env = renderer_of("qwen3"), Adding()
    talk = Conversation(env, renderer, 0, Sampling(1.0, 200, 2000, 9000))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    talk.write(said(renderer, f"<think>\nhm\n</think>\n\n{call}"))
    assert len(talk.rows) == 1
    talk.write(said(renderer, "<think>\nso\n</think>\n\n7"))
    assert len(talk.rows) == 2 and "hm" not in spell(renderer, talk.context)
    assert call in spell(renderer, talk.context)
    for text in ("<think>\nyes\n</think>\n\nfine", "bye"):
        talk.write(said(renderer, text))
    assert talk.ending == "environment" and not talk.fault
    assert not replayed(env, renderer, 0, talk.rollout(0), talk.sampling).problem


class Forgetting(Plain):
    """It shortens the context after each turn to the latest one."""

    name, num_tasks = "forgetting", 2

    def reset(self, task: int) -> Any:
        return 0, [{"role": "user", "content": "begin"}]

    def step(self, state: int, action: str) -> Step:
        if action == "lie":
            return Step(state, [Written(9), {"role": "user", "content": "on"}], False, restart=True)
        whole = [{"role": "user", "content": "so far"}, Written(state), {"role": "user", "content": "on"}]
        return Step(state + 1, whole, state == 2, restart=True)


def test_an_environment_may_begin_a_context_anew_with_turns_of_the_policy(renderer: Renderer) -> None:
    env = Forgetting()
    talk = Conversation(env, renderer, 0, SAMPLING)
    for text in ("one", "two", "three"):
        talk.write(said(renderer, text))
    assert shown(renderer, talk)[1:] == [
        f"<|user|>so far<|end|><|assistant|>{before}<|end|><|user|>on<|end|><|assistant|>{text}<|end|>"
        for before, text in (("one", "two"), ("two", "three"))
    ]
    assert replayed(env, renderer, 0, talk.rollout(0)) == ReplayResult(0.5, "environment")
    lost = Conversation(env, renderer, 0, SAMPLING)
    lost.write(said(renderer, "lie"))
    assert lost.ending == "error" and "a turn that was not written" in lost.fault


def test_a_row_that_leaves_no_room_is_not_opened(thinker: Renderer) -> None:
    env = musing.environment()
    sizes = [len(row.tokens) for row in scripted(env, thinker, 2).rows]
    openings = [len(row.author) - sum(row.author) for row in scripted(env, thinker, 2).rows]
    for all_tokens, rows in (
        (sum(sizes[:2]), 2),
        (sum(sizes[:2]) + openings[2], 2),
        (sum(sizes[:2]) + openings[2] + 1, 3),
    ):
        talk = scripted(env, thinker, 2, sampling=Sampling(1.0, 16, max(sizes), all_tokens))
        assert (talk.ending, len(talk.rows)) == ("length", rows) and len(talk.tokens) <= all_tokens
        assert not replayed(env, thinker, 2, talk.rollout(0), talk.sampling).problem
    short = Sampling(1.0, 16, openings[2], 400)  # of each row
    assert len(scripted(env, thinker, 2, sampling=short).rows) == 2
    alone = Sampling(1.0, 16, max(sizes))  # without max_rollout_tokens, max_tokens holds for all rows
    assert len(scripted(env, thinker, 2, sampling=alone).tokens) <= max(sizes)


def test_a_rollout_ends_before_it_has_too_many_rows(renderer: Renderer) -> None:
    class Endless(Forgetting):
        def step(self, state: int, action: str) -> Step:
            return super().step(state, action)._replace(done=False)

    env, sampling = Endless(), Sampling(1.0, 4, 80, 1 << 20)
    talk = Conversation(env, renderer, 0, sampling)
    while talk.ending is None:
        talk.write(said(renderer, "a"))
    assert (talk.ending, len(talk.rows)) == ("length", MAX_ROLLOUT_ROWS)


def test_a_seat_that_the_game_lacks_ends_the_rollout(renderer: Renderer, tmp_path: Path) -> None:
    class Third(pile.PileGame):
        def step(self, state: Any, action: str) -> Step:
            return super().step(state, action)._replace(seat=2)

    talk = scripted(Third(), renderer, 0)
    assert talk.ending == "error" and "gives the next turn to seat 2: num_seats is 2" in talk.fault
    told = {one.check: one.detail for one in check_env(Third(), tasks=2)}["replay"]
    assert told.startswith("step() gives the next turn to seat 2")
    assert all(one.outcome != "failed" for one in check_env(pile.environment()) if one.check in ("replay", "isolation"))
    file = tmp_path / "none.py"
    file.write_text(Path(pile.__file__).read_text().replace('num_seats = "pile", 16, 2', 'num_seats = "pile", 16, 0'))
    with pytest.raises(ShoalError, match="num_seats is 0; give a whole number of at least 1"):
        load_env(str(file), {})


def test_a_system_prompt_of_the_run_opens_the_view_of_each_seat(renderer: Renderer) -> None:
    env = with_settings(pile.environment(), EnvConfig("pile", system="play well"))
    talk = scripted(env, renderer, 3)
    assert all(text.startswith("<|system|>play well<|end|><|user|>") for text in shown(renderer, talk))


@pytest.mark.parametrize("lie", LIES)
def test_no_false_claim_about_rows_passes_replay(lie: str, thinker: Renderer, renderer: Renderer) -> None:
    for env, by in ((pile.environment(), renderer), (musing.environment(), thinker)):
        for who in ("right", "wrong"):
            rollout = scripted(env, by, 3, who).rollout(0)
            assert not replayed(env, by, 3, rollout).problem
            false = msgspec.structs.replace(rollout, **LIES[lie](rollout))
            found = replayed(env, by, 3, false)
            assert found.problem and found.reward == 0.0 and found.position <= len(false.author)
            # beside an honest one of the same bytes
            assert replay_group(env, by, env.task(3), [rollout, false], SAMPLING)[1].problem
            assert replay_group(env, by, env.task(3), [false, rollout], SAMPLING)[0].problem
            assert retell(env, by, env.task(3), false, SAMPLING) is None


def test_a_real_engine_samples_each_row_by_its_own_seed_and_a_prefill_agrees(
    directory: Path, thinker: Renderer
) -> None:
    engine = LocalEngine(threads=1)
    engine.load(directory, 0)
    envs = {"pile": pile.environment(), "musing": musing.environment()}
    slots = tuple(Slot(i, bytes([i] * 32).hex(), label, i) for i, label in enumerate(envs))
    groups = play_block(engine, thinker, envs, Block(0, slots), 6, SAMPLING)
    assert {len(rollout.rows()) for rollout in groups[0].rollouts} >= {2}
    assert {len(rollout.rows()) for rollout in groups[1].rollouts} >= {2, 3}
    requests = [request for slot, group in zip(slots, groups, strict=True) for request in score_requests(slot, group)]
    assert len({request.seed for request in requests}) == len(requests) > 24
    scores = by_group(groups, engine.score(requests, 1.0, hidden=True))
    for group, of_group in zip(groups, scores, strict=True):
        found = replay_group(envs[group.env], thinker, envs[group.env].task(group.task), group.rollouts, SAMPLING)
        assert not any(one.problem for one in found)
        for rollout, score in zip(group.rollouts, of_group, strict=True):
            assert np.allclose(score.logprobs_P, rollout.logprobs_P(), atol=1e-4) and score.gaps_P.max() < 1e-4
            assert score.hidden_PD is not None and len(score.hidden_PD) == rollout.num_policy_tokens()
    assert not engine._batches


def test_the_engine_remembers_one_row_of_each_episode(random_engine: Any, renderer: Renderer) -> None:
    env, engine, held = pile.environment(), random_engine(["a", "go"]), [0]
    forget = engine.forget
    open_names: set[str] = set()

    def extend(requests: Any, temperature: float, real: Any = engine.extend) -> Any:
        open_names.update(request.rollout for request in requests)
        held.append(len(open_names))
        return real(requests, temperature)

    def forgotten(names: Any) -> None:
        names = list(names)
        open_names.difference_update(names)
        forget(names)

    engine.extend, engine.forget = extend, forgotten
    episodes = [EpisodeAttempt(env, env.task(i), sample_seed(bytes(32), i)) for i in range(8)]
    talks = converse(engine, renderer, episodes, SAMPLING)
    assert max(held) == 8 and not open_names and {len(talk.rows) for talk in talks} == {2}
    seeds = {request.seed for call in engine.calls for request in call}
    assert seeds == {row_seed(episode.seed, row) for episode in episodes for row in (0, 1)}

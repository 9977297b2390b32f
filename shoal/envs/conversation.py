"""One rollout as it grows: the rules for turns, limits and endings, in one place.

`play` feeds it what an engine samples; `replay` feeds it what a claimed rollout says that the policy wrote. Only this
file decides where a turn ends, what the environment adds, and how a rollout ends. It knows no engine and no network.

A conversation opens with the environment's messages. Then, turn by turn, the policy writes up to `room` tokens:

- A stop token ends the turn, and the environment answers. If it is done, the rollout ends by "environment".
- Without a stop token within `room`, the rollout ends by "length". The environment still takes the text as its last
  action, so that an answer cut short gets the score that it deserves.
- If an answer leaves no room in `max_tokens` for another token, it is not appended: "length" again.
- If the environment raises, or scores outside its bounds, the rollout ends by "error" with the lowest reward, so that
  making an environment fail never pays.
"""

from collections.abc import Sequence

from shoal.envs.action import Action
from shoal.envs.base import Env, Message, State, Step, Task, describe_fault, source_of, success_of
from shoal.envs.score import Scored, earned
from shoal.envs.settings import limits_of
from shoal.errors import Overreach, ShoalError
from shoal.policy.messages import arguments_of, as_messages, normal
from shoal.policy.render import Prompt, Renderer
from shoal.protocol.types import ENVIRONMENT, POLICY, UNTRAINED, Ending, Rollout, Sampling, make_rollout


class Conversation:
    """The tokens of one rollout, who wrote each, and how it ended."""

    def __init__(self, env: Env, renderer: Renderer, task: Task, sampling: Sampling) -> None:
        """Open the conversation. Raises `ShoalError` if the environment cannot begin the task."""
        self.env, self.renderer, self.task, self.sampling = env, renderer, task, limits_of(env, sampling)
        self._arguments = arguments_of(env)
        self.tokens: list[int] = []
        self.author: list[int] = []
        self.logprobs: list[float] = []
        """Log-probs of the policy's tokens; empty if the turns came without them."""
        self.texts: list[tuple[str, str]] = []
        """Texts with the chat role of their author, for transcripts."""
        self.ending: Ending | None = None
        self.reward = min(env.reward_bounds)
        self.parts: dict[str, float] = {}
        """Parts of the score, before their weights."""
        self.metrics: dict[str, float] = {}
        self.turn_rewards: list[float] = []
        self.scored: Scored = self.reward
        """What the environment gave for the episode by itself."""
        self.success: bool | None = None
        self.fault = ""
        """One line: what the environment raised."""
        self.state: State
        self._open()

    @property
    def room(self) -> int:
        """Tokens that the policy may write in the next turn, including its stop token; 0 after the end."""
        if self.ending is not None:
            return 0
        return min(self.sampling.max_turn_tokens, self.sampling.max_tokens - len(self.tokens))

    def write(self, token_ids: Sequence[int], logprobs: Sequence[float] = (), action: str | None = None) -> None:
        """Add one whole turn of the policy. It must end with its first stop token, or fill `room` without one.

        `action` is the turn's text, if the caller has decoded it already.
        """
        stop_ids = self.renderer.stop_ids
        stopped = bool(token_ids) and token_ids[-1] in stop_ids
        assert not stop_ids.intersection(token_ids[:-1]), "a turn continues after its stop token"
        assert len(token_ids) <= self.room, f"a turn of {len(token_ids)} tokens where {self.room} fit"
        assert stopped or len(token_ids) == self.room, "a turn ends early without a stop token"
        begin = len(self.tokens)
        self._append(token_ids, POLICY)
        self.logprobs.extend(logprobs)
        action = self.renderer.decode(list(token_ids)) if action is None else action
        self.texts.append(("assistant", action))
        notation = getattr(self.env, "parser", "") or self.renderer.notation
        tools = self._arguments.get("tools", ())
        self._answer(Action(action, notation, self._thinking, tools), begin, cut=not stopped)

    def rollout(self, version: int) -> Rollout:
        """The finished rollout, as it is sent."""
        assert self.ending is not None, "the conversation has not ended"
        return make_rollout(self.tokens, self.author, self.logprobs, version=version, ending=self.ending)

    def _open(self) -> None:
        try:
            self.state, messages = self.env.reset(self.task)
            opening = self.renderer.open(messages, self._arguments)
            self.texts.extend(_told(messages))
        except (Overreach, MemoryError):
            raise  # guard: overreach-opens-nothing
        except Exception as error:  # noqa: BLE001  foreign code may raise anything, and must not stop the run
            place = describe_fault(error, source_of(self.env))
            raise ShoalError(
                f"environment {self.env.name} cannot begin task {str(self.task)[:80]!r}: {place}. "
                "Fix it, then run shoal env check"
            ) from None
        self._append(opening.token_ids, ENVIRONMENT)
        self._thinking = opening.thinking
        if self.room < 1:
            self._end("length")

    def _answer(self, action: Action, begin: int, cut: bool) -> None:
        """Let the environment answer the turn from `begin` on. If the turn was cut short, the answer is not appended."""
        try:
            step = Step(*self.env.step(self.state, action))
            self.state, reply, done = step[:3]
            if step.seat:  # guard: one-seat
                raise NotImplementedError(
                    f"step() gives the next turn to seat {step.seat}: a rollout has one policy, in seat 0"
                )
            self.turn_rewards.append(step.reward)
            if not step.learn:  # guard: masks-are-the-environments
                self.author[begin:] = [UNTRAINED] * (len(self.author) - begin)
            prompt = Prompt((), False) if done else self.renderer.go_on(reply, self._arguments)
        except Overreach:
            raise  # guard: overreach-ends-nothing
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)
            return
        if not cut:
            self._tell(reply, done)
        if cut:
            self._end("length")
        elif done:
            self._end("environment")
        elif len(self.tokens) + len(prompt.token_ids) + 1 > self.sampling.max_tokens:
            self._end("length")
        else:
            self._append(prompt.token_ids, ENVIRONMENT)
            self._thinking = prompt.thinking

    def _tell(self, reply: object, done: bool) -> None:
        """Keep a reply for people. After the last turn only a text is kept."""
        if isinstance(reply, str):
            self.texts += [("user", reply)] if reply else []
        elif not done:
            self.texts.extend(_told(as_messages(reply)))

    def _end(self, ending: Ending) -> None:
        """Score the episode and close the conversation."""
        judge = getattr(self.env, "truncated_score", self.env.score) if ending == "length" else self.env.score
        try:
            scored = judge(self.state)
            found = earned(self.env, [scored], self.turn_rewards)
            success = success_of(self.env, self.state)
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)
            return
        self.ending, self.success, self.scored = ending, success, scored
        self.reward, self.parts, self.metrics = found

    def _fail(self, error: Exception) -> None:
        if isinstance(error, MemoryError):
            raise error  # it says something about this machine, not about the rollout  # guard: no-memory-ends-nothing
        self.ending, self.fault = "error", describe_fault(error, source_of(self.env))

    def _append(self, token_ids: Sequence[int], author: int) -> None:
        self.tokens.extend(token_ids)
        self.author.extend([author] * len(token_ids))


def _told(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Role and text of each message, for people; a message that only calls tools has their names."""
    return [
        (
            message["role"],
            message["content"] or ", ".join(call["function"]["name"] for call in message.get("tool_calls", ())),
        )
        for message in normal(messages)
    ]

"""One rollout as it grows: the rules for turns, limits and endings.

`play_episodes` feeds it what an engine samples; `replay` feeds it the policy's turns from a claimed rollout. Only this file
decides where a turn ends, what the environment adds, and how a rollout ends.

A conversation opens with the environment's messages. Then, turn by turn, the policy writes up to `room` tokens:

- A stop token ends the turn, and the environment answers. If it is done, the rollout ends by "environment".
- Without a stop token within `room`, the rollout ends by "length". The environment still takes the text as its last
  action, so that a truncated answer gets the score that it deserves.
- If the answer has no tokens, which few chat templates allow, the policy's turn goes on: its limit is for both parts.
- If an answer leaves no room for another token in `max_tokens` (of a row) or in `max_rollout_tokens` (of all rows), or
  would open one row too many, it is not appended, and the rollout ends by "length".
- If the environment raises, or scores outside its bounds, the rollout ends by "error" with the lowest reward. Unless the
  run file says otherwise, such a rollout counts in nothing that is learned: `left_out`.

A rollout has one row of tokens, or several: see `view`. Turns are numbered across rows; `row` is that of the next turn.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shoal.chat.messages import Written, as_messages, normal, text_of
from shoal.chat.renderer import Renderer
from shoal.env import Action, Env, Message, Scored, State, Step, Task
from shoal.envs.concurrent_episodes import alone, call_here, of_this_process
from shoal.envs.episode import Calling, EnvCall, Episode, Mark
from shoal.envs.exceptions import LOCAL_ERRORS, REPRODUCIBLE_ERRORS, redact_paths, score_outside
from shoal.envs.interface import describe_fault, describe_fault_of_call, label_of, source_of
from shoal.envs.seat_history import Next, SeatHistory, TalkRow, WrittenTurn
from shoal.envs.settings_wrapper import learns_from_faults, limits_of, opening_of, plain_task, shaped
from shoal.errors import MessagesRefused, ShoalError, StateError
from shoal.protocol.constants import MAX_ROLLOUT_ROWS
from shoal.protocol.messages import ENVIRONMENT, POLICY, UNTRAINED, Ending, Rollout, Sampling, make_rollout
from shoal.protocol.reward_rules import REPLY_REFUSED


class CreditedTurn(NamedTuple):
    """A turn of the policy, and what the environment says that it earns."""

    begin: int
    """Index in the rollout of its first token."""
    token_ids: tuple[int, ...]
    text: str
    reward: float
    marks: tuple[Mark, ...]


class Conversation:
    """The tokens of one rollout, who wrote each, and how it ended."""

    def __init__(self, env: Env, renderer: Renderer, task: Task, sampling: Sampling) -> None:
        """Open the conversation. Raises `ShoalError` if the environment cannot begin the task."""
        self._prepare(env, renderer, task, sampling)
        alone(self._open())

    @classmethod
    def opening(cls, env: Env, renderer: Renderer, task: Task, sampling: Sampling) -> Calling["Conversation"]:
        """The same as a generator, for several conversations that open beside each other."""
        talk = cls.__new__(cls)
        talk._prepare(env, renderer, task, sampling)
        yield from talk._open()
        return talk

    @classmethod
    def failed(cls, env: Env, renderer: Renderer, task: Task, sampling: Sampling, why: ShoalError) -> "Conversation":
        """One that never opened."""
        talk = cls.__new__(cls)
        talk._prepare(env, renderer, task, sampling)
        talk.ending, talk.fault = "error", str(why)
        return talk

    def _prepare(self, env: Env, renderer: Renderer, task: Task, sampling: Sampling) -> None:
        self.env, self.renderer, self.task, self.sampling = env, renderer, task, limits_of(env, sampling)
        self.episode, self._here = Episode(env), of_this_process(env)
        self._arguments = self.episode.facts.arguments
        self.rows: list[TalkRow] = [TalkRow()]
        """Rows in the order in which they opened."""
        self.row = 0
        """Index of the row that the next turn continues."""
        self.seat = 0
        """The seat that acts next."""
        self._turns: list[WrittenTurn] = []
        self._views: dict[int, SeatHistory] = {}
        self._latest: dict[int, int] = {}
        """Each seat's latest turn."""
        self.texts: list[tuple[str, str]] = []
        """Texts with their author, for transcripts: policy, a seat, or the chat role of a message of the environment."""
        self.ending: Ending | None = None
        self.reward = min(env.reward_bounds)
        self.parts: dict[str, float] = {}
        """Parts of the score, before their weights."""
        self.metrics: dict[str, float] = {}
        self._begins: list[tuple[int, int]] = []
        """Row of each turn, and the index in it of the turn's first token."""
        self.scored: tuple[Scored, ...] = (self.reward,)
        """What the environment's `score` gave for this episode, and what the run adds to it, before the episode was
        compared with its siblings."""
        self.success: bool | None = None
        self.fault = ""
        """One line: what the environment raised."""
        self.outside: float | None = None
        """Its score, if that is outside the environment's bounds."""

    @property
    def state(self) -> State:
        return self.episode.state

    @property
    def room(self) -> int:
        """Tokens that the policy may write in the next turn, including its stop token; 0 after the end."""
        if self.ending is not None:
            return 0
        limits, row = self.sampling, self.rows[self.row]
        in_turn = limits.max_turn_tokens - row.num_in_turn()  # guard: silence-shares-a-turn
        return min(in_turn, limits.max_tokens - len(row.tokens), limits.all_tokens - self._used)

    def asked(self) -> list[Message]:
        """Messages that end with those which the next turn answers."""
        return self._view(self.seat).asked()

    @property
    def left_out(self) -> bool:
        """Whether the environment failed, and the run leaves out rollouts on which it does."""
        return bool(self.fault) and not learns_from_faults(self.env)  # guard: lowest-is-learned-from

    @property
    def context(self) -> list[int]:
        """Tokens that the policy reads before its next turn: those of its row."""
        return self.rows[self.row].tokens

    @property
    def tokens(self) -> list[int]:
        """Tokens of all rows, one row after another."""
        return self.rows[0].tokens if len(self.rows) == 1 else [token for row in self.rows for token in row.tokens]

    @property
    def author(self) -> list[int]:
        """Who wrote each token."""
        return self.rows[0].author if len(self.rows) == 1 else [author for row in self.rows for author in row.author]

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of the policy's tokens; empty if the turns came without them."""
        return [logprob for row in self.rows for logprob in row.logprobs]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each row after the first begins."""
        return tuple(accumulate(len(row.tokens) for row in self.rows[:-1]))

    @property
    def _used(self) -> int:
        """Tokens of all rows."""
        return len(self.rows[0].tokens) if len(self.rows) == 1 else sum(len(row.tokens) for row in self.rows)

    def write(self, token_ids: Sequence[int], logprobs: Sequence[float] = (), action: str | None = None) -> None:
        """Add one whole turn of the policy. It must end with its first stop token, or fill `room` without one.

        `action` is the turn's text, if the caller has decoded it already.
        """
        alone(self.writing(token_ids, logprobs, action))

    def writing(
        self, token_ids: Sequence[int], logprobs: Sequence[float] = (), action: str | None = None
    ) -> Calling[None]:
        """`write` up to the environment's answer; the generator returned gets that, for several conversations beside each
        other."""
        stop_ids = self.renderer.stop_ids
        stopped = bool(token_ids) and token_ids[-1] in stop_ids
        assert not stop_ids.intersection(token_ids[:-1]), "a turn continues after its stop token"
        assert len(token_ids) <= self.room, f"a turn of {len(token_ids)} tokens where {self.room} fit"
        assert stopped or len(token_ids) == self.room, "a turn ends early without a stop token"
        row = self.rows[self.row]
        begin = len(row.tokens)
        row.append(token_ids, POLICY)
        row.logprobs.extend(logprobs)
        action = self.renderer.decode(list(token_ids)) if action is None else action
        self.texts.append((f"seat {self.seat}" if self.seat else "policy", action))
        notation = self.episode.facts.parser or self.renderer.notation
        tools = self._arguments.get("tools", ())
        turn = WrittenTurn(tuple(token_ids), Action(action, notation, self._thinking, tools))
        self._latest[self.seat] = len(self._turns)
        self._turns.append(turn)
        self._begins.append((self.row, begin))
        return self._answer(turn.action, row, begin, cut=not stopped)

    def rollout(self, version: int) -> Rollout:
        """The finished rollout, in the form that is sent."""
        assert self.ending is not None, "the conversation has not ended"
        return make_rollout(
            self.tokens, self.author, self.logprobs, version=version, ending=self.ending, starts=self.starts
        )

    def played(self) -> list[CreditedTurn]:
        """The turns of the policy, in the order in which they were played. One that the environment failed on earned 0, and
        so did all of an episode that failed: there a reward need not be a number."""
        starts, credit = (0, *self.starts), self.episode.credit
        unearned = [(0.0, ())] * (len(self._turns) - len(credit))
        # guard: odd-turn-rewards
        return [
            CreditedTurn(
                starts[row] + begin, turn.token_ids, turn.action, 0.0 if self.fault else float(reward or 0), marks
            )
            for (row, begin), turn, (reward, marks) in zip(self._begins, self._turns, [*credit, *unearned], strict=True)
        ]

    def _open(self) -> Calling[None]:
        shown = False
        try:
            self.episode.state, messages = yield EnvCall(self.env, "reset", (plain_task(self.env, self.task),))
            messages = opening_of(self.env, messages, self.task)
            self.texts.extend(_told(messages))
            view, shown = self._view(0), True
            opening = view.opening(messages)
        except LOCAL_ERRORS:
            raise  # guard: overreach-opens-nothing
        except REPRODUCIBLE_ERRORS as error:  # foreign code may raise anything, and must not stop the run
            begins = begins_fault(self.env, self.task)
            if shown:
                said = f"the policy's chat template or tokenizer does not take its messages: {' '.join(str(error).split())}"
                raise MessagesRefused(begins + said) from None
            why = f"{describe_fault(error, source_of(self.env))}. Fix it, then run shoal env check"
            raise ShoalError(begins + why) from None
        view.row, view.items = self.rows[0], opening.items
        view.row.append(opening.token_ids, ENVIRONMENT)
        self._thinking = opening.thinking
        if self.room < 1:
            yield from self._end("length")

    def _view(self, seat: int) -> SeatHistory:
        """What a seat has seen."""
        if seat not in self._views:
            by_template = self.episode.facts.history == "template"
            self._views[seat] = SeatHistory(self.renderer, self._arguments, by_template, self._turns)
        return self._views[seat]

    def _answer(self, action: Action, row: TalkRow, begin: int, cut: bool) -> Calling[None]:
        """Let the environment answer the turn that begins at `begin`. After a turn that was cut, no answer is appended."""
        try:
            if self._here is None:
                told = yield EnvCall(self.env, "step", (self.state, action))
            else:  # the same, sooner: it is called more often than all other methods
                told = call_here(self._here, "step", (self.state, action))
            step = self.episode.answer(told, action)
            if not step.learn:  # guard: masks-are-the-environments
                row.author[begin:] = [UNTRAINED] * (len(row.author) - begin)
            read = Next((), False, False, []) if step.done else self._read_next(step)
        except LOCAL_ERRORS:
            raise  # guard: overreach-ends-nothing, no-memory-ends-nothing
        except REPRODUCIBLE_ERRORS as error:
            self.fail(error, "step")
            return
        if not cut:
            self._tell(step.reply, step.done)
        if cut:
            yield from self._end("length")
        elif step.done:
            yield from self._end("environment")
        elif not self._fits(self._view(step.seat), read):
            yield from self._end("length")
        else:
            self._go_on(step.seat, read)

    def _read_next(self, step: Step) -> Next:
        """As `_next`. A refusal of the chat template is named as such."""
        try:
            return self._next(step)
        except LOCAL_ERRORS:
            raise
        except StateError as refused:
            said = " ".join(str(refused).split())
            raise MessagesRefused(f"{REPLY_REFUSED}: {said}") from None

    def _next(self, step: Step) -> Next:
        """What the next seat reads."""
        view = self._view(step.seat)
        if step.restart:
            return view.anew(step.reply)
        if step.seat not in self._latest:
            return view.opening(opening_of(self.env, as_messages(step.reply), self.task))
        return view.after(step.reply, self._latest[step.seat])

    def _fits(self, view: SeatHistory, told: Next) -> bool:
        """Whether what the seat reads next leaves room for one token of the policy."""
        if told.opens and len(self.rows) >= MAX_ROLLOUT_ROWS:
            return False
        row = TalkRow() if told.opens or view.row is None else view.row
        so_far, news = len(row.tokens), len(told.token_ids) + 1
        if not told.token_ids and row.num_in_turn() >= self.sampling.max_turn_tokens:  # guard: silence-extends-no-turn
            return False
        return so_far + news <= self.sampling.max_tokens and self._used + news <= self.sampling.all_tokens

    def _go_on(self, seat: int, told: Next) -> None:
        """Append what a seat reads. It acts next."""
        view = self._view(seat)
        if told.opens or view.row is None:
            view.row, view.index = TalkRow(), len(self.rows)
            self.rows.append(view.row)
        view.row.append(told.token_ids, ENVIRONMENT)
        view.items, self._thinking = told.items, told.thinking
        self.seat, self.row = seat, view.index

    def _tell(self, reply: object, done: bool) -> None:
        """Keep a reply for people. After the last turn only a text is kept."""
        if isinstance(reply, str):
            self.texts += [("user", reply)] if reply else []
        elif not done:
            items = reply if isinstance(reply, list | tuple) else as_messages(reply)
            self.texts.extend(_told([item for item in items if not isinstance(item, Written)]))

    def _end(self, ending: Ending) -> Calling[None]:
        """Score the episode and close the conversation."""
        written = [turn.token_ids for turn in self._turns]
        try:
            end = yield from self.episode.end(ending == "length", lambda: shaped(self.env, self.task, written))
        except LOCAL_ERRORS:
            raise  # guard: overreach-scores-nothing
        except REPRODUCIBLE_ERRORS as error:
            self.fail(error, self.episode.call)
            return
        self.ending, self.success, self.scored = ending, end.success, end.scored
        self.reward, self.parts, self.metrics = end.earned

    @property
    def public_fault(self) -> str:
        """The fault as the log may have it."""
        return redact_paths(self.fault, source_of(self.env))

    def fail(self, error: BaseException, call: str) -> None:
        """End the rollout by what this call of the environment raised, or returned that is refused. One that has ended
        keeps its ending: a worker claims it before the rollouts of a group are compared."""
        self.ending = self.ending or "error"
        self.fault = describe_fault_of_call(error, self.env, call, source_of(self.env))
        self.outside = score_outside(error)


def begins_fault(env: Env, task: Task) -> str:
    """How it begins to say that a task cannot begin."""
    return f"environment {label_of(env)} cannot begin task {str(task)[:80]!r}: "


def _told(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Role and text of each message, for people. For a message that only calls tools, the text is their names."""
    return [
        (
            message["role"],
            text_of(message) or ", ".join(call["function"]["name"] for call in message.get("tool_calls", ())),
        )
        for message in normal(messages)
    ]

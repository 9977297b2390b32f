"""The first prompt of an environment, or the first row of training, for a person who looks at what the policy learns from.

Each control token is in double brackets, so that one which the tokenizer splits into pieces looks like any other text.
Nothing is played, but empty turns if the chat template may take no later ones.
"""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.chat.messages import Written, normal, text_of
from shoal.chat.renderer import Renderer
from shoal.chat.tool_calls import NOTATIONS
from shoal.env import Env, Message
from shoal.envs.interface import describe, task_of
from shoal.envs.rollout_rules import Conversation
from shoal.envs.settings_wrapper import limits_of
from shoal.errors import MessagesRefused, Overreach, PromptsTooLong, ShoalError, StateError
from shoal.protocol.messages import Sampling
from shoal.protocol.reward_rules import REPLY_REFUSED
from shoal.protocol.rollout_validation import ROOM_REMEDY, no_room
from shoal.terminal import printable

MAX_PROMPTS_MEASURED = 64
"""Of an environment: so many prompts are measured."""

MAX_CHARS = 3000
"""A longer prompt is shown without its middle."""

MAX_TURNS = 8
"""That are tried with the chat template."""

MIN_REPEATED = 4
"""Tokens of a reply that say something again: fewer may be the end of a turn."""

HIDES_REPLIES = "it shows nothing of an environment's reply"


def first_prompt(label: str, env: Env, renderer: Renderer, sampling: Sampling, index: int = 0) -> str:
    """Lines with the prompt of one task, and its number of tokens. Raises `ShoalError` if the task cannot begin,
    and `MessagesRefused` if the chat template shows nothing of it."""
    talk = Conversation(env, renderer, task_of(env, index), sampling)
    token_ids, facts = talk.context, talk.episode.facts
    arguments = facts.arguments
    demand_shown(label, talk, renderer)
    shown = _without_middle("".join(_pieces(token_ids, renderer)))
    count = sum(token in renderer.added_ids for token in token_ids)
    most = limits_of(env, sampling).max_tokens
    head = f"first prompt of {label}, task {index}: {len(token_ids)} tokens of at most {most}"
    lines = [f"{head}, {count} of them control tokens, in [[ ]]", *(f"  | {line}" for line in shown.split("\n"))]
    if room := no_room(facts.max_tokens, sampling, len(token_ids)):
        lines.insert(1, f"too long: {room}. {ROOM_REMEDY}")
    messages, by_template = talk.asked(), facts.history == "template"
    lines += filter(None, [unparsed_calls(label, env, renderer)])
    if cut := renderer.cut_marks(arguments):
        lines.append(
            f"{_template(renderer)} cuts earlier turns at {cut!r:.60}, which is no known mark of thoughts: what "
            "it cuts there is in action.visible"
        )
    lines += filter(None, [hidden_tools(label, talk, renderer)])
    if missing := renderer.missing_generation_prompt(messages, arguments):
        lines.append(
            f"no turn of {label} is opened: {_template(renderer)} ignores add_generation_prompt, so the policy has to "
            f"write {missing!r} by itself. Take the model's own chat template, unless the policy was trained like that"
        )
    if any(message["role"] == "system" for message in messages) and renderer.moves_system(arguments):
        lines.append("the chat template shows no system message, so its text comes before the user's")
    if refused := _refusal_of_replies(renderer, messages, arguments, by_template):
        lines += filter(None, [_later_turn(label, talk, renderer, refused)])
    elif not by_template:
        if not renderer.keeps_thinking(arguments):
            lines.append(
                "later turns, if there are any, also read earlier thoughts, which the chat template leaves out: see "
                "envs.history"
            )
        elif alone := _refusal_of_replies(renderer, messages, arguments, by_template=True):
            lines.append(
                f"later turns are appended, which the chat template alone would not do: {alone}. See envs.history"
            )
        elif repeated := _repeated(renderer, messages, arguments):
            lines.append(
                f"each later turn reads {repeated} tokens again that the chat template would show once: see envs.history"
            )
        elif _shows_turns_differently(renderer, messages, arguments):
            lines.append(
                "each later turn reads what stands around the first reply, and the chat template writes something else "
                "around the next, such as another number: see envs.history"
            )
    return printable("\n".join(lines), keep="\n")


def unparsed_calls(label: str, env: Env, renderer: Renderer, key: str = "envs.parser") -> str:
    """A line about an environment with tools of whose calls none is read: neither the chat template nor `key` shows their
    notation. Empty if they are read, or if `key` says that there are none."""
    facts = describe(env)
    if facts.parser or renderer.notation or not facts.tools:
        return ""
    return (
        f"tool calls of {label} are not read: {_template(renderer)} writes them in no notation that is known. Set {key} to "
        f"one of {', '.join(NOTATIONS)}; or to none, where the environment reads the text itself"
    )


def hidden_tools(label: str, talk: Conversation, renderer: Renderer) -> str:
    """A line about tools that the chat template does not show in the opening of a conversation; empty if it does."""
    facts = talk.episode.facts
    if not facts.tools or renderer.shows_tools(talk.asked(), facts.arguments):
        return ""
    return f"the tools of {label} are not shown: {_template(renderer)} takes none from its arguments"


def learned_row(token_ids: Sequence[int], positions: Iterable[int], renderer: Renderer) -> str:
    """Lines with a row of training, of which the tokens at these positions are learned."""
    shown, learned = "", {*positions}
    pieces = enumerate(_pieces(token_ids, renderer))
    for is_learned, run in itertools.groupby(pieces, key=lambda piece: piece[0] in learned):
        lines = "".join(text for _, text in run).split("\n")
        shown += "".join(f"\n  {'>' if is_learned else '|'} {line}" for line in lines)
    head = (
        f"first row of training: {len(token_ids)} tokens, {len(learned)} of them learned (>), control tokens in [[ ]]"
    )
    return printable(head + _without_middle(shown), keep="\n")


def odd_prompts(label: str, env: Env, renderer: Renderer, sampling: Sampling, tasks: Sequence[int]) -> str:
    """Lines about the prompts that are refused, fail or leave the policy no room, of up to MAX_PROMPTS_MEASURED tasks;
    empty if none is. Raises `PromptsTooLong` if all leave no room, and `MessagesRefused` if all are one prompt."""
    tasks = _sample(tasks)
    begun, refused, failed = list[Conversation](), list[str](), list[str]()
    for index in tasks:
        try:
            begun.append(Conversation(env, renderer, task_of(env, index), sampling))
        except MessagesRefused as error:
            refused.append(str(error))
        except ShoalError as error:
            failed.append(str(error))
    # guard: tasks-are-told-apart
    if len({str(talk.texts) for talk in begun}) > 1 == len({tuple(talk.context) for talk in begun}):
        raise MessagesRefused(
            f"environment {label}: {_template(renderer)} and its tokenizer make one prompt of all {len(begun)} tasks that "
            "were looked at, though their messages differ. Take the model's own, or use another model"
        )
    lengths = [len(talk.context) for talk in begun]
    found = []
    if refused:
        found.append(
            f"prompts of {label}: {len(refused)} of {len(tasks)} that were looked at are refused, and their tasks never "
            f"begin; the first: {printable(' '.join(refused[0].split()))}"
        )
    if failed:
        found.append(
            f"tasks of {label}: {len(failed)} of {len(tasks)} that were looked at did not begin here; the first: "
            f"{printable(' '.join(failed[0].split()))}"
        )
    most = describe(env).max_tokens
    long = [length for length in lengths if no_room(most, sampling, length)]
    if not long:
        return "\n".join(found)
    if len(long) == len(tasks):
        shortest = no_room(most, sampling, min(long))
        raise PromptsTooLong(
            f"no task of environment {label} can begin, because prompts are too long, all {len(long)} that were looked at; "
            f"the shortest: {shortest}. {ROOM_REMEDY}"
        )
    share = f"{len(long)} of {len(lengths)} that were looked at ({len(long) / len(lengths):.0%})"
    found.append(
        f"prompts of {label}: {share} are too long, and their tasks never begin; the longest: "
        f"{no_room(most, sampling, max(long))}. {ROOM_REMEDY}"
    )
    return "\n".join(found)


def no_task_begins(env: Env, renderer: Renderer, sampling: Sampling, tasks: Sequence[int]) -> bool:
    """Whether the environment fails on each of up to MAX_PROMPTS_MEASURED tasks, and none takes too long."""
    for index in _sample(tasks):
        try:
            Conversation(env, renderer, task_of(env, index), sampling)
        except Overreach:
            return False
        except ShoalError:
            continue
        return False
    return True


def _sample(tasks: Sequence[int]) -> Sequence[int]:
    # not every so many: kinds of tasks may take turns
    return random.Random(len(tasks)).sample(tasks, min(len(tasks), MAX_PROMPTS_MEASURED))


def demand_shown(label: str, talk: Conversation, renderer: Renderer) -> None:
    """Refuse a chat template whose prompt is the same when the last message of the user, or all messages, have other texts:
    no policy sees a task. The conversation has just begun."""
    messages, arguments = talk.asked(), talk.episode.facts.arguments
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    for places, what in ((range(len(messages)), "any messages"), (users[-1:], "any text of the user")):
        others = [
            {**message, "content": f"other {place}"} if place in places else message
            for place, message in enumerate(messages)
        ]
        try:
            same = messages != others and renderer.start(messages, arguments) == renderer.start(others, arguments)
        except ShoalError:
            continue  # a template may refuse other texts
        if same:  # guard: tasks-are-shown
            raise MessagesRefused(
                f"environment {label} cannot begin: {_template(renderer)} makes one prompt of {what}, so no task is "
                "shown to the policy. Take the model's own chat template, or use another model"
            )


def _refusal_of_replies(
    renderer: Renderer, messages: Sequence[Message], arguments: Mapping[str, Any], by_template: bool
) -> str:
    """Why the chat template takes no reply of an environment, or not so many as MAX_TURNS; empty if it does. With
    `by_template`, it shows the whole history again after each."""
    try:
        said = map(text_of, normal(messages))
        texts = (".", "other", *said)  # some tokenizers know few words
        if len({tuple(renderer.go_on(text, arguments)) for text in texts}) == 1:
            return HIDES_REPLIES
        told: list[Message | Written] = [*messages]
        for turn in range(MAX_TURNS if by_template else 0):
            told += [Written(turn), {"role": "user", "content": "."}]
            renderer.history(told, arguments)
    except StateError as refused:
        return " ".join(str(refused).split())
    return ""


def _repeated(renderer: Renderer, messages: Sequence[Message], arguments: Mapping[str, Any]) -> int:
    """How many tokens a reply has that the chat template would not show again; 0 if they are few."""
    try:
        shown = renderer.history([*messages, Written(0), {"role": "user", "content": "."}], arguments)
        appended = len(renderer.start(messages, arguments)) + len(renderer.reply(".", arguments))
    except ShoalError:
        return 0
    more = appended - sum(len(segment.token_ids) for segment in shown)
    return more if more >= MIN_REPEATED else 0


def _shows_turns_differently(renderer: Renderer, messages: Sequence[Message], arguments: Mapping[str, Any]) -> bool:
    """Whether a template shows the same reply in two ways after one turn and after two."""
    reply = {"role": "user", "content": "."}
    items: list[Message | Written] = [*messages, Written(0), reply]
    try:
        first, second = (renderer.history(told, arguments)[-1] for told in (items, [*items, Written(1), reply]))
    except ShoalError:
        return False
    return first.token_ids != second.token_ids


def _later_turn(label: str, talk: Conversation, renderer: Renderer, refused: str) -> str:
    """A line about a chat template that takes no reply, or not as many as MAX_TURNS, after as many empty turns; empty if it
    takes this environment's. Raises `MessagesRefused` if it does not."""
    turns = 0
    while talk.room and turns < (1 if refused == HIDES_REPLIES else MAX_TURNS):
        talk.write([min(renderer.stop_ids)])
        turns += 1
    if REPLY_REFUSED in talk.fault or (talk.room and refused == HIDES_REPLIES):  # guard: later-turns-are-shown
        said = talk.fault.removeprefix(f"{REPLY_REFUSED}: ") or refused
        raise MessagesRefused(
            f"environment {label} plays more than {'one turn' if turns == 1 else f'{turns} turns'}, and "
            f"{_template(renderer)} takes none after that: {said}. Take the model's own chat template, or use another model"
        )
    if talk.room:
        return ""
    return (
        f"later turns of {label}: {_template(renderer)} may take none, and an episode that needs one fails: {refused}"
    )


def _template(renderer: Renderer) -> str:
    """The chat template, with its file."""
    return f"the policy's chat template{f' ({renderer.template_in.text()})' if renderer.template_in.file else ''}"


def _pieces(token_ids: Sequence[int], renderer: Renderer) -> list[str]:
    """Texts of tokens, with control tokens in double brackets."""
    return [
        _in_brackets(piece or f"token {token}") if token in renderer.added_ids else piece
        for token, piece in zip(token_ids, renderer.pieces([token_ids])[0], strict=True)
    ]


def _in_brackets(piece: str) -> str:
    bare = piece.lstrip(" ")  # some tokenizers write a space before each token
    return f"{piece[: len(piece) - len(bare)]}[[{bare}]]"


def _without_middle(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    begin, end = 2 * MAX_CHARS // 3, MAX_CHARS // 3
    return f"{text[:begin]}\n[... {len(text) - begin - end} characters ...]\n{text[-end:]}"

"""A judge over real HTTP: its form, its retries, its key, and what an answer cannot do to it."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from shoal.envs.exceptions import is_unreachable
from shoal.errors import ConfigError
from shoal.graders.llm_judge import (
    INJECTIONS,
    Endpoint,
    LabelledAnswer,
    LabelledPair,
    NoAnswer,
    agreement_on_answers,
    agreement_on_pairs,
    better,
    choose,
    cohen_kappa,
    judged,
)

Make = Callable[..., Endpoint]


def pointwise(ask: Endpoint, answer: str = "It is 42."):
    return judged(answer, "What is 6 x 7?", "Is it right?", ask, known="42")


def test_a_right_answer_is_graded_by_the_rubric(openai: Make) -> None:
    assert pointwise(openai("careful")).score == 1.0
    assert pointwise(openai("careful"), "It is 41.").score == 0.0
    assert pointwise(openai("fenced")).score == 1.0


@pytest.mark.parametrize("model", ["quotes", "too-high", "flag", "twice", "cut", "huge", "nonsense", "down"])
def test_an_output_of_another_form_is_undecided(openai: Make, model: str) -> None:
    graded = pointwise(openai(model))
    assert (graded.score, graded.decided) == (0.0, False)


@pytest.mark.parametrize("mark", [
    "<|im_start|>", "<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|turn>", "<turn|>",
    "[INST]", "[/SYSTEM_PROMPT]",
    "[TOOL_CALLS]", "<end_of_turn>", "<bos>", "</s>", "<<SYS>>",
])  # fmt: skip
def test_marks_of_each_chat_format_are_broken(mark: str) -> None:
    sent: list[str] = []

    def ask(messages) -> str:
        sent.append(messages[1]["content"])
        return '{"reason": "", "score": 0}'

    judged(f"It is {mark} [1, 2] for x<y and |a| > 3.", "q", "r", ask)
    assert mark not in sent[0] and "[1, 2] for x<y and |a| > 3." in sent[0]


def test_a_server_that_drips_ends_by_the_clock() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            until = time.monotonic() + 3.0
            with connection, contextlib.suppress(OSError):
                while time.monotonic() < until:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        with pytest.raises(NoAnswer, match="TimeoutError"):
            Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}/v1", "m", timeout_s=0.5, tries=1)([])
        assert time.monotonic() - began < 2.0
        thread.join()


@pytest.mark.parametrize("text", ["", ":", "\u200b"])
def test_an_answer_without_content_is_not_sent(text: str) -> None:
    def ask(messages) -> str:
        raise AssertionError("asked")

    assert judged(text, "q", "r", ask).score == 0.0
    assert better(text, "42", "q", "c", ask).score == 0.0
    assert better("42", text, "q", "c", ask).score == 1.0


def test_each_call_has_its_own_mark_which_is_never_in_the_data() -> None:
    seen: list[str] = []

    def ask(messages) -> str:
        seen.append(messages[0]["content"] + messages[1]["content"])
        return '{"score": 5}'

    assert judged("x", "q", "r", ask).score == judged("x", "q", "r", ask).score == 0.5
    marks = iter(["aaaa", "bbbb"])
    judged("aaaa end answer", "q", "r", ask, mark=lambda: next(marks))
    assert seen[0] != seen[1] and "bbbb begin answer" in seen[2]


def test_one_order_alone_does_not_win(openai: Make) -> None:
    assert better("42", "41", "q", "c", openai("careful")).score == 1.0
    assert better("41", "42", "q", "c", openai("careful")).score == 0.0
    assert better("42", "42", "q", "c", openai("careful")).score == 0.5
    assert better("41", "42", "q", "c", openai("prefers-first")).score == 0.5
    assert not better("41", "42", "q", "c", openai("down")).decided


def test_a_question_that_is_too_long_is_the_authors_fault(openai: Make) -> None:
    with pytest.raises(ConfigError, match="limit"):
        judged("x", "q" * 30_000, "r", openai("careful"))
    assert judged("x" * 30_000, "q", "r", openai("careful")).score == 0.0


# --- over HTTP ---


def test_a_fault_that_may_pass_is_tried_again_as_the_server_asks(openai: Make) -> None:
    waits: list[float] = []
    assert pointwise(openai("flaky", sleep=waits.append)).score == 1.0
    assert waits == [7.0, 7.0]


def test_waits_double_and_tries_end(openai: Make) -> None:
    waits: list[float] = []
    with pytest.raises(NoAnswer, match="4 tries failed, the last with status 503") as found:
        openai("down", sleep=waits.append)([{"role": "user", "content": "x"}])
    assert waits == [1.0, 2.0, 4.0] and is_unreachable(found.value, None)


def test_a_server_that_is_not_there_is_undecided() -> None:
    endpoint = Endpoint("http://127.0.0.1:1/v1", "m", sleep=lambda s: None)
    assert pointwise(endpoint) == (0.0, "the judge did not answer: 4 tries failed, the last with ConnectError", False)


def test_the_key_is_sent_and_never_shown(openai: Make, monkeypatch, caplog) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    caplog.set_level(0)
    endpoint = openai("wants-key", key_name="JUDGE_KEY")
    assert pointwise(endpoint).score == 1.0
    with pytest.raises(ConfigError, match="status 401") as caught:
        pointwise(openai("denied", key_name="JUDGE_KEY"))
    for shown in (repr(endpoint), str(caught.value), caplog.text):
        assert "sesame" not in shown


def test_a_missing_key_is_named(openai: Make, monkeypatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY is empty"):
        pointwise(openai("wants-key", key_name="JUDGE_KEY"))


def test_a_key_is_not_sent_unencrypted_to_another_machine(monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    with pytest.raises(ConfigError, match="https"):
        pointwise(Endpoint("http://judge.example/v1", "m", key_name="JUDGE_KEY", sleep=lambda s: None))


def test_a_redirect_is_not_followed(openai: Make) -> None:
    with pytest.raises(ConfigError, match="status 302"):
        pointwise(openai("moved"))


# --- agreement ---


def test_kappa_equals_numbers_worked_by_hand() -> None:
    """Cohen: 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no gives p_o = 0.7, p_e = 0.5, kappa = 0.4."""
    pairs = [("y", "y")] * 20 + [("y", "n")] * 5 + [("n", "y")] * 10 + [("n", "n")] * 15
    assert cohen_kappa(pairs) == pytest.approx(0.4)
    assert cohen_kappa([("y", "y"), ("n", "n")]) == 1.0
    assert cohen_kappa([("y", "n"), ("n", "y")]) == -1.0
    assert cohen_kappa([("y", "y")] * 3) == 1.0
    assert cohen_kappa([]) == 0.0


PAIRS = [LabelledPair("6 x 7?", "42", "41", "first"), LabelledPair("6 x 7?", "It is 40.", "It is 42.", "second")] * 2


def compare(ask: Endpoint):
    return lambda question, first, second: choose(question, first, second, "right", ask)


def test_a_judge_that_prefers_the_first_shows_its_bias(openai: Make) -> None:
    measured = agreement_on_pairs(PAIRS, compare(openai("prefers-first")), injections=())
    assert (measured.accuracy, measured.position_bias) == (0.0, 1.0)


def test_a_judge_that_gives_nothing_is_undecided(openai: Make) -> None:
    assert agreement_on_pairs(PAIRS, compare(openai("nonsense"))).undecided == 4


def test_injections_into_a_gullible_judge_are_counted(openai: Make) -> None:
    answers = [LabelledAnswer("6 x 7?", "42", True), LabelledAnswer("6 x 7?", "41", False)]
    gullible = agreement_on_answers(answers, lambda q, a: judged(a, q, "r", openai("gullible")))
    assert (gullible.accuracy, gullible.kappa) == (1.0, 1.0)
    assert gullible.injected == pytest.approx(1 / len(INJECTIONS))
    careful = agreement_on_answers(answers, lambda q, a: judged(a, q, "r", openai("careful")))
    assert careful == (2, 0, 1.0, 1.0, 0.0, 0.0)

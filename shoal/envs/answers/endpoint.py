"""A language model behind an OpenAI-compatible HTTP endpoint: one question, one text.

Called by `judge`. It knows the shape of `POST /chat/completions` and how to retry; it knows nothing about grades. An
environment variable holds the key, which is read for each question, so that no run file, log or message holds it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from shoal.config.environ import secret_named
from shoal.envs.base import Message
from shoal.errors import ConfigError

MAX_RESPONSE_BYTES = 1 << 20
"""Size of a response. A grade takes less than a kilobyte."""

MAX_WAIT_S = 60.0
"""Longest wait before another try, even if the server asks for a longer one."""

WORTH_ANOTHER_TRY = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of faults that may pass."""


class NoAnswer(Exception):
    """The endpoint gave no text. The message says why, and quotes nothing that was sent or received."""


class Ask(Protocol):
    """Answers messages with a text: an `Endpoint`, or a function in a test. Raises `NoAnswer`."""

    def __call__(self, messages: Sequence[Message]) -> str: ...


@dataclass(frozen=True)
class Endpoint:
    """A model that answers over HTTP."""

    base_url: str
    """Up to and including the version, such as https://host/v1."""
    model: str
    key_name: str = ""
    """Environment variable that holds the key; "" if the endpoint wants none."""
    max_tokens: int = 1024
    """Length of an answer, in tokens."""
    timeout_s: float = 60.0
    """Time for one try."""
    tries: int = 4
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, messages: Sequence[Message]) -> str:
        """The model's answer. After a fault that may pass it tries again in 1, 2, 4, ... seconds, or when the server
        asks for it."""
        import httpx  # late: an environment that is only loaded, as in a sandbox, need not have it

        headers = self._headers()
        why = ""
        for attempt in range(self.tries):
            wait_s = 2.0**attempt
            try:
                status, body, asked_s = self._post(messages, headers)
                if status == 200:
                    return _text(body)
                why = f"status {status}"
                wait_s = asked_s if asked_s is not None else wait_s
                if status not in WORTH_ANOTHER_TRY:
                    raise ConfigError(
                        f"the endpoint {self.base_url} refuses the request with {why}: check its URL, model and key"
                    )
            except (httpx.HTTPError, TimeoutError) as error:
                why = type(error).__name__
            if attempt + 1 < self.tries:
                self.sleep(min(wait_s, MAX_WAIT_S))
        # So that whoever plays the environment knows that a replay may find otherwise: see `envs.exceptions`.
        raise NoAnswer(f"{self.tries} tries failed, the last with {why}") from TimeoutError(why)

    def _headers(self) -> dict[str, str]:
        if not self.key_name:
            return {}
        address = urlsplit(self.base_url)
        if address.scheme != "https" and address.hostname not in (
            "127.0.0.1",
            "::1",
            "localhost",
        ):  # guard: key-in-the-clear
            raise ConfigError(f"{self.base_url} would send the key in {self.key_name} unencrypted: use https")
        return {"authorization": f"Bearer {secret_named(self.key_name)}"}

    def _post(self, messages: Sequence[Message], headers: dict[str, str]) -> tuple[int, bytes, float | None]:
        """Status, body, and the seconds that the server asks us to wait. It follows no redirect, which would take the
        key along."""
        import httpx

        question = {"model": self.model, "messages": list(messages), "max_tokens": self.max_tokens, "temperature": 0.0}
        url = self.base_url.rstrip("/") + "/chat/completions"

        async def post() -> tuple[int, bytes, float | None]:
            client = httpx.AsyncClient(timeout=self.timeout_s, trust_env=False)
            # The time-outs of httpx are for each piece: a server that drips would never reach them.
            async with (
                asyncio.timeout(self.timeout_s),  # guard: slow-judge-ends
                client,
                client.stream("POST", url, json=question, headers=headers) as response,
            ):
                body = b""
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_RESPONSE_BYTES:  # guard: judge-response-size
                        raise NoAnswer(f"the response has more than {MAX_RESPONSE_BYTES:,} bytes")
                asked = response.headers.get("retry-after", "")
                return response.status_code, body, float(asked) if asked.isdecimal() and len(asked) < 6 else None

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(post())
        with ThreadPoolExecutor(1) as thread:  # a thread has one event loop, and the caller's has its own
            return thread.submit(asyncio.run, post()).result()


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Said
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _text(body: bytes) -> str:
    try:
        choice = msgspec.json.decode(body, type=_Completion).choices[0]
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError):
        raise NoAnswer("the response is not a chat completion") from None
    if choice.finish_reason == "length":
        raise NoAnswer("the answer reached its token limit: raise max_tokens")
    if not choice.message.content:
        raise NoAnswer("the response contains no text")
    return choice.message.content

"""Sorts errors of a connection into those worth another attempt (`RetryableError`) and those that need a person
(`PeerError`).

It explains errors of sockets, TLS and HTTP in one line. It does not try again. Of an answer it reads only how long to wait.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator

import httpx

from shoal.errors import PeerError, cause_of

MOST_RETRY_S = 60.0
"""Longest wait that a server may ask for; if it asks for more, we wait this long."""


PROXY = "the proxy"
"""How an error of a proxy's connection begins."""


class RetryableError(PeerError):
    """An attempt failed in a way that may pass."""

    def __init__(self, reason: str, retry_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_s = retry_s


def retry_after(response: httpx.Response) -> float:
    """Seconds that a server asks us to wait, at most `MOST_RETRY_S`."""
    asked = response.headers.get("retry-after", "")
    return min(float(asked), MOST_RETRY_S) if asked.isdecimal() else 0.0


def another_program(status: int) -> str:
    """Why an answer without our header is no answer of the host."""
    return (
        f"another program answers there now, with HTTP {status} and no shoal-protocol header: the host is down, or its "
        "address leads elsewhere"
    )


@contextlib.contextmanager
def map_http_errors(base_url: str, limit_s: float, reached: Callable[[], bool]) -> Iterator[None]:
    """Sort what goes wrong on the way into `RetryableError`, which may pass, and `PeerError`, which will not.

    `reached`: whether the server has answered before, so that its name and its TLS are known to be good.
    """
    try:
        yield
    except TimeoutError:
        raise RetryableError(f"no answer within {limit_s:.3g} s. Check that it is running") from None
    except (httpx.InvalidURL, UnicodeError) as error:  # httpx makes more of an answer's headers than we do
        raise RetryableError(f"its answer cannot be read ({cause_of(error)})") from None
    except httpx.TransportError as error:
        cause = _cause(error)
        if isinstance(cause, ssl.SSLCertVerificationError) or (isinstance(cause, ssl.SSLError) and not reached()):
            raise PeerError(_explain_tls(base_url, cause)) from None
        if isinstance(cause, socket.gaierror) and not reached():
            if str(error).startswith(PROXY):
                raise PeerError(f"{cause_of(error)}. Check the address of the proxy") from None
            host = httpx.URL(base_url).host
            raise PeerError(f"there is no host named {host} ({cause_of(cause)}): check the URL {base_url}") from None
        if isinstance(error, httpx.RemoteProtocolError) and not reached() and "disconnected" not in str(error):
            raise PeerError(
                f"{base_url} does not speak HTTP ({cause_of(error)}): check the port, or try https:// in its place"
            ) from None
        reason = cause_of(error).rstrip(".")
        raise RetryableError(f"{reason}. Check that it is running and that nothing blocks the connection") from None


def _cause(error: BaseException | None) -> BaseException | None:
    while error is not None and not isinstance(error, (ssl.SSLError, socket.gaierror)):
        error = error.__cause__ or error.__context__
    return error


def _explain_tls(base_url: str, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {base_url} is not valid ({error.verify_message}): check the URL and this machine's "
            "clock, or ask the host to renew it"
        )
    return f"{base_url} does not speak TLS ({error.args[-1]}): try http:// in its place, or check the port"

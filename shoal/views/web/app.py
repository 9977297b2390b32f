"""The web application: its addresses, its headers, and who is the host.

It answers GET and HEAD alone. A page is made again only when the index or the run's condition changed: its ETag names the
change, so a browser that polls gets 304, and viewers of the same page share one rendering.
"""

import asyncio
import hmac
import json
import logging
import secrets
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.errors import ShoalError
from shoal.humanize import duration
from shoal.views.web.csv_export import Download, Places, lines_of_csv
from shoal.views.web.group_pages import GROUP_VIEWS
from shoal.views.web.page_request import BadNumber, NotHere, PageRequest, View
from shoal.views.web.run_pages import VIEWS, chart, comparison
from shoal.views.web.served_runs import ServedRuns
from shoal.views.web.template_filters import STATIC, parts, templates

log = logging.getLogger(__name__)

KEPT_PAGES = 256
"""Maximum number of renderings that are kept for other viewers."""

MAX_URL_CHARS = 2000

WRONG_TOKEN = "wrong-token"
"""In the query of an address to which a wrong token leads, without the token."""

UNKEPT = {"cache-control": "private, no-store", "vary": "cookie"}
"""Headers of what nobody between here and the viewer may keep: it may be the host's alone."""

FAULTS = {400: "Not a number", 404: "Not here"}
"""Titles of pages that say what is wrong, by status."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)

HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin", "x-frame-options": "DENY",
}  # fmt: skip


def page_app(served_runs: ServedRuns, token: str, clock: Callable[[], float] = time.time) -> ASGIApp:
    """The application for the served runs. A viewer with the token is the host; if the token is empty, nobody is."""
    page = _Page(served_runs, token, clock)
    views = {**VIEWS, **GROUP_VIEWS}
    routes: list[BaseRoute] = [Route("/", page.front), Route("/compare", page.show(comparison))]
    routes += [Route(f"/{{run:int}}{path}", page.show(view)) for path, view in views.items()]
    routes += [
        Route("/{run:int}/csv/{table}.csv", page.csv),
        Route("/{run:int}/chart.json", page.data(chart)),
        Mount("/static/{version}", StaticFiles(directory=STATIC)),
    ]
    middleware = [Middleware(_WithHeaders), Middleware(_WithoutToken, page)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={
        HTTPException: page.refuse, ShoalError: page.excuse, sqlite3.Error: page.excuse,
    })  # fmt: skip


Endpoint = Callable[[Request], Awaitable[Response]]


class _Viewer(NamedTuple):
    run: int
    is_host: bool
    may_compute: bool


class _Page:
    """What all requests share."""

    def __init__(self, served_runs: ServedRuns, token: str, clock: Callable[[], float]) -> None:
        self._served_runs, self._clock = served_runs, clock
        self._templates = templates()
        self._boot = secrets.token_hex(4)
        """Part of each ETag, so that one from an earlier process never matches."""
        self._session = sha256(b"shoal dashboard " + token.encode()).hexdigest() if token else ""
        self._token = token
        self._cookie = f"shoal-host-{self._session[:8]}"
        """Named by the token: cookies do not know ports, and a machine may serve several pages."""
        self._downloads = Places()
        self._kept = OrderedDict[tuple[str, _Viewer, str], bytes]()
        self._making = dict[tuple[str, _Viewer, str], asyncio.Future[tuple[bytes, bool]]]()

    def is_host(self, request: Request) -> bool:
        """Whether the viewer has the host's cookie."""
        given = request.cookies.get(self._cookie, "")
        return bool(self._session) and hmac.compare_digest(
            given.encode(), self._session.encode()
        )  # guard: host-by-cookie

    def front(self, request: Request) -> Response:
        """The run, or the comparison of several."""
        return RedirectResponse(self._first(), 303, {"cache-control": "no-store"})

    def _first(self) -> str:
        runs = self._served_runs.runs
        return f"/{runs[0].number}/" if len(runs) == 1 else "/compare"

    def admit(self, request: Request) -> Response:
        """An address with a token without it. The host's link carries the token, and is answered with a cookie; of a wrong
        one the page says so."""
        given = request.query_params.get("token", "")
        path = "/" + request.scope["path"].strip("/")  # // would lead to another host
        is_right = bool(self._token) and hmac.compare_digest(
            given.encode(), self._token.encode()
        )  # guard: host-by-token
        said = [
            (name, value) for name, value in request.query_params.multi_items() if name not in ("token", WRONG_TOKEN)
        ]
        kept = urlencode(said if is_right or not given else [*said, (WRONG_TOKEN, "1")])
        to = self._first() if path == "/" else path + "/" * request.scope["path"].endswith("/")
        response = RedirectResponse(f"{quote(to)}?{kept}" if kept else quote(to), 303)
        if is_right:
            response.set_cookie(
                self._cookie, self._session, httponly=True, samesite="strict", secure=request.url.scheme == "https"
            )
        response.headers["cache-control"] = "no-store"
        return response

    def show(self, view: View) -> Endpoint:
        """An endpoint that renders a view."""

        def made(asked: PageRequest) -> tuple[bytes, bool]:
            template, values = view(asked)
            is_whole = not (
                values.get("why") or values.get("failed")
            )  # the rest may be there when it is asked for again
            return self._render(template, asked, values), is_whole

        return self._endpoint(made, "text/html")

    def data(self, view: Callable[[PageRequest], Mapping[str, Any]]) -> Endpoint:
        """An endpoint that gives the script numbers."""
        return self._endpoint(lambda asked: (json.dumps(view(asked)).encode(), True), "application/json")

    def _endpoint(self, make: Callable[[PageRequest], tuple[bytes, bool]], kind: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            viewer = self._viewer(request)
            change = f"{self._served_runs.change}-{self._served_runs.late_s(viewer.run)}"
            etag = f'"{self._boot}-{change}-{int(viewer.is_host)}{int(viewer.may_compute)}"'
            if _names(request, etag):
                return Response(status_code=304, headers=_cached(etag))
            key = f"{request.scope['path']}?{request.scope['query_string'].decode('latin-1')}", viewer, change
            if (body := self._kept.get(key, b"")) == b"":
                # Viewers who ask at the same time share one rendering.
                making = self._making.get(key)
                if making is None:
                    making = asyncio.ensure_future(run_in_threadpool(lambda: make(self._asked(request, viewer))))
                    self._making[key] = making
                    making.add_done_callback(lambda _: self._making.pop(key, None))
                body, is_whole = await asyncio.shield(making)
                if not is_whole:
                    return Response(body, media_type=kind, headers=UNKEPT)
                self._kept[key] = body
                while len(self._kept) > KEPT_PAGES:
                    self._kept.popitem(last=False)
            return Response(body, media_type=kind, headers=_cached(etag))

        return endpoint

    def csv(self, request: Request) -> Response:
        """A table, line by line. The name of its file says how much of the log the index had."""
        asked = self._asked(request, self._viewer(request))
        served_runs, table, seq = self._served_runs, request.path_params["table"], asked.one()["seq"]
        shown = served_runs.of(asked.run) if table != "runs" else None
        if shown and (fault := served_runs.fault(shown.number)):
            why = "The log of this run cannot be read to its end, so no table of it is whole.\n"
            return PlainTextResponse(f"{why}{fault}\n" if asked.is_host else why, 503)
        if shown and (unread := served_runs.being_read(shown.number)):
            late = f"{unread.capitalize()}: ask for this table once it is whole.\n"
            return PlainTextResponse(late, 503, {"retry-after": "5"})
        lines = lines_of_csv(asked, table)
        name = f"run-{asked.run}-{table}-before-event-{seq + 1}.csv"
        headers = {"content-disposition": f"attachment; filename={name}", **UNKEPT}
        if request.method == "HEAD":
            return Response(media_type="text/csv", headers=headers)
        return Download(lines, None if asked.may_compute else self._downloads, headers)

    def _viewer(self, request: Request) -> _Viewer:
        """Who asks for which run. Raises `NotHere`."""
        run = request.path_params.get("run", 0)
        if "run" in request.path_params and self._served_runs.of(run) is None:
            raise NotHere(f"this page has no run {run}")
        is_known = self.is_host(request)
        own = any(shown.is_own for shown in self._served_runs.runs if run in (0, shown.number))
        return _Viewer(run, is_known and own, is_known)

    def _asked(self, request: Request, viewer: _Viewer) -> PageRequest:
        """What is asked; called in the thread that reads the index."""
        return PageRequest(
            self._served_runs, self._served_runs.look(), viewer.run, request.path_params, request.query_params,
            viewer.is_host,
            self._clock(), viewer.may_compute,
        )  # fmt: skip

    def _render(self, template: str, asked: PageRequest, values: Mapping[str, Any]) -> bytes:
        fault, being_read = self._served_runs.fault(asked.run), self._served_runs.being_read(asked.run)
        common = {
            "run": asked.run, "runs": asked.runs(), "is_host": asked.is_host, "has_host": bool(self._token),
            "read_fault": fault, "being_read": being_read,
            "now_s": asked.now_s, "place": "", "one": asked.one(), "asked": asked, "may_compute": asked.may_compute,
            "wrong_token": asked.word(WRONG_TOKEN), "badge": self._badge(asked),
            "p": parts(self._templates, asked.name_of, "the log cannot be read to its end" if fault else being_read),
        }  # fmt: skip
        return self._templates.get_template(template).render({**common, **values}).encode("utf-8", "replace")

    def _badge(self, asked: PageRequest) -> str:
        """How the run does in a few words: "Live" only of one whose coordinator answers, and whose log is read."""
        if unread := self._served_runs.unread(asked.run):
            return unread.replace("the log, ", "").capitalize()
        condition = asked.look.condition(asked.run)
        if condition.get("phase") == "ended":
            return "The run has ended"
        if condition.get("is_live"):
            late_s = self._served_runs.late_s(asked.run)
            return f"As of {duration(late_s)} ago" if late_s else "Live"
        return "Stopped" if condition.get("is_stopped") else "No answer" if condition else ""

    def refuse(self, request: Request, error: Exception) -> Response:
        """A page that is not there, or a method that is not taken."""
        assert isinstance(error, HTTPException)
        return self._fault(request, error.status_code, error.detail, error.headers)

    def excuse(self, request: Request, error: Exception) -> Response:
        """What cannot be shown, in a sentence."""
        status = 400 if isinstance(error, BadNumber) else 404 if isinstance(error, NotHere) else 503
        return self._fault(request, status, error, None)

    def _fault(
        self, request: Request, status: int, error: str | Exception, headers: Mapping[str, str] | None
    ) -> Response:
        """The page of an error, as anyone may see it."""
        number = request.path_params.get("run", 0)
        run = number if isinstance(number, int) and self._served_runs.of(number) else 0
        try:
            asked = PageRequest(self._served_runs, self._served_runs.look(), run, {}, _NOTHING, False, self._clock())
            words = error if isinstance(error, str) else asked.excuse(error)
            title = FAULTS.get(status, "This cannot be shown")
            body = self._render("fault.html", asked, {"words": words, "title": title})
        except (ShoalError, sqlite3.Error):
            unread = "The index of this page cannot be read now: try again in a few seconds.\n"
            return PlainTextResponse(unread, 503, {"retry-after": "5"})  # guard: fault-without-an-index
        return Response(body, status, dict(headers or {}), "text/html")


_NOTHING = QueryParams()


def _cached(etag: str) -> dict[str, str]:
    return {"etag": etag, "cache-control": "private, no-cache", "vary": "cookie"}


def _names(request: Request, etag: str) -> bool:
    given: Sequence[str] = [part.strip() for part in request.headers.get("if-none-match", "").split(",")]
    return etag in given or f"W/{etag}" in given


class _WithHeaders:
    """Gives every answer the headers that keep a page to itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = "/static/" in scope["path"] and message["status"] == 200
                extra = {**HEADERS, **({"cache-control": "public, max-age=31536000, immutable"} if kept else {})}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in extra.items())]
            await send(message)

        if len(scope["path"]) + len(scope["query_string"]) > MAX_URL_CHARS:  # guard: long-address-ends-early
            # Before routing, which makes a number of any length out of digits, and raises beyond 4300.
            await PlainTextResponse("This address is too long.", 414)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


class _WithoutToken:
    """Sends who comes with a token to the same address without it: an address is kept in histories, and passed on."""

    def __init__(self, app: ASGIApp, page: _Page) -> None:
        self._app, self._page = app, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        carries = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if carries and "token" in (request := Request(scope)).query_params:
            await self._page.admit(request)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

"""A small hub on a real socket: it answers what huggingface_hub asks, for models that are directories on this disk."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """The models of a hub, and what was asked of it."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        """By OWNER/NAME."""
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self.sent_bytes = 0
        self.url = ""
        self.cut_after: int | None = None
        """Answers end after so many bytes, once."""
        self.pad_bytes = 0
        """Files have so many bytes more than the list of files says."""
        self.stalls = threading.Event()
        """Set: the second half of a large file never comes."""
        self.stalled = threading.Event()
        """Whether the first half of one was sent."""

    def refusal(self, repo: str, revision: str) -> tuple[int, str] | None:
        """Status and code of an answer, if there is no such model for us."""
        if repo in self.gated:
            return 403, "GatedRepo"
        if repo not in self.models:
            return 404, "RepoNotFound"
        return None if revision in ("main", COMMIT) else (404, "RevisionNotFound")


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"] and len(parts) == 6 and parts[4] == "revision":
                self.model("/".join(parts[2:4]), parts[5])
            elif len(parts) >= 5 and parts[2] == "resolve":
                self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            else:
                self.answer(404, b"{}")

        def model(self, repo: str, revision: str) -> None:
            if refused := hub.refusal(repo, revision):
                self.answer(refused[0], b"{}", **{"X-Error-Code": refused[1]})
                return
            root = hub.models[repo]
            files = [path for path in sorted(root.rglob("*")) if path.is_file()]
            told = [
                {"rfilename": str(path.relative_to(root)), "size": path.stat().st_size, "blobId": "0" * 40}
                for path in files
            ]
            body = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": told, "tags": []}
            self.answer(200, json.dumps(body).encode(), **{"Content-Type": "application/json"})

        def file(self, repo: str, revision: str, name: str) -> None:
            if refused := hub.refusal(repo, revision):
                self.answer(refused[0], b"{}", **{"X-Error-Code": refused[1]})
                return
            path = hub.models[repo] / name
            if not path.is_file():
                self.answer(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
                return
            data = path.read_bytes() + bytes(hub.pad_bytes)
            told = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
            asked = self.headers.get("Range", "")
            if asked.startswith("bytes=") and self.command == "GET":
                start, _, end = asked.removeprefix("bytes=").partition("-")
                part = data[int(start) : int(end) + 1 if end else len(data)]
                told["Content-Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
                self.answer(206, part, **told)
            else:
                self.answer(200, data, **told)

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.cut_after is not None and len(body) > hub.cut_after:
                body, hub.cut_after = body[: hub.cut_after], None
                self.close_connection = True
            hub.sent_bytes += len(body)
            if hub.stalls.is_set() and len(body) > 20_000:
                with contextlib.suppress(OSError):
                    self.wfile.write(body[: len(body) // 2])
                    hub.stalled.set()
                    self.connection.recv(1)  # until the other side closes
                self.close_connection = True
                return
            with contextlib.suppress(OSError):
                self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

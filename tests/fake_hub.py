"""A hub on this machine: the few answers of its API that huggingface_hub needs to fetch a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Models by id, and what was asked for.

    Attributes:
        models: Id -> directory.
        gated: Ids that need the token.
        token: The token with access to everything.
        broken: Ids that are answered with an error of the server.
        requests: Paths of all requests, in order.
    """

    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    token: str = "hf_right"
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    def fetched(self) -> list[str]:
        """Names of the files whose contents were sent."""
        paths = (r.partition(" ") for r in self.requests)
        return sorted(
            p.split("/resolve/")[1].partition("/")[2]
            for m, _, p in paths
            if m == "GET" and "/resolve/" in p
        )


@contextmanager
def fake_hub(models: dict[str, Path]) -> Iterator[FakeHub]:
    """Serve directories as models, at revision `main`, tag `v1` and their commit."""
    hub = FakeHub(models)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            path = unquote(self.path.partition("?")[0]).strip("/")
            path = path.removeprefix("api/models/")
            model = "/".join(path.split("/")[:2])
            rest = path.split("/")[2:]
            if model not in hub.models:
                # The hub does not tell strangers whether a model exists.
                return self._error(401, "RepoNotFound", "Repository not found")
            if model in hub.broken:
                return self._error(503, "", "Service unavailable")
            if model in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._error(403, "GatedRepo", "Access is restricted")
            revision = rest[1] if len(rest) > 1 else "main"
            if revision not in ("main", "v1", COMMIT):
                return self._error(404, "RevisionNotFound", "Invalid rev id")
            directory = hub.models[model]
            if not rest or rest[0] == "revision":
                names = sorted(
                    p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()
                )
                document = {
                    "id": model,
                    "sha": COMMIT,
                    "siblings": [{"rfilename": n} for n in names],
                }
                return self._send(json.dumps(document).encode(), body, {})
            file = directory.joinpath(*rest[2:])
            if rest[0] != "resolve" or not file.is_file():
                return self._error(404, "EntryNotFound", "Entry not found")
            raw = file.read_bytes()
            etag = hashlib.sha1(raw).hexdigest()
            self._send(raw, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

        def _send(self, raw: bytes, body: bool, headers: dict[str, str]) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(raw))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(raw)

        def _error(self, status: int, code: str, message: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

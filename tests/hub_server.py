"""A server with the few endpoints of the Hugging Face Hub that a download needs, in a thread of the
test's own process."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass
class HubRepository:
    """`gate`: the status for those without the token `right`, None: open for all. Each revision has
    files of its own."""

    revisions: dict[str, dict[str, bytes]]
    gate: int | None = None

    def commit(self, revision: str) -> str | None:
        """The id of the revision's state, or of itself."""
        commits = {self.digest(files): name for name, files in self.revisions.items()}
        if COMMIT.fullmatch(revision):
            return revision if revision in commits else None
        return self.digest(self.revisions[revision]) if revision in self.revisions else None

    def files(self, commit: str) -> dict[str, bytes]:
        return next(files for files in self.revisions.values() if self.digest(files) == commit)

    @staticmethod
    def digest(files: dict[str, bytes]) -> str:
        state = {path: hashlib.sha1(content).hexdigest() for path, content in files.items()}
        return hashlib.sha1(json.dumps(state, sort_keys=True).encode()).hexdigest()


@dataclass
class HubServer:
    """A context manager. `requests`: method, path and range of each; `cut`: paths of which the next
    answer ends in the middle, with the event to wait for before it ends (None: at once); `held`:
    kinds of requests of which the next is not answered before the event."""

    repositories: dict[str, HubRepository]
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    cut: dict[str, threading.Event | None] = field(default_factory=dict)
    held: dict[str, threading.Event] = field(default_factory=dict)
    half_sent: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> HubServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fetched(self) -> list[str]:
        """The files that were sent, and nothing twice."""
        sent = [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET"]
        return sorted({name for name in sent if "." in name})

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        path = to.path.partition("?")[0]
        self.requests.append((to.command, path, to.headers.get("Range")))
        match = re.fullmatch(
            r"/(?:api/models/)?(\w[\w.-]*/\w[\w.-]*)/(revision|tree|resolve)/([^/]+)/?(.*)", path
        ) or re.fullmatch(r"/(?:api/models/)(\w[\w.-]*/\w[\w.-]*)()()()", path)
        repository = match and self.repositories.get(match[1])
        if not match or not repository:
            # for a client without a token the Hub tells a missing and a private one apart no more
            self._refuse(
                to, 401 if to.headers.get("Authorization") is None else 404, "RepoNotFound"
            )
            return
        _, kind, revision, name = match.groups()
        if kind in self.held:
            self.held.pop(kind).wait()
        commit = repository.commit(revision or "main")
        if commit is None:
            self._refuse(to, 404, "RevisionNotFound")
            return
        files = repository.files(commit)
        right = to.headers.get("Authorization") == "Bearer right"
        if kind == "resolve" and repository.gate is not None and not right:
            self._refuse(to, repository.gate, "GatedRepo")
        elif kind == "resolve" and name not in files:
            self._refuse(to, 404, "EntryNotFound")
        elif kind == "resolve":
            self._send_file(to, commit, name, files[name])
        elif kind == "tree":
            entries = [
                {
                    "type": "file",
                    "path": path,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
                for path, content in files.items()
            ]
            self._send(to, json.dumps(entries).encode())
        else:
            about = {"id": match[1], "sha": commit, "siblings": [{"rfilename": p} for p in files]}
            self._send(to, json.dumps(about).encode())

    def _send_file(
        self, to: BaseHTTPRequestHandler, commit: str, name: str, content: bytes
    ) -> None:
        first = int((to.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        cut = to.command == "GET" and name in self.cut
        if not cut:
            self._send(to, content[first:], headers, 206 if first else 200)
            return
        event = self.cut.pop(name)
        self._head(to, 200, len(content), headers)
        to.wfile.write(content[: len(content) // 2])
        to.wfile.flush()
        self.half_sent.set()
        if event is not None:
            event.wait(60)
        to.close_connection = True

    def _refuse(self, to: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self._send(to, b"{}", {"X-Error-Code": code}, status)

    def _send(
        self,
        to: BaseHTTPRequestHandler,
        content: bytes,
        headers: dict[str, str] | None = None,
        status: int = 200,
    ) -> None:
        self._head(to, status, len(content), headers or {})
        if to.command == "GET":
            to.wfile.write(content)

    @staticmethod
    def _head(
        to: BaseHTTPRequestHandler, status: int, length: int, headers: dict[str, str]
    ) -> None:
        to.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            to.send_header(name, value)
        to.end_headers()

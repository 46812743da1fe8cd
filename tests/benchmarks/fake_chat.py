"""A chat completions endpoint with known delays, whose replies are known too."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from tests.scripts.fake_server import FakeServer, Handler

PROMPT_TOKENS = 10  # a message


class ChatServer(FakeServer):
    """A context manager. Event n of a reply is the text "n ", the first after `first_s`, each next
    after `gap_s`.

    per_event  tokens of an event
    fail       the failure of all requests: a status, "error" (sent in an event), or "short" (a
               reply has half of its tokens)
    cached     cached tokens that `usage` tells; None: it does not tell
    answered   requests behind so many are held without an answer
    begun      a held request gets its first event
    taken      events that the client has taken so far, of one reply at a time. A delay then begins
               when the client has taken the event before it; None: when that is sent
    """

    request_queue_size = 128

    def __init__(
        self,
        first_s=0.0,
        gap_s=0.0,
        *,
        per_event=1,
        fail=None,
        cached=3,
        answered=None,
        begun=False,
    ):
        super().__init__(ChatHandler)
        self.first_s = first_s
        self.gap_s = gap_s
        self.per_event = per_event
        self.fail = fail
        self.cached = cached
        self.answered = answered
        self.begun = begun
        self.taken: Callable[[], int] | None = None
        self.sent = 0
        self.lock = threading.Lock()

    def handle_error(self, *_):
        """Clients hang up at a level's end."""


class ChatHandler(Handler):
    server: ChatServer

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            held = server.answered is not None and len(server.bodies) > server.answered
        if held and not server.begun:
            server.stopped.wait(60)
            return
        if isinstance(server.fail, int):
            self._answer({"error": {"message": "no"}}, server.fail)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if server.fail == "error":
            self._write({"error": {"message": "the books disagree"}})
            return
        self._event(delta={"role": "assistant", "content": ""})
        if held:
            self._event(delta={"content": "0 "})
            server.stopped.wait(60)
            return
        tokens = body["max_tokens"] // (2 if server.fail == "short" else 1)
        for index in range(tokens // server.per_event):
            while index and server.taken is not None and server.taken() < server.sent:
                if server.stopped.wait(0.001):
                    return
            time.sleep(server.gap_s if index else server.first_s)
            server.sent += 1
            self._event(delta={"content": f"{index} "})
        usage = {
            "prompt_tokens": PROMPT_TOKENS * len(body["messages"]),
            "completion_tokens": tokens,
        }
        if server.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": server.cached}
        self._write({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _write(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

"""A completions endpoint with known delays, so the client's figures are known too."""

from __future__ import annotations

import json
import threading
import time

from tests.scripts.fake_server import FakeServer, Handler

SOURCES = ("gpu", "host", "disk", "recomputed", "new")


class CompletionsServer(FakeServer):
    """A context manager. A reply is the ids 900, 901, ...: the first after `first_s`, each next
    after `gap_s`.

    fail   the failure, from request `fail_after` on: a status, "drop" (hangs up after two tokens),
           "error" (sent in an event), "silent" (no answer), "short" (a token too few)
    ids    False: like a server that does not know `return_token_ids`
    """

    request_queue_size = 128

    def __init__(self, first_s=0.0, gap_s=0.0, *, fail=None, fail_after=1, ids=True, port=0):
        super().__init__(CompletionsHandler, port)
        self.first_s = first_s
        self.gap_s = gap_s
        self.fail = fail
        self.fail_after = fail_after
        self.ids = ids
        self.prompt_tokens = 0
        self._lock = threading.Lock()

    def handle_error(self, *_):
        """Clients hang up at a run's end."""

    def take(self, body):
        """The failure of this request, or None."""
        with self._lock:
            self.bodies.append(body)
            self.prompt_tokens += len(body["prompt"])
            return self.fail if len(self.bodies) > self.fail_after else None


class CompletionsHandler(Handler):
    server: CompletionsServer

    def do_GET(self):
        if self.path == "/metrics":
            counts = dict.fromkeys(SOURCES, 0) | {"new": self.server.prompt_tokens}
            lines = [
                f'pensieve:prompt_tokens_total{{source="{name}"}} {count}.0'
                for name, count in counts.items()
            ]
            self._send(
                200, "\n".join(["# HELP x", *lines, "pensieve:gpu_seconds_total 1.5", ""]).encode()
            )
        else:
            self._answer({"data": [{"id": "fake", "max_model_len": 500}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fail = self.server.take(body)
        if isinstance(fail, int):
            self._answer({"error": {"message": "no"}}, fail)
            return
        if fail == "silent":
            self.server.stopped.wait(60)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if fail == "error":
            self._write({"error": {"message": "the books disagree"}})
            return
        wanted = body["max_tokens"] - (fail == "short")
        for index in range(wanted):
            time.sleep(self.server.gap_s if index else self.server.first_s)
            if fail == "drop" and index == 2:
                return  # without usage and [DONE]: HTTP/1.0 ends a body by closing the connection
            choice = {"index": 0, "text": "é"} | (
                {"token_ids": [900 + index]} if self.server.ids else {}
            )
            self._write({"choices": [choice], "usage": None})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": wanted}
        self._write(
            {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 3}}}
        )
        self.wfile.write(b"data: [DONE]\n\n")

    def _write(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

"""A server for the terminal chat: it keeps conversations as lists of messages and repeats the
user's text."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

ENDLESS = {
    "wait": {"content": "."},
    "think": {"content": None, "reasoning_content": "."},
    "call": {"tool_calls": [{"index": 0, "function": {"arguments": "."}}]},
    "late": {"role": "assistant", "content": ""},
    "never": {"role": "assistant", "content": ""},
}
NOTHING_TO_STORE = "never"


class FakeServer(ThreadingHTTPServer):
    """A context manager. `conversations`: id -> the user's messages, by creation. `bodies` has the
    bodies of all requests but those that create conversations.

    The messages of `ENDLESS` get an endless answer: `stopped` is set when the client hangs up. The
    turn is stored then, except that of `NOTHING_TO_STORE`, and is in flight for one more request.
    """

    daemon_threads = True

    def __init__(self, handler=None, port=0):
        super().__init__(("127.0.0.1", port), handler or Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.conversations = {}
        self.titles = {}
        self.bodies = []
        self.keys = []
        self.in_flight = set()
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        address = urlsplit(self.path)
        if address.path == "/v1/models":
            self._answer({"data": [{"id": "fake"}]})
        elif address.path == "/metrics":
            self._send(
                200,
                b'# HELP x\npensieve:num_requests_running 1.0\npensieve:kv_slots{tier="gpu"} '
                b"7.0\nother 1\n",
            )
        elif address.path == "/health":
            self._answer({"tier_names": {"gpu": "device", "host": "host", "disk": "disk"}})
        elif address.path != "/v1/conversations":
            name = unquote(address.path.split("/")[3])
            exists = name in self.server.conversations
            messages = [
                {"role": role, "content": text}
                for text in self.server.conversations.get(name, [])
                for role in ("user", "assistant")
            ]
            about = {"id": name, "in_flight": name in self.server.in_flight, "messages": messages}
            if self.server.stopped.is_set():
                self.server.in_flight.discard(name)
            self._answer(
                about if exists else {"error": {"message": "unknown"}}, 200 if exists else 404
            )
        else:
            query = parse_qs(address.query)
            ids = list(self.server.conversations)
            first = ids.index(query["after"][0]) + 1 if "after" in query else 0
            page = ids[first : first + 2]  # the fake's pages are short
            self._answer(
                {
                    "data": [
                        {"id": name, "tokens": 7, "title": self.server.titles.get(name)}
                        for name in page
                    ],
                    "has_more": first + 2 < len(ids),
                }
            )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/conversations":
            if body["id"] in self.server.conversations:
                self._answer({"error": {"message": "there is one already"}}, 409)
                return
            self.server.conversations[body["id"]] = []
            self._answer({"id": body["id"]})
            return
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["Authorization"])
        if self.path.endswith("/fork"):
            source = unquote(self.path.split("/")[3])
            self.server.conversations[body["id"]] = self.server.conversations[source][:]
            self._answer({"id": body["id"]})
        else:
            self._reply(body)

    def do_DELETE(self):
        name = unquote(self.path.split("/")[3])
        if name not in self.server.conversations:
            self._answer({"error": {"message": f"there is no conversation {name!r}"}}, 404)
        else:
            del self.server.conversations[name]
            self._answer({"id": name, "deleted": True})

    def _reply(self, body):
        text = body["messages"][-1]["content"]
        if text == "no key":
            self._answer({"error": {"message": "this server needs a valid API key"}}, 401)
            return
        if text == "too much":
            self._answer({"error": {"message": "the queue is full"}}, 429)
            return
        if (
            body.get("history") == "server"
            and body["conversation"] not in self.server.conversations
        ):
            self._answer({"error": {"message": "there is no such conversation"}}, 404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if text in ENDLESS:
            self.server.in_flight.add(body["conversation"])
            try:
                while True:
                    self._event(delta=ENDLESS[text])
                    self.server.stopped.wait(0.01)
            except OSError:
                if body.get("on_disconnect") == "store" and text != NOTHING_TO_STORE:
                    self.server.conversations.setdefault(body["conversation"], []).append(text)
                self.server.stopped.set()
            return
        if text == "break":
            self.wfile.write(
                b'data: {"error": {"message": "the books disagree"}}\n\ndata: [DONE]\n\n'
            )
            return
        history = self.server.conversations.setdefault(body["conversation"], [])
        history.append(text)
        self._event(delta={"role": "assistant", "content": ""})
        for word in f"you said {text}".split(" "):
            self._event(delta={"content": word + " "})
        sources = {
            "cached_tokens": 192,
            "gpu": 128,
            "host": 64,
            "disk": 0,
            "recomputed": 5,
            "new": 17,
        }
        usage = {
            "prompt_tokens": 214,
            "completion_tokens": len(text),
            "prompt_tokens_details": sources,
        }
        self.wfile.write(
            b"data: "
            + json.dumps({"choices": [], "usage": usage}).encode()
            + b"\n\ndata: [DONE]\n\n"
        )

    def _event(self, delta):
        event = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _answer(self, value, status=200):
        self._send(status, json.dumps(value).encode())

    def _send(self, status, content):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

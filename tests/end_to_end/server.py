"""A real server in a process of its own: `pensieve serve`, on a free port.

With the environment variable HTTP_PROCESSES it has so many (`--api-server-count`), so each test
can run with several: `HTTP_PROCESSES=4 python -m pytest tests/end_to_end/test_ui.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque

import httpx

# Used for the requests of all threads: a new client reads the machine's certificates, which takes
# 25 ms. Connections are not kept, so no request uses one that its server is about to close.
HTTP = httpx.Client(
    timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)


class Server:
    """Use as a context manager. `url` is its address; `log` its last lines. `engine`, `state_dir`
    None: not said."""

    COMMAND = (sys.executable, "-m", "pensieve.scripts.pensieve", "serve")

    def __init__(
        self,
        state_dir,
        *options,
        engine="demo",
        start_seconds=300,
        command=COMMAND,
        environment=None,
    ):
        words = [*command, "--port", 0, *options]
        if (count := os.environ.get("HTTP_PROCESSES")) and "--api-server-count" not in options:
            words += ["--api-server-count", count]
        for option, value in (("--engine", engine), ("--state-dir", state_dir)):
            words += [option, value] if value is not None else []
        self.process = subprocess.Popen(
            [str(word) for word in words], stderr=subprocess.PIPE, text=True, env=environment
        )
        # ranks that fail write their tracebacks and stacks, a hundred lines and more
        self._lines = deque(maxlen=500)
        self._address = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._start_seconds = start_seconds

    def _read(self):
        for line in self.process.stderr:
            self._lines.append(line.rstrip())
            if address := re.search(r"serving .* on (http://[^\s\"]+)", line):
                self.url = address[1]
                self._address.set()
        self._address.set()

    @property
    def log(self):
        """A copy: more may come at any time."""
        return list(self._lines)

    def __enter__(self):
        self._address.wait(self._start_seconds)
        until = time.monotonic() + self._start_seconds
        while time.monotonic() < until and self.process.poll() is None and self.url:
            try:
                if HTTP.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.05)
        self.process.kill()  # `__exit__` is not called after an error here
        self.process.wait()
        raise RuntimeError("the server did not start:\n" + "\n".join(self.log))

    def stop(self, number=signal.SIGTERM, seconds=120):
        """Sends the signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.stop()
        self._reader.join(60)

    def post(self, path, seconds=120, **body):
        return HTTP.post(f"{self.url}{path}", json={"model": "demo", **body}, timeout=seconds)

    def metric(self, name):
        """The value of one sample of /metrics, named with its labels."""
        return self.metrics(name)[0]

    def metrics(self, *names):
        """The values of several metrics at the same time."""
        lines = HTTP.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return [float(values[name]) for name in names]


def wait_for(condition, seconds=300):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never became true"
        time.sleep(0.05)


def gap_of(token):
    """Between the logprobs of the two likeliest tokens in its place."""
    best, second = token["top_logprobs"]
    return best["logprob"] - second["logprob"]


def smallest_gap(tokens, reply):
    """Of the tokens up to the first one that differs from the reply."""
    text = b""
    gaps = []
    for token in tokens:
        gaps.append(gap_of(token))
        text += bytes(token["bytes"] or b"")
        if not reply.encode().startswith(text):
            break
    return min(gaps)


class Hog:
    """A context manager: while it is open a request holds a seat. Its reply takes many seconds on
    any machine."""

    def __init__(self, server, max_tokens):
        body = dict(
            model="demo", prompt=[40] * 5, max_tokens=max_tokens, ignore_eos=True, stream=True
        )
        self._stream = HTTP.stream("POST", f"{server.url}/v1/completions", json=body)

    def __enter__(self):
        # kept: without it the response would be closed
        self._lines = self._stream.__enter__().iter_lines()
        next(self._lines)

    def __exit__(self, *_):
        self._stream.__exit__(None, None, None)

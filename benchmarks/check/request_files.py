"""The files with a function that runs between a chat's arrival at the socket and the first call of
the attention kernel.

A server of the demo model runs in this process: the loop and a client have threads. Python's
profiling hook records the file of each function that is called meanwhile, in all threads, so other
work such as timers and counters counts too.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from types import FrameType

from pensieve.runtime.http.listener import listen
from pensieve.runtime.http.process import serve_http
from pensieve.runtime.launch.assemble import assemble
from pensieve.runtime.launch.http_options import http_settings
from pensieve.runtime.launch.options import parse_options
from pensieve.runtime.launch.resolve import resolved
from pensieve.runtime.launch.serving import make_service
from pensieve.scripts.chat import Server

QUESTION = {"messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 1}
KERNEL = "multi_token_attention"
QUIET_SECONDS = 0.5  # for the start to be over


def files_of_a_request() -> set[str]:
    """Paths of source files. Needs the main thread, which is the HTTP process's."""
    seen: set[str] = set()
    watching = threading.Event()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and watching.is_set():
            seen.add(frame.f_code.co_filename)
            if frame.f_code.co_name == KERNEL:
                watching.clear()

    with tempfile.TemporaryDirectory() as state:
        settings = resolved(
            parse_options(["--engine", "demo", "--state-dir", state, "--log-level", "error"])
        )
        assembled = assemble(settings)
        loops_end, https_end = multiprocessing.Pipe()
        service = make_service(assembled, loops_end)
        listener = listen("127.0.0.1", 0)

        def ask() -> None:
            server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
            body = {"model": server.ask("GET", "/v1/models")["data"][0]["id"], **QUESTION}
            time.sleep(QUIET_SECONDS)
            watching.set()
            server.ask("POST", "/v1/chat/completions", body)
            service.drain(0.0)

        def serve() -> None:
            service.run(assembled.ready)
            loops_end.close()

        threading.setprofile(watch)
        sys.setprofile(watch)
        for work in (serve, ask):
            threading.Thread(target=work).start()
        serve_http(https_end, listener, http_settings(settings))
        sys.setprofile(None)
    return {os.path.realpath(path) for path in seen}

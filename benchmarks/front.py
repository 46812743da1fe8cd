"""What does a token cost the HTTP process, from the loop's message to the socket?

There is no model. This process stands for the loop: it sends a text's tokens as the results of
steps. The HTTP process of `pensieve serve` writes them to streams of chat completions, and a client
drains the sockets. CPU seconds are those of the HTTP process and its workers from the second token
of all streams to their end; `main` is the HTTP process alone.

With `--step-ms 0` steps come as fast as the pipe takes them, so tokens wait in the HTTP process.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import selectors
import socket
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.runtime.http.listener import listen
from pensieve.runtime.http.process import serve_http
from pensieve.runtime.http.settings import HTTPSettings
from pensieve.runtime.http.workers.worker import FIRST_ID_BITS
from pensieve.runtime.messages import Ready, StepMessage, Submit
from pensieve.runtime.system import descendants
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.types import Applied, FinishReason, RequestId, RowResult, Usage

TOKENIZER = Path("builder/demo_models/llama")
TEXT = Path("README.md")
EVENT_END = b"\n\n"
OTHER_EVENTS = 2  # of a stream: its opening and its end
APART = 97  # tokens between the places in the text at which two streams begin
SHOWN = 40  # functions of a profile


class CPUSeconds(NamedTuple):
    user: float = 0.0
    kernel: float = 0.0
    main: float = 0.0

    @classmethod
    def now(cls, process: int) -> CPUSeconds:
        """Of a process and its workers; `main`: of the process alone."""
        ticks = os.sysconf("SC_CLK_TCK")
        user, kernel, main = 0, 0, 0
        for one in (process, *descendants(process)):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            user += int(fields[11])
            kernel += int(fields[12])
            if one == process:
                main = user + kernel
        return cls(user / ticks, kernel / ticks, main / ticks)


def profiled(file: str, *args: Any) -> None:
    """The HTTP process with a profile of its main thread."""
    profile = cProfile.Profile()
    profile.runcall(serve_http, *args)
    profile.dump_stats(file)


def place_of(request: RequestId) -> int:
    """The place in the text at which the request's tokens begin."""
    return request % (1 << FIRST_ID_BITS) * APART


def drain(port: int, streams: int, body: bytes, results: Connection) -> None:
    """The client's process: opens the streams and reads them to their end. Sends the number of
    events and bytes."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json\r\nconnection: close\r\n\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + body)
        selector.register(connection, selectors.EVENT_READ)
    events = 0
    size = 0
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            if not data:
                selector.unregister(key.fileobj)
            events += data.count(EVENT_END)
            size += len(data)
    results.send((events, size))


def send_steps(
    loop: Connection, requests: Sequence[RequestId], text: Sequence[int], steps: int, step_s: float
) -> None:
    """Sends the results of all steps behind the first one, in which the streams end."""
    began = time.perf_counter()
    column = array("q", requests)
    for step in range(1, steps):
        tokens = [text[place_of(own) + step] for own in requests]
        if step < steps - 1:
            applied = Applied(column, array("i", tokens))
        else:
            rows = zip(requests, tokens, strict=True)
            applied = Applied(
                rows=tuple(RowResult(own, (token,), FinishReason.LENGTH) for own, token in rows)
            )
        loop.send(StepMessage(applied))
        time.sleep(max(0.0, began + step * step_s - time.perf_counter()))


def measure(options: argparse.Namespace) -> dict[str, float]:
    streams = options.streams
    steps = options.tokens
    ids = Tokenizer.load(options.tokenizer).encode_rendered(TEXT.read_text("utf-8"))
    text = list(islice(cycle(ids), (streams + 1) * APART + steps))
    spawn = multiprocessing.get_context("spawn")
    loop, connection = multiprocessing.Pipe()
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    settings = HTTPSettings(log_level="warning", api_server_count=options.api_server_count)
    args: tuple[Any, ...] = (connection, listener, settings)
    if options.profile is None:
        server = spawn.Process(target=serve_http, args=args)
    else:
        server = spawn.Process(target=profiled, args=(options.profile, *args))
    server.start()
    connection.close()
    listener.close()
    loop.send(Ready("m", 8192, max(text) + 1, (0,), str(options.tokenizer), 32, 100))
    message = {"role": "user", "content": "Hello"}
    body = {"model": "m", "messages": [message], "stream": True, "max_tokens": steps}
    report, results = multiprocessing.Pipe(duplex=False)
    client = spawn.Process(target=drain, args=(port, streams, json.dumps(body).encode(), results))
    client.start()
    results.close()  # so that the end of the client's process is the end of the pipe
    requests: list[RequestId] = []
    while len(requests) < streams:
        requests += [sent.request.id for sent in loop.recv() if isinstance(sent, Submit)]
    first = [RowResult(own, (text[place_of(own)],), usage=Usage(new=1)) for own in requests]
    loop.send(StepMessage(Applied(rows=tuple(first))))
    time.sleep(0.5)  # the streams have begun
    began = time.perf_counter()
    assert server.pid is not None
    before = CPUSeconds.now(server.pid)
    send_steps(loop, requests, text, steps, options.step_ms / 1e3)
    events, size = report.recv()
    seconds = time.perf_counter() - began
    after = CPUSeconds.now(server.pid)
    loop.close()
    client.join()
    server.join()
    tokens = streams * (steps - 1)
    own = Counter(number >> FIRST_ID_BITS for number in requests)
    return {
        "user us/token": (after.user - before.user) / tokens * 1e6,
        "kernel us/token": (after.kernel - before.kernel) / tokens * 1e6,
        "main us/token": (after.main - before.main) / tokens * 1e6,
        "streams of the busiest": max(own.values()),
        "tokens/s": tokens / seconds,
        "tokens/event": streams * steps / (events - OTHER_EVENTS * streams),
        "bytes/token": size / streams / steps,
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.front", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, metavar="DIR")
    parser.add_argument("--streams", type=int, default=256, metavar="N")
    parser.add_argument("--tokens", type=int, default=300, metavar="N", help="of a stream")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="MS")
    parser.add_argument("--api-server-count", type=int, default=1, metavar="N")
    parser.add_argument("--profile", metavar="FILE", help="of the HTTP process's main thread")
    options = parser.parse_args(args)
    print(json.dumps({name: round(value, 2) for name, value in measure(options).items()}))
    if options.profile is not None:
        pstats.Stats(options.profile).sort_stats("tottime").print_stats(SHOWN)


if __name__ == "__main__":
    main()

"""What does a token cost the HTTP process, from the loop's message to the socket?

Three processes: this one stands for the loop and sends recorded text as the results of steps, the
HTTP process of `pensieve serve` writes it to streams of chat completions, and a client drains the
sockets. There is no model. CPU seconds are those of the HTTP process between the first token of all
streams and their end.

With `--step-ms` 0 steps come as fast as the pipe takes them, so tokens wait in the HTTP process.
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
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pensieve.runtime.http.listener import listen
from pensieve.runtime.http.process import serve_http
from pensieve.runtime.http.settings import HTTPSettings
from pensieve.runtime.messages import Ready, StepMessage, Submit
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.types import Applied, FinishReason, RequestId, RowResult, Usage

EVENT_END = b"\n\n"


def cpu_seconds(process: int) -> tuple[float, float]:
    """CPU seconds of another process in user mode and in the kernel."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


def profiled(file: str, *args: Any) -> None:
    """The HTTP process with a profile of its main thread."""
    profile = cProfile.Profile()
    profile.runcall(serve_http, *args)
    profile.dump_stats(file)


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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.load(options.tokenizer)
    text = list(islice(cycle(tokenizer.encode_rendered(options.text.read_text())), 1 << 20))
    here, there = multiprocessing.Pipe()
    listener = listen("127.0.0.1", 0)
    spawn = multiprocessing.get_context("spawn")
    serve = serve_http if options.profile is None else profiled
    file = () if options.profile is None else (options.profile,)
    server = spawn.Process(
        target=serve, args=(*file, there, listener, HTTPSettings(log_level="warning"))
    )
    server.start()
    there.close()
    here.send(Ready("m", 8192, 1 << 17, (0,), str(options.tokenizer), 32, 100))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    body |= {"max_tokens": options.tokens, "ignore_eos": True, **json.loads(options.body)}
    report, results = multiprocessing.Pipe(duplex=False)
    client = spawn.Process(
        target=drain,
        args=(listener.getsockname()[1], options.streams, json.dumps(body).encode(), results),
    )
    client.start()
    requests: list[RequestId] = []
    while len(requests) < options.streams:
        messages = here.recv()
        requests += [m.request.id for m in messages if isinstance(m, Submit)]
    usage = Usage(gpu=1, new=1)
    first = tuple(RowResult(own, (text[own],), usage=usage) for own in requests)
    here.send(StepMessage(Applied(rows=first)))
    time.sleep(0.5)
    began = time.perf_counter()
    before = cpu_seconds(server.pid or 0)
    column = array("q", requests)
    for step in range(1, options.tokens - 1):
        tokens = array("i", [text[own * 97 + step] for own in requests])
        here.send(StepMessage(Applied(column, tokens)))
        late = began + step * options.step_ms / 1e3 - time.perf_counter()
        if late > 0:
            time.sleep(late)
    end = tuple(
        RowResult(own, (text[own * 97 + options.tokens - 1],), FinishReason.LENGTH)
        for own in requests
    )
    here.send(StepMessage(Applied(rows=end)))
    events, size = report.recv()
    seconds = time.perf_counter() - began
    after = cpu_seconds(server.pid or 0)
    user = after[0] - before[0]
    kernel = after[1] - before[1]
    here.close()
    client.join()
    server.join(20)
    server.kill()
    tokens = options.streams * options.tokens
    return {
        "user_us_a_token": user / tokens * 1e6,
        "kernel_us_a_token": kernel / tokens * 1e6,
        "tokens_per_s": tokens / seconds,
        "tokens_an_event": tokens / (events - 2 * options.streams),
        "bytes_a_token": size / tokens,
        "busy": (user + kernel) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--body", default="{}")
    parser.add_argument("--profile")
    options = parser.parse_args()
    print(json.dumps({name: round(value, 3) for name, value in measure(options).items()}))
    if options.profile is not None:
        pstats.Stats(options.profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()

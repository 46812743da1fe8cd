"""Time to first token, turn by turn, of one long conversation: with reuse and without, one server after the other.

python -m pensieve.scripts.bench_turns [--turns 10] [--input-tokens 38] [--output-tokens 205] [-- serve options]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

VOCABULARY = 250


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_turns", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument(
        "--input-tokens", type=int, default=38, help="new tokens a turn (default: ShareGPT, %(default)s)"
    )
    parser.add_argument("--output-tokens", type=int, default=205, help="of a reply (default: ShareGPT, %(default)s)")
    parser.add_argument("--conversations", type=int, default=2, help="one after the other (default %(default)s)")
    parser.add_argument("--engine", default="demo", help="engine directory (default: the demo model)")
    parser.add_argument("serve", nargs="*", help="options of `pensieve serve`, behind --")
    args = parser.parse_args(argv)
    medians = {}
    for name, options in (("reuse", []), ("no reuse", ["--no-reuse"])):
        process, port = start_server([*args.serve, *options], args.engine)
        try:
            runs = [converse(port, number, args) for number in range(args.conversations + 1)][1:]  # one to warm up
        finally:
            process.terminate()
            process.wait()
        medians[name] = [statistics.median(turn) for turn in zip(*runs, strict=True)]
    print(f"{'turn':>4} {'history':>8} {'reuse ms':>10} {'no reuse ms':>12} {'ratio':>6}")
    for turn, (with_reuse, without) in enumerate(zip(*medians.values(), strict=True)):
        history = turn * (args.input_tokens + args.output_tokens)
        ratio = without / with_reuse
        print(f"{turn + 1:4} {history:8} {1e3 * with_reuse:10.1f} {1e3 * without:12.1f} {ratio:6.1f}")
    print(json.dumps({"ttft_s": medians, "last_turn_ratio": medians["no reuse"][-1] / medians["reuse"][-1]}))
    return 0


def start_server(options: Sequence[str], engine: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "pensieve.scripts.pensieve", "serve", "--engine", engine, "--port", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving .* on http://.*:(\d+)", line):
            # A full pipe would stop the server at its next line.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, int(found[1])
    raise RuntimeError("the server did not start")


def converse(port: int, seed: int, args: argparse.Namespace) -> list[float]:
    """Seconds to the first token of each turn."""
    source = random.Random(seed)
    history: list[int] = []
    seconds = []
    for _ in range(args.turns):
        prompt = [*history, *(source.randrange(VOCABULARY) for _ in range(args.input_tokens))]
        first, reply = stream(port, f"bench{seed}", prompt, args.output_tokens)
        seconds.append(first)
        history = [*prompt, *reply]
    return seconds


def stream(
    port: int, conversation: str, prompt: list[int], max_tokens: int, key: str = "none"
) -> tuple[float, list[int]]:
    """One streamed completion: seconds to its first token, and its token ids."""
    body = dict(
        prompt=prompt,
        max_tokens=max_tokens,
        conversation=conversation,
        ignore_eos=True,
        stream=True,
        return_token_ids=True,
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start = time.perf_counter()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    first = 0.0
    reply: list[int] = []
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                if choice["token_ids"] and not reply:
                    first = time.perf_counter() - start
                reply += choice["token_ids"]
    connection.close()
    return first, reply


if __name__ == "__main__":
    sys.exit(main())

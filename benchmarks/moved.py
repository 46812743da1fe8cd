"""benchmarks.moved: a conversation goes on at another server of the same model.

    python -m benchmarks.moved --engine DIR --device cuda --store /dev/shm

Two servers share a directory. The first turn is on one of them. The second turn's time to its
first token is measured on the other one, which fetches the KV; there again with a salt of its own,
so that all is computed; and on the first server, which has kept the KV. Beside it is what the
engine's profile and the store's measured speed predict (run `pensieve profile` first).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pensieve.builder.manifest import Manifest
from pensieve.runtime.measure.profile import PROFILE, Profile
from pensieve.runtime.shared.config import DirectoryOptions
from pensieve.runtime.shared.directory import DirectoryEngine
from pensieve.runtime.shared.trial import try_store
from pensieve.scripts.command import check_least, exit_status

from .loop import table
from .servers import SERVE, MetricsServer, serving, tell_end

WRITTEN = 'pensieve:kv_shared_records_total{direction="write"}'
STORE_BYTES = 2**40
REPLY, NEW, SCORED = (
    16,
    32,
    20,
)  # tokens of the first reply, of the second message; log probabilities
READY_S, WRITE_S = 300.0, 60.0
WAYS = ("fetched", "computed", "kept")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.moved", description=__doc__.partition("\n")[0]
    )
    option = parser.add_argument
    option("--engine", required=True, type=Path, metavar="DIR", help="an engine directory")
    option("--device", default="cpu", choices=("cpu", "cuda"), help="(default %(default)s)")
    option("--store", type=Path, metavar="DIR", help="(default: where temporary files are)")
    option("--tokens", type=int, default=23_000, metavar="N", help="(default %(default)s)")
    option("--repetitions", type=int, default=5, metavar="N", help="(default %(default)s)")
    option("--options", default="", metavar="TEXT", help="more options of both servers")
    return parser


@contextmanager
def servers(args: argparse.Namespace, folder: Path) -> Iterator[list[MetricsServer]]:
    """Two, one after the other: each takes the GPU memory that it needs."""
    store = {
        "engine": "directory",
        "path": str(folder / "kv"),
        "max_bytes": STORE_BYTES,
        "min_tokens": min(2048, args.tokens // 2),
    }
    with ExitStack() as stack:
        urls = []
        for name in ("a", "b"):
            words = [*SERVE, "--engine", args.engine, "--device", args.device]
            words += ["--state-dir", folder / name, "--kv-shared-config", json.dumps(store)]
            words += args.options.split()
            log = folder / f"{name}.log"
            try:
                url = stack.enter_context(serving(words, log, READY_S))
            except TimeoutError as error:
                tell_end(log, error)
                raise
            urls.append(url)
        yield [MetricsServer(url, None) for url in urls]


def turn(
    server: MetricsServer, prompt: Sequence[int], tokens: int, **fields: object
) -> tuple[float, dict[str, Any]]:
    """Seconds, and the answer."""
    body = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": SCORED,
        "return_token_ids": True,
        "return_sources": True,
        **fields,
    }
    began = time.perf_counter()
    answer = server.ask("POST", "/v1/completions", body)
    return time.perf_counter() - began, answer


def wait_for_records(server: MetricsServer, count: float) -> None:
    """TimeoutError if the server does not write so many."""
    until = time.monotonic() + WRITE_S
    while (written := server.metrics().get(WRITTEN, 0.0)) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"{written:.0f} of {count:.0f} records after {WRITE_S:.0f} s")
        time.sleep(0.05)


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Of the log probabilities of the first token, over the tokens that both name."""
    here, there = (answer["choices"][0]["logprobs"]["top_logprobs"][0] for answer in (one, other))
    return max(abs(here[token] - there[token]) for token in here.keys() & there.keys())


def play(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A line for each conversation: milliseconds of each way, tokens fetched, differences."""
    dice = np.random.default_rng(0)
    vocabulary = Manifest.read(args.engine).vocab_size
    lines = []
    with servers(args, folder) as (first, second):
        for server in (first, second):  # what only a first request costs
            turn(server, dice.integers(0, vocabulary, args.tokens // 2).tolist(), 1)
        for number in range(args.repetitions):
            prompt = dice.integers(0, vocabulary, args.tokens).tolist()
            written = first.metrics().get(WRITTEN, 0.0)
            _, reply = turn(first, prompt, REPLY)
            wait_for_records(first, written + args.tokens // 32)
            log = prompt + reply["choices"][0]["token_ids"]
            log += dice.integers(0, vocabulary, NEW).tolist()
            turns = [
                turn(second, log, 1),
                turn(second, log, 1, cache_salt=f"computed-{number}"),
                turn(first, log, 1),
            ]
            fetched, computed, kept = (answer for _, answer in turns)
            sources = fetched["usage"]["prompt_tokens_details"]
            lines.append(
                {f"{way}_ms": 1e3 * seconds for way, (seconds, _) in zip(WAYS, turns, strict=True)}
                | {
                    "fetched_tokens": sources["shared"],
                    "to_kept": largest_difference(fetched, kept),
                    "to_computed": largest_difference(fetched, computed),
                }
            )
    return lines


def predictions(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Milliseconds to fetch and to compute the first turn's KV; empty without a profile."""
    try:
        cost = Profile.read(args.engine / PROFILE).cost
    except FileNotFoundError:
        return {}
    with closing(DirectoryEngine(DirectoryOptions(folder / "trial", STORE_BYTES))) as store:
        trial = try_store(store, cost.chunk_bytes)
    chunks = args.tokens // cost.chunk_tokens
    ends = range(cost.chunk_tokens, args.tokens + 1, cost.chunk_tokens)
    return {
        "fetched_ms": 1e3 * chunks * max(cost.chunk_bytes / trial.read, cost.swap_in()),
        "computed_ms": 1e3 * sum(map(cost.recompute, ends)),
        "store_gb_per_s": trial.read / 1e9,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("benchmarks.moved", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Returns 1 if no conversation was fetched. Raises SettingError."""
    check_least(args, tokens=256, repetitions=1)
    with TemporaryDirectory(dir=args.store) as name:
        predicted = predictions(args, Path(name))
        lines = play(args, Path(name))
    median = {key: statistics.median(line[key] for line in lines) for key in lines[0]}
    print(table([*lines, median, predicted]))
    report = {"tokens": args.tokens, "conversations": lines, "median": median}
    print(json.dumps({"bench": "moved", **report, "predicted": predicted}))
    return 0 if any(line["fetched_tokens"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())

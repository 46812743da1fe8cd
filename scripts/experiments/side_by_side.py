"""Several servers at once, a GPU each, with settings and loads of their own: what takes hours otherwise takes minutes.

    python scripts/experiments/side_by_side.py --servers FILE --output DIR

FILE is TOML; servers of one GPU come one after the other, in their order:

    [[server]]
    name = "lru"
    gpu = 0
    serve = "--engine DIR --device cuda --gpu-kv-bytes 38147MiB --host-kv-bytes 64GiB --eviction lru"
    bench = ["--conversations --vocabulary 32000 --rate 4,5 --ramp-s 60 --warm-up-s 90 --measure-s 35"]
    pythonpath = "DIR"  # may be left out: another version of the source

`bench` holds loads of bench_serving, one after the other. Ends in one table; what `--seconds` leaves no time for is
said and left out. Servers share the host's cores, memory and links: compare what ran side by side.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from pensieve.scripts.serving_runs import run, serving, tell_end

START_SECONDS = 240.0  # longest start of a server


class Server(NamedTuple):
    """An entry of the file."""

    name: str
    gpu: int
    serve: str
    bench: list[str]
    pythonpath: str = ""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="side_by_side", description=__doc__.partition("\n")[0])
    made.add_argument("--servers", type=Path, required=True, metavar="FILE", help="see above")
    made.add_argument("--output", type=Path, required=True, metavar="DIR", help="logs and a JSON line a rate")
    made.add_argument("--seconds", type=float, default=570.0, metavar="S", help="for all of it (default %(default)s)")
    return made


def main() -> int:
    args = parser().parse_args()
    deadline = time.monotonic() + args.seconds
    args.output.mkdir(parents=True, exist_ok=True)
    servers = [Server(**entry) for entry in tomllib.loads(args.servers.read_text())["server"]]
    by_gpu: defaultdict[int, list[Server]] = defaultdict(list)
    for server in servers:
        by_gpu[server.gpu].append(server)
    threads = [threading.Thread(target=measure, args=(queue, args.output, deadline)) for queue in by_gpu.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = [report(args.output, server, load) for server in servers for load in range(len(server.bench))]
    run("bench_serving", "--compare", *(file for file in files if file.exists() and file.read_text()))
    return 0


def report(output: Path, server: Server, load: int) -> Path:
    """Of the server's `load`-th load."""
    return output / f"{server.name}{f'-{load + 1}' if load else ''}.json"


def measure(servers: list[Server], output: Path, deadline: float) -> None:
    """One GPU's thread."""
    for server in servers:
        log = output / f"{server.name}.log"
        words = [*shlex.split(server.serve), "--state-dir", output / f"state-{server.name}", "--shutdown-timeout", 1]
        variables = {"CUDA_VISIBLE_DEVICES": str(server.gpu)}
        if server.pythonpath:
            variables["PYTHONPATH"] = server.pythonpath
        try:
            with serving(words, log, min(deadline - time.monotonic(), START_SECONDS), variables) as url:
                for load, bench in enumerate(server.bench):
                    options = [*shlex.split(bench), "--url", url, "--json", report(output, server, load)]
                    try:
                        run("bench_serving", *options, seconds=deadline - time.monotonic())
                    except subprocess.SubprocessError as error:
                        tell_end(log, error)
        except TimeoutError as error:
            tell_end(log, error)


if __name__ == "__main__":
    sys.exit(main())

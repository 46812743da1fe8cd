"""Can one tenant's timing tell what another has asked? Time to first token of key B's prompts, asked by key A or not.

python -m pensieve.scripts.bench_tenants [--prompts 60]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence

from .bench_turns import VOCABULARY, start_server, stream

PROMPT_TOKENS = 320


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_tenants", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=60, help="of each kind (default %(default)s)")
    args = parser.parse_args(argv)
    source = random.Random(0)
    prompts = [[source.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(2 * args.prompts)]
    asked_by_a = prompts[: args.prompts]
    process, port = start_server(["--api-key", "a", "--api-key", "b"], "demo")
    seconds: dict[str, list[float]] = {"asked by A before": [], "never asked": [], "asked by B before": []}
    try:
        for prompt in asked_by_a:
            stream(port, "same name", prompt, 1, key="a")
        source.shuffle(prompts)
        for prompt in prompts:
            kind = "asked by A before" if prompt in asked_by_a else "never asked"
            seconds[kind].append(stream(port, "same name", prompt, 1, key="b")[0])
        for prompt in prompts:
            seconds["asked by B before"].append(stream(port, "same name", prompt, 1, key="b")[0])
    finally:
        process.terminate()
        process.wait()
    quartiles = {kind: statistics.quantiles(values, n=4) for kind, values in seconds.items()}
    for kind, (low, median, high) in quartiles.items():
        print(f"{kind:18} median {1e3 * median:6.1f} ms, quartiles {1e3 * low:.1f} to {1e3 * high:.1f} ms")
    print(json.dumps({"ttft_quartiles_s": quartiles}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

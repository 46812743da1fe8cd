"""cpu: how fast this engine generates on a CPU beside transformers' `generate`.

    python -m benchmarks.cpu --checkpoint DIR

Both get prompts of random ids, the same number of threads and one process. They take turns, and
each figure is the best of its rounds. transformers has one stream, because it answers one request
at a time; this engine has 1, 4 and 16. A prompt's time is that of its first token.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pensieve import LLM, SamplingParams

STREAMS = (1, 4, 16)
CONTEXT = 200  # tokens of a prompt of the streams
LONG_PROMPT = 512
GOALS = {
    "float32": {1: 1.0, 4: 3.0, 16: 8.0},
    "bfloat16": {1: 1.0, 4: 3.0, 16: 10.0},
}


class Case(NamedTuple):
    """Best tokens/s of each number of streams, and seconds to the first token of LONG_PROMPT."""

    transformers: float
    streams: dict[int, float]
    transformers_prompt: float
    prompt: float


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(checkpoint: Path, dtype: str, tokens: int, rounds: int) -> Case:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    dice = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        ids: list[list[int]] = torch.randint(
            3, model.config.vocab_size, (count, length), generator=dice
        ).tolist()
        return ids

    def other(length: int, new: int) -> float:
        ids = torch.tensor(prompts(1, length))
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        return seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))

    with LLM(checkpoint, dtype=dtype, backend="reference", gpu_kv_bytes=2**30) as llm:

        def own(count: int, length: int, new: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            return seconds(lambda: llm.generate(prompts(count, length), params, use_tqdm=False))

        best = dict.fromkeys(STREAMS, 0.0)
        best_other = 0.0
        prompt = prompt_other = float("inf")
        own(1, CONTEXT, 2)
        other(CONTEXT, 2)
        for _ in range(rounds):
            # Generation alone: the time of all tokens less that of the first.
            first = other(CONTEXT, 1)
            best_other = max(best_other, tokens / (other(CONTEXT, tokens + 1) - first))
            for count in STREAMS:
                first = own(count, CONTEXT, 1)
                took = own(count, CONTEXT, tokens + 1) - first
                best[count] = max(best[count], count * tokens / took)
            prompt_other = min(prompt_other, other(LONG_PROMPT, 1))
            prompt = min(prompt, own(1, LONG_PROMPT, 1))
    return Case(best_other, best, prompt_other, prompt)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dtypes", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="generated a stream")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args(argv)
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("OMP_", "OPENBLAS_", "MKL_"))
    }
    print(f"threads {torch.get_num_threads()}, variables {variables or 'none'}\n")
    print("| dtype | streams | tokens/s | transformers, 1 stream | ratio | goal |")
    print("|---|---|---|---|---|---|")
    for dtype in options.dtypes:
        case = measure(options.checkpoint, dtype, options.tokens, options.rounds)
        for count, speed in case.streams.items():
            print(
                f"| {dtype} | {count} | {speed:.1f} | {case.transformers:.1f} "
                f"| {speed / case.transformers:.2f} | {GOALS[dtype][count]:g} |"
            )
        ratio = case.transformers_prompt / case.prompt
        print(
            f"| {dtype} | prompt of {LONG_PROMPT} | {case.prompt:.3f} s "
            f"| {case.transformers_prompt:.3f} s | {ratio:.2f} | 1 |",
            flush=True,
        )


if __name__ == "__main__":
    main()

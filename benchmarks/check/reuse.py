"""check.reuse: a prompt's next tokens are equally likely with KV from any source, on a real engine.

Random prompts run cold, and again when their KV is on the GPU, on HOST, partly recomputed, fully
dropped and recomputed, and with their reply suspended in the middle. Meanwhile other rows generate,
and other histories are copied in and out. Then a loop without KV fetches them from a store in which
another one has written them. The log probabilities of the first token and the top 20 are compared
with the same weights in float32. No way may differ by more than twice the cold one's largest
difference, or by 1e-4 from cold if engine and KV are float32. All ranks of an engine take part, but
for the store; rank 0's device must hold the whole model in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pensieve.builder.manifest import Manifest, weights_file
from pensieve.builder.model import Decoder
from pensieve.builder.parity import whole_weights
from pensieve.builder.random_weights import random_weights
from pensieve.builder.weights import load_weights
from pensieve.plugins.collectives.protocol import TENSOR_PARALLEL, register_group
from pensieve.plugins.kv_forms.forms import Form
from pensieve.runtime.device.protocol import Device, ForwardPass
from pensieve.runtime.engine import Engine, open_engine
from pensieve.runtime.executor import Executor
from pensieve.runtime.launch import assemble
from pensieve.runtime.launch.ranks import take_share
from pensieve.runtime.launch.sizing import host_form
from pensieve.runtime.shared.config import DirectoryOptions, SharedConfig
from pensieve.runtime.shared.store import SharedSettings
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.types import (
    MOST_LOGPROBS,
    InvariantError,
    Sampling,
    SettingError,
    TokenLogprobs,
)
from pensieve.scripts.command import add_kv_cache_dtype, check_least, exit_status

from ..loop import Loop, LoopAnswer, Pools, make_device, random_ids, table
from ..ranks import run_as_ranks

if TYPE_CHECKING:
    from pensieve.runtime.ranks.mpi import Ranks

SOURCES = ("gpu", "host", "shared", "recomputed", "new")
FLOAT32_TOLERANCE = 1e-4


def differences(
    one: TokenLogprobs, token: int, other: TokenLogprobs, other_token: int
) -> list[float]:
    """Differences of the log probabilities of all tokens that both contain."""
    here, there = _by_id(one, token), _by_id(other, other_token)
    return [abs(here[each] - there[each]) for each in here if each in there]


def _by_id(told: TokenLogprobs, token: int) -> dict[int, float]:
    return dict(zip(told.top_ids, told.top_logprobs, strict=True)) | {token: told.logprob}


@dataclass(slots=True)
class Way:
    """Results of one way: tokens by source, differences of log probabilities, replies that differ
    from the cold one.

    `gaps`: between the probabilities of the two tokens at which a reply first differs; infinite if
    one run lacks one of them.
    """

    count: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    to_float32: list[float] = field(default_factory=list)
    to_cold: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, answer: LoopAnswer, exact: LoopAnswer, cold: LoopAnswer) -> None:
        self.count += 1
        for source in SOURCES:
            self.tokens[source] += getattr(answer.usage, source)
        self.to_float32 += differences(
            answer.logprobs[0], answer.tokens[0], exact.logprobs[0], exact.tokens[0]
        )
        pairs = zip(answer.tokens, answer.logprobs, cold.tokens, cold.logprobs, strict=False)
        for token, told, cold_token, cold_told in pairs:
            self.to_cold += differences(told, token, cold_told, cold_token)
            if token != cold_token:
                self.gaps.append(
                    max(_gap(told, token, cold_token), _gap(cold_told, cold_token, token))
                )
                return  # the texts differ from here on

    def summary(self) -> dict[str, float | int]:
        return {
            "count": self.count,
            "to_float32_max": max(self.to_float32),
            "to_float32_mean": float(np.mean(self.to_float32)),
            "to_cold_max": max(self.to_cold),
            "to_cold_mean": float(np.mean(self.to_cold)),
            "differing": len(self.gaps),
            "gap_max": max(self.gaps, default=0.0),
        }


def _gap(told: TokenLogprobs, drawn: int, other: int) -> float:
    seen = _by_id(told, drawn)
    return seen[drawn] - seen[other] if other in seen else float("inf")


def judge(ways: dict[str, Way], float32: bool) -> tuple[float, list[str]]:
    """The tolerance, and the ways that exceed it."""
    tolerance = FLOAT32_TOLERANCE if float32 else 2 * float(np.max(ways["cold"].to_float32))
    failed = []
    for name, way in ways.items():
        errors = [*way.to_float32, *way.gaps, *(way.to_cold if float32 else [])]
        if not np.max(errors) <= tolerance:  # also true for NaN
            failed.append(name)
    return tolerance, failed


WAYS_OF_RANKS = ("cold", "gpu", "host", "partly", "recomputed", "suspended")
WAYS = (*WAYS_OF_RANKS, "fetched")
SCORED = Sampling(logprobs=MOST_LOGPROBS)
ROWS = 8  # rows that generate beside the prompt
SHORT_REPLY = 4
FETCHES = 5  # tries
STORE_BYTES = 2**40
LOAD_S = 2e-5  # assumed cost of loading a chunk; recomputing costs as much at a chosen context


class ReusePools(Pools):
    """`tokens`: the longest prompt's. Prompts run in turn are never found in the tier where they
    were."""

    def __init__(self, tokens: int, size: int):
        self.size = size
        self.tokens = tokens
        self.row_prompt = max(size, tokens // 8)
        self.row_reply = 3 * size
        self.long_reply = 2 * size
        self.longest = tokens + self.long_reply
        self.seats = 2 * ROWS
        self.batch = 1024
        self.prompt = self.chunks(tokens + self.long_reply) + 1
        self.rows = ROWS * (self.chunks(self.row_prompt + self.row_reply) + 1)
        self.gpu = 3 * self.prompt + self.rows
        # these evict all else from the GPU, even the first of themselves
        self.histories = self.gpu // (tokens // size) + 3
        self.host = (self.histories + 3) * self.prompt + self.rows
        self.flood = -(-(self.gpu + self.host) // (tokens // size)) + 1
        # Beside prompt and rows with their first tokens there is room for one short history and its
        # turn. While the prompt is answered each row grows by two chunks, which do not fit: one
        # request must be suspended.
        self.short_history = 4 * size
        begun = ROWS * self.chunks(self.row_prompt + 1)
        self.tight = self.chunks(tokens) + begun + self.chunks(self.short_history) + 4

    def chunks(self, tokens: int) -> int:
        return -(-tokens // self.size)


class Asker(Loop):
    """A loop for prompts one at a time; `tend` is called in each pass to keep other work going."""

    def __init__(
        self,
        device: Device,
        engine: ForwardPass,
        config: SchedulerConfig,
        loads_from: int,
        seed: int,
        make_executor: Callable[[Device, ForwardPass, SchedulerConfig], Executor] = Executor,
    ):
        """Chunks whose context ends below `loads_from` tokens are recomputed rather than loaded."""
        attention = tuple(
            (tokens, LOAD_S * tokens / loads_from) for tokens in (1, config.max_model_len)
        )
        cost = CostProfile(
            config.chunk_tokens, 0.0, attention, 0.0, chunk_bytes=1, link_bytes_per_s=1 / LOAD_S
        )
        super().__init__(device, engine, config, cost, seed, make_executor)
        self.tend: Callable[[], None] = lambda: None  # called once a pass

    def step(self) -> bool:
        self.tend()
        return super().step()

    def ask(self, prompt: array[int], tokens: int) -> LoopAnswer:
        answer = self.begin(prompt, tokens)
        self.run_until(lambda: answer.done)
        return answer

    def begin(self, prompt: array[int], tokens: int) -> LoopAnswer:
        """Runs the prompt with log probabilities. It has the lowest priority: if a row must be
        suspended, it is this one."""
        return self.add(prompt, tokens, SCORED, priority=1)

    def ask_and_be_suspended(self, prompt: array[int], tokens: int) -> LoopAnswer:
        """InvariantError if no row is suspended between the reply's first token and its last."""
        answer = self.begin(prompt, tokens)
        self.run_until(lambda: bool(answer.tokens))
        before = self.scheduler.stats().suspensions
        self.run_until(lambda: answer.done)
        if self.scheduler.stats().suspensions == before:
            raise InvariantError("a reply was to be suspended, and was not")
        return answer

    def end(self) -> None:
        """Finishes all requests. InvariantError if no chunk was copied meanwhile."""
        self.tend = lambda: None
        self.drain()
        self.scheduler.check()
        stats = self.scheduler.stats()
        if not (stats.swapped_in and stats.swapped_out):
            raise InvariantError(f"chunks were to be copied all the time, but {stats}")


class Others:
    """Rows that generate and histories that run in turn, for ever; set as an `Asker`'s `tend`."""

    def __init__(self, asker: Asker, sizes: ReusePools, history: int):
        self._asker = asker
        self._sizes = sizes
        self._histories = [asker.random_ids(history) for _ in range(sizes.histories)]
        self._rows: list[LoopAnswer] = []
        self._turn: LoopAnswer | None = None
        self.turns = 0
        self.renew = True
        """True if rows that have ended are replaced."""

    def __call__(self) -> None:
        asker, sizes = self._asker, self._sizes
        self._rows = [row for row in self._rows if not row.done]
        while self.renew and len(self._rows) < ROWS:
            self._rows.append(asker.add(asker.random_ids(sizes.row_prompt), sizes.row_reply))
        if self._turn is None or self._turn.done:
            history = self._histories[self.turns % len(self._histories)]
            # New tokens fill a chunk that is copied out.
            self._turn = asker.add(history + asker.random_ids(sizes.size), 1)
            self.turns += 1

    def turn(self, count: int) -> None:
        end = self.turns + count
        self._asker.run_until(lambda: self.turns >= end)

    def all_rows(self) -> None:
        """Runs until `ROWS` new rows generate."""
        self.renew = False
        self._asker.run_until(lambda: not self._rows)
        self.renew = True
        self._asker.run_until(
            lambda: len(self._rows) == ROWS and all(row.tokens for row in self._rows)
        )
        self.renew = False


# The ways.


Told = Callable[[str, int, LoopAnswer], None]
"""Takes each answer: its way, its prompt's number."""


def check_reuse(way: str, answer: LoopAnswer, prompt: array[int], size: int) -> None:
    """InvariantError if the prompt's KV has other sources than in this way."""
    usage = answer.usage
    full = len(prompt) // size * size
    assert usage is not None  # with the first token
    right = {
        "cold": usage.new == len(prompt),
        "gpu": usage.gpu == full,
        "host": usage.host == full,
        "partly": usage.host > 0 and usage.recomputed > 0 and usage.host + usage.recomputed == full,
        "recomputed": usage.recomputed == full,
        "suspended": usage.new == len(prompt),
        "fetched": usage.shared == full,
    }
    if not right[way]:
        raise InvariantError(
            f"a prompt of {len(prompt)} tokens was to be found in the way {way!r}, but had {usage}"
        )


def ask_again(asker: Asker, sizes: ReusePools, prompts: Sequence[array[int]], tell: Told) -> None:
    """Runs the prompts cold, on the GPU, on HOST; and at the end dropped by many other prompts."""
    asker.tend = others = Others(asker, sizes, sizes.tokens)
    others.turn(sizes.histories + 1)
    for number, prompt in enumerate(prompts):
        tell("cold", number, asker.ask(prompt, sizes.long_reply))
        tell("gpu", number, asker.ask(prompt, SHORT_REPLY))
        others.turn(sizes.histories)
        tell("host", number, asker.ask(prompt, SHORT_REPLY))
    flood = [asker.add(asker.random_ids(sizes.tokens), 1) for _ in range(sizes.flood)]
    asker.run_until(lambda: all(answer.done for answer in flood))
    for number, prompt in enumerate(prompts):
        tell("recomputed", number, asker.ask(prompt, SHORT_REPLY))
    asker.end()


def ask_partly(asker: Asker, sizes: ReusePools, prompts: Sequence[array[int]], tell: Told) -> None:
    """On HOST, with a leading half that is faster recomputed than loaded: the spans of a prompt are
    disjoint."""
    asker.tend = others = Others(asker, sizes, sizes.tokens)
    others.turn(sizes.histories + 1)
    for number, prompt in enumerate(prompts):
        asker.ask(prompt, 1)
        others.turn(sizes.histories)
        tell("partly", number, asker.ask(prompt, SHORT_REPLY))
    asker.end()


def ask_suspended(
    asker: Asker, sizes: ReusePools, prompts: Sequence[array[int]], tell: Told
) -> None:
    """The GPU holds the prompt and the rows at their start. As the rows grow, the prompt must leave
    until they end."""
    asker.tend = others = Others(asker, sizes, sizes.short_history)
    for number, prompt in enumerate(prompts):
        others.all_rows()
        tell("suspended", number, asker.ask_and_be_suspended(prompt, sizes.long_reply))
    asker.end()


def ask_fetched(make_asker: Callable[[], Asker], prompts: Sequence[array[int]], tell: Told) -> None:
    """From the store, by a loop of its own for each prompt. A store that answers too late is asked
    again: a busy machine may delay it."""
    with closing(make_asker()) as writer:
        for prompt in prompts:
            writer.ask(prompt, 1)
    for number, prompt in enumerate(prompts):
        for _ in range(FETCHES):
            with closing(make_asker()) as reader:
                answer = reader.ask(prompt, SHORT_REPLY)
            if answer.usage is not None and answer.usage.shared:
                break
        tell("fetched", number, answer)


class Exact:
    """The eager decoder in float32 with an engine's weights, for any backend and ranks; a
    `ForwardPass`."""

    def __init__(self, directory: Path, manifest: Manifest, dtype: torch.dtype = torch.float32):
        """dtype: another one, for comparison."""
        weights = whole_of(directory, manifest)
        converted = {name: tensor.to(manifest.device, dtype) for name, tensor in weights.items()}
        self.manifest = replace(manifest, tensor_parallel=1)
        self.vocab_size = manifest.vocab_size
        self.dtype = self.kv_dtype = dtype
        self._decoder = Decoder.from_weights(manifest.decoder, converted)

    def kv_shape(self, slots: int, chunk_tokens: int) -> tuple[int, ...]:
        manifest = self.manifest
        return (slots, manifest.kv_layers, 2, manifest.kv_heads, chunk_tokens, manifest.head_dim)

    @torch.inference_mode()
    def forward(self, *arguments: Any) -> torch.Tensor:
        return self._decoder(*arguments)


def whole_of(directory: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The weights of all ranks as those of one."""
    ranks, seed = manifest.tensor_parallel, manifest.random_seed
    if seed is None:
        files = [load_weights(directory / weights_file(rank, ranks)) for rank in range(ranks)]
        return whole_weights(manifest.decoder, files)
    return random_weights(manifest.decoder, getattr(torch, manifest.dtype), manifest.device, seed)


def in_float32(
    directory: Path, manifest: Manifest, sizes: ReusePools, prompts: Sequence[array[int]]
) -> list[LoopAnswer]:
    """The first token of each prompt with the same weights; frees the memory afterwards."""
    config = replace(
        sizes.config(),
        max_model_len=sizes.tokens + 1,
        gpu_kv_chunks=sizes.prompt + 1,
        host_kv_chunks=1,
        reuse=False,
    )
    device = assemble.make_device(manifest.device, enforce_eager=True)  # used only for a short time
    asker = Asker(device, Exact(directory, manifest), config, sizes.size, 0)
    try:
        return [asker.ask(prompt, 1) for prompt in prompts]
    finally:
        asker.executor.close()


# The command.


def measure(
    directory: Path,
    engine: Engine,
    tokens: int,
    repetitions: int,
    seed: int,
    size: int,
    form: Form | None = None,
    store: Path | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Way]:
    """Runs every way, with HOST in that form, and a store in a folder of `store` (default: where
    temporary files are). All ranks call it, if there are several; the others than rank 0 get empty
    ways. InvariantError if a way did not occur."""
    dice = np.random.default_rng(seed)
    # Lengths differ, and none is a multiple of the chunk size.
    lengths = [tokens // size * size + 1 + number % (size - 1) for number in range(repetitions)]
    sizes = ReusePools(max(lengths), size)
    prompts = [random_ids(dice, engine.vocab_size, length) for length in lengths]
    if sizes.longest > engine.manifest.max_model_len:
        raise SettingError(
            "--tokens",
            f"needs contexts of {sizes.longest} tokens, the model's are "
            f"{engine.manifest.max_model_len}",
        )
    ask_exact = partial(in_float32, directory, engine.manifest, sizes, prompts)
    if ranks is None:
        exact = ask_exact()
    else:
        exact = ranks.together(ask_exact if ranks.rank == 0 else list)
        # only now: the model in float32 is on rank 0 alone
        group = ranks.open_group(engine.manifest.device, engine.dtype)
        register_group(TENSOR_PARALLEL, group)
    if engine.manifest.device == "cuda":
        torch.cuda.empty_cache()
    ways = {way: Way() for way in (WAYS if ranks is None else WAYS_OF_RANKS)}
    cold: dict[int, LoopAnswer] = {}

    def tell(way: str, number: int, answer: LoopAnswer) -> None:
        check_reuse(way, answer, prompts[number], size)
        if way == "cold":
            cold[number] = answer
        ways[way].add(answer, exact[number], cold[number])

    config = replace(sizes.config(), copies_may_fail=form is not None and form.is_exact is not None)
    tight = replace(config, gpu_kv_chunks=max(sizes.tight, config.chunks(sizes.longest)))
    runs = (
        (ask_again, config, size),
        (ask_partly, config, sizes.tokens // 2),
        (ask_suspended, tight, size),
    )
    make = partial(make_executor, ranks, form)
    device = make_device(engine.manifest.device)  # graphs are captured once for all three
    try:
        for number, (ask, own, loads_from) in enumerate(runs, start=1):
            if ranks is not None and ranks.rank:
                follow_one(ranks, device, engine, own, form)
                continue
            asker = Asker(device, engine, own, loads_from, seed + number, make)
            ask(asker, sizes, prompts, tell)
            asker.executor.close()
        if ranks is None:
            sharing = replace(config, shared_min_tokens=size)
            with TemporaryDirectory(dir=store) as folder:
                options = DirectoryOptions(Path(folder), STORE_BYTES)
                settings = SharedSettings(SharedConfig(options), "", sizes.host)
                share = partial(Executor, host_form=form, shared=settings)
                ask_fetched(
                    lambda: Asker(device, engine, sharing, 1, seed + 4, share), prompts, tell
                )
    finally:
        device.end()
    return ways


def make_executor(
    ranks: Ranks | None,
    form: Form | None,
    device: Device,
    engine: ForwardPass,
    config: SchedulerConfig,
) -> Executor:
    """Rank 0's, after all reports to the previous one have arrived; or that of the only rank."""
    if ranks is None:
        return Executor(device, engine, config, host_form=form)
    # imported here because it imports MPI
    from pensieve.runtime.ranks.executor import RankedExecutor

    ranks.gather(None)
    deque(ranks.reports(), maxlen=0)
    return RankedExecutor(ranks, device, engine, config, host_form=form)


def follow_one(
    ranks: Ranks, device: Device, engine: ForwardPass, config: SchedulerConfig, form: Form | None
) -> None:
    """Follows rank 0's next executor until it is closed."""
    from pensieve.runtime.ranks.executor import follow

    ranks.gather(None)
    follow(ranks, Executor(device, engine, config, host_form=form))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check.reuse", description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("--engine", required=True, type=Path, metavar="DIR", help="an engine directory")
    option(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where the engine runs (default %(default)s)",
    )
    option(
        "--tokens",
        type=int,
        default=2000,
        metavar="N",
        help="of a prompt, about (default %(default)s)",
    )
    option("--repetitions", type=int, default=10, metavar="N", help="prompts (default %(default)s)")
    option(
        "--chunk-tokens",
        type=int,
        default=32,
        metavar="N",
        help="tokens of a chunk (default %(default)s)",
    )
    option("--seed", type=int, default=0, metavar="N", help="of the prompts (default %(default)s)")
    add_kv_cache_dtype(parser)
    option(
        "--lower-tier-kv",
        default="same",
        choices=["same", "packed"],
        help="as `pensieve serve` (default same)",
    )
    option(
        "--store",
        type=Path,
        metavar="DIR",
        help="for KV that is fetched (default: where temporary files are)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)

    def run_all() -> int:
        count = Manifest.read(args.engine).tensor_parallel
        if count == 1:
            return run(args)
        return run_as_ranks("benchmarks.check.reuse", count, words, partial(run, args))

    return exit_status("check.reuse", run_all)


def run(args: argparse.Namespace, ranks: Ranks | None = None) -> int:
    """Returns 1 if a way differs too much. ranks: all of them call it; rank 0 prints. Raises
    SettingError."""
    started = time.perf_counter()
    check_least(args, chunk_tokens=2, tokens=8 * args.chunk_tokens, repetitions=1, seed=0)
    if args.kv_cache_dtype != "auto" and args.lower_tier_kv != "same":
        raise SettingError("--lower-tier-kv", "cannot be given beside --kv-cache-dtype")
    rank = 0 if ranks is None else ranks.rank
    if ranks is not None:
        ranks.together(lambda: take_share(args.device, ranks))
    engine = open_engine(args.engine, args.device, rank, args.kv_cache_dtype)
    form = host_form(args.lower_tier_kv, args.chunk_tokens, engine)
    sizes = (args.tokens, args.repetitions, args.seed, args.chunk_tokens)
    ways = measure(args.engine, engine, *sizes, form, args.store, ranks)
    if rank:
        return 0
    tolerance, failed = judge(ways, engine.kv_dtype == torch.float32)
    told = {name: way.summary() for name, way in ways.items()}
    print(table([{"way": name, **way.tokens, **told[name]} for name, way in ways.items()]))
    seconds = time.perf_counter() - started
    print(
        f"{'FAIL: ' + ', '.join(failed) if failed else 'PASS'} (tolerance {tolerance:.2e}, "
        f"{seconds:.1f} s)"
    )
    all_told = {name: {**told[name], "tokens": way.tokens} for name, way in ways.items()}
    report = {"passed": not failed, "tolerance": tolerance, "seconds": seconds, "ways": all_told}
    print(json.dumps({"bench": "reuse", **report}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

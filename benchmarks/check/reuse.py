"""check.reuse: a prompt's next tokens are equally likely with KV from any source, on a real engine.

Random prompts run cold, and again when their KV is on the GPU, on HOST, partly recomputed, fully
dropped and recomputed, and with their reply suspended in the middle. Meanwhile other rows generate,
and other histories are copied in and out. Then a loop without KV fetches them from a store in which
another one has written them. The log probabilities of the first token and the top 20 are compared
with the same weights in float32. No way may differ by more than twice the cold one's largest
difference, or by 1e-4 from cold if engine and KV are float32. All ranks of an engine take part, but
for the store; rank 0's device must hold the whole model in float32.

With states, prompts also run without the KV of a leading part (`leading`) or of a part behind a
state (`inner`). Then they run with nothing beside them: cold (`alone`), and from the GPU, from
HOST, from both, from DISK after a restart, and from the store. These five must give the bits of
`alone`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pensieve.builder.checkpoints.config import Shard
from pensieve.builder.checkpoints.hugging_face import dtype_of
from pensieve.builder.manifest import Manifest, weights_file
from pensieve.builder.model import Decoder
from pensieve.builder.parity import whole_weights
from pensieve.builder.random_weights import random_weights
from pensieve.builder.states import state_shape
from pensieve.builder.weights import load_weights
from pensieve.plugins.collectives.protocol import TENSOR_PARALLEL, register_group
from pensieve.plugins.kv_forms.forms import Form
from pensieve.plugins.state.pool import StateShape
from pensieve.runtime.device.protocol import Device, ForwardPass
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import Engine, open_engine
from pensieve.runtime.executor import Executor
from pensieve.runtime.launch import assemble
from pensieve.runtime.launch.ranks import take_share
from pensieve.runtime.launch.sizing import host_form
from pensieve.runtime.shared.config import DirectoryOptions, SharedConfig
from pensieve.runtime.shared.store import SharedSettings
from pensieve.scheduler.config import SchedulerConfig, StateConfig
from pensieve.scheduler.types import SettingError, TokenLogprobs
from pensieve.scripts.command import add_kv_cache_dtype, check_least, exit_status

from ..loop import LoopAnswer, make_device, random_ids, table
from ..ranks import run_as_ranks
from .reuse_ways import (
    ALONE,
    DISK,
    FETCHED,
    SEATS,
    WAYS,
    WAYS_OF_RANKS,
    WAYS_OF_STATES,
    Ask,
    Asker,
    ReusePools,
    Told,
    ask_after_restart,
    ask_again,
    ask_alone,
    ask_fetched,
    ask_holes,
    ask_partly,
    ask_suspended,
    check_reuse,
    check_states,
)

if TYPE_CHECKING:
    from pensieve.runtime.ranks.mpi import Ranks

SOURCES = ("gpu", "host", "disk", "shared", "recomputed", "new")
FLOAT32_TOLERANCE = 1e-4
STORE_BYTES = 2**40


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
    one run lacks one of them. `other_bits`: replies whose bits differ, where they must not.
    """

    count: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    to_float32: list[float] = field(default_factory=list)
    to_cold: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    other_bits: int = 0

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
            "other_bits": self.other_bits,
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
        if way.other_bits or not np.max(errors) <= tolerance:  # also true for NaN
            failed.append(name)
    return tolerance, failed


class Exact:
    """The eager decoder in float32 with an engine's weights, for any backend and ranks; a
    `ForwardPass`."""

    def __init__(self, directory: Path, manifest: Manifest, dtype: torch.dtype = torch.float32):
        """dtype: another one, for comparison."""
        weights = whole_of(directory, manifest)
        # one by one: all of them in both forms may not fit beside the engine
        converted = {
            name: weights.pop(name).to(manifest.device, dtype_of(name, dtype))
            for name in [*weights]
        }
        self.manifest = replace(manifest, tensor_parallel=1)
        self.vocab_size = manifest.vocab_size
        self.dtype = self.kv_dtype = dtype
        self.state_shape = state_shape(Shard(self.manifest.decoder), dtype)
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


def states_of(engine: Engine | Exact, size: int) -> StateConfig | None:
    """The slots of states, in chunks of `size` tokens; None: the model has none."""
    shape = engine.state_shape
    if shape is None:
        return None
    record = math.prod(engine.kv_shape(1, size)) * engine.kv_dtype.itemsize
    return StateConfig.of_size(shape.nbytes, record, size, SEATS)


def in_float32(
    directory: Path, manifest: Manifest, sizes: ReusePools, prompts: Sequence[array[int]]
) -> list[LoopAnswer]:
    """The first token of each prompt with the same weights; frees the memory afterwards."""
    exact = Exact(directory, manifest)
    config = replace(
        sizes.config(),
        max_model_len=sizes.tokens + 1,
        gpu_kv_chunks=sizes.prompt + 1,
        host_kv_chunks=1,
        reuse=False,
        states=states_of(exact, sizes.size),
    )
    device = assemble.make_device(manifest.device, enforce_eager=True)  # used only for a short time
    make = partial(Executor, states=exact.state_shape)
    asker = Asker(device, exact, config, sizes.size, 0, make)
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
    started = time.perf_counter()
    dice = np.random.default_rng(seed)
    states = states_of(engine, size)
    lengths = prompt_lengths(tokens, repetitions, size, states)
    if states is not None and min(lengths) < (least := 3 * states.multiple - 1):
        raise SettingError("--tokens", f"with states prompts have at least {least + 1} tokens")
    sizes = ReusePools(max(lengths), size, states)
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
    names: Sequence[str] = WAYS if ranks is None else WAYS_OF_RANKS
    if states is not None:
        names = [way for way in WAYS_OF_STATES if ranks is None or way not in (DISK, FETCHED)]
    ways = {way: Way() for way in names}
    first: dict[str, dict[int, LoopAnswer]] = {"cold": {}, ALONE: {}}

    def tell(way: str, number: int, answer: LoopAnswer) -> None:
        if states is None:
            check_reuse(way, answer, prompts[number], size)
        else:
            check_states(way, answer, prompts[number], sizes)
        if way in first:
            first[way][number] = answer
        ways[way].add(answer, exact[number], first["cold"][number])
        if way.startswith(ALONE):
            alone = first[ALONE][number]
            same = (answer.tokens, answer.logprobs) == (alone.tokens, alone.logprobs)
            ways[way].other_bits += not same
        if ways[way].count == repetitions:
            worst = max(ways[way].to_float32)
            seconds = time.perf_counter() - started
            print(f"{seconds:.1f} s: {way}, at most {worst:.4f} from float32", flush=True)

    config = replace(sizes.config(), copies_may_fail=form is not None and form.is_exact is not None)
    tight = replace(config, gpu_kv_chunks=max(sizes.tight, config.chunks(sizes.longest)))
    make = partial(make_executor, ranks, form, engine.state_shape)
    device = make_device(engine.manifest.device)  # graphs are captured once for all pools

    def run_one(number: int, ask: Ask, own: SchedulerConfig, loads_from: int) -> None:
        if ranks is not None and ranks.rank:
            follow_one(ranks, device, engine, own, form)
            return
        asker = Asker(device, engine, own, loads_from, seed + number, make)
        ask(asker, sizes, prompts, tell)
        asker.executor.close()

    try:
        run_one(1, ask_again, config, size)
        if states is None:
            run_one(2, ask_partly, config, sizes.tokens // 2)
            run_one(3, ask_suspended, tight, size)
            if ranks is None:
                ask_store(device, engine, config, sizes, prompts, tell, seed, form, store)
        else:
            run_one(2, ask_holes, config, 1)
            run_one(3, ask_alone, config, 1)
            if ranks is None:
                ask_disk(device, engine, config, sizes, prompts, tell, seed, store)
                ask_store(device, engine, config, sizes, prompts, tell, seed, form, store)
            device.end()
            device = make_device(engine.manifest.device)  # states lie at the end of its own pool
            run_one(4, ask_suspended, tight, size)
    finally:
        device.end()
    return ways


def ask_store(
    device: Device,
    engine: Engine,
    config: SchedulerConfig,
    sizes: ReusePools,
    prompts: Sequence[array[int]],
    tell: Told,
    seed: int,
    form: Form | None,
    folder: Path | None,
) -> None:
    """`ask_fetched`, with a store in that folder."""
    sharing = replace(config, shared_min_tokens=sizes.size)
    with TemporaryDirectory(dir=folder) as name:
        options = DirectoryOptions(Path(name), STORE_BYTES)
        has_states = config.states is not None
        settings = SharedSettings(SharedConfig(options), "", sizes.host, states=has_states)
        share = partial(Executor, host_form=form, shared=settings, states=engine.state_shape)
        way = FETCHED if has_states else "fetched"
        ask_fetched(lambda: Asker(device, engine, sharing, 1, seed + 4, share), prompts, tell, way)


def ask_disk(
    device: Device,
    engine: Engine,
    config: SchedulerConfig,
    sizes: ReusePools,
    prompts: Sequence[array[int]],
    tell: Told,
    seed: int,
    folder: Path | None,
) -> None:
    """`ask_after_restart`, with a disk in that folder."""
    slots = len(prompts) * (sizes.prompt + sizes.state_chunks(sizes.tokens))
    own = replace(config, disk_kv_chunks=slots, prefetch=False)
    with TemporaryDirectory(dir=folder) as name:
        disk = DiskSettings(Path(name), slots, engine.manifest.fingerprint)
        make = partial(Executor, disk=disk, states=engine.state_shape)
        ask_after_restart(lambda: Asker(device, engine, own, 1, seed + 4, make), prompts, tell)


def prompt_lengths(
    tokens: int, repetitions: int, size: int, states: StateConfig | None
) -> list[int]:
    """They differ, and none is a multiple of the chunk size. With states they are one less and one
    more than a multiple of the tokens at which states are kept, or have a chunk behind it."""
    if states is None:
        return [tokens // size * size + 1 + number % (size - 1) for number in range(repetitions)]
    multiple = tokens // states.multiple * states.multiple
    return [multiple + (1, -1, size + 1)[number % 3] for number in range(repetitions)]


def make_executor(
    ranks: Ranks | None,
    form: Form | None,
    states: StateShape | None,
    device: Device,
    engine: ForwardPass,
    config: SchedulerConfig,
) -> Executor:
    """Rank 0's, after all reports to the previous one have arrived; or that of the only rank."""
    if ranks is None:
        return Executor(device, engine, config, host_form=form, states=states)
    # imported here because it imports MPI
    from pensieve.runtime.ranks.executor import RankedExecutor

    ranks.gather(None)
    deque(ranks.reports(), maxlen=0)
    return RankedExecutor(ranks, device, engine, config, host_form=form, states=states)


def follow_one(
    ranks: Ranks, device: Device, engine: Engine, config: SchedulerConfig, form: Form | None
) -> None:
    """Follows rank 0's next executor until it is closed."""
    from pensieve.runtime.ranks.executor import follow

    ranks.gather(None)
    states = engine.state_shape
    follow(ranks, Executor(device, engine, config, host_form=form, states=states))


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

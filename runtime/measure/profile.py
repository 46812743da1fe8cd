"""The measured profile of an engine on this hardware: measured, stored next to the engine, and read
for the scheduler.

It measures a full batch of chunks by context, a step by its tokens, generation by rows and context,
and copies by piece and direction (`StepBench`). The scheduler uses it as a `CostProfile`.

**With linear attention** a full batch is one row, because every row reads and writes a state; 64
rows of one chunk would take mostly that. Its attention counts at the middle of the batch.

**Attention and the rest.** A full batch at context l takes rest + attention(l). Attention cannot be
removed from an engine. So the rest is extrapolated to context 0 by the line through the shortest
and the longest context: with points so far apart, noise of a percent changes it by less than a
percent, while the difference of two short contexts would be mostly noise. Noise on a busy machine
only adds time: if a longer context is faster, its time is used for the shorter one too.

**Time of a chunk.** A full batch keeps the device busy with arithmetic, which hides its fixed part
(reading the weights, launching). So its time divided by its chunks is a chunk's marginal cost.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path
from platform import processor
from typing import Any

import torch

from ...scheduler.config import SchedulerConfig
from ...scheduler.cost import CostProfile, Points
from ...scheduler.swap_out_mark import propose_swap_out_below
from ...scheduler.types import SettingError
from ..engine import Engine
from ..executor import GROUP_LAYERS
from .step_bench import CopyTime, StepBench

log = logging.getLogger(__name__)

FORMAT = 1
PROFILE = "profile.json"
PIECES = (1, 2, 4, 8)
"""Layers of a copied piece; whole records are measured too."""
COPIED_BYTES = 256 * 2**20  # bytes of a timed copy: 5 ms on a link of 50 GB/s


@dataclass(frozen=True, slots=True)
class Measured:
    """steps          (tokens, seconds of a step at the shortest context)
    full_batches   (context, seconds of a step of `max_num_batched_tokens` tokens, in chunks that
                   end there)
    generation     (rows, context, seconds of a step)
    """

    steps: Points
    full_batches: Points
    generation: tuple[tuple[int, int, float], ...]
    copies: tuple[CopyTime, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """`hardware`, `engine` (its fingerprint), `chunk_tokens` and `kv_cache_dtype` tell what the
    profile is valid for; the other fields are its measurements.

    gpu_kv_chunks   of the measured pool; `swap_out_below` depends on it
    """

    hardware: str
    engine: str
    chunk_tokens: int
    dtype: str
    torch: str
    date: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    gpu_kv_chunks: int
    measured: Measured
    cost: CostProfile
    swap_out_below: float
    kv_cache_dtype: str = "auto"

    def save(self, directory: Path) -> Path:
        """Writes profile.json next to the engine, atomically."""
        path = directory / PROFILE
        aside = path.with_suffix(".writing")
        aside.write_text(
            json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8"
        )
        os.replace(aside, path)
        return path

    @classmethod
    def read(cls, path: Path) -> Profile:
        """SettingError if the file is damaged or of another format; FileNotFoundError if there is
        none."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value.pop("format") != FORMAT:
                raise ValueError(f"not of format {FORMAT}")
            measured, cost = value.pop("measured"), value.pop("cost")
            copies = tuple(CopyTime(*copy) for copy in measured.pop("copies"))
            return cls(
                measured=Measured(copies=copies, **_tuples(measured)),
                cost=CostProfile(**_tuples(cost)),
                **value,
            )
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingError(
                "--engine", f"{path} is damaged ({error}); run `pensieve profile` again"
            ) from None


def load_profile(directory: Path, engine: Engine, chunk_tokens: int) -> CostProfile | None:
    """Returns the measured costs of this engine on this hardware with chunks of this size. Without
    them returns None and logs a line.

    SettingError for a damaged file.
    """
    try:
        profile = Profile.read(directory / PROFILE)
    except FileNotFoundError:
        log.info("%s has not been measured (pensieve profile): costs are estimated", directory)
        return None
    here = {
        "hardware": hardware(engine),
        "engine": engine.manifest.fingerprint,
        "chunk_tokens": chunk_tokens,
        "kv_cache_dtype": engine.kv_cache_dtype,
    }
    for part, value in here.items():
        if (there := getattr(profile, part)) != value:
            log.info(
                "%s is of another %s (%s, not %s): costs are estimated",
                directory / PROFILE,
                part,
                there,
                value,
            )
            return None
    log.info("costs as measured on %s, %s", profile.hardware, profile.date)
    return profile.cost


def hardware(engine: Engine) -> str:
    """The name of the computing hardware."""
    if engine.manifest.device == "cuda":
        return torch.cuda.get_device_name()
    names = [
        line.partition(":")[2].strip()
        for line in _lines(Path("/proc/cpuinfo"))
        if line.startswith("model name")
    ]
    return f"{names[0] if names else processor()}, {torch.get_num_threads()} threads"


def profile_engine(bench: StepBench, engine: Engine, say: Callable[[str], None]) -> Profile:
    """Measures the bench's engine; calls `say` with the name of each measurement."""
    config = bench.config
    record = engine.chunk_bytes(config.chunk_tokens)
    measured = _measure(bench, engine.manifest.kv_layers, record, say)
    cost = cost_profile(measured, config, record)
    return Profile(
        hardware=hardware(engine),
        engine=engine.manifest.fingerprint,
        chunk_tokens=config.chunk_tokens,
        dtype=engine.manifest.dtype,
        torch=torch.__version__,
        date=date.today().isoformat(),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        gpu_kv_chunks=config.gpu_kv_chunks,
        measured=measured,
        cost=cost,
        swap_out_below=propose_swap_out_below(cost, config),
        kv_cache_dtype=engine.kv_cache_dtype,
    )


def _measure(bench: StepBench, layers: int, record: int, say: Callable[[str], None]) -> Measured:
    config = bench.config
    size = bench.config.chunk_tokens
    contexts = _doubled(size, config.max_model_len)
    rows = _doubled(1, config.max_num_seqs, end=True)
    steps = _doubled(1, config.max_num_batched_tokens, end=True)
    copied = min(-(-COPIED_BYTES // record), config.gpu_kv_chunks // 2, config.host_kv_chunks // 2)
    say(f"copies of {copied} chunks of {record} bytes")
    copies = tuple(
        bench.copies(piece, copied) for piece in (*(p for p in PIECES if p < layers), layers)
    )
    say(f"steps of 1 to {steps[-1]} tokens")
    fresh = tuple((tokens, bench.fresh(tokens)) for tokens in steps)
    full = _full_batches(bench, say)
    say(f"generation, 1 to {rows[-1]} rows at these contexts")
    generation = tuple(
        (count, context, bench.generation(context, count)) for count in rows for context in contexts
    )
    return Measured(fresh, full, generation, copies)


def _full_batches(bench: StepBench, say: Callable[[str], None]) -> Points:
    size = bench.config.chunk_tokens
    chunks = bench.config.max_num_batched_tokens // size
    batch = chunks * size
    one_row = bench.config.states is not None
    longest = bench.config.max_model_len
    contexts = _doubled(batch, longest, end=True) if one_row else _doubled(size, longest)
    say(f"{chunks} chunks at contexts of {contexts[0]} to {contexts[-1]} tokens")
    if one_row:
        return tuple(
            (context - batch // 2, bench.prompt_at(context, batch)) for context in contexts
        )
    return tuple((context, bench.chunks_at(context, chunks)) for context in contexts)


def cost_profile(measured: Measured, config: SchedulerConfig, chunk_bytes: int) -> CostProfile:
    """The scheduler's costs from the measurement; copies count with their speed while both
    directions are busy."""
    rest, attention = split_attention(measured.full_batches)
    chunks = config.max_num_batched_tokens // config.chunk_tokens
    most_rows = measured.generation[-1][0]
    _, row_attention = split_attention(
        [(context, t) for rows, context, t in measured.generation if rows == most_rows]
    )
    swapped_in = next(
        copy
        for copy in reversed(measured.copies)
        if copy.layers <= GROUP_LAYERS or copy.layers == 1
    )
    swapped_out = measured.copies[-1]
    return CostProfile(
        chunk_tokens=config.chunk_tokens,
        chunk_seconds=rest / chunks,
        attention=tuple((context, seconds / chunks) for context, seconds in attention),
        step_base_seconds=measured.steps[0][1],
        chunk_bytes=chunk_bytes,
        link_bytes_per_s=swapped_in.chunks * chunk_bytes / swapped_in.both,
        steps=_never_falling(measured.steps),
        row_attention=tuple((context, seconds / most_rows) for context, seconds in row_attention),
        out_bytes_per_s=swapped_out.chunks * chunk_bytes / swapped_out.both,
    )


def split_attention(points: Sequence[tuple[int, float]]) -> tuple[float, Points]:
    """Returns the seconds without attention, and (context, seconds of attention), from a batch's
    (context, seconds)."""
    times = _never_falling(points)
    (shortest, first), (longest, last) = times[0], times[-1]
    slope = (last - first) / (longest - shortest) if longest > shortest else 0.0
    rest = first - min(slope * shortest, first)
    return rest, tuple((context, seconds - rest) for context, seconds in times)


def _never_falling(points: Sequence[tuple[int, float]]) -> Points:
    tokens, seconds = zip(*points, strict=True)
    lowest_behind = [*accumulate(reversed(seconds), min)]
    return tuple(zip(tokens, reversed(lowest_behind), strict=True))


def _doubled(first: int, most: int, end: bool = False) -> list[int]:
    """`first` times powers of two, up to `most`; with `end`, `most` too."""
    values = [first]
    while 2 * values[-1] <= most:
        values.append(2 * values[-1])
    return [*values, most] if end and values[-1] != most else values


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    """Converts JSON's lists of lists to tuples of tuples."""
    return {
        name: tuple(tuple(point) for point in entry) if isinstance(entry, list) else entry
        for name, entry in value.items()
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []

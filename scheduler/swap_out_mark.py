"""The mark below which GPU slots are freed ahead of time."""

from __future__ import annotations

from math import ceil

from .config import SchedulerConfig
from .cost import CostProfile

LEAD_STEPS = 3
"""Steps from the plan of a copy-out until its GPU slot is free: two are in flight, and the copy
runs beside the next."""


def swap_out_mark(cost: CostProfile, config: SchedulerConfig) -> int:
    """Returns the mark. While fewer GPU slots are free or reclaimable, chunks are copied out ahead
    of time, as far as HOST has room for copies."""
    share = config.swap_out_below
    if share is None:
        share = propose_swap_out_below(cost, config)
    return int(share * config.gpu_kv_chunks)


def propose_swap_out_below(cost: CostProfile, config: SchedulerConfig) -> float:
    """Returns the default of `--swap-out-below`, at which slots are freed in time: a share of the
    GPU slots, in whole percents.

    A full batch takes c chunks a second, of prompts or of generated tokens (the larger rate).
    Copying out frees s chunks a second. The free and reclaimable slots must last

    * until the first copies are done: c times LEAD_STEPS full steps and the copying of one step's
      chunks;
    * if s < c, also for the deficit while the longest context is computed: 1 - s / c of its chunks.

    They come on top of `--generation-reserve`, below which no new request joins. The formula
    assumes short contexts: full steps are fastest then, and take the most slots.
    """
    step_chunks = config.max_num_batched_tokens / config.chunk_tokens
    step_seconds = cost.step(config.max_num_batched_tokens)
    generation_seconds = cost.step(0, rows=config.max_num_seqs)
    if not step_seconds or not generation_seconds:
        return 1.0  # slots are taken faster than any link frees them
    generated = config.max_num_seqs / config.chunk_tokens / generation_seconds
    taken = max(step_chunks / step_seconds, generated)
    lead = LEAD_STEPS * step_seconds + step_chunks * cost.swap_out()
    behind = max(0.0, 1 - 1 / cost.swap_out() / taken) * config.chunks(config.max_model_len)
    share = config.generation_reserve + (taken * lead + behind) / config.gpu_kv_chunks
    return min(1.0, ceil(round(100 * share, 6)) / 100)

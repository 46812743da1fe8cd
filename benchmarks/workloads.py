"""The workloads of `versus`: models, loads, windows, and the promises to their users.

`agents` and `azure` need a trace, `text` the data of benchmarks.text and a checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

from .goodput import Promise


class Workload(NamedTuple):
    """shape          a config.json of benchmarks/shapes, whose weights are random; None: a
                   checkpoint that replies to real text at numbers of streams (benchmarks.text)
    max_model_len  longest context, tokens
    max_num_seqs   rows of every server: requests that run at once
    rates          conversations/s, at most 25% apart (goodput.CLOSE_RATES); or streams
    windows        ramp, warm-up (with the ramp), measured, s; no ramp with a trace's own clock
    load           options of benchmarks.serving; none: it needs a trace
    promise        what goodput is judged by; None: nothing is judged
    """

    shape: str | None
    max_model_len: int
    max_num_seqs: int
    rates: tuple[float, ...]
    windows: tuple[float, float, float]
    load: tuple[str, ...]
    promise: Promise | None


CHATS = ("--synthetic", "sharegpt", "--turn-counts", "uniform", "--think-s", "15")
DOCUMENTS = ("--synthetic", "documents", "--turn-counts", "uniform", "--think-s", "30")

WORKLOADS = {
    "chats": Workload(
        shape="llama-2-13b-gqa.json",
        max_model_len=16384,
        max_num_seqs=256,
        rates=(3, 3.6, 4.2, 4.9),
        windows=(45, 70, 35),
        load=CHATS,
        promise=Promise(first_s=1, later_s=1, token_ms=20),
    ),
    "agents": Workload(
        shape="llama-3-8b.json",
        max_model_len=40960,
        max_num_seqs=128,
        rates=(0.12, 0.15, 0.185, 0.23),
        windows=(40, 60, 70),
        load=(),
        promise=Promise(first_s=15, later_s=5, token_ms=50),
    ),
    "azure": Workload(
        shape="llama-3-8b.json",
        max_model_len=16384,
        max_num_seqs=256,
        rates=(10, 12.5, 15.5, 19),
        windows=(0, 30, 90),
        load=(),
        promise=Promise(first_s=1, later_s=1, token_ms=20),
    ),
    "text": Workload(
        shape=None,
        max_model_len=2048,
        max_num_seqs=512,
        rates=(1, 16, 64, 256, 512),
        windows=(0, 5, 14),
        load=(),
        promise=None,
    ),
    "documents": Workload(
        shape="llama-3.1-8b.json",
        max_model_len=131072,
        max_num_seqs=128,
        rates=(0.1, 0.125, 0.155, 0.19),
        windows=(60, 80, 70),
        load=DOCUMENTS,
        promise=Promise(first_s=15, later_s=5, token_ms=50),
    ),
}

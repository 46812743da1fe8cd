"""What a trace says of kernels that run at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "scripts" / "experiments"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    yield pytest.importorskip("mixed_steps", reason="needs Triton", exc_type=ImportError)
    sys.modules.pop("mixed_steps", None)


def kernel(name, start, seconds, programs=1, threads=128):
    args = {"grid": [programs, 1, 1], "block": [threads, 1, 1]}
    return {"cat": "kernel", "name": name, "ts": start, "dur": seconds, "args": args}


def test_what_runs_at_once_counts_once(script):
    events = [kernel("_attend", 0, 10, 396), kernel("_attend", 5, 10, 132, 256), kernel("nvjet_tst_64x8", 20, 1),
              {"cat": "gpu_memcpy", "name": "x", "ts": 0, "dur": 99}, kernel("elementwise", 21, 2)]  # fmt: skip
    kinds = script.by_kind(events)
    assert {kind: script.covered(found) for kind, found in kinds.items()} == {
        "attention": 15, "attention 396 x 128": 10, "attention 132 x 256": 10, "products": 1, "others": 2
    }  # fmt: skip
    assert script.covered([interval for found in kinds.values() for interval in found]) == 18

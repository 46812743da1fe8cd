"""NVIDIA's load generator, as it is: sessions of several turns, each named by X-Session-ID, without
an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT

from .server import Server

AIPERF = Path(sys.prefix) / "aiperf" / "bin" / "aiperf"
"""It pins many packages: `make aiperf` gives it an environment of its own."""

SESSIONS, TURNS = 4, 3
LOAD = f"""
    --endpoint-type chat --streaming --session-header X-Session-ID --concurrency 3
    --num-sessions {SESSIONS} --session-turns-mean {TURNS} --session-turns-stddev 0
    --synthetic-input-tokens-mean 64 --output-tokens-mean 24 --extra-inputs ignore_eos:true
    --random-seed 7 --ui none
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not AIPERF.exists(), reason=f"no aiperf in {AIPERF.parents[1]}: run `make aiperf`"
)
def test_every_request_of_aiperf_is_answered(tmp_path: Path) -> None:
    report = tmp_path / "report"
    with Server(tmp_path / "state", "--gpu-kv-chunks", 400, "--host-kv-chunks", 400) as server:
        places = [
            "--url",
            server.url,
            "--model",
            "demo",
            "--tokenizer",
            DEMO_CHECKPOINT,
            "--artifact-dir",
            report,
        ]
        done = subprocess.run(
            [AIPERF, "profile", *places, *LOAD.split()], capture_output=True, text=True, timeout=900
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((report / "profile_export_aiperf.json").read_text())
    assert (summary["error_summary"], summary["request_error_rate"]["avg"]) == ([], 0)
    assert summary["request_count"]["avg"] == SESSIONS * TURNS
    turns = [
        json.loads(line) for line in (report / "profile_export.jsonl").read_text().splitlines()
    ]
    later = [turn["metrics"] for turn in turns if turn["metadata"]["turn_index"]]
    assert len(later) == SESSIONS * (TURNS - 1)
    assert all(turn["usage_prompt_cache_read_tokens"]["value"] >= 64 for turn in later)

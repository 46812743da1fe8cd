"""Servers of several settings, measured at once; one that does not start keeps nobody else, nor a load that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.builder.build import build_engine
from tests.models import tiny_checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "experiments" / "side_by_side.py"

SERVERS = """
[[server]]
name = "kept"
gpu = 0
serve = "--engine {engine} --gpu-kv-bytes 1MiB --host-kv-bytes 1MiB --max-num-seqs 8"
bench = ["{bench}", "{bench} --seed 1"]

[[server]]
name = "refused"
gpu = 1
serve = "--engine {engine} --gpu-kv-bytes 1000TiB"
bench = ["{bench}"]

[[server]]
name = "none"
gpu = 1
serve = "--engine {engine} --gpu-kv-bytes 1MiB --host-kv-chunks 0 --no-reuse --max-num-seqs 8"
bench = ["{bench} --rate none", "{bench}"]
"""

BENCH = "--vocabulary 100 --processes 1 --rate 1 --think-s 1 --warm-up-s 1 --max-context 60"


@pytest.mark.slow
def test_each_server_has_its_rows(tmp_path):
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    servers = tmp_path / "servers.toml"
    for seconds in (3, 40):  # on a busy machine nothing may end in a short while
        servers.write_text(SERVERS.format(engine=tmp_path / "engine", bench=f"{BENCH} --measure-s {seconds}"))
        output = tmp_path / f"out-{seconds}"
        ended = subprocess.run(
            [sys.executable, SCRIPT, "--servers", servers, "--output", output, "--seconds", "400"],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert ended.returncode == 0, ended.stderr
        assert "refused: no server after" in ended.stdout and "--gpu-kv-bytes: " in ended.stdout
        rows = {name: json.loads((output / f"{name}.json").read_text()) for name in ("kept", "kept-2", "none-2")}
        if all(row["completed_per_s"] > 0 for row in rows.values()):
            break
    assert all(row["rate"] == 1 and row["completed_per_s"] > 0 for row in rows.values())
    assert not rows["none-2"]["sources"]["gpu"], "nothing is kept there"
    assert rows["kept-2"]["seed"] == 1
    assert "kept\n" in ended.stdout and "none-2\n" in ended.stdout

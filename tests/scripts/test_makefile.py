"""The Makefile's commands, printed and not run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_server_of_make_names_no_port_but_the_one_that_is_given(tmp_path):
    command = ["make", "--dry-run", "serve", "ARGS=--port 8101", f"VENV={tmp_path}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path}/bin/pensieve serve --port 8101" in printed
    assert "8000" not in printed

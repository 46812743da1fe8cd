"""Child processes."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest

from pensieve.runtime.system import descendants, safe_path


@pytest.mark.parametrize("before", [None, "yes"])
def test_a_spawned_process_imports_nothing_of_the_current_directory(before, tmp_path, monkeypatch):
    """`spawn` starts `python -c`, which searches the current directory first."""
    (tmp_path / "signal.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    if before is None:
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    child = multiprocessing.get_context("spawn").Process(target=os.getpid)
    with safe_path():
        child.start()
    child.join()
    assert child.exitcode == 0 and os.environ.get("PYTHONSAFEPATH") == before


def test_descendants_of_a_process_whose_threads_come_and_go():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        until = time.monotonic() + 1.0

        def come_and_go():
            while time.monotonic() < until:
                short = threading.Thread(target=lambda: None)
                short.start()
                short.join()

        busy = threading.Thread(target=come_and_go)
        busy.start()
        while time.monotonic() < until:
            assert child.pid in descendants(os.getpid())
        busy.join()
        child.communicate(b"\n")
    assert child.pid not in descendants(os.getpid())

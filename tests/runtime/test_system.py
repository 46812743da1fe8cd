"""Child processes, and progress on a terminal."""

import io
import os
import subprocess
import sys
import threading
import time

from pensieve.runtime.system import descendants, show_progress


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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_grows_on_a_terminal_and_ends_its_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for done in (1, 2, 4):
        show_progress("pinning host memory", done, 4, " GiB")
    drawn = terminal.getvalue().split("\r")[1:]
    assert [one.count("#") for one in drawn] == [8, 15, 30]
    assert drawn[0].startswith("pinning host memory [########......") and drawn[0].endswith("] 1 of 4 GiB ")
    assert drawn[-1].endswith("4 of 4 GiB \n") and "\n" not in "".join(drawn[:-1])


def test_nothing_is_drawn_elsewhere(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    show_progress("capturing graphs", 1, 2)
    assert not log.getvalue()

"""Child processes."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from pensieve.runtime.system import descendants, safe_path, stacks


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


def test_stacks_name_each_thread_and_its_calls():
    entered, end = threading.Event(), threading.Event()

    def waiting_here():
        entered.set()
        end.wait()

    thread = threading.Thread(target=waiting_here, name="one that waits")
    thread.start()
    entered.wait()
    text = stacks()
    end.set()
    thread.join()
    assert text.startswith(f"Stacks of process {os.getpid()}\n")
    _, _, calls = text.partition("Thread one that waits:\n")
    calls, _, _ = calls.partition("Thread ")
    assert 0 < calls.index("in waiting_here") < calls.index("in wait\n")
    assert "in test_stacks_name_each_thread" in text.partition("Thread MainThread:")[2]


SIGNALLED = """
import os, signal, subprocess, sys
from pensieve.runtime.system import hold_stack_signal, print_stacks_on_signal
hold_stack_signal()
os.kill(os.getpid(), signal.SIGUSR2)  # before anything waits for it
child = subprocess.Popen(["sleep", "600"])
child.send_signal(signal.SIGUSR2)
print_stacks_on_signal()
print(input())
child.terminate()
sys.exit(child.wait() != -signal.SIGTERM)
"""


def test_a_stack_signal_that_comes_early_waits():
    words = [sys.executable, "-c", SIGNALLED]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stderr.readline() == b"Stacks of process %d\n" % process.pid
        assert process.communicate(b"alive\n")[0] == b"alive\n" and process.returncode == 0


NOT_WRITTEN = """
import os, signal, threading, time
from pensieve.runtime.system import hold_stack_signal, print_stacks_on_signal
threading.excepthook = lambda *_: os._exit(3)
hold_stack_signal()
print_stacks_on_signal()
for _ in range(2):  # the second is taken only after the first is answered
    os.kill(os.getpid(), signal.SIGUSR2)
    while signal.SIGUSR2 in signal.sigpending():
        time.sleep(0.001)
"""


def test_stacks_that_cannot_be_written_are_no_fault():
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", NOT_WRITTEN], stderr=full).returncode == 0


EARLIER_THREAD = """
import select, signal, threading
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])  # which the tests' process may hold
earlier = threading.Thread(target=threading.Event().wait, daemon=True)
earlier.start()
from pensieve.runtime.system import hold_stack_signal, print_stacks_on_signal
hold_stack_signal()
print_stacks_on_signal()
signal.pthread_kill(earlier.ident, signal.SIGUSR2)  # as the kernel may choose
while not select.select([0], [], [], 0.01)[0]:
    pass  # Python's handler runs in this thread, between two calls
print(input())
"""


def test_a_thread_that_does_not_hold_the_stack_signal_passes_it_on():
    """Such as one that a tracer starts before the program."""
    words = [sys.executable, "-c", EARLIER_THREAD]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stderr.readline() == b"Stacks of process %d\n" % process.pid
        assert process.communicate(b"alive\n")[0] == b"alive\n" and process.returncode == 0


def test_a_process_whose_stacks_nobody_reads_goes_on():
    """A pipe that is full holds the printing thread alone."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    words = [sys.executable, "-c", SIGNALLED]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=writing) as process:
        assert process.communicate(b"alive\n")[0] == b"alive\n" and process.returncode == 0
    os.close(reading)
    os.close(writing)

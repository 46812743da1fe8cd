"""Child processes."""

import os
import subprocess
import sys
import threading
import time

from pensieve.runtime.system import descendants


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

"""`pensieve serve` as one of several ranks, with a fault of rank 1 in its fourth step, named by the
first argument. "late": it never gets its weights; "absent": also never, and the other ranks soon
give up; "unset": it cannot make its executor; "last": it stops at its end. With "leader" rank 0
stops in its fourth step.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from pensieve.runtime.executor import Executor
from pensieve.scheduler.types import SettingError
from pensieve.scripts import serve

STEP = 4


def break_at(fault):
    launch = Executor.launch

    def broken(self, plan):
        if plan.step >= STEP:
            match fault:
                case "raise":
                    raise ZeroDivisionError("rank 1 divides by zero")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop" | "leader":
                    stop()
                case "hang":
                    time.sleep(3600)
        launch(self, plan)

    Executor.launch = broken


def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def never_open(*_):
    print("rank 1 loads for ever", file=sys.stderr, flush=True)
    time.sleep(3600)


def cannot_make(*_):
    raise SettingError("--disk-dir", "cannot be used")


if __name__ == "__main__":
    from pensieve.runtime.launch import ranks as launch_ranks
    from pensieve.runtime.launch import serving
    from pensieve.runtime.ranks import executor as ranks_executor

    # the HTTP process, which imports this file too, is no rank
    from pensieve.runtime.ranks import mpi as ranks

    # no rank waits for these, so a busy machine gets the full time
    if sys.argv[1] not in ("raise", "kill"):
        ranks.OVERDUE_SECONDS = ranks_executor.OVERDUE_SECONDS = 3.0
    ranks_executor.FAREWELL_SECONDS = 3.0
    if sys.argv[1] == "absent":
        ranks.MEETING_SECONDS = 10.0
    if ranks.MPI.COMM_WORLD.rank == (sys.argv[1] != "leader"):
        match sys.argv[1]:
            case "late" | "absent":
                launch_ranks.open_engine = never_open
            case "unset":
                serving.make_executor = cannot_make
            case "last":
                Executor.close = stop
            case fault:
                break_at(fault)
    sys.exit(serve.main(sys.argv[2:]))

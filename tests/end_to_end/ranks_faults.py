"""`pensieve serve` as one of several ranks, of which rank 1 does what its first argument says in its fourth step; with
"late" it never has its weights."""

from __future__ import annotations

import os
import signal
import sys
import time

from pensieve.runtime.executor import Executor
from pensieve.scripts.serve import main

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
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "hang":
                    time.sleep(3600)
        launch(self, plan)

    Executor.launch = broken


def never_open(*_):
    print("rank 1 loads for ever", file=sys.stderr, flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    from pensieve.runtime import ranks_executor  # the HTTP process, which imports this file too, is no rank
    from pensieve.runtime.ranks import MPI
    from pensieve.scripts import ranks_command

    ranks_executor.OVERDUE_SECONDS = 3.0
    if MPI.COMM_WORLD.rank == 1:
        if sys.argv[1] == "late":
            ranks_command.open_engine = never_open
        else:
            break_at(sys.argv[1])
    sys.exit(main(sys.argv[2:]))

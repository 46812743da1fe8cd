"""Each of three ranks agrees, adds up and gets messages; a fault raises. Run by mpirun; rank 0
prints the results."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path

import torch

from pensieve.plugins.collectives.protocol import ThreadRanks
from pensieve.runtime.ranks import mpi as runtime_ranks
from pensieve.runtime.ranks.mpi import RankFailed, Ranks
from pensieve.runtime.system import give_up_after
from pensieve.scheduler.types import SettingError


def check_sums(ranks):
    """MpiRanks, called by its own thread as on a device, against its twin. The bits are equal on
    all ranks."""
    group = ranks.open_group("cpu", torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        shares = torch.randn(ranks.size, 5, 64, generator=generator).to(dtype)
        twin = ThreadRanks(ranks.size)
        total, row, told = twin.run(
            lambda rank, twin=twin, shares=shares: (
                twin.all_reduce(shares[rank]),
                twin.all_gather(shares[rank]),
                twin.broadcast(shares[rank]),
            )
        )[0]
        sums = []
        x = shares[ranks.rank]

        out = torch.empty_like(x)

        def compute(x=x, sums=sums, out=out):
            sums += [group.all_reduce(x), group.all_gather(x.t()[:, :3].t()), group.broadcast(x)]
            group.all_reduce(x, out)

        thread = threading.Thread(target=compute)
        thread.start()
        ranks.smallest(ranks.rank)  # beside it, in another thread
        thread.join()
        assert torch.equal(sums[0], total) and torch.equal(sums[2], told)
        assert torch.equal(out, total)
        assert torch.equal(sums[1], torch.cat(tuple(shares[:, :3]), dim=-1)) and row.shape == (
            5,
            64 * ranks.size,
        )
        assert torch.equal(x, shares[ranks.rank])


def check_messages(ranks, directory):
    """Longer than the messages that MPI takes before they are received; reports cross plans."""
    plan = bytes(range(256)) * 4096
    report = bytes(1 << 20)
    there = [directory / str(rank) for rank in range(1, ranks.size)]
    if ranks.rank == 0:
        for _ in range(3):
            ranks.send(plan)
        # A plan that is sent has been received: rank 0 may wait for the others without a further
        # call of MPI.
        deadline = time.monotonic() + 100
        while not all(file.exists() for file in there):
            assert time.monotonic() < deadline, (
                "a plan was not received until rank 0 called MPI again"
            )
            time.sleep(0.01)
        told = []
        while len(told) < 3 * len(there):
            told += ranks.reports()
        assert sorted(rank for rank, _ in told) == sorted(3 * [1, 2]) and all(
            sent_report == report for _, sent_report in told
        )
    else:
        for turn in range(3):
            while (received := ranks.receive()) is None:
                time.sleep(1e-4)
            assert received == plan
            if turn == 2:
                (directory / str(ranks.rank)).touch()
            ranks.report(report)
    ranks.together(lambda: None)


def check_agreement(ranks):
    assert ranks.together(lambda: 7 * ranks.rank) == 7 * ranks.rank
    assert ranks.smallest(10 - ranks.rank, ranks.rank) == (11 - ranks.size, 0)
    ranks.check_equal("--engine", "fingerprint", "same")
    assert (ranks.local_rank, ranks.local_size) == (ranks.rank, ranks.size)


def refuse(ranks, what):
    def work():
        if ranks.rank == 1:
            raise SettingError("--device", "there is none on this one")

    def stop(rank):
        runtime_ranks.MEETING_SECONDS = runtime_ranks.OVERDUE_SECONDS = (
            runtime_ranks.FAREWELL_SECONDS
        ) = 3.0
        if ranks.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)

    def stop_in_the_middle():
        """Stops in the middle of a message that continues only while its sender calls MPI."""
        stop(None)
        if ranks.rank == 1:
            ranks._send(bytes(1 << 24), [0], runtime_ranks.VALUE)
            stop(1)
        time.sleep(1.0)
        ranks.gather(None)

    def fail_alone():
        """While the others wait for this rank."""
        if ranks.rank == 1:
            raise ValueError("no room")
        ranks.gather(None)

    def wait_for_ever():
        while ranks.rank == 1:
            time.sleep(60)

    def send_plans():
        """Longer than the messages that MPI takes before they are received."""
        stop(1)
        while ranks.rank:
            ranks.receive()
        while True:
            ranks.send(bytes(1 << 20))

    def fail_at_length():
        """A message that MPI takes only when it is received; a path that is no text is in it."""
        if ranks.rank:
            time.sleep(ranks.rank - 1)
            ranks.fail(ValueError("long " * 2**18 + "\udcff"))
        time.sleep(0.5)  # memory that rank 1 has freed meanwhile is gone
        try:
            while True:
                deque(ranks.reports())
        except RankFailed as error:
            first = str(error)[: len("rank 1")]  # rank 1, unless the machine stopped it
            assert first in ("rank 1", "rank 2")
            assert str(error) == f"{first}: ValueError: " + "long " * 2**18 + "\\udcff"
        raise RankFailed("rank 1 failed, at length")

    ranks.together(lambda: None)  # no limit begins before all are there
    if what == "setting":
        ranks.together(work)
    elif what.startswith("absent"):
        stop(int(what[-1]))
        ranks.gather(None)
    elif what == "middle":
        stop_in_the_middle()
    elif what == "alone":
        fail_alone()
    elif what == "fails":
        fail_at_length()
    elif what == "stopped":
        send_plans()
    elif what == "late":
        with give_up_after(1.0):
            wait_for_ever()
    else:
        ranks.check_equal("--engine", "fingerprint", "abc"[ranks.rank])


if __name__ == "__main__":
    ranks = Ranks()
    try:
        check_agreement(ranks)
        check_sums(ranks)
        if sys.argv[1:2] == ["messages"]:
            check_messages(ranks, Path(sys.argv[2]))
        elif len(sys.argv) > 1:
            refuse(ranks, sys.argv[1])
            ranks.together(lambda: None)  # where the others are ended
    except SettingError as error:
        if ranks.rank == 0:
            print(error, flush=True)
        ranks.fail(error, status=2)
    except RankFailed as error:
        print(error, flush=True)
        ranks.fail(error)
    except BaseException as error:
        ranks.fail(error)
    if ranks.rank == 0:
        print("all well")

"""The ranks that mpirun started, and their messages outside of the forward pass. The only module
that imports MPI.

Rank 0 sends plans, the others report. Each message goes from one rank to one other, so a waiting
rank can poll and notices at once that another has failed. Everything here except `MpiRanks` is for
the main thread; the forward pass has its own communicator, used by the computing thread.

**Failure.** A rank that fails tells rank 0. Rank 0 raises the first such message where it waits,
tells its clients and ends all ranks. A rank that is not ended exits by itself after a while. If one
is killed, mpirun ends the others. Every wait for a rank has a time limit, except the wait for rank
0's next plan.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed
from mpi4py import MPI
from torch import Tensor

from ...plugins.collectives.protocol import Group
from ...scheduler.types import SettingError
from ..system import MEETING_SECONDS, give_up_after

if TYPE_CHECKING:
    from ...plugins.collectives.cuda import CudaRanks

log = logging.getLogger(__name__)

PLAN, REPORT, FAILURE, VALUE = range(4)  # tags of messages
# for rank 0 to notice another's failure; it may be waiting for that one on its GPU
HEARING_SECONDS = 5.0
FAREWELL_SECONDS = 20.0  # for rank 0 to tell its clients, and for NCCL to end
OVERDUE_SECONDS = 120.0  # far longer than any step or any wait of one rank for another
SPINS = 10  # polls of a collective call before the first sleep
BUSY_PAUSE, IDLE_PAUSE = 30e-6, 1e-3  # between two polls, while a step is in flight and otherwise
# nanoseconds; with Linux's default of 50,000 a busy pause takes 95 us, with this 45 us
TIMER_SLACK = 1_000
_PR_SET_TIMERSLACK = 29

T = TypeVar("T")


class RankFailed(RuntimeError):
    """Another rank has failed, or does not answer."""


class Ranks:
    """All ranks, seen from this one. SettingError if this MPI does not support two threads."""

    def __init__(self) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise SettingError(
                "engine", "this MPI was built without MPI_THREAD_MULTIPLE, which ranks need"
            )
        # of this thread and of threads that it starts
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, TIMER_SLACK)
        self._world = MPI.COMM_WORLD
        self._messages = self._world.Dup()
        self._forward = self._world.Dup()
        self.rank, self.size = self._world.rank, self._world.size
        neighbours = self._world.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = neighbours.rank, neighbours.size
        self._sending: list[MPI.Request] = []
        self._reported: deque[tuple[int, Any]] = deque()
        self._cuda: CudaRanks | None = None

    # Agreement at the start: all ranks make the same calls.

    def together(self, work: Callable[[], T]) -> T:
        """Returns this rank's work() after all ranks have done theirs. A rank reports an exception
        to rank 0 with `fail`."""
        result = work()
        self.gather(None)
        return result

    def gather(self, value: T) -> list[T]:
        """Returns all ranks' values, in order. RankFailed if a rank does not take part; rank 0
        raises another rank's failure."""
        if self.rank:
            self._send(pickle.dumps(value), [0], VALUE)
            # Rank 0 may be last, and it knows which rank is late: it gives up first.
            late = "rank 0, or one that it waits for, has not come to the others"
            own: list[T] = self._values(
                [0], 2 * MEETING_SECONDS + FAREWELL_SECONDS, lambda _: late
            )[0]
            return own
        others = self._values(
            range(1, self.size),
            MEETING_SECONDS,
            lambda missing: f"ranks {missing} have not come to the others",
        )
        values = [value, *others]
        self._send(pickle.dumps(values), range(1, self.size), VALUE)
        self._finish_sending()
        return values

    def _values(
        self, ranks: Sequence[int], seconds: float, what_is_late: Callable[[list[int]], str]
    ) -> list[Any]:
        """Returns the next value of each rank. `what_is_late` describes ranks that have not sent a
        value in time."""
        values: dict[int, Any] = {}

        def complete() -> bool:
            self._take_reports()
            for rank in ranks:
                if rank not in values and (message := self._matching(rank, VALUE)):
                    values[rank] = pickle.loads(_content(*message))
            return len(values) == len(ranks)

        wait_until(
            complete, lambda: what_is_late([rank for rank in ranks if rank not in values]), seconds
        )
        return [values[rank] for rank in ranks]

    def slowest(self, seconds: float) -> float:
        """The largest value of all ranks."""
        return max(self.gather(seconds))

    def smallest(self, *values: int) -> tuple[int, ...]:
        """For each value, the smallest of all ranks."""
        return tuple(map(min, zip(*self.gather(values), strict=True)))

    def check_equal(self, setting: str, what: str, value: str) -> None:
        """Raises SettingError, on rank 0, unless `value` is the same on all ranks."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if self.rank == 0 and other != values[0]:
                raise SettingError(
                    setting, f"rank {rank} has another {what} than rank 0: {other}, not {values[0]}"
                )

    # Rank 0 and the others, while they serve.

    def send(self, plan: bytes) -> None:
        """Rank 0: sends a plan to all others. Empty: there are no more plans.

        Afterwards rank 0 may wait on its GPU for ranks that need the plan, but MPI transfers a long
        message only during MPI calls. So this returns only after a long plan is received; a short
        one is already on its way. RankFailed if a rank has failed, or does not receive it.
        """
        self._send(plan, range(1, self.size), PLAN)
        self._finish_sending()

    def receive(self) -> bytes | None:
        """The others: returns the next plan if it has arrived."""
        message = self._matching(0, PLAN)
        return None if message is None else _content(*message)

    def report(self, report: object) -> None:
        """Sends a report to rank 0. RankFailed if rank 0 does not receive the previous report."""
        self._send(pickle.dumps(report, pickle.HIGHEST_PROTOCOL), [0], REPORT)

    def reports(self) -> Iterator[tuple[int, Any]]:
        """Rank 0: yields (rank, report) for all reports that have arrived. If a rank has failed,
        raises RankFailed, or that rank's SettingError."""
        self._take_reports()
        while self._reported:
            yield self._reported.popleft()

    def _take_reports(self) -> None:
        """Raises as `reports`."""
        if message := self._matching(MPI.ANY_SOURCE, FAILURE):
            rank, (setting, what) = message[1].source, pickle.loads(_content(*message))
            raise (
                SettingError(setting, f"{what} (rank {rank})")
                if setting
                else RankFailed(f"rank {rank}: {what}")
            )
        while message := self._matching(MPI.ANY_SOURCE, REPORT):
            self._reported.append((message[1].source, pickle.loads(_content(*message))))

    def _send(self, content: bytes, ranks: Sequence[int], tag: int) -> None:
        """Begins to send after the previous messages are gone: until then MPI uses their memory."""
        self._finish_sending()
        self._sending = [self._messages.Isend([content, MPI.BYTE], rank, tag) for rank in ranks]

    def _finish_sending(self) -> None:
        """Waits until the messages are received, which a rank that hangs never does. Takes reports
        meanwhile: their senders receive only after them."""
        first = 1 if self.rank == 0 else 0  # the first receiver

        def unsent() -> list[int]:
            return [rank for rank, request in enumerate(self._sending, first) if not request.Test()]

        def gone() -> bool:
            if unsent():
                self._take_reports()
                return False
            return True

        wait_until(
            gone, lambda: f"ranks {unsent()} have not received their messages", OVERDUE_SECONDS
        )

    def _matching(self, source: int, tag: int) -> tuple[MPI.Message, MPI.Status] | None:
        status = MPI.Status()
        message = self._messages.Improbe(source, tag, status)
        return None if message is None else (message, status)

    def stop(self) -> None:
        """Rank 0: ends the others after their last messages. Raises as `send`."""
        self.send(b"")

    def fail(self, error: BaseException, status: int = 1, message: str = "") -> NoReturn:
        """Ends all ranks with the exit status, because of the error. Rank 0's clients must have
        been told. message: logged by the rank that ends them."""
        if self.rank:
            self._tell(error)
        print(end=message, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        time.sleep(0.2)  # for mpirun to pass the output on
        with give_up_after(FAREWELL_SECONDS):  # it waits for mpirun, which may be stopped
            self._world.Abort(status)
        os._exit(status)  # if MPI only requested the end

    def _tell(self, error: BaseException) -> None:
        """Tells rank 0, which ends this rank before this returns, unless it does not receive the
        message."""
        setting = None
        what = describe(error)
        if isinstance(error, SettingError):
            setting = error.setting
            what = error.message
        content = pickle.dumps((setting, what.encode(errors="backslashreplace").decode()))
        sending = self._messages.Issend([content, MPI.BYTE], 0, FAILURE)
        began = time.monotonic()
        heard = False
        while time.monotonic() - began < (FAREWELL_SECONDS if heard else HEARING_SECONDS):
            # a poll keeps the message moving; its memory must stay until this returns
            heard = heard or sending.Test()
            time.sleep(0.01)

    # The forward pass.

    def open_group(self, device: str, dtype: torch.dtype) -> Group:
        """Returns the group in which this rank computes, on the current device; dtype: of most
        sums. All ranks call it."""
        return MpiRanks(self._forward) if device == "cpu" else self.open_cuda_group(dtype)

    def open_cuda_group(self, dtype: torch.dtype, **settings: int) -> CudaRanks:
        """Called once in a process; further settings as for `CudaRanks`."""
        # imported here because it loads torch's symmetric memory
        from ...plugins.collectives.cuda import CudaRanks

        same_host = self.local_size == self.size
        with give_up_after(OVERDUE_SECONDS):
            self._cuda = CudaRanks(
                self.rank, self.size, self._store(), dtype, same_host, **settings
            )
        return self._cuda

    def close(self) -> None:
        """Closes the group and MPI, which waits for all ranks. Called at the end, on all ranks."""
        if self._cuda is not None:
            with give_up_after(FAREWELL_SECONDS):
                self._cuda.close()
        with give_up_after(OVERDUE_SECONDS):
            MPI.Finalize()

    def _store(self) -> torch.distributed.TCPStore:  # type: ignore[name-defined]
        """The store through which NCCL's ranks find each other."""
        local = self.local_size == self.size
        host = self._messages.bcast("127.0.0.1" if local else socket.gethostname())
        first = self.rank == 0
        store = torch.distributed.TCPStore  # type: ignore[attr-defined]
        if first:
            served = store(host, 0, self.size, is_master=True, wait_for_workers=False)
        port = self._messages.bcast(served.port if first else None)
        return (
            served
            if first
            else store(host, port, self.size, is_master=False, wait_for_workers=False)
        )


class MpiRanks:
    """A group of processes that compute on the CPU: a call returns when all ranks have made it.

    Every rank adds the same numbers in the same order, so the sums have equal bits on all ranks. If
    a rank is gone, the call does not return: the main thread, which notices it, ends the process.
    """

    def __init__(self, communicator: MPI.Comm):
        self._communicator = communicator
        self.rank: int = communicator.rank

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.sum(self._gather(x), 0, out=out)  # accumulated in float32

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(tuple(self._gather(x)), dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.clone()
        _wait(self._communicator.Ibcast(_bytes(x)))
        return x

    def _gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self._communicator.size, *x.shape)
        _wait(self._communicator.Iallgather(_bytes(x.contiguous()), _bytes(parts)))
        return parts


def pause(busy: bool) -> None:
    """Sleeps between two polls."""
    time.sleep(BUSY_PAUSE if busy else IDLE_PAUSE)


def _wait(request: MPI.Request) -> None:
    """Sleeps between polls: a rank that spins would take the core from the rank that it waits
    for."""
    for _ in range(SPINS):
        if request.Test():
            return
    while not request.Test():
        time.sleep(BUSY_PAUSE)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _bytes(x: Tensor) -> list[Any]:
    return [x.view(-1).view(torch.uint8).numpy(), MPI.BYTE]


def wait_until(
    condition: Callable[[], bool], what_is_late: Callable[[], str], seconds: float
) -> None:
    """Polls until the condition holds. RankFailed after `seconds` seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RankFailed(f"{what_is_late()} after {seconds:g} s: a rank hangs")
        pause(busy=True)


def _content(message: MPI.Message, status: MPI.Status) -> bytes:
    """Receives a message. A long one arrives only while its sender calls MPI."""
    content = bytearray(status.Get_count(MPI.BYTE))
    receiving = message.Irecv([content, MPI.BYTE])
    wait_until(
        receiving.Test,
        lambda: f"rank {status.source} has not sent all of a message",
        OVERDUE_SECONDS,
    )
    return bytes(content)

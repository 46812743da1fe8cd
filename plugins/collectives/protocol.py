"""Communication of tensor-parallel ranks inside a forward pass, as torch operations.

    torch.ops.pensieve.vocabulary_embed(token_ids, weight, group) -> x   this rank's share of the
                                                                         embeddings
    torch.ops.pensieve.all_reduce(x, group) -> x'                        the sum over all ranks
    torch.ops.pensieve.all_gather(x, ranks, group) -> x'                 all ranks' x, side by side

A group is named by a *handle*, an int, like a pool. This handle is written into compiled engines,
so it is fixed: `TENSOR_PARALLEL`. A traced graph contains the number of ranks, but not its own
rank's number. So one compiled engine serves all ranks, each with its own weights. With one rank
none of these operations is called.

Tokens drawn by rank 0 reach the others through `Group.broadcast`, which is not an operation:
engines do not contain it.

`ThreadRanks` is the group of ranks that are threads of one process: the twin of every faster one.
On GPUs `collectives.cuda.CudaRanks` is used, between processes without a GPU
`runtime.ranks.mpi.MpiRanks`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

TENSOR_PARALLEL = 0
"""The handle of the group of ranks that this process's engine is divided among."""

Result = TypeVar("Result")


class Group(Protocol):
    """The ranks that compute one forward pass together, seen from one of them.

    All make the same calls with the same shapes, in the same order. Results are new tensors (but
    for `out`) with equal bits on all ranks. On a GPU the work is issued on the current stream and
    the host never waits for it: it can be captured in a graph.
    """

    @property
    def rank(self) -> int: ...

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum of all ranks' x, in x's shape and dtype. It is written to `out` if there is one,
        which has them too and shares no memory with x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., ranks * n] of each rank's x [..., n], in order of rank."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x; the others' have its shape and dtype."""


_groups: dict[int, Group] = {}


def register_group(handle: int, group: Group) -> None:
    """Registers a group for the operations. The caller still owns it and releases the handle.
    ValueError if the handle is taken."""
    if handle in _groups:
        raise ValueError(f"group {handle} is registered already")
    _groups[handle] = group


def release_group(handle: int) -> None:
    """Removes the group; using the handle again raises KeyError."""
    del _groups[handle]


def registered_group(handle: int) -> Group | None:
    """The group with this handle, or None."""
    return _groups.get(handle)


torch.library.define(
    "pensieve::vocabulary_embed", "(Tensor token_ids, Tensor weight, int group) -> Tensor"
)
torch.library.define("pensieve::all_reduce", "(Tensor x, int group) -> Tensor")
torch.library.define("pensieve::all_gather", "(Tensor x, int ranks, int group) -> Tensor")

DEVICES = ("cpu", "cuda")


@torch.library.impl("pensieve::vocabulary_embed", DEVICES)
def _vocabulary_embed(token_ids: Tensor, weight: Tensor, group: int) -> Tensor:
    """[T, size] of token_ids [T]; weight [rows, size] of the tokens from rank * rows on. Tokens of
    other ranks get zeros."""
    rows = len(weight)
    own = token_ids - _groups[group].rank * rows
    x = torch.nn.functional.embedding(own.clamp(0, rows - 1), weight)
    return x.masked_fill_(((own < 0) | (own >= rows)).unsqueeze(1), 0.0)


@torch.library.impl("pensieve::all_reduce", DEVICES)
def _all_reduce(x: Tensor, group: int) -> Tensor:
    return _groups[group].all_reduce(x)


@torch.library.impl("pensieve::all_gather", DEVICES)
def _all_gather(x: Tensor, ranks: int, group: int) -> Tensor:
    return _groups[group].all_gather(x)


@torch.library.register_fake("pensieve::vocabulary_embed")
def _(token_ids: Tensor, weight: Tensor, group: int) -> Tensor:
    return weight.new_empty(token_ids.shape[0], weight.shape[1])


@torch.library.register_fake("pensieve::all_reduce")
def _(x: Tensor, group: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("pensieve::all_gather")
def _(x: Tensor, ranks: int, group: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], ranks * x.shape[-1])


class RanksParted(RuntimeError):
    """A rank waited for another that has ended, or that made another call."""


class _Brought(NamedTuple):
    call: str
    x: Tensor


class ThreadRanks:
    """A group of ranks in one process, each a thread.

    A call returns when all ranks have made it. If that can no longer happen, it raises RanksParted,
    so no rank waits for ever.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._thread = threading.local()  # .rank, and .calls: the number of its calls
        self._changed = threading.Condition()
        # the ranks' values, for each call that is not complete
        self._meetings: dict[int, dict[int, _Brought]] = {}
        self._ended: set[int] = set()

    @property
    def rank(self) -> int:
        """The calling thread's rank; AttributeError if `run` did not start the thread."""
        return self._thread.rank

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """Runs work(rank) for all ranks, side by side. An exception is raised after all have
        ended."""
        self._meetings.clear()
        self._ended.clear()
        with ThreadPoolExecutor(self.ranks) as pool:
            running = [pool.submit(self._work_as, rank, work) for rank in range(self.ranks)]
        errors = [error for error in map(Future.exception, running) if error is not None]
        # RanksParted follows from the others
        errors.sort(key=lambda error: isinstance(error, RanksParted))
        if errors:
            raise errors[0]
        return [done.result() for done in running]

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        # accumulated in float32
        return torch.sum(torch.stack(self._meet("all_reduce", x)), 0, out=out)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meet("all_gather", x), dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._meet("broadcast", x)[0].clone()

    def _work_as(self, rank: int, work: Callable[[int], Result]) -> Result:
        self._thread.rank = rank
        self._thread.calls = 0
        try:
            return work(rank)
        finally:
            with self._changed:
                self._ended.add(rank)
                self._changed.notify_all()

    def _meet(self, call: str, x: Tensor) -> list[Tensor]:
        """Returns all ranks' values for their n-th call, in order of rank."""
        number = self._thread.calls
        self._thread.calls += 1
        with self._changed:
            meeting = self._meetings.setdefault(number, {})
            # A copy: others may still read it after this rank has gone on and changed x.
            meeting[self.rank] = _Brought(f"{call} of {list(x.shape)} {x.dtype}", x.clone())
            if len(meeting) == self.ranks:
                del self._meetings[number]
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(meeting) == self.ranks or self._ended - meeting.keys()
            )
            brought = dict(sorted(meeting.items()))
        if len(brought) < self.ranks or len({call for call, _ in brought.values()}) > 1:
            calls = ", ".join(f"rank {rank} {call}" for rank, (call, _) in brought.items())
            raise RanksParted(f"of {self.ranks} ranks' call {number} there is: {calls}")
        return [x for _, x in brought.values()]

"""The group of ranks that have a GPU each: NCCL, and for small sums between GPUs of one host a
single kernel that reads all ranks' numbers.

Both are captured in CUDA graphs. Both leave NVLink's multicast off: not every host's fabric offers
it to every process; on others it fails late, or hangs.

**One shot.** Every rank copies its numbers into memory that all ranks can read, waits inside the
kernel for the other ranks' numbers, then reads and adds all of them in the order of the ranks, so
all results have equal bits. The kernels of all ranks end together, so the next call may use the
memory again. Each rank reads all of every other rank's numbers, several times as much as NCCL
moves. This does not matter for small sums, whose time is mostly latency.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

ONE_SHOT_BYTES = 2**20
"""Bytes of the largest one-shot sum: 64 tokens 8,192 wide in bfloat16, which takes 19 us on four
H200, with NCCL 20."""

ONE_SHOT_RANKS = (2, 4, 8)  # with other counts torch's kernel adds in another order on each rank
ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)
_ALIGNMENT = 16  # bytes; whole vectors

# the name since torch 2.13
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

OVERDUE = timedelta(seconds=120)
"""Time limit for all ranks to meet at the start. After this time torch also ends a process with an
unfinished NCCL call outside of a graph, and names the call."""

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Read when NCCL and torch's symmetric memory start; variables that are already set stay."""


class CudaRanks:
    """This process's GPU is the current device. One group in a process; `close` it after the last
    graph with it is gone."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        store: dist.Store,  # type: ignore[name-defined]  # torch defines it only where it has distributed
        dtype: torch.dtype,
        same_host: bool = True,
        one_shot_bytes: int = ONE_SHOT_BYTES,
    ):
        """All ranks call it. store: through which ranks find each other; dtype: of one-shot sums;
        same_host: True if all ranks are on one host."""
        for name, value in OFF.items():
            os.environ.setdefault(name, value)
        self.rank = rank
        self.ranks = ranks
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=ranks, device_id=device, timeout=OVERDUE
        )
        assert dist.group.WORLD is not None
        self.name = dist.group.WORLD.group_name
        self.one_shot_bytes = 0
        """Larger sums, and sums of another dtype, use NCCL. May be lowered, to the same value on
        all ranks."""
        self.shared: Tensor | None = None
        """[numbers] of `dtype`: this rank's part of the shared memory; only one one-shot call at a
        time may use it."""
        if same_host and one_shot_bytes and ranks in ONE_SHOT_RANKS and dtype in ONE_SHOT_DTYPES:
            self.shared = _shared_memory(one_shot_bytes // dtype.itemsize, dtype, device, self.name)
            self.one_shot_bytes = one_shot_bytes
        self._try(dtype, device)

    def _try(self, dtype: torch.dtype, device: torch.device) -> None:
        """Tries each method once, and the host waits: a hang or a wrong result shows now, not
        inside a graph. A kernel's first launch may wait for the whole GPU, which may wait for other
        ranks; connections are made while the hosts wait."""
        for numbers in (8, self.one_shot_bytes // dtype.itemsize + 8):
            total = self.all_reduce(torch.ones(numbers, dtype=dtype, device=device))
            if not bool((total == self.ranks).all()):
                raise RuntimeError(
                    f"the sum of {numbers} ones of each of {self.ranks} ranks is wrong on rank "
                    f"{self.rank}"
                )
        own = torch.full((1, 4), self.rank, dtype=torch.int32, device=device)
        gathered = self.all_gather(own)
        told = self.broadcast(own)
        if gathered.tolist() != [[rank for rank in range(self.ranks) for _ in range(4)]] or bool(
            told.any()
        ):
            raise RuntimeError(
                f"rank {self.rank} gathers {gathered.tolist()} and is told {told.tolist()}"
            )

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        total = torch.empty_like(x) if out is None else out
        shared = self.shared
        if shared is not None and shared.dtype == x.dtype and self._takes_one_shot(x, total):
            place = shared[: x.numel()].view(x.shape)
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(place, x, "sum", self.name, total)
        else:
            dist.all_reduce(total.copy_(x))
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        _gather(parts, x.contiguous())
        return parts.view(self.ranks, *x.shape).movedim(0, -2).flatten(-2)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        """All ranks call it. NCCL waits for graphs that captured it, so these must be gone."""
        torch.cuda.synchronize()
        self.shared = None
        dist.destroy_process_group()

    def _takes_one_shot(self, x: Tensor, total: Tensor) -> bool:
        whole = (x.data_ptr() | total.data_ptr() | x.nbytes) % _ALIGNMENT == 0
        return whole and 0 < x.nbytes <= self.one_shot_bytes


def _shared_memory(
    numbers: int, dtype: torch.dtype, device: torch.device, group: dist.distributed_c10d.GroupName
) -> Tensor:
    """Memory of this rank that all ranks can read. Not allocated from torch's cache, so its address
    stays."""
    memory = _symmetric_memory.empty(numbers, dtype=dtype, device=device)
    _symmetric_memory.rendezvous(memory, group)
    return memory

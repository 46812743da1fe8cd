"""Copies of a CUDA device that change the form of KV on the way: HOST holds coded records
(`kv_forms`).

A lane that codes is two streams with a staging buffer on the GPU between them:

    OUT   entry: the pool's chunks are encoded into the buffer      exit: copied to HOST
    IN    entry: HOST's records are copied into the buffer          exit: decoded into the pool

The buffer has two halves. One is filled while the other is emptied:

    entry   fill A        fill B        fill A, once emptied ...
    exit                  empty A       empty B ...

A half is emptied only after it is filled, and filled again only after it is emptied: there is one
event for each. The lane's tickets and gates are marked on its exit, where the work of a copy ends.
A lane that waits makes both streams wait, because the entry reads data that others have written and
the exit overwrites data that others have read. The host waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.cuda import Event

from ...plugins.kv_forms.forms import Form
from ...scheduler.plan import Lane
from .pinned_memory import Records

HALF_BYTES = 32 * 2**20
"""Bytes of a half of a staging buffer: it takes 0.6 ms on the link, much longer than issuing it. A
record must fit."""

CopyCall = Callable[[np.ndarray, np.ndarray, np.ndarray, int], None]
"""See `CudaRuntime.copy_batch`."""


class _Half:
    def __init__(self, size: int, device: torch.device):
        # the kernels leave padding zero
        self.records = torch.zeros(size, dtype=torch.uint8, device=device)
        self.filled, self.emptied = Event(), Event()


class CodedCopies:
    """The copies of one lane."""

    def __init__(
        self,
        lane: Lane,
        form: Form,
        pool: Tensor,
        host: Records,
        stream: torch.cuda.Stream,
        copy: CopyCall,
    ):
        """pool: the GPU's, still zero; host: the addresses of the coded records; stream: the
        lane's, used as its exit."""
        # imported here because only CUDA installations have Triton
        from ...plugins.kv_forms.host_copy_kernel import copy_words

        self._kernels = form.kernels()
        self._copy_words = copy_words
        self._lane = lane
        self._pool = pool
        self._host = host
        self._copy = copy
        self.entry = torch.cuda.Stream()
        self._exit = stream
        self._layer_bytes = form.layer_bytes(pool.shape)
        self._half_bytes = max(HALF_BYTES, host.record)
        self._halves = [_Half(self._half_bytes, pool.device) for _ in range(2)]
        # Pinned buffers of slots, as large as a copy can need, each with the event after which the
        # GPU has read it; the oldest first.
        self._uploads: deque[tuple[Tensor, Event]] = deque()
        none = np.zeros(1, np.int32)
        self._uploaded = none, self._upload(none)
        self._compile()

    def _compile(self) -> None:
        """Compiles the kernels with zeros as data, so that no copy waits for the compiler."""
        records = self._halves[0].records[: self._layer_bytes].view(1, 1, -1)
        # pool and buffer are zeroed on that stream
        self.entry.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.entry):
            self._code(records, self._uploaded[1], range(1))

    def copy(self, gpu_slots: np.ndarray, host_slots: np.ndarray, layers: range) -> None:
        """Issues the copy of `layers` of the chunks in `gpu_slots` to or from `host_slots`, [n]
        int32 each."""
        piece = len(layers) * self._layer_bytes
        hosted = self._host.addresses(host_slots, layers.start * self._layer_bytes)
        # the layer groups of a gated swap-in share one array
        if gpu_slots is not self._uploaded[0]:
            self._uploaded = gpu_slots, self._upload(gpu_slots)
        slots = self._uploaded[1]
        a_half = self._half_bytes // piece
        for first in range(0, len(hosted), a_half):
            part = slice(first, first + a_half)
            count = len(hosted[part])
            half = self._halves[0]
            self._halves.reverse()
            records = half.records[: count * piece].view(count, len(layers), -1)
            staged = half.records.data_ptr() + piece * np.arange(count, dtype=np.uint64)
            sizes = np.full(count, piece, np.uint64)

            self.entry.wait_event(half.emptied)
            if self._lane is Lane.OUT:
                with torch.cuda.stream(self.entry):
                    self._code(records, slots[part], layers)
            else:
                self._copy(staged, hosted[part], sizes, self.entry.cuda_stream)
            half.filled.record(self.entry)

            self._exit.wait_event(half.filled)
            if self._lane is Lane.OUT:
                self._copy(hosted[part], staged, sizes, self._exit.cuda_stream)
            else:
                with torch.cuda.stream(self._exit):
                    self._code(records, slots[part], layers)
            half.emptied.record(self._exit)

    def _upload(self, slots: np.ndarray) -> Tensor:
        """Uploads slots on the entry, by a kernel: the copy engine would first finish the copies
        that it has."""
        if not self._uploads or not self._uploads[0][1].query():
            pinned = torch.empty(len(self._pool), dtype=torch.int32, pin_memory=self._pool.is_cuda)
            self._uploads.appendleft((pinned, Event()))
        pinned, read = self._uploads.popleft()
        pinned.numpy()[: len(slots)] = slots
        with torch.cuda.stream(self.entry):
            uploaded = torch.empty(len(slots), dtype=torch.int32, device=self._pool.device)
            self._copy_words(uploaded, pinned[: len(slots)])
            read.record(self.entry)
        self._uploads.append((pinned, read))
        uploaded.record_stream(self._exit)  # torch frees its memory only after both streams
        return uploaded

    def _code(self, records: Tensor, slots: Tensor, layers: range) -> None:
        """Encodes or decodes, on the current stream."""
        if self._lane is Lane.OUT:
            self._kernels.encode(self._pool, slots, layers, records)
        else:
            self._kernels.decode(records, slots, layers, self._pool)

"""benchmarks.host: `pensieve serve` with a device that computes nothing. What can the host serve?

    python -m benchmarks.host --step-ms 1 --engine DIR --max-num-seqs 512 ...
    python -m benchmarks.text --url http://127.0.0.1:8000 --data FILE --streams 1,512

The device lays out what a GPU would read. As on a GPU, a step begins when the one before it is
complete, and is complete `--step-ms` later. All other options are those of `pensieve serve`.
`/metrics` has the seconds of a step's parts; at its end the server prints how long the device was
idle between steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch

from pensieve.plugins.kv_forms.forms import Form
from pensieve.runtime.counters import NO_WAITS
from pensieve.runtime.device.memory import GIB, host_memory
from pensieve.runtime.device.protocol import Device, Memory, Ticket, TransferSeconds, Work
from pensieve.runtime.launch import assemble
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import Tier
from pensieve.scripts import pensieve

from .scheduler import StagingDevice

GPU_BYTES = 80 * GIB
POLL_S = 30e-6  # as a GPU's device waits
PAUSE_S = 0.05  # a longer time without a step is a time without requests


class TimedTicket(Ticket):
    """Complete at `due`, seconds."""

    __slots__ = ("due",)

    def __init__(self, due: float):
        self.due = due


class TimedDevice(StagingDevice):
    """Its steps take time, and their tokens are a range of ids."""

    def __init__(self, step_s: float):
        self._step_s = step_s
        self._free_at = 0.0  # when the last step ends
        self._idle_s = 0.0
        self._steps = 0

    def memory(self, tier: Tier) -> Memory:
        return host_memory() if tier is Tier.HOST else Memory(GPU_BYTES, GPU_BYTES)

    def allocate_pool(
        self,
        tier: Tier,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        form: Form | None = None,
        most: int = 0,
    ) -> None:
        self.host_slots = shape[0]  # of the last pool, HOST's

    def mark(self, lane: Lane, gate: int | None = None) -> TimedTicket:
        return TimedTicket(self._free_at if lane is Lane.COMPUTE else 0.0)

    def ready(self, ticket: Ticket) -> bool:
        return time.perf_counter() >= cast(TimedTicket, ticket).due

    def synchronize(self, ticket: Ticket) -> None:
        while not self.ready(ticket):
            time.sleep(POLL_S)

    def run(self) -> None:
        now = time.perf_counter()
        idle = now - self._free_at
        if 0.0 < idle < PAUSE_S:
            self._idle_s += idle
        self._free_at = max(now, self._free_at) + self._step_s
        self._steps += 1

    def sample(self) -> tuple[TimedTicket, np.ndarray, None]:
        first = 1000 + self._steps % 1000
        return (
            TimedTicket(self._free_at),
            np.arange(first, first + self._rows, dtype=np.int32),
            None,
        )

    def transfer_seconds(self) -> TransferSeconds:
        return TransferSeconds(0.0, 0.0, 0.0, NO_WAITS, NO_WAITS)

    def watch(self, report: Callable[[Work], None]) -> None:
        """Reports nothing."""

    def close(self, host_in_use: bool = False) -> None:
        steps = max(1, self._steps)
        print(f"{steps} steps, idle {self._idle_s / steps * 1e6:.0f} us a step", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.host", description=__doc__.partition("\n")[0])
    parser.add_argument("--step-ms", type=float, default=1.0, metavar="MS", help="of the device")
    options, words = parser.parse_known_args(argv)
    device = cast(Device, TimedDevice(options.step_ms / 1e3))
    assemble.make_device = lambda *_: device
    return pensieve.main(["serve", *words])


if __name__ == "__main__":
    sys.exit(main())

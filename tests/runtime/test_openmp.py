"""Threads that compute sleep when they wait, as long as other processes need their processors."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from pensieve.runtime.openmp import (
    CALM_LOOKS,
    OF_THE_USER,
    ProcessorUsage,
    SharedProcessors,
    idle_teams,
    read_usage,
)


class Machine:
    """Numbers of a machine with so many processors; each `second` has what other processes used."""

    def __init__(self, processors: int = 4, threads: int = 4):
        self.processors = processors
        self.threads = threads
        self.now = self.total = self.own = 0.0
        self.teams: list[tuple[int, threading.Event]] = []
        self.shared = SharedProcessors(self.start_team, self.usage)
        self.shared.look(self.now)

    def usage(self) -> ProcessorUsage:
        return ProcessorUsage(self.threads, self.processors, self.total, self.own)

    def start_team(self, threads: int) -> threading.Event:
        self.teams.append((threads, threading.Event()))
        return self.teams[-1][1]

    def second(self, others: float, seconds: float = 1.0) -> bool:
        """Returns whether threads sleep."""
        self.now += seconds
        self.own += 1.5 * seconds
        self.total += (1.5 + others) * seconds
        self.shared.look(self.now)
        return self.asleep()

    def asleep(self) -> bool:
        live = [team for team in self.teams if not team[1].is_set()]
        assert len(live) <= 1
        return bool(live)


def test_threads_sleep_while_another_process_computes():
    machine = Machine()
    assert not machine.second(others=0.2)
    assert machine.second(others=1.0)
    assert machine.second(others=0.4)
    # with the other team 5 threads on 4 processors
    assert [threads for threads, _ in machine.teams] == [2]


def test_threads_spin_again_when_the_processors_were_free_for_some_looks():
    machine = Machine()
    spinning = [machine.second(others) for others in (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)]
    assert CALM_LOOKS == 3
    assert spinning == [True, True, True, True, True, True, False, False, True]


def test_others_may_use_processors_that_no_thread_needs():
    machine = Machine(processors=16, threads=4)
    assert not machine.second(others=12.0)
    assert machine.second(others=12.5)
    assert machine.teams[0][0] == 14  # 3 + 13 threads beside the first: one more than processors


def test_a_single_thread_waits_for_no_other():
    assert not Machine(processors=1, threads=1).second(others=3.0)


def test_more_threads_than_processors_still_get_a_team_of_two():
    machine = Machine(processors=2, threads=8)
    assert machine.second(others=0.0)
    assert machine.teams[0][0] == 2


def test_it_looks_once_a_second():
    machine = Machine()
    assert not machine.second(others=4.0, seconds=0.6)
    assert machine.second(others=4.0, seconds=0.6)


def test_the_end_of_a_device_ends_the_team():
    machine = Machine()
    assert machine.second(others=4.0)
    machine.shared.close()
    assert not machine.asleep()


PASSES = """
import os, re, threading, time
from pathlib import Path
import torch
from pensieve.runtime.openmp import OF_THE_USER, idle_teams

for name in OF_THE_USER:
    os.environ.pop(name, None)
start_team = idle_teams()
if start_team is None:
    raise SystemExit("no libgomp")
tasks = Path("/proc/self/task")

def sleeps():
    texts = [status.read_text() for status in tasks.glob("*/status")]
    switches = r"\\nvoluntary_ctxt_switches:\\s*(\\d+)"
    return sum(int(number) for text in texts for number in re.findall(switches, text))

def regions():
    before = sleeps()
    for _ in range(REGIONS):
        numbers.add_(1)
    return sleeps() - before

def compute():
    global numbers
    numbers = torch.zeros(32768 * torch.get_num_threads())
    sleep_counts = [regions(), regions()]
    threads = len(list(tasks.iterdir()))
    ended = start_team(2)
    sleep_counts.append(regions())
    ended.set()
    while len(list(tasks.iterdir())) > threads:
        time.sleep(0.01)
    sleep_counts.append(regions())
    print(sleep_counts[1:])

computing = threading.Thread(target=compute)  # the main thread has no team
computing.start()
computing.join()
"""
REGIONS = 50


DEVICE = """
import threading, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.openmp import libgomp
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import Tier

if libgomp() is None:
    raise SystemExit("no libgomp")
tasks = Path("/proc/self/task")

def threads(most):
    for _ in range(6000):
        if len(list(tasks.iterdir())) <= most:
            break
        time.sleep(0.01)
    return len(list(tasks.iterdir()))

device = CpuDevice()
without_teams = len(list(tasks.iterdir()))
many = 32768 * torch.get_num_threads()
for tier in (Tier.GPU, Tier.HOST):
    device.allocate_pool(tier, (1, 1, 2, 1, 4, many), torch.float32)
torch.zeros(many).add_(1)
found = [len(list(tasks.iterdir())) - without_teams]
device.load(SimpleNamespace(vocab_size=97), 1, 1, (), 1)
found.append(threads(without_teams) - without_teams)
for lane in (Lane.OUT, Lane.IN):
    device.copy(lane, np.zeros(1, np.int32), np.zeros(1, np.int32), range(1))
    device.synchronize(device.mark(lane))
found.append(len(list(tasks.iterdir())) - without_teams)
print(found)
"""


def with_all_processors(program: str) -> list[int]:
    processors = len(os.sched_getaffinity(0))
    if processors < 2:
        pytest.skip("needs two processors")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"OMP_NUM_THREADS": str(processors), "GOMP_SPINCOUNT": "10000000"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "no libgomp" in done.stderr:
        pytest.skip("this torch has another OpenMP")
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_a_team_without_work_makes_threads_sleep():
    """Sleeps of all threads in `REGIONS` parallel regions, with almost no limit to spinning:
    without, with and without the second team. On a busy machine threads that have no processor
    hardly wait, so it is tried until they do."""
    passes = []
    until = time.monotonic() + 300
    while time.monotonic() < until:
        passes.append(with_all_processors(f"REGIONS = {REGIONS}\n{PASSES}"))
        spinning, sleeping, spinning_again = passes[-1]
        if sleeping > REGIONS / 2 and max(spinning, spinning_again) < sleeping / 5:
            return
    raise AssertionError(passes)


def test_only_the_thread_of_passes_keeps_a_team():
    """Threads of teams: after work on the main thread, after a device was loaded there, after
    copies."""
    main, loaded, copied = with_all_processors(DEVICE)
    assert (main > 0, loaded, copied) == (True, 0, 0)


def test_what_this_process_and_others_use():
    before = read_usage()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = read_usage()
    assert after.own_seconds >= before.own_seconds + 0.1
    assert after.total_seconds >= before.total_seconds
    assert after.processors == len(os.sched_getaffinity(0))
    assert after.threads == torch.get_num_threads()


@pytest.mark.parametrize("name", OF_THE_USER)
def test_a_variable_of_the_user_wins(name, monkeypatch):
    monkeypatch.setenv(name, "7")
    assert idle_teams() is None
    SharedProcessors(None, usage=lambda: pytest.fail("it looked")).look(1.0)

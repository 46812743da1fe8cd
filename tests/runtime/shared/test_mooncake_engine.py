"""The engine on a real Mooncake store, and what it makes of masters and owners that fail."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from pensieve.runtime.shared import mooncake
from pensieve.runtime.shared.config import MooncakeOptions
from pensieve.runtime.shared.engine import StoreOutcome
from pensieve.runtime.shared.mooncake import MooncakeEngine
from pensieve.scheduler.types import SettingError

from ...mooncake import ENVIRONMENT, PrivateMooncake, kill
from ...pausing import pause
from .engine_tests import DONE, MISSING, PAGE, PAYLOAD, EngineTests, key, record, same
from .store_tests import StoreTests

FAILED = StoreOutcome.FAILED
SOON = 30.0
"""Seconds, as Mooncake's own time-outs: a call that takes so long had not ours."""
PATIENCE = 120.0


@pytest.fixture
def store() -> Iterator[PrivateMooncake]:
    """For a test that makes it fail."""
    with PrivateMooncake() as store:
        yield store


@pytest.fixture
def engine(store: PrivateMooncake) -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine(MooncakeOptions(store.master))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def sound_store() -> Iterator[PrivateMooncake]:
    with PrivateMooncake() as store:
        yield store


@pytest.fixture(scope="module")
def lasting_engine(sound_store: PrivateMooncake) -> Iterator[MooncakeEngine]:
    """To close one takes a second."""
    engine = MooncakeEngine(MooncakeOptions(sound_store.master))
    yield engine
    engine.close()


class TestMooncakeEngine(EngineTests):
    @pytest.fixture
    def engine(
        self, lasting_engine: MooncakeEngine, sound_store: PrivateMooncake
    ) -> Iterator[MooncakeEngine]:
        yield lasting_engine
        lasting_engine.remove(list(sound_store.keys()))

    def test_it_can_be_closed_twice(self, sound_store: PrivateMooncake) -> None:
        engine = MooncakeEngine(MooncakeOptions(sound_store.master))
        super().test_it_can_be_closed_twice(engine)
        assert engine.exists([key(1)]) is None


class TestStoreOnMooncake(StoreTests):
    @pytest.fixture
    def open_engine(
        self, lasting_engine: MooncakeEngine, sound_store: PrivateMooncake
    ) -> Iterator[Callable[[], MooncakeEngine]]:
        yield lambda: MooncakeEngine(MooncakeOptions(sound_store.master))
        lasting_engine.remove(list(sound_store.keys()))


def test_smaller_and_larger_records_are_missing_and_removed(
    engine: MooncakeEngine, store: PrivateMooncake
) -> None:
    engine.put([key(1), key(2)], [record(engine, 1), record(engine, 2)])
    parts = [record(engine, 0, PAYLOAD + PAGE), record(engine, 0, PAYLOAD - PAGE)]
    assert engine.get([key(1), key(2)], parts) == [MISSING, MISSING]
    assert store.keys() == set()


def test_another_server_reads_what_one_has_put(
    engine: MooncakeEngine, store: PrivateMooncake
) -> None:
    engine.put([key(1)], [record(engine, 1)])
    engine.close()
    other = MooncakeEngine(MooncakeOptions(store.master))
    try:
        read = record(other, 0)
        assert other.get([key(1)], [read]) == [DONE]
        assert same(read, record(other, 1))
    finally:
        other.close()


@pytest.mark.slow
def test_a_server_starts_before_the_master(store: PrivateMooncake) -> None:
    kill(store.owner_process)
    kill(store.master_process)
    engine = MooncakeEngine(MooncakeOptions(store.master))
    try:
        assert engine.exists([key(1)]) is None
        store.start_master()
        store.start_owner()
        assert engine.put([key(1)], [record(engine, 1)]) == [DONE]
    finally:
        engine.close()


@pytest.mark.slow
def test_a_server_starts_while_the_master_hangs(store: PrivateMooncake) -> None:
    pause(store.master_process.pid)
    engine = MooncakeEngine(MooncakeOptions(store.master))
    try:
        assert engine.exists([key(1)]) is None
        store.master_process.send_signal(signal.SIGCONT)
        assert engine.put([key(1)], [record(engine, 1)]) == [DONE]
    finally:
        engine.close()


def test_an_attempt_to_connect_that_would_hold_up_python_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody accepts this connection, as if the master hung."""
    monkeypatch.setattr(mooncake, "REACHED_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        master = f"127.0.0.1:{listener.getsockname()[1]}"
        assert not mooncake.answers(master)
    assert not mooncake.answers(master)


@pytest.mark.slow
def test_a_master_that_hangs_fails_calls_soon(
    engine: MooncakeEngine, store: PrivateMooncake
) -> None:
    engine.put([key(1)], [record(engine, 1)])
    pause(store.master_process.pid)
    begun = time.monotonic()
    assert engine.exists([key(1)]) is None
    assert engine.get([key(1)], [record(engine, 0)]) == [FAILED]
    assert engine.put([key(2)], [record(engine, 1)]) == [FAILED]
    assert engine.remove([key(3)]) == [FAILED]
    assert time.monotonic() - begun < SOON
    store.master_process.send_signal(signal.SIGCONT)
    assert engine.get([key(1)], [record(engine, 0)]) == [DONE]


@pytest.mark.slow
def test_a_master_that_is_started_again_knows_nothing(
    engine: MooncakeEngine, store: PrivateMooncake
) -> None:
    engine.put([key(1)], [record(engine, 1)])
    kill(store.master_process)
    assert engine.exists([key(1)]) is None
    store.start_master()
    assert engine.get([key(1)], [record(engine, 0)]) == [MISSING]
    again_put(engine)


def again_put(engine: MooncakeEngine) -> None:
    """Waits until owners have room for records again."""
    end = time.monotonic() + PATIENCE
    while engine.put([key(9)], [record(engine, 9)]) != [DONE]:
        assert time.monotonic() < end, "no record can be put"
        time.sleep(0.1)
    read = record(engine, 0)
    assert engine.get([key(9)], [read]) == [DONE]
    assert same(read, record(engine, 9))


@pytest.mark.slow
def test_records_of_a_killed_owner_are_not_done(
    engine: MooncakeEngine, store: PrivateMooncake
) -> None:
    engine.put([key(1)], [record(engine, 1)])
    kill(store.owner_process)
    assert engine.get([key(1)], [record(engine, 0)]) in ([FAILED], [MISSING])
    store.start_owner()
    again_put(engine)


@pytest.mark.slow
def test_a_read_that_failed_writes_nothing_later(
    engine: MooncakeEngine, store: PrivateMooncake
) -> None:
    engine.put([key(1)], [record(engine, 1)])
    pause(store.owner_process.pid)
    read = record(engine, 0)
    begun = time.monotonic()
    assert engine.get([key(1)], [read]) == [FAILED]
    assert time.monotonic() - begun < SOON
    for part in read:
        part[:] = 77
    store.owner_process.send_signal(signal.SIGCONT)
    assert engine.get([key(1)], [record(engine, 0)]) == [DONE]  # the owner answers again
    assert all((part == 77).all() for part in read)


ENDING = """
import sys, threading, time
from pensieve.runtime.shared.config import MooncakeOptions
from pensieve.runtime.shared.mooncake import MooncakeEngine

class SlowEnd:
    def __del__(self, sleep=time.sleep):
        sleep(6)

slow = SlowEnd()  # Python is ending when the call returns
engine = MooncakeEngine(MooncakeOptions(sys.argv[1]))
assert engine.exists(["key"]) == [False]
print("connected", flush=True)
sys.stdin.readline()
engine.exists(["key"])  # finds out that the master is gone
threading.Thread(target=engine.exists, args=(["key"],), daemon=True).start()
"""


@pytest.mark.slow
def test_a_process_that_ends_waits_for_calls_in_progress(store: PrivateMooncake) -> None:
    """Mooncake aborts the process of a call that returns while Python ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDING, store.master],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | ENVIRONMENT,
        text=True,
    )
    assert process.stdout.readline() == "connected\n"
    kill(store.master_process)
    process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == 0


def test_a_full_store_is_not_an_error(engine: MooncakeEngine) -> None:
    parts = [np.ones(PAGE, np.uint8), np.ones(48 << 20, np.uint8)]
    outcomes = engine.put([key(number) for number in range(12)], [parts] * 12)
    assert set(outcomes) == {DONE, StoreOutcome.FULL}


class HangingClient:
    """Mooncake's client, whose calls hang until the gate is open."""

    inside = threading.Event()
    gate = threading.Event()
    closed = 0

    def setup(self, settings: dict[str, str]) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.inside.set()
        assert self.gate.wait(PATIENCE)
        return [0] * len(keys)

    def close(self) -> None:
        HangingClient.closed += 1


def test_a_client_is_not_closed_under_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake ends the process then."""
    module = SimpleNamespace(
        MooncakeDistributedStore=HangingClient, ReplicateConfig=SimpleNamespace
    )
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(mooncake, "answers", lambda master: True)
    monkeypatch.setattr(mooncake, "END_S", 0.01)
    engine = MooncakeEngine(MooncakeOptions("127.0.0.1:50051"))
    call = threading.Thread(target=engine.exists, args=([key(1)],), daemon=True)
    call.start()
    assert HangingClient.inside.wait(PATIENCE)
    engine.close()
    assert engine.exists([key(1)]) is None
    assert not HangingClient.closed
    HangingClient.gate.set()
    call.join(PATIENCE)
    engine.close()
    assert HangingClient.closed == 1


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(SettingError, match=r"pip install 'pensieve\[mooncake\]'"):
        MooncakeEngine(MooncakeOptions("127.0.0.1:50051"))

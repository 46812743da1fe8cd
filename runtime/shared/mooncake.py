"""The engine `mooncake`: Mooncake Store, which pools memory of several machines.

`mooncake_master` knows where each record is, and owners (`mooncake_client`) lend their memory. This
client gives no memory unless `segment_bytes` says so: then what it holds is lost with its server.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ...scheduler.types import SettingError
from .config import SETTING, MooncakeOptions
from .engine import Parts, StoreOutcome

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

    Move = Callable[[MooncakeDistributedStore, Sequence[str], Sequence[Parts]], list[StoreOutcome]]

log = logging.getLogger(__name__)

TIMEOUTS = {
    "MC_RPC_TIMEOUT_MS": "1000",  # of a call to the master: by default 30 s
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",  # of a transfer in which no byte moves: by default 30 s
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}
"""Environment variables that Mooncake reads, unless they are set. A slot of a late call stays lent
until the call returns."""
QUIET = {"MC_LOG_LEVEL": "ERROR"}
NO_ROOM, TOO_SMALL, UNKNOWN_KEY = -200, -600, -704
"""Mooncake's codes that are no failure of the store. `TOO_SMALL`: the buffers for a record."""
NO_ANSWER = -900
NOT_TRANSFERRED = -800
"""The owner of the record is gone, or the buffers are too large for it."""
REGISTERED = ("rdma",)
"""Protocols that transfer registered memory only. Over TCP any memory will do, and it stays out of
reach: others on the network may read and write memory that is registered."""
AT_ONCE = 8
"""Records of one call to Mooncake. For each one of an owner that hangs it waits a second."""
REACHED_S = 1.0
CONNECTING_S = 1.0
END_S = 10.0  # a call takes five seconds if the master is gone
COMPLAINT_S = 60.0


class MooncakeEngine:
    """A `SharedEngine`. It connects beside the start of the server, and each call tries again after
    a failure, so a server starts without a master too."""

    def __init__(self, options: MooncakeOptions):
        """SettingError('kv_shared_config') if Mooncake is not installed."""
        for name, value in (TIMEOUTS | QUIET).items():
            os.environ.setdefault(name, value)  # Mooncake reads them when it connects
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            message = (
                "the engine mooncake needs pip install 'pensieve[mooncake]', and the libraries "
                f"libibverbs1, libnl-3-200 and libnl-route-3-200: {error}"
            )
            raise SettingError(SETTING, message) from error
        self._options = options
        self._new_client = MooncakeDistributedStore
        self._placement = ReplicateConfig()
        self._placement.replica_num = options.replicas
        self._connecting = threading.Lock()
        self._client: MooncakeDistributedStore | None = None
        self._buffers: list[np.ndarray] = []
        self._silent_until = 0.0
        self._closed = False
        self._ended = threading.Condition()  # a call has ended
        self._calls = 0  # in progress
        atexit.register(self.close)
        threading.Thread(target=self._reach, name="mooncake-connect", daemon=True).start()

    def register(self, buffer: np.ndarray) -> None:
        """Nothing over TCP."""
        if self._options.protocol not in REGISTERED:
            return
        with self._connecting:
            self._buffers.append(buffer)
            if self._client is not None:
                self._register(self._client, buffer)

    def exists(self, keys: Sequence[str]) -> list[bool] | None:
        with self._connected() as client:
            codes = client.batch_is_exist(list(keys)) if client is not None else None
        if codes is None:
            return None
        failures = [code for code in codes if code < 0]
        if failures or len(codes) != len(keys):
            self._complain("looking for records", failures)
            return None
        return [code == 1 for code in codes]

    def put(self, keys: Sequence[str], records: Sequence[Parts]) -> list[StoreOutcome]:
        return self._in_pieces(self._put, keys, records)

    def get(self, keys: Sequence[str], records: Sequence[Parts]) -> list[StoreOutcome]:
        return self._in_pieces(self._get, keys, records)

    def _in_pieces(
        self, move: Move, keys: Sequence[str], records: Sequence[Parts]
    ) -> list[StoreOutcome]:
        """After a failure the other records are not tried."""
        outcomes: list[StoreOutcome] = []
        with self._connected() as client:
            while client is not None and len(outcomes) < len(keys):
                piece = slice(len(outcomes), len(outcomes) + AT_ONCE)
                outcomes += move(client, keys[piece], records[piece])
                if StoreOutcome.FAILED in outcomes:
                    break
        return outcomes + [StoreOutcome.FAILED] * (len(keys) - len(outcomes))

    def _put(
        self, client: MooncakeDistributedStore, keys: Sequence[str], records: Sequence[Parts]
    ) -> list[StoreOutcome]:
        codes = client.batch_put_from_multi_buffers(
            list(keys), _addresses(records), _sizes(records), self._placement
        )
        return self._outcomes("writing", codes, [0] * len(keys))

    def _get(
        self, client: MooncakeDistributedStore, keys: Sequence[str], records: Sequence[Parts]
    ) -> list[StoreOutcome]:
        sizes = _sizes(records)
        totals = [sum(parts) for parts in sizes]
        codes = client.batch_get_into_multi_buffers(list(keys), _addresses(records), sizes)
        other = self._of_other_sizes(client, keys, codes, totals)
        if other:
            client.batch_remove([keys[at] for at in other], True)
            codes = [UNKNOWN_KEY if at in other else code for at, code in enumerate(codes)]
        return self._outcomes("reading", codes, totals)

    def remove(self, keys: Sequence[str]) -> list[StoreOutcome]:
        """Without regard to leases: a read protects a record for some seconds otherwise."""
        with self._connected() as client:
            if client is None:
                return [StoreOutcome.FAILED] * len(keys)
            codes = client.batch_remove(list(keys), True)
        gone = [0 if code == UNKNOWN_KEY else code for code in codes]
        return self._outcomes("removing", gone, [0] * len(keys))

    def drop_cached(self, keys: Sequence[str]) -> None:
        """Nothing: no record is cached."""

    def close(self) -> None:
        """Takes up to a second. A call during or after it would end the process, so it waits for
        those in progress, and others get no client. The process's end waits for them once more."""
        with self._ended:
            self._closed = True
            if not self._ended.wait_for(lambda: not self._calls, END_S):
                return
        atexit.unregister(self.close)
        with self._connecting:
            client = self._client
            self._client = None
            if client is not None:
                client.close()

    @staticmethod
    def _of_other_sizes(
        client: MooncakeDistributedStore,
        keys: Sequence[str],
        codes: Sequence[int],
        totals: Sequence[int],
    ) -> set[int]:
        """The places of records whose size is not the one of their buffers."""
        other = {at for at, code in enumerate(codes) if code == TOO_SMALL}
        unsure = {keys[at]: at for at, code in enumerate(codes) if code == NOT_TRANSFERRED}
        if unsure:
            for key, replicas in client.batch_get_replica_desc(list(unsure)).items():
                sizes = {
                    replica.get_memory_descriptor().buffer_descriptor.size
                    for replica in replicas
                    if replica.is_memory_replica()
                }
                if sizes and sizes != {totals[unsure[key]]}:
                    other.add(unsure[key])
        return other

    @contextmanager
    def _connected(self) -> Iterator[MooncakeDistributedStore | None]:
        """For a call. None if the store cannot be reached."""
        with self._ended:
            self._calls += 1
            closed = self._closed
        try:
            yield None if closed else self._reach()
        finally:
            with self._ended:
                self._calls -= 1
                self._ended.notify_all()

    def _reach(self) -> MooncakeDistributedStore | None:
        """None while the store cannot be reached. Other threads wait a moment for an attempt."""
        client = self._client
        if client is not None or not self._connecting.acquire(timeout=CONNECTING_S):
            return client
        try:
            if self._client is None and not self._closed:
                self._client = self._connect()
            return self._client
        finally:
            self._connecting.release()

    def _connect(self) -> MooncakeDistributedStore | None:
        """Mooncake keeps all of Python waiting while it connects, up to five seconds if there is no
        master. So the master must show that it is there first."""
        options = self._options
        if not answers(options.master):
            self._complain(f"reaching {options.master}", [NO_ANSWER])
            return None
        client = self._new_client()
        settings = {
            "local_hostname": _own_address(options.master),
            "metadata_server": options.metadata,
            "global_segment_size": str(options.segment_bytes),
            "local_buffer_size": "0",  # records go straight from and into HOST slots
            "protocol": options.protocol,
            "rdma_devices": "",  # all
            "master_server_addr": options.master,
        }
        code = client.setup(settings)
        if code != 0:
            self._complain(f"connecting to {options.master}", [code])
            return None
        for buffer in self._buffers:
            self._register(client, buffer)
        log.info("the shared tier uses the Mooncake store of %s", options.master)
        return client

    def _register(self, client: MooncakeDistributedStore, buffer: np.ndarray) -> None:
        code = client.register_buffer(buffer.ctypes.data, buffer.nbytes)
        if code != 0:
            self._complain(f"registering {buffer.nbytes} bytes", [code])

    def _outcomes(
        self, action: str, codes: Sequence[int], done: Sequence[int]
    ) -> list[StoreOutcome]:
        """`done`: each record's code of success."""
        outcomes = [
            StoreOutcome.DONE if code == right else _FAILURES.get(code, StoreOutcome.FAILED)
            for code, right in zip(codes, done, strict=True)
        ]
        failures = [
            code
            for code, outcome in zip(codes, outcomes, strict=True)
            if outcome is StoreOutcome.FAILED
        ]
        self._complain(f"{action} records", failures)
        return outcomes

    def _complain(self, action: str, codes: Sequence[int]) -> None:
        """Once a minute."""
        if not codes or time.monotonic() < self._silent_until:
            return
        self._silent_until = time.monotonic() + COMPLAINT_S
        names = ", ".join(map(str, sorted(set(codes))))
        log.warning("Mooncake store: %s failed with the code %s", action, names)


_FAILURES = {NO_ROOM: StoreOutcome.FULL, UNKNOWN_KEY: StoreOutcome.MISSING}


def _addresses(records: Sequence[Parts]) -> list[list[int]]:
    return [[part.ctypes.data for part in parts] for parts in records]


def _sizes(records: Sequence[Parts]) -> list[list[int]]:
    return [[part.nbytes for part in parts] for parts in records]


def answers(master: str) -> bool:
    """True if a master is there and does not hang: it closes a connection whose first bytes are no
    request."""
    host, port = master.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), REACHED_S) as connection:
            connection.sendall(bytes(64))
            return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except OSError:
        return False


def _own_address(master: str) -> str:
    """The address of this machine on its way to the master. No packet is sent."""
    host, port = master.rsplit(":", 1)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"

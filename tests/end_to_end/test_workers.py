"""`pensieve serve --api-server-count 2`, with the real loop."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from pensieve.runtime.system import descendants, running

from .server import HTTP, Server
from .test_server import wait_for

STREAMS = 4


def serving(server, process):
    """True if the process has a connection to a client."""
    port = int(server.url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    open_ones = {
        f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"
    }
    files = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            files.add(os.readlink(file))
    return not open_ones.isdisjoint(files)


@pytest.mark.slow
def test_a_server_with_workers_drains_and_leaves_no_process(tmp_path):
    """Greedy replies are the same at all of them. The first signal waits for replies that run at
    both, which their clients read to the end."""
    with Server(tmp_path, "--api-server-count", 2, "--shutdown-timeout", 60) as server:
        body = dict(prompt="Once upon a time", max_tokens=20, temperature=0, ignore_eos=True)
        # each has a connection of its own
        answers = [server.post("/v1/completions", **body).json() for _ in range(8)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert "pensieve" in HTTP.get(f"{server.url}/ui").text.lower()
        assert server.metric('pensieve:requests_total{finish="length"}') == 8

        long = dict(model="demo", prompt=[40] * 10, max_tokens=300, ignore_eos=True, stream=True)
        begun = [threading.Event() for _ in range(STREAMS)]
        looked = threading.Event()  # until then no client closes its connection

        def read(number):
            events = []
            with HTTP.stream("POST", f"{server.url}/v1/completions", json=long) as response:
                for line in filter(None, response.iter_lines()):
                    events.append(line)
                    begun[number].set()
                    looked.wait(60)
            return events

        processes = descendants(server.process.pid)
        with ThreadPoolExecutor(STREAMS) as pool:
            reading = pool.map(read, range(STREAMS))
            assert all(one.wait(60) for one in begun)
            assert sum(serving(server, process) for process in processes) == 2
            looked.set()
            assert server.stop() == 0
            for events in reading:
                assert events[-1] == "data: [DONE]"
                assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: not any(map(running, processes)))
    assert not any("Traceback" in line for line in server.log)

"""`pensieve serve --api-server-count 2`, with the real loop."""

from __future__ import annotations

import json
import threading

import pytest

from pensieve.runtime.system import descendants, running

from .server import HTTP, Server
from .test_server import wait_for


@pytest.mark.slow
def test_a_server_with_workers_drains_and_leaves_no_process(tmp_path):
    """Greedy replies are the same at all of them. The first signal waits for a running reply, which
    its client reads to the end."""
    with Server(tmp_path, "--api-server-count", 2, "--shutdown-timeout", 60) as server:
        body = dict(prompt="Once upon a time", max_tokens=20, temperature=0, ignore_eos=True)
        # each has a connection of its own
        answers = [server.post("/v1/completions", **body).json() for _ in range(8)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert "pensieve" in HTTP.get(f"{server.url}/ui").text.lower()
        assert server.metric('pensieve:requests_total{finish="length"}') == 8

        events = []
        long = dict(model="demo", prompt=[40] * 10, max_tokens=300, ignore_eos=True, stream=True)
        begun = threading.Event()

        def read():
            with HTTP.stream("POST", f"{server.url}/v1/completions", json=long) as response:
                for line in filter(None, response.iter_lines()):
                    events.append(line)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(60)
        processes = descendants(server.process.pid)
        assert server.stop() == 0
        reader.join(60)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: not any(map(running, processes)))
    assert not any("Traceback" in line for line in server.log)

"""Checks that a server behaves as users of the OpenAI API expect. Uses the official client; each
test checks one thing.

    python -m pytest tests/conformance --url http://127.0.0.1:8000/v1 --model demo [--api-key KEY]

Works with any OpenAI-compatible server that no other client uses meanwhile. A test that does not
apply to the server is skipped with the reason. Without `--url` a server of the demo engine is
started, for which no test is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.server import Server as DemoServer

from .asked_server import Server

KEY = "sesame"


@pytest.fixture(scope="package")
def server(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    url, key = pytestconfig.getoption("--url"), pytestconfig.getoption("--api-key")
    if url is not None:
        yield Server(
            url.rstrip("/").removesuffix("/v1") + "/v1",
            pytestconfig.getoption("--model"),
            key or "none",
        )
        return
    # Few seats and a short queue, so that it is soon full; a key, so that there is a wrong one.
    cache = ("--gpu-kv-chunks", 400, "--host-kv-chunks", 100, "--max-model-len", 1024)
    seats = ("--max-num-seqs", 8, "--max-queue", 12)
    with DemoServer(tmp_path_factory.mktemp("state"), *cache, *seats, "--api-key", KEY) as running:
        yield Server(f"{running.url}/v1", "demo", KEY, shows_all=True)

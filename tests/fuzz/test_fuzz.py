"""Sends wrong input to an HTTP process with a simulated loop, or to a running server.

    python -m pytest tests/fuzz --url http://127.0.0.1:8000 --seconds 600 --seed 42 --pid PID

`--case N` sends one case again and shows the answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pensieve.runtime.http.settings import HTTPSettings
from pensieve.runtime.system import descendants
from tests.runtime.fake_loop import FakeLoop, echo
from tests.runtime.http.test_connection_limits import serve

from .cases import address, fuzz, make_case, send

SHORT = 2.0
"""Seconds of the ordinary run."""


@pytest.fixture(scope="module", params=[1, 4], ids=["one", "several"])
def target(
    request: pytest.FixtureRequest,
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, list[int]]]:
    """The server's address and the processes that are watched, of one or several that serve
    clients."""
    if (url := pytestconfig.getoption("--url")) is not None:
        if request.param > 1:
            pytest.skip("the running server has the processes that it has")
        yield url, pytestconfig.getoption("--pid")
        return
    loop = FakeLoop(lambda request: echo(request)[-40:])
    settings = HTTPSettings(api_server_count=request.param)
    for server in serve(tmp_path_factory.mktemp("tokenizer"), settings, loop):
        process = server.process.pid
        assert process is not None
        yield server.url, [process, *descendants(process)]


def test_random_bytes_leave_nothing_behind(
    pytestconfig: pytest.Config, target: tuple[str, list[int]]
) -> None:
    (url, pids), seed = target, pytestconfig.getoption("--seed")
    if (number := pytestconfig.getoption("--case")) is not None:
        case = make_case(seed, number)
        statuses, fault = send(case, *address(url))
        print(case, statuses, sep="\n")
        assert fault is None
        return
    seconds = pytestconfig.getoption("--seconds")
    findings = fuzz(url, SHORT if seconds is None else seconds, seed, workers=8, pids=pids)
    print(f"{findings.cases} cases, answers by status: {dict(sorted(findings.statuses.items()))}")
    assert not findings.faults and findings.some_of_everything

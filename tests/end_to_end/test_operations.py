"""Operations of a real server: its configuration file, limits, priorities, log, readiness,
drain."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .server import HTTP, Hog, Server
from .test_server import wait_for

CONFIG = """
served-model-name = ["demo", "short"]
max_num_seqs = 1
queue-timeout = 3.0
max-requests-per-client = 6
max-body-bytes = "100KB"
max-model-len = 2048
gpu-kv-chunks = 200
host-kv-chunks = 100
log-format = "json"
"""
RUNNING = "pensieve:num_requests_running"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with one seat, so a second request waits."""
    directory = tmp_path_factory.mktemp("state")
    (directory / "serve.toml").write_text(CONFIG)
    options = [
        "--config",
        directory / "serve.toml",
        "--max-model-len",
        3000,
        "--trace",
        directory / "trace.json",
    ]
    with Server(directory, *options) as running:
        running.trace = directory / "trace.json"
        yield running


def ask(server, number, max_tokens=3, **body):
    return server.post(
        "/v1/completions", prompt=[number] * 7, max_tokens=max_tokens, ignore_eos=True, **body
    )


def log_lines(server, name):
    return [line for line in map(json.loads, server.log) if line["message"] == name]


def test_the_configuration_file_counts_and_flags_override_it(server):
    models = HTTP.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [
        ("demo", 3000),
        ("short", 3000),
    ]
    assert (
        server.post("/v1/completions", model="short", prompt=[50], max_tokens=1).json()["model"]
        == "demo"
    )


def test_smaller_priorities_are_served_first(server):
    """The order is that of the server's log: the clients' threads may see the ends in another
    order."""
    numbers = {}

    def one(number, priority):
        answer = ask(server, number, priority=priority)
        if answer.is_success:
            numbers[answer.json()["id"]] = number

    def ended():
        return [
            numbers[line["id"]] for line in log_lines(server, "request") if line["id"] in numbers
        ]

    # on a paused machine the request may be refused for its time-out: then again
    for _ in range(10):
        numbers.clear()
        with ThreadPoolExecutor(3) as pool, Hog(server, 2900):
            requests = [pool.submit(one, *each) for each in ((41, 5), (42, 0), (43, -1))]
            waiting = "pensieve:num_requests_waiting"
            wait_for(lambda: server.metric(waiting) == 3 or any(each.done() for each in requests))  # noqa: B023
        if len(numbers) == 3:
            break
    wait_for(lambda: len(ended()) == 3)
    assert ended() == [43, 42, 41]


def test_a_request_that_waits_too_long_is_refused(server):
    with Hog(server, 2900):
        started = time.monotonic()
        response = ask(server, 44)
        waited = time.monotonic() - started
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert "queue" in response.json()["error"]["message"] and waited >= 3.0


def test_limits_of_a_client_and_of_a_body(server):
    def one(number):
        status = ask(server, number).status_code
        return status, time.monotonic()

    for _ in range(10):  # the refused request must have come before another one's time-out
        began = time.monotonic()
        with Hog(server, 2900), ThreadPoolExecutor(9) as pool:
            answers = sorted(pool.map(one, range(50, 59)))
        if max(at for _, at in answers[:4]) - began < 2.5:
            break
    assert [status for status, _ in answers] == [429] * 4 + [503] * 5
    assert ask(server, 60).is_success, "nothing is left of it"
    assert server.post("/v1/completions", prompt="x" * 100_000).status_code == 413


def test_a_request_is_one_line_of_the_log(server):
    text = "This should not be found in a log."
    answer = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=3
    ).json()
    wait_for(lambda: [line for line in log_lines(server, "request") if line["id"] == answer["id"]])
    (line,) = (line for line in log_lines(server, "request") if line["id"] == answer["id"])
    assert (
        line["prompt_tokens"] == answer["usage"]["prompt_tokens"] and line["generated_tokens"] == 3
    )
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    assert not any(text in line for line in server.log)


def chat(server, *lines):
    """Runs `pensieve chat` with these lines; returns its output, and the sources of each reply."""
    command = [
        sys.executable,
        "-m",
        "pensieve.scripts.pensieve",
        "chat",
        "--url",
        server.url,
        "--max-tokens",
        "40",
    ]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(
        [*command, "--conversation", "tea"],
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    matches = re.findall(
        r"device (\d+) · host (\d+) .*new (\d+) \| first token \d+ ms \| \d+ tokens", done.stdout
    )
    return done.stdout, [tuple(map(int, sources)) for sources in matches]


def test_the_terminal_chat_and_the_history_that_the_server_keeps(server):
    out, (first, second) = chat(
        server, "Tell me about tea, please, and take your time.", "And coffee?", "/list"
    )
    assert first[0] == 0 < first[2] and second[0] >= first[2], "the second turn finds the first"
    assert "* tea Tell me about tea, please, and take your time. (" in out
    out, (third, branch) = chat(
        server, "Go on.", "/fork copy", "Or else?", "/drop tea", "/list", "/stats"
    )
    assert branch[0] + branch[1] > third[0] + third[1] > second[0] + second[1]
    assert "tea is gone\n* copy " in out and "2 replies" in out


def test_the_trace_can_be_viewed_while_the_server_runs(server):
    """A viewer takes it without its last bracket. Every step is launched before the device has it,
    and waited for."""
    ask(server, 61, max_tokens=100)
    text = server.trace.read_text()
    events = json.loads(text[: text.rindex("},\n") + 1] + "]")
    tracks = {
        event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"
    }
    loop, device = ({}, {})
    for event in events:
        if event["ph"] == "X" and event["tid"] in (tracks["loop"], tracks["device: compute"]):
            track, name = (
                (loop, event["name"]) if event["tid"] == tracks["loop"] else (device, "step")
            )
            track[name, event["args"]["step"]] = (event["ts"], event["ts"] + event["dur"])
    steps = [step for _, step in device if ("send", step) in loop]
    assert len(steps) > 50
    for step in steps:
        start, end = device["step", step]
        assert (
            loop["plan", step][1] <= loop["launch", step][0] <= start < end <= loop["wait", step][1]
        )
        assert (
            loop["wait", step][1]
            <= loop["apply", step][0]
            <= loop["apply", step][1]
            <= loop["send", step][0]
        )


@pytest.mark.slow
def test_bad_grammars_of_one_key_do_not_delay_another_key(tmp_path):
    """Each of twelve is refused after a second of a processor. The other key's replies come while
    some of them wait."""

    async def main(url):
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:

            def ask(key, name, pattern):
                headers = {"authorization": f"Bearer {key}"}
                grammar = {"grammar": f"start: {name}\n{name}: {pattern}"}
                body = {
                    "model": "demo",
                    "prompt": [40] * 5,
                    "max_tokens": 3,
                    "structured_outputs": grammar,
                }
                return asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))

            bad = [
                ask("one", f"BAD{at}", "/.*a.{30}/ & /.*b.{29}/ & ~/.*c.{28}.*/")
                for at in range(12)
            ]
            await asyncio.wait(bad, return_when=asyncio.FIRST_COMPLETED)
            for name in ("GOOD", "BETTER", "BEST"):
                assert (await ask("two", name, "/a+/")).is_success
            refused = [call.result().status_code for call in bad if call.done()]
            for call in bad:
                call.cancel()
            return refused

    with Server(tmp_path, "--api-key", "one", "two") as server:
        refused = asyncio.run(main(server.url))
    assert set(refused) == {400} and len(refused) < 12


@pytest.mark.slow
def test_health_ends_with_sigterm_live_with_the_server_and_a_second_signal_ends_it_at_once(
    tmp_path,
):
    with Server(tmp_path, "--shutdown-timeout", 60) as server:
        answers = []
        body = dict(prompt=[40] * 10, max_tokens=3000, ignore_eos=True)
        thread = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", **body))
        )
        thread.start()
        wait_for(lambda: server.metric(RUNNING) == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: HTTP.get(f"{server.url}/health", timeout=30).status_code == 503)
        assert HTTP.get(f"{server.url}/live", timeout=30).status_code == 200
        refused = server.post("/v1/completions", prompt=[40], max_tokens=1)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert server.metric(RUNNING) == 1
        expected = (
            "shutting down: waits for 1 running reply, at most 60 s; the next signal ends it at "
            "once"
        )
        wait_for(lambda: any(expected in line for line in server.log))
        assert sum(expected in line for line in server.log) == 1
        assert server.stop() == 0
        thread.join(60)
        assert (
            answers[0].status_code == 503
            and "shutting down" in answers[0].json()["error"]["message"]
        )

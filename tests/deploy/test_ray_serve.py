"""The parts of deploy/ray_serve/ without a cluster: relay, child process, and the two files of
settings."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from pensieve.ray_serve.relay import Relay
from pensieve.ray_serve.server import ServerProcess, claim_state_dir, with_own_ports
from pensieve.runtime.launch.options import parser
from tests.end_to_end.ray_cluster import CONFIG, RAY

MANIFEST = CONFIG.with_name("rayservice.yaml")


@asynccontextmanager
async def relayed(answer):
    """A relay to a server with this handler."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    async with TestServer(app) as server:
        relay = Relay(f"http://127.0.0.1:{server.port}", "seven")
        try:
            yield relay, server
        finally:
            await relay.close()


async def call(
    relay,
    method="GET",
    path=b"/",
    query=b"",
    headers=(),
    pieces=(b"",),
    on_piece=lambda piece: None,
):
    """Returns the status, the headers and the body of the answer."""
    waiting = [dict(type="http.request", body=piece, more_body=True) for piece in pieces]
    waiting[-1]["more_body"] = False
    start = {}
    body = b""

    async def receive():
        return waiting.pop(0)

    async def send(message):
        nonlocal body
        if message["type"] == "http.response.start":
            start.update(message)
        elif message["body"]:
            body += message["body"]
            on_piece(message["body"])

    scope = dict(
        type="http",
        method=method,
        path=path.decode(),
        raw_path=path,
        query_string=query,
        root_path="",
    )
    await relay(scope | dict(headers=list(headers), client=("192.0.2.7", 5000)), receive, send)
    return start["status"], start["headers"], body


async def echo(request):
    headers = [[name, value] for name, value in request.headers.items()]
    body = (await request.read()).decode()
    answer = web.json_response(
        dict(method=request.method, path=request.raw_path, headers=headers, body=body), status=418
    )
    answer.headers.extend([("X-One", "1"), ("X-One", "2"), ("Connection", "close")])
    return answer


def test_the_relay_passes_on_all_of_a_request_and_of_its_answer():
    async def main():
        async with relayed(echo) as (relay, _):
            headers = [
                (b"x-session-id", b"tea"),
                (b"connection", b"close"),
                (b"x-forwarded-for", b"192.0.2.1"),
            ]
            headers += [(b"content-length", b"6"), (b"authorization", b"Bearer key")]
            return await call(relay, "PUT", b"/v1/a%2Fb%20c", b"q=%2F&r", headers, (b"one", b"two"))

    status, headers, body = asyncio.run(main())
    echoed = json.loads(body)
    assert (status, echoed["method"], echoed["path"], echoed["body"]) == (
        418,
        "PUT",
        "/v1/a%2Fb%20c?q=%2F&r",
        "onetwo",
    )
    passed = [(name.lower(), value) for name, value in echoed["headers"] if name != "Host"]
    assert sorted(passed) == [
        ("authorization", "Bearer key"),
        ("content-length", "6"),
        ("x-forwarded-for", "192.0.2.1, 192.0.2.7"),
        ("x-session-id", "tea"),
    ]
    assert [value for name, value in headers if name == b"x-one"] == [b"1", b"2"]
    assert dict(headers)[b"x-pensieve-replica"] == b"seven" and b"connection" not in dict(headers)


def test_a_body_without_a_length_is_passed_on():
    async def main():
        async with relayed(echo) as (relay, _):
            return await call(
                relay, "POST", headers=[(b"transfer-encoding", b"chunked")], pieces=(b"one", b"two")
            )

    assert json.loads(asyncio.run(main())[2])["body"] == "onetwo"


def test_each_piece_is_passed_on_before_the_next_one_is_written():
    async def main():
        arrived = asyncio.Event()

        async def write(request):
            answer = web.StreamResponse()
            await answer.prepare(request)
            await answer.write(b"one")
            await arrived.wait()
            await answer.write(b"two")
            return answer

        async with relayed(write) as (relay, _):
            return await call(relay, on_piece=lambda piece: arrived.set())

    assert asyncio.run(main())[2] == b"onetwo"


def test_a_request_that_its_client_has_left_ends_at_the_server():
    async def main():
        ended = asyncio.Event()

        async def write(request):
            answer = web.StreamResponse()
            await answer.prepare(request)
            try:
                while True:
                    await answer.write(b"more")
                    await asyncio.sleep(0.001)
            finally:
                ended.set()

        async with relayed(write) as (relay, _):
            begun = asyncio.Event()
            task = asyncio.create_task(call(relay, on_piece=lambda piece: begun.set()))
            await begun.wait()
            task.cancel()  # as Serve does
            await ended.wait()

    asyncio.run(main())


def test_an_answer_that_breaks_off_does_not_look_whole():
    async def main():
        async def write(request):
            answer = web.StreamResponse(headers={"Content-Length": "100"})
            await answer.prepare(request)
            await answer.write(b"one")
            request.transport.close()
            return answer

        async with relayed(write) as (relay, _):
            with pytest.raises(Exception, match=r"not completed|disconnected|closed"):
                await call(relay)
            assert relay.open_requests == 0

    asyncio.run(main())


@pytest.mark.parametrize("joined", [False, True])
def test_each_replica_has_ports_of_its_own_for_kv_events(joined):
    config = {"enable_kv_cache_events": True, "replay_endpoint": "tcp://*:0", "topic": "a:0"}
    words = ["demo", "--kv-events-config", json.dumps(config), "--port", "0"]
    if joined:
        words[1:3] = ["=".join(words[1:3])]
    changed, addresses = with_own_ports(words)
    values = json.loads(changed[1].partition("=")[2] if joined else changed[2])
    assert values == config | addresses
    assert len({address.rpartition(":")[2] for address in addresses.values()} - {"0"}) == 2
    assert addresses["endpoint"].startswith("tcp://127.0.0.1:")
    assert addresses["replay_endpoint"].startswith("tcp://*:")


def test_given_ports_of_kv_events_stay():
    config = '{"endpoint": "tcp://*:5557", "enable_kv_cache_events": true}'
    words = ["demo", "--kv-events-config", config]
    assert with_own_ports(words) == (words, {"endpoint": "tcp://*:5557"})


@pytest.mark.parametrize(
    "words",
    [
        ["demo"],
        ["demo", "--kv-events-config", '{"enable_kv_cache_events": false}'],
        ["demo", "--kv-events-config", '{"endpoint": "tcp://*:0"}'],
        ["demo", '--kv-events-config={"enable_kv_cache_events": true, "publisher": "null"}'],
        ["demo", "--kv-events-config", "{"],
        ["demo", "--kv-events-config"],
    ],
)
def test_a_replica_without_kv_events_names_no_address(words):
    assert with_own_ports(words) == (words, {})


def test_a_request_without_a_server_is_a_503():
    async def main():
        async with relayed(echo) as (relay, server):
            await server.close()
            return await call(relay)

    status, headers, body = asyncio.run(main())
    assert (status, dict(headers)[b"retry-after"]) == (503, b"1")
    assert json.loads(body)["error"]["type"] == "server_error"


def test_a_state_directory_has_one_server(tmp_path):
    (first, lock), (second, further) = claim_state_dir(tmp_path), claim_state_dir(tmp_path)
    assert (first, second) == (tmp_path / "0", tmp_path / "1")
    os.close(lock)
    again, lock = claim_state_dir(tmp_path)
    assert again == first
    os.close(lock)
    os.close(further)


@pytest.mark.parametrize("option", ["--port", "--host=0.0.0.0", "--state-dir"])
def test_options_that_a_replica_chooses_are_refused(option, tmp_path):
    with pytest.raises(ValueError, match=option.partition("=")[0]):
        ServerProcess(["demo", option], tmp_path, lambda: None)


PARENT = """
import sys
from pathlib import Path
from pensieve.ray_serve.server import ServerProcess
server = ServerProcess(["demo"], Path(sys.argv[1]), lambda: print("ended", flush=True))
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path):
    """A process that has a server as a replica has it, and the server's process id."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], **pipes) as process:
        yield process, int(process.stdout.readline())
        process.kill()


def test_the_server_ends_with_its_replica(parent, tmp_path):
    process, _ = parent
    process.kill()
    lock = os.open(tmp_path / "0" / "in-use", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # waits until both have ended
    os.close(lock)


def test_the_replica_is_told_that_its_server_has_ended(parent):
    process, server = parent
    os.kill(server, signal.SIGKILL)
    assert process.stdout.readline() == "ended\n"


def test_the_server_imports_nothing_of_the_current_directory(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$1" > "{tmp_path}/flag"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    ended = threading.Event()
    ServerProcess(["demo"], tmp_path / "states", ended.set)
    assert ended.wait(60)
    assert (tmp_path / "flag").read_text() == "-P\n"


def settings(text):
    config = yaml.safe_load(text)
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    return config, application, deployment


def test_both_files_have_the_same_settings_and_options_that_exist():
    manifest = yaml.safe_load(MANIFEST.read_text())["spec"]
    first, second = settings(CONFIG.read_text()), settings(manifest["serveConfigV2"])
    (_, application, deployment), (_, other, its) = first, second
    assert application["import_path"] == other["import_path"]
    assert {**deployment, "ray_actor_options": 0} == {**its, "ray_actor_options": 0}
    assert first[0]["http_options"] == second[0]["http_options"]
    for words in (application["args"]["options"], other["args"]["options"]):
        patience = parser().parse_args(shlex.split(words)).shutdown_timeout
        assert deployment["graceful_shutdown_timeout_s"] > patience
    (group,) = manifest["rayClusterConfig"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > deployment["graceful_shutdown_timeout_s"]
    (container,) = pod["containers"]
    assert (
        int(container["resources"]["limits"]["nvidia.com/gpu"])
        == its["ray_actor_options"]["num_gpus"]
    )
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert group["maxReplicas"] == its["autoscaling_config"]["max_replicas"]


SCHEMA = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from pensieve.ray_serve.application import build
config = ServeDeploySchema.model_validate(yaml.safe_load(sys.stdin.read()))
known = {
    deployment.name
    for application in config.applications
    for deployment in application.deployments
}
assert known == {build(config.applications[0].args)._bound_deployment.name}
"""


@pytest.mark.skipif(not RAY.exists(), reason=f"no Ray in {RAY.parent}: run `make ray`")
@pytest.mark.parametrize("file", [CONFIG, MANIFEST], ids=lambda file: file.name)
def test_ray_accepts_the_settings(file: Path):
    text = file.read_text()
    text = yaml.safe_load(text)["spec"]["serveConfigV2"] if file == MANIFEST else text
    done = subprocess.run(
        [RAY / "python", "-c", SCHEMA], input=text, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr

"""Measures what Serve adds to each token: `python -m benchmarks.ray_serve`, where the extra
`ray` is installed.

A server that only writes events stands for the engine: 50 a second to each stream, each with the
time of its writing. A client reads them, in turns from that server and through Serve's proxy and
the relay of a replica. The time from the event's writing to its reading is the added time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import aiohttp
import ray
import uvicorn
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from pensieve.ray_serve.relay import Relay
from pensieve.ray_serve.server import free_port

EVENTS_PER_S = 50
STREAMS = (1, 16)


async def events(request: Request) -> StreamingResponse:
    """Each event is as long as one of a chat."""

    async def written() -> AsyncIterator[bytes]:
        begin = time.monotonic()
        for number in range(int(request.query_params["events"])):
            await asyncio.sleep(begin + number / EVENTS_PER_S - time.monotonic())
            yield (
                b"data: "
                + json.dumps({"at": time.monotonic(), "choices": "." * 200}).encode()
                + b"\n\n"
            )

    return StreamingResponse(written(), media_type="text/event-stream")


def serve_events(port: int) -> None:
    app = Starlette(routes=[Route("/events", events)])
    uvicorn.run(app, host="127.0.0.1", port=port, http="h11", log_level="error", access_log=False)


@serve.deployment(
    max_ongoing_requests=1024,
    ray_actor_options={"num_cpus": 0},
    request_router_config={
        "request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    },
)
@serve.ingress()
class Relayed:
    async def __init__(self, url: str):  # type: ignore[misc]  # Serve awaits it
        self._relay = Relay(url, "measured")

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(routes=[Mount("/", self._relay)])


async def read(session: aiohttp.ClientSession, url: str, number: int, name: str) -> list[float]:
    """The seconds from each event's writing to its reading."""
    headers = {"X-Session-ID": name}
    async with session.get(f"{url}/events", params={"events": number}, headers=headers) as answer:
        answer.raise_for_status()
        lines = (line[6:] async for line in answer.content if line.startswith(b"data: "))
        seconds = [time.monotonic() - json.loads(line)["at"] async for line in lines]
    if len(seconds) != number:
        raise RuntimeError(f"{len(seconds)} of {number} events came")
    return seconds


async def measure(places: dict[str, str], rounds: int, number: int) -> None:
    print("| streams | way | events | p50, ms | p99, ms |\n|---|---|---|---|---|")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for streams in STREAMS:
            latencies: dict[str, list[float]] = {way: [] for way in places}
            for turn in range(rounds + 1):  # the first one warms up
                for way, url in places.items():
                    all_streams = [
                        read(session, url, number, f"session {stream}") for stream in range(streams)
                    ]
                    lists = await asyncio.gather(*all_streams)
                    latencies[way] += [seconds for one in lists for seconds in one] if turn else []
            for way, seconds in latencies.items():
                p50, p99 = (
                    sorted(seconds)[int(len(seconds) * part)] * 1000 for part in (0.5, 0.99)
                )
                print(
                    f"| {streams} | {way} | {len(seconds):,} | {p50:.2f} | {p99:.2f} |", flush=True
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="of each way, in turns (default %(default)s)"
    )
    parser.add_argument(
        "--events", type=int, default=250, help="of each stream in a round (default %(default)s)"
    )
    parser.add_argument("--serve-events", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_events:
        serve_events(args.serve_events)
        return
    ports = free_port(), free_port()
    bare, proxy = (f"http://127.0.0.1:{port}" for port in ports)
    command = [sys.executable, "-m", "benchmarks.ray_serve", "--serve-events", str(ports[0])]
    # a cluster for a minute, on this host
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    writer = subprocess.Popen(command)
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
        serve.start(http_options={"host": "127.0.0.1", "port": ports[1]})
        serve.run(Relayed.bind(bare))  # type: ignore[attr-defined]
        load = os.getloadavg()[0]
        print(f"Ray {ray.__version__}, {os.cpu_count()} cores, load before the start {load:.1f}")
        asyncio.run(measure({"bare": bare, "through Serve": proxy}, args.rounds, args.events))
    finally:
        writer.terminate()
        writer.wait()
        ray.shutdown()


if __name__ == "__main__":
    main()

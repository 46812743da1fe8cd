"""Measures what Serve adds to each token: `python -m benchmarks.ray_serve`, where the extra
`ray` is installed.

A server that only writes events stands for the engine: 50 a second to each stream, each with the
time of its writing. A client reads them, in turns from that server and through Serve's proxy and
the relay of a replica. The time from the event's writing to its reading is the added time. Then
both serve many streams, at that pace and as fast as the client reads.
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

from benchmarks.ports import free_ports
from pensieve.ray_serve.relay import Relay

EVENTS_PER_S = 50
STREAMS = (1, 16)
MANY_STREAMS = 256


async def events(request: Request) -> StreamingResponse:
    """Each event is as long as one of a chat. `paced`: EVENTS_PER_S, not as fast as possible."""
    paced = request.query_params["paced"] == "1"

    async def written() -> AsyncIterator[bytes]:
        begin = time.monotonic()
        for number in range(int(request.query_params["events"])):
            await asyncio.sleep(begin + number / EVENTS_PER_S - time.monotonic() if paced else 0)
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
    params = {"events": number, "paced": 1}
    async with session.get(f"{url}/events", params=params, headers=headers) as answer:
        answer.raise_for_status()
        lines = (line[6:] async for line in answer.content if line.startswith(b"data: "))
        seconds = [time.monotonic() - json.loads(line)["at"] async for line in lines]
    if len(seconds) != number:
        raise RuntimeError(f"{len(seconds)} of {number} events came")
    return seconds


async def count(
    session: aiohttp.ClientSession, url: str, number: int, name: str, paced: bool
) -> None:
    params = {"events": number, "paced": int(paced)}
    headers = {"X-Session-ID": name}
    async with session.get(f"{url}/events", params=params, headers=headers) as answer:
        answer.raise_for_status()
        came = (await answer.read()).count(b"\n\n")
    if came != number:
        raise RuntimeError(f"{came} of {number} events came")


async def measure_rate(places: dict[str, str], rounds: int, number: int) -> None:
    print("| streams | events of each | way | events/s |\n|---|---|---|---|")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for paced in (True, False):
            pace = f"{EVENTS_PER_S} a second" if paced else "as fast as they are read"
            for turn in range(rounds + 1):  # the first one warms up
                for way, url in places.items():
                    began = time.monotonic()
                    names = [f"session {stream}" for stream in range(MANY_STREAMS)]
                    await asyncio.gather(
                        *[count(session, url, number, name, paced) for name in names]
                    )
                    rate = len(names) * number / (time.monotonic() - began)
                    if turn:
                        print(f"| {len(names)} | {pace} | {way} | {rate:,.0f} |", flush=True)


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
    ports = free_ports(2)
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
        places = {"bare": bare, "through Serve": proxy}
        asyncio.run(measure(places, args.rounds, args.events))
        asyncio.run(measure_rate(places, args.rounds, args.events))
    finally:
        writer.terminate()
        writer.wait()
        ray.shutdown()


if __name__ == "__main__":
    main()

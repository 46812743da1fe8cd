"""check.cluster: real servers beside the simulation of them, with the same conversations and
routing.

    python -m benchmarks.check.cluster --url URL --url URL --url URL --profile ENGINE/profile.json

Conversations of long messages and short replies come to both at the same times. The servers are
started before, with the options `--gpu-kv-chunks`, `--host-kv-chunks`, `--max-num-seqs` and
`--max-num-batched-tokens` as here; the profile is of their engine and machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import aiohttp

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.sim.simulator import Session, longest_context, percentile
from pensieve.scripts.command import (
    check_above_0,
    check_least,
    exit_status,
    result_line,
    title_line,
)
from pensieve.scripts.simulation.models import read_profile
from pensieve.scripts.simulation.traces import ChatStatistics, synthetic

from ..clients import StreamedReply, Target, body, clock, open_session
from ..cluster_model import Cluster

CHATS = ChatStatistics(turns=5.0, input_tokens=200.0, output_tokens=16.0)
THINK_S = 8.0
ROUTINGS = ("session", "random")
COLUMNS = {
    "routing": ("routing", ">8"),
    "which": ("", ">9"),
    "requests": ("requests", "8"),
    "hit_percent": ("hit %", "6.1f"),
    "ttft_p50": ("TTFT p50 s", "10.3f"),
    "ttft_p95": ("p95 s", "8.3f"),
    "ms_per_token": ("ms/token", "8.1f"),
}


class LiveCluster:
    """One run against servers. `route` names the server of a session's next turn. As in `Cluster`,
    requests that are sent before `warm_up_s` are not counted, nor is what is open at the end."""

    def __init__(
        self,
        targets: Sequence[Target],
        route: Callable[[str], int],
        vocabulary: int,
        warm_up_s: float,
    ):
        self._targets = targets
        self._route = route
        self._vocabulary = vocabulary
        self._warm_up_s = warm_up_s
        self._run = secrets.token_hex(4)  # its conversations are new to the servers
        self._cached = self._again = 0
        self._ttft: list[float] = []
        self._per_token: list[float] = []

    async def run(self, sessions: Sequence[Session], seconds: float) -> dict[str, Any]:
        async with open_session(self._targets[0]) as self._http:
            self._start = clock()
            playing = [
                asyncio.create_task(self._play(session))
                for session in sessions
                if session.start_s < seconds
            ]
            await asyncio.wait(playing, timeout=seconds)
            for task in playing:
                task.cancel()
            for ended in await asyncio.gather(*playing, return_exceptions=True):
                if isinstance(ended, Exception):  # cancellations are none
                    raise ended
        return {
            "requests": len(self._per_token),
            "hit_percent": 100 * self._cached / max(1, self._cached + self._again),
            "ttft_p50": percentile(self._ttft, 0.50),
            "ttft_p95": percentile(self._ttft, 0.95),
            "ms_per_token": 1e3 * sum(self._per_token) / len(self._per_token),
        }

    async def _play(self, session: Session) -> None:
        await asyncio.sleep(self._start + session.start_s - clock())
        draw = random.Random(f"{self._run} {session.name}")
        name = f"{self._run}-{session.name}"
        log: list[int] = []
        for turn in session.turns:
            await asyncio.sleep(turn.think_s)
            log += (draw.randrange(self._vocabulary) for _ in range(turn.input_tokens))
            target = self._targets[self._route(session.name)]
            log += await self._ask(target, log, turn.output_tokens, name, turn.history_tokens)

    async def _ask(
        self, target: Target, prompt: list[int], wanted: int, name: str, history: int
    ) -> list[int]:
        """Returns the reply. Raises aiohttp.ClientError and Failed."""
        reply = StreamedReply()
        sent = clock()
        first = 0.0
        request = body(target, prompt, wanted, name)
        async with self._http.post(f"{target.url}/v1/completions", data=request) as response:
            response.raise_for_status()
            async for data in response.content.iter_any():
                if reply.read(data) and not first:
                    first = clock()
        if sent - self._start >= self._warm_up_s:
            cached = reply.cached or 0
            self._cached += cached
            self._again += max(0, history - 1 - cached)  # a reply's last token has no KV yet
            self._ttft.append(first - sent)
            self._per_token.append((clock() - sent) / wanted)
        return reply.ids


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check.cluster", description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("--url", action="append", required=True, help="of a server; repeated")
    option(
        "--profile",
        type=Path,
        required=True,
        metavar="FILE",
        help="profile.json of the servers' engine",
    )
    option(
        "--rate",
        type=float,
        default=0.08,
        metavar="RATE",
        help="conversations/s a server (default %(default)s)",
    )
    option(
        "--seconds", type=float, default=180.0, metavar="S", help="of a run (default %(default)s)"
    )
    option(
        "--warm-up-s",
        type=float,
        default=60.0,
        metavar="S",
        help="not measured (default %(default)s)",
    )
    option(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of arrivals and lengths (default %(default)s)",
    )
    option(
        "--gpu-kv-chunks",
        type=int,
        default=80,
        metavar="N",
        help="of a server (default %(default)s)",
    )
    option(
        "--host-kv-chunks",
        type=int,
        default=16,
        metavar="N",
        help="of a server (default %(default)s)",
    )
    option(
        "--max-num-seqs",
        type=int,
        default=16,
        metavar="N",
        help="of a server (default %(default)s)",
    )
    option(
        "--max-num-batched-tokens", type=int, default=256, metavar="N", help="(default %(default)s)"
    )
    option("--max-model-len", type=int, default=2048, metavar="N",
           help="longer conversations do not come (default %(default)s)")  # fmt: skip
    option(
        "--vocabulary",
        type=int,
        default=2048,
        metavar="N",
        help="token ids are below (default %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("check.cluster", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    check_above_0(args, ("rate", "seconds", "vocabulary"))
    check_least(args, warm_up_s=0)
    cost, _ = read_profile(args.profile)
    config = config_of(args, cost)
    drawn = synthetic(
        CHATS,
        conversations=int(2 * args.rate * len(args.url) * args.seconds) + 50,
        sessions_per_s=args.rate * len(args.url),
        think_s=THINK_S,
        seed=args.seed,
    )
    sessions = [session for session in drawn if longest_context([session]) <= args.max_model_len]
    print(title_line(COLUMNS), flush=True)
    for routing in ROUTINGS:
        cluster = Cluster(
            config,
            cost,
            sessions,
            len(args.url),
            routing,  # type: ignore[arg-type]
            warm_up_s=args.warm_up_s,
            seed=args.seed,
        )
        both = {"measured": asyncio.run(measured(args, cluster, routing, sessions))}
        report = cluster.run(args.seconds)
        both["simulated"] = {
            "requests": report.requests,
            "hit_percent": 100 * report.hit_rate,
            "ttft_p50": report.ttft_p50,
            "ttft_p95": report.ttft_p95,
            "ms_per_token": 1e3 * report.seconds_per_token,
        }
        for which, values in both.items():
            print(result_line(COLUMNS, {"routing": routing, "which": which, **values}), flush=True)


def config_of(args: argparse.Namespace, cost: CostProfile) -> SchedulerConfig:
    """Returns the settings of a server. SettingError."""
    names = (
        "gpu_kv_chunks",
        "host_kv_chunks",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
    )
    sizes = {name: getattr(args, name) for name in names}
    return SchedulerConfig(**sizes, chunk_tokens=cost.chunk_tokens, conversation_ttl=inf)


async def measured(
    args: argparse.Namespace, cluster: Cluster, routing: str, sessions: Sequence[Session]
) -> dict[str, Any]:
    """Raises aiohttp.ClientError and Failed."""
    urls = [url.rstrip("/") for url in args.url]
    async with aiohttp.ClientSession() as http, http.get(f"{urls[0]}/v1/models") as response:
        model = (await response.json(content_type=None))["data"][0]["id"]
    targets = [Target(url, model, conversations=True) for url in urls]
    draw = random.Random(args.seed)
    route = cluster.home if routing == "session" else lambda _: draw.randrange(len(urls))
    return await LiveCluster(targets, route, args.vocabulary, args.warm_up_s).run(
        sessions, args.seconds
    )


if __name__ == "__main__":
    sys.exit(main())

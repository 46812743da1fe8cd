"""Plays conversations on an engine, round by round; each next turn finds its history in one chosen
tier.

In a round every conversation has its next turn. The tiers above the chosen one are small. Between
two rounds random prompts fill them, and so push all conversations down to the chosen tier.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import Engine
from pensieve.runtime.executor import Executor
from pensieve.runtime.launch import assemble
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.types import GREEDY, Sampling, TokenLogprobs, Usage

from ...loop import Loop
from .conversations import ChatText, RecordedChat

CHUNK = 32
SPARE_CHUNKS = 8
FILLER_CHUNKS = 32  # of a random prompt that fills a tier: longer ones take longer
TIERS = ("gpu", "host", "disk", "recomputed")
"""Where a turn finds its history; `recomputed`: nowhere."""

ALWAYS_LOAD = CostProfile(
    CHUNK,
    chunk_seconds=1e3,
    attention=((1, 0.0),),
    step_base_seconds=0.0,
    chunk_bytes=1,
    link_bytes_per_s=1e9,
)
"""Pretends that computing takes for ever: KV in a lower tier is always used."""


@dataclass(frozen=True, slots=True)
class PlayLimits:
    """turns         most turns of a conversation
    reply_tokens    most tokens of a reply
    context         most tokens of a context; a conversation ends before the turn that needs more
    rows, batch     requests at once, tokens a step
    """

    turns: int
    reply_tokens: int
    context: int
    rows: int
    batch: int


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """A turn's prompt and the model's own reply, with its stop token if it ended by one."""

    conversation: str
    turn: int
    prompt: array[int]
    reply: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()


def pools(tier: str, contexts: Sequence[int], limits: PlayLimits, reuse: bool) -> SchedulerConfig:
    """Pools that hold all conversations in that tier, and few in the tiers above it.

    contexts: most tokens of each conversation.
    """
    longest = max(*contexts, 2 * CHUNK)  # room for a filling prompt
    every = sum(-(-tokens // CHUNK) + 2 for tokens in contexts) + SPARE_CHUNKS
    few = max(-(-longest // CHUNK), every // 16) + limits.rows + SPARE_CHUNKS
    gpu, host, disk = {
        "gpu": (every, 0, 0),
        "host": (few, every + 2 * few, 0),
        "disk": (few, few, every + 4 * few),
        "recomputed": (few, 0, 0),
    }[tier]
    return SchedulerConfig(
        gpu_kv_chunks=gpu,
        host_kv_chunks=host,
        disk_kv_chunks=disk,
        max_model_len=longest,
        max_num_seqs=limits.rows,
        max_num_batched_tokens=max(limits.batch, limits.rows),
        chunk_tokens=CHUNK,
        queue_order="arrival",
        eviction="lru",
        generation_reserve=0.0,
        reuse=reuse,
    )


@contextmanager
def opened(engine: Engine, config: SchedulerConfig) -> Iterator[Loop]:
    """A loop with a device of its own; its disk tier, if any, is a temporary directory."""
    with TemporaryDirectory(prefix="pensieve-kv-") as directory:
        disk = None
        if config.disk_kv_chunks:
            disk = DiskSettings(Path(directory), config.disk_kv_chunks, engine.manifest.fingerprint)
        device = assemble.make_device(engine.manifest.device)
        loop = Loop(device, engine, config, ALWAYS_LOAD, make_executor=partial(Executor, disk=disk))
        try:
            yield loop
        finally:
            loop.close()
    if engine.manifest.device == "cuda":
        torch.cuda.empty_cache()


def context_bounds(
    text: ChatText, conversations: Sequence[RecordedChat], limits: PlayLimits
) -> list[int]:
    """Most tokens of each conversation: its own messages, and replies as long as they may be."""
    bounds = []
    for one in conversations:
        empty = {"role": "assistant", "content": ""}
        users = one.users[: limits.turns]
        shown = [*one.system, *(message for user in users for message in (user, empty))]
        # A reply that is decoded and encoded again may have a few tokens more.
        replies = len(users) * (limits.reply_tokens + 4)
        bounds.append(min(limits.context, len(text.prompt(shown)) + replies))
    return bounds


def push_down(loop: Loop, tier: str) -> None:
    """Fills the tiers above that one with random tokens."""
    config = loop.config
    chunks = {"gpu": 0, "disk": config.gpu_kv_chunks + config.host_kv_chunks}
    left = chunks.get(tier, config.gpu_kv_chunks)
    most = min(config.max_model_len // CHUNK - 1, FILLER_CHUNKS)
    while left > 0:
        count = min(left, most)
        loop.add(loop.random_ids(count * CHUNK + 1), 1)
        left -= count
    loop.drain()


def play(
    engine: Engine,
    text: ChatText,
    conversations: Sequence[RecordedChat],
    tier: str,
    limits: PlayLimits,
    sampling: Sampling = GREEDY,
    reuse: bool = True,
) -> list[PlayedTurn]:
    """All conversations with the users' messages and the model's own replies."""
    config = pools(tier, context_bounds(text, conversations, limits), limits, reuse)
    started = time.perf_counter()
    chats = {one.name: [*one.system] for one in conversations}
    turns: list[PlayedTurn] = []
    with opened(engine, config) as loop:
        for turn in range(limits.turns):
            if turn:
                push_down(loop, tier)
            going = []
            for one in conversations:
                if turn >= len(one.users) or one.name not in chats:
                    continue
                chats[one.name].append(one.users[turn])
                prompt = text.prompt(chats[one.name])
                if len(prompt) + limits.reply_tokens > config.max_model_len:
                    del chats[one.name]
                    continue
                stops = engine.manifest.stop_ids
                answer = loop.add(prompt, limits.reply_tokens, sampling, stop_ids=stops)
                going.append((one.name, prompt, answer))
            if not going:
                break
            loop.run_until(lambda: all(answer.done for _, _, answer in going))  # noqa: B023
            loop.drain()  # copies and writes of this round end before the next begins
            for name, prompt, answer in going:
                assert answer.usage is not None  # with the first token
                reply = tuple(answer.tokens)
                turns.append(
                    PlayedTurn(name, turn, prompt, reply, answer.usage, tuple(answer.logprobs))
                )
                chats[name].append({"role": "assistant", "content": text.text(reply)})
            seconds = time.perf_counter() - started
            print(f"  {tier}: turn {turn + 1}, {len(going)} conversations, {seconds:.0f} s",
                  flush=True)  # fmt: skip
    return turns


def sources(turns: Sequence[PlayedTurn]) -> dict[str, int]:
    """Prompt tokens by where their KV came from."""
    names = ("gpu", "host", "disk", "recomputed", "new")
    return {name: sum(getattr(turn.usage, name) for turn in turns) for name in names}

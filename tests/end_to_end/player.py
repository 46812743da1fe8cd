"""Plays requests through scheduler, executor and a real engine like the serving loop, and keeps
their outputs."""

from __future__ import annotations

import random
import time
from array import array
from dataclasses import dataclass, field

from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.executor import Executor
from pensieve.runtime.loop import EngineLoop
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import FinishReason, Request, RequestId, Usage

from .chatter import slow_link_profile


@dataclass
class Heard:
    """The outputs of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    usage: Usage | None = None
    finish: FinishReason | None = None


class Player:
    """With `disturbed`, copies and steps are delayed at random and the copies of a batch are
    shuffled."""

    def __init__(self, engine, grammars=None, *, disturbed=False, host_form=None, **settings):
        defaults = dict(
            gpu_kv_chunks=200,
            host_kv_chunks=200,
            max_model_len=200,
            max_num_seqs=8,
            max_num_batched_tokens=48,
            chunk_tokens=8,
        )
        config = SchedulerConfig(**(defaults | settings))
        delays = random.Random(5)
        device = CpuDevice(
            disturb=(lambda lane: delays.choice((0.0, 0.0, 0.002))) if disturbed else None,
            shuffle=random.Random(6) if disturbed else None,
        )
        self.executor = Executor(
            device, engine, config, group_layers=1, grammars=grammars, host_form=host_form
        )
        self.scheduler = Scheduler(
            config, slow_link_profile(config, engine.chunk_bytes(config.chunk_tokens))
        )
        self.steps = 0
        self._ids = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.executor.close()

    def request(self, prompt, max_tokens, **options) -> Request:
        self._ids += 1
        return Request(RequestId(self._ids), array("i", prompt), max_tokens, **options)

    def play(self, *requests: Request) -> list[Heard]:
        """All of them at once; returns when the last one has ended, in the order of the
        arguments."""
        heard = {request.id: Heard() for request in requests}
        for request in requests:
            self.scheduler.add(request, time.monotonic())
        loop = EngineLoop(self.scheduler, self.executor)
        while not self.scheduler.idle:
            applied = loop.step()
            if applied is not None:
                self.steps += 1
                self._take(applied, heard)
            self.scheduler.check()
        return list(heard.values())

    def _take(self, applied, heard):
        for row in applied.results():
            told = heard[row.request]
            told.tokens += row.tokens
            told.logprobs += row.logprobs
            told.prompt_logprobs += row.prompt_logprobs
            told.usage = row.usage or told.usage
            told.finish = row.finish or told.finish

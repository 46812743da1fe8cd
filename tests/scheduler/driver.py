"""Random conversations against the scheduler alone, on the device model, every reply checked."""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import analytic_profile
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import Request, RequestError

from .device_model import DeviceModel, next_token


def profile(chunk_tokens=4, chunks_a_step=3):
    """Costs of a small model. The link copies about `chunks_a_step` chunks while a step runs."""
    return analytic_profile(
        chunk_tokens=chunk_tokens,
        parameters=1_000_000,
        layers=4,
        attention_width=256,
        chunk_bytes=4096,
        max_context=4096,
        flops_per_s=1e10,
        link_bytes_per_s=4096 * chunks_a_step / 2e-3,
        step_base_seconds=1e-3,
    )


class Driver:
    """One random operation after the other; knows every log and what every reply must be."""

    def __init__(self, seed, *, check=True, max_turns=12, **settings):
        self.random = random.Random(seed)
        defaults = dict(
            gpu_kv_chunks=24,
            host_kv_chunks=16,
            max_model_len=64,
            max_num_seqs=6,
            max_num_batched_tokens=24,
            chunk_tokens=4,
            max_queue=8,
        )
        self.config = SchedulerConfig(**(defaults | settings))
        self.scheduler = Scheduler(self.config, profile(self.config.chunk_tokens))
        self.device = DeviceModel(self.config.gpu_kv_chunks, self.config.host_kv_chunks, self.config.chunk_tokens)
        self.check = check
        self.now = 0.0
        self.ids = 0
        self.results = deque()
        self.open = {}  # request id -> (request, reply so far)
        self.held = {}
        self.logs = {}  # conversation -> tokens
        self.openings = [[self.random.randrange(97) for _ in range(14)] for _ in range(3)]
        self.counts = Counter()
        self.first_waiting = {}

    # -- one operation

    def step(self):
        self.now += self.random.choice((0.001, 0.01, 0.5))
        operation = self.random.choices(
            (self.add, self.plan, self.apply, self.abort, self.stop, self.fork, self.delete),
            (12, 40, 40, 2, 2, 1, 1),
        )[0]
        operation()
        if self.check:
            self.scheduler.check()

    def add(self):
        name = self.random.choice([None, *(f"c{i}" for i in range(10))])
        log = self.logs.get(name, [])
        if len(log) > 44:
            log = []
        start = list(log) if log and self.random.random() < 0.85 else list(self.random.choice(self.openings))
        if log and self.random.random() < 0.1:
            start = start[: self.random.randrange(1, len(start) + 1)]  # the client went back: a branch
        prompt = array("i", start + [self.random.randrange(97) for _ in range(self.random.choice((0, 1, 3, 9)))])
        self.ids += 1
        request = Request(
            self.ids,
            prompt,
            self.random.randint(1, 12),
            conversation=name,
            stop_ids=frozenset(self.random.sample(range(97), 4)),
            min_tokens=0,
            confirm=self.random.random() < 0.3,
            salt=b"" if self.random.random() < 0.9 else b"other",
        )
        try:
            self.scheduler.add(request, self.now)
        except RequestError as refusal:
            self.counts[f"refused {refusal.status}"] += 1
        else:
            self.open[request.id] = (request, [])
            self.counts["added"] += 1

    def plan(self):
        if len(self.results) >= 3:
            return
        plan = self.scheduler.next_plan(self.now)
        if plan is None:
            self.counts["nothing to plan"] += 1
            return
        assert plan.tokens <= self.config.max_num_batched_tokens
        starts = {}
        for span in plan.spans:
            assert span.start < span.end and starts.get(span.seat, -1) < span.start
            starts[span.seat] = span.start
        self.counts["disjoint"] += len(plan.spans) > len(starts)
        self.counts["spans"] += len(plan.spans)
        if self.config.batching == "separate":
            assert not (plan.spans and plan.generate)
        for batch in plan.copies:
            self.counts[f"lane {batch.lane} gated {batch.gated}"] += len(batch.sources)
        self.results.append(self.device.launch(plan))

    def apply(self):
        if not self.results:
            return
        applied = self.scheduler.apply(self.results.popleft(), self.now)
        for request_id, token in zip(applied.requests, applied.tokens, strict=True):
            request, reply = self.open[request_id]
            expected = next_token([*request.prompt, *reply])
            assert token == expected, f"request {request_id}: token {len(reply)} is {token}, not {expected}"
            reply.append(token)
            self.counts["tokens"] += 1
        for event in applied.events:
            if event.usage is not None:
                self._note_usage(self.open[event.request][0], event.usage)
            if event.finish is not None:
                request, reply = self.open[event.request]
                if request.confirm:
                    self.held[event.request] = True
                else:
                    self._ended(event.request, len(reply))
        for name, log in self.logs.items():
            assert list(self.scheduler.conversation_tokens(name)) == log

    def _note_usage(self, request, usage):
        total = usage.cached + usage.recomputed + usage.new
        assert total == len(request.prompt) and min(usage.gpu, usage.host, usage.recomputed, usage.new) >= 0, usage
        for source in ("gpu", "host", "recomputed", "new"):
            self.counts[source] += getattr(usage, source)

    def _ended(self, request_id, tokens):
        request, reply = self.open.pop(request_id)
        self.held.pop(request_id, None)
        if request.conversation is not None:
            self.logs[request.conversation] = [*request.prompt, *reply[:tokens]]
        self.counts["ended"] += 1

    def abort(self):
        if self.open:
            request_id = self.random.choice(list(self.open))
            self.scheduler.abort(request_id, self.now)
            del self.open[request_id]
            self.held.pop(request_id, None)
            self.counts["aborted"] += 1

    def stop(self):
        candidates = [i for i, (request, reply) in self.open.items() if request.confirm and reply]
        if candidates:
            self._finish(self.random.choice(candidates))

    def _finish(self, request_id):
        keep = self.random.randint(1, len(self.open[request_id][1]))
        was_held = request_id in self.held
        output = self.scheduler.finish(request_id, keep, self.now)
        assert (output is None) == was_held
        self._ended(request_id, keep)

    def fork(self):
        if self.logs:
            source, new = self.random.choice(list(self.logs)), f"f{self.random.randrange(4)}"
            if new not in self.logs:
                self.scheduler.fork(source, new)
                self.logs[new] = list(self.logs[source])

    def delete(self):
        if self.logs and self.random.random() < 0.5:
            name = self.random.choice(list(self.logs))
            self.scheduler.delete(name)
            del self.logs[name]

    # -- the end

    def drain(self):
        """Everything open ends within a bounded number of steps: nobody starves."""
        for _ in range(10_000):
            for request_id in [i for i in self.held]:
                self._finish(request_id)
            if not self.open and not self.results:
                break
            self.now += 0.01
            self.plan()
            self.apply()
            if self.check:
                self.scheduler.check()
        assert not self.open, f"{len(self.open)} requests never ended"
        assert self.scheduler.idle
        self.counts["suspended"] = self.scheduler.stats().suspensions
        self.counts["dropped"] = self.scheduler.stats().dropped
        slots = self.scheduler.stats().slots["gpu"]
        assert slots["in_use"] == 0

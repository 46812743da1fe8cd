"""Random conversations through scheduler, executor and a real engine, each reply compared with
plain transformers.

A reply's token is right if it is the reference's greedy choice over the same context; where the
reference itself is undecided (its gap between the two tokens is at most `undecided`) the run goes
on with the token it got.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

import torch

from pensieve.plugins.state.pool import state_chunks
from pensieve.runtime.executor import Executor
from pensieve.runtime.loop import EngineLoop
from pensieve.scheduler.config import SchedulerConfig, StateConfig
from pensieve.scheduler.context_window import RECOMPUTE, ContextWindow
from pensieve.scheduler.cost_estimate import analytic_profile
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import GREEDY, Request, Sampling

from .sharing import SharingDevice

UNDECIDED = 1e-3

# Replies outgrow the slots reserved for them, in a pool of 29 chunks: a dozen suspensions and more
# in fifty turns.
STATES = dict(spacing=32, generated=16, multiple=8)  # so dense that short logs have some
TIGHT = dict(generation_reserve=0.0, longest=110, longest_reply=60)


@dataclass
class Open:
    request: Request
    reply: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    base: int = 0


def slow_link_profile(config, chunk_bytes, chunks_a_step=4):
    """Costs at which loading beats recomputing, and a step hides the loading of a few chunks
    only."""
    return analytic_profile(
        chunk_tokens=config.chunk_tokens,
        parameters=1_000_000,
        layers=2,
        attention_width=64,
        chunk_bytes=chunk_bytes,
        max_context=config.max_model_len,
        flops_per_s=1e9,
        link_bytes_per_s=chunk_bytes * chunks_a_step / 2e-3,
        step_base_seconds=1e-4,
    )


class Chatter:
    """`longest`: tokens of a log from which on a client begins a new one; beyond `max_model_len`
    contexts overflow. `longest_reply`: its tokens, at most. `undecided`: gap between two tokens'
    logits up to which either is right. `within`: the log probabilities of replies may differ by so
    much; None: they are not compared. `openings`: tokens with which a log may begin. `disk`:
    DiskSettings, of as many slots as the settings say.
    """

    def __init__(
        self,
        engine,
        reference,
        seed,
        *,
        disturbed=False,
        ids=0.7,
        host_form=None,
        disk=None,
        longest=150,
        openings=(16, 21, 40),
        longest_reply=16,
        undecided=UNDECIDED,
        within=None,
        make_executor=Executor,
        make_device=SharingDevice,
        **settings,
    ):
        self.longest = longest
        self.longest_reply = longest_reply
        self.random = random.Random(seed)
        defaults = dict(
            gpu_kv_chunks=40,
            host_kv_chunks=30,
            max_model_len=200,
            max_num_seqs=6,
            max_num_batched_tokens=48,
            chunk_tokens=8,
            max_queue=64,
        )
        if engine.state_shape is not None:
            record = engine.chunk_bytes(defaults["chunk_tokens"])
            chunks = state_chunks(engine.state_shape, record)
            seats = (defaults | settings)["max_num_seqs"]
            defaults["states"] = StateConfig(chunks, seats + 2, **STATES)
        self.config = SchedulerConfig(**(defaults | settings))
        self.vocabulary = engine.manifest.vocab_size
        self.reference = reference
        self.undecided = undecided
        self.within = within
        self._engine = engine
        self._seed = seed
        self._disturbed = disturbed
        self._disk = disk
        self._host_form = host_form
        self._make_executor = make_executor
        self._make_device = make_device
        self._begin()
        self.ids = ids
        self.names = [f"c{number}" for number in range(8)]  # and the last two forks
        self.logs: dict[str, list[int]] = {}
        self.anonymous: list[list[int]] = []
        self.counts: Counter[str] = Counter()
        self.requests = 0
        self.openings = [[self._token() for _ in range(n)] for n in openings]

    def _begin(self):
        """Starts a process that has only the disk's contents."""
        delays = random.Random(self._seed + 1)
        self._device = self._make_device(
            disturb=(lambda lane: delays.choice((0.0, 0.0, 0.002, 0.006)))
            if self._disturbed
            else None,
            shuffle=random.Random(self._seed + 2) if self._disturbed else None,
        )
        self.executor = self._make_executor(
            self._device,
            self._engine,
            self.config,
            group_layers=1,
            host_form=self._host_form,
            disk=self._disk,
            states=self._engine.state_shape,
        )
        self.scheduler = Scheduler(
            self.config,
            slow_link_profile(self.config, self._engine.chunk_bytes(self.config.chunk_tokens)),
        )
        self.scheduler.lower.adopt(self.executor.stored_records(), time.monotonic())
        self.open: dict[int, Open] = {}

    def restart(self):
        """Restarts at any time: open turns and the contents of memory are lost."""
        self.counts += self._stats()
        self.executor.close()
        self._begin()
        self.counts["restarted"] += 1

    def _token(self):
        return self.random.randrange(self.vocabulary)

    # -- the clients

    def _write(self):
        """A turn: of a named conversation, or a whole history without a name."""
        named = self.random.random() < self.ids
        name = self.random.choice(self.names) if named else None
        log = self.logs.get(name) if named else self.random.choice(self.anonymous or [None])
        if not log or len(log) > self.longest:
            log = self.random.choice(self.openings)
        elif self.random.random() < 0.12:
            log = log[: self.random.randrange(1, len(log))]  # a branch
            self.counts["branched"] += 1
        prompt = array(
            "i", [*log, *(self._token() for _ in range(self.random.choice((0, 1, 5, 20))))]
        )
        self.requests += 1
        truncate = self.longest > self.config.max_model_len
        tokens = self.random.randint(1, self.longest_reply)
        request = Request(
            self.requests,
            prompt,
            tokens,
            sampling=GREEDY if self.within is None else Sampling(logprobs=0),
            conversation=name,
            truncate=truncate,
        )
        self.open[request.id] = Open(request)
        self.scheduler.add(request, time.monotonic())

    def _meddle(self):
        """Aborts and forks."""
        if self.open and self.random.random() < 0.02:
            request = self.random.choice(list(self.open))
            self.scheduler.abort(request, time.monotonic())
            del self.open[request]
            self.counts["aborted"] += 1
        if self.logs and self.random.random() < 0.05:
            source = self.random.choice(list(self.logs))
            if source in self.scheduler.conversations:  # none is after a restart
                self.counts["forked"] += 1
                new = f"f{self.counts['forked']}"
                self.scheduler.conversations.fork(source, new, time.monotonic())
                self.logs[new] = self.logs[source]
                self.names = [*self.names[:8], *self.names[8:][-1:], new]

    # -- the loop

    def run(self, turns, restarts=0, events=(), also=lambda: True):
        """`restarts`: number of restarts at random times. `events`: those whose counts must not be
        0 at the end. Until then, and until `also` returns true, there are more turns, at most ten
        times as many.
        """

        def missing():
            return [event for event in events if not (self.counts + self._stats())[event]]

        def more():
            return self.requests < turns or (
                self.requests < 10 * turns and not (also() and not missing())
            )

        loop = EngineLoop(self.scheduler, self)
        moments = sorted(self.random.sample(range(1, turns), restarts), reverse=True)
        while more() or self.open or not self.scheduler.idle:
            while more() and len(self.open) < 10 and self.random.random() < 0.5:
                self._write()
            self._meddle()
            if moments and self.requests >= moments[-1]:
                moments.pop()
                self.restart()
                loop = EngineLoop(self.scheduler, self)
            if self.config.host_kv_growth:
                self.counts["grown"] += self.scheduler.grow_host(self.executor.host_slots)
            applied = loop.step()
            if applied is not None:
                self._apply(applied)
            self.scheduler.check()
        assert not missing(), f"{missing()} never occurred: {dict(self.counts)}"
        assert self.scheduler.stats().slots["gpu"]["in_use"] == 0 and self.scheduler.idle
        self.counts += self._stats()
        self.executor.close()
        return self.counts

    def _stats(self):
        """Counts since the last start."""
        stats = self.scheduler.stats()
        return Counter(
            suspended=stats.suspensions,
            dropped=stats.dropped,
            drafted=stats.drafted,
            accepted=stats.accepted,
            shared=getattr(self._device, "shared_rows", 0),
        )

    # -- the loop's executor

    def launch(self, plan):
        seats = [span.seat for span in plan.spans]
        self.counts["disjoint"] += len(seats) > len(set(seats))
        self._note_bases(plan)
        self.executor.launch(plan)

    def done(self):
        return self.executor.done()

    def wait(self):
        return self.executor.wait()

    def _note_bases(self, plan):
        for row in self.scheduler._queues.rows:
            self.open[row.turn.request.id].base = row.turn.context_start
        self.counts["moved on"] += sum(
            all(join.seat != origin.seat for join in plan.joins) for origin in plan.origins
        )

    def _apply(self, applied):
        for row in applied.results():
            if row.tokens:
                self.open[row.request].reply += row.tokens
                self.open[row.request].logprobs += [entry.logprob for entry in row.logprobs]
        for event in applied.rows:
            if event.usage is not None:
                for source in ("gpu", "host", "disk", "recomputed", "new"):
                    self.counts[source] += getattr(event.usage, source)
                self.counts["fetched"] += event.usage.shared
            # An end that --save sync keeps back may come when its client has left.
            if event.finish is not None and event.request in self.open:
                self.counts["overflowed"] += event.truncated > 0
                self._ended(self.open.pop(event.request))

    def _ended(self, turn):
        tokens = [*turn.request.prompt, *turn.reply]
        assert len(turn.reply) == turn.request.max_tokens
        if len(tokens) - 1 <= self.config.max_model_len:
            check_greedy(self.reference, tokens, len(turn.request.prompt), self.undecided)
            if self.within is not None:
                check_logprobs(self.reference, tokens, turn.logprobs, self.within)
        else:
            check_overflowing(
                self.reference, tokens, len(turn.request.prompt), self.config.windows, turn.base
            )
            self.counts["begun anew"] += turn.base > 0
        self.counts["replies"] += 1
        if turn.request.conversation is None:
            self.anonymous = [*self.anonymous[-6:], tokens]
        else:
            self.logs[turn.request.conversation] = tokens


@torch.inference_mode()
def check_greedy(reference, tokens, start, undecided=UNDECIDED):
    """Every token from `start` on is the reference's greedy choice behind those before it."""
    _check_choices(
        reference(torch.tensor([tokens[:-1]])).logits[0, start - 1 :], tokens[start:], undecided
    )


@torch.inference_mode()
def check_logprobs(reference, tokens, logprobs, within):
    """The log probabilities of the last tokens are the reference's."""
    count = len(logprobs)
    logits = reference(torch.tensor([tokens[:-1]])).logits[0, -count:]
    expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens[-count:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=within, rtol=0)


@torch.inference_mode()
def check_overflowing(reference, tokens, start, windows: ContextWindow, base):
    """Checks like `check_greedy` where nothing before `base` exists, and each position sees its
    window only."""
    last = len(tokens) - 1
    if windows.mode == RECOMPUTE:  # each window is a context of its own
        while start <= last:
            base = windows.start(start - 1)
            end = min(last + 1, windows.end(base) + 1)
            check_greedy(reference, tokens[base:end], start - base)
            start = end
        return
    position = torch.arange(base, last)
    seen_from = torch.tensor([windows.start(p, base) for p in position.tolist()])
    hidden = (position > position[:, None]) | (position < seen_from[:, None])
    told = position - torch.tensor([windows.zero(seen) for seen in seen_from.tolist()])
    mask = _masks(reference.config, hidden, position)
    logits = reference(
        torch.tensor([tokens[base:last]]), attention_mask=mask, position_ids=told[None]
    ).logits
    _check_choices(logits[0, start - base - 1 :], tokens[start:])


def _masks(config, hidden, position):
    """The mask of the layers, or by kind of layer the masks that differ: some layers have a window
    of the model's."""
    window = getattr(config, "sliding_window", None)
    near = hidden | (position <= position[:, None] - window) if window else hidden
    full, sliding = (
        torch.zeros(x.shape).masked_fill(x, torch.finfo(torch.float32).min)[None, None]
        for x in (hidden, near)
    )
    if window and hasattr(config, "layer_types"):
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding


def _check_choices(logits, tokens, undecided=UNDECIDED):
    best = logits.max(dim=-1).values
    got = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    gap = best - got
    wrong = (gap > undecided).nonzero()
    assert not len(wrong), (
        f"reply token {int(wrong[0])} of {len(got)} is off by {float(gap[wrong[0]])} in logits"
    )

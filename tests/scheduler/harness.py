"""The scheduler on the device model: one operation a method, every reply and every log checked
against the truth."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import replace
from math import inf
from random import Random

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.context_window import RECOMPUTE
from pensieve.scheduler.cost_estimate import analytic_profile
from pensieve.scheduler.kv.chunk_keys import NO_KEY
from pensieve.scheduler.kv.disk_tier import DiskTier
from pensieve.scheduler.kv.piece_keys import split_key
from pensieve.scheduler.kv.shared_tier import SharedTier
from pensieve.scheduler.plan import Lane, Spill, Tickets
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import (
    GPU,
    HOST,
    Erasure,
    ErrorKind,
    Request,
    RequestError,
    RowResult,
    StoredRecord,
    Tier,
)

from .device_model import DeviceModel, disk_work, kv, next_token

SMALL = {
    "gpu_kv_chunks": 24,
    "host_kv_chunks": 16,
    "max_model_len": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "chunk_tokens": 4,
    "max_queue": 8,
    "generation_reserve": 0.1,  # two chunks; the default's share has none
}
COPIES = {  # by lane and the parity of the ticket
    (Lane.OUT, 1): "evictions",
    (Lane.IN, 1): "gated swap-ins",
    (Lane.IN, 0): "early swap-ins",
    (Lane.OUT, 0): "saves",
}


def profile(chunk_tokens=4, chunks_a_step=3):
    """Costs of a small model: 2.2 ms to compute a chunk, 2 ms / `chunks_a_step` to load one.

    The link copies about `chunks_a_step` chunks in the shortest step. Where it copies fewer than
    0.9, early chunks are rather computed and late ones rather loaded.
    """
    return analytic_profile(
        chunk_tokens=chunk_tokens,
        parameters=1_000_000,
        layers=4,
        attention_width=256,
        chunk_bytes=4096,
        max_context=4096,
        flops_per_s=9.1e8 * chunk_tokens,
        link_bytes_per_s=4096 * chunks_a_step / 2e-3,
        step_base_seconds=1e-3,
    )


def former_keys(lower):
    """Keys whose records may be in slots that their chunks have given up."""
    if isinstance(lower, SharedTier):
        return ()
    return lower._former_slots if isinstance(lower, DiskTier) else lower.former_keys()


def free_slots(lower, held):
    """Those of the slots that hold records which should be free."""
    if isinstance(lower, SharedTier):
        return set()
    if isinstance(lower, DiskTier):
        return set(lower.pool._free) & set(held)
    return lower.free_slots(held)


class Harness:
    """open      request id -> (request, its reply so far)
    bases     request id -> where its context begins, from its first seat on
    held      ids whose reply ended and waits for `finish`
    logs      conversation -> every token of its last committed turn
    lives     conversation -> (last activity, seconds it lives on), as far as it was given a TTL
    results   of launched steps, not applied yet
    """

    takes_erased = False

    def __init__(self, *, chunks_a_step=3, check=True, vocabulary=97, **settings):
        self.config = SchedulerConfig(**(SMALL | settings))
        self.windows = self.config.windows
        self._cost = profile(self.config.chunk_tokens, chunks_a_step)
        self.scheduler = self.new_scheduler()
        self._copy_fails = Random(0)
        self._vocabulary = vocabulary
        self.salts = {}
        self.device = self._new_device()
        self._check = check
        self.now = 0.0
        self.ids = 0
        self.results = deque()
        self.open, self.held, self.logs, self.lives, self.bases = {}, {}, {}, {}, {}
        self.scores = {}
        self.grammars = {}
        self.erasing = deque()
        self.counts = Counter()

    def new_scheduler(self):
        return Scheduler(self.config, self._cost)

    def _new_device(self):
        config = self.config
        copy_fails = (lambda: self._copy_fails.random() < 0.2) if config.copies_may_fail else None
        sizes = (config.gpu_kv_chunks, config.host_kv_chunks, config.chunk_tokens)
        return DeviceModel(
            *sizes,
            self.windows,
            self._vocabulary,
            copy_fails,
            self.salts,
            self.erases,
            config.states,
        )

    def erases(self):
        """Whether a record can be erased."""
        return True

    # -- requests

    @staticmethod
    def tokens(ids):
        return array("i", ids)

    def submit(self, prompt, max_tokens=4, conversation=None, **fields):
        """Adds a turn and returns its id. RequestError passes through and changes nothing."""
        request_id = fields.pop("id", self.ids + 1)
        self.ids = max(self.ids, request_id)
        request = Request(
            request_id, array("i", prompt), max_tokens, conversation=conversation, **fields
        )
        self.salts[request_id] = request.salt
        self.enter(request)
        if request.sampling.grammar is not None:
            self.grammars[request_id] = request
        self._expire()
        self.open[request_id] = (request, [])
        self._active(conversation)
        self.counts["added"] += 1
        return request_id

    def enter(self, request):
        self.scheduler.add(request, self.now)

    def state(self, request_id):
        """The state of the open request: waiting, suspended, loading, resuming (its history),
        running, leaving or held."""
        queues = self.scheduler._queues
        if request_id in self.held:
            return "held"
        for turn in queues.waiting:
            if turn.request.id == request_id:
                return "suspended" if len(turn.tokens) > len(turn.request.prompt) else "waiting"
        for row in queues.swapping_in:
            if row.turn.request.id == request_id:
                return "loading"
        if all(row.turn.request.id != request_id for row in queues.rows):
            return "saving"  # its last event is kept back
        row = next(row for row in queues.rows if row.turn.request.id == request_id)
        return (
            "leaving"
            if row.leaving
            else "resuming"
            if row.spans and self.reply(request_id)
            else "running"
        )

    def coming_back(self):
        """Suspended requests in the batch again whose dropped history is not computed yet, and
        those loading theirs."""
        queues = self.scheduler._queues
        rows = [row for row in (*queues.rows, *queues.swapping_in) if row.spans]
        return [row.turn.request.id for row in rows if self.reply(row.turn.request.id)]

    def reply(self, request_id):
        return self.open[request_id][1]

    def abort(self, request_id):
        state = self.state(request_id)
        self.counts[f"aborted {state}"] += 1
        self.scheduler.abort(request_id, self.now)
        if state == "saving" and not self.open[request_id][0].confirm:
            self._ended(request_id, len(self.reply(request_id)))  # too late: it is committed
            return
        del self.open[request_id]
        self.held.pop(request_id, None)

    def time_out(self):
        """Requests that have waited too long for a seat are refused."""
        for request_id in self.scheduler.time_out(self.now):
            assert not self.open.pop(request_id)[1]
            self.counts["timed out"] += 1

    def finish(self, request_id, tokens):
        self.counts[f"finished {self.state(request_id)}"] += 1
        was_held = request_id in self.held
        output = self.scheduler.finish(request_id, tokens, self.now)
        assert (output is None) == was_held or self.config.save == "sync"
        self._ended(request_id, tokens)
        self.check_logs()

    def fork(self, source, new):
        self.scheduler.conversations.fork(source, new, self.now)
        self.logs[new] = self.logs[source]
        self._lives_on(new, self.config.conversation_ttl)
        self.counts["forks"] += 1

    def keep(self, name, ttl=None, pinned_until=float("-inf")):
        self.scheduler.conversations.keep(name, ttl, pinned_until, self.now)
        self._lives_on(name, self.config.conversation_ttl if ttl is None else ttl)
        self.counts["pins"] += pinned_until > self.now

    def _lives_on(self, name, ttl):
        """From its last activity on the conversation lives `ttl` seconds."""
        self.lives.pop(name, None)
        if ttl < inf:
            self.lives[name] = (self.scheduler.conversations.get(name).active, ttl)

    def _active(self, name):
        if name in self.lives:
            self.lives[name] = (self._committed(name) or self.now, self.lives[name][1])

    def _committed(self, name):
        """When the conversation was last active, if that may be a turn whose end is kept back;
        None: as we know it."""
        conversation = (
            self.scheduler.conversations.get(name) if self.config.save == "sync" else None
        )
        return None if conversation is None else conversation.active

    def _expire(self):
        """Removes the conversations that the scheduler must have forgotten by now."""
        for name, (active, ttl) in list(self.lives.items()):
            if (self._committed(name) or active) + ttl <= self.now:
                assert name not in self.scheduler.conversations
                del self.logs[name], self.lives[name]
                self.counts["expired"] += 1
        if self.config.log_chunks < inf:
            names = [name for name in self.logs if name in self.scheduler.conversations]
            sync = self.config.save == "sync"  # then a log may have changed before its last event
            logs = [
                self.scheduler.conversations.tokens(name) if sync else self.logs[name]
                for name in names
            ]
            sizes = [len(log) // self.config.chunk_tokens + 1 for log in logs]
            assert len(names) <= 1 or sum(sizes) <= self.config.log_chunks
            for name in self.logs.keys() - set(names):
                del self.logs[name]
                self.lives.pop(name, None)
                self.counts["forgotten"] += 1

    def delete(self, name, shared=0):
        self._delete(name, shared)
        self.counts["deletes"] += 1

    def cut(self, name, kept, shared=None):
        """An edit leaves the conversation its first `kept` tokens."""
        self._delete(name, kept if shared is None else shared, kept)
        self.counts["cuts"] += 1

    def _delete(self, name, shared=0, kept=0):
        conversation = self.scheduler.conversations.get(name)
        all_keys = self.scheduler.lower.keys(conversation.tokens, conversation.salt, shared)
        keys = [key for key in all_keys if key != NO_KEY]
        self.erasing.append(keys)
        if kept:
            log, salt = conversation.tokens, conversation.salt
            self.scheduler.conversations.cut(name, kept, shared, log, salt, self.now)
        else:
            self.scheduler.conversations.delete(name, shared)
        if name in self.scheduler.conversations:
            self.logs[name] = log[:kept]
            self._active(name)
        else:
            self.lives.pop(name, None)
            del self.logs[name]

    def erase(self, tokens, salt=b""):
        """A conversation of an earlier life, of these tokens, is deleted. Returns the keys that it
        alone had."""
        keys = list(self.scheduler.lower.keys(tokens, salt))
        self.scheduler.lower.erase(keys)
        self.erasing.append(keys)
        return [key for key in keys if self.scheduler._store.find(key) is None]

    def _check_erased(self):
        """Of a deletion that has ended, no record is left, unless another conversation or request
        uses it. Only where all deletions are the harness's: other tests take the ends
        themselves."""
        for erasure in self.scheduler.lower.take_erased():
            store = self.scheduler._store
            keys = self.erasing.popleft()
            gone = {
                key
                for key in keys
                if store.find(key) is None
                and not any(key in former_keys(lower) for lower in store.lower)
            }
            left = [key for key, _, _ in self.device.disk.values() if split_key(key)[0] in gone]
            wholly = erasure is Erasure.WHOLLY
            assert not (wholly and left), f"records of deleted chunks: {left}"
            self.counts["erased wholly" if wholly else "erased in part"] += 1

    def lose(self, choose):
        """Some idle chunks are gone, in any tier: such holes are rare with eviction alone."""
        store = self.scheduler._store
        if idle := [
            chunk for chunk in store.resident_chunks() if chunk.resident and not chunk.users
        ]:
            for chunk in choose(idle):
                store.drop(chunk)
                self.counts["lost"] += 1

    def place(self, chunk, tier):
        """The idle GPU chunk is on the "gpu", on "host", on "both", or "dropped"."""
        store = self.scheduler._store
        device = self.device
        if tier in ("host", "both"):
            chunk.slots[HOST] = store.host.take()
            device.pools["host"][chunk.slots[HOST]] = dict(device.pools["gpu"][chunk.slots[GPU]])
            device.last_writer["host", chunk.slots[HOST]] = (Lane.OUT, 0)
            store.update_victim_set(chunk)
        if tier == "host":
            store.release_gpu(chunk)
        if tier == "dropped":
            store.drop(chunk)

    # -- lives

    def restart(self, outcomes=(), **settings):
        """Restarts the process: writes in progress are torn, except those of `outcomes` (DISK
        slots). `settings` replace those of before."""
        self.config = replace(self.config, **settings)
        self.windows = self.config.windows
        for slot in list(self.device.work):
            self.device.finish(slot, slot in outcomes)
        records = [
            StoredRecord(slot, key, end, 1.0) for slot, (key, end, _) in self.device.disk.items()
        ]
        before = self.device
        self.device = self._new_device()
        self.device.disk = before.disk
        self.scheduler = self.new_scheduler()
        self.scheduler.lower.adopt({Tier.DISK: records}, self.now)
        self.results.clear()
        self.erasing.clear()
        self.grammars.clear()
        self.scores.clear()
        for lost in (self.open, self.held, self.logs, self.lives):
            lost.clear()
        self.counts["restarts"] += 1
        self.check()

    def grow_host(self, slots):
        if self.scheduler.grow_host(slots):
            self.device.grow_host(slots)
            self.counts["growths"] += 1

    # -- steps

    def launch(self):
        """The next plan, launched on the device; None if there is nothing to do."""
        plan = self.scheduler.next_plan(self.now)
        self._expire()
        lookup = self.scheduler._lookup
        for turn in self.scheduler._queues.waiting:
            self.counts["waits for keys"] += turn.waiting_for is not None and lookup.must_wait(
                turn.waiting_for
            )
        if plan is None:
            self.counts["nothing to plan"] += 1
            return None
        assert plan.tokens <= self.config.max_num_batched_tokens
        self._check_target(plan)
        self._check_grammars(plan)
        for row in (*self.scheduler._queues.rows, *self.scheduler._queues.swapping_in):
            self._note_base(row.turn)
            most = self.config.chunks(self.config.max_model_len)
            assert len(row.chunks) <= most, f"{row.id} holds more than its window sees"
        self.counts["moved on"] += sum(
            all(join.seat != origin.seat for join in plan.joins) for origin in plan.origins
        )
        starts = {}
        for span in plan.spans:
            assert span.start < span.end and starts.get(span.seat, -1) < span.start
            starts[span.seat] = span.start
        self.counts["disjoint"] += len(plan.spans) > len(starts)
        self.counts["suppressed writes"] += sum(span.write_from == span.end for span in plan.spans)
        if (
            self.config.batching == "separate" and self.config.speculate == "off"
        ):  # a row with drafts generates in spans
            assert not (plan.spans and plan.generate)
        self.counts["erased"] += len(disk_work(plan).erased)
        for batch in plan.copies:
            self.counts[COPIES[batch.lane, batch.ticket % 2]] += len(batch.sources)
        self.results.append(self.device.launch(plan))
        return plan

    def _check_target(self, plan):
        """Beside generation, prompts are predicted to fit into the target; a chunk of them may take
        longer."""
        target = self.config.target_ms_per_token
        if target is None or not plan.generate or not plan.spans:
            return
        begins = {
            row.seat: row.first * self.config.chunk_tokens for row in self.scheduler._queues.rows
        }
        seconds = self._cost.plan_seconds(plan, begins)
        longest = self.config.chunk_tokens * self._cost.token_attention(self.config.max_model_len)
        # a row that generates in a span samples at each position behind those computed again
        generated = sum(
            span.end - span.start
            for span in plan.spans
            if span.samples and span.end - span.write_from == span.samples
        )
        least = len(plan.token_ids) - generated <= self.config.chunk_tokens
        assert least or seconds <= target / 1e3 + longest
        self.counts["least prompts" if least else "prompts in time"] += 1

    def apply(self):
        """Applies the oldest result and checks its tokens; None if nothing is in flight."""
        if not self.results:
            return None
        result = self.results.popleft()
        own = result.lower[0]._replace(**self.reports())
        result = replace(result, lower=(own, *self.shared_reports()))
        if not self.completes():
            result = replace(result, completed=self.device.completed)
        result = replace(
            result, bad_copies=self.device.newly_failed_copies(result.completed.swap_out)
        )
        stuck = [row for row in result.samples if self.gets_stuck(row)]
        errors = {
            row: RowResult(row.request, error=RequestError(ErrorKind.INTERNAL, "stuck"))
            for row in stuck
        }
        result = replace(result, rows={**result.rows, **errors})
        self.device.completed = Tickets(*map(max, self.device.completed, result.completed))
        self.device.applied = result.step
        applied = self.scheduler.apply(result, self.now)
        results = list(applied.results())
        assert len({row.request for row in results}) == len(results)
        for row in results:
            if row.prompt_logprobs:
                self._note_scores(row.request, row.prompt_logprobs)
            if row.error is not None:
                del self.open[row.request]
                self.counts["stuck"] += 1
            for token in row.tokens:
                self._take_token(row.request, token)
        events = [row for row in applied.rows if row.usage is not None or row.finish is not None]
        ended = {}  # conversation -> the logs of its turns that end in this step
        for event in events:
            if event.request not in self.open:
                assert (
                    self.config.save == "sync"
                )  # its client has left, or ended it, while its last event was kept back
                continue
            request, reply = self.open[event.request]
            if request.prompt_logprobs is not None:
                assert len(self.scores.get(event.request, ())) == len(request.prompt) - 1
            begun = self.bases[event.request]
            seen_from = (
                self.windows.start(len(request.prompt) + len(reply) - 2, begun)
                if self.windows
                else 0
            )
            assert event.truncated == seen_from
            if event.usage is not None:
                self._note_usage(request, event.usage, event.truncated)
            if event.finish is not None and request.confirm:
                self.held[event.request] = True
            elif event.finish is not None:
                log = request.prompt + array("i", reply)
                ended.setdefault(request.conversation, []).append(log)
                self._ended(event.request, len(reply))
        for name, logs in ended.items():
            if len(logs) > 1 and name in self.logs:
                # Which of them was committed last does not show.
                self.logs[name] = self.scheduler.conversations.tokens(name)
                assert self.logs[name] in logs or self.config.save == "sync"
        if events:
            self.check_logs()
        if self.takes_erased:
            self._check_erased()
        return applied

    def _take_token(self, request_id, token):
        request, reply = self.open[request_id]
        base = self.bases[request_id]
        context = [*request.prompt, *reply]
        expected = next_token(context, self.windows, base, self._vocabulary, request.salt)
        assert token == expected, (
            f"request {request_id}: token {len(reply)} is {token}, not {expected}"
        )
        reply.append(token)
        self.counts["tokens"] += 1

    def gets_stuck(self, row):
        """Whether the row's grammar allows no next token."""
        return False

    def _check_grammars(self, plan):
        """A row with a grammar generates only from a token that is known. Its grammar is freed
        once, when it ended."""
        for request_id in plan.ended:
            assert request_id not in self.open or self.config.save == "sync"
            del self.grammars[request_id]
        for join in plan.joins:
            assert (join.row.request in self.grammars) == (join.sampling.grammar is not None)
        seats = {row.seat: row for row in self.scheduler._queues.rows}
        for seat, position in zip(plan.generate, plan.positions, strict=True):
            if seats[seat].id.request in self.grammars:
                request, reply = self.open[seats[seat].id.request]
                assert len(request.prompt) + len(reply) == position + 1

    def _note_scores(self, request_id, scores):
        """Every prompt token but the first is scored once, and in order."""
        request, _ = self.open[request_id]
        noted = self.scores.setdefault(request_id, [])
        noted += scores
        values = kv(request.prompt, self.windows, self.bases[request_id], request.salt)
        assert noted == list(zip(values, request.prompt[1:], strict=False))[: len(noted)]
        self.counts["scored"] += len(scores)

    def _note_base(self, turn):
        """A request's base is settled with its first seat; without kept KV each window is one."""
        base = self.bases.setdefault(turn.request.id, turn.context_start)
        if self.windows is not None and self.windows.mode == RECOMPUTE:
            self.bases[turn.request.id] = turn.context_start
        else:
            assert turn.context_start == base

    def reports(self):
        """The reports of disk work: all of it succeeds, at once."""
        return self.report([(slot, True) for slot in self.device.work])

    def shared_reports(self):
        """The reports of the shared tier: none without one."""
        return ()

    def completes(self):
        """Whether a result confirms the copies issued before it."""
        return True

    def report(self, outcomes):
        """The work on these DISK slots ends, each well or not. Returns the result's fields."""
        fields = {"spilled": (), "promoted": (), "failed": ()}
        for slot, succeeds in outcomes:
            spills = isinstance(self.device.finish(slot, succeeds, torn=slot % 2), Spill)
            name = ("spilled" if spills else "promoted") if succeeds else "failed"
            fields[name] += (slot,)
            self.counts[name if succeeds else f"failed {'writes' if spills else 'reads'}"] += 1
        return fields

    def _note_usage(self, request, usage, truncated):
        total = truncated + usage.cached + usage.recomputed + usage.new
        self.counts["overflows"] += truncated > 0
        self.counts["begun anew"] += self.bases[request.id] > 0
        sources = ("gpu", "host", "disk", "shared", "recomputed", "new")
        assert (
            total == len(request.prompt) and min(getattr(usage, source) for source in sources) >= 0
        ), usage
        for source in sources:
            self.counts[f"{source} tokens"] += getattr(usage, source)

    def _ended(self, request_id, tokens):
        request, reply = self.open.pop(request_id)
        self.held.pop(request_id, None)
        name = request.conversation
        if self.config.save == "sync" and name not in self.scheduler.conversations:
            name = None  # deleted while the end was kept back
        if name is not None:
            old = self.logs.get(name, array("i"))
            new = request.prompt + array("i", reply[:tokens])
            self.counts["branches"] += old != new[: len(old)]
            # If the ends of two turns are kept back, the turn committed last need not end last.
            self.logs[name] = (
                new if self.config.save != "sync" else self.scheduler.conversations.tokens(name)
            )
            if name in self.lives:
                self._active(name)
            else:
                self._lives_on(name, self.config.conversation_ttl)
        self.counts["ended"] += 1

    def tick(self, seconds=0.01):
        """Time passes; one step is planned, launched and applied. Returns its plan."""
        self.now += seconds
        plan = self.launch()
        self.apply()
        self.check()
        return plan

    def run(self, *request_ids):
        """Steps until these requests (all, if none are named) have ended or are held."""
        waited = request_ids or tuple(self.open)
        self.run_until(lambda: not any(i in self.open and i not in self.held for i in waited))

    def run_until(self, happened):
        for _ in range(10_000):
            if happened():
                return
            self.tick()
        raise AssertionError(f"it never happens; open: {[(i, self.state(i)) for i in self.open]}")

    def turn(self, prompt, max_tokens=4, conversation=None, **fields):
        """A whole turn, alone or beside others. Returns its usage."""
        request_id = self.submit(prompt, max_tokens, conversation, **fields)
        before = Counter(self.counts)
        self.run(request_id)
        return {
            k.removesuffix(" tokens"): v
            for k, v in (self.counts - before).items()
            if k.endswith(" tokens")
        }

    # -- proof

    def check(self):
        if self._check:
            self.scheduler.check()
            for lower in self.scheduler._store.lower:
                stale = free_slots(lower, self.device.disk)
                assert not stale, f"free slots {stale} hold records"

    def check_logs(self):
        for name, log in self.logs.items() if self.config.save != "sync" else ():
            assert self.scheduler.conversations.tokens(name) == log

    def drain(self):
        """Ends all open requests within a bounded number of steps (so none starves), and checks
        that nothing is left behind."""
        for _ in range(10_000):
            for request_id in list(self.held):
                self.finish(request_id, len(self.reply(request_id)))
            if not self.open and not self.results and not self.scheduler.lower.busy:
                break
            to_come = bool(self.results) or self.scheduler.lower.busy
            plan = self.tick()
            assert plan or to_come or not self.open, (
                "requests are left, and nothing is to come that lets them go on"
            )
        assert not self.open, f"{len(self.open)} requests never ended"
        assert self.scheduler.idle
        self.check_logs()
        stats = self.scheduler.stats()
        self.counts["suspensions"] += stats.suspensions
        self.counts += {name: getattr(stats, name) for name in ("drafts", "drafted", "accepted")}
        self.counts["drops"] += stats.dropped
        self.counts["failed_copies"] += stats.bad_copies
        assert (stats.running, stats.waiting, stats.conversations) == (0, 0, len(self.logs))
        assert stats.slots["gpu"]["in_use"] == 0
        for name in list(self.logs):
            self._delete(name)
        while self.tick():
            pass
        self.check()
        if self.takes_erased:
            self._check_erased()
            assert not self.erasing, "a deletion is never confirmed"
        useless = [
            chunk
            for chunk in self.scheduler._store._private
            if chunk.state is None or chunk.state.key is None
        ]
        assert not useless, "chunks that no request can ever use again"

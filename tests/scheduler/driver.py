"""Random conversations against the scheduler alone, on the device model, every reply checked."""

from __future__ import annotations

import random

from pensieve.scheduler.turns.conversations import common_prefix
from pensieve.scheduler.types import GPU, RequestError, Sampling

from .harness import Harness

STATES = ("saving", "waiting", "running", "held", "leaving", "suspended", "resuming", "loading")
MOST_IN_FLIGHT = 3


class Driver(Harness):
    """One random operation after the other. `truncates`: the share of requests whose context may
    overflow. `owners`: of the conversations."""

    takes_erased = True

    def __init__(self, seed, truncates=0.3, owners=("",), **settings):
        self.random = random.Random(seed)
        self.truncates = truncates
        self.owners = owners
        super().__init__(chunks_a_step=self.random.choice((0.85, 1, 1, 2, 6)), **settings)
        self.remembered = {}  # logs of earlier lives
        self.openings = [[self.random.randrange(97) for _ in range(14)] for _ in range(3)]

    def play(self, operations, totals):
        """Does the operations, lets all work end, and adds the counts to `totals`."""
        for _ in range(operations):
            self.step()
        self.drain()
        totals.update(self.counts)
        totals["runs"] += 1

    def step(self):
        self.now += self.random.choice((0.001, 0.01, 0.5))
        operation = self.random.choices(
            (
                *(self.add, self.plan, self.apply, self.abort_one, self.finish_one),
                *(
                    self.fork_one,
                    self.delete_one,
                    self.keep_one,
                    self.lose_some,
                    self.restart_one,
                    self.erase_one,
                    self.grow_one,
                ),
            ),
            (12, 40, 40, 3, 4, 1, 1, 1, 2, 0.2 * self.has_disk, 0.2 * self.has_disk, 1),
        )[0]
        operation()
        if self.config.queue_timeout is not None:
            self.time_out()
        self.check()

    def add(self):
        forks = [name for name in self.logs if name[0] == "f"]
        self.add_to(self.random.choice([None, *(f"c{i}" for i in range(8)), *forks]))

    def add_to(self, name):
        log = self.logs.get(name, self.remembered.get(name, []))
        truncate = self.random.random() < self.truncates
        if len(log) > (180 if truncate else 44):
            log = []
        start = (
            list(log)
            if log and self.random.random() < 0.85
            else list(self.random.choice(self.openings))
        )
        if log and self.random.random() < 0.1:
            # the client went back: a branch
            start = start[: self.random.randrange(1, len(start) + 1)]
        grammar = self.random.random() < 0.1
        scores = not truncate and self.random.random() < 0.1
        new = [
            self.random.randrange(97)
            for _ in range(self.random.choice((0, 1, 3, 9, *(30, 70) * truncate)))
        ]
        try:
            self.submit(
                start + new,
                self.random.choice((1, 3, 6, 9, 12, 24)),
                name,
                stop_ids=frozenset(self.random.sample(range(97), 4)),
                confirm=self.random.random() < 0.5,
                priority=self.random.choice((0, 0, 0, 0, 0, -1, 2)),
                truncate=truncate,
                salt=b"" if self.random.random() < 0.9 else b"other",
                expect_next_s=self.random.choice((None, None, 0.0, 2.0)),
                owner=self.owners[int(name[1]) % len(self.owners)]
                if name
                else self.random.choice(self.owners),
                sampling=Sampling(grammar="g" if grammar else None),
                prompt_logprobs=1 if scores else None,
                stored_tokens=len(start) if name in self.remembered else 0,
            )
        except RequestError as refusal:
            self.counts[f"refused {refusal.kind}"] += 1

    def plan(self):
        if len(self.results) == MOST_IN_FLIGHT:
            return
        self.launch()
        suspended = any(bool(turn.tokens.reply) for turn in self.scheduler._queues.waiting)
        if suspended and self.random.random() < 0.6:
            self.random.choice((self.lose_some, self.stow))()
        for request_id in self.coming_back():
            request, reply = self.open[request_id]
            if self.state(request_id) != "loading" and self.random.random() < 0.5:
                continue
            if request.confirm:
                self.finish(request_id, self.random.randint(1, len(reply)))
                self.add_to(request.conversation)
            elif self.random.random() < 0.3:
                self.abort(request_id)

    def grow_one(self):
        """HOST gets some of the slots that it may still get."""
        slots = self.scheduler._store.host.count
        left = self.config.most_host_kv_chunks - slots
        self.grow_host(slots + self.random.randint(0, min(left, 9)))

    # -- the disk

    @property
    def has_disk(self):
        return self.config.disk_kv_chunks > 0

    def reports(self):
        """Some of the work is done, in any order, and some of that fails."""
        slots = self.random.sample(
            list(self.device.work), self.random.randint(0, len(self.device.work))
        )
        return self.report([(slot, self.random.random() > 0.04) for slot in slots])

    def completes(self):
        return self.random.random() < 0.8

    def erases(self):
        return self.random.random() > 0.02

    def gets_stuck(self, row):
        return row.request in self.grammars and self.random.random() < 0.03

    def restart_one(self):
        for request_id in list(self.open):
            self.open.pop(request_id)
        self.remembered |= self.logs
        self.restart([slot for slot in self.device.work if self.random.random() < 0.5])

    def erase_one(self):
        """A conversation of an earlier life is deleted: its records are gone with the next plan."""
        candidates = [name for name in self.remembered if name not in self.logs]
        if not candidates:
            return
        self.counts["erased keys"] += len(
            self.erase(self.remembered.pop(self.random.choice(candidates)))
        )

    def pick(self, candidates):
        """One of the requests: most often of the rarest state that any is in, which is the last one
        of STATES."""
        ids = self.random.sample(list(candidates), len(candidates))
        return (
            ids[0]
            if self.random.random() < 0.4
            else max(ids, key=lambda i: STATES.index(self.state(i)))
        )

    def abort_one(self):
        if self.open:
            self.abort(self.pick(self.open))

    def finish_one(self):
        candidates = [i for i, (request, reply) in self.open.items() if request.confirm and reply]
        if candidates:
            chosen = self.pick(candidates)
            self.finish(chosen, self.random.randint(1, len(self.reply(chosen))))

    def fork_one(self):
        if self.logs:
            source = self.random.choice(list(self.logs))
            new = f"f{self.random.randrange(4)}"
            if new not in self.logs and new not in self.scheduler.conversations:
                self.fork(source, new)

    def keep_one(self):
        if self.logs:
            seconds = (None, 0.05, 2.0, 100.0)
            ttl, pinned = self.random.choice(seconds), self.random.choice(seconds)
            self.keep(self.random.choice(list(self.logs)), ttl, self.now + (pinned or 0.0))

    def stow(self):
        """Moves idle chunks to HOST only, as after many other requests: a returning conversation
        loads all its history."""
        store = self.scheduler._store
        for chunk in [chunk for chunk in store.only[GPU] if not chunk.staged][: store.host.free]:
            self.place(chunk, "host")
        for chunk in list(store.spare[GPU]):
            store.release_gpu(chunk)

    def lose_some(self):
        count = self.random.choice((1, 3, 99))
        self.lose(lambda idle: self.random.sample(idle, min(len(idle), count)))

    def delete_one(self):
        if self.logs and self.random.random() < 0.5:
            name, other = self.random.choice(list(self.logs)), self.random.choice(list(self.logs))
            shared = common_prefix(self.logs[name], self.logs[other]) if other != name else 0
            draw = self.random.random()
            if draw < 0.2:
                kept = int(5 * draw * len(self.logs[name]))
                self.cut(name, kept, max(kept, shared))
            else:
                self.delete(name, shared * (draw < 0.5))

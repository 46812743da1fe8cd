"""Random operations with contexts of many pieces and small budgets of work; the books are checked
after each of them, and every reply at its end."""

from collections import Counter

import pytest

from pensieve.scheduler.types import RequestError
from pensieve.scheduler.work import LARGEST_PIECE, WORK_A_STEP

from .driver import Driver

SETTINGS = {
    "chunk_tokens": 1,
    "gpu_kv_chunks": 900,
    "host_kv_chunks": 300,
    "max_model_len": 6 * LARGEST_PIECE,
    "max_num_batched_tokens": 90,  # a prompt is computed in several steps
}
OPERATIONS = 400


class Piecemeal(Driver):
    """Prompts are prepared in pieces. Some operations find little or nothing of the budget."""

    def __init__(self, seed, **settings):
        super().__init__(seed, **(SETTINGS | settings))
        self.openings = [
            [self.random.randrange(97) for _ in range(4 * LARGEST_PIECE)] for _ in range(3)
        ]

    def step(self):
        work = self.scheduler.work
        work.most = self.random.choice((8, LARGEST_PIECE, 200, WORK_A_STEP))
        if self.random.random() < 0.3:
            work.left = self.random.choice((0, 1, LARGEST_PIECE))
        if self.random.random() < 0.15:
            self.random.choice((self.abort_one, self.fork_one, self.delete_one, self.keep_one))()
        super().step()

    def enter(self, request):
        self.scheduler.submit(request, self.now)
        self.counts["in pieces"] += self.scheduler._turns[request.id] in self.scheduler._preparing

    def state(self, request_id):
        if self.scheduler._turns.get(request_id) in self.scheduler._preparing:
            return "waiting"
        return super().state(request_id)

    def abort(self, request_id):
        super().abort(request_id)
        self.counts["releases in pieces"] += any(self.scheduler._queues.releasing.values())

    def add_to(self, name):
        start = list(self.logs.get(name, ())) or list(self.random.choice(self.openings))
        if self.random.random() < 0.3:
            start = start[: self.random.randrange(1, len(start) + 1)]
        prompt = start + [
            self.random.randrange(97) for _ in range(self.random.choice((0, 1, 9, 70)))
        ]
        if len(prompt) > 5 * LARGEST_PIECE:
            prompt = prompt[:9]
        most = self.random.choice((1, 3, 20))
        confirm = self.random.random() < 0.5
        try:
            self.submit(
                prompt, most, name, confirm=confirm, priority=self.random.choice((0, 0, 0, 1))
            )
        except RequestError as refusal:
            self.counts[f"refused {refusal.kind}"] += 1

    def _expire(self):
        """Conversations may end later than their time."""
        self.logs = {
            name: log for name, log in self.logs.items() if name in self.scheduler.conversations
        }
        self.lives = {name: life for name, life in self.lives.items() if name in self.logs}

    def drain(self):
        self.scheduler.work.most = WORK_A_STEP
        while self.open or self.scheduler.has_work(self.now):
            for request_id in list(self.held):
                self.finish(request_id, len(self.reply(request_id)))
            self.tick()
        super().drain()


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"queue_timeout": 3.0, "log_chunks": 1500},
        {"disk_kv_chunks": 700, "owner_kv_chunks": 600},
    ],
    ids=["time-outs", "disk"],
)
def test_the_books_agree_between_any_two_pieces(settings, seed):
    totals = Counter()
    Piecemeal(seed, **settings).play(OPERATIONS, totals)
    assert (
        totals["in pieces"] and totals["releases in pieces"] and totals["forks"] and totals["ended"]
    )

"""Names that are due at a time: none comes early or twice, and removed names take no room."""

import random
from math import inf

from pensieve.scheduler.turns.timers import SPARE, Timers


def test_names_come_when_their_time_has_and_it_never_grows():
    """Against a plain dict, with names that are given other times, or none, before they come."""
    chance = random.Random(1)
    table = Timers()
    expected = {}
    now = 0.0
    for _ in range(3000):
        name = f"c{chance.randrange(40)}"
        time = chance.choice((inf, now + chance.randrange(1, 10**6), now + 5.0, now))
        table.set(name, time)
        expected.pop(name, None)
        if time < inf:
            expected[name] = time
        assert table.time(name) == time and len(table) <= 2 * len(expected) + SPARE
        assert table.next <= min(expected.values(), default=inf)
        if chance.random() < 0.3:
            now += 1.0
            due = [name for name, time in expected.items() if time <= now]
            assert sorted(table.take(now)) == sorted(due)
            for name in due:
                del expected[name]

"""HOST gains slots while the scheduler runs. The driver grows it in the middle of everything."""

from __future__ import annotations

from .harness import Harness


def test_host_grows_and_does_not_shrink():
    scheduler = Harness(host_kv_chunks=4, host_kv_growth=3).scheduler
    assert [scheduler.grow_host(slots) for slots in (4, 7, 7, 6)] == [False, True, False, False]
    assert scheduler.stats().slots["host"] == {"free": 7, "copy": 0, "idle": 0}


def test_what_a_small_host_loses_stays_once_it_has_grown():
    harness = Harness(host_kv_chunks=4, host_kv_growth=60)

    def recomputed():
        """Tokens, while six conversations take a turn each."""
        before = harness.counts["recomputed tokens"]
        for number, name in enumerate("abcdef"):
            harness.turn(range(number, 24 + number), 4, name)
        return harness.counts["recomputed tokens"] - before

    recomputed()
    assert recomputed() > 6
    harness.grow_host(64)
    recomputed()  # what was lost before
    assert recomputed() == 6, "the last token of each prompt, to sample behind it"

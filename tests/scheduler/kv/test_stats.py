"""The counts of victims: by tier and reason, by retention value, and of victims that returned too
soon."""

from __future__ import annotations

import pytest

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.stats import REGRET_S, EvictionStats
from pensieve.scheduler.types import HOST

from ..stores import SIZE, a_store, an_evictor, fresh_key, idle, in_use


def counted(store) -> dict[str, int]:
    tiers = store.evictions.by_tier_and_reason()
    return {
        f"{tier} {reason}": n
        for tier, reasons in tiers.items()
        for reason, n in reasons.items()
        if n
    }


def test_each_victim_is_counted_once_by_what_became_of_it():
    store = a_store(gpu=4, host=2)
    idle(store, now=0.0, on_gpu=False)
    idle(store, now=5.0, copied=True)
    refused_by_host = idle(store, now=6.0)
    refused_by_host.refused_by_host = True
    store.update_victim_set(refused_by_host)
    idle(store, now=7.0)
    idle(store, now=8.0)
    _, evictor = an_evictor(store, now=10.0)
    evictor.take_gpu_slots(2)
    assert counted(store) == {"gpu reclaimed": 1, "gpu dropped": 1}
    evictor.take_gpu_slots(3)  # on HOST the chunk of least value makes room
    assert counted(store) == {
        "gpu reclaimed": 1,
        "gpu dropped": 1,
        "gpu moved": 1,
        "host dropped": 1,
    }
    assert sum(store.evictions.by_value().values()) == 4
    evictor.take_gpu_slots(3)
    assert sum(counted(store).values()) == 4, "there is room already"


def test_copies_given_up_are_counted_apart_and_have_no_value():
    store = a_store(gpu=2, host=1)
    busy = idle(store, now=9.0, copied=True)
    store.pin([busy])
    idle(store, now=5.0)
    _, evictor = an_evictor(store, now=10.0)
    evictor.take_gpu_slots(1)
    assert busy.slots[HOST] == NO_SLOT
    assert (
        counted(store) == {"host copy": 1, "gpu moved": 1}
        and sum(store.evictions.by_value().values()) == 1
    )


def test_values_are_counted_between_powers_of_two():
    evictions = EvictionStats()
    for value in (0.25, 0.3, 0.5, 2.0**130):
        evictions.count_values(value, 1)
    evictions.count_values(0.3, 2)
    # [1/4, 1/2), [1/2, 1), ...
    assert evictions.by_value() == evictions.by_value() == {-1: 4, 0: 1, 131: 1}
    assert evictions.value_sum == pytest.approx(0.25 + 0.3 * 3 + 0.5 + 2.0**130)


@pytest.mark.parametrize("claims", [0, 1])
@pytest.mark.parametrize(("later", "regret"), [(REGRET_S, SIZE), (REGRET_S + 1, 0)])
def test_a_chunk_computed_again_too_soon_is_regretted(claims: int, later: float, regret: int):
    """With or without a conversation that still claims it."""
    store = a_store()
    key = fresh_key()
    first = idle(store, key=key, claims=claims)
    store.now = 100.0
    store.drop(first)
    store.now += later
    in_use(store, key=key)
    assert store.regret_tokens == regret
    assert store.dropped == 1


def test_what_was_never_dropped_is_not_regretted():
    store = a_store()
    key = fresh_key()
    idle(store, key=key, on_gpu=False)
    in_use(store, key=key)  # computed though it was on HOST, by choice
    in_use(store)
    assert store.regret_tokens == 0

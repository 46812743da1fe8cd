"""The positions that a position sees, and the keys of its KV."""

from __future__ import annotations

from array import array

import pytest

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.context_window import KEEP, OVERFLOW_MODES, RECOMPUTE, ContextWindow
from pensieve.scheduler.kv.chunk_keys import NO_KEY, ChunkKeys, chunk_key, root_key

SIZE = 4
TOKENS = array("i", range(200))
SHAPES = [(16, 8), (18, 8), (16, 4), (15, 12), (9, 4)]


@pytest.mark.parametrize(("length", "step"), SHAPES)
@pytest.mark.parametrize("base", [0, 1, 3])
def test_windows_move_on_by_a_step_whenever_they_are_full(length, step, base):
    windows = ContextWindow(length, step, KEEP)
    base = base * step
    start = base
    for position in range(base, base + 100):
        if position - start == length:
            start += step
        assert windows.start(position, base) == start
        assert start <= position < windows.end(start)
        assert windows.start(position) <= start


def test_bases_are_the_starts_of_windows_up_to_the_last_ones_own():
    windows = ContextWindow(16, 8, KEEP)
    assert list(windows.context_starts(15)) == [0]
    assert list(windows.context_starts(40)) == [0, 8, 16, 24, 32]
    assert list(windows.context_starts(40, lowest=16)) == [16, 24, 32]
    assert list(ContextWindow(16, 8, RECOMPUTE).context_starts(40)) == [windows.start(40)] == [32]


def test_the_model_counts_positions_from_zero_where_kv_is_kept():
    assert [ContextWindow(16, 8, mode).zero(24) for mode in (KEEP, RECOMPUTE)] == [0, 24]


@pytest.mark.parametrize(
    ("missing", "start"),
    [
        ({40}, 32),  # the last position itself
        ({39, 40}, 24),  # 39 sees from 24 on, and that is there
        ({39, 40, 25}, 16),  # 25 saw from 16 on
        ({39, 25, 17}, 8),
        ({39, 25, 17, 9}, 0),
        ({5, 40}, 32),  # no position needs 5
    ],
)
def test_the_reach_of_what_is_missing(missing, start):
    """`start(40)` is 32: each missing position needs the positions that it saw, and those need
    theirs."""
    reach = ContextWindow(16, 8, KEEP).reach(
        40, 0, lambda first: min((p for p in missing if p >= first), default=41)
    )
    assert reach == start


def test_contexts_too_short_for_a_step_of_whole_chunks_do_not_overflow():
    def windows(**settings):
        return SchedulerConfig(64, 0, chunk_tokens=SIZE, **settings).windows

    assert windows(max_model_len=7) is None
    assert windows(max_model_len=8) == ContextWindow(8, 4, RECOMPUTE)
    assert windows(max_model_len=70, overflow_ratio=0.3, overflow=KEEP) == ContextWindow(
        70, 20, KEEP
    )


def keys_of(windows, base=0, tokens=TOKENS, seed=b"seed"):
    keys = []
    ChunkKeys(seed, SIZE, windows).extend(keys, base, b"salt", tokens, len(tokens))
    return keys


def test_keys_without_overflow_are_plain_chains():
    plain = [chunk_key(root_key(b"seed", SIZE, b"salt"), TOKENS, 0, SIZE)]
    for start in range(SIZE, len(TOKENS), SIZE):
        plain.append(chunk_key(plain[-1], TOKENS, start, start + SIZE))
    assert keys_of(None) == plain


@pytest.mark.parametrize(("length", "step"), SHAPES)
def test_windows_enter_a_chain_at_the_first_chunk_that_sees_less(length, step):
    plain = keys_of(None)
    unlike = length // SIZE
    kept = [
        keys_of(ContextWindow(*shape, mode))
        for mode in OVERFLOW_MODES
        for shape in ((length, step), (length, step + 1))
    ]
    for keys in kept:
        assert keys[:unlike] == plain[:unlike]
        assert not set(keys[unlike:]) & set(plain)
    assert len({keys[unlike] for keys in kept}) == len(kept)


def test_a_base_begins_a_chain_of_its_own():
    windows = ContextWindow(16, 8, KEEP)
    chunk_keys = {base: keys_of(windows, base) for base in (0, 8, 16)}
    for base, keys in chunk_keys.items():
        before = base // SIZE
        assert keys[:before] == [NO_KEY] * before and NO_KEY not in keys[before:]
        assert len(keys) == len(TOKENS) // SIZE
    real = [key for keys in chunk_keys.values() for key in keys if key != NO_KEY]
    assert len(set(real)) == len(real)


def test_a_chain_goes_on_where_it_ended():
    for base in (0, 8):
        chunk_keys = ChunkKeys(b"seed", SIZE, ContextWindow(16, 8, KEEP))
        keys = []
        for end in (3, 9, 16, 17, 40, len(TOKENS)):
            chunk_keys.extend(keys, base, b"salt", TOKENS, end)
        assert keys == keys_of(ContextWindow(16, 8, KEEP), base)

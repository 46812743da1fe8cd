"""`causal_conv` and `gated_delta` on a GPU in Triton. `reference` is their slow twin and says what
they compute; `work_list` says how segments are divided.

With unit keys and queries, the state S in front of a piece, G the sum of the decays from the
piece's first token on, and row i of each matrix of token i, a piece is

    U = T beta (V - exp(G) K S)     T = (1 + L)^-1, L = beta exp(G_i - G_j) K K^T below the diagonal
    O = exp(G) Q S + A U            A = exp(G_i - G_j) Q K^T, diagonal included
    S' = exp(G_n) S + (exp(G_n - G) K)^T U

T, A and the factors of rows do not depend on S: `_prepare` computes those of all pieces at once.
`_scan` then takes the pieces of a segment one after the other. Products are of the model's dtype
and accumulated in float32; S is float32 between pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from .reference import NORM_EPS
from .work_list import PIECE, StateWork, most_pieces, most_tiles

BLOCK = 16  # rows of T that are computed one after the other
FACTORS = 4  # numbers of each token and head that `_prepare` leaves for `_scan`
MOST_TAIL_PROGRAMS = 32  # of a head, in a step with longer segments: most programs would be idle
CONV_CHANNELS = 128  # of a program


@dataclass(frozen=True, slots=True)
class DeltaTile:
    """The columns of a state that a program computes, and compiler settings of its kernel."""

    columns: int
    warps: int
    stages: int = 1


TAIL_TILE = DeltaTile(64, 2)
SCAN_TILE = DeltaTile(64, 4, 2)
SMALL_SCAN_TILE = DeltaTile(32, 4)  # for GPUs with less shared memory than SCAN_MEMORY
SCAN_MEMORY = 132 * 1024  # bytes of a program, for heads of 128
EXACT_SCAN_TILE = DeltaTile(16, 4)  # of float32, whose tiles take twice the memory
PREPARE_WARPS = 4


def causal_conv(
    x: Tensor,
    weight: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    columns: Tensor,
    work: StateWork,
) -> Tensor:
    """Does what `reference.causal_conv` does for the segments that `work` lists. x is dense in its
    last dimension, weight is contiguous."""
    tokens, channels = x.shape
    out = x.new_zeros(x.shape)
    one_each = work.longest == 1
    tiles = len(segments) if one_each else most_tiles(tokens, len(segments))
    if not tokens or not tiles:
        return out
    block = CONV_CHANNELS if one_each else CONV_CHANNELS // 2
    _conv[tiles, triton.cdiv(channels, block)](
        x,
        weight,
        columns,
        out,
        segments,
        state_in,
        state_out,
        work.tiles,
        work.counts,
        x.stride(0),
        columns.stride(0),
        CHANNELS=channels,
        WIDTH=weight.shape[2],
        HELD=triton.next_power_of_2(weight.shape[2] - 1),
        TOKENS=1 if one_each else PIECE,
        CHANNEL_BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,  # equal bits for both numbers of TOKENS
    )
    return out


@triton.jit
def _conv(x, weight, columns, out, segments, state_in, state_out, tiles, counts, x_stride,
          slot_stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr,
          TOKENS: tl.constexpr, CHANNEL_BLOCK: tl.constexpr):  # fmt: skip
    """One program for a tile and some channels. That of a segment's first tile reads and writes the
    state, and no other one does: later tiles begin behind WIDTH inputs."""
    kind = out.dtype.element_ty
    tile = tl.program_id(0)
    if tile >= tl.load(counts):
        return
    segment = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1).to(tl.int64)
    start = tl.load(segments + segment * 5).to(tl.int64)
    length = tl.load(segments + segment * 5 + 1).to(tl.int64)
    before = tl.load(state_in + segment).to(tl.int64)
    behind = tl.load(state_out + segment).to(tl.int64)
    channel = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    exists = channel < CHANNELS
    old = columns + before * slot_stride + channel[None, :]
    rows = x + start * x_stride + channel[None, :]

    token = first + tl.arange(0, TOKENS)[:, None]
    inside = (token < length) & exists[None, :]
    oldest = tl.where(before >= 0, 1 - WIDTH, 0)  # input in front of the segment
    total = tl.zeros((TOKENS, CHANNEL_BLOCK), tl.float32)
    for tap in tl.static_range(WIDTH):
        source = token + (tap - WIDTH + 1)
        value = tl.load(rows + source * x_stride, mask=inside & (source >= 0), other=0.0)
        held = tl.load(
            old + (source + WIDTH - 1) * CHANNELS,
            mask=inside & (source < 0) & (source >= oldest),
            other=0.0,
        )
        factor = tl.load(weight + channel * WIDTH + tap, mask=exists, other=0.0).to(tl.float32)
        total += tl.where(source >= 0, value, held).to(tl.float32) * factor[None, :]
    result = tl.div_rn(total, 1.0 + tl.exp(-total))
    tl.store(out + (start + token) * CHANNELS + channel[None, :], result.to(kind), mask=inside)

    if (first == 0) & (behind >= 0):
        column = tl.arange(0, HELD)[:, None]
        wanted = (column < WIDTH - 1) & exists[None, :]
        place = length - (WIDTH - 1) + column
        newest = tl.load(rows + place * x_stride, mask=wanted & (place >= 0), other=0.0)
        kept = tl.load(
            old + (place + WIDTH - 1) * CHANNELS,
            mask=wanted & (place < 0) & (place >= oldest),
            other=0.0,
        )
        tl.debug_barrier()  # all threads have read the old columns, which may be in this slot
        tl.store(
            columns + behind * slot_stride + column * CHANNELS + channel[None, :],
            tl.where(place >= 0, newest, kept),
            mask=wanted,
        )


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    matrices: Tensor,
    work: StateWork,
) -> Tensor:
    """Does what `reference.gated_delta` does for the segments that `work` lists. The heads of q, k
    and v are dense and follow each other; decay and beta are contiguous float32, matrices
    float32."""
    tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    out = v.new_zeros(v.shape)
    if not tokens or not len(segments):
        return out
    slots = segments, state_in, state_out, work.counts
    rows = q.stride(0), k.stride(0), v.stride(0)
    sizes = dict(
        HEADS=heads,
        SHARE=heads // key_heads,
        KEY_DIM=key_dim,
        KEYS=max(16, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        PIECE=PIECE,
    )
    norms = dict(SCALE=key_dim**-0.5, EPS=NORM_EPS)
    width = max(16, triton.next_power_of_2(value_dim))
    most = most_pieces(min(tokens, work.tokens))
    if work.longest > 1 and most:
        exact = v.dtype == torch.float32
        inverse, scores = v.new_empty(2, tokens, heads, PIECE)
        factors = decay.new_empty(heads, FACTORS, tokens)
        _prepare[most, heads](
            q,
            k,
            decay,
            beta,
            inverse,
            scores,
            factors,
            *slots,
            work.pieces,
            *rows[:2],
            tokens,
            BLOCK=BLOCK,
            EXACT=exact,
            num_warps=PREPARE_WARPS,
            **sizes,
            **norms,
        )
        scan = _scan_tile(v.device, exact)
        columns = min(width, scan.columns)
        _scan[most, heads, triton.cdiv(value_dim, columns)](
            q,
            k,
            v,
            beta,
            inverse,
            scores,
            factors,
            matrices,
            out,
            *slots,
            work.longs,
            *rows,
            tokens,
            matrices.stride(0),
            COLUMNS=columns,
            EXACT=exact,
            num_warps=scan.warps,
            num_stages=scan.stages,
            EPS=NORM_EPS,
            **sizes,
        )
    programs = len(segments)
    if work.longest > 1:
        programs = min(programs, MOST_TAIL_PROGRAMS)
    columns = min(width, TAIL_TILE.columns)
    _tails[programs, heads, triton.cdiv(value_dim, columns)](
        q,
        k,
        v,
        decay,
        beta,
        matrices,
        out,
        *slots,
        work.tails,
        *rows,
        matrices.stride(0),
        COLUMNS=columns,
        num_warps=TAIL_TILE.warps,
        num_stages=TAIL_TILE.stages,
        **sizes,
        **norms,
    )
    return out


@cache
def _scan_tile(device: torch.device, exact: bool) -> DeltaTile:
    if exact:
        return EXACT_SCAN_TILE
    if device.type == "cuda":
        properties = driver.active.utils.get_device_properties(device.index)
        if properties["max_shared_mem"] < SCAN_MEMORY:
            return SMALL_SCAN_TILE
    return SCAN_TILE


@triton.jit
def _tails(q, k, v, decay, beta, matrices, out, segments, state_in, state_out, counts, tails,
           q_stride, k_stride, v_stride, slot_stride, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
           SHARE: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr, VALUE_DIM: tl.constexpr,
           PIECE: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """A program takes some tails, one after the other, for a head and COLUMNS columns."""
    head = tl.program_id(1)
    key = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    keys = key < KEY_DIM
    values = column < VALUE_DIM
    cells = keys[:, None] & values[None, :]
    cell = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + column[None, :]
    key_place = head // SHARE * KEY_DIM + key
    for number in range(tl.program_id(0), tl.load(counts + 3), tl.num_programs(0)):
        segment = tl.load(tails + number)
        start = tl.load(segments + segment * 5).to(tl.int64)
        length = tl.load(segments + segment * 5 + 1)
        behind = tl.load(state_out + segment).to(tl.int64)
        first = length - length % PIECE
        before = tl.load(state_in + segment).to(tl.int64)
        before = tl.where(first > 0, behind, before)
        held = (key < tl.where(before >= 0, KEY_DIM, 0))[:, None] & values[None, :]
        state = tl.load(matrices + before * slot_stride + cell, mask=held, other=0.0)
        for token in range(start + first, start + length):
            query = tl.load(q + token * q_stride + key_place, mask=keys, other=0.0).to(tl.float32)
            own = tl.load(k + token * k_stride + key_place, mask=keys, other=0.0).to(tl.float32)
            value = tl.load(
                v + token * v_stride + head * VALUE_DIM + column, mask=values, other=0.0
            ).to(tl.float32)
            kept = tl.exp(tl.load(decay + token * HEADS + head))
            weight = tl.load(beta + token * HEADS + head)
            query = query * (tl.rsqrt(tl.sum(query * query) + EPS) * SCALE)
            own = own * tl.rsqrt(tl.sum(own * own) + EPS)
            state = state * kept
            change = (value - tl.sum(state * own[:, None], axis=0)) * weight
            state = state + own[:, None] * change[None, :]
            result = tl.sum(state * query[:, None], axis=0)
            tl.store(
                out + (token * HEADS + head) * VALUE_DIM + column,
                result.to(out.dtype.element_ty),
                mask=values,
            )
        if behind >= 0:
            tl.debug_barrier()  # all threads have read the old state, which may be in this slot
            tl.store(matrices + behind * slot_stride + cell, state, mask=cells)


@triton.jit(do_not_specialize=["tokens"])
def _prepare(q, k, decay, beta, inverse, scores, factors, segments, state_in, state_out, counts,
             pieces, q_stride, k_stride, tokens, HEADS: tl.constexpr, SHARE: tl.constexpr,
             KEY_DIM: tl.constexpr, KEYS: tl.constexpr, VALUE_DIM: tl.constexpr,
             PIECE: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, SCALE: tl.constexpr,
             EPS: tl.constexpr):  # fmt: skip
    """One program for a piece and a head: T, A, and for each token the factors of `_scan`: of Q S,
    of K S, of its change of the state, and of the state. Rows behind the piece's end are zero."""
    kind = inverse.dtype.element_ty
    products: tl.constexpr = "tf32x3" if EXACT else "tf32"
    piece = tl.program_id(0)
    if piece >= tl.load(counts + 1):
        return
    head = tl.program_id(1)
    segment = tl.load(pieces + 2 * piece)
    first = tl.load(pieces + 2 * piece + 1)
    start = tl.load(segments + segment * 5).to(tl.int64)
    length = tl.load(segments + segment * 5 + 1)
    row = tl.arange(0, PIECE)
    inside = first + row < length
    token = start + first + row
    key = tl.arange(0, KEYS)
    place = head // SHARE * KEY_DIM + key[None, :]
    tile = inside[:, None] & (key < KEY_DIM)[None, :]
    queries = tl.load(q + token[:, None] * q_stride + place, mask=tile, other=0.0)
    own = tl.load(k + token[:, None] * k_stride + place, mask=tile, other=0.0)
    wide = queries.to(tl.float32)
    query_factor = tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS) * SCALE
    wide = own.to(tl.float32)
    key_factor = tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS)
    passed = tl.cumsum(tl.load(decay + token * HEADS + head, mask=inside, other=0.0), axis=0)
    weight = tl.load(beta + token * HEADS + head, mask=inside, other=0.0)

    later = row[None, :]
    causal = row[:, None] >= later
    since = tl.where(causal, passed[:, None] - passed[None, :], float("-inf"))
    kept = tl.exp(since) * key_factor[None, :]
    turned = tl.trans(own)
    score = tl.dot(queries, turned, input_precision=products) * kept * query_factor[:, None]
    mixed = tl.dot(own, turned, input_precision=products) * kept
    mixed = tl.where(row[:, None] > later, mixed * (weight * key_factor)[:, None], 0.0)
    solved = _inverse(mixed, PIECE, BLOCK, "tf32x3" if EXACT else "tf32")

    cell = (token[:, None] * HEADS + head) * PIECE + later
    tl.store(scores + cell, score.to(kind), mask=inside[:, None])
    tl.store(inverse + cell, solved.to(kind), mask=inside[:, None])
    last = tl.sum(tl.where(row == PIECE - 1, passed, 0.0))
    from_start = tl.exp(passed)
    factor = factors + head * 4 * tokens + token
    tl.store(factor, query_factor * from_start, mask=inside)
    tl.store(factor + tokens, key_factor * from_start, mask=inside)
    tl.store(factor + 2 * tokens, key_factor * tl.exp(last - passed), mask=inside)
    tl.store(factor + 3 * tokens, tl.zeros_like(passed) + tl.exp(last), mask=inside)


@triton.jit
def _inverse(lower, PIECE: tl.constexpr, BLOCK: tl.constexpr, PRODUCTS: tl.constexpr):
    """(1 + lower)^-1 of a matrix [PIECE, PIECE] float32 that is zero from the diagonal on.

    Blocks on the diagonal are solved row by row: powers of the matrix would cancel each other where
    keys repeat. With the inverse D of these blocks and the rest R of the matrix, the result is
    (1 + D R)^-1 D, and the fourth power of D R is zero.
    """
    blocks: tl.constexpr = PIECE // BLOCK
    tl.static_assert(blocks == 4)
    across = tl.arange(0, blocks)
    diagonal = across[:, None, None, None] == across[None, None, :, None]
    parts = tl.reshape(lower, (blocks, BLOCK, blocks, BLOCK))
    parts = tl.sum(tl.where(diagonal, parts, 0.0), axis=2)
    row = tl.arange(0, BLOCK)
    solved = tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    solved = tl.broadcast_to(solved, (blocks, BLOCK, BLOCK))
    for i in range(1, BLOCK):
        here = (row == i)[None, :, None]
        own = tl.sum(tl.where(here, parts, 0.0), axis=1)
        change = tl.sum(own[:, :, None] * solved, axis=1)
        solved = tl.where(here, solved - change[:, None, :], solved)
    inner = tl.reshape(tl.where(diagonal, solved[:, :, None, :], 0.0), (PIECE, PIECE))
    place = tl.arange(0, PIECE) // BLOCK
    rest = tl.where(place[:, None] > place[None, :], lower, 0.0)
    step = tl.dot(inner, rest, input_precision=PRODUCTS)
    near = inner - tl.dot(step, inner, input_precision=PRODUCTS)
    twice = tl.dot(step, step, input_precision=PRODUCTS)
    return near + tl.dot(twice, near, input_precision=PRODUCTS)


@triton.jit(do_not_specialize=["tokens"])
def _scan(q, k, v, beta, inverse, scores, factors, matrices, out, segments, state_in, state_out,
          counts, longs, q_stride, k_stride, v_stride, tokens, slot_stride, COLUMNS: tl.constexpr,
          HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr,
          VALUE_DIM: tl.constexpr, PIECE: tl.constexpr, EXACT: tl.constexpr,
          EPS: tl.constexpr):  # fmt: skip
    """One program for a segment's pieces, a head, and COLUMNS columns of the state."""
    kind = out.dtype.element_ty
    products: tl.constexpr = "tf32x3" if EXACT else "tf32"
    number = tl.program_id(0)
    if number >= tl.load(counts + 2):
        return
    head = tl.program_id(1)
    segment = tl.load(longs + 2 * number)
    end = tl.load(longs + 2 * number + 1) * PIECE
    start = tl.load(segments + segment * 5).to(tl.int64)
    end = tl.minimum(end, tl.load(segments + segment * 5 + 1))
    before = tl.load(state_in + segment).to(tl.int64)
    behind = tl.load(state_out + segment).to(tl.int64)
    row = tl.arange(0, PIECE)
    key = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    values = column < VALUE_DIM
    cells = (key < KEY_DIM)[:, None] & values[None, :]
    cell = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + column[None, :]
    held = (key < tl.where(before >= 0, KEY_DIM, 0))[:, None] & values[None, :]
    state = tl.load(matrices + before * slot_stride + cell, mask=held, other=0.0)
    place = head // SHARE * KEY_DIM + key[None, :]
    for first in range(0, end, PIECE):
        inside = first + row < end
        token = start + first + row
        tile = inside[:, None] & (key < KEY_DIM)[None, :]
        queries = tl.load(q + token[:, None] * q_stride + place, mask=tile, other=0.0)
        own = tl.load(k + token[:, None] * k_stride + place, mask=tile, other=0.0)
        wanted = inside[:, None] & values[None, :]
        value_place = token[:, None] * v_stride + head * VALUE_DIM + column[None, :]
        value = tl.load(v + value_place, mask=wanted, other=0.0)
        square = (token[:, None] * HEADS + head) * PIECE + row[None, :]
        solved = tl.load(inverse + square, mask=inside[:, None], other=0.0)
        score = tl.load(scores + square, mask=inside[:, None], other=0.0)
        weight = tl.load(beta + token * HEADS + head, mask=inside, other=0.0)
        factor = factors + head * 4 * tokens + token
        query_factor = tl.load(factor, mask=inside, other=0.0)
        key_factor = tl.load(factor + tokens, mask=inside, other=0.0)
        change_factor = tl.load(factor + 2 * tokens, mask=inside, other=0.0)
        kept = tl.load(factors + head * 4 * tokens + 3 * tokens + start + first)

        narrow = state.to(kind)
        recalled = tl.dot(own, narrow, input_precision=products) * key_factor[:, None]
        wrong = (value.to(tl.float32) - recalled) * weight[:, None]
        change = tl.dot(solved, wrong.to(kind), input_precision=products)
        result = tl.dot(queries, narrow, input_precision=products) * query_factor[:, None]
        result += tl.dot(score, change.to(kind), input_precision=products)
        result_place = (token[:, None] * HEADS + head) * VALUE_DIM + column[None, :]
        tl.store(out + result_place, result.to(kind), mask=wanted)
        if kind == tl.float16:  # its exponents have no room for the factors of keys of any length
            wide = own.to(tl.float32)
            length_factor = tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS)
            own = (wide * length_factor[:, None]).to(kind)
            change_factor /= length_factor
        scaled = (change * change_factor[:, None]).to(kind)
        state = state * kept + tl.dot(tl.trans(own), scaled, input_precision=products)
    if behind >= 0:
        tl.debug_barrier()  # all threads have read the old state, which may be in this slot
        tl.store(matrices + behind * slot_stride + cell, state, mask=cells)

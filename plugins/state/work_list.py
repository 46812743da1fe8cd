"""The work of one step on states, listed on the device once for each step and used by all linear
layers.

    a segment    |-- piece --|-- piece --|-- piece --|- tail -|

A *piece* is PIECE tokens from the segment's begin on, which products of matrices compute. A last
piece of FEW tokens or fewer is a *tail*, computed token by token behind the others. So a segment
that begins at a multiple of PIECE tokens of a longer one is computed in the same pieces and tail,
and its results and states have the same bits.

A tail behind pieces begins with the state in the segment's `state_out`, where the pieces leave it.
If that is not kept, the tail is computed as a piece.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 64  # tokens
FEW = 16  # tokens: a piece of more is computed faster by products
_ENTRIES = 128  # that a program lists at once


class StateWork:
    """Device memory for the work of one step at a time. `build` fills it, every layer reads it.
    All int32.

    counts  [4], how many entries of the next four are listed
    tiles   [most, 2] segment and first token in it, of each piece and tail
    pieces  [most, 2] the same, of pieces
    longs   [most, 2] segment and number of pieces, of segments with pieces
    tails   [segments], segments that have a tail
    """

    def __init__(self, tokens: int, segments: int, device: torch.device | str):
        """tokens, segments: the most of a step."""
        self.tokens = tokens
        self.segments = segments
        self.counts = torch.zeros(4, dtype=torch.int32, device=device)
        self.tiles = self._entries(most_tiles(tokens, segments))
        self.pieces = self._entries(most_pieces(tokens))
        self.longs = self._entries(most_pieces(tokens))
        self.tails = torch.zeros(segments, dtype=torch.int32, device=device)
        self.longest = tokens

    def _entries(self, most: int) -> Tensor:
        return torch.zeros(most, 2, dtype=torch.int32, device=self.counts.device)

    def build(self, segments: Tensor, state_out: Tensor, longest: int | None = None) -> None:
        """Lists the work of segments [S, 5] and state_out [S], int32, as in `reference`. None has
        more than `longest` tokens: kernels for longer ones are not launched in this step.

        Enqueued on the current stream; the host does not wait for the device. ValueError if there
        are more segments than the list was made for. The device does not check the other values.
        """
        count = len(segments)
        if count > self.segments:
            raise ValueError(f"{count} segments, but the list was made for {self.segments}")
        self.longest = self.tokens if longest is None else longest
        if not count:
            self.counts.zero_()
            return
        _list_states[(count,)](
            segments,
            state_out,
            self.counts,
            self.tiles,
            self.pieces,
            self.longs,
            self.tails,
            count,
            SEGMENTS=triton.next_power_of_2(self.segments),
            PIECE=PIECE,
            FEW=FEW,
            ENTRIES=_ENTRIES,
        )


def most_tiles(tokens: int, segments: int) -> int:
    return tokens // PIECE + segments


def most_pieces(tokens: int) -> int:
    """A segment with n pieces has more than n * FEW tokens."""
    return tokens // (FEW + 1)


@triton.jit(do_not_specialize=["count"])
def _list_states(segments, state_out, counts, tiles, pieces, longs, tails, count,
                 SEGMENTS: tl.constexpr, PIECE: tl.constexpr, FEW: tl.constexpr,
                 ENTRIES: tl.constexpr):  # fmt: skip
    """One program for each segment. Each counts the entries of the segments before its own, then
    lists its own."""
    me = tl.program_id(0)
    index = tl.arange(0, SEGMENTS)
    there = index < count
    length = tl.load(segments + index * 5 + 1, mask=there, other=0)
    kept = tl.load(state_out + index, mask=there, other=-1) >= 0
    rest = length % PIECE
    has_tail = (rest > 0) & (rest <= FEW) & (kept | (length <= FEW))
    tail = has_tail.to(tl.int32)
    tile = (length + PIECE - 1) // PIECE
    piece = tile - tail
    long = (piece > 0).to(tl.int32)
    if me == 0:
        tl.store(counts, tl.sum(tile))
        tl.store(counts + 1, tl.sum(piece))
        tl.store(counts + 2, tl.sum(long))
        tl.store(counts + 3, tl.sum(tail))
    before = index < me
    own = index == me
    own_tiles = tl.sum(tl.where(own, tile, 0))
    own_pieces = tl.sum(tl.where(own, piece, 0))
    first_tile = tl.sum(tl.where(before, tile, 0))
    first_piece = tl.sum(tl.where(before, piece, 0))
    if own_pieces > 0:
        place = longs + 2 * tl.sum(tl.where(before, long, 0))
        tl.store(place, me)
        tl.store(place + 1, own_pieces)
    if own_tiles > own_pieces:
        tl.store(tails + tl.sum(tl.where(before, tail, 0)), me)
    entry = tl.arange(0, ENTRIES)
    for base in range(0, own_tiles, ENTRIES):
        number = base + entry
        listed = tiles + 2 * (first_tile + number)
        tl.store(listed, tl.zeros_like(number) + me, mask=number < own_tiles)
        tl.store(listed + 1, number * PIECE, mask=number < own_tiles)
        listed = pieces + 2 * (first_piece + number)
        tl.store(listed, tl.zeros_like(number) + me, mask=number < own_pieces)
        tl.store(listed + 1, number * PIECE, mask=number < own_pieces)

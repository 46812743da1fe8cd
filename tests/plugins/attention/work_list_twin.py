"""The twin of `WorkList.build`, on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from pensieve.plugins.attention import work_list
from pensieve.plugins.attention.work_list import Tile


def cuts(rows: int, kv_len: int) -> tuple[int, int, int]:
    """The twin of `_cuts`."""
    per_row = work_list.TOKENS_PER_MANY if rows > work_list.MANY_ROWS else work_list.TOKENS_PER_ROW
    wanted = max(
        work_list.SMALLEST_SPLIT,
        min(rows * per_row, work_list.LARGEST_SPLIT),
        -(-kv_len // work_list.MOST_SPLITS),
    )
    cut = 1 << (wanted - 1).bit_length()
    if rows > work_list.FEW_ROWS:
        return cut, cut // 4, work_list.MOST_SPLITS
    whole, rest = divmod(kv_len, cut)
    return cut, 0, whole - 1 if whole and 2 * rest < cut else work_list.MOST_SPLITS


def split_of(key: int, cut: int, more: int, last: int) -> int:
    """The split of a key."""
    return min(max(key - more, 0) // cut, last)


def list_work(
    segments: Tensor,
    group: int,
    tiles: tuple[Tile, ...],
    token_pairs: int,
    sharing: Tensor | None = None,
) -> list[list[list[int]]]:
    """The twin of `WorkList.build`, on the host: the items of each class, without the words behind
    a stack's names.

    token_pairs: the most splits of a segment
    """
    rows = segments.tolist()
    order = sharing.tolist() if sharing is not None else [[i, 0] for i in range(len(rows))]
    # (split, -keys, place, item)
    places: list[list[tuple[int, int, int, list[int]]]] = [[] for _ in tiles]
    listed: dict[int, list[list[int]]] = {}  # by split: the names of the stack that takes more rows
    previous = [0, 0, 0, 0, 0]
    for place, (number, shared) in enumerate(order):
        q_start, q_len, kv_start, kv_len, seat = rows[number]
        if not q_len:
            previous = rows[number]
            continue
        cut, more, last = cuts(q_len * group, kv_len)
        first = split_of(kv_start, cut, more, last)
        splits = split_of(kv_len - 1, cut, more, last) - first + 1
        kind = next(
            (i for i, tile in enumerate(tiles[:-1]) if q_len * group <= tile.rows), len(tiles) - 1
        )
        step = tiles[kind].rows // group
        alike = q_len == previous[1] == 1 and kv_start == previous[2] == 0
        common = (
            min(max(shared - more, 0) // cut, splits - 1)
            if alike and cuts(group, previous[3])[0] == cut
            else 0
        )
        previous_cuts = cuts(group, previous[3]) if alike else (cut, more, last)
        common = min(common, split_of(previous[3] - 1, *previous_cuts)) if common else 0
        previous = rows[number]
        # the last tiles have most keys, so they go first
        for start in reversed(range(0, q_len, step)):
            size = min(step, q_len - start)
            own = kv_len - q_len + start
            reached = split_of(own + size - 1, cut, more, last) - first + 1
            for i in range(splits):
                stack = listed.get(i)
                if i < common and stack is not None and len(stack[0]) < tiles[0].rows // group:
                    stack[0].append(q_start)
                    stack[1].append(splits)
                    continue
                begin = kv_start if i == 0 else (first + i) * cut + more
                end = (
                    own + size
                    if first + i == last
                    else min(own + size, (first + i + 1) * cut + more)
                )
                item = [q_start + start, size, own, begin, end, seat]
                item += [token_pairs, i, splits, reached, 0, cut, more, last]
                names = [[q_start], [splits]]
                places[kind].append((i, -kv_len, place, [item, names]))
                listed[i] = names
        for i in [i for i in listed if i >= splits]:
            del listed[i]
    work = []
    for kind in places:
        work.append([])
        for _, _, _, (item, names) in sorted(kind, key=lambda one: one[:3]):
            if len(names[0]) > 1:
                item[1], item[10] = len(names[0]), 1
                item = item + names[0] + names[1]
            work[-1].append(item)
    return work


def attend(
    q: Tensor,
    items: list[list[list[int]]],
    block_table: Tensor,
    pool: Tensor,
    layer: int,
    scale: float,
) -> Tensor:
    """The twin of the kernel: every item by itself in plain attention, then the splits of each
    token merged."""
    chunk_tokens, kv_heads = pool.shape[4], pool.shape[3]
    # by token: splits, logarithms of weights, results
    parts: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
    for item in (item for kind in items for item in kind):
        size, begin, end, seat = item[1], item[3], item[4], item[5]
        keys = torch.arange(begin, max(begin, end))
        k, v = pool[
            block_table[seat, keys // chunk_tokens].long(), layer, :, :, keys % chunk_tokens
        ].unbind(1)
        tokens = item[work_list.NAMED :][:size] if item[10] else range(item[0], item[0] + size)
        for i, token in enumerate(tokens):
            rows = q[token].view(kv_heads, -1, q.shape[2])
            score = torch.einsum("hgd,nhd->hgn", rows, k) * scale
            if not item[10]:  # all rows of a stack see all its keys
                score = score.masked_fill(keys > item[2] + i, float("-inf"))
            if item[7] < item[9]:
                result = torch.einsum("hgn,nhd->hgd", score.softmax(-1).nan_to_num(), v)
                parts.setdefault(token, []).append((item[7], score.logsumexp(-1), result))
    o = torch.zeros_like(q)
    for token, token_parts in parts.items():
        _, weights, results = zip(*sorted(token_parts, key=lambda part: part[0]), strict=True)
        share = torch.stack(weights).softmax(0).unsqueeze(-1)
        o[token] = (share * torch.stack(results)).sum(0).flatten(0, 1)
    return o

"""The twin of `WorkList.build`, on the host."""

from __future__ import annotations

from torch import Tensor

from pensieve.plugins.attention import work_list
from pensieve.plugins.attention.work_list import Tile


def cuts(rows: int, kv_len: int) -> tuple[int, int]:
    """The twin of `_cuts`."""
    per_row = work_list.TOKENS_PER_MANY if rows > work_list.MANY_ROWS else work_list.TOKENS_PER_ROW
    wanted = max(
        work_list.SMALLEST_SPLIT, min(rows * per_row, work_list.LARGEST_SPLIT), -(-kv_len // work_list.MOST_SPLITS)
    )
    cut = 1 << (wanted - 1).bit_length()
    if rows > work_list.FEW_ROWS:
        return cut, cut // 4
    rest, step = kv_len % cut, cut // 8
    return cut, -(-rest // step) * step if kv_len > cut and 2 * rest < cut else 0


def split_of(key: int, cut: int, more: int) -> int:
    """The split of a key."""
    return max(key - more, 0) // cut


def list_work(segments: Tensor, group: int, tiles: tuple[Tile, ...]) -> list[list[list[int]]]:
    """The twin of `WorkList.build`, on the host: the items of each class."""
    places: list[list[tuple[int, list[int]]]] = [[] for _ in tiles]  # (split, item), sorted by split at the end
    numbers = [0] * len(tiles)
    pairs = 0
    for q_start, q_len, kv_start, kv_len, seat in sorted(segments.tolist(), key=lambda segment: -segment[3]):
        if not q_len:
            continue
        cut, more = cuts(q_len * group, kv_len)
        first = split_of(kv_start, cut, more)
        splits = split_of(kv_len - 1, cut, more) - first + 1
        kind = next((i for i, tile in enumerate(tiles[:-1]) if q_len * group <= tile.rows), len(tiles) - 1)
        step = tiles[kind].rows // group
        for start in reversed(range(0, q_len, step)):  # the last tiles have most keys, so they go first
            size = min(step, q_len - start)
            own = kv_len - q_len + start
            reached = split_of(own + size - 1, cut, more) - first + 1
            for i in range(splits):
                begin = kv_start if i == 0 else (first + i) * cut + more
                end = min(own + size, (first + i + 1) * cut + more)
                pair = pairs + start * splits
                item = [
                    q_start + start,
                    size,
                    own,
                    begin,
                    end,
                    seat,
                    pair,
                    i,
                    splits,
                    reached,
                    numbers[kind],
                    cut,
                    more,
                ]
                places[kind].append((i, item))
            numbers[kind] += 1
        pairs += q_len * splits if splits > 1 else 0
    return [[item for _, item in sorted(kind, key=lambda place: place[0])] for kind in places]

"""Quotas of owners: chunks of conversations over quota are evicted first, so no owner pushes out
another's KV.

An owner's conversations, in the order of their last turns:

    the longest ago ... | ... the latest
    over quota          | within the quota
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class _Share:
    """One owner's chunks, by conversation."""

    __slots__ = ("over_quota", "taken", "within")

    def __init__(self) -> None:
        self.over_quota: OrderedDict[str, int] = OrderedDict()
        self.within: OrderedDict[str, int] = OrderedDict()
        self.taken = 0  # chunks of the conversations within the quota


class Quotas:
    """`most`: the quota in chunks. A conversation that is larger by itself is always over quota."""

    def __init__(self, most: int):
        self._most = most
        self._shares: dict[str, _Share] = {}

    def put(self, owner: str, conversation: str, chunks: int) -> Iterator[tuple[str, bool]]:
        """A turn of the conversation has just ended: it is now the owner's latest.

        Yields (conversation, True if it is over quota from now on) for the other conversations for
        which that changes, and for this one if it is over quota.
        """
        share = self._shares.setdefault(owner, _Share())
        share.over_quota.pop(conversation, None)
        share.taken += chunks - share.within.pop(conversation, 0)
        share.within[conversation] = chunks
        while share.taken > self._most:
            oldest, size = share.within.popitem(last=False)
            share.taken -= size
            share.over_quota[oldest] = size
            yield oldest, True
        yield from self._let_in(share)

    def remove(self, owner: str, conversation: str) -> Iterator[tuple[str, bool]]:
        """Removes the conversation. Yields as `put`."""
        share = self._shares[owner]
        share.taken -= share.within.pop(conversation, 0)
        share.over_quota.pop(conversation, None)
        yield from self._let_in(share)
        if not (share.within or share.over_quota):
            del self._shares[owner]

    def _let_in(self, share: _Share) -> Iterator[tuple[str, bool]]:
        while share.over_quota:
            latest, size = share.over_quota.popitem()
            if share.taken + size > self._most:
                share.over_quota[latest] = size
                return
            share.within[latest] = size
            share.within.move_to_end(latest, last=False)
            share.taken += size
            yield latest, False

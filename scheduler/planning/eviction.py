"""Makes room during one plan: takes GPU slots back, copies chunks out ahead of time (Pensieve,
section 4.3.2), and frees slots on HOST for chunks of higher value than those there (below HOST:
`spills`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice

from ..kv.chunk import NO_SLOT, Chunk
from ..kv.chunk_store import ChunkStore
from ..kv.victim_sets import Head, VictimSet
from ..plan import Lane
from ..types import GPU, HOST, InvariantError
from .plan_copies import LaneCopies, StepCopies


class Evictor:
    """Chooses the victims of one plan, by their values at the plan's time."""

    def __init__(self, store: ChunkStore, copies: StepCopies, now: float):
        self.store = store
        self._copies = copies
        self.now = now

        self._heads: dict[VictimSet, Head] = {}

    def head(self, members: VictimSet) -> Head:
        """The set's next victims. Created at first use: most plans make no room."""
        head = self._heads.get(members)
        if head is None:
            head = self._heads[members] = Head(members, self.now)
        return head

    # -- GPU

    def take_gpu_slots(self, count: int) -> None:
        """Makes at least `count` GPU slots free. The caller has checked that this many are
        obtainable.

        Takes spare slots first, then those of only copies, which are moved to HOST by a copy
        that the step waits for, or dropped.
        """
        store = self.store
        if count <= store.gpu.free:
            return
        evictions = store.evictions
        spare = self.head(store.spare[GPU])
        while (missing := count - store.gpu.free) > 0:
            victims = spare.peek(store.policy.at_once(missing))
            if not victims:
                break
            evictions.count_values(spare.value, len(victims))
            dropped = store.reclaim_gpu(victims)
            evictions.count(GPU, "dropped", dropped)
            evictions.count(GPU, "reclaimed", len(victims) - dropped)
        only = self.head(store.only[GPU])
        while (missing := count - store.gpu.free) > 0:
            victims = only.peek(missing)
            if not victims:
                raise InvariantError(
                    f"{count} GPU slots were counted as obtainable, {store.gpu.free} are"
                )
            evictions.count_values(only.value, len(victims))
            moved = self._copy_out(victims, only.value, self._copies.evictions)
            dropped = store.reclaim_gpu(victims)
            evictions.count(GPU, "moved", moved)
            evictions.count(GPU, "dropped", dropped)
            # the others had a copy on HOST, staged there or found there
            evictions.count(GPU, "reclaimed", len(victims) - moved - dropped)

    def swap_out_ahead(self, available: int, most: int) -> None:
        """Copies out chunks of lowest V, at most `most`, until `available` GPU slots are free or
        spare."""
        store = self.store
        only = self.head(store.only[GPU])
        copied = 0
        # `store.available` is read anew in each pass: a chunk that loses its HOST copy to another
        # is no longer spare.
        while (missing := min(available - store.available, most - copied)) > 0:
            chunks = only.peek(missing)
            if not chunks:
                return
            copied += self._copy_out(chunks, only.value, self._copies.swap_outs_ahead)
            store.make_reclaimable(chunks)

    def _copy_out(self, chunks: list[Chunk], value: float, copies: LaneCopies) -> int:
        """Copies the first of these chunks of one value to HOST, as many as get a slot there;
        staged chunks already have one. Returns how many were copied."""
        store = self.store
        uncopied = [chunk for chunk in chunks if chunk.slots[HOST] == NO_SLOT]
        slots = self.host_slots(len(uncopied), value)
        copied = uncopied[: len(slots)]
        copies.add([chunk.slots[GPU] for chunk in copied], slots)
        for chunk, slot in zip(copied, slots, strict=True):
            store.copied_out(chunk, slot)
        return len(slots)

    # -- HOST

    def stage(self, chunk: Chunk, drops: bool = False) -> bool:
        """Copies the chunk to HOST on its way to a lower tier. `drops`: a chunk of lower value that
        is only on HOST may be dropped for it."""
        store = self.store
        slots = self.host_slots(1, store.policy.value(chunk, self.now), drops)
        if slots:
            # its rows note the slot's last step when they release it; the step that wrote the slot
            # has been applied
            if chunk.users:
                computed = store.gpu.last[Lane.COMPUTE]
                computed[chunk.slots[GPU]] = max(
                    computed[chunk.slots[GPU]], store.completed.compute
                )
            self._copies.swap_outs_ahead.add([chunk.slots[GPU]], slots)
            store.stage(chunk, slots[0])
        return bool(slots)

    def host_slots(self, count: int, value: float, drops: bool = True) -> list[int]:
        """Returns HOST slots for `count` chunks of that value; fewer if HOST holds too little of
        lower value.

        Evicts, in this order:
        * copies of chunks in use on the GPU
        * copies of idle GPU chunks of higher value than `value`: they will stay on the GPU
        * chunks of lower value that are also in a lower tier
        * with `drops`, other chunks of lower value
        """
        host = self.store.host
        while (missing := count - host.free) > 0 and self.give_up_host_slots(missing, value, drops):
            pass
        return [host.take() for _ in range(min(count, host.free))]

    def give_up_host_slots(self, missing: int, value: float, drops: bool) -> bool:
        """Frees at least one HOST slot if possible; more than `missing` only when a whole turn is
        evicted. Returns False if none."""
        store = self.store
        # The set is in the order of filing: after the first chunk whose slot this plan uses, all
        # are this plan's.
        busy = [*islice(store.busy_copied, missing)]
        if self.give_up_copies(busy):
            return True
        # those of highest value first: they stay on the GPU longest
        head = Head(store.spare[GPU], self.now, descending=True)
        idle = [
            chunk
            for chunk in head.peek(missing)
            if chunk.slots[HOST] != NO_SLOT and chunk.moving is None
        ]
        if head.value > value and self.give_up_copies(idle):
            return True
        head = self.head(store.spare[HOST])
        spare = head.peek(missing)
        if head.value < value and self.give_up_copies(spare, "reclaimed"):
            return True
        if not drops:
            return False
        head = self.head(store.only[HOST])
        victims = self._copies.without_host_slot_in_use(head.peek(store.policy.at_once(missing)))
        if not victims or head.value >= value:
            return False
        self.drop_from_host(victims, head.value)
        return True

    def give_up_copies(self, chunks: list[Chunk], event: str = "copy") -> bool:
        """Frees the HOST slots of those chunks whose slots this plan does not use. Returns False if
        it frees none."""
        unused = self._copies.without_host_slot_in_use(chunks)
        for chunk in unused:
            self.store.release_host(chunk)
        self.store.evictions.count(HOST, event, len(unused))
        return bool(unused)

    @cached_property
    def idle_on_gpu(self) -> Iterator[Chunk]:
        """Idle GPU chunks, the latest ones first."""
        return iter([*self.store.spare[GPU]][::-1])

    def drop_from_host(self, victims: list[Chunk], value: float) -> None:
        """Drops chunks of that value that are only on HOST."""
        self.store.drop_from_host(victims)
        self.store.evictions.count(HOST, "dropped", len(victims))
        self.store.evictions.count_values(value, len(victims))

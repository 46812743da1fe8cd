"""What routers are told of the chunks of KV (docs/use/routers.md).

A block is a chunk as routers see it: they know tokens, and no salts of owners. Chunks of the same
tokens under several owners' salts are one block, in the fastest tier of them. Blocks make trees,
one for each salt that clients gave. A block is told in the slowest tier on its path from the root,
and not at all behind a hole. So what is told is always a tree from the root, in which tiers never
get faster along a path: routers score the leading blocks of a prompt, and forget a block whose
parent they do not know.

If the model has recurrent states, a block is told only if a state is at its end or further on its
path, before the next hole: a request begins at a state.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...scheduler.kv.chunk import NO_SLOT
from ...scheduler.kv.chunk_keys import NO_KEY, root_key
from ...scheduler.kv.noted_store import ContextRun, ResidencyChanges
from ...scheduler.types import GPU, LOCAL_TIERS, ChunkKey
from ..cache_salt import GIVEN, given_salt

MEDIA = ("GPU", "CPU", "DISK")
"""By tier: its name in events."""

MOST_BLOCKS = 64  # of one event: its tokens are put together in one go
CLEARED = {"type": "AllBlocksCleared"}

Event = dict[str, Any]


class Block:
    """key      SHA-256 over the parent's key and the tokens
    parent      None: a root, which stands for no tokens
    tokens      as bytes of an array
    salt        the given salt of its tree, or None
    tiers       of its chunks, by their keys; empty: a hole, kept for the blocks behind it
    children    by their tokens
    usable      a request can begin at its end or further on, if nothing up to there is missing
    usable_children
                the number of its children that are usable
    told        the tier in which routers know it, or NO_SLOT
    """

    __slots__ = (
        "children",
        "depth",
        "key",
        "parent",
        "salt",
        "tiers",
        "tokens",
        "told",
        "usable",
        "usable_children",
    )

    def __init__(
        self, key: bytes, parent: Block | None, tokens: bytes, salt: str | None, usable: bool
    ):
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.tiers: dict[ChunkKey, int] = {}
        self.children: dict[bytes, Block] = {}
        self.usable = usable
        self.usable_children = 0
        self.told: int = NO_SLOT if parent is not None else GPU

    @property
    def hash(self) -> int:
        """The low 64 bits of its key."""
        return int.from_bytes(self.key[-8:], "big")

    @property
    def slowest(self) -> int:
        """The tier in which it is to be told, or NO_SLOT."""
        parent = self.parent
        if parent is None:
            return GPU
        if not self.tiers or not self.usable or parent.told == NO_SLOT:
            return NO_SLOT
        return max(min(self.tiers.values()), parent.told)


class Blocks:
    """All blocks that are in a tier, those before them, and what routers know of them."""

    def __init__(self, seed: bytes, chunk_tokens: int, has_states: bool = False):
        """`seed`: as in `SchedulerConfig`; `has_states`: the model has recurrent states."""
        self._seed = seed
        self._size = chunk_tokens
        self._roots: dict[str | None, Block] = {}
        self._by_chunk: dict[ChunkKey, Block] = {}
        # resident chunks whose tokens are not known yet, with their tiers
        self._unnamed: dict[ChunkKey, int] = {}
        # by the chunk's key, after how many tokens; None: a request can begin anywhere
        self._states: dict[ChunkKey, int] | None = {} if has_states else None
        self._changed: dict[Block, None] = {}
        self._perhaps_empty: dict[Block, None] = {}

    def __len__(self) -> int:
        return len(self._by_chunk)

    # -- changes

    def apply(self, changes: ResidencyChanges) -> None:
        """Applies what the scheduler noted; `events` tells it."""
        for key, tier in changes.tiers:
            self._move(key, tier)
        for key, end in changes.states:
            self._set_state(key, end)
        for run in changes.names:
            keys = run.keys[run.first : run.end]
            # a context without its first tokens has other KV than a prompt of all its tokens
            whole = bool(keys) and run.keys[0] != NO_KEY
            if self._unnamed and whole and any(key in self._unnamed for key in keys):
                self._name(run, keys)

    def replace(self, resident: ResidencyChanges) -> None:
        """Some changes are lost; these chunks are all that are resident now."""
        there = {key for key, _ in resident.tiers}
        for key in [key for key in (*self._by_chunk, *self._unnamed) if key not in there]:
            self._move(key, NO_SLOT)
        for key in list(self._states or ()):
            self._set_state(key, 0)
        self.apply(resident)

    def _move(self, key: ChunkKey, tier: int) -> None:
        block = self._by_chunk.get(key)
        if block is None:
            if tier == NO_SLOT:
                self._unnamed.pop(key, None)
            else:
                self._unnamed[key] = tier
            return
        self._changed[block] = None
        if tier == NO_SLOT:
            del block.tiers[key], self._by_chunk[key]
            self._perhaps_empty[block] = None
        else:
            block.tiers[key] = tier

    def _set_state(self, key: ChunkKey, end: int) -> None:
        assert self._states is not None
        if end:
            self._states[key] = end
        else:
            self._states.pop(key, None)
        block = self._by_chunk.get(key)
        if block is not None:
            self._changed[block] = None

    def _name(self, run: ContextRun, keys: Sequence[ChunkKey]) -> None:
        first = run.first
        block = self._by_chunk.get(run.keys[first - 1]) if first else self._root(run.salt)
        if block is None:
            return  # behind a hole; the turn that computes the hole names all of its prompt
        size = self._size
        for index, key in enumerate(keys, first):
            block = self._child(block, run.tokens[index * size : (index + 1) * size].tobytes())
            tier = self._unnamed.pop(key, NO_SLOT)
            if tier != NO_SLOT:
                block.tiers[key] = tier
                self._by_chunk[key] = block
                self._changed[block] = None
        self._perhaps_empty[block] = None

    def _root(self, salt: bytes) -> Block:
        given = given_salt(salt)
        root = self._roots.get(given)
        if root is None:
            key = root_key(self._seed, self._size, salt if salt.startswith(GIVEN) else b"")
            root = self._roots[given] = Block(key, None, b"", given, self._states is None)
        return root

    def _child(self, parent: Block, tokens: bytes) -> Block:
        child = parent.children.get(tokens)
        if child is None:
            key = hashlib.sha256(parent.key + tokens).digest()
            child = parent.children[tokens] = Block(
                key, parent, tokens, parent.salt, self._states is None
            )
        return child

    # -- events

    def events(self) -> list[Event]:
        """Returns the net changes since the last call: children are removed first, parents stored
        first. A block that changes its tier is removed from one and stored in the other."""
        before = self._tell()
        gone: list[list[Block]] = [[] for _ in LOCAL_TIERS]
        stored = []
        for block, told in before.items():
            if block.told == told:
                continue
            if told != NO_SLOT:
                gone[told].append(block)
            if block.told != NO_SLOT:
                stored.append(block)
        events: list[Event] = []
        for tier in reversed(LOCAL_TIERS):
            hashes = [block.hash for block in sorted(gone[tier], key=_depth, reverse=True)]
            if hashes:
                removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIA[tier]}
                events.append(removed)
        events += self._stored(stored)
        self._forget_empty()
        return events

    def everything(self) -> list[Event]:
        """Returns events that store all that routers should know. Called after `events`."""
        stored = []
        stack = list(self._roots.values())
        while stack:
            for child in stack.pop().children.values():
                if child.told != NO_SLOT:
                    stored.append(child)
                    stack.append(child)
        return [*self._stored(stored)]

    def _tell(self) -> dict[Block, int]:
        """Brings `told` up to date. Returns what it was before, of blocks that changed in
        between."""
        before: dict[Block, int] = {}
        if self._states is not None:
            for block in sorted(self._changed, key=_depth, reverse=True):
                self._update_usable(block, self._states)
        stack = sorted(self._changed, key=_depth, reverse=True)  # the next to the root first
        self._changed.clear()
        while stack:
            block = stack.pop()
            tier = block.slowest
            if tier != block.told:
                before.setdefault(block, block.told)
                block.told = tier
                stack += block.children.values()
        return before

    def _update_usable(self, block: Block, states: Mapping[ChunkKey, int]) -> None:
        """Brings `usable` up to date, from the block towards its root."""
        parent = block.parent
        while parent is not None and block.usable != self._is_usable(block, states):
            block.usable = not block.usable
            self._changed[block] = None
            parent.usable_children += 1 if block.usable else -1
            block, parent = parent, parent.parent

    def _is_usable(self, block: Block, states: Mapping[ChunkKey, int]) -> bool:
        if not block.tiers:
            return False
        if block.usable_children:
            return True
        end = block.depth * self._size  # an adopted state may have come with another one
        return any(states.get(key) == end for key in block.tiers)

    def _stored(self, blocks: list[Block]) -> Iterator[Event]:
        """Each event has consecutive blocks of one path, in one tier."""
        left = dict.fromkeys(sorted(blocks, key=_depth))
        for first in list(left):
            if first not in left:
                continue
            del left[first]
            path = [first]
            while len(path) < MOST_BLOCKS:
                following = path[-1].children.values()
                block = next(
                    (child for child in following if child in left and child.told == first.told),
                    None,
                )
                if block is None:
                    break
                del left[block]
                path.append(block)
            yield _stored_event(path, self._size)

    def _forget_empty(self) -> None:
        stack = list(self._perhaps_empty)
        self._perhaps_empty.clear()
        while stack:
            block = stack.pop()
            parent = block.parent
            if block.tiers or block.children:
                continue
            if parent is None:
                self._roots.pop(block.salt, None)
            elif parent.children.pop(block.tokens, None) is not None:
                stack.append(parent)


def _depth(block: Block) -> int:
    return block.depth


def _stored_event(path: list[Block], size: int) -> Event:
    first = path[0]
    parent = first.parent
    assert parent is not None
    tokens = array("i")
    tokens.frombytes(b"".join(block.tokens for block in path))
    event: Event = {
        "type": "BlockStored",
        "block_hashes": [block.hash for block in path],
        "parent_block_hash": None if parent.parent is None else parent.hash,
        "token_ids": tokens.tolist(),
        "block_size": size,
        "lora_id": None,
        "medium": MEDIA[first.told],
        "lora_name": None,
    }
    if first.salt is not None:
        event["cache_salt"] = first.salt
        if parent.parent is None:
            event["extra_keys"] = [[first.salt], *[None] * (len(path) - 1)]
    return event

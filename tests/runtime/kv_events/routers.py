"""What routers make of KV events: a double of llm-d's rules, and Dynamo's real router in this
process."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import zmq

FOLDER = Path(sys.prefix) / "kv-events"
"""`make kv-events` installs Dynamo's router there."""

MEDIA = ("GPU", "CPU", "DISK")


# vLLM's events, as a program that reads them declares them.


class BlockStored(msgspec.Struct, tag=True, kw_only=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, kw_only=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None


DECODER = msgspec.msgpack.Decoder(EventBatch)


class Objection(AssertionError):
    """A real router would be wrong from here on."""


class LlmDDouble:
    """Follows llm-d's rules and objects where they are broken: a number follows its predecessor, a
    block's parent is known, no block is stored twice in one medium, and only stored ones are
    removed. Blocks are found by their tokens.

    paths   by hash: the salt and the tokens of the block and of all before it
    stored  by hash: its media
    """

    def __init__(self):
        self.number = 0
        self.paths = {}
        self.stored = Counter()
        self.ended = Counter()  # by path and medium

    def take(self, number, payload):
        if number != self.number:
            raise Objection(f"batch {number} comes where {self.number} is expected")
        self.number += 1
        batch = DECODER.decode(payload)
        assert batch.data_parallel_rank == 0
        self.apply(batch.events)

    def apply(self, events):
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.paths.clear()
                    self.stored.clear()
                    self.ended.clear()
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block in event.block_hashes:
                        self._remove(block, event.medium)
        paths = set(self.paths.values())
        if not all(len(path) == 2 or path[:-1] in paths for path in paths):
            raise Objection("a block is left behind one that is gone")

    def _store(self, event):
        size = event.block_size
        if len(event.token_ids) != size * len(event.block_hashes):
            raise Objection("the tokens are not those of the blocks")
        parent = event.parent_block_hash
        if parent is None:
            path = (event.cache_salt,)
        elif parent in self.paths:
            path = self.paths[parent]
            if path[0] != event.cache_salt:
                raise Objection("the parent has another salt")
        else:
            raise Objection(f"the parent {parent} is not known")
        for at, block in enumerate(event.block_hashes):
            path = (*path, tuple(event.token_ids[at * size : (at + 1) * size]))
            if self.stored[block, event.medium]:
                raise Objection(f"{block} is stored twice")
            if self.paths.setdefault(block, path) != path:
                raise Objection(f"two blocks have the hash {block}")
            self.stored[block, event.medium] += 1
            self.ended[path, event.medium] += 1
            if self.ended[path, event.medium] > 1:
                raise Objection("two blocks have the same tokens, and are removed together")

    def _remove(self, block, medium):
        if self.stored[block, medium] != 1:
            raise Objection(f"{block} is removed and not stored")
        del self.stored[block, medium]
        del self.ended[self.paths[block], medium]
        if not any((block, other) in self.stored for other in MEDIA):
            del self.paths[block]

    def score(self, tokens, size, salt=None):
        """Leading blocks of the prompt on the GPU; there or on the CPU; anywhere."""
        runs = []
        for media in (MEDIA[:1], MEDIA[:2], MEDIA):
            path = (salt,)
            count = 0
            for at in range(0, len(tokens) // size * size, size):
                path = (*path, tuple(tokens[at : at + size]))
                if not any((path, medium) in self.ended for medium in media):
                    break
                count += 1
            runs.append(count)
        return tuple(runs)


class LossyProxy:
    """Passes on a publisher's batches, but for those whose numbers are to be lost."""

    def __init__(self, publisher, loses):
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.subscribe(b"")
        self._in.connect(publisher)
        self._out = self._context.socket(zmq.PUB)
        self._out.bind("tcp://127.0.0.1:*")
        self.endpoint = self._out.last_endpoint.decode()
        self.lost = 0
        self._loses = loses
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._ends.is_set():
            if self._in.poll(50):
                batch = self._in.recv_multipart()
                if self._loses(int.from_bytes(batch[1], "big")):
                    self.lost += 1
                else:
                    self._out.send_multipart(batch)

    def close(self):
        self._ends.set()
        self._thread.join()
        self._context.destroy(linger=0)


class DynamoRouter:
    """Dynamo's `SelectionService`: several workers, each with its own view of one publisher."""

    def __init__(self, size):
        sys.path.append(str(FOLDER))  # packages of the same name here come first
        try:
            from dynamo.llm import SelectionService
        finally:
            sys.path.remove(str(FOLDER))
        self.size = size
        self._service = SelectionService(indexer_threads=1)

    async def join(self, worker, events, replay):
        await self._service.upsert_worker(
            {
                "worker_id": worker,
                "model_name": "m",
                "endpoint": "http://127.0.0.1:9",
                "kv_events_endpoint": events,
                "replay_endpoint": replay,
                "block_size": self.size,
                "data_parallel_size": 1,
                "data_parallel_start_rank": 0,
            }
        )

    async def leave(self, worker):
        await self._service.delete_worker(worker)

    async def scores(self, tokens, salt=None):
        """By worker: leading blocks of the prompt as in `LlmDDouble.score`."""
        query = {"model_name": "m", "token_ids": list(tokens)}
        if salt is not None:
            query["cache_salt"] = salt
        answer = await self._service.overlap_scores(query)
        return {
            worker["worker_id"]: (
                worker["device_blocks"],
                worker["host_pinned_blocks"],
                worker["disk_blocks"],
            )
            for worker in answer["workers"]
        }

    def close(self):
        self._service.shutdown()

"""What the session hands over, and when."""

from __future__ import annotations

from array import array

from pensieve.runtime.engine_session import EngineSession
from pensieve.runtime.messages import Forget
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.noted_store import NotedStores
from pensieve.scheduler.scheduler import Scheduler

from ..test_engine_session import COST, Sevens, play, request

CONFIG = SchedulerConfig(gpu_kv_chunks=8, host_kv_chunks=0, max_model_len=32, chunk_tokens=4)


class Handed:
    """Notes what is handed over."""

    def __init__(self):
        stores = NotedStores()
        self.calls = []
        scheduler = Scheduler(CONFIG, COST, stores)
        self.store = stores.store
        self.session = EngineSession(scheduler, Sevens(), report_kv=self.report)

    def report(self, deleted):
        changes = self.store.take_changes()
        if changes is not None:
            self.calls.append(("changes", changes))
        if deleted:
            self.calls.append(("deleted", None))


def test_a_removal_is_handed_over_before_a_deletion_is_answered():
    handed = Handed()
    session = handed.session
    session.add(request(1, 12, conversation="a"))
    play(session)
    stored = {key: tier for _, changes in handed.calls for key, tier in changes.tiers}
    assert list(stored.values()) == [0] * 3
    log = session.scheduler.conversations.tokens("a")
    handed.calls.clear()
    session.forget(Forget("a", log, 0, b""), lambda wholly: handed.calls.append(("answer", wholly)))
    while not handed.calls or handed.calls[-1][0] != "answer":
        session.step()
    assert [name for name, _ in handed.calls] == ["changes", "deleted", "answer"]
    assert dict(handed.calls[0][1].tiers) == dict.fromkeys(stored, NO_SLOT)


def test_the_tokens_of_each_chunk_are_handed_over_with_it():
    handed = Handed()
    session = handed.session
    session.add(request(1, 12, salt=b"given:s"))
    play(session)
    log = array("i", [1, 2, 3, *[7] * 12])
    joined, *runs = [run for _, changes in handed.calls for run in changes.names]
    assert (joined.first, joined.end) == (0, 0)
    assert [(run.first, run.end) for run in runs] == [(0, 1), (1, 2), (2, 3)]
    for run in (joined, *runs):
        assert (run.tokens[:12], run.salt) == (log[:12], b"given:s")
    tiers = [key for _, changes in handed.calls for key, _ in changes.tiers]
    assert tiers == runs[-1].keys

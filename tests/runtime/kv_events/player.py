"""Random conversations on the real scheduler, whose residency changes are taken, and the truth that
routers should know."""

from __future__ import annotations

from pensieve.runtime.cache_salt import GIVEN, given_salt
from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.chunk_keys import NO_KEY
from pensieve.scheduler.kv.noted_store import NotedStores, fastest_tier
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import LOCAL_TIERS

from ...scheduler.driver import Driver
from ...scheduler.test_states import StateDriver

SALTED = {"c0": b"one", "c1": b"two", "c2": b"two"}


class Player(Driver):
    """Salts are given ones here, and some conversations have their own.

    store       of the present life
    on_start    called with each life's store
    """

    def __init__(self, seed, on_start=lambda store: None, **settings):
        self._on_start = on_start
        super().__init__(seed, **({"truncates": 0.0} | settings))

    def new_scheduler(self):
        stores = NotedStores()
        scheduler = Scheduler(self.config, self._cost, stores)
        self.store = stores.store
        self._on_start(self.store)
        return scheduler

    def submit(self, prompt, max_tokens=4, conversation=None, **fields):
        if conversation in SALTED or fields.get("salt"):
            fields["salt"] = GIVEN + SALTED.get(conversation, b"other")
        return super().submit(prompt, max_tokens, conversation, **fields)

    def truth(self):
        """By conversation: its log, its given salt, and the leading runs of its chunks by tier, as
        in `LlmDDouble.score`."""
        return {
            name: self._runs(name) for name in self.logs if name in self.scheduler.conversations
        }

    def _runs(self, name):
        conversation = self.scheduler.conversations.get(name)
        size = self.config.chunk_tokens
        # as a prompt of all its tokens would have them
        keys = []
        end = len(conversation.keys) * size
        self.scheduler._chunk_keys.extend(keys, 0, conversation.salt, conversation.tokens, end)
        tokens = conversation.tokens[:end]
        tiers = []
        for key in keys:
            chunk = self.store.find(key)
            tier = NO_SLOT if chunk is None else fastest_tier(chunk)
            tiers.append(len(LOCAL_TIERS) if tier == NO_SLOT else tier)
        runs = []
        for tier in LOCAL_TIERS:
            leading = [at for at, there in enumerate(tiers) if there > tier]
            runs.append(leading[0] if leading else len(tiers))
        return tokens.tolist(), given_salt(conversation.salt), tuple(runs)

    def residency(self):
        """By conversation: chunks by tier, as the scheduler reports them."""
        report = self.scheduler.conversations.residency(0, 10**9)
        return {entry.conversation: entry.chunks for entry in report.conversations}


class StatePlayer(Player, StateDriver):
    """The model has recurrent states.

    names   of the present life's chunks, by their keys: the key before it or None, its tokens, and
            the given salt
    """

    def new_scheduler(self):
        self.names = {}
        return super().new_scheduler()

    def note(self, runs):
        size = self.config.chunk_tokens
        for run in runs:
            if run.keys[:1] == [NO_KEY]:
                continue
            for at, key in enumerate(run.keys[: run.end]):
                before = run.keys[at - 1] if at else None
                tokens = tuple(run.tokens[at * size : (at + 1) * size])
                self.names[key] = (before, tokens, given_salt(run.salt))

    def told(self):
        """What is to be told, from all states: tiers by path, as in `LlmDDouble.paths`."""
        tiers = {}
        for key, state in self.scheduler._states.kept.by_key.items():
            keys = []
            while key in self.names:
                keys.insert(0, key)
                key = self.names[key][0]
            if key is not None or len(keys) * self.config.chunk_tokens != state.end:
                continue
            chunks = [self.store.find(one) for one in keys]
            there = [NO_SLOT if chunk is None else fastest_tier(chunk) for chunk in chunks]
            if NO_SLOT in there:
                continue
            path = (self.names[keys[0]][2],)
            for at, one in enumerate(keys, 1):
                path = (*path, self.names[one][1])
                tiers[path] = max(there[:at])
        return tiers

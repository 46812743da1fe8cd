"""The publisher's batches, byte by byte, and their repetition."""

from __future__ import annotations

import logging
import threading
import time
from array import array

import msgspec
import pytest
import zmq

from pensieve.runtime.kv_events import publisher as publisher_module
from pensieve.runtime.kv_events.config import KVEventsConfig, read_config
from pensieve.runtime.kv_events.publisher import KVEventPublisher
from pensieve.scheduler.kv.noted_store import ResidencyChanges
from pensieve.scheduler.types import SettingError

from ..fake_loop import eventually
from .routers import DECODER, LlmDDouble
from .test_blocks import GONE, SIZE, run_of

STORED = bytes.fromhex(
    "93cb3ff8000000000000918aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf3c4c8c"
    "6b0482b237cff5fa4746353eee0fb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647398010203"
    "04cd012c060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e61"
    "6d65c0aa63616368655f73616c74a173aa65787472615f6b6579739291a173c000"
)
"""A batch that stores [1, 2, 3, 4], [300, 6, 7, 8] with the salt "s"."""
END = b"\xff" * 8
PATIENCE_MS = 30_000


@pytest.fixture
def opened(monkeypatch):
    """Opens publishers on free ports."""
    monkeypatch.setattr(publisher_module, "BATCH_MS", 2)
    publishers = []

    def open_one(**settings):
        ends = dict(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
        config = KVEventsConfig(True, **(ends | settings))
        publishers.append(KVEventPublisher(config, Changes(), b"", SIZE, clock=lambda: 1.5))
        return publishers[-1]

    yield open_one
    for publisher in publishers:
        publisher.close()


class Changes:
    """A store whose changes the test makes up."""

    def __init__(self):
        self.next = None
        self.left = ResidencyChanges(())

    def take_changes(self):
        taken, self.next = self.next, None
        return taken

    def resident(self):
        return self.left


def put(publisher, changes, deleted=False):
    publisher._store.next = changes
    publisher.report(deleted)


class Subscriber:
    """Reads batches, and asks for their repetition."""

    def __init__(self, publisher):
        self.context = zmq.Context()
        self.batches = self.context.socket(zmq.SUB)
        self.batches.subscribe(b"")
        self.batches.connect(publisher.endpoint)
        self._replay = self.context.socket(zmq.DEALER)
        self._replay.connect(publisher.replay_endpoint)
        for socket in (self.batches, self._replay):
            socket.set_hwm(0)
            socket.rcvtimeo = PATIENCE_MS

    def replay(self, start):
        """Frames of all answers, as llm-d reads them: the topic before the number."""
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])
        answers = []
        while True:
            empty, topic, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return answers
            answers.append((topic, int.from_bytes(number, "big"), payload))

    def wait_for(self, batches):
        """Returns once so many batches are published."""
        until = time.monotonic() + PATIENCE_MS / 1e3
        while time.monotonic() < until:
            answers = self.replay(0)
            if len(answers) >= batches:
                return answers
        raise AssertionError(f"only {len(answers)} batches")

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def subscribed():
    subscribers = []

    def subscribe(publisher):
        subscribers.append(Subscriber(publisher))
        return subscribers[-1]

    yield subscribe
    for subscriber in subscribers:
        subscriber.close()


def stored(run, tier=0):
    return ResidencyChanges([(key, tier) for key in run.keys], [run])


def test_the_bytes_are_those_of_vllm(opened, subscribed):
    publisher = opened(topic="kv@a:1@m")
    subscriber = subscribed(publisher)
    run = run_of([1, 2, 3, 4, 300, 6, 7, 8], b"given:s")
    put(publisher, stored(run))
    first, second = subscriber.wait_for(2)
    assert first == (
        b"kv@a:1@m",
        0,
        bytes.fromhex("93cb3ff8000000000000") + b"\x91\x81\xa4type\xb0AllBlocksCleared" + b"\x00",
    )
    assert second[:2] == (b"kv@a:1@m", 1)
    assert second[2] == STORED
    batch = DECODER.decode(second[2])
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    (event,) = batch.events
    assert event.token_ids == [1, 2, 3, 4, 300, 6, 7, 8] and event.medium == "GPU"
    assert event.block_hashes == [int.from_bytes(key[-8:], "big") for key in run.keys]
    assert (event.extra_keys, event.cache_salt, event.parent_block_hash) == (
        [["s"], None],
        "s",
        None,
    )


def test_both_layouts_of_a_replay_can_be_read(opened, subscribed):
    """Older readers count from the end; newer ones expect the topic."""
    publisher = opened(topic="t")
    subscriber = subscribed(publisher)
    subscriber.wait_for(1)
    with zmq.Context() as context, context.socket(zmq.REQ) as request:
        request.connect(publisher.replay_endpoint)
        request.rcvtimeo = PATIENCE_MS
        request.send((0).to_bytes(8, "big"))
        *topic, number, payload = request.recv_multipart()
        assert topic == [b"t"] and number == bytes(8)
        assert isinstance(DECODER.decode(payload).events[0], msgspec.Struct)


def test_batches_that_are_not_kept_are_replaced_by_all_that_is_stored(opened, subscribed):
    publisher = opened(buffer_steps=3)
    subscriber = subscribed(publisher)
    runs = [run_of(range(100 * at, 100 * at + 12)) for at in range(8)]
    batches = 1
    for at, run in enumerate(runs):
        changes = stored(run)
        if at >= 4:
            changes.tiers.extend((key, GONE) for key in runs[at - 4].keys)
        put(publisher, changes)
        batches += 1
        subscriber.wait_for(batches)
    answers = subscriber.replay(2)
    assert [number for _, number, _ in answers] == list(range(2, batches))
    assert [len(DECODER.decode(payload).events) for _, _, payload in answers[1:]] == [0] * 6
    kept = subscriber.replay(batches - 2)
    assert [len(DECODER.decode(payload).events) for _, _, payload in kept] == [2, 2]
    assert subscriber.replay(batches) == []
    router = LlmDDouble()
    for _, number, payload in subscriber.replay(0):
        router.take(number, payload)
    expected = [(0, 0, 0)] * 4 + [(3, 3, 3)] * 4
    assert [router.score(run.tokens.tolist(), SIZE) for run in runs] == expected


def test_no_more_bytes_are_kept_than_fit(opened, subscribed, monkeypatch):
    monkeypatch.setattr(publisher_module, "KEPT_BYTES", 3 * len(STORED))
    publisher = opened()
    subscriber = subscribed(publisher)
    for batches in range(2, 9):
        put(publisher, stored(run_of(range(100 * batches, 100 * batches + 8), b"given:s")))
        subscriber.wait_for(batches)
        assert publisher._kept_bytes == sum(len(payload) for _, payload in publisher._kept)
    assert [number for number, _ in publisher._kept] == [6, 7]
    put(publisher, None, deleted=True)
    put(publisher, stored(run_of(range(8))))
    subscriber.wait_for(9)
    assert [number for number, _ in publisher._kept] == [8]
    assert publisher._kept_bytes == len(publisher._kept[0][1])


def test_no_answer_is_lost_of_a_replay_of_many_batches(opened, subscribed):
    publisher = opened()
    subscriber = subscribed(publisher)
    subscriber.wait_for(1)
    publisher._number = 20_000
    publisher._kept.clear()
    assert [number for _, number, _ in subscriber.replay(0)] == list(range(20_000))


def test_a_router_that_does_not_read_holds_up_nothing(opened, subscribed):
    """It asks twice for more than its socket takes."""
    publisher = opened()
    subscriber = subscribed(publisher)
    subscriber.batches.subscribe(b"")
    subscriber.wait_for(1)
    publisher._number = 10_000_000
    publisher._kept.clear()
    stuck = subscribed(publisher)
    eventually(lambda: not publisher._answers)  # the other answer's end was read before it is gone
    for _ in range(2):
        stuck._replay.send_multipart([b"", bytes(8)])
    eventually(lambda: publisher._answers)
    tier = 0
    while not subscriber.batches.poll(20):  # until the subscription has arrived
        tier = 1 - tier
        put(publisher, stored(run_of(range(8)), tier))
    assert len(publisher._answers) == 1
    publisher._closing.set()
    publisher._thread.join()
    assert publisher._answers, "the answer has not ended"


def test_what_is_forgotten_during_an_answer_is_not_in_its_rest(opened, subscribed):
    publisher = opened()
    subscriber = subscribed(publisher)
    secret, other = run_of([77_777] * 8), run_of(range(8))
    for batches, run in enumerate((other, secret), 2):
        put(publisher, stored(run))
        subscriber.wait_for(batches)
    answer = publisher._batches(0)
    router = LlmDDouble()
    router.take(*next(answer))
    put(publisher, ResidencyChanges([(key, GONE) for key in secret.keys]), deleted=True)
    subscriber.wait_for(4)
    rest = list(answer)
    assert [number for number, _ in rest] == [1, 2, 3]
    for number, payload in rest:
        assert msgspec.msgpack.encode(77_777) not in payload
        router.take(number, payload)
    assert router.score(list(range(8)), SIZE) == (2, 2, 2)


def test_a_full_queue_starts_over(opened, subscribed, monkeypatch):
    publisher = opened(max_queue_size=2)
    subscriber = subscribed(publisher)
    subscriber.wait_for(1)
    first, second, third = (run_of(range(at, at + 8)) for at in (0, 100, 200))
    put(publisher, stored(first))
    subscriber.wait_for(2)
    busy = threading.Event()
    monkeypatch.setattr(publisher, "_take", busy.set)  # the thread is busy
    assert busy.wait(30), "it has left the old one"
    put(publisher, stored(second))
    put(publisher, stored(third))
    assert publisher.counters().queue_batches == 2
    publisher._store.left = ResidencyChanges([(first.keys[0], 1), (third.keys[0], 0)])
    put(publisher, ResidencyChanges([(first.keys[0], 1)]))
    assert publisher.counters().queue_batches == 1
    monkeypatch.undo()
    monkeypatch.setattr(publisher_module, "BATCH_MS", 2)
    until = time.monotonic() + 30
    while not publisher.counters().resets and time.monotonic() < until:
        time.sleep(0.001)
    router = LlmDDouble()
    for _, number, payload in subscriber.replay(0):
        router.take(number, payload)
    assert router.score(list(range(8)), SIZE) == (0, 1, 1)
    # its tokens were lost: it is told when a prompt names it
    assert router.score(list(range(200, 208)), SIZE) == (0, 0, 0)
    counters = publisher.counters()
    assert (counters.resets, counters.cleared, counters.queue_batches) == (1, 2, 0)
    put(publisher, ResidencyChanges([], [third]))
    subscriber.wait_for(4)
    for _, number, payload in subscriber.replay(3):
        router.take(number, payload)
    assert router.score(list(range(200, 208)), SIZE) == (1, 1, 1)


def test_a_publisher_that_breaks_says_so_and_costs_nothing_more(opened, monkeypatch, caplog):
    publisher = opened(max_queue_size=2)
    monkeypatch.setattr(publisher._blocks, "apply", {}.__getitem__)
    monkeypatch.setattr(publisher._store, "resident", None)  # not to be called
    with caplog.at_level(logging.ERROR):
        put(publisher, stored(run_of(range(8))))
        publisher._thread.join(30)
    assert "KV events have ended" in caplog.text
    for _ in range(5):
        put(publisher, stored(run_of(range(8))), deleted=True)
    assert publisher._store.next is None, "the store does not collect changes"
    assert publisher.counters().queue_batches == 0


@pytest.mark.parametrize("answered", [True, False])
def test_the_tokens_of_a_deleted_conversation_are_not_repeated(opened, subscribed, answered):
    publisher = opened()
    subscriber = subscribed(publisher)
    secret, other = run_of([77_777] * 8), run_of(range(8))
    put(publisher, stored(secret))
    put(publisher, stored(other))
    subscriber.wait_for(2)
    gone = ResidencyChanges([(key, GONE) for key in secret.keys], deleted=not answered)
    put(publisher, gone, deleted=answered)
    needle = msgspec.msgpack.encode(77_777)
    until = time.monotonic() + 30
    while any(needle in payload for _, _, payload in subscriber.replay(0)):
        assert time.monotonic() < until
    router = LlmDDouble()
    for _, number, payload in subscriber.replay(0):
        router.take(number, payload)
    assert router.score(list(range(8)), SIZE) == (2, 2, 2)


def test_a_request_without_a_number_is_passed_over(opened, subscribed, caplog):
    publisher = opened()
    subscriber = subscribed(publisher)
    with caplog.at_level(logging.WARNING):
        subscriber._replay.send_multipart([b"", b"12"])
        subscriber._replay.send_multipart([b""])
        assert subscriber.replay(0)
    assert "has no number" in caplog.text


def test_what_is_put_before_the_end_is_published(opened):
    publisher = opened(replay_endpoint=None)
    assert publisher.replay_endpoint is None
    with zmq.Context() as context, context.socket(zmq.SUB) as batches:
        batches.subscribe(b"")
        batches.rcvtimeo = PATIENCE_MS
        batches.connect(publisher.endpoint)
        run = run_of(range(8))
        tier = 0
        while not batches.poll(20):  # until the subscription has arrived
            tier = 1 - tier
            put(publisher, stored(run, tier))
        last = [*range(100, 108)]
        put(publisher, stored(run_of(last)))
        publisher._closing.set()
        published = []
        while last not in [getattr(event, "token_ids", None) for event in published]:
            published = DECODER.decode(batches.recv_multipart()[2]).events


def test_an_address_in_use_is_a_wrong_setting(opened):
    publisher = opened()
    with pytest.raises(SettingError, match="cannot bind tcp"):
        opened(endpoint=publisher.endpoint)
    with pytest.raises(SettingError, match="cannot bind nonsense"):
        opened(replay_endpoint="nonsense")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"enable": true}', "there is no field 'enable'"),
        ('{"endpiont": "tcp://*:1"}', "did you mean endpoint?"),
        ('{"hwm": 0}', "hwm must be a number of at least 1, not 0"),
        ('{"max_queue_size": 99}', "max_queue_size must be at least 100"),
        ('{"hwm": true}', "hwm must be a number"),
        ('{"topic": 1}', "topic must be a text"),
        ('{"replay_endpoint": 1}', "replay_endpoint must be a text or null"),
        ('{"enable_kv_cache_events": 1}', "must be true or false"),
        ('{"publisher": "kafka"}', "publisher must be one of zmq, null"),
    ],
)
def test_a_wrong_configuration_is_named(text, message):
    with pytest.raises(SettingError, match=message) as refused:
        read_config(text)
    assert refused.value.setting == "kv_events_config"


def test_configurations():
    assert read_config("{}") is None
    assert read_config('{"enable_kv_cache_events": true, "publisher": "null"}') is None
    config = read_config('{"enable_kv_cache_events": true, "topic": "kv"}')
    assert config == KVEventsConfig(True, topic="kv")
    assert config.endpoint.startswith("tcp://127.0.0.1:"), "tokens do not leave the machine"


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("pensieve.runtime.kv_events.config.PACKAGES", ("zmq", "no_such_package"))
    with pytest.raises(SettingError, match=r"needs no_such_package: pip install 'pensieve\[events"):
        read_config('{"enable_kv_cache_events": true}')
    assert read_config("{}") is None


def test_arrays_of_tokens_are_those_of_the_scheduler():
    """Blocks keep tokens as bytes of them."""
    assert array("i").itemsize == 4

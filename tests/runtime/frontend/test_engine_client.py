"""The HTTP process's messages over its pipe; the test holds the loop's end."""

from __future__ import annotations

import asyncio
import multiprocessing
from array import array
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import pytest

from pensieve.runtime.counters import KVCounters
from pensieve.runtime.frontend.engine_client import ClientGone, EngineClient
from pensieve.runtime.messages import Abort, Drain, Fatal, Finish, Look, Submit
from pensieve.scheduler.kv.stats import SchedulerStats
from pensieve.scheduler.types import (
    Applied,
    ConversationKV,
    ErrorKind,
    FinishReason,
    Request,
    RequestError,
    RequestId,
    Residency,
    RowResult,
    Usage,
)

from ..fake_loop import step_message
from ..observe.test_metrics import samples


def run(work: Callable[[EngineClient, Connection], Awaitable[None]]) -> None:
    """Runs `work` over a client and the loop's end of its pipe; both threads of the client end with
    it."""

    async def main() -> None:
        there, here = multiprocessing.Pipe()
        client = EngineClient(there)
        try:
            await work(client, here)
        finally:
            here.close()
            await client.closed.wait()

    asyncio.run(main())


def request(client: EngineClient, confirm: bool = False, prompt: int = 3) -> Request:
    return Request(
        id=client.new_id(), prompt=array("i", [1] * prompt), max_tokens=9, confirm=confirm
    )


def test_several_tokens_of_a_request_are_one_output_in_their_order() -> None:
    one, other = RequestId(1), RequestId(2)
    news = Applied(array("q", [one, one, other, other]), array("i", [6, 7, 5, 8]))
    assert list(news.results()) == [RowResult(other, (5, 8)), RowResult(one, (6, 7))]


def test_counts_and_times_of_a_request() -> None:
    async def work(client: EngineClient, here: Connection) -> None:
        one, other = request(client), request(client)
        stream = client.submit([one, other], arrived=0.0)
        stats = SchedulerStats(running=2)
        usage = Usage(gpu=2, new=1)
        here.send(
            step_message(RowResult(one.id, (5,), None, usage), stats=stats, copied=KVCounters(1, 2))
        )
        here.send(step_message(RowResult(one.id, (6,))))
        here.send(step_message(RowResult(one.id, (7,), FinishReason.STOP)))
        here.send(step_message(RowResult(other.id, error=RequestError(ErrorKind.TOO_MANY, "full"))))
        here.close()
        await client.closed.wait()
        assert [output.tokens for output in await stream.next()] == [(5,), (6,), (7,)]
        with pytest.raises(RequestError, match="full"):
            await stream.next()
        values = samples(client.metrics)
        assert values["pensieve:generation_tokens_total"] == 3
        assert values["pensieve:time_to_first_token_seconds_count"] == 1
        assert values["pensieve:inter_token_latency_seconds_count"] == 2
        assert values['pensieve:prompt_tokens_total{source="gpu"}'] == 2
        assert values['pensieve:requests_total{finish="stop"}'] == 1
        assert values['pensieve:requests_total{finish="refused"}'] == 1
        assert values["pensieve:num_requests_running"] == 2  # the latest message's value
        assert values['pensieve:kv_copied_bytes_total{direction="swap_out"}'] == 2

    run(work)


def test_a_first_token_is_told_before_those_of_rows_that_generate() -> None:
    """A plan has the prompts last; their clients have waited the longest."""

    async def work(client: EngineClient, here: Connection) -> None:
        old, new = request(client), request(client)
        streams = {
            each_request.id: client.submit([each_request], arrived=0.0)
            for each_request in (old, new)
        }
        told: list[int] = []

        async def hear(number: int) -> None:
            await streams[number].next()
            told.append(number)

        here.send(step_message(RowResult(old.id, (5,))))
        await hear(old.id)
        waiting = asyncio.gather(hear(old.id), hear(new.id))
        await asyncio.sleep(0)
        here.send(
            step_message(RowResult(old.id, (6,)), RowResult(new.id, (7,), usage=Usage(new=3)))
        )
        await waiting
        assert told == [old.id, new.id, old.id]

    run(work)


@pytest.mark.parametrize(
    ("confirm", "ended", "finished", "expected"),
    [
        (False, False, False, [Abort]),
        (False, True, False, []),
        (True, False, False, [Abort]),
        # ended, but its length was never confirmed: the turn is not committed
        (True, True, False, [Abort]),
        (True, False, True, [Finish]),
        (True, True, True, [Finish]),
    ],
)
def test_closing_aborts_what_is_not_settled(
    confirm: bool, ended: bool, finished: bool, expected: list[type]
) -> None:
    async def work(client: EngineClient, here: Connection) -> None:
        submitted, barrier = request(client, confirm), request(client)
        stream = client.submit([submitted], arrived=0.0)
        if ended:
            here.send(step_message(RowResult(submitted.id, (5,), FinishReason.LENGTH)))
            await stream.next()
        if finished:
            stream.finish(submitted.id, 1)
        stream.hang_up()
        with pytest.raises(ClientGone):
            await stream.next()
        stream.close()
        stream.close()
        client.submit([barrier], arrived=0.0)
        assert here.recv() == [Submit(submitted)]
        heard = []
        while (message := await asyncio.to_thread(here.recv)) != [Submit(barrier)]:
            heard.append(message)
        assert [type(message) for message in heard] == expected
        # It was under way when the request was aborted, and is ignored.
        here.send(step_message(RowResult(submitted.id, (6,))))

    run(work)


def test_a_reply_may_end_in_the_tokens_before_a_refusal() -> None:
    """A grammar allows no next token after the ones that complete a stop string. Both messages are
    here at once."""

    async def work(client: EngineClient, here: Connection) -> None:
        submitted = request(client, confirm=True)
        stream = client.submit([submitted], arrived=0.0)
        here.send(step_message(RowResult(submitted.id, (5,))))
        here.send(
            step_message(RowResult(submitted.id, error=RequestError(ErrorKind.INTERNAL, "stuck")))
        )
        await stream.next()
        stream.finish(submitted.id, 1)
        with pytest.raises(RequestError, match="stuck"):
            await stream.next()
        stream.close()

    run(work)


def test_calls_for_the_list_at_the_same_time_share_one_look() -> None:
    """Each look takes the loop a millisecond or two, in which no step is planned."""

    async def work(client: EngineClient, here: Connection) -> None:
        looks = 0

        def answer() -> None:
            nonlocal looks
            while isinstance(here.recv(), Look):
                looks += 1
                here.send(Residency(32, [ConversationKV(f"c{looks}", {"gpu": 1})], 0))

        answering = asyncio.create_task(asyncio.to_thread(answer))
        await asyncio.gather(*(client.refresh_all() for _ in range(50)))
        together = looks
        await client.refresh_all()  # a later call does not get an earlier answer
        client._outbox.put(Drain(0.0))
        await answering
        assert (together, looks) == (2, 3), (
            "one for the first call, one for all that came meanwhile"
        )
        assert client.kv_map.find("c3") is not None

    run(work)


def test_a_loop_that_does_not_listen_blocks_no_request() -> None:
    """Many long prompts exceed any pipe's buffer."""

    async def work(client: EngineClient, here: Connection) -> None:
        requests = [request(client, prompt=100_000) for _ in range(20)]
        streams = [client.submit([one], arrived=0.0) for one in requests]
        here.send(step_message(RowResult(requests[0].id, (5,), FinishReason.STOP)))
        assert len(await streams[0].next()) == 1
        for one in requests:
            assert await asyncio.to_thread(here.recv) == [Submit(one)]

    run(work)


def test_the_first_reason_counts_and_nothing_is_accepted_behind_it() -> None:
    async def work(client: EngineClient, here: Connection) -> None:
        stream = client.submit([request(client)], arrived=0.0)
        here.send(Fatal("two owners of one slot"))
        with pytest.raises(RequestError, match="two owners") as failed:
            await stream.next()
        await client.closed.wait()
        assert failed.value.kind == ErrorKind.INTERNAL and not client.healthy
        with pytest.raises(RequestError, match="two owners"):
            client.submit([request(client)], arrived=0.0)

    run(work)


def test_waiting_messages_are_delivered_together_and_without_a_task() -> None:
    async def work(client: EngineClient, here: Connection) -> None:
        one, other = request(client), request(client)
        stream = client.submit([one, other], arrived=0.0)
        taken: list[list[RowResult]] = []

        def take(outputs: list[RowResult]) -> bool:
            taken.append(outputs)
            return sum(output.finish is not None for output in outputs) == 2

        for token in (5, 6):
            here.send(step_message(RowResult(one.id, (token,)), RowResult(other.id, (token,))))
        ends = [RowResult(own.id, (7,), FinishReason.STOP) for own in (one, other)]
        here.send(step_message(*ends))
        here.close()
        reading = asyncio.create_task(stream.each(take))
        await client.closed.wait()
        await reading
        results = [output for outputs in taken for output in outputs]
        assert [output.tokens for output in results] == [(5,), (5,), (6,), (6,), (7,), (7,)]
        assert len(taken) <= 3

    run(work)


def test_results_that_wait_in_a_stream_are_taken_at_once() -> None:
    async def work(client: EngineClient, here: Connection) -> None:
        own = request(client)
        stream = client.submit([own], arrived=0.0)
        for token in (5, 6):
            stream.push(RowResult(own.id, (token,)))
        stream.push(RowResult(own.id, (7,), FinishReason.STOP))
        taken: list[list[RowResult]] = []
        await stream.each(lambda outputs: not taken.append(outputs))  # type: ignore[func-returns-value]
        assert [[output.tokens for output in outputs] for outputs in taken] == [[(5,), (6,), (7,)]]

    run(work)


def test_an_error_comes_behind_the_results_before_it() -> None:
    async def work(client: EngineClient, here: Connection) -> None:
        own = request(client)
        stream = client.submit([own], arrived=0.0)
        taken: list[RowResult] = []
        here.send(step_message(RowResult(own.id, (5,))))
        here.send(Fatal("the books disagree"))
        with pytest.raises(RequestError, match="the books disagree"):
            await stream.each(lambda outputs: bool(taken.extend(outputs)))  # type: ignore[func-returns-value]
        assert [output.tokens for output in taken] == [(5,)]

    run(work)


@pytest.mark.parametrize(
    ("mistake", "raised"), [(KeyError("a mistake"), KeyError), (StopIteration(), RuntimeError)]
)
def test_a_mistake_in_one_stream_ends_only_that_call(
    mistake: Exception, raised: type[Exception]
) -> None:
    async def work(client: EngineClient, here: Connection) -> None:
        def break_down(outputs: list[RowResult]) -> bool:
            raise mistake

        one, other = request(client), request(client)
        broken = asyncio.create_task(client.submit([one], arrived=0.0).each(break_down))
        whole = asyncio.create_task(client.submit([other], arrived=0.0).each(lambda _: True))
        await asyncio.sleep(0)
        here.send(step_message(RowResult(one.id, (5,)), RowResult(other.id, (5,))))
        await whole
        with pytest.raises(raised):
            await broken

    run(work)


def test_hanging_up_ends_a_call_that_waits() -> None:
    async def work(client: EngineClient, here: Connection) -> None:
        stream = client.submit([request(client)], arrived=0.0)
        waiting = asyncio.create_task(stream.each(lambda _: False))
        await asyncio.sleep(0)
        stream.hang_up()
        with pytest.raises(ClientGone):
            await waiting

    run(work)

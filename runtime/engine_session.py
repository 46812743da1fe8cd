"""An engine in use: requests go in, the results of rows come out. The server, `LLM` and the
benchmarks stand on it.

add, abort, finish   requests
change, forget       conversations
step                 one pass of the loop; returns the results of rows
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty
from typing import Any

from ..scheduler.scheduler import Scheduler
from ..scheduler.step_timing import StepTiming
from ..scheduler.types import (
    Applied,
    Erasure,
    ErrorKind,
    InvariantError,
    Request,
    RequestError,
    RequestId,
    RowResult,
)
from .executor import Executor
from .inbox import Inbox
from .loop import EngineLoop
from .messages import Forget, Fork, Keep
from .observe.loop_stats import LoopCounters

LONGEST_SLEEP_S = 1.0
TIMED_OUT = "the server is busy: the request has waited too long in the queue"


def no_report(deleted: bool) -> None:
    """There are no KV events."""


class EngineSession:
    """Scheduler, executor and loop. One thread uses it; it also makes what happens between two
    steps into results.

    A request that cannot be served has a result with its error.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        counters: LoopCounters | None = None,
        timing: StepTiming | None = None,
        *,
        in_pieces: bool = False,
        wake: Callable[[], None] | None = None,
        report_kv: Callable[[bool], None] = no_report,
    ):
        """counters, timing  as in `EngineLoop`
        in_pieces   long prompts are prepared in pieces, so that the rows that run do not wait
        wake        called, by another thread, when `take_results` or `step` has a request to add
        report_kv   called after each step, and with True before a deletion is answered
        """
        self.scheduler = scheduler
        self.executor = executor
        self._loop = EngineLoop(scheduler, executor, counters, timing)
        self.clock, self.counters = self._loop.clock, self._loop.counters
        self._enqueue = scheduler.submit if in_pieces else scheduler.add
        self._wake = wake
        self._report_kv = report_kv
        self._compiling: dict[RequestId, tuple[Request, Future[Any]]] = {}  # not in the queue yet
        self._compiled: Inbox[RequestId] = Inbox()
        self._results: list[RowResult] = []  # since the last step
        self._erasing: deque[Callable[[Erasure], None]] = deque()

    # -- requests

    def add(self, request: Request) -> None:
        """Queues the request. If it has a grammar, another thread compiles it first, which takes up
        to a second."""
        grammar = request.sampling.grammar
        compiling = self.executor.begin_grammar(grammar) if grammar is not None else None
        if compiling is None:
            self._add(request)
            return
        self._compiling[request.id] = request, compiling
        compiling.add_done_callback(lambda _: self._note_compiled(request.id))

    def abort(self, request: RequestId) -> None:
        """Ends the request without committing its turn. No result of it follows. It may have ended
        already."""
        self._compiling.pop(request, None)
        self.scheduler.abort(request, self.clock())

    def finish(self, request: RequestId, tokens: int) -> None:
        """Cuts the reply to its first `tokens` tokens. Its end is a result, unless it has ended
        already."""
        ended = self.scheduler.finish(request, tokens, self.clock())
        if ended is not None:
            self._results.append(ended)

    def open_requests(self) -> list[RequestId]:
        """Requests that have neither ended nor been aborted."""
        return [*self._compiling, *self.scheduler.open_requests()]

    # -- conversations

    def change(self, message: Fork | Keep) -> None:
        """Applies the change if the scheduler knows the conversation. The history store knows all
        conversations. The scheduler knows only the conversations that have been active since the
        start."""
        conversations = self.scheduler.conversations
        now = self.clock()
        if message.conversation not in conversations:
            return
        match message:
            case Fork(conversation, new):
                if new not in conversations:
                    conversations.fork(conversation, new, now)
            case Keep(conversation, ttl, pinned):
                conversations.keep(conversation, ttl, now + pinned, now)

    def forget(self, message: Forget, answer: Callable[[Erasure], None]) -> None:
        """Begins to erase the conversation's own KV. A conversation that was not active since the
        start may also have records on disk. `answer` is called at the end, by this call or by a
        step, as `Erased` describes."""
        conversation, tokens, shared, salt, kept = message
        conversations = self.scheduler.conversations
        self._erasing.append(answer)
        if conversation is None or conversation not in conversations:
            self.scheduler.lower.erase(self.scheduler.lower.keys(tokens, salt, shared))
        # When turns ran concurrently, the turn that ended last here may not be the last in the
        # history file.
        elif kept:
            conversations.cut(conversation, kept, shared, tokens, salt, self.clock())
        else:
            conversations.delete(conversation, shared, tokens, salt)
        self._answer_erased()

    # -- steps

    def step(self) -> Applied | None:
        """Makes one pass of the loop. Returns the results since the last one, or None if there are
        none: a step was launched, or there is nothing to do. Raises as `EngineLoop.step`."""
        before = tuple(self.take_results())
        applied = self._loop.step()
        self._report_kv(False)  # results are applied: a failed step's copies are never reported
        self._answer_erased()  # also without a result: each plan looks up a part of a long log
        if before:
            applied = applied or Applied()
            return applied._replace(rows=(*before, *applied.rows))
        return applied

    def take_results(self) -> list[RowResult]:
        """Returns the results that have come since the last step. Adds requests whose grammars are
        compiled."""
        while not self._compiled.empty():
            self._add_compiled(self._compiled.get())
        for request in self.scheduler.time_out(self.clock()):
            self._results.append(
                RowResult(request, error=RequestError(ErrorKind.UNAVAILABLE, TIMED_OUT))
            )
        results = self._results
        self._results = []
        return results

    @property
    def idle(self) -> bool:
        """True if nothing is in flight. If `step` just returned None, there was nothing to do."""
        return self._loop.idle

    def sleep(self) -> None:
        """Sleeps until a grammar is compiled or the scheduler's next time has come, a second at
        most. Called when `step` had nothing to do. Raises InvariantError if neither is awaited."""
        left = self.scheduler.wake_at - self.clock()
        if left == float("inf") and not self._compiling:
            raise InvariantError("requests are open and nothing is left to do")
        with contextlib.suppress(Empty):
            self._add_compiled(self._compiled.get(timeout=min(max(0.0, left), LONGEST_SLEEP_S)))

    def spill(self, seconds: float) -> None:
        """Makes steps until all KV for the disk is spilled, for at most `seconds`. No request is
        open."""
        until = self.clock() + seconds
        while (
            self.scheduler.lower.unfinished or self.scheduler.in_flight
        ) and self.clock() < until:
            self.step()

    # -- internal

    def _note_compiled(self, request: RequestId) -> None:
        """Called by the compiler's thread."""
        self._compiled.put(request)
        if self._wake is not None:
            self._wake()

    def _add_compiled(self, request: RequestId) -> None:
        if request in self._compiling:  # otherwise it was aborted meanwhile
            waiting, compiling = self._compiling.pop(request)
            self._add(waiting, compiling.result())

    def _add(self, request: Request, compiled: Any = None) -> None:
        try:
            self._enqueue(request, self.clock())
        except RequestError as error:
            self._results.append(RowResult(request.id, error=error))
            return
        if compiled is not None:
            self.executor.keep_grammar(request.id, compiled)

    def _answer_erased(self) -> None:
        for erasure in self.scheduler.lower.take_erased():
            self._report_kv(True)
            self._erasing.popleft()(erasure)

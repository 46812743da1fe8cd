"""The model that Triton Inference Server's python backend runs. For Triton's clients it takes the
HTTP process's place.

    execute -> TritonBody -> Generate -> RequestBuilder -> EngineClient -> engine's process
    -> Reply -> one response for each wake-up

The engine's loop runs in a child process and gets the HTTP process's messages. Triton calls from
its own thread; all other code here runs on an event loop in a separate thread. Bodies, prompts,
histories, stop strings and texts use the HTTP process's classes, so both have the same rules.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import triton_python_backend_utils as triton  # exists within Triton only; filled after this import
from prometheus_client.parser import text_string_to_metric_families

from ...scheduler.types import ErrorKind, RequestError, SettingError
from ..conversations.store import HistoryStore
from ..conversations.turns import TurnManager
from ..frontend.calls import Caller, GenerationCall, answering
from ..frontend.engine_client import ClientGone, EngineClient, OutputStream
from ..frontend.reply import Reply
from ..frontend.request_builder import RequestBuilder
from ..messages import Ready, TritonSettings
from ..observe.logs import configure_logging
from ..text.tokenizer import Tokenizer
from .tensor_sets import TENSOR_SETS
from .tensors import NewPiece, Tensors, TensorSet, TritonBody

log = logging.getLogger(__name__)

# a parameter in config.pbtxt: JSON, the words of the engine's command line
COMMAND = "engine_command"
# another one: the name of a tensor set; older repositories have none
TENSORS = "tensors"
ENDED = "the engine's process has ended with status {}; the log says why"
CANCEL_CHECK_S = 0.1
METRICS_INTERVAL_S = 1.0

Result = TypeVar("Result")


class TritonPythonModel:
    """The class that the backend looks up. One instance serves any number of requests at a time."""

    def initialize(self, args: dict[str, str]) -> None:
        """Starts the engine and waits until it serves. Raises TritonModelException with the
        fault."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._name = args["model_name"]
        self._finalizing = False
        self._process, connection = start_engine(json.loads(parameters[COMMAND]["string_value"]))
        settings, ready = self._greeting(connection), self._greeting(connection)
        assert isinstance(settings, TritonSettings) and isinstance(ready, Ready)
        configure_logging(settings.log_format, settings.log_level)
        self._settings = settings
        kind = parameters.get(TENSORS, {"string_value": "llmapi"})["string_value"]
        tensors = TENSOR_SETS[kind](ready.chunk_tokens)
        self._event_loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._event_loop.run_forever, name="triton-model", daemon=True
        )
        self._thread.start()
        try:
            self._desk = self._run(open_desk(connection, settings, ready, tensors)).result()
        except SettingError as error:
            self._process.kill()
            self._stop()
            raise triton.TritonModelException(str(error)) from error
        # a fault is logged
        self._run(self._unload_without_engine()).add_done_callback(Future.result)

    def is_ready(self) -> bool:
        """Answers Triton's readiness check; only some versions make it."""
        return self._desk.accepting

    def execute(self, requests: Sequence[Any]) -> None:
        """Responses are sent later, through each request's sender."""
        for request in requests:
            # a fault is logged
            self._run(self._desk.answer(request)).add_done_callback(Future.result)

    def finalize(self) -> None:
        """Lets the engine finish its requests within its time limit, then ends it."""
        self._finalizing = True
        self._process.terminate()
        closing = self._run(self._desk.close())
        try:
            self._process.wait(self._settings.end_seconds)
        except subprocess.TimeoutExpired:
            log.error(
                "the engine has not ended after %g s: it is killed", self._settings.end_seconds
            )
            self._process.kill()
        closing.result()
        self._stop()

    async def _unload_without_engine(self) -> None:
        """Makes the model unready if the engine ends by itself, where Triton's mode allows the
        model to be unloaded."""
        await self._desk.engine_ended()
        if self._finalizing:
            return
        try:
            await asyncio.to_thread(triton.unload_model, self._name)
        except triton.TritonModelException as error:
            log.error("the engine has ended, and the model stays loaded: %s", error)

    def _greeting(self, connection: Connection) -> TritonSettings | Ready:
        """Returns one of the two first messages. A text in its place describes a fault."""
        try:
            message: TritonSettings | Ready | str = connection.recv()
        except EOFError:
            message = ENDED.format(self._process.wait())
        if isinstance(message, str):
            raise triton.TritonModelException(message)
        return message

    def _run(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._event_loop)

    def _stop(self) -> None:
        self._event_loop.call_soon_threadsafe(self._event_loop.stop)
        self._thread.join()
        self._event_loop.close()
        self._process.wait()


def start_engine(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts the engine's process and waits until it, or its rank 0, connects to a socket in a
    directory of this user.

    The process logs to this process's log. Raises TritonModelException if it ends first.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pensieve-") as directory,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = str(Path(directory, "engine"))
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen([*command, "--attach", path], stdin=subprocess.DEVNULL)
        end = os.pidfd_open(process.pid)
        wait([listener, end])
        os.close(end)
        if not wait([listener], 0):
            raise triton.TritonModelException(ENDED.format(process.wait()))
        accepted, _ = listener.accept()
        return process, Connection(accepted.detach())


async def open_desk(
    connection: Connection, settings: TritonSettings, ready: Ready, tensors: TensorSet
) -> TritonFrontend:
    """Called on the event loop that runs everything below. SettingError if the histories cannot be
    used."""
    tokenizer = Tokenizer.load(ready.tokenizer) if ready.tokenizer else None
    quota = settings.max_conversations_per_owner
    store = HistoryStore(settings.histories, settings.history_ttl, quota, settings.server)
    return TritonFrontend(EngineClient(connection), ready, tokenizer, store, tensors)


class TritonFrontend:
    """Takes requests, answers them, and ends those whose clients leave. Runs on the event loop."""

    def __init__(
        self,
        client: EngineClient,
        ready: Ready,
        tokenizer: Tokenizer | None,
        store: HistoryStore,
        tensors: TensorSet,
    ):
        self._client = client
        self._tokenizer = tokenizer
        self._ready = ready
        self._tensors = tensors
        self._histories = TurnManager(store, client.tell, client.forget, tokenizer)
        self._histories.expire_in_background()
        self._calls = RequestBuilder(ready, tokenizer, self._histories, client.new_id)
        self._visits: dict[TritonRequest, asyncio.Task[None] | None] = {}
        self._metrics = TritonMetrics()
        self._watches = [
            asyncio.create_task(work()) for work in (self._watch_clients, self._tell_metrics)
        ]
        for watch in self._watches:
            watch.add_done_callback(_log_fault)

    @property
    def accepting(self) -> bool:
        """True if the engine takes new requests. May be called by any thread."""
        return self._client.accepting

    async def engine_ended(self) -> None:
        """Returns when the engine has ended and every open request has been answered."""
        await self._client.closed.wait()

    async def close(self) -> None:
        """Returns after the last output of the engine, which has been told to end."""
        await self.engine_ended()
        # until their turns are committed
        await asyncio.gather(*filter(None, self._visits.values()), return_exceptions=True)
        for watch in self._watches:
            watch.cancel()
        self._metrics.update(self._client.metrics.text())
        await self._histories.close()

    async def answer(self, request: Any) -> None:
        """Answers one request, from its tensors to its final response, also after a failure. Its
        prompts are answered at the same time."""
        visits = TritonRequest.of_each_row(request, self._tensors.batched)
        await asyncio.gather(*map(self._answer, visits))

    async def _answer(self, visit: TritonRequest) -> None:
        self._visits[visit] = asyncio.current_task()
        try:
            if self._asks_to_stop(visit):
                self._cancel(visit.id)
                # TensorRT-LLM's model answers this request like the ones that it ends
                raise ClientGone
            await self._serve(visit)
        except RequestError as error:
            visit.refuse(error.message, ERRORS.get(error.kind, "INTERNAL"))
        except ClientGone:
            visit.refuse("the request was cancelled", "CANCELLED")
        finally:
            del self._visits[visit]
            if not visit.answered:
                visit.refuse("the request failed; the log says why", "INTERNAL")

    async def _serve(self, visit: TritonRequest) -> None:
        body = self._tensors.read(visit.inputs, visit.sequence)
        caller = Caller()  # Triton does not tell its clients apart, and has its own limits
        generate = await self._calls.check_form(body.generate(), caller)
        writer = body.writer(self._ready.model, self._tokenizer)
        call = await self._calls.call(generate, writer, visit.arrived, caller)
        replies: list[Reply] = []
        with answering(call, "", replies, self._client.count_call):
            await self._reply(visit, body, call, replies)

    async def _reply(
        self, visit: TritonRequest, body: TritonBody, call: GenerationCall, replies: list[Reply]
    ) -> None:
        """Fills `replies` with the reply. With `streaming` each wake-up sends one response;
        otherwise there is one."""
        if visit.stopped:  # stopped while its prompt was checked
            raise ClientGone
        (request,) = call.requests
        visit.stream = stream = self._client.submit([request], call.arrived)
        try:
            replies += call.replies(stream, self._tokenizer)
            (reply,) = replies
            text = reply.echoed
            tokens: list[int] = []
            while True:
                for output in await stream.next():
                    piece = reply.add(output)
                    text += piece.text
                    tokens += piece.result.tokens
                if reply.finish is not None:
                    break
                if body.stream and (text or tokens):
                    new = NewPiece(text, tokens, time.perf_counter(), visit.row)
                    visit.send(self._tensors.response(body, call, reply, new))
                    text = ""
                    tokens = []
            new = NewPiece(text, tokens, time.perf_counter(), visit.row)
            await call.commit(replies)
            visit.send(self._tensors.response(body, call, reply, new), final=True)
        finally:
            stream.close()

    def _asks_to_stop(self, visit: TritonRequest) -> bool:
        """True if the request asks to stop others. Raises RequestError (INVALID)."""
        tensor = visit.inputs.get("stop")
        return tensor is not None and self._tensors.value("stop", tensor)

    def _cancel(self, name: str) -> None:
        """Ends the requests of this id. Raises RequestError (INVALID) if there is no id."""
        if not name:
            raise RequestError(
                ErrorKind.INVALID, "stop needs a request id: that of the request to stop", "stop"
            )
        for visit in self._visits:
            if visit.id == name:
                visit.stop()

    async def _watch_clients(self) -> None:
        while True:
            await asyncio.sleep(CANCEL_CHECK_S)
            for visit in self._visits:
                if visit.cancelled:
                    visit.stop()

    async def _tell_metrics(self) -> None:
        while True:
            self._client.metrics.histories_healthy = self._histories.fault is None
            self._metrics.update(self._client.metrics.text())
            await asyncio.sleep(METRICS_INTERVAL_S)


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has ended by a mistake of this program", task.get_name(), exc_info=error)


ERRORS = {
    ErrorKind.INVALID: "INVALID_ARG",
    ErrorKind.NOT_FOUND: "NOT_FOUND",
    ErrorKind.CONFLICT: "UNAVAILABLE",
    ErrorKind.TOO_MANY: "UNAVAILABLE",
    ErrorKind.UNAVAILABLE: "UNAVAILABLE",
}
"""By the kind of a RequestError; others are INTERNAL."""


class RowSender:
    """Sends the responses of a request. The request ends with the last one of its last open row."""

    def __init__(self, sender: Any, rows: int):
        self._sender = sender
        self._open_rows = rows

    def send(self, response: Any, last: bool) -> None:
        """`last`: of its row."""
        self._open_rows -= last
        final = last and self._open_rows == 0
        flags = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)

    @property
    def cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class TritonRequest:
    """A prompt of a request from Triton, with the sender of its responses. `arrived`:
    time.perf_counter's seconds. `row`: its number in the request's batch, None: there is no
    dimension for a batch."""

    def __init__(self, request: Any, sender: RowSender, row: int | None):
        self.arrived = time.perf_counter()
        self.id: str = request.request_id()
        self.sequence = str(request.correlation_id() or "")
        self.row = row or 0
        self._request = request
        self._batched = row is not None
        self.answered = self.stopped = False
        self.stream: OutputStream | None = None  # set once the engine has it
        self._sender = sender

    @classmethod
    def of_each_row(cls, request: Any, batched: bool) -> list[TritonRequest]:
        """Every input has the same number of rows. A batch may have none, or no input: then it is
        answered as one row without inputs."""
        inputs = request.inputs()
        count = max(1, inputs[0].shape()[0]) if batched and inputs else 1
        sender = RowSender(request.get_response_sender(), count)
        return [cls(request, sender, row if batched else None) for row in range(count)]

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The input tensors by name. Exceptions of Triton's tensors are passed on."""
        tensors = {tensor.name(): tensor.as_numpy() for tensor in self._request.inputs()}
        if not self._batched:
            return tensors
        return {name: values[self.row] for name, values in tensors.items() if len(values)}

    @property
    def cancelled(self) -> bool:
        """True if its client is gone, or has cancelled the request."""
        return self._sender.cancelled

    def stop(self) -> None:
        """Cancels the request, now or before it is sent to the engine."""
        self.stopped = True
        if self.stream is not None:
            self.stream.hang_up()

    def send(self, tensors: Tensors, *, final: bool = False) -> None:
        self._send([triton.Tensor(name, value) for name, value in tensors.items()], None, final)

    def refuse(self, message: str, code: str) -> None:
        """`code`: the name of a code of TritonError."""
        self._send([], triton.TritonError(message, getattr(triton.TritonError, code)), True)

    def _send(self, tensors: list[Any], error: Any, last: bool) -> None:
        self._sender.send(triton.InferenceResponse(tensors, error), last)
        self.answered |= last


class TritonMetrics:
    """Our metrics among Triton's own, under the names in the HTTP process's /metrics.

    A histogram's samples are counters here: Triton cannot use its buckets, and queries ask for them
    by name.
    """

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._told: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def update(self, text: bytes) -> None:
        """`text`: all metrics in Prometheus' format. Only changes are passed on to Triton."""
        for family in text_string_to_metric_families(text.decode()):
            gauge = family.type == "gauge"
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                metric = self._metrics.get(key) or self._add(key, family.documentation, gauge)
                before = self._told.get(key, 0.0)
                if sample.value != before:
                    metric.set(sample.value) if gauge else metric.increment(sample.value - before)
                    self._told[key] = sample.value

    def _add(
        self, key: tuple[str, tuple[tuple[str, str], ...]], description: str, gauge: bool
    ) -> Any:
        name, labels = key
        if name not in self._families:
            kind = triton.MetricFamily.GAUGE if gauge else triton.MetricFamily.COUNTER
            self._families[name] = triton.MetricFamily(
                name=name, description=description, kind=kind
            )
        self._metrics[key] = self._families[name].Metric(labels=dict(labels))
        return self._metrics[key]

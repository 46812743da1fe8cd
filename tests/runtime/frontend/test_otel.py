"""Spans as a collector gets them: one a request, under the caller's, with counts and times."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import importlib.metadata
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from pensieve.runtime.frontend.engine_client import EngineClient
from pensieve.runtime.http.app import create_app
from pensieve.runtime.http.listener import listen
from pensieve.runtime.http.process import serve_http
from pensieve.runtime.http.settings import HTTPSettings
from pensieve.runtime.launch.http_options import http_settings
from pensieve.runtime.launch.options import parse_options
from pensieve.runtime.messages import Submit
from pensieve.scheduler.types import SettingError

from ..fake_loop import FakeLoop, eventually, ready, say

needs_otel = "needs the extra `otel`"
pytest.importorskip("opentelemetry.sdk", reason=needs_otel)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=needs_otel)

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402

from pensieve.runtime.frontend import otel as tracing  # noqa: E402
from pensieve.runtime.frontend.otel import Tracing  # noqa: E402

PROMPT = [70, 71, 72]  # the FakeLoop echoes it and ends
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
UNSET, ERROR = 0, 2  # of a span's status


class Collector:
    """A collector's HTTP side at `url`. `spans`: received spans, `services`: their senders."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.services.add(attributes(resource.resource)["service.name"])
                    collector.spans += [
                        span for scope in resource.scope_spans for span in scope.spans
                    ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 60.0)  # however busy the machine is, spans arrive
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return (
            [plain(one) for one in value.array_value.values]
            if kind == "array_value"
            else getattr(value, kind)
        )

    return {pair.key: plain(pair.value) for pair in of.attributes}


def trace(url: str, loop: FakeLoop, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """Returns the result of `work`, once the last spans are sent or given up."""

    async def main() -> Any:
        client = EngineClient(loop.client_end)
        app = create_app(client, ready(), None, tracing=tracing)
        try:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://test"
            ) as http:
                return await work(http)
        finally:
            await asyncio.to_thread(loop.close)
            await client.closed.wait()

    tracing = Tracing(url, "fake")
    answer = asyncio.run(main())
    tracing.close()
    return answer


def complete(
    http: httpx.AsyncClient, headers: dict[str, Any] | None = None, **body: Any
) -> Awaitable[httpx.Response]:
    return http.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 9, **body}, headers=headers
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_under_its_callers(collector: Collector, stream: bool) -> None:
    before = time.time_ns()
    answer = trace(
        collector.url,
        FakeLoop(),
        lambda http: complete(http, CALLED, stream=stream, conversation="tea"),
    )
    (span,) = collector.spans
    assert collector.services == {"pensieve"} and span.name == "llm_request"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    attributes_of_span = attributes(span)
    queue, first, whole = (
        attributes_of_span.pop(f"gen_ai.latency.{name}")
        for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert 0 <= queue <= first <= whole < 1000, "seconds"
    assert whole == pytest.approx(
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1e-6
    )
    assert len(attributes_of_span.pop("gen_ai.conversation.id")) == 16
    assert attributes_of_span == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": answer.headers["x-request-id"],
        "gen_ai.request.max_tokens": 9,
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 4,
        **{
            f"pensieve.prompt_tokens.{source}": 0
            for source in ("host", "disk", "shared", "recomputed")
        },
        "pensieve.prompt_tokens.gpu": 2,
        "pensieve.prompt_tokens.new": 1,
    }
    assert span.status.code == UNSET


def test_turns_of_a_conversation_can_be_told_and_its_name_cannot(collector: Collector) -> None:
    async def turns(http: httpx.AsyncClient) -> None:
        for conversation in ("tea", "tea", "coffee", None):
            await complete(http, conversation=conversation)

    trace(collector.url, FakeLoop(), turns)
    first, second, other, nameless = (
        attributes(span).get("gen_ai.conversation.id") for span in collector.spans
    )
    assert first == second != other and nameless is None
    trace(collector.url, FakeLoop(), lambda http: complete(http, conversation="tea"))
    assert attributes(collector.spans[-1])["gen_ai.conversation.id"] != first, (
        "the key is this process's"
    )


@pytest.mark.parametrize("headers", [None, {"traceparent": b"00-junk-\xff"}])
def test_without_a_caller_a_trace_begins(
    collector: Collector, headers: dict[str, Any] | None
) -> None:
    trace(collector.url, FakeLoop(), lambda http: complete(http, headers))
    (span,) = collector.spans
    assert span.parent_span_id == b"" and span.trace_id != bytes.fromhex(TRACE)


def test_a_caller_that_does_not_sample_has_no_span(collector: Collector) -> None:
    trace(
        collector.url,
        FakeLoop(),
        lambda http: complete(http, {"traceparent": f"00-{TRACE}-{CALLER}-00"}),
    )
    assert not collector.spans


def test_refused_and_failed_requests_are_errors(collector: Collector) -> None:
    trace(collector.url, FakeLoop(queue=0), complete)
    trace(
        collector.url,
        FakeLoop(say("y" * 100), dies_with=1),
        lambda http: complete(http, max_tokens=50, stream=True),
    )
    told = [(attributes(span), span.status.code) for span in collector.spans]
    ends = [
        (
            attributes_of_span["gen_ai.response.finish_reasons"],
            attributes_of_span["error.type"],
            code,
        )
        for attributes_of_span, code in told
    ]
    assert ends == [(["refused"], "429", ERROR), (["error"], "_OTHER", ERROR)]
    assert [
        "gen_ai.latency.time_to_first_token" in attributes_of_span for attributes_of_span, _ in told
    ] == [False, True]


def test_off_nothing_of_opentelemetry_is_imported() -> None:
    modules = {"opentelemetry.sdk", "opentelemetry.exporter", "pensieve.runtime.frontend.otel"}
    code = (
        f"import sys, pensieve.runtime.http.process, pensieve.scripts.serve; print({modules} & "
        "set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_a_collector_that_takes_no_spans_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the SDK, which would retry for ten seconds, is not waited for."""
    closed = threading.Event()
    ends: list[bool] = []
    monkeypatch.setattr(tracing.TracerProvider, "shutdown", lambda _: ends.append(closed.wait(300)))
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.2)
    # accepts connections and never answers
    with contextlib.closing(listen("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        answer = trace(url, FakeLoop(), complete)
    assert answer.is_success and not ends
    closed.set()


def serve_until_spans_arrive(*arguments: Any) -> None:
    """`serve_http` with `collector`'s time limit, in a separate process."""
    tracing.CLOSE_SECONDS = 60.0
    serve_http(*arguments)


def test_the_process_sends_its_last_spans_an_abandoned_requests_too(collector: Collector) -> None:
    loop = FakeLoop(say("y" * 200), step_seconds=0.2)  # 40 s for the whole reply
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        settings = HTTPSettings(otlp_traces_endpoint=collector.url)
        process = multiprocessing.get_context("spawn").Process(
            target=serve_until_spans_arrive, args=(loop.client_end, listener, settings), daemon=True
        )
        process.start()
    loop.client_end.close()
    loop.say(ready())
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        next(response.iter_lines())
    eventually(lambda: len(loop.log) > len(loop.messages(Submit)))  # the abort
    loop.close()
    process.join(60)
    assert process.exitcode == 0
    (span,) = collector.spans
    assert (
        attributes(span)["gen_ai.response.finish_reasons"] == ["abort"]
        and span.status.code == UNSET
    )
    assert attributes(span)["gen_ai.usage.completion_tokens"] > 0


def wrong(endpoint: str) -> str:
    with pytest.raises(SettingError) as refused:
        http_settings(parse_options(["--engine", "demo", "--otlp-traces-endpoint", endpoint]))
    assert refused.value.setting == "--otlp-traces-endpoint"
    return str(refused.value)


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4317", "grpc://localhost:4317", "http://", "http://[", "http://a:b"]
)
def test_a_wrong_endpoint_is_named(endpoint: str) -> None:
    assert "http://127.0.0.1:4318/v1/traces" in wrong(endpoint)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "pip install opentelemetry-exporter-otlp-proto-http" in wrong(
        "http://127.0.0.1:4318/v1/traces"
    )

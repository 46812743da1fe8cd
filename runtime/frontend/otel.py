"""A span for each call, sent to an OpenTelemetry collector: counts, times and the caller's trace,
but no text.

Needs the extra `otel`, so it is imported only with `--otlp-traces-endpoint`.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..observe.metrics import SOURCES
from .calls import GenerationCall, watched
from .reply import Reply, usage

CLOSE_SECONDS = 2.0  # for the last spans; a collector that is down must not delay the end
SPAN = "llm_request"  # vLLM's name
TRACE_HEADERS = (b"traceparent", b"tracestate")

Headers = Sequence[tuple[bytes, bytes]]  # ASGI's


class Tracing:
    """Ends spans on the event loop's thread. A thread of the SDK sends them in batches and drops
    spans beyond its limit.

    The environment variables of the OpenTelemetry SDK (service name, sampler, the exporter's
    headers, ...) apply.
    """

    def __init__(self, endpoint: str, model: str):
        """`endpoint`: the whole URL, `http://host:4318/v1/traces`."""
        self._model = model
        self._secret = secrets.token_bytes(16)
        resource = Resource.create({"service.name": "pensieve"}).merge(
            OTELResourceDetector().detect()
        )
        # its own shutdown could take half a minute
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("pensieve")
        self._propagator = TraceContextTextMapPropagator()

    def traced(
        self, call: GenerationCall, headers: Headers, replies: Collection[Reply]
    ) -> AbstractContextManager[None]:
        """Watches like `watched`, for a call with these request headers. `replies` may be filled
        meanwhile."""
        return watched(
            lambda unfinished, status: self._end(call, headers, list(replies), unfinished, status)
        )

    def close(self) -> None:
        """Sends the remaining spans, for CLOSE_SECONDS at most. No call may be traced
        afterwards."""
        closing = threading.Thread(
            target=self._provider.shutdown, name="tracing-close", daemon=True
        )
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _end(
        self,
        call: GenerationCall,
        headers: Headers,
        replies: list[Reply],
        unfinished: str,
        status: int | None,
    ) -> None:
        """`unfinished` and `status`: as `watched` passes them."""
        seconds = time.perf_counter() - call.arrived
        now = time.time_ns()
        finishes = [reply.reason or unfinished for reply in replies] or [unfinished]
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in headers
            if name in TRACE_HEADERS
        }
        attributes = {**self._about(call), **_counts(replies), **_times(call, replies, seconds)}
        context = self._propagator.extract(carrier)
        start = now - round(seconds * 1e9)
        span = self._tracer.start_span(SPAN, context, SpanKind.SERVER, attributes, start_time=start)
        span.set_attribute("gen_ai.response.finish_reasons", finishes)
        failure = None if status is None else str(status)
        if failure is None and "error" in finishes:
            failure = "_OTHER"  # the conventions' value for other errors
        if failure is not None:
            span.set_attribute("error.type", failure)
            span.set_status(StatusCode.ERROR)
        span.end(now)

    def _about(self, call: GenerationCall) -> dict[str, str | int]:
        about: dict[str, str | int] = {
            "gen_ai.operation.name": "chat" if call.generate.chat else "text_completion",
            "gen_ai.request.id": call.writer.id,
            "gen_ai.request.max_tokens": max(request.max_tokens for request in call.requests),
            "gen_ai.response.model": self._model,
        }
        if (name := call.requests[0].conversation) is not None:
            # Groups turns of one conversation while this process lives. Names chosen by users
            # cannot be guessed from it.
            about["gen_ai.conversation.id"] = hashlib.blake2b(
                name.encode(), digest_size=8, key=self._secret
            ).hexdigest()
        return about


def _counts(replies: list[Reply]) -> dict[str, int]:
    counts = usage(replies, sources=True)
    return {
        "gen_ai.usage.prompt_tokens": counts["prompt_tokens"],
        "gen_ai.usage.completion_tokens": counts["completion_tokens"],
        **{
            f"pensieve.prompt_tokens.{source}": counts["prompt_tokens_details"][source]
            for source in SOURCES
        },
    }


def _times(call: GenerationCall, replies: list[Reply], seconds: float) -> dict[str, float]:
    """Seconds from the call's arrival, under vLLM's names; times of a first token only if there was
    one."""
    times = {"gen_ai.latency.e2e": seconds}
    started = [reply for reply in replies if reply.started is not None]
    if started:
        first = min(reply.started for reply in started if reply.started is not None)
        times["gen_ai.latency.time_in_queue"] = max(reply.queued for reply in started)
        times["gen_ai.latency.time_to_first_token"] = first - call.arrived
    return times

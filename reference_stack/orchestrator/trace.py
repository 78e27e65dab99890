"""One trace from client to engine (W3C trace context), told to a collector where one is configured.

A trace id is passed on whether anybody collects spans or not, so that logs of all layers can be laid side by side.
"""

from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

EXPORT_TIMEOUT_S = 2


class Tracer:
    """The spans of one worker."""

    def __init__(self, otlp: str | None = None) -> None:
        """`otlp`: the collector's URL for OTLP over HTTP."""
        self._provider = TracerProvider(resource=Resource.create({"service.name": "orchestrator"}))
        if otlp:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = OTLPSpanExporter(endpoint=otlp, timeout=EXPORT_TIMEOUT_S)
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(__name__)
        self._wire = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str]) -> Span:
        """The span of a request, within its client's trace if it names one that is well formed."""
        return self._tracer.start_span("chat", self._wire.extract(headers), SpanKind.SERVER)

    def within(self, parent: Span, name: str) -> Span:
        """The span of a step of it."""
        return self._tracer.start_span(name, set_span_in_context(parent), SpanKind.CLIENT)

    def headers(self, span: Span) -> dict[str, str]:
        """What tells the next layer of a span."""
        carrier: dict[str, str] = {}
        self._wire.inject(carrier, set_span_in_context(span))
        return carrier

    def close(self) -> None:
        """Send what is still to be sent."""
        self._provider.shutdown()


def trace_id(span: Span) -> str:
    """A span's trace as its 32 hex digits."""
    return format_trace_id(span.get_span_context().trace_id)

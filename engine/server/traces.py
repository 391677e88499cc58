"""OpenTelemetry, if enabled: a span for every request, a child of the client's own if it names one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from engine.core.errors import ConfigError

_NAMES = {
    "id": "gen_ai.request.id",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "first_token_s": "gen_ai.latency.time_to_first_token",
    "seconds": "gen_ai.latency.e2e",
    "status": "http.response.status_code",
    "method": "http.request.method",
    "path": "url.path",
}
"""The log's fields with their names in the semantic conventions, or in vLLM."""


def check(endpoint: str | None) -> None:
    """Raise ConfigError if spans are wanted, and the endpoint is no URL or the extra that sends them is missing."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--traces {endpoint}: is no URL; name one, for example http://localhost:4318/v1/traces")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--traces {endpoint}: {error.name} is missing: pip install 'talon-decoding[traces]'"
        ) from None


class Traces:
    """Sends spans of requests. endpoint: where spans are sent, as OTLP over HTTP; None: nowhere."""

    def __init__(self, endpoint: str | None):
        self._provider = None if endpoint is None else _provider(endpoint)

    def request(self, headers: Mapping[str, str], fields: Mapping[str, Any]) -> None:
        """Send a span of a request that has been answered, just now."""
        if self._provider is None:
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended_ns = time.time_ns()
        span = self._provider.get_tracer("talon").start_span(
            f"{fields['method']} {fields['path']}",
            context=TraceContextTextMapPropagator().extract({"traceparent": headers.get("traceparent", "")}),
            kind=SpanKind.SERVER,
            attributes={name: fields[field] for field, name in _NAMES.items() if field in fields},
            start_time=ended_ns - int(fields["seconds"] * 1e9),
        )
        span.end(ended_ns)

    def close(self) -> None:
        """Send what has not been sent."""
        if self._provider is not None:
            self._provider.shutdown()


def _provider(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "talon"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider

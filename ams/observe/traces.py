"""Traces of steps for OpenTelemetry: the parts of a step, here and in the roles that it called.

``OTEL_TRACES_EXPORTER=otlp`` (or ``console``: on stderr) turns them on, in every process that inherits it; the other
variables of OpenTelemetry say where they go. Off, a span costs one check, and nothing is imported.

A call over gRPC carries its trace in its metadata, so that the span of the role that served it is a child of
ours. Rows travel as frames, which carry none: their spans are the client's, from sending to receiving.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, TypeVar

from geartrain.ams.values import interrupts
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.rpc import version

VARIABLE = "OTEL_TRACES_EXPORTER"
T = TypeVar("T")
_FLUSH_SECONDS = 1.0
_NOTHING: AbstractContextManager[Any] = nullcontext()
_tracer: Any = None


def span(name: str, **attributes: str | int) -> AbstractContextManager[Any]:
    """Open a span for the time of the block."""
    if _tracer is None:
        return _NOTHING
    named = {f"geartrain.{key}": value for key, value in attributes.items()}
    return _tracer.start_as_current_span(f"geartrain {name}", attributes=named)  # type: ignore[no-any-return]


def traced(calls: T, **methods: Callable[..., Mapping[str, str | int]]) -> T:
    """Return ``calls`` with a span around each of ``methods``, whose function of the arguments returns the attributes;
    where traces are off, ``calls`` itself.
    """
    if _tracer is None:
        return calls

    def of(name: str, describe: Callable[..., Mapping[str, str | int]]) -> Callable[..., Any]:
        call = getattr(calls, name)

        @wraps(call)
        def in_span(*given: Any) -> Any:
            with span(name.replace("_", " "), **describe(*given)):
                return call(*given)

        return in_span

    return SimpleNamespace(**{name: of(name, describe) for name, describe in methods.items()})  # type: ignore[return-value]


def flush() -> None:
    """Send the remaining spans, for one second at most."""
    if _tracer is None:
        return
    from opentelemetry import trace

    flushing = threading.Thread(target=trace.get_tracer_provider().force_flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECONDS)


def start(role: str, environ: Mapping[str, str] = os.environ) -> None:
    """Start tracing this process if the environment says so. Raises ConfigError: it cannot."""
    global _tracer
    exporter = environ.get(VARIABLE, "none")
    if exporter == "none" or _tracer is not None:
        return
    if exporter not in ("otlp", "console"):
        raise ConfigError(f"{VARIABLE} is {exporter!r}; use otlp, console or none")
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.grpc import GrpcInstrumentorClient, GrpcInstrumentorServer
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ImportError as exc:
        raise ConfigError(f"{VARIABLE} is {exporter!r}: it needs pip install 'geartrain[traces]' ({exc})") from exc

    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # else the program has its own
        name = environ.get("OTEL_SERVICE_NAME", f"geartrain-{role}")
        provider = TracerProvider(resource=Resource.create({"service.name": name}))
        sends = OTLPSpanExporter() if exporter == "otlp" else ConsoleSpanExporter(out=sys.stderr)
        provider.add_span_processor(BatchSpanProcessor(sends))
        trace.set_tracer_provider(provider)

    def is_in_a_span(_: object) -> bool:
        return trace.get_current_span().get_span_context().is_valid  # type: ignore[no-any-return]

    def is_of_a_trace(details: Any) -> bool:
        return "traceparent" in dict(details.invocation_metadata or ())

    GrpcInstrumentorClient(filter_=is_in_a_span).instrument()
    GrpcInstrumentorServer(filter_=is_of_a_trace).instrument()  # heartbeats are of no trace
    interrupts.carry = lambda work: partial(copy_context().run, work)
    _tracer = trace.get_tracer("geartrain", version())

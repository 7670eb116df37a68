"""Which span a client says that its requests belong to."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id

import forktree
from forktree._flavours import each
from forktree._following import Following
from forktree.errors import BadSettings
from forktree.tracing.context import parsed

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_one_that_is_given_goes_with_every_request() -> None:
    assert Following(GIVEN).headers() == {"traceparent": GIVEN}


def test_one_that_is_none_is_refused_in_a_sentence() -> None:
    with pytest.raises(BadSettings, match="a traceparent looks like 00-"):
        forktree.Client("https://127.0.0.1:1", token="t", traceparent="mine")


def test_without_a_span_nothing_is_sent() -> None:
    assert Following(None).headers() == {}


def test_the_current_span_of_the_program_is_sent_also_from_the_clients_own_threads() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    following = Following(None)
    with tracer.start_as_current_span("search") as span:
        context = span.get_span_context()
        for headers in (following.headers(), *each([following.headers] * 3, at_once=3)):
            sent = parsed(headers["traceparent"])
            assert sent is not None
            assert (sent.trace_id, sent.span_id) == (
                format_trace_id(context.trace_id),
                format_span_id(context.span_id),
            )
        with ThreadPoolExecutor(1) as elsewhere:  # A thread of nobody's has no span.
            assert elsewhere.submit(following.headers).result() == {}
    assert following.headers() == {}


def test_a_program_without_opentelemetry_does_without_it() -> None:
    script = (
        "import sys; from forktree._following import Following\n"
        "print(Following(None).headers(), 'opentelemetry' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert printed.stdout == "{} False\n"

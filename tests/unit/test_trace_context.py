"""W3C Trace Context as anybody may send it: what is valid is taken, what is not is as if nothing was sent."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forktree.models.names import TRACE_ANNOTATION
from forktree.tracing.context import TraceContext, current, of_object, parsed, sent, within
from forktree.tracing.exporting import collector_url

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_one_is_taken_and_handed_on_as_it_came() -> None:
    context = parsed(VALID, "vendor=a b,other@tenant=1")
    assert context is not None
    assert (context.trace_id, context.span_id, context.sampled) == (TRACE, SPAN, True)
    assert context.headers() == {"traceparent": VALID, "tracestate": "vendor=a b,other@tenant=1"}


def test_flags_say_whether_it_is_recorded() -> None:
    for flags, sampled in (("00", False), ("01", True), ("02", False), ("ff", True)):
        context = parsed(f"00-{TRACE}-{SPAN}-{flags}")
        assert context is not None
        assert context.sampled is sampled


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        VALID.upper(),
        f" {VALID}",
        f"{VALID}\n",
        f"{VALID}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01" + "-" + "a" * 5000,
        f"01-{TRACE}-{SPAN}-01-\x00",
        "\u0660\u0660-" + VALID[3:],
    ],
)
def test_what_is_not_valid_is_as_if_nothing_was_sent(header: str) -> None:
    assert parsed(header) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert parsed(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings") == parsed(VALID)


def test_a_header_that_came_twice_says_nothing() -> None:
    assert sent([VALID, VALID]) is None
    assert sent([]) is None
    assert sent([VALID], ["a=1", "b=2"]) == parsed(VALID, "a=1,b=2")


@pytest.mark.parametrize("state", ["=", "a", "A=1", "a=1\r\nX-Evil: 1", "a=\x00", "a=" + "b" * 600, "ä=1"])
def test_a_state_that_is_not_valid_is_left_out(state: str) -> None:
    context = parsed(VALID, state)
    assert context is not None
    assert context.headers() == {"traceparent": VALID}


@given(st.text(max_size=300), st.text(max_size=600))
def test_whatever_is_sent_what_is_handed_on_is_valid(traceparent: str, tracestate: str) -> None:
    assert parsed(traceparent) is None
    context = parsed(VALID, tracestate)
    assert context is not None
    for name, value in context.headers().items():
        assert name in {"traceparent", "tracestate"}
        assert value.isascii()
        assert value.isprintable() or "\t" in value
        assert "\n" not in value
        assert "\r" not in value


def test_an_object_without_an_annotation_has_its_uid_for_a_trace() -> None:
    uid = "3f2b8c1e-5d4a-4b6c-9e7f-0a1b2c3d4e5f"
    assert of_object(uid, {}, TRACE_ANNOTATION) == (None, uid.replace("-", ""))
    assert of_object(uid, {TRACE_ANNOTATION: "nonsense"}, TRACE_ANNOTATION)[0] is None
    assert of_object(uid, {TRACE_ANNOTATION: VALID}, TRACE_ANNOTATION) == (parsed(VALID), TRACE)
    strange, digits = of_object("00000000-0000-0000-0000-000000000000", {}, TRACE_ANNOTATION)
    assert strange is None
    assert int(digits, 16)


def test_a_named_span_is_the_same_each_time_and_differs_by_name() -> None:
    context = TraceContext.begun()
    assert context.named("a") == context.named("a")
    assert len({context.span_id, context.named("a").span_id, context.named("b").span_id}) == 3


def test_the_current_span_is_that_of_the_block() -> None:
    assert current() is None
    with within(parsed(VALID)):
        assert current() == parsed(VALID)
    assert current() is None


@pytest.mark.parametrize(
    "text",
    ["", "collector:4318", "ftp://collector", "http://", "http://a:b@c", "http://c?x=1", "http://[::1"],
)
def test_a_collectors_address_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="looks like http://HOST:4318"):
        collector_url(text)


def test_without_a_collector_nothing_of_the_library_is_imported() -> None:
    script = (
        "import sys, forktree, forktree_agent.__main__, forktree_operator.__main__\n"
        "print([each for each in sys.modules if each.startswith(('opentelemetry', 'google.protobuf'))])"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert printed.stdout == "[]\n"

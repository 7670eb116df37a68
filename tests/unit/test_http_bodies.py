"""What a caller is told about a wrong body, and what an answer looks like."""

from __future__ import annotations

import json

import pytest

from forktree.models import Reason, SessionPhase
from forktree.wire import (
    CreateSession,
    ErrorBody,
    Exec,
    ExecFinished,
    ForkSession,
    Request,
    SessionForked,
    SessionInfo,
)
from forktree.wire_batches import BatchExec
from forktree_agent.http.bodies import decode, encode
from forktree_agent.http.errors import Code, Refusal


def refused(model: type[Request], body: object) -> tuple[Code, str]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(Refusal) as raised:
        decode(raw, model)
    return raised.value.code, raised.value.sentence


@pytest.mark.parametrize(
    ("model", "body", "sentence"),
    [
        (ForkSession, {"replica": 2}, "unknown key `replica`"),
        (ForkSession, {"replicas": "3"}, "`replicas`: input should be a valid integer"),
        (ForkSession, {"replicas": 1.5}, "`replicas`: input should be a valid integer"),
        (ForkSession, {"replicas": True}, "`replicas`: input should be a valid integer"),
        (ForkSession, {"replicas": 257}, "`replicas`: input should be less than or equal to 256"),
        (ForkSession, {"replicas": -1}, "`replicas`: input should be greater than or equal to 0"),
        (Exec, {"command": 5}, "`command`: input should be a valid string"),
        (Exec, {"argv": "ls"}, "`argv`: input should be a valid array"),
        (Exec, {"argv": ["ls", 1]}, "`argv.1`: input should be a valid string"),
        (Exec, {}, "give exactly one of `command` and `argv`"),
        (Exec, {"command": "ls", "argv": ["ls"]}, "give exactly one of `command` and `argv`"),
        (Exec, {"argv": ["a\0b"]}, "`argv` must not contain a NUL character"),
        (Exec, {"command": "ls", "timeout_seconds": 3601}, "`timeout_seconds`: input should be less than"),
        (Exec, {"command": "ls", "timeout_seconds": 0}, "`timeout_seconds`: input should be greater than 0"),
        (Exec, {"command": "ls", "env": {"A=B": "c"}}, "`env` names must be non-empty"),
        (Exec, {"command": "ls", "id": "a/b"}, "`id`: string should match pattern"),
        (Exec, {"command": "ls", "id": "trailing\n"}, "`id`: string should match pattern"),
        (CreateSession, [], "the body must be a JSON object"),
        (CreateSession, {"template_id": "t", "name": "Upper"}, "`name` must be a DNS label"),
        (CreateSession, {"template_id": "t", "name": "a" * 64}, "at most 63 characters"),
        (ForkSession, {"name": "a" * 53}, "at most 52 characters"),
        (ForkSession, {"name": "trailing\n"}, "`name` must be a DNS label"),
        (ForkSession, b"{", "the body is not JSON"),
        (ForkSession, b"\xff\xfe", "the body is not JSON"),
        (ForkSession, b"null", "the body must be a JSON object"),
        (ForkSession, b'{"replicas": 1} {}', "the body is not JSON"),
        (ForkSession, b'{"replicas": NaN}', "`replicas`: input should be a valid integer"),
        (ForkSession, b'{"replicas": 1e2}', "`replicas`: input should be a valid integer"),
        (ForkSession, b'{"replicas": 18446744073709551617}', "`replicas`: input should be less than"),
        (ForkSession, b'{"replicas": ' + b"9" * 5000 + b"}", "number out of range"),
        (ForkSession, b'{"replicas": 1, "replicas": 2}', "`replicas` is given twice"),
        (ForkSession, {"a\nb": 1}, "unknown key `a?b`"),
        (ForkSession, {"k" * 5000: 1}, "k…`"),
        (Exec, b"[" * 10_000, "recursion limit exceeded"),
        (Exec, b'{"argv": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "recursion limit exceeded"),
        (Exec, b'{"a": ' * 10_000 + b"1" + b"}" * 10_000, "recursion limit exceeded"),
        (Exec, b'{"command": "ls", "timeout_seconds": NaN}', "`timeout_seconds`: input should be less than"),
        (Exec, b'{"command": "ls", "timeout_seconds": 1e999}', "`timeout_seconds`: input should be less"),
        (Exec, b'{"command": "ls", "env": {"A": "1", "A": "2"}}', "`A` is given twice"),
        (Exec, b'{"command": "\\ud800"}', "the body is not JSON"),
        (Exec, b'{"command": "\xed\xa0\x80"}', "the body is not JSON"),
        (Exec, b'{"command": "a\x00b"}', "the body is not JSON"),
        (Exec, b'{"command": "a\\u0000b"}', "`command` must not contain a NUL character"),
        (Exec, {"command": "ls", "env": {"A\0": "b"}}, "`env` names must be non-empty"),
        (CreateSession, {"template_id": "a\0b"}, "`template_id`: string should match pattern"),
        (CreateSession, {"template_id": "../../forks/a"}, "`template_id`: string should match pattern"),
    ],
)
def test_a_wrong_body_is_refused_with_one_sentence_that_names_the_key(
    model: type[Request], body: object, sentence: str
) -> None:
    code, said = refused(model, body)
    assert code is Code.BAD_REQUEST
    assert sentence in said
    assert said.isprintable()
    assert len(said) < 200


def test_a_missing_template_has_its_own_code() -> None:
    assert refused(CreateSession, {}) == (Code.TEMPLATE_ID_REQUIRED, "`template_id` is missing")


def test_a_refusal_does_not_repeat_what_was_sent() -> None:
    secret = "hunter2"
    for body in (
        {"command": "ls", "env": {"TOKEN": [secret]}},
        {"argv": [secret, {"a": secret}]},
        {"command": secret, "argv": [secret]},
        {"command": "ls", "stdin": {secret: secret}},
    ):
        code, said = refused(Exec, body)
        assert code is Code.BAD_REQUEST
        assert secret not in said


def test_an_empty_body_is_all_defaults() -> None:
    assert decode(b"", ForkSession) == ForkSession(replicas=1)


def test_command_runs_in_a_shell_and_argv_does_not() -> None:
    assert decode(b'{"command": "a | b"}', Exec).arguments() == ("/bin/sh", "-c", "a | b")
    assert decode(b'{"argv": ["a", "| b"]}', Exec).arguments() == ("a", "| b")


def test_answers_leave_out_what_is_not_set() -> None:
    info = SessionInfo(
        session_id="a",
        template_id="t",
        phase=SessionPhase.FAILED,
        ready=False,
        age_secs=1,
        reason=Reason.INTERNAL,
    )
    assert json.loads(encode(info)) == {
        "session_id": "a",
        "template_id": "t",
        "phase": "Failed",
        "ready": False,
        "age_secs": 1.0,
        "reason": "Internal",
    }
    checkpoint = SessionForked(
        parent_session_id="a", template_id="t", fork_id="f", recorded=True, total_time_ms=2
    )
    assert "session_id" not in json.loads(encode(checkpoint))


def test_answers_hold_any_text() -> None:
    text = 'quote " and \x00 and 🌳'
    finished = ExecFinished(
        id="r", stdout=text, stderr="", exit_code=0, timed_out=False, truncated=False, exec_time_ms=1
    )
    assert json.loads(encode(finished))["stdout"] == text


def test_an_error_says_the_same_to_both_families_of_clients() -> None:
    body = ErrorBody(error="no room", error_code="at_capacity", code="at_capacity", message="no room")
    assert set(json.loads(encode(body))) == {"error", "error_code", "code", "message"}


def test_a_batch_waits_for_its_commands() -> None:
    for more in ({"detach": True}, {"stream": True}):
        command = {"command": "true", **more}
        for body in ({"session_ids": ["a"], "exec": command}, {"execs": {"a": command}}):
            with pytest.raises(Refusal, match="a batch waits for its commands"):
                decode(json.dumps(body).encode(), BatchExec)

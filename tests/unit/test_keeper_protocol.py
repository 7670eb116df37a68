"""The keeper's messages: what is written is read again, and what is wrong is refused by name."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forktree_keeper import protocol
from forktree_keeper.protocol import (
    Answer,
    Channel,
    ChannelType,
    Code,
    Companion,
    CompanionExit,
    Done,
    Drop,
    DropCgroup,
    Exit,
    Failure,
    FilePage,
    Forget,
    Greeting,
    Hello,
    Hold,
    Kill,
    Launched,
    Lend,
    LendFile,
    Lent,
    LimitCgroup,
    ListFiles,
    ListMachines,
    MachineEntry,
    MachinePage,
    RaiseWall,
    Refusal,
    Request,
    Result,
    Start,
    Weigh,
    Weight,
    decode_packet,
    decode_request,
    encode_companion_exited,
    encode_exited,
    encode_failure,
    encode_request,
    encode_result,
    read_body,
    receive_packet,
    send_packet,
)

START = Start(
    machine="m-1.a_B",
    argv=("/bin/true", "grün \udce4 \n"),
    env={"A": "1", "B": ""},
    uid=7,
    gid=2**32 - 2,
    cgroup="tree-1",
    network_namespace=True,
    nice=-10,
    channels=(Channel("qmp", ChannelType.STREAM), Channel("shim", ChannelType.SEQPACKET)),
    companion=Companion(argv=("/usr/bin/passt", "--fd", "3"), env={"A": "1"}),
)
EXIT = Exit(machine="m", pid=5, exit_code=None, signal=9, text="killed by signal 9 (SIGKILL)")
ENTRY = MachineEntry(machine="m", pid=1, uid=2, cgroup=None, exit=EXIT, companion_lost="x")
REQUESTS: list[Request] = [
    Hello(1),
    START,
    Lend("m"),
    Hold("f"),
    LendFile("f"),
    Drop(("a", "b")),
    ListMachines(""),
    ListFiles("z"),
    Kill("m"),
    Forget("m"),
    Weigh("m"),
    LimitCgroup("t", None),
    LimitCgroup("t", 1 << 40),
    DropCgroup("t"),
    RaiseWall(first_uid=200_000, uids=4096, allow=("10.1.0.0/16", "fd00::/8"), deny=("192.0.2.7",)),
]
RESULTS: list[Result] = [
    Greeting(version=1, epoch=2, boot_id="b", machines=3, files=4),
    Launched(7),
    Lent(("qmp", "shim")),
    EXIT,
    Weight(1 << 40),
    MachinePage((ENTRY,), more=True),
    MachinePage((), more=False),
    FilePage(("a",), more=False),
    Done(),
]


def test_every_operation_has_a_request_here() -> None:
    assert {type(request) for request in REQUESTS} == set(protocol.OPERATIONS.values())


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_a_request_arrives_as_it_was(request_: Request) -> None:
    assert decode_request(encode_request(3, request_)) == (3, request_)


@pytest.mark.parametrize("result", RESULTS, ids=lambda each: type(each).__name__)
def test_a_result_arrives_as_it_was(result: Result) -> None:
    answer = decode_packet(encode_result(4, result))
    assert isinstance(answer, Answer)
    assert answer.request_id == 4
    assert read_body(type(result), answer.body) == result


def test_failures_and_exits_arrive_as_they_were() -> None:
    assert decode_packet(encode_failure(None, Code.STALE_EPOCH, "x")) == Failure(None, Code.STALE_EPOCH, "x")
    assert decode_packet(encode_failure(5, Code.CGROUP_BUSY, "x")) == Failure(5, Code.CGROUP_BUSY, "x")
    assert decode_packet(encode_exited(EXIT)) == EXIT
    lost = CompanionExit("m", "exited with code 1")
    assert decode_packet(encode_companion_exited(lost)) == lost


def test_a_request_that_does_not_fit_is_refused_by_its_sender() -> None:
    with pytest.raises(Refusal) as raised:
        encode_request(9, Drop(("x" * protocol.MAX_MESSAGE_BYTES,)))
    assert (raised.value.code, raised.value.request_id) == (Code.BAD_REQUEST, 9)


def test_the_fullest_pages_and_the_longest_failure_fit() -> None:
    name, text = "n" * 128, "\u20ac" * protocol.MAX_TEXT_CHARACTERS
    ended = Exit(machine=name, pid=2**31, exit_code=255, signal=None, text=text)
    entry = MachineEntry(machine=name, pid=2**31, uid=2**32, cgroup=name, exit=ended, companion_lost=text)
    encode_result(2**53 - 1, MachinePage((entry,) * protocol.MACHINES_PER_PAGE, more=True))
    encode_result(2**53 - 1, FilePage((name,) * protocol.FILES_PER_PAGE, more=True))
    encode_failure(2**53 - 1, Code.BAD_REQUEST, "\u20ac" * 100_000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"uid": "7"}, "uid has the wrong type"),
        ({"uid": True}, "uid has the wrong type"),
        ({"uid": 7.0}, "uid has the wrong type"),
        ({"uid": None}, "uid has the wrong type"),
        ({"uid": 2**32 - 1}, "uid 4294967295 is out of range"),
        ({"machine": ".hidden"}, "machine name"),
        ({"machine": "a/b"}, "machine name"),
        ({"machine": "a\n"}, "machine name"),
        ({"cgroup": ".."}, "cgroup name"),
        ({"argv": "/bin/true"}, "argv has the wrong type"),
        ({"argv": ["true"]}, "absolute path"),
        ({"env": {"A=": "x"}}, "equals sign"),
        ({"env": [["A", "x"]]}, "env has the wrong type"),
        ({"channels": [{"name": "c"}]}, "'type'"),
        ({"nicer": 1}, "'nicer'"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], said: str) -> None:
    packet = json.loads(encode_request(8, START))
    packet["body"].update(change)
    with pytest.raises(Refusal, match=said) as raised:
        decode_request(json.dumps(packet).encode())
    assert (raised.value.code, raised.value.request_id) == (Code.BAD_REQUEST, 8)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_comes_is_refused_or_read(data: bytes) -> None:
    try:
        decode_request(data)
    except Refusal as refusal:
        assert refusal.code in (Code.BAD_MESSAGE, Code.BAD_REQUEST)
    with suppress(ValueError):
        decode_packet(data)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(protocol.OPERATIONS)),
    JSON,
    st.dictionaries(st.sampled_from(["machine", "name"]), JSON),
)
def test_whatever_a_body_is_the_answer_has_an_id(
    operation: str, body: object, fields: dict[str, object]
) -> None:
    for each in (body, fields):
        try:
            assert decode_request(json.dumps({"id": 1, "op": operation, "body": each}).encode())[0] == 1
        except Refusal as refusal:
            assert (refusal.code, refusal.request_id) == (Code.BAD_REQUEST, 1)


def test_descriptors_travel_with_their_packet_and_are_not_inherited() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        file = os.memfd_create("x")
        send_packet(left, b"two", [file, file])
        send_packet(left, b"none", [])
        data, files = receive_packet(right)
        assert (data, len(files)) == (b"two", 2)
        for received in files:
            assert os.path.samestat(os.fstat(received), os.fstat(file))
            assert not os.get_inheritable(received)
            os.close(received)
        assert receive_packet(right) == (b"none", [])
        os.close(file)
        left.close()
        assert receive_packet(right) == (b"", [])

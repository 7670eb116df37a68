"""The shim's packets on the agent's side: what the golden file says, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forktree_agent.engine.microvm.layers import Run
from forktree_agent.engine.microvm.shim import (
    Dump,
    NoShim,
    Op,
    Stat,
    Status,
    decode_dump,
    decode_number,
    decode_reply,
    decode_stat,
    encode_allocate,
    encode_dump,
    encode_hello,
    encode_map_run,
    encode_map_table,
    encode_prepare,
    encode_request,
    encode_stat,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "shim_packets.txt"
REFUSALS = {
    "malformed": Status.MALFORMED,
    "no_hello": Status.NO_HELLO,
    "ram_not_found": Status.RAM_NOT_FOUND,
    "ram_shared": Status.RAM_SHARED,
    "bad_layer": Status.BAD_LAYER,
    "bad_run": Status.BAD_RUN,
    "no_layer": Status.NO_LAYER,
    "os": Status.OS,
    "half_mapped": Status.HALF_MAPPED,
    "not_tracked": Status.NOT_TRACKED,
}


class Line(NamedTuple):
    name: str
    fields: dict[str, int]
    packet: bytes


def golden() -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for text in GOLDEN.read_text().splitlines():
        if text.startswith("#"):
            continue
        left, right = text.split(" = ")
        name, *words = left.split()
        fields = {word.partition("=")[0]: int(word.partition("=")[2]) for word in words}
        lines[name] = Line(name, fields, bytes.fromhex(right))
    return lines


LINES = golden()


def test_requests_are_the_golden_packets() -> None:
    def fields(name: str, *names: str) -> tuple[int, ...]:
        return tuple(LINES[name].fields[each] for each in names)

    requests = {
        "hello": (Op.HELLO, encode_hello(*fields("hello", "ram_bytes"))),
        "map_table": (
            Op.MAP_TABLE,
            encode_map_table(*fields("map_table", "table_offset", "runs", "copy_below")),
        ),
        "map_run": (Op.MAP_RUN, encode_map_run(Run(*fields("map_run", "page", "pages", "offset")))),
        "prepare": (Op.PREPARE, encode_prepare(*fields("prepare", "bytes"))),
        "dump": (Op.DUMP, encode_dump(*fields("dump", "gap_pages", "target_runs", "since", "mark"))),
        "finish": (Op.FINISH, b""),
        "stat": (Op.STAT, encode_stat(*fields("stat", "since"))),
        "arm": (Op.ARM, encode_stat(*fields("arm", "since"))),
        "track": (Op.TRACK, b""),
        "allocate": (Op.ALLOCATE, encode_allocate(*fields("allocate", "offset", "bytes"))),
    }
    for name, (op, body) in requests.items():
        line = LINES[name]
        assert encode_request(op, line.fields["id"], body) == line.packet, name


def test_replies_are_read_from_the_golden_packets() -> None:
    def body(name: str) -> bytes:
        line = LINES[name]
        reply = decode_reply(line.packet)
        assert (reply.op, reply.id) == (line.fields["op"], line.fields["id"]), name
        assert (reply.status, reply.errno) == (Status.OK, 0), name
        return reply.body

    def fields(name: str) -> dict[str, int]:
        return {key: value for key, value in LINES[name].fields.items() if key not in ("op", "id")}

    assert decode_number(body("ready")) == LINES["ready"].fields["vmas"]
    assert decode_number(body("mapped")) == LINES["mapped"].fields["vmas"]
    assert body("prepared") == body("tracked") == body("allocated") == b""
    assert decode_dump(body("dumped")) == Dump(**fields("dumped"))
    assert decode_number(body("finished")) == LINES["finished"].fields["bytes"]
    assert decode_number(body("armed")) == LINES["armed"].fields["written_pages"]
    counted = fields("counted")
    assert decode_stat(body("counted")) == Stat(
        mappings=counted["vmas"],
        private_pages=counted["private_pages"],
        written_pages=counted["written_pages"],
    )


@pytest.mark.parametrize(("name", "status"), REFUSALS.items())
def test_refusals_are_read_from_the_golden_packets(name: str, status: Status) -> None:
    line = LINES[name]
    reply = decode_reply(line.packet)
    assert (reply.id, reply.status, reply.errno) == (line.fields["id"], status, line.fields["errno"])
    assert decode_number(reply.body) == line.fields["detail"]


def test_every_status_has_a_golden_packet() -> None:
    assert {Status.OK, *REFUSALS.values()} == set(Status)


def test_a_run_is_the_golden_record() -> None:
    line = LINES["run"]
    run = Run(line.fields["page"], line.fields["pages"], line.fields["offset"])
    assert run.encode() == line.packet
    assert Run.decode_table(line.packet) == (run,)


@given(st.binary(max_size=80))
def test_whatever_comes_is_a_reply_or_no_shim(packet: bytes) -> None:
    try:
        reply = decode_reply(packet)
        decode_dump(reply.body)
    except NoShim:
        pass


def test_a_dump_that_contradicts_itself_is_not_believed() -> None:
    packet = bytearray(LINES["dumped"].packet)
    packet[17] ^= 1  # One page more or less than the table's offset says.
    with pytest.raises(NoShim):
        decode_dump(decode_reply(bytes(packet)).body)

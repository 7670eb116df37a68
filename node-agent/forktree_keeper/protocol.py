"""What agent and keeper say to each other; the one module of the keeper that the agent imports.

The two meet on a Unix SEQPACKET socket. A packet is one JSON object of at most `MAX_MESSAGE_BYTES`, with
descriptors beside it (SCM_RIGHTS), and the kernel delivers packets whole or not at all.

    request   {"id": 7, "op": "lend", "body": {"machine": "m1"}}
    result    {"id": 7, "result": {"channels": ["qmp", "shim"]}}        descriptors in that order
    failure   {"id": 7, "failure": {"code": "no_such_machine", "message": "..."}}
    event     {"event": "exited", "body": {"machine": "m1", ...}}

Bodies are the dataclasses below, and both sides refuse what is missing, unknown or of another type: a setting
that an older keeper does not know must not be dropped in silence. Whoever changes a body raises `VERSION`.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import ipaddress
import json
import os
import re
import socket
import types
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

VERSION = 2
MAX_MESSAGE_BYTES = 64 * 1024
MAX_DESCRIPTORS = 253
"""The kernel's own limit per packet (SCM_MAX_FD); one more is EINVAL."""
MAX_CHANNELS = 16
MAX_NETWORKS = 256
MACHINES_PER_PAGE = 10
FILES_PER_PAGE = 400
"""What of a listing is in one packet: with the longest names and texts it stays below `MAX_MESSAGE_BYTES`."""
MAX_TEXT_CHARACTERS = 400
"""Of an exit's words. A failed start's sentence may hold a path, which can be longer."""
SOCKET_NAME = "keeper.sock"
LOG_FOLDER = "logs"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MAX_ID = 2**32 - 2  # The last one, as an unsigned 32 bits number, means "unchanged" to the kernel.

_T = TypeVar("_T")


class Code(StrEnum):
    """Why a request failed; a caller does something different for each."""

    BAD_MESSAGE = "bad_message"
    """Not a request at all. The keeper closes the connection."""
    BAD_REQUEST = "bad_request"
    VERSION_MISMATCH = "version_mismatch"
    NOT_IN_CHARGE = "not_in_charge"
    """Nothing is answered before hello. The keeper closes the connection."""
    STALE_EPOCH = "stale_epoch"
    """Another connection has said hello since. The keeper closes this one at its next message."""
    MACHINE_EXISTS = "machine_exists"
    NO_SUCH_MACHINE = "no_such_machine"
    MACHINE_RUNNING = "machine_running"
    FILE_EXISTS = "file_exists"
    NO_SUCH_FILE = "no_such_file"
    START_FAILED = "start_failed"
    """The message names the step and the kernel's reason. Nothing of the machine is left but its cgroup."""
    DESCRIPTORS_EXHAUSTED = "descriptors_exhausted"
    CGROUP_BUSY = "cgroup_busy"
    CGROUP_FAILED = "cgroup_failed"
    WALL_FAILED = "wall_failed"
    """The wall cannot be put up, or does not stand where a companion needs it: see `RaiseWall`."""


class Refusal(Exception):
    """A request that is not carried out. Nothing has changed."""

    def __init__(self, code: Code, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.request_id = request_id
        """Set by `decode_request` when the packet at least told its id."""


class ChannelType(StrEnum):
    """Kind of a socket pair."""

    STREAM = "stream"
    SEQPACKET = "seqpacket"


@dataclass(frozen=True, slots=True)
class Channel:
    """A socket pair: the machine inherits one end, the keeper holds the other and lends it."""

    name: str
    type: ChannelType

    def __post_init__(self) -> None:
        check_name("channel", self.name)


@dataclass(frozen=True, slots=True)
class Hello:
    """Take charge. From now on the keeper answers this connection alone."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """A machine's way to the outside: a second process at the other end of a socket of the machine's.

    It has the machine's user, group and control group, and what the machine has not: the keeper's network
    namespace, behind the wall. It ends with its machine. Its one descriptor is `child_descriptor(0)`.
    """

    argv: tuple[str, ...]
    env: dict[str, str]

    def __post_init__(self) -> None:
        _check_argv(self.argv)
        _check_env(self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a machine's process. The packet's descriptors become the child's, see `child_descriptor`."""

    machine: str
    argv: tuple[str, ...]
    """`argv[0]` is an absolute path; nothing is searched, no shell."""
    env: dict[str, str]
    """The whole environment: nothing of the keeper's own is added."""
    uid: int
    gid: int
    cgroup: str | None
    """Name below the keeper's root group, made when missing; None: stay in the keeper's own."""
    network_namespace: bool
    """In a new, empty one, whose loopback stays down."""
    nice: int | None
    """-20 to 19; None: the keeper's own."""
    channels: tuple[Channel, ...]
    companion: Companion | None
    """Its socket is the machine's last descriptor. Refused unless the wall holds for the user id."""

    def __post_init__(self) -> None:
        check_name("machine", self.machine)
        _check_cgroup(self.cgroup)
        _check_argv(self.argv)
        _check_env(self.env)
        for what, number in (("uid", self.uid), ("gid", self.gid)):
            if not 0 <= number <= _MAX_ID:
                raise ValueError(f"{what} {number} is out of range")
        if self.nice is not None and not -20 <= self.nice <= 19:
            raise ValueError(f"nice {self.nice} is not in -20..19")
        if len(self.channels) > MAX_CHANNELS:
            raise ValueError(f"{len(self.channels)} channels are more than {MAX_CHANNELS}")
        if len({channel.name for channel in self.channels}) != len(self.channels):
            raise ValueError("two channels have the same name")


@dataclass(frozen=True, slots=True)
class Lend:
    """Give the near ends of a machine's channels (again). Also after its exit, until it is forgotten."""

    machine: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the packet's one descriptor under a name. Repeating it with the same file changes nothing."""

    name: str

    def __post_init__(self) -> None:
        check_name("file", self.name)


@dataclass(frozen=True, slots=True)
class LendFile:
    """Give a duplicate of a held descriptor."""

    name: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Close held descriptors. Names that are not held count as dropped."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListMachines:
    """Up to `MACHINES_PER_PAGE` machines in order of name, those after `after`."""

    after: str


@dataclass(frozen=True, slots=True)
class ListFiles:
    """Up to `FILES_PER_PAGE` names of held files in order, those after `after`."""

    after: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL; answered when the process is reaped, at once where it had already exited."""

    machine: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Close an exited machine's channels and remove its log. A machine not known counts as forgotten."""

    machine: str


@dataclass(frozen=True, slots=True)
class Weigh:
    """How much memory a machine's process has for itself alone."""

    machine: str


@dataclass(frozen=True, slots=True)
class LimitCgroup:
    """Set a group's memory limit, making the group when missing; None: no limit."""

    cgroup: str
    memory_bytes: int | None

    def __post_init__(self) -> None:
        _check_cgroup(self.cgroup)
        if self.memory_bytes is not None and not 0 < self.memory_bytes < 2**63:
            raise ValueError(f"memory limit {self.memory_bytes} is out of range")


@dataclass(frozen=True, slots=True)
class DropCgroup:
    """Remove an empty group. Kills nothing; a group that is not there counts as removed."""

    cgroup: str

    def __post_init__(self) -> None:
        _check_cgroup(self.cgroup)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseWall:
    """Put up the wall that companions need, or change it.

    What user ids `first_uid` and the `uids` - 1 after it send from the keeper's network namespace is refused,
    unless it goes to the internet.
    """

    first_uid: int
    uids: int
    allow: tuple[str, ...]
    """Networks (CIDR) that they may reach all the same."""
    deny: tuple[str, ...]
    """Networks that they may not reach, of the internet's addresses. `allow` goes before it."""

    def __post_init__(self) -> None:
        if not (self.first_uid > 0 and self.uids > 0 and self.first_uid + self.uids - 1 <= _MAX_ID):
            raise ValueError(f"user ids from {self.first_uid}, {self.uids} of them, are out of range")
        if len(self.allow) + len(self.deny) > MAX_NETWORKS:
            raise ValueError(f"{len(self.allow) + len(self.deny)} networks are more than {MAX_NETWORKS}")
        for network in (*self.allow, *self.deny):
            ipaddress.ip_network(network)  # Its `ValueError` is a sentence.


Request = (
    Hello
    | Start
    | Lend
    | Hold
    | LendFile
    | Drop
    | ListMachines
    | ListFiles
    | Kill
    | Forget
    | Weigh
    | LimitCgroup
    | DropCgroup
    | RaiseWall
)

OPERATIONS: dict[str, type[Request]] = {
    "hello": Hello,
    "start": Start,
    "lend": Lend,
    "hold": Hold,
    "lend_file": LendFile,
    "drop": Drop,
    "list_machines": ListMachines,
    "list_files": ListFiles,
    "kill": Kill,
    "forget": Forget,
    "weigh": Weigh,
    "limit_cgroup": LimitCgroup,
    "drop_cgroup": DropCgroup,
    "raise_wall": RaiseWall,
}
_OPERATION_NAMES = {kind: name for name, kind in OPERATIONS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Result of hello."""

    version: int
    epoch: int
    """Grows with every hello to this keeper process."""
    boot_id: str
    machines: int
    files: int


@dataclass(frozen=True, slots=True)
class Launched:
    """Result of start, with the near ends of the channels in the order asked. The program is running."""

    pid: int


@dataclass(frozen=True, slots=True)
class Lent:
    """Result of lend: the channels' names in the order of the descriptors."""

    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a machine's process ended: result of kill, and an event."""

    machine: str
    pid: int
    exit_code: int | None
    """None when a signal ended it."""
    signal: int | None
    text: str
    """In words: "killed by signal 9 (SIGKILL)"."""


@dataclass(frozen=True, slots=True)
class CompanionExit:
    """An event: a companion ended, and its machine runs on without a way to the outside."""

    machine: str
    text: str
    """In words, with the last that it said."""


@dataclass(frozen=True, slots=True)
class Weight:
    """Result of weigh: what goes when the process does. Of one that has exited it is gone already."""

    own_bytes: int
    """Anonymous memory, in the swap too. The kernel's own count, which may lag by half a megabyte or so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineEntry:
    """One machine of a listing."""

    machine: str
    pid: int
    uid: int
    cgroup: str | None
    exit: Exit | None
    """None while it runs."""
    companion_lost: str | None
    """How its companion ended, while the machine runs."""


@dataclass(frozen=True, slots=True)
class MachinePage:
    """Result of list_machines. With `more`, ask again after the last name."""

    entries: tuple[MachineEntry, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class FilePage:
    """Result of list_files. With `more`, ask again after the last name."""

    names: tuple[str, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Done:
    """Result of what has nothing to tell, and of lend_file, whose descriptor says it all."""


Result = Greeting | Launched | Lent | Exit | Weight | MachinePage | FilePage | Done


@dataclass(frozen=True, slots=True)
class Answer:
    """A result that has arrived; `read_body` makes the expected dataclass of `body`."""

    request_id: int
    body: object


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal that has arrived. Without an id it is about the connection, which is lost."""

    request_id: int | None
    code: Code
    message: str


def child_descriptor(index: int) -> int:
    """The number a started process sees: attached files come first, then its ends of the channels."""
    return 3 + index


def encode_request(request_id: int, request: Request) -> bytes:
    """Raises `Refusal` (bad request) when it does not fit into a packet."""
    body = dataclasses.asdict(request)
    return _encode({"id": request_id, "op": _OPERATION_NAMES[type(request)], "body": body}, request_id)


def decode_request(data: bytes) -> tuple[int, Request]:
    """Raises `Refusal`: bad message without an id to answer to, else bad request with the id."""
    try:
        packet = _decode(data)
        request_id = packet["id"]
        if type(request_id) is not int or not 0 <= request_id < 2**53:
            raise ValueError("id is not a counting number")  # noqa: TRY301
    except (ValueError, KeyError) as error:
        raise Refusal(Code.BAD_MESSAGE, f"not a request: {error}"[:400]) from error
    try:
        kind = OPERATIONS[_text(packet.get("op"))]
        return request_id, read_body(kind, packet.get("body"))
    except KeyError as error:
        raise Refusal(Code.BAD_REQUEST, f"no such operation: {error}"[:400], request_id) from error
    except ValueError as error:
        raise Refusal(Code.BAD_REQUEST, str(error)[:400], request_id) from error


def encode_result(request_id: int, result: Result) -> bytes:
    return _encode({"id": request_id, "result": dataclasses.asdict(result)}, request_id)


def encode_failure(request_id: int | None, code: Code, message: str) -> bytes:
    """The message is cut so that it always fits."""
    return _encode({"id": request_id, "failure": {"code": code, "message": message[:2000]}}, request_id)


def encode_exited(exited: Exit) -> bytes:
    return _encode({"event": "exited", "body": dataclasses.asdict(exited)}, None)


def encode_companion_exited(exited: CompanionExit) -> bytes:
    return _encode({"event": "companion_exited", "body": dataclasses.asdict(exited)}, None)


def decode_packet(data: bytes) -> Answer | Failure | Exit | CompanionExit:
    """What the keeper sent. Raises `ValueError`."""
    packet = _decode(data)
    match packet:
        case {"id": int() as request_id, "result": body}:
            return Answer(request_id, body)
        case {
            "id": int() | None as failed_id,
            "failure": {"code": str() as code, "message": str() as message},
        }:
            return Failure(failed_id, Code(code), message)
        case {"event": "exited", "body": body}:
            return read_body(Exit, body)
        case {"event": "companion_exited", "body": body}:
            return read_body(CompanionExit, body)
        case _:
            raise ValueError(f"neither result, failure nor event: {sorted(packet)}"[:400])


def read_body(kind: type[_T], body: object) -> _T:
    """Make a message dataclass of decoded JSON. Raises `ValueError` that names the field."""
    if not isinstance(body, dict):
        raise ValueError(f"body of {kind.__name__} is not an object")  # noqa: TRY004 - one error for bad input
    fields = cast(dict[str, object], body)
    hints = _hints(cast(Hashable, kind))  # mypy does not see that a class is hashable.
    if fields.keys() != hints.keys():
        wrong = ", ".join(sorted(repr(name) for name in fields.keys() ^ hints.keys()))
        raise ValueError(f"missing or unknown in {kind.__name__}: {wrong}")
    return kind(**{name: _read(hint, fields[name], name) for name, hint in hints.items()})


def send_packet(sock: socket.socket, data: bytes, files: Sequence[int]) -> None:
    """Send one packet. Raises `BlockingIOError` when a non-blocking socket has no room now, or `OSError`."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors, which the caller owns. Empty bytes mean that the peer has closed.

    Raises `ValueError` for a packet that is too large or has lost descriptors (those that came are closed),
    `BlockingIOError` when there is no packet now, or `OSError`.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_MESSAGE_BYTES,
        socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize),
        socket.MSG_CMSG_CLOEXEC,
    )
    files = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(payload[: len(payload) - len(payload) % files.itemsize])
    if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(files)
        if data:
            raise ValueError("a packet is too large, or there is no room for its descriptors")
        return b"", []
    return data, files.tolist()


def close_all(files: Iterable[int]) -> None:
    """Close descriptors that the caller owns."""
    for file in files:
        os.close(file)


def socket_address(folder_descriptor: int) -> str:
    """Address of the keeper's socket in an open folder: a socket path may have 107 bytes, a folder's more."""
    return f"/proc/self/fd/{folder_descriptor}/{SOCKET_NAME}"


def check_name(what: str, name: str) -> None:
    """Names become file names and groups, so they must not lead anywhere else. Raises `ValueError`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} name {name[:200]!r} is not 1 to 128 of letters, digits, '_', '-', '.'")


def _encode(packet: dict[str, object], request_id: int | None) -> bytes:
    data = json.dumps(packet, separators=(",", ":")).encode("ascii")
    if len(data) > MAX_MESSAGE_BYTES:
        message = f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}"
        raise Refusal(Code.BAD_REQUEST, message, request_id)
    return data


def _decode(data: bytes) -> dict[str, object]:
    try:
        packet: object = json.loads(data)
    except RecursionError as error:  # A page full of brackets.
        raise ValueError("nested too deep") from error
    if not isinstance(packet, dict):
        raise ValueError("not an object")  # noqa: TRY004 - one error for bad input
    return cast(dict[str, object], packet)


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(hint: Any, value: object, where: str) -> object:
    """`value` as `hint` says, for the few hints that messages use."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is types.UnionType:  # Only `X | None` occurs.
        return None if value is None else _read(arguments[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(arguments[0], each, where) for each in cast(list[object], value))
    if origin is dict and isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return {key: _read(arguments[1], each, where) for key, each in items}
    if dataclasses.is_dataclass(hint):
        return read_body(cast(type[object], hint), value)
    if isinstance(hint, type) and issubclass(hint, StrEnum) and isinstance(value, str):
        return hint(value)
    if type(value) is not hint:  # Exactly: JSON's true is not the number 1.
        raise ValueError(f"{where} has the wrong type ({type(value).__name__})")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("op is not a text")  # noqa: TRY004 - one error for bad input
    return value


def _check_cgroup(name: str | None) -> None:
    if name is not None:
        check_name("cgroup", name)


def _check_argv(argv: tuple[str, ...]) -> None:
    if not argv or not argv[0].startswith("/"):
        raise ValueError("argv does not begin with an absolute path")
    for argument in argv:
        _check_exec_text("argv", argument)


def _check_env(env: dict[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name:
            raise ValueError(f"environment name {name[:200]!r} is empty or has an equals sign")
        _check_exec_text("env", name + value)


def _check_exec_text(what: str, text: str) -> None:
    if "\0" in text:
        raise ValueError(f"{what} holds a NUL character")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds a character that no file system encoding has") from error

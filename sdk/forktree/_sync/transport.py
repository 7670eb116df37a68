# Generated from sdk/forktree/_async/transport.py by `make generate`; change that file.
"""One request and its answer: within its deadline, again where that is safe, errors by their class."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import httpx2
import pydantic

from forktree._answers import explained, refusal
from forktree._flavours import Lock, wait, within
from forktree._following import Following
from forktree._retrying import Retries
from forktree._settings import Reach
from forktree._sync.connecting import Connection, Place
from forktree.errors import AnswerLost, ClientError, Unauthorized, UnexpectedAnswer, Unreachable
from forktree.wire import IDEMPOTENCY_KEY

ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

MAX_ANSWER_BYTES = 110 << 20
"""16 MiB of output in which every byte has to be escaped, and what stands around it."""

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 10.0
"""An agent closes a connection that stands idle for 20: one that it may be closing is not used."""
CONNECTIONS = 256
"""An agent lets in 512 of one address."""
ATTEMPT_SECONDS = 125.0
"""An agent answers a create or a fork after 110 at most, and can then be asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One thing to ask of the server."""

    method: str
    path: str
    """From its slash on, every part that is not ours escaped. Below the namespace's prefix, unless it begins
    with `/v1/`."""
    body: Mapping[str, object] | None = None
    query: Mapping[str, str] | Sequence[tuple[str, str]] | None = None
    key: str | None = None
    """Sent as `Idempotency-Key`."""
    seconds: float = 60.0
    """From now until the caller has its answer or an error, with all attempts and waits."""
    attempt_seconds: float = ATTEMPT_SECONDS
    silence_seconds: float = ATTEMPT_SECONDS
    """How long nothing at all may come or go in an attempt."""
    repeatable: bool = False
    """Done twice, it has the same result as done once, beyond what its method and key say."""

    @property
    def may_repeat(self) -> bool:
        return self.repeatable or self.method in {"GET", "DELETE", "PUT"} or self.key is not None


def new_key() -> str:
    return f"sdk-{secrets.token_hex(16)}"


class Attempt(Protocol[T_co]):
    """One try, which is over at `until` (monotonic)."""

    def __call__(self, until: float, /) -> T_co: ...


class Transport:
    """The way to the server. May be used by many at once."""

    def __init__(self, connection: Connection, retries: Retries, following: Following) -> None:
        self._connection = connection
        self._retries = retries
        self._following = following
        self._lock = Lock()
        self._https: dict[Place, httpx2.Client] = {}
        self._closed = False

    def close(self) -> None:
        """Close all connections. Calls after it raise `ClientError`."""
        with self._lock:
            self._closed = True
            while self._https:
                _, http = self._https.popitem()
                http.close()

    def reach(self) -> Reach:
        """Where requests go and what goes with them."""
        place = self._connection.place()
        return Reach(url=place.url + place.prefix, tls=place.tls, token=self._connection.token())

    def ask(self, call: Call, answer: type[ModelT]) -> ModelT:
        """The answer's body. Raises `ClientError`."""
        raw = self.raw(call)
        try:
            return answer.model_validate_json(raw)
        except pydantic.ValidationError as err:
            raise unexpected(call, err) from err

    def raw(self, call: Call) -> bytes:
        """The answer's body as it came. Raises `ClientError`."""
        return self._repeated(call, lambda until: self._whole(call, until, None))

    def send(self, call: Call, content: Callable[[], Iterable[bytes]]) -> bytes:
        """As `raw`, with the body that `content` gives, anew for each attempt."""
        return self._repeated(call, lambda until: self._whole(call, until, content))

    def receive(
        self,
        call: Call,
        begin: Callable[[], object],
        take: Callable[[bytes], object],
        *,
        silence_seconds: float,
    ) -> None:
        """The answer's body piece by piece: `begin` before the first of each attempt. Raises
        `ClientError`."""

        def attempt(until: float) -> None:
            begin()
            with self.streamed(call, silence_seconds=silence_seconds) as response:
                for piece in response.iter_bytes():
                    take(piece)
                    if time.monotonic() > until:
                        raise AnswerLost(f"{call.path} did not come within {call.seconds:g} seconds")

        self._repeated(call, attempt)

    @contextmanager
    def streamed(self, call: Call, *, silence_seconds: float) -> Generator[httpx2.Response]:
        """An answer that is read piece by piece: one attempt, which ends after `silence_seconds` without a
        byte.

        In the block, what reading raises becomes a `ClientError`, as a refusal does before it.
        """
        place, http = self._open()
        response: httpx2.Response | None = None
        try:
            response = self._begun(place, http, call, silence_seconds)
            yield response
        except TimeoutError as err:
            raise AnswerLost(f"{place.url} was too slow to say what is wrong with {call.path}") from err
        except httpx2.TransportError as err:
            raise explained(err, place.url, call.method, call.path) from err
        finally:
            if response is not None:
                response.close()

    def _repeated(self, call: Call, attempt: Attempt[T]) -> T:
        """What `attempt` comes to in the end."""
        deadline = time.monotonic() + call.seconds
        attempts = 0
        while True:
            try:
                return attempt(min(deadline, time.monotonic() + call.attempt_seconds))
            except ClientError as err:
                if isinstance(err, Unreachable):
                    self._connection.lost()
                seconds = self._retries.wait_seconds(attempts, err, repeatable=call.may_repeat)
                if seconds is None or time.monotonic() + seconds >= deadline:
                    if isinstance(err, AnswerLost):
                        err.idempotency_key = call.key
                    raise
            wait(seconds)
            attempts += 1

    def _whole(self, call: Call, until: float, content: Callable[[], Iterable[bytes]] | None) -> bytes:
        place, http = self._open()
        seconds = max(0.001, until - time.monotonic())
        try:
            with within(seconds):
                silence = min(seconds, call.silence_seconds)
                response = self._begun(place, http, call, silence, content)
                try:
                    return _read(response, until)
                finally:
                    response.close()
        except TimeoutError as err:
            sentence = f"{place.url} gave no answer to {call.method} {call.path} in {seconds:.3g} seconds"
            raise AnswerLost(sentence) from err
        except httpx2.TransportError as err:
            raise explained(err, place.url, call.method, call.path) from err

    def _begun(
        self,
        place: Place,
        http: httpx2.Client,
        call: Call,
        seconds: float,
        content: Callable[[], Iterable[bytes]] | None = None,
    ) -> httpx2.Response:
        """An answer that is no error, its body unread; the caller closes it.

        Raises `ClientError`, and as it comes what sending and reading raise. `seconds`: for each read and
        write.
        """
        for fresh in (False, True):
            token = self._connection.token(fresh=fresh)
            body = None if content is None else content()
            headers = {"Authorization": f"Bearer {token}", **self._following.headers()}
            request = _request(http, place, call, headers, seconds=seconds, content=body)
            response = http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                refused = refusal(response, _read(response, time.monotonic() + CONNECT_SECONDS))
            finally:
                response.close()
            # What is refused so was not begun, and the token may have ended just now.
            if not isinstance(refused, Unauthorized) or fresh or not self._connection.renews:
                raise refused
        raise AssertionError("both attempts return or raise")

    def _open(self) -> tuple[Place, httpx2.Client]:
        place = self._connection.place()
        with self._lock:
            if self._closed:
                raise ClientError("this client is closed: make another")
            http = self._https.get(place)
            if http is None:
                http = self._https[place] = httpx2.Client(
                    verify=place.tls,
                    # A token goes to the agent, not through whatever the environment names.
                    trust_env=False,
                    limits=httpx2.Limits(
                        max_connections=CONNECTIONS,
                        max_keepalive_connections=CONNECTIONS,
                        keepalive_expiry=IDLE_SECONDS,
                    ),
                )
            return place, http


def _request(
    http: httpx2.Client,
    place: Place,
    call: Call,
    headers: dict[str, str],
    *,
    seconds: float,
    content: Iterable[bytes] | None = None,
) -> httpx2.Request:
    if call.key is not None:
        headers[IDEMPOTENCY_KEY] = call.key
    return http.build_request(
        call.method,
        place.url + ("" if call.path.startswith("/v1/") else place.prefix) + call.path,
        params=dict(call.query) if isinstance(call.query, Mapping) else list(call.query or ()),
        json=call.body,
        content=content,
        headers=headers,
        timeout=httpx2.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds)),
    )


def _read(response: httpx2.Response, until: float) -> bytes:
    """The whole body. Raises `TimeoutError` at `until` (monotonic), `UnexpectedAnswer` for an endless
    one."""
    pieces: list[bytes] = []
    size = 0
    for piece in response.iter_bytes():
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise UnexpectedAnswer(f"an answer of more than {MAX_ANSWER_BYTES} bytes is not read as a whole")
        if time.monotonic() > until:
            raise TimeoutError
        pieces.append(piece)
    return b"".join(pieces)


def unexpected(call: Call, error: Exception) -> UnexpectedAnswer:
    return UnexpectedAnswer(f"what {call.method} {call.path} answered is none of this API: {error}")

"""Images from a registry on loopback: what is taken over, who gets in, and registries that misbehave."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from forktree_agent.http.certificates import self_signed
from forktree_agent.images.credentials import Login
from forktree_agent.images.errors import (
    ImageError,
    ImageInvalid,
    ImageMissing,
    ImagePullFailed,
    NoRoomForImage,
    PullBroken,
    RegistryUnwell,
)
from forktree_agent.images.pulling import Images, ImageSettings
from forktree_agent.images.references import parse_named_registry
from forktree_agent.images.registry import BadAuthorities, Rate
from forktree_agent.images.store import ImageFolderUnusable, KeptImage
from unit.image_registry import INDEX, LAYER, Entry, Registry, basic, fault, zipped

SECONDS = 60.0
SPACE = 64 << 20


@dataclass(slots=True)
class Stand:
    """A registry, and an agent's part that pulls from it."""

    registry: Registry
    settings: ImageSettings
    images: Images
    in_use: set[str]
    """Digests that the engine says it uses."""

    async def pull(
        self,
        name: str = "app",
        login: Login | None = None,
        *,
        at: Registry | None = None,
        namespace: str = "team",
    ) -> KeptImage:
        """`name` is what follows the registry, which is `at`, or else the stand's own."""
        deadline = asyncio.get_running_loop().time() + SECONDS
        reference = f"oci:{(at or self.registry).host}/{name}"
        async with self.images.image(reference, login, namespace=namespace, deadline=deadline) as image:
            return image

    async def fails(
        self,
        kind: type[ImageError],
        name: str = "app",
        login: Login | None = None,
        *,
        at: Registry | None = None,
    ) -> str:
        """The sentence."""
        with pytest.raises(kind) as failed:
            await self.pull(name, login, at=at)
        assert type(failed.value) is kind
        return failed.value.message

    def partial(self) -> list[Path]:
        return list((self.settings.folder / "partial").iterdir())

    def kept(self) -> list[Path]:
        return sorted(self.settings.folder.glob("*.erofs"))


@asynccontextmanager
async def pulling(folder: Path, registry: Registry, **changes: Any) -> AsyncGenerator[Stand]:
    in_use: set[str] = set()

    async def free_image(digest: str) -> bool:
        return digest not in in_use

    settings = ImageSettings(
        folder=folder,
        space_bytes=SPACE,
        unpack_uid=204_095,
        named=(parse_named_registry(f"{registry.host}=http"),),
        retry_seconds=(0.0, 0.0),
    )
    settings = dataclasses.replace(settings, **changes)
    async with Images.running(settings, user_agent="test", free_image=free_image) as images:
        yield Stand(registry, settings, images, in_use)


@pytest.fixture
async def registry() -> AsyncGenerator[Registry]:
    async with Registry.running() as registry:
        yield registry


@pytest.fixture
async def stand(tmp_path: Path, registry: Registry) -> AsyncGenerator[Stand]:
    async with pulling(tmp_path / "images", registry) as stand:
        yield stand
        assert stand.partial() == []


async def until(holds: Callable[[], bool]) -> None:
    """Of what nothing tells: other processes, and what they have done."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def one_file(content: bytes = b"content") -> bytes:
    return zipped([Entry(name="file", content=content)])


async def test_an_image_is_pulled_once_and_its_configuration_taken_over(stand: Stand) -> None:
    config = {
        "Env": ["PATH=/app/bin", "MODE=a=b", "FORKTREE_SESSION=x", "=", "no name=x"],
        "WorkingDir": "/app",
    }
    digest = stand.registry.add_image(one_file(), one_file(b"upper"), tag="1.2", config=config)
    image = await stand.pull("team/app:1.2")
    assert f"sha256:{image.digest}" == digest
    assert image.runtime.env == {"PATH": "/app/bin", "MODE": "a=b"}
    assert image.runtime.working_folder == "/app"
    assert image.path.stat().st_size == image.bytes
    asked = len(stand.registry.asked)
    for again in ("team/app:1.2", f"team/app@{digest}"):
        assert (await stand.pull(again)).path == image.path
    # Each is asked for its manifest, and nothing else is fetched again.
    assert [path.rpartition("/")[0] for path in stand.registry.asked[asked:]] == [
        "/v2/team/app/manifests"
    ] * 2


async def test_of_an_index_the_manifest_for_this_machine_is_taken(stand: Stand) -> None:
    digest = stand.registry.add_image(one_file(), tag="for-amd64")
    described = {"digest": digest, "size": 1, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    other = described | {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "arm64"}}
    here = described | {"platform": {"os": "linux", "architecture": "amd64"}}
    stand.registry.add_manifest({"mediaType": INDEX, "manifests": [other, here]}, "latest")
    assert f"sha256:{(await stand.pull()).digest}" == digest
    stand.registry.add_manifest({"mediaType": INDEX, "manifests": [other]}, "latest")
    assert "linux/amd64" in await stand.fails(ImageInvalid)


async def test_who_asks_at_once_shares_one_pull(stand: Stand) -> None:
    stand.registry.add_image(one_file(os.urandom(100_000)))
    stand.registry.gate = asyncio.Event()
    pulls = [asyncio.create_task(stand.pull(), name=f"pull-{number}") for number in range(4)]
    async with asyncio.timeout(SECONDS):
        await stand.registry.stopped.wait()
        await until(lambda: sum("manifests" in path for path in stand.registry.asked) == 4)
    pulls[0].cancel()
    stand.registry.gate.set()
    assert len({(await each).path for each in pulls[1:]}) == 1
    assert sum("blobs" in path for path in stand.registry.asked) == 2  # One layer, one configuration.
    with pytest.raises(asyncio.CancelledError):
        await pulls[0]


async def test_a_pull_that_nobody_waits_for_any_more_ends(stand: Stand) -> None:
    stand.registry.add_image(one_file(os.urandom(100_000)))
    stand.registry.gate = asyncio.Event()
    pull = asyncio.create_task(stand.pull(), name="pull")
    async with asyncio.timeout(SECONDS):
        await stand.registry.stopped.wait()
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        await until(lambda: not stand.partial())
    assert stand.kept() == []
    stand.registry.gate.set()
    assert (await stand.pull()).bytes > 0


@pytest.mark.parametrize("asks", ["token", "basic"])
async def test_a_private_image_takes_a_login(stand: Stand, asks: str) -> None:
    stand.registry.add_image(one_file())
    stand.registry.user, stand.registry.basic = "me:secret", asks == "basic"
    said = await stand.fails(ImagePullFailed)
    assert "may not be pulled without a login: " in said and ("required" in said or "wrong password" in said)
    said = await stand.fails(ImagePullFailed, login=Login("me", "guess"))
    assert "may not be pulled with the login of its imagePullSecret" in said and "guess" not in said
    image = await stand.pull(login=Login("me", "secret"))
    # That it is here by now lets nobody have it who may not pull it.
    assert "without a login" in await stand.fails(ImagePullFailed)
    assert (await stand.pull(login=Login("me", "secret"))).path == image.path
    assert all(each in {"", basic("me:guess"), basic("me:secret")} for each in stand.registry.logins)


async def test_a_redirect_is_followed_and_takes_no_login_along(stand: Stand) -> None:
    stand.registry.add_image(one_file())
    stand.registry.user, stand.registry.basic = "me:secret", True
    async with Registry.running() as elsewhere:
        seen: list[str | None] = []

        def note(request: web.Request) -> None:
            seen.append(request.headers.get("Authorization"))

        elsewhere.answer, elsewhere.blobs = note, stand.registry.blobs

        def away(request: web.Request) -> web.Response | None:
            if "/blobs/" not in request.path or "Authorization" not in request.headers:
                return None
            return web.Response(status=307, headers={"Location": f"http://{elsewhere.host}{request.path}"})

        stand.registry.answer = away
        said = await stand.fails(ImagePullFailed, login=Login("me", "secret"))
        assert f"http://{elsewhere.host} is not asked, as it is no https address" in said
        named = (*stand.settings.named, parse_named_registry(f"{elsewhere.host}=http"))
        async with pulling(stand.settings.folder.parent / "other", stand.registry, named=named) as other:
            await other.pull(login=Login("me", "secret"))
        assert seen == [None, None]


async def test_a_login_is_not_shown_to_whom_a_redirect_leads_to(stand: Stand) -> None:
    stand.registry.add_image(one_file())
    stand.registry.user, stand.registry.basic = "me:secret", True
    async with Registry.running() as elsewhere, Registry.running() as thief:
        challenge = {"WWW-Authenticate": f'Bearer realm="http://{thief.host}/token"'}
        elsewhere.answer = lambda _: web.Response(status=401, headers=challenge)

        def away(request: web.Request) -> web.Response | None:
            if "/blobs/" not in request.path:
                return None
            return web.Response(status=307, headers={"Location": f"http://{elsewhere.host}{request.path}"})

        stand.registry.answer = away
        named = tuple(
            parse_named_registry(f"{each.host}=http") for each in (stand.registry, elsewhere, thief)
        )
        async with pulling(stand.settings.folder.parent / "other", stand.registry, named=named) as other:
            await other.fails(ImagePullFailed, login=Login("me", "secret"))
        assert elsewhere.asked != [] and thief.asked == []


@asynccontextmanager
async def beside(folder: Path, registry: Registry, **changes: Any) -> AsyncGenerator[tuple[Stand, Registry]]:
    """A stand, and a second registry that it asks as well."""
    async with Registry.running() as second:
        named = tuple(parse_named_registry(f"{each.host}=http") for each in (registry, second))
        async with pulling(folder, registry, named=named, **changes) as stand:
            yield stand, second


async def test_who_can_show_only_an_images_manifest_does_not_get_it(
    tmp_path: Path, registry: Registry
) -> None:
    digest = registry.add_image(one_file())
    async with beside(tmp_path / "images", registry) as (stand, second):
        image = await stand.pull()
        second.manifests = dict(registry.manifests)
        assert "is not in its registry" in await stand.fails(ImageMissing, at=second)
        assert "is not in its registry" in await stand.fails(ImageMissing, f"app@{digest}", at=second)
        blobs_asked = sum("/blobs/" in each for each in registry.asked)
        assert await stand.pull("other/app") == image  # Another repository: every blob was to be seen.
        assert sum("/blobs/" in each for each in registry.asked) == 2 * blobs_asked
        second.blobs = dict(registry.blobs)
        assert await stand.pull(at=second) == image
        asked = len(second.asked)
        assert await stand.pull(at=second) == image
        assert len(second.asked) == asked + 1
    async with pulling(tmp_path / "images", registry) as stand:
        asked = len(registry.asked)
        assert await stand.pull() == image == await stand.pull("other/app")
        assert len(registry.asked) == asked + 2


async def test_a_registry_that_stalls_keeps_nobody_from_the_same_image_elsewhere(
    tmp_path: Path, registry: Registry
) -> None:
    registry.add_image(one_file(os.urandom(100_000)))
    async with beside(tmp_path / "images", registry) as (stand, hostile):
        hostile.manifests, hostile.blobs = dict(registry.manifests), dict(registry.blobs)
        hostile.gate = asyncio.Event()
        held = asyncio.create_task(stand.pull(at=hostile), name="held")
        async with asyncio.timeout(SECONDS):
            await hostile.stopped.wait()
            image = await stand.pull()
            hostile.gate.set()
            assert (await held).path == image.path


async def test_one_namespace_leaves_room_for_the_pulls_of_others(tmp_path: Path, registry: Registry) -> None:
    registry.add_image(one_file(os.urandom(100_000)))
    async with beside(tmp_path / "images", registry) as (stand, hostile):
        hostile.gate = asyncio.Event()
        tags = [f"t{number}" for number in range(6)]
        for tag in tags:
            hostile.add_image(one_file(os.urandom(100_000)), tag=tag)
        held = [
            asyncio.create_task(stand.pull(f"app:{tag}", at=hostile, namespace="hostile"), name=tag)
            for tag in tags
        ]
        async with asyncio.timeout(SECONDS):
            await until(lambda: sum("manifests" in each for each in hostile.asked) == len(tags))
            await hostile.stopped.wait()
            assert (await stand.pull()).bytes > 0
            hostile.gate.set()
            assert all([(await each).bytes > 0 for each in held])


async def test_what_a_manifest_claims_gives_no_image_up(tmp_path: Path, registry: Registry) -> None:
    registry.add_image(zipped([Entry(name="a", content=os.urandom(1 << 20))]), tag="victim")
    layer = {"digest": "sha256:" + "0" * 64, "mediaType": LAYER}
    async with pulling(tmp_path / "images", registry, space_bytes=3 << 20) as stand:
        victim = await stand.pull("app:victim")
        for size, kind in ((5 << 19, ImageMissing), (1 << 30, NoRoomForImage)):
            registry.add_image(one_file(), top={"layers": [layer | {"size": size}]})
            await stand.fails(kind)
            assert stand.kept() == [victim.path]


async def test_a_blob_that_trickles_is_given_up(tmp_path: Path, registry: Registry) -> None:
    registry.add_image(one_file(os.urandom(10_000)))

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x")
                await asyncio.sleep(0.05)
        except ConnectionError:
            return response

    async with pulling(tmp_path / "images", registry, lowest_rate=Rate(1 << 20, after_seconds=0.2)) as stand:
        registry.answer = blobs(trickle)
        assert "is slower than" in await stand.fails(ImagePullFailed)
        registry.answer = None
        assert (await stand.pull()).bytes > 0


async def test_redirects_have_an_end(stand: Stand) -> None:
    stand.registry.answer = lambda request: web.Response(status=302, headers={"Location": request.path})
    assert "redirects more than 5 times" in await stand.fails(ImagePullFailed)


async def test_a_registry_is_believed_by_its_certificate_alone(tmp_path: Path) -> None:
    certificates = tmp_path / "tls"
    identity = self_signed(certificates, ["127.0.0.1"])
    async with Registry.running(tls=identity.context) as registry:
        registry.add_image(one_file())
        named = (parse_named_registry(registry.host),)
        async with pulling(tmp_path / "images", registry, named=named) as stand:
            assert "does not prove who it is" in await stand.fails(ImagePullFailed)
        trusting = {"named": named, "authorities": certificates / "ca.crt"}
        async with pulling(tmp_path / "images", registry, **trusting) as stand:
            assert (await stand.pull()).bytes > 0
        with pytest.raises(BadAuthorities, match="has no certificates in PEM"):
            async with pulling(tmp_path / "images", registry, authorities=certificates / "ca.key"):
                pass


Misbehaviour = Callable[[web.Request], Any]


def blobs(answer: Misbehaviour) -> Misbehaviour:
    return lambda request: answer(request) if "/blobs/" in request.path else None


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(bytes(1 << 16))
    except ConnectionError:
        return response


async def cut_short(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"{")
    assert request.transport is not None
    request.transport.close()
    return response


MISBEHAVING: dict[str, tuple[Misbehaviour, type[ImageError], str]] = {
    "another blob": (blobs(lambda _: web.Response(body=b"x")), RegistryUnwell, "bytes early"),
    "a blob without end": (blobs(endless), ImageInvalid, "is longer than the"),
    "a blob cut short": (blobs(cut_short), RegistryUnwell, "did not answer to the end"),
    "a manifest without end": (endless, ImageInvalid, "manifest is larger than"),
    "no manifest": (lambda _: web.Response(text="<html>"), ImageInvalid, "manifest is none"),
    "broken": (lambda _: web.Response(status=503, text="x" * 100_000), RegistryUnwell, "answers 503"),
    "busy": (lambda _: fault(429, "BUSY", "slow\ndown \x1b[31m"), RegistryUnwell, "429: slow down [31m"),
    "forbidden": (lambda _: fault(403, "DENIED", "not you"), ImagePullFailed, "without a login: not you"),
    "absent": (lambda _: fault(404, "UNKNOWN", "no repository"), ImageMissing, "registry: no repository"),
    "long winded": (lambda _: fault(404, "A", "x" * 9000), ImageMissing, "xxx..."),
    "token elsewhere": (
        lambda _: web.Response(
            status=401, headers={"WWW-Authenticate": 'Bearer realm="http://169.254.169.254/latest"'}
        ),
        ImagePullFailed,
        "http://169.254.169.254:80 is not asked",
    ),
    "to an address of the cluster": (
        lambda _: web.Response(status=302, headers={"Location": "https://10.96.0.1/api"}),
        ImagePullFailed,
        "10.96.0.1 is not at a public address",
    ),
    "to a name of the machine": (
        lambda _: web.Response(status=302, headers={"Location": "https://localhost:6443/api"}),
        ImagePullFailed,
        "localhost is not at a public address",
    ),
    "to an address spelled as a number": (
        lambda _: web.Response(status=302, headers={"Location": "https://2130706433:6443/api"}),
        ImagePullFailed,
        "2130706433 is not at a public address",
    ),
    "to an address that ends in a dot": (
        lambda _: web.Response(status=302, headers={"Location": "https://127.0.0.1.:6443/api"}),
        ImagePullFailed,
        "127.0.0.1. is not at a public address",
    ),
    "to a name with an empty part": (
        blobs(lambda _: web.Response(status=302, headers={"Location": "https://a..b/"})),
        ImagePullFailed,
        "a..b is no name of a server",
    ),
    "to a name with a part too long": (
        blobs(lambda _: web.Response(status=302, headers={"Location": f"https://{'a' * 64}.com/"})),
        ImagePullFailed,
        "a.com is no name of a server",
    ),
    "to a file": (
        lambda _: web.Response(status=302, headers={"Location": "file:///etc/passwd"}),
        ImagePullFailed,
        "no https address",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISBEHAVING)
async def test_a_registry_that_misbehaves_is_told_of_in_one_sentence(stand: Stand, name: str) -> None:
    stand.registry.answer, kind, sentence = MISBEHAVING[name]
    # As long as the configuration: so it is its digest that is wrong.
    stand.registry.add_image(one_file())
    said = await stand.fails(kind)
    assert sentence in said, said
    assert said.isprintable() and len(said) < 600
    assert stand.kept() == []
    stand.registry.answer = None
    assert (await stand.pull()).bytes > 0  # Whatever it said, others are served.


async def test_a_defect_met_by_one_pull_ends_that_pull_alone(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.registry.add_image(one_file())

    def broken(body: bytes) -> Any:
        raise ValueError(body)

    with monkeypatch.context() as patched:
        patched.setattr("forktree_agent.images.pulling.read_runtime", broken)
        assert "is a defect of the node's agent" in await stand.fails(PullBroken)
    assert (await stand.pull()).bytes > 0


async def test_slow_name_servers_take_no_threads_of_others(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, asked = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> Any:
        asked.set()
        answered.wait(SECONDS)
        raise socket.gaierror(socket.EAI_AGAIN, "slow")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    deadline = asyncio.get_running_loop().time() + SECONDS

    async def pull(number: int) -> None:
        async with stand.images.image(
            f"oci:slow{number}.example.com/app", None, namespace="team", deadline=deadline
        ):
            pass

    pulls = [asyncio.create_task(pull(number), name=f"pull-{number}") for number in range(64)]
    try:
        async with asyncio.timeout(SECONDS):
            await until(asked.is_set)
            assert await asyncio.to_thread(lambda: "soon") == "soon"
    finally:
        answered.set()
        for each in pulls:
            each.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)


async def test_a_blob_with_another_digest_is_no_image(stand: Stand) -> None:
    layer = one_file()
    stand.registry.add_image(layer)
    for digest, data in stand.registry.blobs.items():
        if data == layer:
            stand.registry.blobs[digest] = bytes(len(layer))
    assert "another blob than" in await stand.fails(ImageInvalid)


async def test_a_manifest_with_another_digest_is_no_image(stand: Stand) -> None:
    digest = stand.registry.add_image(one_file())
    stand.registry.manifests[digest] = (stand.registry.manifests[digest][0], b"{}")
    assert "another manifest than" in await stand.fails(ImageInvalid, f"app@{digest}")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": []}, "has 0 layers"),
        (
            {"layers": [{"digest": "sha256:" + "0" * 64, "size": 1, "mediaType": "a/b"}]},
            "kind that cannot be read",
        ),
        ({"config": {"digest": "md5:0", "size": 1, "mediaType": "a"}}, "configuration of a kind"),
        ({"mediaType": "application/vnd.example"}, "is no image: application/vnd.example"),
        ({"config": 5}, "manifest is none"),
    ],
)
async def test_a_manifest_of_something_else_is_no_image(
    stand: Stand, change: dict[str, Any], sentence: str
) -> None:
    stand.registry.add_image(one_file(), top=change)
    assert sentence in await stand.fails(ImageInvalid)


async def test_what_may_pass_is_tried_again(stand: Stand) -> None:
    stand.registry.add_image(one_file())
    refused = [0]

    def twice(request: web.Request) -> web.Response | None:
        refused[0] += 1
        return fault(502, "", "") if refused[0] in {1, 2, 4} else None

    stand.registry.answer = twice
    assert (await stand.pull()).bytes > 0


async def test_a_registry_that_is_not_named_is_asked_only_at_public_addresses(
    tmp_path: Path, registry: Registry
) -> None:
    async with pulling(tmp_path / "images", registry, named=()) as stand:
        assert "127.0.0.1 is not at a public address" in await stand.fails(ImagePullFailed)
        deadline = asyncio.get_running_loop().time() + SECONDS
        plain = ("localhost", "10.0.0.1:5000", "169.254.169.254", "0.0.0.0", "127.0.0.1:80")
        odd = ("2130706433", "127.1", "0127.0.0.1", "0x7f.1", "0x7f000001", "127.0.0.0x1")
        for host in (*plain, *odd):
            with pytest.raises(ImagePullFailed, match="is not at a public address"):
                async with stand.images.image(f"oci:{host}/app", None, namespace="team", deadline=deadline):
                    pass
    assert registry.asked == []


async def test_only_named_registries_are_asked_where_that_is_said(tmp_path: Path, registry: Registry) -> None:
    registry.add_image(one_file())
    async with pulling(tmp_path / "images", registry, only_named=True) as stand:
        assert (await stand.pull()).bytes > 0
        deadline = asyncio.get_running_loop().time() + SECONDS
        with pytest.raises(ImagePullFailed, match="none that this cluster takes images from"):
            async with stand.images.image(
                "oci:registry.example.com/app", None, namespace="team", deadline=deadline
            ):
                pass


async def test_the_image_used_longest_ago_gives_way_and_one_in_use_never(
    tmp_path: Path, registry: Registry
) -> None:
    for tag in ("a", "b", "c", "d"):
        registry.add_image(zipped([Entry(name=tag, content=tag.encode() * (1 << 20))]), tag=tag)
    async with pulling(tmp_path / "images", registry, space_bytes=(5 << 20) // 2) as stand:
        a, b = await stand.pull("app:a"), await stand.pull("app:b")
        await stand.pull("app:a")
        c = await stand.pull("app:c")
        assert stand.kept() == sorted([a.path, c.path]) and not b.path.exists()
        stand.in_use |= {a.digest}
        d = await stand.pull("app:d")
        assert stand.kept() == sorted([a.path, d.path])
        stand.in_use |= {d.digest}
        assert "are in use" in await stand.fails(NoRoomForImage, "app:b")
        assert stand.kept() == sorted([a.path, d.path])


async def test_an_image_larger_than_the_space_is_refused(tmp_path: Path, registry: Registry) -> None:
    registry.add_image(gzip.compress(bytes(1)), tag="declared", top={})
    registry.add_image(zipped([Entry(name="a", content=bytes(3 << 20))]))
    async with pulling(tmp_path / "images", registry, space_bytes=2 << 20) as stand:
        assert "unpacks to more than the 2097152 bytes" in await stand.fails(ImageInvalid)
        registry.add_image(os.urandom(3 << 20))
        assert "needs" in await stand.fails(NoRoomForImage)
        assert stand.partial() == []


async def test_images_are_there_for_the_next_agent_and_what_was_begun_is_not(
    tmp_path: Path, registry: Registry
) -> None:
    registry.add_image(one_file())
    folder = tmp_path / "images"
    async with pulling(folder, registry) as stand:
        image = await stand.pull()
        with pytest.raises(ImageFolderUnusable, match="another agent keeps its images in"):
            async with pulling(folder, registry):
                pass
    (folder / "partial" / "begun").mkdir()
    (folder / ("0" * 64 + ".erofs")).write_bytes(b"without facts")
    (folder / ("1" * 64 + ".erofs")).write_bytes(b"of another size")
    (folder / ("1" * 64 + ".json")).write_text(json.dumps({"bytes": 4, "env": {}, "working_folder": "/"}))
    async with pulling(folder, registry) as stand:
        asked = len(registry.asked)
        assert await stand.pull() == image
        assert len(registry.asked) == asked + 1
        assert stand.kept() == [image.path] and stand.partial() == []


PULL = """
import asyncio, sys
from pathlib import Path
from forktree_agent.images.pulling import Images, ImageSettings
from forktree_agent.images.references import parse_named_registry
from forktree_agent.images.registry import BadAuthorities

async def pull(folder, host):
    async def free_image(_):
        return True
    settings = ImageSettings(folder=Path(folder), space_bytes=64 << 20, unpack_uid=204095,
                             named=(parse_named_registry(host + "=http"),))
    async with Images.running(settings, user_agent="test", free_image=free_image) as images:
        deadline = asyncio.get_running_loop().time() + 60
        async with images.image(f"oci:{host}/app", None, namespace="team", deadline=deadline):
            pass

asyncio.run(pull(*sys.argv[1:]))
"""


async def test_an_agent_killed_in_the_middle_of_a_pull_leaves_nothing(
    tmp_path: Path, registry: Registry
) -> None:
    registry.add_image(one_file(os.urandom(100_000)))
    registry.gate = asyncio.Event()
    folder = tmp_path / "images"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PULL, str(folder), registry.host)
    async with asyncio.timeout(SECONDS):
        await registry.stopped.wait()
        assert list((folder / "partial").iterdir())
        process.send_signal(signal.SIGKILL)
        await process.wait()
    registry.gate.set()
    async with pulling(folder, registry) as stand:
        assert stand.kept() == [] and stand.partial() == []
        assert (await stand.pull()).bytes > 0


async def test_an_agent_killed_while_it_unpacks_takes_the_jailed_process_along(
    tmp_path: Path, registry: Registry
) -> None:
    registry.add_image(zipped([Entry(name=f"{number}", content=os.urandom(64)) for number in range(30_000)]))
    folder = tmp_path / "images"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PULL, str(folder), registry.host, stdout=subprocess.PIPE
    )
    async with asyncio.timeout(SECONDS):
        await until(lambda: children_of(process.pid) != [])
        children = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    async with pulling(folder, registry) as stand:
        assert stand.kept() == [] and stand.partial() == []


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]

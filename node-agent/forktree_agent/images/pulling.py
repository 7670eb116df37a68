"""Images of registries, by reference: asked for anew each time, pulled once, kept as long as there is room.

A template may have an image if its repository shows the manifest to its own login, and has once shown this
node all of it: who only repeats a manifest seen elsewhere gets nothing that the node has already for others.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, TypeVar
from weakref import WeakValueDictionary

from forktree_agent.images.credentials import Login
from forktree_agent.images.documents import Descriptor, read_manifest, read_runtime
from forktree_agent.images.errors import ImageError, PullBroken, RegistryUnwell
from forktree_agent.images.reaching import Rule
from forktree_agent.images.references import NamedRegistry, parse_reference
from forktree_agent.images.registry import LOWEST_RATE, FoundManifest, Rate, Registries, Repository
from forktree_agent.images.store import FreeImage, ImageStore, KeptImage, Workplace
from forktree_agent.images.unpacker import UnpackLimits, unpack

log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_LAYERS_AT_ONCE = 3
_PULLS_AT_ONCE, _PULLS_OF_ONE = 4, 2
"""Of all, and of one namespace: so that its registries keep nobody else waiting."""


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """What images of registries an agent takes, and where it keeps them."""

    folder: Path
    """On a disk. Nobody else's."""
    space_bytes: int
    """What all images there may take, with what is being pulled."""
    unpack_uid: int
    """Of the process that reads archives, and nobody else's on the node."""
    named: tuple[NamedRegistry, ...] = ()
    """Registries that may be anywhere."""
    only_named: bool = False
    """Take images from no others."""
    authorities: Path | None = None
    """In PEM: who may sign certificates of registries, beside the public ones."""
    retry_seconds: tuple[float, ...] = (1.0, 3.0, 9.0)
    """Before each further try of what may pass."""
    lowest_rate: Rate = LOWEST_RATE
    """At which a registry must answer."""


class _Wanted(NamedTuple):
    """What is pulled once for all who want it at the same time: nobody waits for another's registry."""

    namespace: str
    source: str
    login: Login | None
    digest: str


@dataclass(slots=True)
class _Pull:
    """One image on its way, and how many wait for it."""

    task: asyncio.Task[KeptImage | ImageError]
    waiting: int = 0


class Images:
    """What control asks for images. Leaving `running` ends every pull."""

    def __init__(
        self, settings: ImageSettings, registries: Registries, store: ImageStore, tasks: asyncio.TaskGroup
    ) -> None:
        self._registries = registries
        self._store = store
        self._retry_seconds = settings.retry_seconds
        self._limits = UnpackLimits(uid=settings.unpack_uid, unpacked_bytes=settings.space_bytes)
        self._tasks = tasks
        self._pulls: dict[_Wanted, _Pull] = {}
        self._room = asyncio.Semaphore(_PULLS_AT_ONCE)
        self._room_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # One process at a time: what it may take is then what all may, and nobody else has its user id.
        self._unpacking = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, settings: ImageSettings, *, user_agent: str, free_image: FreeImage
    ) -> AsyncGenerator[Self]:
        """Raises `ImageFolderUnusable`, and `BadAuthorities` where that file cannot be read.

        `free_image` is asked before an image is given up.
        """
        rule = Rule(settings.named, only_named=settings.only_named)
        with ImageStore.opened(settings.folder, settings.space_bytes, free_image) as store:
            async with (
                Registries.running(
                    rule,
                    user_agent=user_agent,
                    authorities=settings.authorities,
                    lowest_rate=settings.lowest_rate,
                ) as registries,
                asyncio.TaskGroup() as tasks,
            ):
                images = cls(settings, registries, store, tasks)
                try:
                    yield images
                finally:
                    for pull in images._pulls.values():
                        pull.task.cancel()

    @asynccontextmanager
    async def image(
        self, reference: str, login: Login | None, *, namespace: str, deadline: float
    ) -> AsyncGenerator[KeptImage]:
        """The image of `reference` for linux/amd64. It stays on the node as long as this is held.

        Raises `ImageError`: a failure that may pass was tried again before, and so often.
        """
        try:
            repository = self._registries.of(parse_reference(reference), login)
            async with asyncio.timeout_at(deadline):
                manifest = await self._tried_again(repository.manifest)
        except TimeoutError as err:
            raise RegistryUnwell(f"{reference} was not found in time") from err
        digest = manifest.digest.removeprefix("sha256:")
        with self._store.pinned(digest):
            image = self._store.get(digest, repository.source)
            yield image or await self._pulled(namespace, repository, manifest, deadline=deadline)

    async def _pulled(
        self, namespace: str, repository: Repository, manifest: FoundManifest, *, deadline: float
    ) -> KeptImage:
        """Take part in the pull of a manifest, or begin it. It ends when nobody waits for it any more."""
        wanted = _Wanted(namespace, repository.source, repository.login, manifest.digest)
        pull = self._pulls.get(wanted)
        if pull is None:
            pull = _Pull(
                self._tasks.create_task(
                    self._pull(namespace, repository, manifest, deadline), name=f"pull-{manifest.digest}"
                )
            )
            self._pulls[wanted] = pull
        pull.waiting += 1
        try:
            outcome = await asyncio.shield(pull.task)
        finally:
            pull.waiting -= 1
            if not pull.waiting:
                pull.task.cancel()
                if self._pulls.get(wanted) is pull:
                    del self._pulls[wanted]
        if isinstance(outcome, ImageError):
            raise outcome
        return outcome

    async def _pull(
        self, namespace: str, repository: Repository, manifest: FoundManifest, deadline: float
    ) -> KeptImage | ImageError:
        of_one = self._room_of.get(namespace)
        if of_one is None:
            of_one = self._room_of[namespace] = asyncio.Semaphore(_PULLS_OF_ONE)
        try:
            async with asyncio.timeout_at(deadline), of_one, self._room, self._store.working() as workplace:
                # Another may have pulled it while this one waited for room.
                image = self._store.get(manifest.digest.removeprefix("sha256:"), repository.source)
                return image or await self._make(repository, manifest, workplace, deadline)
        except ImageError as err:
            return err
        except TimeoutError:
            return RegistryUnwell("the image was not pulled and unpacked in time")
        except OSError as err:
            return RegistryUnwell(f"the image cannot be kept on this node: {err.strerror}")
        except Exception as err:  # The task's edge: nothing that a registry says may end the agent.
            log.exception("pull_broke digest=%s", manifest.digest)
            return PullBroken(
                f"pulling the image met what is a defect of the node's agent: {type(err).__name__}"
            )

    async def _make(
        self, repository: Repository, manifest: FoundManifest, workplace: Workplace, deadline: float
    ) -> KeptImage:
        digest, source = manifest.digest.removeprefix("sha256:"), repository.source
        document = read_manifest(manifest.body)
        config = document.config
        runtime = read_runtime(await self._tried_again(lambda: repository.small_blob(config)))
        layers = {each.digest: each for each in document.layers}
        known = self._store.has(digest)
        if not known:
            workplace.store.must_fit(sum(each.size for each in layers.values()))
        at_once = asyncio.Semaphore(_LAYERS_AT_ONCE)

        async def fetch(layer: Descriptor) -> None:
            async with at_once:
                if known:
                    await self._tried_again(lambda: _see(repository, layer))
                else:
                    await self._tried_again(lambda: _fetch(repository, layer, workplace))

        await _all(fetch(each) for each in layers.values())
        if self._store.has(digest):  # Also if another source was quicker.
            return self._store.shown(digest, source)
        made = workplace.folder / "root.erofs"
        async with self._unpacking:
            await self._unpack(
                [_file(workplace, each) for each in document.layers], made, runtime.working_folder, workplace,
                deadline=deadline,
            )  # fmt: skip
        if self._store.has(digest):
            return self._store.shown(digest, source)
        image = self._store.add(digest, made, runtime, source)
        log.info("image_pulled digest=%s bytes=%d", digest, image.bytes)
        return image

    async def _unpack(
        self, layers: list[Path], made: Path, working_folder: str, workplace: Workplace, *, deadline: float
    ) -> None:
        descriptors: list[int] = []
        try:
            descriptors.extend(os.open(each, os.O_RDONLY | os.O_CLOEXEC) for each in layers)
            # A machine's QEMU, which is another user, opens it anew by its descriptor.
            descriptors.append(os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            await unpack(
                descriptors[:-1],
                descriptors[-1],
                working_folder=working_folder,
                limits=self._limits,
                make_room=workplace.reserve,
                deadline=deadline,
            )
        finally:
            for each in descriptors:
                os.close(each)

    async def _tried_again(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """What `call` gives, at the first try that does not end in what may pass."""
        for seconds in self._retry_seconds:
            try:
                return await call()
            except RegistryUnwell as err:
                log.info("pull_retried after_seconds=%g error=%r", seconds, err.message)
            await asyncio.sleep(seconds)
        return await call()


async def _see(repository: Repository, blob: Descriptor) -> None:
    """That a repository has a blob, which nobody needs again. Raises `ImageError`."""
    async with aclosing(repository.blob(blob)) as pieces:
        async for _ in pieces:
            pass


async def _fetch(repository: Repository, blob: Descriptor, workplace: Workplace) -> None:
    """A blob into a file, which is there only if this returns. Raises `ImageError`, `OSError`.

    Room is taken for what has come and not for what is said to come, so words alone give up no image.
    """
    path, taken = _file(workplace, blob), 0
    try:
        with path.open("wb", buffering=0) as file:
            async with aclosing(_batches(repository, blob)) as batches:
                async for batch in batches:
                    await workplace.reserve(len(batch))
                    taken += len(batch)
                    await _written(file, batch)
    except BaseException:
        path.unlink(missing_ok=True)
        workplace.give_back(taken)
        raise


async def _batches(repository: Repository, blob: Descriptor) -> AsyncGenerator[bytes]:
    batch = bytearray()
    async with aclosing(repository.blob(blob)) as pieces:
        async for piece in pieces:
            batch += piece
            if len(batch) >= _PIECE_BYTES:
                yield bytes(batch)
                batch.clear()
    yield bytes(batch)


async def _written(file: io.FileIO, data: bytes) -> None:
    """Away from the loop, as a disk may be busy. Nothing is written any more once this is left."""
    writing = asyncio.ensure_future(asyncio.to_thread(_write_all, file, data))
    try:
        await asyncio.shield(writing)
    finally:
        await asyncio.wait([writing])


def _write_all(file: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Everything, or the first failure once the rest is cancelled."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for number, each in enumerate(work):
                tasks.create_task(each, name=f"layer-{number}")
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _file(workplace: Workplace, blob: Descriptor) -> Path:
    return workplace.folder / blob.digest.removeprefix("sha256:")

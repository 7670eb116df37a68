"""The images that a node has, in a folder that is never fuller than it may be.

A finished image is `DIGEST.erofs` with `DIGEST.json` beside it, written before it; all else lies in
`partial/`, which is emptied at start. So whatever was under way when an agent was killed never counts as an
image. The time of the file says when it was used last.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forktree_agent.images.documents import Runtime
from forktree_agent.images.errors import NoRoomForImage

log = logging.getLogger(__name__)

_PARTIAL, _LOCK = "partial", "lock"
_IMAGE, _FACTS = ".erofs", ".json"
_SOURCES_MAX = 256

FreeImage = Callable[[str], Awaitable[bool]]
"""Whether nothing on the node uses the image of this digest any more; then nothing of it is held."""


class ImageFolderUnusable(Exception):
    """Nothing can be kept there, and one sentence says why."""


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept beside an image."""

    bytes: int
    env: dict[str, str]
    working_folder: str
    sources: list[str] = []
    """Repositories that have shown all of it, the latest last. Who has it there may have it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptImage:
    """A root file system that is ready to be used, as long as it is pinned."""

    digest: str
    """Of its manifest, 64 hex digits."""
    path: Path
    bytes: int
    runtime: Runtime


class ImageStore:
    """One per folder. Not for several threads."""

    def __init__(self, folder: Path, space_bytes: int, free_image: FreeImage) -> None:
        self._folder = folder
        self._space_bytes = space_bytes
        self._free_image = free_image
        self._images: dict[str, KeptImage] = {}
        self._sources: dict[str, list[str]] = {}
        self._used: dict[str, float] = {}
        self._pins: dict[str, int] = {}
        self._reserved: dict[object, int] = {}
        self._evicting = asyncio.Lock()

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, space_bytes: int, free_image: FreeImage) -> Generator[ImageStore]:
        """Raises `ImageFolderUnusable`. Takes milliseconds, once at start."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise ImageFolderUnusable(f"images cannot be kept in {folder}: {err}") from err
        try:
            store = cls(folder, space_bytes, free_image)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                store._read()
            except BlockingIOError as err:
                raise ImageFolderUnusable(f"another agent keeps its images in {folder}") from err
            except OSError as err:
                raise ImageFolderUnusable(f"images cannot be kept in {folder}: {err}") from err
            yield store
        finally:
            os.close(lock)

    @property
    def taken_bytes(self) -> int:
        """By images, and by what is being made."""
        return sum(each.bytes for each in self._images.values()) + sum(self._reserved.values())

    def digests(self) -> frozenset[str]:
        return frozenset(self._images)

    def _read(self) -> None:
        shutil.rmtree(self._folder / _PARTIAL, ignore_errors=True)
        (self._folder / _PARTIAL).mkdir(mode=0o700)
        known: set[str] = set()
        for path in self._folder.glob(f"*{_IMAGE}"):
            try:
                facts = msgspec.json.decode(path.with_suffix(_FACTS).read_bytes(), type=_Facts)
                found = path.stat()
            except (OSError, msgspec.MsgspecError):
                continue
            if found.st_size == facts.bytes:
                runtime = Runtime(env=facts.env, working_folder=facts.working_folder)
                image = KeptImage(digest=path.stem, path=path, bytes=facts.bytes, runtime=runtime)
                self._images[path.stem], self._used[path.stem] = image, found.st_mtime
                self._sources[path.stem] = facts.sources
                known |= {path.name, path.with_suffix(_FACTS).name}
        for path in self._folder.iterdir():
            if path.suffix in {_IMAGE, _FACTS} and path.name not in known:
                path.unlink()

    @contextmanager
    def pinned(self, digest: str) -> Generator[None]:
        """As long as this is held, an image of this digest stays once it is there."""
        self._pins[digest] = self._pins.get(digest, 0) + 1
        try:
            yield
        finally:
            self._pins[digest] -= 1
            if self._pins[digest] == 0:
                del self._pins[digest]

    def get(self, digest: str, source: str) -> KeptImage | None:
        """An image that this repository has shown in full, noted as used now. Only for who has pinned it."""
        image = self._images.get(digest)
        if image is None or source not in self._sources[digest]:
            return None
        self._used[digest] = time.time()
        with suppress(OSError):  # It is only not remembered over a restart then.
            os.utime(image.path)
        return image

    def has(self, digest: str) -> bool:
        """Whether an image is here, whoever may have it."""
        return digest in self._images

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[Workplace]:
        """A folder for making one image, and room for what is in it. Both go when this is left."""
        folder = self._folder / _PARTIAL / os.urandom(8).hex()
        folder.mkdir(mode=0o700)
        workplace = Workplace(self, folder)
        try:
            yield workplace
        finally:
            self._reserved.pop(workplace, None)
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    def must_fit(self, size: int) -> None:
        """What could never be kept is not begun. Raises `NoRoomForImage`."""
        if size > self._space_bytes:
            raise NoRoomForImage(
                f"the image needs {size} bytes, and the node keeps {self._space_bytes} for all of registries"
            )

    def give_back(self, holder: object, less: int) -> None:
        """So many bytes that were reserved are free again."""
        self._reserved[holder] = self._reserved.get(holder, 0) - less

    async def reserve(self, holder: object, more: int) -> None:
        """Room for so many more bytes, others being given up for it. Raises `NoRoomForImage`."""
        async with self._evicting:
            while self.taken_bytes + more > self._space_bytes:
                if not await self._give_up_one():
                    raise NoRoomForImage(
                        f"the image needs {more} bytes more than the node keeps for images of registries:"
                        f" it may have {self._space_bytes}, and {self.taken_bytes} are in use"
                    )
            self._reserved[holder] = self._reserved.get(holder, 0) + more

    async def _give_up_one(self) -> bool:
        """Delete the image that was used longest ago, of those that nobody uses."""
        for digest in sorted(self._images, key=lambda each: self._used[each]):
            # Asked for each: between pins and machines there is no moment without one of them.
            if digest not in self._pins and await self._free_image(digest) and digest not in self._pins:
                image = self._images.pop(digest)
                del self._used[digest], self._sources[digest]
                image.path.unlink(missing_ok=True)
                image.path.with_suffix(_FACTS).unlink(missing_ok=True)
                log.info("image_given_up digest=%s bytes=%d", digest, image.bytes)
                return True
        return False

    def add(self, digest: str, made: Path, runtime: Runtime, source: str) -> KeptImage:
        """A finished file in a workplace becomes an image, which its repository has shown in full."""
        path = self._folder / f"{digest}{_IMAGE}"
        image = KeptImage(digest=digest, path=path, bytes=made.stat().st_size, runtime=runtime)
        self._write_facts(image, [source])
        made.rename(path)
        self._images[digest], self._used[digest] = image, time.time()
        return image

    def shown(self, digest: str, source: str) -> KeptImage:
        """One more repository has shown in full an image that is here and pinned."""
        image = self._images[digest]
        others = [each for each in self._sources[digest] if each != source]
        self._write_facts(image, [*others[1 - _SOURCES_MAX :], source])
        self._used[digest] = time.time()
        return image

    def _write_facts(self, image: KeptImage, sources: list[str]) -> None:
        facts = _Facts(
            bytes=image.bytes,
            env=image.runtime.env,
            working_folder=image.runtime.working_folder,
            sources=sources,
        )
        draft = self._folder / _PARTIAL / f"{image.digest}{_FACTS}"
        draft.write_bytes(msgspec.json.encode(facts))
        draft.rename(image.path.with_suffix(_FACTS))
        self._sources[image.digest] = sources


@dataclass(frozen=True, slots=True, eq=False)
class Workplace:
    """Where one image is being made."""

    store: ImageStore
    folder: Path

    async def reserve(self, more: int) -> None:
        """Raises `NoRoomForImage`."""
        await self.store.reserve(self, more)

    def give_back(self, less: int) -> None:
        self.store.give_back(self, less)

"""What becomes of an image that was asked for and cannot be had. All of it reaches the template's status."""

from __future__ import annotations

import re
from typing import ClassVar

from forktree.errors import ForktreeError
from forktree.models import Reason

_SAID_CHARACTERS = 300
_UNSEEN = re.compile(r"[^\x20-\x7e]+")


class ImageError(ForktreeError):
    """An image of a registry cannot be had."""

    reason: ClassVar[Reason] = Reason.IMAGE_PULL_FAILED


class ImagePullFailed(ImageError):
    """The registry refused it, may not be asked, or did not answer as one does."""


class RegistryUnwell(ImagePullFailed):
    """The registry, or the way to it, failed in a way that may pass."""

    retryable = True


class ImageMissing(ImageError):
    """The registry has no such image."""

    reason = Reason.IMAGE_NOT_FOUND


class ImageInvalid(ImageError):
    """What the registry has under that name is no image that can be run here."""

    reason = Reason.IMAGE_INVALID


class UnpackingBroken(ImageError):
    """The node cannot unpack images."""

    reason = Reason.INTERNAL


class PullBroken(ImageError):
    """A pull met a defect of ours."""

    reason = Reason.INTERNAL


class NoRoomForImage(ImageError):
    """The node keeps no image of this size, or has no room left beside those in use."""

    reason = Reason.IMAGE_TOO_LARGE


def cleaned(text: str) -> str:
    """What a stranger said, as a piece of one of our sentences."""
    seen = " ".join(_UNSEEN.sub(" ", text).split())
    return seen if len(seen) <= _SAID_CHARACTERS else seen[:_SAID_CHARACTERS] + "..."

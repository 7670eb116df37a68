"""Guests for development and tests: a kernel, an initramfs with our init, and root file systems to boot.

Everything comes from Debian packages and this checkout, is made once and kept in the cache, named by the hash
of what it was made from.
"""

from forktree_dev.images.guest_directory import IMAGES, STANDARD, guest_directory

__all__ = ["IMAGES", "STANDARD", "guest_directory"]

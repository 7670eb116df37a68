"""`python -m forktree_dev.images`: make what is missing; the last line is the guest directory."""

from __future__ import annotations

import argparse

from forktree_dev.images import IMAGES, guest_directory


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forktree_dev.images", description=__doc__)
    parser.add_argument(
        "--name", choices=[*IMAGES, "all"], default="all", help="the image (default: all of them)"
    )
    name: str = parser.parse_args().name
    print(guest_directory(list(IMAGES) if name == "all" else [name]))


if __name__ == "__main__":
    main()

"""`python -m forktree_dev.images`: make what is missing; the last line is the guest directory."""

from __future__ import annotations

import argparse

from forktree_dev.images import IMAGES, STANDARD, guest_directory


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forktree_dev.images", description=__doc__)
    parser.add_argument(
        "--name",
        action="append",
        choices=[*IMAGES],
        help="an image; may be repeated (default: all but large ones)",
    )
    names: list[str] | None = parser.parse_args().name
    print(guest_directory(names or STANDARD))


if __name__ == "__main__":
    main()

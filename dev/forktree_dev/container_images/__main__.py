"""`python -m forktree_dev.container_images`: make what is missing, and say where it is."""

from __future__ import annotations

import argparse
import sys

from forktree_dev.container_images import RECIPES, build, dockerfiles, python_files


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m forktree_dev.container_images", description=__doc__)
    parser.add_argument(
        "command",
        nargs="?",
        choices=["build", "lock", "dockerfiles"],
        default="build",
        help="lock: choose the Python packages anew; dockerfiles: write docker/",
    )
    command: str = parser.parse_args().command
    match command:
        case "lock":
            python_files.lock()
        case "dockerfiles":
            dockerfiles.FOLDER.mkdir(exist_ok=True)
            wanted = dockerfiles.files()
            for name in dockerfiles.stale():
                path = dockerfiles.FOLDER / name
                path.write_text(wanted[name]) if name in wanted else path.unlink()
                print(f"wrote {name}" if name in wanted else f"removed {name}")
        case _:
            for recipe in RECIPES:
                image = build(recipe)
                print(f"{image.reference}\t{image.archive}\t{image.sbom}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

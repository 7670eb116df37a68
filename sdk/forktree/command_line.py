"""What operator and agent take on their command lines in the same way: types for argparse."""

from __future__ import annotations

import argparse

from forktree.tracing.exporting import collector_url

_HIGHEST_PORT = 65535


def address(text: str) -> tuple[str, int]:
    """HOST:PORT; port 0 is any free one."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def collector(text: str) -> str:
    """Where traces are sent to."""
    try:
        return collector_url(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r}: {err}") from err


def positive(text: str) -> float:
    """A number above zero."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return number

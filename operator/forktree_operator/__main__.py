"""`python -m forktree_operator`."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import uvloop

import forktree_logs
from forktree import command_line
from forktree.tracing.context import trace_ids
from forktree_operator.main import run
from forktree_operator.settings import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop. 0 after SIGTERM or SIGINT; 1 means: start it again."""
    options = _parser().parse_args(arguments)
    forktree_logs.begin(options.log_format, options.log_level, more=trace_ids)
    # kopf tells of every stream and step at INFO; what matters of that comes as a warning.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    settings = Settings(
        kubeconfig=options.kubeconfig,
        namespace=options.namespace,
        identity=options.identity or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:5]}",
        metrics_listen=options.metrics_listen,
        health_listen=options.health_listen,
        otlp_endpoint=options.otlp_endpoint,
        lease_seconds=options.lease_seconds,
        sweep_seconds=options.sweep_seconds,
        source_exists_seconds=options.source_exists_seconds,
    )
    return uvloop.run(run(settings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forktree-operator", description="Places sessions and routes forks."
    )
    parser.add_argument("--kubeconfig", type=Path, help="default: the service account of the pod")
    parser.add_argument("--namespace", default=Settings.namespace, help="where the Leases live (%(default)s)")
    parser.add_argument("--identity", help="in the leader's Lease; default: host, process and a random part")
    parser.add_argument(
        "--metrics-listen",
        type=command_line.address,
        metavar="HOST:PORT",
        help="for /metrics, over plain HTTP and without a token; default: nowhere",
    )
    parser.add_argument(
        "--health-listen",
        type=command_line.address,
        metavar="HOST:PORT",
        help="for /healthz and /readyz, likewise",
    )
    parser.add_argument(
        "--otlp-endpoint",
        type=command_line.collector,
        metavar="URL",
        help="of an OpenTelemetry collector that is sent traces, as http://HOST:4318; default: no traces",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument(
        "--log-format", default="text", choices=forktree_logs.FORMATS, help="json: one object a line"
    )
    for option, default, text in (
        ("--lease-seconds", Settings.lease_seconds, "how long a leader holds without renewal"),
        ("--sweep-seconds", Settings.sweep_seconds, "longest time between two sweeps"),
        ("--source-exists-seconds", Settings.source_exists_seconds, "a fork waits for its source to appear"),
    ):
        help_text = f"{text} (%(default)g)"
        parser.add_argument(
            option, type=command_line.positive, default=default, metavar="SECONDS", help=help_text
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())

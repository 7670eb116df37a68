"""`python -m forktree_agent`."""

from __future__ import annotations

import argparse
import ipaddress
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

import forktree_logs
from forktree import command_line
from forktree.models.quantities import parse_bytes
from forktree.models.texts import is_dns_label
from forktree.tracing.context import trace_ids
from forktree_agent.images.references import NamedRegistry, parse_named_registry
from forktree_agent.main import run
from forktree_agent.settings import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop. 0 after SIGTERM or SIGINT; 1 means: start it again."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.tls_cert is None) != (options.tls_key is None):
        parser.error("give both --tls-cert and --tls-key, or neither")
    if options.tls_cert is not None and options.tls_name:
        parser.error("--tls-name is for the certificate made here: a given one has its names already")
    forktree_logs.begin(options.log_format, options.log_level, more=trace_ids)
    if (options.egress_allow or options.egress_deny) and not options.egress:
        parser.error("--egress-allow and --egress-deny do nothing without --egress")
    take_descriptors()
    host, port = options.listen
    settings = Settings(
        node_name=options.node_name,
        state_directory=options.state_dir,
        guest_directory=options.guest_dir,
        shim_library=options.shim_library,
        kubeconfig=options.kubeconfig,
        listen_host=host,
        listen_port=port,
        namespace_sockets=tuple(options.serve_namespace),
        advertise_url=options.advertise,
        metrics_listen=options.metrics_listen,
        otlp_endpoint=options.otlp_endpoint,
        memory_limit_bytes=options.memory_limit,
        uid_base=options.uid_base,
        egress=options.egress,
        egress_allow=tuple(options.egress_allow),
        egress_deny=tuple(options.egress_deny),
        image_directory=options.image_dir,
        image_space_bytes=options.image_space,
        registries=tuple(options.registry),
        registry_authorities=options.registry_ca,
        only_named_registries=options.only_named_registries,
        accelerator=options.accelerator,
        write_tracking=options.write_tracking,
        engine=options.engine,
        tls_certificate=options.tls_cert,
        tls_key=options.tls_key,
        tls_names=tuple(options.tls_name),
        system_namespace=options.namespace,
        sweep_seconds=options.sweep_seconds,
        capacity_wait_seconds=options.capacity_wait_seconds,
    )
    return uvloop.run(run(settings))


def take_descriptors() -> None:
    """As many as this process may have: clients' connections must not leave machines without."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forktree-agent", description="Runs and forks the sessions of one node."
    )
    add = parser.add_argument
    add("--node-name", required=True, help="the Node object that this machine is")
    add("--state-dir", type=Path, required=True, help="on tmpfs, shared with the keeper")
    add("--guest-dir", type=Path, required=True, help="kernel, initial file system and images")
    add("--shim-library", type=Path, required=True, help="the fork shim that QEMU is started with")
    add("--kubeconfig", type=Path, help="default: the service account of the pod")
    add(
        "--listen",
        type=command_line.address,
        default=("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="for the HTTP API",
    )
    add(
        "--serve-namespace",
        type=_namespace_socket,
        action="append",
        default=[],
        metavar="NAMESPACE=PATH",
        help="a socket at which its sessions on this node can be used without a token; may be repeated",
    )
    add("--advertise", default="", metavar="URL", help="where clients reach that; default: where it listens")
    add(
        "--metrics-listen",
        type=command_line.address,
        metavar="HOST:PORT",
        help="for /metrics, over plain HTTP and without a token; default: nowhere",
    )
    add(
        "--otlp-endpoint",
        type=command_line.collector,
        metavar="URL",
        help="of an OpenTelemetry collector that is sent traces, as http://HOST:4318; default: no traces",
    )
    add(
        "--memory-limit",
        type=_bytes,
        default=Settings.memory_limit_bytes,
        metavar="BYTES",
        help="for all machines together, at their worst",
    )
    add("--uid-base", type=int, default=Settings.uid_base, help="first user id of the machines (%(default)s)")
    add(
        "--egress",
        action="store_true",
        help="let machines whose template has network.egress: Open reach the internet",
    )
    add(
        "--egress-allow",
        type=_network,
        action="append",
        default=[],
        metavar="CIDR",
        help="a private network that these may reach too; may be repeated",
    )
    add(
        "--egress-deny",
        type=_network,
        action="append",
        default=[],
        metavar="CIDR",
        help="public addresses that these may not reach, like the nodes' own; may be repeated",
    )
    add("--image-dir", type=Path, help="for images of registries, on a disk; default: none are taken")
    add(
        "--image-space",
        type=_bytes,
        default=Settings.image_space_bytes,
        metavar="BYTES",
        help="for all of them together",
    )
    add(
        "--registry",
        type=_registry,
        action="append",
        default=[],
        metavar="HOST[:PORT][=http]",
        help="that may be at any address, not only at a public one, with =http without TLS; may be repeated",
    )
    add(
        "--registry-ca", type=Path, help="in PEM: who may sign certificates of registries, beside public ones"
    )
    add("--only-named-registries", action="store_true", help="take images from no others than these")
    add("--accelerator", choices=["auto", "kvm", "tcg"], default=Settings.accelerator)
    add(
        "--write-tracking",
        choices=["auto", "pagemap"],
        default=Settings.write_tracking,
        help="pagemap: copy all that a machine ever wrote, also where the kernel can tell what is new",
    )
    add(
        "--engine",
        choices=["microvm", "null"],
        default=Settings.engine,
        help="null: pretend to have machines, to measure the control plane",
    )
    add("--tls-cert", type=Path, help="certificate chain in PEM; default: one made and signed here")
    add("--tls-key", type=Path)
    add(
        "--tls-name",
        type=_host,
        action="append",
        default=[],
        metavar="NAME",
        help="a further name or address in the certificate made here, as a Service's; may be repeated",
    )
    add("--namespace", default=Settings.system_namespace, help="where the agents' Leases are (%(default)s)")
    add(
        "--sweep-seconds",
        type=command_line.positive,
        default=Settings.sweep_seconds,
        help="between sweeps (%(default)g)",
    )
    add(
        "--capacity-wait-seconds",
        type=command_line.positive,
        default=Settings.capacity_wait_seconds,
        help="sessions and forks wait for room (%(default)g)",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add("--log-format", default="text", choices=forktree_logs.FORMATS, help="json: one object a line")
    return parser


def _host(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Fa-f:.]+|(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a host's name nor an address")
    return text


def _namespace_socket(text: str) -> tuple[str, Path]:
    namespace, equals, path = text.partition("=")
    if not equals or not path.startswith("/") or not is_dns_label(namespace):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE=/PATH")
    return namespace, Path(path)


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def _registry(text: str) -> NamedRegistry:
    try:
        return parse_named_registry(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


if __name__ == "__main__":
    sys.exit(main())

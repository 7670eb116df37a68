"""What a pod asks an installed forktree, knowing addresses only. Its text runs in a pod, on Python alone."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import urllib.request

AGENT, OPERATOR, SERVICE = (os.environ[name] for name in ("AGENT", "OPERATOR", "SERVICE"))


def scraped(address: str) -> dict[str, float]:
    """All of our series that have no labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.split() for line in lines if line.startswith("forktree_") and "{" not in line)
    return {name: float(value) for name, value in pairs}


def status(url: str) -> int:
    with urllib.request.urlopen(url, timeout=10) as answer:
        code: int = answer.status
        return code


def status_of_the_api() -> int:
    """By the Service's address, verified by its name."""
    trust = ssl.create_default_context(cadata=os.environ["BUNDLE"])
    api = http.client.HTTPSConnection("unused")
    plain = socket.create_connection((SERVICE, 443), 10)
    api.sock = trust.wrap_socket(plain, server_hostname=os.environ["NAME"])
    api.request("GET", "/v1/health")
    return api.getresponse().status


if __name__ == "__main__":
    said = {
        "agent": scraped(f"{AGENT}:9464"),
        "operator": scraped(f"{OPERATOR}:9465"),
        "health": {each: status(f"http://{OPERATOR}:9466/{each}") for each in ("healthz", "readyz")},
        "service": status_of_the_api(),
    }
    print(json.dumps(said))

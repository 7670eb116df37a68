#!/usr/bin/env python3
"""The search of `beam-search/` against the HTTP API: `examples/http_search.py`, in the playground.

Needs the template (`kubectl apply -f examples/beam-search/lake.yaml`), FORKTREE_URL and FORKTREE_CA in the
environment, and there too FORKTREE_TOKEN=$(kubectl create token player --audience forktree.dev).
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.request
from typing import Any

DOWN, RIGHT, UP = "1", "2", "3"


def search(template: str, depth: int) -> str:
    """The winner's name, after as many steps. It runs, and so do the winners before it."""
    winner: str = ask("POST", "sessions", template_id=template)["session_id"]
    for _ in range(depth):
        forked = ask("POST", f"sessions/{winner}/fork", replicas=3)
        children = [child["session_id"] for child in forked["children"]]
        for child, action in zip(children, (DOWN, RIGHT, UP), strict=True):
            run(child, "gym-ask", "step", action)
        scores = {child: float(run(child, "gym-ask", "score")) for child in children}
        winner = max(children, key=lambda child: scores[child])
        for loser in set(children) - {winner}:
            ask("DELETE", f"sessions/{loser}")
    return winner


def run(session: str, *argv: str) -> str:
    """What the command prints in the session."""
    done = ask("POST", f"sessions/{session}/exec", argv=argv)
    if done["exit_code"] != 0:
        raise SystemExit(f"{session}: {argv} failed: {done['stderr']}")
    return str(done["stdout"])


def ask(method: str, path: str, **body: object) -> Any:
    """The agent's answer. Raises `HTTPError` when it refuses."""
    token = os.environ["FORKTREE_TOKEN"]
    request = urllib.request.Request(
        f"{os.environ['FORKTREE_URL']}/v1/{path}",
        method=method,
        data=json.dumps(body).encode() if body else None,
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=os.environ["FORKTREE_CA"])
    with urllib.request.urlopen(request, timeout=300, context=context) as answer:
        return json.load(answer)


if __name__ == "__main__":
    print(run(search("lake", depth=6), "gym-ask", "state"), end="")

"""What an API server was asked for, by its own count."""

from __future__ import annotations

import re
from collections import Counter

from forktree.kube.client import KubeClient

_LINE = re.compile(r"^apiserver_request_total\{(?P<labels>.*)\} (?P<count>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


async def requests_so_far(kube: KubeClient) -> Counter[str]:
    """Requests since the server's start by verb and kind. A watch counts when it ends."""
    return counted((await kube.raw("GET", "/metrics")).decode())


def counted(metrics: str) -> Counter[str]:
    """Pure: of a page of metrics."""
    found: Counter[str] = Counter()
    for line in _LINE.finditer(metrics):
        labels = dict(_LABEL.findall(line["labels"]))
        kind = labels.get("resource") or "other"
        subresource = labels.get("subresource")
        found[f"{labels.get('verb')} {kind}{'/' + subresource if subresource else ''}"] += int(
            float(line["count"])
        )
    return found

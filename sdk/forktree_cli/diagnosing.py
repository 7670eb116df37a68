"""`doctor`: whether the way to the agent holds, what its caller may do, and what each node can."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

import pydantic
import typer
from rich.text import Text

from forktree import AsyncClient, Reach
from forktree.errors import ClientError, Forbidden, ForktreeError, NotFound, Unauthorized
from forktree.wire_trees import NodeInfo, TemplateInfo
from forktree_cli.asked import Asked, Output, add
from forktree_cli.showing import clean, console, print_json, print_names, size

AUDIENCE = "forktree.dev"
_CLUSTER_SECONDS = 10.0
_CLAIMS: Final = pydantic.TypeAdapter(dict[str, Any])


def add_to(app: typer.Typer) -> None:
    add(app, doctor)


class Finding(StrEnum):
    OK = "ok"
    LIMITED = "limited"
    """It works, but for what the line says."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of a diagnosis."""

    check: str
    finding: Finding
    says: str
    do: str | None = None
    """What to do about it."""


async def doctor(asked: Asked) -> int:
    """Check the connection, the token, what it may do, the nodes and the templates: a line each.

    Ends with 1 where something does not work.
    """
    found: list[Check] = []
    shown = console()
    async with asked.client() as client:
        async for check in _checks(asked, client):
            found.append(check)
            if asked.output is Output.TABLE:
                shown.print(_line(check), soft_wrap=True)
    is_well = all(each.finding is not Finding.FAILED for each in found)
    if asked.json:
        checks = [{key: value for key, value in asdict(each).items() if value is not None} for each in found]
        print_json({"ok": is_well, "checks": checks})
    elif asked.output is Output.NAME:
        print_names(each.check for each in found if each.finding is not Finding.OK)
    return 0 if is_well else 1


_MARKS = {Finding.OK: ("✓", "green"), Finding.LIMITED: ("!", "yellow"), Finding.FAILED: ("✗", "red")}


def _line(check: Check) -> Text:
    mark, style = _MARKS[check.finding]
    line = Text.assemble((mark, style), " ", (clean(check.check), "bold"), ": ", clean(check.says))
    return line if check.do is None else line.append(f" -> {clean(check.do)}", style="cyan")


async def _checks(asked: Asked, client: AsyncClient) -> AsyncGenerator[Check]:
    """In the order in which one stands on the other: what stands on a failed one is not looked at."""
    try:
        reach = await client.reach()
    except ClientError as err:
        yield Check(check="connection", finding=Finding.FAILED, says=err.message, do=_CONNECT)
        async for each in _all_nodes(asked):
            yield each
        return
    yield (agent := await _agent(client, reach))
    if agent.finding is not Finding.FAILED:
        yield (token := await _token(client, reach))
        if token.finding is not Finding.FAILED:
            for name, right in _rights(client):
                yield await _may(name, right)
            yield await _this_node(client)
            async for each in _templates(client):
                yield each
    async for each in _all_nodes(asked):
        yield each


_CONNECT = "set FORKTREE_URL, FORKTREE_CA and FORKTREE_TOKEN, or KUBECONFIG"


async def _agent(client: AsyncClient, reach: Reach) -> Check:
    begun = time.monotonic()
    try:
        health = await client.health()
    except ClientError as err:
        do = f"see that {reach.url} is an agent's address, and FORKTREE_CA its certificate"
        return Check(check="agent", finding=Finding.FAILED, says=err.message, do=do)
    ms = (time.monotonic() - begun) * 1000
    says = f"{reach.url} answers in {ms:.0f} ms and its certificate holds; version {health.version}"
    return Check(check="agent", finding=Finding.OK, says=says)


async def _token(client: AsyncClient, reach: Reach) -> Check:
    """Its claims are read to say what is wrong with it; whether it holds, the agent says."""
    claims = _claims(reach.token)
    about = f"of {claims.get('sub', 'an unknown account')}"
    do = f"make one: kubectl create token ACCOUNT --audience={AUDIENCE}"
    audience = claims.get("aud", [])
    if claims and AUDIENCE not in ([audience] if isinstance(audience, str) else audience):
        says = f"it is {about} and meant for {audience}, not for {AUDIENCE}"
        return Check(check="token", finding=Finding.FAILED, says=says, do=do)
    ends = claims.get("exp")
    left = ends - time.time() if isinstance(ends, int | float) else None
    try:
        await client.sessions.list()
    except Unauthorized as err:
        ended = f"; by its own word it ended {-left:.0f} seconds ago" if left is not None and left < 0 else ""
        return Check(check="token", finding=Finding.FAILED, says=f"{err.message}{ended}", do=do)
    except Forbidden:
        pass  # It is accepted; what it may do is said below.
    except ClientError as err:
        return Check(check="token", finding=Finding.FAILED, says=err.message)
    lasts = "" if left is None else f", for another {timedelta(seconds=round(left))}"
    return Check(check="token", finding=Finding.OK, says=f"accepted, {about}{lasts}")


def _claims(token: str) -> dict[str, Any]:
    """What the token says of itself. Empty where it is none that can be read."""
    try:
        middle = token.split(".")[1]
        return _CLAIMS.validate_json(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))
    except (IndexError, ValueError):
        return {}


Right = Callable[[], Awaitable[object]]


def _rights(client: AsyncClient) -> list[tuple[str, Right]]:
    """What is asked of things that are not there: an agent says first whether one may."""
    nobody = client.sessions.named(f"doctor-{secrets.token_hex(8)}")
    return [
        ("list sessions", client.sessions.list),
        ("create sessions", lambda: client.sessions.create(nobody.id)),
        ("fork", nobody.fork),
        ("run commands", lambda: nobody.exec(["true"])),
        ("read files", lambda: nobody.read("/etc/hostname")),
        ("score", lambda: nobody.score(0.0)),
        ("delete sessions", nobody.delete),
    ]


async def _may(name: str, right: Right) -> Check:
    try:
        await right()
    except NotFound:
        pass  # The answer where one may.
    except Forbidden as err:
        do = "bind the role `forktree-searcher` to the account, or `forktree-viewer` to look only"
        return Check(check=f"may {name}", finding=Finding.LIMITED, says=err.message, do=do)
    except ClientError as err:
        return Check(check=f"may {name}", finding=Finding.FAILED, says=err.message)
    return Check(check=f"may {name}", finding=Finding.OK, says="yes")


async def _this_node(client: AsyncClient) -> Check:
    try:
        node = await client.node()
    except Forbidden as err:
        return Check(check="node", finding=Finding.LIMITED, says=err.message, do="ask for the role `view`")
    except ClientError as err:
        return Check(check="node", finding=Finding.FAILED, says=err.message)
    return _node(node)


def _node(node: NodeInfo) -> Check:
    check, canary = f"node {node.node}", node.canary
    if not node.ready:
        says = "no session is placed there" + (
            "" if canary is None else f": {canary.message} ({canary.reason})"
        )
        do = f"kubectl describe forknode {node.node}; the log of its agent says the rest"
        return Check(check=check, finding=Finding.FAILED, says=says, do=do)
    says = f"{node.engine} on {node.accelerator}"
    if node.capacity_bytes is not None:
        says += f", {size(node.reserved_bytes or 0)} of {size(node.capacity_bytes)} promised"
    if canary is not None and canary.message:
        says += f"; {canary.message}"
    is_slow = canary is not None and canary.reason == "Emulated"
    if is_slow:
        do = "it works, but slowly: give the node /dev/kvm"
        return Check(check=check, finding=Finding.LIMITED, says=says, do=do)
    return Check(check=check, finding=Finding.OK, says=says)


async def _templates(client: AsyncClient) -> AsyncGenerator[Check]:
    try:
        found = await client.templates.list()
    except ClientError as err:
        yield Check(check="templates", finding=Finding.LIMITED, says=err.message)
        return
    if not found:
        do = "kubectl apply a SessionTemplate, see docs/fork.md"
        yield Check(check="templates", finding=Finding.LIMITED, says="there are none", do=do)
    for each in found:
        yield _template(each)


def _template(template: TemplateInfo) -> Check:
    check = f"template {template.template_id}"
    why = [f"{at.node}: {at.message or at.reason}" for at in template.nodes if at.reason is not None]
    if template.ready_nodes:
        says = f"ready on {template.ready_nodes} of {len(template.nodes)} nodes"
        return Check(check=check, finding=Finding.OK, says="; ".join([says, *why]))
    if why:
        do = f"kubectl describe sessiontemplate {template.template_id}"
        return Check(check=check, finding=Finding.FAILED, says="; ".join(why), do=do)
    return Check(check=check, finding=Finding.OK, says="not booted yet; its first session does that")


async def _all_nodes(asked: Asked) -> AsyncGenerator[Check]:
    """All nodes of the cluster, where there is a way to it that may see them; else nothing is said."""
    # Not for every command: their imports take half a second.
    from forktree.kube.access import AccessError, ClusterAccess  # noqa: PLC0415
    from forktree.kube.client import KubeClient  # noqa: PLC0415
    from forktree.models import ForkNode  # noqa: PLC0415

    common = asked.common
    if common.kubeconfig is None and not any(
        os.environ.get(name) for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST")
    ):
        return
    try:
        access = await asyncio.to_thread(ClusterAccess.discovered, common.kubeconfig, common.context)
        async with KubeClient.connected(access, timeout_seconds=_CLUSTER_SECONDS) as kube:
            nodes = (await kube.list(ForkNode)).items
    except (AccessError, ForktreeError) as err:
        yield Check(check="nodes", finding=Finding.LIMITED, says=f"they cannot be listed: {err}")
        return
    if not nodes:
        yield Check(check="nodes", finding=Finding.FAILED, says="none has an agent", do="kubectl get pods -A")
    for each in nodes:
        info = NodeInfo.model_validate(
            {"node": each.metadata.name} | each.status.model_dump(mode="json", exclude_none=True)
        )
        yield _node(info)

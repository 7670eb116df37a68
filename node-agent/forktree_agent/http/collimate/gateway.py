"""The gateway's surface: `/v1/sandboxes`, `/v1/templates` and `/v1/images`, for callers with a token.

It stands on the server beside the native routes: whoever has the address of a namespace has both.

Each answer closes its connection. The client keeps one for each of its threads, and where we have closed that
meanwhile, for being idle or for a restart, its next command there fails.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.models import SessionState, SessionTemplate
from forktree.wire_trees import Nothing
from forktree_agent.http import bodies, changing, finding
from forktree_agent.http.collimate import closing, environments, labels, listing, sandboxes, wire
from forktree_agent.http.collimate.sandboxes import Elsewhere
from forktree_agent.http.collimate.surfaces import Surface, forwarded, handed_on, visit
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.table import Asked, Each, Right, Route

CODES: Final = {
    Code.NO_SUCH_SESSION: Code.NOT_FOUND,
    Code.NO_TEMPLATE: Code.NOT_FOUND,
    Code.INVALID_SEED: Code.BAD_REQUEST,
}


async def _images(asked: Asked) -> web.StreamResponse:
    templates = (await asked.client.list(SessionTemplate, asked.namespace)).items
    return await bodies.answer(wire.Images(images=tuple(environments.image(each) for each in templates)))


async def _templates(asked: Asked) -> web.StreamResponse:
    templates = (await asked.client.list(SessionTemplate, asked.namespace)).items
    return bodies.array([environments.status(each) for each in templates])


async def _template(asked: Asked) -> web.StreamResponse:
    template = await environments.get(asked.client, asked.namespace, asked.named("template_id"))
    return await bodies.answer(environments.status(template))


async def _make_template(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(wire.MakeTemplate)
    return await bodies.answer(await environments.make(visit(asked), wanted), HTTPStatus.CREATED)


async def _delete_template(asked: Asked) -> web.StreamResponse:
    name = asked.named("template_id")
    await environments.delete(visit(asked), name)
    return await bodies.answer(wire.Deleted(deleted=True, id=name))


async def _expect(asked: Asked) -> web.StreamResponse:
    name, wanted = asked.named("template_id"), await asked.body(wire.ExpectWidth)
    width = await environments.expect(visit(asked), name, wanted.width)
    return await bodies.answer(wire.Expected(id=name, expected_width=width))


async def _release(asked: Asked) -> web.StreamResponse:
    name = asked.named("template_id")
    await asked.body(Nothing)
    released_at = await environments.release(visit(asked), name)
    return await bodies.answer(wire.Released(id=name, released=True, released_at=released_at))


async def _open(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(wire.OpenSandbox)
    sandboxes.refuse_network(wanted.egress)
    if wanted.secret_refs:
        sentence = (
            "no proxy here adds secrets to requests: a template names Secrets in its `env`; leave"
            " `secret_refs` out"
        )
        raise Refusal(Code.BAD_REQUEST, sentence)
    annotations = labels.of_sandbox(wanted.label, wanted.labels)
    made = await sandboxes.opened(visit(asked), wanted.template, annotations=annotations)
    body = wire.SandboxOpened(
        id=made.session_id,
        template=made.template_id,
        fork_time_ms=made.fork_time_ms or 0.0,
        create_time_ms=made.create_time_ms,
    )
    return await bodies.answer(body, HTTPStatus.CREATED)


async def _list(asked: Asked) -> web.StreamResponse:
    return await bodies.answer(wire.Sandboxes(sandboxes=tuple(await listing.sandboxes(visit(asked)))))


async def _get(asked: Asked) -> web.StreamResponse:
    return await bodies.answer(await listing.sandbox(visit(asked), asked.session_id))


async def _exec(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(wire.SandboxExec)
    ended = await sandboxes.executed(visit(asked), asked.session_id, wanted)
    return await ended.answer(asked.request)


async def _fork(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(wire.ForkSandbox)
    annotations = labels.of_children(wanted.labels)
    made = await sandboxes.forked(visit(asked), asked.session_id, wanted.count, annotations=annotations)
    body = wire.Forked(
        parent=asked.session_id,
        children=tuple(
            wire.Child(
                id=child.session_id, label=None if wanted.labels is None else wanted.labels[child.index]
            )
            for child in made.children
        ),
        fork_time_ms=made.fork_time_ms,
        total_time_ms=made.total_time_ms,
    )
    return await bodies.answer(body, HTTPStatus.CREATED)


async def _suspend(asked: Asked) -> web.StreamResponse:
    return await _put_into(asked, SessionState.PAUSED)


async def _resume(asked: Asked) -> web.StreamResponse:
    return await _put_into(asked, SessionState.RUNNING)


async def _put_into(asked: Asked, state: SessionState) -> web.StreamResponse:
    await asked.body(Nothing)
    session = await finding.look(asked, asked.session_id)
    if isinstance(session, str):
        raise Elsewhere(session, asked.seen + finding.WAIT_SECONDS)
    info = await changing.become(asked, session, state)
    return await bodies.answer(wire.SandboxState(id=info.session_id, state=listing.STATES[info.phase]))


async def _delete(asked: Asked) -> web.StreamResponse:
    try:
        await closing.closed(visit(asked), asked.session_id, its_node_first=True)
    except Elsewhere as there:
        try:
            return await forwarded(asked, there)
        except Refusal as refusal:
            if refusal.code not in {Code.WRONG_NODE, Code.UPSTREAM_ERROR}:
                raise
            # Nobody answers there; and the client of this protocol does not ask a second time.
            await closing.closed(visit(asked), asked.session_id, its_node_first=False)
    return await bodies.answer(wire.Deleted(deleted=True, id=asked.session_id))


async def _connect(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(wire.Connect)
    await listing.sandbox(visit(asked), asked.session_id)
    sentence = (
        f"port {wanted.port} of {asked.session_id} is not reached by this protocol: one that its template"
        f" declares is at sessions/{asked.session_id}/ports of the native API"
    )
    raise Refusal(Code.PORT_NOT_EXPOSED, sentence)


async def _usage(asked: Asked) -> web.StreamResponse:
    sentence = "nothing is metered here, so there is no usage to tell; kubectl shows what a namespace has"
    raise Refusal(Code.NOT_FOUND, sentence)


_SESSION: Final = "/sandboxes/{session_id}"
_TEMPLATE: Final = "/templates/{template_id}"

GATEWAY: Final = Surface(
    below="",
    codes=CODES,
    closes=True,
    routes=(
        Route(
            method="GET",
            path="/images",
            summary="The templates of the namespace, as what sandboxes can be made of",
            handler=_images,
            rights=(Right("list", "sessiontemplates"),),
            answers={HTTPStatus.OK: (wire.Images,)},
        ),
        Route(
            method="POST",
            path="/templates",
            summary="Make a template, or find the same one",
            handler=_make_template,
            rights=(Right("create", "sessiontemplates"),),
            body=wire.MakeTemplate,
            answers={HTTPStatus.CREATED: (wire.TemplateMade,)},
        ),
        Route(
            method="GET",
            path="/templates",
            summary="The templates of the namespace",
            handler=_templates,
            rights=(Right("list", "sessiontemplates"),),
            answers={HTTPStatus.OK: (Each(wire.TemplateStatus),)},
        ),
        Route(
            method="GET",
            path=_TEMPLATE,
            summary="How one template stands",
            handler=_template,
            rights=(Right("get", "sessiontemplates"),),
            answers={HTTPStatus.OK: (wire.TemplateStatus,)},
        ),
        Route(
            method="DELETE",
            path=_TEMPLATE,
            summary="Delete a template that nothing runs of",
            handler=_delete_template,
            rights=(Right("delete", "sessiontemplates"), Right("list", "sessions")),
            answers={HTTPStatus.OK: (wire.Deleted,)},
        ),
        Route(
            method="POST",
            path=f"{_TEMPLATE}/expect",
            summary="Keep so many machines waiting for now",
            handler=_expect,
            rights=(Right("patch", "sessiontemplates"),),
            body=wire.ExpectWidth,
            answers={HTTPStatus.OK: (wire.Expected,)},
        ),
        Route(
            method="POST",
            path=f"{_TEMPLATE}/release",
            summary="Keep as many machines waiting as before",
            handler=_release,
            rights=(Right("patch", "sessiontemplates"),),
            body=Nothing,
            answers={HTTPStatus.OK: (wire.Released,)},
        ),
        Route(
            method="POST",
            path="/sandboxes",
            summary="Open a sandbox, answered when it runs",
            handler=_open,
            rights=(Right("create", "sessions"),),
            body=wire.OpenSandbox,
            answers={HTTPStatus.CREATED: (wire.SandboxOpened,)},
        ),
        Route(
            method="GET",
            path="/sandboxes",
            summary="The sandboxes of the namespace",
            handler=_list,
            rights=(Right("list", "sessions"),),
            answers={HTTPStatus.OK: (wire.Sandboxes,)},
        ),
        Route(
            method="GET",
            path=_SESSION,
            summary="One sandbox",
            handler=handed_on(_get),
            rights=(Right("get", "sessions"),),
            answers={HTTPStatus.OK: (wire.Sandbox,)},
        ),
        Route(
            method="DELETE",
            path=_SESSION,
            summary="Delete a sandbox, and nothing that was forked from it",
            handler=handed_on(_delete),
            rights=(Right("delete", "sessions"),),
            answers={HTTPStatus.OK: (wire.Deleted,)},
        ),
        Route(
            method="POST",
            path=f"{_SESSION}/exec",
            summary="Run a command to its end",
            handler=handed_on(_exec),
            rights=(Right("create", "sessions/exec"),),
            body=wire.SandboxExec,
            answers={HTTPStatus.OK: (wire.ExecAnswer,)},
        ),
        Route(
            method="POST",
            path=f"{_SESSION}/fork",
            summary="Fork a sandbox, answered when every child runs",
            handler=handed_on(_fork),
            rights=(Right("create", "sessions/fork"),),
            body=wire.ForkSandbox,
            answers={HTTPStatus.CREATED: (wire.Forked,)},
        ),
        Route(
            method="POST",
            path=f"{_SESSION}/suspend",
            summary="Let a sandbox stand still",
            handler=handed_on(_suspend),
            rights=(Right("patch", "sessions"),),
            body=Nothing,
            answers={HTTPStatus.OK: (wire.SandboxState,)},
        ),
        Route(
            method="POST",
            path=f"{_SESSION}/resume",
            summary="Let a sandbox go on",
            handler=handed_on(_resume),
            rights=(Right("patch", "sessions"),),
            body=Nothing,
            answers={HTTPStatus.OK: (wire.SandboxState,)},
        ),
        Route(
            method="POST",
            path=f"{_SESSION}/connect-url",
            summary="Refused: this protocol reaches no ports; the native API does",
            handler=handed_on(_connect),
            rights=(Right("get", "sessions"),),
            body=wire.Connect,
            answers={},
        ),
        Route(
            method="GET",
            path="/usage",
            summary="Refused: nothing is metered",
            handler=_usage,
            rights=(Right("list", "sessions"),),
            answers={},
        ),
    ),
)

"""Searches over live sessions: small loops over fork, act, score and prune, and the steps they are made
of."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeVar

from forktree._async.session import AsyncSession
from forktree._flavours import async_each
from forktree._nodes import Found, Node, backpropagate, uct
from forktree._progress import Progress, shown

A = TypeVar("A")
"""What an action is: a move, a command, a prompt."""
A_co = TypeVar("A_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)

AT_ONCE = 16
"""Children that act and are scored at the same time."""


class AsyncPropose(Protocol[A_co]):
    """Which actions to try from here. None: the session is an end."""

    async def __call__(self, session: AsyncSession, /) -> Iterable[A_co]: ...


class AsyncAct(Protocol[A_contra]):
    """Do the action in the session. Several children act at once. What it returns is not used."""

    async def __call__(self, session: AsyncSession, action: A_contra, /) -> object: ...


class AsyncScore(Protocol):
    """How good the session is: higher is better."""

    async def __call__(self, session: AsyncSession, /) -> float: ...


async def async_expand(
    node: Node[AsyncSession, A],
    actions: Iterable[A],
    *,
    act: AsyncAct[A],
    score: AsyncScore,
    at_once: int = AT_ONCE,
) -> list[Node[AsyncSession, A]]:
    """One child of `node` for each action, all from one fork, each after its action and with its score.

    When anything fails, all these children are deleted.
    """
    tried = list(actions)
    if not tried:
        return []
    forked = await node.session.fork(len(tried))
    children = [
        Node(session=session, action=action, parent=node)
        for session, action in zip(forked, tried, strict=True)
    ]

    async def try_out(child: Node[AsyncSession, A], action: A) -> None:
        await act(child.session, action)
        child.score = await score(child.session)

    try:
        pairs = zip(children, tried, strict=True)
        await async_each([partial(try_out, child, action) for child, action in pairs], at_once=at_once)
    except BaseException:
        await async_prune(children, at_once=at_once)
        raise
    node.children += children
    return children


async def async_prune(nodes: Sequence[Node[AsyncSession, A]], *, at_once: int = AT_ONCE) -> None:
    """Delete the sessions of these nodes, and so all below them."""
    live = [node for node in nodes if not node.pruned]

    async def prune(node: Node[AsyncSession, A]) -> None:
        await node.session.prune()
        for gone in node.below():
            gone.pruned = True

    await async_each([partial(prune, node) for node in live], at_once=at_once)


async def async_keep_only(node: Node[AsyncSession, A], *, at_once: int = AT_ONCE) -> None:
    """Delete all of the search's sessions but that of `node` and those above it."""
    path = {id(each) for each in (node, *node.ancestors())}
    kept = [node, *node.ancestors()]
    off = [child for each in kept for child in each.children if id(child) not in path and not child.pruned]
    await async_prune(off, at_once=at_once)


async def async_beam(
    root: AsyncSession,
    *,
    propose: AsyncPropose[A],
    act: AsyncAct[A],
    score: AsyncScore,
    width: int,
    depth: int,
    goal: float = math.inf,
    at_once: int = AT_ONCE,
    progress: Progress = False,
) -> Found[AsyncSession, A]:
    """Level by level, keep the `width` best sessions; at most `depth` levels, or until a score is `goal`.

    What is not kept is deleted at once, but for the best so far.
    """
    top = Node[AsyncSession, A](session=root)
    level, best, expanded = [top], top, 0
    with ExitStack() as stack:
        tell = stack.enter_context(shown(progress, "beam", depth))
        for _ in range(depth):
            grown: list[Node[AsyncSession, A]] = []
            for node in level:
                grown += await async_expand(
                    node, await propose(node.session), act=act, score=score, at_once=at_once
                )
                expanded += 1
            if not grown:
                break
            level = heapq.nlargest(width, grown, key=lambda node: node.score)
            best = max(best, level[0], key=lambda node: node.score)
            kept = {id(node) for node in (*level, best, *best.ancestors())}
            await async_prune([node for node in grown if id(node) not in kept], at_once=at_once)
            tell(best.score)
            if best.score >= goal:
                break
    await async_keep_only(best, at_once=at_once)
    return Found(best=best, root=top, expanded=expanded)


async def async_best_first(
    root: AsyncSession,
    *,
    propose: AsyncPropose[A],
    act: AsyncAct[A],
    score: AsyncScore,
    budget: int,
    open_most: int = 64,
    goal: float = math.inf,
    at_once: int = AT_ONCE,
    progress: Progress = False,
) -> Found[AsyncSession, A]:
    """Always go on from the best session that was not gone on from; `budget` times, or until a score is
    `goal`.

    Of those that wait, the `open_most` best are kept.
    """
    top = Node[AsyncSession, A](session=root)
    best, expanded = top, 0
    order = itertools.count()  # Of equal scores the newest goes first: deep before wide.
    waiting: list[tuple[float, int, Node[AsyncSession, A]]] = [(-top.score, 0, top)]
    with ExitStack() as stack:
        tell = stack.enter_context(shown(progress, "best first", budget))
        while waiting and expanded < budget and best.score < goal:
            _, _, node = heapq.heappop(waiting)
            for child in await async_expand(
                node, await propose(node.session), act=act, score=score, at_once=at_once
            ):
                heapq.heappush(waiting, (-child.score, -next(order), child))
                best = max(best, child, key=lambda each: each.score)
            expanded += 1
            dropped = [each for _, _, each in heapq.nsmallest(len(waiting), waiting)[open_most:]]
            if dropped:
                waiting = heapq.nsmallest(open_most, waiting)
                await async_prune([each for each in dropped if each is not best], at_once=at_once)
            tell(best.score)
    await async_keep_only(best, at_once=at_once)
    return Found(best=best, root=top, expanded=expanded)


async def async_mcts(
    root: AsyncSession,
    *,
    propose: AsyncPropose[A],
    act: AsyncAct[A],
    score: AsyncScore,
    iterations: int,
    exploration: float = math.sqrt(2),
    goal: float = math.inf,
    at_once: int = AT_ONCE,
    progress: Progress = False,
) -> Found[AsyncSession, A]:
    """Monte-Carlo tree search by UCT: walk down to the most promising leaf, fork it once for all its actions,
    and tell what they scored to all above; `iterations` times, or until a score is `goal`.

    `score` says what a session is worth: what it shows, or what a play from there comes to, which it can find
    out in a `branch` of the session. Scores may be of any size. All sessions live until the end.
    """
    top = Node[AsyncSession, A](session=root)
    best, expanded = top, 0
    lowest, highest = math.inf, -math.inf
    with ExitStack() as stack:
        tell = stack.enter_context(shown(progress, "mcts", iterations))
        for _ in range(iterations):
            node = top
            while node.children:
                node = max(node.children, key=lambda each: uct(each, exploration, lowest, highest))
            children = await async_expand(
                node, await propose(node.session), act=act, score=score, at_once=at_once
            )
            expanded += bool(children)
            if not children and node is top:
                break
            for each in children or [node]:
                lowest, highest = min(lowest, each.score), max(highest, each.score)
                backpropagate(each, each.score)
                best = max(best, each, key=lambda one: one.score)
            tell(best.score)
            if best.score >= goal:
                break
    await async_keep_only(best, at_once=at_once)
    return Found(best=best, root=top, expanded=expanded)

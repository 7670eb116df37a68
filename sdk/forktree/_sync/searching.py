# Generated from sdk/forktree/_async/searching.py by `make generate`; change that file.
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

from forktree._flavours import each
from forktree._nodes import Found, Node, backpropagate, uct
from forktree._progress import Progress, shown
from forktree._sync.session import Session

A = TypeVar("A")
"""What an action is: a move, a command, a prompt."""
A_co = TypeVar("A_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)

AT_ONCE = 16
"""Children that act and are scored at the same time."""


class Propose(Protocol[A_co]):
    """Which actions to try from here. None: the session is an end."""

    def __call__(self, session: Session, /) -> Iterable[A_co]: ...


class Act(Protocol[A_contra]):
    """Do the action in the session. Several children act at once. What it returns is not used."""

    def __call__(self, session: Session, action: A_contra, /) -> object: ...


class Score(Protocol):
    """How good the session is: higher is better."""

    def __call__(self, session: Session, /) -> float: ...


def expand(
    node: Node[Session, A],
    actions: Iterable[A],
    *,
    act: Act[A],
    score: Score,
    at_once: int = AT_ONCE,
) -> list[Node[Session, A]]:
    """One child of `node` for each action, all from one fork, each after its action and with its score.

    When anything fails, all these children are deleted.
    """
    tried = list(actions)
    if not tried:
        return []
    forked = node.session.fork(len(tried))
    children = [
        Node(session=session, action=action, parent=node)
        for session, action in zip(forked, tried, strict=True)
    ]

    def try_out(child: Node[Session, A], action: A) -> None:
        act(child.session, action)
        child.score = score(child.session)

    try:
        pairs = zip(children, tried, strict=True)
        each([partial(try_out, child, action) for child, action in pairs], at_once=at_once)
    except BaseException:
        prune(children, at_once=at_once)
        raise
    node.children += children
    return children


def prune(nodes: Sequence[Node[Session, A]], *, at_once: int = AT_ONCE) -> None:
    """Delete the sessions of these nodes, and so all below them."""
    live = [node for node in nodes if not node.pruned]

    def prune(node: Node[Session, A]) -> None:
        node.session.prune()
        for gone in node.below():
            gone.pruned = True

    each([partial(prune, node) for node in live], at_once=at_once)


def keep_only(node: Node[Session, A], *, at_once: int = AT_ONCE) -> None:
    """Delete all of the search's sessions but that of `node` and those above it."""
    path = {id(each) for each in (node, *node.ancestors())}
    kept = [node, *node.ancestors()]
    off = [child for each in kept for child in each.children if id(child) not in path and not child.pruned]
    prune(off, at_once=at_once)


def beam(
    root: Session,
    *,
    propose: Propose[A],
    act: Act[A],
    score: Score,
    width: int,
    depth: int,
    goal: float = math.inf,
    at_once: int = AT_ONCE,
    progress: Progress = False,
) -> Found[Session, A]:
    """Level by level, keep the `width` best sessions; at most `depth` levels, or until a score is `goal`.

    What is not kept is deleted at once, but for the best so far.
    """
    top = Node[Session, A](session=root)
    level, best, expanded = [top], top, 0
    with ExitStack() as stack:
        tell = stack.enter_context(shown(progress, "beam", depth))
        for _ in range(depth):
            grown: list[Node[Session, A]] = []
            for node in level:
                grown += expand(node, propose(node.session), act=act, score=score, at_once=at_once)
                expanded += 1
            if not grown:
                break
            level = heapq.nlargest(width, grown, key=lambda node: node.score)
            best = max(best, level[0], key=lambda node: node.score)
            kept = {id(node) for node in (*level, best, *best.ancestors())}
            prune([node for node in grown if id(node) not in kept], at_once=at_once)
            tell(best.score)
            if best.score >= goal:
                break
    keep_only(best, at_once=at_once)
    return Found(best=best, root=top, expanded=expanded)


def best_first(
    root: Session,
    *,
    propose: Propose[A],
    act: Act[A],
    score: Score,
    budget: int,
    open_most: int = 64,
    goal: float = math.inf,
    at_once: int = AT_ONCE,
    progress: Progress = False,
) -> Found[Session, A]:
    """Always go on from the best session that was not gone on from; `budget` times, or until a score is
    `goal`.

    Of those that wait, the `open_most` best are kept.
    """
    top = Node[Session, A](session=root)
    best, expanded = top, 0
    order = itertools.count()  # Of equal scores the newest goes first: deep before wide.
    waiting: list[tuple[float, int, Node[Session, A]]] = [(-top.score, 0, top)]
    with ExitStack() as stack:
        tell = stack.enter_context(shown(progress, "best first", budget))
        while waiting and expanded < budget and best.score < goal:
            _, _, node = heapq.heappop(waiting)
            for child in expand(node, propose(node.session), act=act, score=score, at_once=at_once):
                heapq.heappush(waiting, (-child.score, -next(order), child))
                best = max(best, child, key=lambda each: each.score)
            expanded += 1
            dropped = [each for _, _, each in heapq.nsmallest(len(waiting), waiting)[open_most:]]
            if dropped:
                waiting = heapq.nsmallest(open_most, waiting)
                prune([each for each in dropped if each is not best], at_once=at_once)
            tell(best.score)
    keep_only(best, at_once=at_once)
    return Found(best=best, root=top, expanded=expanded)


def mcts(
    root: Session,
    *,
    propose: Propose[A],
    act: Act[A],
    score: Score,
    iterations: int,
    exploration: float = math.sqrt(2),
    goal: float = math.inf,
    at_once: int = AT_ONCE,
    progress: Progress = False,
) -> Found[Session, A]:
    """Monte-Carlo tree search by UCT: walk down to the most promising leaf, fork it once for all its actions,
    and tell what they scored to all above; `iterations` times, or until a score is `goal`.

    `score` says what a session is worth: what it shows, or what a play from there comes to, which it can find
    out in a `branch` of the session. Scores may be of any size. All sessions live until the end.
    """
    top = Node[Session, A](session=root)
    best, expanded = top, 0
    lowest, highest = math.inf, -math.inf
    with ExitStack() as stack:
        tell = stack.enter_context(shown(progress, "mcts", iterations))
        for _ in range(iterations):
            node = top
            while node.children:
                node = max(node.children, key=lambda each: uct(each, exploration, lowest, highest))
            children = expand(node, propose(node.session), act=act, score=score, at_once=at_once)
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
    keep_only(best, at_once=at_once)
    return Found(best=best, root=top, expanded=expanded)

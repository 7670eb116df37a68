#!/usr/bin/env python3
"""The search of `beam-search/` in Python: its README says how to run it."""

import forktree

DOWN, RIGHT, UP = "1", "2", "3"

with forktree.Client() as client:
    best = client.sessions.create("lake")  # open
    for _ in range(6):
        actions = [DOWN, RIGHT, UP]  # propose
        children = best.fork(len(actions))
        for child, action in zip(children, actions, strict=True):
            child.exec(["gym-ask", "step", action], check=True)  # act
        scores = {child: float(child.exec(["gym-ask", "score"]).check().stdout) for child in children}
        client.score(scores)
        best = max(children, key=lambda child: scores[child])  # keep
        client.prune(child for child in children if child != best)
    print(best.exec(["gym-ask", "state"], check=True).stdout, end="")

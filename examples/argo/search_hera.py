#!/usr/bin/env python3
"""`fan-out.yaml` and `beam-search.yaml` in Python, with Hera (`pip install 'hera-workflows>=7,<8'`).

search_hera.py fan-out                        prints the WorkflowTemplate as JSON, for `kubectl apply -f -`
search_hera.py beam-search --submit SERVER    starts it at an Argo server, with $ARGO_TOKEN ("Bearer …")
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hera.workflows import Parameter, Resource, Step, Steps, WorkflowsService, WorkflowTemplate
from hera.workflows.models import TTLStrategy, ValueFrom

PLANS = {
    "along-the-edge": ["2", "2", "2", "1"],
    "half-way": ["1", "1", "2"],
    "round-the-holes": ["1", "1", "2", "1", "2", "2"],
    "straight": ["1", "2", "1", "2"],
}
ACTIONS = {"down": ["1"], "right": ["2"], "up": ["3"]}

FAILED = '.status.phase == "Failed" then error(.status.reason + ": " + .status.message)'
BEST = f'if {FAILED} else .status.best // error("no branch has a score") end'
BRANCH = ".status.best as $best | .status.children[] | select(.name == $best) | .branch"


def manifest(kind: str, name: str, spec: Mapping[str, Any]) -> str:
    """One of forktree's objects, of this workflow."""
    metadata = {"name": name, "labels": {"forktree.dev/workflow": "{{workflow.name}}"}}
    return json.dumps(
        {"apiVersion": "forktree.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
    )


def fork(
    template: str,
    name: str,
    branches: Mapping[str, Sequence[str]],
    *,
    keep: str,
    inputs: Sequence[str],
    called: str,
) -> Resource:
    """A template: the Fork `name` of the session in input `source`. Output `called` is the best branch."""
    spec = {
        "source": {"session": {"name": "{{inputs.parameters.source}}"}},
        "replicas": len(branches),
        "branches": [
            {"name": branch, "exec": {"argv": ["gym-ask", "step", *actions]}}
            for branch, actions in branches.items()
        ],
        "score": {"exec": {"argv": ["gym-ask", "score"]}},
        "prune": {"keepTop": "KEEP"},
    }
    return Resource(
        name=template,
        inputs=[Parameter(name=each) for each in inputs],
        action="apply",
        # A number, which may be known only when the workflow runs.
        manifest=manifest("Fork", name, spec).replace('"KEEP"', keep),
        success_condition="status.phase in (Complete, Failed)",
        outputs=[
            Parameter(name="best", value_from=ValueFrom(jq_filter=BEST)),
            Parameter(name="score", value_from=ValueFrom(json_path="{.status.bestScore}")),
            Parameter(name=called, value_from=ValueFrom(jq_filter=BRANCH)),
        ],
    )


def root() -> Resource:
    """The root of the tree, which goes with the Workflow."""
    spec = {"templateRef": {"name": "{{workflow.parameters.template}}"}}
    return Resource(
        name="root",
        action="apply",
        set_owner_reference=True,
        manifest=manifest("Session", "{{workflow.name}}", spec),
        success_condition="status.phase in (Running, Failed)",
        outputs=[
            Parameter(name="session", value_from=ValueFrom(jq_filter=f"if {FAILED} else .metadata.name end"))
        ],
    )


def forget() -> Resource:
    """For `on_exit="forget"`: the tree ends with the search, and not with the Workflow."""
    return Resource(name="forget", action="delete", flags=["session.forktree.dev", "{{workflow.name}}"])


def search(name: str, **parameters: str) -> WorkflowTemplate:
    return WorkflowTemplate(
        name=name,
        service_account_name="forktree-search",
        entrypoint="search",
        active_deadline_seconds=3600,
        ttl_strategy=TTLStrategy(seconds_after_completion=86400),
        arguments=[Parameter(name=each, value=value) for each, value in parameters.items()],
    )


def of(step: str, *outputs: str) -> list[Parameter]:
    """These outputs of a step, as one's own."""
    paths = {each: f"{{{{steps.{step}.outputs.parameters.{each}}}}}" for each in outputs}
    return [Parameter(name=each, value_from=ValueFrom(parameter=path)) for each, path in paths.items()]


def fan_out() -> WorkflowTemplate:
    label = {"metadata": {"name": "{{inputs.parameters.winner}}", "labels": {"example.org/search": "won"}}}
    with search("fan-out", template="lake") as template:
        root()
        forget()
        fork("plans", "{{workflow.name}}-plans", PLANS, keep="1", inputs=["source"], called="plan")
        Resource(
            name="mark",
            inputs=[Parameter(name="winner")],
            action="patch",
            merge_strategy="merge",
            manifest=json.dumps({"apiVersion": "forktree.dev/v1alpha1", "kind": "Session", **label}),
        )
        with Steps(name="search", outputs=of("plans", "best", "score", "plan")):
            Step(name="root", template="root")
            source = {"source": "{{steps.root.outputs.parameters.session}}"}
            Step(name="plans", template="plans", arguments=source)
            Step(
                name="mark", template="mark", arguments={"winner": "{{steps.plans.outputs.parameters.best}}"}
            )
    return template


def beam_search() -> WorkflowTemplate:
    inputs = ["source", "level", "path"]
    with search("beam-search", template="lake", depth="8", enough="1", keep="1") as template:
        root()
        forget()
        name = "{{workflow.name}}-{{inputs.parameters.level}}"
        keep = "{{workflow.parameters.keep}}"
        fork("fork", name, ACTIONS, keep=keep, inputs=["source", "level"], called="branch")
        found = {
            "best": "steps.fork.outputs.parameters.best",
            "score": "steps.fork.outputs.parameters.score",
            "path": 'sprig.trim(inputs.parameters.path + " " + steps.fork.outputs.parameters.branch)',
        }
        outputs = [
            Parameter(name=each, value_from=ValueFrom(expression=deepest(each, here)))
            for each, here in found.items()
        ]
        with Steps(name="level", inputs=[Parameter(name=each) for each in inputs], outputs=outputs):
            here = {each: f"{{{{inputs.parameters.{each}}}}}" for each in inputs}
            Step(name="fork", template="fork", arguments={"source": here["source"], "level": here["level"]})
            Step(
                name="deeper",
                template="level",
                when="{{=asInt(inputs.parameters.level) < asInt(workflow.parameters.depth)"
                " && asFloat(steps.fork.outputs.parameters.score) < asFloat(workflow.parameters.enough)}}",
                arguments={
                    "source": "{{steps.fork.outputs.parameters.best}}",
                    "level": "{{=asInt(inputs.parameters.level) + 1}}",
                    "path": here["path"] + " {{steps.fork.outputs.parameters.branch}}",
                },
            )
        with Steps(name="search", outputs=of("levels", "best", "score", "path")):
            Step(name="root", template="root")
            first = {"source": "{{steps.root.outputs.parameters.session}}", "level": "1", "path": ""}
            Step(name="levels", template="level", arguments=first)
    return template


def deepest(output: str, here: str) -> str:
    """What the level below found, or this one where there is none below."""
    return f'steps.deeper.status == "Succeeded" ? steps.deeper.outputs.parameters.{output} : {here}'


def main() -> None:
    searches = {"fan-out": fan_out, "beam-search": beam_search}
    parser = argparse.ArgumentParser(description="A search as a WorkflowTemplate of Argo's.")
    parser.add_argument("search", choices=searches)
    parser.add_argument("--submit", metavar="SERVER", help="start it at this server, like https://argo:2746")
    parser.add_argument("--namespace", default="default", help="where it runs (default: default)")
    arguments = parser.parse_args()
    template = searches[arguments.search]()
    if arguments.submit is None:
        print(json.dumps(template.to_dict(), indent=2))
        return
    template.namespace = arguments.namespace
    template.workflows_service = WorkflowsService(
        host=arguments.submit, token=os.environ["ARGO_TOKEN"], namespace=arguments.namespace
    )
    started = template.create_as_workflow(generate_name=f"{arguments.search}-")
    print(started.metadata.name)


if __name__ == "__main__":
    main()

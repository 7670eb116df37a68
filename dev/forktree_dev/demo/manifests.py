"""The objects that the demo applies, as a user would write them."""

from __future__ import annotations

from forktree_dev.demo.workload import PROGRAM, ask

NAMESPACE = "demo"
TEMPLATE = "environment"
USER = "demo-user"

_API = "forktree.dev/v1alpha1"
_RBAC = "rbac.authorization.k8s.io"

Manifest = dict[str, object]


def user() -> Manifest:
    """A namespace, and an account that may do in it what any editor may."""
    return _list(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(USER)},
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": _metadata(USER),
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": "edit"},
            "subjects": [{"kind": "ServiceAccount", "name": USER, "namespace": NAMESPACE}],
        },
    )


def template() -> Manifest:
    """Ready once the program answers, and pinned to the Python it was written for."""
    probe = {
        "exec": {"command": ask()},
        "periodSeconds": 1,
        "timeoutSeconds": 30,
        "failureThreshold": 60,
        "pins": [
            {
                "name": "python",
                "command": ["python3", "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
                "expect": "3.11",
            }
        ],
    }
    return {
        "apiVersion": _API,
        "kind": "SessionTemplate",
        "metadata": _metadata(TEMPLATE),
        "spec": {
            "image": "builtin:python",
            "machine": {"memory": "256Mi", "overlay": "32Mi"},
            "command": ["python3", "-c", PROGRAM],
            "readinessProbe": probe,
        },
    }


def session(name: str) -> Manifest:
    return {
        "apiVersion": _API,
        "kind": "Session",
        "metadata": _metadata(name),
        "spec": {"templateRef": {"name": TEMPLATE}},
    }


def fork(name: str, session: str, replicas: int) -> Manifest:
    return {
        "apiVersion": _API,
        "kind": "Fork",
        "metadata": _metadata(name),
        "spec": {"source": {"session": {"name": session}}, "replicas": replicas},
    }


def _metadata(name: str) -> Manifest:
    return {"name": name, "namespace": NAMESPACE}


def _list(*items: Manifest) -> Manifest:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}

"""What a model says about its CRD beyond types: validation rules, list kinds, printer columns.

These words travel in the models' JSON schema; the generator only moves them to where Kubernetes wants them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic.config import JsonDict


@dataclass(frozen=True, slots=True)
class Column:
    """One column of `kubectl get`. Priority 1 shows only with `-o wide`."""

    name: str
    path: str
    type: str = "string"
    priority: int = 0
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """How the API server serves a kind."""

    kind: str
    plural: str
    short_names: tuple[str, ...]
    namespaced: bool
    columns: tuple[Column, ...]
    selectable_fields: tuple[str, ...] = ()
    name_rules: tuple[tuple[str, str], ...] = ()
    """CEL rule and message about `metadata.name`, which is seen from the whole object only."""


def cel(*rules: tuple[str, str]) -> JsonDict:
    """CEL rules, each with the sentence that a person reads when it does not hold."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def map_list(*keys: str) -> JsonDict:
    """A list whose entries are told apart by `keys`, so several writers can each own some."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def atomic_list() -> JsonDict:
    """A list that one writer replaces as a whole; order matters."""
    return {"x-kubernetes-list-type": "atomic"}

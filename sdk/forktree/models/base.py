"""What all objects of the API have in common."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, ClassVar, Final, NewType

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic.alias_generators import to_camel

from forktree.models.schema import Resource

GROUP: Final = "forktree.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

Uid = NewType("Uid", str)
"""An object's uid. Names come back after a deletion, uids do not: machines are tied to uids."""

# Kubernetes writes an abbreviation in capitals where it stands for the thing itself.
_ALIASES: Final = {
    "boot_id": "bootID",
    "fork_point_id": "forkPointID",
    "parent_uid": "parentUID",
    "template_uid": "templateUID",
    "tree_ttl_seconds": "treeTTLSeconds",
    "vm_generation_id": "vmGenerationID",
}


def _alias(name: str) -> str:
    return _ALIASES.get(name) or to_camel(name)


class ApiModel(BaseModel):
    """Frozen; camelCase outside, snake_case inside; keys it does not know are ignored on read."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=_alias,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
    )

    def to_json(self) -> dict[str, JsonValue]:
        """The object as JSON values under their names in manifests, without what is not set."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_merge_patch(self) -> dict[str, JsonValue]:
        """Like `to_json`, but what is not set is null, so that a merge patch also clears it.

        Only on the first level: below, a merge patch keeps what it does not mention.
        """
        unset: dict[str, JsonValue] = dict.fromkeys(_alias(name) for name in type(self).model_fields)
        return unset | self.to_json()


def _none_is_empty(value: object) -> object:
    return {} if value is None else value


StringMap = Annotated[Mapping[str, str], BeforeValidator(_none_is_empty)]


class OwnerReference(ApiModel):
    """Above this object in a tree stands the one named here; when that goes, this goes."""

    api_version: str
    kind: str
    name: str
    uid: Uid
    controller: bool = False
    block_owner_deletion: bool = False


class ObjectMeta(ApiModel):
    """The part of an object's metadata that forktree reads or writes."""

    name: str
    namespace: str | None = None
    """None for cluster-scoped kinds only."""
    uid: Uid = Uid("")
    """Empty in an object that was not created yet."""
    resource_version: str = ""
    generation: int = 0
    labels: StringMap = Field(default_factory=dict[str, str])
    annotations: StringMap = Field(default_factory=dict[str, str])
    owner_references: tuple[OwnerReference, ...] = ()
    finalizers: tuple[str, ...] = ()
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None

    @property
    def deleting(self) -> bool:
        """Somebody asked for its deletion. There is no way back."""
        return self.deletion_timestamp is not None

    @property
    def orphaning(self) -> bool:
        """It is deleted with `--cascade=orphan`: what hangs below lives on. The DELETED event still tells."""
        return "orphan" in self.finalizers

    @property
    def controller(self) -> OwnerReference | None:
        """The one owner that manages this object."""
        return next((owner for owner in self.owner_references if owner.controller), None)


class ApiObject(ApiModel):
    """An object of the API server, of group `forktree.dev` unless a subclass says otherwise.

    Subclasses add `kind`, `spec` and `status`.
    """

    resource: ClassVar[Resource]

    api_version: str = API_VERSION
    metadata: ObjectMeta

    @classmethod
    def group_version(cls) -> str:
        """What objects of this kind have as `apiVersion`."""
        return str(cls.model_fields["api_version"].default)

    @classmethod
    def collection_path(cls, namespace: str | None) -> str:
        """Where the API server keeps objects of this kind; namespace None: those of all namespaces."""
        version = cls.group_version()
        base = (
            f"/apis/{version}" if "/" in version else f"/api/{version}"
        )  # Kubernetes' oldest kinds have no group.
        scope = f"/namespaces/{namespace}" if namespace is not None and cls.resource.namespaced else ""
        return f"{base}{scope}/{cls.resource.plural}"

    @classmethod
    def object_path(cls, namespace: str | None, name: str) -> str:
        if cls.resource.namespaced and namespace is None:
            raise ValueError(f"a {cls.resource.kind} lives in a namespace, and none is given for {name}")
        return f"{cls.collection_path(namespace)}/{name}"

    def owner_reference(self) -> OwnerReference:
        """What every object below this one carries, and no second one: two owners break the cascade."""
        return OwnerReference(
            api_version=self.group_version(),
            kind=self.resource.kind,
            name=self.metadata.name,
            uid=self.metadata.uid,
            controller=True,
            block_owner_deletion=True,
        )

    def manifest(self) -> dict[str, JsonValue]:
        """What to send to create this object: without status, which its writers add afterwards."""
        body = self.model_dump(mode="json", exclude_none=True, exclude={"metadata", "status"})
        metadata = self.metadata.model_dump(mode="json", exclude_defaults=True)
        return {**body, "kind": self.resource.kind, "metadata": metadata}

"""A bill of materials: SPDX 2.3 in JSON, one for each image. Equal content gives an equal text."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from forktree_dev.checkout import CHECKOUT
from forktree_dev.container_images.debian_files import DebianPackage
from forktree_dev.container_images.python_files import PythonPackage
from forktree_dev.container_images.recipes import Recipe

_CREATED = "2026-01-01T00:00:00Z"
_CARGO_LOCK = CHECKOUT / "node-agent" / "native" / "Cargo.lock"


def render(
    recipe: Recipe, version: str, debian: Iterable[DebianPackage], python: Iterable[PythonPackage]
) -> str:
    """All that the image is made of: Debian packages, wheels, crates, and what is our own."""
    own = _own(recipe, version)
    parts = [_debian(each) for each in debian] + [_python(each) for each in python]
    if recipe.guests:
        parts += _crates()
    content = json.dumps([own, parts], sort_keys=True).encode()
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"forktree-{recipe.name}-{version}",
        "documentNamespace": f"https://forktree.dev/spdx/{recipe.name}-{version}-{sha256(content).hexdigest()}",
        "creationInfo": {"created": _CREATED, "creators": ["Tool: forktree_dev.container_images"]},
        "packages": [own, *parts],
        "relationships": [
            _relation("SPDXRef-DOCUMENT", "DESCRIBES", own["SPDXID"]),
            *(_relation(own["SPDXID"], "CONTAINS", part["SPDXID"]) for part in parts),
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _own(recipe: Recipe, version: str) -> dict[str, Any]:
    return {
        **_part("image", f"forktree-{recipe.name}", version, f"pkg:oci/forktree-{recipe.name}@{version}"),
        "licenseConcluded": "Apache-2.0",
    }


def _debian(package: DebianPackage) -> dict[str, Any]:
    url = (
        f"pkg:deb/debian/{quote(package.name)}@{quote(package.version, safe='')}?arch={package.architecture}"
    )
    return {**_part("deb", package.name, package.version, url), **_checksum(package.sha256)}


def _python(package: PythonPackage) -> dict[str, Any]:
    url = f"pkg:pypi/{quote(package.name)}@{package.version}"
    return {**_part("pypi", package.name, package.version, url), **_checksum(package.sha256)}


def _crates() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = tomllib.loads(_CARGO_LOCK.read_text())["package"]
    return [
        _part("cargo", each["name"], each["version"], f"pkg:cargo/{each['name']}@{each['version']}")
        for each in listed
    ]


def _part(kind: str, name: str, version: str, url: str) -> dict[str, Any]:
    reference = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": url,
    }
    return {
        "SPDXID": "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", f"{kind}-{name}-{version}"),
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "externalRefs": [reference],
    }


def _checksum(digest: str) -> dict[str, Any]:
    if not digest:
        return {}
    return {"checksums": [{"algorithm": "SHA256", "checksumValue": digest}]}


def _relation(one: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}

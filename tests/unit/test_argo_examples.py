"""What Argo is given as YAML and what Hera makes in Python are the same searches."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from forktree_dev.checkout import CHECKOUT

EXAMPLES = CHECKOUT / "examples" / "argo"


@pytest.mark.parametrize("search", ["fan-out", "beam-search"])
def test_the_same_search_in_python(search: str) -> None:
    program = [sys.executable, str(EXAMPLES / "search_hera.py"), search]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert comparable(printed) == comparable((EXAMPLES / f"{search}.yaml").read_text())


def test_the_lake_is_that_of_the_search_without_argo() -> None:
    ours = yaml.safe_load((EXAMPLES / "lake.yaml").read_text())
    template, _ = yaml.safe_load_all((EXAMPLES.parent / "beam-search" / "lake.yaml").read_text())
    assert ours == template


def comparable(text: str) -> Any:
    """A WorkflowTemplate with its manifests decoded, and its templates by name: their order says nothing."""
    found = yaml.safe_load(text)
    found["spec"]["templates"] = {each["name"]: each for each in found["spec"]["templates"]}
    for template in found["spec"]["templates"].values():
        if "manifest" in template.get("resource", {}):
            # What stands there without quotes comes to be a number.
            manifest = re.sub(r": ({{[^}]*}})", r': "\1"', template["resource"]["manifest"])
            template["resource"]["manifest"] = yaml.safe_load(manifest)
    return found

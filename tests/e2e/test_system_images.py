"""Images of a registry on the whole system: a template names one, and its machines run what is in it."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from e2e.whole import Whole
from forktree_dev.system import Artifacts
from unit.image_registry import Entry, Registry, dockerconfig, link, zipped

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROGRAM = b"#!/bin/sh\necho ran in $PWD as $MODE\n"
CONFIG = {"Env": ["PATH=/opt/app/bin:/bin", "MODE=image", "OWN=image"], "WorkingDir": "/srv/work"}
UPPER = zipped(
    [
        Entry(name=".wh.root"),
        Entry(name="opt/app/bin/greet", content=PROGRAM, mode=0o755),
        Entry(name="etc/owned", content=b"x", mode=0o640, uid=1234, gid=4321),
        link("etc/linked", "/etc/owned"),
    ]
)


@pytest_asyncio.fixture(loop_scope="session")
async def registry(registry_port: int) -> AsyncIterator[Registry]:
    async with Registry.running(registry_port) as registry:
        yield registry


@pytest.fixture(scope="session")
def base(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A layer with all that image `tiny` has."""
    root = tmp_path_factory.mktemp("tiny") / "root"
    manifest = json.loads((artifacts.guest_directory / "manifest.json").read_text())
    image = artifacts.guest_directory / manifest["images"]["tiny"]["file"]
    subprocess.run(["fsck.erofs", f"--extract={root}", str(image)], check=True, capture_output=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(root, ".")
    return gzip.compress(packed.getvalue(), compresslevel=1)


def nodes_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = status["nodes"]
    return nodes


async def test_a_template_names_an_image_and_its_machines_run_what_is_in_it(
    whole: Whole, registry: Registry, base: bytes
) -> None:
    digest = registry.add_image(base, UPPER, tag="1.0", config=CONFIG)
    image = f"oci:{registry.host}/team/app:1.0"
    env = [{"name": "OWN", "value": "template"}]
    await whole.template("app", image=image, env=env, command=["greet"])
    await whole.session(template="app")
    (node,) = nodes_of(await whole.status("sessiontemplate", "app"))
    assert (node["phase"], node["imageDigest"]) == ("Ready", digest)
    assert await whole.sh("root", "cat /run/forktree/workload.log") == "ran in /srv/work as image\n"
    assert await whole.sh("root", "greet; echo $OWN") == "ran in /srv/work as image\ntemplate\n"
    assert await whole.sh("root", "stat -Lc '%u %g %a' /etc/linked; ls /root 2>&1 || true") == (
        "1234 4321 640\nls: /root: No such file or directory\n"
    )
    assert (await whole.sh("root", "grep localhost /etc/hosts")).startswith("127.0.0.1")
    await whole.sh("root", "echo parent > state; mv /etc/owned /etc/moved")
    first, second = await whole.forked("both", replicas=2)
    await whole.sh(first, "echo child > state")
    told = [await whole.sh(each, "pwd; cat state; cat /etc/moved") for each in (first, second, "root")]
    assert told == [f"/srv/work\n{each}\nx" for each in ("child", "parent", "parent")]


async def test_the_same_image_by_other_names_has_one_baseline(
    whole: Whole, registry: Registry, base: bytes
) -> None:
    digest = registry.add_image(base, tag="a")
    registry.manifests["b"] = registry.manifests["a"]
    for name, reference in (("one", "app:a"), ("two", f"other/app:b@{digest}")):
        await whole.template(name, image=f"oci:{registry.host}/{reference}")
        await whole.session(name, template=name)
    nodes = [nodes_of(await whole.status("sessiontemplate", name))[0] for name in ("one", "two")]
    assert nodes[0]["baselineId"] == nodes[1]["baselineId"]
    # Another image under the same tag is another baseline.
    other = registry.add_image(base, UPPER, tag="a")
    await whole.template("three", image=f"oci:{registry.host}/app:a")
    await whole.session("three", template="three")
    (node,) = nodes_of(await whole.status("sessiontemplate", "three"))
    assert node["imageDigest"] == other != digest
    assert node["baselineId"] != nodes[0]["baselineId"]


async def test_an_image_without_a_shell_runs_commands(whole: Whole, registry: Registry, base: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(base))) as tar:
        busybox = tar.extractfile("./bin/busybox")
        assert busybox is not None
        program = busybox.read()
    registry.add_image(zipped([Entry(name="echo", content=program, mode=0o755)]), config={"Env": ["PATH=/"]})
    await whole.template("bare", image=f"oci:{registry.host}/bare")
    await whole.session(template="bare")
    status, body = await whole.post("sessions/root/exec", {"argv": ["echo", "no shell"]})
    assert (status, body["stdout"]) == (200, "no shell\n"), body
    status, body = await whole.post("sessions/root/exec", {"argv": ["/bin/sh"]})
    assert status != 200 or body["exit_code"] != 0


async def test_a_private_image_takes_the_templates_secret(
    whole: Whole, registry: Registry, base: bytes
) -> None:
    registry.add_image(base)
    registry.user = "me:pass-word"
    image = f"oci:{registry.host}/private"
    await whole.template("without", image=image)
    await whole.apply("Session", "without", {"templateRef": {"name": "without"}})
    reason, said = await whole.failed("session", "without")
    assert reason == "ImagePullFailed" and "may not be pulled without a login" in said
    for name, user in (("wrong", "me:guess"), ("right", registry.user)):
        await whole.kubectl(
            "create", "secret", "generic", name, "--type=kubernetes.io/dockerconfigjson",
            f"--from-literal=.dockerconfigjson={dockerconfig(registry.host, user)}",
        )  # fmt: skip
    await whole.kubectl(
        "create", "rolebinding", "agent-secrets", "--clusterrole=forktree-agent-secrets",
        "--serviceaccount=forktree-system:forktree-agent",
    )  # fmt: skip
    await whole.template("wrong", image=image, imagePullSecret="wrong")
    await whole.apply("Session", "wrong", {"templateRef": {"name": "wrong"}})
    reason, said = await whole.failed("session", "wrong")
    assert reason == "ImagePullFailed" and "guess" not in said
    await whole.template("none", image=image, imagePullSecret="none")
    await whole.apply("Session", "none", {"templateRef": {"name": "none"}})
    assert (await whole.failed("session", "none"))[0] == "SecretUnreadable"
    await whole.template("right", image=image, imagePullSecret="right")
    await whole.session("right", template="right")
    records = [each.read_text() for each in (whole.node.machine_dir / "journal").rglob("*.json")]
    told = json.dumps(await whole.status("sessiontemplate", "right"))
    assert not any("pass-word" in text for text in (*records, told, whole.node.agent.log_path.read_text()))


@pytest.mark.parametrize(
    ("name", "reason", "sentence"),
    [
        ("oci:{host}/absent", "ImageNotFound", "is not in its registry: manifest unknown"),
        ("oci:localhost/app", "ImagePullFailed", "localhost is not at a public address"),
        ("oci:{host}/hostile", "ImageInvalid", "path '../escaped' leads upwards"),
    ],
)
async def test_an_image_that_cannot_be_had_fails_its_template_with_the_reason(
    whole: Whole, registry: Registry, name: str, reason: str, sentence: str
) -> None:
    registry.add_image(zipped([Entry(name="../escaped")]), tag="hostile")
    registry.manifests["latest"] = registry.manifests["hostile"]
    if "absent" in name:
        del registry.manifests["latest"]
    await whole.template("broken", image=name.format(host=registry.host))
    await whole.apply("Session", "root", {"templateRef": {"name": "broken"}})
    said_reason, said = await whole.failed("session", "root")
    assert (said_reason, sentence in said) == (reason, True), said
    (node,) = nodes_of(await whole.status("sessiontemplate", "broken"))
    assert (node["phase"], node["reason"]) == ("Failed", reason)


async def test_a_template_says_that_its_image_is_being_pulled_and_a_killed_agent_begins_again(
    whole: Whole, registry: Registry, base: bytes
) -> None:
    registry.add_image(base, zipped([Entry(name="big", content=os.urandom(100_000))]))
    registry.gate = asyncio.Event()
    image = f"oci:{registry.host}/slow"
    await whole.template("slow", image=image)
    await whole.apply("Session", "root", {"templateRef": {"name": "slow"}})
    async with asyncio.timeout(120):
        await registry.stopped.wait()
    await whole.wait("sessiontemplate", "slow", f"jsonpath={{.status.nodes[0].message}}=pulling {image}")
    (node,) = nodes_of(await whole.status("sessiontemplate", "slow"))
    assert (node["phase"], node["reason"]) == ("Baking", "PullingImage")
    await whole.node.agent.kill()
    registry.gate.set()
    whole.node.agent.start()
    await whole.ready("session", "root")
    images = Path(
        next(each for each in whole.node.agent.argv if each.startswith("--image-dir=")).partition("=")[2]
    )
    assert list((images / "partial").iterdir()) == []


async def test_an_image_is_named_as_images_are(whole: Whole) -> None:
    for image in (
        "oci:",
        "oci:app",
        "oci:/app",
        "oci:host/App",
        "oci:host/app@sha256:0",
        "oci:http://h/a",
        "/etc",
    ):
        with pytest.raises(Exception, match="image must be builtin:NAME"):
            await whole.template("wrong", image=image)
    await whole.template("right", image="oci:registry.example.com:5000/a/b_c:v1.2@sha256:" + "0" * 64)
    with pytest.raises(Exception, match="cannot be changed"):
        await whole.template(
            "right", image="oci:registry.example.com:5000/a/b_c:v1.2@sha256:" + "0" * 64, imagePullSecret="x"
        )

"""What the chart makes of its values, and which values it refuses. Needs helm and no cluster."""

from __future__ import annotations

import json
import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvloop
import yaml

import forktree_agent.__main__
import forktree_operator.__main__
from forktree_dev import crds
from forktree_dev.checkout import CHECKOUT
from forktree_dev.monitoring.__main__ import DASHBOARD, RULE
from forktree_dev.real_node.helm import CHART, Helm, HelmFailed

MANIFESTS = CHART / "files" / "manifests"
ELSEWHERE = "machines"
"""Another namespace than the usual one."""


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(tmp_path / "no-kubeconfig", tmp_path)


async def rendered(helm: Helm, **values: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """All objects by kind and name."""
    text = await helm.run(
        *("template", "forktree", str(CHART), f"--namespace={ELSEWHERE}", "--values=-"),
        stdin=json.dumps(values),
    )
    return by_name(text)


def by_name(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    objects = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def container(workload: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any]
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return only


async def test_rights_and_policies_are_those_of_development_in_the_releases_namespace(helm: Helm) -> None:
    made = await rendered(helm)
    for file in sorted(MANIFESTS.glob("*.yaml")):
        for key, wanted in by_name(file.read_text().replace("forktree-system", ELSEWHERE)).items():
            if key[0] == "Namespace":
                continue
            found = {**made[key], "metadata": {**made[key]["metadata"]}}
            labels = found["metadata"].pop("labels")
            assert labels.items() >= wanted["metadata"].pop("labels", {}).items()
            assert found == wanted, key
    assert "forktree-system" not in json.dumps([*made.values()])


async def test_definitions_are_the_generated_ones_and_are_kept(helm: Helm) -> None:
    made = await rendered(helm)
    for model in crds.KINDS:
        (key, wanted), *_ = by_name(crds.render(model)).items()
        assert made[key]["spec"] == wanted["spec"]
        assert made[key]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    without = await rendered(helm, crds={"install": False})
    assert not [key for key in without if key[0] == "CustomResourceDefinition"]


async def test_a_keeper_requests_what_its_agent_may_promise(helm: Helm) -> None:
    made = await rendered(helm, node={"memory": "48Gi"})
    keeper = container(made["DaemonSet", "forktree-keeper"])
    assert keeper["resources"]["requests"]["memory"] == "48Gi"
    assert "--memory-limit=48Gi" in container(made["DaemonSet", "forktree-agent"])["args"]


async def test_logs_and_traces_are_asked_of_each_program_that_has_them(helm: Helm) -> None:
    programs = [("Deployment", "forktree-operator"), ("DaemonSet", "forktree-agent")]
    keeper = ("DaemonSet", "forktree-keeper")
    made = await rendered(helm)
    for key in (*programs, keeper):
        arguments = container(made[key])["args"]
        assert "--log-format=text" in arguments
        assert not [each for each in arguments if "otlp" in each]
    collector = "http://collector.monitoring:4318"
    made = await rendered(helm, logFormat="json", tracing={"otlpEndpoint": collector})
    for key in (*programs, keeper):
        assert "--log-format=json" in container(made[key])["args"]
    for key in programs:
        assert f"--otlp-endpoint={collector}" in container(made[key])["args"]
    assert not [each for each in container(made[keeper])["args"] if "otlp" in each]


async def test_only_agents_and_keepers_are_privileged_and_keepers_have_no_token(helm: Helm) -> None:
    made = await rendered(helm)
    pods = [
        (key, each["spec"]["template"]["spec"] if key[0] != "Pod" else each["spec"])
        for key, each in made.items()
        if key[0] in {"DaemonSet", "Deployment", "Job", "Pod"}
    ]
    privileged = {
        key[1]
        for key, spec in pods
        for each in spec["containers"]
        if each["securityContext"].get("privileged")
    }
    assert privileged == {"forktree-agent", "forktree-keeper"}
    for key, spec in pods:
        for each in spec["containers"]:
            assert each["securityContext"]["readOnlyRootFilesystem"] is True, key
            assert "requests" in each.get("resources", {}) or key[1] == "forktree-clear", key
    keeper = made["DaemonSet", "forktree-keeper"]["spec"]
    assert keeper["template"]["spec"]["automountServiceAccountToken"] is False
    assert keeper["updateStrategy"] == {"type": "OnDelete"}
    assert container(made["Deployment", "forktree-operator"])["securityContext"]["runAsNonRoot"] is True


async def test_images_of_registries_are_kept_on_a_disk_of_the_node_where_that_is_wanted(helm: Helm) -> None:
    made = await rendered(
        helm,
        node={
            "imageDirectory": "/srv/images",
            "imageSpace": "5Gi",
            "registries": ["registry.internal:5000=http", "[fd00::1]:5000"],
            "registryAuthorities": "authorities",
            "onlyNamedRegistries": True,
        },
    )
    agent = made["DaemonSet", "forktree-agent"]
    wanted = {
        "--image-dir=/srv/images",
        "--image-space=5Gi",
        "--registry=registry.internal:5000=http",
        "--registry=[fd00::1]:5000",
        "--registry-ca=/etc/forktree/registries/ca.crt",
        "--only-named-registries",
    }
    assert wanted <= set(container(agent)["args"])
    assert {"name": "images", "mountPath": "/srv/images"} in container(agent)["volumeMounts"]
    authorities = {"name": "registries", "configMap": {"name": "authorities"}}
    assert authorities in agent["spec"]["template"]["spec"]["volumes"]
    cleared = made["DaemonSet", "forktree-clear"]["spec"]["template"]["spec"]
    for spec in (agent["spec"]["template"]["spec"], cleared):
        volume = {"name": "images", "hostPath": {"path": "/srv/images", "type": "DirectoryOrCreate"}}
        assert volume in spec["volumes"]
    assert "--image-dir=/srv/images" in cleared["initContainers"][0]["args"]
    without = container((await rendered(helm, node={"imageDirectory": ""}))["DaemonSet", "forktree-agent"])
    assert not [each for each in without["args"] if "image" in each]
    assert "images" not in [each["name"] for each in without["volumeMounts"]]


async def test_an_agent_can_be_reached_at_its_node_or_at_its_pod(helm: Helm) -> None:
    for host_port, field in ((True, "status.hostIP"), (False, "status.podIP")):
        made = await rendered(helm, agent={"hostPort": host_port})
        agent = container(made["DaemonSet", "forktree-agent"])
        address = next(each for each in agent["env"] if each["name"] == "ADDRESS")
        assert address["valueFrom"]["fieldRef"]["fieldPath"] == field
        assert ("hostPort" in agent["ports"][0]) is host_port


def arguments(workload: dict[str, Any]) -> list[str]:
    found: list[str] = container(workload)["args"]
    return found


def mounts(workload: dict[str, Any]) -> dict[str, str]:
    """Where each volume of the one container is seen."""
    return {each["name"]: each["mountPath"] for each in container(workload)["volumeMounts"]}


def volume(workload: dict[str, Any], name: str) -> dict[str, Any]:
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    found: dict[str, Any] = next(each for each in volumes if each["name"] == name)
    return found


async def test_one_address_leads_to_any_agent_and_its_name_is_in_their_certificates(helm: Helm) -> None:
    made = await rendered(helm, agent={"tls": {"names": ["forks.example"]}})
    agent = made["DaemonSet", "forktree-agent"]
    service = made["Service", "forktree"]
    assert service["spec"]["selector"] == agent["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"] == [
        {"name": "https", "port": 443, "targetPort": "https", "protocol": "TCP"}
    ]
    names = {f"--tls-name={each}" for each in (f"forktree.{ELSEWHERE}", f"forktree.{ELSEWHERE}.svc")}
    assert {*names, "--tls-name=forks.example"} <= set(arguments(agent))
    chosen = {"type": "LoadBalancer", "port": 7443, "annotations": {"internal": "true"}}
    balanced = (await rendered(helm, agent={"service": chosen}))["Service", "forktree"]
    assert balanced["spec"]["type"] == "LoadBalancer"
    assert balanced["spec"]["ports"][0]["port"] == 7443
    assert balanced["metadata"]["annotations"] == {"internal": "true"}
    without = await rendered(helm, agent={"service": {"enabled": False}})
    assert ("Service", "forktree") not in without
    assert not [each for each in arguments(without["DaemonSet", "forktree-agent"]) if "--tls" in each]


async def test_agents_serve_with_a_given_certificate(helm: Helm) -> None:
    url = "https://$(NODE_NAME).nodes.example:7443"
    made = await rendered(helm, agent={"tls": {"secretName": "api-tls"}, "advertise": url})
    agent = made["DaemonSet", "forktree-agent"]
    assert volume(agent, "tls")["secret"] == {"secretName": "api-tls", "defaultMode": 0o400}
    folder = mounts(agent)["tls"]
    given = {f"--tls-cert={folder}/tls.crt", f"--tls-key={folder}/tls.key", f"--advertise={url}"}
    assert given <= set(arguments(agent))
    assert not [each for each in arguments(agent) if "--tls-name" in each]


async def test_namespaces_have_sockets_on_the_nodes(helm: Helm) -> None:
    paths = {"a": "/run/forktree/a.sock", "b": "/var/lib/forks/b.sock", "c": "/var/lib/forks/c.sock"}
    made = await rendered(helm, agent={"serveNamespaces": paths})
    agent = made["DaemonSet", "forktree-agent"]
    assert {f"--serve-namespace={name}={path}" for name, path in paths.items()} <= set(arguments(agent))
    # The state directory is there already, and a folder of two sockets once.
    assert sorted(mounts(agent).values()) == [
        "/run/forktree",
        "/tmp",
        "/var/lib/forks",
        "/var/lib/forktree/images",
    ]
    assert volume(agent, "sockets-0")["hostPath"]["path"] == "/var/lib/forks"


async def test_agents_and_operators_are_scraped_where_they_serve_metrics(helm: Helm) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    made = await rendered(
        helm,
        metrics={
            "agentPort": 9001,
            "operatorPort": 9002,
            "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
        },
        networkPolicy={"metricsFrom": peers},
    )
    for part, kind, port in (("agent", "DaemonSet", 9001), ("operator", "Deployment", 9002)):
        workload = made[kind, f"forktree-{part}"]
        assert f"--metrics-listen=0.0.0.0:{port}" in arguments(workload)
        ports = {each["name"]: each["containerPort"] for each in container(workload)["ports"]}
        assert ports["metrics"] == port
        service = made["Service", f"forktree-{part}-metrics"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == workload["spec"]["selector"]["matchLabels"]
        monitor = made["ServiceMonitor", f"forktree-{part}"]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        # It selects that Service and no other of ours.
        chosen = monitor["spec"]["selector"]["matchLabels"].items()
        selected = [key for key, each in made.items() if chosen <= each["metadata"]["labels"].items()]
        assert selected == [("Service", f"forktree-{part}-metrics")]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert (endpoint["port"], endpoint["interval"]) == ("metrics", "15s")
        policy = made["NetworkPolicy", f"forktree-{part}"]
        assert {"ports": [{"port": port, "protocol": "TCP"}], "from": peers} in policy["spec"]["ingress"]


async def test_nobody_may_scrape_of_whom_nothing_is_said(helm: Helm) -> None:
    made = await rendered(helm)
    assert "ingress" not in made["NetworkPolicy", "forktree-operator"]["spec"]
    (api,) = made["NetworkPolicy", "forktree-agent"]["spec"]["ingress"]
    assert api == {"ports": [{"port": 7443, "protocol": "TCP"}]}
    with pytest.raises(HelmFailed, match=r"say in networkPolicy\.metricsFrom where your Prometheus runs"):
        await rendered(helm, metrics={"serviceMonitor": {"enabled": True}})
    await rendered(helm, metrics={"serviceMonitor": {"enabled": True}}, networkPolicy={"enabled": False})


async def test_agents_reach_each_other_whoever_else_may(helm: Helm) -> None:
    trainers = {"namespaceSelector": {"matchLabels": {"team": "research"}}}
    made = await rendered(helm, networkPolicy={"agentFrom": [trainers]})
    (api,) = made["NetworkPolicy", "forktree-agent"]["spec"]["ingress"]
    agents = made["DaemonSet", "forktree-agent"]["spec"]["selector"]
    assert api["from"] == [trainers, {"podSelector": agents}]


async def test_without_metrics_nothing_is_served_and_nothing_can_be_scraped(helm: Helm) -> None:
    made = await rendered(helm, metrics={"enabled": False}, networkPolicy={"metricsFrom": [{}]})
    assert "metrics" not in json.dumps([*made.values()]).replace("metrics.", "")
    with pytest.raises(HelmFailed, match=r"there is nothing to scrape while metrics\.enabled is false"):
        await rendered(helm, metrics={"enabled": False, "serviceMonitor": {"enabled": True}})


async def test_alerts_and_dashboard_are_the_generated_ones_where_they_are_asked_for(helm: Helm) -> None:
    kinds = {key[0] for key in await rendered(helm)}
    assert kinds & {"PrometheusRule", "ServiceMonitor", "ConfigMap"} == set()
    made = await rendered(
        helm,
        metrics={
            "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboard": {"enabled": True, "annotations": {"grafana_folder": "forks"}},
        },
    )
    rule = made["PrometheusRule", "forktree"]
    # Also what looks like a template of helm's, and is Prometheus' own.
    assert rule["spec"] == yaml.safe_load(RULE.read_text())["spec"]
    assert "{{ $labels.instance }}" in json.dumps(rule)
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["metadata"]["namespace"] == ELSEWHERE
    dashboard = made["ConfigMap", "forktree-dashboard"]
    assert json.loads(dashboard["data"]["forktree.json"]) == json.loads(DASHBOARD.read_text())
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard["metadata"]["annotations"] == {"grafana_folder": "forks"}


async def test_an_operator_is_asked_for_its_health_where_it_serves_it(helm: Helm) -> None:
    operator = (await rendered(helm, operator={"healthPort": 9003}))["Deployment", "forktree-operator"]
    assert "--health-listen=0.0.0.0:9003" in arguments(operator)
    only = container(operator)
    assert {"name": "health", "containerPort": 9003} in only["ports"]
    assert only["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert only["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}


async def test_every_option_that_a_program_is_given_is_one_that_it_has(
    helm: Helm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = {"a": "/run/forktree/a.sock"}
    egress = {"enabled": True, "allow": ["10.20.0.0/16"]}
    for agent in ({"serveNamespaces": sockets}, {"tls": {"secretName": "given"}}):
        made = await rendered(helm, agent=agent, egress=egress)
        for program, kind, name in (
            (forktree_agent.__main__, "DaemonSet", "forktree-agent"),
            (forktree_operator.__main__, "Deployment", "forktree-operator"),
        ):
            for where, what in ((program, "run"), (uvloop, "run"), (logging, "basicConfig")):
                monkeypatch.setattr(where, what, nothing)
            told = [each.replace("$(HOST_ADDRESS)", "192.0.2.1") for each in arguments(made[kind, name])]
            assert program.main(told) == 0


def nothing(*_: object, **__: object) -> int:
    """In place of what a program would do with its options."""
    return 0


async def test_no_session_reaches_the_outside_unless_a_value_says_so(helm: Helm) -> None:
    made = await rendered(helm)
    assert "egress" not in json.dumps(made["DaemonSet", "forktree-agent"])
    assert "egress" not in made["NetworkPolicy", "forktree-keeper"]["spec"]
    made = await rendered(
        helm, egress={"enabled": True, "allow": ["10.20.0.0/16"], "deny": ["203.0.114.0/24"]}
    )
    agent = container(made["DaemonSet", "forktree-agent"])
    assert [each for each in agent["args"] if "egress" in each] == [
        "--egress",
        "--egress-deny=$(HOST_ADDRESS)",
        "--egress-allow=10.20.0.0/16",
        "--egress-deny=203.0.114.0/24",
    ]
    (address,) = [each for each in agent["env"] if each["name"] == "HOST_ADDRESS"]
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"
    to, names = made["NetworkPolicy", "forktree-keeper"]["spec"]["egress"]
    internet, allowed = (each["ipBlock"] for each in to["to"])
    assert internet["cidr"] == "0.0.0.0/0"
    assert "10.0.0.0/8" in internet["except"]
    assert allowed == {"cidr": "10.20.0.0/16"}
    assert {each["port"] for each in names["ports"]} == {53}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"egress": {"allow": ["everywhere"]}}, "allow"),
        ({"egress": {"enabled": "yes"}}, "enabled"),
        ({"node": {"memory": "a lot"}}, "memory"),
        ({"node": {"cgroup": "../kubepods"}}, "cgroup"),
        ({"node": {"stateDirectory": "run"}}, "stateDirectory"),
        ({"agent": {"port": 70000}}, "port"),
        ({"node": {"imageDirectory": "/"}}, "imageDirectory"),
        ({"node": {"registries": ["https://registry.example.com"]}}, "registries"),
        ({"operator": {"replicas": 0}}, "replicas"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"logFormat": "xml"}, "logFormat"),
        ({"tracing": {"otlpEndpoint": "collector:4317"}}, "otlpEndpoint"),
        ({"agnet": {}}, "agnet"),
        ({"operator": {"healthPort": 0}}, "healthPort"),
        ({"agent": {"advertise": "http://node"}}, "advertise"),
        ({"agent": {"tls": {"secretName": "A secret"}}}, "secretName"),
        ({"agent": {"tls": {"names": ["a b"]}}}, "names"),
        ({"agent": {"tls": {"secret": "given"}}}, "secret"),
        ({"agent": {"service": {"type": "ExternalName"}}}, "type"),
        ({"agent": {"service": {"port": "https"}}}, "port"),
        ({"agent": {"serveNamespaces": {"a": "sockets/a"}}}, "serveNamespaces"),
        ({"agent": {"serveNamespaces": {"A B": "/run/a/b"}}}, "serveNamespaces"),
        ({"metrics": {"agentPort": 70000}}, "agentPort"),
        ({"metrics": {"enabled": "yes"}}, "enabled"),
        ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "interval"),
        ({"metrics": {"prometheusRule": {"labels": {"a": 1}}}}, "labels"),
        ({"metrics": {"dashboard": {"folder": "forks"}}}, "folder"),
        ({"networkPolicy": {"metricsFrom": ["monitoring"]}}, "metricsFrom"),
    ],
)
async def test_a_wrong_value_is_refused_by_its_name(helm: Helm, values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmFailed, match=named):
        await rendered(helm, **values)


def test_the_chart_has_the_projects_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert (chart["version"], chart["appVersion"]) == (project["version"], project["version"])

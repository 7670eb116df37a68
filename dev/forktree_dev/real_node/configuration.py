"""What containerd, kubelet, kube-proxy and the pod network are told. Values only; `node.py` starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAUSE_IMAGE = "localhost/forktree-dev/pause:1"
"""Holds a pod's namespaces. Made here, as nothing can be pulled."""


def containerd(folder: Path) -> str:
    """Its configuration file. What it mounts and its shims' sockets are in the sandbox's /run."""
    return f"""\
version = 3
root = '{folder}/root'
state = '/run/containerd'
disabled_plugins = [
    'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.zfs',
    'io.containerd.snapshotter.v1.devmapper', 'io.containerd.nri.v1.nri',
    'io.containerd.tracing.processor.v1.otlp',
]
[grpc]
  address = '{containerd_socket(folder)}'
[ttrpc]
  address = '{containerd_socket(folder)}.ttrpc'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{PAUSE_IMAGE}'
[plugins.'io.containerd.cri.v1.runtime']
  # Without CAP_SYS_RESOURCE runc may not lower a score, and no pod would start.
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = '/usr/sbin/runc'
        SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['/usr/lib/cni']
    conf_dir = '{folder}/cni'
"""


def containerd_socket(folder: Path) -> Path:
    return folder / "containerd.sock"


def pod_network(folder: Path, subnet: str) -> dict[str, Any]:
    """A bridge inside the sandbox; ports that pods ask of the host are the node's."""
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(folder / "addresses"),
            "ranges": [[{"subnet": subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}


def kubelet(folder: Path, *, address: str, port: int, cgroup: str, client_authority: Path) -> dict[str, Any]:
    """Fit for a machine with control groups of version 1, and without CAP_SYS_RESOURCE."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "containerRuntimeEndpoint": f"unix://{containerd_socket(folder)}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(client_authority)},
        },
        "authorization": {"mode": "Webhook"},
        "address": address,
        "port": port,
        "readOnlyPort": 0,
        "healthzPort": 0,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "podLogsDir": str(folder / "pod-logs"),
        "resolvConf": "/etc/resolv.conf",
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        # Images were brought by hand and cannot be pulled again.
        "imageMinimumGCAge": "24h",
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "volumePluginDir": str(folder / "volume-plugins"),
    }


def kube_proxy(kubeconfig: Path, *, node: str, pods: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": pods,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": node,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # Of the whole machine, which is not the sandbox's to change.
        "conntrack": {"maxPerCore": 0, "min": 0},
    }

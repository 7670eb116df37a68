"""A real node beside the development control plane: kubelet, containerd and kube-proxy, with pods that run.

Everything of it is inside one sandbox of namespaces, so that the machine's own mounts, network and processes
stay as they are, two nodes do not meet, and the kernel ends all of it with the sandbox.
"""

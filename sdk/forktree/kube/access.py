"""How to reach an API server and prove who we are: from a kubeconfig file, or from inside a pod."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import urllib3.util
from kubernetes.client.configuration import Configuration
from kubernetes.config import kube_config
from kubernetes.config.config_exception import ConfigException

_ACCOUNT_DIRECTORY: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The library has no types for it.
_load_kube_config: Final = cast(
    "Callable[..., None]",
    kube_config.load_kube_config,  # pyright: ignore[reportUnknownMemberType]
)
_list_contexts: Final = cast(
    "Callable[[str | None], tuple[list[dict[str, Any]], dict[str, Any]]]",
    kube_config.list_kube_config_contexts,  # pyright: ignore[reportUnknownMemberType]
)
_REREAD_SECONDS: Final = 30.0
"""Tokens are renewed in place, a kubelet's long before they end. Reading one takes some milliseconds."""


class AccessError(Exception):
    """There is no usable way to a cluster; the text says what is missing."""


class ClusterAccess:
    """One cluster's address, trust, and our credentials, which are read anew as they are renewed."""

    def __init__(
        self, server_url: str, tls: ssl.SSLContext | None, read_token: Callable[[], str | None]
    ) -> None:
        """`read_token` may block: it is called in a thread. None: the connection itself proves who we are."""
        self.server_url = server_url.rstrip("/")
        self.tls = tls
        self._read_token = read_token
        self._reading = asyncio.Lock()
        self._token: str | None = None
        self._read_at = float("-inf")

    @classmethod
    def discovered(cls, kubeconfig: Path | None = None, context: str | None = None) -> ClusterAccess:
        """By `kubeconfig` if given; else the pod's own account; else the user's default kubeconfig."""
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            return cls.in_cluster()
        return cls.from_kubeconfig(kubeconfig, context)

    @classmethod
    def from_kubeconfig(cls, path: Path | None = None, context: str | None = None) -> ClusterAccess:
        """All forms that kubectl reads: tokens, token files, client certificates, exec plugins.

        path None: the file that kubectl would use. Raises `AccessError`.
        """

        def load() -> Configuration:
            loaded = Configuration()
            try:
                _load_kube_config(
                    None if path is None else str(path),
                    context=context,
                    client_configuration=loaded,
                    persist_config=False,
                )
            except (ConfigException, OSError) as err:
                raise AccessError(f"cannot use {path or 'the default kubeconfig'}: {err}") from err
            return loaded

        def read_token() -> str | None:
            # Loading the whole file again is how a token file or an exec plugin's answer is read again.
            value: object = load().auth_settings().get("BearerToken", {}).get("value")
            return value.removeprefix("Bearer ") if isinstance(value, str) else None

        first = load()
        return cls(str(first.host), _tls(first), read_token)

    @classmethod
    def in_cluster(cls, account: Path = _ACCOUNT_DIRECTORY) -> ClusterAccess:
        """The pod's own service account. Raises `AccessError` outside a pod."""
        try:
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (KeyError, OSError) as err:
            raise AccessError(f"not inside a pod with a service account: {err}") from err
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", tls, lambda: (account / "token").read_text().strip())

    def read_authorization(self) -> str | None:
        """The Authorization header's value, read anew. Blocks for milliseconds. Raises `AccessError`."""
        try:
            token = self._read_token()
        except OSError as err:
            raise AccessError(f"cannot read the credentials: {err}") from err
        return None if token is None else f"Bearer {token}"

    async def authorization(self, *, fresh: bool = False) -> str | None:
        """The Authorization header's value, at most 30 s old, or new if `fresh`. Raises `AccessError`."""
        async with self._reading:
            if fresh or time.monotonic() - self._read_at > _REREAD_SECONDS:
                try:
                    self._token = await asyncio.to_thread(self._read_token)
                except OSError as err:
                    raise AccessError(f"cannot read the credentials: {err}") from err
                self._read_at = time.monotonic()
        return None if self._token is None else f"Bearer {self._token}"


def current_namespace(kubeconfig: Path | None = None, context: str | None = None) -> str:
    """Where the user works: the pod's own namespace, or what the kubeconfig's context says. Else `default`.

    Found in the same places, in the same order, as `ClusterAccess.discovered` finds a cluster.
    """
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            return (_ACCOUNT_DIRECTORY / "namespace").read_text().strip()
        contexts, current = _list_contexts(None if kubeconfig is None else str(kubeconfig))
        found = current if context is None else next(each for each in contexts if each["name"] == context)
        return str(found["context"].get("namespace") or "default")
    except (ConfigException, OSError, StopIteration) as err:
        raise AccessError(f"cannot tell the namespace to work in: {err}") from err


def _tls(loaded: Configuration) -> ssl.SSLContext | None:
    if urllib3.util.parse_url(str(loaded.host)).scheme != "https":
        return None
    context = ssl.create_default_context(cafile=loaded.ssl_ca_cert)
    if not loaded.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if loaded.cert_file:
        context.load_cert_chain(loaded.cert_file, loaded.key_file)
    return context

"""Where an agent is and how to prove who we are: what was said to the client, else the environment."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from forktree.errors import BadSettings
from forktree.models.texts import is_dns_label


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is known before anybody is asked. What is None is found out in the cluster."""

    url: str | None = None
    """Of an agent: https, and nothing after the port."""
    token: str | None = None
    """For the audience `forktree.dev`."""
    token_file: Path | None = None
    """Holds such a token and is read anew as it is renewed, as a kubelet does with a projected one."""
    ca: Path | str | None = None
    """File of certificates to verify the agent by, or their PEM text. None: what the system trusts, where the
    URL is given."""
    namespace: str | None = None
    """None: the one of the token's own service account."""
    kubeconfig: Path | None = None
    context: str | None = None
    service_account: str | None = None
    """Whose token is asked for where none is given."""

    @classmethod
    def gathered(
        cls,
        *,
        url: str | None = None,
        token: str | None = None,
        ca: Path | str | None = None,
        namespace: str | None = None,
        kubeconfig: Path | str | None = None,
        context: str | None = None,
        service_account: str | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> Settings:
        """What is given, else FORKTREE_URL, _TOKEN, _TOKEN_FILE, _CA, _NAMESPACE and _SERVICE_ACCOUNT.

        Raises `BadSettings`.
        """

        def from_environment(name: str) -> str | None:
            return environment.get(f"FORKTREE_{name}") or None

        token = token or from_environment("TOKEN")
        token_file = None if token else from_environment("TOKEN_FILE")
        settings = cls(
            url=_origin(url or from_environment("URL")),
            token=token,
            token_file=None if token_file is None else Path(token_file),
            ca=ca or from_environment("CA"),
            namespace=namespace or from_environment("NAMESPACE"),
            kubeconfig=None if kubeconfig is None else Path(kubeconfig),
            context=context,
            service_account=service_account or from_environment("SERVICE_ACCOUNT"),
        )
        if settings.namespace is not None and not is_dns_label(settings.namespace, 63):
            raise BadSettings(f"the namespace {settings.namespace!r} is not a DNS label")
        return settings

    @property
    def needs_cluster(self) -> bool:
        """Whether the Kubernetes API has to be asked for what is missing."""
        return self.url is None or (self.token is None and self.token_file is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where a client's requests go and what goes with them, for what it does not speak itself: WebSockets."""

    url: str
    """Of the API of its namespace, without a slash at the end."""
    tls: ssl.SSLContext
    token: str = field(repr=False)
    """A bearer token that holds now."""


def _origin(url: str | None) -> str | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme == "https" and bool(parts.hostname) and (parts.port or 443) > 0
    except ValueError:
        is_whole = False
        parts = urlsplit("")
    if not is_whole or parts.path not in ("", "/") or parts.query or "@" in parts.netloc:
        raise BadSettings(f"an agent's URL (FORKTREE_URL) looks like https://HOST:7443, not like {url!r}")
    return url.rstrip("/")


def trust(ca: Path | str | None) -> ssl.SSLContext:
    """Verifies by the certificates in `ca`, a file or PEM text, alone; None: by what the system trusts.

    Raises `BadSettings`.
    """
    if ca is None:
        return ssl.create_default_context()
    try:
        if isinstance(ca, str) and "-----BEGIN" in ca:
            context = ssl.create_default_context(cadata=ca)
        else:
            context = ssl.create_default_context(cafile=str(ca))
    except (OSError, ValueError) as err:  # No such file, or no certificate in it.
        raise BadSettings(
            f"the agent's certificates (FORKTREE_CA) cannot be used: {_where(ca)}{err}"
        ) from err
    # A chain may be published whose root is not known: then its own certificates are the trust.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _where(ca: Path | str) -> str:
    return "" if "-----BEGIN" in str(ca) else f"{ca}: "

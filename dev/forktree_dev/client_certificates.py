"""A client certificate under an authority of its own: how an API server proves itself to kubelets."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS = 30  # Longer than any development session.


@dataclass(frozen=True, slots=True)
class Authority:
    """Three files of `folder`. The authority's own key is never kept."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "client.crt"

    @property
    def key(self) -> Path:
        return self.folder / "client.key"

    def issue(self, user: str, group: str) -> None:
        """Make all three anew: who shows the certificate is `user` of `group`."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        signer, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forktree-dev")])
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, group),
                x509.NameAttribute(NameOID.COMMON_NAME, user),
            ]
        )
        authority = (
            _builder(issuer, issuer, signer.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(signer, hashes.SHA256())
        )
        certificate = (
            _builder(subject, issuer, key.public_key())
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .sign(signer, hashes.SHA256())
        )
        self.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.key.touch(mode=0o600)
        self.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
    )

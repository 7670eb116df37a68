"""The server's TLS identity: the one that was given, or one made here under an authority of our own.

The authority is kept in the state directory, so clients that trust `ca.crt` go on trusting it when the agent
restarts; the server's own certificate is made anew at each start and its key never leaves the directory.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from forktree.errors import ForktreeError
from forktree.models.reasons import Reason

AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
"""The longest that common TLS clients accept."""

CLOCK_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Identity:
    """A context to serve with, and what clients verify it by."""

    context: ssl.SSLContext
    authority: Path | None
    """PEM file of our own authority; None where a certificate was given."""
    ca_bundle: str
    """PEM of the certificates to trust: our authority, or the given chain itself, as its issuer is not known
    here."""


class UnusableCertificate(ForktreeError):
    """A given certificate and key cannot be served with."""

    reason: ClassVar[Reason] = Reason.INVALID


def given(certificate: Path, key: Path) -> Identity:
    """The operator's own certificate chain. Raises `UnusableCertificate`."""
    try:
        # Written anew from what was read: the file may hold the key as well.
        chain = x509.load_pem_x509_certificates(certificate.read_bytes())
        context = _context(certificate, key)
    except (OSError, ValueError) as err:
        raise UnusableCertificate(
            f"the certificate {certificate} with the key {key} cannot be used: {err}"
        ) from err
    return Identity(context, None, "".join(_pem(each) for each in chain))


def self_signed(directory: Path, hosts: list[str]) -> Identity:
    """A certificate for `hosts` (names or addresses) by the authority `directory/ca.crt`, made where missing.

    Takes some 5 ms. Raises `OSError` where the directory cannot be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_certificate, authority_key = _authority(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(hosts[0], authority_certificate.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    certificate_file, key_file = directory / "server.crt", directory / "server.key"
    _write(key_file, _pem_key(key), 0o600)
    _write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return Identity(_context(certificate_file, key_file), directory / "ca.crt", _pem(authority_certificate))


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_file, key_file = directory / "ca.crt", directory / "ca.key"
    if certificate_file.exists() and key_file.exists():
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        lasts = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=SERVER_DAYS)
        same = certificate.public_key() == key.public_key()
        if isinstance(key, ec.EllipticCurvePrivateKey) and same and certificate.not_valid_after_utc > lasts:
            return certificate, key
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("forktree agent authority")
    certificate = (
        _builder("forktree agent authority", name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    # The key first: a certificate without its key would be trusted by clients and of no use to us.
    _write(key_file, _pem_key(key), 0o600)
    _write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return certificate, key


def _builder(
    subject: str, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(common_name: str) -> x509.Name:
    # 64 characters are the format's limit; clients look at the alternative names alone.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace `path` in one step; at no moment is it readable by more than `mode` allows."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    new.replace(path)


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context

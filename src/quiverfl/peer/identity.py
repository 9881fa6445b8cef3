"""Who is who: a small certificate authority, one P-256 key per peer, and the checks on them.

A peer is the name in its certificate's subject alternative name, signed by the run's authority, and
with a key whose fingerprint the roster lists. All three must agree; there is no way around them.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quiverfl.errors import QuiverError
from quiverfl.peer.files import write_durably
from quiverfl.peer.wire import PEER_NAME

AUTHORITY_CERTIFICATE, AUTHORITY_KEY = "ca.pem", "ca.key"
CERTIFICATE, KEY = "cert.pem", "key.pem"
SLACK = datetime.timedelta(days=1)
"""Certificates are valid from a day ago, so that a clock that is hours off does no harm."""


@dataclass(frozen=True)
class Identity:
    """PEM texts of one peer: the authority's certificate, its own, and its key."""

    authority: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def read(cls, folder: Path) -> Identity:
        parts = []
        for name in (AUTHORITY_CERTIFICATE, CERTIFICATE, KEY):
            try:
                parts.append((folder / name).read_bytes())
            except OSError as problem:
                raise QuiverError(
                    f"cannot read {folder / name}: {problem.strerror}. Make keys with "
                    "quiver peer certs init or quiver peer certs issue."
                ) from problem
        if (folder / KEY).stat().st_mode & 0o077:
            raise QuiverError(
                f"{folder / KEY} can be read by others: a private key must be private. "
                f"Run: chmod 600 {folder / KEY}"
            )
        return cls(*parts)

    @cached_property
    def _private_key(self) -> ec.EllipticCurvePrivateKey:
        try:
            key = serialization.load_pem_private_key(self.key, password=None)
        except (ValueError, TypeError) as problem:
            raise QuiverError(f"{KEY} is not a private key: {problem}") from problem
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise QuiverError(f"{KEY} is not a P-256 key: make one with quiver peer certs.")
        return key

    def sign(self, text: bytes) -> str:
        return self._private_key.sign(text, ec.ECDSA(hashes.SHA256())).hex()

    @cached_property
    def point(self) -> str:
        """The public key in its shortest form."""
        return (
            self._private_key.public_key()
            .public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
            .hex()
        )

    def check_pair(self) -> None:
        if _encoded(self._private_key.public_key()) != _encoded(
            parse(self.certificate).public_key()
        ):
            raise QuiverError(
                f"{KEY} does not belong to {CERTIFICATE}: copy both from the same folder of the "
                "authority."
            )

    def seconds_left(self, now: datetime.datetime | None = None) -> float:
        """Until the certificate expires."""
        now = now or datetime.datetime.now(datetime.UTC)
        return (parse(self.certificate).not_valid_after_utc - now).total_seconds()

    def check(self, name: str, now: datetime.datetime | None = None) -> None:
        """Refuse to start with a certificate that the others would refuse anyway."""
        certificate = parse(self.certificate)
        now = now or datetime.datetime.now(datetime.UTC)
        self.check_pair()
        if names(certificate) != [name]:
            raise QuiverError(
                f"the certificate is for {names(certificate)}, this peer is {name!r}: "
                f"issue one with quiver peer certs issue {name}."
            )
        if now > certificate.not_valid_after_utc:
            raise QuiverError(
                f"the certificate of {name!r} expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
                f" (it is {now:%Y-%m-%d %H:%M} here): renew it, quiver peer certs rotate {name}."
            )
        if now < certificate.not_valid_before_utc:
            raise QuiverError(
                f"the certificate of {name!r} is valid from {certificate.not_valid_before_utc}, "
                f"and it is {now} here: set this machine's clock."
            )
        try:
            certificate.verify_directly_issued_by(parse(self.authority))
        except (InvalidSignature, ValueError, TypeError) as problem:
            raise QuiverError(
                f"the certificate of {name!r} was not issued by this run's authority "
                f"({AUTHORITY_CERTIFICATE})."
            ) from problem


class LiveIdentity:
    """A peer's papers, read again when they change; what cannot be read now is read later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps = self._seen()
        self._current = Identity.read(folder)
        self._problem = ""

    def refresh(self) -> Identity:
        try:
            stamps = self._seen()
            if stamps != self._stamps:
                fresh = Identity.read(self._folder)
                fresh.check_pair()
                self._current, self._stamps = fresh, stamps
            self._problem = ""
        except (OSError, QuiverError) as problem:  # half replaced, or the machine is short of files
            self._problem = told_once(f"the keys are not read again: {problem}", self._problem)
        return self._current

    def _seen(self) -> list[int]:
        names = (AUTHORITY_CERTIFICATE, CERTIFICATE, KEY)
        return [(self._folder / name).stat().st_mtime_ns for name in names]


def told_once(problem: str, before: str) -> str:
    """Log what keeps a file from being read again, the first time."""
    if problem != before:
        logging.getLogger("quiverfl.peer").error(problem)
    return problem


def parse(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as problem:
        raise QuiverError(f"not a certificate: {problem}.") from problem


def names(certificate: x509.Certificate) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)


def fingerprint(certificate: x509.Certificate) -> str:
    """sha256 of the public key: it stays when a certificate is renewed with the same key."""
    spki = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).hexdigest()


def signed_by(certificate: x509.Certificate, signature: str, text: bytes) -> bool:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


def create_authority(folder: Path, run: str, days: int = 3650) -> None:
    """The run's own certificate authority; its key stays with whoever admits peers."""
    if (folder / AUTHORITY_KEY).exists():
        raise QuiverError(f"{folder / AUTHORITY_KEY} exists: an authority is not overwritten.")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"quiver {run}"[:64])])
    certificate = (
        _builder(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_durably(folder / AUTHORITY_KEY, _private(key))
    write_durably(folder / AUTHORITY_CERTIFICATE, _public(certificate), 0o644)


def issue(authority: Path, name: str, folder: Path, days: float = 365) -> str:
    """A new key and certificate for a peer, into its folder; the key's fingerprint."""
    if not re.match(PEER_NAME, name):
        raise QuiverError(
            f"{name!r} cannot be a peer's name: lower-case letters, digits, dots and dashes only."
        )
    signer = _authority_key(authority)
    issuer = parse((authority / AUTHORITY_CERTIFICATE).read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(subject, issuer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(_usage(authority=False), critical=True)
        .sign(signer, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / KEY, _private(key))
    write_durably(folder / CERTIFICATE, _public(certificate), 0o644)
    if folder.resolve() != authority.resolve():
        write_durably(folder / AUTHORITY_CERTIFICATE, _public(issuer), 0o644)
    return fingerprint(certificate)


def _authority_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(
            (folder / AUTHORITY_KEY).read_bytes(), password=None
        )
    except (OSError, ValueError) as problem:
        raise QuiverError(
            f"cannot use {folder / AUTHORITY_KEY}: {problem}. Make an authority with "
            "quiver peer certs init."
        ) from problem
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SLACK)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _public(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _encoded(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded

"""Identities: a small certificate authority, and one P-256 key per peer.

A peer is the name in its certificate's subject alternative name. The run's authority has signed the
certificate, and the roster lists the fingerprint of its key. All three must agree; there is no way
around them.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.disk import write_durably
from quiverfl.peer.link.wire import PEER_NAME
from quiverfl.support.output_folders import refuse_foreign

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
                    "quiver peer certs request, or quiver peer certs init for all peers at once."
                ) from problem
        if (folder / KEY).stat().st_mode & 0o077:
            raise QuiverError(
                f"{folder / KEY} can be read by others: a private key must be private. "
                f"Run: chmod 600 {folder / KEY}"
            )
        for name, pem in ((AUTHORITY_CERTIFICATE, parts[0]), (CERTIFICATE, parts[1])):
            try:
                parse_certificate(pem)
            except QuiverError as problem:
                raise QuiverError(f"{folder / name}: {problem}") from problem
        return cls(*parts)

    @cached_property
    def _private_key(self) -> ec.EllipticCurvePrivateKey:
        try:
            key = serialization.load_pem_private_key(self.key, password=None)
        except (ValueError, TypeError) as problem:
            raise QuiverError(
                f"{KEY} is not a private key in PEM form, or is damaged: put the file back, or "
                "make another with quiver peer certs request."
            ) from problem
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise QuiverError(f"{KEY} is not a P-256 key: make one with quiver peer certs.")
        return key

    def sign(self, text: bytes) -> str:
        return self._private_key.sign(text, ec.ECDSA(hashes.SHA256())).hex()

    @cached_property
    def point(self) -> str:
        """The public key as a compressed point."""
        return (
            self._private_key.public_key()
            .public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
            .hex()
        )

    def check_pair(self) -> None:
        if _encode_public_key(self._private_key.public_key()) != _encode_public_key(
            parse_certificate(self.certificate).public_key()
        ):
            raise QuiverError(
                f"{KEY} does not belong to {CERTIFICATE}: copy both from the same folder of the "
                "authority."
            )

    def seconds_left(self, now: datetime.datetime | None = None) -> float:
        """The seconds until the certificate expires."""
        now = now or datetime.datetime.now(datetime.UTC)
        return (parse_certificate(self.certificate).not_valid_after_utc - now).total_seconds()

    def check(self, name: str, now: datetime.datetime | None = None) -> None:
        """Refuse to start with a certificate that all other peers would refuse."""
        certificate = parse_certificate(self.certificate)
        now = now or datetime.datetime.now(datetime.UTC)
        self.check_pair()
        if list_names(certificate) != [name]:
            raise QuiverError(
                f"the certificate is for {list_names(certificate)}, this peer is {name!r}: "
                f"issue one with quiver peer certs issue {name}."
            )
        if now > certificate.not_valid_after_utc:
            raise QuiverError(
                f"the certificate of {name!r} expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
                f" (it is {now:%Y-%m-%d %H:%M} here): renew it, quiver peer certs request here or "
                f"quiver peer certs rotate {name} at the authority."
            )
        if now < certificate.not_valid_before_utc:
            raise QuiverError(
                f"the certificate of {name!r} is valid from {certificate.not_valid_before_utc}, "
                f"and it is {now} here: set this machine's clock."
            )
        try:
            certificate.verify_directly_issued_by(parse_certificate(self.authority))
        except (InvalidSignature, ValueError, TypeError) as problem:
            raise QuiverError(
                f"the certificate of {name!r} was not issued by this run's authority "
                f"({AUTHORITY_CERTIFICATE})."
            ) from problem

    def describe_end(self) -> str:
        """Say until when the certificate is valid; it ends with the authority's at the latest."""
        pems = (self.certificate, self.authority)
        end = min(parse_certificate(pem).not_valid_after_utc for pem in pems)
        left = end - datetime.datetime.now(datetime.UTC)
        return f"valid until {end:%Y-%m-%d}, {left.days} days"


class LiveIdentity:
    """A peer's identity, read again when its files change, or later if they cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamps = self._read_stamps()
        self._current = Identity.read(folder)
        self._problem = ""

    def refresh(self) -> Identity:
        try:
            stamps = self._read_stamps()
            if stamps != self._stamps:
                fresh = Identity.read(self.folder)
                fresh.check_pair()
                self._current, self._stamps = fresh, stamps
            self._problem = ""
        except (OSError, QuiverError) as problem:  # half replaced, or the machine is short of files
            self._problem = log_once(f"the keys are not read again: {problem}", self._problem)
        return self._current

    def _read_stamps(self) -> list[int]:
        names = (AUTHORITY_CERTIFICATE, CERTIFICATE, KEY)
        return [(self.folder / name).stat().st_mtime_ns for name in names]


def log_once(problem: str, before: str) -> str:
    """Log what keeps a file from being read again, but only the first time."""
    if problem != before:
        logging.getLogger("quiverfl.peer").error(problem)
    return problem


def parse_certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as problem:
        raise QuiverError("not a certificate in PEM form: put the file back.") from problem


def list_names(certificate: x509.Certificate) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)


def fingerprint(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """Hash a public key; the hash stays when a certificate is renewed with the same key."""
    return hashlib.sha256(_encode_public_key(certificate.public_key())).hexdigest()


def verify_signature(certificate: x509.Certificate, signature: str, text: bytes) -> bool:
    """Whether a text is signed with the key of a certificate."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


RESERVED_NAMES = {AUTHORITY_CERTIFICATE, AUTHORITY_KEY, CERTIFICATE, KEY, "roster.toml"}
"""Files of an authority or of a peer: a peer of such a name could have no folder there."""


def check_name(kind: Literal["peer", "run"], name: str) -> None:
    """Refuse a name that could be no host name in a certificate, or no folder of an authority."""
    if not re.fullmatch(PEER_NAME, name) or any(
        part.startswith("-") or part.endswith("-") or not part for part in name.split(".")
    ):
        raise QuiverError(
            f"{name!r} cannot be a {kind}'s name: 1 to 63 lower-case letters, digits, dots and "
            "dashes, with a letter or digit before and after each dot and dash."
        )
    if kind == "peer" and name in RESERVED_NAMES:
        raise QuiverError(f"{name!r} cannot be a peer's name: the authority has a file of it.")
    if kind == "peer" and _is_ip_address(name):
        raise QuiverError(
            f"{name!r} cannot be a peer's name: certificates tell addresses from names; choose a "
            "name such as north."
        )


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_address(address: str, option: str = "") -> None:
    """Refuse what is no HOST:PORT; `option` is what gave it."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    known = _is_ip_address(host[1:-1]) if bracketed else re.fullmatch(r"[\w.-]+", host)
    if not known or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise QuiverError(
            f"{option}{address!r}: write HOST:PORT with a port from 1 to 65535, such as "
            "10.1.0.5:7400 or [fd00::5]:7400."
        )


def create_authority(folder: Path, run: str, days: int = 3650) -> None:
    """Make the run's own certificate authority; its key stays with the person who admits peers."""
    check_name("run", run)
    if (folder / AUTHORITY_KEY).exists():
        raise QuiverError(f"{folder / AUTHORITY_KEY} exists: an authority is not overwritten.")
    refuse_foreign(folder, lambda _: False, "choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"quiver {run}"[:64])])
    certificate = (
        _build_certificate(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_durably(folder / AUTHORITY_KEY, key_to_pem(key))
    write_durably(folder / AUTHORITY_CERTIFICATE, certificate_to_pem(certificate), 0o644)


def issue_certificate(authority: Path, name: str, folder: Path, days: float = 365) -> str:
    """Make a key and certificate for a peer in its folder. Returns the key's fingerprint."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = sign_certificate(authority, name, key.public_key(), days)
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / KEY, key_to_pem(key))
    write_durably(folder / CERTIFICATE, certificate_to_pem(certificate), 0o644)
    if folder.resolve() != authority.resolve():
        issuer = (authority / AUTHORITY_CERTIFICATE).read_bytes()
        write_durably(folder / AUTHORITY_CERTIFICATE, issuer, 0o644)
    return fingerprint(certificate)


def sign_certificate(
    authority: Path, name: str, key: ec.EllipticCurvePublicKey, days: float = 365
) -> x509.Certificate:
    """Sign a peer's public key. The certificate does not outlive the authority's own."""
    check_name("peer", name)
    signer = _load_authority_key(authority)
    issuer = parse_certificate((authority / AUTHORITY_CERTIFICATE).read_bytes())
    latest = issuer.not_valid_after_utc
    if datetime.datetime.now(datetime.UTC) > latest:
        raise QuiverError(
            f"the authority's certificate expired on {latest:%Y-%m-%d}: found a new run with "
            "quiver peer certs init."
        )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _build_certificate(subject, issuer.subject, key, days, latest)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(_key_usage(authority=False), critical=True)
        .sign(signer, hashes.SHA256())
    )


def _load_authority_key(folder: Path) -> ec.EllipticCurvePrivateKey:
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


def _build_certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: float,
    latest: datetime.datetime = datetime.datetime.max.replace(tzinfo=datetime.UTC),
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SLACK)
        .not_valid_after(min(now + datetime.timedelta(days=days), latest))
    )


def _key_usage(authority: bool) -> x509.KeyUsage:
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


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def certificate_to_pem(certificate: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _encode_public_key(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded

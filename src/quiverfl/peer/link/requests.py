"""Keys that members make themselves: a request, the authority's approval, and the import of that.

The private key never leaves the member's machine. A request is signed with the new key, and a
renewal with the old one as well, so the authority knows that both belong to the same member. The
first request of a member proves no name: the operators compare the key over another channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.disk import write_durably
from quiverfl.peer.accounts.signing import check_line
from quiverfl.peer.link.identity import (
    AUTHORITY_CERTIFICATE,
    CERTIFICATE,
    KEY,
    Identity,
    certificate_to_pem,
    check_address,
    check_name,
    fingerprint,
    key_to_pem,
    list_names,
    parse_certificate,
    sign_certificate,
)
from quiverfl.peer.link.roster import DIALS_OUT, ROSTER, Member, Roster, check_relay

REQUEST, PENDING_KEY, APPROVED = "request.pem", "pending-key.pem", "approved"
LONGEST_FILE = 1 << 16
"""A longer file is neither a request nor an approval."""
SCHEME, OFFER = "quiver://", "quiver:relay"
"""Entries of a request beside the member: its address, and an offer to relay."""
RENEWS = "renews: "
"""Begins the line below a request that the member's old key has signed."""


@dataclass(frozen=True)
class Request:
    """A member's request that the authority signs."""

    name: str
    run: str
    address: str
    key: str  # its fingerprint
    signed: x509.CertificateSigningRequest
    renewal: str = ""  # the old key and its signature; empty for a first request
    relays: bool = False  # for members that only dial out

    def is_renewal(self, roster: Roster) -> bool:
        """Whether a key that the roster has of this member has signed the request."""
        text = _renewal_text(self.signed)
        return bool(self.renewal) and check_line(roster, self.name, self.renewal, text)


def describe_key(key: str) -> str:
    """The first half of a fingerprint, in groups that two people can compare by telephone."""
    return " ".join(key[start : start + 4] for start in range(0, 32, 4))


def parse_address(text: str) -> str:
    """Check HOST:PORT, or dials-out for a member that cannot be called."""
    if text in ("dials-out", DIALS_OUT):
        return DIALS_OUT
    check_address(text, "address ")
    return text


# At the member


def make_request(folder: Path, name: str, run: str, address: str, relays: bool = False) -> Request:
    """Make a member's first key in its folder, and the request for it."""
    if (folder / CERTIFICATE).exists():
        raise QuiverError(
            f"{folder} has a certificate already: quiver peer certs request {folder} without "
            "options asks for its renewal."
        )
    check_name("peer", name)
    check_name("run", run)
    return _write_request(folder, name, run, parse_address(address), relays)


def make_renewal(folder: Path, address: str | None = None, relays: bool | None = None) -> Request:
    """Make a member's next key beside the one in use, and the request for it.

    Address and offer to relay stay as the roster has them, unless they are given.
    """
    if not (folder / CERTIFICATE).exists():
        raise QuiverError(
            f"{folder} has no certificate to renew: a first request needs --run, --address and, "
            "unless the folder is called so, --name."
        )
    if not (folder / ROSTER).exists():
        raise QuiverError(f"{folder} has no {ROSTER}: renew a key in the peer's own folder.")
    identity, roster = Identity.read(folder), Roster.read(folder / ROSTER)
    names = list_names(parse_certificate(identity.certificate))
    if len(names) != 1:
        raise QuiverError(f"{folder / CERTIFICATE} is for {names}: it must name one peer.")
    identity.check_pair()
    member = roster.member(names[0])
    place = member.address if address is None else parse_address(address)
    offer = member.relays if relays is None else relays
    return _write_request(folder, member.name, roster.run, place, offer, identity)


def _write_request(
    folder: Path, name: str, run: str, address: str, relays: bool, old: Identity | None = None
) -> Request:
    check_relay(name, address, relays)
    if (folder / PENDING_KEY).exists():
        raise QuiverError(
            f"{folder / REQUEST} waits for an approval: send that one, or remove it and "
            f"{PENDING_KEY} to ask with another key."
        )
    if folder.exists() and not folder.is_dir():
        raise QuiverError(f"{folder} is a file: name a folder for the keys.")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = [
        x509.NameAttribute(NameOID.COMMON_NAME, name),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, run),
    ]
    names = [x509.DNSName(name), x509.UniformResourceIdentifier(f"{SCHEME}{address}")]
    names += [x509.UniformResourceIdentifier(OFFER)] if relays else []
    signed = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name(subject))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    text = signed.public_bytes(serialization.Encoding.PEM).decode()
    if old is not None:
        text += f"{RENEWS}{old.point} {old.sign(_renewal_text(signed))}\n"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_durably(folder / PENDING_KEY, key_to_pem(key))
    write_durably(folder / REQUEST, text.encode(), 0o644)
    return read_request(folder / REQUEST)


def _renewal_text(signed: x509.CertificateSigningRequest) -> bytes:
    return b"quiver renewal\0" + signed.public_bytes(serialization.Encoding.DER)


def import_approval(folder: Path, path: Path) -> Identity:
    """Put an approved certificate in force beside the key that was made for it."""
    if not (folder / PENDING_KEY).exists():
        raise QuiverError(
            f"{folder} waits for no approval: quiver peer certs request {folder} asks for one; an "
            "approval that was imported need not be imported again."
        )
    request = read_request(folder / REQUEST)
    certificate, authority = _read_approval(path)
    if fingerprint(certificate) != request.key:
        raise QuiverError(
            f"{path} approves the key {describe_key(fingerprint(certificate))} of "
            f"{', '.join(list_names(certificate))}, and {folder / REQUEST} asks for "
            f"{describe_key(request.key)}: import the answer to this request."
        )
    identity = Identity(
        certificate_to_pem(authority),
        certificate_to_pem(certificate),
        (folder / PENDING_KEY).read_bytes(),
    )
    identity.check(request.name)
    _check_import(folder, request, authority)
    write_durably(folder / AUTHORITY_CERTIFICATE, identity.authority, 0o644)
    # Should the machine stop between these, the import is repeated: the key still waits.
    write_durably(folder / CERTIFICATE, identity.certificate, 0o644)
    write_durably(folder / KEY, identity.key)
    for name in (PENDING_KEY, REQUEST):
        (folder / name).unlink(missing_ok=True)
    return identity


def _check_import(folder: Path, request: Request, authority: x509.Certificate) -> None:
    known = folder / AUTHORITY_CERTIFICATE
    if known.exists() and fingerprint(parse_certificate(known.read_bytes())) != fingerprint(
        authority
    ):
        raise QuiverError(
            f"the approval is of another authority than {known}: a run keeps its authority."
        )
    if (folder / ROSTER).exists():
        roster = Roster.read(folder / ROSTER)
        if request.key not in roster.member(request.name).keys:
            raise QuiverError(
                f"{folder / ROSTER} does not have the new key yet: copy the authority's {ROSTER} "
                "to every peer first, then import."
            )


def _read_approval(path: Path) -> tuple[x509.Certificate, x509.Certificate]:
    content = _read_pem(path, "an approval", "quiver peer certs approve writes it")
    try:
        certificates = x509.load_pem_x509_certificates(content)
    except ValueError:
        certificates = []
    if len(certificates) != 2:
        raise QuiverError(
            f"{path} is not an approval, the peer's certificate and its authority's: quiver peer "
            "certs approve writes it."
        )
    return certificates[0], certificates[1]


# At the authority


@dataclass(frozen=True)
class Approval:
    """A request that was approved, and the file for its member."""

    request: Request
    path: Path
    was: Member | None
    """The member as it was before; None if it is new."""


def approve_requests(
    authority: Path,
    paths: Sequence[Path],
    days: float = 365,
    replace_key: bool = False,
    forget_old: bool = False,
) -> list[Approval]:
    """Sign requests and enter their keys into the roster: all of them, or none."""
    roster, approvals, files = Roster.read(authority / ROSTER), [], {}
    issuer = (authority / AUTHORITY_CERTIFICATE).read_bytes()
    for path in paths:
        request = read_request(path)
        was = _check_request(roster, request, path, replace_key)
        certificate = sign_certificate(authority, request.name, _public_key(request), days)
        target = authority / APPROVED / f"{request.name}.pem"
        files[target] = certificate_to_pem(certificate) + issuer
        approvals.append(Approval(request, target, was))
        roster = _enter(roster, request, was, keep_old=not forget_old)
    (authority / APPROVED).mkdir(exist_ok=True)
    for target, content in files.items():
        write_durably(target, content, 0o644)
    roster.write(authority / ROSTER)  # last: without it nothing was approved
    return approvals


def _enter(roster: Roster, request: Request, was: Member | None, keep_old: bool) -> Roster:
    if was is None:
        member = Member(request.name, request.address, (request.key,), relays=request.relays)
        return replace(roster, members=(*roster.members, member))
    changed = roster.with_key(request.name, request.key, keep_old)
    updated = replace(changed.member(request.name), address=request.address, relays=request.relays)
    members = tuple(updated if m.name == request.name else m for m in changed.members)
    return replace(changed, members=members)


def _check_request(
    roster: Roster, request: Request, path: Path, replace_key: bool
) -> Member | None:
    """Refuse what must not be approved. Returns the member that has the request's name, if any."""
    if request.run != roster.run:
        raise QuiverError(
            f"{path} is a request for the run {request.run!r}, and this authority is that of "
            f"{roster.run!r}."
        )
    for member in roster.members:
        if request.key in member.keys:
            raise QuiverError(
                f"{path}: the key {describe_key(request.key)} of {member.name!r} was approved "
                f"already; its answer is {APPROVED}/{member.name}.pem."
            )
        if request.key in member.former:
            raise QuiverError(
                f"{path}: the key {describe_key(request.key)} of {member.name!r} was dropped and "
                "does not come back: ask for a request with a new one."
            )
        if member.name != request.name and member.address == request.address != DIALS_OUT:
            raise QuiverError(
                f"{path}: {request.address} is the address of {member.name!r} already; two peers "
                "cannot listen there."
            )
    if request.name not in roster.names:
        return None
    if not replace_key and not request.is_renewal(roster):
        raise QuiverError(
            f"{path}: {request.name!r} is in the roster with another key, and that key has not "
            "signed the request: if its operator confirms the new key "
            f"{describe_key(request.key)}, give --replace-key."
        )
    return roster.member(request.name)


def read_request(path: Path) -> Request:
    """Read a request and check that its key has signed it."""
    hint = "quiver peer certs request writes it"
    text = _read_pem(path, "a request", hint).decode("ascii", "replace")
    try:
        signed = x509.load_pem_x509_csr(text.encode())
        names = signed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        runs = signed.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
        (name,), (run,) = names.get_values_for_type(x509.DNSName), [str(a.value) for a in runs]
        place, *offers = names.get_values_for_type(x509.UniformResourceIdentifier)
        if offers not in ([], [OFFER]):
            raise ValueError
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        raise QuiverError(f"{path} is not a request for a certificate: {hint}.") from None
    key = signed.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise QuiverError(f"{path}: its key is not a P-256 key: {hint}.")
    if not signed.is_signature_valid:
        raise QuiverError(f"{path}: its key has not signed it: it was changed on the way.")
    check_name("peer", name)
    check_name("run", run)
    address = parse_address(place.removeprefix(SCHEME))
    check_relay(name, address, bool(offers))
    below = text.partition(RENEWS)[2].strip()
    return Request(name, run, address, fingerprint(signed), signed, below, bool(offers))


def _public_key(request: Request) -> ec.EllipticCurvePublicKey:
    key = request.signed.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)  # read_request has refused any other
    return key


def _read_pem(path: Path, what: str, hint: str) -> bytes:
    """Read a small file. A private key is refused as such: it should not have come here."""
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_FILE)
    except OSError as problem:
        raise QuiverError(f"cannot read {path}, {what}: {problem.strerror}; {hint}.") from None
    if b"PRIVATE KEY" in content:
        raise QuiverError(
            f"{path} is a private key, not {what}: it must never leave its member's machine; if it "
            "did, its member removes it and makes another request."
        )
    return content

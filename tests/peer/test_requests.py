"""Keys made at the members' own machines: requests, approvals, imports, renewals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from quiverfl.errors import QuiverError
from quiverfl.peer.link import identity
from quiverfl.peer.link.identity import Identity, certificate_to_pem
from quiverfl.peer.link.requests import (
    APPROVED,
    PENDING_KEY,
    REQUEST,
    approve_requests,
    import_approval,
    make_renewal,
    make_request,
    parse_address,
    read_request,
)
from quiverfl.peer.link.roster import DIALS_OUT, ROSTER, Roster

from .swarm import free_ports
from .test_commands import RUN, quiver, start

PLACE = "127.0.0.1:7400"


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    folder = tmp_path / "authority"
    quiver("certs", "init", folder, "--run", "trial")
    return folder


def admit(authority: Path, folder: Path, address: str = PLACE) -> Path:
    """From the request to the import; the folder then holds keys and roster."""
    make_request(folder, folder.name, "trial", address)
    (approval,) = approve_requests(authority, [folder / REQUEST])
    import_approval(folder, approval.path)
    (folder / ROSTER).write_bytes((authority / ROSTER).read_bytes())
    return folder


def wait(condition: Callable[[], object], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def status(folder: Path) -> dict[str, object]:
    try:
        return dict(json.loads(quiver("status", folder, "--json")))
    except QuiverError:
        return {}


def test_two_sites_make_their_keys_and_renew_one_while_they_run(
    authority: Path, tmp_path: Path
) -> None:
    """As documented, with processes; no private key is ever outside its member's folder."""
    names = ("ward-0", "ward-1")
    sites = [tmp_path / "sites" / name for name in names]
    for site, port in zip(sites, free_ports(2), strict=True):
        quiver("certs", "request", site, "--run", "trial", "--address", f"127.0.0.1:{port}")
    shown = quiver("certs", "approve", authority, *(site / REQUEST for site in sites))
    assert "ward-0 at 127.0.0.1:" in shown
    (tmp_path / "run.toml").write_text(RUN.format(rounds=100_000))
    folders = [tmp_path / name for name in names]
    for name, site, folder in zip(names, sites, folders, strict=True):
        quiver("certs", "import", site, authority / APPROVED / f"{name}.pem")
        common = ("--config", tmp_path / "run.toml", "--roster", authority / ROSTER)
        quiver("init", folder, "--keys", site, *common)
    processes = [start(folder) for folder in folders]
    try:
        wait(lambda: int(str(status(folders[0]).get("round", 0))) > 2)
        before = Identity.read(folders[0])
        quiver("certs", "request", folders[0])
        request = folders[0] / REQUEST
        quiver("certs", "approve", authority, request, "--days", 20, "--forget-old")
        approval = authority / APPROVED / "ward-0.pem"
        with pytest.raises(QuiverError, match="does not have the new key yet"):
            quiver("certs", "import", folders[0], approval)
        for folder in folders:
            (folder / ROSTER).write_bytes((authority / ROSTER).read_bytes())
        quiver("certs", "import", folders[0], approval)
        assert Identity.read(folders[0]).key != before.key
        done = int(str(status(folders[1])["round"]))
        wait(lambda: int(str(status(folders[1])["round"])) > done + 3)
        assert "19 days" in str(status(folders[0])["certificate"])
        assert "doubtful  certificate" in quiver("doctor", folders[0])
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(60) for process in processes]
    assert codes == [0, 0], (folders[0] / "log").read_text()[-3000:]
    report = json.loads(quiver("audit", *folders, "--roster", authority / ROSTER, "--json"))
    assert (report["passed"], report["error"]) == (True, 0)
    secrets = [path for path in authority.rglob("*") if path.is_file() and path.name != "ca.key"]
    assert not any(b"PRIVATE" in path.read_bytes() for path in secrets)
    assert all((f / "key.pem").stat().st_mode & 0o777 == 0o600 for f in folders)
    assert not any((folders[0] / name).exists() for name in (PENDING_KEY, REQUEST))


def test_a_certificate_is_for_the_key_that_asked_and_for_nothing_else(
    authority: Path, tmp_path: Path
) -> None:
    folder = admit(authority, tmp_path / "north", "10.1.0.5:7400")
    papers = Identity.read(folder)
    papers.check("north")
    assert identity.list_names(identity.parse_certificate(papers.certificate)) == ["north"]
    member = Roster.read(authority / ROSTER).member("north")
    assert (member.address, len(member.keys)) == ("10.1.0.5:7400", 1)
    assert admit(authority, tmp_path / "west", "dials-out").name == "west"
    assert Roster.read(authority / ROSTER).member("west").dials_out


def test_a_renewal_is_signed_by_the_old_key(authority: Path, tmp_path: Path) -> None:
    folder = admit(authority, tmp_path / "north")
    make_renewal(folder, "127.0.0.1:7500")
    (approval,) = approve_requests(authority, [folder / REQUEST])
    assert approval.was is not None
    member = Roster.read(authority / ROSTER).member("north")
    assert (member.address, len(member.keys)) == ("127.0.0.1:7500", 2)
    # Somebody else asks in its name, with a key and even with the renewal line of another request.
    make_request(tmp_path / "thief", "north", "trial", PLACE)
    line = (folder / REQUEST).read_text().splitlines()[-1]
    for extra in ("", line):
        forged = tmp_path / "thief" / REQUEST
        forged.write_text(forged.read_text() + extra)
        with pytest.raises(QuiverError, match=r"another key, .* give --replace-key"):
            approve_requests(authority, [forged])
    assert Roster.read(authority / ROSTER).member("north") == member
    approve_requests(authority, [forged], replace_key=True, forget_old=True)
    after = Roster.read(authority / ROSTER).member("north")
    assert (after.keys, after.former) == ((read_request(forged).key,), member.keys)
    with pytest.raises(QuiverError, match="was dropped and does not come back"):
        approve_requests(authority, [folder / REQUEST], replace_key=True)


def test_a_request_is_approved_once(authority: Path, tmp_path: Path) -> None:
    make_request(tmp_path / "north", "north", "trial", PLACE)
    paths = [tmp_path / "north" / REQUEST] * 2
    with pytest.raises(QuiverError, match=r"approved already; its answer is approved/north\.pem"):
        approve_requests(authority, paths)
    assert Roster.read(authority / ROSTER).members == ()  # all of them, or none
    assert not (authority / APPROVED).exists()
    approve_requests(authority, paths[:1])
    with pytest.raises(QuiverError, match="approved already"):
        approve_requests(authority, paths[:1])


def test_wrong_files_are_named(authority: Path, tmp_path: Path) -> None:
    folder = tmp_path / "north"
    make_request(folder, "north", "trial", PLACE)
    for path, words in [
        (folder / PENDING_KEY, "is a private key, not a request"),
        (authority / "ca.pem", "is not a request"),
        (authority / ROSTER, "is not a request"),
        (tmp_path / "nothing", "No such file"),
        (tmp_path, "Is a directory"),
    ]:
        with pytest.raises(QuiverError, match=words):
            approve_requests(authority, [path])
    for path, words in [
        (folder / REQUEST, "is not an approval"),
        (authority / "ca.pem", "is not an approval"),
        (authority / "ca.key", "is a private key, not an approval"),
        (tmp_path / "nothing", "No such file"),
    ]:
        with pytest.raises(QuiverError, match=words):
            import_approval(folder, path)
    make_request(tmp_path / "other", "other", "trial", "127.0.0.1:7401")
    (wrong,) = approve_requests(authority, [tmp_path / "other" / REQUEST])
    with pytest.raises(QuiverError, match="import the answer to this request"):
        import_approval(folder, wrong.path)
    with pytest.raises(QuiverError, match="waits for no approval"):
        import_approval(tmp_path / "empty", wrong.path)


def test_another_run_another_authority_and_an_expired_one(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_request(tmp_path / "north", "north", "elsewhere", PLACE)
    with pytest.raises(QuiverError, match="for the run 'elsewhere', and this authority"):
        approve_requests(authority, [tmp_path / "north" / REQUEST])
    member = admit(authority, tmp_path / "south")
    make_renewal(member)
    quiver("certs", "init", tmp_path / "second", "--run", "trial")
    (foreign,) = approve_requests(tmp_path / "second", [member / REQUEST])
    with pytest.raises(QuiverError, match="another authority"):
        import_approval(member, foreign.path)
    identity.create_authority(tmp_path / "old", "trial", days=-1)
    Roster("trial", ()).write(tmp_path / "old" / ROSTER)
    make_request(tmp_path / "east", "east", "trial", PLACE)
    with pytest.raises(QuiverError, match="authority's certificate expired on"):
        approve_requests(tmp_path / "old", [tmp_path / "east" / REQUEST])


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    identity.create_authority(tmp_path, "trial", days=10)
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    certificate = identity.sign_certificate(tmp_path, "north", key, days=365)
    issuer = identity.parse_certificate((tmp_path / "ca.pem").read_bytes())
    assert certificate.not_valid_after_utc == issuer.not_valid_after_utc


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "North"}, "cannot be a peer's name"),
        ({"name": "abc\n"}, "cannot be a peer's name"),
        ({"name": "../x"}, "cannot be a peer's name"),
        ({"run": "../../x"}, "cannot be a run's name"),
        ({"address": "127.0.0.1"}, "write HOST:PORT"),
        ({"address": "127.0.0.1:99999"}, "port from 1 to 65535"),
        ({"address": "a b:1"}, "write HOST:PORT"),
    ],
)
def test_what_cannot_be_asked_for(change: dict[str, str], words: str, tmp_path: Path) -> None:
    values = {"name": "north", "run": "trial", "address": PLACE, **change}
    with pytest.raises(QuiverError, match=words):
        make_request(tmp_path / "keys", **values)
    assert not (tmp_path / "keys").exists()


def test_addresses() -> None:
    for good in ("10.1.0.5:7400", "[::1]:7400", "north.example.org:1"):
        assert parse_address(good) == good
    assert parse_address("dials-out") == DIALS_OUT


def test_a_request_that_waits_is_not_replaced(authority: Path, tmp_path: Path) -> None:
    folder = tmp_path / "north"
    with pytest.raises(QuiverError, match="no certificate to renew: a first request needs --run"):
        make_renewal(folder)
    make_request(folder, "north", "trial", PLACE)
    with pytest.raises(QuiverError, match="waits for an approval"):
        make_request(folder, "north", "trial", PLACE)
    (approval,) = approve_requests(authority, [folder / REQUEST])
    import_approval(folder, approval.path)
    with pytest.raises(QuiverError, match="without options asks for its renewal"):
        make_request(folder, "north", "trial", PLACE)
    with pytest.raises(QuiverError, match=r"has no roster\.toml"):
        make_renewal(folder)
    with pytest.raises(QuiverError, match="is the address of 'north' already"):
        admit(authority, tmp_path / "south")


def test_forged_requests(authority: Path, tmp_path: Path) -> None:
    """Another kind of key, names that the command refuses, and a request changed on the way."""
    path = tmp_path / REQUEST

    def write(name: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
        organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "trial")
        place = x509.UniformResourceIdentifier(f"quiver://{PLACE}")
        names = x509.SubjectAlternativeName([x509.DNSName(name), place])
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([organization]))
        signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
        path.write_bytes(certificate_to_pem(signed))

    good = ec.generate_private_key(ec.SECP256R1())
    write("north", good)
    assert read_request(path).name == "north"
    for name, key, words in [
        ("north", rsa.generate_private_key(65537, 2048), "not a P-256 key"),
        ("north", ec.generate_private_key(ec.SECP384R1()), "not a P-256 key"),
        ("../north", good, "cannot be a peer's name"),
        ("*", good, "cannot be a peer's name"),
    ]:
        write(name, key)
        with pytest.raises(QuiverError, match=words):
            approve_requests(authority, [path])
    write("north", good)
    der = x509.load_pem_x509_csr(path.read_bytes()).public_bytes(
        identity.serialization.Encoding.DER
    )
    changed = x509.load_der_x509_csr(der.replace(b"north", b"south"))
    path.write_bytes(certificate_to_pem(changed))
    with pytest.raises(QuiverError, match="was changed on the way"):
        read_request(path)

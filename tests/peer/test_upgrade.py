"""Peers of the edition before this one: their messages, stores and agreements still hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import signing
from quiverfl.peer.changes import open_amendment_log, open_eviction_log
from quiverfl.peer.folder import PeerFolder, make_swarm
from quiverfl.peer.link.identity import ROSTER, Identity, Roster
from quiverfl.peer.link.messages import Manifest
from quiverfl.peer.link.wire import (
    Amendment,
    EvictionNotice,
    Terms,
    decode_statements,
    encode_statements,
)

from .swarm import make_folders

AGREED, STORE = "a" * 64, "2" * 16
NOTICE = f'{{"by":"peer-0","about":"peer-2","store":"{STORE}","ban":true,"proof":""}}'
TERMS = '{"since":3,"rounds":8,"lr":0.05}'
AMENDMENT = f'{{"by":"peer-0","terms":{TERMS},"proof":""}}'


def test_statements_have_the_bytes_they_had() -> None:
    notice = EvictionNotice(by="peer-0", about="peer-2", store=STORE, ban=True)
    amendment = Amendment(by="peer-0", terms=Terms(since=3, rounds=8, lr=0.05))
    notices = f'{{"notices":[{NOTICE}]}}'.encode()
    amendments = f'{{"amendments":[{AMENDMENT}]}}'.encode()
    assert encode_statements(EvictionNotice, [notice]) == notices
    assert encode_statements(Amendment, [amendment]) == amendments
    assert decode_statements(EvictionNotice, notices) == [notice]
    assert decode_statements(Amendment, amendments) == [amendment]


def test_logs_that_agree_have_the_hash_they_had(tmp_path: Path) -> None:
    """Peers of both editions compare these hashes, and check each other's signatures."""
    folder = make_folders(tmp_path, 3)[0]
    roster, identity = Roster.read(folder / ROSTER), Identity.read(folder)
    evictions, amendments = open_eviction_log(AGREED), open_amendment_log(AGREED)
    notice = EvictionNotice(by="peer-0", about="peer-2", store=STORE, ban=True)
    amendment = Amendment(by="peer-0", terms=Terms(since=3, rounds=8, lr=0.05))
    assert evictions.add(signing.sign_statement(identity, AGREED, notice), roster)
    assert amendments.add(signing.sign_statement(identity, AGREED, amendment), roster)
    assert evictions.hash == hashlib.sha256(NOTICE.encode()).hexdigest()
    assert amendments.hash == hashlib.sha256(f"peer-0 {TERMS}".encode()).hexdigest()
    fields = json.dumps([AGREED, "peer-0", "peer-2", STORE, True]).encode()
    assert notice.signed_text(AGREED) == b"quiver eviction\0" + fields
    fields = json.dumps([AGREED, "peer-0", 3, 8, 0.05]).encode()
    assert amendment.signed_text(AGREED) == b"quiver amendment\0" + fields


def test_renamed_keys_are_agreed_on_as_before(tmp_path: Path) -> None:
    folder = next(iter(make_swarm(tmp_path / "swarm", 2, rounds=1, mode="sync").values()))
    path = folder.path / "run.toml"
    text = path.read_text()
    path.write_text(text + "max_debt = 0.5\nround_interval = 2.0\n")
    peers = {
        "mode": "sync",
        "deadline": 60.0,
        "staleness": 3,
        "lend": 0.5,
        "pause": 2.0,
        "linger": 30.0,
        "outlier": "off",
        "outlier_factor": 10.0,
        "mass_cap": None,
    }
    opened = PeerFolder.read(folder.path)
    content = {"experiment": opened.agreed_experiment, "peers": peers}
    written = json.dumps(content, sort_keys=True, separators=(",", ":"))
    agreement = opened.agreement(Manifest(()))
    assert agreement.configuration == hashlib.sha256(written.encode()).hexdigest()
    for old, new in {"lend": "max_debt", "pause": "round_interval"}.items():
        path.write_text(f"{text}{old} = 1.0\n")
        with pytest.raises(QuiverError, match=f"{old} is now called {new}"):
            PeerFolder.read(folder.path)

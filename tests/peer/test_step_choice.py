"""Which step on z peers take: by the mode unless run.toml names it, agreed on, recorded, shown."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.api import Peer
from quiverfl.peer.context import Agreement
from quiverfl.peer.demo import make_swarm
from quiverfl.peer.doctor import examine_peer
from quiverfl.peer.folder import PeerFolder, choose_step, fill_in_step
from quiverfl.peer.link.messages import canonical_hash
from quiverfl.peer.link.wire import Hello
from quiverfl.peer.setup import assemble, build_learner, create_store


def folder_with(root: Path, mode: str, method: str) -> PeerFolder:
    """The first of two peers whose run.toml has these lines under [method]."""
    folder = next(iter(make_swarm(root, 2, rounds=1, mode=mode).values()))
    path = folder.path / "run.toml"
    path.write_text(re.sub(r"\[method\]\n(.+\n)*", f"[method]\n{method}\n", path.read_text()))
    return PeerFolder.read(folder.path)


CHOICES = [
    ("sync", 'name = "dfedpgp"', "paper", None, "good"),
    ("async", 'name = "dfedpgp"', "debiased", None, "good"),
    ("async", 'name = "dfedpgpsam"', "debiased", None, "good"),
    ("async", 'name = "osgp"', "debiased", None, "good"),
    ("async", 'name = "dfedpgp"\nstep = "paper"', "paper", None, "doubtful"),
    ("async", 'name = "dfedpgp"\nstep_floor = 0.5', "paper", 0.5, "good"),
    ("async", 'name = "dfedpgp"\nstep_floor = 0.001', "paper", 0.001, "doubtful"),
    ("sync", 'name = "dfedpgp"\nstep = "debiased"', "debiased", None, "good"),
]


@pytest.mark.parametrize(("mode", "method", "step", "floor", "level"), CHOICES)
def test_the_step_in_force_is_computed_with_recorded_and_shown(
    tmp_path: Path, mode: str, method: str, step: str, floor: float | None, level: str
) -> None:
    folder = folder_with(tmp_path / "swarm", mode, method)
    parts = build_learner(folder)
    taken: Any = parts.method
    assert (taken.step, taken.step_floor) == (step, floor)
    assert parts.config.method.options().get("step", "paper") == step
    found = [f for f in asyncio.run(examine_peer(folder.path, 0.1)) if f.about == "step"]
    assert [finding.level for finding in found] == [level]
    words = "debiased" if step == "debiased" else "bounded" if floor else "η/μ"
    assert words in found[0].text
    assert ("run.toml says so" in found[0].text) == ("step" in method)
    assert bool(found[0].remedy) == (level != "good")


def test_methods_without_a_mass_have_no_choice(tmp_path: Path) -> None:
    """Theirs is carried for them: z itself is trained."""
    folder = folder_with(tmp_path / "swarm", "async", 'name = "dfedavgmp"')
    assert choose_step(folder.experiment, "async") is None
    assert folder.agreed_experiment == folder.experiment
    assert [f for f in asyncio.run(examine_peer(folder.path, 0.1)) if f.about == "step"] == []


def test_the_run_folder_names_the_step(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "swarm", "async", 'name = "dfedpgp"')
    peer = Peer.open(folder.path)

    async def brief() -> None:
        running = asyncio.create_task(peer.run())
        while not (folder.path / "run" / "config.json").exists():
            await asyncio.sleep(0.01)
            assert not running.done(), running.result()
        peer.stop()
        await running

    asyncio.run(brief())
    written = json.loads((folder.path / "run" / "config.json").read_text())
    assert written["config"]["method"]["step"] == "debiased"


def test_peers_that_step_otherwise_do_not_talk(tmp_path: Path) -> None:
    """The paper's unsaid is the same agreement as the paper's named: the option is new, not it."""
    names = {
        "unsaid": 'name = "dfedpgp"',
        "paper": 'name = "dfedpgp"\nstep = "paper"',
        "debiased": 'name = "dfedpgp"\nstep = "debiased"',
    }
    hashes = {
        (mode, name): folder_with(tmp_path / mode / name, mode, text)
        for mode in ("sync", "async")
        for name, text in names.items()
    }
    manifest = build_learner(hashes["sync", "unsaid"]).learner.manifest
    found = {key: folder.agreement(manifest).configuration for key, folder in hashes.items()}
    assert found["sync", "unsaid"] == found["sync", "paper"] != found["sync", "debiased"]
    assert found["async", "unsaid"] == found["async", "debiased"] != found["async", "paper"]
    # As it was hashed before there was a choice.
    folder = hashes["sync", "unsaid"]
    peers = written_keys(folder)
    before = canonical_hash({"experiment": folder.experiment, "peers": peers})
    assert found["sync", "unsaid"] == before


def written_keys(folder: PeerFolder) -> dict[str, object]:
    """[peers] as earlier editions hashed it: under the names that its keys had then."""
    names = {"max_debt": "lend", "round_interval": "pause"}
    later = {"noise", "quorum", "quorum_by"}
    later |= {"deadline_floor", "deadline_percentile", "deadline_factor"}
    peers = folder.peers.model_dump().items()
    return {names.get(key, key): value for key, value in peers if key not in later}


def earlier(folder: PeerFolder) -> Agreement:
    """What a version agreed on in which async peers took the paper's step."""
    manifest = build_learner(folder).learner.manifest
    peers = written_keys(folder)
    written = canonical_hash({"experiment": folder.experiment, "peers": peers})
    return Agreement(folder.roster.run, folder.own.name, written, manifest)


def test_a_run_that_was_begun_with_the_papers_step_is_not_continued_with_another(
    tmp_path: Path,
) -> None:
    """Refused with the line that continues it; with that line the old store opens."""
    folder = folder_with(tmp_path / "swarm", "async", 'name = "dfedpgp"')
    parts = build_learner(folder)
    create_store(folder.store, parts.learner, earlier(folder)).close()
    with pytest.raises(QuiverError, match=r'begun with the paper.*write step = "paper" under'):
        asyncio.run(assemble(folder))
    path = folder.path / "run.toml"
    path.write_text(path.read_text().replace('"dfedpgp"', '"dfedpgp"\nstep = "paper"'))
    asyncio.run(assemble(PeerFolder.read(folder.path))).store.close()


def test_a_peer_of_an_earlier_version_is_told_what_differs(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "swarm", "async", 'name = "dfedpgp"')
    old = earlier(folder)
    mine = folder.agreement(old.manifest)
    hello = Hello(
        protocol=mine.newest,
        run=mine.run,
        configuration=old.configuration,
        manifest=mine.manifest.hash,
        sender="peer-1",
        receiver=mine.name,
        incarnation="1" * 16,
        nonce="0" * 64,
        sent=0,
        acknowledged=0,
        received=0,
        round=0,
    )
    assert re.search(
        r"'peer-1' takes the paper's step.*write step = \"paper\"", mine.difference(hello)
    )
    assert old.difference(hello) == ""


def test_what_is_settled_stays_settled() -> None:
    once = fill_in_step({"method": {"name": "osgp", "epochs": 2}}, "async")
    assert once == {"method": {"name": "osgp", "epochs": 2, "step": "debiased"}}
    assert fill_in_step(once, "async") == once
    assert fill_in_step({}, "async") == {"method": {"step": "debiased"}}
    assert fill_in_step({}, "sync") == {}
    unknown = {"method": {"name": "dfedpg"}}
    assert fill_in_step(unknown, "async") == unknown

"""A peer from Python: opened, run, asked and stopped; and what its run folder is good for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import quiverfl as qv
from quiverfl.errors import QuiverError
from quiverfl.results.report.page import write_report
from quiverfl.results.run_files import read_run
from quiverfl.runs.folder import RunFolder

from .test_commands import RUN, prepare

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "peers.md"


async def both(folders: list[Path]) -> list[qv.Peer]:
    peers = [qv.Peer.open(folder) for folder in folders]
    assert [peer.status()["state"] for peer in peers] == ["opened", "opened"]
    tasks = [asyncio.create_task(peer.run()) for peer in peers]
    await asyncio.sleep(0)
    with pytest.raises(QuiverError, match="is running already"):
        await peers[0].run()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert all(outcome.finished for outcome in outcomes)
    return peers


def test_two_peers_in_one_program(tmp_path: Path) -> None:
    folders = prepare(tmp_path, rounds=2)
    peers = asyncio.run(both(folders))
    assert repr(peers[1]) == "<Peer 'ward-1' of 'trial': ended>"
    assert peers[1].status()["round"] == 2
    with pytest.raises(QuiverError, match="only a running peer can leave"):
        peers[1].leave()
    seen = read_run(folders[1] / "run")
    assert seen.finished
    assert seen.member == {"name": "ward-1", "number": 1, "run": "trial", "mode": "sync"}
    known = seen.history.dropna()
    assert set(known["client"]) == {1}
    assert len(known) == 2 * 2
    groups = write_report(folders, tmp_path / "report.html")
    assert [group.first.clients for group in groups] == [2]
    assert groups[0].first.finished
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    with pytest.raises(QuiverError, match=r"one peer recorded .*`quiver peer run"):
        RunFolder(folders[1] / "run").config()


def test_a_peer_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """The one line that a kill cut off is not in the way of those that follow."""
    folders = prepare(tmp_path, rounds=2)

    async def alone() -> None:
        peer = qv.Peer.open(folders[0])
        task = asyncio.create_task(peer.run())
        while peer.status()["state"] != "waiting":
            assert not task.done()
            await asyncio.sleep(0.01)
        peer.stop()
        assert (await asyncio.wait_for(task, 20)).stopped

    asyncio.run(alone())
    assert not read_run(folders[0] / "run").finished
    with (folders[0] / "run" / "history.jsonl").open("a") as history:
        history.write('{"round": 0, "sta')
    asyncio.run(both(folders))
    assert read_run(folders[0] / "run").done_rounds == 2


def test_the_example_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = prepare(tmp_path, rounds=1)
    text = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert 'qv.Peer.open("/srv/quiver")' in text
    names: dict[str, object] = {}
    exec(text.replace("asyncio.run(main())", "").replace("/srv/quiver", str(folders[0])), names)
    main = names["main"]
    assert callable(main)

    async def beside() -> None:
        await asyncio.wait_for(asyncio.gather(main(), qv.Peer.open(folders[1]).run()), 60)

    asyncio.run(beside())
    assert "finished=True" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "topology", "reason"),
    [
        ("fedavg", "auto", r"FedAvg needs a server, and peers have none\. Use dfedavgm"),
        ("dfedavgm", "star", r"'star' has a server, and peers have none: use random_push"),
        ('osgp"\ndelay = "2', "auto", r"method\.delay"),
    ],
)
def test_what_peers_cannot_run_is_said_when_they_are_opened(
    tmp_path: Path, method: str, topology: str, reason: str
) -> None:
    folder = prepare(tmp_path)[0]
    text = RUN.format(rounds=1).replace('"dfedpgp"', f'"{method}"').replace('"2"', "2")
    options = "sampled = 1" if topology == "star" else "neighbors = 1"
    text = re.sub(r"\[topology\]\n.*\n.*\n", f'[topology]\nname = "{topology}"\n{options}\n', text)
    (folder / "run.toml").write_text(text)
    with pytest.raises(QuiverError, match=reason):
        qv.Peer.open(folder)
    assert not (folder / "store").exists()

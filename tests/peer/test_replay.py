"""What real async peers did is played again in the simulation, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quiverfl.cli.peer import app
from quiverfl.errors import QuiverError
from quiverfl.peer.demo import make_swarm
from quiverfl.peer.replay import replay

from .test_simulation import run_processes


@pytest.mark.slow
def test_async_peers_are_replayed_to_the_bit(tmp_path: Path) -> None:
    folders = make_swarm(tmp_path, 3, 6, mode="async")
    run_processes(folders, 120)
    paths = [folder.path for folder in folders.values()]
    found = replay(paths)
    assert found.names == tuple(folders)
    assert found.rounds == (6, 6, 6)
    assert found.same == (True, True, True)
    result = CliRunner().invoke(app, ["replay", *map(str, paths), "--json"])
    assert result.exit_code == 0, result.output
    assert [row["rounds"] for row in json.loads(result.stdout)] == [6, 6, 6]
    with pytest.raises(QuiverError, match="replay needs those of all 3 members"):
        replay(paths[:2])

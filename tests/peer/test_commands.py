"""`quiver peer …` as a person types it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

from quiverfl.cli.peer import app
from quiverfl.data.dataset import Dataset
from quiverfl.data.sources import load_dataset
from quiverfl.data.sources.arrays import from_arrays
from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.folder import PeerFolder
from quiverfl.peer.link.roster import Roster
from quiverfl.peer.setup import assemble, build_learner, load_peer_config, load_peer_dataset
from quiverfl.runs.config_files import load_config

from .swarm import free_ports

RUN = """
[data]
name = "digits"
clients = 2
partition = "iid"
samples_per_client = 60
[model]
name = "mlp"
hidden = [16]
[method]
name = "dfedpgp"
[topology]
name = "random_push"
neighbors = 1
[run]
rounds = {rounds}
[peers]
mode = "sync"
linger = 20.0
"""


def quiver(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)
    if isinstance(result.exception, QuiverError):
        raise result.exception
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def prepare(root: Path, rounds: int = 3, own: Sequence[Sequence[object]] = ((), ())) -> list[Path]:
    ports = free_ports(2)
    members = [f"ward-{n}=127.0.0.1:{port}" for n, port in enumerate(ports)]
    quiver(
        "certs", "init", root / "ca", "--run", "trial", "--peer", members[0], "--peer", members[1]
    )
    (root / "run.toml").write_text(RUN.format(rounds=rounds))
    folders = []
    for number in range(2):
        folder = root / f"ward-{number}"
        keys, roster = root / "ca" / folder.name, root / "ca" / "roster.toml"
        common = ("--config", root / "run.toml", "--keys", keys, "--roster", roster)
        quiver("init", folder, *common, *own[number])
        folders.append(folder)
    return folders


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "quiverfl", "peer", "run", str(folder), *options]
    log = (folder / "log").open("ab")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def test_two_wards_from_certificates_to_export(tmp_path: Path) -> None:
    folders = prepare(tmp_path)
    assert (folders[0] / "key.pem").stat().st_mode & 0o777 == 0o600
    processes = [start(folders[0])]  # alone it waits for the other, and can be asked
    try:
        deadline = time.monotonic() + 60
        status = {}
        while time.monotonic() < deadline and not status and processes[0].poll() is None:
            try:
                status = json.loads(quiver("status", folders[0], "--json"))
            except QuiverError:
                time.sleep(0.2)
        assert status.get("name") == "ward-0", (folders[0] / "log").read_text()[-2000:]
        processes.append(start(folders[1]))
        codes = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], (folders[0] / "log").read_text()[-3000:]
    report = json.loads(quiver("audit", *folders, "--json"))
    assert report["passed"]
    assert (report["error"], report["in_flight"], report["transfers"]) == (0, 0, 6)
    assert "passed" in quiver("audit", *folders)
    stores = [folder / "store" for folder in folders]
    assert re.search(r"signatures +12 checked", quiver("audit", "--live", *stores))
    alone = quiver("audit", folders[0], code=7)
    assert "INCOMPLETE" in alone
    assert "ward-1" in alone
    with pytest.raises(QuiverError, match="given twice"):
        quiver("audit", *folders, folders[0])
    north, south = (read_statement(folder / "store") for folder in folders)
    with pytest.raises(QuiverError, match="not of the same run"):
        audit([north, replace(south, agreement="another")])
    out = tmp_path / "new" / "model.safetensors"
    printed = quiver("export", folders[1], "--out", out)
    assert {name.split(".")[0] for name in load_file(out)} >= {"head"}
    names: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in printed.splitlines() if line.startswith("    ")), names)
    about = json.loads(out.with_suffix(".json").read_text())
    data = load_dataset("digits")
    x = torch.from_numpy(data.test_x).float() / about["scale"]
    x = (x - torch.tensor(about["mean"])[:, None, None]) / torch.tensor(about["std"])[:, None, None]
    right = names["model"](x).argmax(dim=1) == torch.from_numpy(data.test_y)
    assert right.float().mean() > 0.2  # guessing is right once in ten times
    with pytest.raises(QuiverError, match="cannot be written"):
        quiver("export", folders[1], "--out", folders[1] / "key.pem" / "model.safetensors")


def own_rows() -> Dataset:
    """A source of one's own: three classes where the run has ten."""
    chance = np.random.default_rng(5)
    x, y = chance.normal(size=(60, 64)).astype("float32"), chance.integers(3, size=60)
    return from_arrays("own", "own_rows", (x[:50], y[:50]), (x[50:], y[50:]), None, 10)


def test_peers_bring_their_own_data(tmp_path: Path) -> None:
    """One from a file, one from a function; the run's data set is not read."""
    chance = np.random.default_rng(4)
    rows = {"x": chance.normal(size=(40, 64)).astype("float32"), "y": np.arange(40) % 10}
    np.savez(tmp_path / "rows.npz", **rows)
    folders = prepare(
        tmp_path,
        rounds=2,
        own=(
            ("--data", "npz", "--data-path", tmp_path / "rows.npz"),
            ("--data", "tests.peer.test_commands:own_rows"),
        ),
    )

    async def scenario() -> list[int]:
        nodes = [await assemble(PeerFolder.read(folder)) for folder in folders]
        sizes = [int(node.learner._shard.context.examples.sizes[0]) for node in nodes]
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 60)
        for node in nodes:
            node.store.close()
        return sizes

    assert asyncio.run(scenario()) == [30, 50]
    assert (folders[0] / "cache").stat().st_mode & 0o777 == 0o700
    assert json.loads(quiver("audit", *folders, "--json"))["passed"]
    np.savez(tmp_path / "rows.npz", **{**rows, "y": np.arange(40) % 4})
    with pytest.raises(QuiverError, match="another size than the one in the store"):
        quiver("export", folders[0], "--out", tmp_path / "model.safetensors")
    (tmp_path / "rows.npz").write_bytes(b"PK nothing")
    with pytest.raises(QuiverError, match=r"rows\.npz is not a readable"):
        build_learner(PeerFolder.read(folders[0]))


def test_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    folder = prepare(tmp_path, rounds=1)[0]

    async def open_and_close() -> None:
        node = await assemble(PeerFolder.read(folder))
        node.store.close()

    asyncio.run(open_and_close())
    asyncio.run(open_and_close())
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace("hidden = [16]", "hidden = [17]"))
    with pytest.raises(QuiverError, match="another run or configuration"):
        asyncio.run(open_and_close())


def test_a_topology_that_looks_and_privacy_are_refused_together(tmp_path: Path) -> None:
    folder = prepare(tmp_path, rounds=1)[0]
    text = (folder / "run.toml").read_text().replace("random_push", "loss_push")
    (folder / "run.toml").write_text(text)
    assert build_learner(PeerFolder.read(folder)).learner.view is not None
    (folder / "run.toml").write_text(f'{text}\n[privacy]\nname = "update"\n')
    with pytest.raises(QuiverError, match="which nobody accounts for"):
        build_learner(PeerFolder.read(folder))


def test_keys_are_issued_and_rotated(tmp_path: Path) -> None:
    prepare(tmp_path)
    authority = tmp_path / "ca"
    before = Roster.read(authority / "roster.toml")
    quiver("certs", "rotate", authority, "ward-0")
    rotated = Roster.read(authority / "roster.toml")
    assert rotated.member("ward-0").keys[0] == before.member("ward-0").keys[0]
    assert len(rotated.member("ward-0").keys) == 2
    quiver("certs", "rotate", authority, "ward-0", "--forget-old")
    assert len(Roster.read(authority / "roster.toml").member("ward-0").keys) == 1
    quiver("certs", "issue", authority, "ward-9", "--address", "127.0.0.1:1")
    assert Roster.read(authority / "roster.toml").names == ["ward-0", "ward-1", "ward-9"]
    with pytest.raises(QuiverError, match="did you mean 'ward-0'"):
        quiver("certs", "rotate", authority, "ward-00")
    with pytest.raises(QuiverError, match="not overwritten"):
        quiver("certs", "init", authority, "--run", "x", "--peer", "a=127.0.0.1:1")


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    folders = prepare(tmp_path)
    with pytest.raises(QuiverError, match="not a peer's folder"):
        quiver("run", tmp_path)
    with pytest.raises(QuiverError, match="does not answer"):
        quiver("status", folders[0])
    with pytest.raises(QuiverError, match="NAME=HOST:PORT"):
        quiver("certs", "init", tmp_path / "new", "--run", "x", "--peer", "nonsense")
    with pytest.raises(QuiverError, match="holds no peer's store"):
        quiver("audit", folders[0])
    (folders[0] / "run.toml").write_text(RUN.format(rounds=1).replace("linger", "lingr"))
    with pytest.raises(QuiverError, match="did you mean 'linger'"):
        quiver("run", folders[0])
    (folders[0] / "run.toml").write_text(RUN.format(rounds=1).replace("clients = 2", "clients = 3"))
    with pytest.raises(QuiverError, match="the roster has 2 peers"):
        quiver("run", folders[0])


def test_the_command_line_loads_no_grpc_until_asked() -> None:
    script = (
        "import quiverfl.cli.main, sys; print([m for m in sys.modules if m.startswith('grpc')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_what_cannot_run_is_said_before_it_runs(tmp_path: Path) -> None:
    folders = prepare(tmp_path)
    roster, keys = tmp_path / "ca" / "roster.toml", tmp_path / "ca" / "ward-0"
    common = ("--config", tmp_path / "run.toml", "--keys", keys, "--roster", roster)
    with pytest.raises(QuiverError, match=r"nope\.csv: there is no such file"):
        quiver("init", tmp_path / "new", *common, "--data", "table", "--data-path", "nope.csv")
    with pytest.raises(QuiverError, match="'17400': write HOST:PORT"):
        quiver("init", tmp_path / "new", *common, "--bind", "17400")
    with pytest.raises(QuiverError, match=r"none\.toml: No such file"):
        quiver("init", tmp_path / "other", *("--config", "none.toml"), *common[2:])
    assert not (tmp_path / "other").exists()
    shutil.copyfile(folders[1] / "key.pem", folders[0] / "key.pem")
    with pytest.raises(QuiverError, match=r"key\.pem does not belong to cert\.pem"):
        PeerFolder.read(folders[0]).identity()


def test_the_options_of_own_data_are_kept(tmp_path: Path) -> None:
    table = tmp_path / "patients.csv"
    table.write_text("age,diagnosis\n" + "".join(f"{n},{n % 2}\n" for n in range(20)))
    own = ("--data", "table", "--data-path", table, "--data-option", "label=diagnosis")
    folder = PeerFolder.read(prepare(tmp_path, own=(own, ()))[0])
    assert folder.own.data is not None
    assert load_peer_dataset(folder, load_peer_config(folder)).class_names == ("0", "1")


def test_peers_do_not_number_labels_each_by_its_own(tmp_path: Path) -> None:
    """One peer's 1 and 3 would be another's 0 and 2."""
    table = tmp_path / "patients.csv"
    table.write_text("age,label\n" + "".join(f"{n}.5,{1 + 2 * (n % 2)}\n" for n in range(20)))
    own = ("--data", "table", "--data-path", table)
    with pytest.raises(QuiverError, match=r"the labels are 1, 3, .* set options\.classes"):
        prepare(tmp_path / "a", own=(own, ()))
    own = (*own, "--data-option", "classes=4")
    folder = PeerFolder.read(prepare(tmp_path / "b", own=(own, ()))[0])
    assert sorted(set(load_peer_dataset(folder, load_peer_config(folder)).train_y.tolist())) == [
        1,
        3,
    ]


def test_class_names_that_differ_end_at_the_hello_where_the_head_is_sent(tmp_path: Path) -> None:
    """With a personal head every peer has classes of its own, as many as they like."""
    own = []
    for number, names in enumerate((("cat", "dog"), ("cat", "fox"))):
        table = tmp_path / f"animals-{number}.csv"
        rows = (f"{n}.5,{names[n % 2]}\n" for n in range(20))
        table.write_text("age,label\n" + "".join(rows))
        own.append(("--data", "table", "--data-path", table))
    folders = prepare(tmp_path, own=own)

    def agreements() -> list[Any]:
        opened = [PeerFolder.read(folder) for folder in folders]
        return [folder.agreement(build_learner(folder).learner.manifest) for folder in opened]

    one, other = agreements()
    assert one.hash == other.hash
    for folder in folders:
        text = (folder / "run.toml").read_text().replace('"dfedpgp"', '"osgp"')
        (folder / "run.toml").write_text(text)
    one, other = agreements()
    assert one.configuration == other.configuration
    hello = SimpleNamespace(
        protocol=one.newest,
        sender="ward-1",
        run=other.run,
        configuration=other.configuration,
        manifest=other.manifest.hash,
    )
    assert "the same class names" in one.difference(hello)
    hello.manifest = one.manifest.hash
    assert not one.difference(hello)


def test_a_peer_is_not_started_twice(tmp_path: Path) -> None:
    folder = PeerFolder.read(prepare(tmp_path)[0])

    async def scenario() -> None:
        node = await assemble(folder)
        with pytest.raises(QuiverError, match="running already"):
            await assemble(folder)
        node.store.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_killed_peer_pushes_again_within_five_seconds(tmp_path: Path) -> None:
    """A whole process: Python, torch, the data, the store. On a machine with a core to spare."""
    folders = prepare(tmp_path, rounds=100_000)
    processes = [start(folder) for folder in folders]
    try:
        _sent(folders[0], 60.0)
        processes[0].kill()
        processes[0].wait()
        began = time.monotonic()
        processes[0] = start(folders[0])
        _sent(folders[0], 60.0)
        seconds = time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
    print(f"first push after {seconds:.1f} s")
    assert seconds < 5.0


def _sent(folder: Path, seconds: float) -> None:
    """Wait until the process that runs now has sent something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            status = json.loads(quiver("status", folder, "--json"))
        except QuiverError:
            status = {}
        if status.get("counts", {}).get("sent_bytes", 0):
            return
        time.sleep(0.05)
    pytest.fail((folder / "log").read_text()[-2000:])


def test_the_run_can_be_simulated_first(tmp_path: Path) -> None:
    """One file for the run: `quiver run` reads it too, and leaves [peers] to the peers."""
    (tmp_path / "run.toml").write_text(RUN.format(rounds=1))
    assert load_config(tmp_path / "run.toml").data.clients == 2


@pytest.mark.slow
def test_a_disk_that_is_read_only_at_the_start_is_code_4(tmp_path: Path) -> None:
    """A file system of its own, mounted read-only, where this machine allows that."""
    folders, place = prepare(tmp_path), tmp_path / "disk"
    place.mkdir()
    script = (
        f"mount -t tmpfs none {place} && cp -a {folders[0]} {place}/ && "
        f"mount -o remount,ro {place} && {sys.executable} -m quiverfl peer run {place}/ward-0"
    )
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(place)]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('partition = "iid"', 'partition = "shards"'), "partition"),
        (("samples_per_client = 60", "samples_per_client = 100000"), "samples"),
        (('name = "digits"', 'name = "nothing"'), "nothing"),
    ],
)
def test_init_refuses_what_run_would_refuse(
    change: tuple[str, str], words: str, tmp_path: Path
) -> None:
    prepare(tmp_path)
    (tmp_path / "run.toml").write_text(RUN.format(rounds=3).replace(*change))
    keys, roster = tmp_path / "ca" / "ward-0", tmp_path / "ca" / "roster.toml"
    common = ("--config", tmp_path / "run.toml", "--keys", keys, "--roster", roster)
    with pytest.raises(QuiverError, match=words):
        quiver("init", tmp_path / "again", *common)
    assert not (tmp_path / "again" / "peer.toml").exists()
    with pytest.raises(QuiverError, match="served on loopback only"):
        quiver("init", tmp_path / "again", *common, "--metrics", "0.0.0.0:9464")


def test_a_demo_runs_the_configuration_that_it_is_given(tmp_path: Path) -> None:
    import tomllib

    from quiverfl.peer.demo import make_swarm
    from quiverfl.runs.config import parse_config
    from quiverfl.runs.config_files import load_config

    given = load_config(Path("quickstart"), ["method.name=dispfl"])
    folders = make_swarm(tmp_path / "demo", 3, None, "sync", given)
    tree = tomllib.loads((tmp_path / "demo" / "run.toml").read_text())
    assert tree.pop("peers") == {"mode": "sync", "deadline": 60.0, "staleness": 3}
    changed = [("data.clients", 3), ("topology.neighbors", 2)]  # quickstart has 20 with 5 each
    assert parse_config(tree).identity() == given.with_values(changed).identity()
    assert len(folders) == 3


def test_a_demo_follows_the_peers_section_of_its_file(tmp_path: Path) -> None:
    import tomllib

    from quiverfl.peer.demo import make_swarm
    from quiverfl.runs.config_files import load_config, read_peers_section

    path = tmp_path / "own.toml"
    text = RUN.format(rounds=2).partition("[peers]")[0]
    path.write_text(text + '[peers]\nmode = "sync"\ndeadline = 7.0\nquorum = 0.7\n')
    section = read_peers_section(path)
    make_swarm(tmp_path / "demo", 3, None, None, load_config(path), section)
    tree = tomllib.loads((tmp_path / "demo" / "run.toml").read_text())
    assert tree["peers"] == {"mode": "sync", "deadline": 7.0, "staleness": 3, "quorum": 0.7}
    with pytest.raises(QuiverError, match="quorum and deadline_floor are for mode = sync"):
        make_swarm(tmp_path / "other", 3, None, "async", load_config(path), section)
    with pytest.raises(QuiverError, match="unknown key quorun"):
        make_swarm(tmp_path / "third", 3, None, None, load_config(path), {"quorun": 0.7})
    assert not (tmp_path / "other").exists()
    path.write_text("peers = 3\n")
    with pytest.raises(QuiverError, match="peers must be a section"):
        read_peers_section(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["method.name=fedavg"], "needs a server, and peers have none"),
        (["run.patience=3"], "no peer knows the mean"),
        (["method.name=dfedpqp"], "did you mean 'dfedpgp'"),
    ],
)
def test_a_demo_refuses_at_once_what_peers_cannot_do(
    tmp_path: Path, settings: list[str], words: str
) -> None:
    command = ["demo", "quickstart", "--out", str(tmp_path / "demo"), "--peers", "3"]
    command += [part for text in settings for part in ("--set", text)]
    done = CliRunner().invoke(app, command)
    assert words in str(done.exception)
    assert not (tmp_path / "demo").exists()

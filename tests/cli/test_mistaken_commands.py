"""Commands with a slip in them: each ends in one line that names the thing and the remedy."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from shell import quiver

CONFIG = """
[data]
clients = 6
samples_per_client = 20
[model]
hidden = [8]
[topology]
neighbors = 2
[training]
batch_size = 8
[run]
rounds = 1
threads = 1
"""
SWEEP = """
base = "small.toml"
seeds = [0]
[grid]
training.lr = [0.1]
"""
LONG = "a" * 300


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    (tmp_path / "dead").symlink_to("nowhere")
    return tmp_path


def refused(here: Path, *arguments: str) -> str:
    """The one line that a refused command prints."""
    done = quiver(*arguments, cwd=here)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith((".", "?"))
    return line


@pytest.mark.parametrize(
    "command",
    [
        ("run", "small.toml", "--out"),
        ("compare", "small.toml", "--methods", "local", "--out"),
        ("sweep", "sweep.toml", "--out"),
        ("tune", "sweep.toml", "--out"),
        ("resume",),
        ("report",),
        ("init",),
        ("theory", "--out"),
        ("peer", "demo", "--out"),
    ],
    ids=" ".join,
)
def test_a_name_of_300_characters(here: Path, command: tuple[str, ...]) -> None:
    assert "choose a shorter" in refused(here, *command, LONG).lower()
    assert sorted(os.listdir(here)) == ["dead", "small.toml", "sweep.toml"]


def test_files_with_a_name_of_300_characters(here: Path) -> None:
    assert quiver("run", "small.toml", "--out", "run", "--quiet", cwd=here).returncode == 0
    for option, ending in (("--out", "html"), ("--table", "md")):
        said = refused(here, "report", "run", option, f"{LONG}.{ending}")
        assert "too long" in said
        assert "choose a shorter one" in said
    said = refused(here, "export", "run", "--client", "0", "--out", f"{LONG}.safetensors")
    assert "too long" in said


@pytest.mark.parametrize(
    "command",
    [
        ("run", "small.toml", "--out", "dead"),
        ("compare", "small.toml", "--methods", "local", "--out", "dead/below"),
        ("sweep", "sweep.toml", "--out", "dead"),
        ("init", "dead"),
    ],
    ids=" ".join,
)
def test_a_link_to_nowhere_for_a_folder(here: Path, command: tuple[str, ...]) -> None:
    assert "dead is a link to nowhere, which does not exist: make that folder" in refused(
        here, *command
    )


def test_a_sweep_for_a_configuration_and_the_reverse(here: Path) -> None:
    for command in ("run", "compare"):
        said = refused(here, command, "sweep.toml")
        assert "sweep.toml is a sweep (it has base, seeds, grid)" in said
        assert "`quiver sweep sweep.toml` runs it" in said
    said = refused(here, "sweep", "small.toml")
    assert "small.toml is a configuration, not a sweep: `quiver run small.toml` runs it" in said
    (here / "both.toml").write_text(SWEEP + "[run]\nrounds = 2\n")
    assert "write [base.run]" in refused(here, "sweep", "both.toml")


def test_capital_letters_are_guessed(here: Path) -> None:
    said = refused(here, "run", "small.toml", "--set", "method.name=DFedPGP")
    assert "did you mean 'dfedpgp'?" in said
    assert "did you mean 'ring'?" in refused(here, "topology", "show", "Ring")


def test_messages_about_a_preset_begin_with_its_name(here: Path) -> None:
    said = refused(here, "run", "quickstart", "--set", "run.round=3")
    assert said.startswith("error: quickstart and --set: unknown key run.round;")
    (here / "sweep.toml").write_text('base = "quickstart"\n[grid]\nrun.round = [3]\n')
    assert "quickstart.toml" not in refused(here, "sweep", "sweep.toml")


def test_a_sweep_may_start_from_a_preset_by_its_name(here: Path) -> None:
    (here / "sweep.toml").write_text('base = "quickstart"\n[grid]\ntraining.lr = [0.1, 0.2]\n')
    done = quiver("sweep", "sweep.toml", "--dry-run", "--no-estimate", cwd=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 2
    (here / "quickstart").write_text(CONFIG)  # a file beside it comes first
    own = quiver("sweep", "sweep.toml", "--dry-run", "--no-estimate", cwd=here)
    assert own.stdout != done.stdout
    (here / "sweep.toml").write_text('base = "quickstar"\n')
    assert "such as quickstart" in refused(here, "sweep", "sweep.toml")


def test_one_other_client_is_no_plural(here: Path) -> None:
    settings = ["--set", "data.clients=2", "--set", "topology.neighbors=2"]
    assert "has one other to be its neighbours" in refused(here, "run", "small.toml", *settings)


def test_what_changes_nothing_is_warned_of(here: Path) -> None:
    def warned(*settings: str) -> list[str]:
        options = [word for text in settings for word in ("--set", text)]
        out = f"run{len(list(here.iterdir()))}"
        done = quiver("run", "small.toml", *options, "--out", out, "--quiet", cwd=here)
        assert done.returncode == 0, done.stderr
        return done.stderr.splitlines()

    assert warned() == []
    (line,) = warned("run.rounds=0")
    assert line.startswith("warning: run.rounds = 0: nobody trains")
    (line,) = warned("run.threads=1000")
    assert line.startswith("warning: threads = 1000: this process has ")
    for name in ("dfedpgp", "fedper", "dfedavgmp"):
        (line,) = warned("model.personal=[]", f"method.name={name}")
        assert "trains a personal part, and nothing in this model is personal" in line
    for name in ("fedavg", "local", "osgp"):
        assert warned("model.personal=[]", f"method.name={name}") == []


def test_a_comparison_on_a_full_disk_names_its_own_command(here: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    command = ["compare", "small.toml", "--methods", "local", "--out", "both", "--quiet"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        done = quiver(*command, cwd=here)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: both/local cannot be written: File too large.")
    assert "run the same `quiver compare` command again" in line
    assert "quiver resume" not in line
    assert quiver(*command, cwd=here).returncode == 0


def test_a_setting_for_real_peers_is_refused_where_it_changes_nothing(here: Path) -> None:
    said = refused(here, "run", "small.toml", "--set", "peers.mode=sync", "--dry-run")
    assert "--set peers.mode: [peers] is for real peers" in said


def test_who_waits_for_whom_is_drawn_in_known_formats(here: Path) -> None:
    said = refused(here, "topology", "time", "--rounds", "2", "--picture", "x.txt")
    assert "a file name ending in .png, .svg, .pdf is needed" in said
    assert not (here / "x.txt").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("report run --waits all", "--waits all: it goes with --devices FILE"),
        ("report run --out page.pdf", "--out page.pdf: what is written is one HTML file"),
        ("extend small.toml --rounds 3", "small.toml: not a run folder"),
        ("extend run --rounds 1", "run has 1 round; give more"),
        ("topology show ring --picture-round 3", "it goes with --picture FILE"),
        ("check nosuch:X", "error: quiver check nosuch:X: 'nosuch:X': there is no module"),
        ("check os:getcwd", "gives a str, which is no method"),
        ("compare small.toml --seeds 0-99999999999", "than the 100,000 that one command takes"),
        ("run small.toml --set adversary.share=1 --set adversary.name=noise", "all 6 clients"),
        ("sweep small.toml", "docs/how-to/sweep.md"),
    ],
)
def test_an_option_without_effect_or_end_is_refused(here: Path, command: str, words: str) -> None:
    if " run " in f" {command.partition(' ')[2]} ":
        assert quiver("run", "small.toml", "--out", "run", "--quiet", cwd=here).returncode == 0
    assert words in refused(here, *command.split())
    assert not (here / "page.pdf").exists()


def test_a_message_has_a_size(here: Path) -> None:
    done = quiver("topology", "show", "ring", "--message-bytes", "-1", cwd=here)
    assert done.returncode == 2
    assert "--message-bytes" in done.stderr


def test_the_ending_of_a_picture_is_checked_before_anything_is_computed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import quiverfl.clock.waiting as waiting

    monkeypatch.setattr(waiting, "compare_waiting", None)  # would end in a traceback
    assert "a file name ending in" in refused(here, "topology", "time", "--picture", "x.bmp")


def test_overrides_of_one_run_are_not_passed_over_in_silence(here: Path) -> None:
    (here / "own.toml").write_text(CONFIG + "[overrides.dfedpgp.training]\nlr = 0.3\n")
    for method, lines in (("dfedpgp", 1), ("fedavg", 0)):
        options = ["--set", f"method.name={method}", "--set", "topology.neighbors="]
        done = quiver("run", "own.toml", *options, "--out", method, "--quiet", cwd=here)
        assert done.returncode == 0
        assert done.stderr.count("\n") == lines, done.stderr
        assert ("[overrides.dfedpgp] (training.lr) holds where methods" in done.stderr) == lines


def test_a_finished_run_starts_no_ranks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import quiverfl.cli.run as run

    assert quiver("run", "small.toml", "--out", "run", "--quiet", cwd=here).returncode == 0
    monkeypatch.setattr(run, "start_ranks", None)  # would end in a traceback
    done = quiver("resume", "run", "--ranks", "2", cwd=here)
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["run is finished already: nothing to resume."]


def test_one_round_is_no_plural(here: Path) -> None:
    assert "1 round\n" in quiver("run", "small.toml", "--dry-run", cwd=here).stdout


@pytest.mark.parametrize("command", ["export", "resume"])
def test_a_damaged_partition_is_named(here: Path, command: str) -> None:
    assert quiver("run", "small.toml", "--out", "run", "--quiet", cwd=here).returncode == 0
    (here / "run" / "partition.npz").write_bytes(b"abc")
    assert "run/partition.npz is damaged" in refused(here, command, "run", *QUIETLY[command])


QUIETLY: dict[str, list[str]] = {"export": [], "resume": ["--quiet"]}


def test_a_folder_that_describes_no_run(here: Path) -> None:
    assert quiver("run", "small.toml", "--out", "run", "--quiet", cwd=here).returncode == 0
    (here / "run" / "config.json").write_text("{}")
    assert "run/config.json describes no run" in refused(here, "show", "run")


def test_a_sweep_does_not_start_from_a_sweep(here: Path) -> None:
    (here / "own.toml").write_text('base = "sweep.toml"\n')
    said = refused(here, "sweep", "own.toml", "--dry-run")
    assert "base = 'sweep.toml' is a sweep itself (it has base, seeds, grid)" in said
    assert "no case 'x'; there are none." in refused(here, "sweep", "sweep.toml", "--cases", "x")

"""A sweep file becomes exactly the cells it describes, named by what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quiverfl.errors import QuiverError
from quiverfl.runs.config import parse_config
from quiverfl.runs.config_files import load_config
from quiverfl.sweeps.plan import Choice, Sweep, load_sweep

BASE = """
[data]
clients = 6
[training]
lr = 0.1
[run]
rounds = 3
[overrides.fedavg.training]
lr = 0.3
"""


def sweep(folder: Path, text: str, base: str = BASE, choice: Choice | None = None) -> Sweep:
    (folder / "base.toml").write_text(base)
    (folder / "plan.toml").write_text(text)
    return load_sweep(folder / "plan.toml", choice)


def values(plan: Sweep, *paths: str) -> list[tuple[object, ...]]:
    """What the cells have at some keys, in their order."""
    found = []
    for cell in plan.cells:
        tree = cell.config.model_dump()
        found.append(tuple(tree[path.split(".")[0]].get(path.split(".")[1]) for path in paths))
    return found


def test_every_combination_of_methods_grid_and_seeds_once(tmp_path: Path) -> None:
    text = """
    base = "base.toml"
    methods = ["local", "dfedpgp"]
    seeds = [0, 1]
    [grid]
    training.momentum = [0.0, 0.9]
    """
    plan = sweep(tmp_path, text)
    expected = [
        (method, momentum, seed)
        for method in ("local", "dfedpgp")
        for momentum in (0.0, 0.9)
        for seed in (0, 1)
    ]
    assert values(plan, "method.name", "training.momentum", "run.seed") == expected
    assert list(dict.fromkeys(cell.label for cell in plan.cells)) == [
        "momentum 0",
        "momentum 0.9",
    ]
    assert len({cell.name for cell in plan.cells}) == 8


def test_without_any_axis_the_base_itself_is_the_cell(tmp_path: Path) -> None:
    plan = sweep(tmp_path, 'base = "base.toml"')
    assert [cell.config for cell in plan.cells] == [
        load_config(tmp_path / "base.toml").for_method("dfedpgp").with_values([("run.seed", 0)])
    ]


def test_later_words_win_base_case_override_grid_and_command_line(tmp_path: Path) -> None:
    case = '[[case]]\nname = "warm"\ntraining = { lr = 0.2, momentum = 0.5 }\n'
    text = 'base = "base.toml"\nmethods = ["local", "fedavg"]\n'
    assert values(sweep(tmp_path, text), "training.lr") == [(0.1,), (0.3,)]
    assert values(sweep(tmp_path, text + case), "training.lr", "training.momentum") == [
        (0.2, 0.5),
        (0.3, 0.5),
    ]
    grid = text + "[grid]\ntraining.lr = [0.4]\n"
    assert values(sweep(tmp_path, grid + case), "training.lr") == [(0.4,), (0.4,)]
    last = Choice(values=("training.lr=0.5",))
    assert values(sweep(tmp_path, grid + case, choice=last), "training.lr") == [(0.5,), (0.5,)]
    override = Choice(values=("overrides.fedavg.training.lr=0.6",))
    assert values(sweep(tmp_path, text, choice=override), "training.lr") == [(0.1,), (0.6,)]


def test_a_case_can_have_overrides_of_its_own(tmp_path: Path) -> None:
    text = """
    base = "base.toml"
    methods = ["fedavg"]
    [[case]]
    name = "a"
    [case.overrides.fedavg.training]
    lr = 0.7
    [[case]]
    name = "b"
    """
    assert values(sweep(tmp_path, text), "training.lr") == [(0.7,), (0.3,)]


def test_several_grids_add_up_and_keep_their_own_methods(tmp_path: Path) -> None:
    text = """
    base = "base.toml"
    [[grid]]
    methods = ["local"]
    training.lr = [1.0, 2.0]
    [[grid]]
    methods = ["dfedpgp", "osgp"]
    "training.lr" = [3.0]
    """
    rows = [("local", 1.0), ("local", 2.0), ("dfedpgp", 3.0), ("osgp", 3.0)]
    assert values(sweep(tmp_path, text), "method.name", "training.lr") == rows
    some = Choice(methods=("osgp", "local"))
    assert values(sweep(tmp_path, text, choice=some), "method.name", "training.lr") == [
        ("local", 1.0),
        ("local", 2.0),
        ("osgp", 3.0),
    ]


def test_chosen_methods_seeds_and_cases_replace_those_of_the_file(tmp_path: Path) -> None:
    text = 'base = "base.toml"\nmethods = ["local"]\nseeds = [0]\n'
    text += '[[case]]\nname = "a"\n[[case]]\nname = "b"\nrun = { rounds = 5 }\n'
    choice = Choice(methods=("osgp", "ditto"), seeds=(7,), cases=("b",))
    plan = sweep(tmp_path, text, choice=choice)
    assert values(plan, "method.name", "run.seed", "run.rounds") == [
        ("osgp", 7, 5),
        ("ditto", 7, 5),
    ]


def test_a_cell_has_the_same_name_in_every_sweep_that_has_it(tmp_path: Path) -> None:
    one = sweep(tmp_path, 'base = "base.toml"\nmethods = ["local", "osgp"]\nseeds = [0, 1]')
    text = """
    seeds = [1]
    [base]
    data = { clients = 6, root = "elsewhere" }
    training = { lr = 0.1 }
    run = { rounds = 3, threads = 5, device = "cuda" }
    [grid]
    method.name = ["osgp"]
    """
    other = sweep(tmp_path, text)
    assert other.cells[0].name == one.cells[3].name
    assert one.cells[3].name.startswith("osgp-digits-dirichlet-seed1-")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "nowhere.toml"', "plan.toml: base = 'nowhere.toml': there is no such file"),
        ("base = 3", "base = 3: name a configuration file"),
        ("sedes = [1]", "unknown key 'sedes'; did you mean 'seeds'?"),
        ("seeds = 0", "no seed at all"),
        ("methods = []", "method.name = []: a grid needs a list"),
        ('methods = ["dfedpgg"]', "did you mean 'dfedpgp'?"),
        ("[grid]\ntraining.lrr = [1]", "unknown key training.lrr; did you mean 'lr'?"),
        ('methods = ["local"]\n[grid]\nmethod.name = ["osgp"]', "are the same: give one"),
        ("[[case]]\nrun = { rounds = 1 }", "needs a name of its own"),
        ('[[case]]\nname = "a"\n[[case]]\nname = "a"', "needs a name of its own"),
        ('[case]\nname = "a"', "written as [[case]]"),
        ('[[case]]\nname = "a"\nruns = { rounds = 1 }', "unknown section [runs]"),
        ("seeds = [1", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(QuiverError) as caught:
        sweep(tmp_path, text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice(cases=("c",)), "no case 'c'"),
        (Choice(values=("run.seed=3",)), "use --seeds"),
        (Choice(values=("method.name=osgp",)), "use --methods"),
        (Choice(values=("run.rounds",)), "write section.key=value"),
    ],
)
def test_mistakes_on_the_command_line_are_named(tmp_path: Path, choice: Choice, words: str) -> None:
    with pytest.raises(QuiverError) as caught:
        sweep(tmp_path, 'base = "base.toml"\n[[case]]\nname = "a"', choice=choice)
    assert words in str(caught.value)


SCALED = """
base = "base.toml"
methods = ["local", "osgp"]
seeds = [0, 1]
[[case]]
name = "a"
data = { clients = 7 }
[[case]]
name = "b"
data = { clients = 8 }
[scale.small]
base = { run = { rounds = 2 } }
seeds = [5]
cases = ["b"]
[scale.other]
methods = ["ditto"]
[[scale.other.case]]
name = "c"
[scale.wrong]
rounds = 3
"""


def test_at_a_scale_its_section_stands_in_place_of_the_same_keys(tmp_path: Path) -> None:
    keys = ("method.name", "run.seed", "data.clients", "run.rounds")
    whole = sweep(tmp_path, SCALED)
    assert len(whole.cells) == 2 * 2 * 2
    small = load_sweep(tmp_path / "plan.toml", scale="small")
    assert values(small, *keys) == [("local", 5, 8, 2), ("osgp", 5, 8, 2)]
    assert {cell.case for cell in small.cells} == {"b"}
    other = load_sweep(tmp_path / "plan.toml", scale="other")
    assert values(other, *keys) == [("ditto", 0, 6, 3), ("ditto", 1, 6, 3)]


def test_a_scale_that_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    sweep(tmp_path, SCALED)
    with pytest.raises(QuiverError, match=r"there is no \[scale\.huge\]"):
        load_sweep(tmp_path / "plan.toml", scale="huge")
    with pytest.raises(QuiverError, match=r"unknown key 'rounds' in \[scale\.wrong\]"):
        load_sweep(tmp_path / "plan.toml", scale="wrong")


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    text = '[[grid]]\nmethods = ["local"]\n[[grid]]\nmethods = ["osgp"]'
    with pytest.raises(QuiverError, match="nothing is left to run"):
        sweep(tmp_path, text, choice=Choice(methods=("ditto",)))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuiverError, match=r"plan\.toml: cannot be read"):
        load_sweep(tmp_path / "plan.toml")


def test_a_sweep_and_its_base_as_windows_writes_them(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nrounds = 7\r\n")
    (tmp_path / "plan.toml").write_bytes(b'\xef\xbb\xbfbase = "base.toml"\r\n')
    assert values(load_sweep(tmp_path / "plan.toml"), "run.rounds") == [(7,)]


def test_an_override_may_name_the_options_of_its_own_method_only() -> None:
    def overridden(**options: float) -> dict[str, Any]:
        return {"method": {"name": "dfedpgp"}, "overrides": {"fedbabu": {"method": options}}}

    config = parse_config(overridden(finetune_lr=0.01)).for_method("fedbabu")
    assert config.method.model_extra == {"finetune_lr": 0.01}
    with pytest.raises(QuiverError, match=r"overrides\.fedbabu.*method\.step_floor"):
        parse_config(overridden(step_floor=0.1))


def test_a_graph_that_a_case_or_a_grid_names_takes_no_options_of_the_usual_ones(
    tmp_path: Path,
) -> None:
    base = BASE + "[topology]\nneighbors = 2\nsampled = 3\n"
    case = 'base = "base.toml"\n[[case]]\nname = "r"\ntopology = { name = "ring" }\n'
    grid = 'base = "base.toml"\n[grid]\ntopology.name = ["ring", "random_push"]\n'
    keys = ("topology.name", "topology.neighbors", "topology.sampled")
    assert values(sweep(tmp_path, case, base), *keys) == [("ring", None, None)]
    assert values(sweep(tmp_path, grid, base), *keys) == [
        ("ring", None, None),
        ("random_push", 2, None),
    ]

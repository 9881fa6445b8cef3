"""Presets: every cell of the paper's tables and figures, with the settled hyper-parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiverfl.errors import QuiverError
from quiverfl.paper.reproduce.catalogue import (
    ITEMS,
    OTHERS,
    Protocol,
    configs_folder,
    equalize_participation,
    graph_settings,
    make_item_cells,
    rate_settings,
    sweep_file,
)
from quiverfl.paper.reproduce.scores import (
    published_accuracy,
    published_rounds,
    published_speedup,
    published_target,
)
from quiverfl.runs.config_files import load_config
from quiverfl.runs.experiment import make_method, make_run_topology
from quiverfl.sweeps.plan import Cell, Choice, load_sweep

EVERY = [name for name, item in ITEMS.items() if item.kind != "partition"]
TRAINED = [name for name in EVERY if name not in OTHERS]
COUNTS = {
    # cases × methods × seeds
    "table1": 8 * 10 * 3,
    "table2": 4 * 9 * 3,
    "table3": 2 * 9 * 3,
    "table4": 2 * 4 * 3,
    "table6": 4 * 10 * 3,
    "table7": 4 * 9 * 3,
    "fig2": 8 * 10 * 3,
    "fig3a": 5 * 1 * 3,
    "fig3b": 6 * 1 * 3,
    "fig5": 4 * 10 * 3,
    "unreliable": 5 * 4 * 3 + 2 * 3,  # a push is the same where each direction fails alone
    "graphs": 6 * 5 * 3,
    "time": 3 * 8 * 3,
}


def cells(name: str, scale: str, choice: Choice | None = None) -> list[Cell]:
    return make_item_cells(ITEMS.find(name), scale, choice or Choice())


@pytest.mark.parametrize("name", TRAINED)
def test_at_full_size_every_cell_is_there_with_the_papers_settings(name: str) -> None:
    found = cells(name, "paper")
    assert len({cell.name for cell in found}) == COUNTS[name]
    for cell in found:
        config = cell.config
        training = config.training
        assert config.model.name == "resnet18_gn"
        assert (training.lr, training.lr_decay, training.momentum) == (0.1, 0.99, 0.9)
        assert (training.weight_decay, training.batch_size) == (5e-4, 128)
        assert (training.clip_norm, config.data.augment) == (10.0, "crop_flip")
        assert config.data.samples_per_client is None
        tiny = config.data.name == "tiny_imagenet"
        if not config.clock.asynchronous:  # which ends by seconds
            assert config.run.rounds == (300 if tiny else 500)
        if name != "fig3b":
            assert config.data.clients == 100
    assert {cell.config.run.seed for cell in found} == {0, 1, 2}


def test_the_papers_numbers_stand_beside_every_cell_it_prints() -> None:
    for name in ("table1", "table3", "table4", "table6"):
        for cell in cells(name, "paper"):
            assert published_accuracy(cell.case, cell.config.method.name) is not None, cell.name
    for name in ("table2", "table7"):
        for cell in cells(name, "paper"):
            assert published_rounds(cell.case, cell.config.method.name) is not None, cell.name


def test_some_numbers_of_the_paper() -> None:
    assert published_accuracy("CIFAR-10 Dir-0.3", "dfedpgp") == pytest.approx((0.8561, 0.0005))
    assert published_accuracy("CIFAR-100 Pat-10", "fedper") == pytest.approx((0.7038, 0.0002))
    mean, std = published_accuracy("CIFAR-10 Pat-2", "dfedavgmp") or (0.0, 0.0)
    assert mean == pytest.approx(0.9090)
    assert std != std
    assert published_accuracy("CIFAR-10 Pat-2", "nobody") is None
    assert published_target("CIFAR-100 Dir-0.3") == 0.45
    assert published_rounds("CIFAR-10 Dir-0.3", "fedavg") == float("inf")
    assert published_rounds("Tiny-ImageNet Pat-20", "dfedpgp") == 53
    assert published_speedup("Tiny-ImageNet Pat-20", "dfedpgp") == pytest.approx(258 / 53)
    assert published_speedup("CIFAR-10 Dir-0.3", "fedavg") is None
    assert published_rounds("CIFAR-10 Dir-0.3", "local") is None


def test_fedreps_table_is_its_scripts_setting() -> None:
    """Head 10 epochs and body 1 or 5, whole models as many as the body, a tenth of the clients."""
    found = cells("fedrep", "paper")
    assert len(found) == 4 * 5
    for cell in found:
        config, training = cell.config, cell.config.training
        body = 1 if cell.case == "FedRep CIFAR-10, 2 classes" else 5
        assert (training.lr, training.momentum, training.weight_decay) == (0.01, 0.5, 1e-4)
        assert (training.batch_size, training.lr_decay, training.clip_norm) == (10, 1.0, None)
        assert (config.run.rounds, config.run.evaluate_every) == (100, 1)
        assert (config.data.clients, config.data.augment) == (100, "crop_flip")
        method = make_method(config)
        active = make_run_topology(config, method, 100)(0).active
        assert active.sum() == 10 or (method.name == "local" and 1 <= active.sum() <= 25)
        epochs = config.method.options()
        if method.name == "fedrep":
            assert epochs == {"personal_epochs": 10, "shared_epochs": body}
        else:
            assert set(epochs.values()) == {body}


def test_pfllibs_numbers_stand_beside_every_cell() -> None:
    found = cells("pfllib", "paper")
    assert len(found) == 4 * 4
    for cell in found:
        assert published_accuracy(cell.case, cell.config.method.name) is not None, cell.name
        assert cell.config.topology.options()["sampled"] == cell.config.data.clients == 20
    crossing = [
        [published_accuracy(f"PFLlib CIFAR-100, β = {beta}", name) for beta in ("0.5", "5")]
        for name in ("fedrep", "fedavg")
    ]
    (rep, rep_5), (avg, avg_5) = ([score[0] for score in row if score] for row in crossing)
    assert rep > avg
    assert rep_5 < avg_5


@pytest.mark.parametrize("scale", ["small", "tiny"])
@pytest.mark.parametrize("name", EVERY)
def test_every_item_is_there_at_every_scale(scale: str, name: str) -> None:
    assert cells(name, scale)


def test_the_small_scale_is_the_one_that_is_promised() -> None:
    found = cells("table1", "small")
    assert len(found) == 4 * 11 * 2
    assert {cell.case for cell in found} == {
        "CIFAR-10 Dir-0.3",
        "CIFAR-10 Pat-2",
        "CIFAR-100 Dir-0.3",
        "CIFAR-100 Pat-10",
    }
    neighbours = [dict(cell.point)["topology.neighbors"] for cell in cells("fig3a", "small")]
    assert sorted(set(neighbours)) == [2, 5, 10, 20, 40]
    for cell in cells("table3", "small"):
        assert cell.config.run.epoch_groups == (1, 2, 3, 4, 5)
    images = {
        (cell.config.data.clients or 0) * (cell.config.data.samples_per_client or 0)
        for cell in cells("fig3b", "small")
    }
    assert images == {3200}


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_what_tables_and_figures_have_in_common_is_one_cell(scale: str) -> None:
    def names(item: str) -> set[str]:
        return {cell.name for cell in cells(item, scale)}

    table1 = names("table1")
    assert names("table2") < table1
    assert names("fig2") == table1
    assert names("table7") < names("table6") == names("fig5")
    alone = {cell.name for cell in cells("table4", scale) if cell.config.method.name == "dfedavgmp"}
    assert names("table4") - table1 == (set() if scale == "small" else alone)
    seeds = 2 if scale == "small" else 3
    assert len(names("fig3a") & table1) == seeds  # ten neighbours
    assert len(names("fig3b") & table1) == seeds  # the usual number of clients


@pytest.mark.parametrize("scale", ["small", "paper", "tiny"])
def test_a_base_is_a_configuration_by_itself(scale: str) -> None:
    assert load_config(configs_folder() / "scales" / f"{scale}.toml").method.name == "dfedpgp"


def test_figure_4_shows_both_partitions() -> None:
    for scale in ("small", "paper"):
        shown = [cell.config.data for cell in cells("fig4", scale)]
        assert [(d.name, d.partition) for d in shown] == [
            ("cifar100", "dirichlet"),
            ("cifar100", "pathological"),
        ]


def test_pull_is_for_directed_methods_alone() -> None:
    found = cells("table1", "tiny", Choice(values=graph_settings("pull")))
    graphs = {cell.config.method.name: cell.config.topology.name for cell in found}
    assert graphs == {
        "local": "auto",
        "fedavg": "auto",
        "dfedavgm": "auto",
        "osgp": "random_pull",
        "dfedpgp": "random_pull",
    }
    assert graph_settings("push") == ()


def test_at_equal_participation_server_methods_get_more_rounds_and_the_same_decay_in_all() -> None:
    by_method = {cell.config.method.name: cell for cell in cells("table1", "small")}
    same = equalize_participation(by_method["dfedpgp"])
    assert same == by_method["dfedpgp"]
    before, after = by_method["fedavg"].config, equalize_participation(by_method["fedavg"]).config
    assert after.run.rounds == 10 * before.run.rounds
    assert after.run.evaluate_every == 10 * before.run.evaluate_every
    decayed = after.training.lr_decay**after.run.rounds
    assert decayed == pytest.approx(before.training.lr_decay**before.run.rounds)


def test_a_scale_can_be_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "table1.toml").write_text('methods = ["local"]')
    item = ITEMS.find("table1")
    assert sweep_file(item, str(tmp_path)) == tmp_path / "table1.toml"
    assert len(load_sweep(sweep_file(item, str(tmp_path))).cells) == 1
    with pytest.raises(QuiverError, match=r"no such file; the scale .* has table1"):
        sweep_file(ITEMS.find("table3"), str(tmp_path))


def test_unknown_names_are_answered_with_known_ones() -> None:
    with pytest.raises(QuiverError, match="did you mean 'table1'"):
        ITEMS.find("tabel1")
    with pytest.raises(QuiverError, match="did you mean 'small'"):
        sweep_file(ITEMS.find("table1"), "smal")
    with pytest.raises(QuiverError, match="there is no such folder"):
        sweep_file(ITEMS.find("table1"), "./nowhere")


MEDIUM = [name for name in TRAINED if name not in ("table6", "table7", "fig3b", "fig5")]


@pytest.mark.parametrize("name", MEDIUM)
def test_the_medium_scale_has_the_papers_client(name: str) -> None:
    found = cells(name, "medium")
    for cell in found:
        config, training = cell.config, cell.config.training
        data = config.data
        assert (data.clients, data.samples_per_client, data.test_per_client) == (50, 500, 100)
        assert (training.lr, training.lr_decay, training.momentum) == (0.1, 0.99, 0.9)
        assert (training.weight_decay, training.batch_size, training.clip_norm) == (5e-4, 128, 10)
        assert (config.model.name, data.augment) == ("lenet5", "crop_flip")
        assert config.run.rounds == (12 if config.clock.asynchronous else 60)
    if name == "table1":
        assert len(found) == 2 * 11 * 2


def test_any_case_of_the_file_can_be_asked_for() -> None:
    """At medium size two cases run unless asked, and CIFAR-100 when asked."""
    for case in ("CIFAR-100 Dir-0.3", "CIFAR-100 Pat-10"):
        found = cells("table1", "medium", Choice(("dfedpgp", "local"), (0,), (case,)))
        assert {(cell.case, cell.config.data.name) for cell in found} == {(case, "cifar100")}
        assert {cell.config.model.name for cell in found} == {"lenet5"}
    with pytest.raises(QuiverError, match="no case 'CIFAR-100 Pat-7'; did you mean"):
        cells("table1", "medium", Choice(cases=("CIFAR-100 Pat-7",)))


def test_another_network_is_two_settings() -> None:
    """The commands of the docs: a residual network at medium size, LeNet-5 at the paper's."""
    residual = ("model.name=resnet8_gn", "run.precision=bf16")
    for cell in cells("table1", "medium", Choice(values=residual)):
        config = cell.config
        assert (config.model.name, config.model.kernels) == ("resnet8_gn", "compiled")
        assert (config.run.precision, config.run.rounds, config.training.lr) == ("bf16", 60, 0.1)
    small = ("model.name=lenet5", "model.kernels=compiled")
    for cell in cells("table1", "paper", Choice(cases=("CIFAR-10 Dir-0.3",), values=small)):
        config = cell.config
        assert (config.model.name, config.data.clients) == ("lenet5", 100)
        assert (config.data.samples_per_client, config.run.rounds) == (None, 500)


def test_the_undirected_exchange_that_takes_what_arrives() -> None:
    """In the case of its own, where nothing else differs; pushes are the cells they were."""
    half, alone = (
        {
            (c.config.method.name, c.config.run.seed): c
            for c in cells("unreliable", "medium", Choice(cases=(name,)))
        }
        for name in ("50 % of links fail", "50 % of links fail, each direction alone")
    )
    for key, cell in alone.items():
        graph = make_run_topology(cell.config, make_method(cell.config), 50)(0)
        usual = make_run_topology(half[key].config, make_method(half[key].config), 50)(0)
        if key[0] in ("osgp", "dfedpgp"):
            assert cell.name == half[key].name
        else:
            assert cell.name != half[key].name
            assert graph.row_stochastic
            assert not graph.column_stochastic
            assert ((graph.weights > 0) >= (usual.weights > 0)).all()
            assert (graph.weights > 0).sum() > 1.4 * (usual.weights > 0).sum()


def test_what_the_medium_scale_has_not_is_refused_with_what_there_is() -> None:
    with pytest.raises(QuiverError, match=r"no \[scale.medium\]; it has small, tiny"):
        cells("table6", "medium")


def protocol(name: str, scale: str, whose: Protocol, file: Path | None = None) -> list[Cell]:
    return cells(name, scale, Choice(values=rate_settings(whose, scale, file)))


def test_the_papers_rates_are_those_of_its_scale() -> None:
    """At medium size they are the preset's own, so the cells are the same; at small size not."""
    assert {c.name for c in protocol("table1", "medium", "paper")} == {
        c.name for c in cells("table1", "medium")
    }
    small = protocol("table1", "small", "paper")
    assert {cell.config.training.lr for cell in small} == {0.1}
    assert {cell.config.training.lr_decay for cell in small} == {0.99}
    personal = {c.config.method.name: c.config.training.personal_lr for c in small}
    assert (personal["dfedpgp"], personal["fedper"]) == (0.001, None)
    assert all("finetune_lr" not in cell.config.method.options() for cell in small)


def test_tuned_rates_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rates.toml"
    file.write_text(
        "[overrides.dfedpgp.training]\nlr = 0.03\npersonal_lr = 0.02\n"
        "[overrides.fedbabu.training]\nlr = 0.05\n[overrides.fedbabu.method]\nfinetune_lr = 0.004\n"
    )
    found = {c.config.method.name: c.config for c in protocol("table1", "medium", "tuned", file)}
    assert (found["dfedpgp"].training.lr, found["dfedpgp"].training.personal_lr) == (0.03, 0.02)
    assert found["fedbabu"].method.options()["finetune_lr"] == 0.004
    assert found["local"].training.lr == 0.1  # the file has nothing for it


def test_rates_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match="small scale's own rates are tuned"):
        rate_settings("tuned", "small", None)
    with pytest.raises(QuiverError, match="no tuned rates for the scale 'tiny'"):
        rate_settings("tuned", "tiny", None)
    with pytest.raises(QuiverError, match="goes with --protocol tuned"):
        rate_settings("paper", "medium", tmp_path)
    with pytest.raises(QuiverError, match="no such file"):
        rate_settings("tuned", "medium", tmp_path / "none.toml")

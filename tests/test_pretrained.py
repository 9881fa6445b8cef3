"""Pretrained networks from local files: loaded, checked, frozen, adapted, normalised. No hub."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quiverfl as qv
from quiverfl.errors import QuiverError
from quiverfl.models.pretrained import IMAGENET, FrozenNorm
from quiverfl.peer.setup import check_shared_config
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import Experiment
from quiverfl.task import Params

SHAPE = (3, 8, 8)


class Block(nn.Module):
    """A depthwise and a pointwise convolution with BatchNorm, as MobileNet has them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
        self.conv2 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv2(self.conv1(x))))


class Vision(nn.Module):
    """In the manner of torchvision: `fc` or `classifier` is the last layer."""

    def __init__(self, num_classes: int = 7, width: int = 6) -> None:
        super().__init__()
        self.layer1, self.layer2 = Block(3, width), Block(width, width)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.avgpool(self.layer2(self.layer1(x))).flatten(1))
        return logits


class Timm(Vision):
    """In the manner of timm: it knows how its inputs are normalised."""

    def __init__(self, num_classes: int = 7) -> None:
        super().__init__(num_classes)
        self.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.5)}


class Patches(nn.Module):
    """In the manner of transformers: it returns an object with logits."""

    def __init__(self, num_labels: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.classifier = nn.Linear(8, num_labels)

    def forward(self, x: Tensor) -> Any:
        hidden = self.encoder(self.embed(x).flatten(2).transpose(1, 2))
        return SimpleNamespace(logits=self.classifier(hidden.mean(dim=1)))


def trained(make: Callable[[], nn.Module] = Vision, seed: int = 1) -> nn.Module:
    """With running statistics of its own, as a network that was trained has them."""
    torch.manual_seed(seed)
    network = make()
    network.train()
    with torch.no_grad():
        for _ in range(3):
            network(torch.randn(16, *SHAPE) * 2 + 1)
    return network.eval()


def make(source: Any = Vision, classes: int = 5, **options: Any) -> Any:
    return qv.make_model("pretrained", SHAPE, classes, source=source, **options)


X = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.save(trained().state_dict(), tmp_path / "vision.pt")
    return tmp_path / "vision.pt"


def features(network: Any, x: Tensor) -> Tensor:
    found: Tensor = network.avgpool(network.layer2(network.layer1(x))).flatten(1)
    return found


@pytest.mark.parametrize("kind", ["pt", "pth, in a checkpoint", "safetensors", "of several GPUs"])
def test_a_body_computes_what_it_did_under_a_fresh_head(kind: str, tmp_path: Path) -> None:
    network = trained()
    state = network.state_dict()
    if kind == "safetensors":
        path = tmp_path / "net.safetensors"
        save_file(state, path)
    else:
        path = tmp_path / f"net.{kind[:3].strip(' of')}.pt"
        wrapped: Any = {"epoch": 3, "state_dict": state} if "checkpoint" in kind else state
        if "GPUs" in kind:
            wrapped = {f"module.{name}": leaf for name, leaf in state.items()}
        if "epoch" in wrapped:
            wrapped = {"state_dict": state}
        torch.save(wrapped, path)
    model = make(weights=path, normalize="imagenet").eval()
    assert model.head.out_features == 5
    assert model.input_statistics == IMAGENET
    with torch.no_grad():
        assert torch.equal(model(X), model.head(features(network, X)))


def test_a_head_of_another_size_in_the_file_is_not_loaded(weights: Path) -> None:
    torch.manual_seed(5)
    first = make(weights=weights, normalize="data", options={"num_classes": 3})
    second = make(weights=weights, normalize="data", options={"num_classes": 3})
    assert not torch.equal(first.head.weight, second.head.weight)
    assert torch.equal(first.body.layer1.conv1.weight, second.body.layer1.conv1.weight)


def test_a_folder_of_save_pretrained(tmp_path: Path) -> None:
    network: Any = trained(Patches)
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    said = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    model = make(Patches, weights=tmp_path).eval()
    assert model.input_statistics == ((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    with torch.no_grad():
        hidden = network.encoder(network.embed(X).flatten(2).transpose(1, 2)).mean(dim=1)
        torch.testing.assert_close(model(X), model.head(hidden), rtol=1e-5, atol=1e-5)


def trainable(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}


class Renaming(Patches):
    """As transformers: a folder has older names, which its own reader knows."""

    config = None

    @classmethod
    def from_pretrained(cls, folder: Path, config: Any, **options: Any) -> Any:
        assert options == dict.fromkeys(
            ("local_files_only", "ignore_mismatched_sizes", "output_loading_info"), True
        )
        network = cls()
        found = load_file(folder / "model.safetensors")
        named = {name.removeprefix("old."): leaf for name, leaf in found.items()}
        own = network.state_dict()
        fits = {n: leaf for n, leaf in named.items() if n in own and leaf.shape == own[n].shape}
        network.load_state_dict({**own, **fits})
        report = {
            "missing_keys": [name for name in own if name not in named],
            "mismatched_keys": [(n, (), ()) for n in named if n in own and n not in fits],
            "unexpected_keys": [name for name in named if name not in own],
        }
        return network, report


def test_a_folder_with_older_names_is_read_by_its_library(tmp_path: Path) -> None:
    network = trained(Renaming)
    state = {f"old.{name}": leaf.contiguous() for name, leaf in network.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    given: dict[str, Any] = {"weights": tmp_path, "normalize": "data"}
    body = make(Renaming, **given).body.state_dict()
    for name, leaf in body.items():
        assert torch.equal(leaf, network.state_dict()[name])
    first = next(name for name in state if "embed" in name)
    for changed, words in (
        ({n: leaf for n, leaf in state.items() if n != first}, "lacks embed"),
        ({**state, "old.more": torch.ones(2)}, "has more, which the network lacks"),
        ({**state, first: torch.ones(2)}, "lacks embed"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(QuiverError, match=words):
            make(Renaming, **given)


def test_frozen_partly_frozen_and_adapted(weights: Path) -> None:
    given: dict[str, Any] = {"weights": weights, "normalize": "data"}
    assert trainable(make(**given, train="head")) == {"head"}
    part = trainable(make(**given, train=["layer2"]))
    assert part == {"head", *(f"body.layer2.{leaf}" for leaf in ("conv1", "conv2", "bn"))}
    assert len(trainable(make(**given))) == 7
    adapted = make(Patches, train="head", lora=2, targets=["linear"])
    assert trainable(adapted) == {
        "head",
        "body.encoder.layers.0.linear1.lora",
        "body.encoder.layers.0.linear2.lora",
    }
    assert "body.embed" in trainable(make(Patches, lora=2, train=["embed"]))


def test_a_frozen_batch_norm_is_what_it_was_in_use(weights: Path) -> None:
    network = trained()
    model = make(weights=weights, normalize="data", train=["layer2"]).train()
    assert isinstance(model.body.layer1.bn, FrozenNorm)
    assert isinstance(model.body.layer2.bn, nn.BatchNorm2d)
    with torch.no_grad():
        expected = network.layer1(X)  # type: ignore[operator]
        torch.testing.assert_close(model.body.layer1(X), expected, rtol=1e-5, atol=1e-6)
    whole = trained().state_dict()
    frozen = make(weights=weights, normalize="data", train="head").state_dict()
    for name, leaf in whole.items():
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked"):
            assert torch.equal(frozen[f"body.{name}"], leaf)


class NormAct(nn.BatchNorm2d):
    """A BatchNorm and an activation in one, as timm has them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Dense(nn.Linear):
    """A linear layer of a library's own, as timm has it."""


class Library(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), NormAct(6))
        self.last = nn.Sequential(nn.Conv2d(6, 6, 3), NormAct(6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.classifier = Dense(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.last(self.stem(x)).flatten(2).transpose(1, 2)
        logits: Tensor = self.classifier(self.attention(tokens, tokens, tokens)[0].mean(1))
        return logits


@pytest.mark.parametrize("train", ["head", ["last"]])
def test_a_frozen_norm_with_a_forward_of_its_own_computes_it(train: Any, tmp_path: Path) -> None:
    network = trained(Library)
    network(X)  # statistics that are not those of a fresh layer
    torch.save(network.state_dict(), tmp_path / "net.pt")
    given: dict[str, Any] = {"weights": tmp_path / "net.pt", "normalize": "data", "train": train}
    model = make(Library, **given).train()
    stem, last = (network.eval().get_submodule(part) for part in ("stem", "last"))
    with torch.no_grad():
        y = stem(X)
        assert torch.equal(model.body.stem(X), y)
        assert torch.equal(model.body.last(y), last(y)) is (train == "head")
    task = qv.Task(lambda: make(Library, **given), personal=())
    kept = [name for name in task.statistics_layout.names if "stem" in name]
    assert (kept, task.one_by_one is None) == ([], train == "head")
    draw = np.random.default_rng(0)
    pairs = [(draw.random((n, *SHAPE), dtype=np.float32), draw.integers(0, 5, n)) for n in (5, 9)]
    data, found = qv.FederatedData.from_arrays(pairs, pairs, classes=5), []
    for executor in ("sequential", "vectorized")[: 2 if train == "head" else 1]:
        run = qv.simulate(
            task,
            data,
            method=qv.DFedAvgM(epochs=1),
            topology=qv.full(clients=2),
            training=qv.Training(lr=0.1, batch_size=4),
            rounds=2,
            executor=executor,
        )
        found.append(run.personal(0).state_dict())
    before = task.skeleton.state_dict()
    for name, leaf in found[0].items():
        if "stem" in name:
            assert torch.equal(leaf, before[name])
        torch.testing.assert_close(leaf, found[-1][name], rtol=1e-4, atol=1e-6)


def test_a_layer_that_only_says_that_it_is_held_is_refused() -> None:
    """It would normalise by the batch in training, which is padded where clients are stacked."""

    def untracked() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
        model.get_submodule("0").track_running_stats = False
        return model

    with pytest.raises(QuiverError, match="without running statistics"):
        qv.Task(untracked, personal=("2",))


def test_a_frozen_body_trains_its_head_as_a_plain_loop_does(weights: Path) -> None:
    """Whole batches, plain SGD, one client with FedPer's personal head and nothing else trained."""
    draw = np.random.default_rng(0)
    x, y = draw.random((12, *SHAPE), dtype=np.float32), draw.integers(0, 5, 12)
    data = qv.FederatedData.from_arrays([(x, y)] * 2, [(x, y)] * 2, classes=5)
    task = qv.Task(
        lambda: make(weights=weights, normalize="data", train=["layer2.conv2"]), personal=("head",)
    )
    assert task.shared_layout.names == ("body.layer2.conv2.weight",)
    run = qv.simulate(
        task,
        data,
        method=qv.Local(epochs=3),
        topology=qv.isolated(clients=2),
        training=qv.Training(lr=0.1, batch_size=None),
        rounds=1,
        dtype=torch.float64,
    )
    module = task.make_module(Params(*(p.double() for p in task.initial_params(0)))).train()
    chosen = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(chosen, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            module(torch.from_numpy(x).double()), torch.from_numpy(y)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    own = run.parameters(1)
    for name, leaf in module.named_parameters():
        if leaf.requires_grad:
            torch.testing.assert_close(own[name], leaf.detach(), rtol=0, atol=1e-12)


def write_source(folder: Path) -> None:
    (folder / "my_networks.py").write_text("from test_pretrained import Patches, Timm, Vision\n")


def configure(weights: Path, **model: Any) -> dict[str, Any]:
    return {
        "data": {
            "name": "synthetic",
            "clients": 3,
            "samples_per_client": 12,
            "partition": "iid",
            "options": {"shape": [3, 8, 8], "classes": 4},
        },
        "model": {
            "name": "pretrained",
            "source": "my_networks:Vision",
            "weights": str(weights),
            **model,
        },
        "topology": {"name": "random_push", "neighbors": 2},
        "training": {"batch_size": 6, "lr": 0.05},
        "run": {"rounds": 1, "threads": 1},
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def images(count: int = 48) -> qv.Dataset:
    draw = np.random.default_rng(3)
    x = draw.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    y = np.arange(count) % 4
    return qv.Dataset("pixels", x, y, x, y, 4, mean=(0.1, 0.1, 0.1), std=(0.9, 0.9, 0.9))


def test_inputs_are_normalised_as_the_weights_want_it(here: Path, weights: Path) -> None:
    config = configure(weights, normalize="imagenet", train=["layer2"])
    config["data"].pop("options")
    config["data"]["name"] = "pixels"
    dataset = images()
    experiment = Experiment.of(config, dataset)
    assert (experiment.dataset.mean, experiment.dataset.std) == IMAGENET
    assert experiment.dataset.digest == dataset.digest  # the examples are the same
    raw, _ = experiment.data.train.of_client(0)
    prepare: Any = experiment.data.prepare
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in IMAGENET)
    torch.testing.assert_close(prepare(raw), (raw / 255 - mean) / std)  # type: ignore[operator]
    plain = Experiment.of({**config, "model": {**config["model"], "normalize": "data"}}, dataset)
    assert plain.dataset.mean == (0.1, 0.1, 0.1)
    timm: dict[str, Any] = {**config["model"], "source": "my_networks:Timm"}
    del timm["normalize"]
    assert Experiment.of({**config, "model": timm}, dataset).dataset.std == (0.25, 0.25, 0.5)


def test_it_runs_and_another_file_under_the_same_name_is_another_run(
    here: Path, weights: Path
) -> None:
    config = configure(weights, normalize="data", train=["layer2"])
    run = Experiment.of(config).run(here / "run")
    assert run.complete
    again = Experiment.of(config).run(here / "run")
    assert again.history.equals(run.history)
    torch.save(trained(seed=2).state_dict(), weights)
    os.utime(weights, ns=(1, 1))
    with pytest.raises(QuiverError, match=r"holds a run with another weights of the model"):
        Experiment.of(config).run(here / "run")


def test_a_file_may_be_named_by_its_sha256(weights: Path) -> None:
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    make(weights=weights, normalize="data", sha256=digest.upper())
    with pytest.raises(QuiverError, match=f"has the sha256 {digest}, not model\\.sha256 = 'ab'"):
        make(weights=weights, normalize="data", sha256="ab")
    with pytest.raises(QuiverError, match=r"set model.weights, too"):
        make(sha256=digest)


def test_peers_must_agree_on_the_weights(weights: Path) -> None:
    tree = configure(weights, normalize="data")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    with pytest.raises(QuiverError, match=f'sha256 = "{digest}"'):
        check_shared_config(parse_config(tree))
    tree["model"]["sha256"] = digest
    check_shared_config(parse_config(tree))


def test_both_executors_agree_on_a_frozen_body(weights: Path) -> None:
    draw = np.random.default_rng(0)
    pairs = [(draw.random((n, *SHAPE), dtype=np.float32), draw.integers(0, 5, n)) for n in (7, 9)]
    data = qv.FederatedData.from_arrays(pairs, pairs, classes=5)

    def loss(executor: str) -> Any:
        return qv.simulate(
            qv.Task(lambda: make(weights=weights, normalize="data", train=["layer2.conv2"])),
            data,
            method=qv.DFedPGP(shared_epochs=1),
            topology=qv.random_push(clients=2, neighbors=1, seed=0),
            training=qv.Training(lr=0.1, batch_size=4),
            rounds=2,
            dtype=torch.float64,
            executor=executor,
        ).history["loss"]

    np.testing.assert_allclose(loss("vectorized"), loss("sequential"), rtol=0, atol=1e-12)


class Softmax(Vision):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(dim=1)


class NoHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(3, 2)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo must not run",)


def break_weights(name: str, path: Path) -> None:
    state = trained().state_dict()
    if name == "lacks":
        del state["layer1.bn.running_var"]
    elif name == "has":
        state["layer9.weight"] = torch.ones(1)
    elif name == "shape":
        state["layer1.conv2.weight"] = torch.ones(2, 2)
    elif name == "nan":
        state["layer1.conv2.weight"][0] = float("nan")
    torch.save(state, path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lacks", "lacks layer1.bn.running_var, which the network has"),
        ("has", "has layer9.weight, which the network lacks"),
        ("shape", "layer1.conv2.weight has the shape (2, 2), and the network's has (6, 3, 1, 1)"),
        ("nan", "layer1.conv2.weight holds NaN or infinity"),
    ],
)
def test_weights_of_another_network_are_refused(name: str, words: str, tmp_path: Path) -> None:
    break_weights(name, tmp_path / "net.pt")
    with pytest.raises(QuiverError) as caught:
        make(weights=tmp_path / "net.pt", normalize="data")
    assert words in str(caught.value)


def test_files_that_are_no_weights_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(content: Any, name: str = "net.pt") -> str:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(QuiverError) as caught:
            make(weights=path, normalize="data")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "holds Python objects" in refused({"fc": Evil()})
    assert "holds Python objects" in refused(trained())
    assert "must not run" not in capfd.readouterr().out
    assert "is damaged, or holds Python objects" in refused(b"nothing")
    assert "is not a readable file of weights" in refused(b"nothing", "net.safetensors")
    assert "is no state_dict" in refused([torch.ones(2)])
    (tmp_path / "empty").mkdir()
    for path, words in (("empty", "holds none of model.safetensors"), ("no.pt", "is not there")):
        with pytest.raises(QuiverError, match=words):
            make(weights=tmp_path / path, normalize="data")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": ""}, "name the function that makes the network"),
        ({"source": "no_such_module:make"}, "there is no module 'no_such_module'"),
        ({"source": lambda: 3}, "returned a int: it must return a torch nn.Module"),
        ({"options": {"depth": 3}}, "failed with model.options = {'depth': 3}: TypeError"),
        ({"source": NoHead}, "say which linear layer is the network's last one; its last ones"),
        ({"head": "top"}, "has no linear layer of this name; its last ones are fc"),
        ({"source": Softmax}, "is not the last thing that the network computes"),
        ({"train": ["layer7"]}, 'the network has no part \'layer7\'; "all", "head", or some of'),
        ({"train": "all", "lora": 2}, "adapters are for a network that is frozen"),
        ({"targets": ["linear"]}, "set model.lora, too"),
        ({"normalize": "cifar"}, 'model.normalize = \'cifar\': "imagenet", "data"'),
        ({"normalize": {"mean": [0.5], "std": [0.5]}}, "a positive deviation per channel"),
        ({"normalize": {"mean": [1, 1, 1], "std": [1, 1, 0]}}, "a positive deviation per channel"),
        ({"normalize": {"mean": "x"}}, "is no list of a number per channel"),
        ({"rank": 3}, "has no option 'rank'"),
    ],
)
def test_bad_input_is_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(QuiverError) as caught:
        make(**{"source": Vision, **options})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_normalisation_of_weights_must_be_known(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match="neither the network nor its weights say"):
        make(weights=weights)
    (tmp_path / "hf").mkdir()
    save_file(trained(Patches).state_dict(), tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "preprocessor_config.json").write_text("{}")
    with pytest.raises(QuiverError, match="names no image_mean and image_std"):
        make(Patches, weights=tmp_path / "hf")


def test_inputs_that_the_network_does_not_take() -> None:
    with pytest.raises(QuiverError, match=r"does not take inputs \[2, 8, 8\]"):
        qv.make_model("pretrained", (2, 8, 8), 5, source=Vision)

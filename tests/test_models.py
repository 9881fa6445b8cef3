"""Models: exact sizes, a linear head that comes last, and errors a person can act on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from quiverfl.errors import QuiverError
from quiverfl.models import MODELS, make_model
from quiverfl.support.references import load_callable
from quiverfl.task import Task

IMAGE = (3, 32, 32)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("classes", "head"), [(10, 5_130), (100, 51_300), (200, 102_600)])
def test_resnet18_gn_has_the_papers_parameters(classes: int, head: int) -> None:
    with torch.device("meta"):
        model = make_model("resnet18_gn", IMAGE, classes)
    assert size(model) - size(model.head) == 11_168_832
    assert size(model.head) == head


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("mlp", (64,), 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10),
        ("lenet5", (1, 28, 28), 61_706),
        ("lenet5", (1, 32, 32), 61_706),
        ("cnn_small", IMAGE, 117_866),
        ("fedavg_cnn", IMAGE, 878_538),
        ("resnet8_gn", IMAGE, 78_042),
        ("resnet8_bn", IMAGE, 78_042),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], parameters: int) -> None:
    assert size(make_model(name, shape, 10)) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_one_linear_layer_and_comes_last(name: str) -> None:
    model = make_model(name, IMAGE, 7)
    assert isinstance(model.head, nn.Linear)
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    output = model(torch.randn(2, *IMAGE, generator=torch.Generator().manual_seed(0)))
    assert output.shape == (2, 7)
    assert output is seen[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_task_takes_it_and_shares_all_but_the_head(name: str) -> None:
    task = Task(lambda: make_model(name, IMAGE, 10))
    names = {entry.split(".")[0] for entry in task.shared_layout.names}
    assert names == {"body"}


def test_resnets_take_any_image_size() -> None:
    model = make_model("resnet8_gn", (1, 64, 48), 5)
    assert model(torch.zeros(2, 1, 64, 48)).shape == (2, 5)


def test_resnet_has_no_max_pool_and_a_stem_of_stride_one() -> None:
    with torch.device("meta"):
        model = make_model("resnet18_gn", IMAGE, 10)
        before_pooling = model.body[:-2](torch.empty(1, *IMAGE))
    assert before_pooling.shape == (1, 512, 4, 4)
    groups = {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)}
    assert groups == {32}


def test_pooling_before_relu_changes_no_bit() -> None:
    model = make_model("cnn_small", IMAGE, 10)
    x = torch.randn(4, *IMAGE, generator=torch.Generator().manual_seed(1))
    convolution, pool, relu = model.body[0], model.body[1], model.body[2]
    assert [type(m) for m in (convolution, pool, relu)] == [nn.Conv2d, nn.MaxPool2d, nn.ReLU]
    assert torch.equal(relu(pool(convolution(x))), pool(relu(convolution(x))))


def test_options_of_a_configuration_come_as_lists() -> None:
    model = make_model("mlp", (8, 8), 3, hidden=[5])
    assert [parameter.shape for parameter in model.parameters()] == [(5, 64), (5,), (3, 5), (3,)]


def test_small_images_need_padding_and_the_message_says_so() -> None:
    with pytest.raises(QuiverError, match=r"8×8 are too small.*model.padding = 2"):
        make_model("cnn_small", (1, 8, 8), 10)
    assert make_model("cnn_small", (1, 8, 8), 10, padding=2)(torch.zeros(1, 1, 8, 8)).shape == (
        1,
        10,
    )


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("mpl", (4,), {}, "unknown model 'mpl'; did you mean 'mlp'"),
        ("mlp", (4,), {"hiden": [3]}, "no option 'hiden'; did you mean 'hidden'"),
        ("lenet5", (1, 28, 28), {"hidden": 3}, "no option 'hidden'; known are kernels"),
        ("mlp", (4,), {"hidden": ["wide"]}, "give a list of at least one width"),
        ("cnn_small", (12,), {}, "needs images"),
        ("resnet8_gn", (12,), {}, "needs images"),
        ("resnet8_gn", IMAGE, {"groups": 5}, "does not divide"),
    ],
)
def test_errors(
    name: str, shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(QuiverError, match=message):
        make_model(name, shape, 10, **options)


OWN = """
import math
from torch import nn

answer = 42

class Own(nn.Module):
    def __init__(self, inputs, classes, width):
        super().__init__()
        self.body = nn.Linear(inputs, width)
        self.head = nn.Linear(width, classes)

def make(input_shape, classes, width=2):
    return Own(math.prod(input_shape), classes, width)

def not_a_model(input_shape, classes):
    return 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_module_anywhere")
    (tmp_path / f"{name}_raising.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    return name


def test_ones_own_model_by_module_and_function(own: str) -> None:
    model = make_model(f"{own}:make", (2, 3), 4, width=5)
    assert size(model) == math.prod((2, 3)) * 5 + 5 + 5 * 4 + 4


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (":make", "write module:function"),
        ("{own}:", "write module:function"),
        ("{own}:mak", "has no 'mak'; did you mean 'make'"),
        ("{own}:answer", "is a int, not a function"),
        ("{own}_elsewhere:make", "there is no module"),
        ("{own}_broken:make", "No module named 'no_such_module_anywhere'"),
        ("{own}_raising:make", "ZeroDivisionError: division by zero"),
    ],
)
def test_errors_of_ones_own_code(own: str, reference: str, message: str) -> None:
    with pytest.raises(QuiverError, match=message):
        load_callable(reference.format(own=own))


def test_ones_own_model_is_checked(own: str) -> None:
    with pytest.raises(QuiverError, match="has no option 'depth'"):
        make_model(f"{own}:make", (2,), 2, depth=1)
    with pytest.raises(QuiverError, match="returned a int"):
        make_model(f"{own}:not_a_model", (2,), 2)


def test_a_file_of_the_same_name_in_another_folder_does_not_run_for_this_one(
    own: str, tmp_path: Path
) -> None:
    load_callable(f"{own}:make")
    elsewhere = tmp_path / "another_project"
    elsewhere.mkdir()
    (elsewhere / f"{own}.py").write_text("def make(): ...")
    with pytest.raises(QuiverError, match=r"already imported .* start a new process"):
        load_callable(f"{own}:make", elsewhere)


def test_small_networks_take_several_dense_layers_and_a_dropout() -> None:
    """FedRep's network for CIFAR-100; a model in use drops nothing."""
    sizes = {"channels": [4, 8], "hidden": [12, 256], "dropout": 0.5}
    model = make_model("cnn_small", (3, 32, 32), 5, **sizes)
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")]
    assert shapes == [(4, 3, 5, 5), (8, 4, 5, 5), (12, 200), (256, 12), (5, 256)]
    x = torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    with pytest.raises(QuiverError, match="dropout probability"):
        make_model("cnn_small", (3, 32, 32), 5, dropout=1.5)

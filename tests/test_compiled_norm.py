"""The compiled GroupNorm is GroupNorm, ReLU and sum in float64, up to rounding."""

from __future__ import annotations

import copy
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quiverfl as qv
from compilers import environment, mutated, no_compiler, run_sanitized
from quiverfl.engine.local.programs import choose_executor
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.models import make_model
from quiverfl.models.compiled import NORM_SOURCE, GroupNorm, _can_normalise
from quiverfl.support.compiler import _find_compiler, why_not_compiled

needs_compiler = pytest.mark.skipif(
    why_not_compiled(*NORM_SOURCE) is not None, reason=str(why_not_compiled(*NORM_SOURCE))
)
MODES = ("plain", "relu", "add", "add_norm")
SHAPES = [
    # samples, channels, height, width, groups: several pixels in a row, one, four registers, one
    (5, 16, 32, 32, 8),
    (2, 64, 8, 8, 8),
    (2, 16, 7, 7, 4),
    (2, 48, 5, 5, 3),
    (3, 8, 6, 6, 2),
    (1, 3, 8, 16, 3),
    (2, 16, 1, 1, 4),
    (1, 2048, 3, 1, 2),
]
TYPES = {torch.float32: 3e-5, torch.bfloat16: 1e-2}
"""Largest error, over the largest number."""


def make_norms(channels: int, groups: int, mode: str) -> tuple[GroupNorm, nn.GroupNorm]:
    draws = torch.Generator().manual_seed(0)
    ours = GroupNorm(groups, channels, relu=mode != "plain")
    other = nn.GroupNorm(groups, channels, eps=1e-3)
    with torch.no_grad():
        for parameter in (*ours.parameters(), *other.parameters()):
            parameter.copy_(torch.randn(channels, generator=draws))
    return ours, other


def compute(
    mode: str, ours: GroupNorm, other: nn.GroupNorm, x: Tensor, r: Tensor, of_y: Tensor
) -> list[Tensor]:
    """The result, and the gradients of everything in it."""
    x, r = x.clone().requires_grad_(), r.clone().requires_grad_()
    inputs = [x, *ours.parameters()]
    if mode == "add":
        inputs.append(r)
    if mode == "add_norm":
        inputs += [r, *other.parameters()]
    given = {"add": (x, r), "add_norm": (x, r, other)}.get(mode, (x,))
    y = ours(*given)
    return [y.detach(), *torch.autograd.grad(y, inputs, of_y)]


def largest_error(
    shape: tuple[int, ...], mode: str, dtype: torch.dtype, mean: float = 0.0
) -> float:
    samples, channels, height, width, groups = shape
    draws = torch.Generator().manual_seed(1)
    x, r, of_y = (torch.randn(samples, channels, height, width, generator=draws) for _ in range(3))
    x, r, of_y = (x * 2 + mean).to(dtype), r.to(dtype), of_y.to(dtype)
    ours, other = make_norms(channels, groups, mode)
    with_r = None if mode in ("plain", "relu") else r
    assert _can_normalise(x, with_r, [ours, other] if mode == "add_norm" else [ours])
    found = compute(mode, ours, other, x, r, of_y)
    exact = compute(
        mode,
        copy.deepcopy(ours).double(),
        copy.deepcopy(other).double(),
        *(tensor.double() for tensor in (x, r, of_y)),
    )
    errors = [
        (mine.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3)
        for mine, wanted in zip(found, exact, strict=True)
    ]
    return float(max(errors))


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], mode: str, dtype: torch.dtype
) -> None:
    """PyTorch's float32 is off by two parts in a thousand where the mean is 100.

    In bfloat16 such numbers are so few that relu's edge is hit.
    """
    for mean in (0.0, 100.0) if dtype == torch.float32 else (0.0,):
        assert largest_error(shape, mode, dtype, mean) < TYPES[dtype]


MUTANTS = {
    "the variance of another number of pixels": (
        "(float)(each * folds * rows) + (float)eps",
        "(float)(each * rows) + (float)eps",
    ),
    "no difference of means": (
        "square += squares[l] + (float)rows * apart * apart",
        "square += squares[l]",
    ),
    "relu off in the sums": ("sum[j] += g, product[j]", "sum[j] += LOAD(of_y + l), product[j]"),
    "no gradient through the mean": (
        "offset[c] = factor * sum - steep * mean",
        "offset[c] = -steep * mean",
    ),
    "another norm's slope": ("other[j] * g + (other_slope[j]", "other[j] * g + (slope[j]"),
    "a row is left out": ("row < rows; row++", "row < rows - 1; row++"),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_in_the_c_is_found(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mutated(monkeypatch, tmp_path, "group_norm.c", *MUTANTS[mutant]):
        errors = [largest_error((2, 16, 8, 6, 4), mode, torch.float32) for mode in MODES]
    assert max(errors) > 1e-3


SANITIZED = r"""
#include <stdio.h>
#include <stdlib.h>

#define FILL(p, count) for (int64_t i = 0; i < (count); i++) (p)[i] = draw()
static float draw(void) { return (float)rand() / RAND_MAX - 0.5f; }

#define TRY(type, kind, as)                                                                     \
  static void try_##type(Norm *n) {                                                             \
    int64_t size = n->samples * n->pixels * n->channels, both = n->mode == ADD_NORM ? 2 : 1;    \
    kind *x[6];                                                                                 \
    for (int j = 0; j < 6; j++) {                                                               \
      x[j] = malloc(size * sizeof **x);                                                         \
      for (int64_t i = 0; i < size; i++) x[j][i] = as;                                          \
    }                                                                                           \
    float *moments = malloc(n->samples * both * n->groups * 2 * sizeof(float));                 \
    float *weights = malloc(both * 2 * n->channels * sizeof(float));                            \
    group_norm_##type(n, x[0], n->mode >= ADD ? x[1] : NULL, x[2], moments);                    \
    group_norm_backward_##type(n, x[3], x[0], n->mode >= ADD ? x[1] : NULL,                     \
                               n->mode == ADD ? x[2] : NULL, moments, x[4],                     \
                               n->mode >= ADD ? x[5] : NULL, weights);                          \
    for (int j = 0; j < 6; j++) free(x[j]);                                                     \
    free(moments), free(weights);                                                               \
  }
TRY(float32, float, draw())
TRY(bfloat16, uint16_t, (uint16_t)(0x3f00 + rand() % 200))

int main(void) {
  int64_t shapes[][4] = {{2, 16, 8, 8}, {1, 49, 16, 4}, {2, 1, 16, 2}, {1, 30, 48, 3},
                         {1, 36, 8, 2}, {1, 3, 2048, 2}, {2, 16, 64, 32}, {1, 128, 3, 3}};
  int64_t tried = 0;
  for (int s = 0; s < 8; s++) {
    float *weights[4];
    for (int j = 0; j < 4; j++) {
      weights[j] = malloc(shapes[s][2] * sizeof(float));
      FILL(weights[j], shapes[s][2]);
    }
    for (int mode = PLAIN; mode <= ADD_NORM; mode++) {
      if (!can_normalise(shapes[s][1], shapes[s][2])) continue;
      Norm n = {mode, shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], 1e-5, 1e-5,
                weights[0], weights[1], weights[2], weights[3]};
      try_float32(&n), try_bfloat16(&n), tried++;
    }
    for (int j = 0; j < 4; j++) free(weights[j]);
  }
  printf("finished %d\n", (int)tried);
  return tried == 32 ? 0 : 1;
}
"""


@needs_compiler
@pytest.mark.slow
def test_nothing_is_read_or_written_outside_of_what_is_given(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "group_norm.c", "-ffp-contract=fast", SANITIZED)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("option", ["-U__AVX512BF16__", "-mno-avx512f", "-mno-avx -mno-fma"])
def test_lesser_processors_compute_the_same(option: str, tmp_path: Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("options of x86-64")
    compiler = _find_compiler()[0]
    with environment(XDG_CACHE_HOME=str(tmp_path), CC=f"{compiler} {option}"):
        for dtype, allowed in TYPES.items():
            for mode in MODES:
                assert largest_error((2, 16, 8, 6, 4), mode, dtype) < allowed
        check_no_numbers()


@needs_compiler
def test_what_is_no_number_passes_relu() -> None:
    """A run that diverged ends because its loss is not a number: relu must not make it zero."""
    check_no_numbers()


def check_no_numbers() -> None:
    for dtype in TYPES:
        x = torch.zeros(2, 16, 4, 4, dtype=dtype)
        x[1, 0, 0, 0] = torch.nan
        y = GroupNorm(8, 16)(x)
        assert bool(y[1, :2].isnan().all())
        assert int(y.isnan().sum()) == 2 * 16


@needs_compiler
def test_the_compiled_pass_is_really_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("resnet8_gn", (3, 16, 16), 5, kernels="compiled")

    def refused(*_: object) -> Tensor:
        raise AssertionError("PyTorch's norm")

    monkeypatch.setattr(functional, "group_norm", refused)
    x = torch.randn(2, 3, 16, 16)
    model(x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).float().sum().backward()


@needs_compiler
@pytest.mark.parametrize(
    "name", ["resnet8_gn", pytest.param("resnet18_gn", marks=pytest.mark.slow)]
)
def test_a_residual_network_is_pytorchs(name: str) -> None:
    side = 16 if name == "resnet8_gn" else 8
    torch.manual_seed(0)
    theirs = make_model(name, (3, side, side), 5)
    torch.manual_seed(0)
    ours = make_model(name, (3, side, side), 5, kernels="compiled")
    drawn = ours.state_dict()
    assert list(drawn) == list(theirs.state_dict())
    assert all(torch.equal(leaf, drawn[key]) for key, leaf in theirs.state_dict().items())
    x, y = torch.randn(4, 3, side, side), torch.arange(4)
    exact = theirs.double()
    expected = exact(x.double())
    outputs = ours(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-4, atol=1e-4)
    mine = torch.autograd.grad(functional.cross_entropy(outputs, y), list(ours.parameters()))
    wanted = torch.autograd.grad(functional.cross_entropy(expected, y), list(exact.parameters()))
    for gradient, right in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=1e-3, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_are_pytorchs(mode: str) -> None:
    draws = torch.Generator().manual_seed(2)
    x, r, of_y, ahead = (torch.randn(2, 16, 4, 4, generator=draws) for _ in range(4))
    norms = make_norms(16, 4, mode)

    def second(double: bool) -> list[Tensor]:
        kind = torch.float64 if double else torch.float32
        ours, other = (copy.deepcopy(norm).to(kind) for norm in norms)
        inputs = [t.to(kind).requires_grad_() for t in (x, r)]
        given = {"add": inputs, "add_norm": [*inputs, other]}.get(mode, inputs[:1])
        y = ours(*given)
        leaves = [*inputs[: min(2, len(given))], *ours.parameters()]
        slopes = torch.autograd.grad(y, leaves, of_y.to(kind), create_graph=True)
        bent = (slopes[0] * ahead.to(kind)).sum() + sum((s**2).sum() for s in slopes[1:])
        return [*slopes, *torch.autograd.grad(bent, leaves, materialize_grads=True)]

    for mine, wanted in zip(second(double=False), second(double=True), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-3, atol=1e-3)


@needs_compiler
def test_vmap_tracing_export_and_other_types_are_left_to_pytorch() -> None:
    ours, other = make_norms(16, 4, "add_norm")
    x, r = torch.randn(2, 2, 16, 6, 6)
    expected = ours(x, r, other)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours, self.other = ours, other

        def forward(self, x: Tensor, r: Tensor) -> Tensor:
            return self.ours(x, r, self.other)

    stacked = torch.vmap(lambda x, r: ours(x, r, other))(x[:, None], r[:, None])
    traced = torch.jit.trace(Whole(), (x, r))(x, r)
    exported = torch.export.export(Whole(), (x, r)).module()(x, r)
    doubled = copy.deepcopy(ours).double()(x.double(), r.double(), copy.deepcopy(other).double())
    for found in (stacked[:, 0], traced, exported, doubled.float()):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    flat = GroupNorm(4, 16)(torch.randn(3, 16))
    assert flat.shape == (3, 16)
    assert not _can_normalise(torch.ones(2, 3, 3, 3), None, [GroupNorm(3, 3)])


@needs_compiler
def test_without_a_compiler_results_have_the_same_type_and_value() -> None:
    ours, other = make_norms(16, 4, "add_norm")
    x, r = torch.randn(2, 2, 16, 6, 6).bfloat16()
    expected = ours(x, r, other)
    with no_compiler():
        found = ours(x, r, other)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@needs_compiler
def test_hooks_and_replaced_layers_are_called() -> None:
    seen: list[str] = []
    model = make_model("resnet8_gn", (3, 16, 16), 5, kernels="compiled")
    model.body[4].shortcut[1].register_forward_hook(lambda *_: seen.append("shortcut"))
    model.body[3].norm2.register_forward_hook(lambda *_: seen.append("norm"))
    model.body[5].shortcut = nn.Sequential(nn.Conv2d(32, 64, 1, stride=2))
    theirs = make_model("resnet8_gn", (3, 16, 16), 5)
    theirs.body[5].shortcut = nn.Sequential(nn.Conv2d(32, 64, 1, stride=2))
    theirs.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-4, atol=1e-4)
    assert seen == ["norm", "shortcut"]


def test_a_residual_without_relu_is_refused() -> None:
    x = torch.ones(1, 16, 2, 2)
    with pytest.raises(QuiverError, match="relu=False"):
        qv.compiled.GroupNorm(4, 16, relu=False)(x, x)


def own_model() -> nn.Module:
    """One's own model of compiled layers."""
    layers = (nn.Conv2d(1, 16, 3, padding=1), qv.compiled.GroupNorm(4, 16))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.add_module("head", nn.Linear(16, 5))
    return model


def run(model: Any = None, **options: Any) -> qv.Run:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 1, 12, 12, generator=draws), torch.arange(8) % 5
    data = qv.FederatedData.from_arrays(train=[(x, y)] * 2, test=[(x, y)] * 2)
    factory = model or (lambda: make_model("resnet8_gn", (1, 12, 12), 5, kernels="compiled"))
    graph, training = qv.isolated(2), qv.Training(lr=0.1)
    given = {"method": qv.Local(), "topology": graph, "training": training, "rounds": 1}
    return qv.simulate(qv.Task(factory), data, **{**given, **options})


def carried_out(run: qv.Run) -> dict[str, Any]:
    found: dict[str, Any] = run.summary["carried_out"]
    return found


@needs_compiler
def test_settings_that_pytorch_would_compute_are_refused_and_bf16_is_not() -> None:
    for settings in ({"dtype": torch.float64}, {"executor": "vectorized"}, {"executor": "measure"}):
        with pytest.raises(QuiverError, match=r'kernels = "compiled"'):
            run(**settings)
    fine, rough = (run(precision=name).history for name in ("float32", "bf16"))
    losses = [float(rows.loss.mean()) for rows in (fine, rough)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.2)


@needs_compiler
def test_layers_of_ones_own_are_computed_however_the_run_is() -> None:
    expected = run(own_model)
    assert carried_out(expected)["executor"] == "sequential"
    together = run(own_model, executor="vectorized")
    for one, other in zip(
        expected.personal(0).parameters(), together.personal(0).parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with no_compiler(), pytest.warns(QuiverWarning, match="slower"):
        run(own_model)


@needs_compiler
def test_images_lie_with_channels_last_where_the_norm_is_compiled() -> None:
    task = qv.Task(lambda: make_model("resnet8_gn", (3, 16, 16), 5, kernels="compiled"))
    layouts = [choose_executor("auto", task, torch.device("cpu")).image_format]
    with no_compiler():
        layouts.append(choose_executor("auto", task, torch.device("cpu")).image_format)
    assert layouts == [torch.channels_last, torch.contiguous_format]
    chosen = run(layout="contiguous", precision="auto")
    assert carried_out(chosen)["layout"] == "contiguous"
    assert carried_out(chosen)["precision"] in ("float32", "bf16")

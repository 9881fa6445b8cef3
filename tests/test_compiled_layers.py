"""The compiled convolutions are PyTorch's, up to rounding, wherever they are used at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quiverfl as qv
import quiverfl.support.compiler as library
from compilers import environment, mutated, no_compiler, run_sanitized
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.models import compiled as compiled_layers
from quiverfl.models.networks import TwoConvolutions, cnn_small, lenet5
from quiverfl.support.compiler import NotCompiled, load_library, why_not_compiled

SOURCE = compiled_layers.SOURCE
needs_compiler = pytest.mark.skipif(
    why_not_compiled(*SOURCE) is not None, reason=str(why_not_compiled(*SOURCE))
)

SHAPES = [
    # image, channels, padding, samples: rows that pooling drops, one sample, one more than a vector
    ((3, 32, 32), (6, 16), 0, 128),
    ((1, 28, 28), (6, 16), 2, 17),
    ((2, 17, 19), (5, 3), 0, 1),
    ((3, 16, 20), (7, 9), 2, 33),
    ((1, 12, 12), (4,), 0, 16),
]


def pair(
    image: tuple[int, ...], channels: tuple[int, ...], padding: int, seed: int = 0
) -> tuple[nn.Module, nn.Module]:
    """The same model computed by PyTorch and by us."""
    torch_own = cnn_small(image, 5, channels, 11, padding)
    ours = cnn_small(image, 5, channels, 11, padding, kernels="compiled")
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one, other in zip(torch_own.parameters(), ours.parameters(), strict=True):
            other.copy_(one.copy_(torch.randn(one.shape, generator=draws) * 0.2))
    return torch_own, ours


def samples(image: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(count, *image, generator=draws), torch.arange(count) % 5


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    loss = functional.cross_entropy(model(x), y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


@needs_compiler
@pytest.mark.parametrize(("image", "channels", "padding", "count"), SHAPES)
def test_outputs_and_gradients_are_pytorchs(
    image: tuple[int, ...], channels: tuple[int, ...], padding: int, count: int
) -> None:
    """In float64: PyTorch's own float32 sums err by as much, differently on each processor."""
    torchs, ours = pair(image, channels, padding)
    exact = torchs.double()
    x, y = samples(image, count)
    for layout in (torch.contiguous_format, torch.channels_last):
        inputs = x.contiguous(memory_format=layout)
        outputs = ours(inputs).double()
        torch.testing.assert_close(outputs, exact(inputs.double()), rtol=1e-5, atol=1e-5)
        for gradient, expected in zip(
            gradients(ours, inputs, y), gradients(exact, inputs.double(), y), strict=True
        ):
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


def bytes_of(image: tuple[int, ...], count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images of bytes, factors for each place of a line, and the floats that they are."""
    draws = torch.Generator().manual_seed(2)
    raw = torch.randint(0, 256, (count, *image), dtype=torch.uint8, generator=draws)
    scale, shift = torch.rand(2, image[0], generator=draws) * torch.tensor([[0.02], [-3.0]])
    # As data/augmentation.py, with two roundings.
    floats = raw.to(torch.float32) * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
    return raw, scale.repeat(image[2]), shift.repeat(image[2]), floats


@needs_compiler
@pytest.mark.parametrize(("image", "channels", "padding", "count"), SHAPES)
def test_bytes_are_bit_for_bit_their_floats(
    image: tuple[int, ...],
    channels: tuple[int, ...],
    padding: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, ours = pair(image, channels, padding)
    assert isinstance(ours, TwoConvolutions)
    assert ours.likes_bytes
    raw, scale, shift, floats = bytes_of(image, count)
    y = torch.arange(count) % 5
    expected = ours(floats), gradients(ours, floats, y)
    ours.read_bytes(scale, shift)
    monkeypatch.setattr(nn.Conv2d, "forward", None)  # PyTorch's is not taken
    for layout in (torch.contiguous_format, torch.channels_last):
        seen = raw.contiguous(memory_format=layout)
        assert torch.equal(ours(seen), expected[0])
        for mine, theirs in zip(gradients(ours, seen, y), expected[1], strict=True):
            assert torch.equal(mine, theirs)


@needs_compiler
def test_bytes_are_pytorchs_where_it_computes() -> None:
    """A hook, a pass for several clients at once, a model that likes no bytes and is given them."""
    theirs, ours = pair((3, 16, 20), (4, 4), 2)
    raw, scale, shift, floats = bytes_of((3, 16, 20), 7)
    for model in (theirs, ours):
        assert isinstance(model, TwoConvolutions)
        model.read_bytes(scale, shift)
    assert isinstance(theirs, TwoConvolutions)
    assert not theirs.likes_bytes
    assert torch.equal(theirs(raw), theirs(floats))
    torch.testing.assert_close(torch.vmap(ours)(raw[None])[0], ours(floats), rtol=1e-5, atol=1e-5)
    assert isinstance(ours, TwoConvolutions)
    ours.body[0].register_forward_hook(lambda *_: None)
    assert not ours.likes_bytes
    assert torch.equal(ours(raw), theirs(floats))


def test_a_model_with_a_way_of_its_own_is_not_given_bytes() -> None:
    """A hook that doubles what comes in would double bytes, which end at 255."""

    class Own(TwoConvolutions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    given = ((3, 16, 20), 5, (4, 4), (6,), (2, 2), "compiled")
    assert TwoConvolutions(*given).likes_bytes
    assert not Own(*given).likes_bytes
    hooked, patched = TwoConvolutions(*given), TwoConvolutions(*given)
    hooked.register_forward_pre_hook(lambda _, given: (2 * given[0],))
    assert not hooked.likes_bytes
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert not patched.likes_bytes


@needs_compiler
def test_bytes_without_factors_or_with_those_of_other_lines_are_left_to_pytorch() -> None:
    conv = nn.Conv2d(2, 3, 5)
    raw, factors = torch.zeros(4, 2, 12, 10, dtype=torch.uint8), (torch.ones(20), torch.zeros(20))
    assert compiled_layers.can_compute(raw, [conv], factors)
    assert not compiled_layers.can_compute(raw, [conv])
    assert not compiled_layers.can_compute(raw.transpose(2, 3), [conv], factors)
    assert not compiled_layers.can_compute(raw[0], [conv], factors)
    assert not compiled_layers.can_compute(raw, [conv], (torch.ones(20).double(), torch.zeros(20)))


@needs_compiler
def test_the_compiled_pass_is_really_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair((3, 32, 32), (6, 16), 0)

    def refused(*_: object) -> Tensor:
        raise AssertionError("PyTorch's convolution")

    monkeypatch.setattr(nn.Conv2d, "forward", refused)
    ours(samples((3, 32, 32), 4)[0])


@needs_compiler
def test_of_equal_pixels_the_first_has_the_gradient() -> None:
    """Without weights a channel has its bias everywhere: any pixel could be the largest."""
    expected, ours = pair((1, 12, 12), (4,), 0)
    for model in (expected, ours):
        weight, bias = list(model.parameters())[:2]
        with torch.no_grad():
            weight.zero_()
            bias.fill_(1.0)
    x, y = samples((1, 12, 12), 20)
    for mine, theirs in zip(gradients(ours, x, y), gradients(expected, x, y), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("column", [0, -1])
def test_what_is_no_number_wins_wherever_it_is_in_a_pool(row: int, column: int) -> None:
    """A corner is seen by one pixel of the result, which is another one of its pool each time."""
    conv = nn.Conv2d(1, 2, 5)
    x = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    x[1, 0, row, column] = torch.nan
    expected = functional.relu(functional.max_pool2d(conv(x), 2)).flatten(1)
    found = compiled_layers.features(x, [conv])
    assert int(expected.isnan().sum()) == 2  # of two channels
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("channels", [1, 4, 200])
def test_images_with_other_channels_are_refused_by_pytorch(channels: int) -> None:
    _, ours = pair((3, 16, 20), (7, 9), 0)
    with pytest.raises(RuntimeError, match="channels"):
        ours(torch.zeros(2, channels, 16, 20))


@needs_compiler
@pytest.mark.parametrize("padding", [-1, (1, 2), "same", "valid"])
def test_other_paddings_are_left_to_pytorch(padding: Any) -> None:
    """Which refuses to crop: a gradient would be read from behind its end."""
    x = torch.ones(2, 1, 12, 12)
    assert compiled_layers.can_compute(x, [nn.Conv2d(1, 2, 5, padding=1)])
    assert not compiled_layers.can_compute(x, [nn.Conv2d(1, 2, 5, padding=padding)])


@needs_compiler
@pytest.mark.parametrize("side", [4, 5])
def test_images_smaller_than_a_kernel_and_a_pool_are_left_to_pytorch(side: int) -> None:
    """A second layer's padding would make zeros, and with them an answer, of nothing."""
    layers = [nn.Conv2d(1, 2, 5), nn.Conv2d(2, 3, 5, padding=3)]
    assert compiled_layers.can_compute(torch.ones(2, 1, 6, 6), layers)
    assert not compiled_layers.can_compute(torch.ones(2, 1, 6, side), layers)


@needs_compiler
def test_a_model_that_was_changed_is_pytorchs() -> None:
    theirs, ours = pair((3, 16, 20), (4, 4), 2)
    x, _ = samples((3, 16, 20), 3)
    seen: list[torch.Size] = []
    for model in (theirs, ours):
        assert isinstance(model, TwoConvolutions)
        model.body[1] = nn.MaxPool2d(3, 2, 1)
    assert torch.equal(ours(x), theirs(x))
    _, hooked = pair((3, 16, 20), (4, 4), 2)
    assert isinstance(hooked, TwoConvolutions)
    for layer in (hooked.body, hooked.body[0]):
        layer.register_forward_hook(lambda _, given, found: seen.append(found.shape))
    hooked(x)
    assert len(seen) == 2


@needs_compiler
def test_a_traced_model_is_pytorchs() -> None:
    _, ours = pair((3, 16, 20), (7, 9), 0)
    x, _ = samples((3, 16, 20), 4)
    traced = torch.jit.trace(ours, x)
    torch.testing.assert_close(traced(x), ours(x), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_second_derivatives_are_refused() -> None:
    _, ours = pair((3, 16, 20), (7, 9), 0)
    x, y = samples((3, 16, 20), 4)
    loss = functional.cross_entropy(ours(x), y)
    slopes = torch.autograd.grad(loss, list(ours.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum((slope**2).sum() for slope in slopes).backward()  # type: ignore[union-attr]


@needs_compiler
def test_a_gradient_may_lie_in_any_order() -> None:
    """Of a sum it is one number for all; of a transposed result its rows are columns."""
    conv = nn.Conv2d(2, 3, 5)
    x = torch.rand(20, 2, 12, 14, generator=torch.Generator().manual_seed(0))
    factors = torch.rand(3 * 4 * 5, 20, generator=torch.Generator().manual_seed(1))
    theirs = functional.relu(functional.max_pool2d(conv(x), 2)).flatten(1)
    for last in (torch.sum, lambda found: (found.t() * factors).sum()):
        ours = last(compiled_layers.features(x, [conv]))
        found = torch.autograd.grad(ours, list(conv.parameters()))
        expected = torch.autograd.grad(last(theirs), list(conv.parameters()), retain_graph=True)
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_a_sample_does_not_depend_on_its_company() -> None:
    """Lanes do not mix, and nothing is read from behind the last sample."""
    _, ours = pair((3, 16, 20), (7, 9), 0)
    x, _ = samples((3, 16, 20), 40)
    assert isinstance(ours, TwoConvolutions)
    together = compiled_layers.features(x, ours._convolutions)
    for count in (1, 15, 16, 17, 39):
        alone = compiled_layers.features(x[:count], ours._convolutions)
        assert torch.equal(alone, together[:count])


@needs_compiler
def test_vmap_double_precision_and_gradients_of_images_are_left_to_pytorch() -> None:
    expected, ours = pair((3, 16, 20), (7, 9), 0)
    x, _ = samples((3, 16, 20), 6)
    stacked = torch.vmap(ours)(x.view(2, 3, 3, 16, 20))
    torch.testing.assert_close(stacked.flatten(0, 1), expected(x), rtol=1e-5, atol=1e-5)
    asked = x.clone().requires_grad_()
    ours(asked).sum().backward()
    assert asked.grad is not None
    assert ours.double()(x.double()).dtype == torch.float64


@needs_compiler
def test_a_model_of_compiled_layers_has_the_same_parameters() -> None:
    plain, ours = lenet5((3, 32, 32), 10), lenet5((3, 32, 32), 10, kernels="compiled")
    assert [*plain.state_dict()] == [*ours.state_dict()]


def run(**options: Any) -> qv.Run:
    image = (1, 12, 12)
    x, y = samples(image, 8)
    data = qv.FederatedData.from_arrays(train=[(x, y)] * 2, test=[(x, y)] * 2)
    task = qv.Task(lambda: cnn_small(image, 5, (4,), 11, kernels="compiled"))
    graph, training = qv.isolated(2), qv.Training(lr=0.1)
    return qv.simulate(
        task, data, method=qv.Local(), topology=graph, rounds=1, training=training, **options
    )


@needs_compiler
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.float64},
        {"precision": "bf16"},
        {"executor": "vectorized"},
        {"executor": "measure"},
    ],
    ids=str,
)
def test_where_pytorchs_would_be_computed_they_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(QuiverError, match=rf'{next(iter(settings))} = .*kernels = "compiled"'):
        run(**settings)
    run()


@needs_compiler
def test_with_dp_sgd_they_are_refused() -> None:
    privacy = qv.DPSGD(noise=1.0, clip=1.0, delta=1e-3)
    with pytest.raises(QuiverError, match=r'dp_sgd.*model\.kernels = "compiled"'):
        run(privacy=privacy)


def test_without_a_compiler_pytorch_trains_the_same_model_and_that_is_said() -> None:
    with no_compiler(), pytest.warns(QuiverWarning, match="no-such-compiler.*slower"):
        theirs = run()
    torch.testing.assert_close(theirs.parameters(0), run().parameters(0), rtol=1e-4, atol=1e-6)


def test_without_a_compiler_a_trained_model_can_still_be_used() -> None:
    expected, ours = pair((1, 12, 12), (4,), 0)
    x, _ = samples((1, 12, 12), 3)
    with no_compiler():
        assert torch.equal(ours(x), expected(x))


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(QuiverError, match='"torch" or "compiled"'):
        lenet5((3, 32, 32), 10, kernels="fast")  # type: ignore[arg-type]


@needs_compiler
def test_a_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls, compile = [], library._compile
    monkeypatch.setattr(library, "_compile", lambda *a: (calls.append(a), compile(*a)))
    for _ in range(2):
        with environment(XDG_CACHE_HOME=str(tmp_path)):
            load_library(*SOURCE)
    assert len(calls) == 1


@needs_compiler
def test_a_compiler_that_refuses_is_quoted(tmp_path: Path) -> None:
    refusal = pytest.raises(NotCompiled, match=r"could not compile conv_pool_relu\.c")
    with environment(XDG_CACHE_HOME=str(tmp_path)), refusal:
        load_library("conv_pool_relu", "-no-such-flag")
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    with environment(XDG_CACHE_HOME=str(tmp_path)):
        load_library(*SOURCE)
    (kept,) = tmp_path.rglob("*.so")
    kept.unlink()
    kept.touch()
    with environment(XDG_CACHE_HOME=str(tmp_path)):
        assert load_library(*SOURCE).lanes() in (8, 16)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [('gcc "x', "is no command"), ("README", "cannot be run"), ("absent", "no C compiler")],
)
def test_whatever_ails_the_compiler_is_a_reason(tmp_path: Path, compiler: str, reason: str) -> None:
    broken = tmp_path / "README"
    broken.write_text("not a program")
    broken.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with environment(XDG_CACHE_HOME=str(tmp_path), CC=compiler, PATH=path):
        assert reason in str(why_not_compiled(*SOURCE))


@needs_compiler
def test_without_a_home_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with environment(XDG_CACHE_HOME=""):
        assert "XDG_CACHE_HOME" in str(why_not_compiled(*SOURCE))


MUTANTS = {
    "no relu": ("M off = best <= 0;", "M off = best <= -1e9f;"),
    "what relu stopped passes its gradient": ("count += chosen[i] != OFF", "count++"),
    "a bias of the last block alone": ("of_bias[c] += sum_of", "of_bias[c] = sum_of"),
    "the pixel below for the one beside": (
        "s->inputs, line, line + s->inputs, 0}",
        "line, s->inputs, line + s->inputs, 0}",
    ),
    "rows of the kernel in another order": (
        "turned[c * kernel + k / K * kernel_line + k % K * inputs + input] =",
        "turned[c * kernel + (K - 1 - k / K) * kernel_line + k % K * inputs + input] =",
    ),
    "the sides are not left free": (
        "((y + m->side) * columns + m->side) * LANES",
        "y * columns * LANES",
    ),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_in_the_c_is_found(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_layers._load_compiled.cache_clear()
    with (
        mutated(monkeypatch, tmp_path, "conv_pool_relu.c", *MUTANTS[mutant]),
        pytest.raises(AssertionError),
    ):
        test_outputs_and_gradients_are_pytorchs((3, 16, 20), (7, 9), 2, 33)
    compiled_layers._load_compiled.cache_clear()


SANITIZED = r"""
#include <stdio.h>
#include <stdlib.h>

static float draw(void) { return (float)rand() / RAND_MAX - 0.5f; }
static float *floats(int64_t count) {
  float *found = malloc(count * sizeof *found);
  for (int64_t i = 0; i < count; i++) found[i] = draw();
  return found;
}

static int64_t inputs, outputs, height, width, side, samples, high, wide, blocks;

static void back(const float *in, const void *numbers, const float *scale, const float *shift,
                 const float *weights, const uint8_t *chosen, float *of_in) {
  float *gradient = floats(samples * outputs * high * wide), *of_bias = floats(outputs);
  float *of_weights = floats(outputs * inputs * K * K);
  float *work = floats(workspace(inputs, outputs, height, width));
  conv_pool_relu_backward(in, numbers, scale, shift, weights, gradient, chosen, of_weights, of_bias,
                          of_in, work, inputs, outputs, height, width, side, samples,
                          outputs * high * wide, high * wide, wide, 1);
  free(gradient), free(of_bias), free(of_weights), free(work);
}

int main(void) {
  int64_t shapes[][6] = {{3, 6, 32, 32, 0, 20}, {1, 4, 12, 12, 0, 16}, {2, 5, 17, 19, 0, 1},
                         {3, 7, 20, 24, 2, 33}, {40, 3, 6, 7, 0, 5},   {1, 1, 9, 9, 2, 17}};
  for (int i = 0; i < 6; i++) {
    inputs = shapes[i][0], outputs = shapes[i][1], height = shapes[i][2], width = shapes[i][3];
    side = shapes[i][4], samples = shapes[i][5], blocks = (samples + LANES - 1) / LANES;
    high = (height - K + 1) / 2, wide = (width - K + 1) / 2;
    int64_t line = (width - 2 * side) * inputs, pixels = samples * (height - 2 * side) * line;
    int64_t results = blocks * outputs * high * wide * LANES;
    float *weights = floats(outputs * inputs * K * K), *bias = floats(outputs);
    float *images = floats(pixels), *scale = floats(line), *shift = floats(line);
    uint8_t *bytes = malloc(pixels), *chosen = malloc(results);
    for (int64_t j = 0; j < pixels; j++) bytes[j] = (uint8_t)rand();
    float *out = floats(results), *work = floats(first_workspace(inputs, height, width));
    first_conv_pool_relu(images, NULL, NULL, weights, bias, out, chosen, work, inputs, outputs,
                         height, width, side, samples);
    back(NULL, images, NULL, NULL, weights, chosen, NULL);
    first_conv_pool_relu(bytes, scale, shift, weights, bias, out, chosen, work, inputs, outputs,
                         height, width, side, samples);
    back(NULL, bytes, scale, shift, weights, chosen, NULL);
    float *in = floats(blocks * inputs * height * width * LANES);
    float *of_in = floats(samples * image_room(inputs, height, width));
    conv_pool_relu(in, weights, bias, out, chosen, inputs, outputs, height, width, blocks);
    side = 0;
    back(in, NULL, NULL, NULL, weights, chosen, of_in);
    free(weights), free(bias), free(images), free(scale), free(shift), free(bytes), free(chosen);
    free(out), free(work), free(in), free(of_in);
  }
  printf("finished\n");
  return 0;
}
"""


@needs_compiler
@pytest.mark.slow
def test_nothing_is_read_or_written_outside_of_what_is_given(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "conv_pool_relu.c", "-ffp-contract=fast", SANITIZED)

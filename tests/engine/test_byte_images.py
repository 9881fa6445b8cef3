"""Byte images taken in one go are bit for bit what is prepared and augmented step by step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from compilers import mutated, run_sanitized
from quiverfl.data.augmentation import AUGMENTATIONS, CropFlip, Normalize
from quiverfl.data.federated import FederatedData
from quiverfl.engine.local.byte_images import SOURCE, ByteImages
from quiverfl.engine.local.examples import Examples
from quiverfl.models.networks import TwoConvolutions, cnn_small
from quiverfl.seeds import key_hashes
from quiverfl.support.compiler import why_not_compiled

NORMALIZE = Normalize((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))


def images(augment: CropFlip | None) -> FederatedData:
    draw = np.random.default_rng(0)
    pairs = [
        (draw.integers(0, 256, (20, 3, 9, 7), dtype=np.uint8), draw.integers(0, 10, 20))
        for _ in range(3)
    ]
    if augment is not None:
        augment = replace(augment, fill=NORMALIZE.black)
    return FederatedData.from_arrays(pairs, pairs, classes=10, prepare=NORMALIZE, augment=augment)


@pytest.fixture(params=[True, False], ids=["compiled", "in passes"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of taking images: in one compiled pass, and where nothing can be compiled."""
    if not request.param:
        monkeypatch.setattr(
            "quiverfl.engine.local.byte_images.why_not_compiled", lambda *_: "none here"
        )
    elif why_not_compiled(*SOURCE) is not None:
        pytest.skip("no C compiler")


@pytest.mark.parametrize("name", list(AUGMENTATIONS))
@pytest.mark.parametrize("augmented", [True, False])
@pytest.mark.usefixtures("compiled")
def test_equal_to_the_last_bit(name: str, augmented: bool) -> None:
    data = images(AUGMENTATIONS[name])
    cpu = torch.device("cpu")
    plain = Examples(data.train, data, torch.float32, cpu)
    last = Examples(data.train, data, torch.float32, cpu).laid_out(torch.channels_last)
    rows = np.array([2, 0])
    samples = np.random.default_rng(1).integers(0, 20, (2, 40))
    keys = key_hashes(5, "augment", np.arange(80).reshape(2, 40)) if augmented else None
    x, y = plain.gather(rows, samples, keys)
    fast, labels = last.gather(rows, samples, keys)
    assert torch.equal(fast, x)
    assert torch.equal(labels, y)
    assert fast[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", list(AUGMENTATIONS))
@pytest.mark.usefixtures("compiled")
def test_bytes_are_those_whose_floats_they_would_be(name: str) -> None:
    data = images(AUGMENTATIONS[name])
    cpu, last = torch.device("cpu"), torch.channels_last
    floats = Examples(data.train, data, torch.float32, cpu).laid_out(last)
    bytes_ = Examples(data.train, data, torch.float32, cpu).laid_out(last, as_bytes=True)
    rows, samples = np.array([2, 0]), np.random.default_rng(1).integers(0, 20, (2, 40))
    keys = key_hashes(5, "augment", np.arange(80).reshape(2, 40))
    raw, _ = bytes_.gather(rows, samples, keys)
    assert isinstance(raw, torch.Tensor)
    assert raw.dtype == torch.uint8
    assert floats.byte_factors is None
    assert bytes_.byte_factors is not None
    scale, shift = (factor[:3].view(-1, 1, 1) for factor in bytes_.byte_factors)
    assert torch.equal(raw.to(torch.float32) * scale + shift, floats.gather(rows, samples, keys)[0])


@pytest.mark.skipif(why_not_compiled(*SOURCE) is not None, reason=str(why_not_compiled(*SOURCE)))
def test_a_run_on_bytes_is_the_run_on_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, teachers, fine-tuning and evaluation read bytes where the model likes them."""
    draw = np.random.default_rng(0)
    pairs = [
        (draw.integers(0, 256, (20, 3, 16, 16), dtype=np.uint8), draw.integers(0, 4, 20))
        for _ in range(3)
    ]
    data = FederatedData.from_arrays(
        pairs,
        pairs,
        classes=4,
        prepare=NORMALIZE,
        augment=replace(CropFlip(), fill=NORMALIZE.black),
    )
    kinds: list[torch.dtype] = []
    forward = TwoConvolutions.forward

    def noted(model: TwoConvolutions, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:  # and not what stands for it while the model is traced
            kinds.append(x.dtype)
        return forward(model, x)

    monkeypatch.setattr(TwoConvolutions, "forward", noted)

    def run(method: qv.Method[Any], graph: qv.Topology) -> list[torch.Tensor]:
        def model() -> torch.nn.Module:
            return cnn_small((3, 16, 16), 4, (3, 4), 6, 2, kernels="compiled")

        training = qv.Training(lr=0.1, batch_size=8)
        task = qv.Task(model, personal=("head",))
        found = qv.simulate(
            task, data, method=method, topology=graph, training=training, rounds=2, seed=3
        )
        losses = torch.tensor(found.history["loss"].to_numpy())
        return [
            losses,
            *(leaf for client in range(3) for leaf in found.parameters(client).values()),
        ]

    for method, graph in (
        (qv.DFedPGP(), qv.random_push(3, neighbors=1)),
        (qv.MOON(), qv.star(3, 2)),
        (qv.FedBABU(), qv.star(3, 2)),
    ):
        kinds.clear()
        on_bytes = run(method, graph)
        assert set(kinds[-20:]) == {torch.uint8}
        with monkeypatch.context() as patch:
            patch.setattr(TwoConvolutions, "likes_bytes", False)
            kinds.clear()
            on_floats = run(method, graph)
            assert torch.uint8 not in kinds
        assert all(map(torch.equal, on_bytes, on_floats))


def test_only_where_the_numbers_are_the_same() -> None:
    data = images(CropFlip())
    x, last = data.train.x, torch.channels_last
    assert ByteImages.of(x, data, torch.float32, last) is not None
    assert ByteImages.of(x, data, torch.float64, last) is None
    assert ByteImages.of(x, data, torch.float32, torch.contiguous_format) is None
    assert ByteImages.of(x.float(), data, torch.float32, last) is None
    one = replace(data, prepare=Normalize((0.5,), (0.2,)))  # for all three channels
    assert ByteImages.of(x, one, torch.float32, last) is None
    grey = replace(data, augment=CropFlip(fill=(0.0, 0.0, 0.0)))
    assert ByteImages.of(x, grey, torch.float32, last) is None
    own = replace(data, augment=lambda x, keys: x)
    assert ByteImages.of(x, own, torch.float32, last) is None
    assert ByteImages.of(x, replace(data, prepare=torch.Tensor.float), torch.float32, last) is None


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("count", [1, 5])
def test_images_lie_in_memory_as_they_do_when_they_are_read_from_disk(
    channels: int, count: int
) -> None:
    """Convolutions choose their way, and so their last bits, by strides, of a single one, too."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (3, 8, channels, 9, 7), dtype=np.uint8)
    normalize = Normalize((0.5,) * channels, (0.25,) * channels)
    data = FederatedData.from_arrays(
        [(part, np.zeros(8, dtype=np.int64)) for part in x],
        [(part, np.zeros(8, dtype=np.int64)) for part in x],
        classes=2,
        prepare=normalize,
        augment=CropFlip(fill=normalize.black),
    )
    cpu, last = torch.device("cpu"), torch.channels_last
    left = replace(data.train, rows=np.arange(24))
    rows, samples = np.array([1]), np.arange(count)[None]
    keys = key_hashes(5, "augment", np.arange(count)[None])
    here, there = (
        Examples(split, data, torch.float32, cpu).laid_out(last).gather(rows, samples, keys)[0]
        for split in (data.train, left)
    )
    assert isinstance(here, torch.Tensor)
    assert isinstance(there, torch.Tensor)
    assert torch.equal(here, there)
    assert here.stride() == there.stride()


def test_keys_that_do_not_lie_together_are_copied_for_as_long_as_they_are_read() -> None:
    data = images(CropFlip())
    found = ByteImages.of(data.train.x, data, torch.float32, torch.channels_last)
    assert found is not None
    wide = key_hashes(5, "augment", np.arange(2 * 3 * 500).reshape(2, 3, 500))
    places = torch.from_numpy(np.random.default_rng(0).integers(0, 60, (2, 500)))
    apart, together = wide[:, 1], wide[:, 1].copy()
    assert not apart.flags.c_contiguous
    assert torch.equal(found.take(places, apart), found.take(places, together))


def test_an_image_that_is_not_there_is_refused() -> None:
    data = images(CropFlip())
    found = ByteImages.of(data.train.x, data, torch.float32, torch.channels_last)
    assert found is not None
    for place in (-1000, 60):
        with pytest.raises(IndexError):
            found.take(torch.tensor([[0, place]]), None)


MUTANTS = {
    "two pixels change places": ("{13, 14, 15, 10, 11, 12,", "{10, 11, 12, 13, 14, 15,"),
    "down for right": ("c->keys[i] >> FIELD) : c->side", "c->keys[i]) : c->side"),
    "one place fewer": ("(uint64_t)(2 * c->side + 1)", "(uint64_t)(2 * c->side)"),
    "another bit for the flip": ("c->keys[i] >> 63", "c->keys[i] >> 62 & 1"),
    "the line before": ("line += broad * channels, out", "line += (broad - 1) * channels, out"),
}


@pytest.mark.skipif(why_not_compiled(*SOURCE) is not None, reason=str(why_not_compiled(*SOURCE)))
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_in_the_c_is_found(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the compiled pass against floats taken step by step."""
    with mutated(monkeypatch, tmp_path, "byte_images.c", *MUTANTS[mutant]):
        data, cpu, last = images(CropFlip()), torch.device("cpu"), torch.channels_last
        plain = Examples(data.train, data, torch.float32, cpu)
        bytes_ = Examples(data.train, data, torch.float32, cpu).laid_out(last, as_bytes=True)
        rows, samples = np.array([2, 0]), np.random.default_rng(1).integers(0, 20, (2, 40))
        keys = key_hashes(5, "augment", np.arange(80).reshape(2, 40))
        raw, _ = bytes_.gather(rows, samples, keys)
        assert isinstance(raw, torch.Tensor)
        assert bytes_.byte_factors is not None
        scale, shift = (factor[:3].view(-1, 1, 1) for factor in bytes_.byte_factors)
        floats = raw.to(torch.float32) * scale + shift
        assert not torch.equal(floats, plain.gather(rows, samples, keys)[0])


SANITIZED = r"""
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  int64_t tried = 0;
  for (int64_t channels = 1; channels <= 4; channels++)
    for (int64_t side = 0; side <= 4; side += 2)
      for (int64_t width = 1; width <= 33; width += 4) {
        int64_t tall = 5 + 2 * side, broad = width + 2 * side, count = 40, number = 3;
        int64_t size = 5 * width * channels;
        uint8_t *images = malloc(number * tall * broad * channels), *bytes = malloc(count * size);
        float *floats = malloc(count * size * sizeof *floats);
        float *scale = calloc(width * channels, sizeof *scale);
        float *shift = calloc(width * channels, sizeof *shift);
        int64_t *places = malloc(count * sizeof *places);
        uint64_t *keys = malloc(count * sizeof *keys);
        for (int64_t i = 0; i < number * tall * broad * channels; i++) images[i] = (uint8_t)rand();
        for (int64_t i = 0; i < count; i++) {
          places[i] = i % number;
          keys[i] = i == 0 ? ~0ull : (uint64_t)rand() << 33 ^ (uint64_t)rand();
        }
#define GIVEN_(keys) images, places, keys, count, number, tall, broad, channels, side, 1
        tried += cuts(bytes, GIVEN_(keys)) + crops(floats, scale, shift, GIVEN_(keys));
        tried += cuts(bytes, GIVEN_(NULL)) + crops(floats, scale, shift, GIVEN_(NULL));
        places[7] = number;
        if (cuts(bytes, GIVEN_(keys)) || crops(floats, scale, shift, GIVEN_(keys))) return 2;
        places[7] = -1;
        if (cuts(bytes, GIVEN_(keys)) || crops(floats, scale, shift, GIVEN_(keys))) return 2;
        free(images), free(bytes), free(floats), free(scale), free(shift), free(places), free(keys);
      }
  printf("finished\n");
  return tried == 4 * 4 * 3 * 9 ? 0 : 1;
}
"""


@pytest.mark.skipif(why_not_compiled(*SOURCE) is not None, reason=str(why_not_compiled(*SOURCE)))
@pytest.mark.slow
def test_nothing_is_read_or_written_outside_of_what_is_given(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "byte_images.c", SOURCE[1], SANITIZED)

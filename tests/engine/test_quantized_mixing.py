"""The compiled pass of quantising and mixing finds the bits of PyTorch's passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import quiverfl as qv
from compilers import mutated, no_compiler, run_sanitized
from quiverfl.engine.exchange import quantized as quantized_mixing
from quiverfl.engine.exchange.compression import CompressionStage, subtract_identity
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.exchange.matrix import MatrixProduct
from quiverfl.engine.exchange.quantized import SOURCE, ColumnCode, mix_coded
from quiverfl.support.compiler import why_not_compiled
from quiverfl.topologies import participating
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import count_uploads
from quiverfl.transforms.compression import SLACK
from quiverfl.transforms.noise import BLOCK, ROWS, Dither

needs_compiler = pytest.mark.skipif(
    why_not_compiled(*SOURCE) is not None, reason=str(why_not_compiled(*SOURCE))
)

CODERS = [
    qv.Quantize(bits=8),
    qv.Quantize(bits=4),
    qv.Quantize(bits=2),
    qv.Quantize(bits=8, rounding="nearest"),
    qv.Quantize(bits=2, rounding="nearest"),
]
SHAPES = [
    # clients, numbers: whole blocks, a number, one less and one more than a block, than a vector
    (9, 5 * BLOCK),
    (60, 1),
    (60, BLOCK - 1),
    (60, BLOCK + 1),
    (60, 2 * BLOCK + 15),
    (60, 2 * BLOCK + 17),
    (300, 40 * BLOCK + 50),
    (ROWS + 300, 3 * BLOCK + 8),
    (2 * ROWS + 1, BLOCK + 40),
]
NEVER = [float("inf"), -float("inf"), float("nan")]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def away(clients: int, round: int = 0) -> Graph:
    """A push graph in which some neither send nor receive."""
    return participating(qv.random_push(clients, max(1, clients // 30), seed=1), 0.7, seed=2)(round)


def numbers_of(clients: int, numbers: int, seed: int = 0) -> Tensor:
    """Of many sizes, with blocks of zeros, of negative zeros and of hardly anything."""
    random = np.random.default_rng(seed)
    sizes = 10.0 ** random.integers(-12, 12, size=(clients, -(-numbers // BLOCK)))
    sizes[random.random(sizes.shape) < 0.05] = 0.0
    for size in (1e-31, 1e-36, 1e-42):  # steps are not below 1e-30
        sizes[random.random(sizes.shape) < 0.05] = size
    sizes[random.random(sizes.shape) < 0.02] = 1e38  # times at most 3.3: near the end of float32
    values = random.normal(size=(clients, numbers)).clip(-3.3, 3.3)
    found = torch.from_numpy(values * np.repeat(sizes, BLOCK, axis=1)[:, :numbers]).float()
    assert bool((found.isfinite()).all())
    return found


def coded(graph: Graph, coder: qv.Quantize, numbers: int, ids: Tensor | None = None) -> ColumnCode:
    clients = np.arange(graph.clients) if ids is None else ids.numpy()
    silent = np.flatnonzero(count_uploads(graph) == 0)
    return ColumnCode(coder, Dither(5, 3).for_leaf("u", clients, numbers), silent)


def assertsame_bits(one: Tensor, other: Tensor) -> None:
    """Zeros' signs, too; what is not a number has any bits."""
    missing = one.isnan()
    assert torch.equal(missing, other.isnan())
    bits, theirs = (
        x.masked_fill(missing, 0.0).contiguous().view(torch.int32) for x in (one, other)
    )
    assert torch.equal(bits, theirs)


def assert_alike(graph: Graph, leaf: Tensor, code: ColumnCode) -> Tensor:
    moves = subtract_identity(graph)
    expected = quantized_mixing._by_torch(moves, leaf.clone(), code)
    assertsame_bits(quantized_mixing._by_c(moves, leaf, code), expected)
    return expected


@needs_compiler
@pytest.mark.parametrize("coder", CODERS, ids=str)
@pytest.mark.parametrize(("clients", "numbers"), SHAPES)
def test_the_compiled_pass_finds_pytorchs_bits(
    coder: qv.Quantize, clients: int, numbers: int
) -> None:
    graph = away(clients)
    code, leaf = coded(graph, coder, numbers), numbers_of(clients, numbers)
    before = leaf.clone()
    assert len(code.silent)
    assert (np.diff(subtract_identity(graph).matrix.indptr) == 0).any()
    mixed = assert_alike(graph, leaf, code)
    assert not torch.equal(mixed, before)


@needs_compiler
@pytest.mark.parametrize("bad", NEVER)
@pytest.mark.parametrize("coder", CODERS, ids=str)
def test_what_is_not_finite_spreads_as_in_pytorch(coder: qv.Quantize, bad: float) -> None:
    graph, numbers = away(60), 2 * BLOCK + 9
    leaf = numbers_of(60, numbers)
    senders = np.flatnonzero(count_uploads(graph))
    for client, place in zip(senders, (5, BLOCK + 1, 2 * BLOCK + 2), strict=False):
        leaf[client, place] = bad
    leaf[senders[-1], 0] = torch.finfo(torch.float32).max
    leaf[senders[-2], BLOCK] = 3.37e38  # finite, but not as a step of two bits
    found = assert_alike(graph, leaf, coded(graph, coder, numbers))
    assert bool(found.isfinite().any())
    assert not bool(found.isfinite().all())


@needs_compiler
@pytest.mark.parametrize("coder", CODERS, ids=str)
def test_whoever_has_no_receiver_keeps_all(coder: qv.Quantize) -> None:
    """Also where it has an own weight below 1, as whoever pulls has."""
    graph, numbers = qv.random_pull(60, 2, seed=1)(0), BLOCK + 5
    code = coded(graph, coder, numbers)
    assert (subtract_identity(graph).matrix.diagonal()[code.silent] < 0).any()
    assert_alike(graph, numbers_of(60, numbers), code)


def edges(code: ColumnCode, leaf: Tensor) -> Tensor:
    """Numbers that a little less or another rounding would give another code, by blocks.

    Drawn: x / step is rounded up, and with its random number is half a bit below 1, so rounded to
    1; together in one operation they would be a little less. Else: halves, rounded to even.
    """
    split = leaf.view(len(leaf), -1, BLOCK)
    assert isinstance(code.compression, qv.Quantize)
    scales = code.compression.scales(split)
    if code.compression.is_random:
        wanted = 1 - 2.0**-25 - code.dither.take_blocks(0, split.shape[1]).double()
    else:
        wanted = torch.arange(BLOCK).double().expand(split.shape) % code.compression.levels + 0.5
    found = torch.zeros_like(split)
    for off in (-1, 0, 1):
        near = (wanted * scales).float()
        near = (near.view(torch.int32) + off).view(torch.float32)
        exact = near.double() * scales.reciprocal().double()
        below = (exact < wanted) | (not code.compression.is_random)
        found = torch.where((exact.float().double() == wanted) & below, near, found)
    assert (found != 0).sum() > 100
    return found


@needs_compiler
@pytest.mark.parametrize("coder", CODERS, ids=str)
def test_numbers_at_the_edge_of_rounding(coder: qv.Quantize) -> None:
    graph, numbers = away(300), 4 * BLOCK
    code = coded(graph, coder, numbers)
    leaf = torch.zeros(300, numbers)
    leaf[:, ::BLOCK] = torch.rand(300, 4, generator=torch.Generator().manual_seed(0)) + 1
    found = edges(code, leaf)
    leaf.view(found.shape)[..., 1:] = found[..., 1:]
    assert_alike(graph, leaf, code)


@needs_compiler
@pytest.mark.parametrize("coder", CODERS, ids=str)
def test_steps_half_way_between_two_are_rounded_to_even(coder: qv.Quantize) -> None:
    graph = away(300)
    halves = (torch.arange(0x3F80, 0x3F80 + 128) * 2**16 + 2**15).int().view(torch.float32)
    largest = (halves.double() * coder.levels / SLACK).float()
    close = torch.cat([(largest.view(torch.int32) + off).view(torch.float32) for off in (-1, 0, 1)])
    exact = close[(close * (SLACK / coder.levels)).view(torch.int32) % 2**16 == 2**15]
    assert len(exact) > 30
    leaf = torch.randn(300, BLOCK, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    leaf[:, 0] = exact.repeat(300)[:300]
    assert_alike(graph, leaf, coded(graph, coder, BLOCK))


@needs_compiler
def test_clients_may_have_any_numbers() -> None:
    """As where some of several groups of a thousand are here, in no order."""
    graph, numbers = away(60), 3 * BLOCK + 1
    ids = torch.from_numpy(np.random.default_rng(0).permutation(4 * ROWS)[:60])
    code = coded(graph, CODERS[0], numbers, ids)
    assert code.dither.turns.shape[1] == 4
    assert_alike(graph, numbers_of(60, numbers), code)


@needs_compiler
@pytest.mark.parametrize("count", [2, 3])
def test_several_workers_find_the_same(
    monkeypatch: pytest.MonkeyPatch, threads: None, count: int
) -> None:
    graph, numbers = away(60), 11 * BLOCK + 30
    alone = mix_coded(
        subtract_identity(graph), numbers_of(60, numbers), coded(graph, CODERS[0], numbers)
    )
    torch.set_num_threads(count)
    monkeypatch.setattr(quantized_mixing, "AT_ONCE", 2 * BLOCK * 60)
    assertsame_bits(
        assert_alike(graph, numbers_of(60, numbers), coded(graph, CODERS[0], numbers)), alone
    )


@needs_compiler
def test_rows_may_be_part_of_longer_ones() -> None:
    graph, numbers = away(60), BLOCK + 20
    longer = numbers_of(60, 3 * BLOCK)
    before = longer.clone()
    assert_alike(graph, longer[:, 7 : 7 + numbers], coded(graph, CODERS[0], numbers))
    assert torch.equal(longer[:, :7], before[:, :7])
    assert torch.equal(longer[:, 7 + numbers :], before[:, 7 + numbers :])


def exchanged(dtype: torch.dtype = torch.float32, fused: bool = True) -> dict[str, Tensor]:
    """Three rounds of eight-bit messages of two leaves among 60 clients."""
    core = MatrixProduct()
    stage = CompressionStage(core, qv.Quantize(bits=8), 4, np.arange(60), "mu", False, fused)
    through = Exchange(core, [stage])
    draws = torch.Generator().manual_seed(0)
    held = {
        "u": torch.randn(60, 3, 50, generator=draws).to(dtype),
        "v": torch.randn(60, generator=draws).to(dtype),
        "mu": torch.ones(60, dtype=torch.float64),
    }
    for round in range(3):
        through.push(round, away(60, round), held)
        held = through.collect(round)
    return held


@needs_compiler
def test_an_exchange_takes_the_compiled_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantized_mixing.compiled_matches_torch(
        qv.Quantize(bits=8)
    )  # tried before it is made impossible
    with monkeypatch.context() as patch:
        patch.setattr(quantized_mixing, "_by_torch", pytest.fail)
        compiled = exchanged()
    monkeypatch.setattr(quantized_mixing, "_is_for_c", lambda *_: False)
    for by_torch in (exchanged(), exchanged(fused=False)):  # the latter as ranks do it
        for name, leaf in by_torch.items():
            assert torch.equal(leaf, compiled[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_compiler_pytorch_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    here = exchanged(dtype=dtype)
    quantized_mixing.compiled_matches_torch.cache_clear()
    monkeypatch.setattr(quantized_mixing, "_by_c", pytest.fail)
    try:
        with no_compiler():
            for name, leaf in exchanged(dtype=dtype).items():
                assert torch.equal(leaf, here[name])
    finally:
        quantized_mixing.compiled_matches_torch.cache_clear()


@needs_compiler
def test_a_pass_that_is_off_by_a_bit_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor for which PyTorch has a kernel that rounds otherwise."""
    by_c, taken = quantized_mixing._by_c, []

    def off(graph: Graph, leaf: Tensor, code: ColumnCode) -> Tensor:
        taken.append(len(leaf))
        found = by_c(graph, leaf, code)
        found[7, 100] = torch.nextafter(found[7, 100], torch.tensor(9.0))
        return found

    here = exchanged()
    quantized_mixing.compiled_matches_torch.cache_clear()
    monkeypatch.setattr(quantized_mixing, "_by_c", off)
    try:
        for name, leaf in exchanged().items():
            assert torch.equal(leaf, here[name])
    finally:
        quantized_mixing.compiled_matches_torch.cache_clear()
    assert len(taken) == 1  # the trial


def test_many_neighbours_stay_with_the_dense_product(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = qv.random_push(8, 5)(0)
    monkeypatch.setattr(quantized_mixing, "_by_c", pytest.fail)
    mix_coded(subtract_identity(graph), numbers_of(8, BLOCK), coded(graph, CODERS[0], BLOCK))


MUTANTS = {
    "no half of a random step": (" + 0x1p-17f", ""),
    "steps without rounding to bfloat16": ("float scale = bfloat16(", "float scale = ("),
    "who is silent sends": ("e->silent[client] ? 0 :", "0 ? 0 :"),
    "another row of random numbers": (
        "row : row - e->random_rows) * BLOCK",
        "row : row - e->random_rows + 1) * BLOCK",
    ),
    "the last numbers of a row": ("i < width; i++) x[i] +=", "i < width - 1; i++) x[i] +="),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_pass_with_other_bits_is_found(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare() -> None:
        several = away(2 * ROWS + 1)  # groups, whose rows of random numbers begin anew
        for graph in (qv.random_pull(60, 2, seed=1)(0), several):
            leaf = numbers_of(graph.clients, 2 * BLOCK + 5)
            assert_alike(graph, leaf, coded(graph, CODERS[0], 2 * BLOCK + 5))
        test_numbers_at_the_edge_of_rounding(CODERS[0])

    with (
        mutated(monkeypatch, tmp_path, "quantized_mixing.c", *MUTANTS[mutant]),
        pytest.raises(AssertionError),
    ):
        compare()


SANITIZED = r"""
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  for (int64_t clients = 1; clients < 40; clients += 6)
    for (int64_t columns = 1; columns < 300; columns += 31)
      for (int random = 0; random < 2; random++) {
        int64_t stride = columns + 3, blocks = (columns + BLOCK - 1) / BLOCK, rows_ = 8, groups = 2;
        int64_t size = clients * stride - 3;
        float *rows = malloc(size * sizeof *rows), *weights = malloc(3 * clients * sizeof *weights);
        int32_t *starts = malloc((clients + 1) * sizeof *starts);
        int32_t *senders = malloc(3 * clients * sizeof *senders);
        uint8_t *silent = malloc(clients);
        uint16_t *draws = malloc(rows_ * BLOCK * sizeof *draws);
        int64_t *turns = malloc(blocks * groups * sizeof *turns);
        int64_t *group_of = malloc(clients * sizeof *group_of);
        int64_t *place_of = malloc(clients * sizeof *place_of);
        int8_t *codes = malloc(clients * BLOCK);
        float *scales = malloc(clients * sizeof *scales);
        for (int64_t i = 0; i < size; i++) rows[i] = (float)(rand() % 2000 - 1000);
        if (size > 5) rows[5] = NAN, rows[1] = INFINITY;
        for (int64_t i = 0; i < rows_ * BLOCK; i++) draws[i] = (uint16_t)rand();
        for (int64_t i = 0; i < 3 * clients; i++) senders[i] = i * 7 % clients, weights[i] = 0.25f;
        for (int64_t i = 0; i <= clients; i++) starts[i] = i == 0 ? 0 : 3 * i - 2;
        for (int64_t i = 0; i < blocks * groups; i++) turns[i] = i % rows_;
        for (int64_t i = 0; i < clients; i++)
          silent[i] = i % 5 == 4, group_of[i] = i % groups, place_of[i] = i % rows_;
        Exchange e = {rows,  clients, stride, columns, starts,   senders,  weights, silent,
                      random ? draws : NULL, rows_, turns, groups, group_of, place_of, 1 / 127.0f};
        mix_quantized(&e, 0, blocks, codes, scales);
        free(rows), free(weights), free(starts), free(senders), free(silent), free(draws);
        free(turns), free(group_of), free(place_of), free(codes), free(scales);
      }
  printf("finished\n");
  return 0;
}
"""


@needs_compiler
@pytest.mark.slow
def test_nothing_is_read_or_written_outside_of_what_is_given(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "quantized_mixing.c", "-ffp-contract=off", SANITIZED)

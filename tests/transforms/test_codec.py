"""Coded bytes: round trips for every size, and refusal of what no encoder writes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quiverfl as qv
from quiverfl.engine.exchange.quantized import transmit_columns
from quiverfl.transforms.codec import Malformed, decode, encode
from quiverfl.transforms.noise import BLOCK, ClientDither, Dither

CODERS = [
    qv.Quantize(bits=8),
    qv.Quantize(bits=4),
    qv.Quantize(bits=2),
    qv.TopK(fraction=0.1),
    qv.RandomK(fraction=0.05),
]
coders = st.sampled_from(CODERS)
types = st.sampled_from([torch.float32, torch.float64])


def drawn(client: int, numbers: int) -> ClientDither:
    return Dither(11, 5).for_leaf("u", np.array([client]), numbers)


def leaf_of(numbers: int, scale: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    found = np.random.default_rng(seed).normal(size=numbers) * scale
    found[::7] = 0
    return torch.from_numpy(found).to(dtype)


@given(
    coder=coders,
    dtype=types,
    numbers=st.integers(0, 3 * BLOCK + 1),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 9),
    client=st.integers(0, 3000),
)
@settings(max_examples=80, deadline=None)
def test_what_is_decoded_is_what_a_simulation_mixes(
    coder: Any, dtype: Any, numbers: int, exponent: int, seed: int, client: int
) -> None:
    leaf = leaf_of(numbers, 10.0**exponent, seed, dtype)
    draws = drawn(client, numbers)
    code = encode(coder, leaf, draws)
    assert len(code) == coder.coded_bytes(numbers, dtype.itemsize)
    found = decode(coder, code, numbers, dtype, draws)
    assert torch.equal(found, transmit_columns(coder, draws, leaf[None], 0)[0])


@given(
    coder=coders,
    numbers=st.integers(1, 2 * BLOCK + 5),
    cuts=st.integers(-9, 9).filter(bool),
)
@settings(max_examples=40, deadline=None)
def test_a_code_of_another_length_is_refused(coder: Any, numbers: int, cuts: int) -> None:
    code = encode(coder, leaf_of(numbers, 1.0, 0, torch.float32), drawn(0, numbers))
    wrong = code + bytes(cuts) if cuts > 0 else code[:cuts]
    with pytest.raises(Malformed, match="bytes, not"):
        decode(coder, wrong, numbers, torch.float32, drawn(0, numbers))


@given(coder=coders, numbers=st.integers(1, 2 * BLOCK + 5), content=st.randoms())
@settings(max_examples=60, deadline=None)
def test_whatever_bytes_arrive_give_finite_numbers_or_a_sentence(
    coder: Any, numbers: int, content: Any
) -> None:
    code = content.randbytes(coder.coded_bytes(numbers, 4))
    with contextlib.suppress(Malformed):
        found = decode(coder, code, numbers, torch.float32, drawn(0, numbers))
        assert found.shape == (numbers,)
        assert torch.isfinite(found).all()


def spoilt(coder: Any, at: int, value: int, numbers: int = 100) -> bytes:
    code = bytearray(encode(coder, leaf_of(numbers, 1.0, 0, torch.float32), drawn(0, numbers)))
    code[at] = value
    return bytes(code)


@pytest.mark.parametrize(
    ("coder", "at", "value", "sentence"),
    [
        (qv.Quantize(bits=8), -1, 255, "a number above 254"),
        (qv.Quantize(bits=4), -1, 0x0F, "a number above 14"),
        (qv.Quantize(bits=2), -1, 0xFF, "a number above 2"),
        (qv.Quantize(bits=8), 1, 0xFF, "a scale that is not a positive number"),
        (qv.TopK(fraction=0.1), 0, 96, "places do not rise"),
        (qv.TopK(fraction=0.1), 9, 0, "places do not rise"),
        (qv.TopK(fraction=0.1), -1, 0x7F, "not finite"),
    ],
    ids=lambda value: str(value),
)
def test_bytes_that_no_encoder_writes_are_refused(
    coder: Any, at: int, value: int, sentence: str
) -> None:
    code = spoilt(coder, at, value)
    if sentence == "not finite":
        code = code[:-2] + b"\x80\x7f"
    with pytest.raises(Malformed, match=sentence):
        decode(coder, code, 100, torch.float32, drawn(0, 100))


def test_bits_behind_the_last_number_are_refused() -> None:
    coder = qv.Quantize(bits=4)
    code = spoilt(coder, -1, 0x10 | 0x01, numbers=99)
    with pytest.raises(Malformed, match="after its last number"):
        decode(coder, code, 99, torch.float32, drawn(0, 99))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_coded(value: float) -> None:
    leaf = torch.ones(10)
    leaf[3] = value
    with pytest.raises(qv.QuiverError, match="not finite"):
        encode(qv.Quantize(), leaf, drawn(0, 10))

"""`help` of a public class says what its fields are for."""

from __future__ import annotations

import pydoc

import pytest

import quiverfl as qv


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("Train", "params: Callable[[S], Params]\n    The parameters that are stepped, and where"),
        ("Train", "repeats: int = 1\n    Steps on the same batch before the next one."),
        ("Start", "samples: int\n    how many training samples it holds"),
        ("SingleStep", "(outputs, targets, weights, state) → sums over all training samples"),
        ("StepInfo", "rounds: int\n    as planned, T"),
        ("Method", "title: ClassVar[str]\n    as papers print it"),
    ],
)
def test_fields_are_explained(word: str, text: str) -> None:
    told = pydoc.plain(pydoc.render_doc(getattr(qv, word)))
    assert text in "\n".join(line.removeprefix(" |  ") for line in told.splitlines())


def test_the_sentence_of_the_class_stays_first_and_fields_without_a_text_add_nothing() -> None:
    assert (qv.Train.__doc__ or "").startswith("Steps on one part of the model;")
    assert "lr: float" not in (qv.Training.__doc__ or "")
    assert not [line for line in (qv.Run.__doc__ or "").splitlines() if line.startswith("_")]

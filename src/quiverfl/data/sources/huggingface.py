"""Data sets of Hugging Face's `datasets`: what lies on disk, or one that is loaded already.

Their columns are those of a table, and `owner` is the column that makes the clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiverfl.data.dataset import Dataset
from quiverfl.data.sources.table import Names, Options, from_frame, with_options
from quiverfl.errors import QuiverError
from quiverfl.extras import require

if TYPE_CHECKING:
    import pandas as pd

PART = "part of the dictionary"
"""The column that says which part a row is of, where they come in parts."""


@with_options
def read_huggingface(path: Path, options: Options) -> Dataset:
    """A folder that `save_to_disk` wrote; the options are those of a table."""
    require("datasets", "data 'huggingface'")
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # of a dozen kinds, its own and arrow's
        raise QuiverError(
            f"{path} is not a readable folder of datasets' save_to_disk ({error}); files of other "
            "kinds: name = 'table', or module:function with qv.from_huggingface."
        ) from error
    return _from(found, path.name, str(path), options)


def from_huggingface(
    dataset: Any,
    label: Names = "label",
    features: Names | None = None,
    owner: str | None = None,
    name: str = "",
    **options: Any,
) -> Dataset:
    """A `datasets.Dataset`, or a DatasetDict with `train` and `test` (or `validation`).

    `label`, `features` and `owner` name columns; several of lists are a dictionary of inputs.
    `options` are those of a table: split, test_share, classes, inputs, exclude, targets, pad,
    length, mask. Lists of whole numbers are ids.
    """
    require("datasets", "qv.from_huggingface")
    known = list(Options.__dataclass_fields__)
    for key in options:
        if key not in known:
            raise QuiverError(f"from_huggingface has no option {key!r}; it has {', '.join(known)}.")
    chosen = Options(label, features, owner, **options)
    called = name or "huggingface"
    return _from(dataset, called, called, chosen)


def _from(found: Any, name: str, where: str, options: Options) -> Dataset:
    parts = _parts(found, where)
    table = _frame(parts, where, options)
    if len(parts) > 1:
        options = replace(options, split=PART)
    columns = next(iter(parts.values())).features
    names = _class_names(columns, options.label)
    if names and options.classes is None:
        options = replace(options, classes=len(names))
    owner = options.owner
    if owner is not None and owner in table and _class_names(columns, owner):
        table[owner] = table[owner].map(dict(enumerate(_class_names(columns, owner))))
    dataset = from_frame(name, where, table, options, lists_are_ids=True)
    if names and dataset.train_target is None:
        return replace(dataset, class_names=names)
    return dataset


def _parts(found: Any, where: str) -> dict[str, Any]:
    """Rows for training and for testing, or all together."""
    import datasets

    if isinstance(found, datasets.Dataset):
        return {"train": found}
    if not isinstance(found, datasets.DatasetDict):
        raise QuiverError(
            f"{where}: a {type(found).__name__}: give a datasets.Dataset or DatasetDict; of a "
            "stream take what is needed first: datasets.Dataset.from_list(list(stream.take(1000)))."
        )
    if "train" not in found:
        raise QuiverError(f"{where}: no part 'train'; it has {', '.join(found)}.")
    test = next((part for part in ("test", "validation") if part in found), None)
    return {"train": found["train"], **({} if test is None else {"test": found[test]})}


def _frame(parts: Mapping[str, Any], where: str, options: Options) -> pd.DataFrame:
    import pandas as pd

    frames = [part.with_format(None).to_pandas() for part in parts.values()]
    if len(frames) > 1 and options.split is not None:
        raise QuiverError(
            f"{where}: it comes in parts ({', '.join(parts)}), and split = {options.split!r} names "
            "a column for that: leave it out."
        )
    if len(frames) > 1:
        frames = [frame.assign(**{PART: name}) for name, frame in zip(parts, frames, strict=True)]
    table: pd.DataFrame = pd.concat(frames, ignore_index=True)
    if table.empty:
        raise QuiverError(f"{where} has no rows.")
    return table


def _class_names(columns: Any, column: Any) -> tuple[str, ...]:
    """Of a column of class labels; nothing of others."""
    kind = columns.get(column) if isinstance(column, str) else None
    return tuple(getattr(kind, "names", None) or ())

"""A run folder, read: finished, still running or crashed.

While a run is going its history is two files of JSON lines; `finish` turns them into Parquet at the
end. A line that a crash cut off is no line. A round that was recorded twice, because a crashed run
was resumed from an earlier checkpoint, counts once, as it was recorded last.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError
from quiverfl.results.formatting import write_result_file
from quiverfl.results.palette import normalize_method
from quiverfl.results.summary import (
    HUNDRED,
    STAGES,
    Evaluation,
    EvaluationProtocol,
    client_frame,
    drop_attackers,
    history_frame,
    rounds_frame,
)

if TYPE_CHECKING:
    import pandas as pd

Counts = npt.NDArray[np.int64]
_FIRST_TITLES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedbabu": "FedBABU",
    "ditto": "Ditto",
    "dfedavgm": "DFedAvgM",
    "dfedavgmp": "DFedAvgM-P",
    "osgp": "OSGP",
    "dispfl": "Dis-PFL",
    "dfedpgp": "DFedPGP",
}
"""For folders of version 0.1 only, which wrote no titles: its methods in their order."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """Everything a run folder says. What it does not say is empty or None."""

    path: Path
    version: str
    experiment: str | None
    """What it has in common with its other seeds; None in a folder of version 0.1."""
    title: str
    """What the method is called where people read."""
    order: int | None
    """The method's place among Quiver's own; None for others."""
    config: Mapping[str, Any]
    topology_options: Mapping[str, Any]
    """The topology that was used: its name and its options, with nothing left to "auto"."""
    method_options: Mapping[str, Any]
    """The method's name and options; every one of them once the run has finished."""
    environment: Mapping[str, Any]
    history: pd.DataFrame
    """round, stage, client and one column per metric."""
    rounds: pd.DataFrame
    """One row per round; what is recorded per client is summed over clients."""
    train_counts: Counts | None
    """[clients, classes]"""
    test_counts: Counts | None
    train_sizes: Counts | None
    """[clients]: how many samples each has, also where they have no classes."""
    test_sizes: Counts | None
    names: tuple[str, ...]
    """Names of the clients, where the data names its owners."""
    protocol: EvaluationProtocol | None
    """None until the run has finished."""
    finished: bool
    diverged: tuple[int, int] | None
    """(round, client) at which training produced a number that is not finite."""
    attackers: tuple[int, ...] = ()
    """Clients that were made to attack: in the history, and in no table."""
    member: Mapping[str, Any] = field(default_factory=dict)
    """For a peer's own records: its name, its client's number, the run and its mode."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of its data and of code that is not Quiver's, by their names."""

    @cached_property
    def method(self) -> str:
        return str(self._section("method").get("name", "unknown"))

    @cached_property
    def topology(self) -> str:
        return str(self.topology_options.get("name", "unknown"))

    @cached_property
    def seed(self) -> int:
        return int(self._section("run").get("seed", 0))

    @cached_property
    def planned_rounds(self) -> int | None:
        rounds = self._section("run").get("rounds")
        return None if rounds is None else int(rounds)

    @cached_property
    def done_rounds(self) -> int:
        return len(self.rounds)

    @cached_property
    def is_condensed(self) -> bool:
        """Whether the history has hundredths of the clients and no client's own numbers."""
        sizes = self.train_sizes
        return sizes is not None and len(sizes) > self._recorded_clients == HUNDRED

    @cached_property
    def _recorded_clients(self) -> int:
        """Clients, or hundredths of them, in the history."""
        taking_part = self.history[self.history["stage"].isin(STAGES)]
        return int(taking_part["client"].max()) + 1 if len(taking_part) else 0

    @cached_property
    def clients(self) -> int:
        if self.is_condensed and self.train_sizes is not None:
            return len(self.train_sizes)
        if self._recorded_clients:
            return self._recorded_clients
        return int(self._section("data").get("clients") or 0)

    @cached_property
    def partition_digests(self) -> Mapping[str, str]:
        """Digests of the arrays that say which samples a client has; empty if not recorded."""
        arrays = read_partition(self.path / "partition.npz", samples=True)
        return {
            name: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            for name, array in arrays.items()
            if name != "names"  # they decide nothing
        }

    @cached_property
    def test_samples(self) -> pd.Series | None:
        """How many test samples each client has."""
        import pandas as pd

        return None if self.test_counts is None else pd.Series(self.test_counts.sum(axis=1))

    def client_name(self, client: int) -> str:
        if self.is_condensed:
            return f"hundredth {client + 1}"
        return self.names[client] if client < len(self.names) else str(client)

    def client_size(self, client: int) -> int | None:
        """How many training samples it has, if the folder says."""
        sizes = self.train_sizes
        unknown = sizes is None or client >= len(sizes) or self.is_condensed
        return None if sizes is None or unknown else int(sizes[client])

    def values(self, stage: str, metric: str) -> pd.DataFrame:
        """Evaluated rounds × clients (see `summary.by_client`)."""
        if (stage, metric) not in self._tables:
            self._tables[stage, metric] = client_frame(
                drop_attackers(self.history, self.attackers), stage, metric
            )
        return self._tables[stage, metric]

    @cached_property
    def _tables(self) -> dict[tuple[str, str], pd.DataFrame]:
        return {}

    def _section(self, name: str) -> Mapping[str, Any]:
        return _mapping(self.config.get(name))


def is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def find_runs(paths: Iterable[Path]) -> list[RunResult]:
    """The runs of some folders; a folder that is no run itself is searched for runs below it."""
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise QuiverError(f"{path} is not a folder: give the folder of a run or a comparison.")
        below = [path] if is_run(path) else sorted(_runs_below(path))
        if not below:
            raise QuiverError(
                f"{path} holds no run: neither it nor a folder in it has a config.json. "
                "`quiver run` and `quiver compare` say where they write."
            )
        folders.update(dict.fromkeys(folder.resolve() for folder in below))
    return [read_run(folder) for folder in folders]


def _runs_below(folder: Path) -> Iterable[Path]:
    for child in folder.iterdir():
        if child.name.startswith(".") or not child.is_dir():
            continue
        yield from [child] if is_run(child) else _runs_below(child)


def read_run(folder: Path) -> RunResult:
    """One run folder, whatever state it is in."""
    if not is_run(folder):
        raise QuiverError(f"{folder} is not a run folder: it has no config.json.")
    written = read_json(folder / "config.json")
    config = _mapping(written.get("config"))
    summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}
    partition = read_partition(folder / "partition.npz")
    environment = folder / "environment.json"
    title, order = _method(written)
    return RunResult(
        path=folder,
        version=str(written.get("quiver", "unknown")),
        experiment=_text(written.get("experiment")),
        title=title,
        order=order,
        config=config,
        topology_options=_mapping(written.get("topology") or config.get("topology")),
        method_options={**_mapping(config.get("method")), **_mapping(summary.get("method"))},
        environment=read_json(environment) if environment.exists() else {},
        history=_read_frame(folder, "history"),
        rounds=_read_frame(folder, "rounds"),
        train_counts=_counts(partition.get("train_counts")),
        test_counts=_counts(partition.get("test_counts")),
        train_sizes=_sizes(partition, "train"),
        test_sizes=_sizes(partition, "test"),
        names=tuple(str(name) for name in partition.get("names", ())),
        protocol=_protocol(summary.get("protocol")),
        finished=bool(summary.get("finished", False)),
        diverged=_divergence(summary.get("diverged")),
        attackers=tuple(int(client) for client in written.get("attackers", ())),
        member=_mapping(written.get("member")),
        inputs={str(k): str(v) for k, v in _mapping(written.get("inputs")).items()},
    )


def finish_history(folder: Path) -> None:
    """Write history.parquet and rounds.parquet from the lines recorded while running."""
    for name in ("history", "rounds"):
        buffer = io.BytesIO()
        _frame(folder / f"{name}.jsonl").to_parquet(buffer, index=False)
        write_result_file(folder / f"{name}.parquet", buffer.getvalue())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines. A last line that was cut off is left out."""
    if not path.exists():
        return []
    texts = path.read_bytes().splitlines()
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("not an object")
        except ValueError as problem:
            if number == len(texts):
                break
            raise QuiverError(
                f"{path}, line {number} is damaged, and it is not the last one: the file was "
                "changed by something else than a run. Restore it, or delete it and run again."
            ) from problem
        lines.append(line)
    return lines


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise QuiverError(f"{path} is damaged and cannot be read: {problem}.") from problem
    if not isinstance(content, dict):
        raise QuiverError(f"{path} is damaged: it should hold a JSON object.")
    return content


def read_evaluation(line: Mapping[str, Any]) -> Evaluation:
    """A line of history.jsonl as it was recorded: JSON has no NaN and says null."""
    columns = {
        name: np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        for name, values in line["metrics"].items()
    }
    return int(line["round"]), str(line["stage"]), columns


def _frame(path: Path) -> pd.DataFrame:
    """The lines of history.jsonl or rounds.jsonl as a frame."""
    lines = read_lines(path)
    if path.stem == "history":
        return history_frame(read_evaluation(line) for line in lines)
    return rounds_frame(lines)


def _read_frame(folder: Path, name: str) -> pd.DataFrame:
    import pandas as pd

    lines, parquet = folder / f"{name}.jsonl", folder / f"{name}.parquet"
    # A finished run that was extended has newer lines than its Parquet files.
    if parquet.exists() and not (_modified_at(lines) > _modified_at(parquet)):
        try:
            return pd.read_parquet(parquet)
        except (OSError, ValueError) as problem:
            if not lines.exists():
                raise QuiverError(f"{parquet} is damaged and cannot be read.") from problem
    try:
        return _frame(lines)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise QuiverError(f"{lines} is not what a run writes: {problem!r}.") from problem


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _method(written: Mapping[str, Any]) -> tuple[str, int | None]:
    """The method's title and its place in tables, as written or as version 0.1 had them."""
    name = str(_mapping(_mapping(written.get("config")).get("method")).get("name", "unknown"))
    said = _mapping(written.get("method"))
    title, order = _text(said.get("title")), said.get("order")
    if title is None:
        first = list(_FIRST_TITLES)
        title = _FIRST_TITLES.get(normalize_method(name), name.rpartition(":")[2])
        order = first.index(normalize_method(name)) if normalize_method(name) in first else None
    return title, order if isinstance(order, int) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _modified_at(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def read_partition(path: Path, samples: bool = False) -> dict[str, npt.NDArray[Any]]:
    """The arrays; the samples' numbers, of which there may be very many, only if asked for."""
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            wanted = [name for name in arrays if samples or not name.endswith("_indices")]
            return {name: arrays[name] for name in wanted}
    except Exception as problem:  # numpy raises whatever the damaged bytes lead it to
        raise QuiverError(f"{path} is damaged and cannot be read: {problem}.") from problem


def _sizes(partition: Mapping[str, npt.NDArray[Any]], part: str) -> Counts | None:
    offsets, counts = partition.get(f"{part}_offsets"), _counts(partition.get(f"{part}_counts"))
    if offsets is not None and offsets.ndim == 1 and len(offsets) > 1:
        return np.diff(offsets).astype(np.int64)
    return None if counts is None else counts.sum(axis=1)


def _counts(array: Any) -> Counts | None:
    """Counts per class, where the data has classes."""
    if array is None or array.ndim != 2 or 0 in array.shape:
        return None
    return np.asarray(array, dtype=np.int64)


def _divergence(record: Any) -> tuple[int, int] | None:
    if not isinstance(record, dict) or not {"round", "client"} <= set(record):
        return None
    return int(record["round"]), int(record["client"])


def _protocol(record: Any) -> EvaluationProtocol | None:
    if not isinstance(record, dict):
        return None
    known = {field.name for field in fields(EvaluationProtocol)}
    return EvaluationProtocol(**{name: value for name, value in record.items() if name in known})

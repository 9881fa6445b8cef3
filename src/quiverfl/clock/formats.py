"""Devices and traces from files: our own, and those that other projects publish.

    devices.csv          client,step,up,down and, if wanted, watts,idle_watts
    traces.json          {"period": seconds or null, "clients": {"0": [[begin, end], …], …}}
    FedScale             client_device_capacity and client_behave_trace: pickles of plain numbers
    FLASH                cached_timers.json: {guid: {"ready_time": [[begin, end], …], …}}
    MobiPerf             mobiperf_tcp_down_*.json: [{"tcp_speed_results": [kbit/s, …]}, …]
    APPFL                profiles: [{"compute_factor": …, "bandwidth": Mbit/s}, …], also by client

A pickle can run code when it is read. FedScale's are read by an unpickler that knows no class and
no function, so that they can hold numbers, texts, lists and dictionaries and nothing else.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.clock.devices import Trace
from quiverfl.errors import QuiverError
from quiverfl.seeds import stream
from quiverfl.types import Floats

Columns = dict[str, Floats]
"""step, up, down, watts, idle_watts: those that a file has, one number for each client."""

REQUIRED = ("step", "up", "down")
COLUMNS = (*REQUIRED, "watts", "idle_watts")
TRAINING = 3.0
"""A training step costs so many inferences: FedScale's own rule."""
KILOBIT, MEGABIT = 1000 / 8, 1024**2 / 8
"""Bytes; APPFL's megabit is a binary one."""


def read_devices(
    path: Path, clients: int, seed: int, batch_size: int | None, step: float
) -> Columns:
    """The columns of a file for so many clients.

    Quiver's own file has a row for each client. From a published collection, which has more,
    `clients` rows are drawn. `step` is what MobiPerf does not say and APPFL's factors multiply.
    """
    content = _read(path)
    if path.suffix == ".csv":
        return _read_csv(path, content, clients)
    rows = [_read_row(row, path, batch_size, step) for row in _entries(_parse(path, content), path)]
    rows = [row for row in rows if row["up"] > 0]  # measured, but never got through
    chosen = _choose(len(rows), clients, seed, path)
    return {name: np.array([rows[place][name] for place in chosen]) for name in rows[0]}


def read_traces(path: Path, clients: int, seed: int) -> tuple[Trace, ...]:
    """The traces of a file for so many clients; of a collection with more they are drawn."""
    tree = _parse(path, _read(path))
    if isinstance(tree, Mapping) and "clients" in tree:
        own, period = tree["clients"], tree.get("period")
        if not isinstance(own, Mapping) or set(own) != {str(i) for i in range(clients)}:
            count = len(own) if isinstance(own, Mapping) else "no"
            raise QuiverError(
                f'{path}: {count} traces for {clients} clients: "clients" must have the keys "0" '
                f'to "{clients - 1}".'
            )
        parts = [(own[str(i)], period) for i in range(clients)]
    else:
        timers = [_read_timer(entry, path) for entry in _entries(tree, path)]
        timers = [(intervals, period) for intervals, period in timers if intervals]
        if not timers:
            raise QuiverError(f"{path}: nobody in it is ever there.")
        parts = [timers[place] for place in _choose(len(timers), clients, seed, path)]
    return tuple(
        Trace.of(intervals, period, f"{path}: client {client}")
        for client, (intervals, period) in enumerate(parts)
    )


def hash_file(path: Path) -> str:
    """The sha256 of a file that a run is made from, for the run's identity."""
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise QuiverError(f"{path}: cannot be read: {error.strerror}.") from error


def _parse(path: Path, content: bytes) -> Any:
    if content[:1] == b"\x80":
        return _PlainUnpickler(content, path).load()
    try:
        return json.loads(content)
    except RecursionError:
        raise QuiverError(f"{path}: its lists are too deep in one another.") from None
    except ValueError as error:
        raise QuiverError(f"{path}: neither JSON nor a pickle of FedScale's: {error}.") from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries; refuses whatever would have to be called."""

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        raise QuiverError(
            f"{self._path}: the pickle asks for {module}.{name}; only numbers, texts, lists and "
            "dictionaries are read from a pickle, since anything else could run code."
        )

    def load(self) -> Any:
        try:
            return super().load()
        except QuiverError:
            raise
        except Exception as error:  # a damaged pickle raises whatever its bytes lead to
            raise QuiverError(f"{self._path}: a damaged pickle: {error}.") from error


def _read_csv(path: Path, content: bytes, clients: int) -> Columns:
    reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig", errors="replace"), newline=""))
    try:
        header, rows = list(reader.fieldnames or ()), list(reader)
    except csv.Error as error:
        raise QuiverError(f"{path}: not a table as text: {error}.") from error
    missing = [name for name in ("client", *REQUIRED) if name not in header]
    unknown = [name for name in header if name not in ("client", *COLUMNS)]
    if missing or unknown:
        what = f"no column {missing[0]!r}" if missing else f"an unknown column {unknown[0]!r}"
        raise QuiverError(f"{path}: {what}; it needs client,{','.join(REQUIRED)}.")
    columns: Columns = {}
    for name in ("client", *COLUMNS):
        if name in header:
            columns[name] = np.array([_read_cell(path, row, name, k) for k, row in enumerate(rows)])
    order = columns.pop("client").tolist()
    wanted = f"give one row for each client, 0 to {clients - 1}"
    if len(rows) != clients:
        raise QuiverError(f"{path}: {len(rows)} devices for {clients} clients: {wanted}.")
    for place, client in enumerate(order):
        if client not in range(clients) or client in order[:place]:
            why = "there is no such client" if client not in range(clients) else "it is there twice"
            raise QuiverError(f"{path}: row {place + 1}: client {client:g}: {why}; {wanted}.")
    places = np.argsort(order)
    return {name: column[places] for name, column in columns.items()}


def _read_cell(path: Path, row: Mapping[str, Any], column: str, place: int) -> float:
    """The number in a column of a row; one that is too short has fewer cells."""
    where = f"{path}: row {place + 1}: {column}"
    if row[column] is None:
        raise QuiverError(f"{where}: there is no value; every row needs one in every column.")
    return _number(row[column], where)


def _read_row(row: Any, path: Path, batch_size: int | None, step: float) -> dict[str, float]:
    """One device of a published collection."""
    if isinstance(row, Mapping) and {"computation", "communication"} <= set(row):
        if batch_size is None:
            raise QuiverError(
                f"{path}: FedScale counts milliseconds for a sample, so training.batch_size must "
                "be a number."
            )
        seconds = TRAINING * batch_size * _number(row["computation"], f"{path}: computation") / 1000
        link = _number(row["communication"], f"{path}: communication") * KILOBIT
    elif isinstance(row, Mapping) and "tcp_speed_results" in row:
        speeds = [
            _number(speed, f"{path}: tcp_speed_results") for speed in row["tcp_speed_results"]
        ]
        seconds, link = step, float(np.mean(speeds)) * KILOBIT if speeds else 0.0
    elif isinstance(row, Mapping) and {"compute_factor", "bandwidth"} <= set(row):
        seconds = step * _number(row["compute_factor"], f"{path}: compute_factor")
        link = _number(row["bandwidth"], f"{path}: bandwidth") * MEGABIT
    else:
        raise QuiverError(
            f"{path}: neither devices.csv nor FedScale's, MobiPerf's or APPFL's devices: "
            f"{str(row)[:60]!r}."
        )
    return {"step": seconds, "up": link, "down": link}


def _read_timer(entry: Any, path: Path) -> tuple[list[list[float]], float | None]:
    """Intervals and period of one client of FedScale's or FLASH's."""
    if isinstance(entry, Mapping) and "active" in entry and "inactive" in entry:
        period = _number(entry.get("finish_time"), f"{path}: finish_time")
        begins, ends = list(entry["active"]), list(entry["inactive"])
        if ends and begins and ends[0] < begins[0]:  # it was there when the recording began
            begins = [0, *begins]
        ends = [*ends, period][: len(begins)]
        intervals = [[float(b), min(float(e), period)] for b, e in zip(begins, ends, strict=False)]
        return [pair for pair in intervals if pair[0] < pair[1]], period
    if isinstance(entry, Mapping) and "ready_time" in entry:
        begin = _number(entry.get("trace_start", 0), f"{path}: trace_start")
        end = _number(entry.get("trace_end"), f"{path}: trace_end")
        inside = [(max(a, begin) - begin, min(b, end) - begin) for a, b in entry["ready_time"]]
        return [[a, b] for a, b in sorted(inside) if a < b], end - begin
    raise QuiverError(f"{path}: neither traces.json nor FedScale's or FLASH's traces.")


def _entries(tree: Any, path: Path) -> Sequence[Any]:
    entries = list(tree.values()) if isinstance(tree, Mapping) else tree
    if not isinstance(entries, list) or not entries:
        raise QuiverError(f"{path}: it holds no clients.")
    return entries


def _choose(count: int, clients: int, seed: int, path: Path) -> list[int]:
    if count < clients:
        raise QuiverError(f"{path}: {count} devices for {clients} clients: there are too few.")
    chosen: list[int] = stream(seed, "devices file").permutation(count)[:clients].tolist()
    return chosen


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise QuiverError(f"{where} = {value!r}: it must be a number.") from None

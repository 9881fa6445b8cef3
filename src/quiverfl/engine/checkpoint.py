"""The whole state of a simulation between two rounds: states, messages in flight, kept models.

On disk: safetensors for tensors, JSON for the rest with the sha256 of the tensors; each written to
a temporary file, synced and renamed, the JSON last, so that a checkpoint is whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from quiverfl.engine.execution import Measurement
from quiverfl.engine.history import History
from quiverfl.engine.settings import ExecutorName
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError
from quiverfl.support.durable import open_replacement, replace_file
from quiverfl.task import Params

# Write tensors into a safetensors file, one after the other.
#
# The library's own writer makes a copy of all of them first, and another of the file: with 100
# clients of ResNet-18 that is three times 4.5 GB. The format is a length, a JSON header and
# bytes.


TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8
PIECE = 1 << 24
"""Bytes that are hashed and written at a time."""


Shape = tuple[torch.dtype, tuple[int, ...]]
Shapes = Mapping[str, Shape]
Piece = bytes | memoryview


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Write the tensors. Returns the sha256 of the file."""
    shapes = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in tensors.items()}
    return write_pieces(shapes, lambda name: iterate_bytes(tensors[name]), path)


def file_order(shapes: Shapes) -> list[str]:
    """The widest types first, so that all lie aligned."""
    return sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))


def write_pieces(shapes: Shapes, pieces: Callable[[str], Iterable[Piece]], path: Path) -> str:
    """The same file from the bytes of tensors that need not all be here, asked for in its order."""
    order = file_order(shapes)
    header, begin = {}, 0
    for name in order:
        dtype, shape = shapes[name]
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in ([len(text).to_bytes(8, "little") + text], *map(pieces, order)):
            for piece in part:
                file.write(piece)
                digest.update(piece)
    return digest.hexdigest()


def iterate_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Its bytes, a piece at a time."""
    flat = tensor.detach().flatten()
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    step = PIECE // flat.element_size()
    for begin in range(0, len(flat), step):
        yield flat[begin : begin + step].cpu().view(torch.uint8).numpy().data


class DamagedCheckpoint(QuiverError):
    """A checkpoint that cannot be used; `path` is the file at fault."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: damaged checkpoint ({why}).")
        self.path, self.why = path, why


class Carrier(Protocol):
    """Holds messages in flight: an exchange, or the player of a schedule."""

    def tensors(self) -> dict[str, Tensor]: ...
    def restore(self, tensors: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state after `round` complete rounds. `take` borrows the shard's tensors until the next
    round: write the checkpoint, or `copy` it."""

    round: int
    tensors: dict[str, Tensor]
    local_metrics: dict[int, dict[str, float]]
    history: History = field(default_factory=History)
    measured: Measurement | None = None
    """Choices of the trial before the run; the resumed run keeps them, for the same bits."""

    @classmethod
    def take(cls, round: int, shard: Shard, exchange: Carrier, history: History) -> Checkpoint:
        tensors = {f"state/{name}": leaf for name, leaf in shard.state._asdict().items()}
        tensors.update((f"flight/{name}", leaf) for name, leaf in exchange.tensors().items())
        local: dict[str, Tensor] = {}
        for row, point in shard.local.points.items():
            local[f"{row}/shared"] = point.shared
            local[f"{row}/personal"] = point.personal
        for row, statistics in shard.local.statistics.items():
            local[f"{row}/statistics"] = statistics
        if local and len(shard.world.all_ids) > MANY:
            local = _stack_rows(local, len(shard.ids))
        tensors.update((f"local/{name}", leaf) for name, leaf in local.items())
        for number, buffers in shard.buffers.items():
            tensors.update((f"optimizer/{number}/{name}", b) for name, b in buffers.items())
        if shard.statistics is not None:
            tensors["statistics"] = shard.statistics
        if shard.context.private is not None:
            tensors["visits"] = torch.from_numpy(shard.visits)
        if shard.reports is not None:
            tensors.update((f"view/{name}", rows) for name, rows in shard.reports.rows().items())
        return cls(round, tensors, shard.local.metrics, history, shard.execution.measured)

    @property
    def executor(self) -> ExecutorName | None:
        return None if self.measured is None else self.measured.executor

    def copy(self) -> Checkpoint:
        """A copy that stays as it is while the run continues."""
        return Checkpoint(
            self.round,
            {name: leaf.clone() for name, leaf in self.tensors.items()},
            {row: dict(metrics) for row, metrics in self.local_metrics.items()},
            self.history.copy(),
            self.measured,
        )

    def apply(self, shard: Shard, exchange: Carrier) -> None:
        """Put everything back."""
        own = {f"state/{name}": leaf for name, leaf in shard.state._asdict().items()}
        if shard.statistics is not None:
            own["statistics"] = shard.statistics
        for name, leaf in own.items():
            saved = self.tensors.get(name)
            if saved is None or saved.shape != leaf.shape or saved.dtype != leaf.dtype:
                field = name.removeprefix("state/")
                raise QuiverError(
                    f"the checkpoint's field {field!r} does not fit this run: it was made with "
                    "another method, model, data type or number of clients."
                )
            leaf.copy_(saved)
        device = next(iter(shard.state)).device
        flying = _take_below(self.tensors, "flight/")
        exchange.restore({name: leaf.to(device, copy=True) for name, leaf in flying.items()})
        kept = _take_below(self.tensors, "local/")
        if "rows" in kept:
            kept = _unstack_rows(kept)
        rows = sorted({int(name.split("/")[0]) for name in kept})
        shard.local.points = {
            row: Params(*(kept[f"{row}/{part}"].to(device, copy=True) for part in Params._fields))
            for row in rows
        }
        shard.local.statistics = {
            row: kept[f"{row}/statistics"].to(device, copy=True)
            for row in rows
            if f"{row}/statistics" in kept
        }
        shard.local.metrics = {row: dict(metrics) for row, metrics in self.local_metrics.items()}
        if "visits" in self.tensors:
            shard.visits = self.tensors["visits"].cpu().numpy().copy()
        shard.buffers.clear()
        for name, leaf in _take_below(self.tensors, "optimizer/").items():
            number, _, buffer = name.partition("/")
            shard.buffers.setdefault(int(number), {})[buffer] = leaf.to(device, copy=True)
        if shard.reports is not None:
            shard.reports.restore(_take_below(self.tensors, "view/"))

    def save(self, folder: Path) -> Path:
        """Write the checkpoint. Returns the path of its JSON file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"round-{self.round:06d}.json"
        with open_replacement(path.with_suffix(".safetensors")) as draft:
            digest = write_tensors(self.tensors, draft)
        replace_file(path, self.describe(digest, self.local_metrics))
        return path

    def describe(self, digest: str, metrics: Mapping[int, dict[str, float]]) -> bytes:
        """Content of the JSON file, with the tensors' sha256 and the metrics of all kept models."""
        text: dict[str, Any] = {"round": self.round, "sha256": digest}
        text["local_metrics"] = {str(client): own for client, own in sorted(metrics.items())}
        if self.measured is not None:
            text.update(self.measured.choices)
        return json.dumps(text).encode()

    @classmethod
    def load(cls, path: Path, history: History) -> Checkpoint:
        """Read and verify a checkpoint; a damaged one is refused with its name."""
        tensors = path.with_suffix(".safetensors")
        try:
            text = json.loads(path.read_text())
            round, digest = int(text["round"]), str(text["sha256"])
            metrics = {int(row): dict(m) for row, m in text["local_metrics"].items()}
            measured = Measurement.read(text)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(path, "it does not describe a checkpoint") from error
        try:
            actual = _sha256(tensors)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            why = "the file is missing" if missing else str(error.strerror)
            raise DamagedCheckpoint(tensors, why) from error
        if actual != digest:
            raise DamagedCheckpoint(tensors, "its checksum is not the one recorded")
        return cls(round, load_file(tensors), metrics, history, measured)


MANY = 10_000
"""Clients above which kept models are rows of one tensor: a name for each would fill the file."""


def _stack_rows(leaves: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Tensors named "row/name" as one of each name, with a flag for the rows that there are."""
    stacks = {"rows": torch.zeros(count, dtype=torch.uint8)}
    for key, leaf in leaves.items():
        row, _, name = key.partition("/")
        if name not in stacks:
            stacks[name] = leaf.new_zeros(count, *leaf.shape)
        stacks["rows"][int(row)] = 1
        stacks[name][int(row)] = leaf
    return stacks


def _unstack_rows(stacks: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = stacks["rows"].nonzero().flatten().tolist()
    names = stacks.keys() - {"rows"}
    return {f"{row}/{name}": stacks[name][row] for row in rows for name in names}


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(folder.glob("round-*.json"))


def prune_checkpoints(folder: Path, newest: Path, keep: int = 2) -> None:
    """Remove all but this one and those before it; one more, so that a damaged newest is no loss.

    Later ones were damaged, or this one would not have been computed again. Tensors without a
    description are of a save that was interrupted.
    """
    kept = [path for path in checkpoints(folder) if path <= newest][-keep:]
    for path in checkpoints(folder):
        if path not in kept:
            path.unlink(missing_ok=True)
    for path in folder.glob("round-*.safetensors"):
        if not path.with_suffix(".json").exists():
            path.unlink(missing_ok=True)


def _take_below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

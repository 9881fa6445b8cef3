"""Evaluation of a round: metrics on the clients' test splits, and statistics of the states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.batches import ADAPT
from quiverfl.engine.collective import compute_groups
from quiverfl.engine.gradient_norms import gradient_norms
from quiverfl.engine.local.context import ClientGroup, PhaseContext, PhaseIndex
from quiverfl.engine.local.examples import Examples
from quiverfl.engine.local.programs import flatten_clients
from quiverfl.engine.local.workers import WORKER, Halted, parallel_for
from quiverfl.engine.states import open_client
from quiverfl.errors import Diverged
from quiverfl.objectives import AnyMetric, Metric, PerSample
from quiverfl.support.environment import NO_FLOAT64
from quiverfl.task import Params
from quiverfl.transforms.privacy import spent_epsilon
from quiverfl.trees import Tree, tree_map
from quiverfl.types import Floats, Integers, Metrics

if TYPE_CHECKING:
    from quiverfl.engine.shard import Shard

SLAB = 512
"""Samples per client that pass through the model at once, at most."""
TOGETHER = 12_800
"""Samples of all clients together that do: their activations must find room."""
GROUP_BYTES, MOST_MODELS = 32 << 20, 64
"""Bytes of models, and models, that are found at once where clients are computed one by one."""


def evaluate_shard(shard: Shard, round: int, stage: str) -> Metrics:
    """Metrics of every client on its own test split.

    Stage `local` of a client whose kept model was evaluated before is not computed again.
    """
    clients, gather = len(shard.ids), shard.world.gather
    known = shard.local.metrics if stage == "local" else {}
    own: Metrics = {}

    def evaluate_group(group: ClientGroup) -> None:
        params = find_models(shard, group, stage)
        metrics = compute_metrics(shard.context, shard.test, params, group)
        _check_losses(metrics["loss"], shard.test.sizes[group.rows], group.ids, round)
        _join(own, metrics, group.rows, clients)

    fresh = torch.ones(clients, dtype=torch.bool)
    fresh[list(known)] = False
    chosen = np.flatnonzero(gather(fresh).numpy())
    width, blocks = shard.context.executor.evaluation_chunk, shard.blocks.evaluation
    alone = shard.adaptation is not None or shard.opens_clients
    if width > 1 or alone:
        compute_groups(shard.world, evaluate_group, chosen, width, shard.workers, blocks)
    else:
        groups = _divide(shard, np.flatnonzero(fresh.numpy()))
        shard.world.run_on_all(lambda: parallel_for(evaluate_group, groups, shard.workers))
    for row, numbers in known.items():
        values = {name: np.array([number]) for name, number in numbers.items()}
        _join(own, values, np.array([row]), clients)
    if stage == "local":
        shard.local.record_metrics(own)
    gathered = {name: gather(torch.from_numpy(values)).numpy() for name, values in own.items()}
    return gathered if shard.members is None else shard.members.hide_absent(gathered)


def _divide(shard: Shard, rows: Integers) -> list[ClientGroup]:
    """Groups for clients that are computed one by one; what they have in common is done once.

    Each worker has as many groups as others, of like sizes, and few of them hold Python's lock.
    """
    task, leaf = shard.context.task, shard.context.dtype.itemsize
    model = leaf * (task.shared_layout.size + task.personal_layout.size)
    width = min(MOST_MODELS, max(1, GROUP_BYTES // max(1, model)))
    count = -(-len(rows) // (width * shard.workers)) * shard.workers
    order = rows[np.argsort(-shard.test.sizes[rows], kind="stable")]
    parts = [order[first::count] for first in range(min(count, len(order)))]
    return [ClientGroup(part, shard.ids[part]) for part in parts]


def client_model(shard: Shard, row: int, stage: str) -> tuple[Params, Tensor | None]:
    """The model that one client would use, and its running statistics, if it has any.

    It is fine-tuned where the method evaluates it so.
    """
    group = ClientGroup(np.array([row]), shard.ids[row : row + 1])
    params = Params(*(part[0].clone() for part in find_models(shard, group, stage)))
    return params, None if shard.statistics is None else shard.context.programs.statistics[0]


def find_models(shard: Shard, group: ClientGroup, stage: str) -> Params:
    """The models of a group at a stage, fine-tuned where the method evaluates them so."""
    if shard.opens_clients:
        open_client(shard, group.rows, stage)
    if stage == "local":
        params = shard.local.replace(group.rows, shard.personal)
    else:
        params = shard.personal(group.rows)
    device = shard.context.device
    at_once = device.type not in NO_FLOAT64
    params = Params(*(part.to(device, non_blocking=at_once) for part in params))
    if shard.adaptation is None:
        return params
    adapted, *_ = shard.trainer.train(shard.adaptation, params, group, PhaseIndex(0, ADAPT))
    return Params(*adapted)


def _check_losses(losses: Floats, sizes: Integers, clients: Integers, round: int) -> None:
    """End a run in which a model's loss is not finite."""
    bad = np.flatnonzero(~np.isfinite(losses) & (sizes > 0))
    if len(bad):
        raise Diverged(round, int(clients[bad[0]]), "the test loss")


def compute_metrics(
    context: PhaseContext, examples: Examples, params: Params, group: ClientGroup
) -> Metrics:
    """Metrics and loss over each client's own samples; NaN for a client without any."""
    task, program, executor, rows = context.task, context.program(), context.executor, group.rows
    sizes, halt = examples.sizes[rows], WORKER.halt
    everyone = sizes if group.full_group is None else group.full_group.test
    tallies = {
        name: _tally(metric, len(rows))
        for name, metric in {**task.metrics, "loss": task.loss}.items()
    }
    # Joined groups are cut as each would be.
    together = min(len(everyone), executor.evaluation_chunk)
    slab = min(SLAB, max(1, TOGETHER // max(1, together)))
    for begin in range(0, int(sizes.max(initial=0)), slab):
        if halt is not None and halt.is_set():
            raise Halted
        present = np.flatnonzero(sizes > begin)
        if together == 1:
            outputs, targets, blocks = _see_each(context, examples, params, group, begin)
        else:
            width = int(min(everyone.max() - begin, slab))
            samples = np.minimum(np.arange(begin, begin + width), sizes[present][:, None] - 1)
            inside = np.arange(begin, begin + width) < sizes[present][:, None]
            x, y = examples.gather(rows[present], samples)
            stacked = params
            if len(present) < len(rows):
                stacked = Params(*(part[present] for part in params))
            outputs = flatten_clients(executor.forward(program, stacked, x).outputs)
            targets, blocks = flatten_clients(y), [(present, torch.from_numpy(inside).double())]
        for tally in tallies.values():
            tally.add(outputs, targets, blocks)
    with np.errstate(invalid="ignore"):
        return {name: tally.values(sizes) for name, tally in tallies.items()}


Blocks = list[tuple[Integers, Tensor]]
"""Clients of a group, and which of their samples count, [k, n]: 0 for padding."""


def _see_each(
    context: PhaseContext, examples: Examples, params: Params, group: ClientGroup, begin: int
) -> tuple[Tree, Tree, Blocks]:
    """Outputs and targets of the clients that have samples behind `begin`, one after the other.

    Nothing is padded, so those with as many samples are a block. Each is computed as if alone.
    """
    counts, halt = np.minimum(examples.sizes[group.rows] - begin, SLAB), WORKER.halt
    present = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
    seen: list[Tree] = []
    for place in present:
        if halt is not None and halt.is_set():
            raise Halted
        samples = np.arange(begin, begin + counts[place])[None]
        x, y = examples.gather(group.rows[place : place + 1], samples)
        point = Params(*(part[place : place + 1] for part in params))
        outputs = context.executor.forward(context.program(), point, x).outputs
        seen.append((flatten_clients(outputs), flatten_clients(y)))
    blocks: Blocks = []
    for count in dict.fromkeys(counts[present].tolist()):
        like = present[counts[present] == count]
        blocks.append((like, torch.ones(len(like), count, dtype=torch.float64)))
    joined: Tree = seen[0]
    if len(seen) > 1:
        joined = tree_map(lambda *leaves: torch.cat(leaves), *seen)
    return joined[0], joined[1], blocks


class _Tally(Protocol):
    """Accumulates one metric over the samples of some clients."""

    def add(self, outputs: Tree, targets: Tree, blocks: Blocks) -> None:
        """Add the samples of the clients of these blocks; clients lie one after the other."""

    def values(self, sizes: Integers) -> Floats: ...


def _tally(metric: AnyMetric, clients: int) -> _Tally:
    if not isinstance(metric, Metric):
        return _Mean(metric, clients)
    return _All(metric, clients) if metric.value is None else _Sums(metric, clients)


class _Mean:
    def __init__(self, metric: PerSample, clients: int) -> None:
        self._metric = metric
        self._sums = torch.zeros(clients, dtype=torch.float64)

    def add(self, outputs: Tree, targets: Tree, blocks: Blocks) -> None:
        values = self._metric(outputs, targets).cpu().double()
        parts = torch.split(values, [inside.numel() for _, inside in blocks])
        for (clients, inside), part in zip(blocks, parts, strict=True):
            self._sums[clients] += torch.linalg.vecdot(part.view(inside.shape), inside)

    def values(self, sizes: Integers) -> Floats:
        means: Floats = self._sums.numpy() / np.where(sizes, sizes, np.nan)
        return means


class _Sums:
    def __init__(self, metric: Metric, clients: int) -> None:
        self._metric, self._clients = metric, clients
        self._sums: Tensor | None = None

    def add(self, outputs: Tree, targets: Tree, blocks: Blocks) -> None:
        shares = self._metric.of(outputs, targets).cpu().double()
        parts = torch.split(shares, [inside.numel() for _, inside in blocks])
        for (clients, inside), part in zip(blocks, parts, strict=True):
            sums = torch.einsum("kns,kn->ks", part.reshape(*inside.shape, -1), inside)
            if self._sums is None:
                self._sums = sums.new_zeros(self._clients, sums.shape[1])
            self._sums[clients] += sums

    def values(self, sizes: Integers) -> Floats:
        assert self._metric.value is not None
        if self._sums is None:
            return np.full(self._clients, np.nan)
        scores = self._metric.value(self._sums).numpy()
        return np.where(sizes, scores, np.nan)


class _All:
    """Keeps the outputs for every sample until all samples have been seen."""

    def __init__(self, metric: Metric, clients: int) -> None:
        self._metric = metric
        self._seen: list[list[tuple[Tree, Tree]]] = [[] for _ in range(clients)]

    def add(self, outputs: Tree, targets: Tree, blocks: Blocks) -> None:
        begin = 0
        for clients, inside in blocks:
            for client, count in zip(clients, inside.sum(dim=1).int().tolist(), strict=True):
                rows = slice(begin, begin + count)
                self._seen[client].append((_cut(outputs, rows), _cut(targets, rows)))
                begin += inside.shape[1]

    def values(self, sizes: Integers) -> Floats:
        return np.array([self._value(seen) for seen in self._seen], dtype=np.float64)

    def _value(self, seen: list[tuple[Tree, Tree]]) -> float:
        if not seen:
            return float("nan")
        outputs, targets = (
            tree_map(lambda *slabs: torch.cat(slabs), *trees) for trees in zip(*seen, strict=True)
        )
        return float(self._metric.of(outputs, targets))


def _cut(tree: Tree, rows: slice) -> Tree:
    return tree_map(lambda leaf: leaf[rows].cpu(), tree)


def _join(joined: Metrics, part: Metrics, rows: Integers, clients: int) -> None:
    """Write the metrics of some rows into the metrics of all."""
    for name, values in part.items():
        joined.setdefault(name, np.full(clients, np.nan))[rows] = values


class LocalModels:
    """The last locally trained models of clients that do not train now: what stage `local` shows.

    By row, with their metrics, so that a model which did not change is evaluated once.
    """

    def __init__(self) -> None:
        self.points: dict[int, Params] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.statistics: dict[int, Tensor] = {}
        """Their running statistics, [models, size], where these are mixed later."""

    def keep(
        self,
        rows: Integers,
        find_models: Callable[[Integers], Params],
        statistics: Tensor | None,
        width: int,
    ) -> None:
        """Keep the models of these rows, found `width` at a time.

        Their running statistics are kept too, where these are mixed later.
        """
        for begin in range(0, len(rows), width):
            chunk = rows[begin : begin + width]
            # Each its own memory, which is free again when the client trains.
            own = ([row.clone() for row in part.unbind()] for part in find_models(chunk))
            self.points.update(zip(chunk.tolist(), map(Params, *own), strict=True))
        if statistics is not None:
            self.statistics.update((row, statistics[row].clone()) for row in rows.tolist())

    def forget(self, rows: Integers) -> None:
        for row in rows.tolist() if self.points else ():
            self.points.pop(row, None)
            self.metrics.pop(row, None)
            self.statistics.pop(row, None)

    def replace(self, rows: Integers, current: Callable[[Integers], Params]) -> Params:
        """The models of these rows: the kept one where there is one, else the current one."""
        remembered = [row in self.points for row in rows.tolist()] if self.points else []
        if not any(remembered):
            return current(rows)
        points = [
            self.points[int(row)] if kept else Params(*(part[0] for part in current(row[None])))
            for row, kept in zip(rows, remembered, strict=True)
        ]
        return Params(*(torch.stack(parts) for parts in zip(*points, strict=True)))

    def record_metrics(self, metrics: Metrics) -> None:
        lists = {name: values.tolist() for name, values in metrics.items()} if self.points else {}
        for row in self.points:
            self.metrics[row] = {name: values[row] for name, values in lists.items()}


def state_record(shard: Shard, evaluated: bool, gradients: bool) -> dict[str, Any]:
    """Steps and the range of μ; in evaluated rounds also how far the clients are apart."""
    world, method = shard.world, shard.method
    mass = None if method.mass is None else world.gather(getattr(shard.state, method.mass))
    members = None if shard.members is None else torch.from_numpy(shard.members.staying)
    if mass is not None and members is not None:
        mass = mass[members]
    record: dict[str, Any] = {
        "steps": world.gather(torch.from_numpy(shard.steps)).tolist(),
        "mu_min": None if mass is None else float(mass.min()),
        "mu_max": None if mass is None else float(mass.max()),
        "consensus": None,
        "gradient_shared": None,
        "gradient_personal": None,
    }
    if shard.members is not None:
        record["members"] = int(shard.members.present.sum())
        record["mu_sum"] = None if mass is None else float(mass.double().sum())
    if shard.context.private is not None:
        visits = world.gather(torch.from_numpy(shard.visits)).numpy()
        record["epsilon"] = spent_epsilon(visits, shard.context.private).tolist()
    if evaluated:
        shared = None if shard.shared is None else getattr(shard.state, shard.shared)
        if shared is not None:
            # Columns are taken in chunks so that z is never stored whole.
            width = max(1, 4_000_000 // max(1, len(world.all_ids) * shared.element_size()))
            distance = partial(squared_distance, mass=mass, members=members)
            nothing = torch.zeros((), dtype=torch.float64)
            record["consensus"] = float(world.sum_columns(shared, width, distance, nothing))
        if gradients:
            record.update(gradient_norms(shard, mass))
    return record


def squared_distance(shared: Tensor, mass: Tensor | None, members: Tensor | None = None) -> Tensor:
    """(1/m) Σ_i ‖z_i - z̄‖² of some columns; twenty times as fast as `torch.var`."""
    shared = shared if members is None else shared[members]
    z = shared if mass is None else shared / mass.to(shared.dtype).unsqueeze(1)
    apart = z - z.mean(dim=0)
    return apart.square_().sum(dim=0).sum(dtype=torch.float64) / len(z)

"""Cases that are tried on several ranks, and the processes that try them.

As a script: one rank. It runs every case it is asked for and leaves what it found in a folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quiverfl as qv
from quiverfl.distributed.checkpoint import GatheredCheckpoints
from quiverfl.distributed.columns import Columns
from quiverfl.distributed.processes import end_rank
from quiverfl.distributed.ranks import Placement, RankFailed, Ranks
from quiverfl.distributed.simulation import RankSimulation, federation_of
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.exchange.matrix import MatrixProduct
from quiverfl.engine.history import History
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Interleaved, Train
from quiverfl.topologies.graph import Graph
from quiverfl.transforms import Transforms
from small import (
    AWAY,
    CLIENTS,
    METHODS,
    PULL,
    PUSH,
    TRAINING,
    normed_task,
    tiny_data,
    tiny_task,
)

RING = lambda m: qv.ring(clients=m)  # noqa: E731
LOOKING = [
    lambda m: qv.bandit_push(m, 2, by="similarity", sketch=4, seed=0),
    lambda m: qv.participating(qv.loss_push(m, 2, seed=0), 0.5, seed=1),
    lambda m: qv.similar_pull(m, 3, sketch=4, seed=0),
]
BALANCED = lambda m: qv.unreliable(qv.balanced_push(m, 2, seed=0), 0.4, seed=1)  # noqa: E731
CASES = [(method, graphs) for method, choices in METHODS for graphs in choices]
CASES += [(qv.DFedPGP(shared_epochs=2), graphs) for graphs in (*LOOKING, BALANCED)]
RINGS = [(method, RING) for method, _ in METHODS]
EPOCHS = (1, 2, 3, 1, 0, 3)
DFEDPGP = qv.DFedPGP(shared_epochs=2)
TRANSFORMED: list[tuple[Any, Any, dict[str, Any]]] = [
    (DFEDPGP, PUSH, {"compression": qv.Quantize(bits=4)}),
    (qv.OSGP(epochs=1, delay=2), AWAY, {"compression": qv.TopK(fraction=0.2)}),
    (qv.DFedAvgM(epochs=1), RING, {"compression": qv.RandomK(fraction=0.2)}),
    (qv.DFedAvgM(epochs=1), lambda m: qv.full(clients=m), {"compression": qv.Quantize(bits=2)}),
    (DFEDPGP, AWAY, {"privacy": qv.UpdatePrivacy()}),
    (DFEDPGP, AWAY, {"privacy": qv.DPSGD()}),
    (qv.FedAvg(epochs=1), lambda m: qv.star(clients=m, sampled=3), {"privacy": qv.DPSGD()}),
    (
        qv.OSGP(epochs=1, delay=2),
        AWAY,
        {"adversary": qv.AddNoise(share=0.34), "privacy": qv.UpdatePrivacy(noise=0.1)},
    ),
    (
        qv.DFedAvgM(epochs=1),
        RING,
        {"adversary": qv.ScaledUpdate(share=0.34), "robustness": qv.SelfCenteredClip()},
    ),
    (
        qv.DFedAvgM(epochs=1),
        lambda m: qv.full(clients=m),
        {"adversary": qv.Adaptive(share=0.34, distance=1.0)},
    ),
    (DFEDPGP, PUSH, {"adversary": qv.LabelFlip(share=0.5), "robustness": qv.Balance(gamma=0.4)}),
    (
        DFEDPGP,
        PUSH,
        {
            "compression": qv.Quantize(bits=8),
            "adversary": qv.SignFlip(share=0.34),
            "robustness": qv.Balance(sketch=10),
        },
    ),
    (DFEDPGP, PULL, {"compression": qv.Quantize(bits=8)}),
]
"""With a remainder, with messages in flight, with replicas, where all rows of P are equal; what
leaves a client blurred or forged; links that are judged, by models and by sketches; clients that
nobody pulls from."""


def counts_epochs(method: Any) -> bool:
    phases = method.phases(tiny_task())
    return any(isinstance(p, Train | Interleaved) and p.epochs is not None for p in phases)


def settings(method: Any, executor: str = "vectorized", dtype: str = "float64") -> RunSettings:
    return RunSettings(
        rounds=3,
        dtype=getattr(torch, dtype),
        threads=1,
        executor=executor,
        epochs_per_client=EPOCHS if counts_epochs(method) else None,
        gradients=method.name == "dfedpgp",
    )


def simulation(
    ranks: Ranks,
    method: Any,
    topology: Any,
    chosen: RunSettings,
    transforms: dict[str, Any] | None = None,
    task: qv.Task | None = None,
) -> RankSimulation:
    data = tiny_data()
    federation = federation_of(data.train.sizes, data.test.sizes, chosen, ranks.size)
    here = data.select(federation.placement.clients_of(ranks.rank))
    return RankSimulation(
        ranks,
        federation,
        task or tiny_task(),
        here,
        method,
        topology,
        TRAINING,
        chosen,
        Transforms(**(transforms or {})),
    )


def played(
    ranks: Ranks, method: Any, graphs: Any, *how: str, transforms: dict[str, Any] | None = None
) -> dict[str, Any]:
    made = simulation(ranks, method, graphs(CLIENTS), settings(method, *how), transforms)
    return found_by(made.run())


def found_by(run: qv.Run) -> dict[str, Any]:
    kept = {int(run._shard.ids[row]): p for row, p in run._shard.local.points.items()}
    statistics = run._shard.statistics
    return {
        "statistics": None if statistics is None else statistics.clone(),
        "state": [leaf.clone() for leaf in run._shard.state],
        "local": {client: tuple(point) for client, point in kept.items()},
        "evaluations": run._history.evaluations,
        "records": run._history.records,
    }


LEAVES = {"wide": (1000,), "chunks": (30_000,), "scalar": (), "matrix": (7, 9), "narrow": (3,)}
GRAPHS: dict[str, Callable[[], Graph]] = {
    "push": lambda: qv.random_push(clients=13, neighbors=2, seed=0)(0),
    "dense": lambda: qv.random_push(clients=13, neighbors=9, seed=0)(0),
    "star": lambda: qv.star(clients=13, sampled=3, seed=0)(0),
    "lone": lambda: qv.star(clients=13, sampled=1, seed=0)(0),
    "full": lambda: qv.full(clients=13)(0),
}


def message(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    random = np.random.default_rng(len(shape) + sum(shape))
    return torch.from_numpy(random.normal(size=(13, *shape))).to(dtype)


def mixed(ranks: Ranks) -> dict[str, torch.Tensor]:
    """What this rank's clients receive, for every graph, shape and type."""
    placement = Placement.balance(np.arange(1, 14), ranks.size)
    columns, found = Columns(ranks, placement), {}
    for name, graph in ((name, make()) for name, make in GRAPHS.items()):
        here = placement.clients_of(ranks.rank)
        rows = here[np.isin(here, graph.senders)] if graph.one_row else here
        for leaf, shape in LEAVES.items():
            for dtype in (torch.float32, torch.float64):
                own = message(shape, dtype)[torch.from_numpy(rows)]
                found[f"{name} {leaf} {dtype}"] = columns.mix(graph, own).clone()
    return found


def refused(ranks: Ranks, folder: Path) -> str:
    """A checkpoint that rank 0 cannot write: both ranks learn it, and neither waits."""
    chosen = settings(qv.DFedPGP())
    made = simulation(ranks, qv.DFedPGP(), qv.random_push(clients=CLIENTS, neighbors=2), chosen)
    shard = made._simulation(chosen).shard()
    taken = Checkpoint.take(1, shard, Exchange(MatrixProduct()), qv.engine.history.History())
    checkpoints = GatheredCheckpoints(ranks, made.placement)
    file = folder / "a-file"
    file.touch()
    try:
        ranks.run_on_all(lambda: checkpoints.save(taken, file if ranks.rank == 0 else None))
    except (RankFailed, OSError) as error:
        return str(error)
    return ""


RESUMED: list[tuple[Any, Any, dict[str, Any]]] = [
    (*CASES[-1], {}),
    TRANSFORMED[5],
    (DFEDPGP, AWAY, {"adversary": qv.ScaledUpdate(share=0.34), "privacy": qv.UpdatePrivacy()}),
]
"""On a topology that looks, with samples that were visited, with what clients had before."""


def resumed(ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    """The last of three rounds after a checkpoint."""
    return [_resumed(ranks, folder / str(place), *case) for place, case in enumerate(RESUMED)]


def _resumed(
    ranks: Ranks, folder: Path, method: Any, graphs: Any, transforms: dict[str, Any]
) -> dict[str, Any]:
    chosen = replace(settings(method), checkpoint_every=2)
    made = simulation(ranks, method, graphs(CLIENTS), chosen, transforms)
    first = ranks.rank == 0

    def keep(write: Callable[[Path], Path]) -> None:
        write(folder)

    made.run(checkpoint=keep if first else None)
    taken = Checkpoint.load(folder / "round-000002.json", History()) if first else None
    return found_by(made.run(resume=taken))


NORMED: list[tuple[Any, Any, dict[str, Any]]] = [
    (DFEDPGP, AWAY, {}),
    (DFEDPGP, AWAY, {"buffers": "mixed"}),
    (qv.Ditto(epochs=1), lambda m: qv.star(clients=m, sampled=3), {"buffers": "mixed"}),
]
"""With BatchNorm: kept and sent, with a mass and with sample counts, of one model and of two."""


def normed(ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    """A whole run, and the last of its rounds after a checkpoint."""
    found = []
    for place, (method, graphs, options) in enumerate(NORMED):
        chosen = replace(settings(method, "sequential"), checkpoint_every=2)
        made = simulation(ranks, method, graphs(CLIENTS), chosen, task=normed_task(**options))
        path = folder / f"normed-{place}"

        def keep(write: Callable[[Path], Path], path: Path = path) -> None:
            write(path)

        found.append(found_by(made.run(checkpoint=keep if ranks.rank == 0 else None)))
        taken = None
        if ranks.rank == 0:
            taken = Checkpoint.load(path / "round-000002.json", History())
        found.append(found_by(made.run(resume=taken)))
    return found


OVERSPENT = [qv.UpdatePrivacy(epsilon_budget=5.0), qv.DPSGD(epsilon_budget=8.0)]


def overspent(ranks: Ranks, folder: Path) -> list[str]:
    """A budget that only some clients' next release exceeds, and not on every rank."""
    found = []
    for privacy in OVERSPENT:
        chosen = settings(DFEDPGP)
        made = simulation(ranks, DFEDPGP, AWAY(CLIENTS), chosen, {"privacy": privacy})
        try:
            made.run()
        except QuiverError as error:
            found.append(str(error))
    return found


WORK: dict[str, Callable[[Ranks, Path], Any]] = {
    "methods": lambda ranks, _: [played(ranks, *case) for case in CASES],
    "rings": lambda ranks, _: [played(ranks, *case) for case in RINGS],
    "sequential": lambda ranks, _: [played(ranks, *case, "sequential") for case in CASES],
    "single": lambda ranks, _: [played(ranks, *case, "sequential", "float32") for case in CASES],
    "transformed": lambda ranks, _: [
        played(ranks, *case, transforms=transforms) for *case, transforms in TRANSFORMED
    ],
    "overspent": overspent,
    "normed": normed,
    "mixed": lambda ranks, _: mixed(ranks),
    "refused": refused,
    "resumed": resumed,
}


def on_ranks(count: int, works: list[str], folder: Path) -> dict[str, list[Any]]:
    """By name of the work, what every rank found."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    said = [folder / f"rank-{rank}.txt" for rank in range(count)]
    crew = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), *works],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "QUIVER_RANK_STORE": str(folder / "store"),
                "QUIVER_RANK_TIMEOUT": "120",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stderr=said[rank].open("w"),
        )
        for rank in range(count)
    ]
    try:
        codes = [process.wait(timeout=900) for process in crew]
    finally:
        for process in crew:
            process.kill()
    words = [file.read_text()[-2000:] for file in said]
    assert codes == [0] * count, f"the ranks ended with {codes}: {words}"
    return {
        work: [torch.load(folder / f"{work}-{r}.pt", weights_only=False) for r in range(count)]
        for work in works
    }


def main(folder: Path, works: list[str]) -> None:
    torch.set_num_threads(1)
    with Ranks.join() as ranks:
        for work in works:
            torch.save(WORK[work](ranks, folder), folder / f"{work}-{ranks.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    end_rank(0)

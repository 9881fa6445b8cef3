"""Quiver on the frameworks' work: FedAvg over a star, everybody sampled."""

from __future__ import annotations

import time

from contest import CLASSES, CLOCKS, OPTIMIZER, arguments, report
from work import WORKS

import quiverfl
from quiverfl import FedAvg, FederatedData, Task, Training, keep_freed_memory, simulate, star


def main() -> None:
    wanted = arguments()
    keep_freed_memory()  # as the command `quiver` does
    time.perf_counter = CLOCKS[wanted.clock]  # what a run's own laps are taken with
    work = WORKS[wanted.work]
    clients = wanted.clients or work.size.clients
    pairs = [work.data(client) for client in range(clients)]
    run = simulate(
        Task(work.model, personal=()),
        FederatedData.from_arrays(pairs, [(x[:1], y[:1]) for x, y in pairs], classes=CLASSES),
        method=FedAvg(epochs=work.size.epochs),
        topology=star(clients, sampled=clients),
        training=Training(**OPTIMIZER),
        rounds=wanted.rounds + 1,
        threads=wanted.threads,
        evaluate_every=wanted.rounds + 1,
        keep_local=False,
    )
    seconds = run.rounds["train_seconds"] + run.rounds["mix_seconds"]
    report(quiverfl.__version__, seconds=seconds.tolist()[1:])


if __name__ == "__main__":
    main()

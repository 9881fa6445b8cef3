"""Quiver on the frameworks' work: FedAvg over a star, everybody sampled."""

from __future__ import annotations

from work import CLASSES, OPTIMIZER, WORKS, arguments, report

import quiverfl
from quiverfl import FedAvg, FederatedData, Task, Training, keep_freed_memory, simulate, star


def main() -> None:
    wanted = arguments()
    keep_freed_memory()  # as the command `quiver` does
    work = WORKS[wanted.work]
    clients = wanted.clients or work.clients
    pairs = [work.data(client) for client in range(clients)]
    run = simulate(
        Task(work.model, personal=()),
        FederatedData.from_arrays(pairs, [(x[:1], y[:1]) for x, y in pairs], classes=CLASSES),
        method=FedAvg(epochs=work.epochs),
        topology=star(clients, sampled=clients),
        training=Training(**OPTIMIZER),
        rounds=wanted.rounds + 1,
        threads=wanted.threads,
        evaluate_every=wanted.rounds + 1,
        keep_local=False,
    )
    seconds = run.rounds["train_seconds"] + run.rounds["mix_seconds"]
    report(quiverfl.__version__, seconds.tolist())


if __name__ == "__main__":
    main()

"""Flower: its simulation runtime on Ray, one actor per core, and its FedAvg strategy."""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from contest import CLOCKS, arguments, report
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import WORKS, train

DATA: dict[tuple[str, int], Any] = {}
"""A client's examples stay in the actor that made them."""


class Timed(FedAvg):
    """FedAvg that notes when a round begins and when its average is there."""

    def __init__(self, clock: Callable[[], float], **options: Any) -> None:
        super().__init__(**options)
        self.seconds: list[float] = []
        self._clock = clock

    def configure_train(self, *given: Any, **named: Any) -> Any:
        self._begin = self._clock()
        return super().configure_train(*given, **named)

    def aggregate_train(self, *given: Any, **named: Any) -> Any:
        found = super().aggregate_train(*given, **named)
        self.seconds.append(self._clock() - self._begin)
        return found


def main() -> None:
    wanted = arguments()
    work, name = WORKS[wanted.work], wanted.work
    clients = wanted.clients or work.size.clients
    strategy = Timed(
        CLOCKS[wanted.clock],
        fraction_evaluate=0.0,
        min_train_nodes=clients,
        min_available_nodes=clients,
    )
    server, client = ServerApp(), ClientApp()

    @client.train()
    def local(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)  # one thread for each of as many actors as there are threads
        number = int(context.node_config["partition-id"])
        if (name, number) not in DATA:
            DATA[name, number] = work.data(number)
        x, y = DATA[name, number]
        model = work.model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(model, x, y, work.size.epochs)
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        start = ArrayRecord(work.model().state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=wanted.rounds + 1)

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=clients,
        backend_config={
            "init_args": {"num_cpus": wanted.threads, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    report(version("flwr"), seconds=strategy.seconds[1:])


if __name__ == "__main__":
    main()

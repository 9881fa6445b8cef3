"""FedLab: its serial trainer and synchronous server, in one process."""

from __future__ import annotations

from importlib.metadata import version

import torch
import without_torchvision  # noqa: F401
from contest import BATCH, CLOCKS, OPTIMIZER, arguments, report
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from work import WORKS


class Examples:
    """What FedLab's trainer asks for: a loader per client."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._sets = [torch.utils.data.TensorDataset(*pair) for pair in pairs]

    def get_dataloader(self, client: int, batch_size: int) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self._sets[client], batch_size, shuffle=True)


class Trainer(SGDSerialClientTrainer):
    """The trainer as it is, with this work's optimizer, fresh for every client."""

    def train(self, model_parameters: torch.Tensor, train_loader: object) -> list[torch.Tensor]:
        self.optimizer = torch.optim.SGD(self._model.parameters(), **OPTIMIZER)
        return super().train(model_parameters, train_loader)


def main() -> None:
    wanted = arguments()
    torch.set_num_threads(wanted.threads)
    work = WORKS[wanted.work]
    clients = wanted.clients or work.size.clients
    model = work.model()
    trainer = Trainer(model, clients)
    trainer.setup_dataset(Examples([work.data(client) for client in range(clients)]))
    trainer.setup_optim(work.size.epochs, BATCH, OPTIMIZER["lr"])
    server = SyncServerHandler(model, wanted.rounds + 1, 1.0)
    server.num_clients = clients
    clock, seconds = CLOCKS[wanted.clock], []
    while not server.if_stop:  # as its StandalonePipeline does, without the evaluation
        begin = clock()
        trainer.local_process(server.downlink_package, server.sample_clients())
        for package in trainer.uplink_package:
            server.load(package)
        seconds.append(clock() - begin)
    report(version("fedlab"), seconds=seconds[1:])


if __name__ == "__main__":
    main()

# ruff: noqa: I001 - a framework that imports torchvision comes after what stands in for it
"""FedRep with FedLab: its serial trainer, and heads that stay with their clients."""

from importlib.metadata import version

import without_torchvision  # noqa: F401

# A user's code begins.
import fedrep_given as given
import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from torch.utils.data import DataLoader, TensorDataset


class FedRep(SGDSerialClientTrainer):
    def local_process(self, payload, id_list):
        for client in id_list:
            loader = self.dataset[client]
            self.set_model(payload[0])
            if client in self.heads:
                self._model.head.load_state_dict(self.heads[client])
            self.fit(loader, self._model.head, given.HEAD_EPOCHS)
            self.fit(loader, self._model.body, given.BODY_EPOCHS)
            state = self._model.head.state_dict()
            self.heads[client] = {name: leaf.clone() for name, leaf in state.items()}
            self.cache.append([self.model_parameters])

    def fit(self, loader, part, epochs):
        self._model.requires_grad_(False)
        part.requires_grad_(True)
        optimizer = torch.optim.SGD(part.parameters(), **given.SGD)
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                self.criterion(self._model(x), y).backward()
                optimizer.step()


clients = given.make_clients()
trainer = FedRep(given.Network(), len(clients))
trainer.heads = {}
trainer.setup_dataset(
    [
        DataLoader(TensorDataset(*train), batch_size=given.BATCH, shuffle=True)
        for train, _ in clients
    ]
)
trainer.setup_optim(1, given.BATCH, given.SGD["lr"])
server = SyncServerHandler(given.Network(), given.ROUNDS, 1.0)
server.num_clients = len(clients)
while not server.if_stop:
    trainer.local_process(server.downlink_package, server.sample_clients())
    for package in trainer.uplink_package:
        server.load(package)
right = []
trainer.set_model(server.downlink_package[0])
for client, (_, (x, y)) in enumerate(clients):
    trainer._model.head.load_state_dict(trainer.heads[client])
    with torch.no_grad():
        right.append((trainer._model(x).argmax(1) == y).float().mean())
accuracy = float(torch.stack(right).mean())
# A user's code ends.

given.finish(version("fedlab"), accuracy)

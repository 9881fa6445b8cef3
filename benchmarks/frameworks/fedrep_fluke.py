# ruff: noqa: I001 - a framework that imports torchvision comes after what stands in for it
"""FedRep with fluke, which has it among its algorithms."""

from importlib.metadata import version

import without_torchvision  # noqa: F401

# A user's code begins.
import fedrep_given as given
import torch
from fluke.algorithms.fedrep import FedRep, FedRepClient
from fluke.data import DataSplitter, FastDataLoader
from fluke.nets import EncoderHeadNet


class Network(EncoderHeadNet):
    def __init__(self):
        network = given.Network()
        super().__init__(network.body, network.head)

    def forward_encoder(self, x):
        return self.encoder(x)

    def forward_head(self, x):
        return self.head(x)

    def forward(self, x):
        return self.head(self.encoder(x))


class OwnData(DataSplitter):
    def __init__(self):
        pass

    def assign(self, n_clients, batch_size=32):
        options = {"num_labels": given.CLASSES, "batch_size": batch_size}
        loaders = [
            (FastDataLoader(*train, shuffle=True, **options), FastDataLoader(*test, **options))
            for train, test in given.make_clients()
        ]
        return tuple(zip(*loaders, strict=True)), None


class OwnClient(FedRepClient):
    def __init__(self, **options):
        super().__init__(model=Network(), **options)


class Federation(FedRep):
    def get_client_class(self):
        return OwnClient


federation = Federation(
    given.CLIENTS,
    OwnData(),
    {
        "client": {
            "batch_size": given.BATCH,
            "local_epochs": given.HEAD_EPOCHS,
            "tau": given.BODY_EPOCHS,
            "loss": "CrossEntropyLoss",
            "optimizer": {"name": "SGD", **given.SGD},
            "scheduler": {"step_size": 1, "gamma": 1},
        },
        "server": {"weighted": True},
        "model": given.Network().body,
    },
)
federation.run(given.ROUNDS, eligible_perc=1.0)
right = []
for client in federation.clients:
    x, y = client.test_set.tensors
    client.model.get_global().load_state_dict(federation.server.model.state_dict())
    with torch.no_grad():
        right.append((client.model(x).argmax(1) == y).float().mean())
accuracy = float(torch.stack(right).mean())
# A user's code ends.

given.finish(version("fluke-fl"), accuracy)

"""pfl-research: its simulated backend and FederatedAveraging, in one process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from contest import BATCH, CLOCKS, OPTIMIZER, arguments, report
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from work import WORKS


class Net(nn.Module):
    """A model with the two functions pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Clock(TrainingProcessCallback):
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.times = [clock()]

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self.times.append(self._clock())
        return False, Metrics()


def main() -> None:
    wanted = arguments()
    torch.set_num_threads(wanted.threads)
    work = WORKS[wanted.work]
    clients = wanted.clients or work.size.clients
    users = {client: work.data(client) for client in range(clients)}
    data = FederatedDataset(
        lambda user: PyTorchTensorDataset(users[user], user_id=str(user)),
        MinimizeReuseUserSampler(list(users)),
    )
    net = Net(work.model())
    local = {name: value for name, value in OPTIMIZER.items() if name != "lr"}
    model = PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, **local),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    clock = Clock(CLOCKS[wanted.clock])
    # A first iteration is always evaluated; its time is left out, and no other is.
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=wanted.rounds + 1,
            evaluation_frequency=wanted.rounds + 2,
            train_cohort_size=clients,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work.size.epochs,
            local_learning_rate=OPTIMIZER["lr"],
            local_batch_size=BATCH,
        ),
        callbacks=[clock],
    )
    seconds = [end - begin for begin, end in pairwise(clock.times)]
    report(version("pfl"), seconds=seconds[1:])


if __name__ == "__main__":
    main()

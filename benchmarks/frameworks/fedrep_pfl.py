"""FedRep with pfl-research: FederatedAveraging whose users keep their heads."""

from importlib.metadata import version

# A user's code begins.
import fedrep_given as given
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.bridge import FrameworkBridgeFactory as bridges
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy


class Network(given.Network):
    def loss(self, x, y):
        return cross_entropy(self(x), y)

    def metrics(self, x, y):
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class FedRep(FederatedAveraging):
    def __init__(self):
        super().__init__()
        self.heads = {}

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        net, user = model.pytorch_model, user_dataset.user_id
        if user in self.heads:
            net.head.load_state_dict(self.heads[user])
        for part, epochs in ((net.head, given.HEAD_EPOCHS), (net.body, given.BODY_EPOCHS)):
            net.requires_grad_(False)
            part.requires_grad_(True)
            for _ in range(epochs):
                bridges.sgd_bridge().do_sgd(model, user_dataset, central_context.model_train_params)
        net.requires_grad_(True)
        self.heads[user] = {name: leaf.clone() for name, leaf in net.head.state_dict().items()}
        return model.get_model_difference(initial_model_state), Metrics()


clients = given.make_clients()
data = FederatedDataset(
    lambda user: PyTorchTensorDataset(clients[user][0], user_id=str(user)),
    MinimizeReuseUserSampler(list(range(len(clients)))),
)
net = Network()
local = {name: value for name, value in given.SGD.items() if name != "lr"}
algorithm = FedRep()
algorithm.run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=given.ROUNDS,
        evaluation_frequency=given.ROUNDS + 1,
        train_cohort_size=len(clients),
        val_cohort_size=None,
    ),
    backend=SimulatedBackend(training_data=data, val_data=data),
    model=PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, **local),
        torch.optim.SGD(net.parameters(), lr=1.0),
    ),
    model_train_params=NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=given.SGD["lr"], local_batch_size=given.BATCH
    ),
)
right = []
for client, (_, (x, y)) in enumerate(clients):
    net.head.load_state_dict(algorithm.heads[str(client)])
    with torch.no_grad():
        right.append((net(x).argmax(1) == y).float().mean())
accuracy = float(torch.stack(right).mean())
# A user's code ends.

given.finish(version("pfl"), accuracy)

"""FedRep as a plain loop of PyTorch."""

# A user's code begins.
import copy

import fedrep_given as given
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train(model, loader, part, epochs):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(part))
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(chosen, **given.SGD)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


clients = given.make_clients()
models = [given.Network() for _ in clients]
for model in models:
    model.body.load_state_dict(models[0].body.state_dict())
for _ in range(given.ROUNDS):
    for model, (examples, _) in zip(models, clients, strict=True):
        loader = DataLoader(TensorDataset(*examples), batch_size=given.BATCH, shuffle=True)
        train(model, loader, "head", given.HEAD_EPOCHS)
        train(model, loader, "body", given.BODY_EPOCHS)
    bodies = [copy.deepcopy(model.body.state_dict()) for model in models]
    mean = {name: sum(body[name] for body in bodies) / len(bodies) for name in bodies[0]}
    for model in models:
        model.body.load_state_dict(mean)
with torch.no_grad():
    right = [
        (model(x).argmax(1) == y).float().mean()
        for model, (_, (x, y)) in zip(models, clients, strict=True)
    ]
accuracy = float(torch.stack(right).mean())
# A user's code ends.

given.finish(torch.__version__, accuracy)

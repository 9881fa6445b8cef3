"""FedRep with Flower: bodies are sent, heads stay in their clients' state."""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from importlib.metadata import version

# A user's code begins.
import fedrep_given as given
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

client, server, clients = ClientApp(), ServerApp(), given.make_clients()


def load(message, context):
    model = given.Network()
    model.body.load_state_dict(message.content["arrays"].to_torch_state_dict())
    if "head" in context.state:
        model.head.load_state_dict(context.state["head"].to_torch_state_dict())
    return model, clients[int(context.node_config["partition-id"])]


def fit(model, part, loader, epochs):
    model.requires_grad_(False)
    part.requires_grad_(True)
    optimizer = torch.optim.SGD(part.parameters(), **given.SGD)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def answer(message, **records):
    return Message(content=RecordDict(records), reply_to=message)


@client.train()
def train(message, context):
    model, (examples, _) = load(message, context)
    loader = DataLoader(TensorDataset(*examples), batch_size=given.BATCH, shuffle=True)
    fit(model, model.head, loader, given.HEAD_EPOCHS)
    fit(model, model.body, loader, given.BODY_EPOCHS)
    context.state["head"] = ArrayRecord(model.head.state_dict())
    count = MetricRecord({"num-examples": len(examples[1])})
    return answer(message, arrays=ArrayRecord(model.body.state_dict()), metrics=count)


@client.evaluate()
def evaluate(message, context):
    model, (_, (x, y)) = load(message, context)
    with torch.no_grad():
        right = float((model(x).argmax(1) == y).float().mean())
    return answer(message, metrics=MetricRecord({"accuracy": right, "num-examples": len(y)}))


@server.main()
def serve(grid, context):
    global accuracy
    strategy = FedAvg(min_train_nodes=len(clients), min_available_nodes=len(clients))
    start = ArrayRecord(given.Network().body.state_dict())
    found = strategy.start(grid=grid, initial_arrays=start, num_rounds=given.ROUNDS)
    accuracy = found.evaluate_metrics_clientapp[given.ROUNDS]["accuracy"]


run_simulation(
    server_app=server,
    client_app=client,
    num_supernodes=len(clients),
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
)
# A user's code ends.

given.finish(version("flwr"), accuracy)

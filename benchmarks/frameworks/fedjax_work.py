"""FedJAX: its federated averaging, compiled for each client by jax.jit, in one process."""

from __future__ import annotations

import os

if os.environ.get("OMP_NUM_THREADS") == "1":  # XLA has threads of its own
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

from importlib.metadata import version

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from contest import BATCH, CLASSES, CLOCKS, OPTIMIZER, SIZES, Size, arguments, report
from fedjax.algorithms import fed_avg


def dense(x: jax.Array) -> jax.Array:
    return hk.nets.MLP([128, 64, CLASSES])(x)


def convolutional(x: jax.Array) -> jax.Array:
    for channels in (32, 64):
        x = hk.Conv2D(channels, 5, padding="VALID")(x)
        x = jax.nn.relu(hk.max_pool(x, 2, 2, "VALID"))
    return hk.Linear(CLASSES)(jax.nn.relu(hk.Linear(512)(hk.Flatten()(x))))


MODELS = {"A": dense, "B": convolutional}


def make_data(size: Size, clients: int) -> fedjax.InMemoryFederatedData:
    """Channels are last, as JAX has them on a CPU."""
    shape = (size.samples, *size.shape[1:], size.shape[0]) if len(size.shape) == 3 else None
    found = {}
    for client in range(clients):
        draws = np.random.default_rng(client)
        x = draws.normal(size=shape or (size.samples, *size.shape)).astype(np.float32)
        found[b"%d" % client] = {"x": x, "y": draws.integers(CLASSES, size=size.samples)}
    return fedjax.InMemoryFederatedData(found)


def main() -> None:
    wanted = arguments()
    size, clock = SIZES[wanted.work], CLOCKS[wanted.clock]
    data = make_data(size, wanted.clients or size.clients)
    network = hk.transform(lambda batch: MODELS[wanted.work](batch["x"]))
    sample = {name: jnp.asarray(rows[:1]) for name, rows in _first(data).items()}
    model = fedjax.create_model_from_haiku(
        network,
        sample,
        lambda batch, outputs: optax.softmax_cross_entropy_with_integer_labels(outputs, batch["y"]),
    )
    local = optax.chain(
        optax.add_decayed_weights(OPTIMIZER["weight_decay"]),
        optax.sgd(OPTIMIZER["lr"], OPTIMIZER["momentum"]),
    )
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.create_optimizer_from_optax(local),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(BATCH, num_epochs=size.epochs),
    )
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    seconds = []
    for round in range(wanted.rounds + 1):
        keys = jax.random.split(jax.random.PRNGKey(round), data.num_clients())
        begin = clock()
        chosen = [(name, x, key) for (name, x), key in zip(data.clients(), keys, strict=True)]
        state, _ = algorithm.apply(state, chosen)
        jax.block_until_ready(state.params)
        seconds.append(clock() - begin)
    report(version("fedjax"), seconds=seconds[1:])


def _first(data: fedjax.InMemoryFederatedData) -> dict[str, np.ndarray]:
    _, examples = next(iter(data.clients()))
    found: dict[str, np.ndarray] = examples.all_examples()
    return found


if __name__ == "__main__":
    main()

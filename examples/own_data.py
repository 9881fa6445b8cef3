"""Your own data in ten lines: a table with a column to predict and one that says whose row it is.

    python examples/own_data.py

The table here is scikit-learn's 178 wines, dealt out to six cellars; put your own in its place.
Every owner becomes a client, a fifth of its rows is set aside to test it, and columns are
standardised.
"""

import numpy as np
from sklearn.datasets import load_wine

import quiverfl as qv

wines = load_wine(as_frame=True).frame
wines["cellar"] = [f"cellar {k}" for k in np.random.default_rng(0).integers(6, size=len(wines))]
wines.to_csv("wines.csv", index=False)

table = qv.load_dataset("table", path="wines.csv", label="target", owner="cellar")
data = qv.partition(table, "natural")
task = qv.Task(lambda: qv.make_model("mlp", (13,), 3, hidden=[16]), personal="head")
run = qv.simulate(
    task,
    data,
    method=qv.DFedPGP(),
    topology=qv.random_push(clients=data.clients, neighbors=2, seed=0),
    training=qv.Training(lr=0.05, momentum=0.9, batch_size=8),
    rounds=10,
)
run.save("runs/wines", name="wines")  # quiver report runs/wines
last = run.history[(run.history["round"] == 9) & (run.history["stage"] == "mixed")]
for name, accuracy in zip(data.names, last["accuracy"], strict=True):
    print(f"{name}: {accuracy:.2f}")

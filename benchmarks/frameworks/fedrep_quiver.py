"""FedRep with Quiver."""

# A user's code begins.
import fedrep_given as given

import quiverfl as qv

train, test = zip(*given.make_clients(), strict=True)
run = qv.simulate(
    qv.Task(given.Network, personal=("head",)),
    qv.FederatedData.from_arrays(train, test, classes=given.CLASSES),
    method=qv.FedRep(personal_epochs=given.HEAD_EPOCHS, shared_epochs=given.BODY_EPOCHS),
    topology=qv.star(given.CLIENTS, sampled=given.CLIENTS),
    training=qv.Training(**given.SGD, batch_size=given.BATCH),
    rounds=given.ROUNDS,
    evaluate_every=given.ROUNDS,
)
accuracy = run.summary["stages"]["mixed"]["last"]["mean"]
# A user's code ends.

given.finish(qv.__version__, accuracy)

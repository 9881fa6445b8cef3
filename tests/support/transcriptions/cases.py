"""Every method under the settings that could tell a wrong transcription from a right one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import quiverfl as qv
from transcriptions.fedamp import OWN, SHARPNESS
from transcriptions.problem import CLIENTS, Case, HeadFirst


def column_stochastic() -> qv.Topology:
    """A fixed matrix without symmetry, every share different."""
    random = np.random.default_rng(5)
    matrix = random.uniform(0.1, 1.0, (CLIENTS, CLIENTS)) * (
        random.random((CLIENTS, CLIENTS)) < 0.5
    )
    np.fill_diagonal(matrix, 0.6)
    return qv.from_matrix(matrix / matrix.sum(axis=0))


def row_stochastic() -> qv.Topology:
    return qv.from_matrix(column_stochastic()(0).weights.T)


isolated = partial(qv.isolated, clients=CLIENTS)
star = partial(qv.star, clients=CLIENTS, sampled=2, seed=4)
push = partial(qv.random_push, clients=CLIENTS, neighbors=2, seed=0)
pull = partial(qv.random_pull, clients=CLIENTS, neighbors=2, seed=0)
regular = partial(qv.random_regular, clients=CLIENTS, neighbors=3, seed=0)
ring = partial(qv.ring, clients=CLIENTS)


attention = partial(
    qv.similar_pull,
    clients=CLIENTS,
    neighbors=CLIENTS - 1,
    sharpness=SHARPNESS,
    own=OWN,
    sketch=2**16,  # so many buckets that no two numbers share one
)


def some_offline(topology: Any) -> Any:
    return lambda: qv.participating(topology(), fraction=0.6, seed=1)


EPOCHS = {"epochs": 2}
ALTERNATING = {"personal_epochs": 2, "shared_epochs": 3}
BABU = {"epochs": 2, "finetune_epochs": 2, "finetune_lr": 0.05}
DITTO = {"epochs": 2, "personal_epochs": 3, "proximal": 0.75}
SPARSE = {"epochs": 2, "prune_rate": 0.5}
AMP = {"epochs": 2, "proximal": 0.5, "weighting": "uniform"}
PROX = {"epochs": 2, "proximal": 0.5}
MOON = {"epochs": 2, "contrast": 2.0, "temperature": 0.5}
PROTO = {"epochs": 2, "proximal": 2.0}
PFEDME = {"steps": 3, "inner_steps": 2, "proximal": 1.5}
PER = {"epochs": 2, "inner_lr": 0.3}
SAM = {"epochs": 2, "rho": 0.3}
PGP_SAM = {**ALTERNATING, "rho": 0.3}
DEPRL = {"personal_steps": 3, "shared_steps": 2}
KGT = {"epochs": 2, "mixing_lr": 0.7}
DBE = {"epochs": 2, "mean_weight": 6.0}
ALA = {"epochs": 2, "weight_epochs": 2, "weight_lr": 3.0}
AS = {"epochs": 2, "align_epochs": 2, "align_lr": 0.4}
SOME_IDLE = (1, 0, 2, 3, 0, 1)
FULL: dict[str, Any] = {"batch_size": None, "epochs_per_client": None}
PLAIN_RATE: dict[str, Any] = {"personal_lr": None, "clip_norm": None}
BY_STEPS: dict[str, Any] = {"epochs_per_client": None}
TRACKED: dict[str, Any] = {**BY_STEPS, "rounds": 6, "clip_norm": 1.0}
EXACT: dict[str, Any] = {"tolerance": 1e-12}

CASES: dict[str, Case] = {
    "Local": Case("Local", EPOCHS, isolated),
    "Local, full batch": Case("Local", EPOCHS, isolated, **FULL),
    "Local, offline": Case("Local", EPOCHS, some_offline(isolated)),
    "FedAvg": Case("FedAvg", EPOCHS, star),
    "FedAvg, full batch": Case("FedAvg", EPOCHS, star, clip_norm=0.9, **FULL),
    "FedAvg, uniform": Case("FedAvg", {**EPOCHS, "weighting": "uniform"}, star),
    "FedAvg, rows": Case("FedAvg", EPOCHS, row_stochastic),
    "FedAvg, own starts": Case("FedAvg", EPOCHS, star, common_init=False),
    "FedPer": Case("FedPer", EPOCHS, star),
    "FedPer, full batch": Case("FedPer", EPOCHS, star, clip_norm=0.9, **FULL),
    "FedPer, uniform": Case("FedPer", {**EPOCHS, "weighting": "uniform"}, star, **PLAIN_RATE),
    "FedRep": Case("FedRep", ALTERNATING, star),
    "FedRep, full batch": Case("FedRep", ALTERNATING, star, **FULL),
    "FedRep, uniform": Case("FedRep", {**ALTERNATING, "weighting": "uniform"}, star, **PLAIN_RATE),
    "FedRep, personal input layer": Case("FedRep", ALTERNATING, star, personal="body.0"),
    "FedBABU": Case("FedBABU", BABU, star, clip_norm=0.45),
    "FedBABU, full batch": Case("FedBABU", BABU, star, clip_norm=0.45, **FULL),
    "FedBABU, uniform": Case("FedBABU", {**BABU, "weighting": "uniform"}, star, **PLAIN_RATE),
    "FedBABU, less momentum": Case("FedBABU", BABU, star, momentum=0.5, common_init=False),
    "Ditto": Case("Ditto", DITTO, star),
    "Ditto, full batch": Case("Ditto", DITTO, star, **FULL),
    "Ditto, uniform": Case("Ditto", {**DITTO, "weighting": "uniform"}, star, **PLAIN_RATE),
    "DFedAvgM": Case("DFedAvgM", EPOCHS, regular),
    "DFedAvgM, full batch": Case("DFedAvgM", EPOCHS, ring, **FULL),
    "DFedAvgM, offline": Case("DFedAvgM", EPOCHS, some_offline(regular)),
    "DFedAvgM, rows": Case("DFedAvgM", EPOCHS, row_stochastic, common_init=False),
    "DFedAvgMP": Case("DFedAvgMP", ALTERNATING, regular),
    "DFedAvgMP, full batch": Case("DFedAvgMP", ALTERNATING, ring, **FULL),
    "DFedAvgMP, joint": Case("DFedAvgMP", {**ALTERNATING, "alternating": False}, regular),
    "DFedAvgMP, offline": Case("DFedAvgMP", ALTERNATING, some_offline(pull), **PLAIN_RATE),
    "OSGP": Case("OSGP", EPOCHS, push),
    "OSGP, full batch": Case("OSGP", EPOCHS, column_stochastic, **FULL),
    "OSGP, rows": Case("OSGP", EPOCHS, pull),
    "OSGP, delay 1": Case("OSGP", {**EPOCHS, "delay": 1}, push, rounds=5),
    "OSGP, delay 2": Case("OSGP", {**EPOCHS, "delay": 2}, column_stochastic, rounds=6, **FULL),
    "OSGP, offline": Case("OSGP", EPOCHS, some_offline(push)),
    "OSGP, offline, delay 1": Case("OSGP", {**EPOCHS, "delay": 1}, some_offline(push), rounds=7),
    "OSGP, offline, delay 2": Case("OSGP", {**EPOCHS, "delay": 2}, some_offline(push), rounds=8),
    "OSGP, floor": Case("OSGP", {**EPOCHS, "step_floor": 0.8}, push),
    "OSGP, debiased": Case("OSGP", {**EPOCHS, "step": "debiased"}, push),
    "OSGP, debiased, delay 1": Case(
        "OSGP", {**EPOCHS, "delay": 1, "step": "debiased"}, push, rounds=5
    ),
    "DisPFL": Case("DisPFL", SPARSE, regular),
    "DisPFL, full batch": Case("DisPFL", SPARSE, ring, **FULL),
    "DisPFL, gradient": Case("DisPFL", {**SPARSE, "regrow": "gradient"}, pull),
    "DisPFL, gradient, full batch": Case(
        "DisPFL", {**SPARSE, "regrow": "gradient"}, row_stochastic, **FULL
    ),
    "DisPFL, rows": Case("DisPFL", SPARSE, row_stochastic),
    "DisPFL, offline": Case("DisPFL", SPARSE, some_offline(regular)),
    "DisPFL, dense": Case("DisPFL", SPARSE, regular, untold={"density": 0.9}),
    "DisPFL, exact share": Case("DisPFL", SPARSE, regular, rounds=3, untold={"density": 0.548}),
    "DisPFL, head first": Case("DisPFL", SPARSE, regular, model=HeadFirst),
    "DFedPGP": Case("DFedPGP", ALTERNATING, push, **EXACT),
    "DFedPGP, full batch": Case("DFedPGP", ALTERNATING, push, **FULL, **EXACT),
    "DFedPGP, pull": Case("DFedPGP", ALTERNATING, pull, **EXACT),
    "DFedPGP, columns": Case("DFedPGP", ALTERNATING, column_stochastic, rounds=6, **EXACT),
    "DFedPGP, columns, full batch": Case(
        "DFedPGP", ALTERNATING, column_stochastic, batch_size=None, **EXACT
    ),
    "DFedPGP, no clipping": Case("DFedPGP", ALTERNATING, push, **PLAIN_RATE, **EXACT),
    "DFedPGP, own starts": Case("DFedPGP", ALTERNATING, push, common_init=False, **EXACT),
    "DFedPGP, offline": Case("DFedPGP", ALTERNATING, some_offline(push), rounds=5, **EXACT),
    "DFedPGP, personal input layer": Case("DFedPGP", ALTERNATING, push, personal="body.0", **EXACT),
    "DFedPGP, head first": Case("DFedPGP", ALTERNATING, push, model=HeadFirst, **EXACT),
    "DFedPGP, floor": Case("DFedPGP", {**ALTERNATING, "step_floor": 0.8}, push, **EXACT),
    "DFedPGP, debiased": Case("DFedPGP", {**ALTERNATING, "step": "debiased"}, push, **EXACT),
    "DFedPGP, debiased, offline": Case(
        "DFedPGP", {**ALTERNATING, "step": "debiased"}, some_offline(push), rounds=5, **EXACT
    ),
    "FedProx": Case("FedProx", PROX, star),
    "FedProx, full batch": Case("FedProx", PROX, star, clip_norm=0.9, **FULL),
    "FedProx, uniform": Case("FedProx", {**PROX, "weighting": "uniform"}, star, **PLAIN_RATE),
    "FedProx, rows": Case("FedProx", PROX, row_stochastic),
    "FedProx, own starts": Case("FedProx", PROX, star, common_init=False),
    "SCAFFOLD": Case("SCAFFOLD", EPOCHS, star),
    "SCAFFOLD, full batch": Case("SCAFFOLD", EPOCHS, star, **FULL),
    "SCAFFOLD, plain steps": Case("SCAFFOLD", EPOCHS, star, momentum=0.0, **PLAIN_RATE),
    "SCAFFOLD, rows": Case("SCAFFOLD", EPOCHS, row_stochastic),
    "SCAFFOLD, offline": Case("SCAFFOLD", EPOCHS, some_offline(regular)),
    "SCAFFOLD, no epochs": Case("SCAFFOLD", EPOCHS, star, epochs_per_client=SOME_IDLE),
    "SCAFFOLD, own starts": Case("SCAFFOLD", EPOCHS, star, common_init=False),
    "MOON": Case("MOON", MOON, star, clip_norm=1.0),
    "MOON, full batch": Case("MOON", MOON, star, clip_norm=1.0, **FULL),
    "MOON, uniform": Case("MOON", {**MOON, "weighting": "uniform"}, star, **PLAIN_RATE),
    "MOON, rows": Case("MOON", MOON, row_stochastic, clip_norm=1.0),
    "MOON, own starts": Case("MOON", MOON, star, clip_norm=1.0, common_init=False),
    "FedProto": Case("FedProto", PROTO, star),
    "FedProto, full batch": Case("FedProto", PROTO, star, **FULL),
    "FedProto, rows": Case("FedProto", PROTO, row_stochastic),
    "FedProto, offline": Case("FedProto", PROTO, some_offline(regular)),
    "FedProto, own starts": Case("FedProto", PROTO, star, common_init=False),
    "APFL": Case("APFL", EPOCHS, star),
    "APFL, full batch": Case("APFL", EPOCHS, star, **FULL),
    "APFL, fixed": Case("APFL", {**EPOCHS, "adaptive": False}, star),
    "APFL, rows": Case("APFL", EPOCHS, row_stochastic, rounds=8),
    "APFL, own starts": Case("APFL", EPOCHS, star, common_init=False),
    "APFL, no clipping": Case("APFL", EPOCHS, star, **PLAIN_RATE),
    "PFedMe": Case("PFedMe", PFEDME, star, **BY_STEPS),
    "PFedMe, full batch": Case("PFedMe", PFEDME, star, **FULL),
    "PFedMe, rows": Case("PFedMe", PFEDME, row_stochastic, **BY_STEPS),
    "PFedMe, own starts": Case("PFedMe", PFEDME, star, common_init=False, **BY_STEPS),
    "PFedMe, no clipping": Case("PFedMe", PFEDME, star, **PLAIN_RATE, **BY_STEPS),
    "PerFedAvg": Case("PerFedAvg", PER, star),
    "PerFedAvg, full batch": Case("PerFedAvg", PER, star, **FULL),
    "PerFedAvg, uniform": Case("PerFedAvg", {**PER, "weighting": "uniform"}, star, **PLAIN_RATE),
    "PerFedAvg, rows": Case("PerFedAvg", PER, row_stochastic),
    "DFedSAM": Case("DFedSAM", SAM, regular),
    "DFedSAM, full batch": Case("DFedSAM", SAM, ring, **FULL),
    "DFedSAM, offline": Case("DFedSAM", SAM, some_offline(regular)),
    "DFedSAM, rows": Case("DFedSAM", SAM, row_stochastic, common_init=False),
    "DFedPGPSAM": Case("DFedPGPSAM", PGP_SAM, push),
    "DFedPGPSAM, full batch": Case("DFedPGPSAM", PGP_SAM, push, **FULL),
    "DFedPGPSAM, pull": Case("DFedPGPSAM", PGP_SAM, pull),
    "DFedPGPSAM, columns": Case("DFedPGPSAM", PGP_SAM, column_stochastic, common_init=False),
    "DFedPGPSAM, offline": Case("DFedPGPSAM", PGP_SAM, some_offline(push), rounds=5),
    "DFedPGPSAM, floor": Case("DFedPGPSAM", {**PGP_SAM, "step_floor": 0.8}, push),
    "DFedPGPSAM, debiased": Case("DFedPGPSAM", {**PGP_SAM, "step": "debiased"}, push),
    "DFedSalt": Case("DFedSalt", PGP_SAM, regular),
    "DFedSalt, full batch": Case("DFedSalt", PGP_SAM, ring, **FULL),
    "DFedSalt, offline": Case("DFedSalt", PGP_SAM, some_offline(pull)),
    "DFedSGPSM": Case("DFedSGPSM", SAM, push),
    "DFedSGPSM, full batch": Case("DFedSGPSM", SAM, column_stochastic, **FULL),
    "DFedSGPSM, debiased": Case("DFedSGPSM", {**SAM, "step": "debiased"}, some_offline(push)),
    "DePRL": Case("DePRL", DEPRL, regular, **BY_STEPS),
    "DePRL, full batch": Case("DePRL", DEPRL, ring, **FULL),
    "DePRL, offline": Case("DePRL", DEPRL, some_offline(pull), **BY_STEPS),
    "KGT": Case("KGT", KGT, regular),
    "KGT, full batch": Case("KGT", KGT, ring, **FULL),
    "KGT, offline": Case("KGT", KGT, some_offline(regular), clip_norm=None),
    "KGT, rows, no epochs": Case("KGT", KGT, row_stochastic, epochs_per_client=SOME_IDLE),
    "FedALA": Case("FedALA", ALA, star),
    "FedALA, full batch": Case("FedALA", ALA, star, clip_norm=0.9, **FULL),
    "FedALA, uniform": Case("FedALA", {**ALA, "weighting": "uniform"}, row_stochastic),
    "FedDBE": Case("FedDBE", DBE, star, clip_norm=1.0),
    "FedDBE, full batch": Case("FedDBE", DBE, star, clip_norm=1.0, **FULL),
    "FedDBE, uniform": Case("FedDBE", {**DBE, "weighting": "uniform"}, row_stochastic),
    "FedRoD": Case("FedRoD", EPOCHS, star),
    "FedRoD, full batch": Case("FedRoD", EPOCHS, star, **FULL),
    "FedRoD, uniform": Case("FedRoD", {**EPOCHS, "weighting": "uniform"}, row_stochastic),
    "FedAS": Case("FedAS", AS, star),
    "FedAS, full batch": Case("FedAS", AS, star, **FULL),
    "FedAS, rows, no epochs": Case("FedAS", AS, row_stochastic, epochs_per_client=SOME_IDLE),
    "ScaffoldP": Case("ScaffoldP", EPOCHS, star),
    "ScaffoldP, full batch": Case("ScaffoldP", EPOCHS, star, **FULL),
    "ScaffoldP, plain steps": Case("ScaffoldP", EPOCHS, star, momentum=0.0, **PLAIN_RATE),
    "ScaffoldP, rows, no epochs": Case(
        "ScaffoldP", EPOCHS, row_stochastic, epochs_per_client=SOME_IDLE
    ),
    "ScaffoldP, offline": Case("ScaffoldP", EPOCHS, some_offline(regular)),
    "LG-FedAvg": Case("FedPer", EPOCHS, star, personal="body", transcription="lgfedavg"),
    "LG-FedAvg, full batch": Case(
        "FedPer",
        EPOCHS,
        star,
        clip_norm=0.9,
        personal="body",
        transcription="lgfedavg",
        **FULL,
    ),
    "FedAMP": Case("FedProx", AMP, attention, transcription="fedamp", tolerance=1e-6),
    "FedAMP, full batch": Case(
        "FedProx", AMP, attention, transcription="fedamp", tolerance=1e-6, **FULL
    ),
    "PushDIGing": Case("PushDIGing", {}, push, **TRACKED),
    "PushDIGing, full batch": Case("PushDIGing", {}, push, batch_size=None, **TRACKED),
    "PushDIGing, columns": Case("PushDIGing", {}, column_stochastic, **TRACKED),
    "PushDIGing, offline": Case("PushDIGing", {}, some_offline(push), **TRACKED),
    "PushDIGing, own starts": Case("PushDIGing", {}, push, common_init=False, **TRACKED),
}

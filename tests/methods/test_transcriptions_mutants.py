"""The comparison has teeth: the product differs from every deliberate error.

Each mutant is a transcription with one mistake that published code has made or a careless reader
would make. If one of them agreed with the product, the comparison could not see that mistake.
"""

from __future__ import annotations

import pytest

from transcriptions.cases import CASES
from transcriptions.problem import differences, observed, transcribed

SEEN = 1e-8
"""A hundred times the loosest tolerance: a mutant must be told from rounding at a glance."""

MUTANTS: dict[str, tuple[str, ...]] = {
    "Local": (
        "rate not decayed",
        "personal_lr on the head",
        "momentum survives the round",
        "every epoch in the same order",
        "partial batch dropped",
        "mean over the padded batch",
        "no clipping",
        "clipped tensor by tensor",
        "an epsilon in the clipping",
        "decay before clipping",
        "no decay on biases",
        "dampening",
        "nesterov",
    ),
    "Local, offline": ("offline clients train",),
    "FedAvg": (
        "transposed",
        "not weighted by samples",
        "everybody trains",
        "only the sampled receive",
        "the head is not averaged",
        "personal_lr on the head",
        "momentum survives the round",
    ),
    "FedAvg, rows": ("transposed", "not weighted by samples"),
    "FedPer": (
        "personal part averaged",
        "personal part starts afresh",
        "personal_lr ignored",
        "personal_lr not decayed",
        "each part clipped by itself",
        "momentum survives the round",
        "not weighted by samples",
    ),
    "FedRep": (
        "u before v",
        "frozen part decayed",
        "momentum moves the frozen part",
        "unequal epochs for v too",
        "personal_lr ignored",
        "personal part averaged",
        "not weighted by samples",
    ),
    "FedBABU": (
        "the head is trained",
        "the head is decayed",
        "no fine-tuning",
        "only the head fine-tuned",
        "fine-tuning not on a copy",
        "fine-tuning rate decayed",
        "fine-tuning with weight decay",
        "fine-tuning clipped",
        "fine-tuning batches of the round",
        "not weighted by samples",
    ),
    "FedBABU, less momentum": ("fine-tuning with the momentum of training",),
    "Ditto": (
        "anchor after the update",
        "theta starts from the received model",
        "theta is sent",
        "everybody trains theta",
        "the global model evaluated",
        "proximal term after clipping",
        "personal_lr on theta",
        "unequal epochs for theta too",
        "not weighted by samples",
    ),
    "DFedAvgM": (
        "the head is not mixed",
        "sends what it had before training",
        "momentum survives the round",
        "personal_lr on the head",
    ),
    "DFedAvgM, rows": ("transposed",),
    "DFedAvgM, offline": ("offline clients train", "local stage of the idle is what they hold"),
    "DFedAvgMP": (
        "u before v",
        "personal part mixed",
        "personal_lr ignored",
        "joint instead of alternating",
    ),
    "DFedAvgMP, joint": ("each part clipped by itself", "personal_lr ignored"),
    "DFedAvgMP, offline": ("transposed",),
    "OSGP": (
        "transposed",
        "μ ignored",
        "gradient at u",
        "decay at u",
        "z moves by η",
        "one round later",
        "momentum survives the round",
        "personal_lr on the head",
    ),
    "OSGP, delay 1": (
        "transposed",
        "own share delayed",
        "one round later",
        "weights of the round of arrival",
    ),
    "OSGP, delay 2": ("μ ignored", "own share delayed", "one round later"),
    "OSGP, offline, delay 1": ("messages to the offline are lost", "an offline client merges"),
    "OSGP, offline, delay 2": ("messages to the offline are lost", "an offline client merges"),
    "OSGP, floor": ("floor ignored", "floor divides without μ"),
    "DisPFL": (
        "masks exchanged one round late",
        "the new mask is sent",
        "new mask at the local stage",
        "gradient not masked before clipping",
        "masked at the end",
        "plain average",
        "own mask not applied",
        "the old mask applied",
        "regrown from zero",
        "pruned and not regrown",
        "pruned over all tensors",
        "pruned count rounded down",
        "largest pruned",
        "lowest score regrown",
        "regrown among all alike",
        "prune rate constant",
        "masks stay in the last round",
        "the same draw every round",
    ),
    "DisPFL, gradient": ("regrowth gradient masked", "gradient on the whole set"),
    "DisPFL, dense": ("regrown among all alike", "the just pruned regrown by index"),
    "DisPFL, exact share": ("no allowance for rounding",),
    "DisPFL, rows": ("transposed", "neighbours counted alike"),
    "DFedPGP": (
        "transposed",
        "gradient at u",
        "decay at u",
        "z moves by η",
        "z only after communication",
        "v trained at u",
        "u before v",
        "u is the output",
        "μ is not mixed",
        "personal part mixed",
        "personal_lr ignored",
        "personal_lr not decayed",
        "rate not decayed",
        "momentum survives the phase",
        "momentum survives the round",
        "clipped after dividing by μ",
        "unequal epochs for v too",
        "mean over the padded batch",
        "partial batch dropped",
    ),
    "DFedPGP, pull": ("transposed",),
    "DFedPGP, columns": ("transposed",),
    "DFedPGP, floor": ("floor ignored",),
}
PAIRS = [(name, mutant) for name, mutants in MUTANTS.items() for mutant in mutants]


@pytest.mark.parametrize(("name", "mutant"), PAIRS)
def test_a_deliberate_error_is_seen(name: str, mutant: str) -> None:
    case = CASES[name]
    outcome, _ = transcribed(case, mutant)
    found = differences(observed(case, "vectorized"), outcome)
    assert max(found.values()) > SEEN


def test_every_method_has_mutants() -> None:
    methods = {case.method for case in CASES.values()}
    assert {CASES[name].method for name in MUTANTS} == methods

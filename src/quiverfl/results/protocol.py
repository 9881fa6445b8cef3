"""Which accuracy is this? The answer, as an object that goes with every result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from quiverfl.errors import QuiverError, nearest
from quiverfl.results.summary import Report

Stage: TypeAlias = Literal["local", "mixed"]
Weighting: TypeAlias = Literal["uniform", "samples"]

STAGE_WORDS = {
    "local": "right after local training, before communication",
    "mixed": "right after communication",
}
REPORT_WORDS = {
    "last": "of the last evaluated round",
    "best": "of the best round (the one with the best mean over clients)",
    "last10": "averaged over the last ten evaluated rounds",
}
_WEIGHTING_WORDS = {
    "uniform": "the unweighted mean over clients",
    "samples": "the mean over clients weighted by their number of test samples",
}


@dataclass(frozen=True)
class EvaluationProtocol:
    """When a model is tested, which round counts and how clients are averaged.

    `finetune` says what is done to a copy before testing ("5 epochs of fine-tuning"), or None.
    """

    stage: Stage = "local"
    report: Report = "last"
    weighting: Weighting = "uniform"
    finetune: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("stage", Stage), ("report", Report), ("weighting", Weighting)):
            value = getattr(self, name)
            if value not in get_args(known):
                guess = nearest(str(value), get_args(known))
                raise QuiverError(f"evaluation {name} {value!r} is unknown: {guess}")

    def caption(self, metric: str = "accuracy") -> str:
        """One sentence for the foot of a table."""
        tested = f"after {self.finetune}" if self.finetune else UNTUNED
        return describe([self.stage], self.report, self.weighting, tested, metric)

    def record(self) -> dict[str, Any]:
        """As it is written into `summary.json`."""
        return asdict(self)


UNTUNED = "without any fine-tuning before the test"


def describe(
    stages: Sequence[str], report: Report, weighting: Weighting, tested: str, metric: str
) -> str:
    """The sentence under a table of one stage or of both."""
    when = " and ".join(f"“{stage}” ({STAGE_WORDS[stage]})" for stage in stages)
    return (
        f"Test {metric} at stage{'s' if len(stages) > 1 else ''} {when}, {REPORT_WORDS[report]}, "
        f"each client's model on that client's own test data, {tested}; "
        f"{_WEIGHTING_WORDS[weighting]}."
    )

"""Which accuracy is this? The answer, as an object that goes with every result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError, suggest
from quiverfl.types import Floats, Metrics, Stage

if TYPE_CHECKING:
    import pandas as pd


# What a history comes down to: last, best and mean of the last ten, at each stage.
#
# Pure functions of data frames; nothing is read or written here. A history has the columns round,
# stage, client and one per metric; a frame of rounds has one row per round, summed over clients.
#
# Three figures describe the clients at one moment, each over the clients that have test data:
#     mean      not weighted: every client counts the same (unless weights are given)
#     std       over clients, of the population (they are all there), so divided by their number
#     worst10   the mean of the worst tenth of the clients, rounded up to whole clients


Evaluation: TypeAlias = tuple[int, str, dict[str, npt.NDArray[np.float64]]]
"""Round, stage, and for each metric a number per client."""
Report: TypeAlias = Literal["last", "best", "last10"]
REPORTS: tuple[Report, ...] = ("last", "best", "last10")
STAGES = ("local", "mixed")
UNSEEN_STAGES = ("unseen", "fitted")
"""Stages of clients held out of the federation: before and after they fit their personal part.
Their rows count them from 0."""


def history_frame(evaluations: Iterable[Evaluation]) -> pd.DataFrame:
    """One row per (round, stage, client); what was evaluated twice counts as it was last."""
    import pandas as pd  # late: half a second that a peer's start need not wait for

    latest = {(round, stage): metrics for round, stage, metrics in evaluations}
    parts = []
    for (round, stage), metrics in sorted(latest.items(), key=lambda item: item[0]):
        clients = np.arange(max((len(values) for values in metrics.values()), default=0))
        parts.append(pd.DataFrame({"round": round, "stage": stage, "client": clients, **metrics}))
    if not parts:
        return pd.DataFrame({name: [] for name in ("round", "stage", "client")})
    return pd.concat(parts, ignore_index=True)


def rounds_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per round, as it was recorded last; lists, one number per client, are summed."""
    import pandas as pd

    latest = {int(record["round"]): record for record in records}
    rows = [
        {name: _over_clients(name, value) for name, value in record.items()}
        for _, record in sorted(latest.items())
    ]
    return pd.DataFrame(rows) if rows else pd.DataFrame({"round": []})


CROWD, HUNDRED = 50_000, 100
"""Clients above which a history keeps a number for each hundredth of them, unless it is told."""


def condense_metrics(metrics: Metrics, most: int) -> Metrics:
    """Where there are more clients than `most`, the means of equal hundredths of the clients.

    Each metric is sorted for itself, from the lowest value to the highest. The mean over all
    clients and that of the worst tenth stay what they are. Clients without a value are left out.
    """
    return {
        name: _average_hundredths(values) if len(values) > most else values
        for name, values in metrics.items()
    }


def _average_hundredths(values: Floats) -> Floats:
    present = np.sort(values[~np.isnan(values)])
    if len(present) < HUNDRED:
        return np.pad(present, (0, HUNDRED - len(present)), constant_values=np.nan)
    cuts = np.arange(HUNDRED + 1) * len(present) // HUNDRED
    means: Floats = np.add.reduceat(present, cuts[:-1]) / np.diff(cuts)
    return means


def condense_record(record: Mapping[str, Any], most: int) -> dict[str, Any]:
    """A round with one number in place of longer lists of clients' numbers."""
    return {
        name: _over_clients(name, value) if isinstance(value, list) and len(value) > most else value
        for name, value in record.items()
    }


def _over_clients(name: str, value: Any) -> Any:
    """Lists are summed; of what clients have spent of their privacy the most is what counts."""
    if not isinstance(value, list):
        return value
    return max(value, default=0.0) if name == "epsilon" else sum(value)


def summarize(history: pd.DataFrame, rounds: pd.DataFrame) -> dict[str, Any]:
    """The numbers of `summary.json`: every stage at last / best / last10, and what it all cost."""
    metric = headline_metric(history)
    stages, unseen = (
        _summarize_stages(history, names, metric) for names in (STAGES, UNSEEN_STAGES)
    )
    theirs = {"unseen": {"stages": unseen}} if unseen else {}
    return {"metric": metric, "stages": stages, **theirs, **sum_costs(rounds)}


def _summarize_stages(
    history: pd.DataFrame, stages: Sequence[str], metric: str
) -> dict[str, dict[Report, dict[str, float]]]:
    frames = {stage: client_frame(history, stage, metric) for stage in stages}
    return {
        stage: {report: _summarize_stage(values, report, metric) for report in REPORTS}
        for stage, values in frames.items()
        if len(values)
    }


def drop_attackers(history: pd.DataFrame, attackers: Sequence[int]) -> pd.DataFrame:
    """Without the rows of clients that were made to attack."""
    return history[~_attack(history, attackers)] if len(attackers) else history


def _attack(history: pd.DataFrame, attackers: Sequence[int]) -> pd.Series:
    """Which rows are attackers': clients that nobody has seen are counted by themselves."""
    mask: pd.Series = history["client"].isin(list(attackers)) & history["stage"].isin(STAGES)
    return mask


def summarize_attacked(
    history: pd.DataFrame, rounds: pd.DataFrame, attackers: Sequence[int]
) -> dict[str, Any]:
    """The same over honest clients; the attackers' own figures stand apart."""
    summary = summarize(drop_attackers(history, attackers), rounds)
    if not len(attackers):
        return summary
    theirs = summarize(history[_attack(history, attackers)], rounds)["stages"]
    return {**summary, "attackers": {"clients": list(attackers), "stages": theirs}}


def headline_metric(history: pd.DataFrame) -> str:
    """The metric results are judged by: the first of the task's; the loss comes last."""
    for metric in history.columns:
        if metric not in ("round", "stage", "client") and bool(history[metric].notna().any()):
            return str(metric)
    return "loss" if "loss" in history else "accuracy"


LOWER = ("loss", "mae", "mse", "rmse", "perplexity")
LOWER_ENDS = ("_loss", "_error")


def higher_is_better(metric: str) -> bool:
    """By the metric's name, your own included: a loss or an error is better when it is lower."""
    return metric not in LOWER and not metric.endswith(LOWER_ENDS)


def client_frame(history: pd.DataFrame, stage: str, metric: str) -> pd.DataFrame:
    """One row per evaluated round, one column per client; NaN for a client without test data."""
    if metric not in history:
        import pandas as pd

        return pd.DataFrame()
    rows = history[history["stage"] == stage]
    table = rows.pivot(index="round", columns="client", values=metric).sort_index()
    return table[table.notna().any(axis=1)]


def client_scores(
    values: pd.DataFrame, report: Report, metric: str, weights: pd.Series | None = None
) -> pd.Series:
    """One number per client: its last, that of the best round, or its mean of the last ten.

    The best round is one for all clients: the first with the best mean over them. "Ten" counts
    evaluated rounds, fewer where there are fewer.
    """
    if report == "last":
        return values.iloc[-1]
    if report == "last10":
        return values.tail(10).mean(axis=0)
    return values.iloc[_best_row(values, metric, weights)]


def find_best_round(values: pd.DataFrame, metric: str, weights: pd.Series | None = None) -> int:
    return int(values.index[_best_row(values, metric, weights)])


def _best_row(values: pd.DataFrame, metric: str, weights: pd.Series | None) -> int:
    means = mean_by_round(values, weights).to_numpy(dtype=np.float64)
    return int(np.nanargmax(means) if higher_is_better(metric) else np.nanargmin(means))


def mean_by_round(values: pd.DataFrame, weights: pd.Series | None = None) -> pd.Series:
    """The mean over clients in every evaluated round; clients without a value are left out."""
    if weights is None:
        return values.mean(axis=1)
    weight_table = values.notna() * weights.reindex(values.columns)
    means: pd.Series = (values * weight_table).sum(axis=1) / weight_table.sum(axis=1)
    return means


def describe_spread(
    scores: pd.Series, metric: str, weights: pd.Series | None = None
) -> dict[str, float]:
    """Mean, standard deviation and worst tenth over the clients that have a value."""
    present = scores.dropna()
    if present.empty:
        return {"mean": float("nan"), "std": float("nan"), "worst10": float("nan")}
    best_last = np.sort(present.to_numpy(dtype=np.float64))
    if not higher_is_better(metric):
        best_last = best_last[::-1]
    tenth = -(-len(best_last) // 10)
    return {
        "mean": float(mean_by_round(present.to_frame().T, weights).iloc[0]),
        "std": float(best_last.std()),
        "worst10": float(best_last[:tenth].mean()),
    }


def sum_costs(rounds: pd.DataFrame) -> dict[str, Any]:
    """What a run took.

    `bytes` cross the network, every message counted once; a server's own sending is among them.
    `busiest_bytes` is what the busiest node handles in its busiest round, the server too.
    `seconds` were spent computing; `clock` and `joules` are those of the run's devices.
    """
    return {
        "bytes": int(cost_column(rounds, "network_bytes").sum()),
        "busiest_bytes": int(cost_column(rounds, "busiest_bytes").max()) if len(rounds) else 0,
        "steps": int(cost_column(rounds, "steps").sum()),
        "seconds": float(cost_column(rounds, "seconds").sum()),
        **({"epsilon": float(rounds["epsilon"].max())} if "epsilon" in rounds else {}),
        **({"clock": float(rounds["clock"].max())} if "clock" in rounds else {}),
        **({"joules": float(rounds["joules"].sum())} if "joules" in rounds else {}),
    }


def cost_column(rounds: pd.DataFrame, name: str) -> pd.Series:
    """A column of numbers, zero where nothing was recorded."""
    if name not in rounds:
        import pandas as pd

        return pd.Series(0, index=rounds.index)
    return rounds[name].fillna(0)


def _summarize_stage(values: pd.DataFrame, report: Report, metric: str) -> dict[str, float]:
    figures = describe_spread(client_scores(values, report, metric), metric)
    if report == "last10":
        return {**figures, "rounds": min(10, len(values))}
    at = find_best_round(values, metric) if report == "best" else int(values.index[-1])
    return {**figures, "round": at}


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
                guess = suggest(str(value), get_args(known))
                raise QuiverError(f"evaluation {name} {value!r} is unknown: {guess}")

    def caption(self, metric: str = "accuracy") -> str:
        """One sentence for the foot of a table."""
        tested = f"after {self.finetune}" if self.finetune else UNTUNED
        return describe_protocol([self.stage], self.report, self.weighting, tested, metric)

    def record(self) -> dict[str, Any]:
        """The entry of `summary.json`."""
        return asdict(self)


UNTUNED = "without any fine-tuning before the test"


def describe_protocol(
    stages: Sequence[str], report: Report, weighting: Weighting, tested: str, metric: str
) -> str:
    """The sentence under a table of one stage or of both."""
    when = " and ".join(f"“{stage}” ({STAGE_WORDS[stage]})" for stage in stages)
    return (
        f"Test {metric} at stage{'s' if len(stages) > 1 else ''} {when}, {REPORT_WORDS[report]}, "
        f"each client's model on that client's own test data, {tested}; "
        f"{_WEIGHTING_WORDS[weighting]}."
    )

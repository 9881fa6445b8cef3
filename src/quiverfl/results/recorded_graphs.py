"""The graphs that a run wrote down because they depend on how it went."""

from __future__ import annotations

from quiverfl.results.run_files import RunResult
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.recorded import Watch, from_text, watch


def recorded_graphs(run: RunResult) -> list[Graph]:
    """By round; none if the topology does not look."""
    if "links" not in run.rounds:
        return []
    return [from_text(text) for text in run.rounds["links"] if isinstance(text, str)]


def watched(run: RunResult) -> Watch | None:
    """Whether the union of consecutive graphs stayed strongly connected."""
    graphs = recorded_graphs(run)
    return watch(graphs) if graphs else None

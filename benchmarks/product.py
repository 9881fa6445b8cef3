"""What is measured: a round of the product, as `simulate` plays it, and its evaluation."""

from __future__ import annotations

from benchmarks.works import TRAINING, Work
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.exchange.matrix import MatrixProduct
from quiverfl.engine.rounds import exchange_messages
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard


class Product:
    """Clients whose rounds can be called for one at a time."""

    def __init__(self, work: Work) -> None:
        method = work.method()
        settings = RunSettings(1_000, precision=work.precision)
        self.shard = Shard(work.task(), work.data(), method, TRAINING, settings)
        self._exchange = Exchange(MatrixProduct(method.delay))
        self._topology = work.topology()
        self._round = 0

    def round(self) -> None:
        """Draw the graph, train every client, mix."""
        graph = self._topology(self._round)
        self.shard.train(self._round, graph.active)
        exchange_messages(self.shard, self._exchange, graph, self._round)
        self._round += 1

    def evaluate(self) -> None:
        """Metrics of every client on its own test samples."""
        self.shard.evaluate(self._round, "mixed")

"""A peer from Python: `peer = qv.Peer.open(folder)`, then `await peer.run()`.

`quiver peer run` does the same, and lets SIGTERM and Ctrl-C call `stop`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiverfl.errors import QuiverError
from quiverfl.extras import require

if TYPE_CHECKING:
    from quiverfl.peer.node import Node
    from quiverfl.peer.peer_folder import PeerFolder
    from quiverfl.peer.peer_settings import Outcome
    from quiverfl.peer.setup import PeerParts


class Peer:
    """One member of a run between machines, as its folder says (`quiver peer init`)."""

    def __init__(self, folder: PeerFolder, join: bool, trust_store: bool) -> None:
        self._folder, self._join, self._trust_store = folder, join, trust_store
        self._parts: PeerParts | None = None
        self._node: Node | None = None
        self._state = "opened"
        self._stopping = False

    @classmethod
    def open(cls, folder: Path | str, *, join: bool = False, trust_store: bool = False) -> Peer:
        """Read a folder and make what it describes: data, model, method and graph are checked.

        With `join` it enters a run that is under way, if its folder has no store yet; with
        `trust_store` it goes on although neighbours remember a newer store.
        """
        require("peer", "qv.Peer")
        from quiverfl.peer.peer_folder import PeerFolder
        from quiverfl.peer.setup import build_learner

        peer = cls(PeerFolder.read(Path(folder)), join, trust_store)
        peer._folder.identity()
        peer._parts = build_learner(peer._folder)
        return peer

    @property
    def name(self) -> str:
        return self._folder.own.name

    @property
    def path(self) -> Path:
        return self._folder.path

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} of {self._folder.roster.run!r}: {self._state}>"

    async def run(self) -> Outcome:
        """Until its rounds are over, it has left, or `stop` was called; then how that went.

        Run it again, or in a new process, and it goes on from its store. Torch computes with as
        many threads as the folder's peer.toml says, in the whole process.
        """
        import torch

        from quiverfl.peer.peer_run import PeerRun
        from quiverfl.peer.setup import assemble, build_learner

        if self._state == "running":
            raise QuiverError(f"{self.name!r} is running already: await the first run.")
        parts, self._parts = self._parts or build_learner(self._folder), None
        self._state = "running"
        torch.set_num_threads(self._folder.own.threads or 1)
        record = PeerRun(self._folder, parts)
        try:
            with record.recording():
                node = await assemble(
                    self._folder, self._join, self._trust_store, record.record, parts
                )
                self._node = node
                if self._stopping:
                    node.stop()
                try:
                    outcome = await node.run()
                finally:
                    node.store.close()
            if outcome.finished:
                record.close()
        finally:
            self._state, self._stopping = "ended", False
        return outcome

    def status(self) -> dict[str, Any]:
        """What `quiver peer status --json` shows; before the first run only name and state."""
        if self._node is None:
            return {"name": self.name, "state": self._state}
        return self._node.status()

    def stop(self) -> None:
        """End soon, as SIGTERM does: what is being committed is finished, nothing is lost."""
        self._stopping = self._state == "running"
        if self._node is not None:
            self._node.stop()

    def leave(self) -> None:
        """Give all mass away and end, as `quiver peer leave` asks of a running peer."""
        if self._node is None or self._state != "running":
            raise QuiverError(f"{self.name!r} does not run: only a running peer can leave.")
        self._node.leave()

"""What a push makes of a message: the bytes of every share, and what stays."""

from __future__ import annotations

import hashlib

from quiverfl.engine.shares import kept, scaled
from quiverfl.peer.manifest import Array, Leaves, Manifest, as_coded, total
from quiverfl.transforms.coding import Origin


class Sealing:
    """A message that is to be split: as it is, or coded once for all its shares."""

    def __init__(
        self,
        manifest: Manifest,
        message: Leaves,
        origin: Origin,
        whole: bool = False,
        told: Array | None = None,
    ) -> None:
        self._manifest, self._message, self._code = manifest, message, b""
        self._told = manifest.telling(told)
        self._known: Leaves | None = None
        if manifest.coding is not None and not whole:
            self._code = manifest.coding.coded(message, origin)
            self._known = manifest.unpack(self._told + as_coded(self._code, 1.0), origin)

    def sealed(self, part: int, whole: int) -> tuple[bytes, str, float]:
        """Of a share: its bytes, what names them, the sum of its numbers."""
        if self._known is None:
            share = scaled(self._message, part, whole) if part != whole else self._message
            payload = self._told + self._manifest.pack(share)
        else:
            share = scaled(self._known, part, whole)
            payload = self._told + as_coded(self._code, part / whole)
        return payload, hashlib.sha256(payload).hexdigest(), total(share)

    def own(self, part: int, whole: int) -> Leaves:
        """What stays."""
        if self._known is None:
            return scaled(self._message, part, whole)
        return kept(self._message, self._known, part, whole)

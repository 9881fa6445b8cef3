"""`python -m quiverfl`: the command `quiver`, for torchrun and where it is not on the path."""

from __future__ import annotations

from quiverfl.cli.main import main
from quiverfl.distributed.processes import end_rank, world_size

if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if world_size() > 1 and isinstance(end.code, int | None):
            end_rank(end.code or 0)
        raise
    if world_size() > 1:
        end_rank(0)

"""`python -m quiverfl`: the command `quiver`, for torchrun and where it is not on the path."""

from __future__ import annotations

from quiverfl.cli.main import main

if __name__ == "__main__":
    main()

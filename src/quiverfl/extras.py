"""What is installed only on request: `pip install 'quiverfl[peer]'`."""

from __future__ import annotations

import importlib.util

from quiverfl.errors import QuiverError

EXTRAS = {
    "peer": ("grpc", "cryptography", "prometheus_client"),
    "tensorboard": ("tensorboard",),
    "ray": ("ray",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "datasets": ("datasets",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "privacy": ("opacus",),
}
"""The modules that Quiver imports of each."""


def require(extra: str, what: str) -> None:
    """Refuse in one sentence where a module of the extra is missing; `what` is what needs it."""
    missing = [module for module in EXTRAS[extra] if not _is_installed(module)]
    if missing:
        raise QuiverError(
            f"{what} needs {', '.join(missing)}, which is not installed: "
            f"`pip install 'quiverfl[{extra}]'` adds it."
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package above it is missing, or was blocked
        return False

"""What watches a run: progress, early stopping, and the trackers people look at runs with."""

from quiverfl.callbacks.early_stopping import EarlyStopping
from quiverfl.callbacks.trackers import MLflow, TensorBoard, WandB
from quiverfl.engine.recorders import Callback

__all__ = ["Callback", "EarlyStopping", "MLflow", "TensorBoard", "WandB"]

"""One thread per test process: tests run side by side, and tiny tensors gain nothing from more."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

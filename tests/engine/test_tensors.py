"""Our writer of safetensors against the library's reader."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quiverfl.engine import checkpoint as ours
from quiverfl.engine.checkpoint import TYPES, write_tensors


@pytest.mark.parametrize("piece", [16, 1 << 24])
def test_the_library_reads_what_we_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(ours, "PIECE", piece)
    chance = torch.Generator().manual_seed(0)
    kinds = {str(kind): torch.randint(2, (3, 5), generator=chance).to(kind) for kind in TYPES}
    tensors = {
        **kinds,
        "none": torch.zeros(0, 7),
        "one": torch.tensor(3.5),
        "every/other": torch.arange(10.0)[::2],
        "turned": torch.arange(6.0).view(2, 3).t(),
        "common row": torch.arange(4.0).expand(3, 4),
    }
    digest = write_tensors(tensors, tmp_path / "t.safetensors")
    assert digest == hashlib.sha256((tmp_path / "t.safetensors").read_bytes()).hexdigest()
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name

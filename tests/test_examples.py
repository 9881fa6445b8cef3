"""The examples run, at a size that takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_adapters_on_text_with_owners() -> None:
    command = [sys.executable, str(EXAMPLES / "lora_text.py"), "--quick"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "adapters shared, heads personal: perplexity" in done.stdout
    assert done.stderr == ""

"""The example that takes data with its clients out of archives."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_tables_with_clients_are_taken_out_of_archives_and_checked(tmp_path: Path) -> None:
    """No download here: what the archives hold is made up, and so are the digests."""
    place = importlib.util.spec_from_file_location("example", EXAMPLES / "natural_clients.py")
    assert place is not None
    assert place.loader is not None
    example = importlib.util.module_from_spec(place)
    place.loader.exec_module(example)
    wheel, text = tmp_path / "some.whl", "0,7,1,-3.6,0.4,1,2,3,4,5,6,7,8,9\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(example.VOWELS, text)
    with pytest.raises(ValueError, match="has the sha256"):
        example.vowels(wheel)
    example.SHA256[example.VOWELS] = hashlib.sha256(text.encode()).hexdigest()
    header, row = example.spoken(example.vowels(wheel))
    assert (header[0], header[-1]) == ("speaker", "vowel")
    assert row == ["7", "-3.6", "0.4", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
    assert len(header) == len(row)
    bought = ',"id","price.a","choice"\n"1",3,9.5,"a"\n'
    assert example.purchases(bought) == [["household", "price.a", "choice"], ["3", "9.5", "a"]]
    command = [sys.executable, str(EXAMPLES / "natural_clients.py"), "households", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "not the archive that is meant" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [wheel]

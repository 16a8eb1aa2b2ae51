"""The programs that make the examples' data say how they are called, and save no network that is not good enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trtpipe.examples.digits import save


@pytest.mark.parametrize(("example", "does"), [("digits", "make|onnx FOLDER"), ("shapes", "make FOLDER")])
def test_without_a_folder_a_program_says_how_it_is_called(example: str, does: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"trtpipe.examples.{example}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, f"usage: python -m trtpipe.examples.{example} {does}\n")


def test_a_network_that_did_not_learn_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^the network reached only 0\.5000 on val \(wanted 0\.9\)$"):
        save(torch.nn.Linear(1, 1), 0.5, 0.9, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())

"""What a job's code changes of the process is put back: results stand where they were asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nights
import pytest
import torch

import trtpipe
from trtpipe.pipeline.prepared import Stages
from trtpipe.progress import Silent

CHANGES = {
    "import os; os.chdir('/')": "the job's code went to the folder /; back to ",
    "import sys; sys.stdout = sys.stderr = None": "the job's code replaced sys.stdout or sys.stderr; put back",
    "torch.set_default_dtype(torch.float64)": "the job's code set torch's default dtype to float64; back to float32",
}


class Told(Silent):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fails", [False, True])
def test_a_stage_leaves_the_process_as_it_found_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, fails: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    told = Told()
    stages = Stages(told)
    try:
        with stages("model"):
            exec(change, {"torch": torch})
            if fails:
                raise ValueError("and then")
    except ValueError:
        assert fails
    assert os.getcwd() == str(tmp_path)
    assert sys.stdout is not None
    assert sys.stderr is not None
    assert torch.get_default_dtype() == torch.float32
    assert [n.startswith(CHANGES[change]) for n in told.notes] == [True]


def test_a_bundle_is_written_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = nights.write_job(nights.make_world(tmp_path / "jobs"), "m")
    net = tmp_path / "jobs" / "net.py"
    net.write_text(
        net.read_text().replace("def net():", "def net():\n    import os; os.chdir(os.path.dirname(__file__))")
    )
    monkeypatch.delitem(sys.modules, "net", raising=False)
    trtpipe.build(job, "out")
    assert (tmp_path / "out" / "m" / "manifest.json").is_file()
    assert not (tmp_path / "jobs" / "out").exists()

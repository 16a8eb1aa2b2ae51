"""Models of other shapes: each is built and checked, or refused with a message that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import other_shapes
import pytest
from other_shapes import TABLE

from trtpipe.errors import TrtpipeError
from trtpipe.job.load import read_job
from trtpipe.pipeline.build import build
from trtpipe.progress import Silent


def write(folder: Path, name: str) -> Path:
    """The job of a row of the table."""
    inputs, outputs, _ = TABLE[name]
    np.savez(folder / "x.npz", **other_shapes.samples(inputs))
    text = {
        "name": "other",
        "model": {"factory": "other_shapes:make", "args": {"name": name.removesuffix(" of several sizes")}},
        "inputs": inputs,
        "outputs": outputs,
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "x.npz", "batch_size": 2, "limits": {"relative_l2_max": 1e-3}},
    }
    (folder / "job.yaml").write_text(json.dumps(text))
    return folder / "job.yaml"


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 20


@pytest.mark.acceptance
@pytest.mark.parametrize("name", TABLE)
def test_a_model_is_built_or_its_message_says_what_to_do(tmp_path: Path, name: str) -> None:
    _, outputs, refusal = TABLE[name]
    if refusal is None:
        built = build(read_job(write(tmp_path, name)), tmp_path / "out", Silent())
        assert built.report.passed, (built.report.problems, [str(m) for m in built.report.metrics if m.passed is False])
        assert [s.name for s in built.bundle.manifest.outputs] == list(outputs)
        return
    with pytest.raises(TrtpipeError) as caught:
        build(read_job(write(tmp_path, name)), tmp_path / "out", Silent())
    for part in refusal:
        assert part in str(caught.value)
    assert "Traceback" not in str(caught.value)

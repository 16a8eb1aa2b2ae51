"""PyTorch's stages on the GPU give what the CPU gives, within the tolerances that docs/choosing.md states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def both(gpu):
    """The quickstart prepared on the CPU and on the GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is built without CUDA")
    if not (ROOT / "data" / "digits" / "resnet.safetensors").exists():
        pytest.skip("data/digits is not made: run make quickstart")
    from trtpipe.job.load import read_job
    from trtpipe.model.computing import VARIABLE
    from trtpipe.pipeline.prepared import PreparedJob, Stages
    from trtpipe.progress import Silent

    prepared = []
    with pytest.MonkeyPatch.context() as patch:
        for device in ("cpu", "cuda"):
            patch.setenv(VARIABLE, device)
            one = PreparedJob(read_job(ROOT / "configs" / "quickstart.yaml", ()), Stages(Silent()))
            assert one.device.startswith(device)
            prepared.append(one)
    return prepared


def test_the_baseline(both):
    here, there = (one.baseline for one in both)
    for name, wanted in here.outputs.items():
        largest = max(1.0, float(np.abs(wanted).max()))
        assert float(np.abs(there.outputs[name] - wanted).max()) <= 1e-4 * largest
    assert there.notes[0] == "baseline: computed by PyTorch on cuda:0"


def test_the_calibration_table(both):
    from trtpipe.pipeline.stages import calibrate

    here, there = (calibrate(one.job, one, one._stages) for one in both)
    assert there.amax.keys() == here.amax.keys()
    for key, wanted in here.amax.items():
        assert there.amax[key] == pytest.approx(wanted, rel=1e-2), key


def test_the_ranges(both):
    here, there = (one.ranges for one in both)
    assert there.keys() == here.keys()
    for name, wanted in here.items():
        assert there[name] == pytest.approx(wanted, rel=1e-3, abs=1e-5), name


def test_the_sensitivities(both):
    from trtpipe.pipeline.stages import calibrate
    from trtpipe.progress import Silent
    from trtpipe.quantization.diagnose import diagnose

    found = []
    for one in both:
        table = calibrate(one.job, one, one._stages)
        ranges = one.needed_ranges(one.job.precision)
        measured = diagnose(one.job, one.captured, one.check_source, table.amax, Silent(), ranges, device=one.device)
        found.append({m.module: m.sqnr_db for m in measured.modules})
    here, there = found
    assert there.keys() == here.keys()
    for module, wanted in here.items():
        assert there[module] == pytest.approx(wanted, abs=0.5), module

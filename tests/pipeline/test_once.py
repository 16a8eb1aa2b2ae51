"""What a job needs is fetched, and what it shares is computed, at most once in a run, whatever the command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import nights
import numpy as np
import pytest

from calib.corrections import Corrections, Step
from calib.table import CalibrationTable
from trtpipe.evaluation import torch_modes
from trtpipe.job.job import Job
from trtpipe.job.load import read_job
from trtpipe.model.nodes import is_constant
from trtpipe.pipeline.bench import bench_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.kit import write_kit
from trtpipe.pipeline.prepared import Stages
from trtpipe.pipeline.tune import tune
from trtpipe.progress import Silent
from trtpipe.quantization import moments, precision
from trtpipe.quantization.corrections import correct, edits
from trtpipe.values import Captured

SAMPLES = """
from pathlib import Path
import numpy as np

def of(name):
    with open("opened", "a") as log:
        log.write(f"{name} samples\\n")
    data = np.load(Path(__file__).with_name(f"{name}.npz"))
    return list(zip(data["image"], map(int, data["labels"])))

def calibration():
    return of("calib")

def check():
    return of("val")
"""

COMMANDS: dict[str, Callable[[Job, Path], object]] = {
    "build": lambda job, out: build(job, out, Silent()),
    "prepare": lambda job, out: write_kit(job, out, Silent()),
    "tune": lambda job, out: tune(job, out, Silent(), evaluations=2),
    "bench": lambda job, out: bench_job(job, Silent(), rounds=1, seconds=0.1, samples=8),
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """One in INT8 and FP16, with weights in 4 bits, whose check fails by its numbers."""
    monkeypatch.chdir(tmp_path)
    folder = nights.make_world(tmp_path / "jobs")
    (folder / "samples.py").write_text(SAMPLES)
    precision = "precision: {int8_mode: true, fp16_mode: true, weights: int4}\n"
    path = nights.write_job(folder, "m", f"{precision}build: {{target: onnxruntime}}\n")
    text = path.read_text().replace("arrays: calib.npz", 'factory: "samples:calibration"')
    text = text.replace("arrays: val.npz", 'factory: "samples:check"')
    path.write_text(text.replace("cosine_min: 0.9,", "sqnr_db_min: 200.0,"))
    return read_job(path)


def one_correction(captured: Captured, table: CalibrationTable, *_: object, **__: object) -> CalibrationTable:
    """The table with a correction that changes nothing."""
    name = next(str(n.target) for n in captured.graph.graph.nodes if is_constant(n))
    step = Step(name="equalization", kept=True, before_db=20.0, after_db=21.0)
    return table.corrected(table.amax, Corrections((step,), {f"scale:0:{name}": np.ones(4, np.float32)}))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each thing was computed from a captured graph."""
    seen: Counter[str] = Counter()

    def count(module: ModuleType, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: seen.update([name]) or real(*given))

    count(edits, "corrected")
    count(precision, "observe_ranges")
    count(moments, "block_moments")
    monkeypatch.setattr(correct, "correct", one_correction)
    # PyTorch's own modes take long, and read the calibration samples.
    monkeypatch.setattr(torch_modes, "torch_modes", lambda setup, script, whole: tuple(setup.calibration())[:0])
    return seen


@pytest.mark.parametrize("command", COMMANDS)
def test_samples_are_opened_once_and_what_is_of_the_graph_is_computed_once(
    job: Job, computed: Counter[str], tmp_path: Path, command: str
) -> None:
    COMMANDS[command](job, tmp_path / "out")
    assert Counter(Path("opened").read_text().splitlines()) == {"calib samples": 1, "val samples": 1}
    # It holds the weights once more, so that it is held for no longer than somebody uses it: to quantize, to diagnose.
    assert 1 <= computed.pop("corrected") <= 2
    # `bench` compiles no engine here, so that none of its graphs has FP16.
    assert computed == {"block_moments": 1} | ({} if command == "bench" else {"observe_ranges": 1})


def test_the_seconds_of_a_result_are_those_of_the_stages_before_it() -> None:
    stages = Stages(Silent())
    with stages("tune"):
        pass
    seconds = stages.seconds
    with stages("compile"):
        pass
    assert set(seconds) == {"tune"}
    assert set(stages.seconds) == {"tune", "compile"}

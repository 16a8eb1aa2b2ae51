"""What users' models and metrics raise, wherever it is: their frames, the name of what was called, and exit code 2.

What gives samples is in tests/calib/test_user_code.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from code_that_raises import OWN, RAISED, module

from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.evaluation.judges import judge
from trtpipe.job.load import read_job
from trtpipe.job.sections import OwnMetric
from trtpipe.model.load import load_model

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)
"""
#: What stands where in the module of the model; `boom()` raises.
MODELS = {
    "import": NET + "boom()\nmake = Net",
    "factory": "def make():\n    boom()",
    "class": NET + "class make(Net):\n    def __init__(self): boom()",
    "eval": NET + "class make(Net):\n    def eval(self): boom()",
    "forward": NET + "class make(Net):\n    def forward(self, x): boom()",
    "hook": NET
    + "def make():\n    net = Net()\n    net.layer.register_forward_hook(lambda *_: boom())\n    return net",
    "outputs": NET
    + "class Out(dict):\n    def __getitem__(self, k): boom()\n    def items(self): boom()\n"
    + "class make(Net):\n    def forward(self, x): return Out(y=self.layer(x))",
}
#: Of the module of a metric.
METRICS = {
    "import": "boom()\ndef make(outputs, labels, ids): return 1.0",
    "metric": "def make(outputs, labels, ids): boom()",
    "object": "class M:\n    def __call__(self, outputs, labels, ids): boom()\nmake = M()",
    "figure": "class F:\n    def __array__(self, *a, **k): boom()\ndef make(outputs, labels, ids): return F()",
    "total": "import numpy\ndef make(outputs, labels, ids): return numpy.ones(len(ids)), lambda rows: boom()",
}
#: What only a build comes to: on a sample, in the export, of the engine's outputs.
LATER = {
    "sample": NET + "class make(Net):\n    def forward(self, x):\n        if x.abs().sum() > 0: boom()\n"
    "        return self.layer(x)",
    "export": NET + "class make(Net):\n    def forward(self, x):\n        if torch.compiler.is_exporting(): boom()\n"
    "        return self.layer(x)",
}
CALLED_LATER = {
    "engine": "CALLS = []\ndef make(outputs, labels, ids):\n    CALLS.append(1)\n    if len(CALLS) > 2: boom()\n"
    "    return 1.0",
}
CASES = [(r, p) for p in MODELS for r in (*RAISED, *OWN)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32))


def write(folder: Path, model: str, metric: str | None = None) -> Path:
    check: dict[str, Any] = {"arrays": "x.npy", "limits": {"cosine_min": 0.99}}
    if metric:
        check["metrics"] = {"own": metric}
    content = {
        "name": "m",
        "model": {"factory": model},
        "inputs": {"x": {"shape": ["N", 4], "N": {"min": 1, "opt": 2, "max": 4}}},
        "outputs": {"y": {}},
        "build": {"target": "onnxruntime"},
        "check": check,
    }
    (folder / "job.yaml").write_text(json.dumps(content))
    return folder / "job.yaml"


def require_said(text: str, reference: str) -> None:
    """The user's line, and what was called: by its name, or as the model."""
    name = reference.partition(":")[0]
    assert f"{name}.py, line 2, in boom\n    raise " in text or f" at {name}.py:2 (raise " in text
    first = text.partition("\n")[0]
    assert (
        f"{reference} raised " in first
        or f": importing {name} raised " in first
        or re.match("(model|capture): |the model, ", first)
    )
    assert "/trtpipe/" not in text
    assert "a bug in trtpipe" not in text


@pytest.mark.parametrize(("raised", "place"), CASES)
def test_whatever_a_model_raises_wherever(place: str, raised: str, tmp_path: Path) -> None:
    reference = module(tmp_path, MODELS[place], raised)
    with pytest.raises(InputError) as error:
        load_model(read_job(write(tmp_path, reference)))
    require_said(str(error.value), reference)


@pytest.mark.parametrize("raised", [*RAISED, *OWN])
@pytest.mark.parametrize("place", METRICS)
def test_whatever_a_metric_raises_wherever(place: str, raised: str, tmp_path: Path) -> None:
    reference = module(tmp_path, METRICS[place], raised)
    with pytest.raises(InputError) as error:
        judge("own", OwnMetric(function=reference), labelled=False).figure({"y": np.zeros((2, 4))}, None, ("a", "b"))
    require_said(str(error.value), reference)


@pytest.mark.parametrize("raised", ["ValueError('oh')", "SystemExit(0)", "OSError(28, 'oh')"])
@pytest.mark.parametrize(
    ("of", "place"),
    [
        *(("model", p) for p in (*MODELS, *LATER)),
        *(("metric", p) for p in (*METRICS, *CALLED_LATER)),
    ],
)
def test_the_command_ends_with_2(
    of: str, place: str, raised: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if of == "model":
        reference = module(tmp_path, (MODELS | LATER)[place], raised)
        path = write(tmp_path, reference)
    else:
        reference = module(tmp_path, (METRICS | CALLED_LATER)[place], raised)
        path = write(tmp_path, module(tmp_path, NET, "ValueError()").replace(":make", ":Net"), reference)
    assert main(["build", str(path), "-o", str(tmp_path / "out"), "-q"]) == 2
    require_said(capsys.readouterr().err, reference)
    assert not (tmp_path / "out" / "m").exists()

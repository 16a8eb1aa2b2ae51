"""The kernel for CUDA in Triton's own interpreter, which runs it on the CPU, against NumPy's plain histogram."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, math, torch
from calib.gpu_kernel import count
from calib.histogram import ALL_BINS, BINS, SHIFT, Histogram
from calib.observers import _SPREAD, _DeviceCounter, dense

torch.manual_seed(0)
cases = {
    "several programs of the grid": torch.randn(3, 3000),
    "a rectifier's zeros": torch.relu(torch.randn(9001)),
    "not finite": torch.tensor([1.0, math.nan, -3.0, math.inf, -math.inf] * 5),
    "denormal and both zeros": torch.tensor([1e-40, -1e-42, 0.0, -0.0, 3e38]),
    "float16": torch.randn(50).half(),
    "bfloat16": torch.randn(4097).bfloat16(),
    "one value": torch.tensor([-2.5]),
}
found = {}
for name, x in cases.items():
    counter = _DeviceCounter(torch.device("cpu"))
    for part in (x, x[:1]):
        count(dense(part), counter._counts, counter._low, counter._high, all_bins=ALL_BINS, bins=BINS, shift=SHIFT,
              spread=_SPREAD)
    found[name] = counter.read() == Histogram.of(x.float().numpy()) + Histogram.of(x[:1].float().numpy())
print(json.dumps(found))
"""


def test_it_counts_what_numpy_counts():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 7
    assert all(found.values()), found

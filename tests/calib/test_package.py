"""What importing calib costs."""

import subprocess
import sys

import pytest

MODULES = ["calib", "calib.data", "calib.histogram", "calib.algorithms", "calib.table", "calib.observers"]


@pytest.mark.parametrize("module", MODULES)
def test_importing_loads_nothing_heavy(module):
    code = (
        f"import sys, {module}; heavy = 'torch torchvision tensorrt tensorrt_rtx trtpipe onnx numba'.split(); "
        "print(sorted({*heavy} & {m.partition('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

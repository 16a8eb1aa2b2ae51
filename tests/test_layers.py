"""Who may import what. import-linter holds the layers (`make lint`); here is what it cannot say."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "trtpipe").rglob("*.py"), *(ROOT / "calib").rglob("*.py")])

#: Everything outside the light core (numpy, pyyaml, pydantic, click, rich, pillow, cryptography).
HEAVY = ("torch", "torchvision", "torchao", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "safetensors", "jinja2",
         "matplotlib", "numba", "tensorrt", "tensorrt_rtx", "torch_tensorrt", "torch2trt", "cuda", "pycuda", "dask",
         "distributed", "fsspec", "sklearn", "scipy", "timm", "triton")  # fmt: skip

#: Modules that cannot exist without what they are named for; everyone else imports them inside functions.
NEEDS_MORE = {
    "calib.gpu_kernel": "triton",
    "calib.kernel": "numba",
    "trtpipe.bound": "torch",
    "trtpipe.macs": "torch",
    "trtpipe.modes": "torch",
    "trtpipe.operators": "torch",
    "trtpipe.partial": "torch",
    "trtpipe.routes.qdq": "torch",
    "trtpipe.routes.replay": "torch",
    "trtpipe.routes.torch2trt_qdq": "torch",
    "trtpipe.sensitivity": "torch",
    "trtpipe.units": "torch",
    "trtpipe.gpu_modes": "torch",
    "trtpipe.graph": "torch",
    "trtpipe.halves": "onnx",
    "trtpipe.placement": "torch",
    "trtpipe.precision": "torch",
    "trtpipe.pt2e": "torchao",
    "trtpipe.quantize": "torch",
}

#: The only places that may import a module, as the beginning of a path below the root.
ONLY = {
    "tensorrt": ("trtpipe/trt/", "trtpipe/routes/qdq.py"),  # converters take Torch-TensorRT's own module
    "tensorrt_rtx": ("trtpipe/trt/",),
    "pycuda": ("trtpipe/trt/",),
    "cuda": ("trtpipe/trt/",),
    "torch_tensorrt": ("trtpipe/routes/",),
    "torch2trt": ("trtpipe/routes/",),
    "click": ("trtpipe/cli.py", "trtpipe/commands/"),
    "rich": ("trtpipe/console.py",),
    "pickle": (),
    "trtpipe.console": ("trtpipe/cli.py", "trtpipe/commands/"),
    "trtpipe.pipeline": (
        "trtpipe/commands/",
        "trtpipe/api.py",
        "trtpipe/assembly.py",
        "trtpipe/bench_line.py",
        "trtpipe/calibration_line.py",
        "trtpipe/drift.py",
        "trtpipe/evidence.py",
        "trtpipe/kit_line.py",
        "trtpipe/rebuild.py",
        "trtpipe/tune_line.py",
    ),
    "trtpipe.tune_line": ("trtpipe/commands/", "trtpipe/pipeline.py", "trtpipe/bench_line.py"),
    "trtpipe.bench_line": ("trtpipe/commands/", "trtpipe/evidence.py"),
    "trtpipe.kit_line": ("trtpipe/commands/", "trtpipe/execute.py"),
    "trtpipe.calibration_line": ("trtpipe/commands/",),
    "trtpipe.examples": ("trtpipe/examples/",),
}


def imports(path):
    """Every module that a file imports anywhere, `from a import b` as a and a.b."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("name", ONLY)
def test_only_some_may_import(name):
    found = {
        str(path.relative_to(ROOT))
        for path in FILES
        for module in imports(path)
        if (module == name or module.startswith(f"{name}."))
    }
    assert {path for path in found if not path.startswith(ONLY[name] or "\0")} == set()


def test_imports_are_absolute():
    relative = [
        str(path.relative_to(ROOT))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_every_module_imports_with_the_light_core_alone():
    names = sorted(".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in FILES)
    names = [name for name in names if not name.endswith("__main__")]
    script = f"""
import importlib, json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Blocked())
failed = {{}}
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert set(json.loads(done.stdout)) == set(NEEDS_MORE), done.stdout


def test_no_file_is_too_long():
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}

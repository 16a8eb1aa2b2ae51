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
    "trtpipe.model.bindings": "torch",
    "trtpipe.quantization.macs": "torch",
    "trtpipe.evaluation.torch_modes": "torch",
    "trtpipe.quantization.operators": "torch",
    "trtpipe.quantization.partial": "torch",
    "trtpipe.routes.torch_tensorrt.qdq": "torch",
    "trtpipe.routes.torch2trt.replay": "torch",
    "trtpipe.routes.torch2trt.qdq": "torch",
    "trtpipe.quantization.sensitivity": "torch",
    "trtpipe.quantization.units": "torch",
    "trtpipe.evaluation.gpu_modes": "torch",
    "trtpipe.model.nodes": "torch",
    "trtpipe.runtime.half_rounding": "onnx",
    "trtpipe.quantization.placement": "torch",
    "trtpipe.quantization.precision": "torch",
    "trtpipe.model.pt2e": "torchao",
    "trtpipe.quantization.quantize": "torch",
}

#: The only places that may import a module, as the beginning of a path below the root.
ONLY = {
    "tensorrt": ("trtpipe/trt/", "trtpipe/routes/torch_tensorrt/qdq.py"),  # converters take Torch-TensorRT's own module
    "tensorrt_rtx": ("trtpipe/trt/",),
    "pycuda": ("trtpipe/trt/",),
    "cuda": ("trtpipe/trt/",),
    "torch_tensorrt": ("trtpipe/routes/",),
    "torch2trt": ("trtpipe/routes/",),
    "click": ("trtpipe/cli/main.py", "trtpipe/commands/"),
    "rich": ("trtpipe/cli/console.py",),
    "pickle": (),
    "trtpipe.cli.console": ("trtpipe/cli/main.py", "trtpipe/commands/"),
    "trtpipe.pipeline.stages": (
        "trtpipe/commands/",
        "trtpipe/api.py",
        "trtpipe/pipeline/assemble.py",
        "trtpipe/pipeline/bench.py",
        "trtpipe/pipeline/calibrate.py",
        "trtpipe/nightly/drift.py",
        "trtpipe/pipeline/measure.py",
        "trtpipe/pipeline/kit.py",
        "trtpipe/pipeline/cached.py",
        "trtpipe/pipeline/tune.py",
    ),
    "trtpipe.pipeline.tune": ("trtpipe/commands/", "trtpipe/pipeline/stages.py", "trtpipe/pipeline/bench.py"),
    "trtpipe.pipeline.bench": ("trtpipe/commands/", "trtpipe/pipeline/measure.py"),
    "trtpipe.pipeline.kit": ("trtpipe/commands/", "trtpipe/nightly/execute.py"),
    "trtpipe.pipeline.calibrate": ("trtpipe/commands/",),
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

"""What is imported, and when: heavy packages inside functions alone, light ones at the top alone, none undeclared."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest
from source_tree import HEAVY, LIGHT, ROOT, Tree

#: Rooms whose modules a device imports without any of that, and the modules there that load something heavy: nothing
#: imports them but the functions that need it.
ON_A_DEVICE = ("job", "trt", "bundle", "report", "runtime")
OF_A_GRAPH = {"trtpipe.runtime.four_bits", "trtpipe.runtime.half_rounding"}
#: What has to do with the standard streams and is not the command line: a worker's are its log, torch.export prints why
#: it fails, a job's own code may replace them, and TensorRT-RTX's process has nobody else to tell of a bug.
OTHER_STREAMS = {
    "trtpipe.model.export", "trtpipe.nightly.pool", "calib.process_state", "trtpipe.trt.isolated",
}  # fmt: skip


def test_no_command_loads_something_heavy_before_it_runs(tree: Tree) -> None:
    """All of them are for devices too, as far as their help and their refusals go."""
    heavy = {name for name in tree.heavy() if name.startswith("trtpipe.cli.")}
    assert heavy == set(), "import what is heavy inside the functions that use it"


def twice(module: ast.Module) -> list[str]:
    """What a module imports at its top, and for types again."""
    typed = [n for n in module.body if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]

    def each(statements: Iterable[ast.stmt]) -> set[str]:
        found = set[str]()
        for s in statements:
            if isinstance(s, ast.Import | ast.ImportFrom):
                start = f"from {s.module} " if isinstance(s, ast.ImportFrom) else ""
                found.update(f"{start}import {ast.unparse(a)}" for a in s.names)
        return found

    return sorted(each(module.body) & each(s for n in typed for s in n.body))


def test_nothing_is_imported_twice(tree: Tree) -> None:
    found = {name: imported for name, module in tree.modules.items() if (imported := twice(module))}
    assert found == {}, "the import for types is not needed"
    assert twice(ast.parse("from a import b, c\nif TYPE_CHECKING:\n    from a import c, d")) == ["from a import c"]
    assert twice(ast.parse("import a\nif TYPE_CHECKING:\n    import a\n    import b")) == ["import a"]


def test_what_a_device_imports_loads_nothing_heavy(tree: Tree) -> None:
    heavy = {name for name in tree.heavy() if name.startswith(tuple(f"trtpipe.{room}." for room in ON_A_DEVICE))}
    assert heavy == OF_A_GRAPH, "import what is heavy inside the functions that use it, or for types alone"


def test_every_module_that_loads_nothing_heavy_imports_with_the_light_core_alone(tree: Tree) -> None:
    light = sorted(set(tree.modules) - tree.heavy() - {"trtpipe.__main__"})
    blocked = sorted(HEAVY)
    script = f"""
import importlib, json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Blocked())
failed = {{}}
for name in {light!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    failed = json.loads(done.stdout)
    assert failed == {}, "import what a device may lack inside the functions that use it"


def test_no_import_hides_in_a_function_without_a_reason(tree: Tree) -> None:
    assert list(tree.needless()) == [], "import these at the top of the module: they load nothing heavy"


#: Modules by the distributions of pyproject.toml that bring them under another name.
BROUGHT = {"pyyaml": "yaml", "pillow": "PIL", "protobuf": "google", "cuda-python": "cuda", "scikit-learn": "sklearn"}
#: What is imported and no extra installs: a part of what one installs, or what is used where the user has it.
UNDECLARED = {"distributed", "triton", "pycuda", "torch2trt"}


def declared(requirements: Iterable[str]) -> set[str]:
    """The modules that requirements bring."""
    names = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
    return {BROUGHT.get(name, name.replace("-", "_")) for name in names}


def test_every_package_is_one_that_is_declared(tree: Tree) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    what = "add it to pyproject.toml, and to LIGHT (of every installation) or HEAVY (of an extra) here"
    assert list(tree.undeclared()) == [], what
    assert declared(project["dependencies"]) == set(LIGHT), what
    extras = declared(requirement for extra in project["optional-dependencies"].values() for requirement in extra)
    assert {name.partition(".")[0] for name in HEAVY} - extras - set(LIGHT) == UNDECLARED, what


def test_only_the_command_line_prints(tree: Tree) -> None:
    """Beside ruff's T201: `print` is one way of several."""
    assert set(tree.prints()) == OTHER_STREAMS, "return it, or give it to `progress`: trtpipe.cli prints"


@pytest.mark.parametrize(
    "line",
    ["import torch", "from safetensors.torch import load_file",
     "class K:\n    import torch", "if not TYPE_CHECKING:\n    import torch",
     "if TYPE_CHECKING:\n    import csv\nelse:\n    import torch",
     "try:\n    import torch\nexcept ImportError:\n    pass"],
)  # fmt: skip
def test_a_planted_heavy_import_is_found(line: str, tree: Tree) -> None:
    assert "trtpipe.job.dump" in tree.planted("trtpipe.job.dump", line).heavy()


@pytest.mark.parametrize("line", ["import csv", "import safetensors.numpy", "from trtpipe.job import problems"])
@pytest.mark.parametrize(
    "head", ["class K:", "def f():", "async def f():", "class K:\n  def f(self):", "def f():\n  if TYPE_CHECKING:"]
)
def test_a_planted_light_import_is_found_wherever_it_hides(head: str, line: str, tree: Tree) -> None:
    target = line.removeprefix("import ").replace("from trtpipe.job import ", "trtpipe.job.")
    planted = tree.planted("trtpipe.job.dump", f"{head}\n    {line}")
    assert list(planted.needless()) == [f"trtpipe.job.dump -> {target}"]


@pytest.mark.parametrize(
    "line",
    ["sys.stdout.write('x')", "def f(say=print): say(1)", "sys.__stderr__.flush()", "warnings.warn('x')",
     "logging.warning('x')", "from warnings import warn\nwarn('x')", "traceback.print_exc()",
     "from sys import stderr as e\ne.write('x')"],
)  # fmt: skip
def test_a_planted_print_is_found(line: str, tree: Tree) -> None:
    assert set(tree.planted("trtpipe.job.dump", line).prints()) - OTHER_STREAMS == {"trtpipe.job.dump"}


def test_a_planted_package_that_is_not_declared_is_found(tree: Tree) -> None:
    planted = tree.planted("trtpipe.job.dump", "def f():\n    import requests")
    assert list(planted.undeclared()) == ["trtpipe.job.dump -> requests"]

"""Who may import what: one contract of import-linter, no circle, no import in a function without a reason."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "job", "trt", "model", "bundle", "evaluation", "quantization", "routes", "runtime", "report", "pipeline", "nightly",
    "cli",
)  # fmt: skip

#: Everything that the light core can do without.
HEAVY = ("torch", "torchvision", "torchao", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "safetensors", "jinja2",
         "matplotlib", "numba", "tensorrt", "tensorrt_rtx", "torch_tensorrt", "torch2trt", "cuda", "pycuda", "dask",
         "distributed", "fsspec", "sklearn", "scipy", "timm", "triton", "ml_dtypes", "rich",
         "sympy", "markupsafe", "pycocotools")  # fmt: skip

#: The only places that may import a module, as the beginning of a path below the root.
ONLY = {
    "tensorrt": ("trtpipe/trt/", "trtpipe/routes/torch_tensorrt/qdq.py"),  # converters take Torch-TensorRT's own module
    "tensorrt_rtx": ("trtpipe/trt/",),
    "pycuda": ("trtpipe/trt/",),
    "cuda": ("trtpipe/trt/",),
    "torch_tensorrt": ("trtpipe/routes/torch_tensorrt/",),
    "torch2trt": ("trtpipe/routes/torch2trt/",),
    "click": ("trtpipe/cli/",),
    "rich": ("trtpipe/cli/console.py",),
    "pickle": (),
    "trtpipe.examples": ("trtpipe/examples/",),
}


class Tree:
    """The modules under one root, parsed, and what each imports."""

    def __init__(self, root: Path) -> None:
        files = sorted([*(root / "trtpipe").rglob("*.py"), *(root / "calib").rglob("*.py")])
        self.modules = {self._name(root, path): ast.parse(path.read_bytes()) for path in files}

    @staticmethod
    def _name(root: Path, path: Path) -> str:
        return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")

    def targets(self, node: ast.stmt) -> tuple[str, ...]:
        """The modules that one import statement names; `from a import b` is a.b where that is a module."""
        if isinstance(node, ast.Import):
            return tuple(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            return tuple(dict.fromkeys(f if f in self.modules else node.module for f in full))
        return ()

    def named(self, node: ast.AST) -> str:
        """The module of ours that a text names, whole (`trtpipe.api`, `trtpipe.routes.onnx:compile_engine`) or as the
        beginning of an f-string; empty when there is none. Such a text is made to be imported."""
        text = node.value if isinstance(node, ast.Constant) else None
        if not isinstance(text, str) or not re.fullmatch(r"(trtpipe|calib)(\.\w+)+(\.|:\w+)?", text):
            return ""
        name = text.partition(":")[0].rstrip(".")
        return name if name in self.modules else ""

    def imports(self, name: str) -> dict[str, set[str]]:
        """What a module imports, by where the import stands: `top`, `function` or `type`; or `text`, when it is named
        in a text."""
        found: dict[str, set[str]] = {"top": set(), "function": set(), "type": set(), "text": set()}

        def visit(node: ast.AST, where: str) -> None:
            for child in ast.iter_child_nodes(node):
                inside = where
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and where == "top":
                    inside = "function"
                elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                    inside = "type"
                if isinstance(child, ast.Import | ast.ImportFrom):
                    found[where].update(self.targets(child))
                if module := self.named(child):
                    found["text"].add(module)
                visit(child, inside)

        visit(self.modules[name], "top")
        return found

    def heavy(self) -> frozenset[str]:
        """The modules that load something heavy when they are imported, themselves or through another."""
        top = {name: self.imports(name)["top"] for name in self.modules}
        found = {n for n, ts in top.items() if any(t.partition(".")[0] in HEAVY for t in ts)}
        while more := {n for n, ts in top.items() if n not in found and ts & found}:
            found |= more
        return frozenset(found)

    def needless(self) -> Iterator[str]:
        """Imports inside functions of what loads nothing heavy."""
        heavy = self.heavy()
        for name in self.modules:
            for target in sorted(self.imports(name)["function"]):
                if target not in heavy and target.partition(".")[0] not in HEAVY:
                    yield f"{name} -> {target}"

    def upward(self) -> Iterator[str]:
        """Modules named in a text by a room that stands below them or beside them."""
        for name in self.modules:
            for target in sorted(self.imports(name)["text"]):
                here, there = place(name), place(target)
                if here[1] != there[1] and here[0] >= there[0]:
                    yield f"{name} -> {target}"

    def circle(self) -> tuple[str, ...]:
        """One circle of modules, imports in functions, for types and by text counted; empty when there is none."""
        edges = {
            name: {t for ts in self.imports(name).values() for t in ts} & set(self.modules) for name in self.modules
        }
        try:
            graphlib.TopologicalSorter(edges).prepare()
        except graphlib.CycleError as error:
            return tuple(error.args[1])
        return ()


@functools.cache
def layers() -> list[list[str]]:
    """The contract's layers, the highest first: the modules and rooms of each."""
    (listed,) = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    return [re.findall(r"[\w.]+", row) for row in listed.splitlines()]


def place(module: str) -> tuple[int, str]:
    """Where the contract has a module: its layer, 0 at the top, and the room or ground module that it belongs to."""
    room = module.partition(".")[0] if module.startswith("calib") else ".".join(module.split(".")[:2])
    return next((at for at, row in enumerate(layers()) if room in row), -1), room


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's contracts over the packages below `root`."""
    linter = "from importlinter.cli import lint_imports_command as c; c()"
    command = [sys.executable, "-c", linter, "--no-cache"]
    return subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in ("trtpipe", "calib"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(root: Path, module: str, line: str) -> None:
    path = root / (module.replace(".", "/") + ".py")
    path.write_text(path.read_text() + f"\n\n{line}\n")


def test_the_rooms_import_downwards_alone() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, f"import what is needed from a room below, or move it there\n{done.stdout}"


def test_no_circle(tree: Tree) -> None:
    assert tree.circle() == (), "move what both need into a module of its own, below both"


def test_no_module_is_named_by_a_room_below_it(tree: Tree) -> None:
    assert list(tree.upward()) == [], "importing a module by its name is importing it: take the function as an argument"


def test_no_import_hides_in_a_function_without_a_reason(tree: Tree) -> None:
    assert list(tree.needless()) == [], "import these at the top of the module: they load nothing heavy"


def test_a_planted_circle_is_found(copy: Path) -> None:
    plant(copy, "trtpipe.job.yamlfile", "from trtpipe.job.load import load_job")
    assert "trtpipe.job.load" in Tree(copy).circle()


def test_a_planted_upward_import_inside_a_function_breaks_the_contract(copy: Path) -> None:
    plant(copy, "trtpipe.bundle.golden", "def f():\n    from trtpipe.pipeline.stages import Stages\n    return Stages")
    assert lint(copy).returncode != 0


def test_a_planted_type_only_import_breaks_the_contract(copy: Path) -> None:
    plant(copy, "trtpipe.job.rules", "if TYPE_CHECKING:\n    from trtpipe.trt.flavour import Flavour")
    assert lint(copy).returncode != 0


def test_a_planted_light_import_inside_a_function_is_found(copy: Path) -> None:
    plant(copy, "trtpipe.pipeline.kit", "def f():\n    from trtpipe.bundle import golden\n    return golden")
    assert list(Tree(copy).needless()) == ["trtpipe.pipeline.kit -> trtpipe.bundle.golden"]


@pytest.mark.parametrize(
    "line",
    [
        "importlib.import_module('trtpipe.trt.flavour')",
        "__import__('trtpipe.trt.flavour')",
        "ROUTES = {'one': 'trtpipe.trt.flavour:look'}",
        "f'trtpipe.trt.{name}'",
    ],
)
def test_a_planted_upward_module_named_in_a_text_is_found(line: str, copy: Path) -> None:
    plant(copy, "trtpipe.job.dump", line)
    assert [edge.partition(" -> ")[0] for edge in Tree(copy).upward()] == ["trtpipe.job.dump"]


def test_the_house_has_its_rooms_and_nothing_else() -> None:
    there = {p.name.removesuffix(".py") for p in (ROOT / "trtpipe").iterdir() if p.name != "__pycache__"}
    house = {name.removeprefix("trtpipe.") for row in layers() for name in row} - {"calib"}
    assert set(ROOMS) <= house
    assert there == {*house, "__init__", "py.typed"}, "a module belongs into a room: docs/architecture.md says which"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_for_and_what_others_may_import(tree: Tree, room: str) -> None:
    module = tree.modules[f"trtpipe.{room}"]
    line = ast.get_docstring(module)
    assert line
    assert "\n" not in line
    public = next(ast.literal_eval(n.value) for n in module.body if isinstance(n, ast.Assign))
    prefix = f"trtpipe.{room}."
    used = {
        target.removeprefix(prefix).partition(".")[0]
        for name in tree.modules
        if not name.startswith((prefix, "trtpipe.examples")) and name != prefix[:-1]
        for targets in tree.imports(name).values()
        for target in targets
        if target.startswith(prefix)
    }
    what = "__all__ names what other rooms import, and nothing else"
    assert sorted(public) == sorted(used), f"trtpipe/{room}/__init__.py: {what}"
    assert all(prefix + name in tree.modules for name in public)


@pytest.mark.parametrize("name", ONLY)
def test_only_some_may_import(tree: Tree, name: str) -> None:
    found = {
        module.replace(".", "/") + ".py"
        for module in tree.modules
        for targets in tree.imports(module).values()
        for target in targets
        if target == name or target.startswith(f"{name}.")
    }
    strangers = {path for path in found if not path.startswith(ONLY[name] or "\0")}
    assert strangers == set(), f"only {' and '.join(ONLY[name]) or 'nothing'} may import {name}"


def test_imports_are_absolute(tree: Tree) -> None:
    relative = [
        name
        for name, module in tree.modules.items()
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == [], "write trtpipe.<room>.<module>"


def test_every_module_that_loads_nothing_heavy_imports_with_the_light_core_alone(tree: Tree) -> None:
    light = sorted(set(tree.modules) - tree.heavy() - {"trtpipe.__main__"})
    blocked = sorted(set(HEAVY) - {"safetensors", "rich"})
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


def test_every_module_says_what_it_is_for(tree: Tree) -> None:
    lines = {name: (ast.get_docstring(module) or "").partition("\n")[0] for name, module in tree.modules.items()}
    assert [name for name, line in lines.items() if len(re.findall(r"\w+", line)) < 2] == []


def test_no_file_is_too_long() -> None:
    files = [*(ROOT / "trtpipe").rglob("*.py"), *(ROOT / "calib").rglob("*.py")]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}, "split these by subject"

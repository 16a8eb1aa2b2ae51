"""Who may import what: one contract of import-linter, no circle, no import in a function without a reason."""

from __future__ import annotations

import ast
import copy
import functools
import graphlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "job", "trt", "model", "bundle", "evaluation", "quantization", "routes", "runtime", "report", "pipeline", "nightly",
    "cli",
)  # fmt: skip

#: The packages that every installation has, by the name that imports them.
LIGHT = ("numpy", "yaml", "pydantic", "pydantic_core", "click", "rich", "PIL", "cryptography", "safetensors",
         "filelock")  # fmt: skip
#: Of these, what takes long to load: it is imported where it is used.
SLOW = ("rich", "safetensors")
#: Everything that the light core can do without.
HEAVY = ("torch", "torchvision", "torchao", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "google", "jinja2",
         "matplotlib", "numba", "networkx", "tensorrt", "tensorrt_rtx", "torch_tensorrt", "torch2trt", "cuda", "pycuda",
         "dask", "distributed", "fsspec", "sklearn", "timm", "triton", "ml_dtypes", "sympy", "markupsafe",
         "pycocotools")  # fmt: skip
#: Rooms whose modules a device imports without any of that, and the modules there that load something heavy: nothing
#: imports them but the functions that need it.
ON_A_DEVICE = ("job", "trt", "bundle", "report", "runtime")
OF_A_GRAPH = {"trtpipe.runtime.four_bits", "trtpipe.runtime.half_rounding"}
#: What has to do with the standard streams and is not the command line: a worker's are its log, torch.export prints why
#: it fails, and a job's own code may replace them.
OTHER_STREAMS = {"trtpipe.model.export", "trtpipe.nightly.pool", "trtpipe.pipeline.process_state"}
#: What imports a module whose name is made at run time, and the only modules that may: names of what may not be
#: installed, of the user's code, and tables of what is loaded on demand.
BY_NAME = {"import_module", "__import__", "resolve_name", "run_module", "run_path", "exec", "eval"}
MAY_IMPORT_BY_NAME = {
    "calib.user_code", "trtpipe", "trtpipe.cli.main", "trtpipe.examples.networks", "trtpipe.notebook",
    "trtpipe.pipeline.cache.recorder", "trtpipe.routes.registry", "trtpipe.routes.torch2trt.route",
    "trtpipe.runtime.hybrid_runner", "trtpipe.trt.flavour", "trtpipe.trt.memory",
}  # fmt: skip

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
    "marshal": (),
    "shelve": (),
    "trtpipe.examples": ("trtpipe/examples/",),
}


class Tree:
    """The modules of both packages, parsed, and what each imports."""

    def __init__(self) -> None:
        files = sorted([*(ROOT / "trtpipe").rglob("*.py"), *(ROOT / "calib").rglob("*.py")])
        self.modules = {self._name(path): ast.parse(path.read_bytes()) for path in files}
        self._imports: dict[str, dict[str, set[str]]] = {}

    @staticmethod
    def _name(path: Path) -> str:
        return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    def planted(self, module: str, line: str) -> Tree:
        """The same with a line more at the end of a module."""
        other = copy.copy(self)
        body = [*self.modules[module].body, *ast.parse(line).body]
        other.modules = self.modules | {module: ast.Module(body, [])}
        other._imports = {name: found for name, found in self._imports.items() if name != module}
        return other

    def targets(self, node: ast.stmt) -> tuple[str, ...]:
        """The modules that one import statement names; `from a import b` is a.b where that is a module."""
        if isinstance(node, ast.Import):
            return tuple(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            return tuple(dict.fromkeys(f if f in self.modules else node.module for f in full))
        return ()

    def named(self, text: str) -> Iterator[str]:
        """Our modules that a text names: `trtpipe.api`, `trtpipe.routes.onnx:compile_engine`, a line of a script."""
        for name in re.findall(r"\b(?:trtpipe|calib)(?:\.\w+)+", text):
            while name not in self.modules:
                name = name.rpartition(".")[0]
            if "." in name:
                yield name

    def imports(self, name: str) -> dict[str, set[str]]:
        """What a module imports, by where the import stands: `top`, `class`, `function` or `type`; or `text`, when it
        is named in a text that is no docstring."""
        if name in self._imports:
            return self._imports[name]
        found: dict[str, set[str]] = {"top": set(), "class": set(), "function": set(), "type": set(), "text": set()}

        def visit(nodes: Iterable[ast.AST], where: str) -> None:
            for node in nodes:
                inside = where
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and where != "type":
                    inside = "function"
                elif isinstance(node, ast.ClassDef) and where == "top":
                    inside = "class"
                elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                    negated = isinstance(node.test, ast.UnaryOp)
                    typed = "type" if where == "top" else where
                    visit(node.body, where if negated else typed)
                    visit(node.orelse, typed if negated else where)
                    continue
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    found[where].update(self.targets(node))
                elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    continue  # a docstring
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found["text"].update(set(self.named(node.value)) - {name})
                visit(ast.iter_child_nodes(node), inside)

        visit([self.modules[name]], "top")
        self._imports[name] = found
        return found

    def heavy(self) -> frozenset[str]:
        """The modules that load something heavy when they are imported, themselves or through another."""
        loaded = {name: self.imports(name)["top"] | self.imports(name)["class"] for name in self.modules}
        found = {n for n, ts in loaded.items() if any(t.partition(".")[0] in (*HEAVY, *SLOW) for t in ts)}
        while more := {n for n, ts in loaded.items() if n not in found and ts & found}:
            found |= more
        return frozenset(found)

    def needless(self) -> Iterator[str]:
        """Imports inside functions and classes of what loads nothing heavy."""
        heavy = self.heavy()
        for name in self.modules:
            inside = self.imports(name)["function"] | self.imports(name)["class"]
            for target in sorted(inside):
                if target not in heavy and target.partition(".")[0] not in (*HEAVY, *SLOW):
                    yield f"{name} -> {target}"

    def by_name(self) -> Iterator[str]:
        """Modules that import, or pass on, what imports a module by a name."""
        for name, module in self.modules.items():
            if any(used(node) & BY_NAME for node in ast.walk(module)):
                yield name

    def prints(self) -> Iterator[str]:
        """Modules that have to do with the standard streams, but for those of the command line and the examples."""
        streams = {"print", "sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}
        for name, module in self.modules.items():
            named = {ast.unparse(n) for n in ast.walk(module) if isinstance(n, ast.Attribute | ast.Name)}
            if named & streams and not name.startswith(("trtpipe.cli.", "trtpipe.examples.")):
                yield name

    def undeclared(self) -> Iterator[str]:
        """Imports of packages that are neither Python's, nor ours, nor in a table above."""
        for name in self.modules:
            for target in sorted({t for ts in self.imports(name).values() for t in ts}):
                package = target.partition(".")[0]
                if package not in {*sys.stdlib_module_names, *LIGHT, *HEAVY, "trtpipe", "calib"}:
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


def used(node: ast.AST) -> set[str]:
    """The names that a node uses; of attributes, those of modules that import (`model.eval()` imports nothing)."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr} - {"exec", "eval"}
    return {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()


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
    return Tree()


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's contracts over the packages below `root`."""
    linter = "from importlinter.cli import lint_imports_command as c; c()"
    command = [sys.executable, "-c", linter, "--no-cache"]
    return subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for package in ("trtpipe", "calib"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_rooms_import_downwards_alone() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, f"import what is needed from a room below, or move it there\n{done.stdout}"


def test_no_circle(tree: Tree) -> None:
    assert tree.circle() == (), "move what both need into a module of its own, below both"


def test_no_module_is_named_by_a_room_below_it(tree: Tree) -> None:
    assert list(tree.upward()) == [], "importing a module by its name is importing it: take the function as an argument"


def test_only_some_import_by_a_name(tree: Tree) -> None:
    assert set(tree.by_name()) == MAY_IMPORT_BY_NAME, "a name made at run time hides what is imported: write it out"


def test_only_the_command_line_prints(tree: Tree) -> None:
    """Beside ruff's T201: `print` is one way of several."""
    assert set(tree.prints()) == OTHER_STREAMS, "return it, or give it to `progress`: trtpipe.cli prints"


def test_every_package_is_one_that_is_declared(tree: Tree) -> None:
    what = "add it to pyproject.toml, and to LIGHT (of every installation) or HEAVY (of an extra) here"
    assert list(tree.undeclared()) == [], what


def test_what_a_device_imports_loads_nothing_heavy(tree: Tree) -> None:
    heavy = {name for name in tree.heavy() if name.startswith(tuple(f"trtpipe.{room}." for room in ON_A_DEVICE))}
    assert heavy == OF_A_GRAPH, "import what is heavy inside the functions that use it, or for types alone"


def test_no_import_hides_in_a_function_without_a_reason(tree: Tree) -> None:
    assert list(tree.needless()) == [], "import these at the top of the module: they load nothing heavy"


def test_a_planted_circle_is_found(tree: Tree) -> None:
    assert "trtpipe.job.load" in tree.planted("trtpipe.job.yamlfile", "from trtpipe.job.load import load_job").circle()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("bundle/golden", "def f():\n    from trtpipe.pipeline.stages import Stages\n    return Stages"),
        ("job/rules", "if TYPE_CHECKING:\n    from trtpipe.trt.flavour import Flavour"),
    ],
    ids=["in a function", "for types"],
)
def test_a_planted_upward_import_breaks_the_contract(module: str, line: str, copied: Path) -> None:
    path = copied / "trtpipe" / f"{module}.py"
    path.write_text(f"{path.read_text()}\n\n{line}\n")
    assert lint(copied).returncode != 0


@pytest.mark.parametrize(
    "line",
    [
        "importlib.import_module('trtpipe.trt.flavour')",
        "__import__('trtpipe.trt.flavour')",
        "importlib.import_module('.flavour', 'trtpipe.trt')",
        "pkgutil.resolve_name('trtpipe.trt.flavour.Flavour')",
        "sys.modules['trtpipe.trt.flavour']",
        "ROUTES = {'one': 'trtpipe.trt.flavour:look'}",
        "SCRIPT = 'import sys; from trtpipe.trt import flavour'",
        "f'trtpipe.trt.{name}'",
    ],
)
def test_a_planted_upward_module_named_in_a_text_is_found(line: str, tree: Tree) -> None:
    planted = tree.planted("trtpipe.job.dump", line)
    assert [edge.partition(" -> ")[0] for edge in planted.upward()] == ["trtpipe.job.dump"]


@pytest.mark.parametrize(
    "line",
    [
        "importlib.import_module(f'trtpipe.{room}.flavour')",
        "importlib.import_module('.'.join(('trtpipe', 'trt')))",
        "__import__('trtpipe.' + room)",
        "from importlib import import_module as load",
        "exec(script)",
    ],
)
def test_a_planted_import_by_a_name_made_at_run_time_is_found(line: str, tree: Tree) -> None:
    assert set(tree.planted("trtpipe.job.dump", line).by_name()) - MAY_IMPORT_BY_NAME == {"trtpipe.job.dump"}


@pytest.mark.parametrize(
    "line",
    ["import torch", "class K:\n    import torch", "if not TYPE_CHECKING:\n    import torch",
     "if TYPE_CHECKING:\n    import csv\nelse:\n    import torch",
     "try:\n    import torch\nexcept ImportError:\n    pass"],
)  # fmt: skip
def test_a_planted_heavy_import_is_found(line: str, tree: Tree) -> None:
    assert "trtpipe.job.dump" in tree.planted("trtpipe.job.dump", line).heavy()


@pytest.mark.parametrize("line", ["import csv", "from trtpipe.job import problems"])
@pytest.mark.parametrize(
    "head", ["class K:", "def f():", "async def f():", "class K:\n  def f(self):", "def f():\n  if TYPE_CHECKING:"]
)
def test_a_planted_light_import_is_found_wherever_it_hides(head: str, line: str, tree: Tree) -> None:
    target = line.removeprefix("import ").replace("from trtpipe.job import ", "trtpipe.job.")
    planted = tree.planted("trtpipe.job.dump", f"{head}\n    {line}")
    assert list(planted.needless()) == [f"trtpipe.job.dump -> {target}"]


@pytest.mark.parametrize("line", ["sys.stdout.write('x')", "def f(say=print): say(1)", "sys.__stderr__.flush()"])
def test_a_planted_print_is_found(line: str, tree: Tree) -> None:
    assert set(tree.planted("trtpipe.job.dump", line).prints()) - OTHER_STREAMS == {"trtpipe.job.dump"}


def test_a_planted_package_that_is_not_declared_is_found(tree: Tree) -> None:
    planted = tree.planted("trtpipe.job.dump", "def f():\n    import requests")
    assert list(planted.undeclared()) == ["trtpipe.job.dump -> requests"]


def test_every_folder_of_modules_is_a_package() -> None:
    """import-linter sees packages alone."""
    folders = {path.parent for package in ("trtpipe", "calib") for path in (ROOT / package).rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == [], "add __init__.py"


def test_the_packages_hold_modules_and_templates_alone() -> None:
    """All of it is in the wheel; a .pyi would stand for its module in the eyes of mypy."""
    files = [path for package in ("trtpipe", "calib") for path in (ROOT / package).rglob("*") if path.is_file()]
    other = {path.relative_to(ROOT) for path in files if path.suffix != ".py" and path.parent.name != "__pycache__"}
    strange = {path for path in other if path.name != "py.typed" and path.parent.name != "templates"}
    assert strange == set(), "data belongs into configs/ or docs/, what is generated into no commit"


def test_the_house_has_its_rooms_and_nothing_else() -> None:
    there = {p.name.removesuffix(".py") for p in (ROOT / "trtpipe").iterdir() if p.name != "__pycache__"}
    house = {name.removeprefix("trtpipe.") for row in layers() for name in row} - {"calib"}
    assert set(ROOMS) <= house
    assert there == {*house, "__init__", "py.typed"}, "a module belongs into a room: docs/architecture.md says which"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_for_and_what_others_may_import(tree: Tree, room: str) -> None:
    body = tree.modules[f"trtpipe.{room}"].body
    first = f"trtpipe/{room}/__init__.py: a docstring of one line, then __all__, and nothing else"
    assert [type(n) for n in body] == [ast.Expr, ast.Assign], first
    documented, listed = body
    assert "\n" not in ast.literal_eval(documented.value), first
    public = ast.literal_eval(listed.value)
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


def test_every_module_says_what_it_is_for(tree: Tree) -> None:
    lines = {name: (ast.get_docstring(module) or "").partition("\n")[0] for name, module in tree.modules.items()}
    unsaid = [name for name, line in lines.items() if len(re.findall(r"\w+", line)) < 2]
    assert unsaid == [], "begin the module with a docstring: one line of what it is for"


def test_no_file_is_too_long() -> None:
    files = [*(ROOT / "trtpipe").rglob("*.py"), *(ROOT / "calib").rglob("*.py")]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}, "split these by subject"

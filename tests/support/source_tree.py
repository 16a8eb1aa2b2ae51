"""The modules of both packages as syntax trees, what each imports, and which of that is heavy."""

from __future__ import annotations

import ast
import copy
import functools
import graphlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import trtpipe

ROOT = Path(__file__).resolve().parents[2]
#: Modules of Python that came after 3.10, the oldest that is supported.
NEWER = frozenset({"tomllib"})
#: The packages that every installation has, by the name that imports them.
LIGHT = ("numpy", "yaml", "pydantic", "pydantic_core", "click", "rich", "PIL", "cryptography", "safetensors",
         "filelock", "packaging")  # fmt: skip
#: Of these, what takes long to load (40 ms): it is imported where it is used.
SLOW = ("rich", "packaging")
#: Everything that the light core can do without, and what loads it.
HEAVY = ("torch", "torchvision", "torchao", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "google", "jinja2",
         "matplotlib", "numba", "networkx", "tensorrt", "tensorrt_rtx", "torch_tensorrt", "torch2trt", "cuda", "pycuda",
         "dask", "distributed", "fsspec", "sklearn", "timm", "triton", "ml_dtypes", "sympy", "markupsafe",
         "pycocotools", "safetensors.torch")  # fmt: skip
#: What imports a module whose name is made at run time.
BY_NAME = {"import_module", "__import__", "resolve_name", "run_module", "run_path", "exec", "eval", "entry_points",
           "spec_from_file_location", "reload", "SourceFileLoader", "module_from_spec", "exec_module",
           "load_module", "ImportString", "dictConfig", "compile", "__builtins__", "attrgetter", "getmodule",
           "runsource", "runcode", "testmod", "timeit"}  # fmt: skip
#: What runs a command that is its first argument, as a text or word by word.
RUNNING = {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "system", "popen",
           "create_subprocess_exec", "create_subprocess_shell"}  # fmt: skip
#: What writes to a standard stream, by its dotted name.
STREAMS = re.compile(
    r"print|pprint\.p?print|rich\.print|sys\.(__)?std(out|err)(__)?|warnings\.warn(_explicit)?|traceback\.print_\w+|"
    r"logging\.getLogger\(\)\.\w+|logging\.(debug|info|warning|error|critical|exception|log|basicConfig)"
)


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
        if re.fullmatch(r"(\.\w+){2,}", text) and f"trtpipe{text}" in self.modules:  # put behind a package's name
            yield f"trtpipe{text}"

    def imports(self, name: str) -> dict[str, set[str]]:
        """What a module imports, by where the import stands: `top`, `class`, `function` or `type`; or `text`, when it
        is named in a text that is no docstring, or by attributes of a package: `trtpipe.check`, `trtpipe.trt.flavour`.
        """
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
                elif is_own_command(node):
                    found["text"].add("trtpipe.cli.main")
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found["text"].update(set(self.named(node.value)) - {name})
                visit(ast.iter_child_nodes(node), inside)

        visit([self.modules[name]], "top")
        bound = {t.partition(".")[0] for targets in found.values() for t in targets}
        attributes = [n for n in ast.walk(resolved(self.modules[name])) if isinstance(n, ast.Attribute)]
        inner = {n.value for n in attributes}  # the `a.b` of `a.b.c`
        for dotted in (ast.unparse(n) for n in attributes if n not in inner):
            if dotted.partition(".")[0] in bound:
                found["text"].update(set(self.used(dotted)) - {name, *found["top"], *found["function"], *found["type"]})
        self._imports[name] = found
        return found

    def used(self, dotted: str) -> Iterator[str]:
        """The module of ours that an attribute of a package needs; `trtpipe.check` is where `trtpipe` takes it from."""
        if re.fullmatch(r"(trtpipe|calib)(\.\w+)+", dotted):
            package, _, rest = dotted.partition(".")
            if f"{package}.{rest.partition('.')[0]}" in self.modules:
                yield from self.named(dotted)
            elif (home := trtpipe._HOMES.get(rest.partition(".")[0])) and package == "trtpipe":
                yield home

    def heavy(self) -> frozenset[str]:
        """The modules that load something heavy when they are imported, themselves or through another."""
        loaded = {name: self.imports(name)["top"] | self.imports(name)["class"] for name in self.modules}
        found = {n for n, ts in loaded.items() if any(map(is_heavy, ts))}
        while more := {n for n, ts in loaded.items() if n not in found and ts & found}:
            found |= more
        return frozenset(found)

    def needless(self) -> Iterator[str]:
        """Imports inside functions and classes of what loads nothing heavy."""
        heavy = self.heavy()
        for name in self.modules:
            inside = self.imports(name)["function"] | self.imports(name)["class"]
            for target in sorted(inside):
                if target not in heavy and not is_heavy(target):
                    yield f"{name} -> {target}"

    def by_name(self) -> Iterator[str]:
        """Modules that import a module by a name, or pass on what does."""
        yield from (name for name, module in self.modules.items() if imports_by_name(module))

    def prints(self) -> Iterator[str]:
        """Modules that have to do with the standard streams, but for those of the command line and the examples.

        Python's warnings and the root logger end there too; a logger of ours is shown by the command line alone.
        """
        for name, module in self.modules.items():
            named = {ast.unparse(n) for n in ast.walk(resolved(module)) if isinstance(n, ast.Attribute | ast.Name)}
            if any(map(STREAMS.fullmatch, named)) and not name.startswith(("trtpipe.cli.", "trtpipe.examples.")):
                yield name

    def undeclared(self) -> Iterator[str]:
        """Imports of packages that are neither the oldest Python's, nor ours, nor in a table above."""
        for name in self.modules:
            for target in sorted({t for ts in self.imports(name).values() for t in ts}):
                package = target.partition(".")[0]
                if package in NEWER or package not in {*sys.stdlib_module_names, *LIGHT, *HEAVY, "trtpipe", "calib"}:
                    yield f"{name} -> {target}"

    def upward(self) -> Iterator[str]:
        """Modules named in a text by a room that stands below them or beside them."""
        for name in self.modules:
            for target in sorted(self.imports(name)["text"]):
                here, there = place(name), place(target)
                if here[1] != there[1] and here[0] >= there[0]:
                    yield f"{name} -> {target}"

    def circle(self) -> tuple[str, ...]:
        """One circle of modules, imports in functions, for types and by text counted; empty when there is none.

        Importing a module imports the packages that it is in first: what their `__init__` imports counts too. Of the
        package trtpipe itself that is nothing, it loads what it names when that is asked for.
        """
        edges = {
            name: {t for ts in self.imports(name).values() for t in ts} & set(self.modules) for name in self.modules
        }
        for name, targets in edges.items():
            above = {p for t in (name, *targets) for p in packages(t)} - {"trtpipe", name}
            targets.update(above & set(self.modules))
        try:
            graphlib.TopologicalSorter(edges).prepare()
        except graphlib.CycleError as error:
            return tuple(error.args[1])
        return ()


@functools.cache
def resolved(module: ast.Module) -> ast.Module:
    """A copy of a module in which what was imported has its dotted name: `numpy.load` for `np.load`, and for `load`
    after `from numpy import load`. Rules about what another module defines read it."""
    known: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            known.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom):
            known.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    for node in module.body:  # what was imported, under one more name
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            first, dot, rest = ast.unparse(node.value).partition(".")
            if isinstance(node.value, ast.Name | ast.Attribute) and (dot or first in known):
                known[node.targets[0].id] = known.get(first, first) + dot + rest
    return _Resolving(known).visit(copy.deepcopy(module))


class _Resolving(ast.NodeTransformer):
    def __init__(self, known: dict[str, str]) -> None:
        self._known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load) or node.id not in self._known:
            return node
        dotted = ast.parse(self._known[node.id], mode="eval").body
        for part in ast.walk(dotted):
            ast.copy_location(part, node)
        return dotted


def is_heavy(target: str) -> bool:
    """Whether a module of another package takes long to load, or loads what does."""
    return any(target == name or target.startswith(f"{name}.") for name in (*HEAVY, *SLOW))


def packages(name: str) -> set[str]:
    """The packages that a module is in: `a` and `a.b` of a.b.c."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def used(node: ast.AST) -> set[str]:
    """The names that a node uses; of attributes, those of modules that import (`model.eval()` imports nothing)."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr} - {"exec", "eval", "compile"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        return {node.func.attr} & {"exec", "eval"}
    return {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()


def is_own_command(node: ast.AST) -> bool:
    """Whether an expression is a command line of our program, or a call that is given one."""
    if isinstance(node, ast.Call):
        given = [*node.args, *(k.value for k in node.keywords)]
        first = [a.elts[0] for a in given if isinstance(a, ast.List | ast.Tuple) and a.elts]
        if ast.unparse(node.func).rpartition(".")[2] in RUNNING:
            first += given
        return any(re.match(r"f?['\"]([^'\"]* -m *)?trtpipe\b(?![.:-])", ast.unparse(word)) for word in first)
    return isinstance(node, ast.List | ast.Tuple) and bool(re.search("'-m(', ')?trtpipe'", ast.unparse(node)))


@functools.cache
def imports_by_name(module: ast.Module) -> bool:
    """Whether a module imports, takes or passes on a module by a name, or what does."""
    return any(used(node) & BY_NAME or is_begun(node) for node in ast.walk(module)) or takes_modules(module)


def takes_modules(module: ast.Module) -> bool:
    """Whether anything is done with `sys.modules` but to ask for its names, to delete one, or to take a module that is
    named there and is not of our packages."""
    harmless: set[ast.AST] = set()
    for node in ast.walk(resolved(module)):
        match node:
            case (
                ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[table])
                | ast.Call(func=ast.Name("set"), args=[table])
                | ast.Subscript(value=table, ctx=ast.Del())
            ):
                harmless.add(table)
            case (
                ast.Subscript(value=table, slice=ast.Constant(str(name)))
                | ast.Call(func=ast.Attribute(value=table, attr="get"), args=[ast.Constant(str(name)), *_])
            ) if name.partition(".")[0] not in ("trtpipe", "calib"):
                harmless.add(table)
    tables = (n for n in ast.walk(resolved(module)) if isinstance(n, ast.Attribute) and n.attr == "modules")
    return any(ast.unparse(n) == "sys.modules" for n in tables if n not in harmless)


def is_begun(node: ast.AST) -> bool:
    """Whether an expression puts a name behind one of our packages', in any of the ways that text is put together."""
    parts: list[ast.AST] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        parts = [node.left]
    elif isinstance(node, ast.JoinedStr):
        parts = node.values[:1] if len(node.values) > 1 else []
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("format", "format_map"):
            parts = [node.func.value]
        elif node.func.attr == "join":
            parts = [e for a in node.args if isinstance(a, ast.Tuple | ast.List) for e in a.elts[:1]]
    begun = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
    return any(re.match(r"(trtpipe|calib)(\.|$)", text) for text in begun)


@functools.cache
def layers() -> list[list[str]]:
    """The contract's layers, the highest first: the modules and rooms of each."""
    (listed,) = re.findall(
        r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S
    )
    return [re.findall(r"[\w.]+", row) for row in listed.splitlines()]


def place(module: str) -> tuple[int, str]:
    """Where the contract has a module: its layer, 0 at the top, and the room or ground module that it belongs to."""
    room = module.partition(".")[0] if module.startswith("calib") else ".".join(module.split(".")[:2])
    return next((at for at, row in enumerate(layers()) if room in row), -1), room

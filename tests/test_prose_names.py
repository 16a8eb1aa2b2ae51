"""What docstrings and comments name is there: arguments, attributes, modules, keys of a job, functions of libraries."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from trtpipe.job.job import Job

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("calib", "trtpipe")
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)+)`")
#: Ends of the names of files, which have dots too.
ENDINGS = {
    "py",
    "json",
    "html",
    "proto",
    "pbtxt",
    "sig",
    "hybrid",
    "onnx",
    "safetensors",
    "txt",
    "md",
    "yaml",
    "sqlite",
}
#: What stands for any name of its kind, or belongs to a library that cannot be imported everywhere.
EXAMPLES = {
    "layer1.0.conv1", "layer1.0.conv1.weight", "conv.0", "batch.image", "batch.mask", "pair.0", "pair.1",
    "detections.0.boxes", "key.sign", "torch2trt.torch2trt", "torch_tensorrt.dynamo.compile", "IPython.display",
}  # fmt: skip
SECTION = re.compile(r"^(Args|Attributes):\n((?: {4}.*\n?|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)


def documented(text: str) -> Iterator[str]:
    """The names that the sections Args and Attributes of a docstring explain."""
    for section in SECTION.finditer(text):
        for entry in ENTRY.finditer(section[2]):
            yield from (name.lstrip("*") for name in entry[1].split(", "))


def given(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """The arguments of a function; the fields of a class, and the arguments that it is made with."""
    if isinstance(node, ast.FunctionDef):
        a = node.args
        return {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x is not None}
    fields = {
        n.id
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    own = {
        n.attr for m in methods for n in ast.walk(m) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
    }
    return fields | own | {n.name for n in methods} | set().union(*(given(m) for m in methods if m.name == "__init__"))


@cache
def modules() -> dict[str, list[Path]]:
    """Every way to name a module of ours from its end, and the files that it can be."""
    found: dict[str, list[Path]] = {}
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for k in range(len(parts)):
            found.setdefault(".".join(parts[k:]), []).append(path)
    return found


@cache
def names_of_file(path: Path) -> set[str]:
    """What a module defines or imports at its top."""
    found = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for n in [node] if isinstance(node, ast.ClassDef | ast.FunctionDef) else ast.walk(node):
            if isinstance(n, ast.ClassDef | ast.FunctionDef):
                found.add(n.name)
            elif isinstance(n, ast.Import | ast.ImportFrom):
                found.update(a.asname or a.name for a in n.names)
            elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                found.add(n.id)
            elif isinstance(n, ast.Constant) and path.name == "__init__.py":  # a room names what it loads when asked
                found.add(str(n.value))
    return found


@cache
def members() -> dict[str, set[str]]:
    """The members of every class of ours, by its name; of two that share one, those of both."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(given(node))
    return found


def is_key(parts: list[str]) -> bool:
    """Whether they are the path of a key in a job file."""
    model: Any = Job
    for k, part in enumerate(parts):
        fields = model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else {}
        if part not in fields:
            return k > 0 and not fields
        kind = fields[part].annotation
        inside = [kind, *getattr(kind, "__args__", ())]
        model = next((t for t in inside if isinstance(t, type) and issubclass(t, BaseModel)), None)
    return True


def is_of_a_library(parts: list[str]) -> bool:
    """Whether Python finds it in an installed library."""
    try:
        found: ModuleType = importlib.import_module(parts[0])
    except ImportError:
        return False
    for k, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:k]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def leads_somewhere(name: str) -> bool:
    """Whether a dotted name is a module of ours or something in it, a member of a class, a key, a library's, a file."""
    parts = name.split(".")
    for k in range(1, len(parts) + 1):
        for path in modules().get(".".join(parts[:k]), ()):
            if k == len(parts) or parts[k] in names_of_file(path):
                return True
    if parts[0] in members() and parts[1] in members()[parts[0]]:
        return set(parts[2:]) <= set().union(*members().values())
    of_tensorrt = is_of_a_library(["tensorrt_rtx", *parts])
    return parts[-1] in ENDINGS or is_key(parts) or parts[0] == "aten" or is_of_a_library(parts) or of_tensorrt


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_what_prose_names_is_there(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    wrong = [
        f"{node.name}: {name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for name in documented(ast.get_docstring(node) or "")
        if name not in given(node)
    ]
    wrong += [name for name in DOTTED.findall(source) if name not in EXAMPLES and not leads_somewhere(name)]
    assert not wrong


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("job.read_job", False), ("graph.op_name", False), ("nodes.op_name", True), ("load.read_job", True),
        ("precision.keep", True), ("precision.kept", False), ("TensorSpec.shape", True), ("TensorSpec.form", False),
        ("sys.path", True), ("sys.paths", False), ("check.limits.metrics", True), ("Built.report.passed", True),
        ("Built.report.nothing", False),
    ],
)  # fmt: skip
def test_a_name_that_leads_nowhere_is_seen(name: str, there: bool) -> None:
    assert leads_somewhere(name) is there


def test_an_attribute_that_is_not_there_is_seen() -> None:
    node = ast.parse('class A:\n    """Of.\n\n    Attributes:\n        x, y: of it.\n    """\n    x: int\n').body[0]
    assert isinstance(node, ast.ClassDef)
    assert [n for n in documented(ast.get_docstring(node) or "") if n not in given(node)] == ["y"]

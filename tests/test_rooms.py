"""The rooms of the house: which there are, what each lists as public, what a module and a class say of themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

import pytest
from source_tree import ROOT, Tree, layers, resolved

ROOMS = (
    "job", "trt", "model", "bundle", "evaluation", "quantization", "routes", "runtime", "report", "pipeline", "nightly",
    "cli",
)  # fmt: skip


#: Containers that can be changed in place.
CHANGEABLE = (
    "dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "JsonObject",
    "MutableMapping", "MutableSequence", "MutableSet",
)  # fmt: skip
#: Fields of frozen values that hold what no type of ours describes, and why.
HOLDING_ANYTHING = {
    "trtpipe.job.yamlfile.Document.data": "what a user has written, before it is validated",
    "trtpipe.model.onnx.values.Node.attributes": "ONNX's: numbers, texts, tensors and lists of each, by the operator",
    "trtpipe.quantization.corrections.sweep._Place.plain": "what nodes of a graph give: tensors, sizes, tuples of them",
    "trtpipe.quantization.corrections.sweep._Place.coded": "likewise",
}


def test_every_folder_of_modules_is_a_package() -> None:
    """import-linter sees packages alone."""
    folders = {path.parent for package in ("trtpipe", "calib") for path in (ROOT / package).rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == [], "add __init__.py"


def test_the_packages_hold_modules_and_templates_alone() -> None:
    """All of it is in the wheel; a .pyi would stand for its module in the eyes of mypy."""
    files = [path for package in ("trtpipe", "calib") for path in (ROOT / package).rglob("*") if path.is_file()]
    other = {path.relative_to(ROOT) for path in files if path.suffix != ".py" and path.parent.name != "__pycache__"}
    made_of = {("templates", suffix) for suffix in (".html", ".css", ".js")}
    strange = {path for path in other if path.name != "py.typed" and (path.parent.name, path.suffix) not in made_of}
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


def test_every_module_says_what_it_is_for(tree: Tree) -> None:
    lines = {name: (ast.get_docstring(module) or "").partition("\n")[0] for name, module in tree.modules.items()}
    unsaid = [name for name, line in lines.items() if len(re.findall(r"\w+", line)) < 2]
    assert unsaid == [], "begin the module with a docstring: one line of what it is for"


def changing(module: ast.Module) -> list[str]:
    """The dataclasses and pydantic models that are not frozen and do not say why, in a sentence that begins with
    `Mutable:`. Models inherit it, and may not undo it."""
    return [
        node.name
        for node in ast.walk(resolved(module))
        if isinstance(node, ast.ClassDef) and not re.search(r"Mutable: \w+", ast.get_docstring(node) or "")
        if not all(settings(node))
    ]


def settings(node: ast.ClassDef) -> list[bool]:
    """Whether each thing that a class says of itself, as a dataclass or as a model, makes it frozen: a model that is
    derived from pydantic's own has to, another one may leave it to the one it is derived from."""
    configs = [n.value for n in node.body if isinstance(n, ast.Assign | ast.AnnAssign) and "model_config" in targets(n)]
    options = [frozen for part in (*configs, *node.keywords) if (frozen := is_frozen(part)) is not None]
    if any(ast.unparse(base).endswith("BaseModel") for base in node.bases):
        options.append(any(options))
    dataclasses = [decorator for decorator in node.decorator_list if "dataclass" in ast.unparse(decorator)]
    return [*options, *(is_frozen(decorator) is True for decorator in dataclasses)]


def targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """The names that a statement gives a value to."""
    return [ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]


def is_frozen(written: ast.AST | None) -> bool | None:
    """What an expression sets `frozen` to, as an argument or a key; None where it sets nothing."""
    for node in ast.walk(written or ast.Constant(None)):
        pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        given = [value for key, value in pairs if key is not None and ast.unparse(key) == "'frozen'"]
        if isinstance(node, ast.keyword) and node.arg == "frozen":
            given.append(node.value)
        for value in given:
            return isinstance(value, ast.Constant) and value.value is True
    return None


def test_a_dataclass_is_frozen_or_says_why_not(tree: Tree) -> None:
    found = [f"{name}.{c}" for name, module in tree.modules.items() for c in changing(module)]
    assert found == [], "a value does not change after it is made: frozen=True, or `Mutable: why` in the docstring"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("@dataclass\nclass A:\n    x: int", ["A"]),
        ("@dataclasses.dataclass(slots=True)\nclass A:\n    'What was counted.'", ["A"]),
        ("@dataclass\nclass A:\n    'What was counted. Mutable: each batch adds to it.'", []),
        ("@dataclass(frozen=True)\nclass A:\n    x: int", []),
        ("class A(pydantic.BaseModel):\n    x: int", ["A"]),
        ("class A(BaseModel):\n    model_config = ConfigDict(frozen=True)\n    x: int", []),
        ("from dataclasses import dataclass as value\n@value\nclass A:\n    x: int", ["A"]),
        ("class A(Section):\n    model_config = ConfigDict(frozen=False)", ["A"]),
        ("class A(Section):\n    model_config: ClassVar = Section.model_config | {'frozen': False}", ["A"]),
        ("class A(Section, frozen=False): ...", ["A"]),
        ("class A(BaseModel, frozen=True): ...", []),
        ("class A(Section):\n    model_config = ConfigDict(extra='allow')", []),
    ],
)
def test_a_dataclass_that_changes_is_found(line: str, names: list[str]) -> None:
    assert changing(ast.parse(line)) == names


def held(module: ast.Module, types: Collection[str] = CHANGEABLE) -> list[str]:
    """Fields of frozen dataclasses, named tuples and pydantic's own models that are annotated as one of these types, by
    default what can be changed in place; what a function takes or returns is no part of the value."""
    found = []
    for node in ast.walk(resolved(module)):
        if not isinstance(node, ast.ClassDef):
            continue
        frozen = any("dataclass" in ast.unparse(d) and is_frozen(d) for d in node.decorator_list)
        if frozen or any(ast.unparse(base).endswith(("NamedTuple", "BaseModel")) for base in node.bases):
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            found += [f"{node.name}.{ast.unparse(n.target)}" for n in fields if names(n.annotation, types)]
    return found


def names(annotation: ast.expr, types: Collection[str]) -> bool:
    """Whether a type, or a part of it, is one of these."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith(("Callable", "ClassVar")):
        return False
    named = annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", "")
    parts = [n for n in ast.iter_child_nodes(annotation) if isinstance(n, ast.expr)]
    return named in types or any(names(part, types) for part in parts)


def test_a_frozen_value_holds_nothing_that_changes(tree: Tree) -> None:
    found = [f"{name}.{field}" for name, module in tree.modules.items() for field in held(module)]
    assert found == [], "annotate Mapping, Sequence or tuple, or derive a model from Frozen: nobody changes it"


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("x: dict[str, int]", True),
        ("x: list[int] | None = None", True),
        ("x: tuple[set[int], ...]", True),
        ("x: Mapping[str, list[int]]", True),
        ("x: collections.Counter[str]", True),
        ("x: bytearray", True),
        ("x: JsonObject", True),
        ("x: tuple[MutableMapping[str, int], ...]", True),
        ("x: Mapping[str, tuple[int, ...]]", False),
        ("x: Callable[[list[int]], dict[str, int]]", False),
        ("x: ClassVar[dict[str, int]] = {}", False),
    ],
)
def test_a_frozen_value_that_holds_what_changes_is_found(field: str, found: bool) -> None:
    wanted = ["A.x"] if found else []
    assert held(ast.parse(f"@dataclass(frozen=True)\nclass A:\n    {field}")) == wanted
    assert held(ast.parse(f"class A(NamedTuple):\n    {field}")) == wanted
    assert held(ast.parse(f"class A(pydantic.BaseModel):\n    {field}")) == wanted
    assert held(ast.parse(f"@dataclass\nclass A:\n    'Mutable: it grows.'\n    {field}")) == []


def test_a_frozen_value_says_what_it_holds(tree: Tree) -> None:
    found = {f"{name}.{field}" for name, module in tree.modules.items() for field in held(module, {"Any"})}
    assert found == set(HOLDING_ANYTHING), "give the type, `object` where nobody looks into it, or list it with why"


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("x: Any", True),
        ("x: typing.Any = None", True),
        ("x: Any | None", True),
        ("x: Mapping[str, tuple[Any, ...]]", True),
        ("x: NDArray[Any]", True),
        ("x: object", False),
        ("x: Callable[[Any], Any]", False),
    ],
)
def test_a_frozen_value_that_holds_anything_is_found(field: str, found: bool) -> None:
    wanted = ["A.x"] if found else []
    assert held(ast.parse(f"@dataclass(frozen=True)\nclass A:\n    {field}"), {"Any"}) == wanted
    assert held(ast.parse(f"class A(NamedTuple):\n    {field}"), {"Any"}) == wanted


def test_no_file_is_too_long() -> None:
    files = [*(ROOT / "trtpipe").rglob("*.py"), *(ROOT / "calib").rglob("*.py")]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_bytes().splitlines())) > 400}
    assert long == {}, "split these by subject"

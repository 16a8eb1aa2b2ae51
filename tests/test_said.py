"""What is written for people is held by tests: the text of every error, and what a docstring has to say."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from source_tree import resolved

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "trtpipe").rglob("*.py"), *(ROOT / "calib").rglob("*.py")])
#: Their docstrings are what `--help` prints.
COMMANDS = ROOT / "trtpipe" / "cli" / "commands"
#: So many words of a message in a row, wherever in it, have to stand in a test; as many as it has, if it is shorter.
RUN = 5
#: The form of a message: `<where>: must <what> (got <value>).`
OF_THE_FORM = re.compile(r"\(got |(^|: )must ")
#: A docstring that says the dtype or shape of an array.
WITH_ARRAYS = re.compile(r"\[|\b(b?float|u?int)(\d+\w*|s|ing|egers?)?\b|\b(dtypes?|bools?)\b")
#: Bugs of our own, which nobody meets: they are raised so that a type checker and a reader know.
OF_BUGS = ("AssertionError", "TypeError")


def words(text: str) -> list[str]:
    """The words of a text or of a pattern for one."""
    return re.findall(r"[a-z0-9_]+", text.lower().replace("\\", ""))


def runs(text: str) -> set[tuple[str, ...]]:
    """Every 3 to `RUN` words in a row."""
    said = words(text)
    return {tuple(said[i : i + n]) for n in range(3, RUN + 1) for i in range(len(said) - n + 1)}


def parts(node: ast.AST) -> list[str]:
    """The constant parts of a text; empty for what is no text."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return [str(v.value) for v in node.values if isinstance(v, ast.Constant)]
    return []


def texts(node: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Every text below a node but docstrings, by line; the parts of one with values in it together."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and parts(child.value):
            continue
        if found := parts(child):
            yield child.lineno, found  # type: ignore[attr-defined]
        else:
            yield from texts(child)


def stated(node: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """The texts that a value is, may be, or holds, by line; none of what makes it."""
    if found := parts(node):
        yield node.lineno, found  # type: ignore[attr-defined]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        for child in (node.func.value, *node.args[1:]):
            yield from stated(child)
    elif isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.IfExp | ast.BoolOp):
        for child in node.values if isinstance(node, ast.Dict) else ast.iter_child_nodes(node):
            yield from stated(child)


@functools.cache
def named(module: ast.Module) -> dict[str, list[tuple[int, list[str]]]]:
    """The texts that have a name, by name: alone or in a table, at the top of a module or in a function, what is added
    to one, and those that a function returns or gives one after another."""
    found: dict[str, list[tuple[int, list[str]]]] = defaultdict(list)
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found[ast.unparse(target)] += stated(node.value)
        elif isinstance(node, ast.AugAssign):
            found[ast.unparse(node.target)] += stated(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            found[ast.unparse(node.func.value)] += stated(node.args[0])
        elif isinstance(node, ast.FunctionDef):
            for given in ast.walk(node):
                if isinstance(given, ast.Return | ast.Yield) and given.value is not None:
                    found[node.name] += stated(given.value)
    return found


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Those of both packages, by name."""
    names = (path.relative_to(ROOT).with_suffix("") for path in SOURCES)
    return {".".join(name.parts): ast.parse((ROOT / name).with_suffix(".py").read_bytes()) for name in names}


def messages(module: ast.Module, others: Mapping[str, ast.Module]) -> Iterator[tuple[int, list[str]]]:
    """The texts of the errors that a module raises or makes, and others of their form, which are raised elsewhere."""
    yield from ((line, found) for line, found in texts(module) if OF_THE_FORM.search("".join(found)))
    names = named(module)
    for node in ast.walk(resolved(module)):
        raised = node.exc if isinstance(node, ast.Raise) else None
        made = node if isinstance(node, ast.Call) and re.search(r"(Error|Broken)$", ast.unparse(node.func)) else None
        if (error := raised or made) and not ast.unparse(error).startswith(OF_BUGS):
            yield from texts(error)
            for part in ast.walk(error):
                name = getattr(part, "id", getattr(part, "attr", ""))
                home = ast.unparse(part.value) if isinstance(part, ast.Attribute) else ""
                yield from (named(others[home]) if home in others else names).get(name, ())


@pytest.fixture(scope="module")
def tested() -> set[tuple[str, ...]]:
    """Every run of words in the tests."""
    found: set[tuple[str, ...]] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            for part in parts(node):
                found |= runs(part)
    return found


def untested(
    module: ast.Module, tested: set[tuple[str, ...]], others: Mapping[str, ast.Module]
) -> list[tuple[int, str]]:
    """The messages of a module that no test quotes, by line; those too short for a run say nothing by themselves."""
    return [
        (line, " {} ".join(part.strip() for part in found))
        for line, found in dict.fromkeys((line, tuple(found)) for line, found in messages(module, others))
        if (said := set().union(*map(runs, found))) and not {r for r in said if len(r) == max(map(len, said))} & tested
    ]


def test_every_error_has_a_test_of_its_text(tested: set[tuple[str, ...]]) -> None:
    without = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in SOURCES
        for line, text in untested(ast.parse(path.read_bytes()), tested, modules())
    ]
    assert without == [], "write a test that quotes it"


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ('raise InputError(f"{where}: no zebra may graze here (got {x}).")', [1]),
        ('failed(JobError("no zebra may graze here"))', [1]),
        ('yield "a.zebra", f"must graze here alone (got {x})."', [1]),
        ('text = f"{x}: no zebra may graze here"\nraise InputError(text)', [1]),
        ('GONE = "no zebra may graze here"\nraise InputError(f"{x}: {GONE}.")', [1]),
        ('yield Broken(("a",), "let no zebra graze", repr(x))', [1]),
        ('raise InputError("the file is empty", "no zebra may graze here")', [1]),
        ('GONE = {1: "no zebra may graze here"}\nraise InputError(f"{x}: {GONE[1]}.")', [1]),
        ('def why(x):\n    return f"{x}: no zebra may graze here"\nraise InputError(why(x))', [2]),
        ('class A:\n    def why(self):\n        yield "no zebra may graze here"\nraise InputError(*a.why())', [3]),
        ('why = place\nwhy += ": no zebra may graze here"\nraise InputError(why)', [2]),
        ('why.append("no zebra may graze here")\nraise InputError("; ".join(why))', [1]),
        ('from trtpipe.fields import GONE as NO\nraise InputError(f"{x}: {NO}.")', [2]),
        ('from trtpipe import fields\nraise InputError(f"{x}: {fields.GONE}.")', [2]),
        ('from trtpipe.fields import why\nraise InputError(f"{x}: {why(1)}.")', [4]),
        ('raise InputError(f"{a}: the file is empty.")', []),
        ('raise AssertionError("no zebra may graze here")', []),
        ('raise InputError(f"{a} {b}")', []),
        ('class A:\n    """`path` must graze here (got a zebra)."""', []),
    ],
)
def test_a_message_that_no_test_quotes_is_found(line: str, lines: list[int]) -> None:
    others = {
        "trtpipe.fields": ast.parse(
            '\nGONE = "no zebra may graze here"\ndef why(x):\n    return "no zebra may graze here"'
        )
    }
    assert [at for at, _ in untested(ast.parse(line), runs("the file is empty"), others)] == lines


def public(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods that others call, by name."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from ((f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef))


def unsaid(function: ast.FunctionDef) -> list[str]:
    """What a docstring leaves out: the dtype or shape of arrays, the errors that are raised, some of the arguments."""
    text = ast.get_docstring(function) or ""
    signature = f"{ast.unparse(function.args)} -> {ast.unparse(function.returns or ast.Constant(None))}"
    raised = {ast.unparse(n.exc) for n in ast.walk(function) if isinstance(n, ast.Raise) and n.exc is not None}
    missing = []
    if re.search(r"\b(Array|Tensor|NDArray|ndarray|Outputs|Rows)\b", signature) and not re.search(WITH_ARRAYS, text):
        missing.append("shape or dtype")
    said = re.search(r"\bRaises?\b|\w+Error\b|[Rr]efuse", text)
    if any(re.match(r"(?!SystemExit)[A-Z]\w*\(", error) for error in raised) and not said:
        missing.append("Raises")
    if "Raises:" in text and "TrtpipeError" not in text:
        named = {error.partition("(")[0].rpartition(".")[2] for error in raised if error[:1].isupper()}
        named -= set(vars(builtins))  # often an OSError's subclass, or made into an error of ours around it
        caught = {ast.unparse(h.type) for h in ast.walk(function) if isinstance(h, ast.ExceptHandler) and h.type}
        missing += [name for name in sorted(named) if name not in text and not any(name in c for c in caught)]
    if "Args:\n" in text:
        explained = text.partition("Args:\n")[2]
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        missing += [a.arg for a in arguments if a.arg not in ("self", "cls") and a.arg not in explained]
    return [] if text.startswith("See `") else missing


def test_public_functions_say_what_arrays_they_take_and_what_they_raise() -> None:
    files = [path for path in SOURCES if not path.is_relative_to(COMMANDS)]
    left_out = [
        f"{path.relative_to(ROOT)}:{function.lineno}: {name}: {', '.join(missing)}"
        for path in files
        for name, function in public(ast.parse(path.read_bytes()))
        if not name.rpartition(".")[2].startswith("_") and (missing := unsaid(function))
    ]
    assert left_out == [], "a docstring gives dtype, shape [N, C, H, W] and errors"


@pytest.mark.parametrize("array", ["Array", "torch.Tensor", "Mapping[str, np.ndarray]"])
def test_a_docstring_that_leaves_them_out_is_found(array: str) -> None:
    def of(docstring: str) -> list[str]:
        code = f'def f(x: {array}) -> float:\n    """{docstring}"""\n    raise InputError("no")'
        return unsaid(ast.parse(code).body[0])  # type: ignore[arg-type]

    assert of("The mean, to a point.") == ["shape or dtype", "Raises"]
    assert of("The mean.") == ["shape or dtype", "Raises"]
    assert of("The mean of float32 [N].") == ["Raises"]
    assert of("The mean of float32 [N].\n\n    Raises:\n        InputError: it is empty.\n    ") == []
    other = ast.parse('def f(x: Outputs) -> float:\n    """The mean."""\n    raise Unfit("no")').body[0]
    assert unsaid(other) == ["shape or dtype", "Raises"]  # type: ignore[arg-type]
    text = "Do it.\\n\\n    Args:\\n        x: a number.\\n\\n    Raises:\\n        InputError: it is none.\\n    "
    code = f'def f(x: int, y: int) -> None:\n    """{text}"""\n    raise MissingError("no")'
    assert unsaid(ast.parse(code).body[0]) == ["MissingError", "y"]  # type: ignore[arg-type]


#: What a message begins with, a place, and ends with, a sentence; `{}` is what is filled in.
OF_A_PLACE = re.compile(r"(\{\}|[^ ]+( [^:]{0,60})?: )")
#: Errors that no place is to blame for: the user ended the command.
INTERRUPTIONS = {"Cancelled", "CalibCancelled"}
#: What begins without a place because Python's own error, which it is made from, has none.
PLACELESS = ("out of memory. ", "a path must not hold a NUL character ")


def user_errors(modules: Sequence[ast.Module]) -> set[str]:
    """The names of the classes of errors that a user is shown: ours, and what is derived from them in any module."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for module in modules
        for node in ast.walk(resolved(module))
        if isinstance(node, ast.ClassDef)
    }
    found = {"TrtpipeError", "CalibError"}
    while more := {name for name, of in bases.items() if of & found} - found - INTERRUPTIONS:
        found |= more
    return found


def formless(module: ast.Module, errors: set[str]) -> Iterator[tuple[int, str]]:
    """The texts that user errors are made with that name no place, or do not end as a sentence does."""
    for node in ast.walk(resolved(module)):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in errors:
            first = node.args[0]
            pieces = first.values if isinstance(first, ast.JoinedStr) else [first]
            text = "".join("{}" if isinstance(p, ast.FormattedValue) else "".join(parts(p)) for p in pieces)
            begun = OF_A_PLACE.match(text) or text.startswith(PLACELESS)
            if text and not (begun and re.search(r"[.?}]$", text.rstrip())):
                yield node.lineno, text


def test_every_error_names_a_place_and_is_a_sentence() -> None:
    modules = {path.relative_to(ROOT): ast.parse(path.read_bytes()) for path in SOURCES}
    errors = user_errors(list(modules.values()))
    found = [f"{p}:{line}: {text}" for p, module in modules.items() for line, text in formless(module, errors)]
    assert found == [], "<where>: <what must hold> (got <value>). <next step>"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('raise InputError(f"bad image mode {mode}")', ["bad image mode {}"]),
        ('raise CalibError("data: there is no sample")', ["data: there is no sample"]),
        ('raise TrtpipeError("bad image mode")', ["bad image mode"]),
        ('class Gone(BuildError): ...\nclass Lost(Gone): ...\nraise Lost("bad image mode")', ["bad image mode"]),
        ('from trtpipe.errors import InputError as E\nraise E("bad image mode")', ["bad image mode"]),
        ('error = errors.InputError("bad image mode")\nraise error', ["bad image mode"]),
        ('raise errors.InputError(f"{path}: holds no image ({x}). Check the path.")', []),
        ('raise InputError("build.profiles: must be empty (got 2). Leave it out.")', []),
        ('raise ValueError("bad mode")', []),
        ("raise InputError(text)", []),
    ],
)
def test_a_message_of_another_form_is_found(line: str, found: list[str]) -> None:
    errors = [ast.parse(path.read_bytes()) for path in (ROOT / "trtpipe" / "errors.py", ROOT / "calib" / "errors.py")]
    module = ast.parse(line)
    assert [text for _, text in formless(module, user_errors([*errors, module]))] == found


#: What has a unit, and the units.
MEASURED = re.compile(r"\b(latenc(y|ies)|duration|elapsed|how long)\b", re.I)
UNITS = re.compile(
    r"\b(ms|(milli|nano|micro)?seconds?|s|ns|minutes?|hours?|days?|samples|times)\b|_(ms|s|ns)\b|as text|like `", re.I
)


#: Names of times; a runtime is a library, and `times` are counted.
OF_A_TIME = re.compile(
    r"(^|_)(took|elapsed|delays?|pauses?|durations?|latenc(y|ies)|(?!run|date)[a-z]*time(d|out)?)(_|$)"
)


def quantities(module: ast.Module) -> Iterator[tuple[int, str, ast.expr, bool, str]]:
    """What has a name and a type: functions, their arguments, fields of classes. By line: name, type, whether it is a
    time, and what is said of it."""
    for node in ast.walk(module):
        said = ast.get_docstring(node) or "" if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if node.returns is not None:
                spoken_of = "float" in ast.unparse(node.returns) and MEASURED.search(said.partition(".")[0])
                yield node.lineno, node.name, node.returns, bool(spoken_of or OF_A_TIME.search(node.name)), said
            for a in arguments:
                if a.annotation is not None:
                    yield a.lineno, a.arg, a.annotation, bool(OF_A_TIME.search(a.arg)), said
        elif isinstance(node, ast.ClassDef):
            for field, following in itertools.zip_longest(node.body, node.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    name = field.target.id
                    own = [said] if re.search(rf"\b{name}\b", said) else []
                    own += [text for part in (field.value, following) if part for text in spoken(part)]
                    yield field.lineno, name, field.annotation, bool(OF_A_TIME.search(name)), " ".join(own)


def spoken(node: ast.AST) -> list[str]:
    """A text that stands by itself, below a field, or is given to the field as its description."""
    if isinstance(node, ast.Expr):
        return parts(node.value)
    described = node.keywords if isinstance(node, ast.Call) else []
    return [part for k in described if k.arg == "description" for part in parts(k.value)]


def unitless(module: ast.Module) -> list[tuple[int, str]]:
    """The times that are numbers and of which nothing says in what."""
    return [
        (line, name)
        for line, name, annotation, of_a_time, said in quantities(module)
        if of_a_time and re.search(r"\b(float|int)\b", ast.unparse(annotation))
        if not UNITS.search(f"{name} {said}")
    ]


def test_a_time_has_its_unit() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in unitless(ast.parse(path.read_bytes()))
    ]
    assert found == [], "name it ..._ms or ..._s, or say the unit in the docstring"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('def spread(x) -> float:\n    """The spread of the latencies."""', ["spread"]),
        ('def spread(x) -> float:\n    """The spread of the latencies, ms."""', []),
        ('def build_time(x) -> float:\n    """What a build took."""', ["build_time"]),
        ('def wait(timeout: float) -> None:\n    """Wait for it."""', ["timeout"]),
        ('@dataclass(frozen=True)\nclass Build:\n    """One build."""\n    took: float', ["took"]),
        ("class Night(BaseModel):\n    elapsed: float | None = Field(default=None, ge=0)", ["elapsed"]),
        ('class Night(BaseModel):\n    walltime: int = Field(description="how long the night was")', ["walltime"]),
        ('class Night(BaseModel):\n    elapsed: float = Field(description="seconds until all were built")', []),
        ('class Build:\n    """One build, which took `took` seconds."""\n    took: float', []),
        ("class Build:\n    took: float\n    'In seconds.'", []),
        ("class Build:\n    took_s: float\n    runtime: int\n    timestamp: int\n    at: datetime", []),
    ],
)
def test_a_time_without_a_unit_is_found(line: str, names: list[str]) -> None:
    assert [name for _, name in unitless(ast.parse(line))] == names

"""A fact has one home: no set of words, sentence, pattern, constant, table or function body stands in two modules."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: What makes a fact of them: members of a set (two of a type, or of what something is looked for in), words of a
#: sentence, characters of a pattern or of a text with a name, bytes that have one, statements and calls of a function.
MEMBERS, WORDS, CHARACTERS, NAMED_CHARACTERS, MAGIC, STEPS = 3, 5, 8, 8, 4, 6
#: Values by default that are no fact.
SAYING_NOTHING = ("None", "True", "False", "...", "''", "b''", "0", "1", "0.0", "1.0", "-1", "()")
#: The same value by default in two modules, and no fact that they share: each network of the examples has its width.
COINCIDENCES = {"default: width = 16"}
#: What is called as a file of ours is, and is something else: a key of the job, a file of Triton's, a template.
OTHERS = {
    ("model.onnx", "trtpipe/pipeline/cache/keys.py"),
    ("model.onnx", "trtpipe/bundle/triton.py"),
    ("report.html", "trtpipe/report/page.py"),
}


def skeleton(node: ast.expr) -> str:
    """A text with `{}` for what is filled in; empty for what is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(skeleton(v) or "{}" for v in node.values)
    return ""


def members(node: ast.AST, least: int = MEMBERS) -> tuple[str, ...]:
    """The members of a tuple, list, set or `Literal` that holds nothing but text; empty for anything else.

    A mapping from the same keys says something new of each, unless its values are the same too: see `rows`.
    """
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
        node, least = node.slice, 2
    if not isinstance(node, ast.Tuple | ast.List | ast.Set):
        return ()
    written = [m for m in node.elts if not isinstance(m, ast.Starred)]
    texts = [m.value for m in written if isinstance(m, ast.Constant) and isinstance(m.value, str)]
    return tuple(sorted(set(texts))) if len(texts) == len(written) >= least else ()


def pattern(call: ast.Call) -> str:
    """The regular expression that a call is given."""
    of_re = ast.unparse(call.func).startswith("re.")
    given = [k.value for k in call.keywords if k.arg == "pattern"] + (call.args[:1] if of_re else [])
    return next((s for s in map(skeleton, given) if len(s) >= CHARACTERS), "")


def body(function: ast.FunctionDef) -> str:
    """What a function does, whatever its names are; empty where that is little."""
    names: dict[str, str] = {}
    statements = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    calls = sum(isinstance(n, ast.stmt | ast.Call) for s in statements for n in ast.walk(s))
    if calls < STEPS:
        return ""
    own = {a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    tree = ast.parse("\n".join(map(ast.unparse, statements)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in own):
            own.add(node.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in own:
            node.id = names.setdefault(node.id, f"name{len(names)}")
    return ast.unparse(tree)


def is_arithmetic(value: ast.expr) -> bool:
    """Whether an expression is made of constants that are no text, or is a tuple of such."""
    parts = ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.Constant | ast.Tuple | ast.expr_context
    nodes = list(ast.walk(value))
    return all(isinstance(n, parts) and not (isinstance(n, ast.expr) and skeleton(n)) for n in nodes)


def is_range(value: ast.expr) -> bool:
    """Whether an expression is a tuple of numbers of which one has two digits, like -128 to 127."""
    return isinstance(value, ast.Tuple) and is_arithmetic(value) and re.search(r"\d\d", ast.unparse(value)) is not None


def is_magic(value: ast.expr) -> bool:
    """Whether an expression is the bytes that files of a kind begin with."""
    return isinstance(value, ast.Constant) and isinstance(value.value, bytes) and len(value.value) >= MAGIC


def constants(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What a module names at its top, or in capitals anywhere: a number with its name, a text of some length whatever
    it is called."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        if node not in tree.body and not ast.unparse(node).partition("=")[0].partition(":")[0].isupper():
            continue
        for found in {ast.unparse(n) for n in ast.walk(node.value) if isinstance(n, ast.Tuple) and is_range(n)}:
            yield f"constant: {found}", node.lineno
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            for name, value in zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]:
                if len(skeleton(value)) >= NAMED_CHARACTERS:
                    yield f"constant: {skeleton(value)}", node.lineno
                elif is_magic(value):
                    yield f"constant: {ast.unparse(value)}", node.lineno
                elif is_arithmetic(value) and not is_range(value):
                    yield f"constant: {ast.unparse(name).strip('_').upper()} = {ast.unparse(value)}", node.lineno


def rows(table: ast.Dict) -> frozenset[str]:
    """The rows of a table whose values are texts or numbers; what is called the same on both sides is no fact."""
    pairs = list(zip(table.keys, table.values, strict=True))
    for call in (value for key, value in pairs if key is None and isinstance(value, ast.Call)):
        if ast.unparse(call.func) == "dict.fromkeys" and isinstance(call.args[0], ast.Tuple):
            pairs += [(key, call.args[-1]) for key in call.args[0].elts]
    found = {
        skeleton(key): ast.unparse(value)
        for key, value in pairs
        if key and isinstance(value, ast.Constant | ast.UnaryOp)
    }
    return frozenset(f"{key}: {value}" for key, value in found.items() if key and key != value.strip("'"))


def shared(tables: Sequence[tuple[str, frozenset[str]]]) -> Iterator[tuple[str, list[str]]]:
    """Tables of two modules that have two rows in common, and half of the smaller one: the rows, and where."""
    for (one, a), (other, b) in itertools.combinations(tables, 2):
        both, enough = a & b, max(2, (min(len(a), len(b)) + 1) // 2)
        if one.partition(":")[0] != other.partition(":")[0] and len(both) >= enough:
            yield f"table: {', '.join(sorted(both))}", [one, other]


def choices(node: ast.AST) -> tuple[str, ...]:
    """The texts that something is compared with, one after the other or as a pattern: `x == "a" or x == "b"`,
    `case "a" | "b"`; empty for anything else."""
    if isinstance(node, ast.MatchOr):
        values = [p.value for p in node.patterns if isinstance(p, ast.MatchValue)]
        return members(ast.Tuple(values), 2) if len(values) == len(node.patterns) else ()
    compared = [v for v in getattr(node, "values", ()) if isinstance(v, ast.Compare) and len(v.ops) == 1]
    if not isinstance(node, ast.BoolOp) or len({ast.unparse(v.left) for v in compared}) != 1:
        return ()
    kind = ast.Eq if isinstance(node.op, ast.Or) else ast.NotEq
    return members(ast.Tuple([v.comparators[0] for v in compared if isinstance(v.ops[0], kind)]), 2)


def defaults(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """What is no text and is given by default to the arguments of a function and the fields of a class, by name."""
    pairs: list[tuple[str, ast.expr | None]] = []
    if isinstance(node, ast.arguments):
        plain = [*node.posonlyargs, *node.args]
        positional = zip(plain[len(plain) - len(node.defaults) :], node.defaults, strict=True)
        pairs = [(a.arg, v) for a, v in (*positional, *zip(node.kwonlyargs, node.kw_defaults, strict=True))]
    elif isinstance(node, ast.ClassDef):
        pairs = [(ast.unparse(n.target), n.value) for n in node.body if isinstance(n, ast.AnnAssign)]
    for name, value in pairs:
        if isinstance(value, ast.Call) and ast.unparse(value.func).lower().endswith("field"):
            value = next((k.value for k in value.keywords if k.arg == "default"), (*value.args, None)[0])
        if value and is_arithmetic(value) and ast.unparse(value) not in SAYING_NOTHING:
            yield name, value


def facts(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every fact that a module states, as text, and its line."""
    passed = {id(n.value) for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"}
    yield from constants(tree)
    for node in ast.walk(tree):  # from the outside in: what belongs to a fact is none of its own
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(id(node.value))  # a docstring
        if id(node) in passed:
            passed.update(map(id, ast.iter_child_nodes(node)))
            continue
        if found := members(node):
            passed.update(map(id, ast.iter_child_nodes(node)))
            yield f"set: {', '.join(found)}", node.lineno  # type: ignore[attr-defined]
        if isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.In | ast.NotIn):
            looked_in = node.comparators[-1]
            if found := members(looked_in, 2):
                passed.add(id(looked_in))
                yield f"set: {', '.join(found)}", node.lineno
        ends = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("startswith", "endswith"))
        for ending in node.args[:1] if isinstance(node, ast.Call) and ends else ():
            if found := members(ending, 2):
                passed.add(id(ending))
                yield f"set: {', '.join(found)}", ending.lineno
        if found := choices(node):
            yield f"set: {', '.join(found)}", node.lineno  # type: ignore[attr-defined]
        for name, value in defaults(node):
            yield f"default: {name} = {ast.unparse(value)}", value.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("click.option"):
            for given in (k.value for k in node.keywords if k.arg == "default" and is_arithmetic(k.value)):
                named = skeleton(node.args[0]).strip("-").replace("-", "_").upper()
                if ast.unparse(given) not in SAYING_NOTHING:
                    yield f"constant: {named} = {ast.unparse(given)}", given.lineno
        if isinstance(node, ast.Call) and (expression := pattern(node)):
            yield f"pattern: {expression}", node.lineno
        if isinstance(node, ast.expr) and len(re.findall(r"[A-Za-z]{2,}", text := skeleton(node))) >= WORDS:
            passed.update(map(id, ast.iter_child_nodes(node)))
            if " " in text:
                yield f"sentence: {text}", node.lineno
        if isinstance(node, ast.FunctionDef) and (does := body(node)):
            yield f"function: {does}", node.lineno


def sources(root: Path) -> list[Path]:
    """The modules of both packages."""
    return sorted([*(root / "trtpipe").rglob("*.py"), *(root / "calib").rglob("*.py")])


def key(fact: str) -> str:
    """What two homes of a fact have in common: a pattern is the same under a name, and without its anchors."""
    return re.sub(r"^(?:constant|pattern): \^?(.*?)\$?$", r"text: \1", fact)


def homes(root: Path) -> dict[str, list[str]]:
    """Facts that stand in more than one module, and where."""
    found: dict[str, list[str]] = defaultdict(list)
    tables = []
    for path in sources(root):
        tree = ast.parse(path.read_bytes())
        for fact, line in facts(tree):
            found[key(fact)].append(f"{path.relative_to(root)}:{line}")
        dicts = [n for n in ast.walk(tree) if isinstance(n, ast.Dict)]
        tables += [(f"{path.relative_to(root)}:{n.lineno}", rows(n)) for n in dicts]
    found.update(shared(tables))
    return {fact: where for fact, where in found.items() if len({w.partition(":")[0] for w in where}) > 1}


def written_out(root: Path) -> Iterator[str]:
    """Texts with a name in one module (a file's, the beginning of a note) that another module writes out."""
    trees = {p.relative_to(root).as_posix(): ast.parse(p.read_bytes()) for p in sources(root)}
    names = {
        (fact.removeprefix("constant: "), path)
        for path, tree in trees.items()
        for fact, _ in constants(tree)
        if re.search(r"[^\w]", fact.removeprefix("constant: ")) and " = " not in fact
    }
    for path, tree in trees.items():
        documented = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                for home in {h for text, h in names if text == node.value} - {path}:
                    if (node.value, path) not in OTHERS:
                        yield f"{path}:{node.lineno}: {node.value!r} is named in {home}"


def test_every_fact_has_one_home() -> None:
    twice = [f"{fact}\n    in {', '.join(where)}" for fact, where in homes(ROOT).items() if fact not in COINCIDENCES]
    assert not twice, "keep one and import it:\n" + "\n".join(twice)


def test_what_has_a_name_is_not_written_out_again() -> None:
    assert list(written_out(ROOT)) == [], "import the name"


def names(tree: ast.Module) -> Iterator[str]:
    """The classes, aliases of types and constants that a module defines, those for a type checker alone and classes
    within functions too; type variables are the signatures' own."""
    conditional = [s for node in tree.body if isinstance(node, ast.If) for s in (*node.body, *node.orelse)]
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in (*tree.body, *conditional):
        if isinstance(node, ast.Assign | ast.AnnAssign) and not re.search(r"\bTypeVar\(", ast.unparse(node)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                written = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (n.id for n in written if isinstance(n, ast.Name) and re.match(r"_?[A-Z]", n.id))


def called_the_same(root: Path) -> dict[str, list[str]]:
    """Names of classes, and public names of anything else, that stand for something in more than one module, and in
    which."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(root):
        tree = ast.parse(path.read_bytes())
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for name in names(tree):
            if name in classes or not name.startswith("_"):
                found[name].append(path.relative_to(root).as_posix())
    return {name: where for name, where in found.items() if len(where) > 1}


def test_a_class_and_a_public_name_stand_for_one_thing() -> None:
    assert called_the_same(ROOT) == {}, (
        "one thing: keep one and import it; two things: name each after what it is, or begin one that is no class "
        "with an underscore where no other module imports it"
    )


def test_a_name_for_two_things_is_found(tmp_path: Path) -> None:
    own = 'T = TypeVar("T")\n_MOST: Final = 1\n_Row = tuple[int, str]\nclass _State: ...\n'
    (tmp_path / "calib").mkdir()
    (tmp_path / "calib" / "one.py").write_text(
        f"{own}class Plan: ...\nSIZE = 1\nLEAST, FORMAT = 2, 3\nif A:\n    Way = int\n"
    )
    (tmp_path / "calib" / "other.py").write_text(
        f"{own}Plan = tuple[int, ...]\nSIZE: int = 2\nFORMAT = 'a'\ndef f():\n    class Way: ...\n"
    )
    both = ["calib/one.py", "calib/other.py"]
    assert called_the_same(tmp_path) == dict.fromkeys(("_State", "Plan", "SIZE", "FORMAT", "Way"), both)


def parts(root: Path) -> list[str]:
    """Sets in two modules that have two names in common of which each is more than a word: suffixes, keys of a job."""
    sets = [
        (f"{path.relative_to(root).as_posix()}:{line}", set(fact.removeprefix("set: ").split(", ")))
        for path in sources(root)
        for fact, line in facts(ast.parse(path.read_bytes()))
        if fact.startswith("set: ")
    ]
    return [
        f"{here} and {there}: {', '.join(sorted(a & b))}"
        for (here, a), (there, b) in itertools.combinations(sets, 2)
        if here.partition(":")[0] != there.partition(":")[0] and sum(not word.isidentifier() for word in a & b) > 1
    ]


def test_no_module_writes_out_a_part_of_a_set() -> None:
    assert parts(ROOT) == [], "import all of them"


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ('IMAGES = (".png", ".jpg", ".bmp", ".webp")', 'TAKEN = {".jpg", ".png", ".bmp"}', ".bmp, .jpg, .png"),
        ('IMAGES = (".png", ".jpg", ".bmp")', 'def f(n): return n.endswith((".jpg", ".png"))', ".jpg, .png"),
        ('KEYS = frozenset({*A, "a.b", "c.d", "name"})', 'for key in ("name", "c.d", "a.b"): ...', "a.b, c.d, name"),
    ],
)
def test_a_part_of_a_set_that_is_written_out_is_found(one: str, other: str, both: str, tmp_path: Path) -> None:
    (tmp_path / "calib").mkdir()
    (tmp_path / "calib" / "one.py").write_text(one)
    (tmp_path / "calib" / "other.py").write_text(other)
    assert parts(tmp_path) == [f"calib/one.py:1 and calib/other.py:1: {both}"]


def drifted(root: Path) -> list[str]:
    """Sets of words with one name in two modules that have two words in common: one set, of which one was changed."""
    sets: dict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    for path in sources(root):
        for node in ast.parse(path.read_bytes()).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target).strip("_")
            value = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
            if name.isupper():
                sets[name].append((f"{path.relative_to(root).as_posix()}:{node.lineno}", set(members(value, 2))))
    return [
        f"{name}: {here} and {there}"
        for name, found in sets.items()
        for (here, a), (there, b) in itertools.combinations(found, 2)
        if len(a & b) > 1
    ]


def test_sets_of_one_name_have_not_drifted_apart(tmp_path: Path) -> None:
    assert drifted(ROOT) == [], "one thing: keep one and import it; two things: name one after what it is"
    (tmp_path / "calib").mkdir()
    (tmp_path / "calib" / "one.py").write_text('SOFTMAX = ("softmax", "_softmax", "log_softmax")\nA = ("b", "c")\n')
    (tmp_path / "calib" / "other.py").write_text('_SOFTMAX = frozenset({"softmax", "_softmax"})\nA = ("b", "d")\n')
    assert drifted(tmp_path) == ["SOFTMAX: calib/one.py:1 and calib/other.py:1"]


def test_a_text_that_is_written_out_again_is_found(tmp_path: Path) -> None:
    (tmp_path / "calib").mkdir()
    (tmp_path / "calib" / "one.py").write_text('"""table.json"""\nTABLE = "table.json"\nKIND = "one_word"\n')
    (tmp_path / "calib" / "other.py").write_text('def f(p):\n    return p / "table.json", f"one_word {p}"\n')
    assert list(written_out(tmp_path)) == ["calib/other.py:2: 'table.json' is named in calib/one.py"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('MODES = ("a", "b", "c")', 'Mode = Literal["c", "b", "a"]'),
        (
            'raise E(f"{path}: must be a file that is there (got {x}).")',
            'T = f"{p}: must be a file that is there (got {y})."',
        ),
        ('P = re.compile(r"^[a-z][a-z0-9]*$")', 'F = Field(pattern=r"^[a-z][a-z0-9]*$")'),
        ('P = r"^[a-z][a-z0-9]*$"', 'F = re.compile(r"[a-z][a-z0-9]*")'),
        ("LEAST_SHARE = 0.25", "_LEAST_SHARE: Final = 0.25"),
        ("MOST, LEAST_BYTES = 3, 1 << 20", "LEAST_BYTES = 1 << 20"),
        ("MOST = 3", "def f(): MOST: Final = 3"),
        ("INT8_RANGE = (-128, 127)", "LOW, HIGH = -128, 127"),
        ("RANGES = ((-128, 127), (-8, 7))", "INT8_RANGE, X = (-128, 127), f()"),
        ('HEAD = b"ftrt"', '_MAGIC = b"ftrt"'),
        ('GRAPH = "graph.onnx"', '_MODEL = "graph.onnx"'),
        ('f(x == "a" or x == "b")', 'Kind = Literal["b", "a"]'),
        ('f(x.y != "a" and x.y != "b")', 'f(z in ("a", "b"))'),
        ("match x:\n    case 'a' | 'b' | 'c': ...", 'KINDS = ("a", "b", "c")'),
        ("def f(images=32): ...", "def g(path: Path, *, images: int = 32): ..."),
        ("ROUNDS, SECONDS = 100, 30.0", '@click.option("--rounds", default=100)\ndef f(): ...'),
        ("class A:\n    k: int = 2048", "class B:\n    k: int = Field(default=2048, ge=1)"),
        ("class A:\n    k: float = Field(0.5)", "f(lambda k=0.5: k)"),
        ('BEST = {"a": 1.0, "b": 0.0, "c": 2}', 'LARGEST = {"c": 2, "z": 0.0, "a": 1.0}'),
        ('EXTRAS = {**dict.fromkeys(("a", "b"), "c"), "d": "e"}', 'OF = {"a": "c", "b": "c"}'),
        ("def f(x):\n    y = g(x)\n    h(y)\n    return k(y)", "def f2(a):\n    b = g(a)\n    h(b)\n    return k(b)"),
    ],
    ids=[
        "words",
        "sentence",
        "pattern",
        "named pattern",
        "number",
        "one of several",
        "in a function",
        "range",
        "range among others",
        "bytes",
        "text",
        "comparisons",
        "differences",
        "case",
        "default",
        "option",
        "field",
        "positional field",
        "table",
        "table of several",
        "function",
    ],
)
def test_a_second_home_is_found(one: str, other: str, tmp_path: Path) -> None:
    (tmp_path / "trtpipe").mkdir()
    (tmp_path / "trtpipe" / "one.py").write_text(f'"""A module."""\n\n{one}\n')
    assert homes(tmp_path) == {}
    (tmp_path / "trtpipe" / "other.py").write_text(f'"""A module."""\n\n{other}\n')
    found = [[where.partition(":")[0] for where in places] for places in homes(tmp_path).values()]
    assert found == [["trtpipe/one.py", "trtpipe/other.py"]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('MODES = ("a", "b", "c")', 'NUMBERS = {"a": 1, "b": 2, "c": 3}'),  # something new of each
        ("SIDE = 224", "SIDE = 112"),  # a name says what it is of by its module
        ("MOST = 8", "LEAST = 8"),
        ("A = f(8)", "A = f(8)"),
        ("def f(n=1, flag=True, x=None): ...", "def g(n=1, flag=True, x=None): ..."),
        ("def f(images=32): ...", "def f(images=16, tensors=32): ..."),
        ("def f(notes=()): ...", "def f(notes=()): ..."),
        ("PAIR = (1, 2)", "OTHER = (1, 2)"),
        ('f(x == "a" or y == "b")', 'f(x == "a" or y == "b")'),
        ('KIND = "bundle"', 'KIND = "bundle"'),  # a word
        ('OURS = {"a": "a", "b": "b"}', 'THEIRS = {"a": "a", "b": "b"}'),  # names of another library that are ours
        ('A = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}', 'A = {"a": 1, "b": 2, "c": 0, "d": 0, "e": 0}'),
        ('ROW = {"a": x, "b": y}', 'ROW = {"a": x, "b": y}'),
        ('"""One sentence that is the same in both."""', '"""One sentence that is the same in both."""'),
        ('E("Leave it out.")', 'E("Leave it out.")'),
        ('__all__ = ["a", "b", "c"]', '__all__ = ["a", "b", "c"]'),
        ("def f(x):\n    y = g(x)\n    h(y)\n    return k(y)", "def f(x):\n    y = g(x)\n    k(y)\n    return h(y)"),
    ],
    ids=["mapping", "other number", "other name", "call", "no fact", "other default", "empty default", "small numbers",
         "of two things", "word",
         "same names", "few rows", "values", "docstring",
         "few words", "public names", "other function"],
)  # fmt: skip
def test_what_is_no_second_home(one: str, other: str, tmp_path: Path) -> None:
    (tmp_path / "calib").mkdir()
    (tmp_path / "calib" / "one.py").write_text(one + "\n")
    (tmp_path / "calib" / "other.py").write_text(other + "\n")
    assert homes(tmp_path) == {}


def stages_of(root: Path, function: str) -> set[str]:
    """The names of the stages in which a function is called, but for those of trials, which say of what."""
    return {
        item.context_expr.args[0].value
        for path in sources(root)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.With) and any(is_call(n, function) for n in ast.walk(node))
        for item in node.items
        if isinstance(item.context_expr, ast.Call) and is_call(item.context_expr, "stages")
        if isinstance(item.context_expr.args[0], ast.Constant)
    }


def is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name


def test_a_stage_has_one_name() -> None:
    assert stages_of(ROOT, "to_onnx") == {"export"}


def test_modes_and_engines_are_warmed_up_alike() -> None:
    homes = [
        str(p.relative_to(ROOT)) for p in sources(ROOT) if re.search(r"^\w*,? ?WARM_UP\b.* = ", p.read_text(), re.M)
    ]
    assert homes == ["trtpipe/evaluation/bench.py"]


def test_matrix_products_and_number_formats_are_listed_once() -> None:
    trees = {p.relative_to(ROOT).as_posix(): ast.parse(p.read_bytes()) for p in sources(ROOT)}
    listed = {path for path, tree in trees.items() for n in ast.walk(tree) if {"matmul", "bmm"} <= set(members(n, 2))}
    assert listed == {"trtpipe/model/products.py"}
    cut = [path for path, tree in trees.items() if re.search(r"PRECISIONS_BY_WIDTH\[", ast.unparse(tree))]
    assert cut == [], "a position says nothing of what is there: get_args(NumberFormatName)"

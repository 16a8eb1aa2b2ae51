"""What is done in one way only: each thing that the house does by hand has one place, or none."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from source_tree import ROOT, Tree, resolved

#: By a function of this module: the only modules that do it, and what the others do instead.
WAYS: dict[str, tuple[set[str], str]] = {
    "replaces a file": ({"calib.files"}, "calib.files.replacing, or trtpipe.atomic.write_whole"),
    "renames a folder": (
        {"trtpipe.atomic", "trtpipe.bundle.triton", "trtpipe.pipeline.cache.store"}, "trtpipe.atomic.sibling",
    ),
    "writes a file where it stays": (
        # into what becomes a whole file or folder, the user's own stream, a scratch folder, a pipe, memory, /proc, a
        # log, a probe that is deleted, and nowhere
        {"calib.process_state", "calib.table", "calib.trt_calibrator", "trtpipe.atomic", "trtpipe.bundle.archive",
         "trtpipe.bundle.triton", "trtpipe.examples.shapes", "trtpipe.job.dump",
         "trtpipe.cli.commands.run", "trtpipe.cli.results", "trtpipe.evaluation.bench",
         "trtpipe.pipeline.cache.store", "trtpipe.pipeline.replay", "trtpipe.trt.isolated",
         "trtpipe.trt.plugins", "trtpipe.evaluation.torch_modes", "trtpipe.examples.digits",
         "trtpipe.model.onnx.reference", "trtpipe.nightly.history_plot",
         "trtpipe.report.bench_page", "trtpipe.report.sample_image", "trtpipe.cli.starter", "trtpipe.nightly.pool",
         "trtpipe.outputs", "trtpipe.pipeline.cache.recorder", "trtpipe.streams"},
        "calib.files.replacing, or trtpipe.atomic.write_whole",
    ),
    "ends with a number": (
        # processes of jobs, scripts that are to be copied, and what hands on the code of another program
        {"trtpipe.pipeline.preloaded", "trtpipe.examples.digits", "trtpipe.examples.shapes", "trtpipe.errors",
         "trtpipe.cli.main", "trtpipe.cli.supervised"}, "an error, whose exit code errors.py has",
    ),
    "walks a folder": (
        # of installed packages, where what cannot be read cannot be imported either; of scans that it wrote itself
        {"trtpipe.examples.digits", "trtpipe.pipeline.cache.environment", "trtpipe.pipeline.cache.sources"},
        "calib.folders.below",
    ),
    "opens a database": ({"trtpipe.outputs"}, "outputs.open_database"),
    "finds where Q/DQ can go": (
        # of graphs that a correction, or a model's own Q/DQ, has changed
        {"trtpipe.model.capture", "trtpipe.quantization.corrections.edits", "trtpipe.quantization.given"},
        "Captured.sites",
    ),
    "makes a job": ({"trtpipe.job.load", "trtpipe.nightly.task"}, "load_job, which refuses what build refuses"),
    "chooses the check's transform": (
        {"trtpipe.job.job", "trtpipe.job.data_rules"}, "Job.check_transform",  # the latter asks whether there is one
    ),
    "digests a file": ({"calib.images", "trtpipe.pipeline.cache.digests"}, "Digests.file"),
    "names a command of pip": ({"trtpipe.packages"}, "packages.install_command, or pip_install"),
    # calib imports nothing of trtpipe
    "takes the first line of an error": ({"calib.data", "calib.user_code"}, "errors.first_line"),
    "tells a class by its name": ({"trtpipe.job.yamlfile"}, "isinstance"),  # there it becomes a word of a message
    "closes in __del__": ({"trtpipe.trt.owned"}, "a context manager: __enter__ and __exit__"),
    "enters by hand": (set(), "`with`, or ExitStack.enter_context"),
    "asserts what a user gave": (set(), "an error with a message; an assert without one tells mypy"),
    "keeps state in a module": (
        # what is the process's own: its stdout, the modules that it has imported, what is read once within a block,
        # TensorRT's registry, a stuck driver
        {"calib.once", "trtpipe.cli.results", "trtpipe.pipeline.cache.events", "trtpipe.pipeline.own_modules",
         "trtpipe.trt.driver", "trtpipe.trt.plugins"}, "a value that is passed on",
    ),
    "changes a frozen value": (set(), "dataclasses.replace, or model_copy: a new value"),
    "takes a result by what fills a container": ({"trtpipe.cli.commands.nightly"}, "a value that is returned"),
    "hangs a value on a function": (
        {"trtpipe.pipeline.cache.native"}, "a frozen dataclass that holds both",  # what stands in for another library's
    ),
    "has Any for a missing part": ({"trtpipe.evaluation.judgement"}, "the part's type, `| None`"),  # Labels may be None
    "reads JSON that anyone may have written": (
        # their own: a log, a process' pipe, a database; and what TensorRT says of an engine
        {"calib.strictjson", "trtpipe.nightly.history", "trtpipe.pipeline.cache.recorder", "trtpipe.trt.isolated",
         "trtpipe.import_errors", "trtpipe.trt.runtime"}, "strictjson.loads",
    ),
    "looks for a package": (
        # where the files of one are: of libraries beside TensorRT, and of packages whose frames are no model's
        {"trtpipe.packages", "trtpipe.trt.runtime", "trtpipe.trt.isolated"}, "packages.present: a bare folder is none",
    ),
    "spells the name of a package": (set(), "packaging.utils.canonicalize_name"),
    "writes any object as JSON": (set(), "jsontext.plain, which says what it cannot write"),
    "makes a file that must be new": (
        {"trtpipe.outputs", "trtpipe.pipeline.cache.recorder"}, "outputs.write_new",  # the latter's is deleted at once
    ),
    "writes a private key": ({"trtpipe.bundle.signing"}, "signing.private_pem, by outputs.write_new"),
    "takes the largest of a range": ({"calib.histogram"}, "magnitude, or the max of an audit"),
    "takes a callable's name apart": ({"trtpipe.job.importable"}, "importable.is_reference"),
    "names the operators of Q/DQ": ({"trtpipe.onnx_format"}, "onnx_format.QDQ"),
    "asks for calibration's images": (set(), "Job.calibration_images"),
}  # fmt: skip


#: Those that one expression shows, written as `ast.unparse` writes it.
SHOWN = {
    "makes a file that must be new": re.compile(r"os\.open\(.*\bO_EXCL\b.*"),
    "writes a private key": re.compile(r".*\.private_bytes\(.*"),
    "takes the largest of a range": re.compile(r"max\(abs\((.*\b)?low\), abs\((.*\b)?high\)(, .*)?\)"),
    "takes a callable's name apart": re.compile(r"all\(\(?\w+\.isidentifier\(\) for .*\.split\('\.'\).*"),
    "names the operators of Q/DQ": re.compile(r"[(\[{]'QuantizeLinear', 'DequantizeLinear'.*"),
    "asks for calibration's images": re.compile(r".*\bcalibration\.images is not None\b.*"),
}
#: What writes a file, of Python and of the libraries that are used.
WRITERS = re.compile(
    r"\.(write_text|write_bytes|savefig|tofile)$|(^|\.)(save_file|copytree)$"
    r"|^(torch(\.jit)?|np|numpy|onnx|json|yaml|pickle|ir|onnx_ir|jit)\.(save\w*|dump)$"
)


@functools.cache
def ways(module: ast.Module) -> frozenset[str]:
    """What of `WAYS` a module does."""
    module, found = resolved(module), set()
    pictures = any(t.startswith("PIL") for n in ast.walk(module) for t in imported(n))
    making = {id(n) for f in ast.walk(module) if getattr(f, "name", "") == "__post_init__" for n in ast.walk(f)}
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        one = len(call.args) == 1 and not call.keywords
        if name in ("os.replace", "shutil.move", "shutil.copyfile", "shutil.copy", "shutil.copy2") or (
            name.endswith(".replace") and one
        ):
            found.add("replaces a file")
        if name in ("os.rename", "os.renames") or (name.endswith(".rename") and one and not name.startswith("os.")):
            found.add("renames a folder")
        opened = re.fullmatch(r"(.*\.)?((fd)?open|ZipFile)", name) and re.search(
            r", '[wax]|mode='[wax]|\('[wax]b?'[,)]|\bO_(WRONLY|RDWR|CREAT)\b", ast.unparse(call)
        )
        opened = opened or (pictures and name.endswith(".save"))
        if opened or re.search(WRITERS, name):
            found.add("writes a file where it stays")
        if (
            name in ("sys.exit", "SystemExit", "os._exit")
            and one
            and isinstance(call.args[0], ast.Constant | ast.JoinedStr)
        ):
            found.add("ends with a number")
        if name == "typing.cast" and len(call.args) == 2 and is_missing(call.args[1]):
            found.add("has Any for a missing part")
        if name == "importlib.util.find_spec":
            found.add("looks for a package")
        if name == "sqlite3.connect":
            found.add("opens a database")
        if name.rpartition(".")[2] == "find_sites":
            found.add("finds where Q/DQ can go")
        if name.endswith("Job.model_validate") or name.rpartition(".")[2] == "Job":
            found.add("makes a job")
        if name in ("os.walk", "os.fwalk", "glob.glob", "glob.iglob") or name.endswith((".rglob", "ImageFolder")):
            found.add("walks a folder")
        given = [a.attr for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Attribute)]
        if {"append", "update", "extend", "setdefault"} & set(given):
            found.add("takes a result by what fills a container")
        if name.endswith("ExitCode") and call.args:
            found.add("ends with a number")
        if name.endswith("hashlib.file_digest") or re.match(
            r"(hashlib\.\w+|.*\bupdate)\(.*\.read(_bytes)?\(\)", ast.unparse(call)
        ):
            found.add("digests a file")
        by_name = [*call.args, *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
        if name.endswith((".get", ".startswith", ".endswith")) and any(map(is_class_name, by_name)):
            found.add("tells a class by its name")
        if name.endswith(".__enter__") and not name.startswith("super("):
            found.add("enters by hand")
        read = name.endswith("validate_json") and not re.fullmatch(r"json\.dumps\(.*\)", ast.unparse(call.args[0]))
        if name in ("json.loads", "json.load", "json.JSONDecoder", "pydantic_core.from_json") or read:
            found.add("reads JSON that anyone may have written")
        if name == "json.dumps" and any(k.arg == "default" for k in call.keywords):
            found.add("writes any object as JSON")
    shown = (ast.unparse(n) for n in ast.walk(module)
             if isinstance(n, ast.Call | ast.Tuple | ast.List | ast.Set | ast.Compare))  # fmt: skip
    found |= {way for text in shown for way, pattern in SHOWN.items() if pattern.fullmatch(text)}
    documented = {id(n.value) for n in ast.walk(module) if isinstance(n, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            if OF_PIP.search(node.value):
                found.add("names a command of pip")
            if re.search(r"\[[-_.]{3}\]", node.value):
                found.add("spells the name of a package")
        elif isinstance(node, ast.List | ast.Tuple | ast.Call) and OF_PIP.search(in_words(node)):
            found.add("names a command of pip")
        elif isinstance(node, ast.For | ast.While) and re.search(r"\bread\([^$]*\.update\(", ast.unparse(node)):
            found.add("digests a file")
        elif takes_first_line(node):
            found.add("takes the first line of an error")
        elif isinstance(node, ast.Compare) and exact(node) and any(map(is_class_name, (node.left, *node.comparators))):
            found.add("tells a class by its name")
        elif "__del__" in (getattr(node, "name", ""), getattr(node, "id", "")):
            found.add("closes in __del__")
        elif (isinstance(node, ast.Attribute) and node.attr == "__setattr__" and id(node) not in making) or (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and is_inside(node.value)
        ):
            found.add("changes a frozen value")
        elif isinstance(node, ast.Attribute) and ast.unparse(node).endswith("check.transform"):
            found.add("chooses the check's transform")
        elif isinstance(node, ast.Match) and is_class_name(node.subject):
            found.add("tells a class by its name")
        elif isinstance(node, ast.Assert) and node.msg is not None:
            found.add("asserts what a user gave")
        elif isinstance(node, ast.Global):
            found.add("keeps state in a module")
        elif any(
            (hides(annotation) and is_missing(value)) or (is_any(annotation) and is_stand_in(value))
            for annotation, value in with_values(node)
        ):
            found.add("has Any for a missing part")
    classes = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    shared = (n for node in classes for n in executed_once(node) if is_shared(n))
    if any(map(holds_state, (*executed_once(module), *shared))) or any(filled(module)):
        found.add("keeps state in a module")
    if any(hung(module)):
        found.add("hangs a value on a function")
    return frozenset(found)


def imported(node: ast.AST) -> tuple[str, ...]:
    """The modules that an import statement names."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "",)
    return tuple(alias.name for alias in node.names) if isinstance(node, ast.Import) else ()


def takes_first_line(node: ast.AST) -> bool:
    """Whether an expression is a first line, or an error's text, or the name of its type where it has none."""
    if isinstance(node, ast.Subscript):
        return re.search(r"\.(splitlines\(\)|r?(split|partition)\('\\n'(, 1)?\))\[0\]$", ast.unparse(node)) is not None
    text = ast.unparse(node) if isinstance(node, ast.BoolOp | ast.IfExp) else ""
    return "str(" in text and re.search(r"\b(or|else) \(?\[?type\(\w+\)\.__name__", text) is not None


#: A command of pip, however it is begun.
OF_PIP = re.compile(r"\bpip3? (install|uninstall|download|wheel)\b|-m pip3?\b|^pip3? \{\}")


def in_words(node: ast.List | ast.Tuple | ast.Call) -> str:
    """The words of a command that is given as a list or as arguments; `{}` for what is no text."""
    parts = node.args if isinstance(node, ast.Call) else node.elts
    return " ".join(p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "{}" for p in parts)


def with_values(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The types of fields and arguments that have a value by default, and that value."""
    if isinstance(node, ast.ClassDef):  # `object` says what may be given to a function, but of a part nothing
        fields = (n for n in node.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.annotation) == "object")
        yield from ((ast.Name("Any"), field.value) for field in fields if field.value is not None)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.annotation, node.value
    elif isinstance(node, ast.arguments):
        plain = [*node.posonlyargs, *node.args]
        positional = zip(plain[len(plain) - len(node.defaults) :], node.defaults, strict=True)
        for argument, value in (*positional, *zip(node.kwonlyargs, node.kw_defaults, strict=True)):
            if argument.annotation is not None and value is not None:
                yield argument.annotation, value


def is_any(annotation: ast.expr) -> bool:
    """Whether a type is Any, alone or beside others."""
    if isinstance(annotation, ast.BinOp):
        return is_any(annotation.left) or is_any(annotation.right)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith(("Optional", "Union")):
        return any(
            map(is_any, annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice])
        )
    return ast.unparse(annotation) in ("Any", "typing.Any")


def hides(annotation: ast.expr) -> bool:
    """Whether a type does not say that the part may be missing: Any, or one without None."""
    return is_any(annotation) or not re.search(r"\bNone\b|\bOptional\b|\bobject\b", ast.unparse(annotation))


def is_inside(value: ast.expr) -> bool:
    """`x.__dict__` or `vars(x)`."""
    return re.fullmatch(r".+\.__dict__|vars\(.+\)", ast.unparse(value)) is not None


def is_missing(value: ast.expr) -> bool:
    """Whether a value is None, of a dataclass's or a model's field too."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).lower().endswith("field"):
        return any(map(is_missing, [*value.args[:1], *(k.value for k in value.keywords if k.arg == "default")]))
    return isinstance(value, ast.Constant) and value.value is None


def is_stand_in(value: ast.expr) -> bool:
    """Whether a value is `object()`, or made for each by a field's `default_factory`."""
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return ast.unparse(value) == "object()" or any(k.arg == "default_factory" for k in keywords)


def is_class_name(node: ast.expr) -> bool:
    """`type(x).__name__` or `x.__class__.__name__`."""
    return re.fullmatch(r"(type\(.+\)|.+\.__class__)\.__(qual)?name__", ast.unparse(node)) is not None


def exact(node: ast.Compare) -> bool:
    """Whether names are compared whole; a part of one is how torch's private errors are told from others."""
    return not (isinstance(node.ops[0], ast.In | ast.NotIn) and isinstance(node.left, ast.Constant))


#: A list, dict or set that begins empty, and what is there to be filled.
_TO_BE_FILLED = re.compile(
    r"\{\}|\[\]|((collections\.)?(set|dict|list|bytearray|Counter|OrderedDict))\(\)|"
    r"((collections\.)?(defaultdict|deque)|(weakref\.)?Weak\w+|threading\.local|contextvars\.ContextVar|itertools\.count)\(.*\)"
)


def executed_once(node: ast.AST) -> Iterator[ast.AST]:
    """What is executed as a module or class is made: nothing of the functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from executed_once(child)


def holds_state(node: ast.AST) -> bool:
    """Whether a statement of a module or class makes a container to be filled, which is no constant by its type."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    if isinstance(node, ast.AnnAssign) and re.match(r"([\w.]+\.)?(Mapping|Final)\b", ast.unparse(node.annotation)):
        return False
    return _TO_BE_FILLED.fullmatch(ast.unparse(node.value)) is not None


#: Methods that change what they are called on.
_FILLING = ("append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove", "discard")


def filled(module: ast.Module) -> Iterator[str]:
    """The values with a name in a module that its functions change, whatever they begin as."""
    given = {n.id for n in executed_once(module) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    given |= {n.name for n in module.body if isinstance(n, ast.ClassDef)}
    for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
        parts = list(ast.walk(function))
        own = {n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {n.arg for n in parts if isinstance(n, ast.arg)}
        changed = [n.value for n in parts if isinstance(getattr(n, "ctx", None), ast.Store | ast.Del)
                   and isinstance(n, ast.Subscript | ast.Attribute)]  # fmt: skip
        changed += [n.func.value for n in parts if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
                    and n.func.attr in _FILLING]  # fmt: skip
        yield from (n.id for n in changed if isinstance(n, ast.Name) and n.id in given - own)


def hung(module: ast.Module) -> Iterator[str]:
    """The functions, by the names that a piece of code has for them, that are given an attribute but Python's own."""
    outer = {n.name for n in module.body if isinstance(n, ast.FunctionDef)}
    for scope in (module, *(n for n in ast.walk(module) if isinstance(n, ast.FunctionDef))):
        parts = list(ast.walk(scope) if isinstance(scope, ast.FunctionDef) else executed_once(scope))
        own = {n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {n.arg for n in parts if isinstance(n, ast.arg)}
        functions = {n.name for n in parts if isinstance(n, ast.FunctionDef) and n is not scope} | (outer - own)
        for node in (n for n in parts if isinstance(n, ast.Assign | ast.AnnAssign) and n.value is not None):
            value = node.value
            either = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
            if functions & {ast.unparse(v) for v in either if v is not None}:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                functions |= {target.id for target in targets if isinstance(target, ast.Name)}
        given = [n.value for n in parts if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                 and not n.attr.startswith("__")]  # fmt: skip
        given += [n.args[0] for n in parts if isinstance(n, ast.Call) and ast.unparse(n.func) == "setattr"]
        yield from (n.id for n in given if isinstance(n, ast.Name) and n.id in functions)


def is_shared(node: ast.AST) -> bool:
    """Whether a statement of a class gives a value to the class, and none to each of what it makes."""
    return isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and "ClassVar[" in ast.unparse(node))


@pytest.mark.parametrize("way", WAYS)
def test_each_has_its_place(tree: Tree, way: str) -> None:
    there, instead = WAYS[way]
    assert {name for name, module in tree.modules.items() if way in ways(module)} == there, f"use {instead}"


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("os.replace(temporary, path)", "replaces a file"),
        ("temporary.replace(path)", "replaces a file"),
        ("os.rename(temporary, folder)", "renames a folder"),
        ("temporary.rename(folder)", "renames a folder"),
        ("page.write_text(html)", "writes a file where it stays"),
        ("with open(path, 'w') as f: f.write(html)", "writes a file where it stays"),
        ("with path.open('wb') as f: f.write(data)", "writes a file where it stays"),
        ("torch.save(state, path)", "writes a file where it stays"),
        ("np.savez_compressed(path, **arrays)", "writes a file where it stays"),
        ("from safetensors.numpy import save_file\nsave_file(arrays, path)", "writes a file where it stays"),
        ("json.dump(report, stream)", "writes a file where it stays"),
        ("log = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)", "writes a file where it stays"),
        ("from os import O_RDWR, open\nlog = open(path, O_RDWR)", "writes a file where it stays"),
        ("from PIL import Image\nImage.fromarray(pixels).save(path)", "writes a file where it stays"),
        ("pixels.tofile(path)", "writes a file where it stays"),
        ("with zipfile.ZipFile(path, 'w') as archive: pass", "writes a file where it stays"),
        ("shutil.copytree(bundle, out)", "writes a file where it stays"),
        ("with sqlite3.connect(path) as history: pass", "opens a database"),
        ("for site in find_sites(captured.graph)[0]: pass", "finds where Q/DQ can go"),
        ("job = Job.model_validate(yaml.safe_load(path.read_text()))", "makes a job"),
        ("transform = job.check.transform or job.calibration.transform", "chooses the check's transform"),
        ("names = [n for _, _, names in os.walk(images) for n in names]", "walks a folder"),
        ("paths = sorted(p for p in images.rglob('*') if p.is_file())", "walks a folder"),
        ("from torchvision.datasets import ImageFolder\ndataset = ImageFolder(images)", "walks a folder"),
        ("raise SystemExit(70)", "ends with a number"),
        ("from sys import exit\nexit(3)", "ends with a number"),
        ("digest = hashlib.sha256(path.read_bytes()).hexdigest()", "digests a file"),
        ("with path.open('rb') as f:\n    digest = hashlib.file_digest(f, 'sha256')", "digests a file"),
        ("depth = {'Conv2d': 9}.get(type(m).__name__)", "tells a class by its name"),
        ("if type(m).__name__.startswith('Conv'): pass", "tells a class by its name"),
        ("SEEN = defaultdict(int)", "keeps state in a module"),
        ("with path.open('w', encoding='utf-8') as file: pass", "writes a file where it stays"),
        ("job = Job(**yaml.safe_load(text))", "makes a job"),
        ("class K:\n    sensitivity: Any | None = None", "has Any for a missing part"),
        ("from json import loads\nlimits = loads(text)", "reads JSON that anyone may have written"),
        ("limits = json.JSONDecoder().decode(text)", "reads JSON that anyone may have written"),
        ("while chunk := f.read(1 << 20):\n    digest.update(chunk)", "digests a file"),
        ("HOW = f\"{x} is not there. Run: pip install 'x'\"", "names a command of pip"),
        ("text = (str(error).strip() or type(error).__name__).splitlines()[0]", "takes the first line of an error"),
        ("text = str(e).splitlines()[0] if str(e) else type(e).__name__", "takes the first line of an error"),
        ("if type(module).__name__ in ('BatchNorm2d', 'LayerNorm'): pass", "tells a class by its name"),
        ("star = module.__class__.__name__ == 'Bound'", "tells a class by its name"),
        ("class K:\n    def __del__(self): self.close()", "closes in __del__"),
        ("runner = make()\nrunner.__enter__()", "enters by hand"),
        ("report = check(job, keep=outputs.update)", "takes a result by what fills a container"),
        ("def call(x): ...\n\ncall.weights = 1", "hangs a value on a function"),
        ("def f(m):\n    def call(x): ...\n    call.weights = m\n    return call", "hangs a value on a function"),
        ("def f(m):\n    def g(x): ...\n    setattr(g, 'weights', m)", "hangs a value on a function"),
        ("def f(m, a):\n    def g(x): ...\n    h = g if a else m\n    h.weights = m", "hangs a value on a function"),
        ("def seen(x):\n    seen.calls += 1", "hangs a value on a function"),
        ("def f(sensitivity: Any = object()): ...", "has Any for a missing part"),
        ("class K:\n    sensitivity: Any = field(default_factory=object)", "has Any for a missing part"),
        ("name = re.sub(r'[-_.]+', '-', name).lower()", "spells the name of a package"),
        ("def f(n):\n    assert n > 0, 'samples must be positive'", "asserts what a user gave"),
        ("_SEEN: set[str] = set()", "keeps state in a module"),
        ("from collections import deque\n_LAST: deque[str] = deque(maxlen=9)", "keeps state in a module"),
        ("class K:\n    seen: ClassVar[dict[str, int]] = {}", "keeps state in a module"),
        ("_LAST = [None]\ndef f(job):\n    _LAST[0] = job", "keeps state in a module"),
        ("_SEEN = dict(zip(A, B))\ndef f(job):\n    _SEEN.setdefault(job, 0)", "keeps state in a module"),
        ("if sys.platform == 'linux':\n    _SEEN = []", "keeps state in a module"),
        ("object.__setattr__(report, 'passed', True)", "changes a frozen value"),
        ("put = object.__setattr__", "changes a frozen value"),
        ("subprocess.run(['pip', 'install', 'torch'])", "names a command of pip"),
        ("HOW = [sys.executable, '-m', 'pip', 'install', name]", "names a command of pip"),
        ("subprocess.run([sys.executable, '-m', 'pip', *more])", "names a command of pip"),
        ("os.execlp('pip', 'pip', 'uninstall', name)", "names a command of pip"),
        ("def f(sensitivity: Any | None = None): ...", "has Any for a missing part"),
        ("class K:\n    sensitivity: Optional[Any] = Field(default=None)", "has Any for a missing part"),
        ("_CACHE = {}", "keeps state in a module"),
        ("def f():\n    global LAST\n    LAST = 1", "keeps state in a module"),
        ("class K:\n    sensitivity: Any = None", "has Any for a missing part"),
        ("limits = dict(json.loads(path.read_text()))", "reads JSON that anyone may have written"),
        ("file = _TableFile.model_validate_json(path.read_text())", "reads JSON that anyone may have written"),
        ("why = str(error).strip().splitlines()[0]", "takes the first line of an error"),
        ("text = json.dumps(asdict(report), default=str)", "writes any object as JSON"),
        ("def f(d, p):\n    d.update(p.read_bytes())", "digests a file"),
        ("match type(m).__name__:\n    case 'Conv2d': pass", "tells a class by its name"),
        ("def f(e): return str(e).partition('\\n')[0]", "takes the first line of an error"),
        ("def f(e): return str(e).split('\\n')[0]", "takes the first line of an error"),
        ("class P:\n    opened = 0\n    def __init__(self):\n        P.opened += 1", "keeps state in a module"),
        ("def f(a, b): shutil.copyfile(a, b)", "replaces a file"),
        (
            "from pydantic_core import from_json\ndef f(t): return from_json(t)",
            "reads JSON that anyone may have written",
        ),
        ("def f(m): m.__dict__['limit'] = 1", "changes a frozen value"),
        ("class K:\n    moved: int = None  # type: ignore[assignment]", "has Any for a missing part"),
        ("class K:\n    sensitivity: object = None", "has Any for a missing part"),
        ("from typing import cast\nsensitivity = cast(Any, None)", "has Any for a missing part"),
        ("raise SystemExit('no runtime for Windows yet')", "ends with a number"),
        ("def f(n): return ExitCode(3 if n else 0)", "ends with a number"),
        ("key.private_bytes(pem, pkcs8, plain)", "writes a private key"),
        ("amax = max(abs(seen.low), abs(seen.high))", "takes the largest of a range"),
        ("fine = all(p.isidentifier() for p in name.split('.'))", "takes a callable's name apart"),
        ("PAIR = {'QuantizeLinear', 'DequantizeLinear'}", "names the operators of Q/DQ"),
        ("images = job.calibration.images is not None", "asks for calibration's images"),
    ],
)
def test_another_place_is_found(line: str, way: str) -> None:
    assert ways(ast.parse(line)) == {way}


@pytest.mark.parametrize(
    "line",
    ["text.replace('a', 'b')", "table.save(path)", "os.open(path, os.O_RDONLY)",
     "replace(value, name=x)", "moved = value.replace(tzinfo=None)",
     "digest.update(data)", "'a name with type(x).__name__'", "'DataDependent' in type(error).__name__",
     "return_type = f'{type(x).__name__} of {n}'", "assert x is not None", "RTX_SEEN: Mapping[str, int] = {}",
     "class K:\n    def __post_init__(self):\n        object.__setattr__(self, 'low', 0)", "{'pip': 1}",
     "A = [1]\ndef f(A):\n    A.append(2)", "A = [1]\nA.append(2)",
     "why = 'pip is not there'", "f('pipes', 'pip')", "def f(x: Any, kind: str | None = None): ...",
     "def call(): ...\n\ndef f(call):\n    call.weights = 1",
     "class K:\n    x: list[Any] = field(default_factory=list)",
     "def f(self):\n    super().__enter__()", "class K:\n    data: Any", '"""pip install it."""'],
)  # fmt: skip
def test_what_is_another_thing(line: str) -> None:
    assert ways(ast.parse(line)) == set()


#: Functions whose result is kept until the process ends, and why nothing that it depends on changes before.
REMEMBERED = {
    "calib.algorithms._runs": "arithmetic of its arguments",
    "calib.user_code._noted": "nothing is returned: one message a process",
    "calib.histogram.edges": "constants",
    "calib.gpu_kernel._kernel": "a GPU that the process has",
    "calib.kernel._helpers": "threads, which the process has for all counting",
    "calib.kernel._openmp_team": "the OpenMP library that the process has loaded",
    "calib.observers._warn_slower": "nothing is returned: one message a process",
    "trtpipe.job.importable._folders_of_python": "the Python that the process is of",
    "trtpipe.job.importable._installed_folders": "the Python that the process is of",
    "trtpipe.job.importable._names": "the text of a module, which is its argument",
    "trtpipe.packages._asked": "the text of requirements, which is its argument",
    "trtpipe.model.failures._folders": "where the packages are that the process is of",
    "trtpipe.model.onnx.layers._taken": "arithmetic of its arguments",
    "trtpipe.report.page._environment": "templates of the package, which are read again when a file changes",
    "trtpipe.runtime.device_memory._require_memory": "that something gives device memory; not that nothing does",
    "trtpipe.import_errors._unimportable": "a package that was imported once; where it is looked for is an argument",
    "trtpipe.import_errors._loss": "a package's files, which no command changes; where they are is an argument",
    "trtpipe.packages._by_module": "which distribution brings a module, not its version; where they are is an argument",
    "trtpipe.routes.torch_tensorrt.converters.register_converters": "Torch-TensorRT's registry, which is the process's",
}


def remembered(module: ast.Module) -> set[str]:
    """The functions and methods of a module whose results are kept, and names that it gives to such functions."""
    found = set()
    bodies = (n.body for n in ast.walk(resolved(module)) if isinstance(n, ast.Module | ast.ClassDef))
    for node in (node for body in bodies for node in body):
        makers: list[ast.expr] = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            makers = [node.value]
        if any(re.match(r"functools\.(lru_)?cache\b", ast.unparse(maker)) for maker in makers):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            found |= {getattr(target, "name", "") or ast.unparse(target) for target in targets}
    return found


def test_a_result_that_is_kept_depends_on_nothing_that_changes(tree: Tree) -> None:
    found = {f"{name}.{function}" for name, module in tree.modules.items() for function in remembered(module)}
    assert found == set(REMEMBERED), (
        "a job, a file or a machine may change: keep the result in a value that is passed on"
    )


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("@functools.cache\ndef drivers(): ...", {"drivers"}),
        ("from functools import lru_cache\n@lru_cache(maxsize=None)\ndef digest(path): ...", {"digest"}),
        ("from functools import cache as once\nclass Machine:\n    @once\n    def gpus(self): ...", {"gpus"}),
        ("read = functools.lru_cache(4)(read_job)", {"read"}),
        ("def f(job):\n    once = functools.cache(partial(plan, job))\n    return once()", set()),
    ],
)
def test_a_result_that_is_kept_is_found(line: str, names: set[str]) -> None:
    assert remembered(ast.parse(line)) == names


#: Names of modules that say nothing of what is in them.
SAYING_NOTHING = re.compile(r"(^|_)(utils?|utilities|helpers?|managers?|base|common|misc|stuff|tools)$")


def test_a_module_is_called_after_what_it_holds(tree: Tree) -> None:
    assert [name for name in tree.modules if SAYING_NOTHING.search(name.rpartition(".")[2])] == [], "name its subject"
    assert SAYING_NOTHING.search("io_utils")
    assert not SAYING_NOTHING.search("baseline")


def defined(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """The functions, classes, methods and constants of a module, by name; of a class that is derived from one of
    another library, the class alone, as that library calls its methods."""
    ours = {n.name for n in module.body if isinstance(n, ast.ClassDef)}
    for node in module.body:
        names = {ast.unparse(d) for d in node.decorator_list} if isinstance(node, ast.FunctionDef) else set()
        if isinstance(node, ast.FunctionDef) and names <= {"contextmanager", "functools.cache", "cache"}:
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield node.name, node
            if {ast.unparse(b) for b in node.bases} <= {*ours, "object", "Protocol"}:
                plain = (m for m in node.body if isinstance(m, ast.FunctionDef))
                properties = ([], ["property"], ["cached_property"], ["classmethod"], ["staticmethod"])
                yield from ((m.name, m) for m in plain if [ast.unparse(d) for d in m.decorator_list] in properties)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((n.id, node) for n in ast.walk(target) if isinstance(n, ast.Name))


#: A name of ours in a text, with its module: `trtpipe.routes.onnx:compile_engine`.
OF_OURS = re.compile(r"\b(?:trtpipe|calib)(?:[.:]\w+)+")


def dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression; empty of any other."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if isinstance(node, ast.Attribute) and inner else ""


def written(text: str) -> Iterator[str]:
    """The names of ours that stand in a text with their modules, `from calib.table import make_table` too."""
    yield from (name.replace(":", ".") for name in OF_OURS.findall(text))
    for module, names in re.findall(r"from ((?:trtpipe|calib)[\w.]*) import (\w+(?:, \w+)*)", text):
        yield from (f"{module}.{name}" for name in names.split(", "))


@functools.cache
def mentioned(module: ast.Module) -> frozenset[str]:
    """The names in a module's code, with their modules where they are imported; those in its texts have theirs. A
    function or class that names itself is left out."""
    found = set()
    for piece in (*module.body, *resolved(module).body):
        own = getattr(piece, "name", "")
        for node in ast.walk(piece):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id != own:
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(dotted(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(written(node.value))
    return frozenset(found)


def named(node: ast.AST) -> set[str]:
    """The members that a piece of code names, in its texts too: a template's, an argument of getattr."""
    found = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return found.union(*(re.findall(r"\w+", text) for text in texts if " " not in text))


@functools.cache
def naming(module: ast.Module) -> Counter[str]:
    """How many functions, methods and other pieces of a module name each member."""
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    outer = (part for node in classes for part in (*node.bases, *node.decorator_list, *node.keywords))
    pieces = (*(n for n in module.body if n not in classes), *(m for n in classes for m in n.body), *outer)
    return Counter(name for piece in pieces for name in named(piece))


def unused(modules: dict[str, ast.Module], programs: dict[str, ast.Module], pages: str) -> list[str]:
    """What is defined in modules and named nowhere but in its own definition: of functions, classes and constants by
    their modules, of members alone. `programs` are code too; of `pages` count what stands with its module, and of
    members what stands behind a dot or in backticks."""
    code = modules | programs
    known: dict[str, set[str]] = {}
    for name, module in code.items():
        for node in (n for n in ast.walk(module) if isinstance(n, ast.ImportFrom) and n.module):
            for alias in node.names:
                known.setdefault(f"{name}.{alias.asname or alias.name}", set()).add(f"{node.module}.{alias.name}")
    used = {f"{name}.{of}" for name, module in code.items() for of in mentioned(module)}
    used |= {of for module in code.values() for of in mentioned(module)} | set(written(pages))
    while more := {of for name in used & known.keys() for of in known[name]} - used:  # by the modules that hand them on
        used |= more
    count = sum((naming(module) for module in code.values()), Counter[str]())
    shown = {
        word for span in re.findall(r"`([^`\n]+)`|(?<=\.)(\w+)", pages) for word in re.findall(r"\w+", " ".join(span))
    }
    return [
        f"{module}.{name}"
        for module, tree in modules.items()
        for name, node in defined(tree)
        if not re.fullmatch(r"__.*|_repr_\w+_", name)  # Python and Jupyter ask for these
        if (
            f"{module}.{name}" not in used
            if node in tree.body
            else name not in shown and count[name] <= (name in named(node))
        )
    ]


@pytest.fixture(scope="module")
def elsewhere() -> tuple[dict[str, ast.Module], str]:
    """What users name: the programs in benchmarks/; jobs, templates, pages of the docs and the Makefile as one text."""
    programs = {f"benchmarks.{p.stem}": ast.parse(p.read_bytes()) for p in (ROOT / "benchmarks").glob("*.py")}
    files = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "trtpipe" / "report" / "templates").iterdir()]
    files += [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "docs").rglob("*.md")]
    return programs, "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_nothing_is_kept_that_nobody_uses(tree: Tree, elsewhere: tuple[dict[str, ast.Module], str]) -> None:
    assert unused(tree.modules, *elsewhere) == [], "remove it: a test alone is no use of it"


def test_what_nobody_uses_is_found(tree: Tree, elsewhere: tuple[dict[str, ast.Module], str]) -> None:
    programs, pages = elsewhere
    pages += " Words of a page: accuracy, grazing, listed. "
    for line, name in (
        ("def grazing(x):\n    return grazing(x - 1)", "grazing"),
        ("ZEBRA_STRIPES = 80", "ZEBRA_STRIPES"),
        ("@contextmanager\ndef grazing():\n    yield", "grazing"),
        ("class Zebra:\n    def grazing(self): ...\n\nZebra()", "grazing"),
        ("def accuracy(scores): ...", "accuracy"),  # a figure's name in a text
        ("def listed(): ...", "listed"),  # another module has one, which it uses
    ):
        assert unused(tree.planted("trtpipe.job.dump", line).modules, programs, pages) == [f"trtpipe.job.dump.{name}"]
    for line, page in (
        ("def grazing(x): ...\n\ngrazing(1)", ""),
        ("def grazing(x): ...", "trtpipe.job.dump:grazing"),
        ("def grazing(x): ...", "from trtpipe.job.dump import job_text, grazing"),
        ("class Zebra:\n    def grazing(self): ...\n\nZebra()", "`zebra.grazing()`"),
    ):
        assert unused(tree.planted("trtpipe.job.dump", line).modules, programs, pages + page) == []


def unread(modules: dict[str, ast.Module]) -> list[str]:
    """Arguments that a function does not read, but where it is given away as a value: others decide what it takes.

    Methods are left out, whose arguments are those of every class of their kind, and what begins with an underscore.
    """
    trees = list(modules.values())
    called = {id(n.func) for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call)}
    values = {
        n.id if isinstance(n, ast.Name) else n.attr
        for tree in trees
        for n in ast.walk(tree)
        if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Load) and id(n) not in called
    }
    return [
        f"{module}.{node.name}: {argument.arg}"
        for module, tree in modules.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name not in values
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if not argument.arg.startswith("_")
        and argument.arg not in {n.id for s in node.body for n in ast.walk(s) if isinstance(n, ast.Name)}
    ]


def test_functions_read_what_they_are_given(tree: Tree) -> None:
    assert unread(tree.modules) == [], "remove the argument"
    line = "def graze(x, y):\n    return x\n\ngraze(1, 2)"
    assert unread(tree.planted("trtpipe.job.dump", line).modules) == ["trtpipe.job.dump.graze: y"]
    assert unread(tree.planted("trtpipe.job.dump", line + "\nMILK = graze").modules) == []

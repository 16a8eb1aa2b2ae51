"""Who may import whom: one contract of import-linter, no circle, no module named in a text from below.

An import counts wherever it stands, in each of the ways that are planted below: a statement, `importlib`, `__import__`,
`sys.modules`, a name in a text, and what takes or runs a text as code. A command of our own program is no import, and
counts as one of what it runs. Not looked for is what is hidden on purpose (bytes, base64, letters put together, an
attribute by `getattr`, finders of `sys.meta_path`), what else of a library takes a module's name (`mock.patch`,
`cProfile.run`), and a process whose command is put together while it runs.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT, Tree, resolved

#: The only places that may import a module, as the beginning of a path below the root. Converters of Torch-TensorRT
#: take the module that it has put under the name tensorrt.
ONLY = {
    "tensorrt": ("trtpipe/trt/", "trtpipe/routes/torch_tensorrt/converters.py"),
    "tensorrt_rtx": ("trtpipe/trt/",),
    "pycuda": ("trtpipe/trt/",),
    "cuda": ("trtpipe/trt/", "calib/gpu_kernel.py"),
    "torch_tensorrt": ("trtpipe/routes/torch_tensorrt/",),
    "torch2trt": ("trtpipe/routes/torch2trt/",),
    "click": ("trtpipe/cli/",),
    "rich": ("trtpipe/cli/console.py", "trtpipe/cli/watching.py"),
    **dict.fromkeys(("pickle", "_pickle", "cloudpickle", "dill", "joblib", "multiprocessing.reduction"), ()),
    "torch.serialization": (),
    "pydoc": (),  # its `locate` imports
    "marshal": (),
    "builtins": (),  # its functions need no import
    "shelve": (),
    "trtpipe.examples": ("trtpipe/examples/",),
}
#: The only modules that may import by a name made at run time, or take a module that was: names of what may not be
#: installed, of the user's code, and tables of what is loaded on demand.
MAY_IMPORT_BY_NAME = {
    "calib.process_state", "calib.user_code", "trtpipe", "trtpipe.cli.main", "trtpipe.examples.networks",
    "trtpipe.model.load", "trtpipe.notebook", "trtpipe.packages", "trtpipe.pipeline.cache.events",
    "trtpipe.pipeline.cache.native", "trtpipe.pipeline.deep", "trtpipe.pipeline.own_modules",
    "trtpipe.routes.exact_rules", "trtpipe.routes.registry", "trtpipe.routes.torch2trt.route",
    "trtpipe.runtime.hybrid_runner", "trtpipe.trt.flavour", "trtpipe.trt.memory",
}  # fmt: skip


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's contracts over the packages below `root`."""
    linter = "from importlinter.cli import lint_imports_command as c; c()"
    command, env = [sys.executable, "-c", linter, "--no-cache"], {"PYTHONPATH": str(root), "PYTHONUTF8": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, encoding="utf-8", timeout=120)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for package in ("trtpipe", "calib"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_rooms_import_downwards_alone() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, f"import what is needed from a room below, or move it there\n{done.stdout}"


def test_one_contract_says_it_all() -> None:
    """A second contract, or one that leaves imports out, would be another map than that of docs/architecture.md."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = settings.pop("contracts")
    assert settings == {"root_packages": ["trtpipe", "calib"], "exclude_type_checking_imports": False}
    assert (set(contract), contract["type"]) == ({"name", "type", "layers"}, "layers")
    assert not [name for name in ("setup.cfg", ".importlinter") if (ROOT / name).exists()]  # which would be read first


def test_no_circle(tree: Tree) -> None:
    assert tree.circle() == (), "move what both need into a module of its own, below both"


def loaded_by_the_package(tree: Tree) -> set[str]:
    """What of ours `import trtpipe` loads. It is in no layer, and whatever imports a room imports it first."""
    imports = tree.imports("trtpipe")
    return {t for t in imports["top"] | imports["class"] if t.partition(".")[0] in ("trtpipe", "calib")}


def test_the_package_itself_imports_nothing_of_ours(tree: Tree) -> None:
    assert loaded_by_the_package(tree) == set(), "add the name to _HOMES: it is looked up when it is asked for"


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("from trtpipe.api import build", "trtpipe.api"),
        ("import trtpipe.runtime.session", "trtpipe.runtime.session"),
        ("try:\n    from calib import table\nexcept ImportError:\n    table = None", "calib.table"),
        ("class A:\n    from trtpipe.errors import Error", "trtpipe.errors"),
    ],
)
def test_a_planted_import_of_the_package_itself_is_found(line: str, module: str, tree: Tree) -> None:
    assert loaded_by_the_package(tree.planted("trtpipe", line)) == {module}


def test_no_module_is_named_by_a_room_below_it(tree: Tree) -> None:
    assert list(tree.upward()) == [], "importing a module by its name is importing it: take the function as an argument"


def test_only_some_import_by_a_name(tree: Tree) -> None:
    assert set(tree.by_name()) == MAY_IMPORT_BY_NAME, "a name made at run time hides what is imported: write it out"


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
    who = f"only {' and '.join(ONLY[name])}" if ONLY[name] else "no module"
    assert strangers == set(), f"{who} may import {name}"


#: The arguments that say whether the code in a file is run, and the value by which it is not.
SAFE = {"allow_pickle": "False", "weights_only": "True"}
#: Where `allow_pickle` stands without its name.
POSITIONS = {"numpy.load": 2, "numpy.lib.format.read_array": 1}
#: What of PyYAML makes any object that a text asks for.
OF_ANY_OBJECT = re.compile(r"yaml\.(((unsafe|full)_)?load(_all)?|C?(Unsafe|Full)?Loader)")


def unpickled(module: ast.Module) -> list[str]:
    """Calls that run, or may run, what a file holds."""
    return [
        ast.unparse(node)
        for node in ast.walk(resolved(module))
        if (isinstance(node, ast.Call) and runs_what_it_reads(node))
        or (isinstance(node, ast.Attribute) and OF_ANY_OBJECT.fullmatch(ast.unparse(node)))
    ]


def runs_what_it_reads(call: ast.Call) -> bool:
    """Whether a call leaves it to a file, or to a value, whether the code in it is run."""
    function = ast.unparse(call.func)
    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
    if function in POSITIONS and len(call.args) > POSITIONS[function]:
        given["allow_pickle"] = ast.unparse(call.args[POSITIONS[function]])
    if function == "torch.load":  # its default is another before PyTorch 2.6
        given.setdefault("weights_only", "")
    hidden = None in given and function in (*POSITIONS, "torch.load")  # **options
    return hidden or any(given.get(name, safe) != safe for name, safe in SAFE.items())


def test_no_file_is_unpickled(tree: Tree) -> None:
    found = {name: calls for name, module in tree.modules.items() if (calls := unpickled(module))}
    assert found == {}, "whoever wrote the file would run code here"


@pytest.mark.parametrize(
    "line",
    [
        "np.load(p, allow_pickle=True)",
        "import numpy as np\nnp.load(p, None, True)",
        "from numpy.lib.format import read_array\nread_array(stream, trusted)",
        "import numpy\nnumpy.load(p, **options)",
        "import numpy as np\nread = np.load\nread(p, None, True)",
        "torch.load(p, weights_only=own)",
        "torch.load(p, weights_only=False)",
        "from torch import load as weights\nweights(p)",
        "yaml.unsafe_load(text)",
        "from yaml import full_load_all\nfull_load_all(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import CLoader\nyaml.parse(text, CLoader)",
    ],
)
def test_what_unpickles_is_found(line: str) -> None:
    assert unpickled(ast.parse(line))


@pytest.mark.parametrize(
    "line",
    ["np.load(p, 'r')", "np.load(p, None, False)", "torch.load(p, map_location='cpu', weights_only=True)",
     "yaml.safe_load(text)", "json.load(stream, **options)"],
)  # fmt: skip
def test_what_unpickles_nothing(line: str) -> None:
    assert not unpickled(ast.parse(f"import numpy as np\n{line}"))


def test_imports_are_absolute(tree: Tree) -> None:
    relative = [
        name
        for name, module in tree.modules.items()
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == [], "write trtpipe.<room>.<module>"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("trtpipe.job.yamlfile", "from trtpipe.job.load import read_job"),
        ("trtpipe.job.yamlfile", "def f():\n    from trtpipe.job.load import read_job"),
        ("trtpipe.job.yamlfile", "if TYPE_CHECKING:\n    from trtpipe.job.load import JobFile"),
        ("trtpipe.job.yamlfile", "importlib.import_module('trtpipe.job.load')"),
        ("trtpipe.job", "from trtpipe.job.load import read_job"),
        ("trtpipe.model.onnx", "from trtpipe.model.onnx.network import load_network"),
        ("calib", "from calib.table import CalibrationTable"),
        ("calib.files", "import trtpipe"),
        ("trtpipe.values", "import trtpipe\ndef f():\n    return trtpipe.check('x')"),
    ],
)
def test_a_planted_circle_is_found(module: str, line: str, tree: Tree) -> None:
    assert module in tree.planted(module, line).circle()


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
    path.write_bytes(path.read_bytes() + f"\n\n{line}\n".encode())
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
        "import trtpipe.values\ndef f():\n    return trtpipe.trt.flavour.load",
        "import trtpipe.values\ndef f():\n    return trtpipe.check('x')",
        "import trtpipe as t\ndef f():\n    return t.load",
        "from trtpipe import build\ndef f():\n    return build('x')",
        "importlib.util.find_spec(ROOM + '.trt.flavour')",
        "subprocess.run([sys.executable, '-m', 'trtpipe', 'check', path])",
        "subprocess.run(['trtpipe', 'check', path])",
        "subprocess.Popen(('trtpipe', *arguments))",
        "subprocess.run(args=['trtpipe', 'check', path])",
        "subprocess.run([sys.executable, '-mtrtpipe', 'check', path])",
        "subprocess.run('trtpipe check x', shell=True)",
        "subprocess.run(f'python -m trtpipe check {path}', shell=True)",
        "os.system('trtpipe check x')",
        "asyncio.create_subprocess_exec('trtpipe', 'check', path)",
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
        "importlib.util.spec_from_file_location('steps', path)",
        "importlib.metadata.entry_points(group='trtpipe-routes')",
        "importlib.reload(module)",
        "SourceFileLoader('steps', path).load_module()",
        "spec.loader.exec_module(module)",
        "sys.modules['trtpipe.' + name]",
        "sys.modules[f'trtpipe.{name}']",
        "sys.modules['trtpipe.%s' % name]",
        "sys.modules['trtpipe.{}.flavour'.format(room)]",
        "sys.modules['.'.join(('trtpipe', room, 'flavour'))]",
        "sys.modules['trtpipe'].check(path)",
        "vars(sys.modules['trtpipe'])['check']",
        "sys.modules.get('trtpipe').trt.flavour",
        "sys.modules.get(name)",
        "from sys import modules as loaded\nloaded.values()",
        "import sys\ntable = sys.modules",
        "steps: pydantic.ImportString[object]",
        "import builtins\nbuiltins.exec(script)",
        "run.eval('trtpipe.check')",
        "compile(script, 'steps', 'exec')",
        "__builtins__['exec'](script)",
        "logging.config.dictConfig(settings)",
        "operator.attrgetter('trt.flavour')(trtpipe)",
        "inspect.getmodule(function)",
        "code.InteractiveInterpreter().runsource(script)",
        "timeit.timeit(script)",
        "import doctest\ndoctest.testmod()",
    ],
)
def test_a_planted_import_by_a_name_made_at_run_time_is_found(line: str, tree: Tree) -> None:
    assert set(tree.planted("trtpipe.job.dump", line).by_name()) - MAY_IMPORT_BY_NAME == {"trtpipe.job.dump"}


@pytest.mark.parametrize(
    "line",
    ["model.eval()", "re.compile(text)", "torch.compile(module)", "'torch' in sys.modules", "set(sys.modules)",
     "sys.modules.get('torch._ops')", "sys.modules['numpy']", "def f():\n    del sys.modules[name]",
     "PACKAGES = 'trtpipe', 'torch'"],
)  # fmt: skip
def test_what_imports_nothing_by_a_name(line: str, tree: Tree) -> None:
    planted = tree.planted("trtpipe.job.dump", line)
    assert set(planted.by_name()) == MAY_IMPORT_BY_NAME
    assert list(planted.upward()) == []

"""What users' code raises, whatever it is and wherever it is called, is said with their frames and is no bug."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from code_that_raises import OWN, RAISED, module
from PIL import Image

import calib
from calib.data import open_source
from calib.errors import CalibError
from calib.samples import DataSpec, InputSpec, TransformSpec
from calib.user_code import MAX_TEXT, described, import_callable, user_code

#: What stands where in the user's module; `boom()` raises.
PLACES = {
    "import": "boom()",
    "factory": "def make():\n    boom()",
    "length": "class D:\n    def __len__(self): boom()\n    def __getitem__(self, i): pass\ndef make(): return D()",
    "item": "class D:\n    def __len__(self): return 3\n    def __getitem__(self, i): boom()\ndef make(): return D()",
    "targets": "class D(list):\n    @property\n    def targets(self): boom()\ndef make(): return D([1])",
    "iterator": "class D:\n    def __iter__(self): boom()\ndef make(): return D()",
    "generator": "import numpy\ndef make():\n    yield numpy.zeros(2, 'float32')\n    boom()",
    "array": "class A:\n    def __array__(self, *a, **k): boom()\ndef make(): return [A()]",
    "mapping": "class M(dict):\n    def __getitem__(self, k): boom()\ndef make(): return [M(x=0)]",
    "transform": "def make(image): boom()",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "a.png").rename(tmp_path / "images" / "a" / "a.png")


def read(place: str, reference: str, folder: Path, workers: int = 0) -> None:
    inputs = [InputSpec("x", "float32", (2,))]
    if place == "transform":
        images = str(folder / "images")
        spec = DataSpec(images=images, transform=TransformSpec(callable=reference), workers=workers)
    else:
        spec = DataSpec(factory=reference, workers=workers)
    source = open_source(spec, inputs)
    list(source.batches(2))


@pytest.mark.parametrize(
    ("place", "raised"),
    # Python takes a data set whose `targets` raises AttributeError for one without.
    [(p, r) for p in PLACES for r in (*RAISED, *OWN) if (p, r) != ("targets", "AttributeError('oh')")],
)
def test_whatever_is_raised_wherever(place: str, raised: str, tmp_path: Path) -> None:
    reference = module(tmp_path, PLACES[place], raised)
    with pytest.raises(CalibError) as error:
        read(place, reference, tmp_path)
    text = str(error.value)
    assert f"{reference.partition(':')[0]}.py, line 2, in boom\n    raise " in text
    assert " raised " in text
    assert (reference in text) == (place != "import")
    assert "/calib/" not in text
    assert len(text) < MAX_TEXT + 3000


def test_an_interrupt_passes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        read("factory", module(tmp_path, PLACES["factory"], "KeyboardInterrupt()"), tmp_path)


def test_the_message_is_the_callable_the_exception_and_the_users_frames(tmp_path: Path) -> None:
    reference = module(tmp_path, PLACES["item"], "FileNotFoundError(2, 'No such file', 'a.npy')")
    name = reference.partition(":")[0]
    with pytest.raises(CalibError) as error:
        read("item", reference, tmp_path)
    assert str(error.value) == (
        f"factory: {reference}[0] raised FileNotFoundError: [Errno 2] No such file: 'a.npy'\n"
        f"  File {tmp_path / name}.py, line 6, in __getitem__\n"
        "    def __getitem__(self, i): boom()\n"
        f"  File {tmp_path / name}.py, line 2, in boom\n"
        "    raise FileNotFoundError(2, 'No such file', 'a.npy')"
    )


def test_frames_of_installed_packages_are_left_out() -> None:
    def load() -> None:
        np.load("/nowhere/x.npy")

    try:
        load()
    except FileNotFoundError as raised:
        text = described(raised)
    assert text.splitlines()[-1].strip() == 'np.load("/nowhere/x.npy")'
    assert "site-packages" not in text


def test_a_syntax_error_names_the_users_line(tmp_path: Path) -> None:
    (tmp_path / "unparsable.py").write_text("x = 1\nif x\n    pass\n")
    with pytest.raises(CalibError) as error:
        import_callable("unparsable:make", "model.factory")
    assert str(error.value) == (
        "model.factory: importing unparsable raised SyntaxError: expected ':' (unparsable.py, line 2)\n"
        f"  File {tmp_path / 'unparsable.py'}, line 2"
    )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nothing", r"^k: must read package\.module:callable \(got 'nothing'\)\.$"),
        ("surely_absent:make", r"must name a module that can be imported \(got 'surely_absent:make'\)\. Put surely_ab"),
        ("surely.absent.too:make", r"Put surely\.py beside the job file, or install its package\.$"),
        ("math:nothing", r"must be package\.module:callable \(got 'math:nothing'\)\. Check the name after the colon"),
        ("math:pi", r"must be package\.module:callable \(got 'math:pi'\)"),
    ],
)
def test_references_that_name_no_callable(reference: str, message: str) -> None:
    with pytest.raises(CalibError, match=message):
        import_callable(reference, "k")


def test_a_callable_may_be_of_a_class() -> None:
    assert import_callable("pathlib:Path.cwd", "k")() == Path.cwd()


@pytest.mark.parametrize("end", ["__import__('os')._exit(3)", "__import__('os').kill(__import__('os').getpid(), 11)"])
def test_a_worker_process_that_the_users_code_ends(end: str, tmp_path: Path) -> None:
    body = (
        "import numpy, os\nFIRST = os.getpid()\nclass D:\n    targets = [0, 0]\n    def __len__(self): return 2\n"
        f"    def __getitem__(self, i):\n        return numpy.zeros(2, 'float32') if os.getpid() == FIRST else {end}\n"
        "def make(): return D()"
    )
    reference = module(tmp_path, body, "ValueError()")
    assert reference.partition(":")[0] not in sys.modules
    with pytest.raises(
        CalibError,
        match=r"^workers: a worker process ended before all samples were loaded .* Set workers to 0 to see what e",
    ):
        read("item", reference, tmp_path, workers=1)


@pytest.mark.parametrize("recorded_by", ["trtpipe", "the user"])
def test_torchscripts_own_trace_gives_way_to_the_reason_and_the_users_lines(recorded_by: str, tmp_path: Path) -> None:
    """It is 30 lines of torch's and trtpipe's with the reason last, where a long message was cut."""
    net = tmp_path / "net.py"
    net.write_text("import torch\n\n\ndef forward(x):\n    return table(x)\n")
    ours = Path(calib.__file__).parent / "data.py"
    outer = f"{ours}(79): record\n{tmp_path}/main.py(3): <module>\n" if recorded_by == "trtpipe" else ""
    trace = (
        "The following operation failed in the TorchScript interpreter.\n"
        "Traceback of TorchScript (most recent call last):\n"
        "/lib/site-packages/torch/nn/functional.py(2621): embedding\n"
        f"{net}(5): forward\n" + "/lib/site-packages/torch/nn/module.py(1): _call\n" * 200 + outer
        + "RuntimeError: index out of range in self\n"
    )  # fmt: skip
    with pytest.raises(CalibError) as caught, user_code("the model"):
        raise RuntimeError(trace)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the model raised RuntimeError: index out of range in self"
    assert lines[-2:] == [f"  File {net}, line 5, in forward", "    return table(x)"]
    assert "site-packages" not in str(caught.value)
    assert "main.py" not in str(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_exceptions_of_a_group_are_named(tmp_path: Path) -> None:
    (tmp_path / "grouping.py").write_text(
        "def one(number):\n    try:\n        raise OSError(f'file {number}\\nand more')\n"
        "    except OSError as error:\n        return error\n"
        "def make():\n    inner = BaseExceptionGroup('inner', [ValueError('bad'), SystemExit()])\n"
        "    raise BaseExceptionGroup('several', [inner, *map(one, range(6))])\n"
    )
    with pytest.raises(CalibError) as caught, user_code("the factory"):
        import_callable("grouping:make", "model.factory")()
    lines = str(caught.value).splitlines()
    place = f"{tmp_path / 'grouping.py'}, line 3"
    assert lines[0] == "the factory raised BaseExceptionGroup: several (7 sub-exceptions)"
    assert lines[1:6] == [f"  - OSError: file {number} ({place})" for number in range(5)]
    assert lines[6] == "  - and 3 more"
    assert lines[-2:] == [
        f"  File {tmp_path / 'grouping.py'}, line 8, in make",
        "    raise BaseExceptionGroup('several', [inner, *map(one, range(6))])",
    ]
    few = described(ExceptionGroup("outer", [ExceptionGroup("inner", [KeyError("k"), ValueError()])]))  # noqa: F821
    assert few.splitlines()[1:] == ["  - KeyError: 'k'", "  - ValueError"]

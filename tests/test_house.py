"""What is said of the house is so: the map, what CONTRIBUTING names, the gate against skips, what `make setup` says."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import trtpipe

ROOT = Path(__file__).resolve().parent.parent
MAP = (ROOT / "docs" / "architecture.md").read_text()


def layers() -> list[set[str]]:
    """The rooms of the contract, from the top, without what stands above `cli`."""
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^layers = \[\n(.*?)^\]", text, re.M | re.S)
    rows = [re.findall(r"(?:trtpipe\.)?(\w+)(?= [|:]|\")", row) for row in listed.splitlines()]
    return [set(row) for row in rows if not {"__main__", "ground"} & set(row)]


def test_the_map_has_every_room_in_the_contracts_order() -> None:
    (drawn,) = re.findall(r"^## The map\n(.*?)^`make lint`", MAP, re.M | re.S)
    rows = [re.findall(r"^    (\w+)  |\|  (\w+)  ", line) for line in drawn.splitlines() if line.startswith("    ")]
    found = [{a or b for a, b in row} for row in rows if row]
    ground = next(row for row in layers() if "values" in row)
    assert found == [{"ground"} if row == ground else row for row in layers()]
    (listed,) = re.findall(r"^    ground +(.*)$", drawn, re.M)
    assert set(listed.split(", ")) == ground


def absent(page: str) -> list[str]:
    """The files and folders that a page names, by their room or beside it, and that are not there."""
    rooms = "job|trt|model|bundle|evaluation|quantization|routes|runtime|report|pipeline|nightly|cli|calib"
    listed = re.findall(rf"^    ({rooms})  .*  ((?:[\w/]+, )*[\w/]+)$", page, re.M)
    named = [f"{room}/{name}" for room, names in listed for name in names.split(", ")]
    named += re.findall(rf"`((?:{rooms}|tests|benchmarks|docs)/[\w/.]+)`", page)
    assert len(named) > 2
    places = [(name, (ROOT / "trtpipe" / name, ROOT / name)) for name in named]
    return [name for name, paths in places if not any(p.exists() or p.with_suffix(".py").exists() for p in paths)]


def test_files_that_the_map_names_are_there() -> None:
    assert absent(MAP) == []
    drawn = "    report        pages for people                                    page, zebra, templates/"
    assert absent(f"{drawn}\n| zebras | `calib/table`; `trt/zebra`, `model/zebra.py`, `tests/support/zebra.py` |") == [
        "report/zebra", "trt/zebra", "model/zebra.py", "tests/support/zebra.py",
    ]  # fmt: skip


def test_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "README.md", ROOT / ".ci" / "run"):
        text = page.read_text()
        for words in re.findall(r"(?:`|^ {4}|^)make ((?:[a-z-]+ ?)+)", text, re.M):
            assert set(words.split()) <= targets, f"{page.name}: make {words}"


def test_the_changelog_begins_with_what_is_unreleased_or_this_version() -> None:
    first = re.search(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first is not None
    assert first[1] in ("Unreleased", trtpipe.__version__)


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports each by its name alone, and refuses the second."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == [], "rename one"


SKIPPING = """
import pytest
def test_passes(): pass
def test_skips(): pytest.skip({reason!r})
"""


@pytest.mark.parametrize(
    ("reason", "strict", "code"),
    [
        ("needs Chromium", True, 1),
        ("needs Chromium", False, 0),
        ("needs Chromium, or a GPU", True, 1),
        ("a GPU is here", True, 0),
    ],
)
@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_skip_that_nobody_expects_fails_ci(
    reason: str, strict: bool, code: int, workers: tuple[str, ...], tmp_path: Path
) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(SKIPPING.format(reason=reason))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRTPIPE", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, "test_it.py"],
        cwd=tmp_path, env=kept | ({"TRTPIPE_NO_SKIPS": "1"} if strict else {}), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert (f"test_it.py::test_skips: Skipped: {reason}" in done.stdout) == (code == 1)
    assert "1 passed, 1 skipped" in done.stdout.strip().splitlines()[-1]


def test_setup_names_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text(f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 9)\nexec(sys.argv[2])\n")
    old.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    command = ["make", "-s", "setup", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "Python: must be 3.11 or later (got 3.9). Run: make PYTHON=python3.11"


def test_setup_says_what_the_browser_tests_lack() -> None:
    def violation(browser: str) -> str:
        command = ["make", "-s", "setup", "VENV=/usr", f"BROWSER={browser}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert violation("true") == ""
    assert violation("false") == (
        "no Chromium here: the tests of the report in a browser will be skipped. Install it: apt-get install chromium\n"
    )


#: What another program does is a fact: it is stated. "must ... (got ...)" is for values that a user gave.
_COMMANDED = re.compile(
    r"\bmust (accept|answer|be (able|importable|possible|reachable|usable|writable)|compile|"
    r"compute (what|something else)|convert|end with an|find|live|read all|run its|succeed|work)\b"
)


def _texts(tree: ast.AST) -> list[str]:
    """Every string of a module but its docstrings; a value in an f-string is {}."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {ast.get_docstring(n, clean=False) for n in ast.walk(tree) if isinstance(n, documented)}
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
            texts.append(node.value)
    return texts


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("build: TensorRT must compile the graph (got a crash).", True),
        ("{} must be importable here (got: none).", True),
        ("name: must be a word (got 7).", False),
    ],
)
def test_a_message_that_commands_another_program_is_found(text: str, commands: bool) -> None:
    assert (_COMMANDED.search(text) is not None) == commands


def test_messages_state_what_other_programs_do() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for package in ("trtpipe", "calib")
        for path in sorted((ROOT / package).rglob("*.py"))
        for text in _texts(ast.parse(path.read_text()))
        if _COMMANDED.search(text)
    ]
    assert found == []


def test_make_bench_runs_programs_that_need_nothing() -> None:
    """No module of theirs, no argument, no trained networks, and no file of the docs written unasked."""
    left_out = re.search(
        r"NO_FIGURES := \$\(addprefix benchmarks/,(.*?)\)\n", (ROOT / "Makefile").read_text(), re.DOTALL
    )
    assert left_out is not None
    names = left_out[1].replace("\\\n", " ").split()
    programs = {p.name: p.read_text() for p in (ROOT / "benchmarks").glob("*.py")}
    assert set(names) <= set(programs)
    for name in set(programs) - set(names):
        assert '__name__ == "__main__"' in programs[name], name
        assert not re.search(r"\bzoo\b|= sys\.argv", programs[name]), name

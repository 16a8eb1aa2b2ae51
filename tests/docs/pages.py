"""The blocks of a Markdown page, and how each is run.

```console            `$ command` lines are run; what follows one is its output, with `...` for what may differ
```python             is executed; the blocks of a page share their names
```yaml file=a.yaml   is written to that file first, as is any other language with `file=`
```console numbers=any as the first, but any number may stand where the page has one
```console skip="..." is not run, for the reason given, which the page says too
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[a-z]*)(?P<rest>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)
_NUMBER = re.compile(r"-?\d+(,\d{3})*(\.\d+)*(e[+-]?\d+)?")
RUN = ("console", "python")


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is that of its fence."""

    page: Path
    line: int
    language: str
    text: str
    file: str | None = None
    skip: str | None = None
    any_number: bool = False

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def active(self) -> bool:
        """Whether something is done with it."""
        return self.language in RUN or self.file is not None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in _FENCE.finditer(text):
        options = dict(word.split("=", 1) for word in shlex.split(match["rest"]))
        line = text.count("\n", 0, match.start()) + 1
        any_number = options.get("numbers") == "any"
        block = Block(
            page, line, match["language"], match["text"], options.get("file"), options.get("skip"), any_number
        )
        found.append(block)
    return found


@dataclass
class Reader:
    """Someone who does what a page says, in a folder of their own."""

    folder: Path
    names: dict[str, Any] = field(default_factory=dict)

    def do(self, block: Block) -> None:
        """Follow one block; AssertionError when what happens is not what it says."""
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self._execute(block)
        else:
            for command, expected in commands(block.text):
                self._command(block, command, expected)

    def _execute(self, block: Block) -> None:
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        before = Path.cwd()
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("default")  # a reader's warnings are no errors
                exec(code, self.names)
        finally:
            os.chdir(before)
            sys.path.remove(str(self.folder))

    def _command(self, block: Block, command: str, expected: str) -> None:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=environment(self.folder), timeout=600,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}: {command}\nexit code {done.returncode}\n{done.stdout}"
        if expected:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            want, got = (_NUMBER.sub("#", t) if block.any_number else t for t in (expected, done.stdout))
            same = doctest.OutputChecker().check_output(want, got, flags)
            assert same, f"{block}: {command}\nsaid:\n{done.stdout}\nthe page says:\n{expected}"


def commands(text: str) -> list[tuple[str, str]]:
    """(command, output) of a console block; a command goes on over lines that end in a backslash."""
    found: list[tuple[str, str]] = []
    going_on = False
    for line in text.splitlines():
        if going_on:
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        elif line.startswith("$ "):
            found.append((line[2:], ""))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        going_on = line.endswith("\\") and (going_on or line.startswith("$ "))
    return found


def environment(folder: Path) -> dict[str, str]:
    """As after `pip install`: `trtpipe` and `python` are commands, and nothing of the repository is in the way."""
    programs = folder.parent / "programs"
    programs.mkdir(exist_ok=True)
    for name, line in (("trtpipe", "-m trtpipe"), ("python", "")):
        path = programs / name
        if not path.exists():
            safe = "-P " if name == "trtpipe" and sys.version_info >= (3, 11) else ""
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {safe}{line} "$@"\n')
            path.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRTPIPE", "PYTEST"))}
    return kept | {
        "PATH": f"{programs}:{kept['PATH']}",
        "PYTHONPATH": str(ROOT),
        "VENV": str(Path(sys.prefix)),
        "COLUMNS": "120",
    }

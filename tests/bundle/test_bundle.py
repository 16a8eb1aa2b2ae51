"""Bundles on disk: whole or absent whatever kills the writer, and refused unless all of them is as it was written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shipping

from trtpipe import atomic
from trtpipe.atomic import clean_leftovers
from trtpipe.bundle import format as bundle_module
from trtpipe.bundle import golden
from trtpipe.bundle.archive import pack
from trtpipe.bundle.format import Bundle, Trust, read_bundle, require_place, write_bundle
from trtpipe.bundle.manifest import PARTS
from trtpipe.errors import InputError
from trtpipe.outputs import require_replaceable_folder, require_writable_file, require_writable_folder


def tree(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def test_read_returns_what_was_written(tmp_path: Path) -> None:
    written = shipping.bundle(tmp_path / "deep" / "colour")
    read = read_bundle(tmp_path / "deep" / "colour")
    assert read == written
    assert read.signature is None
    assert read.read("model.onnx") == shipping.graph()
    assert read.manifest.files["model.onnx"].size == len(shipping.graph())
    np.testing.assert_array_equal(read.golden().inputs["image"], shipping.golden_data().inputs["image"])
    assert sorted(tree(read.path)) == ["calibration.json", "golden.safetensors", "manifest.json", "model.onnx"]


def test_the_same_values_give_the_same_bytes(tmp_path: Path) -> None:
    assert tree(shipping.bundle(tmp_path / "a").path) == tree(shipping.bundle(tmp_path / "b").path)


def test_replacing_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c", extra={"report.html": b"old"})
    shipping.bundle(tmp_path / "c", notes=("new",))
    assert read_bundle(tmp_path / "c").manifest.notes == ("new",)
    assert os.listdir(tmp_path) == ["c"]


def test_a_file_system_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipping.bundle(tmp_path / "c", notes=("old",))
    monkeypatch.setattr(atomic, "exchange", lambda one, other: False)
    shipping.bundle(tmp_path / "c", notes=("new",))
    assert read_bundle(tmp_path / "c").manifest.notes == ("new",)
    assert os.listdir(tmp_path) == ["c"]


def test_an_error_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipping.bundle(tmp_path / "c", notes=("old",))

    def broken(data: bytes) -> bytes:
        raise OSError("no key")

    def full(path: Path) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(bundle_module, "sync_directory", full)
    with pytest.raises(OSError, match="disk is full"):
        shipping.bundle(tmp_path / "c", notes=("new",))
    with pytest.raises(OSError, match="no key"):
        shipping.bundle(tmp_path / "c", notes=("new",), sign=broken)
    assert read_bundle(tmp_path / "c").manifest.notes == ("old",)
    assert os.listdir(tmp_path) == ["c"]


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import shipping
from pathlib import Path
from trtpipe import atomic
from trtpipe.bundle import format as bundle
destination, exchange = Path({destination!r}), {exchange!r}
shipping.graph()
from safetensors.numpy import load, save   # so that the events below are the writer's own
if not exchange:
    atomic.exchange = lambda one, other: False
shipping.bundle(destination, notes=("old",))
seen = []
for k in range(1, 500):
    child = os.fork()
    if child == 0:
        count = 0
        def die(event, args):
            global count
            if event in ("open", "os.mkdir", "os.rename", "os.listdir", "os.scandir", "shutil.rmtree", "os.remove",
                         "os.rmdir", "ctypes.dlopen", "ctypes.dlsym", "fcntl.flock"):
                count += 1
                if count == k:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(die)
        shipping.bundle(destination, notes=("new",))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    seen.append(bundle.read_bundle(destination).manifest.notes[0])
    shipping.bundle(destination, notes=("old",))
    assert os.listdir(destination.parent) == [destination.name], os.listdir(destination.parent)
    assert bundle.read_bundle(destination).manifest.notes == ("old",)
    if os.waitstatus_to_exitcode(status) == 0:
        break
print(" ".join(seen))
"""


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_every_step(tmp_path: Path, exchange: bool) -> None:
    """The writer dies before each of its file operations in turn; the whole old or the whole new bundle stands."""
    root = Path(__file__).parents[2]
    (tmp_path / "in").mkdir()
    code = KILLED.format(
        paths=[str(root / "tests" / "support"), str(root)], destination=str(tmp_path / "in" / "c"), exchange=exchange
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr
    seen = ran.stdout.split()
    assert len(seen) > 15
    assert seen == ["old"] * seen.count("old") + ["new"] * seen.count("new")
    assert seen.count("old") > 8
    assert seen.count("new") > 3


def test_a_living_writer_is_not_cleaned_away(tmp_path: Path) -> None:
    with atomic.sibling(tmp_path / "c") as temporary:
        assert clean_leftovers(tmp_path / "c") == ()
        assert temporary.exists()
    dead = tmp_path / ".c.trtpipe-new-0123"
    dead.mkdir()
    other = tmp_path / ".d.trtpipe-new-0123"
    other.mkdir()
    assert clean_leftovers(tmp_path / "c") == (dead.name,)
    assert os.listdir(tmp_path) == [other.name]


def test_what_is_no_bundle_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("years of work")
    (tmp_path / "f").write_text("x")
    (tmp_path / "l").symlink_to(tmp_path / "d")
    with pytest.raises(InputError, match=r"d: must be a bundle or absent \(got a directory without manifest.json\)"):
        shipping.bundle(tmp_path / "d")
    for name in "fl":
        with pytest.raises(InputError, match=r"is there already and is no bundle"):
            shipping.bundle(tmp_path / name)
    assert (tmp_path / "d" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("manifest", [None, b"{}", b"[]", b"{", b'{"files": 1}', b'{"files": [[]]}'])
@pytest.mark.parametrize("name", ["release.key", ".notes", "table.json", "photos"])
def test_files_of_others_in_a_bundle_are_not_deleted(tmp_path: Path, manifest: bytes | None, name: str) -> None:
    """Nor where its manifest is damaged, or another program's."""
    shipping.bundle(tmp_path / "b")
    if manifest is not None:
        (tmp_path / "b" / "manifest.json").write_bytes(manifest)
    before = {p.name for p in (tmp_path / "b").iterdir()}
    if name == "photos":
        (tmp_path / "b" / name).mkdir()
    else:
        (tmp_path / "b" / name).write_text("mine")
    for attempt in (shipping.bundle, require_place):
        with pytest.raises(InputError) as caught:
            attempt(tmp_path / "b")
        assert str(caught.value) == (
            f"{tmp_path}/b: must hold only the bundle's files to be replaced (got {name!r} too, which would be "
            "deleted). Move it away, or choose another place."
        )
    assert {p.name for p in (tmp_path / "b").iterdir()} == before | {name}
    (tmp_path / "b" / name).rename(tmp_path / name)
    assert shipping.bundle(tmp_path / "b").manifest.name == "colour"


@pytest.mark.parametrize("manifest", [b"", b"{", b'{"files": 1}'])
def test_a_bundle_whose_manifest_is_damaged_is_replaced(tmp_path: Path, manifest: bytes) -> None:
    """With all that a bundle may be made of: a night makes it whole again."""
    shipping.bundle(tmp_path / "b")
    (tmp_path / "b" / "manifest.json").write_bytes(manifest)
    for name in PARTS - {"manifest.json"}:
        (tmp_path / "b" / name).write_bytes(b"")
    assert {"calibration.json", "calibration.corrections.safetensors", "model.engine", "model.hybrid"} < PARTS
    shipping.bundle(tmp_path / "b")
    assert read_bundle(tmp_path / "b").manifest.name == "colour"


def test_nothing_is_written_into_a_bundle(tmp_path: Path) -> None:
    """A file more makes it invalid."""
    shipping.bundle(tmp_path / "b")
    said = "must not be in the bundle {}/b. Choose another place."
    with pytest.raises(InputError) as caught:
        shipping.bundle(tmp_path / "b" / "in")
    assert str(caught.value) == f"{tmp_path}/b/in: {said.format(tmp_path)}"
    for probe in (require_writable_file, require_writable_folder, require_replaceable_folder):
        with pytest.raises(InputError) as caught:
            probe(tmp_path / "b" / "in")
        assert str(caught.value) == f"{tmp_path}/b/in: {said.format(tmp_path)}"
    with pytest.raises(InputError) as caught:
        require_writable_folder(tmp_path / "b")
    assert str(caught.value) == f"{tmp_path}/b: {said.format(tmp_path)}"
    assert read_bundle(tmp_path / "b").manifest.name == "colour"
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text("{}")  # of something else
    shipping.bundle(tmp_path / "web" / "b")


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "x\n", "manifest.json", "manifest.sig", "x" * 200])
def test_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="a bundle's file must have a plain name of its own"):
        shipping.bundle(tmp_path / "c", extra={name: b""})


def test_writing_holds_the_files_against_the_manifest(tmp_path: Path) -> None:
    files = shipping.files()
    del files["calibration.json"]
    with pytest.raises(InputError, match=r"calibration.json is missing"):
        write_bundle(tmp_path / "c", shipping.manifest(), files)
    wrong = golden.Golden(
        {"image": np.zeros((2, 3, 8, 9), np.float32)}, {"logits": np.zeros((2, 3), np.float32)}, None, None
    )
    with pytest.raises(InputError, match="input:image must have the shape"):
        shipping.bundle(tmp_path / "c", extra={"golden.safetensors": golden.to_bytes(wrong)})
    assert os.listdir(tmp_path) == []


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def relink(path: Path) -> None:
    outside = path.parent.parent / "outside"
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("model.onnx", Path.unlink, "must hold every file its manifest lists (model.onnx is missing)"),
    ("model.onnx", append, "c/model.onnx: must have "),
    ("model.onnx", flip, "c/model.onnx: must have SHA-256 "),
    ("model.onnx", relink, "c/model.onnx: must be a regular file (got: a link)"),
    ("model.onnx", pipe, "c/model.onnx: is not a regular file"),
    ("model.onnx", folder, "c/model.onnx: is not a regular file"),
    ("model.onnx", socket, "c/model.onnx: must be a regular file (got: a socket)"),
    ("calibration.json", flip, "c/calibration.json: must have SHA-256 "),
    ("golden.safetensors", flip, "c/golden.safetensors: must have SHA-256 "),
    ("extra.so", Path.touch, "must hold only the files its manifest lists (got 'extra.so' too)"),
    (".hidden", Path.touch, "must hold only the files its manifest lists (got '.hidden' too)"),
    ("sub", Path.mkdir, "must hold only the files its manifest lists (got 'sub' too)"),
    ("manifest.json", Path.unlink, "c: holds no manifest.json. Give the path of a bundle."),
    ("manifest.json", relink, "c/manifest.json: must be a regular file (got: a link)"),
    ("manifest.sig", Path.touch, "c/manifest.sig: must have 64 bytes (got 0)"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE, ids=range(len(DAMAGE)))
def test_damage_is_refused(tmp_path: Path, name: str, damage: Callable[[Path], object], message: str) -> None:
    shipping.bundle(tmp_path / "c")
    damage(tmp_path / "c" / name)
    with pytest.raises(InputError) as caught:
        read_bundle(tmp_path / "c")
    assert message in str(caught.value)


@pytest.mark.parametrize(("code", "error"), [(errno.EACCES, PermissionError), (errno.EMFILE, OSError)])
@pytest.mark.parametrize("name", ["manifest.json", "model.onnx"])
def test_a_file_that_the_system_does_not_open_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, error: type[OSError]
) -> None:
    shipping.bundle(tmp_path / "c")
    opened = os.open

    def refusing(path: Any, *arguments: Any, **more: Any) -> int:
        if path == name:
            raise OSError(code, os.strerror(code), path)
        return opened(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(error) as caught:
        read_bundle(tmp_path / "c")
    assert (caught.value.errno, caught.value.filename) == (code, f"{tmp_path}/c/{name}")


def test_a_size_that_lies_is_not_believed(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c")
    path = tmp_path / "c" / "manifest.json"
    raw = json.loads(path.read_text())
    raw["files"]["model.onnx"]["size"] = 1 << 60
    del raw["digest"]  # as in a manifest of before
    path.write_bytes((json.dumps(raw, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode())
    with pytest.raises(InputError, match=f"model.onnx: must have {1 << 60} bytes"):
        read_bundle(tmp_path / "c")


def test_a_file_swapped_after_reading_is_not_used(tmp_path: Path) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    flip(tmp_path / "c" / "model.onnx")
    with pytest.raises(InputError, match=r"model.onnx: must have SHA-256"):
        bundle.read("model.onnx")
    with pytest.raises(InputError, match=r"must hold nothing.bin \(got calibration.json, "):
        bundle.read("nothing.bin")


def test_no_bundle_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone: must be a bundle's directory \(got: No such file or directory\)"):
        read_bundle(tmp_path / "gone")


def test_what_is_packed_is_to_be_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = shipping.bundle(tmp_path / "c")
    pack(bundle, Path("c.trtb"))
    pack(bundle, Path("other name"))
    shutil.rmtree("c")
    Path("d.trtb").write_text("something else")
    must = "must be a bundle's directory (got: "
    for path, wanted in (
        ("c.trtb", f"c.trtb: {must}Not a directory). Unpack c.trtb first: trtpipe unpack c.trtb FOLDER."),
        ("c", f"c: {must}No such file or directory). Unpack c.trtb first: trtpipe unpack c.trtb c."),
        (
            "other name",
            f"other name: {must}Not a directory). Unpack other name first: trtpipe unpack 'other name' FOLDER.",
        ),
        ("d.trtb", f"d.trtb: {must}Not a directory). Give the path of a bundle."),
        ("d", f"d: {must}No such file or directory). Give the path of a bundle."),
    ):
        with pytest.raises(InputError) as caught:
            read_bundle(Path(path))
        assert str(caught.value) == wanted


def test_a_bundle_that_cannot_be_opened_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"/loop: symbolic links lead in a circle\. Repair the links\.$"):
        read_bundle(tmp_path / "loop")

    def full(path: Path, *_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(InputError, match=r"/b: too many open files\. Raise the limit \(`ulimit -n 4096`\)\.$"):
        read_bundle(tmp_path / "b")


def test_a_bundle_may_be_reached_by_a_link(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "v1")
    (tmp_path / "current").symlink_to("v1")
    assert read_bundle(tmp_path / "current").manifest.name == "colour"


def test_a_bundle_that_is_replaced_whenever_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipping.bundle(tmp_path / "c")
    replaced: list[Path] = []

    def read(path: Path, directory: int, trust: Trust | None) -> Bundle:
        replaced.append(path.rename(tmp_path / f"old{len(replaced)}"))
        shutil.copytree(replaced[-1], path)
        raise InputError("c: a file is gone.")

    monkeypatch.setattr(bundle_module, "_read_opened", read)
    with pytest.raises(InputError) as caught:
        read_bundle(tmp_path / "c")
    assert str(caught.value) == (
        f"{tmp_path / 'c'}: must stay in place while it is read (it was replaced ten times). Try again later."
    )
    assert len(replaced) == 10

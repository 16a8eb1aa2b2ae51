"""What native code reads: a database's journals, libraries, and the libraries of packages that are taken as known."""

import contextlib
import ctypes
import importlib.util
import re
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.reads import WATCHED, Read
from trtpipe.pipeline.cache.recorder import Recorder


def test_what_a_database_does_not_hold_yet_counts(tmp_path):
    """Another process keeps it open, so that what it wrote stays in the file beside it."""
    path, recorder = tmp_path / "w.db", Recorder(tmp_path)
    keeper = sqlite3.connect(path)
    keeper.execute("pragma journal_mode = wal")
    keeper.execute("pragma wal_autocheckpoint = 0")
    keeper.execute("create table t(v)")
    keeper.commit()
    seen = []
    for value in (1, 2):
        keeper.execute("delete from t")
        keeper.execute("insert into t values (?)", (value,))
        keeper.commit()
        with recorder:
            exec("import sqlite3; assert sqlite3.connect(name).execute('select v from t').fetchone()", {"name": path})
        seen.append(recorder.reads.values(tmp_path, Digests()))
    keeper.close()
    assert {i for i in recorder.reads.items if i.kind == "journal"} == {
        Read("journal", f"w.db{ending}") for ending in ("-wal", "-journal")
    }
    recorder.close()
    assert seen[0]["read w.db"] == seen[1]["read w.db"]
    assert seen[0]["journal w.db-wal"] != seen[1]["journal w.db-wal"]
    (tmp_path / "w.db-wal").write_bytes(b"")
    assert Read("journal", "w.db-wal").value(tmp_path, Digests()) == "absent"


@pytest.mark.parametrize(
    ("statement", "note"),
    [
        ("sqlite3.connect(':memory:').execute(\"attach ':mem' || 'ory:' as z\")",
         "called SQLite's ATTACH with ':mem' || 'ory:': what that operator read"),
        ("ctypes.CDLL('libc.so.6')", "loaded libc.so.6: what its native code reads"),
        ("ctypes.CDLL(None)", "loaded the process's own libraries: what its native code reads"),
    ],
)  # fmt: skip
def test_what_native_code_may_read_unseen_is_noted(statement, note, tmp_path):
    recorder = Recorder(tmp_path)
    with recorder, contextlib.suppress(sqlite3.OperationalError):
        eval(statement, {"sqlite3": sqlite3, "ctypes": ctypes})
    assert recorder.reads.notes == (f"the job's code {note} is not watched",)
    recorder.close()


def test_an_extension_module_of_the_users_own_is_read_and_noted(tmp_path, monkeypatch):
    """Of the packages, the version stands for what they are."""
    found = Path(importlib.util.find_spec("yaml._yaml").origin)
    package = tmp_path / "mine"
    package.mkdir()
    shutil.copy(found, package / found.name)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    recorder = Recorder(tmp_path)
    with recorder, contextlib.suppress(Exception):  # it is yaml's, under another name
        exec("import mine._yaml", {})
    assert Read("file", f"mine/{found.name}") in recorder.reads.items
    assert recorder.reads.notes == (f"the job's code loaded {found.name}: what its native code reads is not watched",)
    recorder.close()


#: What opens a file in C and C++.
OPENS = re.compile(r"f?(re)?open(at)?(64)?|_ZNSt13basic_filebufIcSt11char_traitsIcEE4openE\w+")


def taken_from_elsewhere(library):
    """The names of the functions and variables that an ELF library takes from others."""
    data = library.read_bytes()
    if data[:5] != b"\x7fELF\x02":  # a linker's script
        return set()
    start, (size, count) = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQII", data, start + k * size) for k in range(count)]
    names = set()
    for _, kind, _, _, at, length, link, _ in sections:
        if kind == 11:  # SHT_DYNSYM
            for name, _, _, section, *_ in struct.iter_unpack("<IBBHQQ", data[at : at + length]):
                begin = sections[link][4] + name
                names |= {data[begin : data.index(b"\0", begin)].decode()} if section == 0 else set()
    return names


#: Libraries of watched packages that open files: by which wrapped functions, or why not for a caller in Python.
OPENING = {
    "_safetensors_rust": "safe_open",
    "libfreetype": "getfont",
    "liblcms2": "profile_open",
    "image_stable": "an operator of torch.ops",
    "image": "an operator of torch.ops",
    "libXau": "of the X server, for grabbing the screen",
    "libavif": "Pillow gives it bytes",
    "libharfbuzz": "gets its fonts of FreeType",
    "libopenjp2": "Pillow gives it bytes",
    "libpng16": "of FreeType, for the pictures in a font",
    "libz": "gets bytes",
    "libtiff": "Pillow opens the file",
    "libcudart": "looks for the driver",
    "libnvjpeg": "torchvision gives it bytes",
    "libjpeg": "Pillow gives it bytes",
    "libwebp": "Pillow gives it bytes",
    "libgfortran": "of BLAS, which reads none",
    "libopenblas": "asks the system for its processors",
    "libscipy_openblas64_": "asks the system for its processors",
}


@pytest.mark.parametrize("package", sorted(WATCHED - {"torch", "torchao"}))  # they open by what the table above names
def test_watched_packages_open_files_by_wrapped_functions_alone(package):
    """A new version's new way shows as a library that is not in the table."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    folders = [folder, *folder.parent.glob(f"{ {'PIL': 'pillow'}.get(package, package) }.libs")]
    binaries = [p for f in folders for p in f.rglob("*.so*")]
    opening = {re.split(r"-|\.", p.name)[0] for p in binaries if any(map(OPENS.fullmatch, taken_from_elsewhere(p)))}
    assert opening <= OPENING.keys()

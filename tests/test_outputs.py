"""What the operating system refuses: named, said in words, found out before work begins."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from calib.errors import CalibCancelled, CalibError
from trtpipe.bundle.format import require_place
from trtpipe.errors import _REFUSED, InputError, MissingError, user_error
from trtpipe.outputs import (
    cache_folder,
    naming,
    naming_database,
    open_database,
    require_writable_file,
    require_writable_folder,
    write_new,
)


def refused(code: int, path: str | None = "out/a") -> str:
    shown = user_error(OSError(code, os.strerror(code), path))
    assert shown is not None
    assert shown.exit_code == 2
    return str(shown)


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "trtpipe"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / ".cache" / "trtpipe"


def test_without_a_home_the_user_has_no_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a user id that no password file has, in a container."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(InputError, match=r"^HOME: must name a folder.*Set HOME or XDG_CACHE_HOME\.$"):
        cache_folder()


def test_a_refusal_is_its_path_the_reason_and_a_next_step() -> None:
    assert refused(errno.ENOSPC) == ("out/a: no space left on the disk. Free some space, or choose another place.")
    assert refused(errno.EROFS) == "out/a: the file system is read-only. Choose another place, or mount it writable."
    assert refused(errno.ENAMETOOLONG) == "out/a: the name is too long for the file system. Choose a shorter one."
    assert refused(errno.EMFILE, None) == ("too many open files. Raise the limit (`ulimit -n 4096`).")
    assert refused(errno.ENODEV) == "out/a: no such device. Check the path."
    assert str(user_error(FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"))) == (
        "no such file or folder (No usable temporary directory found in ['/tmp']). Check the path."
    )
    assert str(user_error(MemoryError())) == (
        "out of memory. Use a machine with more memory; in a job, a smaller batch_size or fewer workers."
    )


@pytest.mark.parametrize("code", sorted(errno.errorcode), ids=errno.errorcode.__getitem__)
def test_every_refusal_that_names_a_file_is_a_message(code: int) -> None:
    text = refused(code)
    assert text.startswith("out/a: ")
    assert text.endswith(".")
    assert (user_error(OSError(code, os.strerror(code))) is None) == (code not in _REFUSED)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.EPERM, "the operation is not permitted. Change its permissions, or choose another place."),
        (errno.EISDIR, "is a folder, not a file. Give the path of a file."),
        (errno.ENOTEMPTY, "the folder is not empty. Remove it, or choose another name."),
        (errno.EEXIST, "exists already. Remove it, or choose another name."),
        (errno.ESTALE, "the network file system has lost it. Mount it again."),
    ],
)
def test_what_a_refusal_says(code: int, text: str) -> None:
    assert refused(code) == f"out/a: {text}"


def test_what_is_no_refusal_stays_a_bug() -> None:
    for bug in (ValueError("x"), OSError("libx.so: cannot open"), KeyError("a"), ModuleNotFoundError("x")):
        assert user_error(bug) is None
    assert str(user_error(CalibError("a: must be b."))) == "a: must be b."
    assert user_error(CalibCancelled("stopped")).exit_code == 130  # type: ignore[union-attr]
    assert str(user_error(RuntimeError("Symlink loop from '/a/b'"))) == (
        "/a/b: symbolic links lead in a circle. Repair the links."
    )
    assert str(user_error(ValueError("embedded null byte"))) == (
        "a path must not hold a NUL character (\\0). Check the paths of the command and of the job."
    )
    mine = InputError("x")
    assert user_error(mine) is mine


@pytest.mark.parametrize(
    ("raised", "named"),
    [
        (None, "{d}/a.json"),
        ("{d}/.a.json.77.part", "{d}/a.json"),
        ("{d}/.a.json.trtpipe-new-1/model.engine", "{d}/a.json"),
        ("{d}/a.json", "{d}/a.json"),
        ("{d}/photos/1.png", "{d}/photos/1.png"),
        ("{d}/a.json-journal", "{d}/a.json"),
        ("{d}/a.jsonld", "{d}/a.jsonld"),
        ("{d}/a.json_of_another/x", "{d}/a.json_of_another/x"),
        ("{d}/sub/.a.json.77.part", "{d}/sub/.a.json.77.part"),
    ],
)
def test_naming_names_what_the_user_gave(raised: str | None, named: str, tmp_path: Path) -> None:
    name = None if raised is None else raised.format(d=tmp_path)
    with pytest.raises(OSError, match="No space left") as error, naming(tmp_path / "a.json"):
        raise OSError(errno.ENOSPC, "No space left on device", name)
    assert error.value.filename == named.format(d=tmp_path)
    assert str(error.value) == f"[Errno 28] No space left on device: '{named.format(d=tmp_path)}'"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("database or disk is full", errno.ENOSPC),
        ("attempt to write a readonly database", errno.EACCES),  # the file; of a file system see below
        ("disk I/O error", errno.EIO),
        ("unable to open database file", errno.EACCES),
    ],
)
def test_sqlites_refusals_are_the_systems(text: str, code: int, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(code)) as error, naming_database(tmp_path / "h.sqlite"):
        raise sqlite3.OperationalError(text)
    assert (error.value.errno, error.value.filename) == (code, str(tmp_path / "h.sqlite"))
    with pytest.raises(sqlite3.OperationalError), naming_database(tmp_path / "h.sqlite"):
        raise sqlite3.OperationalError("no such table: runs")


@pytest.mark.parametrize(("flag", "code"), [(os.ST_RDONLY, errno.EROFS), (0, errno.EACCES)])
def test_a_file_that_may_not_be_written_is_told_from_a_file_system(
    flag: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flag))
    with pytest.raises(OSError, match=os.strerror(code)), naming_database(tmp_path / "h.sqlite"):
        raise sqlite3.OperationalError("attempt to write a readonly database")


def test_an_io_error_of_a_full_disk_is_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for left, code in ((63, errno.ENOSPC), (64, errno.EIO)):
        monkeypatch.setattr(os, "statvfs", lambda _, left=left: SimpleNamespace(f_bavail=left, f_frsize=4096))
        with pytest.raises(OSError, match=os.strerror(code)), naming_database(tmp_path / "h.sqlite"):
            raise sqlite3.OperationalError("disk I/O error")


def mapped(folder: Path) -> list[str]:
    """Files below `folder` that this process has mapped into its memory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def test_no_file_of_a_database_is_mapped(tmp_path: Path) -> None:
    """A mapped page that a full disk has no block for ends the process (SIGBUS), whatever it does about errors."""
    live, left = tmp_path / "live.sqlite", tmp_path / "left.sqlite"
    before = sqlite3.connect(live, isolation_level=None)
    before.execute("PRAGMA journal_mode=WAL")
    before.execute("CREATE TABLE t (x)")
    before.execute("INSERT INTO t VALUES (7)")
    assert mapped(live)
    for end in ("", "-wal"):  # as a killed process leaves them
        shutil.copy(f"{live}{end}", f"{left}{end}")
    for path in (left, tmp_path / "new.sqlite"):
        one, other = open_database(path, 5), open_database(path, 5)
        one.execute("CREATE TABLE IF NOT EXISTS t (x)")
        assert other.execute("SELECT * FROM t").fetchall() == ([(7,)] if path == left else [])
        one.execute("INSERT INTO t VALUES (8)")
        assert other.execute("SELECT max(x) FROM t").fetchall() == [(8,)]
        assert mapped(path) == []
        assert sorted(p.name for p in tmp_path.glob(f"{path.name}*")) == [path.name]
        one.close()
        other.close()
    before.close()


def test_a_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("kept")
    require_writable_file(tmp_path / "there.json")
    require_writable_file(tmp_path / "a" / "b" / "c.json")
    require_writable_folder(tmp_path / "a" / "b")
    require_writable_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["there.json"]
    assert (tmp_path / "there.json").read_text() == "kept"


@pytest.mark.parametrize("knows_nameless", [True, False])
def test_no_other_process_sees_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_nameless: bool) -> None:
    """A bundle with a file more is refused: by who reads it at that moment, and by all once a probe's process died."""
    really_open, really_write, seen = os.open, os.write, []

    def opened(path: str | Path, flags: int, *rest: int) -> int:
        if not knows_nameless and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return really_open(path, flags, *rest)

    def written(descriptor: int, data: bytes) -> int:
        seen.append(list(tmp_path.rglob("*")))
        return really_write(descriptor, data)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", written)
    (tmp_path / "bundle").mkdir()
    for probe in (require_writable_folder, require_writable_file, require_place):
        probe(tmp_path / "bundle" if probe is not require_writable_file else tmp_path / "bundle" / "file")
    assert seen == [[tmp_path / "bundle"]] * 3


def test_a_place_for_a_bundle_is_probed_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle is moved into place: nothing is ever written into the one that is there."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    really_open, places = os.open, []
    monkeypatch.setattr(os, "open", lambda path, *rest: places.append(Path(path)) or really_open(path, *rest))
    require_place(bundle)
    assert places == [tmp_path]


def test_a_probe_finds_what_writing_would(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone" / "x")
    for probe, path, code in (
        (require_writable_folder, tmp_path / "file" / "x", errno.ENOTDIR),
        (require_writable_folder, tmp_path / "file", errno.ENOTDIR),
        (require_writable_file, tmp_path, errno.EISDIR),
        (require_writable_file, tmp_path / ("n" * 300), errno.ENAMETOOLONG),
        (require_writable_folder, tmp_path / ("n" * 240) / "x", errno.ENAMETOOLONG),
        (require_writable_folder, tmp_path / "circle" / "x", errno.ELOOP),
        (require_writable_file, tmp_path / "nowhere" / "x", errno.ENOENT),
        (require_writable_file, Path("/proc/x.json"), errno.ENOENT),
    ):
        with pytest.raises(OSError, match=os.strerror(code)) as error:
            probe(path)
        assert (error.value.errno, error.value.filename) == (code, str(path)), path
        assert str(error.value) == f"[Errno {code}] {os.strerror(code)}: {str(path)!r}"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("ImportError('libfoo.so.9: cannot open')", "ImportError: libfoo.so.9: cannot open"),
        (
            "RuntimeError('operator torchvision::nms does not exist')",
            "RuntimeError: operator torchvision::nms does not exist",
        ),
        ("OSError('libcudart.so.13: undefined symbol')", "OSError: libcudart.so.13: undefined symbol"),
        ("AttributeError('_ARRAY_API not found')", "AttributeError: _ARRAY_API not found"),
        ("ModuleNotFoundError(\"No module named 'zebra'\", name='zebra')", ""),  # none that trtpipe names
    ],
)
@pytest.mark.parametrize("where", ["", ".inner.part"])
def test_a_package_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, said: str, where: str
) -> None:
    """Whatever a package raises while it is imported, wherever in it, names the package and what repairs it."""
    name = tmp_path.name  # another for each case: a part that was imported is kept
    folder = tmp_path / name / "inner"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "part.py").write_text(f"raise {raised}\n")
    (tmp_path / name / "__init__.py").write_text(f"import {name}.inner.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    ours: dict[str, object] = {"__name__": "trtpipe.runtime.session"}
    exec("def opened(name):\n    import importlib\n    return importlib.import_module(name)\n", ours)
    with pytest.raises(Exception) as error:  # noqa: PT011  # each case raises its own
        ours["opened"](name + where)  # type: ignore[operator]
    shown = user_error(error.value)
    assert isinstance(shown, MissingError)
    damaged = (
        f"{name} is installed and cannot be imported ({said}). It is damaged, or does not fit the packages "
        f"that it needs. Run: pip install --force-reinstall {name}"
    )
    lacking = f"{name} cannot be imported, as zebra is not installed. Run: pip install zebra"
    assert str(shown) == (damaged if said else lacking)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EDQUOT, "/a: the disk quota is used up. Free some space, or choose another place."),
        (errno.ENFILE, "/a: too many open files on this machine. End other programs."),
        (errno.EIO, "/a: input/output error of the disk. Look at the system's log (`dmesg`), or choose another place."),
        (errno.EBUSY, "/a: is in use by another program. End that program, or choose another place."),
        (errno.ETXTBSY, "/a: is in use by another program. End that program, or choose another place."),
        (errno.ESTALE, "/a: the network file system has lost it. Mount it again."),
        (errno.EAGAIN, "/a: no more processes or threads can be started. Raise `ulimit -u`."),
    ],
)
def test_what_seldom_happens_is_said_in_words_too(code: int, said: str) -> None:
    assert str(user_error(OSError(code, os.strerror(code), "/a"))) == said


def test_a_folder_in_the_place_of_a_database_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").mkdir()
    with pytest.raises(IsADirectoryError), naming_database(tmp_path / "history.sqlite"):
        open_database(tmp_path / "history.sqlite", 1.0)


@pytest.mark.parametrize("taken", ["file", "link", "dangling"])
def test_a_new_file_goes_into_nothing_that_is_there(tmp_path: Path, taken: str) -> None:
    path, other = tmp_path / "key", tmp_path / "other"
    if taken != "dangling":
        other.write_bytes(b"kept")
    if taken == "file":
        other.rename(path)
    else:
        path.symlink_to(other)
    with pytest.raises(FileExistsError):
        write_new(path, b"secret", mode=0o600)
    assert path.is_symlink() or path.read_bytes() == b"kept"
    assert not other.exists() or other.read_bytes() == b"kept"


def test_a_new_file_that_cannot_be_written_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    write_new(path, b"secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()

    def full(*_: object) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        write_new(path, b"secret", mode=0o600)
    assert not path.exists()

"""What the job's code reads is recorded, whichever way it reads it."""

import contextlib
import multiprocessing
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import matplotlib.font_manager
import numpy as np
import pytest
import torch
import torchvision.io  # noqa: F401  registers torch.ops.image

from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.paths import is_own, path_of
from trtpipe.pipeline.cache.reads import STARTED_IN, Read, Reads, recall, remember
from trtpipe.pipeline.cache.recorder import Recorder
from trtpipe.pipeline.cache.store import Cache

SQL = "import sqlite3; sqlite3.connect(name).execute('pragma user_version').fetchone()"
#: Ways to read the file `name`, each as a statement.
WAYS = {
    "open": "open(name).close()",
    "open bytes": "open(name.encode(), 'rb').close()",
    "pathlib": "import pathlib; pathlib.Path(name).read_bytes()",
    "os.open": "import os; os.close(os.open(name, os.O_RDONLY))",
    "io.FileIO": "import io; io.FileIO(name).close()",
    "mmap": "import mmap; f = open(name, 'rb'); mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ).close(); f.close()",
    "np.load": "import numpy; numpy.load(name)",
    "np.fromfile": "import numpy; numpy.fromfile(name, 'u1')",
    "np.memmap": "import numpy; numpy.memmap(name, 'u1', 'r')",
    "np.loadtxt": "import numpy; numpy.loadtxt(name)",
    "sqlite": SQL,
    "sqlite URI": SQL.replace("(name)", "(f'file:{name}?mode=ro', uri=True)"),
    "dir_fd": "import os; d = os.open(os.path.dirname(name), os.O_RDONLY);"
    "os.close(os.open(os.path.basename(name), os.O_RDONLY, dir_fd=d)); os.close(d)",
    "zipimport": "import sys, zipimport; zipimport.zipimporter(name).load_module('inside')",
    "font": "from PIL import ImageFont; ImageFont.truetype(name)",
    "PIL": "from PIL import Image; Image.open(name).load()",
    "torch.load": "import torch; torch.load(name, weights_only=True)",
    "torch.load mmap": "import torch; torch.load(name, weights_only=True, mmap=True)",
    "torch.from_file": "import torch; torch.from_file(name, size=4, dtype=torch.uint8)",
    "UntypedStorage": "import torch; torch.UntypedStorage.from_file(name, False, 4)",
    "torch.jit.load": "import torch; torch.jit.load(name)",
    "safe_open": "from safetensors import safe_open; safe_open(name, 'np').keys()",
    "load_file": "from safetensors.torch import load_file; load_file(name)",
    "numpy load_file": "from safetensors.numpy import load_file; load_file(name)",
    "read_image": "from torchvision.io import read_image; read_image(name)",
    "read_file": "from torchvision.io import read_file; read_file(name)",
    "decode_image": "from torchvision.io import decode_image; decode_image(name)",
    "operator": "import torch, torchvision; torch.ops.image.read_file(name)",
    "overload": "import torch, torchvision; torch.ops.image.read_file.default(filename=name)",
    "packet of before": "read_file(name)",
    "ImageFolder": "from torchvision.datasets import ImageFolder; import os;"
    "ImageFolder(os.path.dirname(os.path.dirname(name)))[0]",
    "thread": "import threading; t = threading.Thread(target=lambda: open(name).close()); t.start(); t.join()",
    "fork": "import os; p = os.fork() or (open(name).close(), os._exit(0)); os.waitpid(p, 0)",
    "shutil": "import shutil; shutil.copyfile(name, name + '.copy')",
    "zipfile": "import zipfile; zipfile.is_zipfile(name)",
    "r+": "open(name, 'r+').close()",
    "os.open for both": "import os; os.close(os.open(name, os.O_RDWR))",
    "json": "import json; json.load(open(name))",
    "sqlite ATTACH": "import sqlite3; sqlite3.connect(':memory:').execute('attach ? as other', (name,))",
    "sqlite ATTACH URI": "import sqlite3; c = sqlite3.connect('file::memory:', uri=True);"
    "c.execute(f\"/* it's */ ATTACH DATABASE 'file:{name}?mode=ro' AS other\")",
    "colour profile": "from PIL import ImageCms; ImageCms.getOpenProfile(name)",
    "between colour profiles": "from PIL import Image, ImageCms;"
    "ImageCms.profileToProfile(Image.new('RGB', (4, 4)), name, ImageCms.createProfile('sRGB'))",
    "certificates": "import ssl; ssl.create_default_context(cafile=name)",
    "certificates in a folder": "import os, ssl; ssl.create_default_context(capath=os.path.dirname(name))",
    "certificates of a context": "import ssl; ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(name)",
}
#: A certificate, whose key nobody has any more.
CERTIFICATE = """
-----BEGIN CERTIFICATE-----
MIIBeDCCAR+gAwIBAgIUWNrWzSpFNGraWsmdXlT8e5dfASowCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGbm9ib2R5MCAXDTI2MTEyNTIyMjcyOVoYDzIxMjYxMTAxMjIy
NzI5WjARMQ8wDQYDVQQDDAZub2JvZHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AAR2t5PVrAND24WTS1cVw4CK26v/H7KLUG/NkucHXpTTgOJjFu9Y9U15TA8JUqQs
+9fVTjdKPwl+IsiN+n53LDNno1MwUTAdBgNVHQ4EFgQUXB8gl5Hmfel2U/fg115S
nWxa5m4wHwYDVR0jBBgwFoAUXB8gl5Hmfel2U/fg115SnWxa5m4wDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNHADBEAiA+u1QCt8/aomujljFgwy5zn+SEZjls
DaM3yeykNj6TqQIgRJGwAN7F4RibjzpIp7BCzBsDUypuyT/n1qyUKrcjfk8=
-----END CERTIFICATE-----
"""


def make_file(way, folder):
    """A file that can be read that way."""
    import torch
    from PIL import Image, ImageCms
    from safetensors.numpy import save_file

    folder = folder / "deep" / "class"
    folder.mkdir(parents=True)
    path = folder / "file.bin"
    if way in ("PIL", "read_image", "decode_image", "ImageFolder"):
        path = folder / "file.png"
        Image.new("L", (4, 4)).save(path)
    elif way.startswith("torch.load"):
        torch.save({"x": torch.ones(3)}, path)
    elif way in ("safe_open", "load_file", "numpy load_file"):
        save_file({"x": np.ones(3, np.float32)}, path)
    elif way == "np.load":
        with path.open("wb") as stream:
            np.save(stream, np.ones(3))
    elif way == "torch.jit.load":
        torch.jit.script(torch.nn.ReLU()).save(str(path))
    elif way.startswith("sqlite"):
        path.touch()
    elif "profile" in way:
        path.write_bytes(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    elif way.startswith("certificates"):
        path.write_text(CERTIFICATE)
    elif way == "zipimport":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("inside.py", "")
    elif way == "font":
        shutil.copy(matplotlib.font_manager.findfont("DejaVu Sans"), path)
    else:
        path.write_text("123456")
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_read_a_file_is_recorded(way, tmp_path):
    path = make_file(way, tmp_path)
    recorder = Recorder(tmp_path)
    with recorder:
        exec(WAYS[way], {"name": str(path), "read_file": torch.ops.image.read_file})
    exec("open(name).close()", {"name": str(make_file("open", tmp_path / "after"))})
    found = recorder.reads
    recorder.close()
    assert {i for i in found.items if i.kind == "file"} >= {Read("file", os.path.relpath(path, tmp_path))}
    assert all(i.path.startswith("deep") for i in found.items)  # and nothing by a wrong name
    assert not [i for i in found.items if "after" in i.path or "site-packages" in i.path]


@pytest.mark.parametrize("way", ["os.listdir(name)", "list(os.scandir(name))", "list(os.walk(name))",
                                 "list(__import__('pathlib').Path(name).iterdir())",
                                 "__import__('glob').glob(name + '/*')"])  # fmt: skip
def test_every_way_to_list_a_folder_is_recorded(way, tmp_path):
    (tmp_path / "data").mkdir()
    recorder = Recorder(tmp_path)
    with recorder:
        eval(way, {"name": str(tmp_path / "data"), "os": os})
    assert recorder.reads.items == (Read("folder", "data"),)
    recorder.close()


@pytest.mark.parametrize(
    "package", ["importlib._bootstrap_external", "importlib.metadata", "importlib_metadata", "mine"]
)
def test_a_search_for_modules_and_packages_lists_no_data(package, tmp_path):
    """importlib_metadata's finder takes part in each `importlib.metadata.version` once anything imported it."""
    (tmp_path / "data").mkdir()
    scope = {"__name__": package, "os": os}
    exec("def children(path):\n    return os.listdir(path)", scope)
    recorder = Recorder(tmp_path)
    with recorder:
        scope["children"](tmp_path / "data")
    assert recorder.reads.items == ((Read("folder", "data"),) if package == "mine" else ())
    recorder.close()


@pytest.mark.parametrize("way", ["os.scandir(fd).close()", "os.listdir(fd)", "list(os.fwalk('.', dir_fd=fd))"])
def test_a_folder_listed_by_its_descriptor_is_recorded(way, tmp_path):
    (tmp_path / "data").mkdir()
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    recorder = Recorder(tmp_path)
    with recorder:
        eval(way, {"fd": fd, "os": os})
    os.close(fd)
    assert Read("folder", "data") in recorder.reads.items
    recorder.close()


PRESENCE = ["os.path.exists(path)", "os.path.isfile(path)", "os.path.isdir(path)", "os.path.lexists(path)",
            "os.path.islink(path)", "path.exists()", "path.is_file()", "path.is_dir()",
            "os.path.realpath(path)", "list(path.glob('*.pt'))"]  # fmt: skip
STATUS = ["os.stat(path)", "os.lstat(path)", "os.path.getsize(path)", "os.path.getmtime(path)", "path.stat()",
          "os.stat(path.name, dir_fd=fd)", "os.fstat(os.open(path, 0)) if path.exists() else os.stat(path)",
          "[e.stat() for e in os.scandir(path.parent)] or os.stat(path)",
          "max(os.scandir(fd), key=lambda e: e.stat().st_mtime, default=None) or os.stat(path)"]  # fmt: skip


@pytest.mark.parametrize(("way", "kind"), [*((w, "presence") for w in PRESENCE), *((w, "status") for w in STATUS)])
@pytest.mark.parametrize("there", [True, False])
def test_every_question_for_a_path_is_recorded_and_its_answer_watched(way, kind, there, tmp_path):
    """A checkpoint that is taken if it exists, or because it is the newest, may never have been opened."""
    path = tmp_path / "last.pt"
    if there:
        path.write_text("1")
    fd = os.open(tmp_path, os.O_RDONLY)
    recorder = Recorder(tmp_path)
    with recorder, contextlib.suppress(FileNotFoundError):
        eval(way, {"path": path, "os": os, "fd": fd})
    os.close(fd)
    assert Read(kind, "last.pt") in recorder.reads.items
    recorder.close()

    def value():
        return Read(kind, "last.pt").value(tmp_path, Digests())

    before = value()
    assert (before == "absent") != there
    path.write_text("1")
    os.utime(path, (1, 1))
    assert (value() == before) == (there and kind == "presence")
    before = value()
    path.unlink()
    path.mkdir()
    assert value() != before


@pytest.mark.parametrize(
    ("way", "there"),
    [
        ("os.access(path, os.X_OK)", True),
        ("os.access(path, os.X_OK)", False),
        ("os.access(path.name, os.R_OK, dir_fd=fd)", True),
        ("os.access(path.name, os.R_OK, dir_fd=fd)", False),
        ("shutil.which('tool', path=folder)", True),
    ],
)
def test_what_may_be_done_with_a_file_is_watched_where_that_is_asked(way, there, tmp_path):
    path = tmp_path / "tool"
    if there:
        path.write_text("1")
        path.chmod(0o644)
    fd = os.open(tmp_path, os.O_RDONLY)
    recorder = Recorder(tmp_path)
    with recorder:
        eval(way, {"path": path, "os": os, "shutil": shutil, "folder": str(tmp_path), "fd": fd})
    os.close(fd)
    (read,) = {i for i in recorder.reads.items if i.path == "tool"} - {Read("presence", "tool")}
    recorder.close()
    before = read.value(tmp_path, Digests())
    assert (before == "absent") != there
    path.write_text("2")
    path.chmod(0o755)
    may_run = read.value(tmp_path, Digests())
    assert may_run != before
    path.write_text("3")
    os.utime(path, (1, 1))
    assert read.value(tmp_path, Digests()) == may_run


def test_the_owner_of_a_file_is_of_its_status(tmp_path):
    (tmp_path / "a").write_text("1")
    status = (tmp_path / "a").stat()
    assert Read("status", "a").value(tmp_path, Digests()).endswith(f" of {status.st_uid}:{status.st_gid}")


def test_entries_of_a_listing_are_what_they_were(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").touch()
    recorder = Recorder(tmp_path)
    with recorder:
        with os.scandir(tmp_path) as found:
            (entry,) = found
        assert (entry.name, os.fspath(entry), entry.is_dir()) == ("a", str(tmp_path / "a"), True)
        assert repr(entry) == "<DirEntry 'a'>"
        assert [files for _, _, files in os.walk(entry)] == [["x.png"]]
        os.scandir(entry).close()
    assert {r.kind for r in recorder.reads.items} == {"folder"}
    recorder.close()


def test_what_a_library_asks_and_what_the_code_itself_makes_are_no_questions(tmp_path):
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "x.png").touch()
    library = {}
    source = "import os\ndef find(path):\n    return os.path.exists(path)"
    exec(compile(source, os.path.join(os.path.dirname(pytest.__file__), "find.py"), "exec"), library)
    recorder = Recorder(tmp_path)
    with recorder:
        library["find"](tmp_path / "hub.pt")
        for made in (tmp_path / "made", tmp_path / "log.txt"):
            assert not made.exists()
        os.makedirs(tmp_path / "made")
        (tmp_path / "log.txt").write_text("1")
        assert Path(__file__).parent.exists()
        assert (tmp_path / ".." / tmp_path.name).resolve() == tmp_path  # asks for each folder above it
    assert recorder.reads.items == (Read("presence", str(Path(__file__).parent)),)
    recorder.close()
    assert os.stat in os.supports_dir_fd
    assert os.stat.__module__ == "posix"


def test_what_a_package_reads_while_it_is_imported_is_its_versions_matter(tmp_path, monkeypatch):
    """In a process that has imported it, it is not read again: two nights of one process must not differ by that."""
    packages = tmp_path / "site-packages"
    (packages / "reading").mkdir(parents=True)
    (packages / "reading" / "__init__.py").write_text(
        "from pathlib import Path\nfrom reading.deep import X\ndef later():\n    return Path('own.txt').read_text()\n"
    )
    (packages / "reading" / "deep.py").write_text(
        "from pathlib import Path\nX = Path('settings.txt').read_text(), __import__('os').listdir('.')\n"
    )
    for name in ("settings.txt", "own.txt"):
        (tmp_path / name).write_text("1")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(tmp_path)
    with recorder:
        import reading

        reading.later()
    assert recorder.reads.items == (Read("file", "own.txt"), STARTED_IN)
    recorder.close()


@pytest.mark.parametrize(
    "read", ["open('x.txt').close()", "os.listdir()", "os.path.exists('x.txt')", "os.stat('x.txt')"]
)
def test_what_is_named_from_the_current_folder_counts_with_that_folder(read, tmp_path, monkeypatch):
    """Elsewhere the same code reads another file; a path in full is the same everywhere."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    (tmp_path / "reads_here.py").write_text(f"import os\n{read}\n")
    monkeypatch.chdir(tmp_path / "one")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "reads_here", raising=False)
    recorder = Recorder(tmp_path)
    with recorder:
        import reads_here  # noqa: F401
    reads = recorder.reads
    recorder.close()
    assert STARTED_IN in reads.items
    with Digests(tmp_path / "d.sqlite") as digests:
        here = reads.values(tmp_path, digests)
        monkeypatch.chdir(tmp_path / "two")
        assert {n for n, v in reads.values(tmp_path, digests).items() if v != here[n]} == {"place ."}


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_process_that_is_not_forked_is_noted_and_a_forked_one_heard(method, tmp_path):
    (tmp_path / "list.txt").write_text("1")
    recorder = Recorder(tmp_path)
    with recorder:
        process = multiprocessing.get_context(method).Process(target=Path.read_text, args=(tmp_path / "list.txt",))
        process.start()
        process.join()
    said = f"the job's code started a process (multiprocessing, {method}): what that process read is not watched"
    assert recorder.reads.notes == (() if method == "fork" else (said,))
    assert recorder.reads.items == ((Read("file", "list.txt"),) if method == "fork" else ())
    recorder.close()


def test_what_is_only_written_and_scratch_files_are_not_read(tmp_path):
    recorder = Recorder(tmp_path)
    with recorder:
        for mode in ("w", "wb", "a", "x"):
            (tmp_path / f"{mode}.log").open(mode).close()
        scratch = tmp_path / "scratch"
        scratch.write_text("1")
        scratch.read_text()
        scratch.unlink()
        (tmp_path / "own").write_text("1")
        (tmp_path / "own").read_text()
    assert [i.path for i in recorder.reads.items] == ["own"]
    assert recorder.changed() == ()
    recorder.close()


SCRATCH = {
    "unzipped by a program": "subprocess.run([sys.executable, '-m', 'zipfile', '-e', data + '/a.zip', t], check=True)",
    "spawned": "os.waitpid(os.posix_spawn('/bin/cp', ['cp', data + '/v.txt', t + '/v.txt'], os.environ), 0)",
    "moved": "shutil.copy(data + '/v.txt', t + '/w.txt'); shutil.move(t + '/w.txt', t + '/v.txt')",
    "copied and replaced": "shutil.copy(data + '/v.txt', t + '/w.txt'); os.replace(t + '/w.txt', t + '/v.txt')",
    "hard link": "os.link(data + '/v.txt', t + '/v.txt')",
    "hard link beside a folder":
        "d = os.open(t, os.O_RDONLY); os.link(data + '/v.txt', 'v.txt', dst_dir_fd=d); os.close(d)",
    "symbolic link": "os.symlink(data + '/v.txt', t + '/v.txt')",
    "link to the folder": "os.symlink(data, t + '/all'); t += '/all'",
    "link to a link to the folder": "os.symlink(data, t + '/one'); os.symlink('one', t + '/all'); t += '/all'",
    "moved there and back": "os.rename(data + '/v.txt', t + '/v.txt')",
}  # fmt: skip


@pytest.mark.parametrize("how", SCRATCH)
def test_scratch_is_no_ingredient_and_what_it_was_made_of_is(how, tmp_path):
    """A build's temporary files are gone when it ends; what another name had a file by is the file."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "v.txt").write_text("1")
    with zipfile.ZipFile(data / "a.zip", "w") as archive:
        archive.writestr("v.txt", "1")
    back = "os.rename(t + '/v.txt', data + '/v.txt')" if how == "moved there and back" else ""
    code = f"""
import os, shutil, subprocess, sys, tempfile
with tempfile.TemporaryDirectory() as t:
    {SCRATCH[how]}
    with open(t + '/v.txt') as file:
        file.read()
    {back}
"""
    recorder = Recorder(tmp_path)
    with recorder:
        exec(code, {"data": str(data)})
    read = {i.path for i in recorder.reads.items if i.kind == "file"}
    seen_elsewhere = {"unzipped by a program": set(), "spawned": set()}
    assert read == seen_elsewhere.get(how, {"data/v.txt"})
    assert recorder.changed() == ()
    assert bool(recorder.reads.notes) == (how in seen_elsewhere)
    (data / "v.txt").write_text("22")
    assert recorder.changed() == (() if how in (*seen_elsewhere, "moved there and back") else (str(data / "v.txt"),))
    recorder.close()


def test_scratch_in_a_folder_behind_a_link_is_no_ingredient(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    time.sleep(0.02)
    recorder = Recorder(tmp_path)
    with recorder:
        path = tmp_path / "link" / "v.txt"
        subprocess.run([sys.executable, "-c", f"open({str(path)!r}, 'w').write('1')"], check=True)
        path.read_text()
        path.unlink()
    assert [i for i in recorder.reads.items if i.kind == "file"] == []
    assert recorder.changed() == ()
    recorder.close()


def test_an_input_that_is_gone_is_told_of(tmp_path):
    (tmp_path / "v.txt").write_text("1")
    time.sleep(0.02)
    recorder = Recorder(tmp_path)
    with recorder:
        (tmp_path / "v.txt").read_text()
    (tmp_path / "v.txt").unlink()
    assert recorder.changed() == (str(tmp_path / "v.txt"),)
    recorder.close()


def test_rotated_logs_are_not_read(tmp_path):
    for k in range(3):
        (tmp_path / f"log.{k}").write_text(str(k))
    recorder = Recorder(tmp_path)
    with recorder:
        for k in (2, 1, 0):
            (tmp_path / f"log.{k}").rename(tmp_path / f"log.{k + 1}")
        (tmp_path / "log.0").write_text("new")
    assert [i for i in recorder.reads.items if i.kind == "file"] == []
    assert recorder.changed() == ()
    recorder.close()


def test_rights_of_a_file_are_asked_for_by_stat(tmp_path):
    path = tmp_path / "v.txt"
    path.write_text("1")
    recorder = Recorder(tmp_path)
    with recorder:
        exec("import os; os.stat(path).st_mode & 0o111", {"path": str(path)})
    (read,) = (i for i in recorder.reads.items if i.kind == "status")
    with Digests() as digests:
        before = read.value(tmp_path, digests)
        path.chmod(0o755)
        assert read.value(tmp_path, digests) != before
    recorder.close()


def test_a_file_that_changes_after_it_was_read_is_told_of(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("1")
    recorder = Recorder(tmp_path)
    with recorder:
        path.read_text()
    assert recorder.changed() == ()
    path.write_text("22")
    assert recorder.changed() == (str(path),)
    recorder.close()


def test_what_is_known_anyhow_is_not_recorded_again(tmp_path):
    for name in ("w.bin", "data/a", "database"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    recorder = Recorder(tmp_path, [tmp_path / "w.bin", tmp_path / "data"])
    with recorder:
        for name in ("w.bin", "data/a", "database"):
            (tmp_path / name).read_text()
    assert [i.path for i in recorder.reads.items] == ["database"]
    recorder.close()


def test_connections_and_programs_are_noted(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        recorder = Recorder(tmp_path)
        with recorder:
            socket.create_connection(("127.0.0.1", port)).close()
            subprocess.run([sys.executable, "-c", ""], check=True)
    assert recorder.reads.notes == (
        f"the job's code opened a network connection (127.0.0.1:{port}): what came over it is not watched",
        f"the job's code ran {os.path.basename(sys.executable)}: what that program read is not watched",
    )
    recorder.close()


def test_what_cannot_be_read_of_an_event_is_noted(tmp_path):
    """It may have been anything; the code that it comes from goes on."""
    recorder = Recorder(tmp_path)
    with recorder:
        sys.audit("open", "list.txt")  # without the mode and flags that Python gives it
        with contextlib.suppress(OSError):
            os.stat("list.txt", dir_fd=1 << 20)
    assert recorder.reads.notes == (
        "the job's code ran something whose event open could not be read: what that program read is not watched",
        "the job's code ran something whose question for 'list.txt' could not be read: what that program read is not "
        "watched",
    )
    recorder.close()


def test_nothing_is_recorded_outside_and_nested_parts_are_told_apart(tmp_path):
    for name in "abcd":
        (tmp_path / name).touch()
    recorder = Recorder(tmp_path)
    with recorder:
        open(tmp_path / "a").close()
        with recorder.only() as part, recorder:
            open(tmp_path / "b").close()
        open(tmp_path / "c").close()
    open(tmp_path / "d").close()
    assert [i.path for i in part.reads.items] == ["b"]
    assert [i.path for i in recorder.reads.items] == ["a", "b", "c"]
    recorder.close()


def test_reads_survive_the_cache_and_are_found_where_everything_is_forced(tmp_path):
    reads = Reads((Read("file", "a"), Read("folder", "/x")), ("a note",))
    remember(Cache(tmp_path), "k" * 64, reads, tmp_path)
    remember(Cache(tmp_path), "k" * 64, reads | Reads((Read("file", "b"),)), tmp_path)
    (again,) = recall(Cache(tmp_path, force=True), "k" * 64, tmp_path)
    assert again == Reads((Read("file", "a"), Read("file", "b"), Read("folder", "/x")), ("a note",))
    assert recall(Cache(tmp_path), "l" * 64, tmp_path) == (Reads(),)


@pytest.mark.parametrize(
    ("path", "fits"),
    [
        ("inside.txt", True),
        ("/data/all/x.txt", True),
        ("/home/one/w.txt", False),  # beside the job's folder: from the other one it is another file
        ("/home/one/jobs/x.txt", False),
        ("/home/shared/x.txt", True),
    ],
)
def test_a_record_of_another_folder_counts_where_its_files_are_the_same_from_there(
    path: str, fits: bool, tmp_path: Path
) -> None:
    """A job beside another checkout's was taken for built: its code read a file of its own by the same words."""
    one, other = Path("/home/one/jobs"), Path("/home/other/jobs")
    cache, key, reads = Cache(tmp_path), "k" * 64, Reads((Read("file", path),))
    remember(cache, key, reads, one, ended=True)
    assert recall(cache, key, one) == (reads,)
    assert recall(cache, key, other) == ((reads,) if fits else (Reads(),))
    own = Reads((Read("file", "/home/other/w.txt"),))
    remember(cache, key, own, other, ended=True)
    assert recall(cache, key, one)[-1] == reads
    assert own not in recall(cache, key, one)


def test_what_runs_that_ended_read_is_kept_beside_what_the_last_one_read(tmp_path):
    """Two checkouts of a job have one record: the code reads other files in each."""
    of = [Reads((Read("file", name),)) for name in "abc"]
    cache, key = Cache(tmp_path), "k" * 64
    remember(cache, key, of[0], tmp_path, ended=True)
    remember(cache, key, of[1], tmp_path, ended=True)
    assert recall(cache, key, tmp_path) == (of[1], of[0])
    remember(cache, key, of[2], tmp_path)
    assert recall(cache, key, tmp_path) == (of[2], of[1], of[0])
    remember(cache, key, of[0], tmp_path, ended=True)
    assert recall(cache, key, tmp_path) == (of[0], of[1])
    for k in range(20):
        remember(cache, key, Reads((Read("file", str(k)),)), tmp_path, ended=True)
    assert [r.items[0].path for r in recall(cache, key, tmp_path)] == [str(k) for k in range(19, 11, -1)]


def test_a_value_tells_content_place_and_absence_apart(tmp_path):
    def value(kind, path):
        return Read(kind, path).value(tmp_path, Digests())

    (tmp_path / "v1").write_text("same")
    (tmp_path / "v2").write_text("same")
    (tmp_path / "link").symlink_to("v1")
    seen = [value("file", "link")]
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("v2")  # the same bytes, but the code may ask where it leads
    seen.append(value("file", "link"))
    (tmp_path / "link").unlink()
    seen += [value("file", "link"), value("file", "v1"), value("folder", ".")]
    (tmp_path / "new").touch()
    seen += [value("folder", "."), value("folder", "nowhere")]
    (tmp_path / "fifo").mkdir()
    seen.append(value("file", "fifo"))
    assert seen[2] == seen[6] == "absent"
    assert len(set(seen)) == 7


def test_what_a_folder_holds_is_told_apart_by_kind(tmp_path):
    """`is_dir` and its like of an entry are answered by the listing itself, without another question."""
    seen = set()
    makers = (Path.touch, Path.mkdir, *(lambda p, to=to: p.symlink_to(to) for to in (__file__, tmp_path, "nowhere")))
    for make in makers:
        entry = tmp_path / "data" / "entry"
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        entry.parent.mkdir()
        make(entry)
        seen.add(Read("folder", "data").value(tmp_path, Digests()))
    assert len(seen) == len(makers)


def test_threads_of_the_process_itself_do_not_confuse_it(tmp_path):
    recorder, stop = Recorder(tmp_path), threading.Event()
    (tmp_path / "a").touch()
    threads = [threading.Thread(target=lambda: [open(tmp_path / "a").close() for _ in range(200)]) for _ in range(4)]
    with recorder:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    stop.set()
    assert [i.path for i in recorder.reads.items] == ["a"]
    recorder.close()


def test_a_file_that_is_made_by_opening_it_was_not_read(tmp_path):
    """As temporary files are, which must not be what a night looks for."""
    recorder = Recorder(tmp_path)
    with recorder:
        exec("import tempfile, os; d, p = tempfile.mkstemp(dir=name); os.close(d)", {"name": str(tmp_path)})
        exec("import os; os.close(os.open(name, os.O_RDWR | os.O_CREAT))", {"name": str(tmp_path / "lock")})
    assert [i for i in recorder.reads.items if i.kind == "file"] == []
    recorder.close()


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/home/me/ml-packages/net.py", True), ("/home/me/my-packages/data/w.pt", True),
        ("/dev/shm/w.pt", True), ("/run/media/me/disk/net.py", True), ("/run/user/1000/w.pt", True),
        ("/home/me/v/lib/python3.11/site-packages/timm/net.py", False), ("/x/dist-packages/net.py", False),
        ("/dev/urandom", False), ("/run/lock/x", False), ("/proc/self/maps", False), ("/etc/hosts", False),
        ("/dev/shmoo", False), ("/opt/lib/tool-1.0.dist-info/entry_points.txt", True), ("/opt/t.egg-info", True),
        ("/home/me/dist-info/w.pt", True), ("/home/me/a.dist-information", True),
    ],
)  # fmt: skip
def test_whose_a_path_is(path, own):
    """RAM disks, and the drives that a desktop mounts, hold users' checkpoints."""
    assert is_own(path) is own
    assert (path_of(path) is not None) is own


@pytest.mark.parametrize("installed", [True, False])
def test_metadata_is_a_packages_where_something_was_installed(tmp_path, installed):
    """Any code that asks for entry points reads those of all packages; a folder with such a name may be the user's."""
    folder = tmp_path / "tool-1.0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text("[models]\nnet = net:net\n")
    if installed:
        (folder / "RECORD").touch()
    recorder = Recorder(tmp_path)
    with recorder:
        (folder / "entry_points.txt").read_text()
    read = [i.path for i in recorder.reads.items if i.kind == "file"]
    assert read == ([] if installed else ["tool-1.0.dist-info/entry_points.txt"])
    recorder.close()


def test_a_record_that_cannot_be_written_is_told_of_and_no_file_that_the_code_reads(tmp_path):
    path = tmp_path / "v.txt"
    path.write_text("1")
    recorder = Recorder(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with recorder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            assert [path.read_text() for _ in range(100)] == ["1"] * 100
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for asked in (lambda: recorder.reads, recorder.changed, lambda: recorder.written):
        with pytest.raises(OSError, match='File too large: "the record of what the job\'s code reads"'):
            asked()
    recorder.close()

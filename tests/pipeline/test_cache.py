import dataclasses
import errno
import json
import multiprocessing
import os
import sqlite3
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtpipe.errors import Cancelled, InputError, MissingError
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.keys import StageKeys
from trtpipe.pipeline.cache.recorder import Recorder
from trtpipe.pipeline.cache.remote import DamagedEntry, Store
from trtpipe.pipeline.cache.store import Busy, Cache, parse_bytes
from trtpipe.pipeline.cached import CachedResults, Memory

KEY = "a" * 64


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def test_what_was_put_is_got(cache):
    assert cache.get("graph", KEY) is None
    cache.put("graph", KEY, {"opset": 20}, {"model.onnx": b"abc"})
    entry = cache.get("graph", KEY)
    assert entry.facts == {"opset": 20}
    assert entry.read("model.onnx") == b"abc"
    assert cache.get("engine", KEY) is None
    assert cache.get("graph", "b" * 64) is None


def test_a_second_put_leaves_the_first_entry(cache):
    cache.put("graph", KEY, {}, {"f": b"first"})
    cache.put("graph", KEY, {}, {"f": b"other"})
    assert cache.get("graph", KEY).read("f") == b"first"
    assert list((cache.root / "new").iterdir()) == []


def test_force_finds_nothing_and_replaces(tmp_path):
    Cache(tmp_path).put("graph", KEY, {}, {"f": b"first"})
    forced = Cache(tmp_path, force=True)
    assert forced.get("graph", KEY) is None
    forced.put("graph", KEY, {}, {"f": b"other"})
    assert Cache(tmp_path).get("graph", KEY).read("f") == b"other"


@pytest.mark.parametrize("data", [b"", b"abd", b"abcd"])
def test_a_changed_file_is_not_read(cache, data):
    entry = cache.put("graph", KEY, {}, {"f": b"abc"})
    (entry.path / "f").write_bytes(data)
    with pytest.raises(DamagedEntry):
        entry.read("f")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema": 1, "kind": "graph", "key": "x", "facts": {}, "files": {}}']
)
def test_a_broken_head_is_no_entry_and_is_replaced(cache, text):
    entry = cache.put("graph", KEY, {}, {"f": b"abc"})
    (entry.path / "entry.json").write_text(text)
    assert cache.get("graph", KEY) is None
    cache.put("graph", KEY, {}, {"f": b"new"})
    assert cache.get("graph", KEY).read("f") == b"new"


def test_a_names_file_must_be_plain(cache):
    with pytest.raises(InputError, match=r"cache: a file's name must be plain \(got '../x'\)\."):
        cache.put("graph", KEY, {}, {"../x": b""})
    assert list((cache.root / "new").iterdir()) == []


def test_trim_evicts_what_was_used_longest_ago_and_no_record(cache):
    for k, letter in enumerate("abcd"):
        entry = cache.put("graph", letter * 64, {}, {"f": bytes(1000)})
        os.utime(entry.path / "entry.json", (k, k))
    record = cache.put("built", KEY, {"much": "x" * 1000}, {})
    os.utime(record.path / "entry.json", (0, 0))
    assert cache.get("graph", "a" * 64) is not None  # used now: b is the oldest
    total = sum(size for _, size, _ in cache.entries())
    assert cache.trim(total) == ()
    assert cache.trim(total - 1) == ("graph/" + "b" * 64,)
    assert cache.trim(0) == tuple(f"graph/{letter * 64}" for letter in "cda")
    assert cache.get("built", KEY) is not None


def test_trim_leaves_what_another_process_holds(cache):
    cache.put("graph", KEY, {}, {"f": bytes(1000)})
    with cache.lock("graph", KEY):
        other = threading.Thread(target=lambda: found.append(Cache(cache.root).trim(0)))
        found = []
        other.start()
        other.join()
    assert found == [()]


def test_trim_removes_what_killed_writers_left(cache):
    leftover = cache.root / "new" / "123-abc"
    leftover.mkdir()
    os.utime(leftover, (0, 0))
    young = cache.root / "new" / "124-abc"
    young.mkdir()
    cache.trim(10**9)
    assert list((cache.root / "new").iterdir()) == [young]


def _hold(root, ready):
    with Cache(root).lock("graph", KEY):
        ready.set()
        time.sleep(60)


def test_one_process_at_a_time_and_a_killed_one_lets_go(cache):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(cache.root, ready))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(Busy), cache.lock("graph", KEY, wait=False):
        pass
    told = []
    stopper = Cache(cache.root, cancelled=lambda: bool(told))
    waits = pytest.raises(Cancelled, match="interrupted while another process builds the same")
    with waits, stopper.lock("graph", KEY, lambda: told.append(1)):
        pass
    holder.kill()
    holder.join()
    with cache.lock("graph", KEY, wait=False):
        pass


def test_who_waits_for_another_process_is_told(cache):
    """And gets what that one made."""
    keys, notes = StageKeys(*[KEY] * len(dataclasses.fields(StageKeys))), []
    codec = SimpleNamespace(kind="graph", stage="graph", load=lambda entry: entry.read("model.onnx"))
    results = CachedResults(cache, keys, Memory(), SimpleNamespace(note=notes.append), Recorder(), lambda: keys)
    found = []
    other = threading.Thread(target=lambda: found.append(results.on_disk(codec, lambda: b"made twice")))
    with Cache(cache.root).lock("graph", KEY):
        other.start()
        while not notes:
            time.sleep(0.01)
        cache.put("graph", KEY, {}, {"model.onnx": b"made once"})
    other.join()
    assert notes == ["graph: another process is making the same; waiting for it"]
    assert found == [b"made once"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/x"):
        Cache(tmp_path / "file" / "x")


def test_sizes_are_read_as_people_write_them():
    assert [parse_bytes(t, "x") for t in ("20GB", "500 MB", "1.5k", "7", "2TB")] == [
        20 * 10**9, 5 * 10**8, 1500, 7, 2 * 10**12,
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"--cache-size: must be a size like 20GB \(got 'lots'\)\."):
        parse_bytes("lots", "--cache-size")


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_store_shares_entries_between_caches(tmp_path, scheme):
    url = f"{scheme}://{tmp_path}/store"
    Cache(tmp_path / "one", Store(url)).put("graph", KEY, {"opset": 20}, {"f": b"abc"})
    other = Cache(tmp_path / "two", Store(url))
    assert other.get("graph", KEY).read("f") == b"abc"
    assert Cache(tmp_path / "two").get("graph", KEY).facts == {"opset": 20}  # it is here now
    assert other.get("graph", "b" * 64) is None


def test_what_is_read_of_a_store_is_no_read_of_the_jobs_code(tmp_path):
    """It is asked while that code is recorded: a night built an unchanged job again, since an entry had been added."""
    store = Store(f"file://{tmp_path}/store")
    (tmp_path / "read").write_text("x")
    recorder = Recorder(tmp_path)
    with recorder:
        (tmp_path / "read").read_text()
        assert Cache(tmp_path / "one", store).get("graph", KEY) is None
        Cache(tmp_path / "one", store).put("graph", KEY, {}, {"f": b"abc"})
        assert Cache(tmp_path / "two", store).get("graph", KEY).read("f") == b"abc"
    names = {read.path for read in recorder.reads.items}
    recorder.close()
    assert "read" in {Path(name).name for name in names}
    assert [name for name in names if "store" in Path(name).parts] == []


def test_a_torn_or_damaged_entry_of_a_store_is_not_taken(tmp_path):
    store = Store(f"file://{tmp_path}/store")
    Cache(tmp_path / "one", store).put("graph", KEY, {}, {"f": b"abc"})
    folder = tmp_path / "store/graph" / KEY[:2] / KEY
    assert sorted(p.name for p in folder.iterdir()) == ["entry.json", "f"]
    (folder / "f").write_bytes(b"abd")
    assert Cache(tmp_path / "two", store).get("graph", KEY) is None
    (folder / "f").unlink()
    assert Cache(tmp_path / "two", store).get("graph", KEY) is None


@pytest.mark.parametrize("step", ["pipe_file", "mv"])
def test_a_store_that_is_full_keeps_nothing_half_written(tmp_path, monkeypatch, step):
    store = Store(f"file://{tmp_path}/store")
    content = {"f": b"abc" * 1000, "entry.json": b"{}"}

    def full(path, *args):
        if step == "pipe_file":  # what fitted is there
            Path(path).write_bytes(b"abc")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as patched:
        patched.setattr(store._fs, step, full)
        with pytest.raises(MissingError, match=r"cannot be written to .*No space left on device"):
            store.put("graph/x", content, "entry.json")
    assert not [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
    store.put("graph/x", content, "entry.json")
    assert sorted(p.name for p in (tmp_path / "store/graph/x").iterdir()) == ["entry.json", "f"]


HOSTILE = (
    "[" * 100_000, "{}", "[]", "1", '{"files": []}', '{"files": {"f": 1}}', '{"files": {"f": [1, 2, 3]}}',
    '{"schema": 1, "kind": "graph", "key": "k", "facts": 1, "files": {}}',
    '{"schema": 1, "kind": "graph", "key": "k", "facts": [], "files": {"../../../x": [0, "0"]}}',
    '{"schema": 1, "kind": "graph", "key": "k", "facts": {}, "files": {"/etc/passwd": [0, "0"]}}',
    '{"schema": 1, "kind": "graph", "key": "k", "facts": {}, "files": {"f": [1e999, "0"]}}',
)  # fmt: skip


@pytest.mark.parametrize("head", HOSTILE)
@pytest.mark.parametrize("where", ["cache", "store"])
def test_a_head_by_another_hand_is_no_entry(tmp_path, head, where):
    store = Store(f"file://{tmp_path}/store")
    cache = Cache(tmp_path / "cache", store)
    folder = tmp_path / where / "graph" / KEY[:2] / KEY
    folder.mkdir(parents=True)
    (folder / "entry.json").write_text(head)
    (folder / "f").write_bytes(b"0")
    before = sorted(tmp_path.rglob("*"))
    assert cache.get("graph", KEY) is None
    assert [p for p in sorted(tmp_path.rglob("*")) if p not in before] == []


def test_a_store_cannot_write_outside_an_entry(tmp_path):
    store = Store(f"file://{tmp_path}/store")
    folder = tmp_path / "store/graph" / KEY[:2] / KEY
    folder.mkdir(parents=True)
    import hashlib

    (folder / ".." / "evil").write_bytes(b"x")
    head = {"schema": 1, "kind": "graph", "key": KEY, "facts": {}}
    head["files"] = {"../evil": [1, hashlib.sha256(b"x").hexdigest()]}
    (folder / "entry.json").write_text(json.dumps(head))
    assert Cache(tmp_path / "two", store).get("graph", KEY) is None
    assert not list((tmp_path / "two").rglob("evil"))


@pytest.mark.parametrize("error", [ConnectionError("refused"), ValueError("no credentials"), PermissionError("denied")])
def test_a_store_that_cannot_be_reached_is_said_once_and_done_without(tmp_path, monkeypatch, error):
    store = Store(f"file://{tmp_path}/store")

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(store, "_fs", SimpleNamespace(cat_file=fails, makedirs=fails, protocol="s3"))
    said = []
    cache = Cache(tmp_path / "one", store, note=said.append)
    assert cache.get("graph", KEY) is None
    cache.put("graph", KEY, {"opset": 20}, {"f": b"abc"})
    assert cache.get("graph", KEY).read("f") == b"abc"
    assert said == [f"--store: file://{tmp_path}/store cannot be reached ({error}). Going on without it."]
    other = Cache(tmp_path / "two", store, note=said.append)
    other.put("graph", KEY, {"opset": 20}, {"f": b"abc"})
    assert said[1:] == [f"--store: file://{tmp_path}/store cannot be written to ({error}). Going on without it."]


DAMAGES = {
    "longer": lambda entry: (entry / "f").write_bytes(b"abcd"),
    "no file": lambda entry: (entry / "f").unlink(),
    "no head": lambda entry: (entry / "entry.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_said_once_and_made_again(tmp_path, damage):
    store, said = Store(f"file://{tmp_path}/store"), []
    cache = Cache(tmp_path / "one", note=said.append)
    cache.put("graph", KEY, {}, {"f": b"abc"})
    entry = tmp_path / "one/graph" / KEY[:2] / KEY
    DAMAGES[damage](entry)
    assert [cache.get("graph", KEY) for _ in range(2)] == [None, None]
    shown = f"the cache holds an entry that is not what was put there ({entry}): it is made again"
    assert said == [shown]
    cache.put("graph", KEY, {}, {"f": b"abc"})
    assert cache.get("graph", KEY).read("f") == b"abc"
    Cache(tmp_path / "two", store).put("graph", KEY, {}, {"f": b"abc"})
    there = tmp_path / "store/graph" / KEY[:2] / KEY
    DAMAGES[damage](there)
    other = Cache(tmp_path / "three", store, note=said.append)
    assert [other.get("graph", KEY) for _ in range(2)] == [None, None]
    assert said == [shown, shown.replace("the cache", "the store").replace(str(entry), str(there))]
    other.put("graph", KEY, {}, {"f": b"abc"})
    assert Cache(tmp_path / "four", store).get("graph", KEY).read("f") == b"abc"


def test_stores_that_cannot_be_opened_are_said():
    with pytest.raises(InputError, match=r"--store: must be an address that fsspec knows \(got 'nosuch://x'"):
        Store("nosuch://x")
    with pytest.raises(MissingError, match=r"--store: abfs://x needs another package \(got: .*\)\. Install it\."):
        Store("abfs://x")


def old(path, data):
    """A file last changed a minute ago."""
    path.write_bytes(data)
    then = time.time() - 60
    os.utime(path, (then, then))
    return path


def test_a_young_file_is_not_remembered(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(b"abc")
    for _ in range(2):
        with Digests(tmp_path / "d.sqlite") as digests:
            digests.file(path)
            assert digests.read == 1


def test_an_unchanged_file_is_read_once_and_a_changed_one_again(tmp_path, monkeypatch):
    monkeypatch.setattr("trtpipe.pipeline.cache.digests.RACY_NS", 0)
    path = old(tmp_path / "w", b"abc")

    def digest():
        with Digests(tmp_path / "d.sqlite") as digests:
            found = digests.file(path)
            assert digests.file(path) == found
            return found, digests.read

    first = digest()
    assert first == ("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 1)
    assert digest() == (first[0], 0)
    old(path, b"abd")  # same size, same time: ctime tells
    assert digest()[0] != first[0]
    old(path, b"abc")
    assert digest() == (first[0], 1)


def test_a_folders_digest_is_of_names_and_contents(tmp_path):
    def digest():
        return Digests().folder(tmp_path / "f")

    (tmp_path / "f/a").mkdir(parents=True)
    (tmp_path / "f/a/1.png").write_bytes(b"1")
    first = digest()
    (tmp_path / "f/.hidden").write_bytes(b"x")
    os.utime(tmp_path / "f/a/1.png", (5, 5))
    assert digest() == first
    (tmp_path / "f/a/1.png").rename(tmp_path / "f/a/2.png")
    second = digest()
    (tmp_path / "f/a/2.png").write_bytes(b"2")
    assert len({first, second, digest()}) == 3


def test_many_files_are_remembered_and_none_is_locked_out_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr("trtpipe.pipeline.cache.digests.RACY_NS", 0)
    monkeypatch.setattr("trtpipe.pipeline.cache.digests._ROWS", 3)
    (tmp_path / "f").mkdir()
    for name in (*map(str, range(7)), os.fsdecode(b"\xff")):
        old(tmp_path / "f" / name, b"abc")
    for read in (8, 0):
        with Digests(tmp_path / "d.sqlite") as digests, sqlite3.connect(tmp_path / "d.sqlite", timeout=0) as other:
            digests.folder(tmp_path / "f")
            assert digests.read == read
            other.execute("BEGIN EXCLUSIVE")
            other.rollback()
        other.close()


def test_a_damaged_table_is_replaced(tmp_path):
    (tmp_path / "d.sqlite").write_bytes(b"this is no database" * 100)
    path = old(tmp_path / "w", b"abc")
    with Digests(tmp_path / "d.sqlite") as digests:
        assert digests.file(path).startswith("ba7816bf")


def test_what_has_no_end_is_not_read(tmp_path):
    """A pipe waits for a writer; the digest of a folder with one, or with a device, is made all the same."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"x")
    with Digests() as digests:
        plain = digests.folder(tmp_path / "a")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    with Digests() as digests:
        piped = digests.folder(tmp_path / "a")
    (tmp_path / "a" / "zero.png").symlink_to("/dev/zero")
    with Digests() as digests:
        assert len({plain, piped, digests.folder(tmp_path / "a")}) == 3

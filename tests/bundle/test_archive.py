"""`.trtb`: the same bytes each time, and every archive that the writer could not have written is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import shipping

from trtpipe.bundle import archive, signing
from trtpipe.bundle.archive import pack, unpack
from trtpipe.bundle.format import read_bundle
from trtpipe.errors import InputError


def tree(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def packed(tmp_path: Path) -> dict[str, bytes]:
    """The members of a good archive, in order."""
    pack(shipping.bundle(tmp_path / "c").path, tmp_path / "c.trtb")
    with tarfile.open(tmp_path / "c.trtb") as tar:
        return {m.name: (tar.extractfile(m) or io.BytesIO()).read() for m in tar.getmembers()}


def test_round_trip_of_a_signed_bundle(tmp_path: Path) -> None:
    public = signing.generate_key(tmp_path / "key")
    signed = shipping.bundle(tmp_path / "c", sign=signing.signer(tmp_path / "key"))
    pack(signed.path, tmp_path / "c.trtb")
    made = unpack(tmp_path / "c.trtb", tmp_path / "d", signing.checking(Path("c.trtb"), public))
    assert tree(made.path) == tree(signed.path)
    assert read_bundle(tmp_path / "d").manifest == signed.manifest


def test_the_same_bundle_gives_the_same_bytes(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c")
    shipping.bundle(tmp_path / "d")
    os.utime(tmp_path / "d" / "model.onnx", (1, 1))
    (tmp_path / "d" / "model.onnx").chmod(0o600)
    pack(tmp_path / "c", tmp_path / "one.trtb")
    pack(tmp_path / "d", tmp_path / "two.trtb")
    assert (tmp_path / "one.trtb").read_bytes() == (tmp_path / "two.trtb").read_bytes()


def test_any_tar_lists_it(tmp_path: Path) -> None:
    assert list(packed(tmp_path)) == ["manifest.json", "calibration.json", "golden.safetensors", "model.onnx"]


def test_unpacking_asks_before_it_replaces(tmp_path: Path) -> None:
    pack(shipping.bundle(tmp_path / "new", notes=("new",)).path, tmp_path / "new.trtb")
    shipping.bundle(tmp_path / "d", notes=("old",))
    key = signing.generate_key(tmp_path / "key")
    with pytest.raises(InputError, match="must be signed by a key in"):
        unpack(tmp_path / "new.trtb", tmp_path / "d", signing.checking(Path("new.trtb"), key))
    assert read_bundle(tmp_path / "d").manifest.notes == ("old",)
    unpack(tmp_path / "new.trtb", tmp_path / "d")
    assert read_bundle(tmp_path / "d").manifest.notes == ("new",)
    assert sorted(os.listdir(tmp_path)) == ["d", "key", "key.pub", "new", "new.trtb"]


def test_a_broken_bundle_is_not_packed(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c")
    (tmp_path / "c" / "model.onnx").write_bytes(b"")
    with pytest.raises(InputError, match=r"model.onnx: must have"):
        pack(tmp_path / "c", tmp_path / "c.trtb")
    assert not (tmp_path / "c.trtb").exists()


Members = dict[str, bytes]


def info(name: str, size: int, **changes: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.mode = size, 0o644
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def tar(entries: list[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """An archive of these entries, ended by two empty blocks."""
    made = b"".join(i.tobuf(form) + d + bytes(-len(d) % 512) for i, d in entries)
    return made + bytes(1024)


def good(m: Members) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [(info(name, len(data)), data) for name, data in m.items()]


def with_manifest(m: Members, **changes: object) -> list[tuple[tarfile.TarInfo, bytes]]:
    raw = json.loads(m["manifest.json"]) | changes
    del raw["digest"]  # as in a manifest of before
    data = (json.dumps(raw, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()
    return good({**m, "manifest.json": data})


def inserted(m: Members, entry: tarfile.TarInfo, data: bytes = b"") -> bytes:
    return tar([*good(m)[:1], (entry, data), *good(m)[1:]])


def zipped(m: Members) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, data in m.items():
            file.writestr(name, data)
    return made.getvalue()


def edited(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


HOSTILE: list[tuple[str, Callable[[Members], bytes], str]] = [
    ("empty", lambda m: b"", "(it ends after 0 bytes). Fetch the archive again, or pack the bundle again."),
    ("a few bytes", lambda m: b"hello", "must be a .trtb archive (it ends after 5 bytes)"),
    ("text", lambda m: b"hello " * 200, "must be a .trtb archive, which is not compressed (got no tar header)"),
    ("gzip bomb", lambda m: gzip.compress(bytes(1 << 20)) + bytes(512), "which is not compressed (got gzip)"),
    ("zip", zipped, "which is not compressed (got zip)"),
    ("only zeros", lambda m: bytes(10240), "(got no tar header)"),
    ("traversal", lambda m: inserted(m, info("../../etc/cron.d/x", 1), b"x"), "it leads out of the bundle"),
    (
        "inner traversal",
        lambda m: inserted(m, info("a/../../x", 1), b"x"),
        "'a/../../x' must be a plain name (it leads out",
    ),
    (
        "absolute",
        lambda m: inserted(m, info("/etc/passwd", 1), b"x"),
        "'/etc/passwd' is an absolute path. Do not use this archive.",
    ),
    ("folder", lambda m: inserted(m, info("sub/x", 1), b"x"), "'sub/x' is not a plain file name"),
    ("hidden", lambda m: inserted(m, info(".bashrc", 1), b"x"), "'.bashrc' is not a plain file name"),
    ("prefix", lambda m: inserted(m, info("p" * 90 + "/" + "x" * 90, 0)), "is not a plain file name"),
    (
        "symbolic link",
        lambda m: inserted(m, info("x", 0, type=tarfile.SYMTYPE, linkname="/etc/shadow")),
        "'x' must be a regular file (got a symbolic link)",
    ),
    (
        "hard link",
        lambda m: inserted(m, info("x", 0, type=tarfile.LNKTYPE, linkname="manifest.json")),
        "'x' must be a regular file (got a hard link)",
    ),
    ("device", lambda m: inserted(m, info("x", 0, type=tarfile.CHRTYPE)), "(got a character device)"),
    ("pipe", lambda m: inserted(m, info("x", 0, type=tarfile.FIFOTYPE)), "(got a named pipe)"),
    ("directory", lambda m: inserted(m, info("x", 0, type=tarfile.DIRTYPE)), "(got a directory)"),
    ("sparse", lambda m: inserted(m, info("x", 0, type=b"S")), "(got a sparse file)"),
    ("odd type", lambda m: inserted(m, info("x", 0, type=b"Z")), "(got an unknown type)"),
    (
        "pax header",
        lambda m: tar([(info("manifest.json", 1, pax_headers={"path": "../x"}), b"x")], tarfile.PAX_FORMAT),
        "(got an extended header)",
    ),
    ("long name", lambda m: tar([(info("x" * 200, 0), b"")], tarfile.GNU_FORMAT), "(got a long name)"),
    ("manifest not first", lambda m: tar(good(m)[::-1]), "must hold manifest.json next (got 'model.onnx')"),
    ("twice", lambda m: tar([*good(m), good(m)[-1]]), "must hold nothing more next (got 'model.onnx')"),
    ("manifest twice", lambda m: inserted(m, *good(m)[0]), "must hold calibration.json next (got 'manifest.json')"),
    ("extra file", lambda m: inserted(m, info("evil.so", 1), b"x"), "must hold calibration.json next (got 'evil.so')"),
    (
        "other order",
        lambda m: tar([good(m)[i] for i in (0, 2, 1, 3)]),
        "must hold calibration.json before golden.safete",
    ),
    ("file missing", lambda m: tar(good(m)[:-1]), "every file its manifest lists (model.onnx is missing)"),
    (
        "larger than said",
        lambda m: inserted(m, info("calibration.json", 1 << 32)),
        "as its manifest says (got 4294967296)",
    ),
    (
        "manifest bomb",
        lambda m: tar([(info("manifest.json", 1 << 30), b"")]),
        "must have at most 67108864 bytes (got 107374",
    ),
    (
        "cut in a file",
        lambda m: tar(good(m))[: -1024 - 512],
        "'model.onnx' must have",
    ),
    ("cut at the end", lambda m: tar(good(m))[:-512], "the file is cut short"),
    ("no end", lambda m: tar(good(m))[:-1024], "the file is cut short"),
    (
        "trailing data",
        lambda m: tar(good(m)) + b"#!/bin/sh",
        "there is data after the last file. Fetch the archive again",
    ),
    ("padding", lambda m: edited(tar(good(m)), 512 + len(m["manifest.json"]), b"x"), "is not padded with zeros"),
    (
        "set-uid",
        lambda m: tar([(info("manifest.json", 1, mode=0o4755), b"x")]),
        "the header of 'manifest.json' is not in canonical form. ",
    ),
    ("owner", lambda m: tar([(info("manifest.json", 1, uname="root"), b"x")]), "is not in canonical form"),
    ("checksum", lambda m: edited(tar(good(m)), 148, b"7"), "is not in canonical form"),
    ("binary size", lambda m: edited(tar(good(m)), 124, b"\x80" + bytes(7)), "must say its size in octal digits"),
    ("newer schema", lambda m: tar(with_manifest(m, schema_version=9)), "schema_version must be 1 (got 9)"),
    ("unknown key", lambda m: tar(with_manifest(m, run="rm -rf /")), "run: Extra inputs are not permitted"),
    (
        "other content",
        lambda m: tar(good({**m, "model.onnx": bytes(len(m["model.onnx"]))})),
        "model.onnx: must have SHA-256",
    ),
    ("cut inside a file", lambda m: tar(good(m))[:1024], " bytes (512 are left)"),
    ("name of bytes", lambda m: inserted(m, info("x\udcff", 0)), "is not a plain file name"),
]


@pytest.mark.parametrize(("make", "message"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_hostile(tmp_path: Path, make: Callable[[Members], bytes], message: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    archive = inside / "hostile.trtb"
    archive.write_bytes(make(packed(tmp_path)))
    with pytest.raises(InputError) as caught:
        unpack(archive, inside / "made")
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(archive))
    assert os.listdir(inside) == ["hostile.trtb"]


def test_a_good_archive_by_hand_is_taken(tmp_path: Path) -> None:
    """So that what is refused above is refused for what was done to it."""
    (tmp_path / "good.trtb").write_bytes(tar(good(packed(tmp_path))))
    assert unpack(tmp_path / "good.trtb", tmp_path / "made").manifest.name == "colour"


def test_every_flipped_byte_of_a_header_is_refused(tmp_path: Path) -> None:
    packed(tmp_path)
    data = (tmp_path / "c.trtb").read_bytes()
    for at in range(0, 512, 3):
        (tmp_path / "f.trtb").write_bytes(edited(data, at, bytes([data[at] ^ 0x21])))
        with pytest.raises(InputError):
            unpack(tmp_path / "f.trtb", tmp_path / "made")


def test_no_archive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone.trtb: must be a readable archive \(got: No such file or directory\)"):
        unpack(tmp_path / "gone.trtb", tmp_path / "x")
    shipping.bundle(tmp_path / "c")
    with pytest.raises(InputError, match=r"c: is there already and is no regular file"):
        pack(tmp_path / "c", tmp_path / "c")


def test_a_file_that_an_archive_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipping.bundle(tmp_path / "c")
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 3)
    with pytest.raises(InputError, match=r": must be at most 3 bytes \(got \d+\)\. Copy the folder\.$"):
        pack(tmp_path / "c", tmp_path / "c.trtb")

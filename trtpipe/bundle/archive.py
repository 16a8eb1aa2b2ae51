"""`.trtb`: a bundle as one file, and the way back, which trusts nothing in it.

An archive is an uncompressed USTAR file in one canonical form: manifest.json, then manifest.sig if there is one, then
the other files by name, every header field but name, size and checksum the same. `tar tf` lists it. Reading compares
each header with the only one the writer could have written, so links, devices, sparse files, long names and
trailing data have no way in; and with nothing compressed, an archive cannot hold more than its own size. tarfile
writes the headers; it does not read them, since it accepts every form of tar and skips what follows the end.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from calib.files import open_regular, replacing
from trtpipe.bundle.format import SIGNATURE_BYTES, Bundle, Trust, incomplete, place, read_bundle
from trtpipe.bundle.manifest import MAX_MANIFEST_BYTES, SIGNATURE, from_json
from trtpipe.errors import InputError
from trtpipe.outputs import is_plain, naming
from trtpipe.streams import is_stream
from trtpipe.values import ARCHIVE_SUFFIX, MANIFEST

_BLOCK = 512
#: The largest size USTAR's eleven octal digits can say.
MAX_FILE_BYTES = 8**11 - 1
_AGAIN = "Fetch the archive again, or pack the bundle again."
_TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a directory",
    b"6": "a named pipe",
    b"x": "an extended header",
    b"g": "an extended header",
    b"L": "a long name",
    b"K": "a long link name",
    b"S": "a sparse file",
}
_MAGICS = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"PK": "zip", b"\x28\xb5": "zstandard"}


def pack(bundle_path: Path, archive: Path) -> Bundle:
    """Write the bundle or kit at `bundle_path`, once it is found whole, to the file `archive`.

    The same bundle gives the same bytes.

    Raises:
        InputError: the bundle is not valid, `archive` is not to be replaced, or a file is larger than 8 GiB.
        OSError: it cannot be written; its filename is `archive`.
    """
    bundle = read_bundle(bundle_path)
    if archive.is_dir() or is_stream(archive):
        raise InputError(f"{archive}: is there already and is no regular file. Choose another name.")
    for name, entry in bundle.manifest.files.items():
        if entry.size > MAX_FILE_BYTES:
            raise InputError(
                f"{bundle_path}/{name}: must be at most {MAX_FILE_BYTES} bytes (got {entry.size}). Copy the folder."
            )
    with naming(archive):
        _write(bundle, archive)
    return bundle


def unpack(archive: Path, destination: Path, trust: Trust | None = None) -> Bundle:
    """Make the bundle in `archive` at `destination`, in one step, once everything about it has been checked.

    Args:
        archive: a `.trtb` file, from anyone.
        destination: the bundle's directory; a bundle there is replaced.
        trust: as in `read_bundle`; raises before anything takes its place.

    Raises:
        InputError: the archive is not in canonical form or what it holds is no valid bundle.
        OSError: the bundle cannot be written; its filename is `destination`.
    """
    try:
        with open_regular(archive) as file:
            content = dict(_read_members(archive, file))
    except OSError as error:
        raise InputError(
            f"{archive}: must be a readable archive (got: {error.strerror}). Give the path of a {ARCHIVE_SUFFIX}."
        ) from None
    return place(destination, content, where=archive, trust=trust)


def _write(bundle: Bundle, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with replacing(archive) as sibling, open(sibling, "xb") as file:
        for name, data in _members(bundle):
            file.write(_header(name, len(data)))
            file.write(data)
            file.write(bytes(-len(data) % _BLOCK))
        file.write(bytes(2 * _BLOCK))
        file.flush()
        os.fsync(file.fileno())


def _members(bundle: Bundle) -> Iterator[tuple[str, bytes]]:
    """Every file of the bundle in canonical order."""
    yield MANIFEST, bundle.manifest_bytes
    if bundle.signature is not None:
        yield SIGNATURE, bundle.signature
    for name in sorted(bundle.manifest.files):
        yield name, bundle.read(name)


def _header(name: str, size: int) -> bytes:
    """The one header of a file called `name` of `size` bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


def _read_members(archive: Path, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Name and content of each member, none of which is believed before the manifest has named it."""
    total = os.fstat(file.fileno()).st_size
    name, data = _read_member(archive, file, total, {MANIFEST: None})
    manifest = from_json(data, f"{archive}:{MANIFEST}")
    yield name, data
    left: dict[str, int | None] = {n: manifest.files[n].size for n in sorted(manifest.files)}
    left = {SIGNATURE: SIGNATURE_BYTES, **left}
    while True:
        block = file.read(_BLOCK)
        if not any(block):
            break
        file.seek(-len(block), io.SEEK_CUR)
        name, data = _read_member(archive, file, total, left)
        # What comes before it in the canonical order can no longer come.
        for earlier in list(left):
            del left[earlier]
            if earlier == name:
                break
            if earlier != SIGNATURE:
                raise InputError(f"{archive}: must hold {earlier} before {name} (it does not). {_AGAIN}")
        yield name, data
    left.pop(SIGNATURE, None)
    if left:
        raise incomplete(archive, next(iter(left)), _AGAIN)
    if len(block) != _BLOCK or file.read(_BLOCK) != bytes(_BLOCK):
        raise InputError(f"{archive}: the file is cut short. {_AGAIN}")
    if file.read(1):
        raise InputError(f"{archive}: there is data after the last file. {_AGAIN}")


def _read_member(archive: Path, file: BinaryIO, total: int, expected: dict[str, int | None]) -> tuple[str, bytes]:
    """Name and content of the member at the file's position, if it is one of `expected` (name to size, None: any)."""
    header = file.read(_BLOCK)
    if len(header) != _BLOCK:
        raise InputError(f"{archive}: must be a {ARCHIVE_SUFFIX} archive (it ends after {file.tell()} bytes). {_AGAIN}")
    if header[257:262] != b"ustar":
        kind = _MAGICS.get(header[:2], "no tar header")
        raise InputError(
            f"{archive}: must be a {ARCHIVE_SUFFIX} archive, which is not compressed (got {kind}). {_AGAIN}"
        )
    raw_name = header[:100].rstrip(b"\0")
    shown = repr(raw_name.decode("ascii", "backslashreplace"))
    kind = _TYPES.get(header[156:157], "" if header[156:157] == b"0" else "an unknown type")
    if kind:
        raise InputError(f"{archive}: {shown} must be a regular file (got {kind}). Do not use this archive.")
    if raw_name.startswith(b"/"):
        raise InputError(f"{archive}: {shown} is an absolute path. Do not use this archive.")
    if b".." in raw_name.split(b"/"):
        raise InputError(
            f"{archive}: {shown} must be a plain name (it leads out of the bundle). Do not use this archive."
        )
    try:
        name = raw_name.decode("ascii")
    except UnicodeDecodeError:
        name = ""
    if header[345:500].strip(b"\0") or not is_plain(name):
        raise InputError(f"{archive}: {shown} is not a plain file name. Do not use this archive.")
    if name not in expected:
        wanted = next((n for n in expected if n != SIGNATURE), "nothing more")
        raise InputError(f"{archive}: must hold {wanted} next (got {shown}). {_AGAIN}")
    digits = header[124:135]
    if not re.fullmatch(rb"[0-7]{11}", digits) or header[135:136] not in (b"\0", b" "):
        raise InputError(f"{archive}: {shown} must say its size in octal digits (it does not). {_AGAIN}")
    size = int(digits, 8)
    wanted_size = expected[name]
    if wanted_size is not None and size != wanted_size:
        raise InputError(
            f"{archive}: {shown} must have {wanted_size} bytes, as its manifest says (got {size}). {_AGAIN}"
        )
    if wanted_size is None and size > MAX_MANIFEST_BYTES:
        raise InputError(f"{archive}: {shown} must have at most {MAX_MANIFEST_BYTES} bytes (got {size}). {_AGAIN}")
    if size > total - file.tell():
        raise InputError(f"{archive}: {shown} must have {size} bytes ({total - file.tell()} are left). {_AGAIN}")
    if header != _header(name, size):
        raise InputError(f"{archive}: the header of {shown} is not in canonical form. {_AGAIN}")
    data = file.read(size)
    if any(file.read(-size % _BLOCK)):
        raise InputError(f"{archive}: {shown} is not padded with zeros. {_AGAIN}")
    return name, data

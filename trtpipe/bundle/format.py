"""A bundle on disk: written whole or not at all, and validated in full before anything in it is used.

How a directory is replaced in one step is in `atomic`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from calib.strictjson import loads
from trtpipe.atomic import clean_leftovers, move_into_place, sibling, standing, sync_directory, write_file
from trtpipe.bundle import golden as golden_data
from trtpipe.bundle import hybrid
from trtpipe.bundle.manifest import (
    AGAIN,
    ENGINE,
    HYBRID,
    MAX_MANIFEST_BYTES,
    PARTS,
    SIGNATURE,
    FileEntry,
    Manifest,
    from_json,
    step_to_folder,
    to_json,
)
from trtpipe.errors import InputError, user_error
from trtpipe.outputs import is_plain, naming, require_replaceable_folder
from trtpipe.trt.plan import read_header
from trtpipe.values import GOLDEN, MANIFEST

#: Bytes of an Ed25519 signature.
SIGNATURE_BYTES = 64

#: Given the manifest's bytes, returns the 64 bytes of their Ed25519 signature (`signing.signer`).
Sign = Callable[[bytes], bytes]
#: Takes the manifest's bytes and its signature, or None, and raises to refuse them; whether it verified the signature.
Trust = Callable[[bytes, bytes | None], bool]


def incomplete(path: Path, missing: str, again: str) -> InputError:
    """The error that a bundle or an archive lacks a file that its manifest lists; `again` is the next step."""
    return InputError(f"{path}: must hold every file its manifest lists ({missing} is missing). {again}")


class Replaced(InputError):
    """Another bundle has taken the place of one that was read: what it was is gone, and the other can be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path}: must stay in place while it is used (another bundle has replaced it). Load it again."
        )


@dataclass(frozen=True)
class Bundle:
    """A bundle, or kit, that was whole and consistent when it was read. `signature` is the raw one, or None.

    `verified`: the signature is by a key that the reader trusts. `folder`: the device and the inode of its directory.
    """

    path: Path
    manifest: Manifest
    manifest_bytes: bytes
    signature: bytes | None
    verified: bool = False
    folder: tuple[int, int] | None = None

    def __fspath__(self) -> str:
        """Its folder, so that a bundle is given wherever a path of one is."""
        return str(self.path)

    def read(self, name: str) -> bytes:
        """The content of the listed file `name`.

        The digest of the very bytes returned is checked, so a file swapped after `read_bundle` is not used.

        Raises:
            InputError: not listed, or changed; `Replaced` where another bundle is there.
            OSError: it is gone, or cannot be read.
        """
        entry = self.manifest.files.get(name)
        if entry is None:
            raise InputError(f"{self.path}: must hold {name} (got {', '.join(sorted(self.manifest.files))}). {AGAIN}")
        with _opened(standing(self.path)) as directory:
            try:
                data = _read_regular(self.path, directory, name, entry.size)
                _check_digest(self.path, name, data, entry)
            except (InputError, OSError):
                if self.folder is not None and self.folder != _folder(directory):
                    raise Replaced(self.path) from None
                raise
        return data

    def contents(self) -> dict[str, bytes]:
        """Every file, the manifest and the signature included.

        Raises:
            InputError, OSError: as `read`.
        """
        files = {name: self.read(name) for name in self.manifest.files} | {MANIFEST: self.manifest_bytes}
        return files | ({SIGNATURE: self.signature} if self.signature is not None else {})

    def golden(self) -> golden_data.Golden:
        """The golden inputs and the baseline's outputs on them."""
        m = self.manifest
        return golden_data.from_bytes(self.read(GOLDEN), m.inputs, m.outputs, f"{self.path}/{GOLDEN}")


def write_bundle(
    destination: Path, manifest: Manifest, files: Mapping[str, bytes], *, sign: Sign | None = None
) -> Bundle:
    """Write `manifest` and `files` to the directory `destination` and return the bundle as it was read back.

    An existing bundle there is replaced in one step; anything else there is left alone.

    Args:
        destination: the bundle's directory; its parents are made.
        manifest: its `files` are replaced by the sizes and digests of `files`.
        files: content by name; names are flat (`is_plain`).
        sign: signs the manifest's bytes; not called when the manifest says that the check failed.

    Raises:
        InputError: a name is illegal, a required file is missing, a file contradicts the manifest, or `destination`
            is something other than a bundle.
        OSError: it cannot be written; its filename is `destination`.
    """
    for name in files:
        if not is_plain(name) or name in (MANIFEST, SIGNATURE):
            raise InputError(
                f"{destination}: a bundle's file must have a plain name of its own (got {name!r}). Rename it."
            )
    entries = {name: FileEntry(size=len(d), sha256=hashlib.sha256(d).hexdigest()) for name, d in files.items()}
    data = to_json(manifest.model_copy(update={"files": entries}))
    content = {**files, MANIFEST: data}
    if sign is not None and not manifest.failed:
        content[SIGNATURE] = sign(data)
    return place(destination, content, where=destination)


def set_signature(path: Path, sign: Sign | None) -> bool:
    """Sign the bundle at `path`, in place of any other signature; with None take its signature away.

    Returns:
        Whether it is signed now: not where its check failed.

    Raises:
        InputError, OSError: it is no bundle, not whole, or cannot be read or written.
    """
    bundle = read_bundle(path)
    wanted = None if sign is None or bundle.manifest.failed else sign(bundle.manifest_bytes)
    if wanted != bundle.signature:
        content = {name: data for name, data in bundle.contents().items() if name != SIGNATURE}
        place(path, content | ({} if wanted is None else {SIGNATURE: wanted}), where=path)
    return wanted is not None


def place(
    destination: Path,
    content: Mapping[str, bytes],
    *,
    where: Path,
    trust: Trust | None = None,
) -> Bundle:
    """Give `destination` exactly the files of `content`, manifest and signature included, in one step.

    They are written aside, read back and checked as any bundle is, and moved into place only then.

    Args:
        destination: the bundle's directory; an existing bundle there is replaced, anything else is left alone.
        content: by plain file name; the caller has checked the names.
        where: what messages call the source of `content`.
        trust: as in `read_bundle`.

    Raises:
        InputError: the content is no valid bundle, or `destination` is something other than a bundle.
        OSError: it cannot be written; its filename is `destination`.
    """
    # Through resolved parents, yet not through a link at the name itself: that one is refused below.
    destination = destination.parent.resolve() / destination.name
    with naming(destination):
        return _placed(destination, content, where, trust)


def _placed(destination: Path, content: Mapping[str, bytes], where: Path, trust: Trust | None) -> Bundle:
    destination.parent.mkdir(parents=True, exist_ok=True)
    require_place(destination)
    clean_leftovers(destination)
    with sibling(destination) as temporary:
        for name, payload in content.items():
            write_file(temporary / name, payload)
        sync_directory(temporary)
        with _opened(temporary) as directory:
            bundle = _read_opened(where, directory, trust)
        move_into_place(temporary, destination)
    return replace(bundle, path=destination)


def read_bundle(path: Path, trust: Trust | None = None) -> Bundle:
    """The bundle or kit at `path`, after everything in it was checked.

    The manifest's schema, every size and digest, that no file is missing, added, a link or a device, the golden data
    against the bindings, the engine's own header against the manifest. Nothing is deserialized or executed.

    Args:
        path: the bundle's directory.
        trust: given the manifest's bytes and its signature, if there is one, before either is parsed; raises to refuse
            them (`signing.checking`). None: signatures are not judged.

    Raises:
        InputError, OSError: any of it does not hold, or cannot be read; the message names the file.
    """
    for _ in range(10):
        actual = standing(path)
        with _opened(actual) as directory:
            try:
                return _read_opened(actual, directory, trust)
            except InputError:
                # A writer may have exchanged the bundle while it was being read: then read the new one.
                try:
                    replaced = os.fstat(directory).st_ino != standing(path).stat().st_ino
                except OSError:
                    replaced = False
                if not replaced:
                    raise
    raise InputError(f"{path}: must stay in place while it is read (it was replaced ten times). Try again later.")


def require_place(destination: Path) -> None:
    """Refuse, before anything is computed, a place where `write_bundle` could not write.

    Raises:
        InputError: something is there that is no bundle, or a bundle with files of others; or the place is in a bundle.
        OSError: nothing can be written there.
    """
    require_replaceable_folder(destination)
    _refuse_other(destination)


def _refuse_other(destination: Path) -> None:
    """Refuse to replace anything that is not a bundle, or a bundle with files of others in it."""
    if not os.path.lexists(destination):
        return
    if destination.is_symlink() or not destination.is_dir():
        raise InputError(f"{destination}: is there already and is no bundle. Choose another place.")
    if any(destination.iterdir()) and not (destination / MANIFEST).is_file():
        raise InputError(
            f"{destination}: must be a bundle or absent (got a directory without {MANIFEST}). Choose another place."
        )
    if others := sorted({entry.name for entry in destination.iterdir()} - _parts(destination)):
        raise InputError(
            f"{destination}: must hold only the bundle's files to be replaced (got {others[0]!r} too, which would be "
            "deleted). Move it away, or choose another place."
        )


def _parts(bundle: Path) -> frozenset[str]:
    """Names that may be in a bundle's folder: what its manifest lists; any part's, where that cannot be read."""
    try:
        manifest = loads((bundle / MANIFEST).read_bytes().decode())
        return frozenset({*manifest["files"], MANIFEST, SIGNATURE}) if isinstance(manifest, dict) else PARTS
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return PARTS


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of the directory `path`, so that all files read through it are of one bundle."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"{path}: must be a bundle's directory (got: {error.strerror}). {step_to_folder(path)}"
        ) from None
    except OSError as error:
        raise user_error(error) or error from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_opened(path: Path, directory: int, trust: Trust | None) -> Bundle:
    """The bundle in the open `directory`, checked in full."""
    present = set(os.listdir(directory))
    if MANIFEST not in present:
        raise InputError(f"{path}: holds no {MANIFEST}. Give the path of a bundle.")
    data = _read_regular(path, directory, MANIFEST, None)
    signature = _read_regular(path, directory, SIGNATURE, SIGNATURE_BYTES) if SIGNATURE in present else None
    verified = trust is not None and trust(data, signature)
    manifest = from_json(data, f"{path}/{MANIFEST}")
    extra = sorted(present - set(manifest.files) - {MANIFEST, SIGNATURE})
    if extra:
        raise InputError(f"{path}: must hold only the files its manifest lists (got {extra[0]!r} too). Remove it.")
    missing = sorted(set(manifest.files) - present)
    if missing:
        raise incomplete(path, missing[0], AGAIN)

    def read(name: str) -> bytes:
        entry = manifest.files[name]
        content = _read_regular(path, directory, name, entry.size)
        _check_digest(path, name, content, entry)
        return content

    needed = set(manifest.required_files)
    for name in manifest.files:
        if name not in needed:
            read(name)
    _check_content(path, manifest, read)
    return Bundle(path, manifest, data, signature, verified, _folder(directory))


def _folder(directory: int) -> tuple[int, int]:
    status = os.fstat(directory)
    return status.st_dev, status.st_ino


def _read_regular(path: Path, directory: int, name: str, size: int | None) -> bytes:
    """The bytes of the regular file `name`, which must be `size` long, or not longer than a manifest may be."""
    try:
        # O_NONBLOCK: a named pipe must not hang the reader.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        what = {errno.ELOOP: "a link", errno.ENXIO: "a socket"}.get(error.errno or 0)
        if what is None:
            raise OSError(error.errno, error.strerror, f"{path}/{name}") from None
        raise InputError(f"{path}/{name}: must be a regular file (got: {what}). {AGAIN}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}/{name}: is not a regular file. {AGAIN}")
        if size is not None and status.st_size != size:
            raise InputError(f"{path}/{name}: must have {size} bytes (got {status.st_size}). {AGAIN}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_MANIFEST_BYTES + 1 if size is None else size)
    finally:
        os.close(descriptor)


def _check_digest(path: Path, name: str, data: bytes, entry: FileEntry) -> None:
    got = hashlib.sha256(data).hexdigest()
    if got != entry.sha256:
        raise InputError(f"{path}/{name}: must have SHA-256 {entry.sha256[:16]}... (got {got[:16]}...). {AGAIN}")


def _check_content(path: Path, manifest: Manifest, read: Callable[[str], bytes]) -> None:
    """Hold the required files against the manifest; `read` returns the content of a listed file."""
    for name in manifest.required_files:
        if name not in manifest.files:
            raise InputError(f"{path}: {name} is missing. {AGAIN}")
        content = read(name)
        if name == GOLDEN:
            golden_data.from_bytes(content, manifest.inputs, manifest.outputs, f"{path}/{name}")
        elif name == ENGINE:
            _check_header(f"{path}/{name}", manifest, content)
        elif name == HYBRID:
            _check_hybrid(f"{path}/{name}", manifest, content)


def _check_hybrid(where: str, manifest: Manifest, data: bytes) -> None:
    """Hold a hybrid module's bindings, and the header of each of its plans, against the manifest."""
    decoded = hybrid.from_bytes(data, where)
    got = (tuple(decoded.plan.inputs), set(decoded.plan.outputs))
    if got != (tuple(s.name for s in manifest.inputs), {s.name for s in manifest.outputs}):
        raise InputError(
            f"{where}: must have the manifest's bindings (got {', '.join([*got[0], *sorted(got[1])])}). {AGAIN}"
        )
    for number, plan in enumerate(decoded.engines):
        _check_header(f"{where}: engine {number}", manifest, plan)


def _check_header(where: str, manifest: Manifest, data: bytes) -> None:
    """Hold the plan's own header against the manifest: flavour, version and, in an RTX plan, compute capabilities."""
    engine = manifest.engine
    assert engine is not None
    header = read_header(data, where)
    if header.flavour != engine.target:
        raise InputError(
            f"{where}: must be a plan of {engine.target}, as the manifest says (got {header.flavour}). {AGAIN}"
        )
    numbers = re.findall(r"\d+", engine.version)[:4]
    # Where a plan's header is of a form whose version field is not known, there is nothing to compare.
    if header.version and header.version.split(".")[: len(numbers)] != numbers:
        raise InputError(
            f"{where}: must be of version {engine.version}, as the manifest says (got {header.version}). {AGAIN}"
        )
    if engine.target == "tensorrt_rtx" and set(header.compute_capabilities) != set(engine.compute_capabilities):
        wanted = ", ".join(engine.compute_capabilities) or "portable"
        got = ", ".join(header.compute_capabilities) or "portable"
        raise InputError(f"{where}: must be for {wanted}, as the manifest says (got {got}). {AGAIN}")

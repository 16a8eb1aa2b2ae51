"""Pipes, devices and the streams of this process (/dev/stdin, /dev/fd/63), where a file is expected.

One rule for every path that a user gives. What is read is a file or a folder: a pipe without a writer would be waited
for, and gives what it holds once. Only job files (but those of a night, which goes back to them, and of `tune`, which
writes beside them) and keys may come by `<(command)`: that is a descriptor of this process, and a file with the content
takes its place. What is written may go to a pipe or a device where nobody reads it back.
"""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

from trtpipe.errors import InputError

#: No job file and no key is as long; what reads them says so.
_MOST_TAKEN_BYTES = 1 << 24
#: The name of a file in memory that holds what a pipe gave.
_TAKEN = "trtpipe-taken"


def is_stream(path: Path) -> bool:
    """Whether a path is no file and no folder, or a stream of this process, whatever that leads to."""
    return _is_special(path) or descriptor_of(path) is not None


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def descriptor_of(path: Path) -> int | None:
    """The descriptor of this process that a path names, as /dev/stdout and /dev/fd/63 do."""
    for _ in range(8):  # /dev/stdout is a link to /proc/self/fd/1, where a link leads to the file
        folder, name = os.path.split(os.path.abspath(path))
        if os.path.realpath(folder) == f"/proc/{os.getpid()}/fd" and name.isdecimal():
            return int(name)
        if not path.is_symlink():
            return None
        path = Path(folder, os.readlink(path))
    return None


def require_no_stream(path: Path) -> None:
    """Nothing, where `path` is a file or a folder, or nothing is there.

    Raises:
        InputError: it is a pipe or a device.
    """
    if _is_special(path):
        raise InputError(
            f"{path}: must be a file or a folder (got a pipe or a device). Save its content in a file, and give that."
        )


def take(path: Path) -> None:
    """Where a stream of this process is given for a file, put a file with its content in its place, which can be read
    as often as any.

    Raises:
        InputError: it is another pipe or device.
    """
    descriptor = descriptor_of(path)
    if descriptor is None or not _is_special(path):
        require_no_stream(path)
        return
    content = bytearray()
    while len(content) <= _MOST_TAKEN_BYTES:
        select.select([descriptor], [], [])  # whoever made it may have made it non-blocking
        if not (part := os.read(descriptor, 1 << 16)):
            break
        content += part
    with os.fdopen(os.memfd_create(_TAKEN), "wb") as file:
        file.write(content)
        file.flush()
        os.dup2(file.fileno(), descriptor)


def folder_of(path: Path) -> Path:
    """The folder that a file is in, links resolved; of what was taken from a pipe the current one."""
    real = path.resolve()
    return Path.cwd() if real.name.startswith(f"memfd:{_TAKEN}") else real.parent


def open_stream(path: Path) -> int:
    """A descriptor to write to a pipe or a device, which is not waited for.

    Raises:
        InputError: nothing reads from it.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise InputError(f"{path}: is a pipe that nothing reads. Start its reader first, or name a file.") from None
    os.set_blocking(descriptor, True)
    return descriptor

"""Paths that code opens: whose they are, and whether they were given from the current folder."""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import calib
from calib.user_code import in_packages

_METADATA = re.compile(r".*?\.dist-info(?=/|$)")


class FilePath(str):
    """An absolute path, links not followed; `relative` where it was given from the current folder."""

    relative = False


def path_of(value: object) -> FilePath | None:
    """The path that a function was given; None for one of Python, a package or the system, and for no path."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        return None
    given = os.fsdecode(value)
    path = FilePath(os.path.abspath(given))
    if path.startswith(_PROCESS):  # links to what the process has: its current folder, its root, what it has opened
        path = FilePath(os.path.realpath(path))
    if _systems(path + os.sep) or is_packages(path):
        return None
    path.relative = not os.path.isabs(given)
    return path


def is_own(source: str) -> bool:
    """Whether a source file is the user's own: none of Python, an installed package or trtpipe."""
    return not source.startswith("<") and not _systems(source) and not is_packages(source)


def is_packages(path: str) -> bool:
    """Whether a path is in a folder of installed packages, or is the metadata of one that was installed elsewhere (`pip
    install --target`): any code that asks for entry points reads all of them. What was installed has a RECORD there; a
    folder of that name without one is the user's own."""
    if in_packages(path):
        return True
    metadata = _METADATA.match(path)
    return metadata is not None and os.path.isfile(os.path.join(metadata[0], "RECORD"))


@dataclass(frozen=True)
class Stamp:
    """A file when it was read: size, time of modification in ns, and inode; `since`, when it came to be at its path, or
    was last changed in any way, in ns; and the path that it has behind links, its own or of a folder above it."""

    size: int
    modified: int
    inode: int
    since: int
    real: str

    def is_of(self, path: str) -> bool:
        """Whether the file at a path is the same, with the same content: another name or other rights change none."""
        now = stamp_of(path)
        return now is not None and (now.size, now.modified, now.inode) == (self.size, self.modified, self.inode)


def stamp_of(path: str) -> Stamp | None:
    """What is at a path now; None where nothing is."""
    try:
        there, real = os.stat(path), os.path.realpath(path)
        links = (folder for folder in map(str, Path(path).parents if real != path else ()) if os.path.islink(folder))
        since = max(os.lstat(p).st_ctime_ns for p in (path, *links))
    except OSError:
        return None
    return Stamp(there.st_size, there.st_mtime_ns, there.st_ino, since, real)


def _systems(path: str) -> bool:
    """Whether a path is Python's or the system's: a RAM disk, and drives that a desktop has mounted, are the user's."""
    return path.startswith(_SYSTEM) and not path.startswith(_USERS)


def _own_folders() -> tuple[str, ...]:
    """Folders of Python, installed packages and the system: their versions are ingredients, not their files."""
    paths = sysconfig.get_paths()
    folders = [paths[n] for n in ("stdlib", "platstdlib", "purelib", "platlib")] + [site.getusersitepackages()]
    folders += [
        p for p in sys.path if os.path.basename(p) == f"python{sysconfig.get_config_var('py_version_nodot')}.zip"
    ]
    folders += [str(Path(__file__).parents[2]), str(Path(calib.__file__).parent)]
    folders += ["/proc", "/sys", "/dev", "/etc", "/run", "/lib", "/usr/lib", "/usr/share/zoneinfo", "/usr/share/locale"]
    return tuple(f + os.sep for f in {*folders, *map(os.path.realpath, folders)})


_PROCESS = ("/proc/", "/dev/fd/")
_SYSTEM = _own_folders()
_USERS = ("/dev/shm/", "/run/media/", "/run/mount/", "/run/user/")

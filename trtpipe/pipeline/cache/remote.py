"""Entries of the cache at any fsspec address: file://, s3://, gs://, memory:// ..."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from calib.strictjson import loads
from calib.types import JsonMapping
from trtpipe.errors import InputError, MissingError
from trtpipe.outputs import is_plain
from trtpipe.packages import not_installed
from trtpipe.pipeline.cache.events import Unheard

#: The file of an entry that says what it is.
ENTRY = "entry.json"
#: Longer entries are refused unread.
_MOST_HEAD_BYTES = 64 << 20


@dataclass(frozen=True)
class Head:
    """What an entry says it is: schema, kind and key, its facts, and (bytes, SHA-256) of each file by name."""

    schema: object
    kind: object
    key: object
    facts: JsonMapping
    files: Mapping[str, tuple[int, str]]


class DamagedEntry(Exception):
    """An entry differs from what was put: it counts as absent, and its result is made again."""


def head_of(data: bytes) -> Head | None:
    """The head in `data`; None for anything else, as whoever can write to a store can have written it."""
    try:
        raw: Any = loads(data)
        files = {n: (int(size), str(sha256)) for n, (size, sha256) in raw["files"].items() if is_plain(n)}
        if len(files) != len(raw["files"]):
            return None
        return Head(raw["schema"], raw["kind"], raw["key"], dict(raw["facts"]), files)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


class Store:
    """A folder at `url`.

    An entry's `last` file is written after all others, and each file under another name first where the file system
    can rename in one step; object stores write an object whole or not at all. So an entry with its `last` file is
    complete, and its digests are checked when it is fetched.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise MissingError(f"--store: {not_installed('fsspec')}") from None
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise MissingError(f"--store: {url} needs another package (got: {error}). Install it.") from None
        except ValueError as error:
            raise InputError(f"--store: must be an address that fsspec knows (got {url!r}: {error}).") from None
        self.url = url

    def get(self, name: str) -> dict[str, bytes] | None:
        """Every file of an entry, checked; None when it is not there.

        Raises:
            DamagedEntry: it is there, and is not what was put.
            MissingError: the store cannot be reached.
        """
        folder, head = f"{self._root}/{name}", None
        try:
            with Unheard():
                data = self._fs.cat_file(f"{folder}/{ENTRY}", start=0, end=_MOST_HEAD_BYTES)
                head = head_of(data)
                if head is None:
                    raise DamagedEntry(folder)
                content = {n: self._fs.cat_file(f"{folder}/{n}") for n in head.files}
        except FileNotFoundError as error:
            if head is None:
                return None
            raise DamagedEntry(folder) from error
        except DamagedEntry:
            raise
        except Exception as error:  # each file system has exceptions of its own
            raise MissingError(f"--store: {self.url} cannot be reached ({error}).") from error
        if any((len(content[n]), hashlib.sha256(content[n]).hexdigest()) != f for n, f in head.files.items()):
            raise DamagedEntry(folder)
        return {**content, ENTRY: data}

    def put(self, name: str, content: Mapping[str, bytes], last: str) -> None:
        """Write an entry, its file `last` after all others.

        Raises:
            MissingError: the store cannot be written to.
        """
        folder = f"{self._root}/{name}"
        try:
            with Unheard():
                self._fs.makedirs(folder, exist_ok=True)
                for file in sorted(content, key=lambda f: f == last):
                    self._write(f"{folder}/{file}", content[file])
        except Exception as error:  # likewise
            raise MissingError(f"--store: {self.url} cannot be written to ({error}).") from error

    def _write(self, path: str, data: bytes) -> None:
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        if "file" not in protocols:
            self._fs.pipe_file(path, data)
            return
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, path)
        except BaseException:  # on a full disk it would be what keeps it full
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

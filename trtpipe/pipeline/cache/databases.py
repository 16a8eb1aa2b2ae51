"""SQLite's files, which it opens in native code: a database, what lies beside it, and those that SQL attaches."""

from __future__ import annotations

import functools
import re
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from trtpipe.pipeline.cache.native import replace_everywhere

T = TypeVar("T")

#: Ends of the names of the files that hold what is not in a database yet, or not any more.
JOURNALS = ("-wal", "-journal")
_ATTACH = re.compile(r"\battach\s+(?:database\s+)?(.+?)\s+as\s", re.IGNORECASE | re.DOTALL)
_TEXT = re.compile(r"'((?:[^']|'')*)'|\"((?:[^\"]|\"\")*)\"")


class Attached(NamedTuple):
    """A database that SQL attaches: its path, or None where an expression names it, whose text is `said`."""

    path: str | None
    said: str


def trace_connections(tell: Callable[[str], None]) -> None:
    """Give the text of each statement to `tell`, of all connections that are opened from now on."""
    connect = sqlite3.connect

    @functools.wraps(connect)
    def traced(*args: object, **kwargs: object) -> object:
        connection = connect(*args, **kwargs)  # type: ignore[call-overload]
        if isinstance(connection, sqlite3.Connection):
            connection.set_trace_callback(tell)
        return connection

    replace_everywhere("connect", connect, traced)


def path_of_database(given: T) -> T | str:
    """What `sqlite3.connect` or ATTACH was given, without the rest of a URI."""
    if isinstance(given, str) and given.startswith("file:"):
        return urllib.parse.unquote(urllib.parse.urlsplit(given).path)
    return given


def attached(sql: str) -> Iterator[Attached]:
    """The databases that a statement attaches; its parameters are in the text, as SQLite traces it."""
    if not re.match(r"(\s|--[^\n]*\n|/\*.*?\*/)*attach\b", sql, re.IGNORECASE | re.DOTALL):
        return
    for found in _ATTACH.finditer(sql):
        text = _TEXT.fullmatch(said := found[1])
        quote = said[0]
        path = None if text is None else path_of_database(said[1:-1].replace(quote * 2, quote))
        yield Attached(path, said)

"""Results of stages from the build cache, or from the memory of this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from calib.errors import CalibError
from trtpipe.pipeline.cache.reads import Reads
from trtpipe.pipeline.cache.recorder import Heard, Recorder
from trtpipe.pipeline.cache.remote import DamagedEntry
from trtpipe.pipeline.cache.store import Cache

if TYPE_CHECKING:
    from trtpipe.pipeline.cache.keys import StageKeys
    from trtpipe.pipeline.codecs import Codec
    from trtpipe.progress import Reporter

T = TypeVar("T")


class Memory:
    """The latest model and graph in this process: jobs of one matrix that follow each other share them.

    `modules` are the names of the modules that were loaded while the latest job ran, `model_modules` of those that the
    shared model was made with. `heard` is what jobs have read so far, by what names their code (`apart.code_of`).
    """

    def __init__(self) -> None:
        self.modules: frozenset[str] = frozenset()
        self.model_modules: frozenset[str] = frozenset()
        self.heard: dict[str, Heard | None] = {}
        self._key = ""
        self._values: dict[str, tuple[object, Reads]] = {}

    def get(self, key: str, name: str) -> tuple[object, Reads] | None:
        """The value of this name made for this key, and what was read to make it; None when there is none."""
        return self._values.get(name) if key == self._key else None

    def put(self, key: str, name: str, value: object, reads: Reads) -> None:
        """Remember a value; what other keys made is forgotten."""
        if key != self._key:
            self._key, self._values = key, {}
        self._values[name] = (value, reads)

    def rename(self, key: str, known_as: str) -> None:
        """What was made for `key` is found as `known_as` from now on: its key with all that was read to make it."""
        if key == self._key:
            self._key = known_as

    def stale_modules(self, model_key: str) -> frozenset[str]:
        """Modules that the next job must load anew; those of a model that it shares stay."""
        return self.modules - self.model_modules if self.get(model_key, "model") else self.modules


class CachedResults:
    """`Results` of one job, by its stages' keys.

    Args:
        cache: the build cache.
        keys: the keys of the job's stages.
        memory: of this process.
        reporter: receives a note when another process computes the same result.
        recorder: records what the job's code reads.
        keys_now: the keys with all that was recorded so far, to store what was just made; None: its inputs have changed
            meanwhile, and it is not stored.
    """

    def __init__(
        self,
        cache: Cache,
        keys: StageKeys,
        memory: Memory,
        reporter: Reporter,
        recorder: Recorder,
        keys_now: Callable[[], StageKeys | None],
    ) -> None:
        self._cache, self._keys, self._memory, self._reporter = cache, keys, memory, reporter
        self._recorder, self._keys_now = recorder, keys_now
        #: Stages whose result was not made, in the order in which they were asked for.
        self.reused: list[str] = []

    def in_memory(self, name: str, make: Callable[[], T]) -> T:
        """The model or graph that an earlier job in this process made, or `make()`."""
        known = self._memory.get(self._keys.model, name)
        if known is not None:
            value, reads = known
            self._recorder.add(reads)
            if name == "capture":
                self.reused.append(name)
            return value  # type: ignore[return-value]  # what `make` of this name gives
        before = set(sys.modules)
        with self._recorder.only() as part:
            made = make()
        if name == "model":
            self._memory.model_modules = frozenset(set(sys.modules) - before)
        self._memory.put(self._keys.model, name, made, part.reads)
        return made

    def on_disk(self, codec: Codec[T], make: Callable[[], T]) -> T:
        """A stage's result from the cache; made and stored when it is not there. One process at a time makes it."""
        kind, key = codec.kind, _key(self._keys, codec.stage)
        stored = self._read(key, codec)
        if stored is not None:
            return stored[0]
        with self._cache.lock(kind, key, lambda: self._waiting(kind)):
            stored = self._read(key, codec)
            if stored is not None:
                return stored[0]
            value = make()
            if (keys := self._keys_now()) is not None:
                facts, files = codec.dump(value)
                self._cache.put(kind, _key(keys, codec.stage), facts, files)
            return value

    def recording(self) -> AbstractContextManager[object]:
        """Record what is read."""
        return self._recorder

    def _read(self, key: str, codec: Codec[T]) -> tuple[T] | None:
        entry = self._cache.get(codec.kind, key)
        if entry is None:
            return None
        try:
            value = codec.load(entry)
        except (DamagedEntry, CalibError, KeyError, TypeError, ValueError):
            self._cache.discard(codec.kind, key, damaged=True)
            return None
        if codec.kind == codec.stage:
            self.reused.append(codec.kind)
        return (value,)

    def _waiting(self, kind: str) -> None:
        self._reporter.note(f"{kind}: another process is making the same; waiting for it")


def _key(keys: StageKeys, stage: str) -> str:
    key: str | None = getattr(keys, stage)
    assert key is not None
    return key

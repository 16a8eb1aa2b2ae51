"""Kernels that TensorRT-RTX compiles for a GPU when an engine is loaded there, kept in a file for the next time.

A TensorRT-RTX engine is finished on the user's machine: kernels are compiled just in time, which takes seconds. Its
runtime cache holds them, and takes no blob of another release, GPU or driver (`IRuntimeCache.deserialize`). Kernels are
code, so the file belongs to one user, and one that others could have written is not read.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.atomic import write_whole
from trtpipe.outputs import cache_folder

if TYPE_CHECKING:
    from trtpipe.trt.driver import Gpu
    from trtpipe.trt.types import IRuntimeCache, IRuntimeConfig


_REFUSED = "TensorRT-RTX gives no runtime cache: the next load compiles the engine again"


def kernel_file(engine: bytes, gpu: Gpu) -> Path:
    """Where the kernels of this engine on this kind of GPU are kept: in the user's cache folder.

    Raises:
        InputError: the user has none.
    """
    return cache_folder() / "rtx-kernels" / f"{hashlib.sha256(engine).hexdigest()[:32]}-{gpu.file_name}"


class KernelCache:
    """A runtime cache of TensorRT-RTX and its file; any number of threads may use it.

    Args:
        path: the file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = b""
        self._cache: IRuntimeCache | None = None
        self._turn = threading.Lock()

    @property
    def new(self) -> bool:
        """Nothing came from the file and nothing was written to it."""
        return not self._before

    def attach(self, config: IRuntimeConfig | None) -> tuple[str, ...]:
        """Give an `IRuntimeConfig` the cache, read from the file the first time; notes on why it is not used.

        TensorRT-RTX answers None and False where it fails, also for the config.
        """
        notes: tuple[str, ...] = ()
        if config is None:
            return (_REFUSED,)
        with self._turn:
            if self._cache is None:
                self._cache = config.create_runtime_cache()
                if self._cache is not None:
                    notes = self._read(self._cache)
            if self._cache is None or not config.set_runtime_cache(self._cache):
                notes += (_REFUSED,)
        return notes

    def save(self) -> tuple[str, ...]:
        """Write the file where kernels were compiled that it does not hold; a note where that cannot be done."""
        with self._turn:
            if self._cache is None:
                return ()
            held = self._cache.serialize()
            if held is None:
                return (_REFUSED,)
            data = bytes(held)
            if not data or data == self._before:
                return ()
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(self.path, data)
                self.path.chmod(0o600)
            except OSError as error:
                return (f"kernels compiled for this GPU cannot be kept in {self.path} ({error.strerror or error})",)
            self._before = data
            return ()

    def _read(self, cache: IRuntimeCache) -> tuple[str, ...]:
        try:
            with self.path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return (f"{self.path} is not used: another user owns it or may write to it",)
                data = file.read()
        except FileNotFoundError:
            return ()
        except OSError as error:
            return (f"{self.path} cannot be read ({error.strerror or error})",)
        if cache.deserialize(data):
            self._before = data
        return ()

"""Timing caches on disk: one file for each TensorRT, GPU and driver, since a timing is true for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from calib.files import read_regular
from trtpipe.atomic import write_whole
from trtpipe.errors import InputError
from trtpipe.outputs import require_writable_file
from trtpipe.trt.driver import Driver, Gpu
from trtpipe.trt.flavour import Flavour
from trtpipe.version_numbers import sm

if TYPE_CHECKING:
    from trtpipe.trt.types import IBuilderConfig, ITimingCache


#: A folder with this file has no other: it is the cache to use, whatever machine it comes from. TensorRT decides.
GIVEN = "given.timing"
#: What a note about a timing cache begins with.
NOTE = "timing cache "


def file_of(folder: Path, flavour: Flavour, driver: Driver, gpu: Gpu) -> Path:
    """The timing cache of this TensorRT, GPU and driver in a folder of them."""
    given = folder / GIVEN
    return given if given.is_file() else folder / file_name(flavour, driver, gpu)


def file_name(flavour: Flavour, driver: Driver, gpu: Gpu) -> str:
    """Like "tensorrt-10.16.1.11_NVIDIA-L4_sm89_cuda13.0.timing"."""
    capability = f"sm{sm(gpu.compute_capability)}"
    return f"{flavour.name}-{flavour.version}_{gpu.file_name}_{capability}_cuda{driver.cuda}.timing"


def attach(config: IBuilderConfig, path: Path) -> tuple[ITimingCache, tuple[str, ...]]:
    """The timing cache of `path`, set on the config (an empty one when there is none), and notes.

    Raises:
        InputError: when the file cannot be read.
        OSError: when it could not be written afterwards.
    """
    notes: tuple[str, ...] = ()
    try:
        cache = config.create_timing_cache(_read(path))
    except OSError as error:
        raise InputError(
            f"build.timing_cache: {path} must be readable (got {error.strerror}). Give a folder for the caches."
        ) from error
    require_writable_file(path)
    if cache is None or not config.set_timing_cache(cache, False):
        which = "of the bundle" if path.name == GIVEN else path.name
        notes = (f"{NOTE}{which}: TensorRT did not accept it, so it was begun anew",)
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache, notes


def save(config: IBuilderConfig, path: Path) -> tuple[bytes, tuple[str, ...]]:
    """Write the config's timing cache, with what another build has written to `path` since, whole or not at all.

    Returns:
        The cache's bytes; and a note where they could not be written, or where what is there could not be read and
        was left: the engine that was just built counts for more.
    """
    cache = config.get_timing_cache()
    try:
        present = _read(path)
    except OSError as error:
        return bytes(cache.serialize()), (_lost(path, "read", error),)
    if present:
        other = config.create_timing_cache(present)
        if other is not None:
            cache.combine(other, False)
    data = bytes(cache.serialize())
    try:
        write_whole(path, data)
    except OSError as error:
        return data, (_lost(path, "written", error),)
    return data, ()


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        return b""


def _lost(path: Path, done: str, error: OSError) -> str:
    return f"{NOTE}{path}: could not be {done} ({error.strerror or error}); the next build begins anew"

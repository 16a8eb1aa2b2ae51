"""Samples from one file of arrays: .npy, .npz or .safetensors. Nothing is unpickled."""

from __future__ import annotations

import functools
import hashlib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from calib.errors import CalibError
from calib.files import suffix_of, unreadable
from calib.samples import ARRAY_SUFFIXES, InputSpec, Sample, fit, require_shapes
from calib.types import Array

LABELS = "labels"


class ArraySamples:
    """Arrays [S, ...] by input name, read a sample at a time through `rows`."""

    sequential, whole = False, True

    classes: tuple[str, ...] | None = None
    recipe = "arrays"

    def __init__(
        self,
        where: str,
        inputs: Sequence[InputSpec],
        rows: dict[str, Callable[[int], Array]],
        count: int,
        labels: tuple[int, ...] | None,
    ) -> None:
        self._where, self._inputs, self._rows = where, tuple(inputs), rows
        self.root = f"{Path(where).parent}/"
        self.ids = tuple(f"{Path(where).name}[{i}]" for i in range(count))
        self.labels = labels

    def load(self, at: int) -> Sample:
        """One row of every input."""
        return fit(f"{self._where}[{at}]", self.stored(at), self._inputs)

    def stored(self, at: int) -> dict[str, Array]:
        """One row of every input in the dtype of the file, unchecked."""
        return {i.name: self._rows[i.name](at) for i in self._inputs}

    def content(self, at: int) -> str:
        """sha256 hex of the rows in the binding dtypes: whichever dtype the file has, equal values have one digest."""
        return array_digest(self.load(at))


def array_digest(arrays: dict[str, Array]) -> str:
    """sha256 hex of arrays by name: their dtypes, shapes and bytes. -0.0 counts as 0.0."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        equal = array + array.dtype.type(0) if array.dtype.kind == "f" else array
        little = equal.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{name}\0{little.dtype.str}\0{list(array.shape)}\0".encode())
        digest.update(np.ascontiguousarray(little).tobytes())
    return digest.hexdigest()


def open_arrays(path: str, inputs: Sequence[InputSpec]) -> ArraySamples:
    """The samples of one file, of which headers and labels are read now, the rest when the first sample is: .npy and
    .safetensors by the sample, .npz whole into memory.

    Raises:
        CalibError: no such file, another kind of file, a damaged one, missing or further arrays, lengths that differ,
        a shape that is not the input's, or labels that are no integers [S].
    """
    readers = dict(zip(ARRAY_SUFFIXES, (_npy, _npz, _safetensors), strict=True))
    file = Path(path)
    suffix = suffix_of(file)
    if suffix not in readers:
        *most, last = ARRAY_SUFFIXES
        raise CalibError(f"{path}: must be a {', '.join(most)} or {last} file (got {suffix or 'no suffix'!r}).")
    if not file.is_file():
        raise CalibError(f"{path}: must be a file (got {'a folder' if file.is_dir() else 'nothing'}). Check the path.")
    with _readable(path):
        rows = readers[suffix](file, inputs)
    names = {i.name for i in inputs}
    if rows.keys() - ({LABELS} - names) != names:
        raise CalibError(
            f"{path}: must hold the inputs {sorted(names)}, and may hold {LABELS!r} (got {sorted(rows)}). "
            f"Rename the arrays."
        )
    lengths = {name: shape[0] if shape else 0 for name, (shape, _) in rows.items()}
    if len(set(lengths.values())) != 1:
        raise CalibError(
            f"{path}: every array must have the same number of samples (got {lengths}). Save the same samples in each."
        )
    count = next(iter(lengths.values()))
    if count:
        require_shapes(path, {i.name: rows[i.name][0][1:] for i in inputs}, inputs)
    labels = None
    if LABELS in rows and LABELS not in names:
        with _readable(path):
            raw = np.array([rows[LABELS][1](i) for i in range(count)])
        if count and (raw.ndim != 1 or raw.dtype.kind not in "iu"):  # without a row there is no dtype
            raise CalibError(
                f"{path}: {LABELS!r} must be integers [S] (got {raw.dtype} {list(raw.shape)}). "
                "Save one class number a sample."
            )
        labels = tuple(int(v) for v in raw)
    return ArraySamples(path, inputs, {n: rows[n][1] for n in names}, count, labels)


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (CalibError, ImportError):
        raise
    except Exception as error:  # NumPy, zipfile, zlib and safetensors have a dozen for a damaged file
        if isinstance(error, OSError) and error.errno is not None:
            raise CalibError(unreadable(path, error)) from error
        raise CalibError(
            f"{path}: must be a readable {suffix_of(path)} file of plain arrays (got {error}). Save it again."
        ) from error


RowReaders = dict[str, tuple[tuple[int, ...], Callable[[int], Array]]]


def _npy(path: Path, inputs: Sequence[InputSpec]) -> RowReaders:
    if len(inputs) != 1:
        raise CalibError(f"{path}: a .npy file feeds exactly one input (got {len(inputs)}). Use .npz or .safetensors.")
    array = np.lib.format.open_memmap(path, mode="r")
    return {inputs[0].name: (array.shape, lambda i: np.array(array[i]))}


def _npz(path: Path, inputs: Sequence[InputSpec]) -> RowReaders:
    with zipfile.ZipFile(path) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist()}
        shapes = {name: _npy_shape(archive, member) for name, member in members.items()}
    return {name: (shape, _npz_rows(path, name)) for name, shape in shapes.items()}


def _npy_shape(archive: zipfile.ZipFile, member: str) -> tuple[int, ...]:
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError(f"{member} holds Python objects")
    return shape


def _npz_rows(path: Path, name: str) -> Callable[[int], Array]:
    """Reads rows of an array that is decompressed for the first of them."""

    @functools.cache
    def array() -> Array:
        with _readable(path), np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive[name])

    return lambda i: array()[i]


#: The dtypes of safetensors that NumPy has too.
_NUMPYS = ("BOOL", "U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "F16", "F32", "F64")


def _safetensors(path: Path, inputs: Sequence[InputSpec]) -> RowReaders:
    file: Any = safe_open(str(path), framework="np")
    for name in {*(i.name for i in inputs), LABELS} & set(file.keys()):
        if (kind := file.get_slice(name).get_dtype()) not in _NUMPYS:
            raise CalibError(f"{path}: {name!r} must be in a dtype of NumPy's (got {kind}). Save it in float32.")
    return {name: (tuple((part := file.get_slice(name)).get_shape()), _slice_row(part)) for name in file.keys()}  # noqa: SIM118


def _slice_row(part: Any) -> Callable[[int], Array]:
    return lambda i: part[i : i + 1][0]

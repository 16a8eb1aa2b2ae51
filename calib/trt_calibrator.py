"""TensorRT's own INT8 calibrators (8.6 to 10.x), fed by a calib source.

Nothing here imports TensorRT: the classes are made from the module passed in. TensorRT reads an exception in
`get_batch` as the end of the data and swallows those of the other methods, so each one is stored, and `finish`
re-raises it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from calib.algorithms import AUTO_BASE, BASES, PERCENTILE
from calib.data import Source
from calib.errors import CalibError
from calib.files import read_regular, replacing, unreadable
from calib.samples import require_batch_size
from calib.strictjson import loads
from calib.trt_cache import read_cache
from calib.types import Array

#: First word of the line that says what a cache file is for.
_MAGIC = "calib-trt-cache-2"

#: Puts an array on the device: (address, whatever must stay alive for the address to hold).
PlaceBatch = Callable[[Array], tuple[int, object]]


class NativeCalibrator(Protocol):
    """What `make_calibrator` returns: TensorRT's interface, and these."""

    notes: tuple[str, ...]

    def finish(self) -> None:
        """After the build: re-raise what went wrong in a callback, and refuse a calibration that was cut short."""


def make_calibrator(
    trt: ModuleType,
    source: Source,
    *,
    batch_size: int,
    place: PlaceBatch,
    algorithm: str = AUTO_BASE,
    percentile: float = PERCENTILE,
    cache: str | Path | None = None,
    made_from: Mapping[str, str] | None = None,
) -> NativeCalibrator:
    """An `IInt8*Calibrator` of the given module that reads `source`. Keep it alive until the build is over, then
    `finish()`.

    TensorRT reads exactly the calibration profile's opt shape from each address, so every batch has `batch_size`
    samples: the last one is filled up with the first samples, which `notes` says.

    Args:
        trt: an imported `tensorrt` of 8.6 to 10.x.
        source: samples by the network's input names.
        batch_size: the batch of the calibration profile's opt shape.
        algorithm: entropy_2, entropy, minmax or percentile (the legacy calibrator).
        percentile: the quantile of the legacy calibrator, in (0, 100].
        cache: a file to read scales from, or to write them to where there is none.
        made_from: whatever else the scales depend on, such as the digests of weights and graph, by a name for errors.
        place: puts an array on the device.

    Returns:
        An instance of a subclass of TensorRT's class, which also is a `NativeCalibrator`.

    Raises:
        CalibError: a module without calibrators, an algorithm TensorRT has not, a cache file that is damaged or made
            from something else.
    """
    if algorithm not in BASES:
        raise CalibError(
            f"calibration.algorithm: must be one of {', '.join(BASES)} for TensorRT's own calibrators (got "
            f"{algorithm!r}). "
            "Let calib calibrate (Q/DQ) for the others."
        )
    base = getattr(trt, BASES[algorithm], None)
    if base is None:
        raise CalibError(
            f"TensorRT {trt.__version__}: has no calibrators: only 8.6 to 10.x have them. Use Q/DQ in the graph."
        )
    require_batch_size(batch_size)
    parts = {
        **(made_from or {}),
        "data": source.digest,
        "algorithm": f"percentile {percentile:.9g}" if algorithm == "percentile" else algorithm,
        "batch size": str(batch_size),
        "TensorRT": str(trt.__version__),
    }
    file = None if cache is None else Path(cache)
    cached, notes = _read_cached(file, parts)
    spare = -source.sample_count % batch_size
    if spare and cached is None:
        notes = (*notes, f"{spare} samples are used twice to fill the last calibration batch of {batch_size}.")
    state = _Feed(source, batch_size, place, cached, file, parts, notes)
    calibrator: NativeCalibrator = _class(base, algorithm == "percentile")(state, percentile / 100)
    return calibrator


class _Feed:
    """The state and the callbacks, apart from TensorRT's class hierarchy."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        place: PlaceBatch,
        cached: bytes | None,
        file: Path | None,
        parts: Mapping[str, str],
        notes: tuple[str, ...],
    ) -> None:
        self.source, self.batch_size, self.place = source, batch_size, place
        self.cached, self.file, self.parts, self.notes = cached, file, parts, notes
        self.error: BaseException | None = None
        self.batches: Iterator[Mapping[str, Array]] = self._full_batches()
        self.alive: list[object] = []
        self.given, self.ended, self.histogram = 0, False, b""

    def get_batch(self, names: list[str]) -> list[int] | None:
        """Addresses of the next batch in the order of `names`; None at the end."""
        if set(names) != set(self.source.names) or len(names) != len(self.source.names):
            raise CalibError(
                f"calibration: the network's inputs must be those of the data, {sorted(self.source.names)} (got "
                f"{names})."
            )
        arrays = next(self.batches, None)
        if arrays is None:
            self.ended, self.alive = True, []
            return None
        placed = [self.place(np.ascontiguousarray(arrays[name])) for name in names]
        self.alive = [owner for _, owner in placed]  # the batch before may go now that its successor was asked for
        self.given += 1
        return [int(address) for address, _ in placed]

    def write(self, data: bytes) -> None:
        """Keep TensorRT's cache, and write it to the file with what it was made from."""
        self.cached = bytes(data)
        if self.file is not None:
            digest = hashlib.sha256(self.cached).hexdigest()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            head = f"{_MAGIC} {digest} {json.dumps(dict(self.parts), sort_keys=True)}\n"
            with replacing(self.file) as sibling:
                sibling.write_bytes(head.encode() + self.cached)

    def finish(self) -> None:
        """See NativeCalibrator."""
        if self.error is not None:
            raise self.error
        if not self.given and self.cached is None:
            raise CalibError(
                "calibration: TensorRT never asked for the data. Set the INT8 flag and the "
                "calibrator on the "
                "builder's config."
            )
        if self.given and not self.ended:
            raise CalibError(
                f"calibration: TensorRT did not read all of the data ({self.given} batches of "
                f"{-(-self.source.sample_count // self.batch_size)} read). See the build's log for why it stopped."
            )

    def _full_batches(self) -> Iterator[Mapping[str, Array]]:
        first: Mapping[str, Array] = {}
        for batch in self.source.batches(self.batch_size):
            first = first or batch.arrays
            missing = self.batch_size - len(batch.ids)
            if not missing:
                yield batch.arrays
                continue
            more = {n: np.concatenate([a] + [first[n]] * -(-missing // len(first[n]))) for n, a in batch.arrays.items()}
            yield {n: a[: self.batch_size] for n, a in more.items()}


def _class(base: Any, legacy: bool) -> type:
    """A subclass of one of TensorRT's calibrator classes whose every callback stores what it raises."""

    def guarded(method: Callable[..., object]) -> Callable[..., object]:
        def call(self: Any, *args: object) -> object:
            feed: _Feed = self._feed
            if feed.error is not None:
                return None
            try:
                return method(feed, *args)
            except BaseException as error:  # noqa: BLE001  TensorRT would swallow it; `finish` raises it
                feed.error = error
                return None

        return call

    def init(self: Any, feed: _Feed, quantile: float) -> None:
        base.__init__(self)  # pybind11 needs the base named, not super()
        self._feed, self._quantile = feed, quantile

    members: dict[str, object] = {
        "__init__": init,
        "__doc__": f"{base.__name__} that reads a calib source.",
        "notes": property(lambda self: self._feed.notes),
        "finish": lambda self: self._feed.finish(),
        "get_batch_size": lambda self: self._feed.batch_size,
        "get_batch": guarded(_Feed.get_batch),
        "read_calibration_cache": guarded(lambda feed: feed.cached),
        "write_calibration_cache": guarded(_Feed.write),
    }
    if legacy:
        members |= {
            "get_quantile": lambda self: self._quantile,
            "get_regression_cutoff": lambda self: 1.0,
            "read_histogram_cache": lambda self, length: None,
            "write_histogram_cache": lambda self, data: None,
        }
    return type(f"Calib{base.__name__[1:]}", (base,), members)


def _read_cached(file: Path | None, parts: Mapping[str, str]) -> tuple[bytes | None, tuple[str, ...]]:
    """TensorRT's text in the cache file, if there is one, and a note that it was used.

    Raises:
        CalibError: the file is something else, damaged, or made from other `parts`.
    """
    if file is None or not file.exists():
        return None, ()
    try:
        head, _, body = read_regular(file).partition(b"\n")
    except OSError as error:
        raise CalibError(unreadable(file, error)) from error
    words = head.decode("utf-8", "replace").split(" ", 2)
    made = _made_from(words[2]) if len(words) == 3 and words[0] == _MAGIC else None
    if made is None:
        raise CalibError(
            f"{file}: must be a cache that calib wrote (got {head[:40]!r}). Remove it, or name another file."
        )
    if words[1] != hashlib.sha256(body).hexdigest():
        raise CalibError(f"{file}: was changed after it was written: its digest differs. Remove it to calibrate again.")
    if changed := [n for n in {**parts, **made} if made.get(n) != parts.get(n)]:
        shown = ", ".join(f"{n} {_short(made.get(n))} for {_short(parts.get(n))}" for n in changed)
        raise CalibError(
            f"{file}: must be made from this calibration's own model, data and settings (got {shown}). "
            "Remove it to calibrate again, or name another file."
        )
    read_cache(body, str(file))
    return body, (f"{file}: scales read from it; nothing was calibrated.",)


def _made_from(text: str) -> dict[str, str] | None:
    """The parts that a cache was made from; None when the header does not hold them."""
    try:
        parts = loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parts, dict) or not all(isinstance(v, str) for v in parts.values()):
        return None
    return parts


def _short(value: str | None) -> str:
    """A value for an error; digests by their first digits."""
    if value is None:
        return "none"
    return f"{value[:12]}..." if len(value) > 24 else value

"""Reads TensorRT's calibration cache, the text file in which the calibrators of 8.6 to 10.x keep their scales.

    TRT-<N>-<algorithm>
    <tensor name>: <8 hex digits>

N is 1000 * major + 100 * minor + patch up to 9.x and 10000 * major + 100 * minor + patch from 10 on. The digits are the
big-endian float32 scale, amax / 127. TensorRT refuses a cache of another version; names may hold colons and spaces.
The format is nowhere documented: this is what TensorRT writes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from calib.algorithms import INT8_MAX, SMALLEST_SCALE
from calib.errors import CalibError

#: TensorRT's names of its algorithms. EntropyCalibration2 and MinMaxCalibration are seen in caches, the others are
#: named alike.
CACHE_ALGORITHMS = ("EntropyCalibration2", "EntropyCalibration", "MinMaxCalibration", "LegacyCalibration")

#: What a cache begins with.
CACHE_MAGIC = "TRT-"
_HEADER = re.compile(rf"{CACHE_MAGIC}([1-9][0-9]{{3,6}})-([A-Za-z0-9]+)")
_LINE = re.compile(r"(.+): ([0-9a-f]{8})")
_MOST_SCALE = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class TrtCache:
    """One cache: its first line, which names the TensorRT version that it is for and the algorithm, and float32 scales
    by tensor name."""

    header: str
    scales: Mapping[str, float]

    @property
    def amax(self) -> dict[str, float]:
        """float32 scale * 127 by tensor name."""
        return {name: float(np.float32(scale) * np.float32(INT8_MAX)) for name, scale in self.scales.items()}


def read_cache(text: str | bytes, where: str = "TensorRT cache") -> TrtCache:
    """A cache read and fully validated.

    Args:
        text: the file's content.
        where: named in errors.

    Raises:
        CalibError: anything but a whole cache: another header, a line of another form, a name twice, a scale that is
            neither 0 nor a positive normal number, no tensor. Lines that are missing at its end do not show.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CalibError(
                f"{where}: must be UTF-8 text (got byte {error.start} that is not). Calibrate again."
            ) from error
    header, _, body = text.partition("\n")
    match = _HEADER.fullmatch(header.rstrip("\r"))
    if match is None or match[2] not in CACHE_ALGORITHMS:
        raise CalibError(
            f"{where}: must begin with TRT-<version>-<algorithm> (got {header[:60]!r}). Is it a TensorRT "
            f"calibration cache?"
        )
    scales: dict[str, float] = {}
    for number, line in enumerate(body.split("\n"), 2):
        line = line.rstrip("\r")
        if not line and number == body.count("\n") + 2:
            break
        fields = _LINE.fullmatch(line)
        if fields is None or not line.isprintable():
            raise CalibError(
                f"{where}:{number}: must read `tensor: 8 hex digits` (got {line[:80]!r}). Is the file cut short?"
            )
        name, scale = fields[1], struct.unpack(">f", bytes.fromhex(fields[2]))[0]
        if scale:  # TensorRT may write 0 for a tensor that was zero everywhere
            _checked(f"{where}:{number}", name, scale)
        if name in scales:
            raise CalibError(f"{where}:{number}: each tensor must be there once (got {name!r} again). Calibrate again.")
        scales[name] = scale
    if not scales:
        raise CalibError(f"{where}: must hold the scales of tensors (got none). Calibrate again.")
    _require_known(where, int(match[1]))
    return TrtCache(match[0], scales)


def _checked(where: str, name: str, scale: float) -> None:
    if not math.isfinite(scale) or not SMALLEST_SCALE <= float(scale) <= _MOST_SCALE:
        raise CalibError(
            f"{where}: the scale of {name!r} must be a positive normal float32 (got {scale:g}). Calibrate again."
        )


def _require_known(where: str, number: int) -> None:
    """Refuse a release of TensorRT after the last that calibrates: 8601 is 8.6.1, 100300 is 10.3.0."""
    if number // (10_000 if number >= 100_000 else 1000) > 10:
        raise CalibError(f"{where}: must be of TensorRT 10.x at most (got TRT-{number}).")

"""The bytes of a table's files: canonical JSON, packed histograms, and writing them whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from calib.audit import Halves, nine_digits
from calib.errors import CalibError
from calib.files import text_at_most
from calib.histogram import BINS, Histogram
from calib.strictjson import loads
from calib.types import Array

#: Far beyond any real table; a longer file is refused unread.
_MOST_BYTES = 256 << 20


def histograms_path(path: Path) -> Path:
    """Where the histograms of the table at `path` are: calibration.json -> calibration.histograms.safetensors."""
    return path.with_suffix(".histograms.safetensors")


def canonical(value: object) -> str:
    """JSON with sorted keys and floats of nine significant digits, which a float32 survives."""
    return json.dumps(_rounded(value), sort_keys=True, indent=1, allow_nan=False)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return nine_digits(value)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def parse(where: Path) -> object:
    """The JSON in a file, read strictly.

    Raises:
        CalibError: it cannot be read, is too long, or is not JSON.
    """
    try:
        return loads(text_at_most(where, _MOST_BYTES))
    except OSError as error:
        raise CalibError(f"{where}: must be a calibration table (got {error.strerror}). Check the path.") from error
    except (ValueError, RecursionError) as error:
        raise CalibError(f"{where}: must be a whole JSON file (got {str(error)[:120]}). Calibrate again.") from error


def pack(counted: Mapping[str, Halves]) -> bytes:
    """Histograms as safetensors, which `unpack` reads.

    For tensor k and half h, "k#h" is int64 [2, K]: buckets in use and their counts; "k#h.range" float32 [2].
    """
    arrays: dict[str, Array] = {}
    for key, halves in counted.items():
        for half, histogram in enumerate(halves):
            used = np.flatnonzero(histogram.counts).astype(np.int64)
            arrays[f"{key}#{half}"] = np.stack([used, histogram.counts[used]])
            arrays[f"{key}#{half}.range"] = np.array([histogram.low, histogram.high], np.float32)
    return bytes(save(arrays))


def unpack(arrays: Mapping[str, Array], key: str, half: int) -> Histogram:
    """The histogram of one half of a tensor's data, from what `pack` wrote (int64 [2, K], float32 [2]).

    Raises:
        KeyError, ValueError: it is not there, or is none that an observer makes.
    """
    used, frequencies = arrays[f"{key}#{half}"]
    low, high = arrays[f"{key}#{half}.range"].tolist()
    if frequencies.size and (
        used.min() < 0 or used.max() >= BINS or frequencies.min() < 1 or np.unique(used).size != used.size
    ):
        raise ValueError(f"{key!r} has counts that no observer makes")
    counts = np.zeros(BINS, np.int64)
    counts[used] = frequencies
    return Histogram(counts, low, high)

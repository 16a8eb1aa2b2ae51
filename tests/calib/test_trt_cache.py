"""TensorRT's cache text, against lines that TensorRT wrote and against everything that could be wrong with a file."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.trt_cache import read_cache

GOOD = "TRT-8601-EntropyCalibration2\nimage: 3c010a14\nlayer1.0: conv (x): 3d9a3f2b\n"


def test_what_tensorrt_wrote():
    # TensorRT writes amax 1 with half a bin of 2048 more: 3c010a14.
    cache = read_cache(GOOD)
    assert cache.header == "TRT-8601-EntropyCalibration2"
    assert list(cache.scales) == ["image", "layer1.0: conv (x)"]
    assert cache.amax["image"] == pytest.approx(1 + 0.5 / 2048, rel=1e-7)


def text_of(scales, header="TRT-100300-MinMaxCalibration"):
    """What TensorRT writes for these scales."""
    return "".join([f"{header}\n", *(f"{n}: {struct.pack('>f', v).hex()}\n" for n, v in scales.items())])


def test_hand_worked_digits():
    assert read_cache("TRT-100300-MinMaxCalibration\nx: 3c010204\n").scales == {"x": np.float32(1) / np.float32(127)}


@pytest.mark.parametrize("number", [7103, 8601, 9000, 100300, 101601])
def test_version_numbers(number):
    header = f"TRT-{number}-MinMaxCalibration"
    assert read_cache(f"{header}\nx: 3f800000\n").header == header


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=20)


@given(st.dictionaries(NAMES, st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=8))
def test_every_cache_reads_back(scales):
    assert dict(read_cache(text_of(scales)).scales) == scales


def line(scale):
    return f"TRT-8601-EntropyCalibration2\nx: {struct.pack('>f', scale).hex()}\n"


HOSTILE = {
    "empty": ("", r"must begin with TRT-<version>-<algorithm> \(got ''\)"),
    "binary": (b"\x00\xff\xfe", r"must be UTF-8 text \(got byte 1 that is not\)"),
    "no header": ("image: 3c010a14\n", r"must begin with TRT-<version>-<algorithm> \(got 'image: 3c010a14'\)"),
    "another header": ("TRT-8601-Magic\nx: 3f800000\n", r"must begin with TRT-<version>-<algorithm>"),
    "a header with more": ("TRT-8601-MinMaxCalibration 2\nx: 3f800000\n", r"must begin with TRT"),
    "no version": ("TRT--MinMaxCalibration\nx: 3f800000\n", r"must begin with TRT"),
    "version 11": (
        "TRT-110000-MinMaxCalibration\nx: 3f800000\n",
        r"must be of TensorRT 10.x at most \(got TRT-110000\)",
    ),
    "a huge version": (f"TRT-{'9' * 400}-MinMaxCalibration\n", r"must begin with TRT"),
    "nothing but a header": (
        "TRT-8601-MinMaxCalibration\n",
        r"must hold the scales of tensors \(got none\)",
    ),
    "digits cut short": (GOOD[:-4], r":3: must read `tensor: 8 hex digits` \(got .*\. Is the file cut short\?"),
    "name cut short": (GOOD[:38], r":2: must read `tensor: 8 hex digits`"),
    "nine digits": ("TRT-8601-MinMaxCalibration\nx: 3f8000000\n", r":2: must read"),
    "capital digits": ("TRT-8601-MinMaxCalibration\nx: 3F800000\n", r":2: must read"),
    "a decimal": ("TRT-8601-MinMaxCalibration\nx: 0.123\n", r":2: must read"),
    "no colon": ("TRT-8601-MinMaxCalibration\nx 3f800000\n", r":2: must read"),
    "no name": ("TRT-8601-MinMaxCalibration\n: 3f800000\n", r":2: must read"),
    "an empty line": ("TRT-8601-MinMaxCalibration\n\nx: 3f800000\n", r":2: must read"),
    "a NUL in a name": ("TRT-8601-MinMaxCalibration\nx\0: 3f800000\n", r":2: must read"),
    "a name twice": (GOOD + "image: 3c010a14\n", r":4: each tensor must be there once \(got 'image' again\)"),
    "negative": (line(-1.0), r":2: the scale of 'x' must be a positive normal float32 \(got -1\)"),
    "NaN": (line(float("nan")), r"must be a positive normal float32 \(got nan\)"),
    "infinity": (line(float("inf")), r"must be a positive normal float32 \(got inf\)"),
    "denormal": (line(1e-40), r"must be a positive normal float32 \(got 9.99995e-41\)"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_caches(name):
    text, message = HOSTILE[name]
    with pytest.raises(CalibError, match="the cache.*" + message):
        read_cache(text, "the cache")


def test_a_zero_passes():
    """TensorRT may write it for a tensor that was zero everywhere."""
    assert read_cache(line(0.0)).scales == {"x": 0.0}

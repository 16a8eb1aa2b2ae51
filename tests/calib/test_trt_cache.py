"""TensorRT's cache text, against lines that TensorRT wrote and against everything that could be wrong with a file."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.trt_cache import load_cache, read_cache, save_cache, version_number, write_cache

GOOD = "TRT-8601-EntropyCalibration2\nimage: 3c010a14\nlayer1.0: conv (x): 3d9a3f2b\n"


def test_what_tensorrt_wrote():
    # TensorRT writes amax 1 with half a bin of 2048 more: 3c010a14.
    cache = read_cache(GOOD)
    assert (cache.version, cache.algorithm) == ((8, 6, 1), "EntropyCalibration2")
    assert list(cache.scales) == ["image", "layer1.0: conv (x)"]
    assert cache.amax["image"] == pytest.approx(1 + 0.5 / 2048, rel=1e-7)
    assert write_cache(cache.scales, cache.version) == GOOD


def test_hand_worked_digits():
    assert write_cache({"x": np.float32(1) / np.float32(127)}, (10, 3, 0), "minmax") == (
        "TRT-100300-MinMaxCalibration\nx: 3c010204\n"
    )
    assert write_cache({"x": 1.0}, (8, 6, 1), "entropy").splitlines() == ["TRT-8601-EntropyCalibration", "x: 3f800000"]


@pytest.mark.parametrize(
    ("version", "number"),
    [((7, 1, 3), 7103), ((8, 6, 1), 8601), ((9, 0, 0), 9000), ((10, 3, 0), 100300), ((10, 16, 1), 101601)],
)
def test_version_numbers(version, number):
    assert version_number(version) == number
    assert read_cache(f"TRT-{number}-MinMaxCalibration\nx: 3f800000\n").version == version


@pytest.mark.parametrize("version", [(11, 0, 0), (0, 1, 1), (8, 10, 0), (10, 100, 0)])
def test_versions_without_caches(version):
    with pytest.raises(CalibError, match=r"TensorRT version: must be at most 10.x .* Use Q/DQ in the graph\."):
        version_number(version)


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=20)


@given(st.dictionaries(NAMES, st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=8))
def test_every_cache_reads_back(scales):
    assert dict(read_cache(write_cache(scales, (10, 3, 0)), expected=scales).scales) == scales


def test_files(tmp_path):
    save_cache(tmp_path / "calib.cache", {"a": 0.5}, (8, 6, 1))
    assert load_cache(tmp_path / "calib.cache", ["a"]).scales == {"a": 0.5}
    assert [p.name for p in tmp_path.iterdir()] == ["calib.cache"]
    with pytest.raises(CalibError, match=r"none: must be a TensorRT calibration cache \(got No such file"):
        load_cache(tmp_path / "none")


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
        r"must hold every quantized tensor \(got none for any tensor\)",
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
    "zero": (line(0.0), r":2: the scale of 'x' must be a positive normal float32 \(got 0\)"),
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


def test_lines_missing_at_the_end_are_found_by_what_was_expected():
    with pytest.raises(CalibError, match=r"must hold every quantized tensor \(got none for logits\)"):
        read_cache(GOOD, expected=["image", "logits"])


@pytest.mark.parametrize(
    ("scales", "algorithm", "message"),
    [
        ({}, "entropy_2", r"must hold at least one tensor \(got none\)"),
        ({"x": 0.0}, "entropy_2", r"the scale of 'x' must be a positive normal float32 \(got 0\)"),
        ({"x": 1e39}, "entropy_2", r"must be a positive normal float32 \(got 1e\+39\)"),
        ({"a\nb": 1.0}, "entropy_2", r"a tensor name must be printable text of one line \(got 'a\\nb'\)"),
        ({"": 1.0}, "entropy_2", r"a tensor name must be printable text"),
        (
            {"x": 1.0},
            "mse",
            r"algorithm: must be one of entropy_2, entropy, minmax, percentile for a TensorRT cache \(got 'mse'",
        ),
    ],
)
def test_what_is_not_written(scales, algorithm, message):
    with pytest.raises(CalibError, match=message):
        write_cache(scales, (8, 6, 1), algorithm)


def test_a_zero_passes_only_where_it_is_let():
    assert read_cache(line(0.0), zeros=True).scales == {"x": 0.0}
    with pytest.raises(CalibError, match="positive normal"):
        read_cache(line(-1.0), zeros=True)

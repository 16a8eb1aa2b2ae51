"""TensorRT's calibrator classes by doubles of the four bases, called the way TensorRT calls them."""

import sys
import types
import weakref

import numpy as np
import pytest

from calib import trt_calibrator
from calib.algorithms import BASES
from calib.data import open_source
from calib.errors import CalibError
from calib.samples import DataSpec, InputSpec

TEXT = b"TRT-8601-EntropyCalibration2\nx: 3f800000\n"


class _Base:
    def __init__(self):
        self.base_ready = True


def tensorrt(version="8.6.1"):
    """A module with the four abstract classes; like pybind11, they must be initialised."""
    return types.SimpleNamespace(__version__=version, **{name: type(name, (_Base,), {}) for name in BASES.values()})


class Device:
    """Places arrays at made-up addresses and knows which are still alive."""

    def __init__(self):
        self.memory = {}

    def place(self, array):
        class Owner:
            pass

        owner, address = Owner(), 4096 + len(self.memory)
        self.memory[address] = (array.copy(), weakref.ref(owner))
        return address, owner

    def alive(self, address):
        return self.memory[address][1]() is not None


def make_calibrator(trt, data, **options):
    """calib's own, on a device that only notes what it is given."""
    return trt_calibrator.make_calibrator(trt, data, **{"place": Device().place, **options})


def source(tmp_path, count=10):
    np.savez(
        tmp_path / "s.npz",
        x=np.arange(count * 2, dtype=np.float32).reshape(count, 2),
        y=np.ones((count, 1), np.float32),
    )
    inputs = [InputSpec("x", "float32", (2,)), InputSpec("y", "float32", (1,))]
    return open_source(DataSpec(arrays=str(tmp_path / "s.npz")), inputs)


def built(calibrator, names=("x", "y")):
    """What TensorRT does while it builds; it swallows what the callbacks raise."""
    cache = calibrator.read_calibration_cache()
    if cache is not None:
        return bytes(cache), []
    batches = []
    while (addresses := calibrator.get_batch(list(names))) is not None:
        batches.append(addresses)
    calibrator.write_calibration_cache(memoryview(TEXT))
    return TEXT, batches


@pytest.mark.parametrize("algorithm", BASES)
def test_every_batch_is_given_in_the_order_of_the_names(tmp_path, algorithm):
    device, trt, data = Device(), tensorrt(), source(tmp_path)
    calibrator = make_calibrator(trt, data, batch_size=4, algorithm=algorithm, place=device.place)
    assert isinstance(calibrator, getattr(trt, BASES[algorithm]))
    assert calibrator.base_ready
    assert calibrator.get_batch_size() == 4
    _, batches = built(calibrator, ("y", "x"))
    assert len(batches) == 3
    xs = np.concatenate([device.memory[x][0] for _, x in batches])
    expected = np.concatenate([b.arrays["x"] for b in data.batches(10)])
    np.testing.assert_array_equal(xs, np.concatenate([expected, expected[:2]]))
    assert device.memory[batches[0][0]][0].shape == (4, 1)
    assert all(type(a) is int for pair in batches for a in pair)
    assert calibrator.notes == ("2 samples are used twice to fill the last calibration batch of 4.",)
    calibrator.finish()


def test_a_batch_lives_until_the_next_one_is_asked_for(tmp_path):
    device = Device()
    calibrator = make_calibrator(tensorrt(), source(tmp_path), batch_size=5, place=device.place)
    first = calibrator.get_batch(["x", "y"])
    assert all(device.alive(a) for a in first)
    second = calibrator.get_batch(["x", "y"])
    assert not any(device.alive(a) for a in first)
    assert all(device.alive(a) for a in second)
    assert calibrator.get_batch(["x", "y"]) is None


def test_more_is_filled_up_than_there_is(tmp_path):
    device = Device()
    calibrator = make_calibrator(tensorrt(), source(tmp_path, 3), batch_size=8, place=device.place)
    _, batches = built(calibrator)
    assert [device.memory[a][0].shape[0] for a in batches[0]] == [8, 8]
    calibrator.finish()


def test_legacy_gets_the_percentile(tmp_path):
    calibrator = make_calibrator(tensorrt(), source(tmp_path), batch_size=5, algorithm="percentile", percentile=99.9)
    assert (calibrator.get_quantile(), calibrator.get_regression_cutoff()) == (pytest.approx(0.999), 1.0)
    assert calibrator.read_histogram_cache(10) is None
    calibrator.write_histogram_cache(b"")


def test_an_exception_ends_the_data_and_is_raised_after_the_build(tmp_path):
    def fail(array):
        raise MemoryError("device is full")

    calibrator = make_calibrator(tensorrt(), source(tmp_path), batch_size=5, place=fail)
    assert calibrator.get_batch(["x", "y"]) is None
    assert calibrator.get_batch(["x", "y"]) is None
    with pytest.raises(MemoryError, match="device is full"):
        calibrator.finish()


def test_interrupting_is_not_swallowed(tmp_path):
    def interrupt(array):
        raise KeyboardInterrupt

    calibrator = make_calibrator(tensorrt(), source(tmp_path), batch_size=5, place=interrupt)
    assert calibrator.get_batch(["x", "y"]) is None
    with pytest.raises(KeyboardInterrupt):
        calibrator.finish()


def test_other_input_names_are_an_error(tmp_path):
    calibrator = make_calibrator(tensorrt(), source(tmp_path), batch_size=5, place=Device().place)
    assert calibrator.get_batch(["x", "z"]) is None
    with pytest.raises(
        CalibError, match=r"the network\'s inputs must be those of the data, \['x', 'y'\] \(got \['x', 'z'\]\)"
    ):
        calibrator.finish()


def test_a_build_that_never_calibrated_is_an_error(tmp_path):
    calibrator = make_calibrator(tensorrt(), source(tmp_path), batch_size=5)
    with pytest.raises(CalibError, match=r"TensorRT never asked for the data\. Set the INT8 flag"):
        calibrator.finish()


def test_a_calibration_that_stopped_early_is_an_error(tmp_path):
    calibrator = make_calibrator(tensorrt(), source(tmp_path), batch_size=5, place=Device().place)
    calibrator.get_batch(["x", "y"])
    with pytest.raises(CalibError, match=r"did not read all of the data \(1 batches of 2 read\)\. See the build's log"):
        calibrator.finish()


def test_the_cache_is_used_for_what_it_was_made_from_and_refused_for_anything_else(tmp_path):
    file = tmp_path / "new" / "int8.cache"

    def fresh(**changes):
        options = {
            "batch_size": 5,
            "cache": file,
            "made_from": {"weights": "1" * 64},
            "place": Device().place,
            **changes,
        }
        return make_calibrator(
            changes.pop("trt", None) or tensorrt(), source(tmp_path), **{k: v for k, v in options.items() if k != "trt"}
        )

    first = fresh()
    built(first)
    first.finish()
    again = fresh()
    assert built(again) == (TEXT, [])
    assert again.notes == (f"{file}: scales read from it; nothing was calibrated.",)
    again.finish()
    before = file.read_bytes()
    others = (
        ({"made_from": {"weights": "2" * 64}}, "weights 111111111111... for 222222222222..."),
        ({"made_from": {}}, "weights 111111111111... for none"),
        ({"batch_size": 2}, "batch size 5 for 2"),
        ({"algorithm": "percentile", "percentile": 99.9}, "algorithm entropy_2 for percentile 99.9"),
        ({"trt": tensorrt("10.3.0"), "batch_size": 2}, "batch size 5 for 2, TensorRT 8.6.1 for 10.3.0"),
    )
    for changes, got in others:
        with pytest.raises(CalibError) as caught:
            fresh(**changes)
        assert str(caught.value) == (
            f"{file}: must be made from this calibration's own model, data and settings (got {got}). Remove it to "
            "calibrate again, or name another file."
        )
    (tmp_path / "other").mkdir()
    with pytest.raises(CalibError, match=r"settings \(got data [0-9a-f]{12}\.\.\. for [0-9a-f]{12}\.\.\.\)\."):
        make_calibrator(
            tensorrt(), source(tmp_path / "other", 11), batch_size=5, cache=file, made_from={"weights": "1" * 64}
        )
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b"", r"must be a cache that calib wrote \(got b''\)"),
        (lambda b: TEXT, r"must be a cache that calib wrote \(got b'TRT-8601"),
        (lambda b: b[:-3], r"was changed after it was written: its digest differs\. Remove it to calibrate again\."),
        (lambda b: b.replace(b"3f80", b"3f90"), r"was changed after it was written: its digest differs"),
        (lambda b: b"\xff" + b, r"must be a cache that calib wrote"),
        (lambda b: b.replace(b"{", b"[", 1), r"must be a cache that calib wrote"),
        (lambda b: b.replace(b'"5"', b"5", 1), r"must be a cache that calib wrote"),
    ],
)
def test_damaged_cache_files(tmp_path, change, message):
    file = tmp_path / "int8.cache"
    built(make_calibrator(tensorrt(), source(tmp_path), batch_size=5, cache=file, place=Device().place))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CalibError, match="int8.cache: " + message):
        make_calibrator(tensorrt(), source(tmp_path), batch_size=5, cache=file)


@pytest.mark.parametrize(
    ("trt", "options", "message"),
    [
        (
            tensorrt(),
            {"algorithm": "mse"},
            r"must be one of entropy_2, .* for TensorRT's own calibrators \(got 'mse'\)",
        ),
        (
            types.SimpleNamespace(__version__="11.4.0"),
            {},
            r"TensorRT 11.4.0: has no calibrators: only 8.6 to 10.x have them. Use Q/DQ in the graph",
        ),
        (tensorrt(), {"batch_size": 0}, r"batch_size: must be at least 1 \(got 0\)"),
    ],
)
def test_what_cannot_be_made(tmp_path, trt, options, message):
    with pytest.raises(CalibError, match=message):
        make_calibrator(trt, source(tmp_path), **{"batch_size": 5, **options})


def test_no_tensorrt_is_imported():
    assert not {"tensorrt", "tensorrt_bindings"} & set(sys.modules)

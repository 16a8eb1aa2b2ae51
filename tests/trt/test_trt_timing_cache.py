from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from trtpipe.errors import InputError
from trtpipe.trt import timing_cache
from trtpipe.trt.driver import Driver, Gpu
from trtpipe.trt.flavour import Flavour


class Cache:
    """A timing cache that is the set of letters in its bytes."""

    def __init__(self, data):
        self.letters = set(data.decode())

    def serialize(self):
        return "".join(sorted(self.letters)).encode()

    def combine(self, other, ignore_mismatch):
        assert not ignore_mismatch
        self.letters |= other.letters


class Config:
    """Takes any cache but one that begins with '!'."""

    def __init__(self):
        self.cache = None

    def create_timing_cache(self, data):
        return None if data.startswith(b"!") else Cache(data)

    def set_timing_cache(self, cache, ignore_mismatch):
        assert not ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self):
        return self.cache


def test_one_file_for_each_tensorrt_gpu_and_driver():
    found = Flavour("tensorrt", types.SimpleNamespace(), "10.16.1.11", frozenset())
    driver = Driver("13.0", (Gpu(0, "NVIDIA RTX A6000 (48 GB)", "8.6", 1),))
    name = timing_cache.file_name(found, driver, driver.devices[0])
    assert name == "tensorrt-10.16.1.11_NVIDIA-RTX-A6000-48-GB_sm86_cuda13.0.timing"


def test_a_cache_is_begun_read_and_written(tmp_path):
    path, config = tmp_path / "caches" / "a.timing", Config()
    _, notes = timing_cache.attach(config, path)
    assert notes == ()
    config.cache.letters |= set("ab")
    timing_cache.save(config, path)
    assert path.read_bytes() == b"ab"
    again = Config()
    timing_cache.attach(again, path)
    assert again.cache.letters == set("ab")


def test_what_another_build_has_written_meanwhile_is_kept(tmp_path):
    path, config = tmp_path / "a.timing", Config()
    timing_cache.attach(config, path)
    config.cache.letters |= set("a")
    path.write_bytes(b"z")
    timing_cache.save(config, path)
    assert path.read_bytes() == b"az"
    assert list(tmp_path.iterdir()) == [path]


def test_a_cache_that_tensorrt_does_not_take_is_begun_anew_and_told(tmp_path):
    path = tmp_path / "a.timing"
    path.write_bytes(b"!other")
    config = Config()
    _, notes = timing_cache.attach(config, path)
    assert notes == ("timing cache a.timing: TensorRT did not accept it, so it was begun anew",)
    given = path.rename(tmp_path / timing_cache.GIVEN)
    _, notes = timing_cache.attach(Config(), given)
    assert notes == ("timing cache of the bundle: TensorRT did not accept it, so it was begun anew",)
    assert config.cache.letters == set()


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path, config = tmp_path / "a.timing", Config()
    path.write_bytes(b"a")
    timing_cache.attach(config, path)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    config.cache.letters |= set("b")
    data, notes = timing_cache.save(config, path)  # the engine that was built with it is not lost
    said = f"timing cache {path}: could not be written (No space left on device); the next build begins anew"
    assert (data, notes) == (b"ab", (said,))
    assert [f.read_bytes() for f in tmp_path.iterdir()] == [b"a"]


def test_one_that_cannot_be_read_any_more_costs_no_engine(tmp_path):
    path, config = tmp_path / "a.timing", Config()
    timing_cache.attach(config, path)
    config.cache.letters |= set("a")
    path.mkdir()
    data, notes = timing_cache.save(config, path)
    assert data == b"a"
    assert notes == (f"timing cache {path}: could not be read (Is a directory); the next build begins anew",)
    assert path.is_dir()


def test_a_cache_that_cannot_be_written_is_said_before_the_build(tmp_path):
    """TensorRT may build for an hour."""
    with pytest.raises(OSError) as raised:  # noqa: PT011
        timing_cache.attach(Config(), Path("/proc/nowhere/a.timing"))
    assert raised.value.filename == "/proc/nowhere/a.timing"


def test_a_folder_in_its_place(tmp_path):
    (tmp_path / "a.timing").mkdir()
    says = r"a\.timing must be readable \(got Is a directory\)\. Give a folder for the caches\.$"
    with pytest.raises(InputError, match=r"^build\.timing_cache: .*" + says):
        timing_cache.attach(Config(), tmp_path / "a.timing")


def test_a_cache_that_was_given_is_used_in_the_place_of_the_machines_own(tmp_path):
    found = Flavour("tensorrt", types.SimpleNamespace(), "10.3.0", frozenset())
    driver = Driver("12.6", (Gpu(0, "Orin", "8.7", 1),))
    own = timing_cache.file_of(tmp_path, found, driver, driver.devices[0])
    assert own == tmp_path / timing_cache.file_name(found, driver, driver.devices[0])
    (tmp_path / timing_cache.GIVEN).mkdir()
    assert timing_cache.file_of(tmp_path, found, driver, driver.devices[0]) == own
    (tmp_path / timing_cache.GIVEN).rmdir()
    (tmp_path / timing_cache.GIVEN).write_bytes(b"ab")
    assert timing_cache.file_of(tmp_path, found, driver, driver.devices[0]) == tmp_path / timing_cache.GIVEN


def test_what_was_written_is_returned(tmp_path):
    config = Config()
    timing_cache.attach(config, tmp_path / "a")
    config.cache.letters |= set("ba")
    assert timing_cache.save(config, tmp_path / "a") == (b"ab", ())

"""`--device` of the commands: what it says in the environment, for as long as the command runs."""

from __future__ import annotations

import os

import click
import pytest

from trtpipe.cli.commands import bench, build, calibrate, nightly, prepare, tune
from trtpipe.cli.commands.options import device_option
from trtpipe.errors import MissingError
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver

VARIABLES = ("TRTPIPE_DEVICE", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """A function that gives this machine a GPU, as it has at first, or none."""

    def use(problem=""):
        monkeypatch.setattr(driver, "probe", lambda: Driver("12.6", (), problem))

    use()
    return use


@click.command()
@device_option
def seen():
    """What a command sees."""
    return tuple(os.environ.get(name) for name in VARIABLES)


@pytest.mark.parametrize(
    ("value", "visible", "wanted"),
    [
        (None, None, (None, None)),
        (None, "2,3", (None, "2,3")),
        ("cpu", "2,3", ("cpu", "2,3")),
        ("cuda", None, ("cuda", None)),
        ("cuda:1", None, ("cuda", "1")),
        ("cuda:1", "2, GPU-5f3a", ("cuda", "GPU-5f3a")),
        ("cuda:0", "3", ("cuda", "3")),
    ],
)
def test_one_gpu_is_left_to_every_library(monkeypatch, value, visible, wanted):
    before = {"TRTPIPE_DEVICE": None, "CUDA_VISIBLE_DEVICES": visible}
    for name, text in before.items():
        monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(name, text)
    assert seen.main([] if value is None else ["--device", value], standalone_mode=False) == wanted
    assert {name: os.environ.get(name) for name in VARIABLES} == before


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("gpu", "--device must be cpu, cuda or cuda:N (got gpu)."),
        ("cuda:", "--device must be cpu, cuda or cuda:N (got cuda:)."),
    ],
)
def test_what_is_no_device(monkeypatch, value, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(click.UsageError) as raised:
        seen.main(["--device", value], standalone_mode=False)
    assert raised.value.message == message
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1", 2), ("", 0), ("GPU-6f4e", 1), ("-1", 0), ("NoDevFiles", 0), ("0, 2,-1,1", 2), ("MIG-1/0/2,GPU-3", 2)],
)
def test_a_gpu_that_the_process_may_not_see(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    number = count
    with pytest.raises(MissingError) as raised:
        seen.main(["--device", f"cuda:{number}"], standalone_mode=False)
    assert str(raised.value) == (f"--device: must be one of the {count} GPUs of CUDA_VISIBLE_DEVICES (got {number}).")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize("value", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_said_before_any_work(gpus, monkeypatch, value):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    gpus("the NVIDIA driver sees no GPU")
    with pytest.raises(MissingError) as raised:
        seen.main(["--device", value], standalone_mode=False)
    assert str(raised.value) == (
        f"--device: must be left out where no NVIDIA GPU can be used (got {value}; the NVIDIA driver sees no GPU). "
        "Check the driver, or leave it out."
    )
    assert not {*VARIABLES} & {*os.environ}
    assert seen.main(["--device", "cpu"], standalone_mode=False) == ("cpu", None)


def test_a_number_that_no_gpu_has_is_said_of_what_was_typed(gpus, monkeypatch):
    """And not of CUDA_VISIBLE_DEVICES, which the option alone has set."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    gpus("CUDA_VISIBLE_DEVICES=2 leaves no GPU")
    with pytest.raises(MissingError) as raised:
        seen.main(["--device", "cuda:2"], standalone_mode=False)
    assert str(raised.value) == (
        "--device: must be one of this machine's GPUs (got cuda:2, and the driver has none of that number). "
        "`trtpipe doctor` lists them."
    )


@pytest.mark.parametrize("module", [bench, build, calibrate, nightly, prepare, tune])
def test_each_command_that_computes_has_it(module):
    assert "--device" in {o for p in module.command.params for o in p.opts}

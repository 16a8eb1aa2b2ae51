"""Torch-TensorRT where no GPU is."""

import importlib.metadata

import pytest
from driverless import driverless


@pytest.fixture(scope="module")
def world():
    """Torch-TensorRT for TensorRT-RTX without an NVIDIA driver, and the engines that it compiled."""
    try:
        importlib.metadata.version("torch-tensorrt-rtx")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch-tensorrt-rtx is not installed")
    with driverless() as seen:
        yield seen

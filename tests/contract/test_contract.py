"""trtpipe on the real Python bindings of each supported TensorRT, in a process each."""

from __future__ import annotations

import pytest
from conftest import RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_contract(contract, release):
    ran = contract(release)
    assert ran.returncode == 0, ran.stdout[-20000:] + ran.stderr[-2000:]

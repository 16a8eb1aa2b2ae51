"""For every test: nothing of whoever runs them reaches what they run, and random tensors are the same each time."""

import importlib.util
import os
import signal
import sys

import pytest

# A shell that runs the tests in the background has interrupts ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A commit has to pass the same examples each time, `make test-slow` tries others. The GPU tests need no hypothesis.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("same", derandomize=True, deadline=None)
    settings.register_profile("random", deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A make run by a test says so when another make runs the tests.
for _name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tensors and weights that a test draws without a seed are the same whichever tests ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)

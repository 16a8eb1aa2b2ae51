"""For every test: nothing of whoever runs them reaches what they run, and random tensors are the same each time."""

import contextlib
import copy
import functools
import gc
import importlib
import importlib.util
import logging
import os
import pkgutil
import re
import signal
import sys
from pathlib import Path

import pytest

from trtpipe.pipeline.collector import SELDOM

#: Why a test may be skipped under TRTPIPE_NO_SKIPS=1, as CI runs, beside the marked ones of a GPU and of torch2trt.
MAY_LACK = re.compile(r"\ba GPU is here$|no bindings for this Python")
_SKIPPED: list[str] = []

# A shell that runs the tests in the background has interrupts ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup has SIGHUP ignored; with a handler, what tests start does not, and the tests themselves still outlive it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# A commit has to pass the same examples each time, `make test-random` tries others. The GPU tests need no hypothesis.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("same", derandomize=True, deadline=None)
    settings.register_profile("random", deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A make run by a test says so when another make runs the tests.
for _name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):
    os.environ.pop(_name, None)


@pytest.fixture(scope="session")
def imported() -> None:
    """Every module of the package, before a test replaces a part of one: a module imported later would keep the double.

    A command's module is imported when the command is first called. Without its packages, as on a machine that runs
    only the GPU tests, a module is left out.
    """
    import trtpipe

    for module in pkgutil.walk_packages(trtpipe.__path__, "trtpipe."):
        if not module.name.startswith("trtpipe.examples.") and not module.name.endswith(".__main__"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module.name)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's images and trained weights, made once a run: training takes a minute of a busy processor."""
    from filelock import FileLock

    from trtpipe.examples.digits import make

    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "digits"
    with FileLock(f"{place}.lock"):
        make(place)
    return place


@pytest.fixture(scope="session")
def tree():
    """The modules of both packages as syntax trees: see `source_tree`."""
    from source_tree import Tree

    return Tree()


@pytest.fixture
def monkeypatch(imported: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pytest's own, once everything is imported."""
    return monkeypatch


@pytest.fixture(autouse=True, scope="module")
def collected() -> None:
    """What lives when a module's tests begin is not searched for garbage again, and new objects seldom.

    It is millions of objects that stay (torch's and sympy's, caches of graphs): to search them took a third of the
    tests' time, and to count them in each command and build more. So `pipeline.collector` is to find a collector that
    is seldom enough.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2 * SELDOM[0], 20, 100)


@pytest.fixture(autouse=True, scope="session")
def one_registry() -> None:
    """PyTorch's ONNX exporter reads its thousand translations from their sources once an opset, not for each export:
    that is half a second of each. A registry that an export gets is its own, as it adds to it."""
    if "torch" not in sys.modules:
        return
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # another release, which does as it does
        return
    made = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(*opset: int, **named: int) -> ONNXRegistry:
        registry = copy.copy(made(*opset, **named))
        registry.functions = {target: list(known) for target, known in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


@pytest.fixture(autouse=True, scope="session")
def one_walk() -> None:
    """PyTorch walks all its composite operators once a namespace for each export, forty times: a tenth of it. Here once
    until an operator is registered."""
    if "torch" not in sys.modules:
        return
    torch = sys.modules["torch"]
    try:
        from torch._export import utils

        walk = utils._materialize_cpp_cia_ops
        registered = torch._C._dispatch_get_registrations_for_dispatch_key
    except (ImportError, AttributeError):  # another release, which does as it does
        return
    seen = 0

    def once() -> None:
        nonlocal seen
        if seen != (now := len(registered("CompositeImplicitAutograd"))):
            walk()
            seen = now

    utils._materialize_cpp_cia_ops = once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests first, so that no process is left alone with one at the end (`--no-loadscope-reorder`).

    And no listener at PyTorch's logger of traces: it describes every tensor of an export to whoever listens, which is a
    quarter of the export, and pytest listens to each logger that does not propagate.
    """
    items.sort(key=lambda item: item.get_closest_marker("acceptance") is None)
    if "torch" in sys.modules:
        traces = logging.getLogger("torch.__trace")
        traces.handlers.clear()
        traces.propagate = True


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tensors and weights that a test draws without a seed are the same whichever tests ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what was skipped, for `pytest_sessionfinish`; with xdist this runs in the process that prints."""
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        _note_skip(report.nodeid, str(report.longrepr[2]), report.keywords)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """The same for whole modules."""
    if report.skipped and isinstance(report.longrepr, tuple):
        _note_skip(report.nodeid, str(report.longrepr[2]), {})


def _note_skip(node: str, reason: str, keywords: object) -> None:
    if not {"gpu", "torch2trt"} & set(keywords) and not MAY_LACK.search(reason):  # type: ignore[call-overload]
        _SKIPPED.append(f"{node}: {reason}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Under TRTPIPE_NO_SKIPS=1 a skip that nobody expects is a failure."""
    if os.environ.get("TRTPIPE_NO_SKIPS") and _SKIPPED and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which."""
    if os.environ.get("TRTPIPE_NO_SKIPS") and _SKIPPED:
        terminalreporter.section("skipped, and nothing may be (TRTPIPE_NO_SKIPS)", red=True, bold=True)
        for line in sorted(set(_SKIPPED)):
            terminalreporter.write_line(line)

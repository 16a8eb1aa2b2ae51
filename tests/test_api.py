"""The five names, and what a notebook sees. They are used for real in tests/docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import shipping

import trtpipe
from calib.errors import CalibCancelled
from trtpipe.bundle.signing import generate_key, signer
from trtpipe.errors import Cancelled, InputError, MissingError, TrtpipeError, as_user_errors
from trtpipe.job.load import JobErrors
from trtpipe.notebook import NotebookReporter, page_html, watching
from trtpipe.progress import Silent
from trtpipe.values import CheckReport, Control, Metric

JOB = """
name: tiny
model: {factory: net:build}
inputs: {x: {shape: [2, 3]}}
outputs: {y: {}}
build: {target: onnxruntime}
check: {arrays: x.npy, limits: {cosine_min: 0.9}}
"""

REPORT = CheckReport(
    "graph",
    "onnxruntime <1>",
    8,
    (Metric("cosine", "y", 0.5, 0.9, False),),
    Control("w", "zero", True, 8),
    False,
    ("<b>",),
)


def test_importing_the_package_loads_none_of_its_parts() -> None:
    code = (
        "import sys, trtpipe; "
        "print([m for m in sys.modules if m.startswith(('trtpipe.', 'calib', 'numpy', 'pydantic', 'torch'))], "
        "sorted(trtpipe.__all__), set(trtpipe.__all__) <= set(dir(trtpipe)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[] ['__version__', 'build', 'calibrate', 'check', 'load', 'load_job'] True"


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_onnx_runtime_sends_nothing_unless_the_user_says_so(before: str | None, after: str) -> None:
    """Of 1.32.0 this keeps `~/.cache/Microsoft` from being written, and names from being looked up."""
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    environment |= {} if before is None else {"ORT_DISABLE_TELEMETRY": before}
    code = "import os, trtpipe; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == after


def test_check_is_the_function_whatever_was_imported() -> None:
    import trtpipe.evaluation.check  # a module of the same name

    assert callable(trtpipe.check)
    assert "cosine_min" in trtpipe.evaluation.limits.METRIC_OF_LIMIT


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'trtpipe' has no attribute 'bild'"):
        trtpipe.bild  # noqa: B018


def test_load_job_says_all_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("target", "targit").replace("x.npy", "missing.npy"))
    with pytest.raises(JobErrors) as caught:
        trtpipe.load_job(path)
    assert "targit" in str(caught.value)
    assert "missing.npy" in str(caught.value)


#: Values that no check takes, by what the error says of them.
FAULTS = {
    "must be given as float32": np.ones((4, 3), np.int64),
    "must be finite": np.full((4, 3), np.nan, np.float32),
    "complex64": np.ones((4, 3), np.complex64),
    "[3]": np.ones((4, 2), np.float32),
}


@pytest.mark.parametrize("words", FAULTS)
def test_bad_data_are_the_errors_of_the_command_line(tmp_path: Path, words: str) -> None:
    """Not calib's own, which have no exit code."""
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("net:build", "torch.nn:Identity"))
    np.save(tmp_path / "x.npy", FAULTS[words])
    with pytest.raises(TrtpipeError, match=re.escape(words)) as caught:
        trtpipe.build(path, tmp_path / "out")
    assert caught.value.exit_code == 2


def test_bad_labels_are_among_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("net:build", "torch.nn:Identity"))
    np.save(tmp_path / "x.npy", np.ones((4, 3), np.float32))
    np.save(tmp_path / "labels.npy", np.full(4, 2**63, np.uint64))
    with pytest.raises(JobErrors, match=r"check\.labels: .* a label must be a class from 0, .* Save labels as int64\."):
        trtpipe.load_job(path, "check.labels=labels.npy")


def test_others_errors_are_told_and_bugs_stay_as_they_are() -> None:
    with pytest.raises(MissingError, match=r"^out of memory"), as_user_errors():
        raise MemoryError
    with pytest.raises(Cancelled), as_user_errors():
        raise CalibCancelled("interrupted")
    for bug in (ZeroDivisionError(), PermissionError(13, "no", "f")):
        with pytest.raises(type(bug)) as caught, as_user_errors():
            raise bug
        assert caught.value is bug


def test_one_override_may_be_given_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\n")
    with pytest.raises(JobErrors, match=r"--set: build\.target: must be .* \(got 'nowhere'\)"):
        trtpipe.load_job(tmp_path / "a.yaml", "build.target=nowhere")


def test_builds_in_threads_take_turns_and_sign_with_a_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export captures in one thread at a time; two at once blamed the model for what was the other thread's."""
    inside = threading.Semaphore(1)
    signatures = []

    def run(*args: Any, sign: Any, **options: Any) -> None:
        assert inside.acquire(blocking=False), "two at once"
        signatures.append(sign(b"manifest"))
        inside.release()

    def table(*args: Any) -> None:
        assert inside.acquire(blocking=False), "two at once"
        inside.release()

    monkeypatch.setattr("trtpipe.api.run", run)
    monkeypatch.setattr("trtpipe.api.make_table", table)
    monkeypatch.setattr("trtpipe.api._job", lambda job, purpose="build": job)
    private = tmp_path / "release.key"
    generate_key(private)
    works = [lambda: trtpipe.build("job", sign=private), lambda: trtpipe.calibrate("job")] * 20
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()
    assert set(signatures) == {signer(private)(b"manifest")}
    with pytest.raises(InputError, match=r"nosuch\.key: "):
        trtpipe.build("job", sign=tmp_path / "nosuch.key")


def test_calibrate_refuses_a_job_without_calibration(tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "x.npy", np.zeros((2, 3), np.float32))
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "net.py").write_text("def build():\n    import torch\n    return torch.nn.Linear(3, 4)\n")
    with pytest.raises(InputError) as caught:
        trtpipe.calibrate(tmp_path / "job.yaml")
    assert str(caught.value) == ("calibration: the job has no calibration data. Add calibration.images.")


def test_check_and_load_take_a_bundle_as_they_take_its_folder(tmp_path: Path) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    for given in (bundle, bundle.path, str(bundle.path)):
        assert trtpipe.check(given, graph=True).executed == "graph"
        with trtpipe.load(given, graph=True) as model:
            assert model.bundle.path == bundle.path


class _Display:
    """What IPython.display is to us."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def HTML(self, text: str) -> str:
        return text

    def display(self, value: str, display_id: bool) -> Any:
        assert display_id
        return SimpleNamespace(update=self.shown.append)


def test_a_notebook_shows_stages_bars_and_notes() -> None:
    display = _Display()
    reporter = NotebookReporter(display)
    with reporter.stage("calibrate"):
        reporter.step(8, 8, "samples")
        assert 'calibrate <progress value="8" max="8"></progress> 8 of 8 samples' in display.shown[-1]
        reporter.note("<3 samples")
    assert display.shown[-1].startswith("calibrate 0.0")
    assert display.shown[-1].endswith("<br><em>&lt;3 samples</em>")
    with pytest.raises(ValueError, match="no"), reporter.stage("compile"):
        raise ValueError("no")
    assert "compile failed" in display.shown[-1]


def test_progress_goes_to_a_notebook_only_where_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    display = _Display()
    with watching(None) as reporter:
        assert isinstance(reporter, Silent)
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    with watching(None) as reporter:
        assert isinstance(reporter, NotebookReporter)
    mine = Silent()
    with watching(mine) as reporter:
        assert reporter is mine
    shell.kernel = None  # a terminal's IPython has no front end
    with watching(None) as reporter:
        assert isinstance(reporter, Silent)


def test_a_check_is_a_table_in_a_notebook() -> None:
    html = REPORT._repr_html_()
    assert "<strong>failed</strong>: graph executed by onnxruntime &lt;1&gt; on 8 samples</p><p>&lt;b&gt;</p>" in html
    assert "<td>y</td><td>cosine</td><td>0.5</td><td>0.9</td><td>missed</td>" in html


def test_a_page_within_a_page_is_shut_in() -> None:
    html = page_html('<p title="x">')
    assert 'srcdoc="&lt;p title=&quot;x&quot;&gt;"' in html
    assert 'sandbox="allow-scripts"' in html

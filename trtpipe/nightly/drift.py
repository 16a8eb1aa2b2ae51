"""One job built several times without any cache: whether the engines and their outputs are the same."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.bundle.format import place
from trtpipe.errors import TrtpipeError
from trtpipe.figures import difference
from trtpipe.nightly.outcome import Drift, JobOutcome
from trtpipe.nightly.task import RepeatTask, of_bundle
from trtpipe.pipeline.build import build
from trtpipe.runtime.session import open_model

if TYPE_CHECKING:
    from trtpipe.bundle.format import Bundle
    from trtpipe.progress import Reporter


def repeat(task: RepeatTask, reporter: Reporter) -> JobOutcome:
    """Build the job as often as the task says (`times`); the last bundle goes where the job's belongs.

    Raises:
        TrtpipeError: as `pipeline.build`.
    """
    engines, outputs, notes = [], [], []
    for number in range(task.times):
        reporter.note(f"build {number + 1} of {task.times}")
        with tempfile.TemporaryDirectory(prefix="trtpipe-repeat-") as scratch:
            built = build(task.job, Path(scratch), reporter, diagnose_seconds=task.diagnose_seconds)
            manifest = built.bundle.manifest
            assert manifest.engine is not None
            engines.append(manifest.files[manifest.engine.file].sha256)
            outputs.append(_golden_outputs(built.bundle))
            if number + 1 == task.times:
                bundle = place(Path(task.out, task.name), built.bundle.contents(), where=built.bundle.path)
                seconds = dict(built.seconds)
    executed = [a for a in outputs if a is not None]
    if built.report.executed == "graph" and task.job.build.target != "onnxruntime":
        notes.append("no GPU executed the engines here: the outputs are those of their graphs")
    if len(executed) < len(outputs):
        notes.append("nothing here can execute the engine or its graph")
    largest = _largest_difference(executed) if len(executed) == len(outputs) else None
    drift = Drift(tuple(engines), largest, tuple(notes))
    return dataclasses.replace(of_bundle(task, bundle), seconds=seconds, drift=drift)


def _golden_outputs(bundle: Bundle) -> dict[str, Array] | None:
    """A bundle's outputs on its golden inputs; None where neither engine nor graph can be executed here."""
    for graph in (False, True):
        try:
            with open_model(bundle, graph=graph, as_written=True) as model:
                return dict(model.run_arrays(bundle.golden().inputs))
        except TrtpipeError:
            continue
    return None


def _largest_difference(outputs: list[dict[str, Array]]) -> float:
    """The largest |difference| between outputs of two builds, NaN counting as infinite."""
    worst = 0.0
    for one, other in itertools.combinations(outputs, 2):
        for name, value in one.items():
            with np.errstate(invalid="ignore"):  # of two infinities
                apart = np.where(value == other[name], 0.0, np.abs(difference(value, other[name])))
            worst = max(worst, float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(initial=0.0)))
    return worst

"""What the command line does, from Python: `load_job`, `build`, `calibrate`, `check`; `load` is in `runtime.session`.

They are here for `trtpipe`, which imports this module when one of them is first asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from calib.process_state import as_it_begins
from trtpipe.bundle.signing import signer
from trtpipe.errors import as_user_errors
from trtpipe.job.job import Job
from trtpipe.notebook import watching
from trtpipe.pipeline.build import build as run
from trtpipe.pipeline.calibrate import make_table
from trtpipe.pipeline.validate import Purpose, plan_one
from trtpipe.quantization.diagnose import DIAGNOSE_SECONDS
from trtpipe.runtime.recheck import recheck
from trtpipe.runtime.session import load

#: torch.export, and the capture and calibration of a model with it, work in one thread of a process at a time.
_ONE_AT_A_TIME = threading.RLock()

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.bundle.format import Sign
    from trtpipe.pipeline.build import Built
    from trtpipe.progress import Reporter
    from trtpipe.values import CheckReport


@as_user_errors()
def load_job(path: str | Path, overrides: Iterable[str] = ()) -> Job:
    """The job in a file, validated as `trtpipe validate` does for the TensorRT installed here.

    Args:
        path: the YAML file; its relative paths are resolved against its folder.
        overrides: `section.key=value` each, as with `--set`.

    Raises:
        JobErrors: everything that is wrong with it, at once.
        InputError: the file has a matrix of several jobs.
    """
    return plan_one(path, (overrides,) if isinstance(overrides, str) else overrides)


@as_user_errors()
@as_it_begins()
def build(
    job: Job | str | Path,
    out: str | Path = "out",
    *,
    progress: Reporter | None = None,
    sign: Sign | str | Path | None = None,
    diagnose_seconds: float = DIAGNOSE_SECONDS,
) -> Built:
    """Build a job, check the engine against its baseline, and write the bundle `out/<name>`.

    A check that fails is a result, not an exception: see `Built.report.passed`. Builds in several threads take turns.

    Args:
        job: a job, or the path of one.
        out: the folder that the bundle's folder is made in.
        progress: receives stages and steps; by default a bar in a notebook, and nothing elsewhere.
        sign: the file of a private key (see `trtpipe keygen`), or a function from the manifest's bytes to their
            signature, as `trtpipe.bundle.signing.signer` makes it. A bundle whose check failed is not signed.
        diagnose_seconds: after a failed check of a quantized model, how long to look for the modules to blame; 0: not
            at all. `check.sensitivity: true` measures them in full, whatever this says.

    Raises:
        TrtpipeError: what the command line would end with, with the same exit code. Before the check is done no bundle
            is then written; after it the bundle stays, without what was being measured to explain it.
        OSError: the disk refuses; it names the file or folder.
    """
    signs = signer(Path(sign)) if isinstance(sign, str | Path) else sign
    with _ONE_AT_A_TIME, watching(progress) as reporter:
        return run(_job(job), Path(out), reporter, sign=signs, diagnose_seconds=diagnose_seconds)


@as_user_errors()
@as_it_begins()
def calibrate(job: Job | str | Path, *, progress: Reporter | None = None) -> CalibrationTable:
    """The calibration table of a job, with its audit, and its histograms where it was made of samples.

    Args:
        job: a job, or the path of one. A `calibration.table` in it is read, not made, with the histograms that lie
            beside it; of a model that is quantized already and has no `calibration`, the table is of its own scales.
        progress: as for `build`.

    Raises:
        InputError: the job has no calibration.
        TrtpipeError, OSError: as `build`.
    """
    planned = _job(job, "calibrate")
    with _ONE_AT_A_TIME, watching(progress) as reporter:
        return make_table(planned, reporter)


@as_user_errors()
@as_it_begins()
def check(bundle: str | PathLike[str], *, key: str | Path | None = None, graph: bool = False) -> CheckReport:
    """A bundle's engine (or graph) run here on its golden inputs and compared with its baseline's outputs.

    Args:
        bundle: the bundle's folder, or a bundle that `build` returned.
        key: file of trusted public keys; the device's configured one when None.
        graph: run the ONNX graph on the CPU instead of the engine.

    Raises:
        InputError: the bundle is damaged, unsigned where a key is asked for, or has nothing to run.
        MissingError: it does not fit this device, or its runtime is not installed.
        BuildError: ONNX Runtime or TensorRT refuses what is to be executed.
    """
    with load(bundle, key=key, graph=graph, as_written=True) as model:
        return recheck(model)


def _job(job: Job | str | Path, purpose: Purpose = "build") -> Job:
    return job if isinstance(job, Job) else plan_one(job, purpose=purpose)

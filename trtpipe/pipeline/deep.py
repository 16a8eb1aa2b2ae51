"""`validate --deep`: problems that only running the model shows, on zeros of its declared inputs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from trtpipe.errors import MissingError, TrtpipeError
from trtpipe.import_errors import broken, loss
from trtpipe.job.job import Job
from trtpipe.model.baseline import script
from trtpipe.model.capture import capture
from trtpipe.model.data import open_check, with_labels
from trtpipe.model.load import load_model
from trtpipe.model.repeating import require_same_on_zeros
from trtpipe.packages import core_modules, version
from trtpipe.pipeline.as_wanted import as_the_job_wants
from trtpipe.pipeline.own_modules import with_own_modules
from trtpipe.pipeline.required import required
from trtpipe.routes.onnx import to_onnx


@with_own_modules
def deep_problems(job: Job) -> tuple[TrtpipeError, ...]:
    """The first thing of each kind that would stop the job later: its model, data, baseline, graph and ONNX form; or
    the packages that cannot be imported.

    The model is run a few times on zeros, traced, exported and lowered in FP32; nothing is calibrated,
    compiled or written.
    """
    from trtpipe.quantization.payoff import keep_of
    from trtpipe.quantization.quantize import quantize

    if damaged := tuple(_damaged(job)):  # what follows needs them
        return damaged
    problems: list[TrtpipeError] = []
    try:
        loaded = load_model(job)
    except TrtpipeError as error:
        return (error,)
    try:
        with_labels(job, loaded, open_check(job))
    except TrtpipeError as error:
        problems.append(error)
    try:
        script(loaded, job.model.baseline, job.model.torchscript)
        require_same_on_zeros(loaded)
    except TrtpipeError as error:
        problems.append(error)
    try:
        captured = as_the_job_wants(job, capture(loaded))
        quantized = quantize(captured, int8=False, half=None, keep=keep_of(job, captured), amax={}, ranges={})
        if job.build.route == "onnx":
            to_onnx(quantized)
    except TrtpipeError as error:
        problems.append(error)
    return tuple(problems)


def _damaged(job: Job) -> Iterator[MissingError]:
    """Packages that are installed, that the job's build imports, and that cannot be; in this process, which needs most
    of them anyway."""
    for module in (*core_modules(), *required(job)):
        if version(module) is None:
            continue
        if lost := loss(module):
            yield MissingError(broken(module, lost))
            continue
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever it raises
            yield MissingError(broken(module, error))

"""`validate --deep` and a build agree about every model: what they take, and in which words they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model import test_awkward_models as awkward
from trtpipe.api import build
from trtpipe.errors import TrtpipeError
from trtpipe.job.load import read_job
from trtpipe.pipeline.deep import deep_problems

#: what forward does with y -> the job's outputs
BODIES = {
    **{body: outputs for body, (outputs, _) in awkward.MODELS.items()},
    **dict.fromkeys((*awkward.CODES, *awkward.REPEATED), awkward.ONE),
    "return y + x / x.norm(dim=1, keepdim=True)": awkward.ONE,  # NaN of zeros alone
}


@pytest.mark.parametrize("at", range(len(BODIES)), ids=lambda k: list(BODIES)[k])
def test_a_build_says_what_deep_says(tmp_path: Path, at: int) -> None:
    body, outputs = list(BODIES.items())[at]
    file = awkward.job(tmp_path, body, outputs, f"agreed_{at}")
    problems = deep_problems(read_job(file))
    try:
        passed, refused = build(file, tmp_path / "out").report.passed, []
    except TrtpipeError as error:
        passed, refused = False, [(str(error), error.exit_code)]
    assert passed == (not problems)
    assert set(refused) <= {(str(p), p.exit_code) for p in problems}

"""The numbers of the code that the docs quote: each page says the one that the code has."""

from __future__ import annotations

import math

import pages
import pytest

from calib import algorithms, audit
from trtpipe import import_errors, outputs
from trtpipe.bundle import format as bundle_format
from trtpipe.bundle import manifest
from trtpipe.evaluation import intervals, standard
from trtpipe.figures import CONFIDENCE_TEXT
from trtpipe.job import rules
from trtpipe.model import corners
from trtpipe.model.onnx import reading
from trtpipe.nightly import fleet, history, regressions, transport
from trtpipe.pipeline import prepared
from trtpipe.pipeline.cache import store
from trtpipe.quantization import diagnose, engine_size, formats, payoff, policy, precision, search
from trtpipe.quantization.corrections import correct, guard, samples
from trtpipe.routes import narrow_onnx
from trtpipe.routes.torch_tensorrt import partition
from trtpipe.runtime import executor, recheck
from trtpipe.trt import formats as trt_formats
from trtpipe.trt import platforms

WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

#: The page, and what it says of a constant, made of that constant.
QUOTED = [
    ("accuracy", f"clips more than {100 * audit.CLIPPED:.0f} % of its values"),
    ("accuracy", f"under {audit.POOR_DB:.0f} dB of\nsignal to noise where another algorithm would leave "
     f"{audit.GAIN_DB:.0f} dB more"),
    ("accuracy", f"have {CONFIDENCE_TEXT} intervals: the samples are drawn anew "
     f"{intervals.RESAMPLES:,} times"),
    ("accuracy", f"with a {CONFIDENCE_TEXT} confidence interval"),
    ("accuracy", f"Of fewer than {intervals.LEAST_RESAMPLED} nothing is known"),
    ("accuracy", f"`ignore` ({standard.IGNORED})"),
    ("accuracy", f"At most {corners.MOST_VALUES / 1e6:.1f} million input values "
     f"({corners.MOST_VALUES // math.prod((3, 224, 224))} images of 3 x 224 x 224)"),
    ("accuracy", f"looks for them for {diagnose.DIAGNOSE_SECONDS:.0f} seconds"),
    ("accuracy", f"A preview ({diagnose._SAMPLES} samples"),
    ("accuracy", f"never more than `--evaluations` ({search.EVALUATIONS})"),
    ("accuracy", f"each where it gains {search.HALF_MARGIN_DB:.0f} dB over the one before"),
    ("bundle", f"manifest.sig         {bundle_format.SIGNATURE_BYTES} bytes"),
    ("bundle", f"at most {outputs.MOST_NAME} characters"),
    ("bundle", f"{executor._ELSEWHERE} times the relative L2 error"),
    ("bundle", f"cosine may be {recheck._SLACK} below that of the build's worst sample"),
    ("calibration", f"least mean \\|error\\|^{algorithms.AUTO_POWER}"),
    ("calibration", f"keeps {algorithms.PERCENTILE} % of all values"),
    ("calibration", f"under {audit.POOR_DB:.0f} dB\nwhere another algorithm would leave {audit.GAIN_DB:.0f} dB more"),
    ("calibration", f"move by over {100 * audit.UNSTABLE:.0f} % between the halves"),
    ("calibration", f"that have over {100 * audit.CLIPPED:.0f} % of"),
    ("calibration", f"Of the first {samples.MOST_SAMPLES} calibration samples"),
    ("calibration", f"need more than {samples._MOST_BYTES >> 30} GB)"),
    ("calibration", f"A step that gains less than\n{guard.LEAST_GAIN_DB} dB"),
    ("calibration", f"there and on {correct.MORE_JUDGES} of those to fit"),
    ("calibration", f"up to {correct.MORE_JUDGES} samples of each half of the {samples.MOST_SAMPLES}"),
    ("calibration", f"fewer than {correct.ENOUGH_VALUES:,} values were seen"),
    ("calibration", f"With fewer than {samples.LEAST_SAMPLES} samples that differ"),
    ("choosing", f"fewer than {payoff.TILE} numbers, most convolutions with fewer than {payoff.TILE} channels"),
    ("choosing", f"keeps about {engine_size.KERNEL_BYTES // 1000} kB of CUDA source"),
    ("formats", f"on the first batches, up to {prepared.RANGE_SAMPLES} samples or one batch"),
    ("formats", f"under {policy.LEAST_FEATURES} inputs or outputs"),
    ("formats", f"at\nmost {policy.LEAST_FEATURES} channels or kernels of over {policy.MOST_KERNEL} elements"),
    ("formats", f"input has 2 or {policy.MOST_DIMENSIONS_NVFP4} dimensions"),
    ("formats", f"at least {search.HALF_MARGIN_DB:.0f} dB\nbetter at the module's own output"),
    ("formats", f"are over FP16's {precision.FP16_MAX:.0f}"),
    ("formats", f"The ONNX files are of opset {narrow_onnx.OPSET}"),
    ("job-file", "in blocks of " + " or ".join(map(str, formats.INT4.blocks)) + " (int4), "
     f"{trt_formats.NVFP4_BLOCK} (nvfp4)"),
    ("job-file", f"powers of 2 from {rules._LEAST_DLA_POOL} on"),
    ("job-file", f"from compute capability {platforms.OLDEST_PORTABLE} on"),
    ("nightly", f"`--cache-size {store.DEFAULT_LIMIT_BYTES // 10**9}GB` is held"),
    ("nightly", f"valid for {transport.VALID_DAYS} days"),
    ("nightly", f"after {WORDS[fleet.MOST_STARTS]} lost workers it is given up"),
    ("nightly", f"once there are {WORDS[regressions.LEAST_TREND]}, with the median of the last {WORDS[history.GREENS]}"),
    ("nightly", f"above {regressions.EXACT_DB:.0f} dB all count as equal"),
    ("onnx", f"**Opsets** {reading._OPSETS[0]} to {reading._OPSETS[1]}"),
    ("routes", f"fewer than {partition.MIN_BLOCK_SIZE} operations"),
    ("security", f"({manifest.MAX_MANIFEST_BYTES >> 20} MiB at most)"),
    ("shipping", f"tries each package for {import_errors.IMPORT_S:.0f} s at most"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "text"), QUOTED)
def test_a_page_quotes_the_number_that_the_code_has(page: str, text: str) -> None:
    prose = (pages.ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert " ".join(text.split()) in " ".join(prose.split()), "change the page with the constant"

"""Tables read from files, and what is said of them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import nets
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

from calib.audit import Audit, TensorAudit, threshold_warnings
from calib.corrections import Corrections, Step
from calib.data import Source, open_source
from calib.errors import CalibError
from calib.histogram import Histogram
from calib.images import transform_of
from calib.samples import DataSpec, InputSpec
from calib.table import CalibrationTable, given_table, make_table
from trtpipe.api import build, calibrate
from trtpipe.job.job import Job
from trtpipe.job.sections import Calibration, Correction, Precision
from trtpipe.model.capture import capture
from trtpipe.model.data import open_check
from trtpipe.pipeline.cache.reads import Read
from trtpipe.pipeline.lowered import Lowered
from trtpipe.pipeline.tables import (
    digests_of,
    overlap_warnings,
    read_table,
    require_transform,
    table_notes,
    verdict_warnings,
)
from trtpipe.pipeline.validate import validate
from trtpipe.values import LayerPrecision, PrecisionName


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "uint8", "normalize": {"x": ((0.5,), (0.25,))}},
        {"dtype": "uint8"},
        {"dtype": "float16"},
        {"normalize": {"x": ((0.5,), (0.25,))}},
    ],
)
def test_a_table_of_the_same_weights_says_in_what_its_graph_may_differ(
    tmp_path: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nets.settled(nets.Residual(), nets.images(4, 3, 8, 8))
    own, another = (digests_of(capture(nets.loaded(network, **how))) for how in ({}, other))
    table = given_table({"head": 1.0}, own)
    monkeypatch.setattr(CalibrationTable, "load", lambda path, histograms=False: table)
    calibration = Calibration(table="a.json")
    assert read_table(calibration, own) is table
    if another == own:  # the same values reach the network
        assert other == {"dtype": "float16"}
        return
    with pytest.raises(CalibError) as caught:
        read_table(calibration, another)
    assert str(caught.value) == (
        "a.json: must belong to this job (got one for another graph of the same weights: other operations or "
        "constants, or an input that the job declares with another dtype or normalize). Declare it as the table's job "
        "does, or calibrate again."
    )
    with pytest.raises(CalibError, match=r"a\.json: must belong to this job \(got one for other weights\)"):
        read_table(calibration, {**another, "weights": "x" * 64})


def test_a_corrected_table_is_none_for_a_job_without_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SimpleNamespace(
        algorithm="mse",
        percentile=99.99,
        corrections=SimpleNamespace(steps=[SimpleNamespace(name=n, kept=False) for n in ("equalization", "bias")]),
        require=lambda *_: None,
        digests={},
    )
    monkeypatch.setattr(CalibrationTable, "load", lambda path, histograms=False: table)
    calibration = SimpleNamespace(table="a.json", algorithm="auto", percentile=99.99, corrections=True)
    assert read_table(calibration, {}) is table  # type: ignore[arg-type]
    calibration.corrections = False
    assert read_table(calibration, {}) is table  # type: ignore[arg-type]  # each was rejected: none is in it
    table.corrections.steps[1].kept = True
    for none in (False, ()):
        calibration.corrections = none
        with pytest.raises(CalibError) as caught:
            read_table(calibration, {})  # type: ignore[arg-type]
        assert str(caught.value) == (
            "a.json: must be without corrections for calibration.corrections (got bias). Leave the key out, or "
            "calibrate again."
        )
    table.corrections.steps.append(SimpleNamespace(name="ranges", kept=True))
    calibration.corrections = ("rounding", "bias")
    assert read_table(calibration, {}) is table  # type: ignore[arg-type]
    calibration.corrections = ("rounding", "smoothing")
    with pytest.raises(CalibError) as caught:
        read_table(calibration, {})  # type: ignore[arg-type]
    assert str(caught.value) == (
        "a.json: must hold no corrections but rounding, smoothing for calibration.corrections (got bias). Leave the "
        "key out, or calibrate again."
    )


NETWORK = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Parameter(torch.randn(1, 1, 16))
        self.conv = torch.nn.Conv2d(3, 16, 4, 4)
        self.norm, self.qkv, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 5)

    def forward(self, x):
        count = x.shape[0]
        x = torch.relu(self.conv(x)).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(count, -1, -1), x], 1)
        q, k, v = self.qkv(self.norm(x)).reshape(count, 5, 3, 16).unbind(2)
        return self.head(torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])

def net():
    return Net().eval()
"""
JOB = """
name: {name}
model: {{factory: "tables_network:net"}}
inputs: {{image: {{shape: [{batch}, 3, 8, 8]{dims}}}}}
outputs: {{logits: {{}}}}
precision: {{int8_mode: true}}
calibration: {calibration}
build: {{target: onnxruntime}}
check: {{arrays: x.npy, limits: {{cosine_min: 0.5}}}}
"""
RANGE, FIXED = ("N", ", N: {min: 1, opt: 4, max: 8}"), ("1", "")


@pytest.mark.parametrize(("made", "used"), [(RANGE, FIXED), (FIXED, RANGE)], ids=["range to fixed", "fixed to range"])
def test_a_table_serves_every_batch_size(
    made: tuple[str, str], used: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrated for a range of batches, built for one, and the other way round: the same scales in the graph."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tables_network.py").write_text(NETWORK)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((16, 3, 8, 8), np.float32))
    scales = []
    for name, (batch, dims), calibration in (
        ("a", made, "{arrays: x.npy, batch_size: 1}"), ("b", used, "{table: table.json}")
    ):  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(JOB.format(name=name, batch=batch, dims=dims, calibration=calibration))
        if name == "a":
            calibrate(path).save(tmp_path / "table.json")
        bundle = build(path, tmp_path / "out").bundle
        graph = onnx.load_from_string(bundle.read("model.onnx")).graph
        constants = {i.name: i for i in graph.initializer}
        quantizers = [n for n in graph.node if n.op_type == "QuantizeLinear"]
        scales.append({n.name: float(numpy_helper.to_array(constants[n.input[1]])) for n in quantizers})
    assert scales[0] == scales[1]
    assert len(scales[0]) >= 5


def test_a_named_table_brings_its_own_histograms_to_the_report_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the table, gone, and damaged: the report draws the first, and the graph is always the same."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tables_network.py").write_text(NETWORK)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((16, 3, 8, 8), np.float32))
    path = tmp_path / "a.yaml"
    batch, dims = FIXED
    path.write_text(JOB.format(name="a", batch=batch, dims=dims, calibration="{arrays: x.npy, algorithm: minmax}"))
    calibrate(path).save(tmp_path / "table.json")
    path.write_text(JOB.format(name="a", batch=batch, dims=dims, calibration="{table: table.json}"))
    beside = tmp_path / "table.histograms.safetensors"
    whole = beside.read_bytes()
    graphs, drawn = [], []
    for i, data in enumerate((whole, None, whole[:-8] + bytes(8))):
        beside.write_bytes(data) if data else beside.unlink()
        bundle = build(path, tmp_path / f"out{i}").bundle
        graphs.append(bundle.read("model.onnx"))
        page = bundle.read("report.html").decode()
        drawn.append("How often each magnitude was seen" in page)
        assert ("No histograms of this table came with it" in page) != drawn[-1]
    assert graphs[0] == graphs[1] == graphs[2]
    assert drawn == [True, False, False]


def test_a_table_made_otherwise_than_the_job_says_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tables_network.py").write_text(NETWORK)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((16, 3, 8, 8), np.float32))
    path = tmp_path / "a.yaml"
    batch, dims = FIXED
    path.write_text(JOB.format(name="a", batch=batch, dims=dims, calibration="{arrays: x.npy, algorithm: minmax}"))
    calibrate(path).save(tmp_path / "t.json")
    said = []
    for asked in ("", ", algorithm: minmax", ", algorithm: mse"):
        path.write_text(JOB.format(name="a", batch=batch, dims=dims, calibration="{table: t.json" + asked + "}"))
        said.append([problem.message for problem in validate(path)])
    assert said == [[], [], [
        f"calibration.table: {tmp_path}/t.json: must be made by mse, the job's algorithm (got one made by minmax). "
        "Leave algorithm and percentile out of the job, which then takes the table's, or calibrate again."
    ]]  # fmt: skip


def test_a_read_of_an_unknown_kind_is_none_of_ours() -> None:
    assert Read.from_plain(["file", "/a"]) == Read("file", "/a")
    with pytest.raises(ValueError, match=r"kind must be .*file.* \(got 'smell'\)"):
        Read.from_plain(["smell", "/a"])


MODES = ({"int8_mode": True}, {"fp8_mode": True}, {"nvfp4_mode": True}, {"weights": "int4"})


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("modes", [m for n in range(1, 5) for m in itertools.combinations(MODES, n)], ids=str)
def test_a_job_is_not_told_of_what_its_formats_do_not_use(modes: tuple[dict[str, object], ...], kept: bool) -> None:
    """INT8's thresholds and corrections are no matter of FP8 and 4 bits; the data and changes of the graph are."""
    precision = Precision.model_validate({k: v for m in modes for k, v in m.items()})
    skipped, threshold = "1 bad samples were skipped; first: x.png: no image", "a:input: percentile leaves 3.0 dB"
    audit = Audit(
        batches=1, batch_size=1, coverage=None, skipped=("x.png: no image",), tensors={}, warnings=(threshold, skipped)
    )
    steps = tuple(Step(name=n, kept=kept, before_db=20.0, after_db=21.0) for n in get_args(Correction))
    table = CalibrationTable("mse", 99.99, {"a:input": 1.0}, {}, {}, "", audit, corrections=Corrections(steps, {}))
    job = cast(Job, SimpleNamespace(precision=precision))
    written = tuple(f"calibration: {s}" for s in steps)
    if not precision.int8_mode:
        assert table_notes(job, table) == (skipped, *(f"calibration: {s}" for s in steps[:2] if kept))
    elif len(modes) == 1:
        assert table_notes(job, table) == (threshold, skipped, *written)
    else:  # what reads it is not known yet
        mixed = (w.replace("calibration:", "calibration, with all in INT8:", 1) for w in written)
        assert table_notes(job, table) == (skipped, *mixed)
    none = "need at least 16 calibration samples that differ"
    for said in table_notes(job, dataclasses.replace(table, corrections=Corrections((), {}, none)))[-1:]:
        assert said.startswith("calibration")
        assert said.endswith(f": corrections: {none}; none was made")


@pytest.mark.parametrize("number", ["int8", "fp8"])
def test_beside_fp8_the_graph_decides_whose_thresholds_are_noted(number: PrecisionName) -> None:
    seen = TensorAudit(low=-2.0, high=1.0, elements=9, zeros=0.0, clipped=0.0, sqnr_db=9.0, stability=0.5, state="live")
    audit = Audit(batches=1, batch_size=1, coverage=None, skipped=(), tensors={"a:input": seen}, warnings=())
    audit = audit.model_copy(update={"warnings": threshold_warnings(audit.tensors)})
    table = CalibrationTable("mse", 99.99, {"a:input": 1.0}, {}, {}, "", audit)
    layers = (LayerPrecision("a", "linear", number, ""), LayerPrecision("b", "conv2d", "int8", ""))
    lowered = cast(Lowered, SimpleNamespace(layers=layers, shared_scales={}))
    job = cast(Job, SimpleNamespace(precision=Precision(int8_mode=True, fp8_mode=True)))
    unstable = "1 thresholds differ by over 10 % between two halves of the data and need more samples: a:input (50 %)."
    assert table_notes(job, table, lowered) == ((unstable,) if number == "int8" else ())


@pytest.mark.parametrize("formats", list(itertools.product(("fp16", "int8", "fp8", "int4", "nvfp4"), repeat=2)))
def test_a_verdict_and_the_notes_name_the_same_thresholds(formats: tuple[PrecisionName, PrecisionName]) -> None:
    """Those that a product in INT8 reads: a linear in another format reads no INT8, and nothing there is clipped."""
    seen = TensorAudit(low=-2.0, high=1.0, elements=9, zeros=0.0, clipped=0.5, sqnr_db=3.0, stability=0.0, state="live")
    keys = ("a:input", "b:input")
    poor = tuple(f"{key}: percentile leaves 3.0 dB" for key in keys)
    tensors = dict.fromkeys(keys, seen)
    audit = Audit(
        batches=1,
        batch_size=1,
        coverage=None,
        skipped=(),
        tensors=tensors,
        warnings=(*poor, *threshold_warnings(tensors)),
    )
    table = CalibrationTable("percentile", 99.99, dict.fromkeys(keys, 1.0), {}, {"a.png": "0" * 64}, "", audit)
    layers = tuple(LayerPrecision(m, "linear", f, "") for m, f in zip("ab", formats, strict=True))
    lowered = cast(Lowered, SimpleNamespace(table=table, layers=layers, shared_scales={}))
    check = cast(Source, SimpleNamespace(ids=("a",), sample_digests=("0" * 64,), sample_count=1))
    overlap = "1 of 1 check samples were calibrated on too (first: a); the check is the weaker for it"
    counts = [k for k, f in zip(keys, formats, strict=True) if f == "int8"]
    clipped = ", ".join(f"{k} (50.0 %)" for k in sorted(counts, reverse=True))
    lines = (f"{len(counts)} tensors have over 1 % of their values clipped: {clipped}.",) if counts else ()
    named = (*(f"{k}: percentile leaves 3.0 dB" for k in counts), *lines)
    assert verdict_warnings(lowered, check) == (*named, overlap)
    job = cast(Job, SimpleNamespace(precision=Precision(int8_mode=True, fp8_mode=True)))
    assert table_notes(job, table, lowered) == named


def test_a_verdict_without_a_table_has_no_warnings_of_one() -> None:
    check = cast(Source, SimpleNamespace(sample_digests=("a", "b"), sample_count=2))
    assert verdict_warnings(cast(Lowered, SimpleNamespace(table=None)), check) == ()


@pytest.mark.parametrize(("copies", "warned"), [(0, False), (1, False), (2, True), (9, True)])
def test_copies_of_one_sample_are_no_more_samples(copies: int, warned: bool) -> None:
    """Six more of them would make an interval as narrow as its limit asks."""
    digests = ("a",) * (copies + 1) + tuple("bcdefghij"[: 9 - copies])
    check = cast(Source, SimpleNamespace(sample_digests=digests, sample_count=10))
    said = (
        f"{copies} of 10 check samples are copies of others: they prove what {10 - copies} samples prove, and "
        "confidence intervals are narrower than that",
    )
    assert verdict_warnings(cast(Lowered, SimpleNamespace(table=None)), check) == (said if warned else ())


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_check_samples_that_the_table_was_made_from_are_named(shared: int) -> None:
    """By content, whatever they were called, and as often for a table that was read as for one that was made."""
    audit = Audit(batches=1, batch_size=1, coverage=None, skipped=(), tensors={}, warnings=())
    calibrated = {f"train/{i}.png": f"{i:064x}" for i in range(5)}
    table = CalibrationTable("mse", 99.99, {}, {}, calibrated, "", audit)
    digests = (*list(calibrated.values())[:shared], *(f"{i:064x}" for i in range(100, 104 - shared)))
    check = SimpleNamespace(ids=("a", "b", "c", "d"), sample_digests=digests, sample_count=4)
    assert overlap_warnings(None, check) == ()  # type: ignore[arg-type]
    assert overlap_warnings(table, check) == (  # type: ignore[arg-type]
        ()
        if not shared
        else (f"{shared} of 4 check samples were calibrated on too (first: a); the check is the weaker for it",)
    )


def test_check_samples_calibrated_on_in_another_dtype_are_named(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32).reshape(4, 2) / 4
    np.save(tmp_path / "calib.npy", values.astype(np.float64))
    np.save(tmp_path / "check.npy", np.concatenate([values[:3], values[3:] + 1]))
    calibration, check = (
        open_source(DataSpec(arrays=str(tmp_path / name)), (InputSpec("x", "float32", (2,)),))
        for name in ("calib.npy", "check.npy")
    )
    audit = Audit(batches=1, batch_size=1, coverage=None, skipped=(), tensors={}, warnings=())
    calibrated = dict(zip(calibration.ids, calibration.sample_digests, strict=True))
    (warning,) = overlap_warnings(CalibrationTable("mse", 99.99, {}, {}, calibrated, "", audit), check)
    assert warning.startswith("3 of 4 check samples were calibrated on too (first: check.npy[")


TRANSFORMS = {
    "resized": ({"resize": 32}, "resize 32"),
    "cut": ({"center_crop": [16, 16]}, "center_crop [16, 16]"),
    "normalized": (
        {"normalize": {"mean": [0.5], "std": [0.25]}}, "normalize_mean [0.5], normalize_std [0.25]",
    ),
    "called": ({"callable": "numpy:asarray"}, "callable numpy:asarray"),
    "of another filter": ({"resize": 32, "interpolation": "bicubic"}, "interpolation bicubic, resize 32"),
}  # fmt: skip


def with_table(folder: Path, transform: dict[str, Any] | None, check: dict[str, Any]) -> Job:
    """A job with a table of images made by `transform`, and that check."""
    Image.new("RGB", (40, 40)).save(folder / "one.png")

    def job(calibration: dict[str, Any], check: dict[str, Any]) -> Job:
        return Job.model_validate(
            {
                "name": "job",
                "model": {"factory": "nets:make"},
                "inputs": {"image": {"shape": ["N", 3, 16, 16], "N": {"min": 1, "opt": 1, "max": 2}}},
                "outputs": {"out": {}},
                "precision": {"int8_mode": True},
                "calibration": calibration,
                "check": {"limits": {"cosine_min": 0.9}, **check},
            }
        )

    images = {"images": str(folder)} if transform is None else {"images": str(folder), "transform": transform}
    recipe = open_check(job(images, images)).recipe
    seen = {":head": (Histogram.of([1.0]), Histogram.empty())}
    samples = {"one.png": "0" * 64}
    make_table(seen, "minmax", 99.99, {}, samples, recipe, 1, 1, None, ()).save(folder / "t.json")
    return job({"table": str(folder / "t.json")}, check)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_table_in_the_place_of_images_does_not_take_their_transform_along(tmp_path: Path, name: str) -> None:
    transform, said = TRANSFORMS[name]
    job = with_table(tmp_path, transform, {"images": str(tmp_path)})
    table = CalibrationTable.load(tmp_path / "t.json")
    with pytest.raises(CalibError) as caught:
        require_transform(job, table)
    assert str(caught.value) == (
        f"{tmp_path}/t.json: must come with check.transform, as the images that it was made of had one (got none; "
        f"theirs: {said}). Give the check's images theirs; {{}} takes them as they are."
    )


@pytest.mark.parametrize(
    ("transform", "check"),
    [
        (None, {"images": "."}),
        ({}, {"images": "."}),
        ({"resize": 32}, {"images": ".", "transform": {}}),
        ({"resize": 32}, {"images": ".", "transform": {"resize": 32}}),
        ({"resize": 32}, {"arrays": "x.npy"}),
    ],
)
def test_a_transform_is_not_missed_where_none_was_or_the_job_says_which(
    tmp_path: Path, transform: dict[str, Any] | None, check: dict[str, Any]
) -> None:
    job = with_table(tmp_path, transform, check)
    require_transform(job, CalibrationTable.load(tmp_path / "t.json"))


@pytest.mark.parametrize("recipe", ["", "arrays", "images", "images {", "images []", "images {{}", "factory a:b {}"])
def test_a_recipe_of_no_images_has_no_transform(recipe: str) -> None:
    assert transform_of(recipe) == {}

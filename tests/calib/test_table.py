"""The table on disk: canonical, whole, and refused when anything is wrong with it."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.algorithms import ALGORITHMS, threshold
from calib.errors import CalibError
from calib.histogram import Histogram
from calib.samples import combine_digests
from calib.table import CalibrationTable, make_table
from calib.table_files import histograms_path

RECIPE = "arrays\nx:float32[3]"


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def counted(seed, tensors=("conv1:input", "block.0:conv_2:input", ":output")):
    rng = np.random.default_rng(seed)
    return {
        key: tuple(Histogram.of(rng.normal(size=2000) * (i + 1)) for _ in range(2)) for i, key in enumerate(tensors)
    }


def made(seed=0, algorithm="entropy_2", samples=("a", "b"), digests=None, data=None, **options):
    return make_table(
        counted(seed) if data is None else data,
        algorithm,
        options.pop("percentile", 99.99),
        {"weights": "w1", "graph": "g1"} if digests is None else digests,
        {s: sha(s) for s in samples},
        options.pop("recipe", RECIPE),
        batches=2,
        batch_size=1,
        coverage=options.pop("coverage", {"cat": 1, "dog": 1}),
        skipped=options.pop("skipped", ()),
    )


@pytest.fixture
def saved(tmp_path):
    table = made()
    table.save(tmp_path / "calibration.json")
    return tmp_path / "calibration.json"


def test_an_error_of_writing_names_the_file_that_was_asked_for(saved, tmp_path):
    """Not the histograms', which are written first."""
    wanted = tmp_path / "nowhere" / "t.json"
    with pytest.raises(FileNotFoundError) as caught:
        CalibrationTable.load(saved, histograms=True).save(wanted)
    assert caught.value.filename == str(wanted)


def test_what_is_read_is_what_was_written(saved):
    assert CalibrationTable.load(saved) == made()
    whole = CalibrationTable.load(saved, histograms=True)
    assert whole.digest == made().digest
    assert whole.histograms == counted(0)


def test_one_table_has_one_text(saved, tmp_path):
    CalibrationTable.load(saved, histograms=True).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == saved.read_bytes()
    assert histograms_path(tmp_path / "again.json").read_bytes() == histograms_path(saved).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "again.histograms.safetensors",
        "again.json",
        "calibration.histograms.safetensors",
        "calibration.json",
    ]


def test_keys_are_sorted_and_amax_survives_as_float32(saved):
    raw = json.loads(saved.read_text())
    assert list(raw) == sorted(raw)
    assert list(raw["amax"]) == [":output", "block.0:conv_2:input", "conv1:input"]
    for key, amax in made().amax.items():
        assert np.float32(raw["amax"][key]) == np.float32(amax) == amax


def test_scale_is_amax_over_127():
    table = made()
    assert table.scale("conv1:input") == np.float32(table.amax["conv1:input"]) / np.float32(127)
    with pytest.raises(
        CalibError, match=r"table: must hold 'conv9:input' \(got 3 other tensors\)\. Calibrate this model"
    ):
        table.scale("conv9:input")


def test_thresholds_are_those_of_both_halves_together():
    for algorithm in ALGORITHMS:
        for key, (first, second) in counted(0).items():
            assert made(algorithm=algorithm).amax[key] == np.float32(threshold(first + second, algorithm))


def test_the_digest_changes_with_anything():
    digests = {
        made().digest,
        made(seed=1).digest,
        made(algorithm="mse").digest,
        made(samples=("a", "c")).digest,
        made(digests={"weights": "w2", "graph": "g1"}).digest,
        made(skipped=("x.png: bad",)).digest,
    }
    assert len(digests) == 6


def test_a_table_fits_its_own_job_alone():
    table = made()
    job = {"weights": "w1", "graph": "g1", "data": table.digests["data"]}
    assert table.changed(job, "entropy_2") == ()
    table.require("here", job, "entropy_2")
    assert table.changed(job, "percentile", 99.0) == ("algorithm",)
    assert made(algorithm="percentile").changed(job, "percentile", 99.0) == ("percentile",)
    assert table.changed({**job, "transform": "t"}, "entropy_2") == ("transform",)
    message = re.escape(
        "calibration.table: must belong to this job (got one for other data, weights, algorithm). Calibrate again."
    )
    with pytest.raises(CalibError, match=message):
        table.require("calibration.table", {"weights": "w2", "graph": "g1", "data": "d"}, "mse")


@pytest.mark.parametrize(
    ("of_table", "of_job", "said"),
    [
        (("mse", 99.99), ("minmax", 99.99), "made by minmax, the job's algorithm (got one made by mse)"),
        (("percentile", 99.5), ("mse", 99.0), "made by mse, the job's algorithm (got one made by percentile 99.5)"),
        (
            ("percentile", 99.99),
            ("percentile", 99.0),
            "made by percentile 99, the job's algorithm (got one made by percentile 99.99)",
        ),
    ],
)
def test_a_table_of_another_algorithm_says_both(of_table, of_job, said):
    table = dataclasses.replace(made(algorithm=of_table[0]), percentile=of_table[1])
    step = "Leave algorithm and percentile out of the job, which then takes the table's, or calibrate again."
    with pytest.raises(CalibError) as caught:
        table.require("t.json", table.digests, *of_job)
    assert str(caught.value) == f"t.json: must be {said}. {step}"


@pytest.mark.parametrize(
    ("digests", "named"),
    [({"weights": "w2", "graph": "g2"}, "weights"), ({"weights": "w1", "graph": "g2"}, "graph")],
)
def test_of_other_weights_no_other_graph_is_claimed(digests, named):
    """The graph's digest is made of the weights too: with others it always differs."""
    with pytest.raises(CalibError, match=rf"must belong to this job \(got one for other {named}\)\. Calibrate again\."):
        made().require("calibration.table", digests, "entropy_2")


def test_other_algorithms_come_from_the_histograms(saved):
    whole = CalibrationTable.load(saved, histograms=True)
    for algorithm in ALGORITHMS:
        assert whole.recomputed(algorithm) == made(algorithm=algorithm)
    with pytest.raises(CalibError, match=r"it was loaded without its histograms\. Load it with histograms=True"):
        CalibrationTable.load(saved).recomputed("mse")


def test_histograms_that_were_never_written_are_said(saved, tmp_path):
    plain = dataclasses.replace(CalibrationTable.load(saved), histograms_sha256=None)
    plain.save(tmp_path / "plain.json")
    with pytest.raises(CalibError) as caught:
        CalibrationTable.load(tmp_path / "plain.json", histograms=True)
    assert str(caught.value) == f"{tmp_path / 'plain.json'}: was written without histograms. Calibrate again."


def test_no_observed_tensor_is_refused():
    with pytest.raises(CalibError, match=r"there is no tensor to observe"):
        make_table({}, "entropy_2", 99.99, {}, {}, RECIPE, 1, 1, None, ())


def resigned(raw):
    """The file's text with its digest made right again, as someone who forges a table would."""
    from calib.table_files import canonical

    raw = {k: v for k, v in raw.items() if k != "digest"}
    if isinstance(raw.get("samples"), dict) and isinstance(raw.get("digests"), dict):
        raw["digests"] = {**raw["digests"], "data": combine_digests(raw["samples"], raw["recipe"])}
    return json.dumps({**raw, "digest": sha(canonical(raw))})


def edit(*path, value=None, drop=False):
    def change(raw):
        node = raw
        for step in path[:-1]:
            node = node[step]
        if drop:
            del node[path[-1]]
        else:
            node[path[-1]] = value
        return resigned(raw)

    return change


K = "conv1:input"
SEEN = ("audit", "tensors", K)
FORGED = {
    "no amax": (edit("amax", value={}), r"amax: Dictionary should have at least 1 item"),
    "amax zero": (edit("amax", K, value=0.0), r"amax.conv1:input: Input should be greater than or equal to"),
    "amax negative": (edit("amax", K, value=-1.0), r"amax.conv1:input: Input should be greater than or equal to"),
    "amax too small for a scale": (edit("amax", K, value=1e-37), r"amax.conv1:input: Input should be greater"),
    "amax over float32": (edit("amax", K, value=1e39), r"amax.conv1:input: Input should be less than or equal"),
    "amax as text": (edit("amax", K, value="1.5"), r"amax.conv1:input: Input should be a valid number"),
    "amax true": (edit("amax", K, value=True), r"amax.conv1:input: Input should be a valid number"),
    "amax null": (edit("amax", K, value=None), r"amax.conv1:input: Input should be a valid number"),
    "amax a list": (edit("amax", K, value=[1.0]), r"amax.conv1:input: Input should be a valid number"),
    "amax over what was seen": (edit("amax", K, value=100.0), r"amax of 'conv1:input' must be at most .* \(got 100\)"),
    "amax of another tensor": (
        edit("amax", "x:input", value=1.0),
        r"must name the same tensors \(got 'x:input' in one",
    ),
    "a tensor missing": (
        edit("amax", K, drop=True),
        r"must name the same tensors \(got 'conv1:input' in one of them\)",
    ),
    "a key without a role": (edit("amax", "conv1", value=1.0), r"amax.conv1.*: String should match pattern"),
    "a key with a control character": (edit("amax", "a\nb:input", value=1.0), r"String should match pattern"),
    "an unknown algorithm": (edit("algorithm", value="kl"), r"algorithm: Input should be 'auto', 'entropy_2'"),
    "percentile over 100": (edit("percentile", value=101.0), r"percentile: Input should be less than or equal to 100"),
    "an unknown field": (edit("extra", value=1), r"extra: Extra inputs are not permitted"),
    "a field missing": (edit("audit", drop=True), r"audit: Field required"),
    "a digest of no hex": (edit("samples", "a", value="xyz"), r"samples.a: String should match pattern"),
    "no samples": (edit("samples", value={}), r"a table of given scales, and only that, has no samples"),
    "a count below zero": (edit(*SEEN, "elements", value=-1), r"elements: Input should be greater than or equal to 0"),
    "a share over one": (edit(*SEEN, "clipped", value=1.5), r"clipped: Input should be less than or equal to 1"),
    "an unknown state": (edit(*SEEN, "state", value="fine"), r"state: Input should be 'live', 'constant' or 'dead'"),
    "a huge count": (edit(*SEEN, "elements", value=10**400), r"elements: Input should be|elements: Unable to parse"),
    "another format": (edit("format", value="onnx"), r"is JSON, but no calibration table"),
    "another version": (edit("version", value=3), r"must be of version 1 or 2 \(got 3\)\. Calibrate again\."),
    "version 2 without corrections": (
        edit("version", value=2),
        r"a table of version 2, and only that, has corrections",
    ),
    "a version as text": (edit("version", value="1"), r'must be of version 1 or 2 \(got "1"\)\.'),
    "a version that is no number": (edit("version", value=True), r"must be of version 1 or 2 \(got true\)\."),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_tables(saved, name):
    change, message = FORGED[name]
    saved.write_text(change(json.loads(saved.read_text())))
    with pytest.raises(CalibError, match=message):
        CalibrationTable.load(saved)


def test_the_forger_forges_well(saved):
    """Without a change the re-signed table reads: what the tests above see refused is the change."""
    saved.write_text(resigned(json.loads(saved.read_text())))
    assert CalibrationTable.load(saved) == made()


DAMAGED = {
    "empty": (lambda b: b"", r"must be a whole JSON file \(got Expecting value"),
    "cut short": (lambda b: b[:-20], r"must be a whole JSON file \(got"),
    "cut in half": (lambda b: b[: len(b) // 2], r"must be a whole JSON file \(got"),
    "more behind it": (lambda b: b + b"{}", r"must be a whole JSON file \(got Extra data"),
    "not UTF-8": (lambda b: b"\xff" + b, r"must be a whole JSON file \(got 'utf-8' codec"),
    "a list": (lambda b: b"[1, 2]", r"is JSON, but no calibration table"),
    "deep nesting": (lambda b: b"[" * 100_000, r"must be a whole JSON file \(got"),
    "NaN": (lambda b: b.replace(b'"percentile": 99.99', b'"percentile": NaN'), r"got NaN is not JSON"),
    "a key twice": (lambda b: b.replace(b'"version": 1', b'"version": 1,"version": 1'), r"got a key is given twice"),
    "one digit of one amax": (
        lambda b: re.sub(rb'("conv1:input": )\d', rb"\g<1>1", b, count=1),
        r"must be as it was written \(got digest \w{12}, not \w{12}\)",
    ),
    "another sample": (
        lambda b: b.replace(b'"samples": {\n  "a"', b'"samples": {\n  "z"'),
        r"digests.data is not that of",
    ),
    "many digits": (lambda b: b.replace(b'"version": 1', b'"version": ' + b"1" * 5000), r"must be a whole JSON file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tables(saved, name):
    change, message = DAMAGED[name]
    before = saved.read_bytes()
    saved.write_bytes(change(before))
    assert saved.read_bytes() != before
    with pytest.raises(CalibError, match=message):
        CalibrationTable.load(saved)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_no_changed_byte_gives_another_table(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("table") / "calibration.json"
    made().save(path)
    text = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= data.draw(st.integers(1, 127))
    path.write_bytes(text)
    with contextlib.suppress(CalibError):
        assert CalibrationTable.load(path) == made()  # white space, or 1e-5 for 1e-05


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(CalibError, match=r"must be a calibration table \(got No such file or directory\)"):
        CalibrationTable.load(tmp_path / "calibration.json")


def repacked(path, change):
    from safetensors.numpy import load_file, save_file

    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)


def drop_tensor(path):
    repacked(path, lambda a: a.pop("conv1:input#0"))


def negative_count(path):
    repacked(path, lambda a: a["conv1:input#0"].__setitem__((1, 0), -5))


def bucket_out_of_range(path):
    repacked(path, lambda a: a["conv1:input#0"].__setitem__((0, 0), 10**6))


SIDECARS = {
    "missing": (lambda p: p.unlink(), False, r"must be readable \(got No such file"),
    "cut short": (
        lambda p: p.write_bytes(p.read_bytes()[:-8]),
        False,
        r"these are not the histograms of calibration.json: the digest",
    ),
    "garbage": (lambda p: p.write_bytes(b"\0" * 64), True, r"must hold the histograms of calibration.json \(got"),
    "a tensor missing": (drop_tensor, True, r"must hold the histograms of calibration.json \(got 'conv1:input#0'\)"),
    "a negative count": (negative_count, True, r"'conv1:input' has counts that no observer makes"),
    "a bucket out of range": (bucket_out_of_range, True, r"'conv1:input' has counts that no observer makes"),
}


@pytest.mark.parametrize("name", SIDECARS)
def test_bad_histogram_files(saved, name):
    change, sign, message = SIDECARS[name]
    path = histograms_path(saved)
    change(path)
    if sign:
        raw = json.loads(saved.read_text())
        raw["histograms_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        saved.write_text(resigned(raw))
    with pytest.raises(CalibError, match=message):
        CalibrationTable.load(saved, histograms=True)
    assert CalibrationTable.load(saved).amax == made().amax


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        made().save(tmp_path / "calibration.json")
    assert list(tmp_path.iterdir()) == []

"""Nights over a small world: what is built, what is reused and why, and what one bad job costs."""

import json
import os
import shutil
import sqlite3
import subprocess
import time

import nights
import numpy as np
import pytest
from nights import fingerprints, night, outcomes
from PIL import Image

from calib.files import as_text
from trtpipe.cli.main import main
from trtpipe.errors import MissingError
from trtpipe.pipeline.cache.remote import Store

MATRIX = """
matrix:
  weights: [./w0.safetensors, ./w1.safetensors]
  precision: [fp32, int8]
build: {target: onnxruntime}
"""
NAMES = ["m-w0-fp32", "m-w0-int8", "m-w1-fp32", "m-w1-int8", "rtx"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A world after its first night: a matrix of four jobs and one for TensorRT-RTX."""
    folder = tmp_path_factory.mktemp("first")
    jobs = nights.make_world(folder / "jobs", 3)
    nights.write_job(jobs, "m", MATRIX.replace("precision: [", "precision: ["), "none.safetensors")
    nights.write_job(jobs, "rtx", "precision: {int8_mode: true}\nbuild: {target: tensorrt_rtx}\n", "w2.safetensors")
    report = night(folder)
    assert outcomes(report) == dict.fromkeys(NAMES, "built"), report
    return folder


@pytest.fixture
def world(first, tmp_path, monkeypatch):
    """A copy of that world, which is the current folder; times are kept, as a copy of a disk would."""
    shutil.copytree(first, tmp_path / "world", symlinks=True)
    monkeypatch.chdir(tmp_path / "world")
    return tmp_path / "world"


@pytest.fixture
def here(world, capsys):
    """`trtpipe nightly` in this process, where torch need not be imported again; its report."""

    def run(*arguments, jobs=("jobs",), expect=0):
        capsys.readouterr()
        code = main(["nightly", *jobs, "-o", "out", "--cache", "cache", "--workers", "0", "--json", *arguments])
        shown = capsys.readouterr()
        assert code == expect, shown.err + shown.out
        return json.loads(shown.out)

    return run


def result(report, name):
    return next(o for o in report["outcomes"] if o["name"] == name)


def last_first_night(folder):
    return json.loads((folder / "out/nightly.json").read_text())


def test_a_job_that_cannot_be_found_or_read_costs_itself_alone(world, here):
    (world / "jobs/loop.yaml").symlink_to("loop.yaml")
    (world / "jobs/long.yaml").symlink_to("x" * 300)
    (world / "jobs" / os.fsdecode(b"caf\xe9.yaml")).write_text("name: z\n")  # no UTF-8
    report = here(expect=2)
    broken = dict.fromkeys(("loop.yaml", "long.yaml", as_text(os.fsdecode(b"caf\xe9.yaml"))), "error")
    assert outcomes(report) == {**dict.fromkeys(NAMES, "reused"), **broken}
    assert (
        result(report, "loop.yaml")["error"]
        == "jobs/loop.yaml: must be readable (got Too many levels of symbolic links)."
    )
    assert result(report, "long.yaml")["error"] == "jobs/long.yaml: must be readable (got File name too long)."


def test_a_job_that_is_gone_or_renamed_is_said_once(world, here, monkeypatch):
    here()
    (world / "jobs/rtx.yaml").unlink()
    assert here()["notes"][-1] == "no job any more, and built no more: rtx (jobs/rtx.yaml is gone)"
    path = world / "jobs/m.yaml"
    text = path.read_text()
    path.write_text(text.replace("name: m", "name: k"))
    gone = [f"{n} (jobs/m.yaml has no job of that name)" for n in NAMES[:4]]
    assert here()["notes"][-1] == f"no job any more, and built no more: {', '.join(gone)}"
    assert not [n for n in here()["notes"] if "no job any more" in n]
    (world / "elsewhere").mkdir()
    monkeypatch.chdir(world / "elsewhere")  # where jobs/m.yaml, as the run before called it, is not
    (world / "other").mkdir()
    nights.write_job(nights.make_world(world / "other"), "o")
    report = here("-o", "../out", "--cache", "../cache", jobs=("../other",))
    assert not [n for n in report["notes"] if "no job any more" in n]
    monkeypatch.chdir(world)
    path.write_text("name: [")  # what cannot be read says so itself
    assert not [n for n in here(expect=2)["notes"] if "no job any more" in n]


def test_the_first_night_builds_and_says_so(first):
    report = last_first_night(first)
    assert report["exit_code"] == 0
    assert report["headline"] == "all 5 jobs are green"
    assert {o["reasons"][0] for o in report["outcomes"]} == {"first build"}
    assert (first / "out/nightly.txt").read_text().splitlines()[0] == "all 5 jobs are green"
    for name in NAMES:
        metrics = {m["name"]: m["value"] for m in result(report, name)["metrics"]}
        assert metrics["accuracy_engine"] == 1.0, name


def test_jobs_of_one_model_share_its_baseline(first):
    report = last_first_night(first)
    for weight in ("w0", "w1"):
        reused = [set(result(report, f"m-{weight}-{p}")["stages_reused"]) for p in ("fp32", "int8")]
        assert "baseline" in reused[0] | reused[1]


def test_a_night_without_changes_loads_no_torch_starts_no_process_and_reads_no_file_again(world):
    report, done = nights.watched_night(world)  # in a copy: every file is another
    assert done.pop("digested") > 0
    assert done == {k: v for k, v in nights.NOTHING.items() if k != "digested"}
    again, done = nights.watched_night(world)
    assert done == nights.NOTHING
    for shown in (report, again):
        assert outcomes(shown) == dict.fromkeys(NAMES, "reused")
        assert fingerprints(shown) == fingerprints(last_first_night(world))


def test_a_touched_file_is_no_change_and_a_changed_one_is_with_its_reason(world, here):
    os.utime(world / "jobs/w1.safetensors")
    assert set(outcomes(here()).values()) == {"reused"}
    nights.write_weights(world / "jobs/w2.safetensors", scale=1.1)
    report = here()
    assert outcomes(report) == dict.fromkeys(NAMES, "reused") | {"rtx": "built"}
    assert result(report, "rtx")["reasons"] == ["weights changed"]
    assert result(report, "rtx")["stages_reused"] == []


def test_new_check_images_neither_calibrate_nor_export_nor_compile(world):
    nights.data(world / "jobs/val.npz", 3)
    report = night(world, "--workers", "1")  # a process of its own, as what torch's import reads counts too
    assert set(outcomes(report).values()) == {"built"}
    assert result(report, "rtx")["reasons"] == ["check data changed"]
    assert result(report, "rtx")["stages_reused"] == ["engine"]
    assert set(result(report, "rtx")["seconds"]) == {"model", "baseline", "check", "bundle"}
    before = result(last_first_night_of(world), "rtx")
    assert result(report, "rtx")["engine_sha256"] == before["engine_sha256"]


def last_first_night_of(folder):
    """What the history says of the first run."""
    with sqlite3.connect(folder / "out/history.sqlite") as db:
        rows = db.execute("SELECT data FROM results WHERE run = 1").fetchall()
    return {"outcomes": [json.loads(row[0]) for row in rows]}


def test_another_limit_checks_again_and_builds_nothing(world, here):
    job = world / "jobs/rtx.yaml"
    job.write_text(job.read_text().replace("cosine_min: 0.9", "cosine_min: 0.95"))
    report = here()
    assert result(report, "rtx")["reasons"] == ["check.limits.cosine_min 0.9 -> 0.95"]
    assert set(result(report, "rtx")["stages_reused"]) == {"engine", "baseline"}
    assert set(result(report, "rtx")["seconds"]) == {"check", "bundle"}


def test_what_else_is_wanted_of_an_engine_from_the_cache_is_had_and_is_no_regression(world, here):
    """Sensitivity; after a failed check the modules to blame, which need the graph that was not made this night."""
    job = world / "jobs/rtx.yaml"
    text = job.read_text()
    job.write_text(text.replace("limits: {", "sensitivity: true, limits: {"))
    report = here()
    assert "engine" in result(report, "rtx")["stages_reused"]
    assert result(report, "rtx")["regressions"] == []
    assert "Alone quantized" in (world / "out/rtx/report.html").read_text()
    job.write_text(text.replace("cosine_min: 0.9", "sqnr_db_min: 200"))
    report = here(expect=1)
    failed = result(report, "rtx")
    assert "engine" in failed["stages_reused"]
    assert (failed["outcome"], failed["error"]) == ("built", "")
    assert failed["regressions"] == ["passed its check and now fails it"]
    assert any(problem.startswith("worst quantized modules") for problem in failed["problems"])
    assert "Alone quantized" in (world / "out/rtx/report.html").read_text()


def test_a_damaged_or_missing_bundle_is_put_back_from_the_cache(world, here):
    engine = world / "out/rtx/model.engine"
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes(data)
    shutil.rmtree(world / "out/m-w0-fp32")
    (world / "out/m-w0-int8/report.html").unlink()
    (world / "out/m-w1-fp32/manifest.sig").write_bytes(b"no signature")  # no reader takes it
    linked = world / "out/m-w1-int8/model.onnx"  # to the same bytes, which no reader takes either
    shutil.move(linked, world / "model.onnx")
    linked.symlink_to(world / "model.onnx")
    report = here()
    assert set(outcomes(report).values()) == {"reused"}
    was = {"m-w0-fp32": "was missing"}
    assert sorted(report["notes"]) == [
        f"{name}: its bundle in out {was.get(name, 'was not the one that was built')}, and was put back from the cache"
        for name in NAMES
    ]
    for name in NAMES:
        nights.check_bundle(world / f"out/{name}")


def test_files_of_others_in_a_bundle_are_an_error_of_its_job(world, here):
    """They would be deleted with it; once they are away the night is what it was."""
    extra = world / "out/m-w0-int8/extra"
    extra.touch()
    (found,) = (job for job in here(expect=2)["outcomes"] if job["outcome"] == "error")
    assert found["name"] == "m-w0-int8"
    assert (
        "must hold only the bundle's files to be replaced (got 'extra' too, which would be deleted)" in found["error"]
    )
    assert extra.exists()
    asked = ("nightly", "jobs", "-o", "out", "--cache", "cache", "--explain")
    assert "m-w0-int8: error, exit code 2" in nights.run(*asked, cwd=world, expect=2).splitlines()
    extra.unlink()
    assert set(outcomes(here()).values()) == {"reused"}


IN_THE_WAY = {
    "file": lambda path: path.write_text("x"),
    "link": lambda path: path.symlink_to("nowhere"),
    "folder": lambda path: (path.mkdir(), (path / "other").touch()),
}


@pytest.mark.parametrize("changed", [False, True], ids=["known", "to be built"])
@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_what_stands_in_the_way_of_a_bundle_is_an_error_of_its_path(kind, changed, world, here):
    """It is no regression, costs no other job, and what the cache holds stays there."""
    if changed:
        nights.write_weights(world / "jobs/w2.safetensors", scale=1.3)
    place = world / "out/rtx"
    shutil.rmtree(place)
    IN_THE_WAY[kind](place)
    report = here(expect=2)
    assert report["headline"] == "ERROR rtx"
    assert outcomes(report) == dict.fromkeys(NAMES, "reused") | {"rtx": "error"}
    assert (world / "out/rtx").name in result(report, "rtx")["error"].partition(": ")[0]
    assert result(report, "rtx")["regressions"] == []
    shutil.rmtree(place) if kind == "folder" else place.unlink()
    if changed:
        nights.write_weights(world / "jobs/w2.safetensors", scale=1.5)  # as at first
    after = here()
    assert outcomes(after)["rtx"] == "reused"
    assert after["notes"] == ["rtx: its bundle in out was missing, and was put back from the cache"]


def test_what_a_local_night_does_not_use_is_in_its_report(world, here, capsys):
    job = world / "jobs/rtx.yaml"
    job.write_text(f"{job.read_text()}worker: [orin]\n")
    blocked = world / "file"
    blocked.touch()
    report = here("--resume", "--store", f"file://{blocked}/store", jobs=("jobs/rtx.yaml",))
    assert outcomes(report) == {"rtx": "reused"}
    assert report["notes"] == [
        "--resume: no run was stopped before its end; this is a new one",
        "worker: not used without --scheduler, by rtx: built on this machine",
    ]
    assert main(["nightly", "-o", "out", "--cache", "cache", "--resume", "-q"]) == 2
    assert capsys.readouterr().err == (
        "--resume: no run of this history was stopped before its end. Name the jobs of a new one.\n"
    )


def test_a_store_that_cannot_be_reached_costs_no_job(world, here, capsys):
    nights.write_weights(world / "jobs/w2.safetensors", scale=1.2)
    (world / "file").touch()
    report = here("--store", f"file://{world}/file/store", jobs=("jobs/rtx.yaml",))
    assert outcomes(report) == {"rtx": "built"}
    (note,) = report["notes"]
    assert note.startswith(f"--store: file://{world}/file/store cannot be reached (")
    assert note.endswith(" Going on without it.")


LAZY = """
import functools
from pathlib import Path

import numpy as np


@functools.cache
def scale():
    return np.load(Path(__file__).with_name("scale.npy"))


def made(picture):
    return (np.asarray(picture.convert("L"), np.float32) / 255 * scale())[None]
"""


def test_a_file_that_a_transform_reads_but_once_is_seen(world, here):
    """By the first batch of the check, which is read before anything else of the data."""
    (world / "jobs/lazily.py").write_text(LAZY)
    np.save(world / "jobs/scale.npy", np.float32(1))
    (world / "jobs/pictures").mkdir()
    for k in range(12):
        grey = np.random.default_rng(k).integers(0, 256, (16, 16), np.uint8)
        Image.fromarray(grey).save(world / f"jobs/pictures/{k}.png")
    job = nights.write_job(world / "jobs", "lazy", weight="w0.safetensors")
    head = job.read_text().partition("calibration:")[0]
    data = "images: pictures, transform: {callable: 'lazily:made'}, limits: {cosine_min: 0.9}"
    job.write_text(f"{head}check: {{{data}}}\nbuild: {{target: onnxruntime}}\n")
    assert outcomes(here(jobs=(str(job),))) == {"lazy": "built"}
    assert outcomes(here(jobs=(str(job),))) == {"lazy": "reused"}
    np.save(world / "jobs/scale.npy", np.float32(2))
    assert outcomes(here(jobs=(str(job),))) == {"lazy": "built"}


CHANGING = """
import itertools
import sys

import numpy as np
import torch

calls = sys.__dict__.setdefault("_calls_of_{name}", itertools.count())  # outlives this module, as the time of day does


def model():
    torch.manual_seed({model})
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5)).eval()


def samples():
    return list((np.random.default_rng(1).standard_normal((32, 16)) * {factor}).astype(np.float32))
"""


@pytest.mark.parametrize(
    ("model", "factor", "wrong"),
    [
        ("0", "1", ""),
        ("0", "(1 + next(calls) / 8)",
         "check: the samples hold other values than in an earlier build, of files and code that are the same. Seed "
         "what is random in how they are made, or read it from a file."),
        ("next(calls)", "1",
         "model: it gives other outputs than in an earlier build, of files and code that are the same. Seed what is "
         "random in its weights, or read it from a file."),
    ],
)  # fmt: skip
def test_what_is_another_from_night_to_night_is_said(world, here, model, factor, wrong):
    """Of data and models that are random: the baseline of the night before is no baseline of them."""
    text = CHANGING.format(name=world.parent.name, model=model, factor=factor)
    (world / "jobs/by_chance.py").write_text(text)
    job = world / "jobs/chance.yaml"
    job.write_text("""
name: chance
model: {factory: "by_chance:model"}
inputs: {x: {shape: [N, 16], N: {min: 1, opt: 4, max: 8}}}
outputs: {y: {}}
precision: {int8_mode: true}
calibration: {factory: "by_chance:samples", corrections: false}
build: {target: onnxruntime}
check: {factory: "by_chance:samples", limits: {cosine_min: 0.9}}
""")
    assert outcomes(here(jobs=(str(job),))) == {"chance": "built"}
    keep = "precision.keep.fp32=['2']"  # another graph, of the same model
    report = here("--set", keep, jobs=(str(job),), expect=2 if wrong else 0)
    assert result(report, "chance")["error"] == wrong


@pytest.mark.parametrize("more", [(), ("-q",)])
def test_a_store_that_cannot_be_written_to_is_in_the_report(world, here, monkeypatch, more):
    def full(store, path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "_write", full)
    for k in (0, 2):
        nights.write_weights(world / f"jobs/w{k}.safetensors", scale=1.3)
    report = here("--store", f"file://{world}/store", *more)
    assert [o["outcome"] for o in report["outcomes"]].count("built") == 3
    (note,) = report["notes"]
    assert note == (
        f"--store: file://{world}/store cannot be written to ([Errno 28] No space left on device). Going on without it."
    )
    assert f"note: {note}" in (world / "out/nightly.txt").read_text()


def test_a_damaged_cache_is_noticed_and_made_again(world, here):
    for path in (world / "cache").rglob("model.*"):
        path.write_bytes(b"x" * path.stat().st_size)
    shutil.rmtree(world / "out/rtx")
    report = here()
    assert outcomes(report)["rtx"] == "built"
    assert result(report, "rtx")["reasons"] == ["its bundle is no longer in the cache, or is damaged there"]
    assert result(report, "rtx")["stages_reused"] == ["baseline", "calibration"]
    assert fingerprints(report) == fingerprints(last_first_night_of(world))


def test_explain_says_what_would_be_built_and_builds_nothing(world):
    nights.write_weights(world / "jobs/w0.safetensors", scale=1.1)
    (world / "jobs/net.py").write_text(nights.NET + "\n# another line\n")
    out = nights.run("nightly", "jobs", "-o", "out", "--cache", "cache", "--explain", cwd=world)
    assert out.splitlines() == [
        "m-w0-fp32: build: weights changed; source of net changed",
        "m-w0-int8: build: weights changed; source of net changed",
        "m-w1-fp32: build: source of net changed",
        "m-w1-int8: build: source of net changed",
        "rtx: build: source of net changed",
    ]
    (world / "jobs/net.py").write_text(nights.NET)
    assert "rtx: reuse" in nights.run("nightly", "jobs", "-o", "out", "--cache", "cache", "--explain", cwd=world)


def test_explain_says_of_jobs_that_cannot_be_read_why_and_plans_the_others(world):
    (world / "jobs/broken.yaml").write_text("name: x\n")
    (world / "jobs/more").mkdir()
    (world / "jobs/more/rtx.yaml").write_text((world / "jobs/rtx.yaml").read_text())
    asked = ("nightly", "jobs", "-o", "out", "--cache", "cache", "--explain")
    try:
        out = nights.run(*asked, cwd=world, expect=2)
        assert out.splitlines()[-2:] == ["rtx: reuse", "broken.yaml: error, exit code 2"]
        listed = json.loads(nights.run(*asked, "--json", cwd=world, expect=2))
        assert listed[-2] == {"name": "rtx", "build": False, "reasons": []}
        assert "broken.yaml:1: model: must be given (got nothing)." in listed[-1]["error"]
    finally:
        (world / "jobs/broken.yaml").unlink()
        shutil.rmtree(world / "jobs/more")


def test_a_regression_is_the_first_line_and_exit_code_1_until_it_is_repaired_or_accepted(world, here):
    nights.write_weights(world / "jobs/w2.safetensors", broken=True)
    report = here(expect=1)
    line = "rtx: accuracy_engine of logits 1 -> 0.333333, worse by 0.6667 than the last green run (limit 0.01)"
    assert report["headline"].startswith(f"REGRESSION {line}")
    assert (world / "out/nightly.txt").read_text().startswith(f"REGRESSION {line}")
    assert report["outcomes"][0]["name"] == "rtx"
    again = here(expect=1)  # reused, and no better for it
    assert again["headline"].startswith(f"REGRESSION {line}")
    assert outcomes(again)["rtx"] == "reused"
    accepted = here("--accept", "rt*")
    assert "accepted: accuracy_engine" in " ".join(result(accepted, "rtx")["notes"])
    assert here()["exit_code"] == 0  # the new normal


@pytest.mark.parametrize("nights_before", [1, 3, 12])
def test_what_was_accepted_stays_normal_however_many_nights_were_better(nights_before, world, here):
    """The trend is the median of many nights: those before the acceptance would turn it round again."""
    for _ in range(nights_before - 1):
        here()
    nights.write_weights(world / "jobs/w2.safetensors", broken=True)
    assert here(expect=1)["headline"].startswith("REGRESSION rtx")
    assert here("--accept", "rtx")["exit_code"] == 0
    for _ in range(4):
        assert here()["exit_code"] == 0
    nights.write_weights(world / "jobs/w2.safetensors")  # better, and the normal of the next night
    assert here()["exit_code"] == 0
    nights.write_weights(world / "jobs/w2.safetensors", broken=True)
    assert here(expect=1)["headline"].startswith("REGRESSION rtx")


def test_a_glob_that_accepts_nothing_is_refused(world, capsys):
    words = ["nightly", str(world / "jobs"), "-o", str(world / "o"), "--cache", str(world / "c"), "--workers", "0"]
    (world / "o").mkdir()
    (world / "o" / "history.sqlite").touch()
    assert main([*words, "--accept", "rtz*"]) == 2
    said = capsys.readouterr().err
    assert "--accept: must fit the name of a job (got 'rtz*'; the jobs: " in said
    assert f"{world / 'o' / 'history.sqlite'} held nothing: this history begins anew" in said
    with sqlite3.connect(world / "o" / "history.sqlite") as history:  # a night that never began is none to go on with
        assert history.execute("SELECT count(*) FROM runs").fetchone() == (0,)


def test_a_limit_of_a_metric_that_no_job_has_is_refused(world, capsys):
    words = ["nightly", str(world / "jobs"), "-o", str(world / "o"), "--cache", str(world / "c"), "--workers", "0"]
    assert main([*words, "--limit", "miou_drop=0.5", "-q"]) == 2
    said = "--limit: must name a metric of a job (got 'miou_drop'; no job has check.metrics)."
    assert said in capsys.readouterr().err
    rtx = world / "jobs" / "rtx.yaml"
    rtx.write_text(rtx.read_text().replace("check: {", "check: {metrics: {again: top5}, "))
    assert main([*words, "--limit", "miou_drop=0.5", "-q"]) == 2
    said = "--limit: must name a metric of a job (got 'miou_drop'; the jobs have again_drop)."
    assert said in capsys.readouterr().err


def test_one_bad_job_costs_only_itself(world, here):
    (world / "jobs/bad.yaml").write_text("name: bad\nmodel: [\n")
    (world / "jobs/twin.yaml").write_text((world / "jobs/rtx.yaml").read_text())
    report = here(expect=2)
    assert outcomes(report) == dict.fromkeys(NAMES, "reused") | {"bad.yaml": "error", "rtx (twin.yaml)": "error"}
    assert result(report, "bad.yaml")["error"].startswith("jobs/bad.yaml:3: must be valid YAML")
    assert "twin.yaml: name: must be another than that of" in result(report, "rtx (twin.yaml)")["error"]
    assert report["headline"] == "ERROR bad.yaml, rtx (twin.yaml)"


def test_what_validate_refuses_is_not_started(world, here):
    job = world / "jobs/rtx.yaml"
    job.write_text(job.read_text().replace("net:net", "net:nat"))
    report = here(expect=2)
    error = result(report, "rtx")["error"]
    assert error.startswith("jobs/rtx.yaml:3: model.factory: must name something that net defines (got 'nat').")
    assert report["headline"] == "ERROR rtx"
    assert result(report, "rtx")["regressions"] == []
    asked = ("nightly", "jobs", "-o", "out", "--cache", "cache", "--explain")
    assert nights.run(*asked, cwd=world, expect=2).splitlines()[-1] == "rtx: error, exit code 2"


def test_a_worker_that_dies_is_replaced_and_the_job_tried_again(world):
    """The net's module ends its process the first time it is imported."""
    jobs = world / "jobs"
    marker = jobs / "died"
    (jobs / "net.py").write_text(
        f"import os, pathlib, signal\nmarker = pathlib.Path({str(marker)!r})\n"
        "if not marker.exists():\n    marker.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n" + nights.NET
    )
    report = night(world, "--workers", "1", jobs=("jobs/rtx.yaml",))
    assert outcomes(report) == {"rtx": "built"}
    assert result(report, "rtx")["attempts"] == ["worker cpu0 died with SIGKILL"]
    (jobs / "net.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n" + nights.NET)
    report = night(world, "--workers", "1", expect=4, jobs=("jobs/rtx.yaml",))
    assert "worker cpu0 died with SIGKILL, 2 times." in result(report, "rtx")["error"]


def test_interrupted_it_stops_and_resume_goes_on(world):
    for k in range(3):
        nights.write_weights(world / f"jobs/w{k}.safetensors", scale=3.0 + k)
    before = (world / "out/rtx/manifest.json").read_bytes()
    process = nights.start("nightly", "jobs", "-o", "out", "--cache", "cache", "--workers", "1", cwd=world)
    wait_for_job(world, process)
    process.send_signal(2)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert out.startswith("INTERRUPTED with ")
    assert (world / "out/rtx/manifest.json").read_bytes() == before or "rtx: built" in err
    assert not list((world / "out").glob(".*trtpipe-new*"))
    wrong = nights.start("nightly", "jobs/m.yaml", "-o", "out", "--cache", "cache", "--resume", cwd=world)
    assert "--resume: jobs and options must be those of the run that was stopped" in wrong.communicate()[1]
    report = json.loads(nights.run("nightly", "-o", "out", "--cache", "cache", "--resume", "--json", cwd=world))
    assert report["resumed"]
    assert report["run"] == 2
    assert outcomes(report) == dict.fromkeys(NAMES, "built")
    assert night(world)["run"] == 3


def wait_for_job(world, process):
    """Until a worker has begun a job of this night."""
    logs = list((world / "out/.nightly").glob("*.log"))
    before = sum(log.read_text().count("== ") for log in logs)
    while sum(log.read_text().count("== ") for log in (world / "out/.nightly").glob("*.log")) == before:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_killed_it_resumes_to_what_an_undisturbed_night_gives(world, tmp_path):
    nights.write_weights(world / "jobs/w0.safetensors", scale=1.3)
    calm = tmp_path / "calm"
    shutil.copytree(world, calm)
    process = nights.start("nightly", "jobs", "-o", "out", "--cache", "cache", "--workers", "1", cwd=world)
    wait_for_job(world, process)
    time.sleep(0.5)
    process.kill()
    process.communicate()
    resumed = night(world, "--resume", "--workers", "1")
    undisturbed = night(calm, "--workers", "1")
    assert fingerprints(resumed) == fingerprints(undisturbed)
    assert resumed["run"] == undisturbed["run"] == 2
    assert outcomes(resumed) == outcomes(undisturbed)


def test_repeat_compares_engines_and_outputs(world, here):
    job = nights.write_job(world / "jobs", "again")
    report = here("--repeat", "2", jobs=(str(job),))
    drift = result(report, "again")["drift"]
    assert len(drift["engines"]) == 2
    assert len(set(drift["engines"])) == 1
    assert drift["max_abs"] == 0.0
    assert "drift: 2 builds, one engine; outputs differ by at most 0" in (world / "out/nightly.txt").read_text()
    after = result(here(jobs=(str(job),)), "again")
    assert (after["outcome"], after["reasons"]) == ("built", ["--repeat builds without the cache, and left none there"])


def test_repeat_says_what_was_compared_where_no_engine_is_executed(world, here, monkeypatch):
    """Of an engine for a GPU that is not here its graph is; and nothing, where ONNX Runtime cannot be used either."""

    def notes():
        found = result(here("--repeat", "2", jobs=("jobs/rtx.yaml",)), "rtx")["drift"]["notes"]
        assert f"({'; '.join(found)})" in (world / "out/nightly.txt").read_text()
        return found

    of_graphs = "no GPU executed the engines here: the outputs are those of their graphs"
    assert notes() == [of_graphs]

    def unusable(*_, **__):
        raise MissingError("onnxruntime is not installed.")

    monkeypatch.setattr("trtpipe.nightly.drift.open_model", unusable)
    assert notes() == [of_graphs, "nothing here can execute the engine or its graph"]


def test_repeat_finds_a_model_that_is_another_each_time(world, here):
    jobs = world / "jobs"
    another = """
    import pathlib
    loads = pathlib.Path(__file__).with_name("loads")
    loads.write_text((loads.read_text() if loads.exists() else "") + "x")
    made = original()
    made[-1].bias.data += 0.25 * len(loads.read_text())
    return made
"""
    (jobs / "net.py").write_text(nights.NET.replace("def net()", "def original()") + "\ndef net():" + another)
    job = nights.write_job(jobs, "dice")
    job.write_text(job.read_text().replace(", weights: w0.safetensors", "").replace(", top1_agreement_min: 0.9", ""))
    report = here("--repeat", "2", "--set", "check.limits={max_abs_max: 0.01}", jobs=(str(job),), expect=1)
    drift = result(report, "dice")["drift"]
    assert len(set(drift["engines"])) == 2
    assert drift["max_abs"] >= 0.25
    assert report["headline"] == "DRIFT dice"


def test_a_store_spares_the_next_machine_the_build(world, here):
    job = nights.write_job(world / "jobs", "shared")
    store = f"file://{world}/store"
    assert outcomes(here("--store", store, jobs=(str(job),))) == {"shared": "built"}
    elsewhere = ("--cache", "cache-elsewhere", "-o", "out-elsewhere", "--store", store)
    assert outcomes(here(*elsewhere, jobs=(str(job),))) == {"shared": "reused"}
    one, other = (nights.check_bundle(world / out / "shared") for out in ("out", "out-elsewhere"))
    assert one.manifest_bytes == other.manifest_bytes


READING = "import pathlib\npathlib.Path(__file__).with_name('read').read_text()\n"


@pytest.mark.parametrize("code", ["", READING], ids=["reads nothing", "reads a file"])
def test_two_processes_build_each_job_once(code, tmp_path):
    """Whatever the first build shows of what the job's code reads, which changes the key of the bundle."""
    jobs = nights.make_world(tmp_path / "jobs", 3)
    (jobs / "read").write_text("x")
    (jobs / "net.py").write_text(code + nights.NET)
    for k in range(3):
        nights.write_job(jobs, f"j{k}", weight=f"w{k}.safetensors")
    reports = nights.two_at_once(tmp_path, [f"j{k}" for k in range(3)])
    assert fingerprints(reports[0]) == fingerprints(reports[1])


def test_who_waits_for_a_process_that_is_killed_builds_the_job(tmp_path):
    jobs = nights.make_world(tmp_path / "jobs", 1)
    begun = tmp_path / "begun"
    wait = (
        f"import os, time\nif not os.path.exists({str(begun)!r}):\n    open({str(begun)!r}, 'w')\n    time.sleep(600)\n"
    )
    (jobs / "net.py").write_text(wait + nights.NET)
    nights.write_job(jobs, "j")
    where = ("nightly", "jobs", "--cache", "cache", "--workers", "1")
    first = nights.start(*where, "-o", "first", cwd=tmp_path)
    while not begun.exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    second = nights.start(*where, "-o", "second", "--json", cwd=tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(6)
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert outcomes(json.loads(out)) == {"j": "built"}

"""The programs that measure on a GPU: kept alive where there is none, and what they write held to what they got."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trtpipe.evaluation.bench import Bench, Row
from trtpipe.trt import driver

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_page  # noqa: E402
import rtx_loads  # noqa: E402

NO_GPU = "libcuda.so.1, the NVIDIA driver's library, is not on this machine"


def ran(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def no_gpu():
    if not driver.probe().problem:
        pytest.skip("a GPU is here")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("program", ["devices.py", "engines.py", "gpu.py", "rtx_loads.py"])
def test_without_a_gpu_it_fails_and_says_so(program, tmp_path):
    done = ran("benchmarks/" + program, "--results", tmp_path)
    assert done.returncode == 3
    assert done.stderr == f"bench-gpu: an NVIDIA GPU must be here (got: {NO_GPU}). Run it on a machine with one.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_gpu")
def test_a_dry_run_goes_the_whole_way(tmp_path):
    done = ran(
        "benchmarks/gpu.py", "--dry-run", "--models", "tiny", "--batch", "4", "--rounds", "2", "--machine", "Some GPU",
        "--results", tmp_path, "--without", "torch.compile*", "PyTorch INT8*",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page, file = sorted(tmp_path.iterdir(), key=lambda p: p.suffix, reverse=True)
    assert re.fullmatch(r"some-gpu-\d{4}-\d\d-\d\d\.md", page.name)
    assert file.name == page.name.replace(".md", ".json")
    text = page.read_text()
    assert done.stdout == text
    assert f"- gpu: none: {NO_GPU}\n" in text
    for name in ("eager FP32", "autocast FP16", "TorchScript FP16"):
        assert re.search(rf"\| {name} \(CPU\) \| \d+\.\d+ \| \d", text)
    needs = "not measured: it needs a GPU that PyTorch can use"
    for name in ("eager TF32", "eager FP16, channels last", "eager FP16, CUDA graph", "torch.compile FP16"):
        assert f"| {name} | {needs} |" in text
    for name in ("engine FP16", "engine INT8"):
        for how in ("", ", CUDA graph", ", with transfers"):
            assert f"| {name}{how} | not measured: no GPU executes an engine here: {NO_GPU} |" in text
    assert "| torch.compile FP32 (CPU) | not measured: left out of this run |" in text
    (bench,) = json.loads(file.read_text())["benches"]
    assert bench["name"] == "tiny, batch 4"
    assert {r["name"]: r["agreement"] for r in bench["rows"]}["eager FP32"] == 1.0


def bench(name, *rows):
    return Bench(name, 8, 64, 100, 5, "eager FP32", 16, rows, {"tensorrt_rtx": "1.7.1.116"})


FP32 = Row("eager FP32", "cuda", median_ms=8.0, size_bytes=4_000_000)


def test_speed_is_against_eager_fp32_on_the_same_device():
    found = bench("resnet50, batch 8", FP32, Row("engine FP16", "cuda", median_ms=2.0), Row("x", "cpu", median_ms=1.0))
    assert [gpu_page.speed(found, row, "eager FP32") for row in found.rows] == [1.0, 4.0, None]
    assert "| engine FP16 | 2.000 |  |  |  | 4.00 |  |  |  |  |" in gpu_page.markdown({"name": "H"}, "d", [found])


def test_the_reason_stands_in_its_row_whole():
    said = "InputError: engine: the plan is not valid for this GPU (TensorRT-RTX 1.7.1.116 says INVALID, 4; a | b)"
    text = gpu_page.markdown({"name": "H"}, "d", [bench("m", Row("engine FP16", "cuda", skipped=said))])
    assert f"| engine FP16 | not measured: {said.replace('|', chr(92) + '|')} |" in text


def test_the_published_figure_stands_beside_ours():
    script = Row("TorchScript FP32", "cuda", median_ms=6.0)
    found = bench("resnetv2_101x1_bit, batch 8", FP32, script, Row("TorchScript FP16", "cuda", median_ms=3.0))
    ours, published = "2.00 times as fast as TorchScript FP32", "1.69 times FP32 is published for one such model"
    assert gpu_page.anchor(found) == f"TorchScript in half is {ours}; {published}."
    assert gpu_page.anchor(bench("resnet50, batch 8", *found.rows)) == ""


def test_another_run_of_the_day_keeps_what_it_did_not_measure(tmp_path):
    for made in (bench("a", FP32), bench("b", FP32), bench("a", Row("eager FP32", "cuda", median_ms=5.0))):
        page, file = gpu_page.keep(tmp_path, "NVIDIA H100 80GB HBM3", {"name": "NVIDIA H100 80GB HBM3"}, made)
    assert page.name.startswith("nvidia-h100-80gb-hbm3-")
    names = {b["name"]: b["rows"][0]["median_ms"] for b in json.loads(file.read_text())["benches"]}
    assert names == {"a": 5.0, "b": 8.0}
    assert page.read_text().count("\n## ") == 2


def test_networks_prepared_together_are_timed_in_turns(tmp_path):
    """One whose process ended without getting ready is not waited for."""
    seen = []

    def one(name, before):
        time.sleep(before)
        reporter = gpu.Together(name, tmp_path, ["a", "b", "c"])
        reporter.step(1, 2, "modes")
        seen.append((name, "ready"))
        reporter.step(2, 2, "modes")
        seen.append((name, "begins"))
        reporter.step(1, 2, "rounds")
        seen.append((name, "ends"))
        reporter._turn.release()

    (tmp_path / "c.ready").touch()
    threads = [threading.Thread(target=one, args=given) for given in (("a", 0), ("b", 0.5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen[:2]) == [("a", "ready"), ("b", "ready")]
    assert [what for _, what in seen[2:]] == ["begins", "ends"] * 2
    assert seen[2][0] == seen[3][0] != seen[4][0]


def test_a_process_that_dies_is_followed_by_one_without_engines(tmp_path, monkeypatch):
    args = argparse.Namespace(batch=8, rounds=1, seconds=1.0, limit=9.0, without=[], meet=None)
    commands, ends = (
        [],
        ["the process ended with SIGSEGV", "the process ended with exit code 1"],
    )

    def run(command, limit_s):
        commands.append(command)
        return ends[len(commands) - 1]

    monkeypatch.setattr(gpu, "run", run)
    (row,) = gpu.in_own_process("resnet50", args).rows
    assert row.skipped == ends[1]
    reasons = [c[c.index("--no-engine") + 1] for c in commands]
    assert reasons == ["", "the process ended with SIGSEGV while the engines were among the modes"]


def test_how_a_process_ended():
    assert gpu.run([sys.executable, "-c", ""], 60) == ""
    assert gpu.run([sys.executable, "-c", "import os; os.abort()"], 60) == "the process ended with SIGABRT"
    ended = "the process ended with exit code 4; its messages are above"
    assert gpu.run([sys.executable, "-c", "raise SystemExit(4)"], 60) == ended
    assert gpu.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) == "the process was ended after 0.2 s"


def plan(runs, capability="portable", **more):
    return {"precision": "FP32", "compute_capability": capability, "runs": runs, **more}


def test_the_answer_about_rtx_holds_its_own_words():
    good = [plan(True, relative_l2=2e-7), plan(True, "8.9"), plan(False, "12.0", ended="x")]
    assert rtx_loads.answer(good, "9.0") == (
        "On 9.0 portable engines run, at most 2e-07 (relative L2) from ONNX Runtime; plans for 8.9 run too."
    )
    bad = plan(False, ended="deserialize_cuda_engine returned None", validity="INVALID, diagnostics 4", messages=["no"])
    assert rtx_loads.answer([bad, plan(False, "8.9", ended="x")], "9.0") == (
        "On 9.0 portable engines in FP32 do not run (deserialize_cuda_engine returned None; INVALID, diagnostics 4; "
        "no); no plan for a named compute capability runs."
    )

"""What the issue promises, at full size: minutes on two cores. Each test prints its figures (`pytest -s`)."""

import os
import random
import shutil
import signal
import subprocess
import time

import nights
import pytest
from nights import fingerprints, night, outcomes

pytestmark = pytest.mark.acceptance

FP32 = "build: {target: onnxruntime}\n"
INT8 = "precision: {int8_mode: true}\nbuild: {target: onnxruntime}\n"
HUNDRED = """
matrix:
  weights: [{weights}]
  precision: [fp32, int8, fp16]
  check.limits.cosine_min: [{limits}]
build: {{target: onnxruntime}}
"""


def test_a_hundred_jobs(tmp_path):
    """99 jobs of a matrix, eleven of each engine, and one alone: all built, then none and nothing read again, then
    exactly the one that changed."""
    jobs = nights.make_world(tmp_path / "jobs", 4)
    weights = ", ".join(f"./w{k}.safetensors" for k in range(3))
    limits = ", ".join(f"0.{k}" for k in range(80, 91))
    nights.write_job(jobs, "m", HUNDRED.format(weights=weights, limits=limits))
    nights.write_job(jobs, "alone", FP32, "w3.safetensors")
    began = time.monotonic()
    report = night(tmp_path)
    print(f"\nfirst run: {time.monotonic() - began:.1f} s")
    assert len(report["outcomes"]) == 100
    assert set(outcomes(report).values()) == {"built"}
    nights.watched_night(tmp_path)  # remembers the files of the bundles
    began = time.monotonic()
    second, done = nights.watched_night(tmp_path)
    print(f"nothing changed: {time.monotonic() - began:.2f} s")
    assert done == nights.NOTHING
    assert set(outcomes(second).values()) == {"reused"}
    assert fingerprints(second) == fingerprints(report)
    os.utime(jobs / "w1.safetensors")
    assert set(outcomes(night(tmp_path)).values()) == {"reused"}
    nights.write_weights(jobs / "w3.safetensors", scale=2.0)
    changed = night(tmp_path, "--workers", "1")
    assert [n for n, o in outcomes(changed).items() if o == "built"] == ["alone"]
    assert next(o["reasons"] for o in changed["outcomes"] if o["name"] == "alone") == ["weights changed"]


def test_bad_yaml_and_a_damaged_weight_file_among_twenty_good_jobs(tmp_path):
    jobs = nights.make_world(tmp_path / "jobs", 8)
    names = [f"good{k}" for k in range(20)]
    for k, name in enumerate(names):
        nights.write_job(jobs, name, INT8 if k == 7 else FP32, f"w{k if k == 7 else k % 4}.safetensors")
    (jobs / "bad.yaml").write_text("name: bad\nmodel: [\n")
    report = night(tmp_path, expect=2)
    assert outcomes(report) == dict.fromkeys(names, "built") | {"bad.yaml": "error"}
    (jobs / "bad.yaml").unlink()
    nights.write_weights(jobs / "w7.safetensors", broken=True)
    report = night(tmp_path, expect=1)
    assert outcomes(report) == dict.fromkeys(names, "reused") | {"good7": "built"}
    first = (tmp_path / "out" / "nightly.txt").read_text().splitlines()[0]
    print(f"\n{first}")
    assert first.startswith("REGRESSION good7: ")


def test_two_processes_and_ten_jobs(tmp_path):
    jobs = nights.make_world(tmp_path / "jobs", 10)
    for k in range(10):
        nights.write_job(jobs, f"j{k}", INT8 if k % 5 == 0 else FP32, f"w{k}.safetensors")
    reports = nights.two_at_once(tmp_path, [f"j{k}" for k in range(10)])
    print("\nbuilt by each process:", [sum(o == "built" for o in outcomes(r).values()) for r in reports])


def test_killed_at_ten_random_moments(tmp_path):
    """After each kill -9, --resume; the end is that of an undisturbed run."""
    jobs = nights.make_world(tmp_path / "disturbed/jobs", 3)
    for k in range(3):
        nights.write_job(jobs, f"a{k}", INT8, f"w{k}.safetensors")
        nights.write_job(jobs, f"b{k}", "build: {target: tensorrt_rtx}\n", f"w{k}.safetensors")
    shutil.copytree(tmp_path / "disturbed", tmp_path / "calm")
    began = time.monotonic()
    calm = night(tmp_path / "calm")
    span = time.monotonic() - began
    rng = random.Random(5)
    command = ["nightly", "jobs", "-o", "out", "--cache", "cache"]
    moments, struck = [], 0
    for _ in range(10):
        process = nights.start(*command, cwd=tmp_path / "disturbed", stdout=None, stderr=None)
        try:
            moments.append(rng.uniform(0.0, 0.15 * span))
            process.wait(moments[-1])
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            struck += 1
        if "--resume" not in command:
            command.append("--resume")
    assert struck >= 8
    shown = ", ".join(f"{m:.1f}" for m in moments)
    print(f"\n{struck} kills while it ran, after {shown} s; undisturbed it took {span:.1f} s")
    final = night(tmp_path / "disturbed", "--resume")
    assert final["exit_code"] == 0
    assert fingerprints(final) == fingerprints(calm)
    for name in fingerprints(calm):
        nights.check_bundle(tmp_path / "disturbed" / f"out/{name}")
        one, other = (nights.check_bundle(tmp_path / w / "out" / name).manifest for w in ("calm", "disturbed"))
        assert one.calibration_digest == other.calibration_digest
        for file in one.files.keys() - {"report.html"}:  # which shows times
            assert one.files[file] == other.files[file], (name, file)
    assert not [p for p in (tmp_path / "disturbed/out").iterdir() if "trtpipe-new" in p.name]

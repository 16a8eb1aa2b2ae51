"""Several jobs of one command: what the code of one does is no other job's, and each is said."""

from __future__ import annotations

import json
import signal
import time
from functools import partial
from pathlib import Path

import nights
import pytest

from trtpipe.bundle.format import read_bundle
from trtpipe.cli.each import Result, Work, each
from trtpipe.cli.interrupts import STOPPING
from trtpipe.cli.main import main
from trtpipe.errors import BUG, InputError, TrtpipeError

AWKWARD = """
import ctypes, multiprocessing, os, threading, time, torch
from concurrent.futures import ProcessPoolExecutor
from net import net

def poisoned():
    torch.nn.ReLU.forward = lambda self, x: x * torch.sigmoid(x)
    torch.nn.functional.relu = torch.relu = lambda x: x * 0
    print("printed by the job")
    return net()

def exits():
    os._exit(0)

def crashes():
    ctypes.string_at(0)

def squared(x):
    return x * x

def leaves():
    threading.Thread(target=time.sleep, args=(600,)).start()
    return begins()

def begins(pools=[]):
    pools.append(ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")))
    pools.append(multiprocessing.get_context("fork").Pool(2))
    print(*pools[0].map(squared, [3, 4]), *pools[1].map(squared, [5, 6]))
    multiprocessing.Process(target=time.sleep, args=(600,), daemon=True).start()
    return net()

def forks():
    if os.fork() == 0:
        time.sleep(0.5)
        raise SystemExit(0)
    return net()

def closes():
    os.closerange(3, 60)
    return net()

def waits():
    open("begun", "w").close()
    time.sleep(60)
    open("waited", "w").close()
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    folder = nights.make_world(tmp_path / "jobs")
    (folder / "awkward.py").write_text(AWKWARD)
    return folder


def awkward(world: Path, kind: str) -> Path:
    path = nights.write_job(world, kind)
    path.write_text(path.read_text().replace("net:net", f"awkward:{kind}"))
    return path


def test_what_the_code_of_a_job_does_is_no_other_jobs(world: Path, tmp_path: Path) -> None:
    good = nights.write_job(world, "good")
    nights.run("build", good, "-o", tmp_path / "alone", "-q")
    kinds = ("poisoned", "leaves", "forks", "exits", "crashes", "closes")
    jobs = [*(awkward(world, kind) for kind in kinds), good]
    process = nights.start("build", *jobs, "-o", tmp_path / "out", "--json", cwd=tmp_path)
    out, err = process.communicate()
    assert process.returncode == 128 + signal.SIGSEGV
    poisoned, left, forked, ended, crashed, closed, passed = json.loads(out)
    assert [job["exit_code"] for job in (poisoned, left, forked, passed)] == [0] * 4
    assert closed["exit_code"] != 0
    assert ended["exit_code"] == InputError.exit_code
    assert ended["error"] == (
        "the process ended before the command did (exit code 0): code of the job, or a library, called os._exit, exec "
        "or exit(). Take that call out."
    )
    assert crashed["error"].startswith("the process was ended by SIGSEGV. A library has crashed")
    assert f"{jobs[3]}: {ended['error']}" in err
    assert "printed by the job" in err
    assert "9 16 25 36" in err
    assert "Traceback" not in err
    assert not nights.running(tmp_path)
    alone, beside = (read_bundle(tmp_path / folder / "good").manifest.check for folder in ("alone", "out"))
    assert alone is not None
    assert beside is not None
    assert alone.metrics == beside.metrics


def test_what_a_single_jobs_code_has_begun_ends_without_a_word(world: Path, tmp_path: Path) -> None:
    process = nights.start("build", awkward(world, "begins"), "-q", cwd=tmp_path)
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "9 16 25 36\n")
    assert not nights.running(tmp_path)


@pytest.mark.parametrize("number", STOPPING)
def test_the_command_is_stopped_with_the_process_of_a_job(world: Path, tmp_path: Path, number: signal.Signals) -> None:
    jobs = [awkward(world, "waits"), nights.write_job(world, "good")]
    process = nights.start("build", *jobs, cwd=tmp_path)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert not (tmp_path / "waited").exists()
    assert not nights.running(tmp_path)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_tables_of_several_jobs_are_made_apart_too(world: Path, tmp_path: Path) -> None:
    good = nights.write_job(world, "good", "build: {target: onnxruntime}\nprecision: {int8_mode: true}\n")
    bad = awkward(world, "poisoned")
    bad.write_text(bad.read_text() + "precision: {int8_mode: true}\n")
    nights.run("calibrate", good, "-o", tmp_path / "alone", "-q")
    nights.run("calibrate", bad, good, "-o", tmp_path / "both", "-q")
    first, second = ((tmp_path / f / "good.calibration.json").read_text() for f in ("alone", "both"))
    assert first == second


def raises(error: Exception, reporter: object) -> Result:
    raise error


def test_a_bug_costs_one_of_several_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    works = [
        Work(Path("a.yaml"), partial(raises, ValueError("deep"))),
        Work(Path("b.yaml"), partial(raises, InputError("b: is wrong."))),
        Work(Path("c.yaml"), lambda reporter: Result(0, {}, "c: passed")),
    ]
    assert each(works, as_json=False, verbose=0, quiet=False) == BUG
    out, err = capsys.readouterr()
    assert out == "c: passed\n"
    assert "ValueError: deep\n" in err
    assert "a.yaml: this is a bug in trtpipe " in err
    assert "b.yaml: b: is wrong.\n" in err
    with pytest.raises(TrtpipeError, match=r"^b: is wrong\.$"):
        each(works[1:2], as_json=False, verbose=0, quiet=True)


def test_a_key_that_is_none_is_refused_before_anything_is_built(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("none")
    job = nights.write_job(world, "good")
    assert main(["build", str(job), "-o", str(tmp_path / "out"), "--sign", str(tmp_path / "key")]) == 2
    assert "is not an unencrypted Ed25519 private key in PEM" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""What the code of a job changes within other packages is no other job's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nights
import pytest

from trtpipe.bundle.format import read_bundle
from trtpipe.cli.main import main

POISON = """
import multiprocessing, torch
from concurrent.futures import ProcessPoolExecutor
from net import net

def squared(x):
    return x * x

def poisoned(pools=[]):
    pools.append(ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")))
    print(*pools[0].map(squared, [3, 4]))
    torch.nn.ReLU.forward = lambda self, x: x * torch.sigmoid(x)
    torch.nn.functional.relu = torch.relu = lambda x: x * 0
    return net()
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_changes_pytorch_changes_no_other_job(tmp_path: Path, workers: int) -> None:
    world = nights.make_world(tmp_path / "jobs")
    (world / "poison.py").write_text(POISON)
    text = nights.write_job(world, "a").read_text()
    assert "net:net" in text
    (world / "a.yaml").write_text(text.replace("net:net", "poison:poisoned"))
    for name in "bc":
        nights.write_job(world, name)
    nights.run("build", world / "b.yaml", "-o", tmp_path / "alone", "-q")
    jobs = [world / f"{name}.yaml" for name in "abc"]
    nights.run("nightly", *jobs, "-o", "out", "--cache", "cache", "--workers", workers, "-q", cwd=tmp_path)
    assert not nights.running(tmp_path)
    alone = read_bundle(tmp_path / "alone" / "b").manifest.check
    for name in "bc":
        check = read_bundle(tmp_path / "out" / name).manifest.check
        assert check is not None
        assert alone is not None
        assert check.metrics == alone.metrics


def test_a_package_that_cannot_be_imported_costs_the_jobs_that_need_it(tmp_path: Path) -> None:
    """The process that workers are forked from imports it before any job does."""
    world = nights.make_world(tmp_path / "jobs")
    (tmp_path / "other" / "torchvision").mkdir(parents=True)
    (tmp_path / "other" / "torchvision" / "__init__.py").write_text(
        "import torch\nraise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    (world / "vision.py").write_text("import torchvision\nfrom net import net\n")
    for name in ("a", "b", "c"):
        path = nights.write_job(world, name)
        path.write_text(path.read_text().replace("net:net", "net:net" if name == "b" else "vision:net"))
    command = ("nightly", "jobs", "-o", "out", "--cache", "cache", "--workers", "1", "--json")
    process = nights.start(*command, cwd=tmp_path, packages=(tmp_path / "other",))
    out, err = process.communicate()
    assert process.returncode == 3, err
    report = json.loads(out)
    assert nights.outcomes(report) == {"a": "error", "b": "built", "c": "error"}
    errors = [o["error"].partition(")")[0] for o in report["outcomes"] if o["name"] != "b"]
    where = tmp_path / "other" / "torchvision" / "__init__.py"
    said = f"{where} hides the package torchvision (RuntimeError: operator torchvision::nms does not exist"
    assert errors == [said, said]


def test_a_night_in_one_process_says_what_its_jobs_share(tmp_path: Path) -> None:
    world = nights.make_world(tmp_path / "jobs", 2)
    nights.write_job(world, "a")
    nights.write_job(world, "b", weight="w1.safetensors")
    note = "note: --workers 0: what the code of one model changes in other packages stays for those after it"
    for jobs, said in ((["a.yaml", "b.yaml"], True), (["a.yaml", "--force"], False)):
        where = ("-o", tmp_path / "out", "--cache", tmp_path / "cache", "--workers", "0")
        process = nights.start("nightly", *jobs, *where, cwd=world)
        _, err = process.communicate()
        assert process.returncode == 0, err
        assert (note in err.splitlines()) is said


#: A model that has a scale of its own where there is a file of it.
SCALED = """
from pathlib import Path
from net import net

SCALE = Path(__file__).parent / "{where}" / "scale.txt"

def scaled():
    module = net()
    if SCALE.exists():
        scale = float(SCALE.read_text())
        module.register_forward_hook(lambda module, given, output: output * scale)
    return module
"""


@pytest.mark.parametrize("where", [".", ".."])
def test_two_checkouts_of_a_job_have_a_record_each_of_what_its_code_reads(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cache holds both; a night in one does not make what is read in the other a reason, nor its engine theirs."""

    def night(checkout: str) -> tuple[str, list[str]]:
        where = ("-o", tmp_path / checkout / "out", "--cache", tmp_path / "cache", "--workers", "0", "--json")
        assert main(["nightly", *map(str, (tmp_path / checkout / "jobs", *where))]) == 0
        (outcome,) = json.loads(capsys.readouterr().out)["outcomes"]
        return outcome["outcome"], outcome["reasons"]

    for checkout in ("one", "other"):
        world = nights.make_world(tmp_path / checkout / "jobs")
        (world / "scaled.py").write_text(SCALED.replace("{where}", where))
        path = nights.write_job(world, "a")
        path.write_text(path.read_text().replace("net:net", "scaled:scaled"))
    scale = tmp_path / "other" / "jobs" / where / "scale.txt"
    scale.write_text("2")
    for checkout in ("one", "other"):
        assert night(checkout) == ("built", ["first build"])
    engines = {(tmp_path / checkout / "out/a/model.onnx").read_bytes() for checkout in ("one", "other")}
    assert len(engines) == 2
    for checkout in ("one", "other"):
        assert night(checkout) == ("reused", [])
    scale.write_text("3")
    shown = "scale.txt" if where == "." else str(tmp_path / "other" / "scale.txt")
    assert night("other") == ("built", [f"{shown}, read by the job's code, changed"])
    assert night("one") == ("reused", [])
    scale.unlink()
    assert night("other")[0] == ("reused" if where == "." else "built")  # inside, it is what the first checkout built


#: A model that reads its scale through something that the process keeps.
KEEPING = """
import linecache
import torch
from net import net

def once(path):
    kept = torch.__dict__.setdefault("_kept", {})
    if path not in kept:
        kept[path] = open(path).read()
    return kept[path]

def kept():
    module, scale = net(), float(READ)
    module.register_forward_hook(lambda module, given, output: output * scale)
    return module
"""


@pytest.mark.parametrize(("read", "workers"), [('linecache.getline("scale.txt", 1)', "1"), ('once("scale.txt")', "0")])
def test_what_an_earlier_job_made_a_package_keep_counts_as_read(read: str, workers: str, tmp_path: Path) -> None:
    """Jobs of one model share a process, in which the second one opens nothing."""
    world = nights.make_world(tmp_path)
    (world / "keeping.py").write_text(KEEPING.replace("READ", read))
    (world / "scale.txt").write_text("1.0\n")
    for name, size in (("a", 8), ("b", 4)):
        path = nights.write_job(world, name)
        text = path.read_text().replace("net:net", "keeping:kept")
        path.write_text(text.replace("val.npz, batch_size: 8", f"val.npz, batch_size: {size}"))

    def night() -> Any:
        return nights.night(world, "--workers", workers, jobs=("a.yaml", "b.yaml"))

    assert nights.outcomes(night()) == {"a": "built", "b": "built"}
    assert nights.outcomes(night()) == {"a": "reused", "b": "reused"}
    (world / "scale.txt").write_text("2.0\n")
    report = night()
    changed = ["scale.txt, read by the job's code, changed"]
    assert {o["name"]: (o["outcome"], o["reasons"]) for o in report["outcomes"]} == {
        "a": ("built", changed), "b": ("built", changed),
    }  # fmt: skip

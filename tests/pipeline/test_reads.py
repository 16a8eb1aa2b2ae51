"""Whatever a job's code reads is part of what the job is made of: recorded as it runs, and watched from then on."""

import json
import os

import nights
import numpy as np
import pytest

from trtpipe.cli.main import main
from trtpipe.job.load import read_job
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import this_machine
from trtpipe.pipeline.cache.keys import Survey, stage_keys, with_reads
from trtpipe.pipeline.cache.store import Cache

NET = """
import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent
MIDDLE = importlib.import_module("mid" + "dle")
sys.path.insert(0, str(HERE / "elsewhere"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Linear(4, 3)
        self.scale = None
        factor = MIDDLE.factor() * json.loads((HERE / "settings.json").read_text())["factor"]
        for name in sorted(os.listdir(HERE / "parts")):
            factor *= float(np.load(HERE / "parts" / name)[0])
        factor *= float(np.memmap(HERE / "map.bin", np.float32, "r")[0])
        factor *= float(np.load(HERE / "current.npy")[0])
        factor *= float(torch.from_file(str(HERE / "raw.bin"), size=1)[0])
        with torch.no_grad():
            from safetensors.torch import load_file
            self.load_state_dict(load_file(HERE / "checkpoint.safetensors"), strict=False)
            self.conv.weight.mul_(factor)
        try:
            open(HERE / "optional.txt").close()
        except FileNotFoundError:
            pass

    def forward(self, x):
        if self.scale is None:  # lazily, where the model first runs
            self.scale = torch.load(HERE / "lazy.pt", weights_only=True)
        return self.head(torch.relu(self.conv(x)).mean((2, 3))) * self.scale


def net():
    import far
    assert far.FACTOR
    return Net()
"""
MIDDLE = "import importlib\nBOTTOM = importlib.import_module('bot' + 'tom')\ndef factor():\n    return BOTTOM.FACTOR\n"
SAMPLES = """
from pathlib import Path
import numpy as np

class Samples:
    def __len__(self):
        return 8

    def __getitem__(self, k):
        return {"image": np.load(Path(__file__).parent / "samples" / f"{k}.npy")}


def few():
    return Samples()
"""
JOB = """
name: reader
model: {factory: "reader:net"}
inputs: {image: {dtype: float32, shape: [N, 1, 16, 16], N: {min: 1, opt: 4, max: 8}}}
outputs: {logits: {dtype: float32}}
build: {target: onnxruntime}
check: {factory: "samples_of:few", workers: 1, batch_size: 8, limits: {relative_l2_max: 0.01}}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A job whose code reads in every way, and one night over it."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("reads") / "jobs"
    for inside in ("parts", "samples", "elsewhere"):
        (folder / inside).mkdir(parents=True)
    texts = {
        "reader.py": NET,
        "middle.py": MIDDLE,
        "bottom.py": "FACTOR = 1.5\n",
        "elsewhere/far.py": "FACTOR = 2\n",
        "samples_of.py": SAMPLES,
        "reader.yaml": JOB,
        "settings.json": '{"factor": 1.0}',
        "unrelated.txt": "x",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    one = np.ones(1, np.float32)
    for name in ("parts/a.npy", "parts/b.npy", "v1.npy"):
        np.save(folder / name, one)
    np.save(folder / "v2.npy", 2 * one)
    (folder / "current.npy").symlink_to("v1.npy")
    for name in ("map.bin", "raw.bin"):
        (folder / name).write_bytes(one.tobytes())
    rng = np.random.default_rng(0)
    for k in range(8):
        np.save(folder / "samples" / f"{k}.npy", rng.random((1, 16, 16)).astype(np.float32))
    torch.manual_seed(0)
    save_file({"conv.weight": torch.randn(4, 1, 3, 3)}, folder / "checkpoint.safetensors")
    torch.save(torch.tensor(1.0), folder / "lazy.pt")
    nights.night(folder.parent, "--workers", "1")
    return folder


def explained(folder):
    where = ("-o", "out", "--cache", "cache")
    (found,) = json.loads(nights.run("nightly", "jobs", *where, "--json", "--explain", cwd=folder.parent))
    return found["reasons"] if found["build"] else None


def planned(folder):
    """The same without a process of its own."""
    cache = Cache(folder.parent / "cache")
    with Digests() as digests:
        survey = Survey(digests, this_machine(digests))
        return with_reads(survey, read_job(folder / "reader.yaml"), cache)[0]


READ = ["settings.json", "parts/a.npy", "parts/b.npy", "map.bin", "current.npy", "raw.bin", "checkpoint.safetensors",
        "lazy.pt", "bottom.py", "middle.py", "optional.txt", "elsewhere/far.py",
        *(f"samples/{k}.npy" for k in range(8))]  # fmt: skip


def test_a_night_over_a_job_that_reads_is_reused_when_nothing_changed(world):
    assert explained(world) is None
    assert {n for n in planned(world).parts if n.startswith("read ")} == {f"read {name}" for name in READ}
    (world / "unrelated.txt").write_text("another")
    os.utime(world / "lazy.pt")
    assert explained(world) is None


@pytest.mark.parametrize("name", READ)
def test_a_change_of_anything_that_was_read_is_a_reason_to_build(world, name):
    before = planned(world)
    path = world / name
    held = path.read_bytes() if path.exists() else None
    target = os.readlink(path) if path.is_symlink() else None
    path.unlink(missing_ok=True)
    path.write_bytes(b"changed")
    try:
        assert planned(world).changes(before.parts) == (f"{name}, read by the job's code, changed",)
        path.unlink()
        expected = [] if held is None else [f"{name}, read by the job's code, changed"]
        if name.startswith("parts/"):  # a folder that the code lists
            expected.append("the list of files in parts changed")
        assert planned(world).changes(before.parts) == tuple(expected)
    finally:
        path.unlink(missing_ok=True)
        if target is not None:
            path.symlink_to(target)
        elif held is not None:
            path.write_bytes(held)
    assert planned(world).key == before.key


@pytest.mark.parametrize("change", ["limits: {relative_l2_max: 0.02}", "limits: {cosine_min: 0.9}"])
def test_what_judges_alone_leaves_what_was_read_known(world, change):
    """So that the stages before the check are taken from the cache."""
    before = planned(world)
    (world / "reader.yaml").write_text(JOB.replace("limits: {relative_l2_max: 0.01}", change))
    try:
        now = planned(world)
        keys = [stage_keys(read_job(world / "reader.yaml"), ingredients) for ingredients in (before, now)]
        assert [n for n in now.parts if n.startswith("read ")] == [n for n in before.parts if n.startswith("read ")]
        assert keys[0] == keys[1]
    finally:
        (world / "reader.yaml").write_text(JOB)


def test_a_new_file_in_a_folder_that_was_listed_and_a_moved_link_are_reasons(world):
    before = planned(world)
    np.save(world / "parts" / "c.npy", np.ones(1))
    assert planned(world).changes(before.parts) == ("the list of files in parts changed",)
    (world / "parts" / "c.npy").unlink()
    (world / "current.npy").unlink()
    (world / "current.npy").symlink_to("v2.npy")
    assert planned(world).changes(before.parts) == ("current.npy, read by the job's code, changed",)
    (world / "current.npy").unlink()
    (world / "current.npy").symlink_to("v1.npy")
    assert planned(world).key == before.key


def test_a_changed_checkpoint_gives_another_engine_and_nothing_of_the_old_one(world):
    import torch

    engine = world.parent / "out" / "reader" / "model.onnx"
    before = engine.read_bytes()
    torch.save(torch.tensor(3.0), world / "lazy.pt")
    report = nights.night(world.parent, "--workers", "1")
    assert nights.outcomes(report) == {"reader": "built"}
    assert report["outcomes"][0]["reasons"] == ["lazy.pt, read by the job's code, changed"]
    assert report["outcomes"][0]["stages_reused"] == []
    assert engine.read_bytes() != before
    assert nights.outcomes(nights.night(world.parent, "--workers", "1")) == {"reader": "reused"}
    torch.save(torch.tensor(1.0), world / "lazy.pt")
    assert nights.outcomes(nights.night(world.parent, "--workers", "1")) == {"reader": "reused"}  # it is still kept
    assert engine.read_bytes() == before


def test_two_jobs_of_one_model_in_one_process_both_know_what_it_read(world, capsys):
    """The second takes the model from memory: nothing is read then."""
    (world / "second.yaml").write_text(JOB.replace("name: reader", "name: second") + "precision: {fp16_mode: true}\n")
    where = ["-o", str(world.parent / "o2"), "--cache", str(world.parent / "c2"), "--json"]
    files = [str(world / name) for name in ("reader.yaml", "second.yaml")]
    try:
        assert main(["nightly", *files, *where, "--workers", "0"]) == 0
        (world / "map.bin").write_bytes(np.float32(2.0).tobytes())
        capsys.readouterr()
        assert main(["nightly", *files, *where, "--explain"]) == 0
        found = json.loads(capsys.readouterr().out)
    finally:
        (world / "map.bin").write_bytes(np.float32(1.0).tobytes())
        (world / "second.yaml").unlink()
    assert [f["reasons"] for f in found] == [["map.bin, read by the job's code, changed"]] * 2


def test_a_file_that_changes_while_the_job_is_built_fails_it_and_is_not_kept(world, capsys, monkeypatch):
    from trtpipe.nightly import execute

    def build(*args, **kwargs):
        done = original(*args, **kwargs)
        (world / "settings.json").write_text('{"factor": 1.25}')
        return done

    original = execute.build
    monkeypatch.setattr(execute, "build", build)
    where = ["-o", str(world.parent / "o3"), "--cache", str(world.parent / "c3"), "--workers", "0", "--json"]
    try:
        assert main(["nightly", str(world / "reader.yaml"), *where]) == 2
        (found,) = json.loads(capsys.readouterr().out)["outcomes"]
        assert found["error"] == (
            "reader: inputs changed while it was built (settings.json changed after it was read). Run again."
        )
        monkeypatch.setattr(execute, "build", original)
        assert main(["nightly", str(world / "reader.yaml"), *where]) == 0
        (found,) = json.loads(capsys.readouterr().out)["outcomes"]
        assert found["outcome"] == "built"
    finally:
        (world / "settings.json").write_text('{"factor": 1.0}')

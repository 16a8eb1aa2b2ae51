import json
import re

import numpy as np
import pytest
from jobs import GOOD, good_folder
from pydantic import BaseModel

from trtpipe.job.job import Job
from trtpipe.job.load import PATHS, read_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.cache.environment import WITHOUT_EFFECT, fingerprint, portable_job
from trtpipe.pipeline.cache.keys import CONTENTS
from trtpipe.progress import Silent
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver, Gpu


def test_a_tensorrt_engine_is_of_its_gpu_and_others_are_not(monkeypatch):
    def on(*gpu):
        monkeypatch.setattr(driver, "probe", lambda: Driver("12.6", tuple(Gpu(0, n, c, 1) for n, c in gpu)))
        return {target: fingerprint("0" * 64, target, "onnx") for target in ("tensorrt", "tensorrt_rtx", "onnxruntime")}

    orin, ada = on(("Orin", "8.7")), on(("RTX 4090", "8.9"))
    assert orin["tensorrt"] != ada["tensorrt"]
    assert orin["tensorrt"] == on(("Orin", "8.7"))["tensorrt"]
    assert {k: v for k, v in orin.items() if k != "tensorrt"} == {k: v for k, v in ada.items() if k != "tensorrt"}


#: A value of each key that says how a machine works and not what it makes.
OF_THE_MACHINE = {
    "build.log_level": "verbose", "build.timing_cache": "/var/timing", "build.calibration_cache": "/var/ranges",
    "calibration.workers": "2", "check.workers": "2", "worker": "[night]",
}  # fmt: skip


def test_what_has_no_effect_is_what_says_how_a_machine_works():
    """The name of a job aside, which is part of what is made of it."""
    assert set(OF_THE_MACHINE) == WITHOUT_EFFECT - {"name"}


@pytest.mark.parametrize("key", sorted(OF_THE_MACHINE))
def test_a_job_is_told_alike_whatever_the_machine(key, tmp_path):
    path = good_folder(tmp_path) / "job.yaml"
    path.write_text(GOOD.replace("build:\n  compute_capability: [8.6, 12.0]\n", "build: {target: tensorrt}\n"))
    overrides = () if key != "build.calibration_cache" else ("build.quantization=implicit",)
    plain = portable_job(read_job(path, overrides))
    changed = read_job(path, (*overrides, f"{key}={OF_THE_MACHINE[key]}"))
    assert portable_job(changed) == plain
    assert portable_job(read_job(path, (*overrides, "check.batch_size=3"))) != plain
    assert '"name": "digits"' in plain


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Bundles of a linear in INT4, whose weights are fitted to calibration samples and in no table: by overrides."""
    folder = tmp_path_factory.mktemp("linear")
    rng = np.random.default_rng(0)
    np.save(folder / "a.npy", rng.normal(size=(8, 128)).astype(np.float32))
    np.save(folder / "b.npy", (rng.normal(size=(8, 128)) * np.arange(128)).astype(np.float32))
    np.save(folder / "w.npy", rng.normal(size=(16, 128)).astype(np.float32))
    (folder / "linear_of_file.py").write_text(
        "import numpy as np, torch\n"
        "def net(path):\n"
        "    made = torch.nn.Linear(128, 16, bias=False)\n"
        "    made.weight.data = torch.from_numpy(np.load(path))\n"
        "    return made\n"
    )
    job = {
        "name": "linear",
        "model": {"factory": "linear_of_file:net", "args": {"path": str(folder / "w.npy")}},
        "inputs": {"x": {"shape": ["N", 128], "N": {"min": 1, "opt": 2, "max": 8}}},
        "outputs": {"y": {}},
        "precision": {"weights": "int4"},
        "calibration": {"arrays": "a.npy"},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "a.npy", "limits": {"cosine_min": 0.5}},
    }
    (folder / "job.yaml").write_text(json.dumps(job))

    def make(*overrides):
        made = read_job(folder / "job.yaml", overrides)
        return build(made, folder / "out", Silent(), diagnose_seconds=0).bundle.manifest.fingerprint

    return make


def test_the_fingerprint_is_of_all_that_changes_an_engine(built):
    """Profiles are in no graph, and samples that 4-bit weights are fitted to in no table."""
    plain = built()
    assert built() == plain
    changes = (
        "calibration.arrays=b.npy",
        "inputs.x.N={min: 1, opt: 4, max: 8}",
        "inputs.x.N={min: 1, opt: 2, max: 16}",
    )
    others = [built(change) for change in changes]
    assert len({plain, *others}) == 1 + len(changes)
    assert built("check.limits={cosine_min: 0.6}") == plain


def text_keys(model, path=()):
    """Every key of a job that takes text, and what is said of it."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for section in (k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)):
            yield from text_keys(section, (*path, name))
        if "str" in str(field.annotation):
            yield (*path, name), field.description or ""


def test_every_key_that_names_a_file_is_resolved_and_watched():
    """By what is said of it: from the job's folder, and with what is in it; plugins have digests of their own."""
    a_file = re.compile(r"\b(files?|folders?|libraries)\b|(^|\s)\.\w{2,}\b")
    named = {path for path, said in text_keys(Job) if a_file.search(said)} - {("name",), ("inputs", "dims")}
    assert named | {("calibration", "table")} == set(PATHS)
    keys = {".".join(p) for p in PATHS}
    assert keys == {*CONTENTS, "build.plugins", *(WITHOUT_EFFECT & keys)}

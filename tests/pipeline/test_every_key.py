"""Every key of a job, with every kind of job: read while the job is carried out, refused by name, or named in a note.

The keys come from the pydantic models, so that a new one fails here until every kind of job has an answer for it. Which
keys a job reads is observed while it runs on small data, not declared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import nights
import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel

from trtpipe.errors import TrtpipeError
from trtpipe.evaluation.bench import Bench
from trtpipe.job.build_options import BuildOptions
from trtpipe.job.job import Job
from trtpipe.job.load import JobErrors, load_job
from trtpipe.job.sections import Build, Section
from trtpipe.pipeline import bench, build, kit, tune, validate
from trtpipe.pipeline.calibrate import make_table
from trtpipe.progress import Silent
from trtpipe.routes import options as routes
from trtpipe.trt import options as trt
from trtpipe.values import Engine, OnnxModel

#: A value of each key that differs from that of `BASE`, and what else has to change with it. One row for every key but
#: those of BuildOptions, which `trt.options` and `routes.options` have a row for each.
CHANGES: dict[str, dict[str, Any]] = {
    "name": {"name": "other"},
    "model.factory": {"model.factory": "net:other"},
    "model.args": {"model.args": {"extra": 1}},
    "model.weights": {"model.weights": None},
    "model.torchscript": {"model.torchscript": "net.ts"},
    "model.program": {"model.factory": None, "model.weights": None, "model.program": "net.pt2"},
    "model.baseline": {"model.baseline": "script"},
    "inputs.dtype": {"inputs.image.dtype": "float16"},
    "inputs.shape": {"inputs.image.shape": ["N", 1, "H", 16], "inputs.image.H": {"min": 16, "opt": 16, "max": 16}},
    "inputs.normalize": {"inputs.image.normalize": None},
    "inputs.normalize.mean": {"inputs.image.normalize": {"mean": [0.5], "std": [1.0]}},
    "inputs.normalize.std": {"inputs.image.normalize": {"mean": [0.0], "std": [0.5]}},
    "inputs.dims": {"inputs.image.N": {"min": 1, "opt": 2, "max": 2}},
    "inputs.dims.min": {"inputs.image.N": {"min": 2, "opt": 4, "max": 8}},
    "inputs.dims.opt": {"inputs.image.N": {"min": 1, "opt": 3, "max": 8}},
    "inputs.dims.max": {"inputs.image.N": {"min": 1, "opt": 4, "max": 6}},
    "outputs.dtype": {"outputs.logits.dtype": "float16"},
    "precision.fp16_mode": {"precision.fp16_mode": True},
    "precision.bf16_mode": {"precision.bf16_mode": True},
    "precision.int8_mode": {"precision.int8_mode": True},
    "precision.fp8_mode": {"precision.fp8_mode": True},
    "precision.nvfp4_mode": {"precision.nvfp4_mode": True},
    "precision.weights": {"precision.weights": "int4"},
    "precision.formats": {"precision.weights": "int4", "precision.formats": {"0": "int4"}},
    "precision.placement": {"precision.placement": "all"},
    "precision.keep": {"precision.keep": {"fp32": ["0"]}},
    "precision.keep.fp32": {"precision.keep": {"fp32": ["0"]}},
    "precision.keep.fp16": {"precision.keep": {"fp16": ["0"]}},
    "precision.keep.bf16": {"precision.keep": {"bf16": ["0"]}},
    "build.route": {"build.route": "torch_tensorrt"},
    "build.target": {"build.target": "tensorrt_rtx"},
    "build.use_onnx": {"build.use_onnx": True},
    "build.allow_torch_fallback": {"build.allow_torch_fallback": True},
    "check.limits": {"check.limits": {"max_abs_max": 1.0}},
    "check.limits.cosine_min": {"check.limits": {"cosine_min": 0.5}},
    "check.limits.max_abs_max": {"check.limits": {"max_abs_max": 1.0}},
    "check.limits.relative_l2_max": {"check.limits": {"relative_l2_max": 1.0}},
    "check.limits.sqnr_db_min": {"check.limits": {"sqnr_db_min": 1.0}},
    "check.limits.top1_agreement_min": {"check.limits": {"top1_agreement_min": 0.5}},
    "check.limits.accuracy_drop_max": {"check.limits": {"accuracy_drop_max": 0.5}},
    "check.limits.confident": {"check.limits": {"top1_agreement_min": 0.5, "confident": True}},
    "check.limits.speedup_over_fp16_min": {
        "check.limits": {"speedup_over_fp16_min": 1.0}, "check.require": "engine",
    },
    "check.require": {"check.require": "engine"},
    "check.sensitivity": {"check.sensitivity": True},
    "check.bench": {"check.bench": True},
    "check.on_fail": {"check.on_fail": "tune"},
    "calibration.corrections": {"calibration.corrections": []},
    "check.labels": {"check.labels": "labels.txt"},
    "calibration.algorithm": {"calibration.algorithm": "mse"},
    "calibration.percentile": {"calibration.algorithm": "percentile", "calibration.percentile": 99.0},
    "calibration.table": {"calibration": {"table": "table.json"}},
    "worker": {"worker": ["sm87"]},
}  # fmt: skip
for _section in ("calibration", "check"):
    CHANGES |= {
        f"{_section}.images": {f"{_section}.images": f"{_section}-more"},
        f"{_section}.arrays": {f"{_section}.images": None, f"{_section}.transform": None,
                               f"{_section}.arrays": "val.npz"},
        f"{_section}.factory": {f"{_section}.images": None, f"{_section}.transform": None,
                                f"{_section}.factory": "net:samples"},
        f"{_section}.samples": {f"{_section}.samples": 6},
        f"{_section}.batch_size": {f"{_section}.batch_size": 2},
        f"{_section}.seed": {f"{_section}.samples": 6, f"{_section}.seed": 1},
        f"{_section}.workers": {f"{_section}.workers": 1},
        f"{_section}.on_bad_sample": {f"{_section}.on_bad_sample": "skip"},
        f"{_section}.transform": {f"{_section}.transform": {"grayscale": True}},
        f"{_section}.transform.resize": {f"{_section}.transform.resize": [16, 16]},
        f"{_section}.transform.center_crop": {f"{_section}.transform.center_crop": 16},
        f"{_section}.transform.grayscale": {f"{_section}.transform.grayscale": True},
        f"{_section}.transform.interpolation": {f"{_section}.transform.interpolation": "nearest"},
        f"{_section}.transform.normalize": {f"{_section}.transform.normalize": {"mean": [0.1], "std": [1.0]}},
        f"{_section}.transform.normalize.mean": {f"{_section}.transform.normalize": {"mean": [0.1], "std": [1.0]}},
        f"{_section}.transform.normalize.std": {f"{_section}.transform.normalize": {"mean": [0.0], "std": [2.0]}},
        f"{_section}.transform.callable": {f"{_section}.transform": {"callable": "net:transform"}},
    }  # fmt: skip
#: What makes of `BASE` a job of each kind. Target onnxruntime runs anywhere; bf16 ends at a TensorRT that takes what it
#: is given, like implicit quantization.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"precision": {"fp16_mode": True}},
    "bf16": {"precision": {"bf16_mode": True}, "build": {"target": "tensorrt_rtx"}},
    "int8": {"precision": {"int8_mode": True}},
    "int8+fp16": {"precision": {"int8_mode": True, "fp16_mode": True}},
    "implicit": {
        "precision": {"int8_mode": True},
        "build": {"target": "tensorrt", "quantization": "implicit"},
    },
    "int8 from a table": {
        "precision": {"int8_mode": True},
        "calibration": {"table": "table.json", "algorithm": "minmax"},
        "check.transform": {"grayscale": True, "normalize": {"mean": [0.0], "std": [1.0]}},
    },
}
#: The header of a plan of TensorRT 10.3.
PLAN = b"ftrt" + bytes(20) + bytes((10, 3, 0, 0)) + bytes(36)
CALLABLES = """
def other(**_):
    return net()

def samples():
    return []

def transform(image):
    return image
"""
GRAY = {"grayscale": True, "normalize": {"mean": [0.0], "std": [1.0]}}
BASE: dict[str, Any] = {
    "name": "m",
    "model": {"factory": "net:net", "weights": "w0.safetensors"},
    "inputs": {
        "image": {
            "dtype": "float32",
            "shape": ["N", 1, 16, 16],
            "N": {"min": 1, "opt": 4, "max": 8},
            "normalize": {"mean": [0.0], "std": [1.0]},
        }
    },
    "outputs": {"logits": {"dtype": "float32"}},
    "calibration": {"images": "images", "transform": GRAY, "batch_size": 4, "algorithm": "minmax"},
    "build": {"target": "onnxruntime"},
    "check": {"images": "images", "transform": GRAY, "batch_size": 4, "limits": {"cosine_min": 0.5}},
}
#: Keys that say nothing to a command, by what it is for; a build of the same job honours them.
ELSEWHERE: dict[str, dict[str, str]] = {
    "bf16": {
        "check.limits*": "no CPU executes it",
        "check.require": "no CPU executes it",
        "check.bench": "no CPU executes it",
        "name": "no CPU executes it, so there is no bundle",
    },
    "build": {"worker": "for a fleet"},
    "prepare": {
        "worker": "for a fleet",
        "check.require": "kept in the kit for the device",
        "check.bench": "noted in the kit",
        "check.sensitivity": "noted in the kit",
    },
    "tune": {
        "worker": "for a fleet",
        "build.route": "engines are built where a GPU executes them",
        "check.limits.speedup_over_fp16_min": "a trial is not timed against another engine",
        "check.require": "a trial runs the graph",
        "check.sensitivity": "always measured",
        "check.bench": "for a build's report",
        "check.on_fail": "it is what this command does",
    },
    "bench": {
        "worker": "for a fleet",
        "build.route": "engines are built where a GPU executes them",
        "precision.fp16_mode": "of the engines alone",
        "precision.bf16_mode": "of the engines alone",
        "precision.fp8_mode": "of the engines alone",
        "precision.nvfp4_mode": "of the engines alone",
        "precision.weights": "of the engines alone",
        "precision.formats": "of the engines alone",
        "check.limits*": "nothing is judged",
        "check.require": "nothing is judged",
        "check.sensitivity": "nothing is judged",
        "check.bench": "it is what this command does",
        "check.on_fail": "nothing is judged",
    },
}
KINDS = [("build", p) for p in PRECISIONS] + [
    ("prepare", "int8"), ("tune", "int8"), ("bench", "int8"),
]  # fmt: skip


def keys(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted paths of every key below a model; a mapping or tuple of sections counts as its section."""
    for name, info in model.model_fields.items():
        here = f"{path}{name}"
        if issubclass(model, BuildOptions) and name in BuildOptions.model_fields:
            continue
        inner = [a for a in _leaves(info.annotation) if isinstance(a, type) and issubclass(a, Section)]
        if path or not inner:
            yield here
        for section in inner:
            yield from keys(section, f"{here}.")


def _leaves(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from _leaves(argument)


KEYS = tuple(dict.fromkeys(keys(Job)))


def test_every_key_has_a_value_to_try():
    assert set(KEYS) == set(CHANGES), "a new key of the job file needs its row, and an answer from every kind of job"
    for table in (trt.OPTIONS, routes.OPTIONS):
        assert {row.field for row in table} == set(BuildOptions.model_fields)


@dataclass
class Trace:
    """The keys read of a job's sections while it is on."""

    on: bool = False
    read: set[str] = field(default_factory=set)
    of: dict[int, str] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def know(self, section: Any, path: str = "") -> None:
        """Remember where in the job each section is."""
        self.of[id(section)] = path
        self.kept.append(section)
        for name in type(section).model_fields:
            value = section.__dict__[name]
            for inner in value.values() if isinstance(value, dict) else (value,):
                if isinstance(inner, Section):
                    self.know(inner, f"{path}{name}.")


#: Functions that read a section as a whole, to compare, copy or dump it; what they read is not thereby honoured.
WHOLE = {"asked", "_changed", "_given", "know", "__eq__", "__repr_args__", "model_copy", "__copy__", "_flat"}


@pytest.fixture
def trace(monkeypatch):
    found = Trace()

    def reads(self: Any, name: str) -> Any:
        if found.on and name in type(self).model_fields and sys._getframe(1).f_code.co_name not in WHOLE:
            at = found.of.get(id(self))
            for path in [at] if at is not None else PATHS_OF.get(type(self).__name__, []):
                found.read.add(f"{path}{name}")
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Section, "__getattribute__", reads, raising=False)
    return found


def _paths_of() -> dict[str, list[str]]:
    """Where each class of section is in a job, for copies made while the job runs."""
    found: dict[str, list[str]] = {"Job": [""]}

    def walk(model: type[BaseModel], path: str) -> None:
        for name, info in model.model_fields.items():
            for inner in _leaves(info.annotation):
                if isinstance(inner, type) and issubclass(inner, Section):
                    found.setdefault(inner.__name__, []).append(f"{path}{name}.")
                    walk(inner, f"{path}{name}.")

    walk(Job, "")
    return found


PATHS_OF = _paths_of()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    nights.make_world(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "net.py").write_text(nights.NET + CALLABLES)
    rng = np.random.default_rng(0)
    for name in ("images", "calibration-more", "check-more"):
        for k, level in enumerate(nights.LEVELS):
            (tmp_path / name / str(k)).mkdir(parents=True)
            for i in range(4):
                gray = np.clip(level + rng.normal(0, 0.02, (16, 16)), 0, 1)
                Image.fromarray((gray * 255).astype(np.uint8)).save(tmp_path / name / str(k) / f"{i}.png")
    (tmp_path / "labels.txt").write_text("0\n1\n2\n")
    for name in ("net.ts", "net.pt2"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    make_table(load_job(write(tmp_path, PRECISIONS["int8"])), Silent()).save(tmp_path / "table.json")
    return tmp_path


def write(folder: Path, *layers: dict[str, Any]) -> Path:
    """A job file of BASE with each layer's dotted keys laid over it; None removes a key."""
    job = json.loads(json.dumps(BASE))
    for layer in layers:
        for dotted, value in layer.items():
            *most, last = dotted.split(".")
            inner = job
            for part in most:
                inner = inner.setdefault(part, {})
            if value is None:
                inner.pop(last, None)
            else:
                inner[last] = json.loads(json.dumps(value))
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def run(command: str, job: Job, out: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the job; what it reads of the job is in `trace`."""
    trace.know(job)

    def compiled(graph: OnnxModel, section: Build, **_: Any) -> Engine:
        if job.precision.bf16_mode:
            raise TrtpipeError("compiled")
        return Engine(PLAN, section.target, "10.3.0", ("8.9",), graph.inputs, graph.outputs, graph)

    for name in ("build_engine", "build_isolated"):
        monkeypatch.setattr(f"trtpipe.routes.onnx.{name}", compiled)
    if command == "build":
        monkeypatch.setattr(
            "trtpipe.pipeline.build.bench_front", lambda *a, **k: Bench("m", 4, 4, 1, 1, "eager FP32", 1, ())
        )
    trace.on = True
    try:
        if command == "build":
            build.build(job, out, Silent())
        elif command == "prepare":
            kit.write_kit(job, out, Silent())
        elif command == "tune":
            tune.tune(job, out, Silent(), evaluations=2)
        else:
            bench.bench_job(job, Silent(), rounds=1, seconds=1.0, samples=4)
    except TrtpipeError as error:
        assert str(error) == "compiled", error  # noqa: PT017
    finally:
        trace.on = False


def refused(folder: Path, precision: str, key: str) -> tuple[str, ...]:
    """What is said of a job of this kind with another value of `key`; () when it is accepted, or is no job at all."""
    path = write(folder, PRECISIONS[precision], CHANGES[key])
    release = "10.3.0" if precision == "implicit" else None
    problems = validate.validate(path, here=False, version=release)
    return tuple(str(p) for p in problems)


def noted(folder: Path, precision: str, key: str) -> tuple[str, ...]:
    """The notes on a job of this kind with another value of `key`; a note on a section names each of its keys."""
    try:
        notes = load_job(write(folder, PRECISIONS[precision], CHANGES[key]), paths_exist=False).unused()
    except JobErrors:
        return ()
    return tuple(
        f"{key}: {n}" if n.startswith("calibration: ") and f"{key}.".startswith("calibration.") else n for n in notes
    )


@pytest.mark.parametrize(("command", "precision"), KINDS, ids=[f"{c} {p}" for c, p in KINDS])
def test_every_key_is_read_refused_or_noted(folder, trace, monkeypatch, command, precision):
    runs = {"fails": {"check.limits": {"max_abs_max": 0.0, "cosine_min": 1.0}}}
    if command == "build" and precision.startswith(
        "int8"
    ):  # a check that fails is diagnosed whatever check.sensitivity says
        runs["passes"] = {}
    for name, change in runs.items():
        try:
            job = load_job(write(folder, PRECISIONS[precision], change))
        except JobErrors as error:  # pragma: no cover - a mistake in this test
            pytest.fail(str(error))
        run(command, job, folder / name, trace, monkeypatch)
    unanswered = {}
    elsewhere = ELSEWHERE[command] | ELSEWHERE.get(precision, {})
    for key in KEYS:
        if key in trace.read or any(_fits(key, glob) for glob in elsewhere):
            continue
        said = (*refused(folder, precision, key), *noted(folder, precision, key))
        if not any(_names(key, text) for text in said):
            unanswered[key] = said
    assert unanswered == {}, "read by nothing, not refused and not noted: silent"


def _names(key: str, text: str) -> bool:
    """Whether a message is about the key, or about a section that it is in."""
    written = key.replace("inputs.", "inputs.image.").replace("outputs.", "outputs.logits.").split(".")
    return any(".".join(written[:k]) in text for k in range(len(written), 1, -1)) or f"{written[0]}: " in text


def _fits(key: str, glob: str) -> bool:
    return key == glob or (glob.endswith("*") and key.startswith(glob[:-1]))

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
from job_values import BASE, CALLABLES, CHANGES, ELSEWHERE, KINDS, PRECISIONS
from PIL import Image
from pydantic import BaseModel
from trt_double import VERSIONS, plan

from trtpipe.errors import InputError, TrtpipeError
from trtpipe.evaluation.bench import Bench
from trtpipe.job.build_options import BuildOptions
from trtpipe.job.job import Job
from trtpipe.job.load import JobErrors, read_job, read_jobs
from trtpipe.job.section import Section
from trtpipe.job.sections import Build
from trtpipe.nightly.options import Options, Unwatched
from trtpipe.nightly.run import nightly
from trtpipe.pipeline import bench, build, kit, tune, validate
from trtpipe.pipeline.calibrate import make_table
from trtpipe.progress import Silent
from trtpipe.routes.support import ROUTE_OPTIONS
from trtpipe.trt import options as trt
from trtpipe.values import Engine, OnnxModel


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
    for table in (trt.OPTIONS, ROUTE_OPTIONS):
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
WHOLE = {"asked", "changed", "given", "know", "__eq__", "__repr_args__", "model_copy", "__copy__", "_flat"}


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
    for name in ("net.ts", "net.pt2", "net.onnx"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    make_table(read_job(write(tmp_path, PRECISIONS["int8"])), Silent()).save(tmp_path / "table.json")
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


def run(command: str, job: Job, folder: Path, out: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the job; what it reads of the job is in `trace`."""
    trace.know(job)

    def compiled(graph: OnnxModel, section: Build, **_: Any) -> Engine:
        if job.precision.bf16_mode:
            raise TrtpipeError("compiled")
        version = VERSIONS[section.target]
        return Engine(plan(section.target), section.target, version, ("8.9",), graph.inputs, graph.outputs, graph)

    class Isolated:
        def __enter__(self) -> Isolated:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing runs."""

        def start(self, *given: Any, **options: Any) -> None:
            self.engine = compiled(*given, **options)

        def look(self, progress: Any) -> None:
            """Nothing is reported."""

        def finish(self, progress: Any) -> Engine:
            return self.engine

    monkeypatch.setattr("trtpipe.routes.onnx.build_engine", compiled)
    monkeypatch.setattr("trtpipe.routes.onnx.Isolated", Isolated)
    if command in ("build", "nightly"):
        monkeypatch.setattr(
            "trtpipe.pipeline.build.bench_prepared", lambda *a, **k: Bench("m", 4, 4, 1, 1, "eager FP32", 1, ())
        )
    trace.on = True
    try:
        carry_out(command, job, folder, out, monkeypatch)
    except TrtpipeError as error:
        assert str(error) == "compiled", error  # noqa: PT017
    finally:
        trace.on = False


def carry_out(command: str, job: Job, folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does, with a search or a bench that is short."""
    if command == "build":
        build.build(job, out, Silent())
    elif command == "prepare":
        kit.write_kit(job, out, Silent())
    elif command == "nightly":
        for what in ("_compiler", "_gpu_absent"):  # which ask for TensorRT and its GPU
            monkeypatch.setattr(validate, what, lambda job: ())
        options = Options((folder / "job.yaml",), out, out / "cache", out / "history.sqlite", workers=0)
        (outcome,) = nightly(options, Unwatched()).outcomes
        assert outcome.outcome == "built", outcome.error
    elif command == "tune":
        tune.tune(job, out, Silent(), evaluations=2)
    elif command == "calibrate":
        make_table(job, Silent())
    else:
        bench.bench_job(job, Silent(), rounds=1, seconds=1.0, samples=4)


def refused(folder: Path, precision: str, key: str) -> tuple[str, ...]:
    """What is said of a job of this kind with another value of `key`; () when it is accepted, or is no job at all."""
    path = write(folder, PRECISIONS[precision], CHANGES[key])
    release = "10.3.0" if precision == "implicit" else None
    problems = validate.validate(path, here=False, version=release)
    return tuple(str(p) for p in problems)


def noted(folder: Path, precision: str, key: str) -> tuple[str, ...]:
    """The notes on a job of this kind with another value of `key`; a note on a section names each of its keys."""
    try:
        notes = read_jobs(write(folder, PRECISIONS[precision], CHANGES[key]), paths_exist=False)[0].unused()
    except JobErrors:
        return ()
    return tuple(
        f"{key}: {n}" if n.startswith("calibration: ") and f"{key}.".startswith("calibration.") else n for n in notes
    )


@pytest.mark.parametrize(("command", "precision"), KINDS, ids=[f"{c} {p}" for c, p in KINDS])
def test_every_key_is_read_refused_or_noted(folder, trace, monkeypatch, command, precision):
    runs = {"fails": {"check.limits": {"max_abs_max": 0.0, "cosine_min": 1.0, "metrics": {"off": {"max": 9.0}}}}}
    if command == "build" and precision.startswith(
        "int8"
    ):  # a check that fails is diagnosed whatever check.sensitivity says
        runs["passes"] = {}
    for name, change in runs.items():
        try:
            job = read_job(write(folder, PRECISIONS[precision], change))
        except JobErrors as error:  # pragma: no cover - a mistake in this test
            pytest.fail(str(error))
        run(command, job, folder, folder / name, trace, monkeypatch)
    unanswered = {}
    elsewhere = ELSEWHERE[command] | ELSEWHERE.get(precision, {})
    for key in KEYS:
        if key in trace.read or any(_fits(key, glob) for glob in elsewhere):
            continue
        said = (*refused(folder, precision, key), *noted(folder, precision, key))
        if not any(_names(key, text) for text in said):
            unanswered[key] = said
    assert unanswered == {}, "read by nothing, not refused and not noted: silent"


@pytest.mark.parametrize(
    ("command", "precision", "message"),
    [
        (
            "prepare",
            "implicit",
            "build.quantization: must be explicit to prepare a kit (got implicit): TensorRT would calibrate on the "
            "device, and a kit holds no calibration samples. Use explicit, or build where its GPU is.",
        ),
        (
            "tune",
            "fp16",
            "tune: the job turns on no mode that quantizes. Set precision.int8_mode or fp8_mode.",
        ),
        (
            "tune",
            "implicit",
            "tune: build.quantization must be explicit, where trtpipe places the Q/DQ (got implicit). Leave it out.",
        ),
    ],
)
def test_a_kind_that_a_command_cannot_carry_out_is_refused(folder, monkeypatch, command, precision, message):
    """As a whole: no key of it can be silent."""
    job = read_job(write(folder, PRECISIONS[precision]))
    with pytest.raises(InputError) as caught:
        carry_out(command, job, folder, folder / "out", monkeypatch)
    assert str(caught.value) == message


def _names(key: str, text: str) -> bool:
    """Whether a message is about the key, or about a section that it is in."""
    written = key.replace("inputs.", "inputs.image.").replace("outputs.", "outputs.logits.").split(".")
    return any(".".join(written[:k]) in text for k in range(len(written), 1, -1)) or f"{written[0]}: " in text


def _fits(key: str, glob: str) -> bool:
    return key == glob or (glob.endswith("*") and key.startswith(glob[:-1]))

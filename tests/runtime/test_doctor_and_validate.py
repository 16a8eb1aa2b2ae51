"""What `doctor` says of a machine is what `validate` says there of a job that asks for no more than that."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from jobs import good_folder
from PIL import Image

from trtpipe import packages
from trtpipe.errors import MissingError
from trtpipe.pipeline import validate
from trtpipe.routes import options
from trtpipe.routes.options import FRONTENDS, REQUIREMENTS, Frontend
from trtpipe.runtime import device_memory, doctor
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver, Gpu
from trtpipe.values import Route, Target

GPUS = {
    "none": Driver(problem="libcuda.so.1, the NVIDIA driver's library, is not on this machine"),
    **{
        name: Driver("13.0", (Gpu(0, name, capability, 24 << 30),))
        for name, capability in {
            "GTX 1080": "6.1", "Tesla V100": "7.0", "T4": "7.5", "L4": "8.9", "H100": "9.0", "B200": "10.0"
        }.items()
    },
    "L4, CUDA 11": Driver("11.8", (Gpu(0, "NVIDIA L4", "8.9", 24 << 30),)),
    "L4, CUDA 12": Driver("12.4", (Gpu(0, "NVIDIA L4", "8.9", 24 << 30),)),
}  # fmt: skip
TENSORRTS: list[dict[str, tuple[str, str]]] = [
    {**rtx, **ten}
    for rtx in ({}, {"tensorrt_rtx": ("tensorrt-rtx", "1.7.1.116")}, {"tensorrt_rtx": ("tensorrt-rtx", "1.0.0.21")})
    for ten in (
        {},
        *({"tensorrt": ("tensorrt", release)} for release in ("8.5.3", "8.6.1", "10.3.0", "10.16.1.11", "11.4.0.106")),
    )
]
#: Torch-TensorRT and torch2trt.
FRONTENDS_HERE = [
    (None, None),
    (Frontend("tensorrt_rtx", "torch-tensorrt-rtx", "2.14.0"), "0.5.0"),
    (Frontend("tensorrt", "torch-tensorrt", "2.14.0"), "0.5.0"),
    (Frontend("tensorrt", "torch-tensorrt", "2.9.0"), None),
]
NO_MEMORY = "device memory: none. Install one: pip install 'trtpipe[edge]'."
#: By what doctor says, the routes and targets that it is about.
JOBS: dict[str, list[tuple[Route, Target]]] = {
    "run a graph (target onnxruntime)": [("onnx", "onnxruntime")],
    "build an engine (target tensorrt_rtx)": [("onnx", "tensorrt_rtx")],
    "build and run an engine (target tensorrt)": [("onnx", "tensorrt")],
    "build by route torch_tensorrt": [("torch_tensorrt", target) for target in REQUIREMENTS["torch_tensorrt"].packages],  # type: ignore[misc]
    "build by route torch2trt": [("torch2trt", target) for target in REQUIREMENTS["torch2trt"].packages],  # type: ignore[misc]
}


@dataclasses.dataclass(frozen=True)
class Machine:
    gpu: str
    tensorrts: dict[str, tuple[str, str]]
    frontend: Frontend | None
    torch2trt: str | None
    memory: str


Describe = Callable[[Machine], None]


@pytest.fixture
def describe(monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Makes a machine of this one."""
    real = packages.version
    state: dict[str, Any] = {}

    def version(name: str) -> str | None:
        machine: Machine = state["machine"]
        here = {machine.frontend.distribution: machine.frontend.version} if machine.frontend else {}
        if name == "torch_tensorrt":
            return machine.frontend.version if machine.frontend else None
        if name == "torch2trt":
            return machine.torch2trt
        return here.get(name) if name in FRONTENDS.values() else real(name)

    def require_memory(visible: str | None) -> None:
        if state["machine"].memory:
            raise MissingError(state["machine"].memory)

    def built_for(module: str) -> int | None:
        return {"tensorrt_rtx": 13, "tensorrt": 12}.get(module)

    for module in (doctor, validate):
        monkeypatch.setattr(module, "version" if module is doctor else "package_version", version)
        monkeypatch.setattr(module, "cuda_major", built_for)
    monkeypatch.setattr(packages, "cuda_major", built_for)
    monkeypatch.setattr(driver, "probe", lambda: GPUS[state["machine"].gpu])
    for name in ("trtpipe.trt.flavour", "trtpipe.pipeline.validate"):
        monkeypatch.setattr(f"{name}.installed", lambda: state["machine"].tensorrts)
    monkeypatch.setattr(options, "installed_frontend", lambda: state["machine"].frontend)
    monkeypatch.setattr(doctor, "import_failures", lambda modules: {})
    monkeypatch.setattr(validate, "unimportable", lambda target: "")
    monkeypatch.setattr(device_memory, "no_memory", lambda: state["machine"].memory)
    monkeypatch.setattr(device_memory, "_require_memory", require_memory)
    return lambda machine: state.update(machine=machine)


@pytest.fixture
def jobs(tmp_path: Path) -> dict[tuple[Route, Target], Path]:
    good_folder(tmp_path)
    Image.new("L", (32, 32)).save(tmp_path / "val" / "0" / "a.png")
    found = {}
    for route, target in {pair for pairs in JOBS.values() for pair in pairs}:
        job = {
            "name": "plain",
            "model": {"factory": "torch.nn:Identity"},
            "inputs": {"image": {"shape": ["N", 1, 32, 32], "N": {"min": 1, "opt": 8, "max": 32}}},
            "outputs": {"logits": {}},
            "build": {"route": route, "target": target},
            "check": {
                "images": "val",
                "transform": {"resize": [32, 32], "grayscale": True},
                "limits": {"cosine_min": 0.9},
            },
        }
        found[route, target] = tmp_path / f"{route}-{target}.yaml"
        found[route, target].write_text(json.dumps(job))
    return found


def test_every_route_and_target_is_one_that_doctor_judges() -> None:
    judged = {pair for pairs in JOBS.values() for pair in pairs}
    assert {route for route, _ in judged} == set(get_args(Route))
    assert {target for _, target in judged} == set(get_args(Target))


MACHINES = st.builds(
    lambda gpu, tensorrts, frontends, memory: Machine(gpu, tensorrts, *frontends, memory),
    st.sampled_from(sorted(GPUS)),
    st.sampled_from(TENSORRTS),
    st.sampled_from(FRONTENDS_HERE),
    st.sampled_from(["", NO_MEMORY]),
)


@given(machine=MACHINES)
@example(machine=Machine("L4", TENSORRTS[3], FRONTENDS_HERE[1][0], "0.5.0", NO_MEMORY))
@example(machine=Machine("B200", TENSORRTS[2], FRONTENDS_HERE[2][0], "0.5.0", ""))
@example(machine=Machine("L4, CUDA 11", TENSORRTS[3], FRONTENDS_HERE[2][0], "0.5.0", ""))
@settings(  # a failing machine is not shrunk: each asks validate six times
    max_examples=60,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_doctors_yes_is_validates_yes(
    machine: Machine, describe: Describe, jobs: dict[tuple[Route, Target], Path]
) -> None:
    describe(machine)
    abilities = {a.what: a for a in doctor.examine().abilities}
    for what, pairs in JOBS.items():
        said = [[p.message for p in validate.validate(jobs[pair])] for pair in pairs]
        able = abilities[what].possible and "; but for this " not in abilities[what].reason  # which validate refuses
        assert able == (not all(said)), (abilities[what], said)

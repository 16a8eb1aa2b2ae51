from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from trtpipe import packages
from trtpipe.cli import main as cli
from trtpipe.packages import BUILDING
from trtpipe.routes.options import Frontend
from trtpipe.runtime import device_memory, doctor
from trtpipe.trt import driver, flavour, install, platforms
from trtpipe.trt.driver import Driver, Gpu

NO_GPU = Driver(problem="libcuda.so.1, the NVIDIA driver's library, is not on this machine")
L4 = Driver("12.6", (Gpu(0, "NVIDIA L4", "8.9", 24 << 30),))
H100 = Driver("12.6", (Gpu(0, "NVIDIA H100", "9.0", 80 << 30),))
ORIN = Driver("12.6", (Gpu(0, "Orin", "8.7", 8 << 30),))
ALL = {name: "1.0" for name, _ in doctor.PACKAGES} | {"torch": "2.14.1", "torchao": "0.18.0"}
RTX, TEN, ELEVEN = ("tensorrt-rtx", "1.7.1.116"), ("tensorrt", "10.3.0"), ("tensorrt-cu13", "11.4.0.106")


@pytest.fixture
def machine(monkeypatch):
    """A function that describes a machine and returns its diagnosis."""

    def examine(gpu=NO_GPU, tensorrts=None, packages=ALL, *, jetson=False, processor="x86_64", failed=None,
                built_for=12, memory=""):  # fmt: skip
        monkeypatch.setattr(driver, "probe", lambda: gpu)
        monkeypatch.setattr(flavour, "installed", lambda: tensorrts or {})
        monkeypatch.setattr(driver, "is_jetson", lambda: jetson)
        monkeypatch.setattr(doctor, "cuda_major", lambda module: built_for)
        monkeypatch.setattr(device_memory, "no_memory", lambda: memory)
        there = dict((tensorrts or {}).values())
        monkeypatch.setattr(install, "versions", lambda names: {n: there[n] for n in names if n in there})
        monkeypatch.setattr(doctor.platform, "machine", lambda: processor)
        by_module = {module: packages.get(name) for name, module in doctor.PACKAGES}
        by_module |= {name: packages.get(name, "1.0") for name in BUILDING}
        monkeypatch.setattr(doctor, "version", by_module.get)
        monkeypatch.setattr(doctor, "import_failures", lambda modules: failed or {})
        frontend = Frontend("tensorrt_rtx", "torch-tensorrt-rtx", "2.14.0") if by_module["torch_tensorrt"] else None
        monkeypatch.setattr(doctor.route_options, "installed_frontend", lambda: frontend)
        return doctor.examine()

    return examine


def can(found):
    return {a.what: a.possible for a in found.abilities}


def why(found, what):
    return next(a.reason for a in found.abilities if what in a.what)


@pytest.mark.parametrize("name", BUILDING)
def test_what_a_build_needs_beside_pytorch_is_missed(machine, name):
    """Before hours of it are done: the report and the counting come last."""
    found = machine(packages={**ALL, name: None})
    assert why(found, "capture, calibrate and export") == f"{name} is not installed"
    assert not can(found)["capture, calibrate and export a model"]
    assert "pip install 'trtpipe[build]'" in found.commands


def test_no_gpu_and_tensorrt_rtx(machine):
    found = machine(tensorrts={"tensorrt_rtx": RTX})
    assert can(found) == {
        "capture, calibrate and export a model": True,
        "calibrate and check on images": True,
        "run a graph (target onnxruntime)": True,
        "build an engine (target tensorrt_rtx)": True,
        "run an engine (target tensorrt_rtx)": False,
        "build and run an engine (target tensorrt)": False,
        "build by route torch_tensorrt": False,
        "build by route torch2trt": False,
    }
    assert why(found, "run an engine (target tensorrt_rtx)") == NO_GPU.problem
    said = f"Torch-TensorRT loads each engine on a GPU, and {NO_GPU.problem}"
    assert why(found, "torch_tensorrt") == said
    assert found.gpus == ()
    assert any("executed: graph" in note for note in found.notes)
    assert found.commands == ()  # no package puts a GPU into the machine


def test_nothing_is_installed(machine):
    found = machine(packages={})
    assert not any(can(found).values())
    assert found.commands == (
        "pip install 'trtpipe[build]'",
        "pip install onnxruntime",
        "pip install 'trtpipe[rtx]'",
    )


def test_a_gpu_that_no_release_on_pypi_is_for(machine):
    volta = Driver("12.4", (Gpu(0, "Tesla V100", "7.0", 1 << 34),))
    found = machine(volta, packages=ALL | {"torch_tensorrt": None})
    assert why(found, "torch_tensorrt") == (
        "it must have TensorRT 11, which Torch-TensorRT 2.14 is built for, and Tesla V100 one before 10.5"
    )
    pascal = Driver("12.4", (Gpu(0, "GTX 1080", "6.1", 1 << 33),))
    found = machine(pascal, packages=ALL)
    assert why(found, "target tensorrt)") == (
        "tensorrt is not installed, and PyPI has none before 10.0, which GTX 1080 (compute capability 6.1) must have"
    )
    old = Driver("11.0", (Gpu(0, "NVIDIA A100", "8.0", 1 << 33),))
    assert why(machine(old, packages=ALL), "target tensorrt)").startswith("tensorrt is not installed")


def test_a_gpu_with_everything(machine):
    found = machine(L4, {"tensorrt": TEN, "tensorrt_rtx": RTX})
    assert all(can(found).values())
    assert found.commands == ()
    (gpu,) = found.gpus
    assert (gpu.name, gpu.compute_capability, gpu.precisions) == (
        "NVIDIA L4", "8.9", ("fp32", "fp16", "bf16", "int8", "int4", "fp8"),
    )  # fmt: skip
    assert (
        "gpu          NVIDIA L4, compute capability 8.9, 24.0 GiB, FP32, FP16, BF16, INT8, INT4, FP8"
        in doctor.lines(found)
    )


def test_a_gpu_without_tensorrt(machine):
    """torch2trt is for other releases than the one whose command is given: not both."""
    torch2trt = "pip install git+https://github.com/NVIDIA-AI-IOT/torch2trt"
    found = machine(L4, packages=ALL | {"torch2trt": None})
    assert "pip install 'tensorrt-cu12>=11.0,<12'" in found.commands
    assert torch2trt not in found.commands
    assert why(found, "torch2trt") == (
        "it must have TensorRT 8.6 to 10, whose weak typing and calibrators it uses, and none is installed"
    )
    assert torch2trt in machine(L4, {"tensorrt": TEN}, packages=ALL | {"torch2trt": None}).commands


def test_a_gpu_that_tensorrt_rtx_does_not_name_is_told_that_first(machine):
    """Another build of it, for the driver's CUDA, would run there no sooner."""
    for name, capability in (("NVIDIA H100", "9.0"), ("Orin", "8.7")):
        gpu = Driver("12.2", (Gpu(0, name, capability, 64 << 30),))
        found = machine(gpu, {"tensorrt_rtx": RTX}, built_for=13)
        assert "does not name compute capability" in why(found, "run an engine (target tensorrt_rtx)")
        assert not any("tensorrt-rtx" in command for command in found.commands)


def test_torch2trt_and_tensorrt_11(machine):
    found = machine(L4, {"tensorrt": ELEVEN})
    assert not can(found)["build by route torch2trt"]
    assert why(found, "torch2trt") == (
        "torch2trt must have TensorRT 8.6 to 10, whose weak typing and calibrators it uses (got 11.4.0.106)"
    )


@pytest.mark.parametrize(
    ("frontend", "release", "said"),
    [
        (("tensorrt", "torch-tensorrt", "2.14.0"), "10.3.0",
         "torch_tensorrt must have TensorRT 11, which Torch-TensorRT 2.14 is built for (got 10.3.0)"),
        (("tensorrt", "torch-tensorrt", "2.13.0"), "11.4.0.106",
         "torch_tensorrt must be version 2.14, whose arguments are known (got 2.13.0)"),
        (("tensorrt", "torch-tensorrt", "2.14.0"), "11.4.0.106", ""),
    ],
)  # fmt: skip
def test_a_route_is_judged_as_the_jobs_that_take_it_are(machine, monkeypatch, frontend, release, said):
    machine(L4, {"tensorrt": ("tensorrt-cu12", release)})
    monkeypatch.setattr(doctor.route_options, "installed_frontend", lambda: Frontend(*frontend))
    found = doctor.examine()
    assert can(found)["build by route torch_tensorrt"] is not bool(said)
    if said:
        assert why(found, "route torch_tensorrt") == said


def test_nobody_gives_device_memory(machine):
    """An installed torch may have no CUDA, a cuda-python may be for a later driver: both are tried."""
    why_not = device_memory.no_memory()
    assert "none of torch with CUDA, cuda-python and pycuda works" in why_not  # there is no GPU here
    for target, release in (("tensorrt", TEN), ("tensorrt_rtx", RTX)):
        reason, _, command = why_not.partition(" Install one: ")
        found = machine(L4, {target: release}, memory=why_not)
        what = next(w for w in can(found) if "run an engine" in w and target + ")" in w)
        assert (can(found)[what], why(found, what)) == (False, reason)
        assert command.removesuffix(".") in found.commands
        if target == "tensorrt_rtx":  # which builds for other GPUs all the same
            assert can(found)["build an engine (target tensorrt_rtx)"]
            assert why(found, "build an engine (target tensorrt_rtx)").endswith(
                "; but for this NVIDIA L4 only where device memory works: the check executes the engine"
            )


def test_a_full_gpu_is_not_told_to_install_anything(machine):
    found = machine(L4, {"tensorrt": TEN}, memory="cudaStreamCreate: cudaErrorMemoryAllocation")
    what = "build and run an engine (target tensorrt)"
    assert (can(found)[what], why(found, what)) == (False, "cudaStreamCreate: cudaErrorMemoryAllocation")
    assert not any("cuda-python" in command or "edge" in command for command in found.commands)


ENDINGS = [
    ("import os; os._exit(3)", 60, "ended its process (exit code 3)"),
    ("import os; os.abort()", 60, "ended its process (SIGABRT)"),
    ("import time; time.sleep(600)", 4, "did not end within 4 s"),
]


@pytest.mark.parametrize(("ends", "limit_s", "how"), ENDINGS)
def test_a_package_that_ends_the_process_which_asks_it_is_named(machine, monkeypatch, tmp_path, ends, limit_s, how):
    for package, module in (("pycuda", "autoinit"), ("cuda", "cudart")):
        folder = tmp_path / package / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / f"{module}.py").write_text(ends)
    (tmp_path / "pycuda" / "torch.py").write_text("class cuda: is_available = bool\n")
    with monkeypatch.context() as patched:
        patched.setattr(device_memory, "IMPORT_S", limit_s)
        patched.syspath_prepend(tmp_path / "pycuda")
        pycuda = device_memory.no_memory()
        patched.syspath_prepend(tmp_path / "cuda")
        cuda = device_memory.no_memory()
    assert pycuda == (
        f"device memory: asking pycuda for it {how}. Remove it, or have cuda-python, which is asked first. "
        "Install one: pip install 'trtpipe[edge]'."
    )
    assert cuda == (
        f"device memory: asking cuda-python for it {how}. Remove it, or install a release that fits the NVIDIA driver."
    )
    found = machine(L4, {"tensorrt": TEN}, memory=pycuda)
    assert why(found, "target tensorrt)") == pycuda.partition(" Install one: ")[0]
    assert "pip install 'trtpipe[edge]'" in found.commands


def test_a_package_that_cannot_be_imported_gives_no_device_memory(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13')")
    monkeypatch.syspath_prepend(tmp_path)
    assert device_memory.no_memory().startswith(
        f"{tmp_path}/torch.py hides the package torch (ImportError: libcudart.so.13). Rename it, "
    )


def test_asking_for_device_memory_may_end_before_any_package_is_asked(monkeypatch):
    monkeypatch.setattr(device_memory, "_TRY_MEMORY", "import os; os._exit(5)")
    assert device_memory.no_memory() == (
        "device memory: asking for it ended its process (exit code 5). See what `python -m trtpipe --version` says."
    )


def test_each_of_several_gpus_is_judged(machine):
    """An old card beside a new one: what one of them can is possible, and what the other cannot is said."""
    both = Driver("12.6", (Gpu(0, "P100", "6.0", 16 << 30), Gpu(1, "NVIDIA L4", "8.9", 24 << 30)))
    found = machine(both, {"tensorrt": TEN, "tensorrt_rtx": RTX})
    assert can(found)["run an engine (target tensorrt_rtx)"]
    assert can(found)["build and run an engine (target tensorrt)"]
    said = why(found, "run an engine (target tensorrt_rtx)")
    assert said.startswith("TensorRT-RTX 1.7.1.116 on NVIDIA L4; P100: a portable engine is for ")
    assert why(found, "target tensorrt)") == (
        "TensorRT 10.3.0 on NVIDIA L4; P100 (compute capability 6.0) must have TensorRT before 10.0 (got 10.3.0)"
    )
    twins = Driver("12.6", tuple(Gpu(k, "NVIDIA L4", "8.9", 24 << 30) for k in range(2)))
    assert why(machine(twins, {"tensorrt": TEN}), "target tensorrt)") == "TensorRT 10.3.0 on NVIDIA L4"


V100, B200 = (Driver("13.0", (Gpu(0, n, c, 16 << 30),)) for n, c in (("V100", "7.0"), ("B200", "10.0")))
CU12, CU11 = (Driver(c, (Gpu(0, "NVIDIA L4", "8.9", 24 << 30),)) for c in ("12.2", "11.8"))
P100 = Driver("12.6", (Gpu(0, "P100", "6.0", 16 << 30),))


@pytest.mark.parametrize(
    ("gpu", "release", "wrong", "command"),
    [
        (V100, ("tensorrt", "10.16.1.11"), "must have TensorRT before 10.5 (got 10.16.1.11)",
         "pip uninstall -y tensorrt && pip install 'tensorrt-cu12>=10.3,<10.5'"),
        (B200, ("tensorrt", "10.3.0"), "must have TensorRT 10.8 or later (got 10.3.0)",
         "pip uninstall -y tensorrt && pip install 'tensorrt-cu13>=11.0,<12'"),
        (P100, ("tensorrt", "10.3.0"), "must have TensorRT before 10.0 (got 10.3.0)", ""),
        (CU12, ("tensorrt-cu13", "11.4.0.106"), "must have a driver of CUDA 13 (got CUDA 12.2)",
         "pip uninstall -y tensorrt-cu13 && pip install 'tensorrt-cu12>=11.0,<12'"),
        (CU11, ("tensorrt-cu13", "11.4.0.106"), "must have a driver of CUDA 13 (got CUDA 11.8)",
         "pip uninstall -y tensorrt-cu13 && pip install 'tensorrt-cu11>=10.3,<10.14'"),
    ],
)  # fmt: skip
def test_a_tensorrt_that_the_gpu_or_its_driver_cannot_use(machine, gpu, release, wrong, command):
    """What is advised for it is then accepted."""
    what = "build and run an engine (target tensorrt)"
    found = machine(gpu, {"tensorrt": release}, built_for=13 if "cu13" in release[0] else 12)
    assert not can(found)[what]
    assert why(found, what).endswith(wrong)
    assert [c for c in found.commands if "tensorrt-cu" in c] == ([command] if command else [])
    if command:
        name, lowest = re.findall(r"'(tensorrt-cu(?:\d+))>=([\d.]+)", command)[0]
        assert can(machine(gpu, {"tensorrt": (name, lowest)}, built_for=int(name[-2:])))[what]


def test_a_jetsons_tensorrt_is_jetpacks(machine):
    found = machine(ORIN, jetson=True, processor="aarch64")
    assert "apt install python3-libnvinfer" in found.commands


@pytest.mark.parametrize(("gpu", "capability", "whether"), [("H100", "9.0", "does not run there (on an H200"),
                                                            ("B200", "10.0", "runs there is not known")])  # fmt: skip
def test_an_rtx_engine_on_a_gpu_that_rtx_does_not_name_is_not_promised(machine, gpu, capability, whether):
    found = machine(Driver("13.0", (Gpu(0, f"NVIDIA {gpu}", capability, 80 << 30),)), {"tensorrt_rtx": RTX})
    what = "run an engine (target tensorrt_rtx)"
    assert not can(found)[what]
    assert why(found, what).startswith(f"NVIDIA {gpu}: TensorRT-RTX does not name compute capability {capability}; ")
    assert whether in why(found, what)


def test_a_jetson(machine):
    bindings = ("tensorrt-bindings", "8.6.1")
    found = machine(ORIN, {"tensorrt": bindings}, jetson=True, processor="aarch64")
    assert found.system == "linux aarch64"
    assert "JetPack 6 has TensorRT 8.6 or 10.3" in found.notes
    assert any("they must come from the system" in note for note in found.notes)
    assert why(found, "build an engine (target tensorrt_rtx)").startswith("there is no TensorRT-RTX for Jetsons")
    assert doctor.lines(found)[0].endswith("linux aarch64, a Jetson")


@pytest.mark.parametrize(("cuda", "command"), [("13.0", "pip install 'tensorrt-rtx-cu13>=1.7.1,<1.8'"), ("12.6", "")])
def test_tensorrt_rtx_on_an_arm_machine(machine, monkeypatch, cuda, command):
    """A DGX Spark: there are wheels for aarch64, for CUDA 13 alone."""
    monkeypatch.setattr(install.platform, "machine", lambda: "aarch64")
    spark = Driver(cuda, (Gpu(0, "NVIDIA GB10", "12.1", 119 << 30),))
    found = machine(spark, {"tensorrt": TEN}, processor="aarch64", jetson=False)
    assert why(found, "build an engine (target tensorrt_rtx)") == "tensorrt_rtx is not installed"
    assert [c for c in found.commands if "tensorrt-rtx-cu" in c] == ([command] if command else [])


def test_the_command_for_packages_that_do_not_fit_is_the_one_that_helps(machine):
    found = machine(packages=ALL | {"torch": "2.8.0", "torchao": "0.18.0"})
    assert why(found, "capture") == "torchao must be one for torch 2.8.0 (got 0.18.0)."
    assert "pip install 'torchao==0.17.*'" in found.commands
    assert "pip install 'trtpipe[build]'" not in found.commands


def test_a_torchao_that_nothing_needs_may_be_broken(machine):
    """pip takes the newest torchao beside PyTorch 2.6, which has PT2E itself."""
    failed = {"torchao": "AttributeError: no register_constant"}
    assert why(machine(packages=ALL | {"torch": "2.6.0"}, failed=failed), "capture") == "torch 2.6.0"
    found = machine(failed=failed)
    assert why(found, "capture").startswith("torchao is installed and cannot be imported (AttributeError: no register")


def test_the_command_of_validate_is_the_one_of_doctor(machine):
    """Which TensorRT a GPU and its driver take is asked in one place."""
    for gpu in (L4, V100, CU12, CU11, B200, NO_GPU):
        found = machine(gpu)
        commands = [a.install for a in found.abilities if a.what == "build and run an engine (target tensorrt)"]
        said = install.not_here("tensorrt")
        if gpu is NO_GPU:
            assert said.startswith("tensorrt is not installed. Run: pip install 'trtpipe[trt11]'")
        else:
            assert said == f"tensorrt is not installed. Run: {commands[0]}"
    machine(P100)
    assert install.not_here("tensorrt") == (
        "tensorrt is not installed. PyPI has none for this GPU and its driver: choose another build.target."
    )


def test_releases_too_old(machine):
    found = machine(L4, {"tensorrt": ("tensorrt", "8.5.2"), "tensorrt_rtx": ("tensorrt-rtx", "1.6.1.1")})
    assert why(found, "target tensorrt)") == "tensorrt must be TensorRT 8.6 or later (got 8.5.2)"
    assert "pip uninstall -y tensorrt-rtx && pip install 'tensorrt-rtx-cu12>=1.7.1,<1.8'" in found.commands


def test_the_command_in_text_and_json(machine, capsys):
    machine(tensorrts={"tensorrt_rtx": RTX})
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "driver       libcuda.so.1, the NVIDIA driver's library, is not on this machine\n" in text
    assert "yes  build an engine (target tensorrt_rtx): TensorRT-RTX 1.7.1.116, for any GPU: 7.5, 8.0, 8.6, " in text
    assert "no   run an engine (target tensorrt_rtx): libcuda.so.1" in text
    assert cli.main(["doctor", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["tensorrts"] == {"tensorrt_rtx": "tensorrt-rtx 1.7.1.116"}
    assert [a["possible"] for a in value["abilities"]] == [True, True, True, True, False, False, False, False]
    assert value["commands"] == []


@pytest.mark.parametrize(
    ("module", "lost"),
    [
        ("torchvision", {"calibrate and check on images"}),
        ("onnxruntime", {"capture, calibrate and export a model", "run a graph (target onnxruntime)"}),
        ("tensorrt_rtx", {"build an engine (target tensorrt_rtx)"}),
    ],
)
def test_what_cannot_be_imported_cannot_be_done(machine, module, lost):
    whole, broken = (
        machine(tensorrts={"tensorrt_rtx": RTX}),
        machine(tensorrts={"tensorrt_rtx": RTX}, failed={module: "E: x"}),
    )
    assert {what for what, possible in can(whole).items() if possible != can(broken)[what]} == lost
    for what in lost:
        assert why(broken, what) == (
            f"{module} is installed and cannot be imported (E: x). It is damaged, or does not fit the packages that "
            "it needs."
        )
    assert any(c.startswith("pip install --force-reinstall ") for c in broken.commands)


def test_imports_are_tried_in_another_process(tmp_path, monkeypatch):
    for name, text in (
        ("whole", "print('noise')"),
        ("lacking", "raise OSError('libfoo.so.9: cannot open shared object file')"),
        ("ending", "import os; os._exit(5)"),
        ("after", "import whole, lacking"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.import_failures(("whole", "lacking", "ending", "whole", "after")) == {
        "lacking": "OSError: libfoo.so.9: cannot open shared object file",
        "ending": "its import ended the process (exit code 5)",
        "after": "OSError: libfoo.so.9: cannot open shared object file",
    }
    assert "whole" not in sys.modules


def test_what_another_puts_in_a_modules_place_is_not_that_module(tmp_path, monkeypatch):
    """As Torch-TensorRT-RTX does, whether or not it can be imported itself: a TensorRT lacked its libraries."""
    alias = (
        "import sys, types, whole, importlib.machinery as m; sys.modules['fine'] = whole\n"
        "sys.modules['broken'] = b = types.ModuleType('broken'); b.__spec__ = m.ModuleSpec('broken', None)"
    )
    for name, text in (
        ("whole", ""),
        ("aliasing", alias),
        ("failing", f"{alias}\nraise ImportError('lacks a driver')"),
        ("broken", "raise ImportError('libnvinfer.so.8: cannot open shared object file')"),
        ("fine", ""),
        ("ending", "import sys; sys.exit(0)"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    lost = {"broken": "ImportError: libnvinfer.so.8: cannot open shared object file"}
    ended = {"ending": "its import ended the process (exit code 0)"}
    assert doctor.import_failures(("aliasing", "whole", "broken", "fine", "ending", "whole")) == lost | ended
    assert doctor.import_failures(("failing", "fine", "broken")) == lost | {"failing": "ImportError: lacks a driver"}


def test_a_folder_of_the_name_of_a_package_is_not_that_package(tmp_path, monkeypatch):
    """An empty __init__.py can be imported, and no command can use it."""
    modules = (*packages.CAPTURE, *packages.IMAGES, *packages.BUILDING, "tensorrt", "tensorrt_rtx", "numpy")
    for module in modules:
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
    here = tuple(module for module in modules if packages.version(module))
    assert len(here) > 10
    assert doctor.import_failures(here) == {}  # the packages themselves have what is asked of them
    monkeypatch.syspath_prepend(tmp_path)
    failed = doctor.import_failures(modules)
    assert failed.keys() == set(modules)
    assert failed["onnxruntime"] == "it has no InferenceSession"
    assert all(said.startswith("it has no ") for said in failed.values())


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from trtpipe.runtime import doctor; doctor.examine()\n"
        "print(sorted({'torch', 'onnx', 'tensorrt', 'tensorrt_rtx', 'cuda', 'onnxruntime'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("runs", [True, False])
def test_doctor_says_of_hopper_what_was_seen_there(machine, monkeypatch, runs):
    monkeypatch.setattr(platforms, "RTX_SEEN", {"9.0": (runs, "its words")})
    found = machine(H100, {"tensorrt_rtx": RTX})
    assert can(found)["run an engine (target tensorrt_rtx)"] is runs
    verb = "runs" if runs else "does not run"
    said = f"TensorRT-RTX does not name compute capability 9.0; a portable engine {verb} there (its words)"
    where = "TensorRT-RTX 1.7.1.116 on NVIDIA H100" if runs else "NVIDIA H100"
    assert why(found, "run an engine (target tensorrt_rtx)") == f"{where}: {said}"


def test_torch_tensorrt_needs_the_tensorrt_it_is_made_for(machine):
    found = machine(L4, {"tensorrt": TEN})
    assert why(found, "torch_tensorrt") == ("torch-tensorrt-rtx 2.14.0 needs tensorrt_rtx, which is not installed")
    assert "pip install 'tensorrt-rtx-cu12>=1.7.1,<1.8'" in found.commands
    assert can(machine(L4, {"tensorrt_rtx": RTX}))["build by route torch_tensorrt"]


def test_a_driver_that_is_older_than_the_cuda_of_what_is_installed(machine):
    found = machine(L4, {"tensorrt_rtx": RTX, "tensorrt": TEN}, built_for=13)
    for what in ("run an engine (target tensorrt_rtx)", "build and run an engine (target tensorrt)"):
        assert not can(found)[what]
        assert why(found, what) == (
            f"what is installed of {what.split()[-1].strip(')')} must have a driver of CUDA 13 (got CUDA 12.6)"
        )
    assert can(found)["build an engine (target tensorrt_rtx)"]
    assert "pip uninstall -y tensorrt-rtx && pip install 'tensorrt-rtx-cu12>=1.7.1,<1.8'" in found.commands


def test_a_package_that_does_not_fit_the_driver_is_not_installed_again(machine):
    old = "RuntimeError: The NVIDIA driver on your system is too old (found version 12060)"
    found = machine(L4, {"tensorrt_rtx": RTX}, failed={"torch_tensorrt": old})
    assert why(found, "route torch_tensorrt") == (
        f"torch_tensorrt is installed and cannot be imported ({old}). It does not fit the NVIDIA driver: update that, "
        "or install a release for its CUDA."
    )
    assert not any("--force-reinstall" in command for command in found.commands)


def test_torch_tensorrt_is_not_advised_where_it_would_replace_tensorrt(machine):
    """Its wheel requires TensorRT 11.1 for CUDA 13."""
    found = machine(L4, {"tensorrt": TEN}, ALL | {"torch_tensorrt": None})
    assert why(found, "route torch_tensorrt") == (
        "torch_tensorrt must have TensorRT 11, which Torch-TensorRT 2.14 is built for (got 10.3.0)"
    )
    assert not any("torch-tensorrt" in command for command in found.commands)


def test_torch_tensorrt_is_not_advised_beside_a_torch_that_it_would_replace(machine):
    packages = {k: v for k, v in ALL.items() if k != "torch-tensorrt"} | {"torch": "2.8.0", "torchao": "0.13.0"}
    packages["torch_tensorrt"] = None
    found = machine(L4, {"tensorrt": TEN}, packages)
    assert why(found, "route torch_tensorrt") == (
        "Torch-TensorRT 2.14, whose arguments are known, needs torch 2.14 (got 2.8.0)"
    )
    assert not any("torch-tensorrt" in command for command in found.commands)

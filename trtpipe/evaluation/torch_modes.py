"""The ways to run a model with PyTorch: eager, autocast, TorchScript, torch.compile, INT8 on the CPU."""

from __future__ import annotations

import copy
import gc
import io
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from calib.types import Array
from trtpipe.errors import MissingError
from trtpipe.evaluation.bench import REFERENCE, Mode, Ready
from trtpipe.model.computing import tf32_allowed
from trtpipe.model.nodes import calls, op_name
from trtpipe.model.torch_versions import graph_module, needs_torchao
from trtpipe.values import LoadedModel

TensorTuple = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class WithWeights:
    """A compiled, traced or recorded network, and the module whose weights it computes with."""

    function: Callable[..., TensorTuple]
    weights: torch.nn.Module

    def __call__(self, *inputs: torch.Tensor) -> TensorTuple:
        """The outputs of `inputs`, tensors [B, ...] in the binding dtypes."""
        return self.function(*inputs)


#: A network as it is called in one mode.
Call: TypeAlias = torch.nn.Module | WithWeights
#: The context that a mode runs in.
Within = Callable[[], AbstractContextManager[object]]
#: Batches of calibration data that PyTorch's own INT8 observes.
CALIBRATION_BATCHES = 8


class InHalf(torch.nn.Module):
    """The network in a half precision behind float32 bindings: inputs are cast to it, outputs back to float32."""

    def __init__(self, bound: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.bound = bound
        self.network = copy.deepcopy(bound.network).to(dtype)
        self.dtype = dtype

    def forward(self, *inputs: torch.Tensor) -> TensorTuple:
        """The outputs of `inputs` in their binding dtypes."""
        ready = [x.to(self.dtype) if x.is_floating_point() else x for x in self.bound.prepared(inputs)]
        outputs: TensorTuple = self.bound.outputs(self.network(*ready))
        return outputs


@dataclass(frozen=True)
class ModeSetup:
    """What every mode of PyTorch is made from: the model, the batch that is timed, and the device, "cpu" or "cuda"."""

    loaded: LoadedModel
    batch: Mapping[str, Array]
    device: str
    calibration: Callable[[], Iterator[Mapping[str, Array]]]

    def moved(self, module: torch.nn.Module) -> torch.nn.Module:
        """A copy of a module on the device, in eval mode."""
        return copy.deepcopy(module).to(self.device).eval()


def torch_modes(setup: ModeSetup, script: torch.nn.Module | None, *, whole: bool = True) -> tuple[Mode, ...]:
    """Every mode, the reference (eager FP32) first. `script` is the baseline's TorchScript module, or None; `whole`,
    whether it holds the bindings (`baseline.HOLDING_BINDINGS`).

    On a GPU times are CUDA events around the launches, inputs already on the device, and FP32 is FP32: TF32, which
    PyTorch allows in convolutions by itself, is off (`gpu_modes` has it as a mode of its own).
    """
    module, device = setup.loaded.module, setup.device
    half, bfloat = torch.float16, torch.bfloat16

    def mode(name: str, make: Callable[[], Call], cannot: str = "", within: Within = nullcontext) -> Mode:
        return Mode(name, device, lambda: ready(setup, make, within), cannot)

    def autocast(dtype: torch.dtype) -> Within:
        return lambda: torch.autocast(device, dtype=dtype)

    in_half = not_in_half(setup)
    compiler = "" if device == "cuda" or shutil.which("g++") or shutil.which("clang++") else _NO_COMPILER
    cpu_only = "" if device == "cpu" else "PyTorch's INT8 kernels are for CPUs"
    if not needs_torchao(torch.__version__):
        cpu_only = "PyTorch's own INT8 is measured with torchao, which PyTorch before 2.7 does without"
    return (
        mode(REFERENCE, lambda: setup.moved(module)),
        mode("eager FP16", lambda: setup.moved(InHalf(module, half)), in_half),
        mode("eager BF16", lambda: setup.moved(InHalf(module, bfloat)), in_half),
        mode("autocast FP16", lambda: setup.moved(module), within=autocast(half)),
        mode("autocast BF16", lambda: setup.moved(module), within=autocast(bfloat)),
        mode("TorchScript FP32", lambda: _as_script(script, setup, whole), _NO_SCRIPT if script is None else ""),
        mode("TorchScript FP16", lambda: _traced(setup.moved(InHalf(module, half)), setup), in_half),
        mode("TorchScript BF16", lambda: _traced(setup.moved(InHalf(module, bfloat)), setup), in_half),
        mode("torch.compile FP32", lambda: compiled(setup.moved(module)), compiler),
        mode("torch.compile BF16", lambda: compiled(setup.moved(InHalf(module, bfloat))), in_half or compiler),
        mode(f"PyTorch INT8 ({_int8_backend()})", lambda: _pt2e(setup), cpu_only),
    )


_NO_SCRIPT = "there is no TorchScript of a .pt2 program or an ONNX file"
_OF_FILE = "an ONNX file has its casts in FP32; the graph of a job with fp16_mode or bf16_mode is in half"
_NO_COMPILER = "Inductor needs a C++ compiler; none of g++ and clang++ is on PATH"


def not_in_half(setup: ModeSetup) -> str:
    """Why the model cannot be run in FP16 or BF16; empty where it can."""
    return _OF_FILE if setup.loaded.kind == "onnx" else ""


def tensors(setup: ModeSetup, arrays: Mapping[str, Array]) -> TensorTuple:
    """The inputs in order, on the device, in the arrays' own dtypes and shapes [B, ...]; copies, to which a model may
    write."""
    given = (np.array(arrays[s.name], order="C") for s in setup.loaded.inputs)
    return tuple(torch.from_numpy(array).to(setup.device) for array in given)


def ready(
    setup: ModeSetup,
    make: Callable[[], Call],
    within: Within = nullcontext,
    *,
    tf32: bool = False,
    notes: tuple[str, ...] = (),
) -> Ready:
    """What `make` makes, ready to run inside `within`; `tf32` is whether a GPU may compute float32 in TF32."""
    before = _allocated(setup.device)
    call = make()
    inputs = tensors(setup, setup.batch)
    names = [s.name for s in setup.loaded.outputs]
    size = _bytes(call.weights if isinstance(call, WithWeights) else call)

    @contextmanager
    def around() -> Iterator[None]:
        with torch.inference_mode(), tf32_allowed(setup.device, tf32), within():
            yield

    def run() -> Any:
        with around():
            return call(*inputs)

    def ms() -> float:
        """Milliseconds between two events on the stream around one run."""
        cuda: Any = torch.cuda
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        with around():
            begin.record()
            call(*inputs)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def infer(arrays: Mapping[str, Array]) -> dict[str, Array]:
        with around():
            outputs = call(*tensors(setup, arrays))
        wide = [o.float() if o.is_floating_point() else o for o in outputs]
        return {n: o.cpu().numpy() for n, o in zip(names, wide, strict=True)}

    if setup.device == "cpu":
        return Ready(run, infer, size, notes)
    return Ready(
        run,
        infer,
        size,
        notes=("CUDA events; inputs on the GPU before, outputs left there", *notes),
        ms=ms,
        peak_memory_bytes=lambda: max(0, torch.cuda.max_memory_allocated() - before),
    )


def _allocated(device: str) -> int:
    """Bytes of the GPU that torch holds before a mode is made; its peak is counted from here on."""
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _bytes(module: torch.nn.Module) -> int:
    """Parameters and buffers, each storage once."""
    # The wrapper of a half network holds the FP32 one too.
    return sum(_sizes(module.network if isinstance(module, InHalf) else module).values())


def _sizes(module: torch.nn.Module) -> dict[int, int]:
    """Bytes by storage; oneDNN's packed weights have none and are counted as objects."""
    held = (*module.parameters(), *module.buffers())
    return {id(t) if t.is_mkldnn else t.data_ptr(): t.numel() * t.element_size() for t in held}


def _as_script(script: torch.nn.Module | None, setup: ModeSetup, whole: bool) -> Call:
    """The baseline's module; one that is the network alone gets its bindings back."""
    buffer, jit = io.BytesIO(), _jit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jit.save(script, buffer)
        buffer.seek(0)
        fresh = jit.load(buffer, map_location=setup.device).eval()
    bound: Any = setup.loaded.module

    def bound_to(*inputs: torch.Tensor) -> TensorTuple:
        outputs: TensorTuple = bound.outputs(fresh(*bound.prepared(inputs)))
        return outputs

    return WithWeights(fresh if whole else bound_to, fresh)


def _jit() -> Any:
    """torch.jit, whose functions have no types."""
    return torch.jit


def _traced(module: torch.nn.Module, setup: ModeSetup) -> Call:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        traced: Any = _jit().trace(module, tensors(setup, setup.batch), check_trace=False)

    return WithWeights(traced, module)


def compiled(module: torch.nn.Module, *, freezing: bool = False, cuda_graphs: bool = False) -> Call:
    """Compiled for the one batch size that is used; `freezing` folds weights, which Inductor's INT8 kernels need."""
    options: dict[str, Any] = {"freezing": freezing, "triton.cudagraphs": cuda_graphs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = torch.compile(module, dynamic=False, options=options)

    def quietly(*inputs: torch.Tensor) -> TensorTuple:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs: TensorTuple = made(*inputs)
            return outputs

    return WithWeights(quietly, module)


def _int8_backend() -> str:
    return "Arm, PT2E" if platform.machine() in ("aarch64", "arm64") else "x86, PT2E"


def _pt2e(setup: ModeSetup) -> Call:
    """PyTorch's own INT8: its quantizer for this processor, its observers, and oneDNN's kernels."""
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86
    from torchao.quantization.pt2e.quantizer import arm_inductor_quantizer as arm
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    from trtpipe.model.pt2e import convert_pt2e, prepare_pt2e

    if torch.backends.quantized.engine not in ("x86", "fbgemm", "onednn", "qnnpack"):
        raise MissingError("bench: PyTorch has no quantized kernels for this processor.")
    on_arm = _int8_backend().startswith("Arm")
    if on_arm:
        quantizer: Any = arm.ArmInductorQuantizer().set_global(arm.get_default_arm_inductor_quantization_config())
    else:
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    example = tensors(setup, setup.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = graph_module(torch.export.export(setup.loaded.module, example, strict=False))
        _name_relus(graph)
        observed = prepare_pt2e(graph, quantizer)
        with torch.inference_mode():
            for _, arrays in zip(range(CALIBRATION_BATCHES), setup.calibration(), strict=False):
                observed(*tensors(setup, arrays))
        converted: Any = convert_pt2e(observed)
        if not any("quantize" in op_name(n) for n in calls(converted.graph)):
            raise MissingError("bench: PyTorch's quantizer found no operation of this network that it knows.")
        if on_arm:
            return compiled(converted, freezing=True)
        with torch.no_grad():  # torch 2.14's Inductor refuses oneDNN's packed weights; torchao's own lowering does not
            lowered: torch.nn.Module = lower_pt2e_quantized_to_x86(converted, example)
    return lowered


def _name_relus(graph: Any) -> None:
    """Give each ReLU a name of its own: torchao 0.18's quantizer cannot take one ReLU module that is called twice."""
    for node in graph.graph.nodes:
        if node.target in (torch.ops.aten.relu.default, torch.ops.aten.relu_.default):
            node.meta["source_fn_stack"] = [(node.name, torch.nn.functional.relu)]

"""Route torch2trt: the eager module through torch2trt's converters, for TensorRT 8.6 to 10.

torch2trt hooks Python functions while a module runs once. In FP32 and FP16 that is the user's module, and FP16 is
TensorRT's choice under a flag. INT8 is the quantized program that every route shares, spelt out as calls of such
functions (`replay`), with layers for its Q/DQ (`qdq`); or, with build.quantization implicit, the user's
module and TensorRT's own calibration, read from `calib`'s batches (`calibrator`).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import inspect
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from calib.algorithms import ALGO_TYPES, AUTO_BASE
from calib.types import JsonObject
from trtpipe.errors import BuildError, InputError, MissingError, first_line
from trtpipe.job.globs import matching
from trtpipe.job.job import Job
from trtpipe.progress import Progress
from trtpipe.routes import options, support
from trtpipe.routes.frontends import graph_of, require_gpu
from trtpipe.routes.torch2trt.calibrator import INSTALL, Unread, own_calibrator
from trtpipe.trt import driver, flavour, plan
from trtpipe.trt.options import asked
from trtpipe.values import Engine, LoadedModel, Quantized, TensorSpec
from trtpipe.version_numbers import parse_version

if TYPE_CHECKING:
    import torch
    from torch2trt import TRTModule

    from trtpipe.trt.implicit import NativeCalibration
    from trtpipe.trt.types import INetworkDefinition, ITensor

#: Where the module runs while it is converted.
DEVICE = "cuda"
#: What torch2trt prints of an operation that it has no converter for. The result of such an operation becomes a
#: constant: the value it had for the example input.
WARNING = re.compile(r"Encountered known unsupported method (\S+)")
#: Operations without a converter whose result is no tensor of the graph.
HARMLESS = re.compile(
    r"\.(dim|size|numel|stride|is_[a-z_]+|element_size|get_device|data_ptr|requires_grad_|_[a-z_]+_)$"
)
IMPLICIT_GRAPH_NOTE = (
    "route torch2trt: the bundle's graph is the ONNX of the captured program; the engine was converted by torch2trt "
    "from the eager module, so a check of the graph does not cover that conversion"
)
EXPLICIT_GRAPH_NOTE = (
    "route torch2trt: the bundle's graph is the ONNX of the quantized program; torch2trt converted the same program, "
    "call by call, so a check of the graph does not cover that conversion"
)
EXPLICIT_NOTE = (
    "route torch2trt: the quantized program was converted with its own Q/DQ and the scales of the calibration table; "
    "this has not been executed on TensorRT 8.6 to 10 by trtpipe's tests"
)
FP16_NOTE = "route torch2trt: TensorRT chose by itself which layers run in FP16"
INT8_NOTE = (
    "route torch2trt: TensorRT calibrated by itself and chose the precision of each layer; the bundle's precision by "
    "layer does not show INT8"
)


def compile_engine(
    job: Job,
    loaded: LoadedModel,
    quantized: Quantized,
    progress: Progress,
    calibration: NativeCalibration | None = None,
) -> Engine:
    """The engine that torch2trt makes of the model itself.

    Args:
        job: says what is asked of torch2trt.
        loaded: the module that is converted, unless INT8 is explicit; a copy is, since torch2trt leaves attributes on
            what it touches.
        quantized: the program that is converted where INT8 is explicit, and the bundle's graph.
        progress: not used: torch2trt reports no progress and cannot be cancelled.
        calibration: what TensorRT calibrates by, with implicit INT8.

    Raises:
        MissingError: without a GPU or torch2trt.
        InputError: an option that torch2trt cannot honour, or a TensorRT that it cannot use.
        BuildError: an operation has no converter, or TensorRT refuses the network.
    """
    require_gpu("torch2trt")
    tensorrt = flavour.load("tensorrt")
    if refused := options.job_refusals(job, tensorrt.version):
        raise InputError("\n".join(message for _, message in refused))
    frontend = load()
    arguments = keywords(job, loaded, frontend, tensorrt)
    _known(frontend.torch2trt, {**arguments, "device_types": {}})
    explicit = job.places_int8
    held: list[object] = []
    module = quantized_module(quantized, frontend, tensorrt, job, held) if explicit else on_device(loaded)
    devices = device_types(loaded.module if explicit else module, job.build.device_types, tensorrt.module)
    arguments["device_types"] = {} if explicit else devices  # explicit INT8 runs on the GPU alone
    calibrating, notes = None, [f"torch2trt on {tensorrt.title}"]
    with contextlib.ExitStack() as stack:
        if job.precision.int8_mode and not explicit:
            assert calibration is not None
            own = replace(calibration, made_from=made_from(loaded))
            calibrating = stack.enter_context(own_calibrator(tensorrt, own))
        made = converted(frontend, module, example(loaded), arguments)
    held.clear()
    if calibrating is not None:
        notes += calibrating.finish()
    check_network(made.network, loaded)
    if made.engine is None:
        raise BuildError(
            "build: TensorRT gave no engine for the network of torch2trt. Set build.log_level to verbose to "
            "see why, or use build.route onnx."
        )
    data = bytes(made.engine.serialize())
    header = plan.own_header(data, tensorrt.name, tensorrt.version)
    graph, graph_notes = graph_of(quantized, EXPLICIT_GRAPH_NOTE if explicit else IMPLICIT_GRAPH_NOTE)
    notes += graph_notes
    notes += [FP16_NOTE] * job.precision.fp16_mode + [
        EXPLICIT_NOTE if explicit else INT8_NOTE
    ] * job.precision.int8_mode
    return Engine(
        data=data,
        target="tensorrt",
        version=tensorrt.version,
        compute_capabilities=header.compute_capabilities,
        inputs=loaded.inputs,
        outputs=quantized.outputs,
        graph=graph,
        options=job.build.model_dump(mode="json", include=set(asked(job.build)) - {"calibration_cache"}),
        notes=tuple(notes),
    )


def load() -> ModuleType:
    """The torch2trt package.

    Raises:
        MissingError: it is not installed, or cannot be imported.
    """
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module("torch2trt")
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "torch2trt"
        reason = "it is not installed" if absent else f"{type(error).__name__}: {error}"
        raise MissingError(
            f"build.route: torch2trt cannot be imported here ({reason}). Run: {INSTALL}; or use build.route onnx."
        ) from error


def on_device(loaded: LoadedModel) -> torch.nn.Module:
    """A copy of the module on the GPU, in FP16 where the bindings are.

    torch2trt gives a binding the dtype that the tensor has, and it has no converter for casts.
    """
    module = _clean_copy(loaded.module).eval().to(DEVICE)
    half = all(s.dtype == "float16" for s in (*loaded.inputs, *loaded.outputs))
    return _halved(module) if half else module


def example(loaded: LoadedModel) -> list[torch.Tensor]:
    """Zeros on the GPU in the dtypes and opt shapes of the bindings, which nothing else holds: torch2trt leaves its
    own tensors on them."""
    import torch

    return [torch.zeros(s.at("opt"), dtype=getattr(torch, s.dtype), device=DEVICE) for s in loaded.inputs]


def quantized_module(
    quantized: Quantized, frontend: ModuleType, tensorrt: flavour.Flavour, job: Job, held: list[object]
) -> torch.nn.Module:
    """The quantized program on the GPU as a module that torch2trt can convert; `held` gets what TensorRT reads later.

    Raises:
        BuildError: this torch2trt takes no converters, or has none for an operation of the program.
    """
    if missing := [n for n in ("tensorrt_converter", "CONVERTERS") if not hasattr(frontend, n)]:
        raise BuildError(
            f"build.route: this torch2trt takes no converters for Q/DQ (no {' and no '.join(missing)}). "
            f"Update it: {INSTALL}; or use build.quantization implicit."
        )
    from trtpipe.routes.torch2trt.qdq import register
    from trtpipe.routes.torch2trt.replay import replay

    flags = ("FP16", "INT8") if job.precision.fp16_mode else ("INT8",)
    register(frontend, tensorrt.module, flags, held)
    able = {name for name, c in frontend.CONVERTERS.items() if isinstance(name, str) and c["is_real"]}
    return replay(quantized, able).to(DEVICE)


def _clean_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A deep copy whose tensors hold no `_trt`: with one, torch2trt would take a tensor of an earlier network."""
    stale = {id(t._trt): None for t in (*module.parameters(), *module.buffers()) if hasattr(t, "_trt")}
    made = copy.deepcopy(module, dict(stale))
    for tensor in (*made.parameters(), *made.buffers()):
        if hasattr(tensor, "_trt"):
            del tensor._trt
    return made


def _halved(bound: Any) -> torch.nn.Module:
    """The network without the casts of its wrapper: FP16 in, FP16 out."""
    import torch

    class Halved(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = bound.network.half()

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = self.network(*inputs)
            if isinstance(result, dict):
                return tuple(result[name] for name in bound.output_names)
            return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    return Halved().eval()


def made_from(loaded: LoadedModel) -> dict[str, str]:
    """What TensorRT's ranges depend on besides the data, by name, for the calibration cache."""
    try:
        release = importlib.metadata.version("torch2trt")
    except importlib.metadata.PackageNotFoundError:
        release = "unknown"
    return {"weights": loaded.weights_digest, "model": loaded.source, "torch2trt": release}


def keywords(job: Job, loaded: LoadedModel, frontend: ModuleType, tensorrt: flavour.Flavour) -> JsonObject:
    """Every argument of torch2trt that a job decides, each one given: several of its defaults are not what they seem.

    `gpu_fallback` is on by default, the workspace is 32 MiB on TensorRT 8, and the calibration algorithm depends on a
    comparison of version strings. With explicit INT8 the modes are off: under `int8_mode` torch2trt calibrates, under
    both its converters give some layers a precision, and the flags are set where Q/DQ are written.
    """
    explicit = job.places_int8
    implicit = job.precision.int8_mode and not explicit
    made: JsonObject = {
        "input_names": [s.name for s in loaded.inputs],
        "output_names": [s.name for s in loaded.outputs],
        "fp16_mode": job.precision.fp16_mode and not explicit,
        "int8_mode": implicit,
        "keep_network": True,
        "use_onnx": job.build.use_onnx,
        "min_shapes": [s.at("min") for s in loaded.inputs],
        "opt_shapes": [s.at("opt") for s in loaded.inputs],
        "max_shapes": [s.at("max") for s in loaded.inputs],
    }
    if parse_version(tensorrt.version) < (10,):
        made["max_workspace_size"] = driver.probe().devices[0].memory_bytes
    made |= support.keywords("torch2trt", job.build, frontend, tensorrt)
    if implicit:
        assert job.calibration is not None
        algorithm = AUTO_BASE if job.calibration.algorithm == "auto" else job.calibration.algorithm
        made["int8_calib_algorithm"] = getattr(tensorrt.module.CalibrationAlgoType, ALGO_TYPES[algorithm])
        made["int8_calib_dataset"] = Unread()
    return made


def device_types(module: torch.nn.Module, globs: Mapping[str, str], trt: ModuleType) -> dict[torch.nn.Module, object]:
    """The device of each submodule that a glob over module paths fits; the last glob decides.

    Raises:
        InputError: a glob fits no module.
    """
    from trtpipe.model.bindings import INNER

    paths = {name.removeprefix(INNER).removeprefix("."): m for name, m in module.named_modules()}
    made: dict[torch.nn.Module, object] = {}
    for glob, device in globs.items():
        fitting = [p for p in paths if p and matching((glob,), p)]
        if not fitting:
            raise InputError(
                f"build.device_types.{glob}: must fit the path of a module (got none of {len(paths) - 1}). "
                "Correct the glob."
            )
        made |= {paths[p]: getattr(trt.DeviceType, device.upper()) for p in fitting}
    return made


def _known(function: Callable[..., object], arguments: JsonObject) -> None:
    """Refuse arguments that `function` does not have by name and would ignore in its **kwargs."""
    have = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    if missing := sorted(set(arguments) - set(have)):
        raise InputError(
            f"build.route: torch2trt lacks arguments that this job needs ({', '.join(missing)}). Update it: {INSTALL}"
        )


def converted(
    frontend: ModuleType, module: torch.nn.Module, inputs: list[torch.Tensor], arguments: JsonObject
) -> TRTModule:
    """The module that torch2trt returns, with the engine and the network; `inputs` are as `example` makes them, in the
    dtypes and shapes of the bindings.

    Raises:
        BuildError: it raised, or let an operation without a converter become a constant.
    """
    import torch

    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed), torch.no_grad():
            warnings.simplefilter("ignore")
            made = frontend.torch2trt(module, inputs, **arguments)
    except Exception as error:
        lost = _lost(printed.getvalue())
        got = f"no converter for {', '.join(lost)}; then " if lost else ""
        text = first_line(error)[:400]
        raise BuildError(
            f"build: torch2trt cannot convert the module ({got}{type(error).__name__}: {text}). Use build.route onnx."
        ) from error
    if lost := _lost(printed.getvalue()):
        raise BuildError(
            f"build: torch2trt has no converter for {', '.join(lost)}, whose "
            "results it would freeze at their values for the example input. Use build.route onnx."
        )
    return made


def _lost(printed: str) -> list[str]:
    return [n for n in dict.fromkeys(WARNING.findall(printed)) if not HARMLESS.search(n)]


def check_network(network: INetworkDefinition, loaded: LoadedModel) -> None:
    """Hold the network against the bindings: torch2trt drops inputs it does not know and ignores parser errors, and
    some of its converters get the shape of what they do not cover wrong.

    Raises:
        BuildError: a binding is missing, has another dtype or shape, or an input is read by no layer.
    """
    read = set()
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        read |= {t.name for t in (layer.get_input(k) for k in range(layer.num_inputs)) if t is not None}
    for kind, specs, count, get in (
        ("inputs", loaded.inputs, network.num_inputs, network.get_input),
        ("outputs", loaded.outputs, network.num_outputs, network.get_output),
    ):
        have = {t.name: t for t in map(get, range(count))}
        for spec in specs:
            _check_binding(kind, spec, have.get(spec.name), spec.name in read or kind == "outputs")


def _dims(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _check_binding(kind: str, spec: TensorSpec, tensor: ITensor | None, used: bool) -> None:
    if tensor is None:
        raise BuildError(f"{kind}.{spec.name}: is not in the network that torch2trt made. Use build.route onnx.")
    wanted = {"float32": "FLOAT", "float16": "HALF"}[spec.dtype]
    if (got := str(tensor.dtype).rpartition(".")[2].upper()) != wanted:
        raise BuildError(f"{kind}.{spec.name}: must be {spec.dtype} in the network (got {got}). Use build.route onnx.")
    shape = tuple(tensor.shape)
    if len(shape) != len(spec.shape) or any(
        isinstance(w, int) and g not in (w, -1) for w, g in zip(spec.shape, shape, strict=True)
    ):
        raise BuildError(
            f"{kind}.{spec.name}: must have the shape {_dims(spec.shape)} in the network that torch2trt made (got "
            f"{_dims(shape)}). One of its converters does not cover an operation: use build.route onnx."
        )
    if not used:
        raise BuildError(
            f"{kind}.{spec.name}: is read by no layer of the network that torch2trt made. "
            "An operation on it has no converter: use build.route onnx."
        )

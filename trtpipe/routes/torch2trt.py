"""Route torch2trt: the eager module through torch2trt's converters, for TensorRT 8.6 to 10.

torch2trt hooks Python functions while the module runs once, so it takes the module and not the quantized program: FP16
is TensorRT's choice under a flag, INT8 is TensorRT's own calibration, read from `calib`'s batches.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import importlib
import inspect
import io
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from trtpipe.errors import BuildError, InputError, MissingError
from trtpipe.job import Job
from trtpipe.progress import Progress
from trtpipe.routes import options
from trtpipe.routes.native import native_calibration
from trtpipe.routes.torch_tensorrt import checked_header, graph_of, require_gpu
from trtpipe.trt import driver, flavour
from trtpipe.values import Engine, LoadedModel, Quantized, TensorSpec

if TYPE_CHECKING:
    import torch

INSTALL = options.TORCH2TRT
#: Where the module runs while it is converted.
DEVICE = "cuda"
#: What torch2trt prints of an operation that it has no converter for. The result of such an operation becomes a
#: constant: the value it had for the example input.
WARNING = re.compile(r"Encountered known unsupported method (\S+)")
#: Operations without a converter whose result is no tensor of the graph.
HARMLESS = re.compile(
    r"\.(dim|size|numel|stride|is_[a-z_]+|element_size|get_device|data_ptr|requires_grad_|_[a-z_]+_)$"
)
GRAPH_NOTE = (
    "route torch2trt: the bundle's graph is the ONNX of the captured program; the engine was converted by torch2trt "
    "from the eager module, so a check of the graph does not cover that conversion"
)
FP16_NOTE = "route torch2trt: TensorRT chose by itself which layers run in FP16"
INT8_NOTE = (
    "route torch2trt: TensorRT calibrated by itself and chose the precision of each layer; the bundle's precision by "
    "layer does not show INT8"
)


def compile_engine(job: Job, loaded: LoadedModel, quantized: Quantized, progress: Progress) -> Engine:
    """The engine that torch2trt makes of the model itself.

    Args:
        job: INT8 needs `build.quantization: implicit` and samples to calibrate on.
        loaded: the module that is converted; a copy is, since torch2trt leaves attributes on what it touches.
        quantized: used for the bundle's graph alone.
        progress: is told of each stage; torch2trt can be neither followed nor cancelled.

    Raises:
        MissingError: without a GPU or torch2trt.
        InputError: an option that torch2trt cannot honour, or a TensorRT that it cannot use.
        BuildError: an operation has no converter, or TensorRT refuses the network.
    """
    require_gpu("torch2trt")
    found = flavour.load("tensorrt")
    if refused := options.job_refusals(job, found.version):
        raise InputError("\n".join(message for _, message in refused))
    frontend = load()
    module, inputs = on_device(loaded)
    arguments = keywords(job, loaded, found, module)
    _known(frontend.torch2trt, arguments)
    calibration, notes = None, [f"torch2trt on {found.title}"]
    with contextlib.ExitStack() as stack:
        if job.precision.int8_mode:
            calibration = stack.enter_context(own_calibrator(found, job))
        made = converted(frontend, module, inputs, arguments)
    if calibration is not None:
        notes += calibration.finish()
    check_network(made.network, loaded)
    if made.engine is None:
        raise BuildError(
            "build: TensorRT must compile the network of torch2trt (got no engine). Set build.log_level to verbose to "
            "see why, or use build.route onnx."
        )
    data = bytes(made.engine.serialize())
    header = checked_header(found, data)
    graph, said = graph_of(quantized, GRAPH_NOTE)
    notes += said
    notes += [FP16_NOTE] * job.precision.fp16_mode + [INT8_NOTE] * job.precision.int8_mode
    return Engine(
        data=data,
        target="tensorrt",
        version=found.version,
        compute_capabilities=header.compute_capabilities,
        inputs=loaded.inputs,
        outputs=loaded.outputs,
        graph=graph,
        options=job.build.model_dump(mode="json", include=set(options.asked(job.build))),
        notes=tuple(notes),
    )


def load() -> Any:
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
            f"build.route: torch2trt must be importable here (got: {reason}). Run: {INSTALL}; or use build.route onnx."
        ) from error


def on_device(loaded: LoadedModel) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A copy of the module on the GPU, in FP16 where the bindings are, and inputs that nothing else holds.

    torch2trt gives a binding the dtype that the tensor has, and it has no converter for casts.
    """
    import torch

    module = _clean_copy(loaded.module).eval().to(DEVICE)
    half = all(s.dtype == "float16" for s in (*loaded.inputs, *loaded.outputs))
    inputs = [torch.zeros(s.at("opt"), dtype=getattr(torch, s.dtype), device=DEVICE) for s in loaded.inputs]
    return (_halved(module) if half else module), inputs


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

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = bound.network.half()

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            answer = self.network(*inputs)
            if isinstance(answer, dict):
                return tuple(answer[name] for name in bound.output_names)
            return (answer,) if isinstance(answer, torch.Tensor) else tuple(answer)

    return Half().eval()


def keywords(job: Job, loaded: LoadedModel, found: flavour.Flavour, module: torch.nn.Module) -> dict[str, Any]:
    """Every argument of torch2trt that a job decides, each one given: several of its defaults are not what they seem.

    `gpu_fallback` is on by default, the workspace is 32 MiB on TensorRT 8, and the calibration algorithm depends on a
    comparison of version strings.
    """
    trt, build = found.module, job.build
    dla = build.default_device_type == "dla"
    made: dict[str, Any] = {
        "input_names": [s.name for s in loaded.inputs],
        "output_names": [s.name for s in loaded.outputs],
        "log_level": getattr(trt.Logger, build.log_level.upper()),
        "fp16_mode": job.precision.fp16_mode,
        "int8_mode": job.precision.int8_mode,
        "keep_network": True,
        "use_onnx": build.use_onnx,
        "default_device_type": trt.DeviceType.DLA if dla else trt.DeviceType.GPU,
        "dla_core": build.dla_core or 0,
        "gpu_fallback": build.gpu_fallback,
        "device_types": device_types(module, build.device_types, trt),
        "min_shapes": [s.at("min") for s in loaded.inputs],
        "opt_shapes": [s.at("opt") for s in loaded.inputs],
        "max_shapes": [s.at("max") for s in loaded.inputs],
    }
    if build.avg_timing_iterations is not None:
        made["avg_timing_iterations"] = build.avg_timing_iterations
    if flavour.parse_version(found.version) < (10,):
        made["max_workspace_size"] = build.workspace or driver.probe().devices[0].memory_bytes
    if job.precision.int8_mode:
        names = {"entropy_2": "ENTROPY_CALIBRATION_2", "entropy": "ENTROPY_CALIBRATION", "minmax": "MINMAX_CALIBRATION",
                 "percentile": "LEGACY_CALIBRATION"}  # fmt: skip
        assert job.calibration is not None
        made["int8_calib_algorithm"] = getattr(trt.CalibrationAlgoType, names[job.calibration.algorithm])
        made["int8_calib_dataset"] = Unread()
    return made


class Unread:
    """Stands where torch2trt wants a dataset; our calibrator has the real one."""

    def __len__(self) -> int:
        raise BuildError("calibration: torch2trt must read the samples through trtpipe's calibrator (got another one).")

    def __getitem__(self, index: int) -> Any:
        raise BuildError("calibration: torch2trt must read the samples through trtpipe's calibrator (got another one).")


def device_types(module: torch.nn.Module, globs: Mapping[str, str], trt: Any) -> dict[torch.nn.Module, Any]:
    """The device of each submodule that a glob over module paths fits; the last glob decides.

    Raises:
        InputError: a glob fits no module.
    """
    paths = {name.removeprefix("network").removeprefix("."): m for name, m in module.named_modules()}
    made: dict[torch.nn.Module, Any] = {}
    for glob, device in globs.items():
        fitting = [p for p in paths if p and fnmatch.fnmatchcase(p, glob)]
        if not fitting:
            raise InputError(
                f"build.device_types.{glob}: must fit the path of a module (got none of {len(paths) - 1}). "
                "Correct the glob."
            )
        made |= {paths[p]: getattr(trt.DeviceType, device.upper()) for p in fitting}
    return made


def _known(function: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what `function` would swallow in its **kwargs."""
    have = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    if missing := sorted(set(arguments) - set(have)):
        raise InputError(
            f"build.route: torch2trt must have the arguments that this job needs (got none called "
            f"{', '.join(missing)}). Update it: {INSTALL}"
        )


class Calibrating:
    """The calibrator that torch2trt was given in place of its own."""

    def __init__(self, found: flavour.Flavour, job: Job) -> None:
        self._found, self._job = found, job
        self.made: list[Any] = []

    def make(self, dataset: Any, algorithm: Any = None, **_: Any) -> Any:
        """What torch2trt calls `DatasetCalibrator(dataset, algorithm=...)` for."""
        del dataset, algorithm  # the job's, which its own class would read one sample at a time
        from trtpipe.trt.implicit import make_calibrator

        self.made.append(make_calibrator(self._found, native_calibration(self._job)))
        return self.made[-1]

    def finish(self) -> list[str]:
        """Notes, after the build.

        Raises:
            CalibError: what went wrong in a callback, or a calibration that was cut short.
            BuildError: torch2trt made no calibrator through us.
        """
        if not self.made:
            raise BuildError(
                "calibration: torch2trt must calibrate with trtpipe's calibrator (got its own or none). "
                f"Update it: {INSTALL}"
            )
        for calibrator in self.made:
            calibrator.finish()
        return [n for c in self.made for n in c.notes]


@contextlib.contextmanager
def own_calibrator(found: flavour.Flavour, job: Job) -> Iterator[Calibrating]:
    """torch2trt's `DatasetCalibrator` replaced: it reads one sample at a time, keeps none alive and loses exceptions.

    The attribute `torch2trt.torch2trt` is the function; its module is found in sys.modules.
    """
    module = sys.modules.get("torch2trt.torch2trt")
    if not hasattr(module, "DatasetCalibrator"):
        raise BuildError(
            "calibration: torch2trt must have a DatasetCalibrator to replace (got none). "
            f"Update it: {INSTALL}; or use build.route onnx."
        )
    calibrating = Calibrating(found, job)
    with patch.object(module, "DatasetCalibrator", calibrating.make):
        yield calibrating


def converted(frontend: Any, module: torch.nn.Module, inputs: list[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
    """What torch2trt returns.

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
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:400]
        raise BuildError(
            f"build: torch2trt must convert the module (got {got}{type(error).__name__}: {text}). Use build.route onnx."
        ) from error
    if lost := _lost(printed.getvalue()):
        raise BuildError(
            f"build: torch2trt must have a converter for every operation (got none for {', '.join(lost)}, whose "
            "results it would freeze at their values for the example input). Use build.route onnx."
        )
    return made


def _lost(printed: str) -> list[str]:
    return [n for n in dict.fromkeys(WARNING.findall(printed)) if not HARMLESS.search(n)]


def check_network(network: Any, loaded: LoadedModel) -> None:
    """Hold the network against the bindings: torch2trt drops inputs it does not know and ignores parser errors.

    Raises:
        BuildError: a binding is missing, has another dtype, or an input is read by no layer.
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


def _check_binding(kind: str, spec: TensorSpec, tensor: Any, used: bool) -> None:
    if tensor is None:
        raise BuildError(
            f"{kind}.{spec.name}: must be in the network that torch2trt made (got none of that name). "
            "Use build.route onnx."
        )
    wanted = {"float32": "FLOAT", "float16": "HALF"}[spec.dtype]
    if (got := str(tensor.dtype).rpartition(".")[2].upper()) != wanted:
        raise BuildError(f"{kind}.{spec.name}: must be {spec.dtype} in the network (got {got}). Use build.route onnx.")
    if not used:
        raise BuildError(
            f"{kind}.{spec.name}: must be read by the network that torch2trt made (got no layer that reads it). "
            "An operation on it has no converter: use build.route onnx."
        )

"""Route torch_tensorrt: the quantized program through Torch-TensorRT's dynamo frontend, for both TensorRTs."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from calib.types import JsonObject
from trtpipe.bundle import hybrid
from trtpipe.errors import BuildError, InputError, MissingError
from trtpipe.job.job import Job
from trtpipe.job.sections import Build
from trtpipe.model.export import export
from trtpipe.model.torch_versions import graph_module
from trtpipe.packages import TORCH_TENSORRT, install_command
from trtpipe.progress import Progress
from trtpipe.routes import options, support
from trtpipe.routes.frontends import graph_of, require_gpu
from trtpipe.routes.torch_tensorrt.convert import NoConverter, converted, trt_inputs
from trtpipe.routes.torch_tensorrt.logs import LOGGERS, ROUTE_NOISE, hushed, logged
from trtpipe.routes.torch_tensorrt.partition import MIN_BLOCK_SIZE, fallback_lines, hybrid_of, plural
from trtpipe.trt import flavour, formats, plan
from trtpipe.trt.monitor import Watch
from trtpipe.trt.options import asked
from trtpipe.values import Engine, Fallback, LoadedModel, Quantized, TensorSpec, computed_in

if TYPE_CHECKING:
    import torch

    from trtpipe.trt.implicit import NativeCalibration

__all__ = ["LOGGERS", "compile_engine"]

GRAPH_NOTE = (
    "route torch_tensorrt: the bundle's graph is the ONNX of the same quantized program; the engine was compiled by "
    "Torch-TensorRT from the program itself, so a check of the graph does not cover that conversion"
)
SETTINGS_NOTE = (
    "route torch_tensorrt: neither progress nor cancelling while it built; the engine keeps layer names and no more"
)
NOT_NEEDED_NOTE = (
    "build.allow_torch_fallback: not needed, every operation was converted: the engine is whole and needs no PyTorch"
)
#: What Torch-TensorRT calls the bindings of a whole engine.
_BINDINGS = ("arg_input_binding_names", "output_binding_names")


def compile_engine(
    job: Job,
    loaded: LoadedModel,
    quantized: Quantized,
    progress: Progress,
    calibration: NativeCalibration | None = None,
) -> Engine:
    """The whole program as one engine of the job's target, or no engine; with build.allow_torch_fallback, where some
    operations have no converter, a hybrid module.

    Torch-TensorRT reads its finished engine back, so it needs a GPU even for TensorRT-RTX.

    Args:
        job: its `build.target` has to be the TensorRT that the installed Torch-TensorRT is made for.
        loaded: not used: the program holds the model.
        quantized: the program, with Q/DQ and casts placed.
        progress: receives the messages of Torch-TensorRT and TensorRT.
        calibration: not used: INT8 is explicit on this route.

    Raises:
        MissingError: without a GPU, or without the Torch-TensorRT of this target.
        InputError: an option that this route cannot honour.
        BuildError: an operation has no converter, or TensorRT refuses the network.
    """
    build = job.build
    require_gpu("torch_tensorrt")
    frontend, tensorrt = load(build.target)
    if refused := options.refusals(build, "torch_tensorrt", frontend=frontend.__version__):
        raise InputError("\n".join(message for _, message in refused))
    watch = Watch(progress, build.log_level)
    with tempfile.TemporaryDirectory() as scratch, logged(watch, build.log_level):
        keywords = settings(frontend, tensorrt, build, Path(scratch))
        fallback: tuple[Fallback, ...] = ()
        how: tuple[str, ...] = ()
        try:
            data = _whole(frontend, quantized, build, keywords, watch)
            header = plan.own_header(data, tensorrt.name, tensorrt.version)
            if build.allow_torch_fallback:
                how = (NOT_NEEDED_NOTE,)
        except NoConverter:
            if not build.allow_torch_fallback:
                raise
            data, header, fallback, how = _hybrid(frontend, tensorrt, quantized, build, keywords, watch)
    graph, notes = graph_of(quantized, GRAPH_NOTE)
    least = formats.floor(computed_in(quantized.layers), tensorrt.name, header.compute_capabilities)
    how += formats.portable_notes(least)
    warnings = tuple(f"Torch-TensorRT: {t}" for t in watch.warnings if not ROUTE_NOISE.search(t))
    return Engine(
        data=data,
        target=tensorrt.name,
        version=tensorrt.version,
        compute_capabilities=header.compute_capabilities,
        minimum_compute_capability=least,
        inputs=quantized.inputs,
        outputs=quantized.outputs,
        graph=graph,
        options=build.model_dump(mode="json", include=set(asked(build))),
        notes=(f"Torch-TensorRT {frontend.__version__}", *how, *notes, SETTINGS_NOTE, *warnings),
        fallback=fallback,
    )


def _whole(frontend: ModuleType, quantized: Quantized, build: Build, keywords: JsonObject, watch: Watch) -> bytes:
    """The program as one engine, with the job's names for its bindings."""
    data = converted(
        frontend,
        frontend.dynamo.convert_exported_program_to_serialized_trt_engine,
        checked_program(quantized),
        {
            **keywords,
            "arg_inputs": trt_inputs(frontend, quantized.inputs, build),
            "arg_input_binding_names": tuple(s.name for s in quantized.inputs),
            "output_binding_names": tuple(s.name for s in quantized.outputs),
        },
        watch,
    )
    if not data:
        raise BuildError(f"build: Torch-TensorRT {frontend.__version__} gave no engine. Use build.route onnx.")
    return bytes(data)


def _hybrid(
    frontend: ModuleType,
    tensorrt: flavour.Flavour,
    quantized: Quantized,
    build: Build,
    keywords: JsonObject,
    watch: Watch,
) -> tuple[bytes, plan.PlanHeader, tuple[Fallback, ...], tuple[str, ...]]:
    """The program as engines with PyTorch between them: the file, its engines' header, what stayed, and the notes."""
    arguments = {
        **keywords,
        "require_full_compilation": False,
        "min_block_size": MIN_BLOCK_SIZE,
        # An output whose shape only its values decide would need an allocator at run time.
        "fallback_data_dependent_ops": True,
    }
    _known(frontend.dynamo.compile, arguments, frontend.__version__, ())
    arguments["arg_inputs"] = trt_inputs(frontend, quantized.inputs, build, parts=True)
    program = checked_program(quantized, parts=True)
    compiled = converted(frontend, frontend.dynamo.compile, program, arguments, watch)
    module, fallback = hybrid_of(compiled, quantized.inputs, quantized.outputs)
    headers = [plan.own_header(data, tensorrt.name, tensorrt.version) for data in module.engines]
    how = (
        f"build.allow_torch_fallback: hybrid, {plural(len(module.engines), 'engine')}, and "
        f"{plural(len(fallback), 'operation')} in PyTorch; at least {MIN_BLOCK_SIZE} convertible operations that "
        "stand together (min_block_size) make an engine",
        *fallback_lines(fallback),
    )
    return hybrid.to_bytes(module), headers[0], fallback, how


def load(target: str) -> tuple[ModuleType, flavour.Flavour]:
    """Torch-TensorRT, imported quietly, and the TensorRT below it.

    Its import prints, sends Python's warnings to logging, and puts its own flavour under the name `tensorrt`.

    Raises:
        MissingError: it is not installed, is made for another TensorRT, or PyTorch has no CUDA.
    """
    import torch

    if torch.version.cuda is None:
        raise MissingError(
            f"build.route: torch_tensorrt needs the CUDA build of PyTorch ({torch.__version__}). "
            "Install torch from the default index, or use build.route onnx."
        )
    names = options.FRONTENDS
    installed = options.installed_frontend()
    if installed is None or installed.target != target:
        got = "none" if installed is None else f"{installed.distribution} {installed.version}"
        raise MissingError(
            f"build.route: torch_tensorrt for target {target} must have {names[target]} (got {got}). "
            f"Run: {install_command(names[target])}"
        )
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), hushed():
            warnings.simplefilter("ignore")
            shown = warnings.showwarning
            import torch_tensorrt

            if warnings.showwarning is not shown:
                logging.captureWarnings(False)
    except Exception as error:
        raise MissingError(
            f"build.route: {installed.distribution} cannot be imported here ({error}). "
            f"Run: {install_command(names[target])}"
        ) from error
    return torch_tensorrt, flavour.load(target)


def settings(frontend: ModuleType, tensorrt: flavour.Flavour, build: Build, scratch: Path) -> JsonObject:
    """The keyword arguments of the conversion, each one in its signature: the conversion swallows any other.

    Args:
        frontend: the imported torch_tensorrt.
        tensorrt: the TensorRT below it.
        build: the job's.
        scratch: a folder for the timing cache of a job that names none; Torch-TensorRT would keep it in a file that all
            users of the machine share.

    Raises:
        InputError: this version of Torch-TensorRT does not have an argument that the job needs.
    """
    made: JsonObject = {"require_full_compilation": True}
    if tensorrt.has("timing_cache"):
        made["timing_cache_path"] = str(scratch / "timing")
    made |= support.keywords("torch_tensorrt", build, frontend, tensorrt)
    _known(frontend.dynamo.convert_exported_program_to_serialized_trt_engine, made, frontend.__version__)
    return made


def _known(function: Callable[..., object], made: JsonObject, version: str, also: Collection[str] = _BINDINGS) -> None:
    have = inspect.signature(function).parameters
    wanted = {*made, "arg_inputs", *also}
    if missing := sorted(wanted - set(have)):
        raise InputError(
            f"build.route: torch_tensorrt lacks arguments that this job needs ("
            f"{', '.join(missing)} in version {version}). Use build.route onnx, or Torch-TensorRT {TORCH_TENSORRT}."
        )


def checked_program(quantized: Quantized, *, parts: bool = False) -> torch.export.ExportedProgram:
    """The program with our own Q/DQ, after its shapes and outputs were held against the bindings; one that is to be cut
    into `parts` keeps each weight's DQ beside its reader, and each operation's module where Torch-TensorRT leaves it.

    Torch-TensorRT believes its `Input`s alone: a program exported with a fixed batch would become an engine that claims
    a dynamic one. An output that is returned twice would lose its second binding.

    Raises:
        BuildError: a dimension is not what the binding says, or two outputs are one tensor.
    """
    from trtpipe.routes.own_qdq import rewritten
    from trtpipe.routes.torch_tensorrt.qdq import kept_with_readers, remember_modules

    check_shapes(quantized.program, quantized.inputs)
    _check_outputs(quantized.program, quantized.outputs)
    graph = rewritten(graph_module(quantized.program))
    program = export(kept_with_readers(graph) if parts else graph, quantized.inputs)
    check_shapes(program, quantized.inputs)
    if parts:
        remember_modules(program.graph)
    return program


def check_shapes(program: torch.export.ExportedProgram, inputs: tuple[TensorSpec, ...]) -> None:
    """Hold every dimension of the exported inputs against its binding.

    Raises:
        BuildError: the program fixes a dimension or bounds it closer than its binding does.
    """
    import torch

    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec, name in zip(inputs, program.graph_signature.user_inputs, strict=True):
        shape = nodes[str(name)].meta["val"].shape
        for axis, extent in enumerate(spec.shape):
            low, high = (extent, extent) if isinstance(extent, int) else (spec.dims[extent].min, spec.dims[extent].max)
            got = shape[axis]
            if isinstance(got, torch.SymInt):
                bounds = program.range_constraints.get(got.node.expr)
                fits = bounds is None or (bounds.lower <= low and bounds.upper >= high)
                shown = "any" if bounds is None else f"{bounds.lower} to {bounds.upper}"
            else:
                fits, shown = got == low == high, str(got)
            if not fits:
                want = str(low) if low == high else f"{low} to {high}"
                raise BuildError(
                    f"inputs.{spec.name}: dimension {axis} of the exported program must be {want} (got {shown}). "
                    "The model fixes it: declare it as a number in inputs.*.shape."
                )


def _check_outputs(program: torch.export.ExportedProgram, outputs: tuple[TensorSpec, ...]) -> None:
    names = [str(n) for n in program.graph_signature.user_outputs]
    for index, name in enumerate(names):
        if name in names[:index]:
            first = outputs[names.index(name)].name
            raise BuildError(
                f"outputs.{outputs[index].name}: each output must be a tensor of its own on route torch_tensorrt "
                f"(got the tensor of {first} again). Return a clone, or use build.route onnx."
            )

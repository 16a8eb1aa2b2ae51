"""Route torch_tensorrt: the quantized program through Torch-TensorRT's dynamo frontend, for both TensorRTs."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.errors import BuildError, InputError, MissingError
from trtpipe.job import Build, Job
from trtpipe.progress import Progress
from trtpipe.routes import options
from trtpipe.trt import config, driver, flavour, plan, timing_cache
from trtpipe.trt.monitor import LEVELS, Watch
from trtpipe.values import Engine, LoadedModel, OnnxModel, Quantized, TensorSpec

if TYPE_CHECKING:
    import torch

#: Torch-TensorRT's loggers; the second one, which TensorRT itself writes to, is no child of the first.
LOGGERS = ("torch_tensorrt", "torch_tensorrt [TensorRT Conversion Context]")
#: Said of every model, or of machines and packages that this route does not use.
NOISE = ("modelopt", "is deprecated", "CUDA lazy loading", "is unsupported in TensorRT-RTX", "Multi stream is disabled",
         "has not been calibrated", "Remaining GPU memory", "Using default stream in enqueue")  # fmt: skip
GRAPH_NOTE = (
    "route torch_tensorrt: the bundle's graph is the ONNX of the same quantized program; the engine was compiled by "
    "Torch-TensorRT from the program itself, so a check of the graph does not cover that conversion"
)
SETTINGS_NOTE = (
    "route torch_tensorrt: neither progress nor cancelling while it built; the engine keeps layer names and no more"
)


def compile_engine(job: Job, loaded: LoadedModel, quantized: Quantized, progress: Progress) -> Engine:
    """The whole program as one engine of the job's target, or no engine.

    Torch-TensorRT reads its finished engine back, so it needs a GPU even for TensorRT-RTX.

    Args:
        job: its `build.target` has to be the TensorRT that the installed Torch-TensorRT is made for.
        loaded: not used: the program holds the model.
        quantized: the program, with Q/DQ and casts placed.
        progress: is told what Torch-TensorRT and TensorRT say.

    Raises:
        MissingError: without a GPU, or without the Torch-TensorRT of this target.
        InputError: an option that this route cannot honour.
        BuildError: an operation has no converter, or TensorRT refuses the network.
    """
    build = job.build
    require_gpu("torch_tensorrt")
    frontend, found = load(build.target)
    if refused := options.refusals(build, job.precision, "torch_tensorrt", frontend=frontend.__version__):
        raise InputError("\n".join(message for _, message in refused))
    program = checked_program(quantized)
    watch = Watch(progress, build.log_level)
    with tempfile.TemporaryDirectory() as scratch, logged(watch, build.log_level):
        keywords = settings(frontend, found, build, Path(scratch))
        data = _serialized(frontend, program, quantized, build, keywords, watch)
    header = checked_header(found, data)
    graph, notes = graph_of(quantized, GRAPH_NOTE)
    said = tuple(f"Torch-TensorRT: {t}" for t in watch.warnings if not any(n in t for n in NOISE))
    return Engine(
        data=data,
        target=found.name,
        version=found.version,
        compute_capabilities=header.compute_capabilities,
        inputs=quantized.inputs,
        outputs=quantized.outputs,
        graph=graph,
        options=build.model_dump(mode="json", include=set(options.asked(build))),
        notes=(f"Torch-TensorRT {frontend.__version__}", *notes, SETTINGS_NOTE, *said),
    )


def require_gpu(route: str) -> None:
    """Nothing, where this machine has an NVIDIA GPU.

    Raises:
        MissingError: it has none; the message points to the route that needs none.
    """
    if problem := driver.probe().problem:
        raise MissingError(
            f"build.route: {route} must have an NVIDIA GPU and its driver here (got: {problem}). "
            "Use build.route onnx, which builds TensorRT-RTX engines without one."
        )


def load(target: str) -> tuple[Any, flavour.Flavour]:
    """Torch-TensorRT, imported quietly, and the TensorRT below it.

    Its import prints, sends Python's warnings to logging, and puts its own flavour under the name `tensorrt`.

    Raises:
        MissingError: it is not installed, is made for another TensorRT, or PyTorch has no CUDA.
    """
    import torch

    if torch.version.cuda is None:
        raise MissingError(
            f"build.route: torch_tensorrt must have the CUDA build of PyTorch (got {torch.__version__}). "
            "Install torch from the default index, or use build.route onnx."
        )
    names = options.FRONTENDS
    installed = options.installed_frontend()
    if installed is None or installed.target != target:
        got = "none" if installed is None else f"{installed.distribution} {installed.version}"
        raise MissingError(
            f"build.route: torch_tensorrt for target {target} must have {names[target]} (got {got}). "
            f"Run: {options.INSTALL[target]}"
        )
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), _hushed():
            warnings.simplefilter("ignore")
            shown = warnings.showwarning
            import torch_tensorrt

            if warnings.showwarning is not shown:
                logging.captureWarnings(False)
    except Exception as error:
        raise MissingError(
            f"build.route: {installed.distribution} must be importable here (got: {error}). "
            f"Run: {options.INSTALL[target]}"
        ) from error
    return torch_tensorrt, flavour.load(target)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """No logging of warnings and below."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def settings(frontend: Any, found: flavour.Flavour, build: Build, scratch: Path) -> dict[str, Any]:
    """The keyword arguments of the conversion, each one in its signature: the conversion swallows any other.

    Args:
        frontend: the imported torch_tensorrt.
        found: the TensorRT below it.
        build: the job's.
        scratch: a folder for the timing cache of a job that names none; Torch-TensorRT would keep it in a file that all
            users of the machine share.

    Raises:
        InputError: this version of Torch-TensorRT does not have an argument that the job needs.
    """
    asked = options.asked(build)
    made: dict[str, Any] = {"require_full_compilation": True, "disable_tf32": not build.tf32}
    for field, keyword in options.KEYWORDS.items():
        if field in asked:
            made[keyword] = asked[field]
    if "hardware_compatibility" in asked:
        made["hardware_compatible"] = True
    if build.refit != "none":
        made |= {"immutable_weights": False, "refit_identical_engine_weights": build.refit == "identical"}
        made["strip_engine_weights"] = build.strip_plan
    for pool, keyword in options.POOL_KEYWORDS.items():
        if pool in build.memory_pools:
            made[keyword] = build.memory_pools[pool]
    if build.default_device_type == "dla":
        made["device"] = frontend.Device(dla_core=build.dla_core or 0, allow_gpu_fallback=build.gpu_fallback)
    if found.has("timing_cache"):
        folder, name = scratch, "timing"
        if build.timing_cache is not None:
            here = driver.probe()
            folder, name = Path(build.timing_cache), timing_cache.file_name(found, here, here.devices[0])
        made["timing_cache_path"] = str(folder / name)
    _known(frontend.dynamo.convert_exported_program_to_serialized_trt_engine, made, frontend.__version__)
    return made


def _known(function: Callable[..., Any], made: Mapping[str, Any], version: str) -> None:
    have = inspect.signature(function).parameters
    wanted = {*made, "arg_inputs", "arg_input_binding_names", "output_binding_names"}
    if missing := sorted(wanted - set(have)):
        raise InputError(
            f"build.route: torch_tensorrt must take the arguments that this job needs (got none called "
            f"{', '.join(missing)} in version {version}). Use build.route onnx, or Torch-TensorRT {options.TESTED}."
        )


def checked_program(quantized: Quantized) -> torch.export.ExportedProgram:
    """The program with our own Q/DQ, after its shapes and outputs were held against the bindings.

    Torch-TensorRT believes its `Input`s alone: a program exported with a fixed batch would become an engine that claims
    a dynamic one. An output that is returned twice would lose its second binding.

    Raises:
        BuildError: a dimension is not what the binding says, or two outputs are one tensor.
    """
    from trtpipe.export import export
    from trtpipe.routes.qdq import rewritten

    check_shapes(quantized.program, quantized.inputs)
    _check_outputs(quantized.program, quantized.outputs)
    graph: Any = quantized.program.module(check_guards=False)
    program = export(rewritten(graph), quantized.inputs)
    check_shapes(program, quantized.inputs)
    return program


def check_shapes(program: torch.export.ExportedProgram, inputs: tuple[TensorSpec, ...]) -> None:
    """Hold every dimension of the exported inputs against its binding. See `checked_program`."""
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


def trt_inputs(frontend: Any, inputs: tuple[TensorSpec, ...], build: Build) -> list[Any]:
    """Torch-TensorRT's `Input`s in the binding dtypes, with every optimization profile of the job."""
    import torch

    ranges = config.profile_ranges(inputs, build)
    made = []
    for spec in inputs:
        dtype = getattr(torch, spec.dtype)
        if not spec.dynamic:
            made.append(frontend.Input(shape=spec.at("opt"), dtype=dtype))
            continue
        at = [TensorSpec(spec.name, spec.dtype, spec.shape, dims).at for dims in ranges]
        shapes = [{f"{w}_shape": a(w) for w in ("min", "opt", "max")} for a in at]
        more = shapes[0] if len(shapes) == 1 else {"profiles": shapes}
        made.append(frontend.Input(dtype=dtype, **more))
    return made


def _serialized(
    frontend: Any,
    program: torch.export.ExportedProgram,
    quantized: Quantized,
    build: Build,
    keywords: Mapping[str, Any],
    watch: Watch,
) -> bytes:
    from trtpipe.routes.qdq import register_converters

    register_converters()
    watch.check()
    warned: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            data = frontend.dynamo.convert_exported_program_to_serialized_trt_engine(
                program,
                arg_inputs=trt_inputs(frontend, quantized.inputs, build),
                arg_input_binding_names=tuple(s.name for s in quantized.inputs),
                output_binding_names=tuple(s.name for s in quantized.outputs),
                **keywords,
            )
    except Exception as error:
        watch.check()
        raise BuildError(
            f"build: Torch-TensorRT {frontend.__version__} must convert the program (got "
            f"{_reason(error, warned, program)}). "
            "Use build.route onnx, or rewrite the operation named."
        ) from error
    watch.check()
    if not data:
        raise BuildError(
            f"build: Torch-TensorRT {frontend.__version__} must give an engine (got none). Use build.route onnx."
        )
    return bytes(data)


def _reason(error: BaseException, warned: list[warnings.WarningMessage], program: Any) -> str:
    """Every operation without a converter, with the modules that have it, or the first line of the innermost error."""
    told = "\n".join(str(w.message) for w in warned)  # all of them; the error itself names the first
    found = re.findall(r"^call_function torch\.(?:_?ops\.)?(\S+)$", told, re.MULTILINE)
    found = found or re.findall(
        r"Conversion of function torch\.(?:_?ops\.)?(\S+) not currently supported", _chain(error)
    )
    if names := list(dict.fromkeys(found)):
        return f"no converter for {', '.join(_with_modules(n, program) for n in names)}"
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:400]


def _with_modules(name: str, program: Any) -> str:
    """`name`, followed by the paths of the modules whose operation it is, where the program still has it."""
    from trtpipe.graph import calls, module_path

    paths = {module_path(n) for n in calls(program.graph) if str(n.target) == name}
    shown = ", ".join(sorted(p or "the model itself" for p in paths))
    return f"{name} ({shown})" if shown else name


def _chain(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return "\n".join(texts)


@contextlib.contextmanager
def logged(watch: Watch, level: str) -> Iterator[None]:
    """What Torch-TensorRT and, through it, TensorRT log goes to `watch` and nowhere else."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            level = {"critical": "internal_error", "debug": "verbose"}.get(n := record.levelname.lower(), n)
            # Its errors repeat, with a traceback and the whole graph, what is then raised.
            if record.exc_info is None and level in LEVELS:
                watch.message(level, record.getMessage().splitlines()[0] if record.getMessage() else "")

    handler = Handler()
    before = []
    for name in LOGGERS:
        logger = logging.getLogger(name)
        before.append((logger, logger.level, logger.propagate))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel({"info": logging.INFO, "verbose": logging.DEBUG}.get(level, logging.WARNING))
    try:
        yield
    finally:
        for logger, old, propagate in before:
            logger.removeHandler(handler)
            logger.propagate = propagate
            logger.setLevel(old)


def checked_header(found: flavour.Flavour, data: bytes) -> plan.PlanHeader:
    """The plan's header, which must name the TensorRT of the target."""
    header = plan.read_header(data)
    version = ".".join(str(n) for n in flavour.parse_version(found.version)[:4])
    if (header.flavour, header.version[: len(version)]) != (found.name, version):
        raise BuildError(
            f"engine: the plan's header must say {found.title} (got {flavour.title(header.flavour, header.version)}). "
            "Another TensorRT's library was loaded: check LD_LIBRARY_PATH."
        )
    return header


def graph_of(quantized: Quantized, note: str) -> tuple[OnnxModel | None, tuple[str, ...]]:
    """The ONNX of the same program, to execute where no engine can; and what has to be said of it."""
    from trtpipe.routes.onnx import to_onnx

    try:
        return to_onnx(quantized), (note,)
    except BuildError as error:
        return None, (f"the program has no ONNX form, so only the engine can be checked: {error}",)

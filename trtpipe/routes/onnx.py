"""Route onnx: the quantized graph as a Q/DQ ONNX file."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from trtpipe.errors import BuildError
from trtpipe.job.job import Job
from trtpipe.model import torch_versions
from trtpipe.model.export import example_inputs, export
from trtpipe.model.failures import typed_line
from trtpipe.model.onnx.names import scopes_of
from trtpipe.onnx_format import QDQ
from trtpipe.progress import Progress
from trtpipe.routes import int8_onnx, narrow_onnx, plugin_nodes
from trtpipe.routes.exact_rules import exact_rules
from trtpipe.routes.float_scales import with_float_scales, with_zero_points
from trtpipe.routes.release import EXPORTED_OPSET, lower, needs_lowering, require_parsable
from trtpipe.trt.builder import build_engine
from trtpipe.trt.flavour import installed
from trtpipe.trt.implicit import NativeCalibration
from trtpipe.trt.isolated import Isolated
from trtpipe.values import Engine, LoadedModel, OnnxModel, Quantized, Target, computed_in

if TYPE_CHECKING:
    from onnx import ModelProto
    from onnx_ir import Model, Node
    from torch.onnx import ONNXProgram

#: Bytes of weights of one file: protobuf's 2 GB less what the rest of a graph may take.
MOST_WEIGHTS = 2**31 - 2**25

_ROUNDED = (
    "ONNX Runtime has operators in INT8 beside FP32 alone: beside FP16, what INT8 rounds is computed in FP16. For INT8 "
    "operators leave out precision.fp16_mode"
)


def compile_engine(
    job: Job,
    loaded: LoadedModel,
    quantized: Quantized,
    progress: Progress,
    calibration: NativeCalibration | None = None,
) -> Engine:
    """The engine of the job's target, compiled from the quantized graph as ONNX; for onnxruntime that file itself."""
    return compile_graph(job, onnx_of(job, quantized), progress, calibration)


def onnx_of(job: Job, quantized: Quantized) -> OnnxModel:
    """The quantized graph as ONNX, for the job's target and the TensorRT that is here."""
    return to_onnx(quantized, release(job), plugins=bool(job.build.plugins))


def release(job: Job) -> str | None:
    """The TensorRT that the graph is written for, where its parser matters: the one here, for target tensorrt."""
    tensorrt = installed().get("tensorrt") if job.build.target == "tensorrt" else None
    return None if tensorrt is None else tensorrt[1]


def compile_graph(
    job: Job, model: OnnxModel, progress: Progress, calibration: NativeCalibration | None = None
) -> Engine:
    """The engine of the job's target, compiled from an ONNX file; for onnxruntime that file itself.

    TensorRT itself calibrates by `calibration`, with build.quantization implicit.
    """
    with compiler(job, calibration) as compiling:
        compiling.start(model)
        return compiling.finish(progress)


class Compiler(Protocol):
    """Compiles one ONNX file for the target of a job; where `beside`, from `start` on, in a process of its own."""

    beside: bool

    def start(self, model: OnnxModel) -> None:
        """Compile this file, which is as its target understands it."""

    def look(self, progress: Progress) -> None:
        """Pass on what was reported since `start`, without waiting, and raise what `finish` would."""

    def finish(self, progress: Progress) -> Engine:
        """The engine; for onnxruntime the file itself."""


@contextlib.contextmanager
def compiler(job: Job, calibration: NativeCalibration | None) -> Iterator[Compiler]:
    """What compiles for the job's target. What it loads, it loads now; what it began ends with the context."""
    if job.build.target != "tensorrt_rtx":
        yield _Here(job, calibration)
        return
    with Isolated() as builder:
        yield _Beside(job, builder)


class _Here:
    """The compiler of a target that is compiled for in this process."""

    beside = False

    def __init__(self, job: Job, calibration: NativeCalibration | None) -> None:
        self._job, self._calibration = job, calibration

    def start(self, model: OnnxModel) -> None:
        self._model = lowered_for(model, self._job.build.target)

    def look(self, progress: Progress) -> None:
        """Nothing runs."""

    def finish(self, progress: Progress) -> Engine:
        job, model = self._job, self._model
        if job.build.target == "onnxruntime":
            return graph_engine(model)
        ranges = self._calibration
        if ranges is not None:
            ranges = replace(ranges, made_from={"graph": hashlib.sha256(model.data).hexdigest()})
        return build_engine(model, job.build, progress=progress, precision=job.precision, calibration=ranges)


def graph_engine(model: OnnxModel) -> Engine:
    """The engine for ONNX Runtime: the graph itself, with the release that executes it here.

    Whatever distribution has brought it: the module says its own.
    """
    import onnxruntime

    return Engine(model.data, "onnxruntime", onnxruntime.__version__, (), model.inputs, model.outputs, model)


class _Beside:
    """TensorRT-RTX, in its own process."""

    beside = True

    def __init__(self, job: Job, builder: Isolated) -> None:
        self._job, self._builder = job, builder

    def start(self, model: OnnxModel) -> None:
        self._builder.start(model, self._job.build, precision=self._job.precision)

    def look(self, progress: Progress) -> None:
        self._builder.look(progress)

    def finish(self, progress: Progress) -> Engine:
        return self._builder.finish(progress)


def lowered_for(model: OnnxModel, target: Target) -> OnnxModel:
    """The graph as its target understands it; lowering it again changes nothing."""
    if target != "onnxruntime":
        return model
    scaled = with_float_scales(model.data)
    data = with_zero_points(scaled)
    notes = model.notes if scaled is model.data else (*model.notes, _ROUNDED)
    return model if data is model.data else replace(model, data=data, notes=notes)


def to_onnx(quantized: Quantized, release: str | None = None, *, plugins: bool = False) -> OnnxModel:
    """The quantized program as one checked ONNX file, byte-identical for the same program and form.

    Its opset is `narrow_onnx.OPSET`, or the first that has the types of its number formats.

    Node names begin with the source module path (`layer3.1.conv2/Conv`), so that engine layers can be read. Traces,
    which hold paths of the exporting machine, are removed.

    Args:
        quantized: the program.
        release: TensorRT whose parser is to take the file, like "8.6.1". Before 10 that is a form of its own
            (`routes.release`); every other target, and None, gets the same file.
        plugins: operations of torch.library become nodes for plugins (`plugin_nodes`).

    Raises:
        BuildError: an operation has no ONNX translation, or none that the release parses, or the file is over ONNX's
            2 GB.
    """
    import onnx

    old = needs_lowering(release)
    program = _exported(quantized, old, plugins)
    narrow_onnx.store_four_bits(program.model)
    _rename(program.model)
    _keep_apart(program.model)
    if old:
        lower(program.model)
    _require_one_file(program.model)
    model = program.model_proto
    for value in program.model.graph.initializers.values():
        value.const_value = None  # rules of onnxscript's optimizer keep the graph that they have last seen
    del program  # the weights are in the file's message now, and soon in its bytes
    _strip(model)
    _name_dimensions(model, quantized)
    try:
        data, opset = model.SerializeToString(deterministic=True), model.opset_import[0].version
        if old and release is not None:
            require_parsable(model, release)  # first: the checker knows no operator that is newer than its opset
        del model
        onnx.checker.check_model(data)
    except BuildError:
        raise
    except Exception as error:
        raise BuildError(f"onnx: the exported file is not valid ({error}). This is a bug of the exporter.") from error
    return OnnxModel(data, opset, quantized.inputs, quantized.outputs, precisions=computed_in(quantized.layers))


def _exported(quantized: Quantized, old: bool, plugins: bool) -> ONNXProgram:
    """The quantized program as torch.onnx gives it; `old` for a release that needs lowering.

    Raises:
        BuildError: an operation has no ONNX translation.
    """
    import torch
    from torch._dispatch.python import enable_python_dispatcher

    from trtpipe.routes.decomposed import decomposed

    source = quantized.program
    symbolic: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if torch_versions.release(torch.__version__) < torch_versions.EXPORTER_KEEPS_SHAPES:
        source = export(torch_versions.graph_module(source), quantized.inputs)
        symbolic = enable_python_dispatcher()  # or a linear of a dynamic batch fails in it
    translated = int8_onnx.translations(float32_only=old) | narrow_onnx.translations()
    translated |= plugin_nodes.translations(source.graph) if plugins else {}
    try:
        with _quiet(), symbolic, exact_rules():
            program = torch.onnx.export(
                decomposed(source),
                example_inputs(quantized.inputs),
                dynamo=True,
                opset_version=EXPORTED_OPSET if old else narrow_onnx.opset_of(quantized),
                input_names=[s.name for s in quantized.inputs],
                output_names=[s.name for s in quantized.outputs],
                custom_translation_table=translated,
                external_data=False,
                verbose=False,
                optimize=True,
            )
    except Exception as error:
        raise _untranslated(error) from error
    assert program is not None
    return program


def _untranslated(error: Exception) -> BuildError:
    """What torch.onnx says of an operation, without its steps for those who develop it."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    said = "\n".join(map(str, chain))
    step = (
        "Write it in other operations. With build.target tensorrt a plugin can compute it (build.plugins), and with "
        "that or tensorrt_rtx build.route torch_tensorrt may have it."
    )
    if absent := re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>", said):
        return BuildError(f"onnx: torch.onnx has no translation of {absent[1]}.{absent[2]}. {step}")
    why = typed_line(chain[-1])
    if failed := re.search(r"call_function\[target=torch\.ops\.([\w.]+)\]", said):
        return BuildError(f"onnx: torch.onnx cannot translate {failed[1]} here ({why}). {step}")
    return BuildError(f"onnx: torch.onnx cannot translate the model ({why}). Take another build.route.")


def _require_one_file(model: Model) -> None:
    """Refuse weights that one protobuf message cannot hold.

    Raises:
        BuildError: there are more.
    """
    held = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if held > MOST_WEIGHTS:
        raise BuildError(
            f"onnx: the graph's weights must be at most 2 GB, as a graph is one file (got {held / 1e9:.2f} GB). Set "
            "precision.fp16_mode, which halves them; formats of 8 or 4 bits are for what convolutions and linears hold."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx and its passes print to stdout and log conversions; errors still raise."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnx_ir"))}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _rename(model: Model) -> None:
    """Name every node `<module path>/<operator>`, with a number where several share it."""
    from trtpipe.model.bindings import INNER
    from trtpipe.model.nodes import CALL_SUFFIX

    def path_of(node: Node) -> str | None:
        scopes = scopes_of(node.metadata_props)
        if len(scopes) < 2:
            return None
        path = CALL_SUFFIX.sub("", scopes[-2]).removeprefix(INNER + ".")
        path = "" if path == INNER else path
        return path or (None if node.op_type in (*QDQ, "Cast") else "")

    seen: dict[str, int] = {}
    for node in model.graph.all_nodes():
        path, reader = path_of(node), node
        while path is None and (reader := next(iter(reader.outputs[0].consumers()), None)) is not None:
            path = path_of(reader)  # Q, DQ and casts belong to the module that reads them
        stem = f"{path}/{node.op_type}" if path else node.op_type
        k = seen.get(stem, 0)
        seen[stem] = k + 1
        node.name = stem if k == 0 else f"{stem}_{k}"


def _keep_apart(model: Model) -> None:
    """Give values and weights inside the graph other names than the bindings'.

    The exporter names bindings by the job and values by their operations: an output `mean` may meet a value `mean`.
    """
    bindings = [*model.graph.inputs, *model.graph.outputs]
    taken = {v.name for v in bindings}
    inside = [*model.graph.initializers.values(), *(v for n in model.graph.all_nodes() for v in n.outputs)]
    used = taken | {v.name for v in inside}
    own = {id(v) for v in bindings}
    for value in inside:
        if value.name in taken and id(value) not in own:
            k = next(k for k in itertools.count(1) if f"{value.name}_inner_{k}" not in used)
            value.name = f"{value.name}_inner_{k}"
            used.add(value.name)


def _strip(model: ModelProto) -> None:
    """Remove traces, scopes and documentation from the file, functions and subgraphs included."""
    todo = [model, model.graph, *model.functions]
    while todo:
        item = todo.pop()
        if hasattr(item, "metadata_props"):
            item.ClearField("metadata_props")
        if hasattr(item, "doc_string"):
            item.ClearField("doc_string")
        for name in ("node", "input", "output", "value_info", "initializer"):
            if hasattr(item, name) and not isinstance(getattr(item, name), str):
                children = getattr(item, name)
                todo += [c for c in children if hasattr(c, "ClearField")]
        for attribute in getattr(item, "attribute", ()):
            if hasattr(attribute, "g") and attribute.HasField("g"):
                todo.append(attribute.g)


def _name_dimensions(model: ModelProto, quantized: Quantized) -> None:
    """Give dynamic dimensions of inputs and outputs the job's own names.

    Raises:
        BuildError: the exporter has fixed one of an input, though the graph takes several sizes of it.
    """
    values = {v.name: v for v in (*model.graph.input, *model.graph.output)}
    for spec in (*quantized.inputs, *quantized.outputs):
        for axis, extent in enumerate(spec.shape):
            dim = values[spec.name].type.tensor_type.shape.dim[axis]
            fixed = str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param
            if spec in quantized.inputs and fixed.isdigit() and spec.at("min")[axis] != spec.at("max")[axis]:
                raise BuildError(
                    f"onnx: PyTorch's exporter fixed the dynamic dimension {extent} of input {spec.name} at {fixed}: "
                    f"it translates an operation for that size alone. Declare one size of {extent} in inputs, or "
                    "write the operations that depend on it in others."
                )
            if isinstance(extent, str) and not dim.HasField("dim_value"):
                dim.dim_param = extent

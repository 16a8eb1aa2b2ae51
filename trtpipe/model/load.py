"""Load the user's network behind its declared bindings."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calib.types import JsonObject
from calib.user_code import import_callable, user_code
from trtpipe.errors import InputError
from trtpipe.job.importable import on_path
from trtpipe.model.export import without_its_log
from trtpipe.model.failures import place_of, typed_line
from trtpipe.model.process_state import put_back
from trtpipe.model.torch_versions import graph_module
from trtpipe.model.weights import load_weights, weights_digest
from trtpipe.values import DimRange, LoadedModel, ModelKind, TensorSpec

if TYPE_CHECKING:
    import torch

    from trtpipe.job.job import Job
    from trtpipe.model.bindings import Bound

_LOG = logging.getLogger(__name__)


def load_model(job: Job, base: Path | None = None, note: Callable[[str], None] = _LOG.warning) -> LoadedModel:
    """The job's network in eval mode behind its bindings, with the shapes of its outputs found by running it once.

    Args:
        job: the validated job; its paths are absolute.
        base: folder of the job file; a factory's module is looked up there too.
        note: receives what the factory changed of the process (torch's default device, say), which is put back.

    Raises:
        InputError: the factory, the weights or the outputs are not what the job says, the user's code raises, or the
            model cannot be run on zeros of the declared input shapes.
    """
    from trtpipe.model.bindings import bind

    with put_back(note):
        network, source = _network(job, base)
    inputs = job.input_specs()
    normalize = {
        name: (tuple(i.normalize.mean), tuple(i.normalize.std)) for name, i in job.inputs.items() if i.normalize
    }
    nested = job.model.factory is not None  # names of an ONNX file's inputs may hold dots of their own
    _require_order(network, tuple(dict.fromkeys(n.partition(".")[0] if nested else n for n in job.inputs)))
    module = bind(network, inputs, normalize, tuple(job.outputs), nested=nested)
    digest = weights_digest(network)
    outputs = _output_specs(module, inputs, {n: o.dtype for n, o in job.outputs.items()})
    own = getattr(network, "classes", None)
    kind: ModelKind = "onnx" if job.model.onnx else "program" if job.model.program else "eager"
    classes = tuple(own) if isinstance(own, list | tuple) and own and all(isinstance(c, str) for c in own) else None
    notes: tuple[str, ...] = network.file.notes if kind == "onnx" else ()  # type: ignore[union-attr, assignment]
    return LoadedModel(module, inputs, outputs, digest, source, notes, kind=kind, classes=classes)


def _network(job: Job, base: Path | None) -> tuple[torch.nn.Module, str]:
    import torch

    from trtpipe.model.bindings import evaluating
    from trtpipe.model.quantizers import take_quantizers_off

    model = job.model
    recalibrate = job.calibration is not None and job.calibration.recalibrate
    if model.program is not None:
        return _program(model.program, job.input_specs(), recalibrate), f"program {Path(model.program).name}"
    if model.onnx is not None:
        return _onnx(job, Path(model.onnx), recalibrate), f"onnx {Path(model.onnx).name}"
    if model.factory is None:
        raise InputError(
            "model: torch.export cannot take a TorchScript file (got only model.torchscript). Give model.factory, "
            "model.program or model.onnx to build from; model.torchscript then stays the baseline it is compared with."
        )
    with on_path(base):
        factory = import_callable(model.factory, "model.factory", InputError)
        _require_fit(factory, model.factory, model.args)
        with user_code(f"model.factory: {model.factory}", InputError):
            network = factory(**copy.deepcopy(model.args))  # a factory may take its configuration apart
    if not isinstance(network, torch.nn.Module):
        raise InputError(
            f"model.factory: must return an nn.Module (got {type(network).__name__} from {model.factory}). "
            "Return the model itself."
        )
    network = _plain(network, model.factory)
    if model.weights is not None:
        load_weights(network, Path(model.weights))
    if absent := [n for n, t in (*network.named_parameters(), *network.named_buffers()) if t.is_meta]:
        raise InputError(
            f"model.factory: every weight must have values (got {model.factory}, whose {absent[0]} is on the meta "
            "device). Make it on the CPU: .to_empty(device='cpu'), then load its weights."
        )
    with user_code(f"model.factory: eval() of the model of {model.factory}", InputError):
        network = evaluating(network).requires_grad_(False)

    return take_quantizers_off(network, "model.factory", recalibrate=recalibrate), f"factory {model.factory}"


def _plain(network: torch.nn.Module, factory: str) -> torch.nn.Module:
    """The network without torch.compile and DataParallel around it; its weights then have the names they were given.

    Raises:
        InputError: it is TorchScript already, which torch.export does not take.
    """
    import torch

    if isinstance(network, torch.jit.ScriptModule):
        raise InputError(
            f"model.factory: must return a plain nn.Module (got TorchScript from {factory}). Return the module that it "
            "was made of; to compare with the TorchScript file, name it in model.torchscript."
        )
    wrapped = getattr(network, "_orig_mod", None)  # of torch.compile
    if isinstance(network, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        wrapped = network.module
    return _plain(wrapped, factory) if isinstance(wrapped, torch.nn.Module) else network


def _require_fit(factory: Callable[..., object], reference: str, args: JsonObject) -> None:
    """Refuse arguments that the factory does not take; one without a readable signature is believed."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        raise InputError(
            f"model.args: must fit the factory {reference} ({error}; it takes {signature}). Correct the names."
        ) from None


def _require_order(network: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Refuse inputs named like arguments of forward that stand elsewhere: they are given in order.

    Raises:
        InputError: an input has the name of an argument at another place.
    """
    try:
        arguments = tuple(inspect.signature(network.forward).parameters)
    except (TypeError, ValueError):
        return
    if any(n in arguments and arguments.index(n) != k for k, n in enumerate(names)):
        step = "Reorder or rename them."
        if list(names) == [a for a in arguments if a in names]:  # in order, with an argument between or before them
            step = f"Wrap the model in a module whose forward takes ({', '.join(names)})."
        raise InputError(
            f"inputs: must be in the order of the model's forward({', '.join(arguments)}) (got {', '.join(names)}), "
            f"which is given them in order. {step}"
        )


def _program(path: str, inputs: tuple[TensorSpec, ...], recalibrate: bool) -> torch.nn.Module:
    import torch

    from trtpipe.model import pt2e  # the operators of a quantized program are registered with it
    from trtpipe.model.bindings import evaluating
    from trtpipe.model.quantizers import take_quantizers_off

    del pt2e
    try:
        with warnings.catch_warnings(), without_its_log():  # torch 2.11 warns of the buffers it reads into
            warnings.simplefilter("ignore")
            program = torch.export.load(path)
    except Exception as error:
        reason = "" if "Please check the warnings above" in str(error) else f": {error}"  # they are not shown
        raise InputError(
            f"model.program: must be a file of torch.export.save (got {Path(path).name}{reason})."
        ) from error
    _require_sizes(program, inputs)
    network = evaluating(graph_module(program))
    return take_quantizers_off(network, "model.program", recalibrate=recalibrate)


def _onnx(job: Job, path: Path, recalibrate: bool) -> torch.nn.Module:
    from trtpipe.model.onnx.network import load_network, require_bindings

    network = load_network(path, tuple(job.outputs), recalibrate=recalibrate)
    require_bindings(network.file, {s.name: s.shape for s in job.input_specs()})
    return network.eval()


def _require_sizes(program: torch.export.ExportedProgram, inputs: tuple[TensorSpec, ...]) -> None:
    """Refuse sizes that a program was not exported for: it may compute something else there, and does not say so.

    A lower end of 2 is torch.export's own, which takes 0 and 1 for special.
    """
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    given = [values.get(name) for name in program.graph_signature.user_inputs]
    if len(given) != len(inputs):
        return
    for spec, value in zip(inputs, given, strict=True):
        sizes = tuple(getattr(value, "shape", ()))
        if len(sizes) != len(spec.shape):
            continue
        for axis, (asked, size) in enumerate(zip(spec.shape, sizes, strict=True)):
            low, high = (asked, asked) if isinstance(asked, int) else (spec.dims[asked].min, spec.dims[asked].max)
            if isinstance(size, int):
                least, most = size, float(size)
            elif (known := program.range_constraints.get(size.node.expr)) is not None:
                least, most = int(known.lower), float(known.upper)
            else:
                continue
            if not ((1 if least == 2 < most else least) <= low and high <= most):
                where = f"inputs.{spec.name}.shape" if isinstance(asked, int) else f"inputs.{spec.name}.{asked}"
                taken = f"{least}" if least == most else f"{least} to {most:g}"
                raise InputError(
                    f"{where}: must be within what the program was exported for, {taken} on axis {axis} "
                    f"(got {low if low == high else f'{low} to {high}'}). Change it, or export the program for that."
                )


def _output_specs(module: Bound, inputs: tuple[TensorSpec, ...], dtypes: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """The outputs' bindings, from running the model at two sizes of each dynamic dimension, and of the batch.

    An extent that is a dynamic dimension at both sizes carries its name; one that varies otherwise is named
    `<output>_<axis>` until the captured graph says what it is. The batch axis is the only axis that varies with the
    batch, and is as long as it.

    Raises:
        InputError: a dtype that the job declares cannot hold what the model returns.
    """
    dims = {n: r for s in inputs for n, r in s.dims.items() if r.min < r.max}
    batch = inputs[0].shape[0]
    first = {n: min(max(2, r.min), r.max) if n == batch else r.opt for n, r in dims.items()}
    returned = _on_zeros(module, inputs, first)
    _require_dtypes(returned, dtypes)
    listed = any(part.isdigit() for name in dtypes for part in name.split("."))  # maybe an element for each sample
    if listed and (more := _outputs_by_batch(module, _zeros(inputs, first))):
        raise InputError(more)
    shapes = [tuple(t.shape) for t in returned]
    named: list[list[int | str]] = [list(s) for s in shapes]
    ranges: list[dict[str, DimRange]] = [{} for _ in shapes]
    fixed = inputs[0].at("opt")[0]
    sizes = (fixed, fixed + 1)
    with_batch: list[list[tuple[int, int, int]]] | None = None
    for name, r in dims.items():
        size = first[name] + 1 if first[name] < r.max else first[name] - 1
        changes = _changes(shapes, _shapes(module, inputs, {**first, name: size}))
        if name == batch:
            with_batch, sizes = changes, (first[name], size)
        for k, changed in enumerate(changes):
            for axis, before, after in changed:
                whole = (before, after) == (first[name], size)
                label = name if whole else f"{list(dtypes)[k]}_{axis}"
                low, high = sorted((before, after))
                named[k][axis] = label
                ranges[k][label] = r if whole else DimRange(low, low, high)
    if batch not in dims:
        try:
            with_batch = _changes(shapes, _shapes(module, inputs, first, batch=fixed + 1))
        except InputError:  # the model takes this one batch alone
            with_batch = None
    if dims:  # a rank of its own at the least sizes, of squeeze() for one sample
        _changes(shapes, _shapes(module, inputs, {n: r.min for n, r in dims.items()}))
    specs = []
    for k, (name, dtype) in enumerate(dtypes.items()):
        batch_axis: int | None = None
        if with_batch is None:
            batch_axis = 0 if shapes[k] and shapes[k][0] == sizes[0] else None
        elif len(with_batch[k]) == 1 and with_batch[k][0][1:] == sizes:
            batch_axis = with_batch[k][0][0]
        specs.append(TensorSpec(name, dtype, tuple(named[k]), ranges[k], batch_axis))
    return tuple(specs)


def _require_dtypes(returned: Sequence[torch.Tensor], dtypes: Mapping[str, str]) -> None:
    """Bindings are cast within a kind of number, or to a wider kind: a mask to integers or floats, integers to floats.

    Raises:
        InputError: a float output is declared an integer, or an integer one a truth value.
    """
    kinds = "bif"  # NumPy's letters
    for (name, wanted), tensor in zip(dtypes.items(), returned, strict=True):
        own = str(tensor.dtype).removeprefix("torch.")
        if kinds.index(np.dtype(wanted).kind) < kinds.index(np.dtype(own).kind.replace("u", "i")):
            legal = "float32 or float16" if tensor.is_floating_point() else f"{own} or a float type"
            raise InputError(
                f"outputs.{name}.dtype: must be {legal} for what the model returns, {own} (got {wanted}). Change it, "
                "or round in the model."
            )


def _shapes(
    module: Bound, inputs: tuple[TensorSpec, ...], sizes: Mapping[str, int], batch: int | None = None
) -> list[tuple[int, ...]]:
    """The outputs' shapes on zeros, as `_on_zeros`."""
    return [tuple(t.shape) for t in _on_zeros(module, inputs, sizes, batch)]


def _on_zeros(
    module: Bound, inputs: tuple[TensorSpec, ...], sizes: Mapping[str, int], batch: int | None = None
) -> tuple[torch.Tensor, ...]:
    """The outputs for zeros, dynamic dimensions at `sizes` and the first axis at `batch`, if that is given.

    Raises:
        InputError: the model does not run on them.
    """
    import torch

    args = _zeros(inputs, sizes, batch)
    try:
        with torch.inference_mode():
            outputs = tuple(module(*args))
    except KeyboardInterrupt:
        raise
    except InputError as error:
        if not (more := _outputs_by_batch(module, args)):
            raise
        raise InputError(more) from error
    except BaseException as error:
        where = place_of(error)
        tried = ", ".join(f"{s.name} {s.dtype} {list(a.shape)}" for s, a in zip(inputs, args, strict=True))
        raise InputError(
            f"model: it fails on zeros of the declared inputs ({tried}){f' at {where}' if where else ''}: "
            f"{typed_line(error)}. {_help(module, inputs, error)}"
        ) from error
    for name, value in zip(module.output_names, outputs, strict=True):
        if value.is_complex():
            raise InputError(
                f"outputs.{name}: must be real numbers (got {str(value.dtype).removeprefix('torch.')}, which no engine "
                "returns). Return torch.view_as_real(y), y.abs() or y.real in the model."
            )
    return outputs


def _zeros(inputs: tuple[TensorSpec, ...], sizes: Mapping[str, int], batch: int | None = None) -> list[torch.Tensor]:
    """Inputs of zeros, as `_on_zeros` has them."""
    import torch

    args = []
    for spec in inputs:
        shape = [d if isinstance(d, int) else sizes.get(d, spec.dims[d].opt) for d in spec.shape]
        args.append(torch.zeros([batch or shape[0], *shape[1:]], dtype=getattr(torch, spec.dtype)))
    return args


def _outputs_by_batch(module: Bound, args: Sequence[torch.Tensor]) -> str:
    """The message for a model that returns more tensors for a larger batch; empty where it does not."""
    import torch

    counts = {}
    for batch in (1, 2):
        try:
            with torch.inference_mode():
                counts[batch] = module.count([a[:1].expand(batch, *a.shape[1:]).clone() for a in args])
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  (it takes another batch alone, or fails for its own reasons)
            return ""
    if counts[1] == counts[2]:
        return ""
    return (
        f"outputs: the model must return as many tensors for any batch (got {counts[1]} for one sample and {counts[2]} "
        "for two, as of a detector that chooses boxes by itself). Return what it chooses from, tensors of a fixed "
        "number of rows, and choose behind the engine."
    )


def _help(module: Bound, inputs: tuple[TensorSpec, ...], error: BaseException) -> str:
    """What to do about a model that does not run on the declared inputs."""
    import torch

    try:
        inspect.signature(module.network.forward).bind(*inputs)
    except TypeError:
        taken = inspect.signature(module.network.forward)
        by_name = [p.name for p in taken.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        step = "name each in inputs, or wrap the model."
        if by_name:
            step = f"it is given them in order, so wrap the model in one that takes {', '.join(by_name)} in order."
        return f"forward takes {taken}, and the job has {len(inputs)} inputs: {step}"
    except ValueError:
        pass
    weights = (*module.network.named_parameters(), *module.network.named_buffers())
    other = next(((n, w.dtype) for n, w in weights if w.is_floating_point() and w.dtype != torch.float32), None)
    if other is not None and re.search(r"dtype|scalar type|type \(", str(error)):
        dtype = str(other[1]).removeprefix("torch.")
        return (
            f"It is run in float32, and its weight {other[0]} is {dtype}: return the model in float32 (.float()). What "
            "the engine computes in is precision's, and the dtype of a binding is that of inputs and outputs."
        )
    return "Change inputs.*.shape or dtype in the job, or that line of the model."


def _changes(before: list[tuple[int, ...]], after: list[tuple[int, ...]]) -> list[list[tuple[int, int, int]]]:
    """For each output, (axis, extent before, extent after) where the two differ.

    Raises:
        InputError: the rank of an output depends on the size.
    """
    for one, other in zip(before, after, strict=True):
        if len(one) != len(other):
            raise InputError(
                f"outputs: each must have one rank whatever the batch and the dynamic dimensions are (got shapes "
                f"{list(one)} and {list(other)}). Replace squeeze() by squeeze(dim) or flatten(1) in the model."
            )
    return [
        [(axis, b, a) for axis, (b, a) in enumerate(zip(one, other, strict=True)) if a != b]
        for one, other in zip(before, after, strict=True)
    ]

"""Load the user's network behind its declared bindings."""

from __future__ import annotations

import copy
import inspect
import keyword
import logging
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calib.files import as_text, is_torchscript
from calib.process_state import put_back
from calib.types import JsonObject
from calib.user_code import import_callable, user_code
from trtpipe.errors import InputError, first_line
from trtpipe.job.importable import find_module, on_path
from trtpipe.job.sections import FROM_TORCHSCRIPT
from trtpipe.model.hooks import require_no_hooks_for_all
from trtpipe.model.output_specs import output_specs
from trtpipe.model.torch_versions import graph_module
from trtpipe.model.weights import load_weights, weights_digest
from trtpipe.values import LoadedModel, ModelKind, TensorSpec

if TYPE_CHECKING:
    import sympy
    import torch

    from trtpipe.job.job import Job

_LOG = logging.getLogger(__name__)


def load_model(job: Job, note: Callable[[str], None] = _LOG.warning) -> LoadedModel:
    """The job's network in eval mode behind its bindings, with the shapes of its outputs found by running it once.

    Args:
        job: the validated job; its paths are absolute, and a factory's module is looked up in its folder too.
        note: receives what the factory changed of the process (torch's default device, say), which is put back.

    Raises:
        InputError: the factory, the weights or the outputs are not what the job says, the user's code raises, or the
            model cannot be run on zeros of the declared input shapes.
    """
    from trtpipe.model.bindings import bind

    with put_back(note):
        network, source = _network(job)
    inputs = job.input_specs()
    normalize = {
        name: (tuple(i.normalize.mean), tuple(i.normalize.std)) for name, i in job.inputs.items() if i.normalize
    }
    nested = job.model.factory is not None  # a program is given every tensor by itself, as an ONNX file is
    _require_order(network, tuple(dict.fromkeys(n.partition(".")[0] if nested else n for n in job.inputs)))
    module = bind(network, inputs, normalize, tuple(job.outputs), nested=nested)
    digest = weights_digest(network)
    outputs, said = output_specs(module, inputs, {n: o.dtype for n, o in job.outputs.items()})
    require_no_hooks_for_all()
    own = getattr(network, "classes", None)
    kind: ModelKind = "onnx" if job.model.onnx else "program" if job.model.program else "eager"
    classes = tuple(own) if isinstance(own, list | tuple) and own and all(isinstance(c, str) for c in own) else None
    notes: tuple[str, ...] = network.file.notes if kind == "onnx" else ()  # type: ignore[union-attr, assignment]
    return LoadedModel(module, inputs, outputs, digest, source, (*notes, *said), kind=kind, classes=classes)


def _network(job: Job) -> tuple[torch.nn.Module, str]:
    import torch

    from trtpipe.model.bindings import evaluating
    from trtpipe.model.quantizers import take_quantizers_off

    model = job.model
    recalibrate = job.calibration is not None and job.calibration.recalibrate
    if model.program is not None:
        return _program(model.program, job.input_specs(), recalibrate), f"program {Path(model.program).name}"
    if model.onnx is not None:
        return _onnx(job, Path(model.onnx), recalibrate), f"onnx {Path(model.onnx).name}"
    assert model.factory is not None  # a job has one of the three
    with on_path(job.folder):
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
    held = (*network.named_modules(), *network.named_parameters(), *network.named_buffers())
    _require_names([name for name, _ in held], "model.factory")
    _require_utf8_files({type(m).__module__ for m in network.modules()})
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
    inner = next((name for name, m in network.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if inner is not None:
        raise InputError(
            f"model.factory: must return modules of Python (got {factory}, whose {inner} is TorchScript). Leave "
            "torch.jit.script or torch.jit.trace out of it: torch.export takes what they are made of."
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


def _require_names(names: Iterable[str], where: str) -> None:
    """Refuse names in a network, `where` it is from, that are keywords of Python: PyTorch writes code of them."""
    if odd := next((name for name in names if any(map(keyword.iskeyword, name.split(".")))), None):
        raise InputError(
            f"{where}: no module, parameter or buffer may be named by a keyword of Python (got {odd}), which "
            "torch.export cannot write. Name it another, as class_."
        )


def _require_utf8_files(modules: Iterable[str]) -> None:
    """Refuse code in files whose names Python does not read as UTF-8: PyTorch, which notes them, cannot write them."""
    files = (str(getattr(sys.modules.get(name), "__file__", "")) for name in sorted(modules))
    if odd := next((file for file in files if as_text(file) != file), None):
        raise InputError(
            f"model.factory: its code must lie in folders whose names are UTF-8 (got {as_text(odd)}). Rename the "
            "folder, or, if its name is UTF-8, unset PYTHONUTF8 and set LC_ALL=C.UTF-8."
        )


def _require_order(network: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Refuse inputs named like arguments of forward that stand elsewhere: they are given in order.

    Raises:
        InputError: an input has the name of an argument at another place.
    """
    arguments, nests, more = _arguments(network)
    places = {a.replace(".", "_"): k for k, a in enumerate(arguments)}  # torch.export writes feats.a so
    misplaced = any(places.get(n.replace(".", "_"), k) != k for k, n in enumerate(names))
    too_many = nests and not more and len(names) > len(arguments) > 0
    if misplaced or too_many:
        step = "Reorder or rename them."
        if too_many:
            whole = next((a for a in arguments if a not in names), arguments[0])
            step = f"Name tensors within one argument by their paths, as {whole}.key or {whole}.0."
        elif list(names) == [a for a in arguments if a in names]:  # in order, with an argument between or before them
            step = f"Wrap the model in a module whose forward takes ({', '.join(names)})."
        raise InputError(
            f"inputs: must be in the order of the model's forward({', '.join(arguments)}) (got {', '.join(names)}), "
            f"which is given them in order. {step}"
        )


def _arguments(network: torch.nn.Module) -> tuple[tuple[str, ...], bool, bool]:
    """What forward is given, in order; whether one may hold several tensors; and whether it takes any number of them.

    The names of its arguments; of an exported program, which is given each tensor by itself, the tensors' paths, as
    feats.a. None where nothing says them.
    """
    import torch
    from torch.utils import _pytree as pytree

    from trtpipe.model.bindings import is_exported, tensors

    try:
        parameters = inspect.signature(network.forward).parameters.values()
    except (TypeError, ValueError):
        return (), True, True
    names = tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    spec = getattr(network, "_in_spec", None) if is_exported(network) else None
    if spec is None:
        return names, True, any(p.kind == p.VAR_POSITIONAL for p in parameters)
    args, kwargs = pytree.tree_unflatten([torch.tensor(k) for k in range(spec.num_leaves)], spec)
    given = dict(zip(names, args, strict=False)) | kwargs
    return tuple(path for path, _ in sorted(tensors(given), key=lambda leaf: int(leaf[1]))), False, False


def _program(path: str, inputs: tuple[TensorSpec, ...], recalibrate: bool) -> torch.nn.Module:
    from trtpipe.model import pt2e  # the operators of a quantized program are registered with it
    from trtpipe.model.bindings import evaluating
    from trtpipe.model.quantizers import take_quantizers_off

    del pt2e
    program = _read(path)
    _require_names((*program.state_dict, *program.constants), "model.program")
    _require_sizes(program, inputs)
    network = evaluating(graph_module(program))
    return take_quantizers_off(network, "model.program", recalibrate=recalibrate)


class _Errors(logging.Handler):
    """Keeps the errors that are logged and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


#: How torch.export.load names an operation, or a class of an output, that no code here has registered.
_UNREGISTERED = re.compile(
    r"resolve torch\.ops\.(\S+?)(?:\.default)? to an|Deserializing (\S+) in pytree is not registered|"
    r"namedtuple class (\S+) because"
)


def _read(path: str) -> torch.export.ExportedProgram:
    """A file of torch.export.save, with torchvision's operations where it is installed.

    Raises:
        InputError: torch.export.load cannot read it.
    """
    import torch

    log, kept = logging.getLogger("torch.export"), _Errors()
    before = log.handlers, log.propagate
    log.handlers, log.propagate = [kept], False  # it logs the reason, and raises another error
    try:
        with warnings.catch_warnings():  # torch 2.11 warns of the buffers it reads into
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as error:
        reason: BaseException = kept.errors[-1] if kept.errors else error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        lacking = _UNREGISTERED.search(str(reason))
        if is_torchscript(Path(path)):
            got = f"{Path(path).name}, of torch.jit.save"
            raise InputError(
                f"model.program: must be a file of torch.export.save (got {got}). {FROM_TORCHSCRIPT}"
            ) from None
        if lacking is None:
            got = f"{Path(path).name}: {first_line(reason)}"
            newer = f" If a newer PyTorch saved it, save it by {torch.__version__}." if zipfile.is_zipfile(path) else ""
            raise InputError(f"model.program: must be a file of torch.export.save (got {got}).{newer}") from error
        name = next(n for n in lacking.groups() if n)
        of_torchvision = name.startswith("torchvision.") and find_module("torchvision") is not None
        if not of_torchvision or "torchvision" in sys.modules:
            raise InputError(
                f"model.program: must hold nothing that only code of yours registers (got {Path(path).name} with "
                f"{name}). Read it in a model.factory, in a module that imports what registers {name}: "
                f"return torch.export.load({path!r}).module()."
            ) from error
    finally:
        log.handlers, log.propagate = before
    import torchvision  # registers its operations

    del torchvision
    return _read(path)


def _onnx(job: Job, path: Path, recalibrate: bool) -> torch.nn.Module:
    from trtpipe.model.onnx.network import load_network, require_bindings

    network = load_network(path, tuple(job.outputs), recalibrate=recalibrate)
    require_bindings(network.file, {s.name: s.shape for s in job.input_specs()})
    return network.eval()


def _require_sizes(program: torch.export.ExportedProgram, inputs: tuple[TensorSpec, ...]) -> None:
    """Refuse sizes that a program was not exported for: it may compute something else there, and does not say so.

    A lower end of 2 is torch.export's own, which takes 0 and 1 for special.
    """
    import torch

    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    given = [value for n in program.graph_signature.user_inputs if isinstance(value := values.get(n), torch.Tensor)]
    if len(given) != len(inputs):
        return
    joint: dict[sympy.Symbol, _Tied] = {}
    for spec, value in zip(inputs, given, strict=True):
        if len(value.shape) != len(spec.shape):
            continue
        sizes: tuple[int | torch.SymInt, ...] = tuple(value.shape)
        for axis, size in enumerate(sizes):
            asked = _Asked(spec, axis)
            if isinstance(size, int):
                _require_range(asked, size, size)
                continue
            if (known := program.range_constraints.get(size.node.expr)) is not None:
                _require_range(asked, int(known.lower), float(known.upper))
            _require_joint(asked, size.node.expr, joint)


@dataclass(frozen=True)
class _Asked:
    """One axis of an input, as the job declares it."""

    spec: TensorSpec
    axis: int

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest size."""
        size = self.spec.shape[self.axis]
        return (size, size) if isinstance(size, int) else (self.spec.dims[size].min, self.spec.dims[size].max)

    @property
    def size(self) -> int | str:
        """The number where there is one size alone, otherwise the dimension's name."""
        low, high = self.range
        return low if low == high else self.spec.shape[self.axis]

    @property
    def where(self) -> str:
        size = self.spec.shape[self.axis]
        return f"inputs.{self.spec.name}.shape" if isinstance(size, int) else f"inputs.{self.spec.name}.{size}"


@dataclass(frozen=True)
class _Tied:
    """An axis with its extent in the program, and what the job makes of the symbol in it; None where no number does."""

    of: _Asked
    size: sympy.Expr
    value: int | str | None


def _require_range(asked: _Asked, least: int, most: float) -> None:
    low, high = asked.range
    if (1 if least == 2 < most else least) <= low and high <= most:
        return
    taken = f"{least}" if least == most else f"{least} to {most:g}"
    raise InputError(
        f"{asked.where}: must be within what the program was exported for, {taken} on axis {asked.axis} "
        f"(got {low if low == high else f'{low} to {high}'}). Change it, or export the program for that."
    )


def _require_joint(asked: _Asked, size: sympy.Expr, joint: dict[sympy.Symbol, _Tied]) -> None:
    """Refuse an axis whose size the program takes from another's, or from a formula, and the job declares by itself.

    Args:
        asked: the axis.
        size: its extent in the program, a symbol or a formula of one, such as 2*s0.
        joint: what the axes before it say of each symbol; what this one says is added.
    """
    import sympy

    if len(size.free_symbols) != 1:
        return
    (symbol,) = size.free_symbols
    values = [asked.size]
    if size != symbol:
        values = [] if isinstance(asked.size, str) else [int(v) for v in sympy.solve(size - asked.size, symbol)]
    here = _Tied(asked, size, values[0] if values else None)
    first = joint.setdefault(symbol, here)
    if first.value == here.value is not None:
        return
    tied = [here] if here.value is None else [first, here]
    name = sympy.Symbol("n")
    sizes = " and ".join(f"{t.size.xreplace({symbol: name})} on axis {t.of.axis} of {t.of.spec.name}" for t in tied)
    raise InputError(
        f"inputs.{asked.spec.name}.shape: must be sizes that the program was exported for, {sizes} "
        f"(got {' and '.join(str(t.of.size) for t in tied)}). Give equal sizes one name, and sizes of a formula "
        "numbers; or export the program with a Dim for each axis."
    )

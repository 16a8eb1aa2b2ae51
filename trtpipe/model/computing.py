"""Where PyTorch computes: on a GPU that gives what the CPU gives, where there is one; else on the CPU.

The tensors of a module are moved for as long as something runs, and put back: a graph's nodes stay what they are, and
its constants are the very same afterwards. Which GPU `cuda:0` is, CUDA_VISIBLE_DEVICES says.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from calib.types import Array
from trtpipe.errors import InputError, MissingError, first_line
from trtpipe.figures import difference
from trtpipe.values import LoadedModel
from trtpipe.version_numbers import of_cuda

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule

CPU, CUDA = "cpu", "cuda:0"
#: Names the device, "cpu" or "cuda", for this process and those that it starts.
VARIABLE = "TRTPIPE_DEVICE"
#: Largest difference between outputs on a GPU and on the CPU, relative to the largest output and to 1: float32 sums in
#: another order.
_TOLERANCE = 1e-4
#: The last arguments of a traced convolution: benchmark, deterministic, cudnn_enabled, allow_tf32.
_CUDNN = (False, True, True, False)


def cpu_asked() -> bool:
    """Whether PyTorch is to compute on the CPU also where there is a GPU."""
    return os.environ.get(VARIABLE) == CPU


def wanted_device() -> str:
    """ "cuda:0" where PyTorch sees a GPU, unless TRTPIPE_DEVICE is cpu; else "cpu".

    Raises:
        InputError: TRTPIPE_DEVICE is neither cpu nor cuda.
        MissingError: it is cuda, and PyTorch sees no GPU.
    """
    import torch

    name = os.environ.get(VARIABLE, "")
    if name not in ("", "cpu", "cuda"):
        raise InputError(f"{VARIABLE}: must be cpu or cuda (got {name!r}). Unset it for the GPU where there is one.")
    if cpu_asked():
        return CPU
    if torch.cuda.is_available():
        return CUDA
    if name == "cuda":
        why = old_driver()
        step = "Update the driver" if why else "Install PyTorch's CUDA build and NVIDIA's driver"
        got = f"cuda; {why}" if why else "cuda"
        raise MissingError(
            f"--device or {VARIABLE}: must be cpu where PyTorch sees no GPU (got {got}). {step}, or leave it out."
        )
    return CPU


def old_driver() -> str:
    """Of what CUDA the driver is, and of what this PyTorch, where PyTorch sees no GPU as the driver is too old for it;
    a clause without a full stop, empty where that is not why."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter of a build without CUDA
        found = re.search(r"driver on your system is too old \(found version (\d+)\)", str(error))
        if found and torch.version.cuda:
            cuda = of_cuda(int(found[1]))
            return f"the NVIDIA driver is for CUDA {cuda}, too old for this PyTorch, which needs {torch.version.cuda}"
    return ""


#: The outputs that something gives for these inputs, which are on this device, where the model is `placed`.
Computation = Callable[["tuple[torch.Tensor, ...]", str], "Sequence[torch.Tensor]"]


def computing_device(
    loaded: LoadedModel,
    arrays: Mapping[str, Array],
    note: Callable[[str], None],
    others: Sequence[Computation] = (),
) -> str:
    """The device that computes this model: the wanted one if it gives what the CPU gives on one batch, else the CPU.

    Args:
        loaded: the model; one read from an ONNX file is compared with ONNX Runtime on the CPU, and stays there.
        arrays: the batch, [B, ...] by input name.
        note: is told why a GPU is not used.
        others: what has to give the same there, beside the model itself.

    Raises:
        InputError: a GPU was asked for by name, and the model does not compute there, or otherwise than on the CPU.
    """
    import torch

    device = wanted_device()
    if device == CPU or loaded.kind == "onnx":
        return CPU
    args = [torch.from_numpy(arrays[s.name]) for s in loaded.inputs]
    with torch.inference_mode():
        expected = loaded.module(*(a.clone() for a in args))
        try:
            with placed(loaded.module, device):
                found = [run(sent(args, device), device) for run in (lambda x, _: loaded.module(*x), *others)]
                outputs = [[o.cpu() for o in one] for one in found]
            why = next(filter(None, (_difference(expected, one) for one in outputs)), "")
        except Exception as error:  # noqa: BLE001 - the model's own code, which nobody has tried on a GPU
            why = f"it fails there ({first_line(error)})"
    if not why:
        return device
    if os.environ.get(VARIABLE):
        raise InputError(
            f"--device or {VARIABLE}: the model must compute on {device} what it computes on the CPU ({why}). Give cpu."
        )
    note(f"the model is computed on the CPU and not on {device}: {why}")
    return CPU


def apart(wanted: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """`figures.difference` of two tensors: got - wanted, float64 of their shape; of whole numbers on the CPU."""
    import torch

    if wanted.is_floating_point() or got.is_floating_point():
        return got.double() - wanted.double()
    return torch.from_numpy(difference(wanted.cpu().numpy(), got.cpu().numpy()))


def reach(so_far: float, values: torch.Tensor) -> float:
    """The larger of `so_far` and the largest |value| of a tensor of any dtype and shape; NaN once there is one."""
    if not values.numel():
        return so_far
    seen = float(values.double().abs().max())
    return seen if math.isnan(seen) or seen > so_far else so_far


def off(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference of two tensors of one shape and any dtype, as a share of the largest |wanted|, or of 1
    where that is more; infinity where a value is NaN."""
    share = reach(0.0, apart(wanted, got)) / reach(1.0, wanted)
    return math.inf if math.isnan(share) else share


def _difference(expected: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
    """How far outputs are from the CPU's where that is beyond `_TOLERANCE`; empty otherwise."""
    for wanted, got in zip(expected, outputs, strict=True):
        if wanted.shape != got.shape:
            return f"an output has the shape {list(got.shape)} there and {list(wanted.shape)} on the CPU"
        most = apart(wanted, got).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(1.0, float(wanted.double().abs().max()) if wanted.numel() else 0.0)
        if wanted.numel() and not float(most.max()) <= _TOLERANCE * largest:
            return f"its outputs differ by up to {float(most.max()):.3g}, outputs up to {largest:.3g}"
    return ""


def sent(tensors: Sequence[torch.Tensor], device: str) -> tuple[torch.Tensor, ...]:
    """The tensors, in their dtypes and shapes, on the device."""
    return tuple(t.to(device) for t in tensors)


@contextmanager
def placed(module: torch.nn.Module, device: str) -> Iterator[None]:
    """The tensors of a module are on the device for the block, and new ones are made there; then all is as it was.

    On a GPU float32 is float32 (no TF32) and the same call gives the same again. Its memory goes back to the driver
    afterwards: TensorRT will want it.

    Raises:
        MissingError: the GPU has no memory left.
    """
    if device == CPU:
        yield
        return
    import torch

    with ExitStack() as stack:
        if on_gpu := device.startswith("cuda"):
            stack.callback(torch.cuda.empty_cache)
        stack.callback(_move(module, device))
        stack.enter_context(torch.device(device))
        if on_gpu:
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True))
        stack.enter_context(tf32_allowed(device, False))
        try:
            yield
        except (torch.OutOfMemoryError, InputError) as error:
            full = error if isinstance(error, torch.OutOfMemoryError) else error.__cause__
            if not isinstance(full, torch.OutOfMemoryError):
                raise
            first = first_line(full)
            raise MissingError(
                f"{device}: out of memory ({first}). Set a smaller batch_size, or give --device or {VARIABLE} cpu."
            ) from error


def _move(module: torch.nn.Module, device: str) -> Callable[[], None]:
    """Put a module's tensors and the devices in its graphs' arguments on the device; what puts them back."""
    import torch
    from torch.fx import GraphModule

    undo: list[Callable[[], None]] = []
    moved: dict[int, torch.Tensor] = {}

    def put_back() -> None:
        for one in reversed(undo):
            one()

    def there(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            new = tensor.detach().to(device)
            parameter = isinstance(tensor, torch.nn.Parameter)
            moved[id(tensor)] = torch.nn.Parameter(new, tensor.requires_grad) if parameter else new
        return moved[id(tensor)]

    try:
        for part in module.modules():
            held: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, part.__dict__)
            for tensors in held:
                before = {n: v for n, v in tensors.items() if isinstance(v, torch.Tensor)}
                undo.append(lambda tensors=tensors, before=before: tensors.update(before))  # type: ignore[misc]
                tensors.update({n: there(v) for n, v in before.items()})
            if isinstance(part, GraphModule):
                undo.append(_retarget(part, device))
    except BaseException:
        put_back()
        raise
    return put_back


def _retarget(graph: GraphModule, device: str) -> Callable[[], None]:
    """Name the device wherever an argument of the graph names the CPU; what names the CPU again."""
    import torch
    from torch.fx.node import map_aggregate

    def there(value: Any) -> Any:
        return torch.device(device) if isinstance(value, torch.device) and value.type == "cpu" else value

    before = [(n, n.args, n.kwargs) for n in graph.graph.nodes]
    changed = []
    for node, args, kwargs in before:
        new = map_aggregate(args, there), map_aggregate(kwargs, there)
        if repr(new) != repr((args, kwargs)):
            node.args, node.kwargs = new
            changed.append((node, args, kwargs))
    if changed:
        graph.recompile()

    def put_back() -> None:
        for node, args, kwargs in changed:
            node.args, node.kwargs = args, kwargs
        if changed:
            graph.recompile()

    return put_back


@contextmanager
def tf32_allowed(device: str, allowed: bool) -> Iterator[None]:
    """Whether matmuls and convolutions of float32 may be computed in TF32; as it was afterwards."""
    if not device.startswith("cuda"):
        yield
        return
    import torch

    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    with warnings.catch_warnings():  # torch announces newer switches, which do not set the older ones
        warnings.simplefilter("ignore")
        before = [p.allow_tf32 for p in places]
        for place in places:
            place.allow_tf32 = allowed
        try:
            yield
        finally:
            for place, was in zip(places, before, strict=True):
                place.allow_tf32 = was


def plain_float32(script: torch.jit.ScriptModule) -> None:
    """Make the convolutions of a TorchScript module compute float32 as `placed` has it; the module is changed.

    A trace holds cuDNN's switches (benchmark, deterministic, enabled, TF32) of the time when it was recorded, and obeys
    them whatever they are later: TF32 is on by default, so that a traced network is 60 dB coarser on a GPU.
    """
    for part in script.modules():
        compiled: Any = part._c
        for graph in (compiled._get_method(name).graph for name in compiled._method_names()):
            for node in graph.findAllNodes("aten::_convolution"):
                given = list(node.inputs())
                for at, value in zip(range(len(given) - len(_CUDNN), len(given)), _CUDNN, strict=True):
                    switch = graph.insertConstant(value)
                    switch.node().moveBefore(node)
                    node.replaceInput(at, switch)

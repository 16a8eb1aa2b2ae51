"""A second device without one: `cpu:0`, another name of the CPU, told apart from it tensor by tensor.

Under `two_devices`, PyTorch's operations refuse tensors of both, as a GPU's do, and NumPy sees none of `cpu:0`. The
real thing is tests/gpu.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

THERE = "cpu:0"
#: Operations that read a tensor of one device and write one of another.
_COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten._copy_from}


class Devices(TorchDispatchMode):
    """Which memory is there, and that no operation takes tensors of both devices."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, StorageWeakRef] = {}

    def is_there(self, tensor: torch.Tensor) -> bool:
        """Whether the memory was made there."""
        found = self._there.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        return found is not None and not found.expired()

    def put(self, tensor: torch.Tensor, there: bool) -> None:
        """Say where new memory is."""
        kept = StorageWeakRef(tensor.untyped_storage())
        self._there.pop(kept.cdata, None)
        if there:
            self._there[kept.cdata] = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it on the CPU, and say of what it makes where it is."""
        kwargs = kwargs or {}
        # TorchScript's interpreter hands a number to a mode where the operation has a tensor.
        if args and isinstance(args[0], int | float) and str(func._schema.arguments[0].type) == "Tensor":
            args = (torch.tensor(args[0]), *args[1:])
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {StorageWeakRef(t.untyped_storage()).cdata for t in given}
        places = {self.is_there(t) for t in given if t.dim()} or {self.is_there(t) for t in given}
        named = kwargs.get("device")
        if len(places) > 1 and func.overloadpacket not in _COPIES:
            where = [(tuple(t.shape), self.is_there(t)) for t in given]
            raise RuntimeError(f"Expected all tensors to be on the same device ({func} got {where})")
        result = func(*args, **kwargs)
        there = str(named) == THERE if named is not None else True in places
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and StorageWeakRef(made.untyped_storage()).cdata not in known:
                self.put(made, there)
        return result


class Ways(TorchFunctionMode):
    """The ways from device to device and to NumPy, which the CPU takes for none."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`cpu()` is a copy, `numpy()` an error, and `device` says where it is."""
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and self._devices.is_there(first):
            if func == torch.Tensor.device.__get__:
                return torch.device(THERE)
            if func in (torch.Tensor.numpy, torch.Tensor.__array__):
                raise TypeError(f"can't convert {THERE} device type tensor to numpy. Use Tensor.cpu()")
            if func is torch.Tensor.cpu or (
                func is torch.Tensor.to and "cpu" in map(str, (*args[1:], *kwargs.values()))
            ):
                home = func(*args, **kwargs)
                home = home.clone() if home is first else home
                self._devices.put(home, False)
                return home
        return func(*args, **kwargs)


@contextmanager
def two_devices() -> Iterator[Devices]:
    """The block's tensors are of one device or of the other."""
    devices = Devices()
    with Ways(devices), devices:
        yield devices

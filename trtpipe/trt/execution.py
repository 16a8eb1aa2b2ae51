"""One execution context of an engine at work: its stream, the memory of its bindings, its CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from trtpipe.errors import InputError

if TYPE_CHECKING:
    from calib.types import Array
    from trtpipe.trt.calls import Binding, Shape, Tensors
    from trtpipe.trt.flavour import Flavour
    from trtpipe.trt.memory import Buffer, DeviceMemory, Graph, HostBuffer
    from trtpipe.trt.monitor import Watch
    from trtpipe.trt.types import IOutputAllocator


def execution_failed(reason: str) -> InputError:
    """The error that TensorRT did not execute an engine; `reason` is its own latest one."""
    return InputError(f"engine: the execution failed ({reason}). Check the inputs' values.")


class OutputMemory:
    """Memory of the outputs whose shapes only the execution itself decides: the work of TensorRT's IOutputAllocator."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._raised: BaseException | None = None
        self.buffers: dict[str, Buffer] = {}
        self.shapes: dict[str, Shape] = {}

    def reallocate(self, name: str, size: int, alignment: int) -> int:
        """The address of at least `size` bytes for an output; 0, as TensorRT wants it, when there are none.

        TensorRT calls it, and nothing can be raised through TensorRT: `check` raises the InputError of what went wrong.
        """
        try:
            buffer = self.buffers.get(name)
            if buffer is None or buffer.size < size:
                if buffer is not None:
                    del self.buffers[name]
                    buffer.free()
                self.buffers[name] = buffer = self._memory.allocate(size)
            if buffer.address % max(alignment, 1):
                raise InputError(f"outputs.{name}: device memory is not aligned to {alignment} bytes.")
        except BaseException as error:  # noqa: BLE001 - nothing can be raised through TensorRT: see check
            self._raised = self._raised or error
            return 0
        return buffer.address

    def notify(self, name: str, shape: Shape) -> None:
        """The shape that an output has got."""
        self.shapes[name] = tuple(shape)

    def check(self) -> None:
        """Raise what went wrong in a callback."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised


def make_output_allocator(flavour: Flavour, memory: OutputMemory) -> IOutputAllocator:
    """An IOutputAllocator of the flavour's module that gives everything to `memory`."""
    trt = flavour.module

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)  # pybind11 wants the base called by name

        def reallocate_output(self, tensor_name: str, current: int, size: int, alignment: int) -> int:
            return memory.reallocate(tensor_name, size, alignment)

        def reallocate_output_async(
            self, tensor_name: str, current: int, size: int, alignment: int, stream: int
        ) -> int:
            return memory.reallocate(tensor_name, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Shape) -> None:
            memory.notify(tensor_name, tuple(shape))

    return Allocator()


class Execution:
    """Runs an engine in one context on one stream, for one caller at a time.

    Inputs and outputs go through page-locked memory, so that the copies run on the stream as the kernels do. Buffers
    grow with the batch and stay. `close` gives everything back; an execution that raised is not to be used again.

    Args:
        calls: the context behind one of TensorRT's two APIs.
        memory: a stream and memory of the GPU; closed with this.
        cuda_graph: capture an execution when shapes change, and launch the graph from then on.
        allocator: makes TensorRT's side of an `OutputMemory`.
        watch: of TensorRT's logger.
    """

    def __init__(
        self,
        calls: Tensors,
        memory: DeviceMemory,
        *,
        cuda_graph: bool,
        allocator: Callable[[OutputMemory], IOutputAllocator],
        watch: Watch,
    ) -> None:
        self.calls, self.memory = calls, memory
        self._bindings = {b.name: b for b in calls.list()}
        self._wants_graph, self._watch = cuda_graph, watch
        self._device: dict[str, Buffer] = {}
        self._host: dict[str, HostBuffer] = {}
        self._graph: Graph | None = None
        self._decided = OutputMemory(memory)
        self._make_allocator, self._allocator = allocator, None

    @property
    def device_bytes(self) -> int:
        """Device memory of the bindings."""
        return sum(b.size for b in (*self._device.values(), *self._decided.buffers.values()))

    def close(self) -> None:
        """Give back the graph, the context, the buffers and the stream, once nothing runs on it any more."""
        calls = self.__dict__.pop("calls", None)
        if calls is not None:
            try:
                self.memory.synchronize()  # after an error the GPU may still be at work in all of it
            except Exception as error:  # noqa: BLE001 - all has to be given back all the same
                logging.getLogger("trtpipe").warning("%s", str(error))
            self._graph = None
            calls.close()  # before the buffers, whose addresses it knows
        self._allocator = None
        self._device, self._host = {}, {}
        self.memory.close()

    def run(self, profile: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs by name, in arrays of their own.

        Args:
            profile: an optimization profile that holds the arrays' shapes.
            arrays: one contiguous array for each input, in its dtype.

        Raises:
            InputError: the context refuses a shape, or the execution failed.
            MissingError: no memory, or another CUDA call failed.
        """
        changed = self.prepare(profile, arrays)
        self.upload()
        self.enqueue(changed)
        return self.results()

    def prepare(self, profile: int, arrays: Mapping[str, Array]) -> bool:
        """Choose the shapes, have memory for them, and copy the inputs to page-locked memory.

        Args:
            profile: number of the optimization profile.
            arrays: every input [B, ...] in the dtype of its binding.

        Returns:
            Whether a shape or an address is not what it was, so that a captured graph no longer holds.
        """
        shapes = {n: tuple(a.shape) for n, a in arrays.items()}
        changed = self.calls.choose(profile, shapes, self.memory.stream)
        self._inputs = shapes
        self._outputs: dict[str, Shape | None] = {}
        for name, binding in self._bindings.items():
            if binding.is_input:
                changed |= self._reserve(name, shapes[name])
                self._array(name, shapes[name])[...] = arrays[name]
                continue
            shape = self.calls.shape_of(name)
            if min(shape, default=0) >= 0:
                self._outputs[name] = shape
                changed |= self._reserve(name, shape)
            else:
                self._outputs[name] = None
                self._leave_to_allocator(name, shape)
        return changed

    def upload(self) -> None:
        """Put the copies of the inputs on the stream."""
        for name, shape in self._inputs.items():
            self.memory.upload(self._device[name], self._array(name, shape))

    def enqueue(self, changed: bool) -> None:
        """Put one execution on the stream, as a CUDA graph where that is wanted and shapes are known before."""
        if changed and self._graph is not None:
            self.memory.synchronize()
            self._graph.free()
            self._graph = None
        if not self._wants_graph or None in self._outputs.values():
            self._execute()
            return
        if self._graph is None:
            self._execute()  # once outside a capture: TensorRT may still allocate or load kernels
            self.memory.synchronize()
            self._graph = self.memory.capture(self._execute)
        self._graph.launch()

    def download(self) -> None:
        """Put the copies of the outputs whose shapes are known on the stream."""
        for name, shape in self._outputs.items():
            if shape is not None:
                self.memory.download(self._device[name], self._array(name, shape))

    def results(self) -> dict[str, Array]:
        """Copy the outputs back, wait, and take them out of page-locked memory.

        Returns:
            Every output [B, ...] in the dtype of its binding.

        Raises:
            InputError: TensorRT gave no shape, or no memory, to an output whose shape the execution decides.
        """
        self.download()
        self.memory.synchronize()
        decided = [name for name, shape in self._outputs.items() if shape is None]
        shapes = {name: shape for name, shape in self._outputs.items() if shape is not None}
        self._decided.check()
        for name in decided:
            if name not in self._decided.shapes:
                raise InputError(f"outputs.{name}: TensorRT gave no shape for it ({self._watch.reason(self._began)}).")
            shapes[name] = shape = self._decided.shapes[name]
            self._grow_host(name, _bytes(self._bindings[name], shape))
            if 0 not in shape:
                self.memory.download(self._decided.buffers[name], self._array(name, shape))
        if decided:
            self.memory.synchronize()
        return {name: self._array(name, shapes[name]).copy() for name in self._outputs}

    def _execute(self) -> None:
        self._began = self._watch.mark()
        accepted = self.calls.execute(self.memory.stream)
        self._decided.check()
        if not accepted:
            raise execution_failed(self._watch.reason(self._began))

    def _leave_to_allocator(self, name: str, shape: Shape) -> None:
        """Let TensorRT ask for the memory of this output while it executes."""
        if self._allocator is None:
            self._allocator = self._make_allocator(self._decided)
        self.calls.set_output_allocator(name, self._allocator, shape)

    def _reserve(self, name: str, shape: Shape) -> bool:
        """Have memory of both kinds for a binding; whether its address on the device changed."""
        size = _bytes(self._bindings[name], shape)
        self._grow_host(name, size)
        buffer = self._device.get(name)
        if buffer is not None and buffer.size >= size:
            return False
        self.memory.synchronize()
        if buffer is not None:
            del self._device[name]
            buffer.free()
        self._device[name] = self.memory.allocate(size)
        self.calls.set_address(name, self._device[name].address)
        return True

    def _grow_host(self, name: str, size: int) -> None:
        held = self._host.get(name)
        if held is None or held.array.nbytes < size:
            self.memory.synchronize()
            if held is not None:
                del self._host[name]
                held.free()
            self._host[name] = self.memory.allocate_host(size)

    def _array(self, name: str, shape: Shape) -> Array:
        """The page-locked memory of a binding as the array it stands for."""
        binding = self._bindings[name]
        flat = self._host[name].array[: _bytes(binding, shape)].view(np.dtype(binding.dtype))
        return flat.reshape(shape)


def _bytes(binding: Binding, shape: Shape) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(binding.dtype).itemsize

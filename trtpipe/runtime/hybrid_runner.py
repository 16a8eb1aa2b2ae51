"""A hybrid module executed: its engines by TensorRT, what is between them by PyTorch, on one stream of one GPU."""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from calib.types import Array
from trtpipe.batching import require_names
from trtpipe.bundle import hybrid
from trtpipe.bundle.hybrid import PYTHON_OPERATORS, EngineStep, OperatorStep
from trtpipe.bundle.manifest import AGAIN, HYBRID
from trtpipe.errors import InputError, MissingError, first_line
from trtpipe.model.computing import old_driver
from trtpipe.packages import pip_install, present
from trtpipe.trt.execution import execution_failed
from trtpipe.trt.runtime import NOT_OPEN, EngineRunner

if TYPE_CHECKING:
    import torch

_PYTHON: Mapping[str, Callable[..., Any]] = {n: getattr(operator, n) for n in PYTHON_OPERATORS}


class DeviceRunner(EngineRunner):
    """An engine that reads and writes PyTorch's tensors where they are, on the stream that is current in PyTorch."""

    device = "cuda"

    def run_tensors(self, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str], /) -> list[torch.Tensor]:
        """The outputs [B, ...], in order, in newly allocated tensors.

        Raises:
            InputError: dtypes or shapes are not those of the engine; or the execution failed.
        """
        torch: ModuleType = importlib.import_module("torch")
        self._opened()
        dtypes = {b.name: getattr(torch, b.dtype) for b in self.bindings}
        held = {name: tensor.contiguous() for name, tensor in inputs.items()}
        for name, tensor in held.items():
            if tensor.dtype != dtypes.get(name):
                raise InputError(f"inputs.{name}: must be {dtypes.get(name)} (got {tensor.dtype}). Build it again.")
        shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
        stream, profile = int(torch.cuda.current_stream().cuda_stream), self._profile_for(shapes)
        with self._execution() as execution:
            calls = execution.calls
            calls.choose(profile, shapes, stream)
            made = {n: torch.empty(calls.shape_of(n), dtype=dtypes[n], device=self.device) for n in outputs}
            for name, tensor in (held | made).items():
                calls.set_address(name, tensor.data_ptr())
            since = self._watch.mark()
            if not calls.execute(stream):
                raise execution_failed(self._watch.reason(since))
        return [made[n] for n in outputs]


class HybridRunner:
    """Runs one hybrid module; a context manager, as `EngineRunner` is.

    Args:
        data: the content of model.hybrid.
        version_compatible, without_lean_runtime: as for `EngineRunner`.

    Raises:
        InputError: the file is damaged. On entering: it names an operator that this PyTorch lacks, or an engine cannot
            be loaded.
        MissingError: on entering: no PyTorch with CUDA, no GPU, or no TensorRT.
    """

    def __init__(self, data: bytes, *, version_compatible: bool = False, without_lean_runtime: bool = False) -> None:
        self._hybrid = hybrid.from_bytes(data, HYBRID)
        self._device = DeviceRunner.device
        self._version_compatible, self._without_lean_runtime = version_compatible, without_lean_runtime
        self._stack = contextlib.ExitStack()
        self._open = False
        self._parts: list[DeviceRunner] = []
        self.name = "hybrid"

    def __enter__(self) -> HybridRunner:
        torch = self._torch = _pytorch(self._device)
        with contextlib.ExitStack() as stack:
            plan = self._hybrid.plan
            self._operators = {s.op: _operator(torch, s.op) for s in plan.steps if isinstance(s, OperatorStep)}
            self._parts = [self._part(engine) for engine in self._hybrid.engines]
            for part in self._parts:
                stack.enter_context(part)
            self._constants = {n: self._constant(n) for n in plan.constants}
            self._last = _last_readers(plan)
            self._stream = torch.cuda.Stream() if self._device == "cuda" else None
            self._stack = stack.pop_all()
        self._open = True
        self.name = f"{self._parts[0].name}, with PyTorch {torch.__version__}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        for part in ("_constants", "_operators"):
            self.__dict__.pop(part, None)
        self._stack.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of its engines, each once."""
        return tuple(dict.fromkeys(note for part in self._parts for note in part.notes))

    def run(self, inputs: Mapping[str, Array], /) -> dict[str, Array]:
        """The outputs by name in their binding dtypes.

        Raises:
            InputError: the inputs are not those of the module, an engine does not take them, or PyTorch fails.
        """
        plan, torch = self._hybrid.plan, self._torch if self._open else None
        if torch is None:
            raise InputError(NOT_OPEN)
        require_names(inputs, plan.inputs)
        current = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with torch.inference_mode(), current:
            values = {n: torch.from_numpy(np.array(inputs[n], order="C")).to(self._device) for n in plan.inputs}
            for index, step in enumerate(plan.steps):
                values[step.out] = self._step(step, values)
                for name in self._last.get(index, ()):
                    del values[name]
            return {n: self._argument(a, values).cpu().numpy() for n, a in plan.outputs.items()}

    def _part(self, engine: bytes) -> DeviceRunner:
        return DeviceRunner(
            engine,
            memory="torch",
            version_compatible=self._version_compatible,
            without_lean_runtime=self._without_lean_runtime,
        )

    def _step(self, step: EngineStep | OperatorStep, values: Mapping[str, Any]) -> Any:
        args = [self._argument(a, values) for a in step.args]
        if isinstance(step, EngineStep):
            made = self._parts[step.engine].run_tensors(dict(zip(step.inputs, args, strict=True)), step.outputs)
            return made[0] if len(made) == 1 else tuple(made)
        try:
            return self._operators[step.op](*args, **{k: self._argument(a, values) for k, a in step.kwargs.items()})
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"engine: {step.op} failed in PyTorch {self._torch.__version__} ({first_line(error)[:300]}). "
                "Use the PyTorch that the bundle was built with."
            ) from error

    def _argument(self, value: Any, values: Mapping[str, Any]) -> Any:
        """An argument of the plan as PyTorch takes it."""
        if isinstance(value, list):
            return [self._argument(v, values) for v in value]
        if not isinstance(value, dict):
            return value
        ((key, argument),) = value.items()
        if key == "value":
            return values[argument]
        if key == "tensor":
            return self._constants[argument]
        if key == "device":
            return self._torch.device(self._device)
        if key == "float":
            return float(argument)
        constant = getattr(self._torch, argument, None)
        if not isinstance(constant, getattr(self._torch, key)):
            raise InputError(f"{HYBRID}: {key} must be one of PyTorch's (got {argument!r}). {AGAIN}")
        return constant

    def _constant(self, name: str) -> torch.Tensor:
        info, raw = self._hybrid.plan.constants[name], self._hybrid.constants[name]
        dtype = getattr(self._torch, info.dtype)
        flat = self._torch.frombuffer(bytearray(raw), dtype=dtype) if raw else self._torch.empty(0, dtype=dtype)
        constant: torch.Tensor = flat.reshape(info.shape).to(self._device)
        return constant


def _pytorch(device: str) -> ModuleType:
    """PyTorch, with CUDA where that is asked for."""
    got = "none"
    if present("torch"):
        torch: ModuleType = importlib.import_module("torch")
        for registering in ("operators", "narrow"):
            importlib.import_module(f"trtpipe.quantization.{registering}")
        if device != "cuda" or torch.cuda.is_available():
            return torch
        got = f"{torch.__version__}, {old_driver() or 'which sees no GPU'}"
    raise MissingError(
        "engine: PyTorch with CUDA is not here, and some operations of a hybrid engine run in it "
        f"({got}). Install it: {pip_install('torch')}."
    )


def _operator(torch: ModuleType, name: str) -> Callable[..., Any]:
    """The operator by its name in a plan; one that only computes."""
    library, op, *overload = name.split(".")
    if library == "python":
        return _PYTHON[op]
    overload_object = getattr(getattr(getattr(torch.ops, library), op, None), overload[0], None)
    if not isinstance(overload_object, torch._ops.OpOverload) or overload_object._schema.is_mutable:
        raise InputError(
            f"engine: {name} must be an operator of PyTorch {torch.__version__} that writes to no argument (got "
            f"{'none' if overload_object is None else 'another'}). Use the PyTorch that the bundle was built with."
        )
    operator: Callable[..., Any] = overload_object
    return operator


def _last_readers(plan: hybrid.StoredPlan) -> dict[int, list[str]]:
    """The values that nothing reads after a step, by that step: their memory is given back there."""
    last: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        extra = list(step.kwargs.values()) if isinstance(step, OperatorStep) else []
        last[step.out] = index
        for key, argument in hybrid.references([*step.args, *extra]):
            if key == "value":
                last[argument] = index
    for key, argument in hybrid.references(list(plan.outputs.values())):
        if key == "value":
            last.pop(argument, None)
    readers: dict[int, list[str]] = {}
    for name, index in last.items():
        readers.setdefault(index, []).append(name)
    return readers

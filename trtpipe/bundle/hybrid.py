"""A hybrid module: TensorRT engines and the PyTorch operations between them, as one file without code or pickle.

The file, `model.hybrid`, is safetensors, all of it uint8: `plan` is canonical JSON, `engine:<n>` a serialized engine,
`tensor:<name>` the raw bytes of a constant that a PyTorch operation reads. The plan is a list of steps, each one engine
or one operator by its name; a reader knows every name beforehand, so nothing but the engines can bring code.
Reading it takes NumPy alone; `runtime.hybrid_runner` executes it, with PyTorch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, JsonValue, ValidationError
from safetensors.numpy import save

from calib.frozen import Frozen
from calib.strictjson import first_problem, loads
from trtpipe.bundle.golden import tensors_of
from trtpipe.bundle.manifest import AGAIN, HYBRID
from trtpipe.errors import InputError

#: Python's operators, on numbers and tuples, that a plan may name.
PYTHON_OPERATORS = ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg")
#: trtpipe's own Q/DQ in INT8, which `quantization.operators` registers.
OWN_OPERATORS = ("quantize", "dequantize", "dequantize_per_channel", "dequantize_beside")
#: All operators that a plan may name: ATen's, trtpipe's own Q/DQ, and Python's.
OPERATOR = (
    r"^(aten\.[a-z_][a-z0-9_]*\.[A-Za-z0-9_]+"
    rf"|trtpipe\.({'|'.join(OWN_OPERATORS)})\.default"
    rf"|python\.({'|'.join(PYTHON_OPERATORS)}))$"
)
#: Of ATen's, the one that reaches outside: it maps a file. Those that write to their arguments end in "_".
FORBIDDEN = frozenset({"from_file"})

#: Sizes of a constant's elements by PyTorch's names.
DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8,
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float8_e4m3fn": 1,
}  # fmt: skip
#: An argument that JSON has no word for is a mapping with one of these keys.
SPECIAL = ("value", "tensor", "dtype", "device", "layout", "memory_format", "float")

_NAME = r"^[A-Za-z_][A-Za-z0-9_.]*$"
_MAX_PLAN_BYTES, _MAX_DEPTH = 16 << 20, 8

PlainName = Annotated[str, Field(pattern=_NAME)]


class _Part(Frozen, strict=True):
    pass


class EngineStep(_Part):
    """One engine executed: `inputs[i]` is bound to `args[i]`; several `outputs` are a tuple, as `out`."""

    engine: Annotated[int, Field(ge=0)]
    inputs: tuple[str, ...] = Field(strict=False)
    args: tuple[JsonValue, ...] = Field(strict=False)
    outputs: tuple[str, ...] = Field(strict=False, min_length=1)
    out: PlainName


class OperatorStep(_Part):
    """One operation in PyTorch, whose result is called `out`."""

    op: Annotated[str, Field(pattern=OPERATOR)]
    args: tuple[JsonValue, ...] = Field(strict=False)
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    out: PlainName


class StoredConstant(_Part):
    """A constant in the file."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPE_BYTES)})$")]
    shape: tuple[Annotated[int, Field(ge=0)], ...] = Field(strict=False)


class StoredPlan(_Part):
    """What is executed, in order. `inputs` and the names of `outputs` are those of the bundle's bindings."""

    version: Literal[1] = 1
    inputs: tuple[PlainName, ...] = Field(strict=False, min_length=1)
    outputs: dict[str, JsonValue] = Field(min_length=1)
    steps: tuple[EngineStep | OperatorStep, ...] = Field(strict=False, min_length=1)
    constants: dict[PlainName, StoredConstant] = Field(default_factory=dict)


@dataclass(frozen=True)
class Hybrid:
    """A plan with the engines and the constants it names; `constants` are raw bytes, little-endian."""

    plan: StoredPlan
    engines: tuple[bytes, ...]
    constants: Mapping[str, bytes]


def to_bytes(hybrid: Hybrid) -> bytes:
    """The file. The same module gives the same bytes.

    Raises:
        InputError: the parts do not fit together.
    """
    _check(hybrid, HYBRID)
    text = _canonical(hybrid.plan.model_dump(mode="json"))
    parts = {"plan": text} | {f"engine:{i}": e for i, e in enumerate(hybrid.engines)}
    parts |= {f"tensor:{n}": c for n, c in hybrid.constants.items()}
    data: bytes = save({name: np.frombuffer(parts[name], np.uint8) for name in sorted(parts)})
    return data


def from_bytes(data: bytes, where: str) -> Hybrid:
    """The module in `data`, which messages call `where`, after all of it was checked. Nothing is executed.

    Raises:
        InputError: not safetensors, another version, an operator that is not allowed, a value read before it is there,
            a part that is missing, too many or of another size.
    """
    parts = tensors_of(data, where)
    for name, array in parts.items():
        if array.dtype != np.uint8 or array.ndim != 1:
            raise InputError(f"{where}: {name} must be uint8 [bytes] (got {array.dtype} {array.shape}). {AGAIN}")
    text = parts["plan"].tobytes() if "plan" in parts else b""
    hybrid = Hybrid(
        _plan(text, where),
        tuple(parts[n].tobytes() for n in sorted((n for n in parts if n.startswith("engine:")), key=_number)),
        {n.removeprefix("tensor:"): a.tobytes() for n, a in parts.items() if n.startswith("tensor:")},
    )
    wanted = {"plan", *(f"engine:{i}" for i in range(len(hybrid.engines))), *(f"tensor:{n}" for n in hybrid.constants)}
    if odd := sorted(wanted ^ set(parts)):
        raise InputError(f"{where}: must hold a plan, engines and constants alone (got {odd[0]}). {AGAIN}")
    _check(hybrid, where)
    return hybrid


def allowed(op: str) -> bool:
    """Whether a plan may name the operator `op`, like `aten.relu.default`."""
    name = op.split(".")[1] if op.count(".") else ""
    writes = name.endswith("_") and not name.endswith("__")
    return re.fullmatch(OPERATOR, op) is not None and name not in FORBIDDEN and not writes


def references(value: JsonValue, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every special argument within `value`, as (key, text).

    Raises:
        ValueError: a mapping that is no special argument, or nesting deeper than any argument needs.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("arguments must not be nested so deeply")
    if isinstance(value, list):
        for item in value:
            yield from references(item, depth + 1)
    elif isinstance(value, dict):
        key, argument = next(iter(value.items())) if len(value) == 1 else ("", None)
        if key not in SPECIAL or not isinstance(argument, str):
            raise ValueError(f"an argument must be one of {', '.join(SPECIAL)} (got {sorted(value)})")
        yield key, argument


def _canonical(raw: object) -> bytes:
    return json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _number(name: str) -> tuple[int, str]:
    digits = name.partition(":")[2]
    return (int(digits), name) if digits.isascii() and digits.isdecimal() and len(digits) < 6 else (1 << 30, name)


def _plan(text: bytes, where: str) -> StoredPlan:
    if len(text) > _MAX_PLAN_BYTES:
        raise InputError(f"{where}: the plan must be at most {_MAX_PLAN_BYTES} bytes (got {len(text)}). {AGAIN}")
    try:
        raw = loads(text)
        if not isinstance(raw, dict) or raw.get("version") != 1 or isinstance(raw.get("version"), bool):
            got = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
            raise InputError(f"{where}: the plan must be of version 1 (got {got!r}). Update trtpipe.")
        plan = StoredPlan.model_validate(raw)
        if _canonical(plan.model_dump(mode="json")) != text:
            raise ValueError("it is not in canonical form")
    except ValidationError as error:
        raise InputError(f"{where}: the plan must follow its schema (got {first_problem(error)}). {AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: the plan must be JSON (got: {error}). {AGAIN}") from None
    return plan


def _check(hybrid: Hybrid, where: str) -> None:
    try:
        _agrees(hybrid)
    except ValueError as error:
        raise InputError(f"{where}: the plan must agree with itself and its parts (got: {error}). {AGAIN}") from None


def _agrees(hybrid: Hybrid) -> None:
    """Every value is there before it is read, every part is used and of its size, no operator reaches outside."""
    plan = hybrid.plan
    known = set(plan.inputs)
    if len(known) != len(plan.inputs):
        raise ValueError("two inputs have one name")
    if set(plan.constants) != set(hybrid.constants):
        raise ValueError("constants other than the plan's")
    for name, constant in plan.constants.items():
        size = DTYPE_BYTES[constant.dtype] * math.prod(constant.shape)
        if size != len(hybrid.constants[name]):
            raise ValueError(f"constant {name} of {len(hybrid.constants[name])} bytes, not {size}")
    for step in plan.steps:
        if isinstance(step, OperatorStep):
            if not allowed(step.op):
                raise ValueError(f"operator {step.op}, which is not allowed")
            _defined([*step.args, *step.kwargs.values()], known, plan)
        else:
            if len(step.args) != len(step.inputs):
                raise ValueError(f"engine {step.engine} with {len(step.args)} arguments for {len(step.inputs)} inputs")
            _defined(list(step.args), known, plan)
        if step.out in known:
            raise ValueError(f"two values called {step.out}")
        known.add(step.out)
    used = sorted(s.engine for s in plan.steps if isinstance(s, EngineStep))
    if used != list(range(len(hybrid.engines))) or not used:
        raise ValueError(f"engines {used} executed, of {len(hybrid.engines)}")
    _defined(list(plan.outputs.values()), known, plan)


def _defined(args: list[JsonValue], known: set[str], plan: StoredPlan) -> None:
    for key, argument in references(args):
        if key == "value" and argument not in known:
            raise ValueError(f"value {argument} read before it is there")
        if key == "tensor" and argument not in plan.constants:
            raise ValueError(f"constant {argument}, which is not there")
        if key == "float" and argument not in ("inf", "-inf", "nan"):
            raise ValueError(f"number {argument}")

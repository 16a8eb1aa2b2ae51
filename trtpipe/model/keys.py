"""Keys of a calibration table: a tensor that an operation reads, by the operation's module and its place in it."""

from __future__ import annotations

from trtpipe.model.products import WEIGHTED


def numbered(name: str, before: int) -> str:
    """A name with the count of those before it in the module: `add`, `add_1`, `add_2`."""
    return name if before == 0 else f"{name}_{before}"


def input_key(module: str, before: int) -> str:
    """The input of an operation with a weight, whose module has `before` such operations before it."""
    return f"{module}:{numbered('input', before)}"


def weight_key(module: str, before: int) -> str:
    """The weight of an operation, as `input_key`."""
    return f"{module}:{numbered('weight', before)}"


def operand_key(module: str, operation: str, before: int, index: int | None = None) -> str:
    """An input of another operation, whose module has `before` of the same name before it; `index` where it has
    several."""
    return f"{module}:{numbered(operation, before)}.input{'' if index is None else f'_{index}'}"


def is_read_by(key: str, module: str, operation: str) -> bool:
    """Whether one of a module's operations of this name reads the tensor; of those with a weight, any of them."""
    if operation in WEIGHTED:
        return key.startswith(f"{module}:input")
    return key.startswith((f"{module}:{operation}.", f"{module}:{operation}_"))

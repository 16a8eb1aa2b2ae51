"""The user's network behind its bindings: casts, in-engine normalisation, and outputs as a tuple in the job's order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import traceback

from trtpipe.errors import InputError
from trtpipe.values import TensorSpec

#: Where the user's network sits in the wrapper; `nodes.module_path` strips it again.
INNER = "network"


def is_exported(network: torch.nn.Module) -> bool:
    """Whether it is a graph of torch.export, and not one of torch.fx, whose modules are called as any other's."""
    return isinstance(network, torch.fx.GraphModule) and not any(
        n.op == "call_module" and n.target != "_guards_fn" for n in network.graph.nodes
    )


def evaluating(network: torch.nn.Module) -> torch.nn.Module:
    """The network in eval mode. An exported one refuses train() and eval(): what it does was settled before."""
    if is_exported(network):
        network.train = network.eval = lambda mode=True: network  # type: ignore[method-assign, misc]
    return network.eval()


class Bound(torch.nn.Module):
    """Casts float16 inputs to float32, normalises where the job says so, and calls the network.

    A uint8 input [N, C, ...] with a normalisation is cast and scaled by 1/255 first. Without one the network has it as
    it is, or where `casts_uint8`, as it takes none, as float32 from 0 to 255.
    Outputs are float32 where they are floating point, in the order of `output_names`.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        inputs: Sequence[TensorSpec],
        normalize: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]],
        output_names: tuple[str, ...],
        *,
        nested: bool = False,
    ) -> None:
        super().__init__()
        self.nested = nested
        self.casts_uint8 = True
        self.network = network
        self.specs = tuple(inputs)
        self.output_names = output_names
        self._keeps_meta = is_exported(network)
        for k, spec in enumerate(inputs):
            if spec.name in normalize:
                mean, std = (torch.tensor(v, dtype=torch.float32) for v in normalize[spec.name])
                scale = 255.0 if spec.dtype == "uint8" else 1.0
                shape = (1, -1, *([1] * (len(spec.shape) - 2)))
                self.register_buffer(f"factor_{k}", (1.0 / (std * scale)).reshape(shape))
                self.register_buffer(f"offset_{k}", (mean / std).reshape(shape))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The network's outputs for `inputs` in their binding dtypes."""
        return self.outputs(self.returned(inputs))

    def returned(self, inputs: Sequence[torch.Tensor]) -> object:
        """What the network itself returns for one batch [B, ...] of the bound inputs, in the job's dtypes."""
        arguments = self.prepared(inputs)
        if not self._keeps_meta:
            return self.network(*arguments)
        with traceback.preserve_node_meta():  # each node's module, which its generated code does not know
            return torch.fx.Interpreter(self.network).run(*arguments)

    def prepared(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """The arguments of the network: float16, and uint8 if it is cast, as float32; normalised where the job says so.

        Names that are paths are put together: `batch.image` and `batch.mask` make one dict, `pair.0`, `pair.1` a list.
        """
        arguments: list[torch.Tensor] = []
        for k, x in enumerate(inputs):
            if self.specs[k].dtype == "float16" or (x.dtype == torch.uint8 and (self._scales(k) or self.casts_uint8)):
                x = x.to(torch.float32)
            if self._scales(k):
                x = x * getattr(self, f"factor_{k}") - getattr(self, f"offset_{k}")
            arguments.append(x)
        if not self.nested:
            return arguments
        return list(_assembled([(s.name.split("."), x) for s, x in zip(self.specs, arguments, strict=True)]).values())

    def cast_bytes(self) -> tuple[str, ...]:
        """Names of the uint8 inputs that the network is given as float32, though no normalisation asks for that."""
        kept = [s.name for k, s in enumerate(self.specs) if s.dtype == "uint8" and not self._scales(k)]
        return tuple(kept) if self.casts_uint8 else ()

    def _scales(self, place: int) -> bool:
        """Whether the input there is normalised."""
        return hasattr(self, f"factor_{place}")

    def count(self, inputs: Sequence[torch.Tensor]) -> int:
        """How many tensors the network returns for one batch of the bound inputs, [B, ...] in the job's dtypes."""
        return len(list(tensors(self.network(*self.prepared(inputs)))))

    def left_out(self, returned: object) -> tuple[str, ...]:
        """Names of the tensors in what the network returned that the job does not return."""
        found = _by_path(returned)
        return tuple(n for n in found if n not in self.output_names) if found.keys() >= set(self.output_names) else ()

    def outputs(self, returned: object) -> tuple[torch.Tensor, ...]:
        """What the network returned as a tuple in the job's order, tensors in its own dtypes and shapes.

        By name, as in `detections.0.boxes`, where every name is the path of a tensor; in order where what was
        returned is a tensor, or a list or tuple of tensors.

        Raises:
            InputError: the number or the names of the outputs are not the job's.
        """
        names, found = self.output_names, _by_path(returned)
        if all(n in found for n in names):
            values = [found[n] for n in names]
        else:
            unnamed = [returned] if isinstance(returned, torch.Tensor) else returned
            values = list(found.values())
            if not isinstance(unnamed, list | tuple) or len(values) != len(unnamed) or len(values) != len(names):
                raise InputError(_unlike_the_job(returned, names, {s.name for s in self.specs}))
        half = (torch.float16, torch.bfloat16, torch.float64)
        return tuple(t.to(torch.float32) if t.dtype in half else t for t in values)


def _assembled(parts: Sequence[tuple[Sequence[str], torch.Tensor]]) -> dict[str, Any]:
    """Values by path as nested dicts; the children of one parent are a list where they are named 0, 1, ..."""
    by_name: dict[str, list[tuple[Sequence[str], torch.Tensor]]] = {}
    for (name, *rest), value in parts:
        by_name.setdefault(name, []).append((rest, value))
    made: dict[str, Any] = {}
    for name, inner in by_name.items():
        children = _assembled(inner) if inner[0][0] else None
        places = children is not None and list(children) == [str(k) for k in range(len(children))]
        made[name] = inner[0][1] if children is None else list(children.values()) if places else children
    return made


#: Tensors that a message lists, which is to be pasted whole; and up to how many with a line each.
_MOST_LISTED, _MOST_LINES = 200, 6


def _unlike_the_job(returned: object, names: tuple[str, ...], inputs: Collection[str]) -> str:
    """The message when the model's outputs are not the job's: what it returned, and the lines that help."""
    message = f"outputs: must be the tensors that the model returns (got {', '.join(names)}, and it returns "
    message += f"{described(returned)}). "
    found = list(dict(tensors(returned)))
    if not found:
        return message + "Return tensors from its forward."
    named = "output" if found == [""] else None
    in_order = isinstance(returned, list | tuple) and not hasattr(returned, "_fields")
    flat = in_order and found == [str(k) for k in range(len(returned))]  # type: ignore[arg-type]
    if taken := [n for n in found if n in inputs]:
        return message + f"{taken[0]} is an input's name too: name that input otherwise in the job."
    listed = [f"{named or (f'output_{n}' if flat else n)}: {{}}" for n in found[:_MOST_LISTED]]
    message += "Name each of them in the job:\n    outputs:"
    if len(found) <= _MOST_LINES:
        return message + "".join(f"\n      {line}" for line in listed)
    more = f"  # and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    return f"{message} {{{', '.join(listed)}}}{more}"


#: A size that torch.export does not know, where the model returns it beside its tensors.
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _parts(value: object) -> dict[str, object]:
    """The parts of a container by how they are reached: a key, a place or a field."""
    if isinstance(value, dict):
        return {str(k): v for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return {str(k): v for k, v in enumerate(value)}
    if value is None or isinstance(value, (torch.Tensor, int, float, str, *_SYMBOLIC)):
        return {}
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def tensors(value: object, path: str = "", around: tuple[object, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in a value, of any dtype and shape, by its path: keys, places and fields with dots between
    them, as `detections.0.boxes`. What holds one of those `around` it is not walked again."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for key, part in _parts(value).items():
        if not any(part is outer for outer in (*around, value)):
            yield from tensors(part, f"{path}.{key}" if path else key, (*around, value))


def _by_path(value: object) -> dict[str, torch.Tensor]:
    """Each tensor by its path.

    Raises:
        InputError: two have one path, as a key may hold a dot.
    """
    found: dict[str, torch.Tensor] = {}
    for path, tensor in tensors(value):
        if path in found:
            raise InputError(
                f"outputs: each tensor that the model returns must have a path of its own (got two at {path}, and it "
                f"returns {described(value)}). Rename the key that holds a dot."
            )
        found[path] = tensor
    return found


def described(value: object, levels: int = 5) -> str:
    """A value in a few words, as `a dict of boxes: a list of 2 (float32 [3, 4], float 0.5)`; text, and what is
    `levels` deep, by its type alone."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None or isinstance(value, bool | int | float):
        return f"{value}" if value is None else f"{type(value).__name__} {value}"
    if not levels or isinstance(value, str | bytes):
        return type(value).__name__
    parts = _parts(value)
    shown = [f"{k}: {described(v, levels - 1)}" for k, v in list(parts.items())[:3]]
    shown += ["..."] * (len(parts) > 3)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        inside = ", ".join([described(v, levels - 1) for v in value[:3]] + (["..."] if len(value) > 3 else []))
        return f"a {type(value).__name__} of {len(value)} ({inside})"
    if isinstance(value, dict):
        return f"a dict of {', '.join(shown) or 'nothing'}"
    return f"{type(value).__name__}({', '.join(shown)})"


def bind(
    network: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    normalize: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]],
    output_names: tuple[str, ...],
    *,
    nested: bool = False,
) -> Bound:
    """`network` behind its bindings, in eval mode; `nested`: names of inputs with dots are paths in its arguments."""
    return Bound(network, inputs, normalize, output_names, nested=nested).eval().requires_grad_(False)

"""Whether a model gives the same outputs for the same inputs: nothing can be compared with one that does not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calib.errors import some_of
from calib.user_code import user_code
from trtpipe.errors import BuildError, InputError
from trtpipe.model.computing import off
from trtpipe.model.export import example_inputs, export, filled
from trtpipe.model.output_specs import whole_value
from trtpipe.values import LoadedModel

if TYPE_CHECKING:
    import torch

#: TorchScript may reorder float32 sums; a larger difference means that tracing lost something of the model.
EAGER_TOLERANCE = 1e-4
#: What the same code gives for the same inputs differs by less, whatever kernels a GPU takes: more is no rounding.
_SAME_CODE = 1e-5
#: Runs of a model that draws random numbers: one that chooses between two ways takes another one in some of them.
_RUNS = 12


def require_repeatable(
    loaded: LoadedModel,
    args: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    at_first: Sequence[torch.Tensor],
) -> None:
    """Refuse a model that gives other outputs when it is run again, at once, after other inputs, or after all that came
    since it gave `at_first` for `first`; several times where it draws random numbers. For a model of which something
    is known to differ: it asks for more than rounding may take.

    Args:
        loaded: the model behind its bindings.
        args, first: batches of its inputs, in their dtypes and shapes.
        at_first: its outputs.

    Raises:
        InputError: it gives others, or its own code raised.
    """
    whole = whole_value(loaded.module, loaded.inputs)  # type: ignore[arg-type]
    other = [filled(a.shape, s.dtype, whole).to(a.device) for s, a in zip(loaded.inputs, args, strict=True)]
    drawn = _generators()
    once = _again(loaded, args)
    for _ in range(_RUNS if _generators() != drawn else 1):
        require_unchanged(loaded, args, once, _SAME_CODE)
    _again(loaded, other)
    require_unchanged(loaded, args, once, _SAME_CODE)
    require_unchanged(loaded, first, at_first, _SAME_CODE)


def exported(loaded: LoadedModel) -> torch.export.ExportedProgram:
    """The model as torch.export gives it (`export`), on inputs of zeros.

    Raises:
        BuildError: torch.export cannot capture it.
        InputError: its own code raised; or it cannot be captured, and gives other outputs when it is run again: what it
            draws, say, decides.
    """
    try:
        return export(loaded.module, loaded.inputs)
    except BuildError:
        whole = whole_value(loaded.module, loaded.inputs)  # type: ignore[arg-type]
        args = example_inputs(loaded.inputs, whole)
        try:
            once = _again(loaded, args)
        except InputError:  # of sizes that it cannot have, say, which is what torch.export says
            once = None
        if once is not None:
            require_repeatable(loaded, args, args, once)
        raise


def require_unchanged(
    loaded: LoadedModel,
    args: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    tolerance: float = EAGER_TOLERANCE,
) -> None:
    """Refuse a model that gives other outputs than `before` for a batch `args` of its inputs, of any dtypes and shapes,
    by more than `tolerance` of the largest output.

    Raises:
        InputError: it does, or its own code raised.
    """
    for spec, a, b in zip(loaded.outputs, before, _again(loaded, args), strict=True):
        if a.shape != b.shape or off(a, b) > tolerance:
            raise InputError(
                f"model: it gives other outputs for the same inputs (other values of {spec.name} when it was run "
                "again), so that nothing can be compared with it. Take out what draws random numbers, reads the clock, "
                "counts calls or keeps a state in eval mode; make a state an input and an output."
            )


def require_same_on_zeros(loaded: LoadedModel) -> None:
    """Refuse a model that gives other outputs when it is run again on zeros of its declared inputs, if its outputs are
    finite there.

    Raises:
        InputError: it does, or its own code raised.
    """
    whole = whole_value(loaded.module, loaded.inputs)  # type: ignore[arg-type]
    args = example_inputs(loaded.inputs, whole)
    once = _again(loaded, args)
    if all(bool(output.isfinite().all()) for output in once):
        require_unchanged(loaded, args, once)


def require_no_draws(graph: torch.fx.GraphModule) -> None:
    """Refuse operations that draw random numbers on the way to an output, though a seed may make them repeat.

    Raises:
        InputError: there is one.
    """
    import torch

    from trtpipe.model.nodes import op_name, source_line

    for node in _reached(graph):
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        own = getattr(node.target, "namespace", "") == "trtpipe"  # tagged so that they are not folded away
        if draws and not own and not _out_of_training(node):
            at = source_line(node)
            raise InputError(
                f"model: it draws random numbers in eval mode ({op_name(node)}{f' at {at}' if at else ''}), and an "
                "engine draws others than PyTorch, whatever the seed. Take that out (a dropout by "
                "training=self.training, in attention dropout_p=0.0), or make them an input."
            )


def plain_attributes(module: torch.nn.Module) -> dict[str, object]:
    """By `<path>.<name>`, the numbers, truth values and texts among the attributes of a model's modules, and None."""
    from trtpipe.model.bindings import INNER

    return {
        f"{path}.{name}".removeprefix(f"{INNER}."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if value is None or type(value) in (bool, int, float, complex, str)
    }


def changed_by_calls(module: torch.nn.Module, before: Mapping[str, object]) -> tuple[str, ...]:
    """Notes on attributes that were others `before` the latest calls: a graph holds what they were in one call."""
    now = plain_attributes(module)
    changed = [f"{n} ({before[n]!r}, then {now[n]!r})" for n in before if n in now and now[n] != before[n]]
    if not changed:
        return ()
    return (
        f"model: each call may change what it keeps outside its inputs and outputs: {some_of(changed)}. An engine "
        "answers as in the call in which it was captured",
    )


def drop_writes(graph: torch.fx.GraphModule) -> None:
    """Take out what writes into buffers and inputs, which no engine does: whoever runs the graph keeps his samples.

    Raises:
        InputError: an output depends on a buffer that is written: it is another in the next call.
    """
    from trtpipe.model.bindings import INNER
    from trtpipe.model.nodes import calls, is_constant, op_name, source_line

    ends = set(graph.graph.find_nodes(op="placeholder"))
    writes = [n for n in calls(graph.graph) if op_name(n) == "copy_" and (is_constant(n.args[0]) or n.args[0] in ends)]
    written = {n.args[0].target: n.args[1] for n in writes if is_constant(n.args[0])}
    for node in _reached(graph) if written else ():
        if node.op == "get_attr" and node.target in written:
            at = source_line(written[node.target])  # type: ignore[arg-type]
            raise InputError(
                f"model: it changes its buffer {str(node.target).removeprefix(f'{INNER}.')} in eval mode"
                f"{f' (at {at})' if at else ''}, and what it gives depends on that: the next call gives something "
                "else. Take out what counts calls or keeps a state in eval mode; make a state an input and an output."
            )
    for node in writes:
        graph.graph.erase_node(node)


def _reached(graph: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """The nodes on the ways to the outputs."""
    reached, ways = set(), list(graph.graph.find_nodes(op="output"))
    while ways:
        node = ways.pop()
        if node not in reached:
            reached.add(node)
            ways += node.all_input_nodes
    return reached


def _out_of_training(node: torch.fx.Node) -> bool:
    """Whether an operation draws in training alone and is told that it does not train: dropouts, recurrent layers,
    attention."""
    from trtpipe.model.nodes import arguments_of

    values = arguments_of(node)
    return any(values.get(name) is False for name in ("train", "training")) or values.get("dropout_p") == 0


def fresh(args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies of tensors of any dtype and shape: a model may write to its inputs."""
    return tuple(a.clone() for a in args)


def _generators() -> tuple[object, ...]:
    """What the generators of random numbers of Python, NumPy and PyTorch are at: another thing after each draw."""
    import torch

    kind, keys, *at = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *at, torch.get_rng_state().numpy().tobytes()


def _again(loaded: LoadedModel, args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    import torch

    with torch.inference_mode(), user_code("the model, run again", InputError):
        outputs: tuple[torch.Tensor, ...] = loaded.module(*fresh(args))
        return outputs

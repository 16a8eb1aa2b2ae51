"""A network's weights: taken from a file, and their digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from calib.files import is_torchscript, suffix_of
from calib.types import JsonObject
from calib.user_code import user_code
from trtpipe.errors import InputError, first_line
from trtpipe.model.failures import typed_line

if TYPE_CHECKING:
    import torch


def load_weights(network: torch.nn.Module, path: Path) -> None:
    """Give the network the tensors of a .safetensors or .pt file, wherever in nested dicts they are.

    Raises:
        InputError: the file cannot be read, holds something else, or does not fit the network; or it holds several sets
            of tensors that would, such as an average of the weights beside them.
    """
    import torch

    try:
        if suffix_of(path) == ".safetensors":
            from safetensors.torch import load_file

            state: JsonObject = load_file(str(path))
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        got = f"{path}: {error.strerror or first_line(error)}"
        raise InputError(f"model.weights: must be a file that can be read (got {got}). Is all of it there?") from None
    except Exception as error:
        if is_torchscript(path):
            got = f"{path.name}, of torch.jit.save"
            step = "Save the state_dict of the module that it was made of, and name the file in model.torchscript."
            raise InputError(f"model.weights: must be a file of tensors (got {got}). {step}") from None
        # torch goes on about options of torch.load that trtpipe does not have.
        reason = (str(error).partition("WeightsUnpickler error: ")[2] or str(error)).partition(" was not an allowed")[0]
        if blocked := re.search(r"unsupported GLOBAL \S+", reason):  # below advice to switch the protection off
            reason = f"U{blocked[0][1:]}"
        step = "Save the state_dict, not the module." if " global" in str(error) else "Is it one, and all of it there?"
        step = "It would run that when it is read: save the state_dict, of tensors alone." if blocked else step
        if "numpy" in reason:
            step = "Make its NumPy arrays tensors, by torch.from_numpy, and save it again."
        raise InputError(
            f"model.weights: must be a .safetensors file or a .pt file of tensors (got {path.name}: "
            f"{first_line(reason) or first_line(error)}). {step}"
        ) from error
    names = set(network.state_dict())
    sets = list(_sets(state, names)) if names else []
    if len(sets) > 1:
        keys = ["".join(f"[{key!r}]" for key in at) for at, _ in sets]
        raise InputError(
            f"model.weights: must hold the model's weights once (got {path.name} with {len(sets)} sets of them: "
            f"{', '.join(keys)}). Save the one that is meant: torch.save(torch.load({path.name!r}){keys[-1]}, ...)."
        )
    if sets:
        state = sets[0][1]
    for wrapper in () if sets else ("state_dict", "model"):  # of a model with other names, as is said below
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        kind = "a dict of other keys" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise InputError(
            f"model.weights: must hold tensors by their names in the model (got {kind} in {path.name}). Save the "
            "model's state_dict()."
        )
    levels = [name for name, tensor in network.state_dict().items() if _are_levels(state.get(name), tensor)]
    if levels:
        name = levels[0]
        raise InputError(
            f"model.weights: must hold the model's weights as numbers of its own kind (got {name} in "
            f"{_short(state[name].dtype)}, which is {_short(network.state_dict()[name].dtype)} in the model; "
            f"{len(levels)} such). Integers are levels without their scale: save the weights in floating point."
        )
    with user_code("model.weights: load_state_dict() of the model", InputError):
        try:
            network.load_state_dict(_with_tied(network, state), strict=True)
            return
        except RuntimeError as error:
            unfit = str(error)
    prefix = _prefix(names, set(state))
    step = f"Take {prefix!r} off the names: {{k.removeprefix({prefix!r}): v for k, v in state.items()}}."
    step = step if prefix else "Check model.args."
    raise InputError(f"model.weights: must fit the model (got {path.name}: {unfit}). {step}")


def _with_tied(network: torch.nn.Module, state: JsonObject) -> JsonObject:
    """The saved tensors by all of their names in the network: safetensors keeps one of those that share a tensor."""
    own = network.state_dict(keep_vars=True)
    saved = {id(tensor): state[name] for name, tensor in own.items() if name in state}
    return {**{name: saved[id(tensor)] for name, tensor in own.items() if id(tensor) in saved}, **state}


def _are_levels(given: object, wanted: object) -> bool:
    """Whether a saved tensor of integers is to become one of floating point."""
    import torch

    if not isinstance(given, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return False
    return wanted.is_floating_point() and not given.is_floating_point() and not given.is_complex()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: How deep in a checkpoint weights are looked for.
_DEEPEST = 4


def _sets(held: object, names: set[str], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], JsonObject]]:
    """Every dict of a checkpoint that has the model's names, or those behind one prefix, and the keys that lead there;
    of a network's own only the outermost."""
    if not isinstance(held, dict) or len(at) > _DEEPEST:
        return
    if all(isinstance(key, str) for key in held) and _prefix(names, set(held)) is not None:
        yield at, held
        return
    for key, inner in held.items():
        yield from _sets(inner, names, (*at, key))


def _prefix(names: set[str], saved: set[str]) -> str | None:
    """What stands before the model's names among saved ones, as DataParallel has it; empty where nothing does, None
    where they are not there."""
    if names <= saved:
        return ""
    some = min(saved, default="")
    for prefix in (some[: at + 1] for at, letter in enumerate(some) if letter == "."):
        if names == {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}:
            return prefix
    return None


def weights_digest(network: torch.nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all parameters and buffers, in the order of their names.

    Raises:
        InputError: one of them has no values, or is not dense.
    """
    return _digest_of({**dict(network.named_parameters()), **dict(network.named_buffers())})


def read_weights_digest(module: torch.nn.Module, program: torch.export.ExportedProgram) -> str:
    """As `weights_digest`, of the parameters and buffers that operations of a captured network read as tensors.

    An operation's own arguments are none, such as axes that an ONNX file holds beside its weights, nor is what training
    alone needs.

    Args:
        module: the network, behind its bindings or not.
        program: that module, exported.
    """
    from trtpipe.model.bindings import INNER

    network = getattr(module, INNER, module)
    signature = program.graph_signature
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes = (n for n in program.graph.nodes if n.op == "placeholder" and n.users and n.name in held)
    names = {held[n.name].removeprefix(f"{INNER}.") for n in nodes}
    every = (*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False))
    read = {id(tensor) for name, tensor in every if name in names}  # what has two names counts under its first
    own = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return _digest_of({name: tensor for name, tensor in own.items() if id(tensor) in read})


def _digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        try:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            values = (flat if flat.numel() else torch.empty(0)).view(torch.uint8).numpy()  # no stride of nothing
        except (RuntimeError, ValueError, TypeError) as error:  # sparse, on "meta", of a lazy module, a subclass
            raise InputError(
                f"model: every weight must be a dense tensor with values (got {name}: {typed_line(error)}). "
                "Make it one before the model is returned."
            ) from error
        digest.update(values.tobytes())
    return digest.hexdigest()

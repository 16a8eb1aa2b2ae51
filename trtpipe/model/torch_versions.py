"""The releases of PyTorch that trtpipe supports, what fits each, and what differs between them.

Differences are asked of the imported module where it can tell; the numbers are for what is judged before torch is
imported. `model.pt2e` has the one choice between modules.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from trtpipe.packages import BUILDING, CAPTURE, RUN, pip_install
from trtpipe.version_numbers import parse_version

if TYPE_CHECKING:
    import torch

#: The oldest release that is supported, and the first that is not known yet.
OLDEST, UNKNOWN = (2, 6), (2, 16)
#: The first whose PT2E quantization is torchao's; before, it is PyTorch's own.
PT2E_IN_TORCHAO = (2, 7)
#: From a release of PyTorch on, the first and last torchao whose PT2E can be imported with it (docs/support.md).
TORCHAO = (((2, 7), (0, 13), (0, 17)), ((2, 11), (0, 17), (0, 18)), ((2, 14), (0, 18), (0, 18)))

#: The first whose ONNX exporter leaves the program that it is given as it was: before, it fixes its dynamic dimensions.
EXPORTER_KEEPS_SHAPES = (2, 7)
#: The first whose torch.export shows of a pooling behind a strided convolution that it takes any height and width.
SHOWS_MORE = (2, 13)


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version of PyTorch: (2, 14) of "2.14.1+cu130"; (0, 0) of what is none."""
    major, minor, *_ = parse_version(version) or (0, 0)
    return major, minor


def dotted(number: tuple[int, int]) -> str:
    """A release as people write it: 2.13."""
    return f"{number[0]}.{number[1]}"


def unsupported(version: str) -> str | None:
    """Why this release of PyTorch cannot be used, as "must ... (got ...)"; None where it can."""
    if OLDEST <= release(version) < UNKNOWN:
        return None
    last = dotted((UNKNOWN[0], UNKNOWN[1] - 1))
    return f"torch must be {dotted(OLDEST)} to {last} (got {version})"


def needs_torchao(version: str) -> bool:
    """Whether quantization with this release of PyTorch takes PT2E from torchao."""
    return release(version) >= PT2E_IN_TORCHAO


def building_modules(version: str | None) -> tuple[str, ...]:
    """What every build imports, with this release of PyTorch; with None, which is none, all that it may need."""
    modules = (*CAPTURE, *BUILDING)
    return modules if version is None or needs_torchao(version) else tuple(m for m in modules if m != "torchao")


def misfit(version: str, torchao: str) -> str | None:
    """Why these releases of PyTorch and torchao cannot be used together, and what to do; None where they can, or need
    not, as PyTorch has its own.
    """
    if not needs_torchao(version):
        return None
    first, last = [row[1:] for row in TORCHAO if row[0] <= release(version)][-1]
    if first <= release(torchao) <= last:
        return None
    fitting = pip_install(f"torchao=={last[0]}.{last[1]}.*")
    return f"torchao must be one for torch {version} (got {torchao}).{RUN}{fitting}"


def graph_module(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """An exported program as a module, without the guards on its inputs that PyTorch has from 2.9 on."""
    import torch

    parameters = inspect.signature(program.module).parameters
    module = program.module(check_guards=False) if "check_guards" in parameters else program.module()
    assert isinstance(module, torch.fx.GraphModule)
    return module


def scripted(network: torch.nn.Module) -> torch.nn.Module:
    """The network as TorchScript, in eval mode.

    What is raised where that cannot be made is the same each time: PyTorch keeps the half that it has compiled, and
    would say that it cannot define it again.
    """
    import torch
    from torch.jit import _recursive

    try:
        made: torch.nn.Module = torch.jit.script(network).eval()
        return made
    except BaseException:
        _recursive.concrete_type_store = _recursive.ConcreteTypeStore()
        raise

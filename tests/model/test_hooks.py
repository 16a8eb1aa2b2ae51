"""Hooks that a process has for every module."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nights
import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from trtpipe.errors import InputError
from trtpipe.job.load import read_job
from trtpipe.model.load import load_model

REGISTER: dict[str, Callable[..., object]] = {
    "register_module_forward_hook": lambda: modules.register_module_forward_hook(lambda m, x, y: y),
    "register_module_forward_pre_hook": lambda: modules.register_module_forward_pre_hook(lambda m, x: x),
}


@pytest.mark.parametrize("register", REGISTER)
def test_a_hook_for_all_modules_is_refused(register: str, tmp_path: Path) -> None:
    """Of the model's code or of the caller's: it would run in captured graphs once more, and in what PT2E exports."""
    job = read_job(nights.write_job(nights.make_world(tmp_path), "m"))
    handle = REGISTER[register]()
    try:
        with pytest.raises(
            InputError, match=re.escape("model: must leave the process without hooks for all modules")
        ) as e:
            load_model(job)
    finally:
        handle.remove()  # type: ignore[attr-defined]
    assert register in str(e.value)
    assert getattr(nn.Module(), register.replace("_module", ""))  # what it says to call instead
    load_model(job)


def test_these_are_the_hooks_that_a_forward_pass_runs() -> None:
    """A new kind of them in PyTorch would be missed."""
    held = {name for name in vars(modules) if name.startswith("_global_forward") and name.endswith("hooks")}
    assert held == {"_global_forward_hooks", "_global_forward_pre_hooks"}
    assert torch.nn.modules.module is modules

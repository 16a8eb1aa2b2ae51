"""Hooks that a process has for every module, its own and others'."""

from __future__ import annotations

from trtpipe.errors import InputError

#: What registers them, and what PyTorch (1.8 to 2.14) keeps those in that change what a forward pass gives.
_REGISTERED = {
    "register_module_forward_pre_hook": "_global_forward_pre_hooks",
    "register_module_forward_hook": "_global_forward_hooks",
}


def require_no_hooks_for_all() -> None:
    """Refuse hooks that run in every module of the process: they would run in captured graphs too, once more.

    Raises:
        InputError: there is one.
    """
    from torch.nn.modules import module

    for register, held in _REGISTERED.items():
        if getattr(module, held, None):
            raise InputError(
                f"model: must leave the process without hooks for all modules (got one of {register}, which runs in "
                "every module there is, captured graphs too). Register it with the modules that are meant: "
                f"for m in model.modules(): m.{register.replace('_module', '')}(hook)."
            )

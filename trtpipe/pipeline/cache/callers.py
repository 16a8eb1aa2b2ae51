"""On whose behalf a file is opened or a program run: by the functions that are being called."""

from __future__ import annotations

import sys
from types import FrameType

from calib.user_code import OURS
from trtpipe.pipeline.cache.paths import is_own


def is_from_users_code() -> bool:
    """Whether a function of the user's own is among the callers, as far as trtpipe is not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            return True
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in OURS and not module.startswith(f"{__package__}."):
            return False
        frame = frame.f_back
    return False


def is_package_import() -> bool:
    """Whether an installed package reads while it is imported: its version stands for that, and a process that has
    imported it before does not read it again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(source := frame.f_code.co_filename):
        if frame.f_code.co_name == "<module>" and not source.startswith("<"):
            return True
        frame = frame.f_back
    return False

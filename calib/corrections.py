"""The post-training corrections of a model and what each step of them gained: kept beside the table.

calib stores the arrays and does not interpret them; their file is `calibration.corrections.safetensors`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.numpy import load, save

from calib.errors import CalibError
from calib.files import read_regular
from calib.types import Array

#: Steps that change thresholds: those of another algorithm undo them.
OF_THRESHOLDS = ("ranges", "thresholds")
#: Name of a step or of a digest: what the caller calls it.
StepName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)]
Decibels = Annotated[float, Field(allow_inf_nan=False)]


class Step(BaseModel):
    """One correction as it was tried.

    Attributes:
        name: which one.
        kept: whether it is part of the result; a step that does not gain on unseen samples is taken back.
        before_db, after_db: signal to quantization noise ratio at the model's outputs without and with it.
        detail: what it did, in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: StepName
    kept: bool
    before_db: Decibels
    after_db: Decibels
    detail: Annotated[str, Field(max_length=1024)] = ""

    def __str__(self) -> str:
        """`equalization: kept, 14.2 to 16.8 dB on unseen samples (42 groups of channels)`."""
        tail = f" ({self.detail})" if self.detail else ""
        verdict = "kept" if self.kept else "rejected"
        return f"{self.name}: {verdict}, {self.before_db:.1f} to {self.after_db:.1f} dB on unseen samples{tail}"


@dataclass(frozen=True, eq=False)
class Corrections:
    """Steps in the order they were tried, and the arrays of those kept, by name; `none` is why none could be tried."""

    steps: tuple[Step, ...]
    arrays: Mapping[str, Array]
    none: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """What was tried, each step by itself, or why nothing was."""
        return (*map(str, self.steps), *([f"corrections: {self.none}; none was made"] if self.none else ()))

    def for_thresholds_of(self, algorithm: str) -> Corrections:
        """The same beside the thresholds of an algorithm, which undo the steps that moved thresholds."""

        def undone(step: Step) -> Step:
            if not step.kept or step.name not in OF_THRESHOLDS:
                return step
            detail = "; ".join(filter(None, (step.detail, f"undone by thresholds of {algorithm}")))
            return step.model_copy(update={"kept": False, "detail": detail})

        return replace(self, steps=tuple(map(undone, self.steps)))

    @property
    def packed(self) -> bytes:
        """The arrays as safetensors; b"" when there are none."""
        return bytes(save({k: np.ascontiguousarray(v) for k, v in self.arrays.items()})) if self.arrays else b""

    @cached_property
    def sha256(self) -> str | None:
        """Digest of the file; None when there is none."""
        return hashlib.sha256(self.packed).hexdigest() if self.arrays else None


def corrections_path(path: Path) -> Path:
    """Where the arrays of the table at `path` are: calibration.json -> calibration.corrections.safetensors."""
    return path.with_suffix(".corrections.safetensors")


def load_corrections(where: Path, steps: tuple[Step, ...], sha256: str | None, none: str) -> Corrections:
    """The corrections of the table at `where`.

    Raises:
        CalibError: the file beside it is missing or another one.
    """
    if sha256 is None:
        return Corrections(steps, {}, none)
    path = corrections_path(where)
    try:
        data = read_regular(path)
    except OSError as error:
        raise CalibError(
            f"{path}: {where.name} needs its corrections beside it (got {error.strerror}). Copy both files; where the "
            "table was renamed, so must this one be."
        ) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CalibError(f"{path}: these are not the corrections of {where.name}: the digest differs. Calibrate again.")
    try:
        return Corrections(steps, load(data))
    except (SafetensorError, KeyError, ValueError) as error:
        raise CalibError(f"{path}: must be a safetensors file (got {error}). Calibrate again.") from error

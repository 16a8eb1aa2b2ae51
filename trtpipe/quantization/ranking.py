"""What quantizing each module costs: the figures of `sensitivity`, which need no torch to be read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ModuleSensitivity:
    """One source module, alone in its number format in an otherwise float32 network.

    Attributes:
        module, source, op: its path, `file.py:line`, and its first operation.
        sqnr_db: signal to quantization noise ratio at the model's outputs, the worst of them, dB; inf: no difference.
        outputs_db: the same of each of the model's outputs by itself, by name, but those that are zero everywhere.
        own_sqnr_db: the same at the module's own output.
        half_sqnr_db: at its own output again, computed from inputs rounded to FP16 (or BF16) instead; -inf where a
            value overflows, None when the job has no half precision.
        macs: multiply-accumulates for one sample.
        agreement: share of samples with the float network's argmax, in [0, 1]; None without one score a class.
        loss_rise: mean cross-entropy less the float network's, nats, on labelled samples; None without labels.
        fp8_sqnr_db: of a module in INT8 or 4 bits, at its own output in FP8 instead; None where the job has no FP8, or
            FP8 cannot hold the module.
        int8_sqnr_db: of a module in FP8 or 4 bits the same in INT8; None where the job has no INT8.
    """

    module: str
    source: str
    op: str
    sqnr_db: float
    own_sqnr_db: float
    half_sqnr_db: float | None
    macs: int
    agreement: float | None = None
    loss_rise: float | None = None
    fp8_sqnr_db: float | None = None
    int8_sqnr_db: float | None = None
    outputs_db: Mapping[str, float] = field(default_factory=dict)

    def at(self, outputs: Collection[str]) -> ModuleSensitivity:
        """The same with `sqnr_db` at these outputs alone."""
        return replace(
            self, sqnr_db=min((v for name, v in self.outputs_db.items() if name in outputs), default=math.inf)
        )


@dataclass(frozen=True)
class Sensitivity:
    """All modules, the most sensitive first, and what it took to find out.

    `passes` is the work in forward passes over the samples, by multiply-accumulates; `node_passes` by operations
    executed. `macs` are those of the whole network for one sample. `left_out` modules were not measured for want of
    time.
    """

    modules: tuple[ModuleSensitivity, ...]
    samples: int
    macs: int
    passes: float
    node_passes: float
    seconds: float
    left_out: int = 0

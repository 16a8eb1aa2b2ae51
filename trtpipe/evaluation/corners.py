"""What executes an engine, or its graph, at the sizes that the job declares and no check sample may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from calib.types import Array
from trtpipe.errors import TrtpipeError
from trtpipe.evaluation.check import Runner
from trtpipe.model.corners import corners, described
from trtpipe.values import TensorSpec


def corner_problems(
    runner: Runner, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], samples: Mapping[str, Array]
) -> tuple[str, ...]:
    """What is wrong at the least and the largest dynamic dimensions: a failure, another shape than declared, or a value
    that is not finite.

    Args:
        runner: executes the engine, or its graph.
        inputs: the input bindings.
        outputs: the output bindings.
        samples: one batch of check samples, [B, ...] by name.
    """
    found = []
    for arrays in corners(inputs, samples):
        where = f"for {described(arrays)}, which the job declares"
        sizes: dict[int | str, int] = {d: n for s in inputs for d, n in zip(s.shape, arrays[s.name].shape, strict=True)}
        try:
            given = runner.run(arrays)
        except TrtpipeError as error:
            found.append(f"what was executed fails {where}: {str(error).splitlines()[0]}")
            continue
        for spec in outputs:
            value = np.asarray(given[spec.name])
            fits = value.ndim == len(spec.shape) and all(
                (d if isinstance(d, int) else sizes.get(d, got)) == got
                for d, got in zip(spec.shape, value.shape, strict=True)
            )
            if not fits:
                found.append(f"output {spec.name} has the shape {list(value.shape)} {where}, not {spec.described}")
            elif not np.isfinite(value).all():
                found.append(f"output {spec.name} holds NaN or infinity {where}")
    return tuple(found)

"""What an engine says of itself beside its bytes, as JSON: a builder's process sends it, and the cache keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtpipe.values import Engine

if TYPE_CHECKING:
    from calib.types import JsonObject
    from trtpipe.values import OnnxModel, TensorSpec


def facts_of(engine: Engine) -> JsonObject:
    """All but its bytes and those beside them, its graph, and what a route leaves to PyTorch."""
    return {
        "target": engine.target,
        "version": engine.version,
        "compute_capabilities": list(engine.compute_capabilities),
        "minimum_compute_capability": engine.minimum_compute_capability,
        "options": dict(engine.options),
        "notes": list(engine.notes),
    }


def engine_of(
    facts: JsonObject,
    data: bytes,
    *,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    graph: OnnxModel | None,
) -> Engine:
    """The engine that `facts_of` described; `graph` is what it was compiled from."""
    return Engine(
        data=data,
        target=facts["target"],
        version=facts["version"],
        compute_capabilities=tuple(facts["compute_capabilities"]),
        minimum_compute_capability=facts["minimum_compute_capability"],
        inputs=inputs,
        outputs=outputs,
        graph=graph,
        options=facts["options"],
        notes=tuple(facts["notes"]),
    )

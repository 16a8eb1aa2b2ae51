"""A bundle's engine with the weights of a kit: TensorRT's refit in the place of a build, then the whole check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.bundle.manifest import GRAPH
from trtpipe.errors import InputError
from trtpipe.pipeline.kit import finish_kit
from trtpipe.pipeline.replay import bundle_to_replay
from trtpipe.runtime.compatibility import admit, require_fit
from trtpipe.runtime.device import this_device
from trtpipe.runtime.executor import not_executed_here
from trtpipe.trt import driver
from trtpipe.trt.refit import FIXED, changed_weights, refitted, weight_mismatches
from trtpipe.values import Engine

if TYPE_CHECKING:
    from trtpipe.bundle.format import Bundle, Sign
    from trtpipe.bundle.manifest import Manifest
    from trtpipe.pipeline.build import Built
    from trtpipe.progress import Progress, Reporter
    from trtpipe.values import OnnxModel

_STEP = "trtpipe check on the engine's GPU says whether TensorRT takes them."

#: Values of build.refit with which other weights can be given.
CHANGEABLE = ("all", "individual")


def refit(
    bundle: Path, weights: Path, out: Path, reporter: Reporter, *, key: Path | None, sign: Sign | None = None
) -> Built:
    """The bundle's engine with the weights of a kit, checked on the kit's samples, as the bundle `out/<its name>`.

    Args:
        bundle: a bundle whose engine was built with build.refit: all or individual.
        weights: a kit of the same job, prepared from the other weights.
        out: the folder that the bundle goes to.
        reporter: receives the stages.
        key: file of trusted public keys, or None; both have to be signed by one of them.
        sign: signs the manifest, unless the check failed.

    Raises:
        TrtpipeError: with the exit code of what went wrong; nothing is then written.
    """
    before = bundle_to_replay(bundle, key)
    kit, _ = admit(weights, key)
    if why := fixed(before.manifest):
        raise InputError(f"{bundle}: {why}")
    problems = mismatches(before.manifest, kit.manifest)
    if not problems and GRAPH in before.manifest.files:
        unlike = weight_mismatches(kit.read(GRAPH), before.read(GRAPH))
        more = (f"{len(unlike) - 3} more weights are not the graph's",) if len(unlike) > 3 else ()
        problems = tuple(f"{one}. Prepare it from the bundle's job." for one in (*unlike[:3], *more))
    if problems:
        raise InputError("\n".join(f"{weights}: {p}" for p in problems))

    if not before.manifest.build.strip_plan:
        device = this_device()
        if before.manifest.build.target in device.versions:
            driver.require("refit")
        require_fit(before.manifest, device)

    def engine_of(graph: OnnxModel, progress: Progress) -> Engine:
        return _engine(before, graph)

    return finish_kit(weights, out, reporter, key=key, sign=sign, compiler=engine_of)


def fixed(bundle: Manifest) -> str:
    """Why no other weights can be given to a bundle's engine; empty where they can."""
    engine = bundle.engine
    assert engine is not None
    if engine.target == "onnxruntime" or engine.fallback:
        return f"the engine must be one TensorRT plan (got {engine.file}). Build the job with the new weights."
    if bundle.build.refit not in CHANGEABLE:
        got = bundle.build.refit
        return f"the engine must have been built with build.refit: all or individual (got {got}). Build it so."
    return ""


def mismatches(bundle: Manifest, kit: Manifest) -> tuple[str, ...]:
    """Why a kit's weights are not for a bundle's engine, as far as their manifests say."""
    if kit.kind != "kit":
        return (
            "must be a kit, which holds a graph and what it is checked against (got a bundle). Run trtpipe prepare.",
        )
    problems = []
    for what, old, new in (
        ("inputs", bundle.inputs, kit.inputs),
        ("outputs", bundle.outputs, kit.outputs),
        ("the precision of every operation", _precisions(bundle), _precisions(kit)),
        ("the build section", bundle.build, kit.build),
    ):
        if old != new:
            problems.append(f"{what} must be the bundle's (got others). Prepare it from the bundle's job.")
    return tuple(problems)


def _precisions(manifest: Manifest) -> list[tuple[str, str, str]]:
    """The operations and their precisions: reasons hold figures of the weights, and lines of code may have moved."""
    return [(layer.module, layer.op, layer.precision) for layer in manifest.layers]


def _engine(before: Bundle, graph: OnnxModel) -> Engine:
    """The engine of the bundle with the weights of this graph; a stripped one takes them when it is loaded."""
    manifest = before.manifest
    about = manifest.engine
    assert about is not None
    data, build = before.read(about.file), manifest.build
    own = build.refit == "individual" and GRAPH in manifest.files
    if not build.strip_plan:
        marked = changed_weights(graph.data, before.read(GRAPH)) if own else ()
        data = refitted(data, graph.data, marked=marked, version_compatible=build.version_compatible)
    fixed = (note for note in manifest.notes if note.startswith(FIXED))
    made = Engine(
        data=data,
        target=about.target,
        version=about.version,
        compute_capabilities=about.compute_capabilities,
        minimum_compute_capability=about.minimum_compute_capability,
        inputs=graph.inputs,
        outputs=graph.outputs,
        graph=graph,
        options=dict(about.options),
        notes=(f"refitted: the engine was built with the weights {_short(manifest.weights_digest)}", *fixed),
    )
    if build.strip_plan and not_executed_here(made):
        only = "only their names, types and shapes were" if GRAPH in manifest.files else "nothing of them was"
        untried = f"refitted: no GPU here gave the engine its weights: {only} held against the bundle's graph. {_STEP}"
        return replace(made, notes=(*made.notes, untried))
    return made


def _short(digest: str | None) -> str:
    return "of no known digest" if digest is None else digest[:16]

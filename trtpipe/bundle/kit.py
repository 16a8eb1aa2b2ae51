"""A kit: all of a bundle but the engine, for a device to finish with NumPy and its own TensorRT.

A kit is a bundle of kind "kit": the quantized graph as ONNX, the golden data it is to be checked on (all of them, where
a bundle keeps a few), the calibration table, and a manifest with the builder's options. It is read, verified and
packed as a bundle is.
"""

from __future__ import annotations

from collections.abc import Mapping

from trtpipe.bundle import golden as golden_data
from trtpipe.bundle.format import Bundle
from trtpipe.bundle.golden import Golden
from trtpipe.bundle.manifest import CALIBRATION, ENGINE, GRAPH, TIMING_CACHE, Manifest, describe_engine
from trtpipe.errors import InputError, shell
from trtpipe.values import GOLDEN, CheckReport, Engine, OnnxModel, WeightBytes, computed_in

#: Inputs of all the samples in a kit.
MAX_GOLDEN_BYTES = 512 << 20

#: Behind the name of what made a kit and has another version where the kit was finished.
OF_KIT = " (kit)"
#: The note of a bundle whose engine could not be executed where it was built.
NOT_EXECUTED = (
    "No GPU could execute the engine where the kit was finished: the check is the one of the kit's graph. "
    "Run `trtpipe check` on the bundle where its GPU is."
)


def kit_contents(
    manifest: Manifest,
    graph: OnnxModel,
    golden: Golden,
    calibration: bytes | None,
    extra: Mapping[str, bytes],
) -> tuple[Manifest, dict[str, bytes]]:
    """Manifest and files of a kit, for `write_bundle`.

    Args:
        manifest: of the bundle that the device is to finish.
        graph: what TensorRT is to compile.
        golden: every sample the device is to check on.
        calibration: the calibration table's JSON, if there is one.
        extra: further files: the arrays of the table's corrections.

    Raises:
        InputError: the golden data are too large.
    """
    files = {GRAPH: graph.data, GOLDEN: golden_data.to_bytes(golden), **extra}
    if calibration is not None:
        files[CALIBRATION] = calibration
    if sum(a.nbytes for a in golden.inputs.values()) > MAX_GOLDEN_BYTES:
        raise InputError(
            f"{manifest.name}: a kit holds every check sample, in at most {MAX_GOLDEN_BYTES >> 20} MiB "
            f"(got {golden.samples} samples of more). Set check.samples to fewer."
        )
    return manifest.model_copy(update={"kind": "kit", "engine": None, "opset": graph.opset}), files


def kit_graph(kit: Bundle) -> OnnxModel:
    """The graph of a kit, to compile.

    Raises:
        InputError: it is a bundle, whose engine is built already.
    """
    manifest = kit.manifest
    if manifest.kind != "kit":
        raise InputError(f"{kit.path}: is a finished bundle, not a kit. Run it: {shell('trtpipe', 'run', kit.path)}.")
    precisions = computed_in(manifest.layers)
    return OnnxModel(kit.read(GRAPH), manifest.opset or 0, manifest.inputs, manifest.outputs, precisions=precisions)


def bundle_contents(
    kit: Bundle,
    engine: Engine,
    *,
    check: CheckReport,
    fingerprint: str,
    environment: Mapping[str, str],
    device_memory_bytes: int | None = None,
    int8_weights: WeightBytes | None = None,
) -> tuple[Manifest, dict[str, bytes]]:
    """Manifest and files of the bundle that `engine` makes of `kit`, for `write_bundle`.

    Args:
        kit: as it was read.
        engine: compiled from `kit_graph(kit)` with the manifest's build options.
        check: of the engine, executed on `kit.golden()`, or the kit's own with the note `NOT_EXECUTED`.
        fingerprint: of all that decides the engine, this machine's TensorRT included.
        environment: versions on this machine. What made the kit in another version stays beside it, as `NAME (kit)`.
        device_memory_bytes: activation memory of one context, where known.
        int8_weights: how the engine stores the graph's INT8 weights, where that was looked for.
    """
    manifest = kit.manifest
    files = {name: kit.read(name) for name in manifest.files}
    files[GOLDEN] = golden_data.to_bytes(golden_data.first(kit.golden(), manifest.outputs))
    if engine.target != "onnxruntime":
        files[ENGINE] = engine.data
    if engine.timing_cache:
        files[TIMING_CACHE] = engine.timing_cache
    notes = [*manifest.notes, *check.notes, *engine.notes]
    made = {f"{n}{OF_KIT}" if environment.get(n, v) != v else n: v for n, v in manifest.environment.items()}
    changes: dict[str, object] = {
        "kind": "bundle",
        "engine": describe_engine(
            engine, manifest.build, device_memory_bytes=device_memory_bytes, int8_weights=int8_weights
        ),
        "check": check,
        "fingerprint": fingerprint,
        "environment": {**made, **environment},
        "notes": tuple(dict.fromkeys(notes)),
    }
    return manifest.model_copy(update=changes), files

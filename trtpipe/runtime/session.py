"""A bundle loaded to be run, without torch: images or arrays in, the outputs by name out.

with trtpipe.load("out/quickstart") as model:
    for prediction in model.classify(["a.png", "b.png"]):
        print(prediction.label, prediction.score)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from calib.samples import two_sizes
from calib.types import Array
from trtpipe.batching import Batching, has_shape, joined, of_batches
from trtpipe.bundle import signing
from trtpipe.bundle.format import Bundle, Replaced
from trtpipe.bundle.manifest import Manifest
from trtpipe.errors import InputError, either, shell
from trtpipe.runtime import compatibility
from trtpipe.runtime.device import this_device
from trtpipe.runtime.executor import (
    OpenRunner,
    bundle_settings,
    deviation,
    engine_runner,
    graph_runner,
    is_exact,
    open_graph,
    unrecorded,
    without_specializations,
)
from trtpipe.runtime.preprocess import load_image, preprocess
from trtpipe.trt.runtime import Specialization
from trtpipe.values import Executed, TensorSpec

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Prediction:
    """The classes with the largest values in the first [N, C] output of one sample, largest first.

    `scores` are that output's values as they are: logits, unless the model ends in a softmax.
    """

    indices: tuple[int, ...]
    scores: tuple[float, ...]
    labels: tuple[str | None, ...]

    @property
    def index(self) -> int:
        """Of the best class."""
        return self.indices[0]

    @property
    def score(self) -> float:
        """Of the best class."""
        return self.scores[0]

    @property
    def label(self) -> str | None:
        """Of the best class, if the manifest names classes."""
        return self.labels[0]


class Model:
    """An open bundle. Call it with images (paths or PIL images) or with arrays by input name.

    `executed` is whether the engine or the graph runs.
    """

    def __init__(self, bundle: Bundle, runner: OpenRunner, executed: Executed, notes: tuple[str, ...] = ()) -> None:
        self.bundle = bundle
        self.executed: Executed = executed
        self._stack = ExitStack()
        self._runner: OpenRunner | None = self._stack.enter_context(runner)
        self._notes, self._runs_by = (*of_batches(bundle.manifest.mixed, bundle.manifest.inputs), *notes), runner

    @property
    def notes(self) -> tuple[str, ...]:
        """What users of the outputs should know; what executes may add to them as it runs."""
        return (*self._notes, *self._runs_by.notes)

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    @property
    def runner(self) -> OpenRunner:
        """What executes.

        Raises:
            InputError: the model was closed.
        """
        if self._runner is None:
            raise InputError(f"{self.bundle.path}: must be open to be run (it was closed). Load it again.")
        return self._runner

    def __repr__(self) -> str:
        """What is executed by what, and the bindings."""
        by = "closed" if self._runner is None else f"{self.executed} executed by {self._runner.name}"
        ins, outs = (
            ", ".join(f"{s.name} {s.dtype} [{', '.join(map(str, s.shape))}]" for s in specs)
            for specs in (self.manifest.inputs, self.manifest.outputs)
        )
        return f"<trtpipe.Model {self.manifest.name}: {by}; {ins} -> {outs}>"

    @property
    def batch(self) -> tuple[int, int, int]:
        """Smallest, best and largest batch of the engine."""
        spec = self.manifest.inputs[0]
        return spec.at("min")[0], spec.at("opt")[0], spec.at("max")[0]

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the engine."""
        self._runner = None
        self._stack.close()

    def __call__(self, images: Sequence[Image | str | Path] | Array | Mapping[str, Array]) -> dict[str, Array]:
        """The outputs by name, each [S, ...], one row a sample whichever axis the engine's batch axis is.

        An output without a batch axis has one row a batch, [B, ...]: see `run_batches`.

        Args:
            images: images, preprocessed as the manifest says; or the array [S, ...] of the only input; or arrays by
                input name, as the bindings take them.

        Raises:
            InputError: an image that cannot be read, or arrays that do not fit the bindings.
        """
        if isinstance(images, Mapping):
            return self.run_arrays(images)
        if isinstance(images, np.ndarray):
            return self.run_arrays({self._only_input().name: images})
        if not isinstance(images, list | tuple) or not all(_is_image(i) for i in images):
            raise InputError(
                f"{self.bundle.path}: must be given a list of images (paths or PIL images), an array, or arrays by "
                f"input name (got {_kind(images)}). Convert it."
            )
        return self.run_arrays({self._only_input().name: self.preprocess(images)})

    def preprocess(self, images: Iterable[Image | str | Path]) -> Array:
        """The images as the array [S, C, H, W] of the only input, in the dtype of its binding.

        Raises:
            InputError: no image, one that cannot be read, or a bundle that was checked on arrays.
        """
        spec, transform = self._only_input(), self.manifest.preprocessing
        if transform is None:
            raise InputError(
                f"{self.bundle.path}: must say how an image becomes input {spec.name} (it does not: it was checked on "
                "arrays). Give arrays."
            )
        loaded = [load_image(Path(i)) if isinstance(i, str | Path) else i for i in images]
        if not loaded:
            raise InputError(f"{self.bundle.path}: no image was given. Give at least one.")
        samples = [preprocess(image, transform, spec) for image in loaded]
        other = next((s for s in samples if s.shape != samples[0].shape), None)
        if other is not None:
            raise InputError(
                f"{self.bundle.path}: images of one call must become one shape (got {list(samples[0].shape)} and "
                f"{list(other.shape)}). Call it once for each size."
            )
        return np.stack(samples)

    def classify(
        self, images: Sequence[Image | str | Path] | Array | Mapping[str, Array], top: int = 1
    ) -> list[Prediction]:
        """The `top` best classes of each image, or of each sample of arrays [S, ...].

        Raises:
            InputError: as calling the model, or no output [N, C] to classify by.
        """
        self.require_classes(top)
        return self.predictions(self(images), top)

    @property
    def scores(self) -> TensorSpec | None:
        """The first output that is [S, C], C >= 2, of floats: a score a class, by which samples are classified."""
        return next((s for s in self.manifest.outputs if s.scores_classes), None)

    def predictions(self, outputs: Mapping[str, Array], top: int = 1) -> list[Prediction]:
        """The `top` best classes in `outputs`, by the first output that is [S, C].

        Raises:
            InputError: no output is, or `top` is no whole number from 1 to the classes.
        """
        spec, names = self.require_classes(top), self.manifest.class_names
        rows = []
        for row in outputs[spec.name].astype(np.float64):
            # Stable, so that of equal values the lowest index comes first, as argmax has it; NaN comes last.
            order = [int(i) for i in np.argsort(-row, kind="stable")[:top]]
            labels = tuple(names[i] if names and i < len(names) else None for i in order)
            rows.append(Prediction(tuple(order), tuple(float(row[i]) for i in order), labels))
        return rows

    def require_classes(self, top: int, key: str = "top", instead: str = "Use the raw outputs.") -> TensorSpec:
        """The output that samples are classified by; `key` and `instead` are what messages call `top` and advise.

        Raises:
            InputError: there is none, or `top` is no whole number from 1 to its classes.
        """
        spec = self.scores
        if spec is None:
            raise InputError(f"{self.bundle.path}: has no output [N, C] to classify by. {instead}")
        if not isinstance(top, int | np.integer) or isinstance(top, bool) or top < 1:
            raise InputError(
                f"{key}: must be a whole number of 1 or more (got {top!r}). It is how many classes to give."
            )
        classes = spec.at("max")[1 - (spec.batch_axis or 0)]
        if top > classes:
            raise InputError(f"{key}: must be at most {classes}, the classes of output {spec.name} (got {top}).")
        return spec

    def run_arrays(self, arrays: Mapping[str, Array], ids: Sequence[str] | None = None) -> dict[str, Array]:
        """The outputs by name for arrays [S, ...] of any S, run in batches that the engine takes.

        Args:
            arrays: by input name.
            ids: what messages call the samples.
        """
        return joined(self.run_batches(arrays, ids))

    def run_batches(self, arrays: Mapping[str, Array], ids: Sequence[str] | None = None) -> Iterator[dict[str, Array]]:
        """As `run_arrays`, one batch [B, ...] at a time.

        Raises:
            InputError: an output has no batch axis, and the samples do not fill whole batches.
        """
        runner, samples = self.runner, self._check_arrays(arrays, ids)
        high = self.batch[2]
        self.batching(high).require_whole(samples, self.bundle.path)
        how = self.batching(min(samples, high))
        for start in range(0, samples, high):
            part = {n: np.ascontiguousarray(a[start : start + high]) for n, a in arrays.items()}
            for piece, count in how.pieces(part):
                yield how.rows(runner.run(piece), count)

    def batching(self, size: int) -> Batching:
        """How samples are run, `size` at a time where the profiles allow it."""
        return Batching(self.manifest.inputs, self.manifest.outputs, size, self.manifest.build.profiles)

    def _only_input(self) -> TensorSpec:
        specs = self.manifest.inputs
        if len(specs) != 1:
            names = ", ".join(s.name for s in specs)
            raise InputError(
                f"{self.bundle.path}: must have one input to take images (got {names}). Give arrays by name."
            )
        return specs[0]

    def _check_arrays(self, arrays: Mapping[str, Array], ids: Sequence[str] | None = None) -> int:
        """How many samples there are, after the arrays are checked against the bindings."""
        where, specs = self.bundle.path, {s.name: s for s in self.manifest.inputs}
        if set(arrays) != set(specs):
            raise InputError(
                f"{where}: must be given the inputs {', '.join(specs)} (got {', '.join(arrays)}). Name them so."
            )
        for name, spec in specs.items():
            array = arrays[name]
            if not isinstance(array, np.ndarray):
                raise InputError(f"{where}: input {name} must be a NumPy array (got {_kind(array)}). Convert it.")
            if np.ma.is_masked(array):
                raise InputError(f"{where}: input {name} must have no masked values (got some). Fill them.")
            if array.dtype != np.dtype(spec.dtype):
                raise InputError(f"{where}: input {name} must be {spec.dtype} (got {array.dtype}). Convert it.")
            if not array.ndim or not has_shape(array.shape[1:], spec.shape[1:], spec.dims):
                raise InputError(
                    f"{where}: input {name} must have the shape {spec.described} (got {list(array.shape)}). Reshape or "
                    "resize it."
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                bad = int((~np.isfinite(array.reshape(len(array), -1)).all(axis=1)).argmax())
                raise InputError(
                    f"{where}: every value of input {name} must be finite, as in the check (got NaN or infinity in "
                    f"{f'sample {bad}' if ids is None else ids[bad]}). Leave it out or replace them."
                )
        named = ((n, d, g) for n, s in specs.items() for d, g in zip(s.shape[1:], arrays[n].shape[1:], strict=True))
        if wrong := two_sizes((name, dim, size) for name, dim, size in named if isinstance(dim, str)):
            raise InputError(f"{where}: {wrong}")
        counts = {len(a) for a in arrays.values()}
        if len(counts) != 1 or min(counts) < 1:
            raise InputError(
                f"{where}: every input must hold the same samples, one or more (got {sorted(counts)}). Check them."
            )
        return counts.pop()


def _is_image(value: object) -> bool:
    return isinstance(value, str | Path) or hasattr(value, "mode")  # without PIL for users of arrays


def _kind(value: object) -> str:
    """`Tensor`, or `list of list` for the first part of it that is no image."""
    name = type(value).__name__
    wrong = next((v for v in value if not _is_image(v)), None) if isinstance(value, list | tuple) else None
    return name if wrong is None else f"{name} of {type(wrong).__name__}"


def load(
    path: str | PathLike[str],
    *,
    key: str | Path | None = None,
    graph: bool = False,
    as_written: bool = False,
    specialization: Specialization | None = None,
) -> Model:
    """The bundle at `path`, ready to be run here.

    Nothing of the engine is deserialized before the bundle is verified to be whole, signed as the device demands, and
    fit for this device. One whose check failed when it was made is loaded, with a warning in the log.

    Args:
        path: the bundle's directory, or a bundle that was read or built.
        key: file of trusted public keys; the device's own configured one when None.
        graph: run the ONNX graph on the CPU instead of the engine.
        as_written: see `open_model`.
        specialization: of a TensorRT-RTX engine; see `EngineRunner`.

    Raises:
        InputError: the bundle is damaged, unsigned or badly signed, a kit, or has no graph.
        MissingError, BuildError: it does not fit this device; its runtime is not installed, or refuses it.
        Replaced: another bundle takes its place again and again.
    """
    trusted = signing.trusted_key(key)
    for _ in range(10):
        bundle, _ = compatibility.admit(Path(path), trusted)
        if failed := compatibility.failure(bundle.manifest):
            logging.getLogger("trtpipe").warning("%s: %s", bundle.path, failed)
        with suppress(Replaced):  # by a writer, since it was admitted: the new one is admitted by itself
            return open_model(bundle, graph=graph, as_written=as_written, specialization=specialization)
    raise Replaced(Path(path))


def open_model(
    bundle: Bundle,
    *,
    graph: bool = False,
    as_written: bool = False,
    specialization: Specialization | None = None,
) -> Model:
    """`bundle`, which `compatibility.admit` has let in, ready to be run here.

    Args:
        bundle: read and admitted.
        graph: run the ONNX graph on the CPU instead of the engine; a kit has nothing else.
        as_written: the graph exactly as a check executes it (`graph_runner`), whatever it gives; otherwise
            the fastest way that gives the golden outputs as closely as the check did (`executor.open_graph`).
        specialization: of a TensorRT-RTX engine; see `EngineRunner`.

    Raises:
        InputError, MissingError, BuildError: as `load`.
    """
    engine = bundle.manifest.engine
    if specialization not in (None, *get_args(Specialization)):
        raise InputError(f"specialization: must be {either(get_args(Specialization))} (got {specialization!r}).")
    if specialization is not None and (what := without_specializations(engine, graph)):
        raise InputError(f"specialization: must be left out for a bundle whose {what} is run (got {specialization}).")
    if engine is None and not graph:
        finish = shell("trtpipe", "build", bundle.path)
        raise InputError(f"{bundle.path}: is a kit, which has no engine to run. Finish it here: {finish}.")
    if engine is None or graph or engine.target == "onnxruntime":
        if not as_written:
            runner, notes = open_graph(bundle)
            return Model(bundle, runner, "graph", notes)
        return Model(bundle, graph_runner(bundle, as_written=is_exact(bundle.manifest.build.target)), "graph")
    compatibility.require_fit(bundle.manifest, this_device())
    settings, plan = bundle_settings(bundle), bundle.read(engine.file)
    executes = engine_runner(plan, hybrid=bool(engine.fallback), settings=settings, specialization=specialization)
    model = Model(bundle, executes, "engine")
    try:
        why = "" if as_written or unrecorded(bundle) else deviation(model.runner, bundle)
    except BaseException:
        model.close()
        raise
    if why:
        model._notes += (f"the engine is further from the baseline than its check was: {why}. Run `trtpipe verify`",)
    return model

"""A job prepared for every precision: its model, its check data, the baseline and the captured graph."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from calib.errors import CalibCancelled, CalibError
from calib.process_state import put_back
from calib.samples import figures, same_figures
from calib.types import Array
from trtpipe.batching import Batching, unranked
from trtpipe.errors import BuildError, Cancelled, InputError
from trtpipe.evaluation.check import unjudgeable
from trtpipe.evaluation.judgement import NO_METRICS, Judgement
from trtpipe.evaluation.judges import judge
from trtpipe.evaluation.metrics import sqnr_db
from trtpipe.machine import Heap, freed_memory_reused
from trtpipe.model.baseline import compiled, record_baseline, script
from trtpipe.model.capture import capture
from trtpipe.model.computing import CPU, computing_device, wanted_device
from trtpipe.model.corners import corner_outputs, require_corners
from trtpipe.model.data import open_calibration, open_check, turned, with_labels
from trtpipe.model.labels import labels_of, sample_labels
from trtpipe.model.load import load_model
from trtpipe.pipeline.as_wanted import as_the_job_wants
from trtpipe.pipeline.codecs import CORNERS, FIGURES, RECORDED, SPECS, CornerOutputs, Recorded
from trtpipe.pipeline.collector import set_apart
from trtpipe.pipeline.results import Results, Uncached

if TYPE_CHECKING:
    import torch

    from calib.data import Source
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.job.sections import Precision
    from trtpipe.model.labels import Labels
    from trtpipe.progress import Progress, Reporter
    from trtpipe.values import Baseline, Captured, LoadedModel, TensorSpec

T = TypeVar("T")

#: Samples whose ranges decide what FP16 can hold.
RANGE_SAMPLES = 64
#: Outputs of one model on the same inputs differ by less, whatever computes them.
LEAST_SQNR_DB = 40.0
_OTHERWISE = (
    "{}: {} than in an earlier build, of files and code that are the same. Seed what is random in {}, or read it from "
    "a file."
)
#: Stages in which only trtpipe's and the compiler's code runs, and none of the job's.
COMPILING = frozenset({"compile", "export", "bundle", "kit", "speed", "verify"})


class Stages:
    """Names the stages of one build to a Reporter and keeps how long each took, in seconds.

    Args:
        reporter: receives the stages.
        recording: makes the context manager that is entered while code of the job may run.
    """

    def __init__(
        self, reporter: Reporter, recording: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._reporter, self._recording = reporter, recording
        self._seconds, self._inside = dict[str, float](), [0.0]
        self._heap: Heap | None = None

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long each stage took that has ended so far, each time, without the stages inside it."""
        return dict(self._seconds)

    @contextmanager
    def __call__(self, name: str) -> Iterator[Progress]:
        """One stage; calib's errors become the user's, the process is left as it was found, and memory is returned."""
        began = time.perf_counter()
        ours = nullcontext() if name in COMPILING else self.unnamed()
        with self._reporter.stage(name), freed_memory_reused(), ours:
            self._inside.append(0.0)
            try:
                yield self._reporter
            except CalibCancelled as error:
                raise Cancelled(str(error)) from error
            except CalibError as error:
                raise InputError(f"{name}: {error}") from error
            finally:
                inside = self._inside.pop()
        self._heap = self._heap or Heap()  # the first stage loads libraries, which stay
        self._heap.settle(garbage=True)
        if name == "capture":  # libraries are loaded, and the graph lasts as long as the job
            set_apart()
        self._inside[-1] += (took := time.perf_counter() - began)
        self._seconds[name] = self._seconds.get(name, 0.0) + took - inside

    @contextmanager
    def unnamed(self) -> Iterator[None]:
        """Code of the job runs, too shortly for a stage of its own."""
        with self._recording(), put_back(self.note):
            yield

    def note(self, message: str) -> None:
        """Tell the reader of the log."""
        self._reporter.note(message)


class PreparedJob:
    """What every precision of one job shares. Each value is computed, or taken from `results`, on first use.

    Args:
        job: its model, check data and, for the ranges, calibration data count.
        stages: names the stages as they run.
        results: where values come from that need not be made.
    """

    def __init__(self, job: Job, stages: Stages, results: Results | None = None) -> None:
        self.job, self.results = job, results or Uncached()
        self._stages = stages
        #: By the digest of a table's corrections: graphs, which hold the weights once more, and what was seen in them.
        self._corrected: WeakValueDictionary[str, PreparedJob] = WeakValueDictionary()
        self._ranges: dict[str, Mapping[str, float]] = {}
        self._moments: dict[str, Mapping[str, torch.Tensor]] = {}
        self._corrections = ""
        # Opened at most once, by what `corrected` gives too: a job's callable may take long to make its samples.
        self._calibration = functools.cache(partial(open_calibration, job))
        self._check = functools.cache(partial(open_check, job))

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model behind its bindings; the outputs' shapes are those of its graph."""
        return replace(self._model, outputs=self.captured.outputs)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The input bindings."""
        return self.job.input_specs()

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The output bindings."""
        specs = self.results.on_disk(SPECS, lambda: self.captured.outputs)
        return self.job.as_judged(specs)

    @cached_property
    def _model(self) -> LoadedModel:
        def make() -> LoadedModel:
            with self._stages("model"):
                return load_model(self.job, self._stages.note)

        return self.results.in_memory("model", make)

    @cached_property
    def captured(self) -> Captured:
        """The model's graph; of a model that is quantized already, with its scales unless it is to be recalibrated.

        Raises:
            InputError: the job's precision and calibration do not say what becomes of the model's own scales.
        """
        loaded = self._model

        def make() -> Captured:
            expected = self.corner_outputs
            with self._stages("capture"):
                captured = capture(loaded)
                try:
                    require_corners(loaded, captured, self.first_check_batch, expected, self.job.build.profiles)
                except (BuildError, InputError) as error:
                    raise self._moved(expected) or error from error
                return captured

        captured = as_the_job_wants(self.job, self.results.in_memory("capture", make))
        return replace(captured, outputs=self.job.as_judged(captured.outputs))

    def _moved(self, expected: CornerOutputs) -> InputError | None:
        """The error where the model itself, which nothing has changed, gives others than these outputs of it."""
        again = corner_outputs(self._model, self.first_check_batch, self.job.build.profiles)
        for now, before in zip(again, expected, strict=True):
            if any(sqnr_db(before[n], now[n]) < LEAST_SQNR_DB for n in before):
                return InputError(_OTHERWISE.format("model", "it gives other outputs", "its weights"))
        return None

    @cached_property
    def device(self) -> str:
        """Where PyTorch computes the model, "cpu" or "cuda:0".

        Raises:
            InputError, MissingError: a GPU was asked for by name, and cannot be used.
        """
        if wanted_device() == CPU:
            return CPU
        with self._stages.unnamed():
            others = compiled(self._model, self.job.model.baseline, self.job.model.torchscript)
            return computing_device(self._model, self.first_check_batch, self._stages.note, others)

    @property
    def check_samples(self) -> Source:
        """The check samples, labelled as they come."""
        with self._stages.unnamed():
            return self._check()

    @property
    def calibration_samples(self) -> Source:
        """The samples to calibrate on.

        Raises:
            InputError: the job has none, or they are bad.
        """
        with self._stages.unnamed():
            return self._calibration()

    @cached_property
    def first_check_batch(self) -> Mapping[str, Array]:
        """The inputs of the first check batch, [B, ...] by name.

        Raises:
            InputError: they are others than when the job's baseline was recorded in an earlier build.
        """
        with self._stages.unnamed():
            arrays = next(iter(self.check_samples.batches(self.job.batch_size(self.job.check)))).arrays
        now = figures(arrays)
        before = self.results.on_disk(FIGURES, lambda: now)
        if now.shape != before.shape or not same_figures(now, before):
            raise InputError(_OTHERWISE.format("check", "the samples hold other values", "how they are made"))
        return arrays

    @cached_property
    def corner_outputs(self) -> CornerOutputs:
        """The model's outputs at the least and the largest sizes that the job declares."""

        def make() -> CornerOutputs:
            loaded = self._model
            with self._stages.unnamed():
                return corner_outputs(loaded, self.first_check_batch, self.job.build.profiles)

        return self.results.on_disk(CORNERS, make)

    @cached_property
    def check_source(self) -> Source:
        """The check samples, their labels numbered as the model's classes are."""
        source, names = self.check_samples, self._recorded.classes
        if source.labels is None or source.classes is None:
            return source
        return source.without_labels() if names is None else source.numbered_by(names)

    @property
    def baseline(self) -> Baseline:
        """The outputs of the model as TorchScript on the check samples."""
        return self._recorded.baseline

    @cached_property
    def judgement(self) -> Judgement:
        """The job's own metrics and the labels they are about; each was measured on the baseline once.

        Raises:
            InputError: the labels or a metric's function are not what the job says, or a limit cannot be judged.
        """
        job, baseline = self.job, self.baseline
        if not job.check.metrics:
            return NO_METRICS
        with self._stages("metrics"):
            labels: Labels = baseline.labels
            if (file := sample_labels(job.check)) is not None:
                labels = labels_of(file, baseline.ids, job.check_transform(), job.check.images)
            judges = tuple(judge(n, m, labelled=labels is not None) for n, m in job.check.metrics.items())
            judgement = Judgement(judges, labels, baseline.ids, baseline.outputs, job.boxed)
            judgement.require_figures()
            by_baseline = unjudgeable(job.check.limits, baseline.outputs, baseline.labels, judgement.boxed)
            if unjudged := by_baseline | judgement.unjudgeable(job.check.limits):
                raise InputError(f"{'; '.join(unjudged.values())}. Give that, or take the limit out of the job.")
        return judgement

    @cached_property
    def _recorded(self) -> Recorded:
        job = self.job
        _ = self.first_check_batch  # refused where it is another than that of the baseline

        fresh = False

        def make() -> Recorded:
            nonlocal fresh
            fresh, loaded, size = True, self._model, job.batch_size(job.check)
            with self._stages("baseline") as progress:
                source, notes = with_labels(job, loaded, self.check_samples)
                skipped = (f"check: skipped {s}" for s in source.skipped)
                notes += (*turned(job.check, job.check_transform(), source.ids), *skipped)
                for note in notes:
                    progress.note(note)
                baseline = record_baseline(
                    loaded,
                    source.batches(size),
                    source.sample_count,
                    batch_size=size,
                    kind=job.model.baseline,
                    torchscript=job.model.torchscript,
                    progress=progress,
                    device=self.device,
                )
                self._require_judgeable(baseline, loaded.outputs)
            return Recorded(replace(baseline, notes=(*baseline.notes, *notes)), source.classes)

        recorded = self.results.on_disk(RECORDED, make)
        if not fresh:  # it may have been recorded for other limits
            self._require_judgeable(recorded.baseline, self.outputs)
        return recorded

    def _require_judgeable(self, baseline: Baseline, outputs: Sequence[TensorSpec]) -> None:
        """Refuse, by an InputError, limits that cannot be judged: before anything is compiled."""
        names = [s.name for s in outputs if unranked(s)]
        if unjudged := unjudgeable(self.job.check.limits, baseline.outputs, baseline.labels, names):
            raise InputError(f"{'; '.join(unjudged.values())}. Give that, or take the limit out of the job.")

    def corrected(self, table: CalibrationTable | None) -> PreparedJob:
        """The same with the table's corrections in its graph; this one where there are none."""
        if table is None or table.corrections is None or not table.corrections.arrays:
            return self
        from trtpipe.quantization.corrections import edits

        key = str(table.corrections.sha256)
        if (other := self._corrected.get(key)) is None:
            captured = edits.corrected(self.captured, table.corrections.arrays)
            other = self._corrected[key] = copy.copy(self)
            other.captured, other._corrections = captured, key
        return other

    def _once(self, seen: dict[str, T], see: Callable[[], T]) -> T:
        """What was seen in this graph, whether it is still held or not, or `see()`."""
        if self._corrections not in seen:
            with self._stages.unnamed():
                seen[self._corrections] = see()
        return seen[self._corrections]

    @cached_property
    def torchscript(self) -> torch.nn.Module:
        """The model as TorchScript, as the baseline was recorded with it."""
        with self._stages.unnamed():
            module: torch.nn.Module
            module, _ = script(self._model, self.job.model.baseline, self.job.model.torchscript)
            return module

    @property
    def calibrates(self) -> bool:
        """Whether the job names samples to calibrate on, and not a table alone."""
        data = self.job.calibration
        return data is not None and data.has_samples

    @property
    def first_samples(self) -> Source:
        """The samples that calibrate, or those of the check where none do."""
        return self.calibration_samples if self.calibrates else self.check_samples

    def _first(self) -> tuple[Source, int, int]:
        """The samples, how many make a batch, and how many batches are the first."""
        job, data, source = self.job, self.job.calibration, self.first_samples
        size = job.batch_size(data if data is not None and self.calibrates else job.check)
        return source, size, max(1, RANGE_SAMPLES // size)

    @property
    def first_digests(self) -> tuple[str, ...]:
        """The digests of the samples in `first_batches`."""
        source, size, count = self._first()
        return source.sample_digests[: size * count]

    def first_batches(self) -> Iterator[list[torch.Tensor]]:
        """Inputs [B, ...] in order of the first calibration samples, or check samples where there are none."""
        import torch

        source, size, count = self._first()
        how = Batching(self.inputs, self.outputs, size)
        for batch in itertools.islice(source.batches(size), count):
            for piece, _ in how.pieces(batch.arrays):
                yield [torch.from_numpy(piece[s.name]) for s in self.inputs]

    def needed_ranges(self, precision: Precision) -> Mapping[str, float]:
        """`ranges` for a job that computes in FP16; nothing for any other, so that no sample is run for it."""
        return self.ranges if precision.fp16_mode else {}

    @property
    def ranges(self) -> Mapping[str, float]:
        """Largest |x| of every tensor by node name, over the first samples. They decide what FP16 can hold."""
        from trtpipe.quantization import precision

        batches = self.first_batches()
        return self._once(self._ranges, lambda: precision.observe_ranges(self.captured, batches, self.device))

    @property
    def moments(self) -> Mapping[str, torch.Tensor]:
        """E[x x^T] of what linears read over the first samples: float32 [K / m, m, m] by node (`block_moments`)."""
        from trtpipe.quantization.moments import block_moments

        return self._once(self._moments, lambda: block_moments(self.captured, self.first_batches()))

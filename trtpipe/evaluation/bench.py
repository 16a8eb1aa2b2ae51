"""Many ways to run one model, timed in turns and compared with one reference. No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from calib.types import Array, JsonObject
from trtpipe.batching import Batching, joined, last_label, ranked_output
from trtpipe.errors import Cancelled, InputError, TrtpipeError, first_line
from trtpipe.evaluation import intervals, metrics
from trtpipe.progress import Progress

#: Runs of each mode that are thrown away, and the fewest that a percentile is read off.
WARM_UP, FEWEST = 5, 10
#: The mode that all others are compared with.
REFERENCE = "eager FP32"
#: Of the latencies of a mode or an engine: what is reported as p50 (the median), p90 and p99.
LATENCY_PERCENTILES = (50, 90, 99)
#: Between two modes the threads of the first come to rest: ONNX Runtime's spin for a while.
PAUSE_S = 0.002
#: Characters of a reason why a mode cannot run: longer messages, like Inductor's, are cut.
LONGEST_REASON = 800


@dataclass(frozen=True)
class Ready:
    """A mode that can run.

    run: one batch that is on the device already, to its end. infer: outputs by name for inputs by name, [B, ...] each.
    ms: the milliseconds of one `run` as the device itself counts them (CUDA events); the host's clock where None.
    size_bytes: of the weights, or of the file that is deployed; peak_memory_bytes: what a device counted, if it did.
    close: releases what was opened for it.
    """

    run: Callable[[], object]
    infer: Callable[[Mapping[str, Array]], Mapping[str, Array]]
    size_bytes: int
    notes: tuple[str, ...] = ()
    ms: Callable[[], float] | None = None
    peak_memory_bytes: Callable[[], int | None] | None = None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Mode:
    """One way to run the model. `prepare` makes it ready, or raises what stands in the way.

    `cannot` is the reason why it is not even tried here; empty when it is.
    """

    name: str
    device: str
    prepare: Callable[[], Ready]
    cannot: str = ""


@dataclass(frozen=True)
class Row:
    """What was measured of one mode, or why it was not.

    Latencies are of one batch, in milliseconds; throughput is samples a second at the median. `loss` is the mean
    cross-entropy in nats and `accuracy` the share of labelled samples with the right class; `agreement` the share of
    samples with the reference's class, with its 95 % interval; `sqnr_db` and `max_abs` are against the reference's
    outputs. `peak_memory_bytes` is the most that the process held above what it held before the mode was made.
    """

    name: str
    device: str
    skipped: str = ""
    median_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    throughput: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    agreement: float | None = None
    agreement_interval: tuple[float, float] | None = None
    sqnr_db: float | None = None
    max_abs: float | None = None
    size_bytes: int | None = None
    peak_memory_bytes: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """One table, measured in one run. `reference` names what every mode is compared with."""

    name: str
    batch: int
    samples: int
    rounds: int
    warm_up: int
    reference: str
    threads: int
    rows: tuple[Row, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchData:
    """What modes are compared on: batches of one size (read again each time), the reference's rows, labels or None."""

    batches: Callable[[], Iterable[Mapping[str, Array]]]
    reference: Mapping[str, Array]
    labels: Array | None
    batching: Batching


def measure_modes(
    modes: Sequence[Mode],
    data: BenchData,
    *,
    batch: int,
    rounds: int,
    seconds: float,
    progress: Progress,
) -> tuple[tuple[Row, ...], int]:
    """One row for each mode, and how many rounds were timed.

    Every mode is prepared and runs all samples; then rounds follow, each of which runs every mode once, so that
    whatever else the machine does falls on all of them alike. The first few warm up: not before, since to prepare one
    mode can make PyTorch forget what it has compiled for another. Rounds end early after `seconds`, but not before
    there are `FEWEST`.

    Raises:
        InputError: fewer than one round is asked for.
        Cancelled: progress asked to stop.
    """
    if rounds < 1:
        raise InputError(f"bench: at least one round is needed (got {rounds}). Raise --rounds.")
    ready: dict[int, Ready] = {}
    rows = []
    with ExitStack() as opened:
        for k, mode in enumerate(modes):
            _listen(progress)
            row = Row(mode.name, mode.device, skipped=mode.cannot)
            if not mode.cannot:
                row, made = _made(mode, data, opened)
                if made is not None:
                    ready[k] = made
            rows.append(row)
            progress.step(k + 1, len(modes), "modes")
        times: dict[int, list[float]] = {k: [] for k in ready}
        began, done = time.perf_counter(), -WARM_UP
        while ready and done < rounds and (done < FEWEST or time.perf_counter() - began < seconds):
            _listen(progress)
            for k, made in list(ready.items()):
                time.sleep(PAUSE_S)
                try:
                    times[k].append(_timed_ms(made))
                except Cancelled:
                    raise
                except Exception as error:  # noqa: BLE001  # the other modes are timed none the less
                    rows[k] = _skipped(modes[k], error)
                    del ready[k], times[k]
            done += 1
            if done == 0:
                began, times = time.perf_counter(), {k: [] for k in ready}
            elif done > 0:
                progress.step(done, rounds, "rounds")
    return tuple(_with_times(row, times.get(k), batch) for k, row in enumerate(rows)), max(done, 0)


def _listen(progress: Progress) -> None:
    if progress.cancelled():
        raise Cancelled


def _made(mode: Mode, data: BenchData, opened: ExitStack) -> tuple[Row, Ready | None]:
    """The mode ready to be timed until `opened` is closed, and its row so far; or the row that says why not."""
    peak = PeakMemory()
    try:
        with ExitStack() as own:
            made = mode.prepare()
            own.callback(made.close)
            outputs = outputs_of(made.infer, data)
            opened.push(own.pop_all())
    except Cancelled:
        raise
    except Exception as error:  # noqa: BLE001  # whatever keeps a mode from running here is its row's text
        return _skipped(mode, error), None
    used = peak.bytes() if made.peak_memory_bytes is None else made.peak_memory_bytes()
    figures = compare(data.reference, outputs, data.labels, data.batching.unranked)
    return Row(
        mode.name, mode.device, size_bytes=made.size_bytes, peak_memory_bytes=used, notes=made.notes, **figures
    ), made


def outputs_of(infer: Callable[[Mapping[str, Array]], Mapping[str, Array]], data: BenchData) -> dict[str, Array]:
    """The rows of every output over all batches, [S, ...] in the dtype that `infer` gives."""
    return joined(data.batching.rows(infer(b), len(next(iter(b.values())))) for b in data.batches())


def _skipped(mode: Mode, error: Exception) -> Row:
    """The row of a mode that something keeps from running here."""
    text = first_line(error)[:LONGEST_REASON]
    named = "" if isinstance(error, TrtpipeError) else f"{type(error).__name__}: "
    return Row(mode.name, mode.device, skipped=named + text)


def _timed_ms(made: Ready) -> float:
    if made.ms is not None:
        return made.ms()
    began = time.perf_counter()
    made.run()
    return (time.perf_counter() - began) * 1e3


def _with_times(row: Row, times: Sequence[float] | None, batch: int) -> Row:
    if not times:
        return row
    median, p90, p99 = (float(q) for q in np.percentile(times, LATENCY_PERCENTILES))
    return replace(row, median_ms=median, p90_ms=p90, p99_ms=p99, throughput=1e3 * batch / median)


def compare(
    reference: Mapping[str, Array], outputs: Mapping[str, Array], labels: Array | None, unranked: Collection[str] = ()
) -> JsonObject:
    """The figures of a Row that compare a mode's outputs with the reference's.

    Half-precision outputs are widened first, so that no softmax is computed in half. NaN or infinity in an output is
    an SQNR of minus infinity and never an agreement.

    Args:
        reference: float [S, ...] by output.
        outputs: the mode's, of the same shapes.
        labels: int64 [S], -1 where unknown, or None.
        unranked: names the outputs that are no class scores of samples.

    Raises:
        InputError: an output of the reference is missing.
    """
    missing = [n for n in reference if n not in outputs]
    if missing:
        raise InputError(f"outputs: must be {', '.join(reference)} (got {', '.join(outputs)}). Build it again.")
    arrays = {n: np.asarray(a) for n, a in outputs.items()}
    wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in arrays.items()}
    ratios, worst = [], 0.0
    figures: JsonObject = {}
    columns = {n: a.shape[1] for n, a in reference.items() if n not in unranked and metrics.ranks_classes(a)}
    last = last_label(labels)
    counts = ranked_output(columns, last)
    for name, wanted in reference.items():
        got = wide[name]
        finite = bool(np.isfinite(got).all())
        ratios.append(metrics.sqnr_db(wanted, got) if finite else -math.inf)
        worst = max(worst, metrics.max_abs(wanted, got) if finite else math.inf)
        if name != counts:
            continue
        valid = np.isfinite(got).all(axis=1)
        same = metrics.same_class(wanted[valid], got[valid]) if valid.any() else 0
        figures["agreement"] = same / len(got)
        figures["agreement_interval"] = intervals.binomial_interval(same, len(got))
        if labels is not None and columns[name] > last >= 0:
            known = labels >= 0
            figures["accuracy"] = float(((got.argmax(1) == labels) & valid)[known].mean())
            figures["loss"] = cross_entropy(got[known], labels[known])
    return {"sqnr_db": min(ratios), "max_abs": worst, **figures}


def cross_entropy(scores: Array, labels: Array) -> float:
    """Mean of -log softmax(scores)[label], nats, in float64; scores [S, C], labels int [S]."""
    wide = np.asarray(scores, np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(-logs[np.arange(len(labels)), labels].mean())


class PeakMemory:
    """The most resident memory of this process since it was made, above what there was then; Linux alone."""

    def __init__(self) -> None:
        self._known = self._reset()
        self._before = self._read("VmRSS")

    def bytes(self) -> int | None:
        """The rise so far, None where the system does not say."""
        peak = self._read("VmHWM")
        return None if not self._known or peak is None or self._before is None else max(0, peak - self._before)

    @staticmethod
    def _reset() -> bool:
        """Set the kernel's high-water mark to what is resident now (see proc(5), clear_refs)."""
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            return False
        return True

    @staticmethod
    def _read(name: str) -> int | None:
        try:
            with open("/proc/self/status") as file:
                lines = [line.split() for line in file]
        except OSError:
            return None
        return next((int(words[1]) * 1024 for words in lines if words and words[0] == f"{name}:"), None)

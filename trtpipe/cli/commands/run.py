"""trtpipe run."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
import numpy as np

from calib.files import replacing, suffix_of
from calib.folders import unread
from calib.types import JsonObject
from trtpipe.cli import console
from trtpipe.cli.commands.bundles import bundle_argument, graph_option, key_option
from trtpipe.cli.commands.options import InputPath, OutputFile, refuse_unused
from trtpipe.cli.console import jsonable
from trtpipe.cli.results import results
from trtpipe.errors import InputError, either
from trtpipe.evaluation.bench import LATENCY_PERCENTILES
from trtpipe.jsontext import json_line
from trtpipe.outputs import naming, require_apart
from trtpipe.runtime.inputs import open_feed
from trtpipe.runtime.session import load
from trtpipe.streams import is_stream, open_stream

if TYPE_CHECKING:
    from trtpipe.runtime.inputs import Feed
    from trtpipe.runtime.session import Model


#: The result of one sample by column or JSON key.
JsonRow = JsonObject
Write = Callable[[JsonRow], None]
_FORMATS = ("jsonl", "json", "csv")


@click.command("run", short_help="Run a bundle on images or arrays.")
@bundle_argument
@click.argument("source", metavar="INPUT", required=False, type=InputPath())
@key_option
@graph_option
@click.option(
    "--format", "chosen", type=click.Choice(_FORMATS), help="[default: by the suffix of --output; jsonl without one]"
)
@click.option("-o", "--output", type=OutputFile(piped=True), help="Write to this file, not stdout.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples at a time. [default: the engine's best]")
@click.option("--top", type=click.IntRange(min=1), default=1, show_default=True, help="Classes given for each sample.")
@click.option("--raw", is_flag=True, help="Give the outputs themselves instead of classes (json, jsonl).")
@click.option("--benchmark", is_flag=True, help="Measure latency and throughput; INPUT may then be left out.")
@click.option("--iterations", type=click.IntRange(min=1), default=50, show_default=True, help="Of --benchmark.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no summary.")
def command(
    bundle: Path,
    source: Path | None,
    key: Path | None,
    graph: bool,
    chosen: str | None,
    output: Path | None,
    batch_size: int | None,
    top: int,
    raw: bool,
    benchmark: bool,
    iterations: int,
    quiet: bool,
) -> None:
    """Run BUNDLE on INPUT (an image, a folder of them, .npy, .npz, .safetensors): JSON or CSV, a line a sample."""
    if source is None and not benchmark:
        raise click.UsageError("INPUT must be given, unless --benchmark is.")
    if benchmark:
        refuse_unused(("chosen", "output", "top", "raw"), "with --benchmark")
    else:
        refuse_unused(("iterations",), "without --benchmark")
    if raw:
        refuse_unused(("top",), "with --raw")
    if output is not None:
        require_apart(output, bundle, source, key)
    form = chosen or _format_of(output)
    if raw and form == "csv":
        raise click.UsageError("--raw must not be given with CSV, which has no columns for outputs (got --raw).")
    with load(bundle, key=key, graph=graph) as model:
        for note in model.notes:
            console.err(f"note: {note}")
        if batch_size is not None and batch_size > model.batch[2]:
            raise InputError(
                f"--batch-size: must be at most {model.batch[2]}, the bundle's largest (got {batch_size})."
            )
        feed = None if source is None else open_feed(source, model)
        if source is not None and source.is_dir() and not quiet:
            for note in unread(str(source), source, classes=False):
                console.err(f"note: {note}")
        if benchmark:
            console.out_json(_measured(model, feed, batch_size, iterations))
            return
        assert feed is not None
        if raw:
            how = model.batching(batch_size or model.batch[1])
            how.require_whole(len(feed.ids), bundle, "Give as many, or a --batch-size that divides them.")
        else:
            model.require_classes(top, "--top", "Add --raw.")
        with console.Console(quiet=quiet).watching() as reporter, _destination(output) as stream:
            right = labelled = 0
            with reporter.stage("run"), _writer(form, stream, top) as write:
                for done, row in enumerate(_rows(model, feed, batch_size or model.batch[1], top, raw), start=1):
                    write(row)
                    reporter.step(done, len(feed.ids), "samples")
                    if row.get("truth") is not None and not raw:
                        labelled += 1
                        right += row["label"] == row["truth"]
    if labelled and not quiet:
        console.err(f"accuracy {right / labelled:.4f}: {right} of {labelled} labelled samples")


def _rows(model: Model, feed: Feed, size: int, top: int, raw: bool) -> Iterator[JsonRow]:
    """One row for each sample, in order."""
    at = 0
    for arrays in feed.batches(model, size):
        count = len(next(iter(arrays.values())))
        outputs = model.run_arrays(arrays, feed.ids[at : at + count])
        predictions = [] if raw else model.predictions(outputs, top)
        for i in range(count):
            row: JsonRow = {"id": feed.ids[at + i]}
            if feed.truths[at + i] is not None:
                row["truth"] = feed.truths[at + i]
            if raw:
                row["outputs"] = {name: values[i * len(values) // count] for name, values in outputs.items()}
            else:
                best = predictions[i]
                row |= {"index": best.index, "label": best.label, "score": best.score}
                if top > 1:
                    ranked = zip(best.indices, best.labels, best.scores, strict=True)
                    row["top"] = [{"index": n, "label": label, "score": score} for n, label, score in ranked]
            yield row
        at += count


def _format_of(output: Path | None) -> str:
    """The format that a file's suffix names; JSON lines where it has none, for what is no file, and on stdout."""
    if output is None or not output.suffix or is_stream(output):
        return "jsonl"
    suffix = suffix_of(output).removeprefix(".")
    if suffix not in _FORMATS:
        raise click.UsageError(
            f"-o: must end in {either([f'.{name}' for name in _FORMATS])} (got {output.name}). Name it so, or give "
            "--format."
        )
    return suffix


@contextmanager
def _writer(form: str, stream: TextIO, top: int) -> Iterator[Write]:
    """A function that writes a row in this format; the text is complete when the block ends."""
    if form == "csv":
        yield _csv_writer(stream, top)
        return
    if form == "jsonl":
        yield lambda row: print(json_line(jsonable(row)), file=stream)  # whole lines, whatever the next sample does
        return
    written = 0

    def write(row: JsonRow) -> None:
        nonlocal written
        stream.write(",\n" if written else "[\n")
        stream.write(json_line(jsonable(row)))
        written += 1

    yield write
    if written:
        stream.write("\n]\n")


def _csv_writer(stream: TextIO, top: int) -> Write:
    """Columns id, truth, index, label, score, and index_2, label_2, score_2 ... for more classes."""
    keys = ("index", "label", "score")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["id", "truth", *keys, *(f"{k}_{n}" for n in range(2, top + 1) for k in keys)])

    def write(row: JsonRow) -> None:
        ranked = row.get("top") or [row]
        cells = [row["id"], row.get("truth"), *(entry[k] for entry in ranked for k in keys)]
        writer.writerow([console.visible(cell) if isinstance(cell, str) else cell for cell in cells])

    return write


@contextmanager
def _destination(output: Path | None) -> Iterator[TextIO]:
    """stdout, or a file that appears under its name when it is complete."""
    if output is None:
        with naming("standard output"):
            yield results()
            results().flush()
        return
    as_text: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
    with naming(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        if is_stream(output):
            with open(open_stream(output), "w", **as_text) as stream:
                yield stream
            return
        with replacing(output) as sibling, open(sibling, "x", **as_text) as stream:
            yield stream


def _measured(model: Model, feed: Feed | None, batch_size: int | None, iterations: int) -> JsonObject:
    """Latency of one batch in ms and samples a second, after warm-up runs of a tenth of the iterations."""
    size = batch_size or model.batch[1]
    arrays = model.bundle.golden().inputs if feed is None else next(feed.batches(model, size))
    # Repeat the samples up to the batch size.
    batch = {n: np.resize(a, (size, *a.shape[1:])) for n, a in arrays.items()}
    for _ in range(max(1, iterations // 10)):
        model.run_arrays(batch)
    times_ms = np.empty(iterations)
    for i in range(iterations):
        began = time.perf_counter()
        model.run_arrays(batch)
        times_ms[i] = (time.perf_counter() - began) * 1e3
    p50, p90, p99 = np.percentile(times_ms, LATENCY_PERCENTILES)
    return {
        "executed": model.executed,
        "runner": model.runner.name,
        "notes": list(model.notes),
        "batch_size": size,
        "iterations": iterations,
        "latency_ms": {"mean": times_ms.mean(), "p50": p50, "p90": p90, "p99": p99},
        "samples_per_s": size / times_ms.mean() * 1e3,
    }

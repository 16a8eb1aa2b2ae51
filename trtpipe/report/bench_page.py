"""A bench as text: Markdown for people, CSV for spreadsheets, a plot; all from the JSON that `trtpipe bench` writes."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from calib.files import suffix_of, text_at_most
from calib.strictjson import first_problem, loads
from trtpipe.atomic import write_whole
from trtpipe.errors import InputError
from trtpipe.evaluation.bench import Bench, Row
from trtpipe.figures import markdown_table
from trtpipe.jsontext import json_text
from trtpipe.progress import per_second
from trtpipe.report.metric_rows import SIZE

#: Column title and what it shows, in order.
COLUMNS = (
    ("median ms", "median_ms", "{:.3f}"),
    ("p90 ms", "p90_ms", "{:.3f}"),
    ("p99 ms", "p99_ms", "{:.3f}"),
    ("samples/s", "throughput", ""),  # `per_second`
    ("loss", "loss", "{:.4f}"),
    ("accuracy", "accuracy", "{:.4f}"),
    ("agreement", "agreement", "{:.4f}"),
    ("SQNR dB", "sqnr_db", "{:.1f}"),
    (SIZE, "size_bytes", "{:.3f}"),
    ("peak memory MB", "peak_memory_bytes", "{:.1f}"),
)
#: A longer file is none of `bench_text`.
_MOST_BYTES = 64 << 20
MEGA = ("size_bytes", "peak_memory_bytes")
#: What the figures of the environment are read off, in the page's first lines.
VERSIONS = ("python", "torch", "torchao", "onnxruntime", "system")


def read_bench(path: Path) -> Bench:
    """The bench in a JSON file of `trtpipe bench --save`.

    Raises:
        InputError: it is none.
    """
    try:
        raw = loads(text_at_most(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: must be JSON of `trtpipe bench --save` (got {error}). Measure again.") from None
    try:
        bench = TypeAdapter(Bench).validate_python(raw)
    except ValidationError as error:
        raise InputError(
            f"{path}: must be JSON of `trtpipe bench --save` (got {first_problem(error)}). Measure again."
        ) from None
    if loads(bench_text(bench)) != raw:
        raise InputError(f"{path}: was not written by `trtpipe bench --save` of this version. Measure again.")
    return bench


def bench_text(bench: Bench) -> str:
    """The bench as JSON, which `read_bench` reads."""
    return json_text(bench)


def markdown(bench: Bench) -> str:
    """One page: how it was measured, the table, and each mode that could not run with the reason."""
    titles, *rows = _table(bench)
    table = markdown_table(titles, rows, numbers=True)
    return "\n\n".join([f"# Bench: {bench.name}", _head(bench), table, *_remarks(bench)]) + "\n"


def terminal(bench: Bench) -> str:
    """The same for a terminal, the table in aligned columns."""
    lines = _table(bench)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join(
        "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
        for cells in lines
    )
    return "\n\n".join([f"Bench: {bench.name}", _head(bench), table, *_remarks(bench)]) + "\n"


def _head(bench: Bench) -> str:
    """How it was measured, in a line."""
    versions = ", ".join(f"{n} {bench.environment[n]}" for n in VERSIONS if n in bench.environment)
    return (
        f"Batch {bench.batch}; {bench.rounds} rounds after {bench.warm_up} warm-up runs, each of every mode in turn; "
        f"{bench.samples} samples compared with {bench.reference}; {bench.threads} CPU cores; {versions}."
    )


def _table(bench: Bench) -> list[list[str]]:
    """The cells: titles of the columns that some mode has a figure for, then a row for each mode that ran."""
    ran = [r for r in bench.rows if not r.skipped]
    used = [c for c in COLUMNS if any(getattr(r, c[1]) is not None for r in ran)]
    rows = [[r.name, *(_cell(r, name, form) for _, name, form in used)] for r in ran]
    return [["mode", *(title for title, _, _ in used)], *rows]


def _remarks(bench: Bench) -> list[str]:
    """Paragraphs below the table: notes on modes, modes that could not run and why, notes on the machine."""
    parts = []
    if notes := [f"- {r.name}: {'; '.join(r.notes)}" for r in bench.rows if r.notes and not r.skipped]:
        parts.append("\n".join(notes))
    if skipped := [f"- {r.name}: {r.skipped}" for r in bench.rows if r.skipped]:
        parts.append("Not run here:\n\n" + "\n".join(skipped))
    return parts + [f"Note: {note}" for note in bench.notes]


def _cell(row: Row, name: str, form: str) -> str:
    value = getattr(row, name)
    if value is None:
        return ""
    return form.format(value / 1e6 if name in MEGA else value) if form else per_second(value)


def table_csv(bench: Bench) -> str:
    """Every field of every row, as CSV with a header."""
    out = io.StringIO()
    names = [f for f in Row.__dataclass_fields__ if f not in ("notes", "agreement_interval")]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "agreement_low", "agreement_high", "batch", "rounds"])
    for row in bench.rows:
        values: list[object] = [getattr(row, n) for n in names]
        values += [*(row.agreement_interval or (None, None)), bench.batch, bench.rounds]
        writer.writerow(["" if v is None else v for v in values])
    return out.getvalue()


def require_plot(path: Path) -> None:
    """Refuse a file that `plot` has no format for, before anything is measured.

    Raises:
        InputError: its name ends neither in .png nor in .svg.
    """
    if suffix_of(path) not in (".png", ".svg"):
        raise InputError(f"{path}: must end in .png or .svg (got {suffix_of(path) or 'no suffix'}).")


def plot(bench: Bench, path: Path) -> None:
    """Write a bar of each mode's median latency, with its p90 as a whisker, to a .png or .svg file.

    Raises:
        InputError: the suffix is another.
        OSError: it cannot be written; its filename is `path`.
    """
    require_plot(path)
    from matplotlib.figure import Figure

    rows = [r for r in bench.rows if r.median_ms is not None and r.p90_ms is not None]
    medians = [r.median_ms or 0.0 for r in rows]
    whiskers = [[0.0] * len(rows), [(r.p90_ms or 0.0) - (r.median_ms or 0.0) for r in rows]]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh([r.name for r in rows], medians, xerr=whiskers, color="#4878a8", ecolor="#333333")
    axes.invert_yaxis()
    axes.set_xlabel(f"ms for a batch of {bench.batch} (bar: median, whisker: p90)")
    axes.set_title(f"{bench.name}: {bench.rounds} interleaved rounds")
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix_of(path)[1:])
    write_whole(path, stream.getvalue())

"""What benchmarks/gpu.py writes: the machine, and one table a network, as JSON and as Markdown."""

from __future__ import annotations

import datetime
import importlib.util
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtpipe.evaluation.bench import Bench, Row

#: Column title, field of a row, format; `speed` is against eager FP32 in the same run.
COLUMNS = (
    ("median ms", "median_ms", "{:.3f}"),
    ("p90 ms", "p90_ms", "{:.3f}"),
    ("p99 ms", "p99_ms", "{:.3f}"),
    ("samples/s", "throughput", "{:,.0f}"),
    ("speed", "speed", "{:.2f}"),
    ("top-1 as FP32", "agreement", "{:.4f}"),
    ("SQNR dB", "sqnr_db", "{:.1f}"),
    ("size MB", "size_bytes", "{:.1f}"),
    ("peak memory MB", "peak_memory_bytes", "{:.1f}"),
)
#: What the programs say where there is none.
NO_GPU = "bench-gpu: an NVIDIA GPU must be here (got: {}). Run it on a machine with one."
#: TorchScript in half over FP32, as published for one BiT-M-R101x1.
ANCHOR_MODEL, ANCHOR = "resnetv2_101x1_bit", 1.69
NOTE = """\
Every table was measured in one run: each mode warmed up, then rounds in which every mode ran once. Times are between
CUDA events around one batch, data on the GPU before and after, unless the row says `with transfers`: then the copies
from and to page-locked memory are between the events. `speed` is how many times as fast as eager FP32 (TF32 off) the
median is. `top-1 as FP32` and SQNR compare with eager FP32 on the CPU. Weights are random, so accuracy is not told.
Size is of the weights or of the engine file; peak memory is what PyTorch's allocator held more than before the mode was
made, and for an engine its file, its activations and its bindings. INT8 engines compute in FP16 where they do not in
INT8."""


def machine() -> dict[str, str]:
    """The GPU, its driver, and the versions that count; on a machine without one the reason is its name's place."""
    from trtpipe.trt import driver

    found = driver.probe()
    facts = {"name": "cpu", "gpu": f"none: {found.problem}"}
    if found.devices:
        first = found.devices[0]
        facts = {
            "name": first.name,
            "gpu": f"{first.name}, {first.memory_bytes / 2**30:.0f} GiB, compute capability {first.compute_capability}",
            "driver": _driver(),
            "driver's CUDA": found.cuda,
        }
    return facts | {"python": platform.python_version()} | _torch()


def _driver() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "unknown: nvidia-smi is not on PATH"
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or ["unknown"])[0]


def _torch() -> dict[str, str]:
    """Versions of what takes part, read off packages: torch is not imported for it."""
    from trtpipe.packages import versions

    names = ("torch", "triton", "torchao", "onnx", "timm", "tensorrt", "tensorrt-rtx", "nvidia-cudnn-cu13")
    found = versions(names)
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        text = Path(spec.origin).with_name("version.py").read_text()
        if cuda := re.search(r"^cuda\b.*?'([\d.]+)'", text, re.MULTILINE):
            found["torch's CUDA"] = cuda.group(1)
    return found


def keep(results: Path, name: str, about: Mapping[str, str], bench: Bench) -> tuple[Path, Path]:
    """Put the bench beside those that are in today's files already; the paths of the page and of the JSON."""
    from pydantic import TypeAdapter

    from trtpipe.atomic import write_whole
    from trtpipe.evaluation.bench import Bench
    from trtpipe.jsontext import plain

    file, today = dated(results, name), today_utc()
    page = file.with_suffix(".md")
    results.mkdir(parents=True, exist_ok=True)
    before = json.loads(file.read_text())["benches"] if file.exists() else []
    kept = [b for b in TypeAdapter(list[Bench]).validate_python(before) if b.name != bench.name]
    benches = [*kept, bench]
    write_whole(file, json.dumps({"machine": dict(about), "date": today, "benches": plain(benches)}, indent=1) + "\n")
    write_whole(page, markdown(about, today, benches))
    return page, file


def today_utc() -> str:
    """The date, in ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def dated(results: Path, name: str) -> Path:
    """<results>/<name>-<date>.json, the name in small letters and hyphens."""
    return results / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + f"-{today_utc()}.json")


def nothing_measured(why: str) -> Row:
    """The row of a network none of whose modes were measured."""
    from trtpipe.evaluation.bench import Row

    return Row("every mode", "cuda", skipped=why)


def markdown(about: Mapping[str, str], date: str, benches: list[Bench]) -> str:
    """The page: the machine, how it was measured, and one table a network."""
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items() if name != "name")
    parts = [f"# {about['name']}, {date}", facts, NOTE]
    for bench in benches:
        parts += [f"## {bench.name}", _head(bench), _table(bench)]
        if line := anchor(bench):
            parts.append(line)
        parts += [f"Note: {note}." for note in bench.notes]
    return "\n\n".join(parts) + "\n"


def _head(bench: Bench) -> str:
    trt = [f"{n} {bench.environment[n]}" for n in ("tensorrt", "tensorrt_rtx") if n in bench.environment]
    return (
        f"{bench.rounds} rounds after {bench.warm_up} warm-up runs of each mode, {bench.samples} samples compared, "
        f"{bench.threads} CPU cores{', ' + ', '.join(trt) if trt else ''}."
    )


def _table(bench: Bench) -> str:
    lines = [["mode", *(title for title, _, _ in COLUMNS)], ["---", *("---:" for _ in COLUMNS)]]
    for row in bench.rows:
        where = "" if row.device == "cuda" else " (CPU)"
        if row.skipped:
            lines.append([row.name + where, f"not measured: {_cell(row.skipped)}", *[""] * (len(COLUMNS) - 1)])
        else:
            lines.append([row.name + where, *(_figure(bench, row, field, form) for _, field, form in COLUMNS)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _figure(bench: Bench, row: Row, field: str, form: str) -> str:
    value = speed(bench, row, "eager FP32") if field == "speed" else getattr(row, field)
    if value is None:
        return ""
    return form.format(value / 1e6 if field.endswith("_bytes") else value)


def speed(bench: Bench, row: Row, against: str) -> float | None:
    """How many times as fast as the mode named `against` a row is, by medians of the same run."""
    other = next((r.median_ms for r in bench.rows if r.name == against and r.device == row.device), None)
    return None if other is None or not row.median_ms else other / row.median_ms


def anchor(bench: Bench) -> str:
    """The one figure that has been published, beside ours."""
    row = next((r for r in bench.rows if r.name == "TorchScript FP16" and r.median_ms), None)
    if row is None or not bench.name.startswith(ANCHOR_MODEL):
        return ""
    ours = " and ".join(
        f"{found:.2f} times as fast as {against}"
        for against in ("TorchScript FP32", "eager TF32")
        if (found := speed(bench, row, against)) is not None
    )
    return f"TorchScript in half is {ours or 'not comparable'}; {ANCHOR} times FP32 is published for one such model."

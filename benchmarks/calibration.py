"""Time and memory of calibrating on photos: a bare forward pass, calib, ONNX Runtime's calibrators and NVIDIA
ModelOpt's.

    python benchmarks/calibration.py [--json] [--device cuda] [--model resnet50] [--images 128] [--batch 8] [--rounds 3]
                                     [--rows ...]

Every row runs in a process of its own, so that its peak memory is its own. There it alternates with the bare forward
pass over the same loaded images, and its ratio is to that. The images are random crops of scikit-learn's two sample
photos. Seconds are for the whole calibration, from the first batch to the thresholds. Weights are random: they change
no time. With --device cuda the graph and its observers are on the GPU, rows are calib's alone, and two more figures say
what the pass over the images takes without reading the histograms and computing thresholds, which are the CPU's work.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from calibrators import calib_runner, modelopt_runner, onnxruntime_runner, wait

if TYPE_CHECKING:
    import torch

    from trtpipe.values import Captured

ROWS = ("calib auto", "calib entropy_2", "calib entropy", "calib minmax", "calib percentile", "calib mse",
        "onnxruntime minmax", "onnxruntime entropy", "modelopt entropy")  # fmt: skip
MEMORY_ROWS = ("calib auto",)
#: Processes for each count of images: one's peak differs from the next one's by up to 5 %.
MEMORY_RUNS = 3
#: Times the bare forward pass that calibrating on a GPU may take.
MOST_ON_A_GPU = 1.1
SIZE = 224


class Photos:
    """Crops of two photos as a calib origin: float32 [3, 224, 224], in memory or cut when they are asked for."""

    labels: tuple[int, ...] | None = None
    classes: tuple[str, ...] | None = None
    recipe = "photos"
    sequential = False
    whole = True
    root = ""

    def __init__(self, count: int, in_memory: bool) -> None:
        from sklearn.datasets import load_sample_images

        self._photos = load_sample_images().images
        self.ids = tuple(f"crop {i}" for i in range(count))
        self._loaded = [self._crop(i) for i in range(count)] if in_memory else None

    def load(self, at: int) -> dict[str, np.ndarray[Any, Any]]:
        """One crop."""
        return {"x": self._loaded[at] if self._loaded else self._crop(at)}

    def content(self, at: int) -> str:
        """sha256 hex of the crop."""
        return hashlib.sha256(self.load(at)["x"].tobytes()).hexdigest()

    def _crop(self, at: int) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng(at)
        photo = self._photos[at % 2]
        top, left = rng.integers(0, photo.shape[0] - SIZE), rng.integers(0, photo.shape[1] - SIZE)
        crop = photo[top : top + SIZE, left : left + SIZE].transpose(2, 0, 1)
        return np.ascontiguousarray((crop.astype(np.float32) / 255 - 0.45) / 0.225)


def captured_model(name: str, batch: int) -> tuple[torch.nn.Module, Captured]:
    """The float network and its captured graph, conv+bn folded."""
    import timm
    import torch

    from trtpipe.model.bindings import bind
    from trtpipe.model.capture import capture
    from trtpipe.values import DimRange, LoadedModel, TensorSpec

    torch.manual_seed(0)
    network = timm.create_model(name).eval()
    inputs = (TensorSpec("x", "float32", ("N", 3, SIZE, SIZE), {"N": DimRange(1, batch, 64)}),)
    outputs = (TensorSpec("y", "float32", ("N", 1000), {"N": DimRange(1, batch, 64)}),)
    return network, capture(LoadedModel(bind(network, inputs, {}, ("y",)), inputs, outputs, "random", name))


def peak_mb() -> float:
    """Most memory this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def measure(row: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time one row against the bare forward pass, alternating; in a process of its own."""
    import torch

    from calib.data import Source
    from calib.samples import InputSpec

    tool, method = row.split(" ")
    if args.device != "cpu":
        require_device(args.device, tool)
    network, captured = captured_model(args.model, args.batch)
    origin = Photos(args.images, in_memory=True)
    source = Source(origin, [InputSpec("x", "float32", (3, SIZE, SIZE))], range(args.images))
    arrays = [b.arrays["x"] for b in source.batches(args.batch)]
    batches = [torch.from_numpy(a) for a in arrays]

    bare_graph = captured.graph if args.device == "cpu" else copy.deepcopy(captured.graph).to(args.device)

    def bare() -> None:
        with torch.inference_mode():
            for x in batches:
                bare_graph(x.to(args.device, non_blocking=True))
        wait(args.device)

    result: dict[str, Any] = {"row": row, "model": args.model, "images": args.images}
    with tempfile.TemporaryDirectory() as folder:
        run: Callable[[], Any]
        if tool == "calib":
            calibrate = calib_runner(captured, args.batch, method, args.device)
            run = lambda: calibrate(source)  # noqa: E731
        elif tool == "onnxruntime":
            collect = onnxruntime_runner(captured, batches[0], Path(folder), method)
            run = lambda: collect(arrays)  # noqa: E731
        else:
            observe = modelopt_runner(network)
            run = lambda: observe(batches)  # noqa: E731
        bare_graph(batches[0].to(args.device))
        if tool == "calib":  # compiles the loop, or reads it from the cache
            result["first_call_s"] = timed(lambda: calibrate(Source(origin, source._inputs, range(2))))
        result["bare_peak_mb"] = peak_mb()
        pairs = [(timed(bare), timed(run)) for _ in range(args.rounds)]
    result["bare_s"] = statistics.median(b for b, _ in pairs)
    result["seconds"] = statistics.median(s for _, s in pairs)
    result["ratio"] = statistics.median(s / b for b, s in pairs)
    result["peak_mb"] = peak_mb()
    if args.device != "cpu":
        result.update(observed_pass(captured, batches, args), device=torch.cuda.get_device_name())
    return result


def require_device(device: str, tool: str) -> None:
    """End with a line that says why a row cannot be measured on this device."""
    import torch

    if tool != "calib":
        raise SystemExit(f"{tool} is measured on the CPU")
    if not torch.cuda.is_available():
        raise SystemExit(f"{device}: PyTorch sees no GPU")


def observed_pass(captured: Captured, batches: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The same batches through the same graph without and with observers, alternating, and the GPU's memory."""
    import torch

    from calib.observers import HistogramObserver
    from trtpipe.model.computing import placed
    from trtpipe.model.recorded import replayed
    from trtpipe.quantization.quantize import prepare

    bare_graph, prepared = copy.deepcopy(captured.graph).to(args.device), prepare(captured)
    for observer in prepared.observers.values():
        observer.histogram = HistogramObserver()
    moved = [x.to(args.device) for x in batches]

    def through(graph: Any) -> float:
        def run() -> None:
            with torch.inference_mode():
                for x in moved:
                    graph(x)
            wait(args.device)

        return timed(run)

    half = torch.zeros(1, dtype=torch.int32, device=args.device)
    for observer in prepared.observers.values():
        assert observer.histogram is not None
        observer.histogram.half = half

    def observed() -> float:
        """As `calibrate.calibrate` does: recorded anew each time, the halves in turns."""

        def run() -> None:
            with (
                torch.inference_mode(),
                replayed(lambda inputs: prepared.graph(*inputs), args.device) as run_batch,
            ):
                for k, x in enumerate(moved):
                    half.fill_(k % 2)
                    run_batch((x,))
            wait(args.device)

        return timed(run)

    with placed(prepared.graph, args.device):
        through(bare_graph), observed(), through(prepared.graph)
        torch.cuda.reset_peak_memory_stats()
        times = [(through(bare_graph), observed(), through(prepared.graph)) for _ in range(args.rounds)]
    bare, recorded, plain = (statistics.median(t) for t in zip(*times, strict=True))
    return {
        "pass_bare_s": bare,
        "pass_observed_s": recorded,
        "pass_ratio": statistics.median(r / b for b, r, _ in times),
        "pass_unrecorded_ratio": plain / bare,
        "counted_by": "one launch" if all(in_one_launch(o) for o in prepared.observers.values()) else "torch",
        "gpu_peak_mb": torch.cuda.max_memory_allocated() / 1e6,
    }


def in_one_launch(observer: Any) -> bool:
    """Whether our kernel counted for it; torch's own operations count the same in a dozen launches."""
    return all(c._in_one_launch for c in observer.histogram._counters.values())


def measure_memory(row: str, args: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of one calibration on images that are not held in memory."""
    from calib.data import Source
    from calib.samples import InputSpec

    _, captured = captured_model(args.model, args.batch)
    source = Source(
        Photos(args.images, in_memory=False), [InputSpec("x", "float32", (3, SIZE, SIZE))], range(args.images)
    )
    calibrate = calib_runner(captured, args.batch, row.split(" ")[1], "cpu")
    seconds = timed(lambda: calibrate(source))
    return {"row": row, "images": args.images, "seconds": seconds, "peak_mb": peak_mb()}


def timed(run: Callable[[], Any]) -> float:
    """Seconds `run` takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_own_process(row: str, args: argparse.Namespace, images: int, memory: bool) -> dict[str, Any]:
    """The row's figures, or why there are none."""
    command = [sys.executable, __file__, "--row", row, "--model", args.model, "--images", str(images)]
    command += ["--batch", str(args.batch), "--rounds", str(args.rounds), *(["--memory"] if memory else [])]
    command += ["--device", args.device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {
            "row": row,
            "images": images,
            "problem": done.stderr.strip().rpartition("\n")[2] or f"exit {done.returncode}",
        }
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory_rows(row: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The row's median peak over `MEMORY_RUNS` processes on as many images and on 8 times as many, alternating."""
    counts = (args.images, 8 * args.images)
    runs = [[in_own_process(row, args, n, memory=True) for n in counts] for _ in range(MEMORY_RUNS)]
    found = []
    for of_one_count in zip(*runs, strict=True):
        bad = [r for r in of_one_count if "problem" in r]
        if bad:
            return bad[:1]
        medians = {key: statistics.median(r[key] for r in of_one_count) for key in ("seconds", "peak_mb")}
        found.append({**of_one_count[0], **medians, "peaks_mb": [r["peak_mb"] for r in of_one_count]})
    few, many = found
    return [few, many | {"peaks_of_few_mb": few["peaks_mb"], "peak_growth": many["peak_mb"] / few["peak_mb"] - 1}]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    print(f"{'':22} {'images':>6} {'seconds':>8} {'bare s':>8} {'ratio':>6} {'peak MB':>8} {'bare MB':>8}")
    for r in rows:
        if "problem" in r:
            print(f"{r['row']:22} {r['images']:6}  not measured: {r['problem'][:90]}")
            continue
        bare = f"{r['bare_s']:8.2f} {r['ratio']:6.2f}" if "bare_s" in r else f"{'':8} {'':6}"
        more = f"{r['bare_peak_mb']:8.0f}" if "bare_peak_mb" in r else ""
        print(f"{r['row']:22} {r['images']:6} {r['seconds']:8.2f} {bare} {r['peak_mb']:8.0f} {more}".rstrip())
        if "pass_ratio" in r:
            print(
                f"{'':22} the pass alone, on {r['device']}: {r['pass_observed_s']:.3f} s, {r['pass_ratio']:.2f} times "
                f"the bare one (at most {MOST_ON_A_GPU} is wanted), counted by {r['counted_by']}; "
                f"{r['gpu_peak_mb']:.0f} MB of the GPU"
            )


def main() -> None:
    """Measure every row and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--model", default="resnet50", help="a timm model that takes 224 x 224")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where graph and observers are")
    parser.add_argument("--rounds", type=int, default=3, help="how often each row and the bare pass alternate")
    parser.add_argument(
        "--rows", nargs="*", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the run of 8 times as many images")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps((measure_memory if args.memory else measure)(args.row, args)))
        return
    rows = []
    if args.device != "cpu":
        args.rows, args.no_memory = [r for r in args.rows if r.startswith("calib ")], True
    for row in args.rows:
        rows.append(in_own_process(row, args, args.images, memory=False))
        print(f"done: {row}", file=sys.stderr)
    for row in () if args.no_memory else MEMORY_ROWS:
        rows += memory_rows(row, args)
    if args.json:
        print(json.dumps(rows, indent=1))
        sys.exit(1 if all("problem" in r for r in rows) else 0)
    show(rows)
    if all("problem" in r for r in rows):
        sys.exit(1)
    by_row = {r["row"]: r for r in rows if "ratio" in r}
    for other in ("onnxruntime entropy", "modelopt entropy"):
        if {"calib auto", other} <= by_row.keys():
            times = by_row[other]["ratio"] / by_row["calib auto"]["ratio"]
            print(f"calib auto is {times:.1f} times as fast as {other}")
    for r in rows:
        if "peak_growth" in r:
            few, many = (", ".join(f"{p:.0f}" for p in r[key]) for key in ("peaks_of_few_mb", "peaks_mb"))
            print(f"peak memory with 8 times the images: {100 * r['peak_growth']:+.1f} % (MB: {few}; {many})")


if __name__ == "__main__":
    main()

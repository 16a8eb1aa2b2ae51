"""Does TensorRT-RTX run its engines on this machine's GPU? Every plan it can build, tried; the answer, written down.

    python benchmarks/rtx_loads.py [--results benchmarks/results] [--machine NAME]

A convolution is built portable, in FP32 and in INT8, and for each compute capability that TensorRT-RTX names. Each
plan is then given to TensorRT-RTX itself, past trtpipe's own checks, in a process of its own: is it valid, does it
load, does it run, and how far are its answers from ONNX Runtime's on the same graph. Every message of TensorRT-RTX is
kept. The answer goes to <results>/rtx-<GPU>-<date>.json; what it says of a GPU that TensorRT-RTX does not name belongs
into RTX_SEEN of trtpipe/trt/platforms.py, from where doctor, verify and the docs take it. An answer of the same day is
not asked for again, but shown. Ends with 3 where no GPU is.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_page
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

PORTABLE = "portable"


def main() -> int:
    """Try every plan, write the answer, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--machine", help="what the file is named after; the GPU's name when left out")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan is not None:
        print(json.dumps(attempt(args.plan)))
        return 0
    from trtpipe.trt import driver, flavour

    found = driver.probe()
    if found.problem:
        print(gpu_page.NO_GPU.format(found.problem), file=sys.stderr)
        return 3
    if "tensorrt_rtx" not in flavour.installed():
        print("rtx_loads: tensorrt-rtx is not installed, so there is nothing to ask.", file=sys.stderr)
        return 0
    here, about = found.devices[0].compute_capability, gpu_page.machine()
    path = gpu_page.dated(args.results, f"rtx-{args.machine or about['name']}")
    if path.exists():
        print(f"{json.loads(path.read_text())['answer']}\n{path}, of this day")
        return 0
    plans = tried()
    text = answer(plans, here)
    written = {
        "machine": about,
        "date": gpu_page.today_utc(),
        "tensorrt_rtx": flavour.installed()["tensorrt_rtx"][1],
        "compute_capability": here,
        "answer": text,
        "plans": plans,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(f"{text}\n{path}")
    return 0


def tried() -> list[dict[str, Any]]:
    """What became of each plan."""
    from gpu_graphs import conv_model, quantized_model

    from trtpipe.errors import TrtpipeError
    from trtpipe.job.sections import Build
    from trtpipe.progress import Silent
    from trtpipe.trt.isolated import build_isolated
    from trtpipe.trt.platforms import RTX_COMPUTE_CAPABILITIES

    done = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for precision, model in (("FP32", conv_model()), ("INT8", quantized_model())):
            (folder / "graph.onnx").write_bytes(model.data)
            for capability in (PORTABLE, *(RTX_COMPUTE_CAPABILITIES if precision == "FP32" else ())):
                asked = () if capability == PORTABLE else (capability,)
                facts: dict[str, Any] = {"precision": precision, "compute_capability": capability}
                try:
                    engine = build_isolated(model, Build(compute_capability=asked), progress=Silent())
                except TrtpipeError as error:
                    done.append({**facts, "runs": False, "ended": f"not built: {error}"})
                    continue
                (folder / "plan").write_bytes(engine.data)
                done.append({**facts, **in_own_process(folder / "plan")})
                print(json.dumps(done[-1]), file=sys.stderr)
    return done


def in_own_process(plan: Path) -> dict[str, Any]:
    """What `attempt` says; or how its process died."""
    command = [sys.executable, __file__, "--plan", str(plan)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return {"runs": False, "ended": "after 120 s it had not ended"}
    if done.returncode:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        return {"runs": False, "ended": f"the process ended with {how}: {done.stderr.strip()[-800:]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def attempt(path: Path) -> dict[str, Any]:
    """Give one plan to TensorRT-RTX, step by step; `ended` is the step that failed, `messages` are its own words."""
    import tensorrt_rtx as trt
    from gpu_graphs import batch

    from trtpipe.evaluation.metrics import relative_l2
    from trtpipe.runtime.onnxruntime import OrtRunner
    from trtpipe.trt.memory import open_memory

    messages: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR, trt.ILogger.WARNING):
                messages.append(f"{severity.name}: {message}")

    found: dict[str, Any] = {"runs": False, "ended": "", "validity": "", "messages": messages}
    memory, plan, logger = open_memory(), path.read_bytes(), Log()
    found["memory"] = memory.provider
    runtime = trt.Runtime(logger)
    validity, diagnostics = runtime.get_engine_validity(plan)
    found["validity"] = f"{getattr(validity, 'name', validity)}, diagnostics {diagnostics}"
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        return {**found, "ended": "deserialize_cuda_engine returned None"}
    context = engine.create_execution_context()
    if context is None:
        return {**found, "ended": "create_execution_context returned None"}
    inputs = batch(4)
    wanted = OrtRunner(path.with_name("graph.onnx"), as_written=True).run(inputs)["map"]
    context.set_input_shape("image", inputs["image"].shape)
    output = np.empty(wanted.shape, np.float32)
    buffers = {"image": memory.allocate(inputs["image"].nbytes), "map": memory.allocate(output.nbytes)}
    for name, buffer in buffers.items():
        context.set_tensor_address(name, buffer.address)
    memory.upload(buffers["image"], inputs["image"])
    if not context.execute_async_v3(memory.stream):
        return {**found, "ended": "execute_async_v3 returned False"}
    memory.download(buffers["map"], output)
    memory.synchronize()
    return {**found, "runs": True, "relative_l2": relative_l2(wanted, output)}


def answer(plans: list[dict[str, Any]], here: str) -> str:
    """One sentence for a person, with TensorRT-RTX's own words where it refused."""
    portable = [p for p in plans if p["compute_capability"] == PORTABLE]
    others = sorted({p["compute_capability"] for p in plans if p["runs"]} - {PORTABLE})
    refused = [p for p in portable if not p["runs"]]
    also = f"plans for {', '.join(others)} run too" if others else "no plan for a named compute capability runs"
    if not refused:
        worst = max(p["relative_l2"] for p in portable)
        return f"On {here} portable engines run, at most {worst:.2g} (relative L2) from ONNX Runtime; {also}."
    said = [w for p in refused for w in (p["ended"], p.get("validity", ""), *p.get("messages", ())) if w]
    words = "; ".join(dict.fromkeys(said))
    who = " and ".join(p["precision"] for p in refused)
    return f"On {here} portable engines in {who} do not run ({words}); {also}."


if __name__ == "__main__":
    sys.exit(main())

"""The quickstart's digits in INT8 by each algorithm: accuracy, and how far amax depends on the batch size.

    python benchmarks/calibration_accuracy.py [--json] [--job configs/quickstart.yaml]

`make quickstart` makes the data and the weights first. INT8 is simulated by executing the Q/DQ graph with torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

#: Batch sizes whose thresholds are compared; the first one's are used.
BATCH_SIZES = (64, 7, 1)


def answers(graph: Any, source: Any) -> np.ndarray[Any, Any]:
    """The class that `graph` answers for each sample: int64 [S]."""
    import torch

    with torch.inference_mode():
        found = [graph(*(torch.from_numpy(b.arrays[n]) for n in source.names))[0].argmax(1) for b in source.batches(30)]
    return torch.cat(found).numpy()


def measure(path: Path) -> dict[str, Any]:
    """Accuracy by algorithm, and the largest relative difference of any amax between batch sizes."""
    from calib.algorithms import ALGORITHMS
    from trtpipe.job.load import read_job
    from trtpipe.model.capture import capture
    from trtpipe.model.data import open_calibration, open_check
    from trtpipe.model.load import load_model
    from trtpipe.progress import Silent
    from trtpipe.quantization.calibrate import calibrate
    from trtpipe.quantization.quantize import place_qdq, prepare

    job = read_job(path)
    captured = capture(load_model(job))
    source, check = open_calibration(job), open_check(job)
    tables = [
        calibrate(
            captured,
            source,
            batch_size=size,
            algorithm="entropy_2",
            percentile=99.99,
            digests={},
            progress=Silent(),
        )
        for size in BATCH_SIZES
    ]
    expected = answers(captured.graph, check)
    rows: list[dict[str, Any]] = [{"algorithm": "float32", "accuracy": float(np.mean(expected == check.labels))}]
    for algorithm in ALGORITHMS:
        amax = [t.recomputed(algorithm).amax for t in tables]
        quantized, _ = place_qdq(prepare(captured), amax[0])
        got = answers(quantized, check)
        rows.append(
            {
                "algorithm": algorithm,
                "accuracy": float(np.mean(got == check.labels)),
                "agreement": float(np.mean(got == expected)),
                "amax_batch_difference": max(abs(a[k] / amax[0][k] - 1) for a in amax for k in a),
            }
        )
    return {
        "samples": source.sample_count,
        "check_samples": check.sample_count,
        "batch_sizes": BATCH_SIZES,
        "rows": rows,
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--job", type=Path, default=Path("configs/quickstart.yaml"))
    args = parser.parse_args()
    found = measure(args.job)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    sizes = ", ".join(map(str, BATCH_SIZES))
    print(
        f"{found['samples']} samples calibrated, {found['check_samples']} checked; amax compared for batches of {sizes}"
    )
    print(f"{'algorithm':12} {'accuracy':>9} {'agreement':>10} {'amax differs by':>16}")
    for row in found["rows"]:
        more = f"{row['agreement']:10.4f} {row['amax_batch_difference']:16.1e}" if "agreement" in row else ""
        print(f"{row['algorithm']:12} {row['accuracy']:9.4f} {more}".rstrip())


if __name__ == "__main__":
    main()

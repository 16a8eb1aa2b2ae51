"""Build well-known architectures (random weights, crops of two photos) in fp32, fp16 and int8; print what came out.

    python benchmarks/models.py [--json] [--only resnet50] [--precision int8]

No GPU is needed: TensorRT-RTX compiles the engines, ONNX Runtime executes their graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from photos import write_photos

#: timm name -> side of the input in pixels
MODELS = {
    "resnet50": 224,
    "mobilenetv3_large_100": 224,
    "vit_base_patch16_224": 224,
    "tf_efficientnet_b4": 320,
    "resnetv2_101x1_bit": 224,
}
PRECISIONS: dict[str, dict[str, bool]] = {"fp32": {}, "fp16": {"fp16_mode": True}, "int8": {"int8_mode": True}}


def job(name: str, size: int, precision: str, photos: Path) -> dict[str, Any]:
    """The job file's content."""
    data = {
        "images": str(photos),
        "transform": {"resize": [size, size], "normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}},
        "batch_size": 8,
    }
    return {
        "name": f"{name}-{precision}",
        "model": {"factory": "seeded_timm:create", "args": {"name": name}},
        "inputs": {"image": {"shape": ["N", 3, size, size], "N": {"min": 1, "opt": 8, "max": 16}}},
        "outputs": {"logits": {}},
        "precision": PRECISIONS[precision],
        "calibration": {**data, "samples": 32},
        "build": {"target": "tensorrt_rtx"},
        "check": {**data, "samples": 16, "seed": 1, "limits": {"cosine_min": 0.8}},
    }


def measure(name: str, precision: str, folder: Path) -> dict[str, Any]:
    """Build one job and describe its bundle."""
    from trtpipe.job.load import read_job
    from trtpipe.pipeline.build import build
    from trtpipe.progress import Silent

    size = MODELS[name]
    path = folder / f"{name}-{precision}.yaml"
    path.write_text(json.dumps(job(name, size, precision, folder / "photos")))  # JSON is YAML
    (folder / "seeded_timm.py").write_text(
        "import timm, torch\n\n\ndef create(name):\n    torch.manual_seed(0)\n    return timm.create_model(name)\n"
    )
    began = time.perf_counter()
    built = build(read_job(path), folder / "out", Silent())
    metrics = {m.name: m.value for m in built.report.metrics}
    manifest = built.bundle.manifest
    return {
        "model": name,
        "precision": precision,
        "size_px": size,
        "engine_bytes": manifest.files[manifest.engine_file].size,
        "cosine": metrics["cosine"],
        "sqnr_db": metrics["sqnr_db"],
        "executed": built.report.executed,
        "control_failed": built.report.control.failed,
        "int8_layers": sum(layer.precision == "int8" for layer in manifest.layers),
        "layers": len(manifest.layers),
        "seconds": time.perf_counter() - began,
        "stage_seconds": dict(built.seconds),
    }


def main() -> None:
    """Print a row a build, as it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--precision", choices=PRECISIONS)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_photos(folder / "photos", 64, 384)
        for name in [args.only] if args.only else MODELS:
            for precision in [args.precision] if args.precision else PRECISIONS:
                rows.append(measure(name, precision, folder))
                row = rows[-1]
                first = next(r for r in rows if r["model"] == name)
                share = row["engine_bytes"] / first["engine_bytes"]
                print(
                    f"{name:<24} {precision}  {row['engine_bytes'] / 1e6:8.1f} MB  {share:6.1%} of "
                    f"{first['precision']}  cosine {row['cosine']:.5f}  SQNR {row['sqnr_db']:6.1f} dB  "
                    f"INT8 {row['int8_layers']}/{row['layers']}  {row['seconds']:6.1f} s",
                    file=sys.stderr if args.json else sys.stdout,
                    flush=True,
                )
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

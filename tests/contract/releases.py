"""The releases of TensorRT whose real bindings the contract is run on."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Release to the distribution that has its bindings.
RELEASES = {
    "8.6.1": "tensorrt-bindings",
    "10.3.0": "tensorrt-cu12-bindings",
    "10.16.1.11": "tensorrt-cu13-bindings",
    "11.4.0.106": "tensorrt-cu13-bindings",
}
#: The last Python that a release has bindings for.
NEWEST_PYTHON = {"8.6.1": (3, 11), "10.3.0": (3, 12)}

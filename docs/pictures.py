"""The pictures of calibration.md: python docs/pictures.py [FOLDER], docs/pictures by default.

One tensor, made without a network: scikit-learn's photo of a flower, a 3 x 3 convolution with seeded weights, ReLU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from calib.algorithms import ALGORITHMS, ENTROPY_BINS, LEVELS, divergences, mean_squared_errors, threshold
from calib.histogram import Histogram

HERE = Path(__file__).resolve().parent / "pictures"


def activations() -> np.ndarray[Any, Any]:
    """float32 [8, H, W]: what a first layer gives on a photo."""
    from sklearn.datasets import load_sample_images

    photo = (load_sample_images().images[1].astype(np.float64) / 255 - 0.45) / 0.225
    weights = np.random.default_rng(3).normal(0, 0.35, (8, 3, 3, 3))
    windows = np.lib.stride_tricks.sliding_window_view(photo, (3, 3), (0, 1))
    return np.maximum(np.einsum("hwcij,ocij->ohw", windows, weights), 0).astype(np.float32)


def thresholds(axes: Any, histogram: Histogram) -> None:
    """The values, and where each algorithm would saturate them."""
    edges = np.linspace(0, histogram.max, 257)
    counts = np.diff(histogram.below(edges))
    axes.stairs(np.maximum(counts, 0.5), edges, baseline=0.5, fill=True, color="#9db4c0")
    axes.set_yscale("log")
    for k, name in enumerate(a for a in ALGORITHMS):
        amax = threshold(histogram, name)
        axes.axvline(amax, color=f"C{k}", label=f"{name} {amax:.2f}")
    axes.set_xlabel(f"value (zeros, {100 * histogram.zeros / histogram.elements:.0f} %, are left out)")
    axes.set_ylabel("count")
    axes.legend()


def divergence(axes: Any, histogram: Histogram) -> None:
    """What entropy_2 takes the least of."""
    counts = histogram.linear(ENTROPY_BINS)
    counts[0] = counts[1]
    found = divergences(counts)
    amax = (np.arange(LEVELS, ENTROPY_BINS + 1) + 0.5) * histogram.max / ENTROPY_BINS
    axes.plot(amax, found, color="C0", linewidth=0.8)
    axes.axvline(threshold(histogram, "entropy_2"), color="C0", linestyle=":")
    axes.set_yscale("log")
    axes.set_xlabel("threshold")
    axes.set_ylabel("KL divergence, nats (entropy_2)")


def error(axes: Any, histogram: Histogram) -> None:
    """What mse takes the least of: rounding on the right, clipping on the left."""
    amax = np.geomspace(histogram.max / 40, histogram.max, 200)
    axes.plot(amax, mean_squared_errors(histogram, amax), color="C4")
    axes.axvline(threshold(histogram, "mse"), color="C4", linestyle=":")
    axes.set_yscale("log")
    axes.set_xlabel("threshold")
    axes.set_ylabel("mean squared error (mse)")


def main(folder: Path) -> None:
    """Write both pictures."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "trtpipe", "svg.fonttype": "none", "figure.facecolor": "white"})
    histogram = Histogram.of(activations())
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawn in (("thresholds", (thresholds,)), ("criteria", (divergence, error))):
        figure, axes = pyplot.subplots(1, len(drawn), figsize=(9, 3.4), layout="constrained", squeeze=False)
        for one, draw in zip(axes[0], drawn, strict=True):
            draw(one, histogram)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

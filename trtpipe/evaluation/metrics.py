"""How far one set of outputs is from another. Pure functions in float64; a half-precision output is widened first, and
whole numbers are subtracted as such. Where an output is NaN or infinite nothing of it is alike: a cosine is 0 and an
SQNR -inf; other figures are infinite or NaN themselves, and NumPy does not warn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from calib.types import Array
from trtpipe.figures import difference

#: The best value of every figure of the check: larger is better where it is over 0. A metric of the job's own says for
#: itself which way is better.
BEST: Mapping[str, float] = {
    "cosine": 1.0,
    "cosine_worst": 1.0,
    "max_abs": 0.0,
    "relative_l2": 0.0,
    "sqnr_db": math.inf,
    "top1_agreement": 1.0,
    "accuracy_baseline": 1.0,
    "accuracy_engine": 1.0,
    "accuracy_drop": 0.0,
}


def _rows(x: Array) -> Array:
    """[S, ...] as float64 [S, everything else]."""
    return np.asarray(x, dtype=np.float64).reshape(len(x), -1)


def _less(output: Array, reference: Array) -> Array:
    """output - reference of two arrays [S, ...] as float64 [S, everything else] (`difference`)."""
    a, b = (np.asarray(x).reshape(len(x), -1) for x in (output, reference))
    return difference(b, a)


def cosine(reference: Array, output: Array) -> Array:
    """Cosine similarity of each sample, float64 [S] in [-1, 1].

    Two zero vectors are equal (1); a zero vector against any other has no similarity (0). A vector of one
    number has no direction but its sign: such an output is one vector over all samples, and float64 [1] comes back.
    """
    a, b = _rows(reference), _rows(output)
    return similarity(a.T, b.T) if a.shape[1] == 1 else similarity(a, b)


@np.errstate(invalid="ignore", over="ignore")
def similarity(a: Array, b: Array) -> Array:
    """Cosine similarity of each row of two arrays [S, K], float64 [S] in [-1, 1], exactly 1 for equal rows; `cosine`
    says what it is of zeros."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    safe = np.where(lengths > 0, lengths, 1.0)
    measured = np.where(lengths > 0, np.clip((a * b).sum(axis=1) / safe, -1.0, 1.0), 0.0)
    return np.where((a == b).all(axis=1), 1.0, measured)


@np.errstate(invalid="ignore", over="ignore")
def max_abs(reference: Array, output: Array) -> float:
    """Largest |output - reference| of two arrays [S, ...]."""
    return float(np.abs(_less(output, reference)).max())


@np.errstate(invalid="ignore", over="ignore")
def relative_l2(reference: Array, output: Array) -> float:
    """|output - reference| / |reference|, Euclidean norms over all of [S, ...]; where the reference is all zero, 0 for
    an output that is zero too, else inf."""
    noise, signal = (
        np.linalg.norm(_less(output, reference)),
        np.linalg.norm(_rows(reference)),
    )
    if signal == 0:
        return 0.0 if noise == 0 else float("inf")
    return float(noise / signal)


def sqnr_db(reference: Array, output: Array) -> float:
    """Signal to quantization noise ratio of two arrays [S, ...] in dB; inf where they are equal, -inf where the
    reference alone is all zero, or the output is NaN or infinite.

    It is 10 log10(|reference|^2 / |output - reference|^2), Euclidean norms over everything.
    """
    ratio = relative_l2(reference, output)
    if ratio == 0:
        return math.inf
    return -20 * math.log10(ratio) + 0.0 if ratio < math.inf else -math.inf


def ranks_classes(x: Array) -> bool:
    """Whether the output is one score a class: [S, C] with C >= 2."""
    return x.ndim == 2 and x.shape[1] >= 2 and np.issubdtype(x.dtype, np.floating)


def top1_agreement(reference: Array, output: Array) -> float:
    """Share of samples with the same argmax, in [0, 1]; both are [S, C]."""
    return same_class(reference, output) / len(reference)


def same_class(reference: Array, output: Array) -> int:
    """How many samples have the same argmax; both are [S, C]."""
    return int((_rows(reference).argmax(1) == _rows(output).argmax(1)).sum())


@dataclass(frozen=True)
class Paired:
    """Samples with a known label (>= 0) by who gets them right: both, one alone, or neither."""

    both: int
    only_reference: int
    only_output: int
    neither: int

    @property
    def samples(self) -> int:
        """All of them."""
        return self.both + self.only_reference + self.only_output + self.neither

    @property
    def accuracies(self) -> tuple[float, float]:
        """Share of samples that the reference gets right, and that the output gets right, in [0, 1]."""
        return (self.both + self.only_reference) / self.samples, (self.both + self.only_output) / self.samples

    @property
    def drop(self) -> float:
        """Accuracy of the reference less that of the output, in [-1, 1]."""
        return (self.only_reference - self.only_output) / self.samples


def paired_accuracy(reference: Array, output: Array, labels: Array) -> Paired:
    """Samples by which of the two gets them right; scores are [S, C], labels int [S]."""
    known = labels >= 0
    a = _rows(reference).argmax(1)[known] == labels[known]
    b = _rows(output).argmax(1)[known] == labels[known]
    return Paired(int((a & b).sum()), int((a & ~b).sum()), int((~a & b).sum()), int((~a & ~b).sum()))

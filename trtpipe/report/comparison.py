"""How the checked outputs differ from the baseline's: the confusion matrix and the samples that differ most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calib.types import Array
from trtpipe.batching import last_label, ranked_output
from trtpipe.evaluation import metrics
from trtpipe.report.boxes import Drawn, box_pictures, drawn, overlap
from trtpipe.report.content import ComparedOutputs
from trtpipe.report.dense import is_dense, pictures
from trtpipe.report.sample_image import IMAGE_SIDE, data_uri, sample_image

#: Classes that a confusion matrix shows; of more, those with the most errors are taken.
SHOWN_CLASSES = 12
#: Samples that are shown.
SHOWN_SAMPLES = 12
#: Outputs of pictures that are shown beside the first gallery.
SHOWN_DENSE = 3


@dataclass(frozen=True)
class Confusion:
    """Counts [C, C] of some classes: row = `rows`, column = what was executed; `others` are of other classes."""

    names: tuple[str, ...]
    counts: Array
    rows: str
    others: int
    classes: int


@dataclass(frozen=True)
class Shown:
    """One sample of the report. `score` is what it was chosen by; `image` is a data: URI, or None; `pictures` are those
    of a dense output (see `dense`), or of boxes."""

    id: str
    label: str | None
    baseline: str | None
    executed: str | None
    differs: bool
    score: float
    image: str | None
    pictures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Gallery:
    """The samples to look at. `by` says what their score is; `differing` counts all samples that differ."""

    output: str
    by: str
    differing: int
    samples: int
    shown: tuple[Shown, ...]


def class_output(compared: ComparedOutputs) -> str | None:
    """The output of one score a class that the labels are about (`ranked_output`), or None; of detections none is."""
    if compared.detections is not None:
        return None
    columns = {
        name: reference.shape[1]
        for name, reference in compared.reference.items()
        if name not in compared.unranked and metrics.ranks_classes(reference) and _is_paired(compared, name, reference)
    }
    return ranked_output(columns, last_label(compared.labels)) or None


def confusion(compared: ComparedOutputs, names: tuple[str, ...] | None) -> Confusion | None:
    """The confusion matrix of the first output of class scores; rows are the labels, or the baseline without labels."""
    output = class_output(compared)
    if output is None:
        return None
    reference, outputs = compared.reference[output], compared.outputs[output]
    classes = reference.shape[1]
    executed = outputs.argmax(1)
    known = (
        np.ones(len(outputs), bool) if compared.labels is None else (compared.labels >= 0) & (compared.labels < classes)
    )
    labelled = compared.labels is not None and bool(known.any())
    truth = compared.labels if labelled and compared.labels is not None else reference.argmax(1)
    known = known if labelled else np.ones(len(outputs), bool)
    pairs, amounts = np.unique(np.stack([truth[known], executed[known]]), axis=1, return_counts=True)
    if classes <= SHOWN_CLASSES:
        shown = list(range(classes))
    else:
        involved = np.zeros(classes, np.int64)
        wrong = pairs[0] != pairs[1]
        np.add.at(involved, pairs[0, wrong], amounts[wrong])
        np.add.at(involved, pairs[1, wrong], amounts[wrong])
        seen = np.bincount(truth[known], minlength=classes)
        order = sorted(range(classes), key=lambda c: (-int(involved[c]), -int(seen[c]), c))
        shown = sorted(order[:SHOWN_CLASSES])
    at = {c: i for i, c in enumerate(shown)}
    counts = np.zeros((len(shown), len(shown)), np.int64)
    for (row, column), amount in zip(pairs.T.tolist(), amounts.tolist(), strict=True):
        if row in at and column in at:
            counts[at[row], at[column]] += amount
    others = int(amounts.sum() - counts.sum())
    titles = tuple(str(c) if names is None else class_name(c, names) for c in shown)
    return Confusion(titles, counts, "label" if labelled else "baseline", others, classes)


def galleries(compared: ComparedOutputs, names: tuple[str, ...] | None) -> tuple[tuple[Gallery, ...], tuple[str, ...]]:
    """`gallery`, then one of each other output whose samples are pictures; and the names of those beyond the first
    `SHOWN_DENSE`."""
    first = gallery(compared, names)
    if first is None:
        return (), ()
    paired = {n: compared.outputs[n] for n, a in compared.reference.items() if _is_paired(compared, n, a)}
    dense = [name for name, output in paired.items() if is_dense(output) and name != first.output]
    others = (_least_similar(compared, name) for name in dense[:SHOWN_DENSE])
    return (first, *filter(None, others)), tuple(dense[SHOWN_DENSE:])


def _is_paired(compared: ComparedOutputs, name: str, reference: Array) -> bool:
    outputs = compared.outputs.get(name)
    return outputs is not None and outputs.shape == reference.shape and len(outputs) > 0


def gallery(compared: ComparedOutputs, names: tuple[str, ...] | None) -> Gallery | None:
    """The samples on which the two differ most: other classes first, then the closest calls or the least similar."""
    if (pairs := drawn(compared)) is not None:
        return _least_overlapping(compared, pairs)
    output = class_output(compared)
    if output is None:
        return _least_similar(compared)
    reference, outputs = compared.reference[output], np.asarray(compared.outputs[output], np.float64)
    expected, executed = reference.argmax(1), outputs.argmax(1)
    top = np.sort(outputs, axis=1)[:, -2:]
    margin = np.nan_to_num(top[:, 1] - top[:, 0], nan=-1.0)
    differs = expected != executed
    order = sorted(range(len(outputs)), key=lambda i: (not differs[i], float(margin[i]), i))[:SHOWN_SAMPLES]
    shown = []
    for i in order:
        label = None if compared.labels is None or compared.labels[i] < 0 else int(compared.labels[i])
        shown.append(
            Shown(
                id=str(compared.ids[i]),
                label=None if label is None else class_name(label, names),
                baseline=class_name(int(expected[i]), names),
                executed=class_name(int(executed[i]), names),
                differs=bool(differs[i]),
                score=float(margin[i]),
                image=image_uri(compared.images, str(compared.ids[i])),
            )
        )
    return Gallery(output, "margin", int(differs.sum()), len(outputs), tuple(shown))


def _least_overlapping(compared: ComparedOutputs, pairs: Sequence[tuple[Drawn, Drawn]]) -> Gallery:
    """The samples whose boxes match the baseline's least, with these drawn."""
    scores = [overlap(*pair) for pair in pairs]
    order = sorted(range(len(scores)), key=lambda i: (scores[i], i))[:SHOWN_SAMPLES]
    shown = tuple(
        Shown(str(compared.ids[i]), None, None, None, False, scores[i], None, box_pictures(compared, i, pairs[i]))
        for i in order
    )
    assert compared.detections is not None
    return Gallery(compared.detections.boxes, "overlap", 0, len(scores), shown)


def _least_similar(compared: ComparedOutputs, only: str | None = None) -> Gallery | None:
    """The samples with the least cosine similarity, over all outputs that can be paired, or of one; an output of one
    number a sample has none of each."""
    worst: Array | None = None
    output = ""
    for name, reference in compared.reference.items():
        if only not in (None, name) or not _is_paired(compared, name, reference) or reference[0].size == 1:
            continue
        similarity = np.nan_to_num(metrics.cosine(reference, compared.outputs[name]), nan=-1.0)
        if worst is None or float(similarity.min()) < float(worst.min()):
            worst, output = similarity, name
    if worst is None:
        return None
    order = sorted(range(len(worst)), key=lambda i: (float(worst[i]), i))[:SHOWN_SAMPLES]
    dense = is_dense(compared.outputs[output])
    shown = tuple(
        Shown(str(compared.ids[i]), None, None, None, False, float(worst[i]),
              image_uri(compared.images, str(compared.ids[i])),
              pictures(compared.reference[output][i], compared.outputs[output][i]) if dense else ())
        for i in order
    )  # fmt: skip
    return Gallery(output, "cosine", 0, len(worst), shown)


def class_name(index: int, names: tuple[str, ...] | None) -> str:
    """The class's name; where the job does not name it, `class 7`."""
    return names[index] if names is not None and 0 <= index < len(names) else f"class {index}"


def image_uri(folder: Path | None, name: str) -> str | None:
    """The image `folder/name`, made small, as a data: URI; None when it cannot be read as an image."""
    image = sample_image(folder, name)
    if image is None:
        return None
    image.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    return data_uri(image, "png" if max(image.size) <= 64 else "jpeg")

"""A dense output of one sample as pictures side by side: the baseline's, what was executed, and where they differ."""

from __future__ import annotations

import numpy as np
from PIL import Image

from calib.types import Array
from trtpipe.report.sample_image import IMAGE_SIDE, data_uri

#: Of classes, in turn; the first is dark, as it often is the background.
COLOURS = np.array(
    [(30, 30, 34), (66, 133, 244), (219, 68, 55), (244, 180, 0), (15, 157, 88), (171, 71, 188), (0, 172, 193),
     (255, 112, 67), (158, 157, 36), (92, 107, 192), (240, 98, 146), (121, 85, 72)], np.uint8,
)  # fmt: skip


def is_dense(output: Array) -> bool:
    """Whether each of the samples [S, ...] is a picture: [C, H, W] or [H, W], of 4 x 4 pixels or more."""
    return output.ndim in (3, 4) and min(output.shape[-2:]) >= 4 and output.size > 0


def pictures(reference: Array, output: Array) -> tuple[tuple[str, str], ...]:
    """(title, data: URI) of the baseline's picture, of what was executed, and of their difference.

    Of 1 or 3 channels the values are shown, from the least to the largest of the two; of others the class with the
    largest score, or the integers as classes. The difference is the share of that range, or white where classes differ.
    What is not finite is at the end of the range, NaN black, and white in the difference.

    Args:
        reference: of one sample, [C, H, W] or [H, W].
        output: likewise.
    """
    a, b = (x[None] if x.ndim == 2 else x for x in (reference, output))
    if a.dtype.kind == "f" and len(a) in (1, 3):
        wide = [x.astype(np.float64) for x in (a, b)]
        finite = np.concatenate([x[np.isfinite(x)] for x in wide])
        low = float(finite.min()) if finite.size else 0.0
        span = (float(finite.max()) - low if finite.size else 0.0) or 1.0
        shares = [np.nan_to_num((x - low) / span, nan=0.0).clip(0, 1) for x in wide]
        shown = [(x * 255).astype(np.uint8).transpose(1, 2, 0) for x in shares]
        with np.errstate(invalid="ignore"):  # infinity less infinity
            off = np.nan_to_num(np.abs(wide[0] - wide[1]).max(axis=0) / span, nan=1.0)
    else:
        classes = [x[0].astype(np.int64) if x.dtype.kind != "f" else x.argmax(axis=0) for x in (a, b)]
        shown = [COLOURS[c % len(COLOURS)] for c in classes]
        off = (classes[0] != classes[1]).astype(np.float64)
    difference = (np.clip(off, 0, 1) * 255).astype(np.uint8)[..., None]
    titles = ("baseline", "executed", "difference")
    return tuple((t, uri(x)) for t, x in zip(titles, (*shown, difference), strict=True))


def uri(pixels: Array, side: int = IMAGE_SIDE) -> str:
    """Pixels uint8 [H, W, 1 or 3] as a data: URI, no longer than `side`."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((side, side), Image.Resampling.NEAREST)
    return data_uri(image, "png")

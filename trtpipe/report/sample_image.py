"""The picture of a sample, for the report."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Literal

from PIL import Image

from calib.images import UNREADABLE_IMAGE

#: A file with more pixels is not decoded for the report.
MOST_PIXELS = 64_000_000
#: Longer side of a picture in the report, in pixels.
IMAGE_SIDE = 112


def sample_image(folder: Path | None, name: str) -> Image.Image | None:
    """The image `folder/name` as RGB, its pixels lying as the network got them: no EXIF orientation is applied.

    None where the samples are no files, the file cannot be read, or it has more than `MOST_PIXELS`.
    """
    if folder is None:
        return None
    try:
        with Image.open(folder / name) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                return None
            return opened.convert("RGB")
    except UNREADABLE_IMAGE:
        return None


def data_uri(image: Image.Image, kind: Literal["png", "jpeg"]) -> str:
    """The image as a data: URI."""
    stream = io.BytesIO()
    image.save(stream, kind, **({} if kind == "png" else {"quality": 82}))
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"

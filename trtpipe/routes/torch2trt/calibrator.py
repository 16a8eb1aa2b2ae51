"""The calibrator that torch2trt is given in place of its own, for implicit INT8."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn
from unittest.mock import patch

from calib.trt_calibrator import NativeCalibrator
from trtpipe.errors import BuildError
from trtpipe.packages import install_command
from trtpipe.trt import flavour
from trtpipe.trt.implicit import NativeCalibration, make_calibrator

INSTALL = install_command("torch2trt")


class Unread:
    """The dataset that torch2trt requires; it is never read, since the calibrator reads the job's samples."""

    def __len__(self) -> int:
        return self[0]

    def __getitem__(self, index: int) -> NoReturn:
        raise BuildError(
            "calibration: torch2trt must read the samples through trtpipe's calibrator (it read them itself). "
            f"Install the release that trtpipe is tested with: {INSTALL}"
        )


class Calibrating:
    """The calibrator that torch2trt was given in place of its own."""

    def __init__(self, tensorrt: flavour.Flavour, calibration: NativeCalibration) -> None:
        self._calibrator = make_calibrator(tensorrt, calibration)
        self._given = False

    def make(self, dataset: object, algorithm: object = None, **_: object) -> NativeCalibrator:
        """What torch2trt calls `DatasetCalibrator(dataset, algorithm=...)` for."""
        del dataset, algorithm  # the job's, which its own class would read one sample at a time
        self._given = True
        return self._calibrator

    def finish(self) -> list[str]:
        """Notes, after the build.

        Raises:
            CalibError: what went wrong in a callback, or a calibration that was cut short.
            BuildError: torch2trt did not make its calibrator through `make`.
        """
        if not self._given:
            raise BuildError(
                f"calibration: torch2trt did not calibrate with trtpipe's calibrator. Update it: {INSTALL}"
            )
        self._calibrator.finish()
        return list(self._calibrator.notes)


@contextlib.contextmanager
def own_calibrator(tensorrt: flavour.Flavour, calibration: NativeCalibration) -> Iterator[Calibrating]:
    """torch2trt's `DatasetCalibrator` replaced: it reads one sample at a time, keeps none alive and loses exceptions.

    A calibration cache that was made from something else ends the build here, before anything is converted. The
    attribute `torch2trt.torch2trt` is the function; its module is found in sys.modules.

    Raises:
        BuildError: this torch2trt has no `DatasetCalibrator`.
    """
    module = sys.modules.get("torch2trt.torch2trt")
    if not hasattr(module, "DatasetCalibrator"):
        raise BuildError(
            "calibration: this torch2trt has no DatasetCalibrator to replace. "
            f"Update it: {INSTALL}; or use build.route onnx."
        )
    calibrating = Calibrating(tensorrt, calibration)
    with patch.object(module, "DatasetCalibrator", calibrating.make):
        yield calibrating

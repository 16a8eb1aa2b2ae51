"""An ONNX file executed by ONNX Runtime in FP32, Q/DQ taken off: what the engine of such a job is compared with."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trtpipe.errors import InputError, first_line
from trtpipe.model.onnx.quantized import take_qdq_off
from trtpipe.model.onnx.reading import opened, take_outputs

if TYPE_CHECKING:
    from trtpipe.model.onnx.reading import OnnxFile


class Reference:
    """ONNX Runtime on the CPU; called like the network itself.

    Raises:
        InputError: ONNX Runtime refuses the file.
    """

    def __init__(self, file: OnnxFile) -> None:
        import onnx_ir as ir
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = file.path
                if file.quantized or file.cut:
                    path = Path(folder, "fp32.onnx")
                    model = opened(file.path)
                    take_outputs(model, [b.name for b in file.outputs])
                    take_qdq_off(model, any_scales=True)
                    ir.save(model, path, external_data="fp32.data")
                self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except InputError:  # of the file's Q/DQ
            raise
        except Exception as error:
            reason = first_line(error)
            raise InputError(f"model.onnx: ONNX Runtime cannot run it ({reason}). Export it again.") from error
        self._inputs, self._outputs = file.inputs, [b.name for b in file.outputs]

    def __call__(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs by name, for `inputs` in the file's order."""
        feed = {b.name: x.numpy().astype(b.dtype) for b, x in zip(self._inputs, inputs, strict=True)}
        found = self._session.run(self._outputs, feed)
        return {name: torch.from_numpy(array) for name, array in zip(self._outputs, found, strict=True)}

# ruff: noqa: F401
"""What takes seconds to import, and every job with a model does: for the process that `apart` forks others from.

Nothing else imports this module. Where an import fails the process ends: a second try of the same import may fail
otherwise, and what a job is told must be the first one's error. Its own process is then spawned.
"""

try:
    import numba
    import onnx
    import onnxruntime
    import onnxscript
    import torch.onnx
    import torchvision

    import trtpipe.pipeline.build
except ModuleNotFoundError:  # so it is the second time
    pass
except BaseException:  # noqa: BLE001  # whatever it raises, SystemExit too
    raise SystemExit(1) from None

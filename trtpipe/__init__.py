"""trtpipe: a PyTorch model, a folder of images and a target in; a TensorRT engine with its proof out."""

__version__ = "0.1.0"

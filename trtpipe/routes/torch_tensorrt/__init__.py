"""Route torch_tensorrt: through Torch-TensorRT's dynamo frontend."""

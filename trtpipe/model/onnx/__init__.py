"""An ONNX file as a PyTorch module: read, its operators by their table, its nodes under module paths."""

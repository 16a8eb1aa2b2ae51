"""All that touches a TensorRT module. Importing this package loads none; `flavour.load` does, when asked."""

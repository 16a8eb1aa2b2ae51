"""Route torch2trt: through NVIDIA's torch2trt, for TensorRT 8.6 to 10 and Jetsons."""

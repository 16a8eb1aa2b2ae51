"""calib: streaming calibration for INT8 engines. Imports neither torch nor TensorRT until it is used."""

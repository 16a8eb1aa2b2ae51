"""Post-training corrections: weights and biases changed so that INT8 errs less, thresholds so that outputs err less.

`correct` tries them in this order and keeps what gains at the model's outputs on calibration samples it did not use:

    equalization   channels of a tensor scaled to one range, through ReLU, ReLU6, residual adds and depthwise
    smoothing      the same from a LayerNorm into the linears that read it
    thresholds     amax of each activation by its own error at the output of the operation that reads it
    rounding       levels of each weight by second-order rounding
    bias           the mean error of each channel taken out of the bias

Nothing is added to the graph, so an engine runs as fast with them as without.
"""

"""The operations of a captured graph that multiply and accumulate, by the names that `nodes.op_name` gives."""

from __future__ import annotations

#: Operations with a weight: name -> axis of the output channel in it.
WEIGHTED = {"conv1d": 0, "conv2d": 0, "conv3d": 0, "linear": 0, "conv_transpose2d": 1, "conv_transpose1d": 1}
MATMULS = ("matmul", "bmm")
#: What their names begin with, in a program that may have been decomposed too.
PRODUCTS = ("conv", "linear", *MATMULS, "addmm", "mm")
#: Products that no rule is for.
OTHER_PRODUCTS = {
    "mv": "a product with one vector gains nothing", "addmv": "a product with one vector gains nothing",
    "einsum": "an einsum that is no matmul of two tensors has no Q/DQ rule",
    "dot": "a product with one vector gains nothing", "addbmm": "a sum of products has no Q/DQ rule",
    "conv_transpose3d": "a transposed convolution in three dimensions has no Q/DQ rule",
}  # fmt: skip
#: What TensorRT computes as a matrix product.
MATRIX_PRODUCTS = ("linear", *MATMULS, *(n for n in OTHER_PRODUCTS if not n.startswith("conv")))

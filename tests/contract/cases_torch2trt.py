"""The converters that torch2trt gets for Q/DQ, on the real network classes of each release that it can use.

The stub computes nothing: what is held here is that every call and every attribute exists and takes what it is given.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorrt as trt
import torch
from world import VERSION

from trtpipe.routes.torch2trt import qdq as torch2trt_qdq

pytestmark = pytest.mark.skipif(VERSION >= (11,), reason="torch2trt is for TensorRT 8.6 to 10")


@pytest.fixture
def ctx():
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0 if VERSION >= (10,) else 1)
    made = SimpleNamespace(network=network, builder_config=builder.create_builder_config(), alive=builder)
    made.flags = []
    return made


def converters(flags=("FP16", "INT8")):
    found = {}
    frontend = SimpleNamespace(tensorrt_converter=lambda name: lambda f: found.__setitem__(name.rpartition(".")[2], f))
    torch2trt_qdq.register(frontend, trt, flags, [])
    return found


def called(ctx, name, *args):
    ctx.method_args, ctx.method_return = args, torch.zeros(())
    converters()[name](ctx)
    return ctx.method_return._trt


def tensor(ctx, shape, dtype="float32"):
    made = torch.zeros(shape, dtype=getattr(torch, dtype))
    made._trt = ctx.network.add_input("x", getattr(trt, dtype), shape)
    return made


def test_q_dq_and_cast(ctx):
    assert isinstance(called(ctx, "quantize", tensor(ctx, (1, 3, 4, 4)), 0.5), trt.ITensor)
    assert isinstance(called(ctx, "dequantize", tensor(ctx, (1, 3, 4, 4), "int8"), 0.5), trt.ITensor)
    assert isinstance(called(ctx, "cast", tensor(ctx, (1, 3, 4, 4)), torch.float16), trt.ITensor)


@pytest.mark.parametrize(
    ("name", "x", "weight", "axis", "rest"),
    [
        ("conv2d", (1, 3, 4, 4), (8, 3, 3, 3), 0, (torch.zeros(8), (1, 1), (1, 1), (1, 1), 1)),
        ("conv2d", (1, 3, 4, 4), (8, 3, 3, 3), 0, ()),
        ("conv1d", (1, 3, 4), (8, 3, 3), 0, (torch.zeros(8), (1,), (1,))),
        ("conv3d", (1, 3, 4, 4, 4), (8, 3, 3, 3, 3), 0, (None,)),
        ("conv_transpose2d", (1, 3, 4, 4), (3, 8, 3, 3), 1, (None, (2, 2), (1, 1), (1, 1), 1, (1, 1))),
        ("linear", (1, 3), (8, 3), 0, (torch.zeros(8),)),
        ("linear", (1, 5, 3), (8, 3), 0, (None,)),
    ],
)
def test_operations_with_a_weight(ctx, name, x, weight, axis, rest):
    q, scales = torch.zeros(weight, dtype=torch.int8), torch.ones(8)
    assert isinstance(called(ctx, "weighted", name, tensor(ctx, x), q, scales, axis, *rest), trt.ITensor)


def test_the_flags_are_those_of_the_release(ctx):
    for name in ("FP16", "INT8"):
        assert hasattr(trt.BuilderFlag, name)
    seen = []
    ctx.builder_config = SimpleNamespace(set_flag=seen.append)
    called(ctx, "quantize", tensor(ctx, (1, 3)), np.float32(0.5))
    assert seen == [trt.BuilderFlag.FP16, trt.BuilderFlag.INT8]

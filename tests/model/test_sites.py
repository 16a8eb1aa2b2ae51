"""Where Q/DQ pairs go, against placements worked out by hand from NVIDIA's rules."""

from __future__ import annotations

import re
from pathlib import Path

import nets
import pytest
import torch
from torch import nn

from trtpipe.model import sites as rules
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.marks import Mark, mark
from trtpipe.model.nodes import module_path, op_name
from trtpipe.model.sites import find_sites, kept_sites
from trtpipe.quantization.precision import Keep, observe_ranges
from trtpipe.quantization.quantize import quantize
from trtpipe.values import DimRange, LoadedModel, Site, TensorSpec


def placed(loaded: LoadedModel | str) -> dict[str, tuple[str, str]]:
    sites, _ = find_sites((nets.captured(loaded) if isinstance(loaded, str) else capture(loaded)).graph)
    return {s.key: (s.group, s.rule) for s in sites}


def test_residual_network() -> None:
    assert placed("residual") == {
        "stem:input": ("stem:input", "Q1"),
        "stem:weight": ("stem:weight", "Q2"),
        # The pool's input and output, which two convolutions read, share one scale.
        "pool:max_pool2d.input": ("pool:max_pool2d.input", "Q5"),
        "conv1:input": ("pool:max_pool2d.input", "Q1"),
        "conv1:weight": ("conv1:weight", "Q2"),
        "conv2:input": ("conv2:input", "Q1"),
        "conv2:weight": ("conv2:weight", "Q2"),
        "down:input": ("pool:max_pool2d.input", "Q1"),
        "down:weight": ("down:weight", "Q2"),
        # conv2 is the longer branch and is fused with the add; the output of `down` is the skip branch.
        ":add.input_1": (":add.input_1", "Q4"),
        "head:input": ("head:input", "Q1"),
        "head:weight": ("head:weight", "Q2"),
    }


def test_attention_quantizes_both_matmuls_and_not_the_norm_or_the_softmax() -> None:
    found = placed("attention")
    assert set(found) == {
        *("qkv:input", "qkv:weight", "proj:input", "proj:weight"),
        *(f":matmul.input_{i}" for i in (0, 1)),
        *(f":matmul_1.input_{i}" for i in (0, 1)),
    }


@pytest.mark.parametrize("pads", [(0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("fill", [-float("inf"), 0.0])
def test_a_pool_that_is_padded_with_infinity_has_no_scale(pads: tuple[int, ...], fill: float) -> None:
    """TensorFlow's padding "same", and ONNX files with unequal pads. Calibrating ended at the infinite values."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.pad(torch.relu(self.a(x)), pads, value=fill)
            return self.b(nn.functional.max_pool2d(x, 3, 2)).mean((2, 3))

    found = placed(nets.loaded(Same().eval(), ("N", 3, 16, 16)))
    pool = {":max_pool2d.input"} if fill == 0.0 else set()
    assert set(found) == {"a:input", "a:weight", "b:input", "b:weight", *pool}


@pytest.mark.parametrize(
    "twice", ["torch.matmul(y, y)", "torch.cat([y, y], 1)", "y + y", "torch.bmm(y[:, 0], y[:, 0])"]
)
def test_one_tensor_twice_has_one_scale(twice: str) -> None:
    """Sharing a scale with itself never ended."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(8 if "cat" in twice else 4, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.a(x))
            z = eval(twice, {"torch": torch, "y": y})
            return self.b(z if z.dim() == 4 else z[:, None].expand(-1, 4, -1, -1)).mean((2, 3))

    captured = capture(nets.loaded(Twice().eval()))
    seen = observe_ranges(captured, [(nets.images(2, 3, 8, 8),)])
    amax = {s.group: seen[s.producer.name] for s in captured.sites if s.axis is None}
    made = quantize(captured, int8=True, half=None, keep=Keep(), amax=amax, ranges={})
    kinds = [str(n.target) for n in made.program.graph.nodes]
    assert sum("dequantize" in k for k in kinds) >= len({s.group for s in captured.sites if s.axis is None})


def test_concat_inputs_share_the_scale_of_what_reads_them() -> None:
    found = placed("concat")
    shared = {found[k][0] for k in (":cat.input_0", ":cat.input_1", "c:input")}
    assert shared == {":cat.input_0"}


def test_a_concat_that_nobody_reads_in_int8_stays_in_float() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.a(x), x], 1).mean((2, 3))

    assert set(placed(nets.loaded(Plain().eval(), out_shape=("N", 8)))) == {"a:input", "a:weight"}


class OwnConv(nn.Conv2d):
    """A convolution whose input and weight the model quantizes itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(mark(x, Mark((0.03,), None)), mark(self.weight, Mark((0.02,), None)), self.bias)


class Leaky(nn.Module):
    """A convolution in INT8, and another one that is kept in float, read what is concatenated or pooled; with Q/DQ of
    the model's `own`, or with none."""

    def __init__(self, way: str, own: bool) -> None:
        super().__init__()
        conv = OwnConv if own else nn.Conv2d
        self.first, self.other, self.kept = conv(3, 5, 1), conv(8, 4, 1), conv(8, 4, 1)
        self.way, self.own = way, own

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([self.quantized(self.first(x)), self.quantized(x)], 1)
        if self.way != "cat":
            both = nn.functional.max_pool2d(self.quantized(both), 2)
        ways = {"behind": torch.sigmoid, "sum": lambda v: self.quantized(v) + self.quantized(v.flip(1))}
        read = ways.get(self.way, lambda v: v)(both)
        return self.other(both).mean((2, 3)), self.kept(read).mean((2, 3))

    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        return mark(x, Mark((0.03,), None)) if self.own else x


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("way", ["cat", "pool", "behind", "sum"])
def test_what_is_kept_in_float_reads_no_rounded_numbers(way: str, own: bool) -> None:
    """A concat had its Q/DQ before it for the reader in INT8, and the one that was kept read the rounded parts; and so
    it did wherever a model that was quantized already had its own Q/DQ before a concat, a pool or a sum."""
    torch.manual_seed(0)
    x = TensorSpec("x", "float32", ("N", 3, 8, 8), {"N": DimRange(1, 2, 4)})
    outputs = tuple(TensorSpec(n, "float32", ("N", 4), x.dims) for n in ("a", "b"))
    module = bind(Leaky(way, own).eval(), (x,), {}, ("a", "b"))
    captured = capture(LoadedModel(module, (x,), outputs, "0" * 64, "leaky"))
    images = nets.images(2, 3, 8, 8)
    seen = observe_ranges(captured, [(images,)])
    amax = {s.group: seen[s.producer.name] for s in captured.sites if s.axis is None}

    def made(keep: Keep) -> list[float]:
        quantized = quantize(captured, int8=True, half=None, keep=keep, amax=amax, ranges={})
        with torch.no_grad():
            pairs = zip(captured.graph(images), quantized.program.module()(images), strict=True)
            return [float((wanted - got).abs().max()) for wanted, got in pairs]

    assert min(made(Keep())) > 1e-4
    a, b = made(Keep(fp32=("kept", "first")))
    assert a > 1e-4
    assert b < 1e-6


def test_around_a_concat_of_readers_in_int8_the_pairs_stay() -> None:
    captured = nets.captured("concat")
    kept = kept_sites(captured.sites, lambda node: module_path(node) == "a")
    assert [s.key for s in kept if s.rule == "Q5"] == [":cat.input_0", ":cat.input_1"]


def test_own_pairs_beside_a_product_in_int8_stay_where_their_sum_is_kept() -> None:
    """A residual add is fused with its convolution, whose output is rounded by what it reads in any case."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = OwnConv(3, 3, 1), OwnConv(3, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.conv(x)
            out: torch.Tensor = self.head(torch.relu(y + mark(x, Mark((0.03,), None))))
            return out.mean((2, 3))

    captured = capture(nets.loaded(Block().eval(), out_shape=("N", 2)))

    def added(*kept: str) -> bool:
        return any(op_name(s.consumer) == "add" for s in kept_sites(captured.sites, lambda n: op_name(n) in kept))

    last = next(n for n in reversed(captured.graph.graph.nodes) if op_name(n) == "conv2d")
    assert added()
    assert any(op_name(s.consumer) == "add" for s in kept_sites(captured.sites, lambda n: n is last))
    assert not added("conv2d")  # nothing is in INT8 that it could be fused with


@pytest.mark.parametrize("grid", ["buffer", "of any batch", "computed"])
def test_features_do_not_have_the_range_of_coordinates_that_they_are_concatenated_with(grid: str) -> None:
    """With one scale for both, features of up to 3 were rounded in steps of 2 wherever else they were read. Nor is
    there a pair around a pool before such a concat, which Q and DQ cannot cross."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pooled, self.other = nn.Conv2d(4, 2, 1), nn.Conv2d(3, 2, 1)
            self.register_buffer(
                "position", 80 * torch.arange(4.0).expand(2 if grid == "buffer" else 1, 1, 4, 4).clone()
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = nn.functional.max_pool2d(x, 2)
            position: torch.Tensor = self.position  # type: ignore[assignment]
            if grid == "computed":
                lines = torch.arange(0.0, 321.0, 80.0, device=x.device)[:4]
                position = torch.stack(torch.meshgrid(lines, lines, indexing="ij"))[:1].repeat(x.shape[0], 1, 1, 1)
            elif grid == "of any batch":
                position = position.expand(x.shape[0], -1, -1, -1)
            return self.pooled(torch.cat([features, position], 1)).mean((2, 3)) + self.other(features).mean((2, 3))

    batch = (2, {}) if grid == "buffer" else ("N", {"N": DimRange(1, 2, 4)})
    inputs = (TensorSpec("x", "float32", (batch[0], 3, 8, 8), batch[1]),)
    outputs = (TensorSpec("y", "float32", (batch[0], 2), batch[1]),)
    found = placed(LoadedModel(Positions().eval(), inputs, outputs, "0" * 64, "p"))
    assert found["pooled:input"] == ("pooled:input", "Q1")
    assert {found[k][0] for k in ("other:input", ":max_pool2d.input")} == {":max_pool2d.input"}


def test_identity_skip_shares_the_observer_of_the_next_convolution() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 3, 1)
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x))
            return (self.conv(x) + x).mean((2, 3))

    found = placed(nets.loaded(Block().eval(), out_shape=("N", 3)))
    assert found[":add.input_1"] == ("conv:input", "Q4")


def test_an_add_without_a_convolution_is_left_in_float() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) + x

    assert set(placed(nets.loaded(Mlp().eval(), ("N", 8), out_shape=("N", 8)))) == {"fc:input", "fc:weight"}


def test_weights_computed_at_run_time_are_skipped_with_the_reason() -> None:
    class Hyper(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, x[:1].reshape(1, 8))

    captured = capture(nets.loaded(Hyper(), ("N", 8), out_shape=("N", 1)))
    sites, skipped = find_sites(captured.graph)
    assert not sites
    assert [s.reason for s in skipped] == ["its weight is computed at run time"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_what_the_model_computes_in_float64_stays_in_it(dtype: torch.dtype) -> None:
    """Halves are captured in FP32 (`model.widening`), and precision decides about them."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 16, 3), nn.Linear(36, 16)
            self.inner = nn.Conv2d(16, 16, 1).to(dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x).to(dtype)
            z = torch.cat([self.inner(y) + y, y], 1).flatten(2)
            return self.head((z @ z.transpose(1, 2) @ z).float())

    captured = capture(nets.loaded(Mixed().eval(), ("N", 3, 8, 8), out_shape=("N", 32, 16)))
    inside = {k for s in captured.sites if not (k := s.key).startswith(("stem:", "head:"))}
    reasons = [s.reason for s in captured.skipped if "computes in" in s.reason]
    if dtype == torch.float64:
        assert not inside
        assert reasons == ["it computes in float64"] * 3
    else:
        assert {"inner:input", "inner:weight"} < inside
        assert not reasons
    x = nets.images(2, 3, 8, 8)
    seen = observe_ranges(captured, [(x,)])
    amax = {s.group: seen[s.producer.name] for s in captured.sites if s.axis is None}
    for half in (None, torch.float16):
        whole = quantize(captured, int8=True, half=half, keep=Keep(), amax=amax, ranges={})
        with torch.inference_mode():
            found, expected = whole.program.module()(x)[0], captured.graph(x)[0]
        assert (found - expected).norm() <= 0.1 * expected.norm()


def test_keeping_the_reader_out_of_int8_takes_pool_and_skip_with_it() -> None:
    sites, _ = find_sites(nets.captured("residual").graph)
    kept = {s.key for s in kept_sites(sites, lambda n: module_path(n) in ("conv1", "down"))}
    # Nobody reads the pool in INT8 any more; `down` runs in float, so its output is no INT8 skip branch.
    assert kept == {"stem:input", "stem:weight", "conv2:input", "conv2:weight", "head:input", "head:weight"}


def test_keys_do_not_depend_on_what_is_kept() -> None:
    sites, _ = find_sites(nets.captured("residual").graph)
    whole = {s.key: s.group for s in sites}
    for path in ("stem", "conv1", "conv2", "down", "head"):
        kept = kept_sites(sites, lambda n, path=path: module_path(n) == path)
        assert 0 < len(kept) < len(sites)
        assert {s.key: s.group for s in kept}.items() <= whole.items()


def test_transposed_convolutions_keep_their_output_axis() -> None:
    class Up(nn.Module):
        def __init__(self, groups: int) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 4, 2, 2, groups=groups)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x)

    for groups, axis in ((1, 1), (4, None)):
        loaded = nets.loaded(Up(groups).eval(), ("N", 4, 4, 4), out_shape=("N", 4, 8, 8))
        sites, skipped = find_sites(capture(loaded).graph)
        axes = {s.axis for s in sites if s.rule == "Q2"}
        assert axes == ({axis} if axis is not None else set())
        assert len(skipped) == (0 if axis is not None else 1)


class Functional(nn.Module):
    """Operations of several kinds with weights in one forward, as an exported program without modules has them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4, 3)) for _ in range(2))
        self.c, self.d = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.Parameter(torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.conv2d(x, self.c, padding=1)
        y = nn.functional.conv1d(nn.functional.conv1d(x.flatten(2), self.a), self.b)
        return nn.functional.linear(y.relu().mean(-1), self.d)


def test_every_operation_has_a_key_of_its_own() -> None:
    x = TensorSpec("x", "float32", (2, 4, 8, 8))
    loaded = LoadedModel(Functional().eval(), (x,), (TensorSpec("y", "float32", (2, 5)),), "", "test")
    sites = capture(loaded).sites
    of_inputs = [s.key for s in sites if s.axis is None]
    assert of_inputs == [":input", ":input_1", ":input_2", ":input_3"]
    assert [s.key for s in sites if s.axis is not None] == [":weight", ":weight_1", ":weight_2", ":weight_3"]
    assert [s.group for s in sites if s.axis is None] == of_inputs


class Product(nn.Module):
    """One product of tokens [N, 4, 16], with a weight or among themselves."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.weight, self.bias = nn.Parameter(torch.randn(16, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, w, b, turned = x.reshape(-1, 16), self.weight, self.bias, x.transpose(1, 2)
        products = {
            "mm": lambda: torch.mm(flat, w),
            "addmm": lambda: torch.addmm(b, flat, w),
            "addmm, scaled": lambda: torch.addmm(b, flat, w, beta=0.5, alpha=3),
            "addmm, one number": lambda: torch.addmm(b[:1], flat, w),
            "addmm, a row": lambda: torch.addmm(b[None], flat, w, alpha=2),
            "baddbmm": lambda: torch.baddbmm(x @ turned, x, turned, beta=0.5),
            "baddbmm, not added": lambda: torch.baddbmm(x[:, :, :4], x, turned, beta=0, alpha=0.25),
            "mm of activations": lambda: torch.mm(w.t(), flat.t()).t(),
            "matmul": lambda: x @ w,
            "matmul of one row": lambda: (x[:, 0] @ w)[:, None],
            "matmul, transposed weight": lambda: x[..., :6] @ w.t(),
            "one weight twice": lambda: (x @ w) * (x.flip(1) @ w),
            "matmul by a constant on the left": lambda: w.t() @ turned,
            "matmul by matrices": lambda: x @ torch.stack([w, w * 2])[:1],
            "mv": lambda: torch.mv(flat, w[:, 0]),
        }
        return products[self.kind]().reshape(x.shape[0], -1)


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        ("mm", ["Q1", "Q2"]), ("addmm", ["Q1", "Q2"]), ("addmm, scaled", ["Q1", "Q2"]),
        ("addmm, one number", ["Q1", "Q2"]), ("addmm, a row", ["Q1", "Q2"]), ("baddbmm", ["Q1"] * 4),
        ("baddbmm, not added", ["Q1"] * 2), ("mm of activations", ["Q1"] * 2), ("mv", []),
        ("matmul", ["Q1", "Q2"]), ("matmul of one row", ["Q1", "Q2"]), ("matmul, transposed weight", ["Q1", "Q2"]),
        ("one weight twice", ["Q1", "Q2"] * 2), ("matmul by a constant on the left", ["Q1"] * 2),
        ("matmul by matrices", ["Q1"] * 2),
    ],
)  # fmt: skip
def test_every_way_to_write_a_product_has_sites_or_a_reason(kind: str, rules: list[str]) -> None:
    network = Product(kind).eval()
    captured = capture(nets.loaded(network, shape=("N", 4, 16)))
    assert [s.rule for s in captured.sites] == rules
    assert len({s.producer for s in captured.sites if s.rule == "Q2"}) == ("Q2" in rules)
    assert [s.reason for s in captured.skipped] == ([] if rules else ["a product with one vector gains nothing"])
    x = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(captured.graph(x)[0], network(x))


def test_a_site_says_which_rules_it_may_be_of() -> None:
    written = Path(rules.__file__).read_text()
    assert set(re.findall(r"Q\d", Site.__doc__ or "")) == set(re.findall(r'"(Q\d)"', written))

"""A corrected graph holds weights of its own only where its corrections are its own."""

from __future__ import annotations

import gc
import weakref

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.errors import CalibError
from calib.types import Array
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, constant_value, is_constant, op_name
from trtpipe.quantization.corrections.edits import corrected
from trtpipe.quantization.partial import Partial, Rounding
from trtpipe.quantization.rounding import on_grid
from trtpipe.values import Captured


@pytest.fixture
def plain() -> Captured:
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).requires_grad_(False).eval()
    return capture(nets.loaded(network, ("N", 4), out_shape=("N", 3)))


def held(captured: Captured) -> dict[str, torch.Tensor]:
    """The constants of a graph by name."""
    nodes = (n for n in captured.graph.graph.nodes if is_constant(n))
    return {str(n.target): constant_value(captured.graph, n) for n in nodes}


def weights(captured: Captured) -> list[str]:
    return [n for n, value in held(captured).items() if value.dim() == 2]


def test_a_constant_with_the_same_factors_is_shared_and_has_the_values_of_one_made_anew(plain: Captured) -> None:
    first, second = weights(plain)
    factors: dict[str, Array] = {f"scale:0:{first}": np.arange(1, 7, dtype=np.float32)}
    factors[f"scale:1:{first}"] = np.full(4, 0.3, np.float32)
    before = corrected(plain, factors)
    more = {**factors, f"scale:0:{second}": np.full(3, 2.0, np.float32)}
    beside, alone = held(corrected(plain, more, (before, factors))), held(corrected(plain, more))
    assert beside[first].data_ptr() == held(before)[first].data_ptr() != alone[first].data_ptr()
    for name, value in alone.items():
        assert torch.equal(beside[name], value)
    equal = {key: array.copy() for key, array in factors.items()}
    assert held(corrected(plain, equal, (before, factors)))[first].data_ptr() != held(before)[first].data_ptr()


def test_levels_are_those_of_the_table_and_multiplied_where_they_are_read(plain: Captured) -> None:
    name = weights(plain)[0]
    levels, steps = np.arange(-12, 12, dtype=np.int8).reshape(6, 4), np.linspace(0.1, 0.6, 6, dtype=np.float32)
    (own,) = corrected(plain, {f"levels:{name}": levels, f"steps:{name}": steps}).int8.values()
    assert own.stored is not None
    assert own.stored.data_ptr() == levels.ctypes.data
    assert own.stored.dtype == torch.int8
    assert torch.equal(on_grid(own), torch.from_numpy(levels.astype(np.float32) * steps[:, None]))  # type: ignore[arg-type]


def test_batches_side_by_side_give_what_each_gives_and_a_rounded_weight_does_not_outlive_its_operation(
    plain: Captured,
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = [0]

    def halved(w: torch.Tensor) -> torch.Tensor:
        gc.collect()
        most[0] = max(most[0], sum(r() is not None for r in alive))
        value = (w * 0.5).detach()
        alive.append(weakref.ref(value))
        return value

    changed: dict[torch.fx.Node, dict[torch.fx.Node, Rounding]] = {
        n: {n.args[1]: halved}  # type: ignore[dict-item]
        for n in calls(plain.graph.graph)
        if op_name(n) == "linear"
    }
    machine = Partial(plain.graph)
    batches = [[torch.randn(3, 4)], [torch.randn(2, 4)]]
    together = machine.side_by_side([machine.inputs(b) for b in batches], changed)
    assert len(alive) == len(changed) == 2
    assert most == [0]
    for batch, outputs in zip(batches, together, strict=True):
        (wanted,), _ = machine.finish(0, machine.inputs(batch), changed)
        assert torch.equal(outputs[0], wanted)


@pytest.mark.parametrize(("kind", "own"), [("scale:0", [6]), ("scale:1", [4]), ("levels", [6, 4]), ("steps", [6])])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 4)])
def test_arrays_of_another_shape_are_refused(
    plain: Captured, kind: str, own: list[int], shape: tuple[int, ...]
) -> None:
    name = weights(plain)[0]
    arrays: dict[str, Array] = {f"levels:{name}": np.ones((6, 4), np.int8), f"steps:{name}": np.ones(6, np.float32)}
    arrays[f"{kind}:{name}"] = np.ones(shape, np.int8 if kind == "levels" else np.float32)
    with pytest.raises(CalibError) as caught:
        corrected(plain, arrays)
    assert str(caught.value) == (
        f"corrections: {kind}:{name} must have the shape {own} for this model's graph (got {list(shape)}). Calibrate "
        "again."
    )


def test_a_bias_has_a_number_for_each_output_channel() -> None:
    network = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Conv2d(6, 8, 1, groups=2))
    captured = capture(nets.loaded(network.requires_grad_(False).eval(), ("N", 4, 5, 5), out_shape=("N", 8, 7, 7)))
    for node, channels in zip((n for n in calls(captured.graph.graph) if "conv" in op_name(n)), (6, 8), strict=True):
        key = f"bias:{node.name}"
        assert corrected(captured, {key: np.zeros(channels, np.float32)}).int8
        with pytest.raises(CalibError, match=rf"corrections: {key} must have the shape \[{channels}\] .*got \[3\]"):
            corrected(captured, {key: np.zeros(3, np.float32)})

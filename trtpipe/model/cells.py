"""Recurrent cells, one step of an LSTM, a GRU or an RNN each, spelt out as linears, which every number format knows.

PyTorch's exporters write them so into ONNX files, whose table and engine were others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from trtpipe.model.nodes import calls, op_name


def spell_out_cells(graph: torch.fx.GraphModule) -> None:
    """Replace each aten.lstm_cell, gru_cell, rnn_tanh_cell and rnn_relu_cell by what it is defined as."""
    cells: dict[str, Callable[..., object]] = {
        "lstm_cell": lstm_cell,
        "gru_cell": gru_cell,
        "rnn_tanh_cell": rnn_cell,
        "rnn_relu_cell": rnn_cell,
    }
    for node in list(calls(graph.graph)):
        if (name := op_name(node)) in cells and "aten" in str(node.target):
            node.target = cells[name]
            if name == "rnn_relu_cell":
                node.kwargs = {**node.kwargs, "rectified": True}


def lstm_cell(
    x: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    w_x: torch.Tensor,
    w_h: torch.Tensor,
    b_x: torch.Tensor | None = None,
    b_h: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch.nn.LSTMCell computes, by its documentation.

    Args:
        x: [N, I], floating-point.
        state: hidden and cell, [N, H] each.
        w_x, w_h, b_x, b_h: of the gates input, forget, cell and output: [4 H, I], [4 H, H], [4 H], [4 H].

    Returns:
        Hidden and cell, [N, H] each.
    """
    hidden, cell = state
    i, f, g, o = (linear(x, w_x, b_x) + linear(hidden, w_h, b_h)).chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def gru_cell(
    x: torch.Tensor,
    hidden: torch.Tensor,
    w_x: torch.Tensor,
    w_h: torch.Tensor,
    b_x: torch.Tensor | None = None,
    b_h: torch.Tensor | None = None,
) -> torch.Tensor:
    """What torch.nn.GRUCell computes, by its documentation: [N, H].

    Args: as for `lstm_cell`, with one state [N, H] and the gates reset, update and new.
    """
    r_x, z_x, n_x = linear(x, w_x, b_x).chunk(3, 1)
    r_h, z_h, n_h = linear(hidden, w_h, b_h).chunk(3, 1)
    z = (z_x + z_h).sigmoid()
    n = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return (1 - z) * n + z * hidden


def rnn_cell(
    x: torch.Tensor,
    hidden: torch.Tensor,
    w_x: torch.Tensor,
    w_h: torch.Tensor,
    b_x: torch.Tensor | None = None,
    b_h: torch.Tensor | None = None,
    *,
    rectified: bool = False,
) -> torch.Tensor:
    """What torch.nn.RNNCell computes: [N, H]; arguments as for `lstm_cell`, with one gate, and a ReLU where it is
    `rectified`, else tanh."""
    y = linear(x, w_x, b_x) + linear(hidden, w_h, b_h)
    return y.relu() if rectified else y.tanh()

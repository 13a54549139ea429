"""The readable version of everything in `kernels.Kernels`: PyTorch's own operations, differentiated by autograd.

`model.kernels=reference` builds a model of these parts. They compute the same as the fast ones up to rounding (and
`Dropout` draws other random numbers), in more time and memory. Read them alongside the papers; the tests compare
the fast parts with them.

Shapes: B sentences, N rows, T steps, I input size, O output size, D state size, G gates x D (4 gates LSTM, 3 GRU).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.model.numerics import accumulation_dtype

LinearFn = Callable[..., Tensor]  # (x, addend=None) -> x W^T + b (+ addend)
RNNState = tuple[Tensor, ...]  # (h_ND, c_ND) of an LSTM layer, (h_ND,) of a GRU layer
RNNStepFn = Callable[..., RNNState]  # (x_NI, state, inputs_NG=None) -> state, see `RNN.for_step_loop`

Dropout = nn.Dropout


def apply_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """Return x W^T + b + addend, computed in the dtype of `x`."""
    y = F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))
    return y if addend is None else y + addend


class Linear(nn.Linear):
    """`nn.Linear` that casts its weights to the dtype of its input."""

    inference_fn: LinearFn | None = None  # computes `forward` if the weights are prepared for inference

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(x, self.weight, self.bias)

    def for_step_loop(self, dtype: torch.dtype) -> LinearFn:
        """Return (x_NI, addend=None) -> x W^T + b + addend, for use in one step loop with inputs of `dtype`."""
        return lambda x_NI, addend=None: apply_linear(x_NI, self.weight, self.bias, addend)


# -------------------------------------------------------------------------------------------------------- recurrence
def lstm_cell(inputs_NG: Tensor, hidden_NG: Tensor, state: RNNState) -> RNNState:
    """Run one LSTM step (Hochreiter and Schmidhuber 1997, with forget gates).

    i, f, o = sigmoid(.), g = tanh(.); c_t = f c_{t-1} + i g; h_t = o tanh(c_t). Gates are stacked as i, f, g, o, and
    their pre-activations are `inputs_NG` + `hidden_NG`, from the input and from h_{t-1}.
    """
    i, f, g, o = (inputs_NG + hidden_NG).chunk(4, 1)
    c_ND = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c_ND), c_ND


def gru_cell(inputs_NG: Tensor, hidden_NG: Tensor, state: RNNState) -> RNNState:
    """Run one GRU step (Cho et al. 2014), with the reset gate applied after the product, as in cuDNN.

    r, z = sigmoid(.); n = tanh(i_n + r h_n); h_t = (1 - z) n + z h_{t-1}. Gates are stacked as r, z, n; i are their
    pre-activations from the input, h those from h_{t-1}.
    """
    (i_r, i_z, i_n), (h_r, h_z, h_n) = inputs_NG.chunk(3, 1), hidden_NG.chunk(3, 1)
    r, z = torch.sigmoid(i_r + h_r), torch.sigmoid(i_z + h_z)
    n = torch.tanh(i_n + r * h_n)
    return ((1 - z) * n + z * state[0],)


CELL_SPECS = {"lstm": (lstm_cell, 4, 2), "gru": (gru_cell, 3, 1)}  # step function, number of gates, tensors per state


class RNN(nn.Module):
    """One unidirectional recurrent layer, for a whole sequence in one call (`forward`) or for a step loop.

    For a step loop, the first `num_projected` inputs go through `project`, outside of the loop. The others and the
    state are inputs of the step that `for_step_loop` returns.
    """

    def __init__(self, cell: str, inputs: int, hidden: int, num_projected: int = 0) -> None:
        super().__init__()
        self.cell = cell
        self.cell_fn, gates, self.num_states = CELL_SPECS[cell]
        self.hidden = hidden
        self.num_projected = num_projected
        self.weight_ih = nn.Parameter(torch.empty(gates * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(gates * hidden, hidden))
        self.bias_ih = nn.Parameter(torch.zeros(gates * hidden))
        self.bias_hh = nn.Parameter(torch.zeros(gates * hidden))
        for block in self.weight_ih.detach().split(hidden):
            nn.init.xavier_uniform_(block)
        for block in self.weight_hh.detach().split(hidden):
            nn.init.orthogonal_(block)
        if cell == "lstm":
            nn.init.ones_(self.bias_ih.detach()[hidden : 2 * hidden])  # forget gate bias 1 (Jozefowicz et al. 2015)

    def init_state(self, like_BTI: Tensor) -> RNNState:
        """Return the zero state before the first step, with the batch size, dtype and device of `like_BTI`."""
        return (like_BTI.new_zeros(like_BTI.shape[0], self.hidden),) * self.num_states

    def forward(self, x_BTI: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        """Run all T steps. Return the outputs h_BTD and the state after the last step."""
        outputs: list[Tensor] = []
        for inputs_BG in apply_linear(x_BTI, self.weight_ih, self.bias_ih).unbind(1):
            state = self.cell_fn(inputs_BG, apply_linear(state[0], self.weight_hh, self.bias_hh), state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), state

    def project(self, x: Tensor) -> Tensor:
        """Map (..., num_projected) to (..., G): the part of the pre-activations that is known before the loop."""
        return apply_linear(x, self.weight_ih[:, : self.num_projected], self.bias_ih)

    def for_step_loop(self, dtype: torch.dtype) -> RNNStepFn:
        """Return step(x_NI, state, inputs_NG=None) -> state for one step loop with inputs of `dtype`.

        x_NI are the inputs that are not projected. `inputs_NG` is one step of the result of `project`, or None if no
        inputs are projected.
        """
        weight_GI = self.weight_ih[:, self.num_projected :]
        bias_G = None if self.num_projected else self.bias_ih  # otherwise `project` has added it

        def step(x_NI: Tensor, state: RNNState, inputs_NG: Tensor | None = None) -> RNNState:
            hidden_NG = apply_linear(state[0], self.weight_hh, self.bias_hh)
            return self.cell_fn(apply_linear(x_NI, weight_GI, bias_G, inputs_NG), hidden_NG, state)

        return step


# --------------------------------------------------------------------------------------------- encoder and attention
def permute_positions(x_BSE: Tensor, order_R: Tensor) -> Tensor:
    """Reorder the R = B x S positions of a batch by a permutation that is its own inverse, as reversals are."""
    return x_BSE.flatten(0, 1)[order_R].view_as(x_BSE)


def additive_score(query_RHQA: Tensor, keys_RHWA: Tensor, v_HA: Tensor, extra_RHQWA: Tensor | None = None) -> Tensor:
    """Return scores_RHQW = v . tanh(q + k + extra), Bahdanau et al. 2014, appendix A.1.2, with q and k projected."""
    sum_RHQWA = query_RHQA.unsqueeze(3) + keys_RHWA.unsqueeze(2)
    if extra_RHQWA is not None:
        sum_RHQWA = sum_RHQWA + extra_RHQWA
    return (torch.tanh(sum_RHQWA) * v_HA[:, None, None]).sum(4)


# -------------------------------------------------------------------------------------------------------------- loss
class Loss(NamedTuple):
    """Sums over target tokens, `</s>` included. To average over batches, add them up and divide once."""

    smoothed: Tensor  # cross-entropy with label smoothing and R-Drop
    nats: Tensor  # negative log-likelihood, without smoothing
    correct: Tensor  # number of tokens with the highest logit of the vocabulary, ties included (common in bf16)


def cross_entropy(
    x_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    target_R: Tensor,
    smoothing: float = 0.0,
    r_drop: float = 0.0,
    output_fn: LinearFn | None = None,
    pad: int = -1,
) -> Loss:
    """Return the cross-entropy of softmax(x W^T + b), summed over the R tokens with y != pad.

    -(1 - e) log p(y) - e / V sum_v log p(v), with p = softmax(x W^T + b) and e = `smoothing` (Szegedy et al. 2016,
    section 7). `output_fn` computes x W^T + b if the output layer is prepared for inference.

    With `r_drop`, a, the second half of the rows is another pass over the tokens of the first, and each pair of rows
    adds a (KL(p || q) + KL(q || p)) / 2 with p and q of the two passes: R-Drop (Liang et al. 2021, eq. 2 to 4).
    """
    logits_RV = output_fn(x_RD) if output_fn else apply_linear(x_RD, weight_VD, bias_V)
    inside_R = target_R != pad
    logits_RV, target_R1 = logits_RV[inside_R].to(accumulation_dtype(x_RD.dtype)), target_R[inside_R].unsqueeze(1)
    logp_RV = torch.log_softmax(logits_RV, 1)
    nats = -logp_RV.gather(1, target_R1).sum()
    smoothed = (1 - smoothing) * nats - smoothing * logp_RV.mean(1).sum()
    if r_drop:
        logp, logq = logp_RV.chunk(2)
        smoothed = smoothed + r_drop / 2 * ((logp.exp() - logq.exp()) * (logp - logq)).sum()
    correct = (logits_RV.gather(1, target_R1).squeeze(1) == logits_RV.amax(1)).sum()
    return Loss(smoothed, nats.detach(), correct)

"""Functions with which a model family writes its forward pass. Each returns one phase: an operation with parameters
that computes rows `r` of its output.

A forward pass says what one device computes. The compiler later decides how ranks share this work.
"""

from __future__ import annotations

from ...isa import Buffer, Operation, Phase, Result, Rows


def gather(name: str, table: Buffer, output: Buffer) -> Phase:
    """output[r] = table[token id of row r]"""
    return Phase(name, Operation.GATHER, weights=table, output=output)


def rope(name: str, frequencies: Buffer, output: Buffer, ahead: int = 0) -> Phase:
    """output[r] = the cosines and sines by which `qkv` rotates row r, in the layer that is `ahead` layers later"""
    return Phase(name, Operation.ROPE, weights=frequencies, output=output, ahead=ahead)


def norm(name: str, inputs: Buffer, scale: Buffer, output: Buffer) -> Phase:
    """output[r] = RMS norm of inputs[r], times scale"""
    return Phase(name, Operation.NORM, weights=scale, inputs=inputs, output=output)


def last_norm(name: str, inputs: Buffer, scale: Buffer, output: Buffer) -> Phase:
    """output[i] = RMS norm of the i-th of the rows that get logits, times scale"""
    return Phase(name, Operation.NORM, Rows.LOGIT, scale, inputs, output)


def add_norm(name: str, inputs: Buffer, scale: Buffer, output: Buffer) -> Phase:
    """output[r] += RMS norm of inputs[r], times scale: a norm whose result is added to the residual"""
    return Phase(name, Operation.NORM, weights=scale, inputs=inputs, output=output, result=Result.RESIDUAL)


def qkv(
    name: str, inputs: Buffer, weights: Buffer, output: Buffer, bias: Buffer | None = None, head_norms: bool = False
) -> Phase:
    """q, k, v = inputs[r] weights^T + bias; rotates q and k, stores k and v in the KV cache, and output[r] = q. With
    `head_norms`, the RMS norm of each head of q and k, times QK_NORM, comes before the rotation.
    """
    scales = Buffer.QK_NORM if head_norms else None
    return Phase(name, Operation.MATMUL, Rows.OWN, weights, inputs, output, Result.HEADS, bias, head_norm=scales)


def rounded(name: str, inputs: Buffer, output: Buffer) -> Phase:
    """output[r] = inputs[r], rounded to the compute type; replaces a norm before attention or the MLP"""
    return Phase(name, Operation.NORM, inputs=inputs, output=output)


def raw_qkv(name: str, inputs: Buffer, weights: Buffer, output: Buffer, bias: Buffer | None = None) -> Phase:
    """output[r] = inputs[r] weights^T + bias, not rounded, for all heads: `heads_norm` normalises over all of them"""
    return Phase(name, Operation.MATMUL, Rows.EVERY, weights, inputs, output, Result.STORED, bias)


def heads_norm(name: str, inputs: Buffer, scale: Buffer, output: Buffer) -> Phase:
    """q, k, v = inputs[r]; normalises all of q and all of k, times scale; then rotates and stores like `qkv`"""
    return Phase(name, Operation.NORM, weights=scale, inputs=inputs, output=output, result=Result.HEADS)


def attention(name: str, inputs: Buffer, output: Buffer, sinks: bool = False) -> Phase:
    """output[r] = causal attention of the queries inputs[r] to the KV cache of the row's sequence. With `sinks`, the
    softmax of each head has one more score, which belongs to no token.
    """
    return Phase(name, Operation.ATTENTION, weights=Buffer.SINKS if sinks else None, inputs=inputs, output=output)


def matmul(name: str, inputs: Buffer, weights: Buffer, output: Buffer, bias: Buffer | None = None) -> Phase:
    """output[r] = inputs[r] weights^T + bias, not rounded"""
    return Phase(name, Operation.MATMUL, Rows.OWN, weights, inputs, output, Result.STORED, bias)


def add_matmul(name: str, inputs: Buffer, weights: Buffer, output: Buffer, bias: Buffer | None = None) -> Phase:
    """output[r] += inputs[r] weights^T + bias: a matmul whose result is added to the residual"""
    return Phase(name, Operation.MATMUL, Rows.OWN, weights, inputs, output, Result.RESIDUAL, bias)


def gated_matmul(
    name: str, inputs: Buffer, weights: Buffer, output: Buffer, bias: Buffer | None = None, gelu: bool = False
) -> Phase:
    """gate, up = inputs[r] weights^T + bias; output[r] = silu(gate) * up; with `gelu`, GELU by tanh replaces SiLU"""
    result = Result.GELU_GATED if gelu else Result.GATED
    return Phase(name, Operation.MATMUL, Rows.OWN, weights, inputs, output, result, bias)


def route(name: str, inputs: Buffer, router: Buffer, output: Buffer, bias: Buffer | None = None) -> Phase:
    """output[r] = the experts of row r, which a router chooses by inputs[r] router^T and by the bias; ROUTE_WEIGHTS[r]
    = the weights of these experts"""
    return Phase(name, Operation.ROUTE, Rows.OWN, router, inputs, output, bias=bias)


def gated_experts(name: str, inputs: Buffer, weights: Buffer, output: Buffer, bias: Buffer | None = None) -> Phase:
    """gate, up = inputs[r] weights[e]^T + bias[e] for the j-th expert e of row r; output[r, j] = silu(gate) * up"""
    return Phase(name, Operation.EXPERTS, Rows.OWN, weights, inputs, output, Result.GATED, bias)


def experts(name: str, inputs: Buffer, weights: Buffer, output: Buffer, bias: Buffer | None = None) -> Phase:
    """output[r, j] = inputs[r, j] weights[e]^T + bias[e] for the j-th expert e of row r"""
    return Phase(name, Operation.EXPERTS, Rows.OWN, weights, inputs, output, bias=bias)


def add_experts(name: str, inputs: Buffer, weights: Buffer, output: Buffer) -> Phase:
    """output[r] += the sum over j of (inputs[r, j] W^T) g, for row r's j-th expert, which has matrix W and weight g"""
    return Phase(name, Operation.COMBINE, Rows.OWN, weights, inputs, output, Result.RESIDUAL)


def logits(name: str, inputs: Buffer, weights: Buffer, output: Buffer) -> Phase:
    """output[i] = inputs[i] weights^T, for the rows that get logits"""
    return Phase(name, Operation.MATMUL, Rows.LOGIT, weights, inputs, output, Result.LOGITS)


def sample(name: str, inputs: Buffer) -> Phase:
    """Choose a token for each row of logits."""
    return Phase(name, Operation.SAMPLE, Rows.LOGIT, inputs=inputs)

"""qwen35 in plain PyTorch: Gated DeltaNet, gated attention, and one MTP block that drafts.

Parameters have the names and shapes of the GGUF tensors (recall_gguf.py has the two exceptions).
Shapes: b rows, t tokens, h heads, d of a head, e of the embedding.
Source: llama.cpp src/models/qwen35.cpp and delta-net-base.cpp; Gated Delta Networks
(arXiv 2412.06464), section 3.3 for the chunked form.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK_TOKENS = 64
INIT_STD = 0.03
RESET = 30.0
"""Minus the log decay that empties a state: e^-30 is nothing in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model. n_layers: of the trunk; the MTP block comes behind them."""

    n_vocab: int = 1792
    n_embd: int = 256
    n_layers: int = 8
    attention_interval: int = 4
    n_ff: int = 512
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    n_rotated: int = 16
    rope_base: float = 1e7
    delta_heads: int = 4
    delta_dim: int = 64
    conv_taps: int = 4
    eps: float = 1e-6
    context_tokens: int = 32768

    def has_attention(self, layer: int) -> bool:
        """Whether a layer keeps K and V; the MTP block does."""
        return layer == self.n_layers or (layer + 1) % self.attention_interval == 0


class Norm(nn.RMSNorm):
    """RMS norm in float32, whatever is around it."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)
        return y.to(x.dtype)


class Weight(nn.Module):
    """One parameter that is called `.weight` in the file."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


class Bias(nn.Module):
    """One parameter that is called `.bias` in the file."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(values)


def linear(n_in: int, n_out: int, std: float = INIT_STD) -> nn.Linear:
    layer = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over whole rows, from an empty state, in float32.

    q, k, v: [b, t, h, d], q and k of length 1. log_decay, beta: [b, t, h]. Returns [b, t, h, d].

    S_t = e^g_t S_(t-1) + beta_t k_t (v_t - e^g_t S_(t-1)^T k_t)^T, and S_t^T q_t is returned.
    Within a chunk, what its tokens write is the solution of a triangular system that is linear in
    the state before it; so the state is carried over the chunks by a scan of log2(n_chunks) steps.
    """
    n_tokens, head_dim = q.shape[1], q.shape[-1]
    pad = -n_tokens % CHUNK_TOKENS

    def chunks(x: Tensor) -> Tensor:  # [b, t, h, ...] to [b, h, n_chunks, chunk, ...]
        x = x.float().transpose(1, 2)
        x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, pad))
        return x.unflatten(2, (-1, CHUNK_TOKENS))

    q, k, v, log_decay, beta = map(chunks, (q / head_dim**0.5, k, v, log_decay, beta))
    since = log_decay.cumsum(-1)  # decay since the chunk began
    until = since[..., -1:]
    between = since.unsqueeze(-1) - since.unsqueeze(-2)
    past = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=q.device).tril()
    decay = between.masked_fill(~past, -torch.inf).exp()

    known = (beta.unsqueeze(-1) * (k @ k.mT) * decay).tril(-1)
    k_in = k * (beta * since.exp()).unsqueeze(-1)
    written = torch.linalg.solve_triangular(
        known, torch.cat([v * beta.unsqueeze(-1), k_in], -1), upper=False, unitriangular=True
    )
    new, erased = written.split(head_dim, -1)  # a chunk writes new - erased @ state

    k_out = (k * (until - since).exp().unsqueeze(-1)).mT
    identity = torch.eye(head_dim, device=q.device)
    state = _carry(identity * until.exp().unsqueeze(-1) - k_out @ erased, k_out @ new)
    seen = (q @ k.mT) * decay
    out = (q * since.exp().unsqueeze(-1)) @ state + seen @ (new - erased @ state)
    return out.flatten(2, 3)[:, :, :n_tokens].transpose(1, 2)


def _carry(keep: Tensor, add: Tensor) -> Tensor:
    """State before each chunk, if one turns it into keep @ state + add: all [b, h, n, d, d]."""
    n_chunks, step = keep.shape[2], 1
    while step < n_chunks:
        add = torch.cat(
            [add[:, :, :step], keep[:, :, step:] @ add[:, :, :-step] + add[:, :, step:]], 2
        )
        keep = torch.cat([keep[:, :, :step], keep[:, :, step:] @ keep[:, :, :-step]], 2)
        step *= 2
    return F.pad(add[:, :, :-1], (0, 0, 0, 0, 1, 0))


def rotate(x: Tensor, n_rotated: int, base: float) -> Tensor:
    """RoPE of the first n_rotated dims, token i at position i. x: [b, t, h, d].

    Pairs are (i, i + n_rotated / 2). M-RoPE has positions in time, height and width; those of text
    are equal, so its sections do not matter.
    """
    half = n_rotated // 2
    frequency = base ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[1], device=x.device).outer(frequency).unsqueeze(1)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half].float(), x[..., half:n_rotated].float()
    turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), x[..., n_rotated:]], -1)


class Block(nn.Module):
    """What all layers share: x + mix(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.out_std = INIT_STD / math.sqrt(2 * shape.n_layers)
        self.attn_norm = Norm(shape.n_embd, shape.eps)
        self.post_attention_norm = Norm(shape.n_embd, shape.eps)
        self.ffn_gate = linear(shape.n_embd, shape.n_ff)
        self.ffn_up = linear(shape.n_embd, shape.n_ff)
        self.ffn_down = linear(shape.n_ff, shape.n_embd, self.out_std)

    def feed_forward(self, x: Tensor) -> Tensor:
        y = self.post_attention_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(y)) * self.ffn_up(y))


class DeltaBlock(Block):
    """Gated DeltaNet: a recurrent state of [h, d, d] instead of K and V."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        heads, width = shape.delta_heads, shape.delta_heads * shape.delta_dim
        self.attn_qkv = linear(shape.n_embd, 3 * width)
        self.attn_gate = linear(shape.n_embd, width)
        self.ssm_conv1d = Weight(torch.rand(3 * width, shape.conv_taps) - 0.5)
        self.ssm_alpha = linear(shape.n_embd, heads)
        self.ssm_beta = linear(shape.n_embd, heads)
        # steps of 0.001 to 0.1, as Mamba-2 begins: softplus gives them back
        steps = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.ssm_dt = Bias(steps + torch.log(-torch.expm1(-steps)))
        self.ssm_a_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.ssm_norm = Norm(shape.delta_dim, shape.eps)
        self.ssm_out = linear(width, shape.n_embd, self.out_std)

    def forward(self, x: Tensor, resets: Tensor | None) -> Tensor:
        """x: [b, t, e]. resets: bool [b, t], the state is empty before these tokens."""
        n_tokens, taps = x.shape[1], self.shape.conv_taps
        y = self.attn_norm(x)
        mixed = F.pad(self.attn_qkv(y), (0, 0, taps - 1, 0))
        kernel = self.ssm_conv1d.weight.to(mixed.dtype)
        mixed = sum(mixed[:, i : i + n_tokens] * kernel[:, i] for i in range(taps))
        heads = F.silu(mixed).unflatten(-1, (3, self.shape.delta_heads, self.shape.delta_dim))
        q, k, v = heads.float().unbind(2)
        q, k = (z * torch.rsqrt(z.square().sum(-1, True) + self.shape.eps) for z in (q, k))
        step = F.softplus(self.ssm_alpha(y).float() + self.ssm_dt.bias)
        log_decay = -self.ssm_a_log.exp() * step
        if resets is not None:
            log_decay = log_decay.masked_fill(resets.unsqueeze(-1), -RESET)
        beta = torch.sigmoid(self.ssm_beta(y).float())
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(q, k, v, log_decay, beta).to(x.dtype)
        gate = self.attn_gate(y).unflatten(-1, out.shape[2:])
        return self.feed_forward(x + self.ssm_out((self.ssm_norm(out) * F.silu(gate)).flatten(2)))


class AttentionBlock(Block):
    """Grouped-query attention with normed queries and keys, and a gate on what it returns."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, kv_width = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        self.attn_q = linear(shape.n_embd, 2 * width)  # of each head: query, then gate
        self.attn_k = linear(shape.n_embd, kv_width)
        self.attn_v = linear(shape.n_embd, kv_width)
        self.attn_q_norm = Norm(shape.head_dim, shape.eps)
        self.attn_k_norm = Norm(shape.head_dim, shape.eps)
        for norm in (self.attn_q_norm, self.attn_k_norm):
            nn.init.constant_(norm.weight, 1.2)
        self.attn_output = linear(width, shape.n_embd, self.out_std)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x: [b, t, e]. past: more K and V, [b, h, n, d], that come first. mask: bool [t, n + t].

        Without a mask a token sees itself and those before it. Returns the rows, and K and V.
        """
        shape, y = self.shape, self.attn_norm(x)
        q, gate = self.attn_q(y).unflatten(-1, (shape.n_heads, -1)).chunk(2, -1)
        k, v = (f(y).unflatten(-1, (shape.n_kv_heads, -1)) for f in (self.attn_k, self.attn_v))
        q, k = self.attn_q_norm(q), self.attn_k_norm(k)
        q, k = (rotate(z, shape.n_rotated, shape.rope_base) for z in (q, k))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        each = shape.n_heads // shape.n_kv_heads
        k_each, v_each = (z.repeat_interleave(each, 1) for z in (k, v))
        out = F.scaled_dot_product_attention(
            q, k_each, v_each, attn_mask=mask, is_causal=mask is None
        )
        out = (out.transpose(1, 2) * torch.sigmoid(gate)).flatten(2)
        return self.feed_forward(x + self.attn_output(out)), (k, v)


class MtpBlock(AttentionBlock):
    """Joins a token with the hidden row before it, and drafts what follows the token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.nextn = nn.ModuleDict(
            {name: Norm(shape.n_embd, shape.eps) for name in ("enorm", "hnorm", "shared_head_norm")}
        )
        self.nextn["eh_proj"] = linear(2 * shape.n_embd, shape.n_embd)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        rows = (self.nextn["enorm"](embedding), self.nextn["hnorm"](hidden))
        return self.nextn["eh_proj"](torch.cat(rows, -1))


class Qwen35(nn.Module):
    """The trunk, and the MTP block behind it. The output head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        nn.init.normal_(self.token_embd.weight, std=INIT_STD)
        self.blk = nn.ModuleList(
            AttentionBlock(shape) if shape.has_attention(layer) else DeltaBlock(shape)
            for layer in range(shape.n_layers)
        )
        self.blk.append(MtpBlock(shape))
        self.output_norm = Norm(shape.n_embd, shape.eps)

    def forward(self, tokens: Tensor, resets: Tensor | None = None) -> Tensor:
        """Normed rows of the trunk [b, t, e]; head() makes logits of them.

        tokens: int64 [b, t]. resets: bool [b, t], DeltaNet states are empty before these tokens.
        """
        x = self._embed(tokens)
        for block in self.blk[:-1]:
            x = block(x, resets) if isinstance(block, DeltaBlock) else block(x)[0]
        return self.output_norm(x)

    def head(self, rows: Tensor) -> Tensor:
        """Logits [..., n_vocab] of rows [..., e], of the trunk or of drafts()."""
        return F.linear(rows, self.token_embd.weight)

    def drafts(self, tokens: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Rows of `depth` drafts in a row: row i of each is for token i + 1. Each is [b, t, e].

        tokens: int64 [b, t]. hidden: [b, t, e], the trunk's rows of these tokens.

        The first draft joins token i with the trunk's row i - 1, the n-th with row i - 1 of the
        draft before. Attention sees what a server's cache holds then: K of the first draft for
        tokens that are decided, and those of the chain itself for its own.

            token        0 .. i - n    i - n + 1   ...   i - 1        i
            K of draft   1 (decided)   2           ...   n - 1 + ..   n
        """
        block = self.blk[-1]
        embedding = self._embed(tokens)
        token = torch.arange(tokens.shape[1], device=tokens.device)
        row, column = token.unsqueeze(1), token.unsqueeze(0)
        rows: list[Tensor] = []
        past = None
        for n in range(depth):
            x = block.join(embedding, F.pad(hidden, (0, 0, 1, 0))[:, :-1])
            visible = [column <= row - n, *(column == row - n + m for m in range(1, n + 1))]
            x, past = block(x, past, torch.cat(visible, 1) if n else None)
            hidden = block.nextn["shared_head_norm"](x)
            rows.append(hidden)
        return rows

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.token_embd(tokens)
        return x.bfloat16() if torch.is_autocast_enabled(x.device.type) else x

"""A hybrid model (qwen35 with an MTP block) whose weights are set by hand, so that it is exact.

It does two things, and both show at once whether the memory is right:

    [go]                plays a fixed script of thinking, text and a tool call, token by token
    [f3=7] ... [q3]     answers [a7]: it recalls the value through its attention layer alone

If the block with [f3=7] is not visible, or another one with key 3 is, the answer is wrong.

The hidden row has four parts of 16 and one of 64 (n_embd is 128):

      0 ..  63   which token this is: a random direction for each ordinary token
     64 ..  79   a fact's key      80 ..  95   a fact's value
     96 .. 111   the key that is asked for
    112 .. 127   the value that was found

Layer 0 is a linear attention layer and layer 2 the MTP block; both add nothing to the row. In
layer 1 every head's query is the asked key and its key is the fact's key, in dimensions that are
not rotated, so that distance plays no part; values move from 80.. to 112.., and the output head
turns what was found into [aN].
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt
import tiny_vocab
from tiny import N_HEADS, N_KV_HEADS, Shape, Tensors, add_linear_attention, add_metadata, finish

N_KEYS: Final = 16
N_VALUES: Final = 16
TOKEN, FACT_KEY, FACT_VALUE, ASKED, FOUND = 0, 64, 80, 96, 112

SCRIPT: Final = (
    "<think>", "\nI should ", "look it up.\n", "</think>", "\n\nOf course. ", "One ", "moment.\n",
    "<tool_call>", "\n<function=look>\n", "<parameter=place>\n", "Oslo", "\n</parameter>\n",
    "</function>\n", "</tool_call>",
)  # fmt: skip
LINE_BREAK: Final = "\u010a"  # how byte-level BPE writes it
SHAPE: Final = Shape(arch="qwen35", n_layers=2, head_dim=64, attention_interval=2, mtp=True)

F32 = npt.NDArray[np.float32]


def fact(key: int, value: int) -> str:
    """The token that states a fact."""
    return f"[f{key}={value}]"


def write_handset(
    path: Path,
    *,
    script: Sequence[str] = SCRIPT,
    wrong_drafts: Sequence[int] = (),
    torn_drafts: Sequence[int] = (),
    start: str = "[go]",
    template: str = tiny_vocab.CHATML_TOOLS,
) -> Path:
    """Write the model to `path`, which is returned.

    wrong_drafts: steps of the script (0 is its start) after which the MTP block proposes a wrong
        token.
    torn_drafts: steps after which it holds the right token and another one for equally likely.
    start: the token after which the script is played; LINE_BREAK for the end of a chat's prompt.
    """
    facts = {fact(k, v): (k, v) for k in range(N_KEYS) for v in range(N_VALUES)}
    asked = {f"[q{k}]": k for k in range(N_KEYS)}
    found = {f"[a{v}]": v for v in range(N_VALUES)}
    writer = gguf.GGUFWriter(str(path), "qwen35")
    add_metadata(writer, SHAPE)
    said = [text for text in script if text not in tiny_vocab.USER_DEFINED]
    ids = tiny_vocab.add_vocabulary(
        writer,
        pre="qwen35",
        template=template,
        extra=(*facts, *asked, *found, "[go]", *dict.fromkeys(said)),
    )
    writer.add_vocab_size(len(ids))
    tensors = Tensors(writer, SHAPE.seed)

    rows = _directions(len(ids))
    for text, (key, value) in facts.items():
        rows[ids[text]] = _one_hot(FACT_KEY + key) + _one_hot(FACT_VALUE + value)
    for text, key in asked.items():
        rows[ids[text]] = _one_hot(ASKED + key)
    answered = rows[ids["[a0]"]].copy()  # what follows an answer is the same for all of them
    for text in found:
        rows[ids[text]] = answered

    steps = [ids[start], *(ids[text] for text in script), ids["<|im_end|>"]]
    if len(set(steps)) != len(steps):
        raise ValueError("each token of the script may come once: the last one decides the next")
    head = np.zeros_like(rows)
    for now, after in pairwise(steps):
        head[after] += 3 * rows[now]
    head[ids["<|im_end|>"]] += 3 * answered
    for text, value in found.items():
        head[ids[text], FOUND + value] = 3

    tensors.put("token_embd.weight", rows)
    tensors.ones("output_norm.weight", SHAPE.n_embd)
    tensors.put("output.weight", head)
    for layer in range(SHAPE.n_layers + 1):
        _add_block(tensors, layer)
    drafts = rows.copy()
    for step in wrong_drafts:
        drafts[steps[step]] = rows[steps[0]]
    for step in torn_drafts:
        drafts[steps[step]] = rows[steps[step]] + rows[steps[step - 1]]
    _add_mtp(tensors, drafts)
    finish(writer)
    return path


def _directions(n: int) -> F32:
    """f32 [n, n_embd]: a random unit vector in the token part of each row."""
    rows = np.zeros((n, SHAPE.n_embd), np.float32)
    drawn = np.random.default_rng(1).standard_normal((n, FACT_KEY - TOKEN))
    rows[:, TOKEN:FACT_KEY] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return rows


def _one_hot(index: int) -> F32:
    row = np.zeros(SHAPE.n_embd, np.float32)
    row[index] = 1
    return row


def _add_block(tensors: Tensors, layer: int) -> None:
    """A block that adds nothing, but for layer 1, whose attention recalls."""
    prefix, wide, narrow = f"blk.{layer}.", SHAPE.n_embd, SHAPE.n_ff
    tensors.ones(prefix + "attn_norm.weight", wide)
    tensors.ones(prefix + "post_attention_norm.weight", wide)
    tensors.matrix(prefix + "ffn_gate.weight", narrow, wide, gain=0.01)
    tensors.matrix(prefix + "ffn_up.weight", narrow, wide, gain=0.01)
    tensors.put(prefix + "ffn_down.weight", np.zeros((wide, narrow)))
    if SHAPE.has_attention_cache(layer):
        _add_attention(tensors, prefix, recalls=layer < SHAPE.n_layers)
    else:
        add_linear_attention(tensors, SHAPE, prefix, output_gain=0.0)


def _add_attention(tensors: Tensors, prefix: str, *, recalls: bool) -> None:
    dim, wide = SHAPE.head_dim, SHAPE.n_embd
    query = np.zeros((N_HEADS, 2 * dim, wide))  # each head's query, and its output gate (open)
    key = np.zeros((N_KV_HEADS, dim, wide))
    value = np.zeros((N_KV_HEADS, dim, wide))
    output = np.zeros((wide, N_HEADS, dim))
    if recalls:
        still = dim // 2  # the first dimension that is not rotated
        for k in range(N_KEYS):
            query[:, still + k, ASKED + k] = 1
            key[:, still + k, FACT_KEY + k] = 1
        for v in range(N_VALUES):
            value[:, v, FACT_VALUE + v] = 1
            output[FOUND + v, :, v] = 1
    tensors.put(prefix + "attn_q.weight", query.reshape(-1, wide))
    tensors.put(prefix + "attn_k.weight", key.reshape(-1, wide))
    tensors.put(prefix + "attn_v.weight", value.reshape(-1, wide))
    tensors.put(prefix + "attn_output.weight", output.reshape(wide, -1))
    # Normed rows have length 8 in one dimension: a match scores 8 * 8 * 3 / 8 = 24, all else 0.
    tensors.ones(prefix + "attn_q_norm.weight", dim, 3.0)
    tensors.ones(prefix + "attn_k_norm.weight", dim)


def _add_mtp(tensors: Tensors, drafts: F32) -> None:
    """Drafts from the last token's embedding alone: what the head says of it."""
    wide, prefix = SHAPE.n_embd, f"blk.{SHAPE.n_layers}.nextn."
    tensors.put(prefix + "eh_proj.weight", np.eye(wide, 2 * wide))
    for name in ("enorm", "hnorm", "shared_head_norm"):
        tensors.ones(f"{prefix}{name}.weight", wide)
    tensors.put(prefix + "embed_tokens.weight", drafts)

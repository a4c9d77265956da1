"""Query: the pre-rotation query rows of the content tokens, for the layers that score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.layout import KvLayout, Pair
from kvmem.kv.rope import unrotate

__all__ = ["MAX_ROWS", "Query", "pick_evenly"]

# Cost is linear in the rows; 16 lose nothing that the study could measure (docs/retrieval.md).
MAX_ROWS = 16


def pick_evenly(n: int, limit: int) -> NDArray[np.intp]:
    """At most `limit` of 0 .. n - 1, evenly spread, the first and the last among them."""
    if limit < 1:
        raise ValueError(f"limit is {limit}")
    return np.unique(np.linspace(0, max(n - 1, 0), min(n, limit)).round().astype(np.intp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is asked of the history. A value: it may be kept and scored again later.

    layers: layer index > f32 [n_rows, n_head, head_dim_k], un-rotated, without attn_scale.
    tokens: i32 [n_tokens], ids of all content tokens, for the lexical rank.
    """

    layout: KvLayout
    layers: Mapping[int, NDArray[np.float32]]
    tokens: NDArray[np.int32]

    @classmethod
    def from_tap(
        cls,
        layout: KvLayout,
        pairs: Sequence[tuple[int, int]],
        rows: Sequence[NDArray[np.float32]] | NDArray[np.float32],
        pos: NDArray[np.int32],
        tokens: Sequence[int] | NDArray[np.int32] = (),
        max_rows: int = MAX_ROWS,
    ) -> "Query":
        """Un-rotate what the query tap read for the content tokens.

        rows: for each layer of the layout f32 [n_rows, n_head, head_dim_k], rotated; one array
        [n_layers, n_rows, n_head, head_dim_k] will do. pos: i32 [n_rows, 4]. Neither is changed.
        """
        if len(rows) != len(layout.layers):
            raise ValueError(f"rows of {len(rows)} layers for a layout of {len(layout.layers)}")
        chosen = pick_evenly(len(pos), max_rows)
        picked_pos = np.ascontiguousarray(pos[chosen], np.int32)
        layers: dict[int, NDArray[np.float32]] = {}
        for index in sorted({layer for layer, _ in pairs}):
            layer = layout.layers[index]
            expected = (len(pos), layer.n_head, layer.head_dim_k)
            if rows[index].shape != expected:
                raise ValueError(
                    f"rows of layer {layer.il} are {rows[index].shape}, not {expected}"
                )
            picked = np.array(rows[index][chosen], np.float32, order="C")
            unrotate(picked, picked_pos, layer.rope_q, layer.hadamard)
            picked.setflags(write=False)
            layers[index] = picked
        return cls(layout=layout, layers=layers, tokens=np.asarray(tokens, np.int32))

    @property
    def n_rows(self) -> int:
        """Rows that score, of each query head."""
        return next((len(rows) for rows in self.layers.values()), 0)

    def covers(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether it has the rows that these pairs score with."""
        return all(layer in self.layers for layer, _ in pairs)

    def join(self, other: "Query") -> "Query":
        """A query that asks with the rows and tokens of both, in the layers that both know."""
        layers = {
            index: np.concatenate([rows, other.layers[index]])
            for index, rows in self.layers.items()
            if index in other.layers
        }
        return replace(self, layers=layers, tokens=np.concatenate([self.tokens, other.tokens]))

    def take(self, rows: NDArray[np.intp], n_tokens: int) -> "Query":
        """A query that asks with these of its rows, and with its first n_tokens tokens."""
        layers = {index: of_layer[rows] for index, of_layer in self.layers.items()}
        return replace(self, layers=layers, tokens=self.tokens[:n_tokens])

    def heads(self, pair: Pair) -> NDArray[np.float32]:
        """The query heads that read this KV head: f32 [n_rows, group, head_dim_k], a view."""
        if pair.layer not in self.layers:
            raise ValueError(f"the query has no rows of layer index {pair.layer}")
        group = self.layout.layers[pair.layer].group
        return self.layers[pair.layer][:, pair.kv_head * group : (pair.kv_head + 1) * group]

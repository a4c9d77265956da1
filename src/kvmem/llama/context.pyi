from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvmem.llama.model import Model

__all__ = ["CancelToken", "Context", "Share", "shares_of"]

class Share(NamedTuple):
    device: str
    free: int
    total: int
    weights: int
    cells: int
    states: int
    compute: int

def shares_of(
    model: Model,
    *,
    n_ctx: int,
    n_cells: int,
    n_batch: int,
    n_ubatch: int,
    type_k: str,
    type_v: str,
    flash_attn: str = "on",
    n_rs_seq: int = 0,
    replay: bool = False,
    draft_types: tuple[str, str] | None = None,
) -> list[Share]: ...

class CancelToken:
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...

class Context:
    model: Model
    n_vocab: int
    n_batch: int
    n_ubatch: int
    @property
    def n_threads_batch(self) -> int: ...
    n_ctx: int
    n_rs_seq: int
    n_seq_max: int
    block_tokens: int
    n_seen: int
    n_outputs: int
    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_cells: int = 0,
        block_tokens: int = 0,
        n_batch: int = 512,
        n_ubatch: int = 512,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: str = "on",
        n_threads: int = 1,
        n_threads_batch: int = 1,
        offload_kqv: bool = True,
        n_seq_max: int = 1,
        n_rs_seq: int = 0,
        replay: bool = False,
    ) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    def decode(
        self,
        tokens: NDArray[np.int32],
        pos: NDArray[np.int32],
        *,
        outputs: Literal["last", "all", "none"] | Sequence[int] = "last",
        seqs: Sequence[int] = (0,),
        cancel: CancelToken | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None: ...
    def shares(self) -> list[Share]: ...
    def logits(self, i: int = -1) -> NDArray[Any]: ...
    def keep_hidden_rows(self) -> None: ...
    def clear(self) -> None: ...
    def seq_rm(self, seq: int, start: int, stop: int) -> bool: ...
    def seq_cp(self, source: int, target: int, start: int, stop: int) -> None: ...
    def seq_pos_max(self, seq: int) -> int: ...

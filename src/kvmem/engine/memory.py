"""The memory of histories: what the engine does to tokens, in terms of blocks.

TieredMemory keeps a bounded working set on the device and everything on the host; what takes turns
on the device is the business of engine.switching. PlainMemory is stock llama.cpp.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvmem.config import MemoryConfig
from kvmem.engine.calibration import Calibration, Scoring, scoring
from kvmem.engine.check import check_memory
from kvmem.engine.checkpoint import Checkpoints, DeviceCopy
from kvmem.engine.conversation import Conversation
from kvmem.engine.draft import Drafter
from kvmem.engine.index import BlockIndex
from kvmem.engine.plain import Outputs, PlainMemory
from kvmem.engine.prompt import positions_behind
from kvmem.engine.room import make_room, with_room
from kvmem.errors import Cancelled, CapacityError, HostCapacityError, StateError
from kvmem.kv.budget import HostBudget
from kvmem.kv.history import History
from kvmem.kv.lexical import LexicalIndex
from kvmem.kv.score import MOST_THREADS, ScoreScratch
from kvmem.kv.summary import KeySummaries
from kvmem.kv.working_set import WorkingSet
from kvmem.llama.context import CancelToken, Context
from kvmem.llama.memory import LlamaPort
from kvmem.llama.state import state_bytes
from kvmem.sizes import PoolSizes

__all__ = ["Memory", "Outputs", "PlainMemory", "TieredMemory", "as_tiered"]

# Some three seconds of prefill on a GPU, against 150 MiB of host memory a checkpoint.
CHECKPOINT_GAP_TOKENS = 8192

T = TypeVar("T")
I32 = NDArray[np.int32]


class TieredMemory:
    """A working set over llama.cpp's cells, with what is needed to score every block of the
    history.

    drafter: the MTP head, where tokens are drafted; it is the memory's from here on.
    """

    def __init__(
        self,
        context: Context,
        sizes: PoolSizes,
        config: MemoryConfig,
        calibration: Calibration | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.context = context
        self.drafter = drafter
        self.port = LlamaPort(context)
        self.layout = self.port.layout
        self.sizes = sizes
        self.scorer = config.scorer
        self.query_replay = config.query_replay
        self.query_policy = config.query_policy
        self.block_tokens = sizes.block_tokens
        self.budget_blocks = sizes.n_budget_blocks
        # a chunk sees the window as it was when it began: a quarter leaves three quarters to look
        # back at
        quarter = max(1, self.budget_blocks // 4) * self.block_tokens
        self.chunk_tokens = min(context.n_batch, quarter)
        # slabs follow the smaller of both limits
        self.host = HostBudget(
            min(config.conversations_bytes or sizes.host_limit_bytes, sizes.host_limit_bytes)
        )
        self.working_set = WorkingSet(
            self.port,
            block_tokens=self.block_tokens,
            budget_blocks=sizes.n_budget_blocks,
            reserve_blocks=sizes.n_reserve_blocks,
            slack_blocks=config.n_slack_blocks,
            budget=self.host,
            ordered=config.ordered,
        )
        self.host.set_limit(sizes.host_limit_bytes)
        # asked for room where the host limit is reached: True if another conversation has left
        self.make_room_on_host: Callable[[], bool] = lambda: False
        self._spare_states: list[NDArray[np.uint8]] = []
        keeps_copy = config.device_checkpoint and self.is_hybrid
        self.device_copy = DeviceCopy(context) if keeps_copy else None
        self.scoring = scoring(self.layout, calibration, self.scorer)
        self.active = self.conversation_of(self.working_set.history)
        self.index = BlockIndex(self.active, self.block_tokens)
        self.scratch = ScoreScratch(self.host)
        # those of a prefill batch, which rest while blocks are scored
        self.score_threads = min(context.n_threads_batch, MOST_THREADS)
        # False while the recurrent state may be of other tokens than the history
        self.state_is_certain = True
        self._trial: tuple[int, I32] | None = None
        self.begin_request()

    def begin_request(self) -> None:
        """What is noted and timed from now on belongs to one request."""
        self.notes: list[str] = []
        self.store_s = 0.0
        self.checkpoint_s = 0.0

    def use_calibration(self, calibration: Calibration | None) -> None:
        """Score with other pairs from now on; their summaries are made from the stored keys.

        Raises ConfigError and CapacityError; then all is as before.
        """
        chosen = scoring(self.layout, calibration, self.scorer)
        made = self.summarise_as(chosen)
        self.scoring = chosen  # first: settle() makes summaries for it where an interrupt follows
        self.index.use(made)

    def renew_summaries(self) -> None:
        """Make the summaries anew if they are of other pairs than score now.

        Where the host has no room for both, the history is forgotten, and that is noted: settle()
        may not fail for want of memory, or no request would be answered any more.
        """
        made_for = (self.summaries.pairs, self.summaries.slice_tokens)
        if made_for == (self.scoring.pairs, self.scoring.slice_tokens):
            return
        try:
            made = self.summarise_as(self.scoring)
        except HostCapacityError as error:
            self.note(f"a conversation of {self.n_tokens} tokens could not be kept: {error}")
            self.clear()
            made = self.summarise_as(self.scoring)
        self.index.use(made)

    def summarise(self, pairs: Sequence[tuple[int, int]], slice_tokens: int) -> KeySummaries:
        """New summaries of all that is summarised, made from the stored keys."""
        return self.index.recompute(self.working_set, pairs, slice_tokens)

    def summarise_as(self, chosen: Scoring) -> KeySummaries:
        """The same for a scoring; others leave where the host limit forbids both sets."""
        return with_room(self, lambda: self.summarise(chosen.pairs, chosen.slice_tokens))

    @property
    def n_tokens(self) -> int:
        return self.working_set.n_tokens

    @property
    def tokens(self) -> I32:
        return self.working_set.tokens

    @property
    def summaries(self) -> KeySummaries:
        return self.active.summaries

    @property
    def lexical(self) -> LexicalIndex:
        return self.active.lexical

    @property
    def checkpoints(self) -> Checkpoints:
        return self.active.checkpoints

    @property
    def is_hybrid(self) -> bool:
        """Whether a recurrent state stands beside the attention cache.

        It can go back to checkpoints only.
        """
        return self.port.is_hybrid

    def save_checkpoint(self, *, is_needed: bool = False) -> None:
        """Make it possible to go back to this point; on attention alone it always is.

        is_needed: a second pass may begin here. Where the host limit has no room for the state,
        that is noted and nothing is kept; nor is a state that may be another's.
        """
        if not self.is_hybrid or self.n_tokens == 0 or not self.is_whole:
            return
        started = perf_counter()
        if not self.checkpoints.save(self.n_tokens, is_needed=is_needed):
            self.note(
                f"no checkpoint was kept: the state of {state_bytes(self.context)} bytes does not "
                "fit in the host limit; a change of the history reads it from its start"
            )
        if is_needed:
            self.checkpoints.needed = self.n_tokens
        self.checkpoint_s += perf_counter() - started

    def can_return_to(self, n_tokens: int) -> bool:
        """Whether `truncate` would go to exactly this point."""
        if not self.is_hybrid or n_tokens in (0, self.n_tokens):
            return True
        checkpoint = self.checkpoints.nearest(n_tokens)
        return checkpoint is not None and checkpoint.n_tokens == n_tokens

    def note(self, text: str) -> None:
        """Something that the request should know of."""
        if text not in self.notes:
            self.notes.append(text)

    def spread_checkpoint(self) -> None:
        """Save one where the last is far behind: a change in the middle goes back to it."""
        newest = self.checkpoints.positions[-1] if len(self.checkpoints) else 0
        if self.n_tokens - newest >= CHECKPOINT_GAP_TOKENS:
            self.save_checkpoint()

    @property
    def device_bytes(self) -> int:
        """Bytes of the attention cache: the same at any length of the history."""
        return self.port.device_bytes()[0]

    def n_blocks_of(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_tokens)

    def decode(
        self,
        tokens: I32,
        *,
        outputs: Outputs = "last",
        cancel: CancelToken | None = None,
        reply: bool = False,
        seal: bool = True,
    ) -> None:
        """Run one batch and append it.

        seal: whether the blocks that it completes are to be stored. After an error the history is
        as before, or at the checkpoint before that; an interrupt may also come when all is done.
        """
        if not self.is_whole:
            raise StateError("what was broken off is not undone yet: settle() comes first")
        ws = self.working_set

        def append() -> None:
            cells = with_room(self, lambda: ws.prepare(len(tokens), reply=reply))
            pos = positions_behind(ws.pos, len(tokens))
            first_pos = np.ascontiguousarray(pos[:, 0])
            self.state_is_certain = False
            self.context.decode(
                tokens,
                first_pos,
                outputs=outputs,
                cancel=cancel,
                meanwhile=self.provide if seal else None,
            )
            if self.drafter is not None:
                self.drafter.follow(cells, tokens, first_pos)
            ws.commit(tokens, pos)
            self.state_is_certain = True

        self.undone_on_error(append)

    # What is broken off is undone: at once, or where that is interrupted, before anything else.

    def undone_on_error(self, action: Callable[[], T]) -> T:
        """Do this, which appends tokens. Where it fails, none of them stays."""
        try:
            return action()
        except BaseException as error:
            # a cancel before the batch leaves a recurrent state as it was, and how many tokens it
            # has seen tells of one that came behind; of other errors nothing is known
            if isinstance(error, Cancelled):
                self.state_is_certain = True
            self.settle()
            raise

    @property
    def is_whole(self) -> bool:
        """Whether the recurrent state, if any, has seen exactly the history; any doubt is a no."""
        if not self.is_hybrid:
            return True
        return self.state_is_certain and self.port.recurrent_tokens == self.n_tokens

    def settle(self) -> None:
        """Undo what an error or an interrupt has left half done; nothing where all is whole.

        Every use begins with it, since the repair behind an error may be interrupted, too.
        """
        if self.working_set.n_pending:
            self.working_set.rollback()
        self.index.mend()
        self.renew_summaries()
        if not self.is_whole:
            self.go_back(self.n_tokens)
        if self._trial is not None:
            n_tokens, resident = self._trial
            self.truncate(n_tokens)
            self._trial = None
            if self.n_tokens == n_tokens > 0:
                self.working_set.apply(resident)

    def begin_trial(self) -> None:
        """What is read from here on does not outlive settle(), unless end_trial() comes before."""
        self._trial = (self.n_tokens, self.working_set.resident())

    def end_trial(self) -> None:
        """What was read stays."""
        self._trial = None

    def read(
        self,
        tokens: I32,
        *,
        outputs: Outputs = "last",
        cancel: CancelToken | None = None,
        on_chunk: Callable[[int], None] | None = None,
        seal: bool = True,
        keep: bool = False,
    ) -> None:
        """Append any number of tokens in chunks; the oldest blocks behind the sink leave when the
        budget is full.

        outputs holds for the last chunk. seal: store completed blocks as they fill. keep: nothing
        leaves, and the tokens may take a part of the reserve (see room_beside_reply).
        """
        done = 0
        while done < len(tokens):
            n = self.chunk_end(self.n_tokens, self.n_tokens + len(tokens) - done) - self.n_tokens
            if not keep:
                make_room(self, n)
            self.decode(
                tokens[done : done + n],
                outputs=outputs if done + n == len(tokens) else "none",
                cancel=cancel,
                reply=keep,
                seal=seal,
            )
            if seal:
                self.try_seal()
            done += n
            if on_chunk is not None:
                on_chunk(n)

    def clock(self) -> float:
        """Seconds, for PhaseTimes.measure: those of `store_s` and `checkpoint_s` do not count."""
        return perf_counter() - self.store_s - self.checkpoint_s

    def chunk_end(self, start: int, stop: int) -> int:
        """Where the chunk ends that begins at `start`, on the way to `stop`.

        Where a batch reaches a block's border it ends there, and leaves no open block behind.
        """
        end = min(start + self.chunk_tokens, stop)
        border = end - end % self.block_tokens
        return border if start < border and end < stop else end

    @property
    def may_overflow(self) -> bool:
        """Whether a history can become longer than the budget."""
        return self.n_blocks_of(self.sizes.workspace_tokens) > self.budget_blocks

    def try_seal(self) -> None:
        """Store the completed blocks if the host limit allows it: none of them has to leave now."""
        try:
            self.seal()
        except CapacityError as error:
            self.note(f"not all blocks have a copy on the host, so they cannot leave: {error}")

    def seal(self) -> None:
        """Store the completed blocks, and queue what scores them."""
        started = perf_counter()
        try:
            with_room(self, self._seal)
        finally:
            self.store_s += perf_counter() - started

    def provide(self) -> None:
        """Get the host memory for the blocks that the pending tokens complete, if there is some."""
        with suppress(CapacityError):  # storing says so, where it matters
            self.working_set.provide()

    def _seal(self) -> None:
        self.working_set.seal()
        self.index.add_sealed(self.working_set)

    def truncate(self, n_tokens: int) -> None:
        """Forget the tokens from n_tokens on.

        A hybrid goes back to the checkpoint at or before, if need be to nothing.
        """
        if n_tokens >= self.n_tokens:
            return
        if self.is_hybrid:
            self.go_back(n_tokens)
        else:
            self._truncate_attention(n_tokens)

    def go_back(self, n_tokens: int) -> None:
        """Restore the recurrent state at or before n_tokens, and the attention part to the same
        point: both or nothing.
        """
        checkpoint = self.checkpoints.nearest(n_tokens)
        if checkpoint is None:
            self.clear()
            return
        self.state_is_certain = False
        try:
            self._truncate_attention(checkpoint.n_tokens)
            started = perf_counter()
            self.checkpoints.restore(checkpoint)
            self.checkpoint_s += perf_counter() - started
        except Exception:
            self.clear()
            raise
        self.state_is_certain = True

    def _truncate_attention(self, n_tokens: int) -> None:
        self.index.truncate(n_tokens // self.block_tokens)
        with_room(self, lambda: self.working_set.truncate(n_tokens))
        self.restore_order()

    def restore_order(self) -> None:
        """With ordered placement, close the gap that a single block left or came into."""
        if self.working_set.ordered and self.n_tokens:
            self.working_set.apply(self.working_set.resident())

    def clear(self) -> None:
        """Forget the whole history."""
        self.state_is_certain = False
        self.index.truncate(0)
        self.checkpoints.clear()
        self.working_set.clear()
        self.clear_device()
        self._trial = None

    def clear_device(self) -> None:
        """Forget the states of an empty history."""
        self.context.clear()
        if self.drafter is not None:
            self.drafter.clear()
        self.state_is_certain = True

    # Several conversations, of which one is on the device.

    def make_active(self, conversation: Conversation) -> None:
        """This one's history is on the device from now on, with a state that is still another's."""
        self.state_is_certain = False
        self.index.follow(conversation)
        self.active = conversation  # last: until then an interrupt finds that it is not active

    def new_conversation(self) -> Conversation:
        """An empty one, not on the device."""
        return self.conversation_of(self.working_set.new_history())

    def conversation_of(self, history: History) -> Conversation:
        """The same around a history that nothing scores yet."""
        return Conversation(
            history=history,
            summaries=KeySummaries(
                self.layout, self.scoring.pairs, self.scoring.slice_tokens, self.host
            ),
            lexical=LexicalIndex(self.block_tokens, budget=self.host),
            checkpoints=Checkpoints(
                self.context,
                self.host,
                self.port,
                spare=self._spare_states,
                make_room=lambda: self.make_room_on_host(),
                hidden=None if self.drafter is None else self.drafter.hidden,
                device=self.device_copy,
            ),
        )

    def check(self, parked: Sequence[Conversation] = ()) -> None:
        """State every invariant; `parked` are all conversations that are not on the device."""
        check_memory(self, parked)

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        if self.context.is_closed:
            return
        self.index.close()
        self.checkpoints.clear()
        self.working_set.clear()  # their host memory goes back now, whoever still refers to them
        if self.drafter is not None:
            self.drafter.close()
        self.context.close()


Memory = PlainMemory | TieredMemory


def as_tiered(memory: Memory) -> TieredMemory:
    """The same, where it is tiered. Raises StateError with --no-kvmem."""
    if isinstance(memory, PlainMemory):
        raise StateError("KV memory is off")
    return memory

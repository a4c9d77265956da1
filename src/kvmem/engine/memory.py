"""The memory of histories: what the engine does to tokens, in terms of blocks.

TieredMemory keeps a bounded working set on the device and everything on the host; what takes turns
on the device is the business of engine.switching. PlainMemory is stock llama.cpp.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvmem.config import MemoryConfig, PoolSizes
from kvmem.engine.calibration import Calibration, Scoring, scoring
from kvmem.engine.checkpoint import Checkpoints
from kvmem.engine.conversation import Conversation
from kvmem.engine.draft import Drafter
from kvmem.engine.plain import Outputs, PlainMemory
from kvmem.engine.prompt import positions_behind
from kvmem.engine.stats import PhaseTimes
from kvmem.errors import Cancelled, CapacityError, HostCapacityError
from kvmem.kv.budget import HostBudget
from kvmem.kv.history import History
from kvmem.kv.lexical import LexicalIndex
from kvmem.kv.score import MOST_THREADS, ScoreScratch
from kvmem.kv.summary import KeySummaries
from kvmem.kv.summary_worker import SummaryWorker
from kvmem.kv.working_set import WorkingSet
from kvmem.llama.context import CancelToken, Context
from kvmem.llama.memory import LlamaPort
from kvmem.llama.state import state_bytes

__all__ = ["Memory", "Outputs", "PlainMemory", "TieredMemory", "slack_blocks"]

# Some three seconds of prefill on a GPU, against 150 MiB of host memory a checkpoint.
CHECKPOINT_GAP_TOKENS = 8192

T = TypeVar("T")
I32 = NDArray[np.int32]


def slack_blocks(config: MemoryConfig) -> int:
    """Slots beyond budget and reserve: ordered placement shifts blocks through a free one."""
    return 1 if config.ordered else 0


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
            slack_blocks=slack_blocks(config),
            budget=self.host,
            ordered=config.ordered,
        )
        self.host.set_limit(sizes.host_limit_bytes)
        # asked for room where the host limit is reached: True if another conversation has left
        self.make_room_on_host: Callable[[], bool] = lambda: False
        self._spare_states: list[NDArray[np.uint8]] = []
        self.scoring = scoring(self.layout, calibration, self.scorer)
        self.active = self.conversation_of(self.working_set.history)
        self.worker = SummaryWorker(self.active.summaries)
        self.scratch = ScoreScratch(self.host)
        # those of a prefill batch, which rest while blocks are scored
        self.score_threads = min(context.n_threads_batch, MOST_THREADS)
        self.notes: list[str] = []  # what a request should know of, until the session takes them
        self.store_s = 0.0
        self.checkpoint_s = 0.0

    def use_calibration(self, calibration: Calibration | None) -> None:
        """Score with other pairs from now on; their summaries are made from the stored keys.

        Raises ConfigError and CapacityError; then all is as before.
        """
        chosen = scoring(self.layout, calibration, self.scorer)
        self.with_room(lambda: self._summarise_again(chosen))
        self.scoring = chosen

    def renew_summaries(self) -> None:
        """Make the summaries anew if they are of other pairs than score now."""
        made_for = (self.summaries.pairs, self.summaries.slice_tokens)
        if made_for != (self.scoring.pairs, self.scoring.slice_tokens):
            self.with_room(lambda: self._summarise_again(self.scoring))

    def summarise(self, pairs: Sequence[tuple[int, int]], slice_tokens: int) -> KeySummaries:
        """New summaries of all that is summarised, made from the stored keys."""
        self.worker.flush()
        return self.summaries.recompute(pairs, self._records, slice_tokens)

    def _summarise_again(self, chosen: Scoring) -> None:
        self.active.summaries = self.summarise(chosen.pairs, chosen.slice_tokens)
        self.worker.attach(self.active.summaries)

    def _records(self, n_blocks: int) -> Iterator[tuple[int, I32]]:
        """Address and positions of the stored blocks 0 .. n_blocks - 1."""
        ws = self.working_set
        for block in range(n_blocks):
            start, stop = block * self.block_tokens, (block + 1) * self.block_tokens
            yield ws.record_address(block), np.ascontiguousarray(ws.pos[start:stop])

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

    def save_checkpoint(self) -> None:
        """Make it possible to go back to this point; on attention alone it always is.

        Where the host limit has no room for the state, that is noted and nothing is kept.
        """
        if not self.is_hybrid or self.n_tokens == 0:
            return
        started = perf_counter()
        if not self.checkpoints.save(self.n_tokens):
            self.note(
                f"no checkpoint was kept: the state of {state_bytes(self.context)} bytes does not "
                "fit in the host limit; a change of the history reads it from its start"
            )
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
        """Save one where the last is far behind.

        What a change in the middle of a history costs to read again.
        """
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
    ) -> None:
        """Run one batch and append it.

        After an error the history is as before, or at the checkpoint before that.
        """
        ws = self.working_set
        with self.undone_on_error():
            cells = self.with_room(lambda: ws.prepare(len(tokens), reply=reply))
            pos = positions_behind(ws.pos, len(tokens))
            first_pos = np.ascontiguousarray(pos[:, 0])
            self.context.decode(tokens, first_pos, outputs=outputs, cancel=cancel)
            if self.drafter is not None:
                self.drafter.follow(cells, tokens, first_pos)
            ws.commit(tokens, pos)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Where what is inside fails, no token of it stays."""
        ws = self.working_set
        start = ws.n_tokens
        try:
            yield
        except BaseException as error:
            has_begun = ws.n_pending > 0 or ws.n_tokens != start
            if ws.n_pending:
                ws.rollback()
            # a cancel before the batch leaves a recurrent state as it was, and one that a signal
            # handler raises may come behind it; of other errors that is not known
            last_pos = ws.pos[start - 1, 0] if start else -1
            is_clean = isinstance(error, Cancelled) and self.port.recurrent_pos == last_pos
            if has_begun and self.is_hybrid and not is_clean:
                self.go_back(start)
            raise

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
        leaves, and the tokens may take a part of the reserve (see `room_beside_reply`).
        """
        done = 0
        while done < len(tokens):
            n = self.chunk_end(self.n_tokens, self.n_tokens + len(tokens) - done) - self.n_tokens
            if not keep:
                self.make_room(n)
            self.decode(
                tokens[done : done + n],
                outputs=outputs if done + n == len(tokens) else "none",
                cancel=cancel,
                reply=keep,
            )
            if seal:
                self.try_seal()
            done += n
            if on_chunk is not None:
                on_chunk(n)

    @contextmanager
    def phase(self, times: PhaseTimes, name: str) -> Iterator[None]:
        """Add the time inside, less `store_s` and `checkpoint_s`, to this field of `times`."""
        started = perf_counter() - self.store_s - self.checkpoint_s
        try:
            yield
        finally:
            spent = perf_counter() - self.store_s - self.checkpoint_s - started
            setattr(times, name, getattr(times, name) + spent)

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

    def room_beside_reply(self) -> int:
        """Tokens that fit with nothing leaving and half of the reserve left to the reply."""
        half = -(-self.sizes.n_reserve_blocks // 2) * self.block_tokens
        ws = self.working_set
        return max(ws.room(), ws.room(reply=True) - half)

    def make_room(self, n_tokens: int) -> None:
        """Let the oldest blocks behind the sink leave until n_tokens fit in the budget."""
        ws = self.working_set
        if ws.room() >= n_tokens:
            return
        n_new = self.n_blocks_of(ws.n_tokens + n_tokens) - ws.n_blocks
        n_keep = self.budget_blocks - n_new
        resident = ws.resident()
        sink = resident[resident < self.sizes.n_sink_blocks]
        rest = resident[resident >= self.sizes.n_sink_blocks]
        kept = np.concatenate([sink, rest[-max(1, n_keep - len(sink)) :]])[-n_keep:]
        self.seal()
        ws.apply(kept)

    def make_reply_room(self, reply_from_block: int) -> int:
        """Let the oldest finished blocks of the reply leave for its next token.

        Returns how many left.
        """
        ws = self.working_set
        if ws.room(reply=True) >= 1:
            return 0
        self.seal()
        own = range(reply_from_block, ws.n_blocks - 1)
        # a reserve of one block holds no finished block of the reply: then the oldest of the
        # history behind the sink
        first = (
            reply_from_block if any(ws.is_resident(b) for b in own) else self.sizes.n_sink_blocks
        )
        n_left = ws.make_room(1, reply_from_block=first)
        self.restore_order()
        return n_left

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
            self.with_room(self._seal)
        finally:
            self.store_s += perf_counter() - started

    def with_room(self, action: Callable[[], T]) -> T:
        """Do this; where the host limit forbids it, let others go one by one.

        First conversations that were not used for long, then checkpoints: those save time, and what
        else is on the host cannot be had again.
        """
        while True:
            try:
                return action()
            except HostCapacityError:
                if self.make_room_on_host():
                    continue
                if not self.checkpoints.give_way():
                    raise
                self.note("the host limit is near: checkpoints gave way to blocks")

    def _seal(self) -> None:
        ws = self.working_set
        ws.seal()
        for block in range(self.lexical.n_blocks, ws.n_sealed):
            start, stop = block * self.block_tokens, (block + 1) * self.block_tokens
            self.lexical.add(block, ws.tokens[start:stop])
            try:
                self.worker.add(block, ws.record_address(block), ws.pos[start:stop], owner=ws)
            except (
                BaseException
            ):  # the host limit: both know the same blocks, so that the next call can go on
                self.lexical.truncate(block)
                raise

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
        try:
            self._truncate_attention(checkpoint.n_tokens)
            self.checkpoints.restore(checkpoint)
        except BaseException:
            self.clear()
            raise

    def _truncate_attention(self, n_tokens: int) -> None:
        self._forget_scores(n_tokens // self.block_tokens)
        self.with_room(lambda: self.working_set.truncate(n_tokens))
        self.restore_order()

    def restore_order(self) -> None:
        """With ordered placement, close the gap that a single block left or came into."""
        if self.working_set.ordered and self.n_tokens:
            self.working_set.apply(self.working_set.resident())

    def clear(self) -> None:
        """Forget the whole history."""
        self._forget_scores(0)
        self.checkpoints.clear()
        self.working_set.clear()
        self.clear_device()

    def clear_device(self) -> None:
        """Forget the states of an empty history."""
        self.context.clear()
        if self.drafter is not None:
            self.drafter.clear()

    def _forget_scores(self, n_blocks: int) -> None:
        # the worker reads host records, so it is done before the store lets them go
        self.worker.truncate(n_blocks)
        self.lexical.truncate(n_blocks)

    # Several conversations, of which one is on the device.

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
                spare=self._spare_states,
                make_room=lambda: self.make_room_on_host(),
                hidden=None if self.drafter is None else self.drafter.hidden,
            ),
        )

    def check(self, parked: Sequence[Conversation] = ()) -> None:
        """State every invariant; AssertionError names the broken one.

        parked: all conversations that are not on the device.
        """
        self.worker.flush()
        self.working_set.check([one.history for one in parked])
        for one in parked:
            assert one.lexical.n_blocks == one.summaries.n_blocks <= one.history.n_blocks
            assert all(n <= one.history.n_tokens for n in one.checkpoints.positions)
            if self.is_hybrid and one.history.n_tokens:
                assert one.checkpoints.positions[-1] == one.history.n_tokens
        assert self.lexical.n_blocks == self.summaries.n_blocks <= self.working_set.n_sealed
        assert self.port.n_cells_used == self.working_set.n_cells_used
        assert self.port.do_caches_agree
        assert self.host.used <= self.host.limit
        assert all(n <= self.n_tokens for n in self.checkpoints.positions)

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        if self.context.is_closed:
            return
        self.worker.close()
        del self.working_set  # its host slabs belong to the context's device
        if self.drafter is not None:
            self.drafter.close()
        self.context.close()


Memory = PlainMemory | TieredMemory

"""The reply.

Token after token, until something ends it. The pool and the reserve never do.
"""

from collections.abc import Generator
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.draft import Drafter
from kvmem.engine.events import Event, StopReason, TokenEvent
from kvmem.engine.logprobs import token_chances, token_logprobs
from kvmem.engine.memory import Memory, TieredMemory
from kvmem.engine.room import make_reply_room
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.stats import RequestStats
from kvmem.engine.verify import Verification
from kvmem.llama.context import CancelToken
from kvmem.llama.sampler import Sampler
from kvmem.llama.vocab import Vocab

__all__ = ["decode_reply"]


def decode_reply(
    memory: Memory,
    vocab: Vocab,
    sampler: Sampler,
    prompt: NDArray[np.int32],
    params: GenerateParams,
    workspace_tokens: int,
    stats: RequestStats,
    cancel: CancelToken | None,
) -> Generator[Event, None, StopReason]:
    """Yield the reply's tokens and return why it ended.

    The last token is not decoded: no one has asked what follows it.

    Raises Cancelled; the tokens yielded before stand in the history, save the last.
    """
    sampler.accept_prompt(prompt)
    reply = _Reply(memory, vocab, sampler, params, workspace_tokens, stats, cancel)
    if isinstance(memory, TieredMemory):
        reply.from_block = memory.n_blocks_of(len(prompt))
    reply.begin_drafts()
    try:
        return (yield from _decode(reply))
    finally:
        reply.judge_drafts()


def _decode(reply: "_Reply") -> Generator[Event, None, StopReason]:
    if reply.is_full:
        return "length"
    token = reply.sample(-1)
    yield reply.event(token, -1)
    while not reply.is_end(token):
        if reply.is_full:
            return "length"
        n_drafts = reply.n_drafts()
        if n_drafts:
            token = yield from reply.draft(token, n_drafts)
        else:
            reply.decode(token)
            token = reply.sample(-1)
            yield reply.event(token, -1)
    return "stop"


class _Reply:
    """The steps of one reply, each behind a token that is yielded and not decoded."""

    def __init__(
        self,
        memory: Memory,
        vocab: Vocab,
        sampler: Sampler,
        params: GenerateParams,
        workspace_tokens: int,
        stats: RequestStats,
        cancel: CancelToken | None,
    ) -> None:
        self._memory = memory
        self._vocab = vocab
        self._sampler = sampler
        self._params = params
        self._workspace_tokens = workspace_tokens
        self._stats = stats
        self._cancel = cancel
        self._times = stats.memory.times
        self._step = np.empty(1, np.int32)
        self._said_first_at = 0.0
        self._has_line_break = False
        self.from_block = 0

    # What ends it

    def is_end(self, token: int) -> bool:
        return self._vocab.is_eog(token) or token in self._params.stop_tokens

    @property
    def is_full(self) -> bool:
        """Whether no further token may come."""
        said, limit = self._stats.completion_tokens, self._params.max_tokens
        has_no_room = said > 0 and self._memory.n_tokens + 1 >= self._workspace_tokens
        return has_no_room or (limit is not None and said >= limit) or self._is_late

    @property
    def _is_late(self) -> bool:
        """Source: llama-server's server_slot, t_max_predict_ms."""
        limit_s = self._params.time_limit_s
        if limit_s is None or not self._has_line_break:
            return False
        return perf_counter() - self._said_first_at > limit_s

    # One token

    def sample(self, row: int) -> int:
        """The token behind a row of the last batch."""
        with self._times.measure("sample_s", self._memory.clock):
            token = self._sampler.sample(self._memory.context, row)
            self._sampler.accept(token)
        return token

    def event(self, token: int, row: int) -> TokenEvent:
        """Count the token, which was sampled at this row, and say it."""
        if self._stats.completion_tokens == 0:
            self._said_first_at = perf_counter()
        self._stats.completion_tokens += 1
        piece = b"" if self.is_end(token) else self._vocab.piece(token, special=False)
        self._has_line_break |= b"\n" in piece
        logprobs = None
        if self._params.n_logprobs is not None:
            logits = self._memory.context.logits(row)
            logprobs = token_logprobs(logits, token, self._params.n_logprobs, self._vocab)
        chances = None
        if self._params.n_chances is not None:
            chances = token_chances(self._sampler, token, self._params.n_chances, self._vocab)
        return TokenEvent(token, piece, logprobs, chances)

    def decode(self, token: int) -> None:
        memory = self._memory
        self._step[0] = token
        started = perf_counter()
        with self._times.measure("decode_s", memory.clock):
            if isinstance(memory, TieredMemory):
                self._make_room(memory)
                memory.decode(self._step, cancel=self._cancel, reply=True)
                self._seal(memory, memory.n_tokens - 1)
            else:
                memory.decode(self._step, cancel=self._cancel)
        if self._drafter is not None:
            self._drafter.worth.count(1, 0, perf_counter() - started)

    def _make_room(self, memory: TieredMemory) -> None:
        self._stats.memory.reply_blocks_evicted += make_reply_room(memory, self.from_block)

    @staticmethod
    def _seal(memory: TieredMemory, n_before: int) -> None:
        """Store a block that the tokens since n_before have filled."""
        if memory.n_tokens // memory.block_tokens > n_before // memory.block_tokens:
            memory.try_seal()

    # Several tokens

    @property
    def _drafter(self) -> Drafter | None:
        return self._memory.drafter if isinstance(self._memory, TieredMemory) else None

    def n_drafts(self) -> int:
        """How many proposals the next step takes.

        No more than fit beside the token without a block leaving, so that what leaves, and when,
        is the same as without drafts; and none that could not be said.
        """
        memory, drafter = self._memory, self._drafter
        if drafter is None or not isinstance(memory, TieredMemory):
            return 0
        if self._params.n_chances is not None:  # the sampler knows those of its last choice alone
            return 0
        n = min(drafter.n_max, self._workspace_tokens - memory.n_tokens - 2)
        if self._params.max_tokens is not None:
            n = min(n, self._params.max_tokens - self._stats.completion_tokens - 1)
        if n < 1:
            return 0
        with self._times.measure("decode_s", memory.clock):
            self._make_room(memory)
        n = min(n, memory.working_set.room(reply=True) - 1)
        return n if n > 0 and drafter.worth.take_turn() else 0

    def draft(self, token: int, n_drafts: int) -> Generator[Event, None, int]:
        """Decode the token with proposals behind it, and say those that are what is sampled.

        Returns the last token, which may be none of them. However this ends, what was yielded
        stands in the history, save the last.
        """
        memory, drafter = self._memory, self._drafter
        assert isinstance(memory, TieredMemory) and drafter is not None
        started = perf_counter()
        drafted_s = drafter.seconds
        with self._times.measure("decode_s", memory.clock):
            verification = Verification(memory, token, n_drafts, self._cancel)
        seconds = perf_counter() - started
        n_said = 0
        tokens: list[int] = []
        try:
            tokens = self._accept(verification.drafts)
            for row, token in enumerate(tokens):
                n_said += 1
                yield self.event(token, row)
        finally:
            n_before = memory.n_tokens
            started = perf_counter()
            with self._times.measure("decode_s", memory.clock):
                verification.keep(max(1, n_said))
                self._seal(memory, n_before)
            drafter.worth.count(len(tokens), n_drafts, seconds + perf_counter() - started)
            self._times.decode_s -= drafter.seconds - drafted_s
            self._times.draft_s += drafter.seconds - drafted_s
        return token

    def begin_drafts(self) -> None:
        """What the head has read up to here is a part of what drafts cost."""
        if self._drafter is not None:
            self._drafter.begin_reply()

    def judge_drafts(self) -> None:
        """Let drafts rest where they lost, and say so."""
        if self._drafter is not None and isinstance(self._memory, TieredMemory):
            note = self._drafter.end_reply()
            if note:
                self._memory.note(note)

    def _accept(self, drafts: list[int]) -> list[int]:
        """What is sampled at each row, up to the first that its proposal does not match.

        Each token is drawn as it would be without drafts, so its distribution is the same.
        """
        tokens: list[int] = []
        for row, draft in enumerate([*drafts, -1]):
            tokens.append(self.sample(row))
            if tokens[-1] != draft or self.is_end(draft):
                break
        self._stats.draft_n += len(drafts)
        self._stats.draft_n_accepted += sum(a == b for a, b in zip(tokens, drafts, strict=False))
        return tokens

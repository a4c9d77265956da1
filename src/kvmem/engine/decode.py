"""The reply.

One token after the other, until something ends it. The pool and the reserve never do.
"""

from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.events import Event, StopReason, TokenEvent
from kvmem.engine.logprobs import token_logprobs
from kvmem.engine.memory import Memory, TieredMemory
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.stats import RequestStats
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
    times = stats.memory.times
    sampler.accept_prompt(prompt)
    reply_from_block = 0
    if isinstance(memory, TieredMemory):
        reply_from_block = memory.n_blocks_of(len(prompt))
    step = np.empty(1, np.int32)
    while True:
        if params.max_tokens is not None and stats.completion_tokens >= params.max_tokens:
            return "length"
        with memory.phase(times, "sample_s"):
            token = sampler.sample(memory.context)
            sampler.accept(token)
        stats.completion_tokens += 1
        ends = vocab.is_eog(token) or token in params.stop_tokens
        logprobs = None
        if params.n_logprobs is not None:
            logprobs = token_logprobs(memory.context.logits(-1), token, params.n_logprobs, vocab)
        yield TokenEvent(token, b"" if ends else vocab.piece(token, special=False), logprobs)
        if ends:
            return "stop"
        if memory.n_tokens + 1 >= workspace_tokens or stats.completion_tokens == params.max_tokens:
            return "length"
        step[0] = token
        with memory.phase(times, "decode_s"):
            if isinstance(memory, TieredMemory):
                stats.memory.reply_blocks_evicted += memory.make_reply_room(reply_from_block)
                memory.decode(step, cancel=cancel, reply=True)
                if memory.n_tokens % memory.block_tokens == 0:
                    memory.try_seal()
            else:
                memory.decode(step, cancel=cancel)

"""What a request did, for the reply, the log and the benches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvmem.kv.transfer import Transfer

__all__ = ["ConversationUse", "Decision", "MemoryReport", "PhaseTimes", "RequestStats"]

# How the working set of a request was found; docs/memory.md says when each one happens.
Decision = Literal[
    "off",  # plain llama.cpp
    "all_resident",  # the whole history fits in the budget: nothing to choose
    "keep_selected",  # what was chosen for this question is still visible, and there is room
    "cached_query",  # chosen before the new tokens were read, by the question that they belong to
    "early_query",  # chosen on the way, by a question that stands before the part read last
    "unchanged_selection",  # the first pass had seen what was then chosen
    "query_replay",  # the question was read again over the chosen blocks
    "replay_skipped",  # it should have been, but there was no state to go back to
    "recency",  # no query is wanted: the newest blocks
]


# How the conversation of a request was found; docs/memory.md has the rules.
ConversationUse = Literal[
    "same",  # it was on the device
    "switched",  # it was on the host
    "branched",  # it begins like another one, which stays as it is
    "new",  # none begins like it
]


@dataclass(slots=True, kw_only=True)
class PhaseTimes:
    """Seconds of each phase; they add up to the time of the request, `other_s` being the rest.

    Blocks and states are stored between the batches of the other phases, and counted once: here.
    """

    switch_s: float = 0.0  # finding the conversation, and bringing it to the device
    read_s: float = 0.0  # decoding of new prompt tokens, once each
    query_s: float = 0.0  # the first pass over the query, while Q is read
    score_s: float = 0.0  # waiting for summaries, scoring, choosing
    move_s: float = 0.0  # copies between host and device for the selection
    replay_s: float = 0.0  # the query's second pass
    store_s: float = 0.0  # copies of completed blocks to the host
    checkpoint_s: float = 0.0  # saving and restoring of recurrent states
    decode_s: float = 0.0  # reply tokens
    draft_s: float = 0.0  # proposals for them, by the draft head
    sample_s: float = 0.0
    other_s: float = 0.0

    @property
    def counted_s(self) -> float:
        """All phases but `other_s`."""
        phases: dict[str, float] = asdict(self)
        return sum(phases.values()) - self.other_s

    @contextmanager
    def measure(self, phase: str, clock: Callable[[], float]) -> Iterator[None]:
        """Add the time inside to this field, however it ends."""
        started = clock()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + clock() - started)


@dataclass(slots=True, kw_only=True)
class MemoryReport:
    """What the memory did for one request."""

    decision: Decision = "off"
    reason: str = ""
    scorer: str = ""
    scoring: str = ""  # which pairs and slices
    blocks: list[int] = field(default_factory=list)  # visible to the reply's first token, ascending
    n_blocks: int = 0  # of the history at that time
    conversation: int = 0  # its number, from 1; 0 without KV memory
    conversation_use: ConversationUse = "same"
    n_conversations: int = 0  # kept, this one included
    reused_tokens: int = 0
    read_tokens: int = 0
    replayed_tokens: int = 0
    blocks_in: int = 0
    blocks_out: int = 0
    blocks_kept: int = 0
    blocks_moved: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    reply_blocks_evicted: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    checkpoints: list[int] = field(default_factory=list)  # tokens that each one stands behind
    checkpoint_bytes: int = 0  # of host_bytes
    notes: list[str] = field(default_factory=list)  # what should not stay unsaid
    times: PhaseTimes = field(default_factory=PhaseTimes)

    def count(self, transfer: Transfer) -> None:
        """What moved on top of what did before."""
        self.blocks_in += transfer.n_in
        self.blocks_out += transfer.n_out
        self.blocks_kept += transfer.n_kept
        self.blocks_moved += transfer.n_moved
        self.bytes_in += transfer.bytes_in
        self.bytes_out += transfer.bytes_out

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Counts and times of one request.

    prompt_tokens: the whole prompt. cached_tokens: those of it that were not read again.
    prompt_s: from the start to the first sampled token, replay and retrieval included.
    decode_s: from there to the end.
    prompt_times: the phases of prompt_s alone; they add up to it.
    draft_n, draft_n_accepted: proposals of the draft head, and those that became reply tokens.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    prompt_times: PhaseTimes = field(default_factory=PhaseTimes)
    memory: MemoryReport = field(default_factory=MemoryReport)

    @property
    def prompt_per_s(self) -> float:
        """Prompt tokens read per second."""
        read = self.prompt_tokens - self.cached_tokens
        return read / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def decode_per_s(self) -> float:
        """Reply tokens per second after the first."""
        steps = max(0, self.completion_tokens - 1)
        return steps / self.decode_s if self.decode_s > 0 else 0.0

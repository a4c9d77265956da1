"""One conversation: its history, what scores it, and what was asked last."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.checkpoint import Checkpoints
from kvmem.engine.prompt import Span
from kvmem.kv.history import History
from kvmem.kv.lexical import LexicalIndex
from kvmem.kv.query import MAX_ROWS, Query, pick_evenly
from kvmem.kv.summary import KeySummaries

__all__ = ["Conversation", "LastPrompt", "Question", "Window"]

I32 = NDArray[np.int32]

MAX_KNOWN = 3


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose Q is known.

    rows: int32, the tokens that the rows of the query are of, counted over the prompt. prefix: all
    tokens up to its end.
    """

    query: Query
    rows: I32
    span: Span
    prefix: I32

    @property
    def is_whole(self) -> bool:
        """Whether all of its tokens ask, and not its end alone."""
        return len(self.query.tokens) == len(self.span)

    def extend(self, query: Query, rows: I32, start: int) -> tuple[Query, I32]:
        """The Q of a question that begins as this whole one does, and from the token `start` on
        asks with `query`, whose rows are of the tokens `rows`. Returns it and the tokens of its
        rows.
        """
        n_kept = int(np.searchsorted(self.rows, start))
        head = self.query.take(np.arange(n_kept), start - self.span.start)
        whole = head.join(query)
        tokens = np.concatenate([self.rows[:n_kept], rows])
        chosen = pick_evenly(len(tokens), MAX_ROWS)
        return whole.take(chosen, len(whole.tokens)), tokens[chosen]


@dataclass(frozen=True, slots=True)
class Window:
    """What the reply to a prompt could see at its start. blocks: int32, ascending."""

    prompt: I32
    question: Question | None
    blocks: I32
    n_blocks: int


@dataclass(frozen=True, slots=True)
class LastPrompt:
    """Where the newest prompt of a conversation had what, in tokens.

    messages_end: the end of its last message; behind it stands only what opens the reply.
    may_change_from: a prompt that differs from here on is most likely this one gone on: its last
        message was replaced, or what follows the last question was written anew.
    """

    messages_end: int = 0
    may_change_from: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """Everything that leaves the device with a history, and comes back with it.

    question: the one that the newest window is of. known: those whose Q is at hand, the newest
    first: an agent may put a reminder in the place of the last user message, and take it back.
    client_id: what a client calls it; None if it did not say. used: when, on the clock of requests.
    is_superseded: a branch went on where this one stopped, so it is the first to leave.
    """

    history: History
    summaries: KeySummaries
    lexical: LexicalIndex
    checkpoints: Checkpoints
    question: Question | None = None
    known: tuple[Question, ...] = ()
    window: Window | None = None
    client_id: str | None = None
    number: int = 0
    used: int = 0
    is_superseded: bool = False
    last: LastPrompt = field(default_factory=LastPrompt)

    @property
    def n_tokens(self) -> int:
        return self.history.n_tokens

    def ask(self, question: Question) -> None:
        """It is the one that is asked now, and again if all of it is known."""
        self.question = question
        if not question.is_whole:
            return
        others = tuple(one for one in self.known if one.span != question.span)
        self.known = (question, *others)[:MAX_KNOWN]

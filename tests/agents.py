"""Seeded agents: what they do to their history, turn by turn, and how a template renders it."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from engines import ENDLESS
from stock import TIE

from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.prompt import Prompt, RoleSpan, Span
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.session import Session
from kvmem.engine.stats import RequestStats

Tokens = tuple[int, ...]
Role = Literal["system", "user", "assistant", "tool"]

OPENING: dict[Role, Tokens] = {
    "system": (1, 2, 3), "user": (1, 4, 3), "assistant": (1, 5, 3), "tool": (1, 6, 3)
}  # fmt: skip
"""What a template puts in front of a message."""
COMPACT_AT = 1500
"""Tokens of history at which a summary takes its place."""


@dataclass(frozen=True, slots=True)
class Message:
    """thinking: in front of the text, as long as no user has spoken after it."""

    role: Role
    text: Tokens
    thinking: Tokens = ()


def render(messages: list[Message]) -> Prompt:
    """As a template does it. Thinking is dropped from all before the last user message."""
    last_user = max((i for i, one in enumerate(messages) if one.role == "user"), default=0)
    tokens: list[int] = []
    spans = []
    for i, one in enumerate(messages):
        tokens += OPENING[one.role]
        text = one.thinking + one.text if i > last_user else one.text
        spans.append(RoleSpan(one.role, Span(len(tokens), len(tokens) + len(text))))
        tokens += text
    users = [item.span for item in spans if item.role == "user"]
    return Prompt(
        tokens=(*tokens, *OPENING["assistant"]),
        spans=tuple(spans),
        query_span=users[-1] if users else None,
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """leads: without drafts, by how much the best logit stood before the next one at each token."""

    tokens: Tokens
    leads: tuple[float, ...]
    done: Done

    @property
    def stats(self) -> RequestStats:
        return self.done.stats


def generate(session: Session, prompt: Prompt) -> Reply:
    tokens, leads = [], []
    params = GenerateParams(sampling=ENDLESS, max_tokens=8)
    for event in session.generate(prompt, params):
        if isinstance(event, TokenEvent):
            second, best = np.partition(session.memory.context.logits(-1), -2)[-2:]
            tokens.append(event.token)
            leads.append(float(best - second))
    assert isinstance(event, Done)
    return Reply(tuple(tokens), tuple(leads), event)


def require_tie_in_sight(reply: Reply, expected: Reply) -> None:
    """AssertionError unless they part where the twin, without drafts, had two tokens side by side.

    What was read in other pieces is rounded otherwise; stock llama.cpp sees more than they did.
    """
    pairs = zip(reply.tokens, expected.tokens, strict=True)
    at = next(i for i, (one, other) in enumerate(pairs) if one != other)
    assert expected.leads[at] < TIE, f"token {at}"


@dataclass
class Agent:
    """Its turns are drawn, and depend on the replies that it hears alone."""

    seed: int
    history: list[Message] = field(default_factory=list)
    reminder: Message | None = None

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self.history = [Message("system", self._text(80, 160))]

    def _text(self, low: int, high: int) -> Tokens:
        n = int(self._random.integers(low, high))
        return tuple(self._random.integers(10, 250, n).tolist())

    def next(self) -> list[Message]:
        """The messages of the next request."""
        random = self._random
        if self.reminder is not None and random.random() < 0.5:  # as the assistant's: else dropped
            self.history.insert(-1, Message("assistant", self.reminder.text))
        self.reminder = None
        if len(render(self.history).tokens) > COMPACT_AT:
            if self.history[-1].role == "user":  # its summary has come: it takes all their place
                self.history = [self.history[0], Message("user", self._text(60, 120))]
            else:
                self.history.append(Message("user", self._text(8, 16)))
            return self.history
        if len(self.history) == 1 or random.random() < 0.3:
            self.history.append(Message("user", self._text(5, 40)))
        else:
            self.history.append(Message("tool", self._text(10, 80)))
        if random.random() < 0.2:
            self.reminder = Message("user", self._text(10, 30))
            return [*self.history, self.reminder]
        return self.history

    def hear(self, reply: Tokens) -> None:
        """The reply becomes history: trimmed, or with thinking in it that is dropped later."""
        if len(render(self.history).tokens) > COMPACT_AT and self.history[-1].role == "user":
            return  # a summary
        how = self._random.random()
        if how < 0.2:
            reply = reply[int(self._random.integers(0, 2)) : -int(self._random.integers(1, 3))]
        n_thinking = 4 if how > 0.6 else 0
        self.history.append(Message("assistant", reply[n_thinking:], reply[:n_thinking]))

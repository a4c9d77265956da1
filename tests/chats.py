"""Clients of a session that talk in turns, each with a conversation of its own."""

from dataclasses import dataclass, field

from engines import ENDLESS, Reply

from kvmem.engine.conversations import Conversations
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.prompt import Prompt, RoleSpan, Span
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.session import Session
from kvmem.llama.context import CancelToken

MANY = {"conversations": 8, "type_k": "f32", "type_v": "f32"}
WHOLE = {**MANY, "budget_tokens": 2048, "workspace_tokens": 2048}
OPEN = (1, 2, 3)  # what a template puts in front of a message


def conversations_of(session: Session) -> Conversations:
    assert session.conversations is not None
    return session.conversations


@dataclass
class Chat:
    """A client's side of one conversation: messages as tokens, resent in full each turn."""

    system: tuple[int, ...]
    client_id: str | None = None
    messages: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def prompt(self) -> Prompt:
        tokens: list[int] = []
        spans = []
        for role, text in [("system", self.system), *self.messages]:
            tokens += OPEN
            spans.append(RoleSpan(role, Span(len(tokens), len(tokens) + len(text))))
            tokens += text
        users = [item.span for item in spans if item.role == "user"]
        return Prompt(
            tokens=(*tokens, *OPEN),
            spans=tuple(spans),
            query_span=users[-1] if users else None,
            conversation_id=self.client_id,
        )

    def ask(
        self,
        session: Session,
        text: tuple[int, ...],
        *,
        max_tokens: int = 8,
        cancel: CancelToken | None = None,
    ) -> Reply:
        """One turn: the question, and the reply as the model gave it."""
        self.messages.append(("user", text))
        reply = generate(session, self.prompt(), max_tokens, cancel)
        self.messages.append(("assistant", reply.tokens))
        return reply


def generate(
    session: Session, prompt: Prompt, max_tokens: int = 8, cancel: CancelToken | None = None
) -> Reply:
    params = GenerateParams(sampling=ENDLESS, max_tokens=max_tokens)
    events = list(session.generate(prompt, params, cancel=cancel))
    done = events[-1]
    assert isinstance(done, Done)
    return Reply(tuple(e.token for e in events if isinstance(e, TokenEvent)), done)

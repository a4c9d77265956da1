"""Requests for chats, and how a template renders them."""

from typing import Any

from kvmem.chat.render import ChatRenderer, RenderedChat
from kvmem.chat.request import parse_chat_request
from kvmem.engine.prompt import Span
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def user(content: Any) -> dict[str, Any]:
    return message("user", content)


def tool(name: str, /, strict: bool = False, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


SHORT = {"type": "string", "maxLength": 3}
WIDE = {"type": "integer", "minimum": 2**63 - 808, "maximum": 2**63 - 1}
NEVER = {"type": "string", "minLength": 5, "maxLength": 3}
LOOK = tool("look", place={"type": "string"})
OTHER = tool("other", n={"type": "integer"})


def render(vocab: Vocab, *messages: Any, source: str = "", **fields: Any) -> RenderedChat:
    with ChatTemplate(vocab.model, source) as template:
        request = parse_chat_request({"messages": list(messages) or [user("hi")], **fields})
        return ChatRenderer(template, vocab).render(request)


def text_of(vocab: Vocab, rendered: RenderedChat, span: Span | None) -> str:
    assert span is not None, rendered.prompt.query_fallback
    return vocab.detokenize(rendered.prompt.tokens[span.start : span.stop])


def constraint(rendered: RenderedChat) -> dict[str, Any]:
    found = rendered.sampling.extra["constraint"]
    assert isinstance(found, dict)
    return found

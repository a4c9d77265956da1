"""Endpoints that count and show tokens: nothing is generated, so they answer at any time."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvmem.chat.fields import FieldError, read_bool, read_list
from kvmem.chat.request import RequestDefaults, parse_chat_request
from kvmem.chat.text import (
    MixedText,
    Tokenizer,
    check_tokens,
    read_mixed_text,
    tokenize_mixed,
)
from kvmem.server.body import read_json, read_object_body
from kvmem.server.worker import EngineWorker

__all__ = ["TokenApi"]


class TokenApi:
    """The handlers, and what they share."""

    def __init__(self, worker: EngineWorker, defaults: RequestDefaults) -> None:
        self._worker = worker
        self._defaults = defaults

    def routes(self) -> list[Route]:
        table = (
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
            ("/apply-template", self.apply_template),
            ("/chat/completions/input_tokens", self.count),
            ("/v1/chat/completions/input_tokens", self.count),
        )
        return [Route(path, handler, methods=["POST"]) for path, handler in table]

    async def tokenize(self, request: Request) -> Response:
        """Token ids of `content`; with `with_pieces`, beside their texts."""
        body = await read_object_body(request, self._worker)
        tokenizer = self._worker.backend.tokenizer
        if body.get("content") is None:
            return JSONResponse({"tokens": []})
        special = read_bool(body, "parse_special")
        return await self._worker.in_thread(
            _tokenize,
            read_mixed_text(body["content"], "content"),
            tokenizer,
            add_special=read_bool(body, "add_special") or False,
            parse_special=special is not False,
            with_pieces=read_bool(body, "with_pieces") or False,
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`."""
        body = await read_object_body(request, self._worker)
        tokens = read_list(body, "tokens") or []
        return await self._worker.in_thread(_detokenize, tokens, self._worker.backend.tokenizer)

    async def apply_template(self, request: Request) -> Response:
        """The prompt that a chat request would give, as text."""
        asked = parse_chat_request(await read_json(request, self._worker), self._defaults)
        rendered = await self._worker.in_thread(self._worker.backend.render, asked)
        return JSONResponse({"prompt": rendered.text})

    async def count(self, request: Request) -> Response:
        """How many tokens the prompt of a chat request has, as `usage` would count them."""
        asked = parse_chat_request(await read_json(request, self._worker), self._defaults)
        rendered = await self._worker.in_thread(self._worker.backend.render, asked)
        n_tokens = len(rendered.prompt.tokens)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": n_tokens})


def _tokenize(
    text: MixedText,
    tokenizer: Tokenizer,
    *,
    add_special: bool,
    parse_special: bool,
    with_pieces: bool,
) -> Response:
    """In a thread, as the next one: a book takes seconds."""
    tokens = tokenize_mixed(
        text, tokenizer, "content", add_special=add_special, parse_special=parse_special
    )
    if not with_pieces:
        return JSONResponse({"tokens": tokens})
    shown = [{"id": token, "piece": _shown(tokenizer.piece(token))} for token in tokens]
    return JSONResponse({"tokens": shown})


def _detokenize(tokens: list[Any], tokenizer: Tokenizer) -> Response:
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise FieldError("tokens", "must be a list of token ids")
    pieces = [tokenizer.piece(token) for token in check_tokens(tokens, tokenizer, "tokens")]
    return JSONResponse({"content": b"".join(pieces).decode("utf-8", "replace")})


def _shown(piece: bytes) -> Any:
    """As text, or as a list of bytes where it is no UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)

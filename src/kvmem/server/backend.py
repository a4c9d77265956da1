"""What the server serves: an engine with its chat template, or a test's stand-in."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kvmem.chat.completion import (
    CompletionRequest,
    RenderedCompletion,
    render_completion,
)
from kvmem.chat.render import ChatRenderer, RenderedChat
from kvmem.chat.request import ChatRequest
from kvmem.chat.text import Tokenizer
from kvmem.config import EngineConfig
from kvmem.engine.engine import Engine
from kvmem.engine.events import Event
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.llama.context import CancelToken
from kvmem.llama.template import ChatTemplate

__all__ = ["Backend", "EngineBackend"]


class Backend(Protocol):
    """`generate` runs in one thread, one call at a time; all else in any thread, at any time."""

    @property
    def n_ctx(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def render(self, request: ChatRequest) -> RenderedChat: ...
    def render_completion(self, request: CompletionRequest) -> RenderedCompletion: ...
    def generate(
        self, prompt: Prompt, params: GenerateParams, cancel: CancelToken
    ) -> Iterator[Event]: ...
    def describe(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class EngineBackend:
    """One engine with one session: the history that its device pool holds."""

    def __init__(
        self, config: EngineConfig, *, progress: Callable[[float], object] | None = None
    ) -> None:
        self._engine = Engine(config, progress=progress)
        try:
            self._template = ChatTemplate(self._engine.model, config.model.chat_template or "")
            self._renderer = ChatRenderer(self._template, self._engine.vocab)
            self._session = self._engine.session()
        except BaseException:
            self._engine.close()
            raise

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def n_ctx(self) -> int:
        return self._engine.n_ctx

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.vocab

    def render(self, request: ChatRequest) -> RenderedChat:
        return self._renderer.render(request)

    def render_completion(self, request: CompletionRequest) -> RenderedCompletion:
        return render_completion(request, self._engine.vocab)

    def generate(
        self, prompt: Prompt, params: GenerateParams, cancel: CancelToken
    ) -> Iterator[Event]:
        return self._session.generate(prompt, params, cancel=cancel)

    def describe(self) -> dict[str, Any]:
        """The `meta` object of /v1/models."""
        engine = self._engine
        return {
            "architecture": engine.model.architecture,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": engine.model.n_ctx_train,
            "n_embd": engine.model.n_embd,
            "n_params": engine.model.n_params,
            "n_vocab": engine.vocab.n_tokens,
            "size": engine.model.size_bytes,
        }

    def close(self) -> None:
        """Free template, session and engine, in this order. A second call does nothing."""
        self._template.close()
        self._engine.close()

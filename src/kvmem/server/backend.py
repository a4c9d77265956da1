"""What the server serves: an engine with its chat template, or a test's stand-in."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvmem.chat.completion import (
    CompletionRequest,
    RenderedCompletion,
    render_completion,
)
from kvmem.chat.render import ChatRenderer, RenderedChat
from kvmem.chat.request import ChatRequest, RequestDefaults, parse_chat_request
from kvmem.chat.text import Tokenizer
from kvmem.chat.token_bound import TokenBound
from kvmem.config import EngineConfig, ModelConfig
from kvmem.engine.conversations import ConversationInfo
from kvmem.engine.engine import Engine
from kvmem.engine.events import Event
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import RequestError
from kvmem.llama.context import CancelToken
from kvmem.llama.model import Model
from kvmem.llama.sampler import describe_sampling
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

__all__ = ["Backend", "EngineBackend", "check_template"]


class Backend(Protocol):
    """`generate` runs in one thread, one call at a time; all else in any thread, at any time."""

    @property
    def n_ctx(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def render(self, request: ChatRequest, *, limit_tokens: int | None = None) -> RenderedChat: ...
    def render_completion(self, request: CompletionRequest) -> RenderedCompletion: ...
    def generate(
        self, prompt: Prompt, params: GenerateParams, cancel: CancelToken
    ) -> Iterator[Event]: ...
    def describe(self) -> dict[str, Any]: ...
    def default_sampling(self, defaults: RequestDefaults) -> dict[str, Any]: ...
    def conversations(self) -> Sequence[ConversationInfo]: ...
    def close(self) -> None: ...


def check_template(config: ModelConfig) -> None:
    """Raises ModelError: the chat template cannot be used. Maps the model and computes nothing."""
    with Model(config.path, n_gpu_layers=0, use_mmap=True) as model:
        ChatTemplate(model, config.chat_template or "")


class EngineBackend:
    """One engine with one session: the conversations that take turns on its device."""

    def __init__(
        self, config: EngineConfig, *, progress: Callable[[float], object] | None = None
    ) -> None:
        self._drafts = config.draft.enabled
        self._engine = Engine(config, progress=progress)
        try:
            self._template = ChatTemplate(self._engine.model, config.model.chat_template or "")
            self._source = (
                config.model.chat_template
                or self._engine.model.metadata("tokenizer.chat_template")
                or ""
            )
            self._renderer = ChatRenderer(self._template, self._engine.vocab)
            self._bound = TokenBound(self._engine.vocab)
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

    def render(self, request: ChatRequest, *, limit_tokens: int | None = None) -> RenderedChat:
        return self._renderer.render(request, limit_tokens=limit_tokens)

    def render_completion(self, request: CompletionRequest) -> RenderedCompletion:
        for text in request.prompts:
            for part in text:
                if isinstance(part, str):
                    self._bound.check(part, self.n_ctx)
        return render_completion(request, self._engine.vocab)

    def generate(
        self, prompt: Prompt, params: GenerateParams, cancel: CancelToken
    ) -> Iterator[Event]:
        return self._session.generate(prompt, params, cancel=cancel)

    def describe(self) -> dict[str, Any]:
        """What is known of the model: for /v1/models and /props."""
        engine = self._engine
        vocab = engine.vocab
        return {
            "path": str(engine.model.path),
            "chat_template": self._source,
            "bos_token": _text(vocab, vocab.bos),
            "eos_token": _text(vocab, vocab.eos),
            "architecture": engine.model.architecture,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": engine.model.n_ctx_train,
            "n_embd": engine.model.n_embd,
            "n_params": engine.model.n_params,
            "n_vocab": vocab.n_tokens,
            "vocab_type": vocab.type,
            "size": engine.model.size_bytes,
            "speculative": self._drafts,
        }

    def default_sampling(self, defaults: RequestDefaults) -> dict[str, Any]:
        """How a chat is sampled that says nothing, under llama-server's names."""
        question = {"messages": [{"role": "user", "content": "Hello"}]}
        try:
            sampling = self.render(parse_chat_request(question, defaults)).sampling
        except RequestError:  # a template of another kind: then no thinking state has a say
            sampling = defaults.sampling
        return describe_sampling(self._engine.model, sampling.as_dict())

    def conversations(self) -> Sequence[ConversationInfo]:
        """Those that are kept, as they were after the newest request."""
        kept = self._session.conversations
        return () if kept is None else kept.infos

    def close(self) -> None:
        """Free template, session and engine, in this order. A second call does nothing."""
        self._template.close()
        self._engine.close()


def _text(vocab: Vocab, token: int) -> str:
    return "" if token < 0 else vocab.piece(token).decode("utf-8", "replace")

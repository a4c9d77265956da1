"""`kvmem run`: one prompt, or a chat in the terminal."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from kvmem.chat.reply import Delta, ReplyMessage
from kvmem.chat.request import RequestDefaults, parse_chat_request
from kvmem.cli import logs
from kvmem.cli.options import EngineOptions
from kvmem.cli.sampling_options import SamplingOptions
from kvmem.cli.takes import takes
from kvmem.engine.events import Done, PromptProgress, TokenEvent
from kvmem.engine.stats import RequestStats
from kvmem.errors import ConfigError, RequestError
from kvmem.llama.context import CancelToken
from kvmem.server.backend import Backend, EngineBackend
from kvmem.server.sse import timings_of, usage_of

__all__ = ["Chat", "run"]


class Chat:
    """A conversation with the model. The history grows with each turn that succeeds."""

    def __init__(
        self, backend: Backend, defaults: RequestDefaults, *, system: str | None = None
    ) -> None:
        self._backend = backend
        self._defaults = defaults
        self._messages: list[dict[str, Any]] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        self.done: Done | None = None

    def ask(self, text: str) -> Iterator[Delta]:
        """The reply in pieces. After the last one, `done` says how it went."""
        messages = [*self._messages, {"role": "user", "content": text}]
        asked = parse_chat_request({"messages": messages}, self._defaults)
        rendered = self._backend.render(asked)
        reader = rendered.reader()
        cancel = CancelToken()
        message = ReplyMessage()
        for event in self._backend.generate(rendered.prompt, rendered.params(), cancel):
            delta = Delta()
            if isinstance(event, TokenEvent) and not reader.is_stopped:
                delta = reader.feed([event])
                if reader.is_stopped:
                    cancel.set()
            elif isinstance(event, Done):
                delta = reader.finish(event.reason)
                self.done = event
            elif isinstance(event, PromptProgress):
                _show_progress(event)
            message.add(delta)
            if delta:
                yield delta
        answer = {"role": "assistant", "content": message.content}
        if message.reasoning:
            answer["reasoning_content"] = message.reasoning
        self._messages = [*messages, answer]


@takes(EngineOptions, SamplingOptions)
def run(
    options: EngineOptions,
    sampling: SamplingOptions,
    prompt: Annotated[str | None, Option("-p", "--prompt", help="The prompt.")] = None,
    file: Annotated[
        Path | None, Option("-f", "--file", help="A file with the prompt, - for stdin.")
    ] = None,
    system: Annotated[str | None, Option("--system", help="A system message before it.")] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print an object with text, usage, timings and memory.")
    ] = False,
    verbose: Annotated[bool, Option("-v", "--verbose", help="Log to stderr.")] = False,
) -> None:
    """Answer one prompt (-p, -f, or piped in), or chat in the terminal without one."""
    logs.set_up(verbose=verbose)
    config = options.config()
    defaults = sampling.defaults()
    for name, given in (("prompt", prompt), ("system", system)):
        _in_utf8(name, "other bytes", given or "")
    text = _prompt_of(prompt, file)
    if text is None and as_json:
        raise ConfigError("json", "given", "used with a prompt")
    if text is not None and not text.strip():
        raise ConfigError("prompt", "empty", "some text")
    backend = EngineBackend(config)
    try:
        chat = Chat(backend, defaults, system=system)
        if text is None:
            _converse(chat)
        else:
            _answer(chat, text, as_json=as_json)
    finally:
        backend.close()


def _prompt_of(prompt: str | None, file: Path | None) -> str | None:
    """The prompt, from where it was given; None for a chat."""
    if prompt is not None and file is not None:
        raise ConfigError("file", file, "given without --prompt")
    if prompt is not None:
        return prompt
    if file is not None and str(file) != "-":
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("file", file, f"a readable text file ({error})") from None
    if file is not None or not sys.stdin.isatty():
        try:
            text = sys.stdin.read()
        except UnicodeError as error:
            raise ConfigError("file", "-", f"text in UTF-8 ({error})") from None
        return _in_utf8("file", "-", text)
    return None


def _in_utf8(setting: str, value: str, text: str) -> str:
    """The same text. ConfigError: in arguments, and where the locale is not UTF-8, other bytes have
    come in as surrogates.
    """
    try:
        text.encode()
    except UnicodeError as error:
        raise ConfigError(setting, value, f"text in UTF-8 ({error})") from None
    return text


def _answer(chat: Chat, text: str, *, as_json: bool) -> None:
    message = ReplyMessage()
    for delta in chat.ask(text):
        message.add(delta)
        if not as_json:
            _print(delta)
    assert chat.done is not None
    stats = chat.done.stats
    if as_json:
        report = {
            "text": message.content,
            "reasoning": message.reasoning,
            "finish_reason": chat.done.reason,
            "usage": usage_of(stats),
            "timings": timings_of(stats),
            "kvmem": stats.memory.as_dict(),
        }
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        print()
        print(_summary(stats), file=sys.stderr)


def _converse(chat: Chat) -> None:
    """Until end of input. An interrupt ends a reply; at the question it ends the chat."""
    print("Ctrl-D ends the chat, Ctrl-C a reply.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        if not text.strip():
            continue
        try:
            for delta in chat.ask(text):
                _print(delta)
            print()
            assert chat.done is not None
            print(_summary(chat.done.stats), file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(interrupted)", file=sys.stderr)
        except RequestError as error:
            print(f"error: {error}; try a shorter text or a new chat", file=sys.stderr)


def _print(delta: Delta) -> None:
    """The answer goes to stdout, thinking beside it."""
    print(delta.reasoning, end="", file=sys.stderr, flush=True)
    print(delta.content, end="", flush=True)


def _show_progress(event: PromptProgress) -> None:
    """On a terminal, how far the reading is, on one line that goes away."""
    if not sys.stderr.isatty() or event.n_total < 512:
        return
    if event.n_done < event.n_total:
        print(f"\rreading {event.n_done:,} of {event.n_total:,} tokens", end="", file=sys.stderr)
    else:
        print("\r\033[K", end="", file=sys.stderr)


def _summary(stats: RequestStats) -> str:
    read = stats.prompt_tokens - stats.cached_tokens
    return (
        f"[{stats.prompt_tokens} prompt tokens, {read} read at {stats.prompt_per_s:.0f}/s; "
        f"{stats.completion_tokens} reply tokens at {stats.decode_per_s:.0f}/s; "
        f"memory: {stats.memory.decision}]"
    )

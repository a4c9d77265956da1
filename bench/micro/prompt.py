"""What a long conversation costs on the host before the engine begins, in CPU milliseconds.

    python bench/micro/prompt.py model.gguf [--template FILE] [--messages 402] [--tokens 206000]

Each round asks what the round before asked, and one question more, as an agent does: `first` knows
nothing of it, `next` is the median of the rounds after.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any, TypeVar

import numpy as np

from kvmem.bench.generators.harbor import Harbor
from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.llama.model import Model
from kvmem.llama.sampler import Sampler
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--template", type=Path, help="another chat template than the model's")
    parser.add_argument("--messages", type=int, default=402)
    parser.add_argument("--tokens", type=int, default=206_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    source = options.template.read_text(encoding="utf-8") if options.template else ""
    with Model(options.model, n_gpu_layers=0) as model, ChatTemplate(model, source) as template:
        vocab = Vocab(model)
        messages = conversation(vocab, options.messages, options.tokens)
        renderer = ChatRenderer(template, vocab)
        measured: dict[str, list[float]] = {}
        n_tokens = 0
        for turn in range(options.rounds + 1):
            n_tokens = ask(model, renderer, messages, measured)
            messages.append({"role": "assistant", "content": f"Answer {turn}."})
            messages.append({"role": "user", "content": f"And what of number {turn}?"})
    print(f"{len(messages)} messages, {n_tokens} tokens, n = {options.rounds}, CPU ms")
    for what, seconds in measured.items():
        print(f"{what:28}{1e3 * seconds[0]:9.1f}{1e3 * statistics.median(seconds[1:]):9.1f}")
    totals = [sum(turn) for turn in zip(*measured.values(), strict=True)]
    print(f"{'all':28}{1e3 * totals[0]:9.1f}{1e3 * statistics.median(totals[1:]):9.1f}")


def conversation(vocab: Vocab, n_messages: int, n_tokens: int) -> list[dict[str, Any]]:
    """Text of the demo's generator; about n_tokens in all."""
    rng = random.Random(0)
    text = ""
    while len(text) < 8 * n_tokens:
        text += "\n".join("".join(turn.pieces) for turn in Harbor().turns(rng))
    per_token = len(text[:100_000]) / len(vocab.tokenize(text[:100_000]))
    size = int(per_token * (n_tokens / n_messages - 5))
    roles = ["user", "assistant"]
    return [
        {"role": roles[i % 2], "content": text[i * size : (i + 1) * size]}
        for i in range(n_messages - 1)
    ] + [{"role": "user", "content": text[-size:]}]


def ask(
    model: Model,
    renderer: ChatRenderer,
    messages: list[dict[str, Any]],
    measured: dict[str, list[float]],
) -> int:
    """One request, from its body to the sampler. Returns the tokens of its prompt."""

    def timed(what: str, step: Callable[[], T]) -> T:
        started = process_time()
        result = step()
        measured.setdefault(what, []).append(process_time() - started)
        return result

    sent = json.dumps({"messages": messages}).encode()
    body = timed("JSON", lambda: json.loads(sent))
    request = timed("fields", lambda: parse_chat_request(body))
    rendered = timed("text, tokens, messages", lambda: renderer.render(request))
    tokens = timed("as an array", lambda: np.asarray(rendered.prompt.tokens, np.int32))
    with Sampler(model, rendered.sampling.as_dict()) as sampler:
        timed("the sampler's penalties", lambda: sampler.accept_prompt(tokens))
    assert rendered.prompt.query_span is not None, rendered.prompt.query_fallback
    return len(tokens)


if __name__ == "__main__":
    main()

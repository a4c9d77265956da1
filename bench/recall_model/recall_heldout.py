"""Ask the recall model its held-out questions through kvmem: full cache, quarter budget, controls.

    python bench/recall_model/recall_heldout.py --tokens 1024 2048 --policy full fused recency

An answer counts if all of it is equal to the expected one, greedily sampled. Questions are asked
each on its own behind the same history, so every one but the first of a conversation goes back to
the checkpoint in front of the question before.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine import retrieve
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.kv.scorers import Scores
from kvmem.llama.template import ChatTemplate

HERE = Path(__file__).resolve().parent
MODEL = HERE / "recall-qwen35.gguf"
HELDOUT = HERE / "heldout.jsonl"

BLOCK_TOKENS = 32
KINDS = ("fact", "update", "hop", "none")
POLICIES = ("full", "fused", "heads", "lexical", "mass", "cosine", "recency", "shuffled")
"""Scorers at a quarter of the history; the whole of it; and fused with its scores shuffled."""


@dataclass(slots=True)
class Outcome:
    """Counts of a policy by kind of question, and what the memory did."""

    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    gold_asked: int = 0
    gold_held: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)  # question, expected, said
    seconds: float = 0.0

    @property
    def recalled(self) -> float:
        """Share of right answers to what was told: unknown facts need no memory."""
        kinds = [kind for kind in self.asked if kind != "none"]
        return sum(self.right[k] for k in kinds) / sum(self.asked[k] for k in kinds)

    @property
    def gold_share(self) -> float:
        """Share of the blocks with the wanted tokens that the reply could see."""
        return self.gold_held / self.gold_asked if self.gold_asked else 1.0


def load(
    tokens: Sequence[int] = (1024, 2048, 4096), limit: int | None = None, path: Path = HELDOUT
) -> list[Any]:
    """Conversations of these lengths, at most `limit` of each."""
    items = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        item
        for size in tokens
        for item in [item for item in items if item["target_tokens"] == size][:limit]
    ]


@contextmanager
def shuffled(seed: int = 0) -> Iterator[None]:
    """While it lasts, every block has the score of another."""
    plain = retrieve.score
    rng = np.random.default_rng(seed)

    def score(*args: Any, **others: Any) -> Scores:
        scores = plain(*args, **others)
        scores.blocks[:] = rng.permutation(scores.blocks)
        return scores

    with patch.object(retrieve, "score", score):
        yield


def ask_all(
    conversation: dict[str, Any],
    policy: str,
    outcome: Outcome,
    *,
    model: Path = MODEL,
    **memory: Any,
) -> None:
    """Ask the questions of one conversation and add the result to `outcome`."""
    if policy == "shuffled":
        with shuffled():
            _ask_all(conversation, "fused", outcome, model, **memory)
    else:
        _ask_all(conversation, policy, outcome, model, **memory)


def _ask_all(
    conversation: dict[str, Any], policy: str, outcome: Outcome, model: Path, **memory: Any
) -> None:
    started = time.perf_counter()
    n_tokens = conversation["n_tokens"]
    quarter = n_tokens // 4 // BLOCK_TOKENS * BLOCK_TOKENS
    settings: dict[str, Any] = {
        "workspace_tokens": 8192,
        "budget_tokens": 8192 if policy == "full" else quarter,
        "reserve_tokens": 128,
        "block_tokens": BLOCK_TOKENS,
        "recent_tokens": 64,
        "host_limit_bytes": 256 << 20,
        "scorer": "fused" if policy == "full" else policy,
        **memory,
    }
    config = EngineConfig(
        model=ModelConfig(path=model, n_threads=1), memory=MemoryConfig(**settings)
    )
    with Engine(config) as engine, ChatTemplate(engine.model) as template:
        renderer = ChatRenderer(template, engine.vocab)
        session = engine.session()
        for question in conversation["questions"]:
            messages = [*conversation["messages"], {"role": "user", "content": question["text"]}]
            prompt = renderer.render(parse_chat_request({"messages": messages})).prompt
            params = GenerateParams(sampling=SamplingParams(temperature=0.0), max_tokens=64)
            events = list(session.generate(prompt, params))
            said = b"".join(e.piece for e in events if isinstance(e, TokenEvent)).decode()
            done = events[-1]
            assert isinstance(done, Done)
            report = done.stats.memory
            gold = {
                position // BLOCK_TOKENS
                for start, stop in question["spans"]
                for position in range(start, stop)
            }
            outcome.gold_asked += len(gold)
            outcome.gold_held += len(gold & set(report.blocks))
            outcome.asked[question["kind"]] += 1
            outcome.decisions[report.decision] += 1
            if said == question["answer"]:
                outcome.right[question["kind"]] += 1
            else:
                outcome.wrong.append((question["text"], question["answer"], said))
        session.close()
    outcome.seconds += time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--limit", type=int, help="conversations of each length")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--questions", type=Path, default=HELDOUT, help="written by recall_tokens")
    parser.add_argument("--wrong", action="store_true", help="print wrong answers")
    options = parser.parse_args()
    print("| policy | tokens |", " | ".join(KINDS), "| told | gold in sight | decisions | s |")
    for policy in options.policy:
        for size in options.tokens:
            outcome = Outcome()
            for conversation in load([size], options.limit, options.questions):
                ask_all(conversation, policy, outcome, model=options.model)
            cells = [f"{outcome.right[kind]}/{outcome.asked[kind]}" for kind in KINDS]
            decisions = ", ".join(f"{n} {name}" for name, n in outcome.decisions.most_common())
            print(
                f"| {policy} | {size} |", " | ".join(cells), f"| {outcome.recalled:.1%} |",
                f"{outcome.gold_share:.1%} | {decisions} | {outcome.seconds:.0f} |", flush=True,
            )  # fmt: skip
            if options.wrong:
                for text, expected, said in outcome.wrong:
                    print(f"    {text}\n      expected {expected!r}\n      said     {said!r}")


if __name__ == "__main__":
    main()

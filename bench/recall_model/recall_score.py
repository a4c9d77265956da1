"""How many held-out questions a PyTorch model answers right, and how good its drafts are.

    python bench/recall_model/recall_score.py MODEL.gguf --tokens 1024

The whole answer and the end of turn must be on top at each step after the right beginning: then,
and only then, a greedy answer is equal to the expected one.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from recall_gguf import load
from recall_qwen35 import Qwen35
from recall_tokens import HERE, MODEL, Tokenize, Vocabulary
from torch import Tensor

HELDOUT: Final = HERE / "heldout.jsonl"
DRAFT_TOKENS: Final = 3


@dataclass(slots=True)
class Score:
    """Counts by kind of question. drafted, accepted: by place in the chain of drafts."""

    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = [f"{kind} {self.right[kind]}/{n}" for kind, n in sorted(self.asked.items())]
        shares = [f"{self.accepted[n] / self.drafted:.3f}" for n in range(DRAFT_TOKENS)]
        return f"{', '.join(kinds)}; drafts {' '.join(shares)}"


def render(item: dict[str, Any]) -> str:
    """A line of heldout.jsonl as its chat template renders it, without a generation prompt."""
    messages = item["messages"]
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def score(
    model: Qwen35, items: Iterable[dict[str, Any]], tokenize: Tokenize, device: str = "cpu"
) -> Score:
    """Ask each question on its own behind its history. Needs as much memory as training does."""
    total = Score()
    for item in items:
        history = tokenize(render(item))
        asked = [
            tokenize(f"<|im_start|>user\n{q['text']}<|im_end|>\n<|im_start|>assistant\n")
            for q in item["questions"]
        ]
        answers = [tokenize(f"{q['answer']}<|im_end|>") for q in item["questions"]]
        heads = [len(history) + len(question) for question in asked]
        rows = [[*history, *q, *a] for q, a in zip(asked, answers, strict=True)]
        best, drafts = predict(model, rows, device)
        for n, question in enumerate(item["questions"]):
            said = slice(heads[n] - 1, heads[n] - 1 + len(answers[n]))
            right = best[n, said].tolist() == answers[n]
            total.asked[question["kind"]] += 1
            total.right[question["kind"]] += right
            # row i of the trunk and of a draft are both for token i + 1
            total.drafted += len(answers[n])
            for place, draft in enumerate(drafts):
                equal = draft[n, said] == best[n, said]
                total.accepted[place] += int(equal.sum())
    return total


def predict(
    model: Qwen35, rows: Sequence[Sequence[int]], device: str = "cpu"
) -> tuple[Tensor, list[Tensor]]:
    """The token on top after each token, int64 [b, t], and that of each draft in a chain of three.

    Rows are filled up to the longest; what stands behind their ends means nothing.
    """
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        hidden = model(tokens)
        drafts = model.drafts(tokens, hidden, DRAFT_TOKENS)
        best = model.head(hidden).argmax(-1)
        return best.cpu(), [model.head(row).argmax(-1).cpu() for row in drafts]


def read_items(path: Path = HELDOUT) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Count right answers to held-out questions.")
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--questions", type=Path, default=HELDOUT)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--limit", type=int, help="conversations of each length")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(options.model).to(device)
    tokenize = Vocabulary(options.model).tokenizer()
    items = read_items(options.questions)
    for size in options.tokens:
        chosen = [item for item in items if item["target_tokens"] == size][: options.limit]
        print(f"{size}: {score(model, chosen, tokenize, device)}", flush=True)


if __name__ == "__main__":
    main()

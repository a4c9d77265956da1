"""What is chosen under other sizes and rules, and for questions that ask for many facts.

    python bench/recall_model/recall_select.py --each 8 --out select.jsonl

New conversations are read by the recall model under a quarter of their length, as a server reads
them; then blocks are chosen for questions under every rule, and nothing is decoded: counted is how
much of the evidence is among them. Beside the five questions of a conversation there are lists:
everything about a place, every value of an attribute, of a word that attributes share, and all that
was told. The model cannot answer those.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from recall_conversations import Mark, Style, write_conversation
from recall_outcome import MODEL
from recall_paths import I32, Rule, choose_by
from recall_tokens import SEEDS_APART, Tokenize, Vocabulary, encode, held_out_item

from kvmem.bench import metrics
from kvmem.bench.conversations import read_conversations
from kvmem.bench.history import EngineHistory, position_scores
from kvmem.bench.record import environment, write_jsonl
from kvmem.bench.workload import Prompt, Question
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory
from kvmem.kv.scorers import Scores
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab

LISTS = ("of a place", "of an attribute", "of a word", "all")
SHARED_WORDS = ("code", "phrase", "host", "number", "path", "color", "date", "version")
"""Last words of attributes that several share."""

OF_A_QUESTION = ("kind", "recall", "facts", "seen")

RULES = (
    *(Rule(block=block) for block in (16, 32, 64, 128)),
    *(Rule(recent=recent) for recent in (0, 64, 128, 256, 512)),
    *(Rule(sink=sink) for sink in (64, 128)),
    Rule(choice="messages"),
    *(Rule(choice=f"spread:{part}") for part in (4, 2, 1)),
)


def lists(spans: dict[Mark, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Questions for several facts, in the form of heldout.jsonl."""
    facts = {mark: span for mark, span in spans.items() if mark.attribute}  # no aliases
    by_name: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for mark, span in facts.items():
        by_name["of a place", mark.subject].append(span)
        by_name["of an attribute", mark.attribute].append(span)
        by_name["of a word", mark.attribute.split()[-1]].append(span)
        by_name["all", ""].append(span)
    forms = {
        "of a place": "I need everything for {}.",
        "of an attribute": "I need the {} for every place.",
        "of a word": "I need every {}.",
        "all": "Remind me of everything that was told.",
    }
    for (kind, name), told in by_name.items():
        if kind == "of a word" and name not in SHARED_WORDS:
            continue
        if len(told) > 2:
            yield {"text": forms[kind].format(name), "answer": "", "kind": kind, "spans": told}


def conversations(seed: int, n_tokens: int, tokenize: Tokenize) -> Iterator[dict[str, Any]]:
    """Endless new ones of about n_tokens, on places that are held out, with their questions."""
    lengths = Vocabulary().lengths
    style = Style(
        tokens=n_tokens, held_out=True, question_rate=0.15, fact_tokens=60, final_questions=5
    )
    for number in count((seed * 10 + 2) * SEEDS_APART + n_tokens * 1000):
        conversation = write_conversation(number, style)
        item = held_out_item(conversation, tokenize, lengths)
        if 0.85 * n_tokens < item["n_tokens"] < 1.08 * n_tokens:
            spans = encode(tuple(conversation.pieces()), tokenize, lengths).spans
            item["questions"] += lists(spans)
            yield {"target_tokens": n_tokens, **item}


def choose(
    memory: TieredMemory, question: Question, scores: Scores, rule: Rule, budget: int,
    messages: Sequence[tuple[int, int]],
) -> I32:  # fmt: skip
    """As a session chooses: the question's tokens count, and its first block is the newest one."""
    block = memory.block_tokens
    n_history = memory.n_blocks_of(memory.n_tokens)
    n_blocks = memory.n_blocks_of(memory.n_tokens + question.content.start)
    n_asked = memory.n_blocks_of(memory.n_tokens + len(question.tokens)) - n_blocks
    selection = choose_by(
        rule.choice,
        scores,
        n_blocks=n_blocks,
        budget_blocks=budget // block - n_asked,
        block_tokens=block,
        pins=(n_history - 1,),
        sink_blocks=max(1, rule.sink // block),
        recent_blocks=1 if rule.recent is None else -(-rule.recent // block),
        messages=[range(start // block, -(-stop // block)) for start, stop in messages],
    )
    return selection[selection < n_history]


def measure(prompt: Prompt, messages: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    n_tokens = len(prompt.history)
    for block in sorted({rule.block for rule in RULES}):
        config = EngineConfig(
            model=ModelConfig(path=MODEL, n_threads=1),
            memory=MemoryConfig(
                workspace_tokens=8192,
                budget_tokens=n_tokens // 4 // block * block,
                reserve_tokens=128,
                block_tokens=block,
                recent_tokens=0,
                host_limit_bytes=256 << 20,
                calibration="off",
            ),
        )
        with Engine(config) as engine:
            history = EngineHistory.read(engine, prompt.history)
            memory = engine.tiered
            for divisor in (4, 8):
                budget = n_tokens // divisor // block * block
                for question in prompt.questions:
                    if question.kind == "none":
                        continue
                    newest = position_scores(history.n_blocks)
                    history.restrict(choose(memory, question, newest, Rule(), budget, messages))
                    scores = history.score(history.ask(question), "fused")
                    for rule in RULES:
                        if rule.block != block or (rule.recent or rule.sink) + 64 > budget:
                            continue
                        chosen = choose(memory, question, scores, rule, budget, messages)
                        parts = [metrics.gold_recall(chosen, [g], block) for g in question.gold]
                        yield {
                            "rule": rule.name,
                            "divisor": divisor,
                            "budget_blocks": budget // block,
                            "history": history.n_blocks,
                            "kind": question.kind,
                            "recall": round(metrics.gold_recall(chosen, question.gold, block), 3),
                            "facts": len(parts),
                            "seen": sum(part == 1 for part in parts),
                        }


def pack(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for all questions of a conversation under a rule: what differs, as lists."""
    packed: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        head = {name: value for name, value in row.items() if name not in OF_A_QUESTION}
        record = packed.setdefault(
            tuple(head.values()), head | {name: [] for name in OF_A_QUESTION}
        )
        for name in OF_A_QUESTION:
            record[name].append(row[name])
    return list(packed.values())


def print_rules(rows: list[dict[str, Any]]) -> None:
    """Mean share of the evidence, and of how many questions all of it."""
    kinds = ("fact", "update", "hop", *LISTS)
    print("| budget | rule | " + " | ".join(kinds) + " |")
    for divisor in (4, 8):
        for rule in dict.fromkeys(row["rule"] for row in rows):
            cells = []
            for kind in kinds:
                own = [
                    row
                    for row in rows
                    if (row["rule"], row["divisor"], row["kind"]) == (rule, divisor, kind)
                ]
                whole = sum(row["seen"] == row["facts"] for row in own)
                mean = f"{np.mean([row['recall'] for row in own]):.2f}" if own else "-"
                cells.append(f"{mean} ({whole} of {len(own)})")
            print(f"| 1/{divisor} | {rule} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 2048])
    parser.add_argument("--each", type=int, default=8, help="conversations of each length")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write raw records here, as they are finished")
    options = parser.parse_args()
    where = environment(MODEL, vars(options), bench="recall-select")
    rows: list[dict[str, Any]] = []
    with Model(MODEL) as model, tempfile.TemporaryDirectory() as folder:
        vocab = Vocab(model)
        items = [
            item
            for n_tokens in options.tokens
            for item in islice(conversations(options.seed, n_tokens, vocab.tokenize), options.each)
        ]
        path = Path(folder) / "conversations.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        prompts = list(read_conversations(path, model, vocab))
        borders = [_messages(item, vocab) for item in items]
    # short and long ones in turn, so that a run that is stopped has both
    order = sorted(range(len(items)), key=lambda index: index % options.each)
    for index in order:
        facts = {"tokens": items[index]["target_tokens"], "conversation": index}
        rows += [facts | row for row in measure(prompts[index], borders[index])]
        if options.out is not None:
            write_jsonl(options.out, [where, *pack(rows)])
    print_rules(rows)


def _messages(item: dict[str, Any], vocab: Vocab) -> list[tuple[int, int]]:
    """The tokens of each message, with what the template writes around it."""
    ends = np.cumsum([
        len(vocab.tokenize(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n"))
        for m in item["messages"]
    ])  # fmt: skip
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))


if __name__ == "__main__":
    main()

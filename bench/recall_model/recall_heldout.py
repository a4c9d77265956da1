"""Ask the recall model its held-out questions through kvmem: full cache, small budgets, controls.

    python bench/recall_model/recall_heldout.py --tokens 1024 2048 --policy full fused recency

An answer counts if all of it is equal to the expected one, greedily sampled. Questions are asked
each on its own behind the same history, so every one but the first of a conversation goes back to
the checkpoint in front of the question before.

    python bench/recall_model/recall_heldout.py --chain 3 --path "as served" "no replay"

asks in chains of tool calls instead (recall_chain.py), step by step as an agent does, and counts by
the decision that the memory report names.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
from recall_chain import split_answer, write_chains
from recall_outcome import (
    HERE,
    MODEL,
    POLICIES,
    Answer,
    Key,
    Outcome,
    Setting,
    print_drafts,
    print_head,
    print_rows,
    raw,
)
from recall_paths import PATHS, choosing, shuffled, told, watched

from kvmem.bench import metrics
from kvmem.bench.record import environment, write_jsonl
from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.config import DraftConfig, EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.prompt import Prompt, Span
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.session import Session
from kvmem.kv.scorers import Scores
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

__all__ = ["HELDOUT", "MODEL", "Outcome", "Setting", "ask_all", "load"]

HELDOUT = HERE / "heldout.jsonl"


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


def ask_all(
    conversation: dict[str, Any], setting: Setting, outcome: Outcome, **memory: Any
) -> None:
    """Ask the questions of one conversation and add the answers to `outcome`.

    memory: fields of MemoryConfig that replace those of the setting.
    """
    started = time.perf_counter()
    path, fields = PATHS[setting.path]
    with ExitStack() as opened:
        opened.enter_context(path())
        if setting.policy == "shuffled":
            opened.enter_context(shuffled())
        engine = opened.enter_context(
            Engine(_config(conversation["n_tokens"], setting, {**fields, **memory}))
        )
        template = opened.enter_context(ChatTemplate(engine.model))
        renderer = ChatRenderer(template, engine.vocab)
        asker = _Asker(conversation, engine.session(), renderer, engine.vocab, setting)
        if setting.together:
            outcome.answers += asker.ask_together()
        elif setting.chain is None:
            outcome.answers += asker.ask_plainly()
        else:
            outcome.answers += asker.ask_in_chains(setting.chain)
        asker.session.close()
    outcome.seconds += time.perf_counter() - started


def _config(n_tokens: int, setting: Setting, fields: dict[str, Any]) -> EngineConfig:
    block = setting.block_tokens
    is_full = setting.policy == "full"
    is_scorer = setting.policy not in ("full", "gold", "shuffled")
    settings: dict[str, Any] = {
        "workspace_tokens": 8192,
        "budget_tokens": 8192 if is_full else n_tokens // setting.divisor // block * block,
        "reserve_tokens": 128,
        "block_tokens": block,
        "sink_tokens": setting.sink,
        "recent_tokens": block if setting.recent is None else setting.recent,
        "host_limit_bytes": 256 << 20,
        "scorer": setting.policy if is_scorer else "fused",
        "calibration": setting.calibration,
        **fields,
    }
    return EngineConfig(
        model=ModelConfig(path=setting.model, n_threads=1),
        memory=MemoryConfig(**settings),
        draft=DraftConfig(spec_type="draft-mtp", n_max=setting.n_drafts)
        if setting.n_drafts
        else DraftConfig(),
    )


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked, and the answer that counts.

    spans: of what it takes to know it. before: the decisions of the steps in front of it.
    """

    number: int
    kind: str
    text: str
    expected: str
    spans: Sequence[Span]
    where: str = ""
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks about one conversation in one session, under one setting."""

    conversation: dict[str, Any]
    session: Session
    renderer: ChatRenderer
    vocab: Vocab
    setting: Setting

    def ask_plainly(self) -> Iterator[Answer]:
        for number, asked in enumerate(self.conversation["questions"]):
            text = asked["text"]
            spans = [Span(*span) for span in asked["spans"]]
            question = _Question(number, asked["kind"], text, asked["answer"], spans)
            message = {"role": "user", "content": text}
            prompt = self._render([*self.conversation["messages"], message])
            yield self._ask(prompt, question, max_tokens=64)

    def ask_in_chains(self, n_lines: int) -> Iterator[Answer]:
        for chain in write_chains(self.conversation, n_lines):
            asked = {"role": "user", "content": chain.question}
            messages = [*self.conversation["messages"], asked]
            before = []
            for step in chain.steps:
                if not self.setting.at_once:
                    _, done, _ = self._generate(self._render(messages), [], max_tokens=1)
                    before.append(done.stats.memory.decision)
                messages += [
                    {"role": "assistant", "content": step.call},
                    {"role": "tool", "content": step.result},
                ]
            prompt = self._render(messages)
            spans = [Span(*span) for span in chain.spans]
            if chain.told:
                spans.append(self._find(prompt, chain.told))
            question = _Question(
                number=chain.number,
                kind=chain.kind,
                text=chain.question,
                expected=chain.rest,
                spans=spans,
                where=chain.where,
                before=tuple(before),
            )
            opening = self.vocab.tokenize(chain.opening)
            prompt = replace(prompt, tokens=(*prompt.tokens, *opening))
            yield self._ask(prompt, question, max_tokens=len(self.vocab.tokenize(chain.rest)))

    def ask_together(self) -> Iterator[Answer]:
        """All that was told, in one message; how each sentence of the reply begins is given."""
        told_ones = [q for q in self.conversation["questions"] if q["kind"] != "none"]
        asked = {"role": "user", "content": " ".join(q["text"] for q in told_ones)}
        prompt = self._render([*self.conversation["messages"], asked])
        self._generate(prompt, [], max_tokens=1)
        reply = ""
        for number, one in enumerate(told_ones):
            opening, rest = split_answer(one)
            reply += opening
            begun = replace(prompt, tokens=(*prompt.tokens, *self.vocab.tokenize(reply)))
            spans = [Span(*one["spans"][0])]
            question = _Question(number, one["kind"], one["text"], rest, spans)
            answer = self._ask(begun, question, max_tokens=len(self.vocab.tokenize(rest)))
            reply += f"{answer.said} "
            yield answer

    def _ask(self, prompt: Prompt, question: _Question, *, max_tokens: int) -> Answer:
        spans, block = question.spans, self.setting.block_tokens
        said, done, scores = self._generate(prompt, spans, max_tokens=max_tokens)
        report = done.stats.memory
        gold = self._blocks(spans)
        rank = None
        if scores and any(b < len(scores[-1].blocks) for b in gold):
            rank = int(metrics.gold_rank(scores[-1].blocks, spans, block))
        return Answer(
            conversation=self.conversation["id"],
            tokens=self.conversation["target_tokens"],
            number=question.number,
            kind=question.kind,
            where=question.where,
            text=question.text,
            expected=question.expected,
            said=said,
            gold=len(gold),
            seen=len(set(gold) & set(report.blocks)),
            recall=metrics.gold_recall(report.blocks, spans, block) if spans else 1.0,
            rank=rank,
            decision=report.decision,
            before=question.before,
            replayed_tokens=report.replayed_tokens,
            bytes_in=report.bytes_in,
            drafted=done.stats.draft_n,
            accepted=done.stats.draft_n_accepted,
        )

    def _render(self, messages: list[dict[str, str]]) -> Prompt:
        return self.renderer.render(parse_chat_request({"messages": messages})).prompt

    def _find(self, prompt: Prompt, text: str) -> Span:
        """Where it stands last."""
        pieces = [self.vocab.piece(token) for token in prompt.tokens]
        ends = np.cumsum([len(piece) for piece in pieces])
        start = b"".join(pieces).rindex(text.encode())
        first = int(np.searchsorted(ends, start, "right"))
        return Span(first, int(np.searchsorted(ends, start + len(text), "left")) + 1)

    def _generate(
        self, prompt: Prompt, gold: Sequence[Span], *, max_tokens: int
    ) -> tuple[str, Done, list[Scores]]:
        setting = self.setting
        with ExitStack() as opened:
            if setting.policy == "gold":
                opened.enter_context(told(set(self._blocks(gold))))
            if setting.choice != "best":
                messages = [(item.span.start, item.span.stop) for item in prompt.spans]
                opened.enter_context(choosing(setting.choice, messages))
            seen = opened.enter_context(watched())
            events = list(self.session.generate(prompt, GenerateParams(max_tokens=max_tokens)))
        done = events[-1]
        assert isinstance(done, Done)
        return b"".join(e.piece for e in events if isinstance(e, TokenEvent)).decode(), done, seen

    def _blocks(self, spans: Iterable[Span]) -> list[int]:
        block = self.setting.block_tokens
        return sorted(
            {i for span in spans for i in range(span.start // block, -(-span.stop // block))}
        )


def _ask_one(task: tuple[dict[str, Any], Setting]) -> Outcome:
    """What a process of the pool does."""
    outcome = Outcome()
    ask_all(*task, outcome)
    return outcome


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """All that was asked for; the full cache is one whatever the sizes."""
    found = [
        Setting(
            policy=policy,
            divisor=4 if policy == "full" else divisor,
            block_tokens=16 if policy == "full" else block,
            model=options.model,
            n_drafts=n_drafts,
            sink=0 if policy == "full" else sink,
            recent=None if policy == "full" else recent,
            path="as served" if policy == "full" else path,
            choice="best" if policy == "full" else choice,
            chain=chain,
            at_once=at_once,
            together=options.together,
            calibration=options.calibration,
        )
        for n_drafts, chain, at_once, policy, divisor, block, sink, recent, path, choice in product(
            options.drafts,
            options.chain,
            (False, True) if options.at_once else (False,),
            options.policy,
            options.divisor,
            options.block,
            options.sink,
            options.recent,
            options.path,
            options.choice,
        )
    ]
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--limit", type=int, help="conversations of each length")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--questions", type=Path, default=HELDOUT, help="written by recall_tokens")
    parser.add_argument("--divisor", type=int, nargs="+", default=[4], help="4 for a quarter")
    parser.add_argument("--block", type=int, nargs="+", default=[16], help="tokens of a block")
    parser.add_argument("--sink", type=int, nargs="+", default=[0], help="tokens; 0 for a block")
    parser.add_argument(
        "--recent", type=int, nargs="+", default=[None], help="tokens; left out for a block"
    )
    parser.add_argument("--path", nargs="+", choices=PATHS, default=["as served"])
    parser.add_argument(
        "--choice", nargs="+", default=["best"], help="best, messages, or spread:N, for 1/N of it"
    )
    parser.add_argument(
        "--chain", type=int, nargs="+", default=[None], help="lines of a tool's result, in chains"
    )
    parser.add_argument("--at-once", action="store_true", help="chains as one request, too")
    parser.add_argument(
        "--together",
        action="store_true",
        help="all questions in one message, answered in one reply",
    )
    parser.add_argument("--calibration", default="off", help="a file of kvmem calibrate")
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[0], help="proposals of a step at most; 0 for none"
    )
    parser.add_argument("--jobs", type=int, default=1, help="conversations at a time")
    parser.add_argument("--out", type=Path, help="write raw records here, as JSON lines")
    parser.add_argument("--wrong", action="store_true", help="print wrong answers")
    options = parser.parse_args()
    settings = settings_of(options)
    conversations = load(options.tokens, options.limit, options.questions)
    tasks = [(c, s) for s in settings for c in reversed(conversations)]
    records = [environment(options.model, vars(options), bench="recall-heldout")]
    outcomes = {setting: Outcome() for setting in settings}
    known: dict[tuple[object, ...], set[Key]] = {}
    print_head(is_chain=options.chain != [None])
    with ProcessPoolExecutor(options.jobs) as pool:
        found = pool.map(_ask_one, tasks)
        for setting, outcome in outcomes.items():  # each as it is finished
            for part in islice(found, len(conversations)):
                outcome.answers += part.answers
                outcome.seconds += part.seconds
            alike = (setting.chain, setting.at_once, setting.together)
            if setting.policy == "full":
                known[alike] = {a.key for a in outcome.answers if a.is_right}
            by_decision = setting.chain is not None or len(options.path) > 1
            print_rows(setting, outcome, known.get(alike, set()), by_decision=by_decision)
            records += raw(setting, outcome)
            if options.out is not None:
                write_jsonl(options.out, records)
    print_drafts(outcomes)
    if options.wrong:
        for setting, outcome in outcomes.items():
            for answer in outcome.answers:
                if not answer.is_right:
                    print(f"{setting.name}: {answer.text}\n      expected {answer.expected!r}")
                    print(f"      said     {answer.said!r}, {answer.seen}/{answer.gold} seen")


if __name__ == "__main__":
    main()

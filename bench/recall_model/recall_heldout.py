"""Ask the recall model its held-out questions through kvmem: full cache, small budgets, controls.

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
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.config import DraftConfig, EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine import retrieve
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.kv.scorers import Scores
from kvmem.llama.template import ChatTemplate

HERE = Path(__file__).resolve().parent
MODEL = HERE / "recall-qwen35.gguf"
HELDOUT = HERE / "heldout.jsonl"

KINDS = ("fact", "update", "hop", "none")
POLICIES = ("full", "gold", "fused", "heads", "lexical", "mass", "cosine", "recency", "shuffled")
"""Scorers at a part of the history; the whole of it; the blocks of the evidence, then those beside
them, then as fused has it: an oracle for the budget; and fused with its scores shuffled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the questions are asked.

    divisor: the budget is this part of the history. n_drafts: proposals of a step at most.
    """

    policy: str
    divisor: int = 4
    block_tokens: int = 16
    model: Path = MODEL
    n_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question. gold: blocks that hold its evidence; seen: those that the reply could see."""

    conversation: str
    tokens: int
    number: int
    kind: str
    text: str
    expected: str
    said: str
    gold: int
    seen: int
    decision: str
    replayed_tokens: int
    bytes_in: int
    drafted: int
    accepted: int

    @property
    def is_right(self) -> bool:
        return self.said == self.expected


@dataclass(slots=True)
class Outcome:
    """All answers under a setting, in the order they were asked."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def asked(self) -> Counter[str]:
        return Counter(answer.kind for answer in self.answers)

    @property
    def right(self) -> Counter[str]:
        return Counter(answer.kind for answer in self.answers if answer.is_right)

    @property
    def decisions(self) -> Counter[str]:
        return Counter(answer.decision for answer in self.answers)

    @property
    def told(self) -> list[Answer]:
        """Answers to what was told: unknown facts need no memory."""
        return [answer for answer in self.answers if answer.kind != "none"]

    @property
    def recalled(self) -> float:
        """Share of right answers to what was told."""
        return sum(answer.is_right for answer in self.told) / len(self.told)

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were said."""
        drafted = sum(answer.drafted for answer in self.answers)
        return sum(answer.accepted for answer in self.answers) / max(1, drafted)

    @property
    def said(self) -> list[str]:
        return [answer.said for answer in self.answers]

    @property
    def gold_share(self) -> float:
        """Share of the blocks with the wanted tokens that the reply could see."""
        gold = sum(answer.gold for answer in self.answers)
        return sum(answer.seen for answer in self.answers) / gold if gold else 1.0


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
def told(gold: set[int]) -> Iterator[None]:
    """While it lasts, these blocks score above all others, and those beside them come next."""
    plain = retrieve.score
    beside = {block + step for block in gold for step in (-1, 1)} - gold

    def score(*args: Any, **others: Any) -> Scores:
        scores = plain(*args, **others)
        above = np.ptp(scores.blocks) + 1
        for blocks, lift in ((gold, 2 * above), (beside, above)):
            known = [block for block in blocks if 0 <= block < len(scores.blocks)]
            scores.blocks[known] += lift
            scores.edges[known] = 0  # they bring nobody before their like
        return scores

    with patch.object(retrieve, "score", score):
        yield


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
    conversation: dict[str, Any], setting: Setting, outcome: Outcome, **memory: Any
) -> None:
    """Ask the questions of one conversation and add the answers to `outcome`.

    memory: fields of MemoryConfig that replace those of the setting.
    """
    started = time.perf_counter()
    if setting.policy == "shuffled":
        with shuffled():
            outcome.answers += _ask_all(conversation, setting, "fused", memory)
    else:
        outcome.answers += _ask_all(conversation, setting, setting.policy, memory)
    outcome.seconds += time.perf_counter() - started


def _ask_all(
    conversation: dict[str, Any], setting: Setting, scorer: str, memory: dict[str, Any]
) -> Iterator[Answer]:
    block = setting.block_tokens
    part = conversation["n_tokens"] // setting.divisor // block * block
    is_full = setting.policy == "full"
    settings: dict[str, Any] = {
        "workspace_tokens": 8192,
        "budget_tokens": 8192 if is_full else part,
        "reserve_tokens": 128,
        "block_tokens": block,
        "recent_tokens": block,
        "host_limit_bytes": 256 << 20,
        "scorer": "fused" if setting.policy in ("full", "gold") else scorer,
        "calibration": "off",
        **memory,
    }
    config = EngineConfig(
        model=ModelConfig(path=setting.model, n_threads=1),
        memory=MemoryConfig(**settings),
        draft=DraftConfig(spec_type="draft-mtp", n_max=setting.n_drafts)
        if setting.n_drafts
        else DraftConfig(),
    )
    with Engine(config) as engine, ChatTemplate(engine.model) as template:
        renderer = ChatRenderer(template, engine.vocab)
        session = engine.session()
        for number, question in enumerate(conversation["questions"]):
            messages = [*conversation["messages"], {"role": "user", "content": question["text"]}]
            prompt = renderer.render(parse_chat_request({"messages": messages})).prompt
            params = GenerateParams(sampling=SamplingParams(temperature=0.0), max_tokens=64)
            gold = {
                position // block
                for start, stop in question["spans"]
                for position in range(start, stop)
            }
            with told(gold) if setting.policy == "gold" else nullcontext():
                events = list(session.generate(prompt, params))
            said = b"".join(e.piece for e in events if isinstance(e, TokenEvent)).decode()
            done = events[-1]
            assert isinstance(done, Done)
            report = done.stats.memory
            yield Answer(
                conversation=conversation["id"],
                tokens=conversation["target_tokens"],
                number=number,
                kind=question["kind"],
                text=question["text"],
                expected=question["answer"],
                said=said,
                gold=len(gold),
                seen=len(gold & set(report.blocks)),
                decision=report.decision,
                replayed_tokens=report.replayed_tokens,
                bytes_in=report.bytes_in,
                drafted=done.stats.draft_n,
                accepted=done.stats.draft_n_accepted,
            )
        session.close()


def _ask_one(task: tuple[dict[str, Any], Setting]) -> Outcome:
    """What a process of the pool does."""
    outcome = Outcome()
    ask_all(*task, outcome)
    return outcome


def print_drafts(outcomes: dict[Setting, Outcome]) -> None:
    """A line for each setting with drafts: how many were said, and whether answers changed."""
    for setting, outcome in outcomes.items():
        if not setting.n_drafts:
            continue
        drafted = sum(answer.drafted for answer in outcome.answers)
        accepted = sum(answer.accepted for answer in outcome.answers)
        part = "all" if setting.policy == "full" else f"1/{setting.divisor}"
        line = (
            f"{setting.policy}, {part}, {setting.n_drafts} drafts: {accepted:,} of {drafted:,} "
            f"said ({outcome.acceptance:.1%})"
        )
        plain = outcomes.get(replace(setting, n_drafts=0))
        if plain is not None:
            n_same = sum(a == b for a, b in zip(outcome.said, plain.said, strict=True))
            line += f"; {n_same} of {len(plain.said)} answers are those without"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--limit", type=int, help="conversations of each length")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--questions", type=Path, default=HELDOUT, help="written by recall_tokens")
    parser.add_argument("--divisor", type=int, nargs="+", default=[4], help="4 for a quarter")
    parser.add_argument("--block", type=int, nargs="+", default=[16], help="tokens of a block")
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[0], help="proposals of a step at most; 0 for none"
    )
    parser.add_argument("--jobs", type=int, default=1, help="conversations at a time")
    parser.add_argument("--out", type=Path, help="write every answer here, as JSON lines")
    parser.add_argument("--wrong", action="store_true", help="print wrong answers")
    options = parser.parse_args()
    settings = [
        Setting(
            policy=policy,
            divisor=divisor,
            block_tokens=block,
            model=options.model,
            n_drafts=n_drafts,
        )
        for n_drafts in options.drafts
        for policy in options.policy
        for divisor in (options.divisor if policy != "full" else options.divisor[:1])
        for block in (options.block if policy != "full" else options.block[:1])
    ]
    conversations = load(options.tokens, options.limit, options.questions)
    tasks = [(c, s) for s in settings for c in reversed(conversations)]
    with ProcessPoolExecutor(options.jobs) as pool:
        found = list(pool.map(_ask_one, tasks))
    full: set[tuple[str, int]] = set()
    outcomes: dict[Setting, Outcome] = {}
    lines = []
    print(
        "| policy | budget | units | drafts | tokens |",
        " | ".join(KINDS),
        "| told | of full's | in sight |",
    )
    for setting in settings:
        outcomes[setting] = Outcome()
        for size in options.tokens:
            outcome = Outcome()
            for (conversation, own), part in zip(tasks, found, strict=True):
                if own == setting and conversation["target_tokens"] == size:
                    outcome.answers += part.answers
            outcomes[setting].answers += outcome.answers
            right = {(a.conversation, a.number) for a in outcome.told if a.is_right}
            if setting.policy == "full":
                full |= right
            of_full = {
                key for key in full if key in {(a.conversation, a.number) for a in outcome.told}
            }
            kept = f"{len(right & of_full)}/{len(of_full)}" if of_full else "-"
            cells = [f"{outcome.right[kind]}/{outcome.asked[kind]}" for kind in KINDS]
            budget = "all" if setting.policy == "full" else f"1/{setting.divisor}"
            print(
                f"| {setting.policy} | {budget} | {setting.block_tokens} | {setting.n_drafts} "
                f"| {size} |",
                " | ".join(cells),
                f"| {outcome.recalled:.1%} | {kept} | {outcome.gold_share:.1%} |",
                flush=True,
            )
            lines += [
                {**asdict(setting), "model": setting.model.name, **asdict(a), "right": a.is_right}
                for a in outcome.answers
            ]
            if options.wrong:
                for answer in outcome.answers:
                    if not answer.is_right:
                        print(f"    {answer.text}\n      expected {answer.expected!r}")
                        print(f"      said     {answer.said!r}, {answer.seen}/{answer.gold} seen")
    print_drafts(outcomes)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()

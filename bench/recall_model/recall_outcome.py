"""What recall_heldout.py asks under, what was answered, and the tables of it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from recall_chain import WHERE

HERE = Path(__file__).resolve().parent
MODEL = HERE / "recall-qwen35.gguf"

Key = tuple[str, int, str]
KINDS = ("fact", "update", "hop", "none")
POLICIES = ("full", "gold", "fused", "heads", "lexical", "mass", "cosine", "recency", "shuffled")
"""Scorers at a part of the history; the whole of it; the blocks of the evidence, then those beside
them, then as fused has it: an oracle for the budget; and fused with its scores shuffled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the questions are asked.

    divisor: the budget is this part of the history. n_drafts: proposals of a step at most.
    path, choice: how a question is read and blocks are taken, see recall_paths. chain: lines of the
    results behind a question; None for none. at_once: the whole chain is one request. together: all
    questions are one message, and their answers one reply.
    """

    policy: str
    divisor: int = 4
    block_tokens: int = 16
    model: Path = MODEL
    n_drafts: int = 0
    sink: int = 0
    recent: int | None = None
    path: str = "as served"
    choice: str = "best"
    chain: int | None = None
    at_once: bool = False
    together: bool = False
    calibration: str = "off"

    @property
    def name(self) -> str:
        """For a table: what is not usual."""
        if self.policy == "full":
            parts = ["full"]
        else:
            parts = [self.policy, f"1/{self.divisor}", f"units of {self.block_tokens}"]
        for what in ("sink", "recent", "n_drafts"):
            if getattr(self, what):
                parts.append(f"{what} {getattr(self, what)}")
        parts += [self.path] * (self.path != "as served") + [self.choice] * (self.choice != "best")
        if self.chain is not None:
            parts.append(f"results of {self.chain}" + ", at once" * self.at_once)
        parts += ["together"] * self.together
        return ", ".join(parts + ["calibrated"] * (self.calibration != "off"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question. gold: blocks that hold its evidence; seen: those that the reply could see.

    recall: share of the evidence's tokens that it could see. rank: of the best block that holds
    some, where it was scored; None for none. decision: of the request that was answered; before:
    those of the requests before it, in a chain. where: its fact, in a chain.
    """

    conversation: str
    tokens: int
    number: int
    kind: str
    where: str
    text: str
    expected: str
    said: str
    gold: int
    seen: int
    recall: float
    rank: int | None
    decision: str
    before: tuple[str, ...]
    replayed_tokens: int
    bytes_in: int
    drafted: int
    accepted: int

    @property
    def key(self) -> Key:
        """The question, under whatever setting."""
        return self.conversation, self.number, self.where

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


def print_head(*, is_chain: bool) -> None:
    """Columns are the kinds, in chains the places of the fact. rank: the median."""
    columns = ("setting", "tokens", *(WHERE if is_chain else KINDS))
    print("| " + " | ".join((*columns, "told", "of full's", "gold tokens", "rank")) + " |")


def print_rows(
    setting: Setting, outcome: Outcome, known: set[Key], *, by_decision: bool = False
) -> None:
    """A line for each length, and for each decision if wanted.

    known: what the full cache answers in the same place.
    """
    is_chain = setting.chain is not None
    sizes = sorted({a.tokens for a in outcome.answers})
    groups = [(str(size), [a for a in outcome.answers if a.tokens == size]) for size in sizes]
    groups.append(("all", outcome.answers))
    if by_decision:
        groups += [
            (name, [a for a in outcome.answers if a.decision == name])
            for name in sorted(outcome.decisions)
        ]
    for name, answers in groups:
        cells = []
        for column in WHERE if is_chain else KINDS:
            own = [a for a in answers if (a.where if is_chain else a.kind) == column]
            cells.append(f"{sum(a.is_right for a in own)}/{len(own)}")
        told = [a for a in answers if a.kind != "none"]
        of_full = [a.is_right for a in told if a.key in known]
        ranks = [a.rank for a in told if a.rank is not None]
        cells.append(f"{sum(a.is_right for a in told)}/{len(told)}")
        cells.append(f"{sum(of_full)}/{len(of_full)}")
        cells.append(f"{np.mean([a.recall for a in told]):.3f}" if told else "")
        cells.append(f"{np.median(ranks):.0f}" if ranks else "")
        print(f"| {setting.name} | {name} | " + " | ".join(cells) + " |", flush=True)


def raw(setting: Setting, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """A record for each conversation; fields of the setting where not usual."""
    usual = asdict(Setting(policy="", divisor=0, block_tokens=0))  # these are always said
    how = {k: v for k, v in asdict(setting).items() if v != usual[k] and k != "model"}
    for conversation in dict.fromkeys(a.conversation for a in outcome.answers):
        answers = [a for a in outcome.answers if a.conversation == conversation]
        record = {
            **how,
            "conversation": conversation,
            "tokens": answers[0].tokens,
            "kinds": [a.kind for a in answers],
            "right": [int(a.is_right) for a in answers],
            "gold": [a.gold for a in answers],
            "seen": [a.seen for a in answers],
            "recall": [round(a.recall, 3) for a in answers],
            "rank": [a.rank for a in answers],
            "decision": [a.decision for a in answers],
            "replayed_tokens": [a.replayed_tokens for a in answers],
        }
        if setting.chain is not None:
            record |= {"where": [a.where for a in answers], "before": [a.before for a in answers]}
        if setting.n_drafts:
            record |= {
                "drafted": [a.drafted for a in answers],
                "accepted": [a.accepted for a in answers],
            }
        yield record


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

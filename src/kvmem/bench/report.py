"""Tables of results for a terminal or a file."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvmem.bench.agent import AgentRecord, AgentSummary
from kvmem.bench.details import Difference, Part
from kvmem.bench.metrics import Interval
from kvmem.bench.quality import Record
from kvmem.bench.remote_speed import RemoteRow
from kvmem.bench.speed_summary import Ratio, RequestRow, SpeedRow
from kvmem.bench.summary import Gate, Row
from kvmem.bench.turns import TurnRow

__all__ = [
    "agent_table",
    "cost_table",
    "difference_table",
    "experiment_table",
    "gate_table",
    "move_table",
    "parity_line",
    "part_table",
    "phase_table",
    "recall_table",
    "remote_table",
    "request_table",
    "round_table",
    "speed_table",
    "turn_table",
]

GIB = 1 << 30

PHASES = {
    "switch_s": "find the conversation",
    "read_s": "read what is new",
    "query_s": "read the question for its Q",
    "score_s": "score",
    "move_s": "move blocks",
    "replay_s": "read the question again",
    "store_s": "store new blocks",
    "checkpoint_s": "save and restore states",
    "decode_s": "write",
    "draft_s": "draft",
    "sample_s": "choose tokens",
    "other_s": "all else",
}
"""The phases of a request in words, in their order."""


def interval(value: Interval | None) -> str:
    """`.92 [.89,.95]`; a dash where nothing was measured."""
    if value is None or math.isnan(value.mean):
        return "-"
    return f"{value.mean:.2f} [{value.low:.2f},{value.high:.2f}]"


def number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def recall_table(rows: Sequence[Row], title: str | None = None) -> Table:
    """One line a policy, references first."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("policy")
    free = any(row.free is not None for row in rows)
    headings = ["n", "gold recall", "paraphrased", "rank", "KL, nats", "top-1", "KLE", "forced"]
    for heading in headings + ["free"] * free:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [
            str(row.n),
            interval(row.gold_recall),
            interval(row.paraphrase_recall),
            number(row.gold_rank, 0),
            interval(row.kl_nats),
            number(row.top1),
            number(row.kle),
            interval(row.forced),
        ]
        table.add_row(row.policy, *cells, *([interval(row.free)] if free else []))
    return table


def cost_table(rows: Sequence[Row]) -> Table:
    """Answers over those of full attention, and what choosing costs: a line a policy."""
    table = Table(title="beside full attention", title_justify="left", box=None, pad_edge=False)
    table.add_column("policy")
    sessions = any(not math.isnan(row.session_recall.mean) for row in rows)
    headings = ["forced, of full", "score, ms", "index, bytes a token", "blocks in", "MB in"]
    for heading in headings + ["gold sessions"] * sessions:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.policy,
            number(row.of_full),
            number(row.score_ms, 1),
            number(row.bytes_per_token, 1),
            number(row.blocks_in, 1),
            number(row.bytes_in / 1e6),
            *([interval(row.session_recall)] if sessions else []),
        )
    return table


def parity_line(records: Sequence[Record]) -> str:
    """How far the scores of `heads` are from a twin's; empty where that was not measured."""
    errors = [r.twin_error for r in records if not math.isnan(r.twin_error)]
    if not errors:
        return ""
    return (
        f"scores of heads against the same in NumPy and float64: at most {max(errors):.1e} of a "
        f"block's score apart (n = {len(errors)})"
    )


def part_table(parts: Sequence[Part], policy: str) -> Table:
    """Kinds of questions, then fifths of the history, under one policy."""
    table = Table(title=policy, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for heading in ("n", "gold recall", "all of it", "forced"):
        table.add_column(heading, justify="right")
    for part in parts:
        gold = interval(part.gold_recall)
        table.add_row(part.part, str(part.n), gold, number(part.whole), number(part.forced))
    return table


def difference_table(pairs: Sequence[Difference]) -> Table:
    """First less second, question by question."""
    table = Table(title="paired differences", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for heading in ("n", "gold recall", "KL, nats", "forced", "p"):
        table.add_column(heading, justify="right")
    for pair in pairs:
        table.add_row(
            f"{pair.first} - {pair.second}",
            str(pair.n),
            interval(pair.gold_recall),
            interval(pair.kl_nats),
            interval(pair.forced),
            number(pair.p_forced, 3),
        )
    return table


def experiment_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Lines of `bench/gpu`: what was measured, and each of its values with its unit."""
    table = Table(box=None, pad_edge=False)
    table.add_column("experiment")
    table.add_column("what")
    table.add_column("measured")
    for line in lines:
        rest = {key: value for key, value in line.items() if key not in ("experiment", "what")}
        values = ", ".join(f"{key} {_short(value)}" for key, value in rest.items())
        table.add_row(str(line["experiment"]), str(line.get("what", "")), values)
    return table


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def turn_table(rows: Sequence[TurnRow], title: str) -> Table:
    """What a session recalls, brings back and moves, turn by turn."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    headings = ("turns", "gold recall", "were away", "resurrected", "churn", "seen before")
    for heading in (*headings, "MB in a turn", "answered"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.n),
            interval(row.gold_recall),
            str(row.n_away),
            interval(row.resurrected),
            interval(row.churn),
            number(row.returned),
            number(row.bytes_in / 1e6, 1),
            number(row.answered),
        )
    return table


def gate_table(gates: Sequence[Gate]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("gate", "policy", "value", "bar", ""):
        table.add_column(heading)
    for gate in gates:
        bar = f"{'>=' if gate.at_least else '<='} {gate.bar:.2f}"
        verdict = "passed" if gate.passed else "missed"
        table.add_row(gate.what, gate.policy, number(gate.value), bar, verdict)
    return table


def speed_table(rows: Sequence[SpeedRow], ratios: Sequence[Ratio]) -> Table:
    """One line for each system, phase and depth; kvmem's rate over the others' beside them."""
    over = {(ratio.depth_tokens, ratio.phase, ratio.against): ratio.value for ratio in ratios}
    title = "reading and writing behind the history: medians; reserve: writing, all cells in use"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("phase", "history", "system", "n"):
        table.add_column(heading, justify="right" if heading in ("history", "n") else "left")
    headings = ("tokens/s", "slowest .. fastest", "kvmem is", "stored, GB/s", "of plain copy")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        is_own = row.phase == "reserve"  # stock has no row of this name
        ratio = over.get((row.depth_tokens, row.phase, "stock" if is_own else row.system))
        table.add_row(
            row.phase,
            str(row.depth_tokens),
            row.system,
            str(row.n),
            number(row.tokens_per_s, 1),
            f"{row.slowest:.1f} .. {row.fastest:.1f}",
            "" if ratio is None else f"{ratio:.2f}x" + " of stock's decode" * is_own,
            "" if row.to_host_per_s is None else number(row.to_host_per_s / 1e9, 2),
            "" if row.of_ceiling is None else number(row.of_ceiling),
        )
    return table


def request_table(rows: Sequence[RequestRow]) -> Table:
    """Time to the first token, cold and warm, and what was moved for it."""
    title = "one request of one token: medians, in ms"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("request", "system", "decision"):
        table.add_column(heading)
    headings = ("history", "n", "first token", "fastest .. slowest", "beside reading")
    for heading in (*headings, "MB in", "GB/s", "of plain copy"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.kind + ", in a row" * row.in_a_row,
            row.system,
            row.decision,
            str(row.depth_tokens),
            str(row.n),
            number(1e3 * row.first_token_s, 1),
            f"{1e3 * row.fastest_s:.1f} .. {1e3 * row.slowest_s:.1f}",
            number(1e3 * row.overhead_s, 1),
            number(row.bytes_in / 1e6, 1),
            "-" if row.to_device_per_s is None else number(row.to_device_per_s / 1e9, 2),
            "-" if row.of_ceiling is None else number(row.of_ceiling),
        )
    return table


def phase_table(rows: Sequence[RequestRow]) -> Table:
    """What a first token's time consists of: a line for each phase, a column for each request."""
    title = "the first token of the median request, in ms"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("phase")
    for row in rows:
        kind = f"{row.kind}, in a row" if row.in_a_row else row.kind
        table.add_column(f"{kind}, {row.depth_tokens}", justify="right")
    for name, what in PHASES.items():
        seconds = [row.phases.get(name, 0.0) for row in rows]
        if name == "other_s" or any(seconds):
            table.add_row(what, *(number(1e3 * each, 1) for each in seconds))
    table.add_row("all", *(number(1e3 * sum(row.phases.values()), 1) for row in rows))
    return table


def remote_table(rows: Sequence[RemoteRow]) -> Table:
    """One line for each depth, cold and warm; beside it what the server says of itself."""
    title = "rates in tokens/s, as the client sees them and as the server tells them"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("request")
    headings = ("history", "n", "prompt", "new", "first token, ms", "prefill", "decode")
    for heading in (*headings, "its own prefill", "its own decode"):
        table.add_column(heading, justify="right")
    for row in rows:
        own = (row.own_prefill_per_s, row.own_decode_per_s)
        table.add_row(
            row.kind,
            *map(str, (row.depth_tokens, row.n, row.prompt_tokens, row.new_tokens)),
            number(1e3 * row.first_token_s, 1),
            number(row.prefill_per_s, 1),
            number(row.decode_per_s, 1),
            *("-" if rate is None else number(rate, 1) for rate in own),
        )
    return table


def move_table(records: Sequence[AgentRecord]) -> Table:
    """What a task moved, and how fast beside the machine's plain copy: medians of its rounds."""
    title = "blocks that moved: in a round at the median"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("task")
    for heading in ("MB in", "GB/s", "of plain copy", "MB stored", "GB/s", "of plain copy"):
        table.add_column(heading, justify="right")
    for task in dict.fromkeys(record.task for record in records):
        group = [record for record in records if record.task == task]
        cells = [
            _median_of([r.bytes_in for r in group], 1e6),
            _median_of([r.to_device_per_s for r in group], 1e9),
            _median_of([r.of_ceiling for r in group], 1),
            _median_of([r.bytes_stored for r in group], 1e6),
            _median_of([r.to_host_per_s for r in group], 1e9),
            _median_of([r.to_host_of_ceiling for r in group], 1),
        ]
        table.add_row(task, *cells)
    return table


def _median_of(values: Sequence[float | None], unit: float) -> str:
    known = [value / unit for value in values if value is not None]
    return number(statistics.median(known)) if known else "-"


def round_table(records: Sequence[AgentRecord]) -> Table:
    """What kvmem's rounds consist of: the first, the last and all of each task, in seconds."""
    table = Table(title="rounds, in s", title_justify="left", box=None, pad_edge=False)
    table.add_column("phase")
    columns: list[dict[str, float]] = []
    for task in dict.fromkeys(record.task for record in records):
        rounds = [_seconds(record) for record in records if record.task == task]
        total = {name: sum(each[name] for each in rounds) for name in PHASES}
        columns += (rounds[0], rounds[-1], total)
        for heading in ("first", "last", "all"):
            table.add_column(f"{task}, {heading}", justify="right")
    for name, what in PHASES.items():
        if any(column[name] for column in columns):
            table.add_row(what, *(number(column[name], 3) for column in columns))
    table.add_row("all", *(number(sum(column.values()), 3) for column in columns))
    return table


def _seconds(record: AgentRecord) -> dict[str, float]:
    """Of each phase; what an old record does not tell is in the rest."""
    known = {name: (record.phases or {}).get(name, 0.0) for name in PHASES if name != "other_s"}
    total = record.prompt_s + record.decode_s
    return {**known, "other_s": total - sum(known.values())}


def agent_table(summaries: Sequence[AgentSummary]) -> Table:
    """One line for each task and system."""
    table = Table(title="rates in tokens/s", title_justify="left", box=None, pad_edge=False)
    table.add_column("task")
    table.add_column("system")
    headings = ("rounds", "tokens", "prefill first", "prefill all", "all/first", "decode")
    memory = ("RAM GiB", "GPU GiB", "all of the GPU")
    for heading in (*headings, "decode last", "read twice", "accepted", *memory):
        table.add_column(heading, justify="right")
    for row in summaries:
        peaks = (row.peak_rss_bytes, row.peak_gpu_bytes, row.peak_gpu_used_bytes)
        table.add_row(
            row.task,
            row.system,
            str(row.rounds),
            str(row.n_tokens),
            number(row.initial_per_s, 1),
            number(row.overall_per_s, 1),
            number(row.overall_over_initial),
            number(row.decode_per_s, 1),
            number(row.decode_last_per_s, 1),
            "-" if row.replay_share is None else number(row.replay_share, 3),
            "-" if row.accepted_share is None else number(row.accepted_share),
            *("-" if n is None else number(n / GIB) for n in peaks),
        )
    return table

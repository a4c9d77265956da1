"""The README's figures are those of the newest kept run of each kind."""

from itertools import takewhile
from pathlib import Path

from kvmem.bench.record import read_jsonl
from kvmem.bench.saved import load_recall, load_runs
from kvmem.bench.speed_summary import ratios, request_rows, speed_rows
from kvmem.bench.summary import DEFAULT_SIZE, Size, summarise

RESULTS = Path(__file__).parents[2] / "bench/results"


def newest(name: str) -> Path:
    return sorted(RESULTS.glob(f"{name}-20*.jsonl"))[-1]


def table(root: Path, head: str) -> list[list[str]]:
    """The README's table whose head begins so: the cells of its rows."""
    lines = iter((root / "README.md").read_text().splitlines())
    assert any(line.startswith(head) for line in lines), head
    next(lines)
    rows = takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]


def percent(share: float) -> str:
    """Whole per cents, where that makes no whole of less."""
    text = f"{100 * share:.0f} %"
    return f"{100 * share:.1f} %" if text == "100 %" and share < 1 else text


def test_the_readme_says_what_smollm2_recalled(root: Path) -> None:
    kept = [record for _, record in load_recall(newest("recall-smollm2"))]
    rows = {row.policy: row for row in summarise(kept)}
    named = {
        "kvmem (`fused`)": "fused @first",
        "the newest blocks": "recency",
        "the reference system's scorer (`cosine`)": "cosine @first",
        "the very blocks of the facts": "gold",
        "full attention over the same K and V": "full",
        "plain llama.cpp, full cache": "stock",
    }
    assert table(root, "| | fact's tokens visible") == [
        [
            name,
            percent(rows[policy].gold_recall.mean),
            f"{rows[policy].kl_nats.mean:.2f}",
            percent(rows[policy].forced.mean),
        ]
        for name, policy in named.items()
    ]


def test_the_readme_says_what_the_heads_alone_found(root: Path) -> None:
    found = load_recall(newest("quality-smollm2"))
    rows = {
        row.policy: row
        for row in summarise([record for cell, record in found if Size.of(cell) == DEFAULT_SIZE])
    }
    shares = [percent(rows[name].gold_recall.mean) for name in ("heads @first", "heads* @first")]
    n_bytes = [rows[name].bytes_per_token for name in ("heads* @first", "heads @first")]
    assert (
        f"the heads alone find {shares[0]} of the facts' tokens on text of two kinds, and "
        f"{shares[1]} with the four heads that `kvmem calibrate` picks "
        f"(n = {rows['heads @first'].n}), which take {n_bytes[0]:.0f} bytes a token in place of "
        f"{n_bytes[1]:.0f}."
    ) in (root / "README.md").read_text()


def test_the_readme_says_what_the_recall_model_answered(root: Path) -> None:
    right: dict[tuple[str, int, int], dict[tuple[str, int], bool]] = {}
    for line in read_jsonl(newest("recall-heldout")):
        if "policy" not in line or line.get("n_drafts"):
            continue
        answers = right.setdefault((line["policy"], line["divisor"], line["block_tokens"]), {})
        for index, (kind, is_right) in enumerate(zip(line["kinds"], line["right"], strict=True)):
            if kind != "none":  # what was never told
                answers[line["conversation"], index] = bool(is_right)
    full = right["full", 4, 16]
    of_full = {
        run: sum(answers[question] for question in full if full[question]) / sum(full.values())
        for run, answers in right.items()
    }
    fused, eighth = ("fused", 4, 16), ("fused", 8, 16)
    assert table(root, f"| visible | right, of {len(full)} | of the {sum(full.values())} ") == [
        ["everything (plain llama.cpp)", str(sum(full.values())), "100 %"],
        ["kvmem (`fused`), a quarter in blocks of 16", str(sum(right[fused].values())),
         f"{100 * of_full[fused]:.1f} %"],
        ["an eighth", str(sum(right[eighth].values())), f"{100 * of_full[eighth]:.1f} %"],
        ["the newest blocks, a quarter", str(sum(right["recency", 4, 16].values())), ""],
        ["`fused` with its scores mixed up, a quarter", str(sum(right["shuffled", 4, 16].values())),
         ""],
    ]  # fmt: skip


def test_the_readme_says_what_the_gpu_did(root: Path) -> None:
    path = newest("speed-27b-h200")
    run = next(run for run in load_runs(RESULTS) if run.path == path)
    depth = max(record.depth_tokens for record in run.speeds)
    speeds = [record for record in run.speeds if record.depth_tokens == depth]
    rate: dict[tuple[str, str], float] = {
        (row.system, row.phase): row.tokens_per_s for row in speed_rows(speeds)
    }
    ratio: dict[tuple[str, str], float] = {
        (each.phase, each.against): each.value for each in ratios(speeds)
    }
    requests = [record for record in run.requests if record.depth_tokens == depth]
    first_s: dict[tuple[str, str], float] = {
        (row.system, row.kind): row.first_token_s
        for row in request_rows(requests)
        if row.in_a_row == (row.kind == "warm")
    }
    pool = next(record.device_bytes for record in requests if record.system == "kvmem")
    own_cells, own_gib = run.environment["settings"]["pool_tokens"], pool / (1 << 30)
    stock_gib = own_gib / own_cells * depth
    expected = [
        [name, f"{rate['kvmem', phase]:{form}}", f"{rate['stock', phase]:{form}}",
         f"{ratio[phase, 'stock']:.2f}"]
        for name, phase, form in (("decode, t/s", "decode", ".1f"),
                                  ("prefill, t/s", "prefill", ",.0f"))
    ]  # fmt: skip
    for name, kind, form in (
        ("the whole history", "cold", ".0f"),
        ("one more question", "warm", ".2f"),
    ):
        own, stock = first_s["kvmem", kind], first_s["stock", kind]
        expected.append([f"first token of {name}", f"{own:{form}} s", f"{stock:{form}} s",
                         f"{own / stock:.2g}"])  # fmt: skip
    held = (f"{own_gib:.1f} GiB", f"{stock_gib:.1f} GiB", f"{own_gib / stock_gib:.2f}")
    expected.append(["KV on the device", *held])
    head = f"| 27B shape (qwen35, IQ4_XS, q8_0 KV), one H200, at {depth:,} tokens of history"
    assert table(root, head) == expected

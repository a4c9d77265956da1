"""The filler of generator C: tool calls, logs, diffs, shell sessions and notes."""

import random
from typing import Final

from kvmem.bench.generators.base import Turn, draw

COLLEAGUES: Final = ("Freja", "Anselm", "Ottilie", "Casimir", "Ludmila")
"""Who the notes are about; each is named in many places of a history."""
PATHS: Final = (
    "src/parser/lexer.rs", "src/net/pool.go", "lib/retry.ts", "tests/test_cache.py", "ui/table.tsx",
    "infra/main.tf", "docs/setup.md", "scripts/release.sh", "src/index/merge.cc",
)  # fmt: skip
TASKS: Final = (
    "{who} wants you to look at {path}.", "{who} asks why {path} is so slow.",
    "Check {path} before {who} ships it.", "{who} touched {path} again; see what changed.",
)  # fmt: skip
THOUGHTS: Final = (
    "I should read the file first.", "The stack trace points here.",
    "A search will show who calls it.", "The tests may tell more than the code.",
)  # fmt: skip
CONCLUSIONS: Final = (
    "Nothing stands out here.", "This part is fine as it is.", "One helper is unused, no more.",
    "The change is harmless.", "I would leave it alone for now.",
)  # fmt: skip
EVENTS: Final = (
    "compaction finished in {n}ms", "evicted {k} idle sessions", "retrying upload, attempt {k}",
    "slow lock on shard {k}: {n}ms", "flushed {n} rows", "tls handshake with peer {k} failed",
    "lease renewed for {n}s", "dropped {k} late packets", "gc pause {n}us",
)  # fmt: skip
FEELINGS: Final = (
    "would rather rewrite the scheduler", "thinks the flaky test is a timing problem",
    "wants smaller reviews", "is tired of the build cache", "asked for a second screen",
    "prefers tabs, which nobody else does", "found the meeting too long",
    "left three comments and approved", "is learning to type on a split keyboard",
)  # fmt: skip
FUNCTIONS: Final = ("drain", "resolve", "splice", "hydrate", "coalesce", "backoff", "probe")


def tool(rng: random.Random) -> list[Turn]:
    """A task, a thought with a tool call, its result, a conclusion."""
    path, name = rng.choice(PATHS), rng.choice(("read_file", "grep", "list_dir", "run_tests"))
    rows = [
        f'{{"line": {rng.randrange(1, 900)}, "text": "{rng.choice(FUNCTIONS)}'
        f'({rng.choice(FUNCTIONS)}_{rng.randrange(1, 40)})"}}\n'
        for _ in range(rng.randrange(3, 7))
    ]
    call = f'{{"name": "{name}", "arguments": {{"path": "{path}"}}}}'
    return [
        Turn("user", (rng.choice(TASKS).format(path=path, who=rng.choice(COLLEAGUES)) + "\n",)),
        Turn("assistant", (f"{rng.choice(THOUGHTS)}\n<tool_call>\n{call}\n</tool_call>",)),
        Turn("user", ("<tool_response>\n", *rows, "</tool_response>\n")),
        Turn("assistant", (rng.choice(CONCLUSIONS),)),
    ]


def logs(rng: random.Random) -> list[Turn]:
    """Structured log lines."""
    lines = [
        f"level={rng.choice(('info', 'info', 'warn', 'debug'))} t={rng.randrange(10**5)} "
        f'msg="{rng.choice(EVENTS).format(n=rng.randrange(2, 900), k=rng.randrange(1, 20))}"\n'
        for _ in range(rng.randrange(5, 10))
    ]
    who = rng.choice(COLLEAGUES)
    return [Turn("user", (f"{who} sent the journal:\n", *lines)), _conclusion(rng)]


def diff(rng: random.Random) -> list[Turn]:
    """A patch for review."""
    path = rng.choice(PATHS)
    lines = [f"--- a/{path}\n+++ b/{path}\n"]
    for name in draw(rng, FUNCTIONS, 3):
        n = rng.randrange(2, 99)
        lines.append(f"@@ -{n},4 +{n},4 @@\n-    {name}(b, {n})\n+    {name}(b, {n + 1})\n")
    who = rng.choice(COLLEAGUES)
    return [Turn("user", (f"Review this for {who}:\n", *lines)), _conclusion(rng)]


def shell(rng: random.Random) -> list[Turn]:
    """A shell session that somebody pasted."""
    lines = [f"{rng.choice(COLLEAGUES)} pasted this:\n"]
    for _ in range(rng.randrange(2, 5)):
        lines.append(f"$ make {rng.choice(FUNCTIONS)}\n")
        lines.append(f"ok {rng.randrange(1, 400)} passed, {rng.randrange(0, 9)} skipped\n")
    return [Turn("user", tuple(lines)), _conclusion(rng)]


def notes(rng: random.Random) -> list[Turn]:
    """What colleagues said at the stand-up."""
    lines = [
        f"{who} {rng.choice(FEELINGS)}.\n" for who in draw(rng, COLLEAGUES, rng.randrange(3, 6))
    ]
    return [Turn("user", ("Stand-up notes.\n", *lines)), _conclusion(rng)]


def _conclusion(rng: random.Random) -> Turn:
    return Turn("assistant", (rng.choice(CONCLUSIONS),))

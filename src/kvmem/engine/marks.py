"""Where a prompt is likely to change next time: there a hybrid model saves its recurrent state."""

from dataclasses import dataclass

from kvmem.engine.prompt import Prompt

__all__ = ["Marks", "find_marks", "generation_start"]

# Where messages are not marked: a generation prompt is some tokens long, and a tokenizer may join
# the last ones with what follows.
GENERATION_TOKENS = 8
# Farther from the end than this, the last content found is not that of the last message.
MAX_GENERATION_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Marks:
    """Token indices to stop and save at, ascending.

    question: where the last user message begins; the question is read again from here.
    opening: where the last message ends, and what opens the reply begins; None where messages are
        not marked.
    """

    points: tuple[int, ...] = ()
    question: int | None = None
    opening: int | None = None


def generation_start(prompt: Prompt) -> int:
    """Where the last message ends, and what opens the reply begins."""
    n_tokens = len(prompt.tokens)
    if prompt.spans and n_tokens - prompt.spans[-1].span.stop <= MAX_GENERATION_TOKENS:
        return prompt.spans[-1].span.stop
    return max(0, n_tokens - GENERATION_TOKENS)


def find_marks(prompt: Prompt, *, shared: int) -> Marks:
    """The points of a prompt that leaves the history before it after ``shared`` tokens.

    - The end of what the system message opens, other conversations share it: where the first
      user's text begins, as a template may list the tools in between.
    - Where this prompt leaves the one before: agents change the end of a prompt again and again.
    - The end of the message before the question, rather than the question's first token: its role
      may change, too, and the role stands in front.
    - The end of the question: what follows it, a chain of tools, is written anew once the next
      question comes. It is the end of the last message, but where a chain is read whole.
    - The last part of the last message, where it has several: a reminder that is replaced.
    - The end of the last message. The generation prompt behind it is another one when the reply
      comes back as history: a template may open a thinking block there, and drop it later.
    """
    n_tokens = len(prompt.tokens)
    spans = [item.span for item in prompt.spans]
    points = {shared}
    before = [span.stop for span in spans]
    if prompt.spans and prompt.spans[0].role in ("system", "developer"):
        has_user = len(spans) > 1 and prompt.spans[1].role == "user"
        before[0] = spans[1].start if has_user else spans[0].stop
        points.add(before[0])
    question = None
    if prompt.query_span is not None:
        start = prompt.query_span.start
        question = max((end for end in before if end <= start), default=start)
        points |= {question, prompt.query_span.stop}
    opening = generation_start(prompt)
    points.add(opening)
    if prompt.last_part is not None:
        points.add(prompt.last_part)
    is_marked = bool(spans) and opening == spans[-1].stop
    return Marks(
        tuple(sorted(p for p in points if 0 < p < n_tokens)),
        question,
        opening if is_marked and opening < n_tokens else None,
    )

"""Drafts: the MTP head proposes tokens, one batch verifies them, and what fails is taken back."""

from collections import deque
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvmem.config import DraftConfig
from kvmem.errors import ModelError
from kvmem.llama.context import Context
from kvmem.llama.draft import DraftContext

__all__ = ["Drafter", "Worth", "make_drafter"]

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

# Requests over which drafts must pay, and how long they rest where they do not.
WINDOW_REQUESTS = 8
REST_REQUESTS = 32
# Less than this in a window says nothing.
MIN_DRAFTED_STEPS = 32
# One step in so many goes without drafts, to know what that costs: some 2 % of what they gain.
PLAIN_PERIOD = 32


@dataclass(slots=True)
class _Steps:
    """What one request took: the head for what was read, and steps with and without drafts."""

    read_s: float = 0.0
    n_drafted: int = 0
    drafted_tokens: int = 0
    drafted_s: float = 0.0
    n_plain: int = 0
    plain_s: float = 0.0


class Worth:
    """Whether drafts pay: the time of a token with them against that of a step without.

    The time that the head takes for prompts counts with that of the steps that it is for.
    """

    def __init__(self) -> None:
        self._window: deque[_Steps] = deque(maxlen=WINDOW_REQUESTS)
        self._now = _Steps()
        self._n_steps = 0
        self._n_rest = 0
        self._note = ""

    @property
    def is_off(self) -> bool:
        """Whether drafts rest."""
        return self._n_rest > 0

    def take_turn(self) -> bool:
        """Whether the next step should have drafts."""
        self._n_steps += 1
        return not self.is_off and self._n_steps % PLAIN_PERIOD != PLAIN_PERIOD // 2

    def count_reading(self, seconds: float) -> None:
        """What the head has taken for what was read, of this request or of one without a reply."""
        self._now.read_s += seconds

    def count(self, n_tokens: int, n_drafts: int, seconds: float) -> None:
        """A step that gave n_tokens, with n_drafts proposals."""
        if n_drafts:
            self._now.n_drafted += 1
            self._now.drafted_tokens += n_tokens
            self._now.drafted_s += seconds
        else:
            self._now.n_plain += 1
            self._now.plain_s += seconds

    def end_request(self) -> str:
        """Judge the window. Returns what the request should be told, or nothing."""
        if self.is_off:
            self._n_rest -= 1
            self._now = _Steps()  # what is judged later is measured later
            return self._note
        if self._now.n_drafted == 0:
            return ""  # what it took counts with the next one
        self._window.append(self._now)
        self._now = _Steps()
        if len(self._window) < WINDOW_REQUESTS:
            return ""
        n_drafted = sum(steps.n_drafted for steps in self._window)
        n_plain = sum(steps.n_plain for steps in self._window)
        if n_drafted < MIN_DRAFTED_STEPS or n_plain == 0:
            return ""
        n_tokens = sum(steps.drafted_tokens for steps in self._window)
        reading = sum(steps.read_s for steps in self._window) / n_tokens
        with_drafts = reading + sum(steps.drafted_s for steps in self._window) / n_tokens
        without = sum(steps.plain_s for steps in self._window) / n_plain
        if with_drafts <= without:
            return ""
        self._note = (
            f"drafts rest for {REST_REQUESTS} requests: over the last {WINDOW_REQUESTS} a token "
            f"took {1e3 * with_drafts:.2f} ms with them ({1e3 * reading:.2f} for prompts) "
            f"and {1e3 * without:.2f} ms without, at {n_tokens / n_drafted:.2f} tokens a step"
        )
        self._window.clear()
        self._n_rest = REST_REQUESTS
        return self._note


class Drafter:
    """Keeps the head in step with the history, and proposes what follows it.

    The head pairs each token with the hidden row of the one before, so the row of the newest token
    is a part of what a history is: checkpoints hold it. While drafts rest the head reads nothing.

    n_max, n_min, p_min: as DraftConfig has them. hidden: f32 [n_embd].
    """

    def __init__(
        self, head: DraftContext, n_max: int, *, n_min: int = 0, p_min: float = 0.0
    ) -> None:
        self.head = head
        self.n_max = n_max
        self.n_min = n_min
        self.p_min = p_min
        self.hidden: F32 = np.zeros(head.n_embd, np.float32)
        self.worth = Worth()
        self.seconds = 0.0
        self._counted_s = 0.0
        self._proposals = np.empty(n_max, np.int32)

    def clear(self) -> None:
        """Forget every token."""
        self.head.clear()
        self.hidden[:] = 0

    def follow(self, cells: I32, tokens: I32, pos: I32, *, skip: int = 0) -> None:
        """Take in what the leader has decoded, or leave it out while drafts rest; the first
        ``skip`` tokens are in already.

        cells, tokens, pos: int32 [n], of the leader's last batch or of its beginning.
        """
        started = perf_counter()
        if self.worth.is_off:
            self.head.skip(cells[skip:], tokens[skip:], pos[skip:])
        else:
            self.head.follow(cells, tokens, pos, self.hidden, skip=skip)
        self.head.hidden_row(len(tokens) - 1, self.hidden)
        self.seconds += perf_counter() - started

    def begin_reply(self) -> None:
        """What it has taken since the last reply was for reading."""
        self.worth.count_reading(self.seconds - self._counted_s)

    def end_reply(self) -> str:
        """Let drafts rest where they lost. Returns what the request should be told, or nothing."""
        self._counted_s = self.seconds
        return self.worth.end_request()

    def propose(self, cells: I32, token: I32, pos: I32, n: int) -> I32:
        """What may follow a token that is not decoded yet: int32 of at most n, and maybe of none;
        valid until the next call.

        token: int32 [1]. cells, pos: int32 [n] at least, of the token and what follows.
        """
        started = perf_counter()
        found = self.head.draft(
            cells, token, pos, self.hidden, self._proposals[:n], p_min=self.p_min
        )
        self.seconds += perf_counter() - started
        return self._proposals[: found if found >= self.n_min else 0]

    def close(self) -> None:
        self.head.close()


def make_drafter(context: Context, config: DraftConfig) -> Drafter:
    """A drafter over a context that was made with config.n_rollback.

    Raises ModelError: the model has no head, or its recurrent state cannot be rolled back.
    """
    head = DraftContext(context, type_k=config.type_k, type_v=config.type_v)
    if context.n_rs_seq < config.n_rollback:
        head.close()
        raise ModelError(
            f"{context.model.architecture}: no drafts: llama.cpp cannot take tokens out of its "
            "recurrent state; leave --spec-type out"
        )
    return Drafter(head, config.n_max, n_min=config.n_min, p_min=config.p_min)

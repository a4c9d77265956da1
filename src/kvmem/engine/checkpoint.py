"""Checkpoints.

Recurrent states by position. A hybrid model can go back to these and nowhere else.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from kvmem.errors import CapacityError
from kvmem.kv.budget import Charge, HostBudget
from kvmem.kv.port import DevicePort, HostMemory
from kvmem.llama.context import Context
from kvmem.llama.state import restore_state, save_state, state_bytes

__all__ = ["Checkpoint", "Checkpoints", "DeviceCopy"]

U8 = NDArray[np.uint8]

# 150 MiB each on the 27B shape. Enough for the last turn's three, the system prompt, and a spread
# over what lies between.
MAX_CHECKPOINTS = 8


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state after n_tokens tokens.

    state: u8, with the hidden row of a draft head behind it; its memory is charged as long as
    anything refers to it. holders: the histories that begin with these tokens. device_save: the
    save of a DeviceCopy that was of this state; none has the number -1.
    """

    n_tokens: int
    state: U8
    device_save: int = -1
    holders: "WeakSet[Checkpoints]" = field(default_factory=WeakSet)


class DeviceCopy:
    """One state that llama.cpp keeps on its device, beside the checkpoint that it belongs to.

    It comes back in a third of the time. llama.cpp has room for one: each save writes over the one
    before, whichever history that was of, and what is there cannot be copied to the host. So a
    checkpoint has its own memory on the host as well; without, it would be lost at the next save.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._n_saves = 0
        self._head = np.empty(0, np.uint8)  # says what is there, without the tensors

    def save(self, checkpoint: Checkpoint) -> None:
        """The state is this checkpoint's now: keep it on the device."""
        if self.holds(checkpoint):
            return
        self._n_saves += 1  # first: what a save that fails has written over is nobody's
        self._head = np.empty(state_bytes(self._context, on_device=True), np.uint8)
        save_state(self._context, self._head, on_device=True)
        checkpoint.device_save = self._n_saves

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether what is on the device is the state of this one."""
        return checkpoint.device_save == self._n_saves

    def restore(self, checkpoint: Checkpoint) -> None:
        """Make the state what it was; only of the one that it holds."""
        assert self.holds(checkpoint)
        restore_state(self._context, self._head, checkpoint.n_tokens, on_device=True)


class Checkpoints:
    """The checkpoints of one history, ascending, counted against the host limit.

    port: gives their memory. spare: buffers of dropped checkpoints, used again and still charged;
    histories share them.
    make_room: called where the host limit leaves no room; True if something else has left.
    hidden: f32, what goes back with the state: the row that a draft head goes on from. It is
    written in place.
    device: where the one that a second pass may begin from is kept as well; None for nowhere.
    limit: how many are kept. When one too many is saved, the least missed one goes (see
    `_by_loss`), so that they stand densely where a history changes again and again, near its
    end, and thinly far behind.
    needed: tokens before the one that a second pass may begin from. asked: before the one at the
    end of the last question, behind which a template writes the chain of tools anew once the next
    question comes. Both stay until they are the last that could go.
    """

    def __init__(
        self,
        context: Context,
        budget: HostBudget,
        port: DevicePort,
        limit: int = MAX_CHECKPOINTS,
        *,
        spare: list[U8] | None = None,
        make_room: Callable[[], bool] | None = None,
        hidden: NDArray[np.float32] | None = None,
        device: DeviceCopy | None = None,
    ) -> None:
        self._context = context
        self._device = device
        self._hidden = np.empty(0, np.float32) if hidden is None else hidden
        self._budget = budget
        self._port = port
        self._limit = limit
        self._saved: list[Checkpoint] = []
        self._spare = [] if spare is None else spare
        self._make_room = make_room
        self.needed = 0
        self.asked = 0

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def positions(self) -> list[int]:
        return [saved.n_tokens for saved in self._saved]

    @property
    def n_bytes(self) -> int:
        """What is charged for them."""
        return sum(map(len, (*(saved.state for saved in self._saved), *self._spare)))

    def save(self, n_tokens: int, *, is_needed: bool = False) -> bool:
        """Keep the state as it is now, after n_tokens tokens.

        is_needed: a second pass may begin from it, so it is kept on the device as well. Where the
        host limit leaves no room, an older one goes. Returns False, and keeps nothing,
        where not even one fits.
        """
        if not self._save_on_host(n_tokens):
            return False
        if is_needed and self._device is not None:
            self._device.save(self._saved[-1])
        return True

    def _save_on_host(self, n_tokens: int) -> bool:
        if self._saved and self._saved[-1].n_tokens == n_tokens:
            return True
        assert not self._saved or self._saved[-1].n_tokens < n_tokens, "checkpoints ascend"
        n_state = state_bytes(self._context)
        state = self._take(n_state + self._hidden.nbytes)
        if state is None:
            return False
        try:
            save_state(self._context, state[:n_state])
        except BaseException:
            self._spare.append(state)
            raise
        state[n_state:] = self._hidden.view(np.uint8)
        self._hold(Checkpoint(n_tokens, state))
        if len(self._saved) > self._limit:
            self._drop(self._by_loss()[0])
        return True

    def give_way(self, *, least: int = 0) -> bool:
        """Give the memory of the least missed one back, for what cannot be read again.

        least: how many stay, the newest among them. Returns False, and drops none, where that would
        give nothing back: another history holds them, too.
        """
        return self.give_back_spare() or (self._spare_one(least) and self.give_back_spare())

    def give_back_spare(self) -> bool:
        """Give the memory of a dropped one back, which no history holds; False if there is none."""
        if not self._spare:
            return False
        del self._spare[-1]
        return True

    def branch(self, n_tokens: int) -> "Checkpoints":
        """Those of a history that begins with the first n_tokens of this one."""
        fresh = Checkpoints(
            self._context,
            self._budget,
            self._port,
            self._limit,
            spare=self._spare,
            make_room=self._make_room,
            hidden=self._hidden,
            device=self._device,
        )
        for saved in self._saved:
            if saved.n_tokens <= n_tokens:
                fresh._hold(saved)
        return fresh

    def nearest(self, n_tokens: int) -> Checkpoint | None:
        """The newest checkpoint at or before n_tokens."""
        return next((saved for saved in reversed(self._saved) if saved.n_tokens <= n_tokens), None)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Make the state what it was then, and forget the checkpoints after it."""
        n_state = len(checkpoint.state) - self._hidden.nbytes
        if self._device is not None and self._device.holds(checkpoint):
            self._device.restore(checkpoint)
        else:
            restore_state(self._context, checkpoint.state[:n_state], checkpoint.n_tokens)
        self._hidden.view(np.uint8)[:] = checkpoint.state[n_state:]
        self.drop_after(checkpoint.n_tokens)

    def drop_after(self, n_tokens: int) -> None:
        """Forget the checkpoints beyond n_tokens."""
        while self._saved and self._saved[-1].n_tokens > n_tokens:
            self._drop(len(self._saved) - 1)

    def clear(self) -> None:
        """Forget all, and give their memory back."""
        self.drop_after(-1)
        while self.give_back_spare():
            pass

    def _take(self, n_bytes: int) -> U8 | None:
        """Memory for a state of this size, or None."""
        while True:
            while self._spare:
                if len(self._spare[-1]) == n_bytes:
                    return self._spare.pop()
                del self._spare[-1]
            with suppress(CapacityError, MemoryError):  # of the limit, or of the machine itself
                return self._allocate(n_bytes)
            if self._make_room is not None and self._make_room():
                continue
            if not self._spare_one():
                return None

    def _allocate(self, n_bytes: int) -> U8:
        """The device copies from and to it several times as fast as plain memory."""
        charge = Charge(self._budget, n_bytes, "a checkpoint of the recurrent state")
        state: U8 = np.asarray(memoryview(HostMemory(self._port, n_bytes, charge)))
        return state

    def _spare_one(self, least: int = 0) -> bool:
        """Drop the least missed one whose memory no other history holds; False if there is none."""
        if len(self._saved) <= least:
            return False
        order = self._by_loss()
        for index in order[:-1] if least else order:
            if len(self._saved[index].holders) == 1:
                self._drop(index)
                return True
        return False

    def _by_loss(self) -> list[int]:
        """Indices of the checkpoints, the one first whose loss costs least, in proportion.

        A history that changes right behind a checkpoint at h is read again from h to its end at e.
        Without that checkpoint the way begins at the one before, at b: it is (e - b) / (e - h)
        times as long. The smallest ratio goes first; what is needed and what was asked behind
        those; then the first: other conversations begin with the same system prompt. The newest
        goes last.
        """
        *behind, end = self.positions
        ratios = [
            inf if here in (self.needed, self.asked) else (end - before) / (end - here)
            for before, here in pairwise(behind)
        ]
        between = sorted(range(len(ratios)), key=ratios.__getitem__)
        return [*(1 + index for index in between), *([0] if behind else []), len(behind)]

    def _hold(self, checkpoint: Checkpoint) -> None:
        checkpoint.holders.add(self)
        self._saved.append(checkpoint)

    def _drop(self, index: int) -> None:
        dropped = self._saved.pop(index)
        dropped.holders.discard(self)
        if not dropped.holders:
            self._spare.append(dropped.state)

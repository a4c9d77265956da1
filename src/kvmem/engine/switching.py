"""Conversations take turns on the device: branching, switching, forgetting.

Which one, and when, engine.conversations decides.
"""

from kvmem.engine.conversation import Conversation
from kvmem.engine.memory import TieredMemory
from kvmem.errors import HostCapacityError
from kvmem.kv.transfer import Transfer

__all__ = ["branch", "forget", "switch"]


def branch(memory: TieredMemory, source: Conversation, n_tokens: int) -> Conversation:
    """A new conversation that begins with the first n_tokens of another, which stays as it is.

    They share what is complete. Raises CapacityError, TransferError; then there is none.
    """
    if source is memory.active:
        memory.try_seal()
        memory.worker.flush()
    history = memory.with_room(lambda: memory.working_set.branch(source.history, n_tokens))
    n_blocks = min(n_tokens // memory.block_tokens, source.lexical.n_blocks)
    return Conversation(
        history=history,
        summaries=source.summaries.branch(n_blocks),
        lexical=source.lexical.branch(n_blocks),
        checkpoints=source.checkpoints.branch(n_tokens),
        question=source.question,
        known=source.known,
    )


def switch(memory: TieredMemory, target: Conversation, n_tokens: int) -> Transfer:
    """Put another conversation on the device, cut back to n_tokens or a checkpoint before.

    Of the one that leaves, everything is kept; if there is no room for its state, it ends at the
    checkpoint before, and if there is none for its blocks, it is forgotten. Both are noted.

    Raises:
        CapacityError, TransferError: the one that was there is still there, or a new, empty one is
            (see WorkingSet.switch); memory.active says which.
    """
    memory.try_seal()
    memory.worker.flush()
    if memory.port.is_recurrent_valid:
        memory.save_checkpoint()
    try:
        transfer = _switch_blocks(memory, target)
        _make_active(memory, target)
        if not memory.is_hybrid:
            memory.restore_order()
            memory.truncate(n_tokens)
        elif memory.n_tokens:
            memory.go_back(n_tokens)
        else:
            memory.clear_device()
    except BaseException:
        _agree_again(memory, target)
        raise
    memory.renew_summaries()
    return transfer


def _switch_blocks(memory: TieredMemory, target: Conversation) -> Transfer:
    working_set = memory.working_set

    def leave() -> Transfer:
        _end_at_checkpoint(memory)  # each time: the last one may have given way
        return working_set.switch(target.history)

    try:
        return memory.with_room(leave)
    except HostCapacityError as error:
        memory.note(f"a conversation of {memory.n_tokens} tokens could not be kept: {error}")
        memory.clear()
        return working_set.switch(target.history)


def _end_at_checkpoint(memory: TieredMemory) -> None:
    """A hybrid history leaves with its state: where that is not saved, it ends before."""
    n_tokens = memory.n_tokens
    if memory.is_hybrid and n_tokens and memory.checkpoints.positions[-1:] != [n_tokens]:
        memory.go_back(n_tokens)


def _make_active(memory: TieredMemory, conversation: Conversation) -> None:
    memory.active = conversation
    memory.worker.attach(conversation.summaries)


def _agree_again(memory: TieredMemory, target: Conversation) -> None:
    """After an error: the active conversation is the one whose blocks are on the device, and no
    recurrent state of another one stays with them.
    """
    history = memory.working_set.history
    if history is target.history:
        _make_active(memory, target)
        if memory.is_hybrid:
            memory.clear()
    elif history is not memory.active.history:
        _make_active(memory, memory.conversation_of(history))
        memory.clear_device()


def forget(memory: TieredMemory, conversation: Conversation) -> None:
    """Give all memory of a conversation back, on the device or not."""
    if conversation is memory.active:
        memory.clear()
        return
    conversation.checkpoints.clear()
    conversation.lexical.truncate(0)
    conversation.summaries.truncate(0)
    conversation.history.forget()

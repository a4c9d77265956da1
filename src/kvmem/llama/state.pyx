"""The recurrent state of a hybrid model, as bytes: it cannot be rewound, only restored."""

from kvmem.errors import StateError, TransferError
from kvmem.llama cimport c_adapter as a
from kvmem.llama cimport c_llama as c
from kvmem.llama import log
from kvmem.llama.context cimport Context

__all__ = ["is_state_valid", "restore_state", "roll_back_state", "save_state", "state_bytes"]

cdef int SEQ = 0


cdef inline c.llama_state_seq_flags _flags(bint on_device) noexcept nogil:
    cdef c.llama_state_seq_flags flags = c.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    return flags | c.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE if on_device else flags


cdef int _check_device(Context context) except -1:
    """llama.cpp would end the process."""
    if context._memory != NULL and a.kvmem_device_check(context._memory) != a.KVMEM_OK:
        raise TransferError(a.kvmem_last_error().decode("utf-8", "replace"))
    return 0


def state_bytes(Context context not None, *, bint on_device=False):
    """Bytes that save_state writes now."""
    if not context.model.is_hybrid:
        raise StateError("the model keeps no recurrent state")
    return c.llama_state_seq_get_size_ext(context.get(), SEQ, _flags(on_device))


def save_state(Context context not None, unsigned char[::1] out not None, *, bint on_device=False):
    """Copy the recurrent state to ``out``: u8 [state_bytes].

    on_device: keep its tensors on their devices, in one copy that the next such call writes over;
    ``out`` says what they are.

    Raises StateError if it is not usable (see is_state_valid), TransferError behind a lost device.
    """
    cdef c.llama_context *ctx = context.get()
    cdef size_t n_bytes = out.shape[0]
    cdef size_t written
    _check_device(context)
    if not is_state_valid(context):
        raise StateError("the recurrent state is not usable: restore one, or read again")
    with nogil:
        written = c.llama_state_seq_get_data_ext(ctx, &out[0], n_bytes, SEQ, _flags(on_device))
    if written != n_bytes:
        errors = log.drain()
        what = f"the recurrent state has {written} bytes, not {n_bytes}"
        raise StateError("; ".join([what, *errors]))


def restore_state(Context context not None, const unsigned char[::1] state not None, int n_tokens,
                  *, bint on_device=False):
    """Put a saved state back, which has seen n_tokens tokens.

    on_device: as it was saved. After a StateError the state is not usable. Raises TransferError
    behind a lost device.
    """
    cdef c.llama_context *ctx = context.get()
    cdef size_t n_bytes = state.shape[0]
    cdef size_t taken
    _check_device(context)
    with nogil:
        taken = c.llama_state_seq_set_data_ext(ctx, &state[0], n_bytes, SEQ, _flags(on_device))
    if taken != n_bytes:
        errors = log.drain()
        raise StateError("; ".join(["the recurrent state could not be restored", *errors]))
    context.n_seen = n_tokens
    if context._memory != NULL:
        a.kvmem_recurrent_restored(context._memory)


def roll_back_state(Context context not None, int n_tokens):
    """Take the last n tokens of the last batch out of the state: at most context.n_rs_seq, once.

    n_tokens: fewer than the batch had. After a StateError the state is not usable. Raises
    TransferError behind a lost device.
    """
    _check_device(context)
    if a.kvmem_recurrent_rollback(context.memory(), n_tokens) != a.KVMEM_OK:
        raise StateError(a.kvmem_last_error().decode("utf-8", "replace"))
    context.n_seen -= n_tokens


def is_state_valid(Context context not None):
    """False after a failed decode: the state has seen tokens that the history does not hold.

    A stock context does not tell.
    """
    return context._memory == NULL or a.kvmem_recurrent_valid(context._memory) != 0

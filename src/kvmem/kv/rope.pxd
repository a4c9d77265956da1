# One rotation, undone. A Rotation belongs to one thread at a time.
cdef struct Rotation:
    int n_half        # rotated pairs of dims in a head
    int first         # first rotated dim
    bint adjacent     # the dims of a pair are neighbours; else they are n_half apart
    double *freq      # [n_half], radians per position
    int *section      # [n_half], which of the four positions turns this pair
    float *weight     # [2 * n_half], of the rotated dims; NULL for none
    double scale      # 1 / magnitude that the rotation multiplied in
    float *cos_       # [max_rows, n_half], times scale
    float *sin_

cdef int rotation_open(Rotation *rotation, spec, int max_rows) except -1
cdef void rotation_close(Rotation *rotation) noexcept nogil
cdef void rotation_fill(Rotation *rotation, const int *pos, int n_rows) noexcept nogil
cdef void rotation_undo(const Rotation *rotation, int row, float *head) noexcept nogil
cdef void hadamard(float *x, int n, int size) noexcept nogil

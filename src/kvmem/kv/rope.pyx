"""Un-rotation: from stored K rows, or tapped Q rows, back to what they were before RoPE.

The angle of pair i at position p is p * f_i, with
    f_i = base^(-2i/n_dims) / factor_i * (scale * (1 - r_i) + r_i)
where r_i is YaRN's ramp times ext_factor (0 without YaRN). The rotation multiplies by
attn_factor, and by 1 + 0.1 ln(1/scale) under YaRN; both are divided out.
Weights behind the rotation are taken off before it is undone and put on again after it: what is
left is the vector as it would be at position 0.
Angles, sines and cosines are taken in double: at position 200,000 a float angle is 0.01 off.
Source: ggml-cpu/ops.cpp, rope_yarn and ggml_mrope_cache_init; YaRN, arXiv 2309.00071, section 3.
"""

from libc.math cimport ceil, cos, floor, fmax, fmin, log, pow, sin, sqrt
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from kvmem.kv.layout import ROPE_IMROPE, ROPE_MROPE, ROPE_NORMAL

__all__ = ["unrotate"]

cdef double TWO_PI = 6.283185307179586


cdef double _corr_dim(int n_dims, double n_ctx, double turns, double base) noexcept nogil:
    # The (fractional) dim that turns `turns` times over the trained context.
    return n_dims * log(n_ctx / (turns * TWO_PI)) / (2 * log(base))


cdef int _section_of(int i, int mode_interleaved, int s0, int s1, int s2, int s3) noexcept nogil:
    cdef int sector = i % (s0 + s1 + s2 + s3)
    if mode_interleaved:
        if sector % 3 == 1 and sector < 3 * s1:
            return 1
        if sector % 3 == 2 and sector < 3 * s2:
            return 2
        return 0 if sector % 3 == 0 and sector < 3 * s0 else 3
    if sector < s0:
        return 0
    if sector < s0 + s1:
        return 1
    return 2 if sector < s0 + s1 + s2 else 3


cdef int rotation_open(Rotation *rotation, spec, int max_rows) except -1:
    """Allocate the tables of a RopeSpec for up to max_rows positions. rotation: zeroed memory."""
    cdef int i, n_half = spec.n_dims // 2
    cdef int s0, s1, s2, s3
    cdef double low = 0, high = 0, ramp, scale = spec.freq_scale, base = spec.freq_base
    rotation.n_half = n_half
    rotation.first = spec.offset
    rotation.adjacent = spec.mode == ROPE_NORMAL
    rotation.freq = <double *>malloc(n_half * sizeof(double))
    rotation.section = <int *>calloc(n_half, sizeof(int))
    rotation.cos_ = <float *>malloc(<size_t>max_rows * n_half * sizeof(float))
    rotation.sin_ = <float *>malloc(<size_t>max_rows * n_half * sizeof(float))
    weights = spec.weights
    if weights is not None:
        rotation.weight = <float *>malloc(2 * n_half * sizeof(float))
        if rotation.weight:
            for i in range(2 * n_half):
                rotation.weight[i] = weights[spec.offset + i]
    if not (rotation.freq and rotation.section and rotation.cos_ and rotation.sin_
            and (weights is None or rotation.weight)):
        rotation_close(rotation)
        raise MemoryError()

    rotation.scale = 1.0 / spec.attn_factor
    has_yarn = spec.ext_factor != 0
    if has_yarn:
        rotation.scale /= 1.0 + 0.1 * log(1.0 / scale)
        low = fmax(0, floor(_corr_dim(spec.n_dims, spec.n_ctx_orig, spec.beta_fast, base)))
        high = ceil(_corr_dim(spec.n_dims, spec.n_ctx_orig, spec.beta_slow, base))
        high = fmin(spec.n_dims - 1, high)
    factors = spec.freq_factors
    has_sections = spec.mode in (ROPE_MROPE, ROPE_IMROPE)
    s0, s1, s2, s3 = spec.sections
    for i in range(n_half):
        ramp = 0
        if has_yarn:
            ramp = 1 - fmin(1, fmax(0, (i - low) / fmax(0.001, high - low)))
            ramp *= spec.ext_factor
        rotation.freq[i] = pow(base, -2.0 * i / spec.n_dims) * (scale * (1 - ramp) + ramp)
        if factors is not None:
            rotation.freq[i] /= factors[i]
        if has_sections:
            rotation.section[i] = _section_of(i, spec.mode == ROPE_IMROPE, s0, s1, s2, s3)
    return 0


cdef void rotation_close(Rotation *rotation) noexcept nogil:
    free(rotation.freq)
    free(rotation.section)
    free(rotation.cos_)
    free(rotation.sin_)
    free(rotation.weight)
    rotation.weight = NULL
    rotation.freq = NULL
    rotation.section = NULL
    rotation.cos_ = NULL
    rotation.sin_ = NULL


cdef void rotation_fill(Rotation *rotation, const int *pos, int n_rows) noexcept nogil:
    """Sines and cosines for pos [n_rows, 4]; n_rows <= max_rows."""
    cdef int row, i
    cdef double theta
    cdef float *c
    cdef float *s
    for row in range(n_rows):
        c = rotation.cos_ + <size_t>row * rotation.n_half
        s = rotation.sin_ + <size_t>row * rotation.n_half
        for i in range(rotation.n_half):
            theta = pos[4 * row + rotation.section[i]] * rotation.freq[i]
            c[i] = <float>(cos(theta) * rotation.scale)
            s[i] = <float>(sin(theta) * rotation.scale)


cdef void rotation_undo(const Rotation *rotation, int row, float *head) noexcept nogil:
    """Turn one head back by the angles of `row`, in place."""
    cdef int i, n_half = rotation.n_half
    cdef float a, b
    cdef const float *c = rotation.cos_ + <size_t>row * n_half
    cdef const float *s = rotation.sin_ + <size_t>row * n_half
    cdef float *x = head + rotation.first
    cdef float *y = x + n_half
    if rotation.weight:
        for i in range(2 * n_half):  # a dim of weight 0 says nothing, and gets nothing below
            x[i] = x[i] / rotation.weight[i] if rotation.weight[i] else 0
    if rotation.adjacent:
        for i in range(n_half):
            a = x[2 * i]
            b = x[2 * i + 1]
            x[2 * i] = a * c[i] + b * s[i]
            x[2 * i + 1] = b * c[i] - a * s[i]
    else:
        for i in range(n_half):
            a = x[i]
            b = y[i]
            x[i] = a * c[i] + b * s[i]
            y[i] = b * c[i] - a * s[i]
    if rotation.weight:
        for i in range(2 * n_half):
            x[i] *= rotation.weight[i]


cdef void hadamard(float *x, int n, int size) noexcept nogil:
    """Orthonormal Walsh-Hadamard transform of each `size` values, in place; its own inverse."""
    cdef int start = 0, half, i, j
    cdef float a, b
    cdef float norm = <float>(1.0 / sqrt(<double>size))
    cdef float *v
    while start < n:
        v = x + start
        half = 1
        while half < size:
            i = 0
            while i < size:
                for j in range(i, i + half):
                    a = v[j]
                    b = v[j + half]
                    v[j] = a + b
                    v[j + half] = a - b
                i += 2 * half
            half *= 2
        for j in range(size):
            v[j] *= norm
        start += size


def unrotate(
    float[:, :, ::1] rows not None, const int[:, ::1] pos not None, spec, int hadamard_size=0
):
    """Undo the Hadamard transform and the rotation of rows, in place.

    rows: f32 [n_rows, n_heads, head_dim]; pos: i32 [n_rows, 4]; spec: RopeSpec, or None (NoPE).
    """
    cdef Py_ssize_t n_rows = rows.shape[0]
    cdef Py_ssize_t n_heads = rows.shape[1]
    cdef int dim = <int>rows.shape[2]
    cdef Py_ssize_t row, head
    cdef Rotation rotation
    cdef bint rotates = spec is not None
    if pos.shape[0] != n_rows or pos.shape[1] != 4:
        raise ValueError(f"pos is {pos.shape[0]} x {pos.shape[1]}, rows need {n_rows} x 4")
    if hadamard_size and (hadamard_size & (hadamard_size - 1) or dim % hadamard_size):
        raise ValueError(f"hadamard_size {hadamard_size} is no power of two that divides {dim}")
    if spec is not None and spec.offset + spec.n_dims > dim:
        raise ValueError(f"the rotation reaches dim {spec.offset + spec.n_dims}, rows have {dim}")
    if n_rows == 0 or n_heads == 0:
        return
    memset(&rotation, 0, sizeof(rotation))
    if rotates:
        rotation_open(&rotation, spec, <int>n_rows)
    with nogil:
        if rotates:
            rotation_fill(&rotation, &pos[0, 0], <int>n_rows)
        for row in range(n_rows):
            for head in range(n_heads):
                if hadamard_size:
                    hadamard(&rows[row, head, 0], dim, hadamard_size)
                if rotates:
                    rotation_undo(&rotation, <int>row, &rows[row, head, 0])
        rotation_close(&rotation)

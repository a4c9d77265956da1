# What all calls of the bridge have in common.
cdef bytes as_json(value, str what)
cdef int check(int status, str refused, str failed) except -1
cdef bytes take(int status, char *text, size_t n_text, str refused, str failed)
cdef str last_error()

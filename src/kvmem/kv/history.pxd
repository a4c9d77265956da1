from kvmem.kv.block cimport BlockTable
from kvmem.kv.budget cimport HostBudget
from kvmem.kv.port cimport DevicePort
from kvmem.kv.store cimport HostStore


cdef class History:
    cdef readonly BlockTable table
    cdef readonly HostStore store
    cdef int[:, ::1] window       # [n, 2], block and slot, by block: what was resident when it left

    cdef int take_window(self, History other) except -1

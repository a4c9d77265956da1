# The CUDA backend: what to compile for the KV types that kvmem offers, and a compiler known to be wrong.
find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_FOUND)
    message(FATAL_ERROR
        "kvmem: KVMEM_CUDA is on but no CUDA toolkit was found; put nvcc on PATH, set CUDAToolkit_ROOT, or turn it off.")
endif()
if(NOT TARGET CUDA::cublas)
    message(FATAL_ERROR
        "kvmem: the CUDA toolkit ${CUDAToolkit_VERSION} has no cuBLAS; install it (libcublas-dev), or turn KVMEM_CUDA off.")
endif()
if(NOT TARGET CUDA::cuda_driver AND NOT GGML_CUDA_NO_VMM)
    message(FATAL_ERROR
        "kvmem: neither a driver nor the toolkit's stub of libcuda was found; install one, or set GGML_CUDA_NO_VMM.")
endif()
if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 13.2 AND CUDAToolkit_VERSION VERSION_LESS 13.2.86)
    message(WARNING
        "kvmem: nvcc ${CUDAToolkit_VERSION} miscompiles IQ1_S, IQ2_S and IQ3_S weights; use 13.0, or 13.2.86 or newer.")
endif()
set(GGML_CUDA ON CACHE BOOL "" FORCE)
# Flash-attention kernels in equal pairs; a pair that is not here still runs, through a conversion to F16.
set(GGML_CUDA_FA_QUANTS "q4_0-q4_0;q5_0-q5_0;q8_0-q8_0;f16-f16" CACHE STRING "")

# For the GPUs of this machine, or where it has none and in releases, for what ggml compiles for when it is not told.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    find_program(KVMEM_NVIDIA_SMI nvidia-smi)
    if(KVMEM_NVIDIA_SMI AND NOT KVMEM_RELEASE)
        set(CMAKE_CUDA_ARCHITECTURES native)
    else()
        set(CMAKE_CUDA_ARCHITECTURES 75-virtual 80-virtual 86-real 89-real 90-virtual)
        if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
            list(APPEND CMAKE_CUDA_ARCHITECTURES 120a-real)
        endif()
        if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.9)
            list(APPEND CMAKE_CUDA_ARCHITECTURES 121a-real)
        endif()
    endif()
endif()

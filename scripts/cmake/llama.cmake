# llama.cpp, from KVMEM_LLAMA_DIR, under our own library names.
#
# ggml and llama are shared, llama-common is a static library inside kvmem-bridge, so that nothing of it is exported.
# Sets KVMEM_LLAMA_LIBS (all that is installed) and KVMEM_LINK_LIBS (what a binding links).
set(LLAMA_BUILD_COMMON OFF CACHE INTERNAL "")
set(LLAMA_BUILD_MTMD OFF CACHE INTERNAL "")
foreach(part TESTS TOOLS EXAMPLES SERVER APP UI)
    set(LLAMA_BUILD_${part} OFF CACHE INTERNAL "")
endforeach()
set(LLAMA_USE_PREBUILT_UI OFF CACHE INTERNAL "")
set(LLAMA_OPENSSL OFF CACHE INTERNAL "")
set(LLAMA_SUBPROCESS OFF CACHE INTERNAL "")
set(LLAMA_LLGUIDANCE OFF CACHE INTERNAL "")
set(GGML_OPENMP OFF CACHE BOOL "a wheel must run where no libgomp is")
if(KVMEM_RELEASE)
    set(GGML_BACKEND_DL ON CACHE BOOL "" FORCE)
    set(GGML_NATIVE OFF CACHE BOOL "" FORCE)
    if(NOT DEFINED GGML_CPU_ALL_VARIANTS)
        set(GGML_CPU_ALL_VARIANTS ON CACHE BOOL "")
    endif()
endif()
if(KVMEM_CUDA)
    include(scripts/cmake/cuda.cmake)
    enable_language(CUDA)  # here and not only in ggml's folder: the adapter has a kernel
endif()

file(STRINGS ${CMAKE_CURRENT_SOURCE_DIR}/vendor/PIN build_line REGEX "^build = ")
string(REGEX REPLACE "^build = " "" LLAMA_BUILD_NUMBER "${build_line}")
set(LLAMA_BUILD_COMMIT b${LLAMA_BUILD_NUMBER})
if(KVMEM_LLAMA_SOURCE)
    set(LLAMA_BUILD_NUMBER 0)
    set(LLAMA_BUILD_COMMIT checkout)
endif()

# Only what scripts/cmake/<map> names stays visible in `target`.
function(kvmem_limit_exports target map)
    set(path ${CMAKE_CURRENT_SOURCE_DIR}/scripts/cmake/${map})
    target_link_options(${target} PRIVATE LINKER:--version-script=${path})
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${path})
endfunction()

function(kvmem_add_llama)
    set(GIT_EXE "")  # else ggml takes our own commit for its
    set(BUILD_SHARED_LIBS ON)
    add_subdirectory(${KVMEM_LLAMA_DIR} vendor/llama EXCLUDE_FROM_ALL)
    set(BUILD_SHARED_LIBS OFF)
    set(PROJECT_SOURCE_DIR ${KVMEM_LLAMA_DIR})  # build-info looks for a git index there, not in ours,
    set(CMAKE_MESSAGE_LOG_LEVEL ERROR)          # and warns that there is none
    set(BUILD_COMPILER "${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION}")
    set(BUILD_TARGET "${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}")
    # llama-common's downloader wants an HTTP library; nothing that the bridge links does, as -z defs proves.
    add_library(cpp-httplib INTERFACE)
    add_subdirectory(${KVMEM_LLAMA_DIR}/common vendor/common EXCLUDE_FROM_ALL)
endfunction()
kvmem_add_llama()

# Upstream's SONAMEs would bind to the copy of another package in the same process. GGML_AVAILABLE_BACKENDS is ggml's
# list of what it builds: one or more CPU backends, perhaps CUDA; in the release form they are modules that are loaded.
set(KVMEM_LLAMA_LIBS)
set(KVMEM_LINK_LIBS)
foreach(target llama ggml ggml-base ${GGML_AVAILABLE_BACKENDS})
    if(NOT TARGET ${target})
        continue()
    endif()
    get_target_property(type ${target} TYPE)
    set_property(TARGET ${target} PROPERTY OUTPUT_NAME kvmem-${target})
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
    set_property(TARGET ${target} PROPERTY PUBLIC_HEADER)
    set_property(TARGET ${target} PROPERTY INSTALL_RPATH $ORIGIN)
    target_link_options(${target} PRIVATE LINKER:-Bsymbolic)
    list(APPEND KVMEM_LLAMA_LIBS ${target})
    if(type STREQUAL "SHARED_LIBRARY")
        list(APPEND KVMEM_LINK_LIBS ${target})
    endif()
endforeach()

# The adapter needs llama.cpp's internal classes, so it is compiled into the llama target; only its C API is exported.
file(GLOB adapter_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/kvmem/adapter/*.cpp)
target_sources(llama PRIVATE ${adapter_sources})
target_include_directories(llama PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/src/kvmem/adapter)
set_source_files_properties(${adapter_sources} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
if(KVMEM_CUDA)
    set(cuda_source ${CMAKE_CURRENT_SOURCE_DIR}/src/kvmem/adapter/kvmem-transfer.cu)
    target_sources(llama PRIVATE ${cuda_source})
    set_source_files_properties(${cuda_source} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    target_compile_definitions(llama PRIVATE KVMEM_CUDA)
    target_link_libraries(llama PRIVATE CUDA::cudart)
endif()
kvmem_limit_exports(llama llama.map)

# The bridge hides llama-common: templates, chat parsing and samplers behind a C API of strings and handles.
file(GLOB bridge_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/kvmem/bridge/*.cpp)
if(bridge_sources)
    add_library(kvmem-bridge SHARED ${bridge_sources})
    target_include_directories(kvmem-bridge PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/src/kvmem/bridge)
    target_link_libraries(kvmem-bridge PRIVATE llama-common llama)
    target_link_options(kvmem-bridge PRIVATE LINKER:-Bsymbolic LINKER:-z,defs
        LINKER:--wrap=fprintf LINKER:--wrap=__fprintf_chk)
    kvmem_limit_exports(kvmem-bridge bridge.map)
    set_property(TARGET kvmem-bridge PROPERTY INSTALL_RPATH $ORIGIN)
    list(APPEND KVMEM_LLAMA_LIBS kvmem-bridge)
    list(APPEND KVMEM_LINK_LIBS kvmem-bridge)
endif()

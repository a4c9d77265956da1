# Where llama.cpp comes from: the pin in vendor/, or a user's checkout copied into the build folder. Sets KVMEM_LLAMA_DIR.
function(kvmem_run script)
    list(JOIN ARGN " " arguments)
    execute_process(
        COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/scripts/${script} ${ARGN}
        RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE errors
        OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "${errors}")
    endif()
    message(STATUS "${output}")
endfunction()

file(GLOB patches CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/patches/*.patch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${patches} ${CMAKE_CURRENT_SOURCE_DIR}/patches/series ${CMAKE_CURRENT_SOURCE_DIR}/vendor/PIN)

if(KVMEM_LLAMA_SOURCE)
    set(KVMEM_LLAMA_DIR ${CMAKE_CURRENT_BINARY_DIR}/llama.cpp)
    kvmem_run(apply-patches --from ${KVMEM_LLAMA_SOURCE} ${KVMEM_LLAMA_DIR})
else()
    set(KVMEM_LLAMA_DIR ${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp)
    kvmem_run(vendor-llama)
    kvmem_run(apply-patches)
endif()

# Compilers and the options that every target shares. What is missing is said in one sentence.
include(CheckLanguage)
foreach(language C CXX)
    check_language(${language})
    if(NOT CMAKE_${language}_COMPILER)
        message(FATAL_ERROR
            "kvmem: no working C and C++ compiler was found; install one (on Debian: apt install g++) or set CC and CXX.")
    endif()
    enable_language(${language})
endforeach()
find_package(Python COMPONENTS Interpreter Development.Module QUIET)
if(NOT Python_Development.Module_FOUND)
    message(FATAL_ERROR
        "kvmem: the headers of ${Python_EXECUTABLE} were not found; install them (on Debian: apt install python3-dev).")
endif()

if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

# No file of a wheel names the folder it was built in, also not through __FILE__. nvcc hands its options to the host compiler.
foreach(folder "${CMAKE_CURRENT_SOURCE_DIR}=." "${CMAKE_CURRENT_BINARY_DIR}=./build")
    add_compile_options(
        "$<$<COMPILE_LANGUAGE:C,CXX>:-ffile-prefix-map=${folder}>"
        "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${folder}>")
endforeach()

# Some compilers link libstdc++ as an archive. A copy that a module exported would be mixed with the copies of the others.
add_link_options("LINKER:--exclude-libs,libstdc++.a")

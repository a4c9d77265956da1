# Cython modules of the package. The directives stand here and not in the modules: -X refuses a misspelt one.
set(KVMEM_CYTHON_FLAGS
    -3 --fast-fail
    -X language_level=3 -X wraparound=False -X cdivision=True -X auto_pickle=False
    -X embedsignature=True -X embedsignature.format=python
    -I ${CMAKE_CURRENT_SOURCE_DIR}/src)
if(KVMEM_CHECKS)
    list(APPEND KVMEM_CYTHON_FLAGS -X boundscheck=True -X initializedcheck=True)
else()
    list(APPEND KVMEM_CYTHON_FLAGS -X boundscheck=False -X initializedcheck=False)
endif()

# The helpers that all modules share (memoryviews above all) live once, in kvmem._cyutility.
set(KVMEM_CYUTILITY ${CMAKE_CURRENT_BINARY_DIR}/cython/_cyutility.c)
add_custom_command(
    OUTPUT ${KVMEM_CYUTILITY}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/cython
    COMMAND ${Python_EXECUTABLE} -m cython --generate-shared=${KVMEM_CYUTILITY}
    VERBATIM)
python_add_library(kvmem_cyutility MODULE WITH_SOABI ${KVMEM_CYUTILITY})
set_target_properties(kvmem_cyutility PROPERTIES OUTPUT_NAME _cyutility)
install(TARGETS kvmem_cyutility LIBRARY DESTINATION kvmem COMPONENT kvmem)

# kvmem_cython(<package> <language>): one extension module for each .pyx of src/kvmem/<package>; sets <package>_TARGETS.
function(kvmem_cython package language)
    string(TOLOWER ${language} extension)
    if(language STREQUAL "CXX")
        set(extension cpp)
        set(plus --cplus)
    endif()
    file(GLOB modules CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/kvmem/${package}/*.pyx)
    set(targets)
    foreach(source ${modules})
        get_filename_component(name ${source} NAME_WE)
        set(generated ${CMAKE_CURRENT_BINARY_DIR}/cython/${package}/${name}.${extension})
        add_custom_command(
            OUTPUT ${generated}
            COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/cython/${package}
            COMMAND ${Python_EXECUTABLE} -m cython ${KVMEM_CYTHON_FLAGS} ${plus} --depfile
                --shared=kvmem._cyutility --module-name kvmem.${package}.${name} ${source} -o ${generated}
            DEPENDS ${source}
            DEPFILE ${generated}.dep
            COMMENT "Cython kvmem.${package}.${name}"
            VERBATIM)
        set(target kvmem_${package}_${name})
        python_add_library(${target} MODULE WITH_SOABI ${generated})
        # Not the build folder itself: Cython runs there, and would import kv/select for Python's select.
        set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name} INSTALL_RPATH "$ORIGIN/../lib"
            LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/modules/${package})
        target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/src/kvmem/${package})
        target_compile_options(${target} PRIVATE -O3 -Wno-unused-function)
        if(KVMEM_SANITIZE)
            target_compile_options(${target} PRIVATE -fsanitize=address,undefined -fno-omit-frame-pointer -g)
            target_link_options(${target} PRIVATE -fsanitize=address,undefined)
        endif()
        install(TARGETS ${target} LIBRARY DESTINATION kvmem/${package} COMPONENT kvmem)
        list(APPEND targets ${target})
    endforeach()
    set(${package}_TARGETS ${targets} PARENT_SCOPE)
endfunction()

# Stands for CANN's: a library of the kernels in the emulator, with the entries that CANN before 9.0 generates. Like the
# real one it links the library to nothing that these entries call (that is for whoever links the library), has a script
# look objects up by name, and merges them by one that wants a build type.
file(REAL_PATH "${CMAKE_CURRENT_LIST_FILE}" here)
cmake_path(GET here PARENT_PATH cann)
cmake_path(GET cann PARENT_PATH fake)
if(NOT RUN_MODE STREQUAL npu OR NOT SOC_VERSION MATCHES "^Ascend910" OR NOT IS_DIRECTORY "${ASCEND_CANN_PACKAGE_PATH}")
  message(FATAL_ERROR "ascendc.cmake: RUN_MODE, SOC_VERSION or ASCEND_CANN_PACKAGE_PATH is not set")
endif()

function(ascendc_library target kind)
  file(GLOB machine "${fake}/../emulator/machine/*.cpp")
  set(files "${fake}/emulated_kernels.cpp" ${machine})
  foreach(source IN LISTS ARGN)
    get_filename_component(op "${source}" NAME_WE)
    file(STRINGS "${source}" heads REGEX "^NPUZERO_KERNEL\\(")
    set(text "#include \"emulated_kernels.h\"\n#include \"${source}\"\n")
    foreach(head IN LISTS heads)
      string(REGEX MATCH "npuzero_[a-z_]+" kernel "${head}")
      string(APPEND text "extern \"C\" uint32_t aclrtlaunch_${kernel}(uint32_t cores, void* stream, void* table) {\n"
        "  emulated_launch(${kernel}, cores, stream, static_cast<uint8_t*>(table));\n  return 0;\n}\n")
    endforeach()
    file(WRITE "${CMAKE_BINARY_DIR}/${op}_entry.cpp" "${text}")
    list(APPEND files "${CMAKE_BINARY_DIR}/${op}_entry.cpp")
  endforeach()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  add_library(${target}_objects OBJECT ${files})
  set_target_properties(${target}_objects PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target}_objects PRIVATE -std=c++17 -O1 -ffp-contract=off)
  target_include_directories(${target}_objects PRIVATE "${fake}" "${fake}/../emulator")
  add_library(${target} ${kind} "$<TARGET_OBJECTS:${target}_objects>")
  target_link_directories(${target} INTERFACE "${ASCEND_CANN_PACKAGE_PATH}/lib64")
  target_link_libraries(${target} INTERFACE ascendcl runtime profapi error_manager mmpa)
  add_custom_command(TARGET ${target} PRE_LINK VERBATIM COMMAND_EXPAND_LISTS
    COMMAND python3 "${cann}/find_objects.py" "${CMAKE_BINARY_DIR}/compile_commands.json"
      "$<TARGET_OBJECTS:${target}_objects>"
    COMMAND sh "${cann}/merge_objects.sh" "${CMAKE_BUILD_TYPE}" "$<TARGET_PROPERTY:${target},DEVICE_OPTIONS>")
endfunction()

function(ascendc_include_directories target scope)
  target_include_directories(${target}_objects ${scope} ${ARGN})
endfunction()

function(ascendc_compile_options target scope)
  set_property(TARGET ${target} APPEND PROPERTY DEVICE_OPTIONS ${ARGN})
endfunction()

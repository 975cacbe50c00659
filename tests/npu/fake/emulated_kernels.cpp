// Part of the library that a fake CANN builds from the kernels: runs them in the emulator, on the fake device's
// streams.
#include "emulated_kernels.h"

#include <cstdio>
#include <map>
#include <mutex>

#include "device.h"
#include "run.h"

// In libraries of their own: fake/cann/called.cpp.
extern "C" bool fake_runtime();
extern "C" bool fake_profapi();
extern "C" bool fake_error_manager();
extern "C" bool fake_mmpa();

void emulated_launch(void (*kernel)(uint8_t*), uint32_t cores, void* stream, uint8_t* table) {
  if (!(fake_runtime() && fake_profapi() && fake_error_manager() && fake_mmpa())) {
    std::puts("a kernel is not registered");  // and the caller returns 0, as what CANN generates does
    return;
  }
  fake::enqueue(stream, [=] {
    static std::mutex one_at_a_time;  // the emulator has one machine
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    emulator::Setting setting;
    setting.cores = static_cast<int>(cores);
    for (const auto& [begin, bytes] : fake::allocations()) setting.extents[begin] = {begin + bytes, true};
    emulator::Counts counts{};
    emulator::run(kernel, static_cast<int>(cores), table, setting, counts);
  });
}

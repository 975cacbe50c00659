// Part of the library that a fake CANN builds from the kernels: runs them in the emulator, on the fake device's
// streams.
#include "emulated_kernels.h"

#include <map>
#include <mutex>

#include "device.h"
#include "run.h"

void emulated_launch(void (*kernel)(uint8_t*), uint32_t cores, void* stream, uint8_t* table) {
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

// What stands for the launch syntax of the device's compiler: <<<cores, nullptr, stream>>>.
#pragma once

#include <cstdint>

void emulated_launch(void (*kernel)(uint8_t*), uint32_t cores, void* stream, uint8_t* table);

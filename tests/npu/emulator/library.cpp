// The npu kernels behind C functions, for ctypes: csrc/npu's own launch code over a launcher that is the emulator.
// Buffers are the caller's; each call says first which of them the kernels may read and write.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "npu/launch.h"
#include "npu/tiling.h"
#include "run.h"

// Weak: a library of one op's kernels has not the others.
extern "C" {
[[gnu::weak]] void npuzero_cast(uint8_t* table);
[[gnu::weak]] void npuzero_dequantize_sum(uint8_t* table);
[[gnu::weak]] void npuzero_flat_adam(uint8_t* table);
[[gnu::weak]] void npuzero_flat_lion(uint8_t* table);
[[gnu::weak]] void npuzero_norm(uint8_t* table);
[[gnu::weak]] void npuzero_norm_finish(uint8_t* table);
[[gnu::weak]] void npuzero_pack(uint8_t* table);
[[gnu::weak]] void npuzero_quantize(uint8_t* table);
}

namespace {

using namespace npuzero;

emulator::Setting setting;
emulator::Counts counts;
std::string answer;

struct Named {
  const char* name;
  emulator::Kernel kernel;
};
const Named kernels[] = {{"npuzero_cast", npuzero_cast},           {"npuzero_dequantize_sum", npuzero_dequantize_sum},
                         {"npuzero_flat_adam", npuzero_flat_adam}, {"npuzero_flat_lion", npuzero_flat_lion},
                         {"npuzero_norm", npuzero_norm},           {"npuzero_norm_finish", npuzero_norm_finish},
                         {"npuzero_pack", npuzero_pack},           {"npuzero_quantize", npuzero_quantize}};

class Emulated final : public npu::Launcher {
 public:
  uint64_t table(const void* content, int64_t bytes, Stream) override {
    copy_.assign((bytes + 7) / 8, 0);
    std::memcpy(copy_.data(), content, bytes);
    const auto at = reinterpret_cast<uint64_t>(copy_.data());
    setting.extents[at] = {at + bytes, false};
    return at;
  }

  void launch(const char* kernel, int cores, uint64_t table, Stream) override {
    for (const Named& named : kernels) {
      if (std::strcmp(named.name, kernel) != 0) continue;
      counts.launches += 1;
      return emulator::run(named.kernel, cores, reinterpret_cast<uint8_t*>(table), setting, counts);
    }
    throw emulator::Fault("dtype", std::string("no kernel of the name ") + kernel);
  }

 private:
  std::vector<uint64_t> copy_;
};

// Runs body over a launcher; null, or what went wrong.
template <class Body>
const char* run(const Body& body) {
  answer.clear();
  try {
    Emulated launcher;
    body(launcher);
  } catch (const Error& error) {
    answer = std::string(error.python_name()) + ": " + error.what();
  } catch (const emulator::Fault& fault) {
    answer = fault.what();
  }
  setting.extents.clear();
  return answer.empty() ? nullptr : answer.c_str();
}

View view(const int64_t* words) {
  return {reinterpret_cast<void*>(words[0]), words[1], static_cast<Dtype>(words[2]), Device::npu};
}

float real(int64_t word) {
  const auto bits = static_cast<uint32_t>(word);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void take(const int64_t*& words, FlatAdamGroup& group) {
  for (float* field : {&group.beta1, &group.one_minus_beta1, &group.beta2, &group.one_minus_beta2, &group.eps,
                       &group.weight_decay, &group.decay, &group.step_size, &group.bias2_sqrt}) {
    *field = real(*words++);
  }
  for (bool* field : {&group.l2, &group.maximize, &group.amsgrad}) *field = *words++ != 0;
}

void take(const int64_t*& words, FlatLionGroup& group) {
  for (float* field :
       {&group.beta1, &group.one_minus_beta1, &group.beta2, &group.one_minus_beta2, &group.decay, &group.step_size}) {
    *field = real(*words++);
  }
  group.maximize = *words++ != 0;
}

template <class Args>
const char* run_update(void (*launch)(const Args&, Stream, int, npu::Launcher&), const int64_t* rows, int64_t count,
                       const int64_t* words, int64_t group_count, const float* grad_scale, const float* skip,
                       const float* dynamic, uint64_t seed) {
  return run([&](npu::Launcher& launcher) {
    std::vector<typename Args::Group> groups(group_count);
    for (auto& group : groups) {
      take(words, group);
      group.step = static_cast<uint32_t>(*words++);
      group.row = *words++;
    }
    std::vector<typename Args::Part> parts(count);
    int64_t total = 0;
    for (auto& part : parts) {
      const auto pointer = [&] { return reinterpret_cast<void*>(*rows++); };
      part.master = pointer();
      for (Moment& moment : part.moments) {
        moment.values = pointer();
        moment.exponents = static_cast<uint8_t*>(pointer());
      }
      part.low = pointer();
      part.remainder = static_cast<int16_t*>(pointer());
      part.grad = pointer();
      part.count = *rows++;
      for (Dtype* dtype : {&part.master_dtype, &part.moment_dtype, &part.low_dtype, &part.grad_dtype}) {
        *dtype = static_cast<Dtype>(*rows++);
      }
      part.group = *rows++;
      part.stream = static_cast<uint32_t>(*rows++);
      part.place = *rows++;
      part.line = total;
      total += part.count;
    }
    Args args;
    args.parts = parts.data(), args.part_count = count, args.total = total, args.groups = groups.data();
    args.grad_scale = grad_scale, args.skip = skip, args.dynamic = dynamic, args.seed = seed;
    launch(args, 0, setting.cores, launcher);
  });
}

}  // namespace

extern "C" {

void emulator_configure(int cores, int schedule, int64_t seed, int drop, const char* dropped) {
  setting = {};
  setting.cores = cores;
  setting.schedule = static_cast<emulator::Schedule>(schedule);
  setting.seed = seed;
  setting.drop = static_cast<emulator::Drop>(drop);
  setting.dropped = dropped;
}

void emulator_extent(int64_t begin, int64_t bytes, int writable) {
  setting.extents[static_cast<uint64_t>(begin)] = {static_cast<uint64_t>(begin + bytes), writable != 0};
}

// The counts since they were last asked for.
void emulator_counts(int64_t* out) {
  std::memcpy(out, &counts, sizeof counts);
  counts = {};
}

// "file:line call count" of each synchronization since emulator_configure, a line each.
const char* emulator_sites() {
  answer.clear();
  for (const auto& [site, times] : setting.sites) {
    answer += site.first + " " + site.second + " " + std::to_string(times) + "\n";
  }
  return answer.c_str();
}

const char* run_cast(const int64_t* source, const int64_t* target, int rounding, uint64_t seed, uint64_t offset) {
  return run([&](npu::Launcher& launcher) {
    npu::launch_cast({view(source), view(target), static_cast<Rounding>(rounding), seed, offset}, 0, setting.cores,
                     launcher);
  });
}

const char* run_pack(const int64_t* rows, int64_t count, float factor, const float* scale_at, int scaled,
                     int accumulate) {
  return run([&](npu::Launcher& launcher) {
    std::vector<PackPart> parts;
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i, rows += 5) {
      parts.push_back({reinterpret_cast<const void*>(rows[0]), reinterpret_cast<void*>(rows[1]), rows[2], total,
                       static_cast<Dtype>(rows[3]), static_cast<Dtype>(rows[4])});
      total += rows[2];
    }
    npu::launch_pack({parts.data(), count, total, factor, scale_at, scaled != 0, accumulate != 0}, 0, setting.cores,
                     launcher);
  });
}

const char* run_quantize(const int64_t* source, const int64_t* message, const int64_t* residual, int64_t pieces,
                         int bits) {
  return run([&](npu::Launcher& launcher) {
    npu::launch_quantize({view(source), view(message), static_cast<float*>(view(residual).data), pieces, bits}, 0,
                         setting.cores, launcher);
  });
}

const char* run_dequantize_sum(const int64_t* messages, const int64_t* out, int64_t rows, int64_t pieces, int bits,
                               int accumulate) {
  return run([&](npu::Launcher& launcher) {
    npu::launch_dequantize_sum({view(messages), view(out), rows, pieces, bits, accumulate != 0}, 0, setting.cores,
                               launcher);
  });
}

const char* run_norm(const int64_t* x, const int64_t* out, const int64_t* workspace, const int64_t* addend,
                     float scale) {
  return run([&](npu::Launcher& launcher) {
    const View other = view(addend);
    npu::launch_norm({view(x), view(out), view(workspace), other.data ? &other : nullptr, scale}, 0, setting.cores,
                     launcher);
  });
}

// Of each part: addresses of master, of values and exponents of the moments, of low copy, remainder and gradient; count;
// dtypes of master, moments, low copy and gradient; group, stream, place. Of each group: its floats' patterns, its
// flags, step, row.
const char* run_flat_adam(const int64_t* rows, int64_t count, const int64_t* words, int64_t group_count,
                          const float* grad_scale, const float* skip, const float* dynamic, uint64_t seed) {
  return run_update<FlatAdamArgs>(npu::launch_flat_adam, rows, count, words, group_count, grad_scale, skip, dynamic,
                                  seed);
}

const char* run_flat_lion(const int64_t* rows, int64_t count, const int64_t* words, int64_t group_count,
                          const float* grad_scale, const float* skip, const float* dynamic, uint64_t seed) {
  return run_update<FlatLionArgs>(npu::launch_flat_lion, rows, count, words, group_count, grad_scale, skip, dynamic,
                                  seed);
}

// The shares of a line of parts: of each (count, buffers, grain, then address, itemsize and elements of eight); out: begin,
// end, part.
int64_t cut_line(const int64_t* words, int64_t count, int cores, int64_t tile, int64_t* out) {
  std::vector<npu::LinePart> parts;
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i, words += 27) {
    npu::LinePart part{words[0], total, {}, static_cast<int>(words[1]), words[2]};
    for (int w = 0; w < 8; ++w) {
      part.written[w] = {static_cast<uint64_t>(words[3 + 3 * w]), words[4 + 3 * w], words[5 + 3 * w]};
    }
    parts.push_back(part);
    total += part.count;
  }
  const std::vector<npu::Share> shares = npu::cut(parts, total, cores, tile);
  std::memcpy(out, shares.data(), shares.size() * sizeof(npu::Share));
  return static_cast<int64_t>(shares.size());
}

int64_t cut_norm(int64_t count, int cores, int64_t* out) {
  const std::vector<npu::Share> shares = npu::cut_norm(count, cores);
  std::memcpy(out, shares.data(), shares.size() * sizeof(npu::Share));
  return static_cast<int64_t>(shares.size());
}

int32_t flat_tile(int moments, int rooms, int drawn, int coded) {
  return npu::flat_tile(moments, rooms, drawn != 0, coded != 0);
}

}  // extern "C"

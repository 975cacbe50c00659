// Kernels behind a pipe: tests/ops/emulated.py sends it the calls of the ordinary tests. For cpu kernels of a processor
// that is only emulated here and has no Python, and for cuda kernels without a torch that knows the GPU, or under a
// checker. Integers have 64 bits, little-endian. With the argument `exact` nothing lies behind a buffer in its
// allocation, for checkers that see where an allocation ends.
//
//   request   op; number of buffers; of each the bytes, the address modulo 64 and the content; number of words; words
//   answer    1 if no byte beside a buffer changed, else 0; the content of each buffer
//
// A word is an integer, the bits of a float, or the number of a buffer (-1: none), in the order of the functions below.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/numeric.h"
#include "driver/memory.h"
#include "ops/ops.h"

// The namespace of the kernels, npuzero::cpu::neon say.
#ifndef NPUZERO_KERNELS
#define NPUZERO_KERNELS npuzero::cpu::NPUZERO_ISA
#endif

namespace NPUZERO_KERNELS {
NPUZERO_OPS(NPUZERO_DECLARE)
}

namespace {

using namespace npuzero;
namespace kernels = NPUZERO_KERNELS;

constexpr int64_t guard = memory_line;
constexpr char untouched = 0x5a;
int64_t guard_behind = guard;

void read(void* to, int64_t bytes) {
  if (bytes && std::fread(to, bytes, 1, stdin) != 1) std::exit(0);  // the tests are over
}

int64_t read_word() {
  int64_t word;
  read(&word, sizeof word);
  return word;
}

struct Buffer {
  int64_t bytes = read_word(), shift = guard + read_word();
  std::vector<char> image = std::vector<char>(shift + bytes + guard_behind, untouched);  // content between guards
  Memory memory{static_cast<int64_t>(image.size())};
  char *content = image.data() + shift, *start = memory.start() + shift;

  Buffer() {
    read(content, bytes);
    memory.put(image.data());
  }

  // Takes what the kernel has left; whether it touched nothing beside the content.
  bool fetch() {
    memory.get(image.data());
    for (const char* at = image.data(); at < image.data() + image.size(); ++at) {
      if ((at < content || at >= content + bytes) && *at != untouched) return false;
    }
    return true;
  }
};

// A request's buffers and words; the words are taken one after the other.
struct Request {
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<int64_t> words;
  size_t next = 0;

  Request() {
    for (int64_t n = read_word(); n > 0; --n) buffers.push_back(std::make_unique<Buffer>());
    for (int64_t n = read_word(); n > 0; --n) words.push_back(read_word());
  }

  int64_t integer() { return words.at(next++); }
  float real() { return float_of(static_cast<uint32_t>(integer())); }
  Dtype dtype() { return static_cast<Dtype>(integer()); }
  template <class T = void>
  T* pointer() {
    const int64_t i = integer();
    return i < 0 ? nullptr : reinterpret_cast<T*>(buffers.at(i)->start);
  }
  View view() {
    void* data = pointer();
    const int64_t count = integer();
    return View{data, count, dtype(), Device::cpu};
  }
};

void cast(Request& request) {
  const View source = request.view(), target = request.view();
  const auto rounding = static_cast<Rounding>(request.integer());
  const auto seed = static_cast<uint64_t>(request.integer()), offset = static_cast<uint64_t>(request.integer());
  kernels::cast(CastArgs{source, target, rounding, seed, offset}, 0);
}

void norm(Request& request) {
  const View x = request.view(), out = request.view(), workspace = request.view(), addend = request.view();
  kernels::norm(NormArgs{x, out, workspace, addend.data ? &addend : nullptr, request.real()}, 0);
}

void pack(Request& request) {
  const float factor = request.real();
  const auto* scale_at = request.pointer<float>();
  const bool scaled = request.integer(), accumulate = request.integer();
  std::vector<PackPart> parts;
  int64_t total = 0;
  while (request.next < request.words.size()) {
    const void* source = request.pointer();
    void* target = request.pointer();
    const int64_t count = request.integer();
    const Dtype from = request.dtype(), to = request.dtype();
    parts.push_back({source, target, count, total, from, to});
    total += count;
  }
  kernels::pack(PackArgs{parts.data(), static_cast<int64_t>(parts.size()), total, factor, scale_at, scaled, accumulate},
                0);
}

void quantize(Request& request) {
  const View source = request.view(), message = request.view(), residual = request.view();
  const int64_t pieces = request.integer(), bits = request.integer();
  kernels::quantize(QuantizeArgs{source, message, static_cast<float*>(residual.data), pieces, static_cast<int>(bits)},
                    0);
}

void dequantize_sum(Request& request) {
  const View messages = request.view(), out = request.view();
  const int64_t rows = request.integer(), pieces = request.integer(), bits = request.integer();
  const bool accumulate = request.integer();
  kernels::dequantize_sum(DequantizeSumArgs{messages, out, rows, pieces, static_cast<int>(bits), accumulate}, 0);
}

void take(Request& request, FlatAdamGroup& group) {
  for (float* field : {&group.beta1, &group.one_minus_beta1, &group.beta2, &group.one_minus_beta2, &group.eps,
                       &group.weight_decay, &group.decay, &group.step_size, &group.bias2_sqrt}) {
    *field = request.real();
  }
  for (bool* field : {&group.l2, &group.maximize, &group.amsgrad}) *field = request.integer();
}

void take(Request& request, FlatLionGroup& group) {
  for (float* field :
       {&group.beta1, &group.one_minus_beta1, &group.beta2, &group.one_minus_beta2, &group.decay, &group.step_size}) {
    *field = request.real();
  }
  group.maximize = request.integer();
}

// An update of core/flat.h.
template <class Args, void (*kernel)(const Args&, Stream)>
void update(Request& request) {
  Args args;
  for (const float** scalar : {&args.grad_scale, &args.skip, &args.dynamic}) *scalar = request.pointer<float>();
  args.seed = static_cast<uint64_t>(request.integer());
  std::vector<typename Args::Group> groups(request.integer());
  for (auto& group : groups) {
    take(request, group);
    group.step = static_cast<uint32_t>(request.integer());
    group.row = request.integer();
  }
  std::vector<typename Args::Part> parts;
  int64_t total = 0;
  while (request.next < request.words.size()) {
    typename Args::Part part = {};
    part.master = request.pointer();
    for (Moment& moment : part.moments) {
      moment.values = request.pointer();
      moment.exponents = request.pointer<uint8_t>();
    }
    part.low = request.pointer();
    part.remainder = request.pointer<int16_t>();
    part.grad = request.pointer();
    part.count = request.integer();
    for (Dtype* dtype : {&part.master_dtype, &part.moment_dtype, &part.low_dtype, &part.grad_dtype}) {
      *dtype = request.dtype();
    }
    part.group = request.integer();
    part.stream = static_cast<uint32_t>(request.integer());
    part.place = request.integer();
    part.line = total;
    total += part.count;
    parts.push_back(part);
  }
  args.parts = parts.data(), args.part_count = static_cast<int64_t>(parts.size()), args.total = total;
  args.groups = groups.data();
  kernel(args, 0);
}

constexpr auto flat_adam = &update<FlatAdamArgs, kernels::flat_adam>;
constexpr auto flat_lion = &update<FlatLionArgs, kernels::flat_lion>;

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "exact") == 0) guard_behind = 0;
  check_device();
#define NPUZERO_TAKE(op, Args) op,
  constexpr void (*ops[])(Request&) = {NPUZERO_OPS(NPUZERO_TAKE)};
  for (;;) {
    const auto op = ops[read_word()];
    Request request;
    op(request);
    int64_t guarded = 1;
    for (const auto& buffer : request.buffers) guarded &= buffer->fetch();
    std::fwrite(&guarded, sizeof guarded, 1, stdout);
    for (const auto& buffer : request.buffers) std::fwrite(buffer->content, 1, buffer->bytes, stdout);
    std::fflush(stdout);
  }
}

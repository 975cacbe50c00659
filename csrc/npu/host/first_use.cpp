#include "npu/host/first_use.h"

#include <cstddef>
#include <cstring>
#include <iterator>
#include <memory>

#include "core/check.h"
#include "core/kernel_table.h"
#include "npu/host/ascendcl.h"

namespace npuzero::npu {
namespace {

constexpr int64_t numbers = 8;
constexpr int wire_bits = 4;
constexpr int64_t block = wire_block(wire_bits);
constexpr unsigned char unwritten = 0xA5;

// What the ops read and write. Results are exact in whatever order they are computed: no device rounds them otherwise.
struct Trial {
  float given[numbers], master[numbers], exp_avg[numbers], exp_avg_sq[numbers];
  float lion_master[numbers], lion_exp_avg[numbers];
  alignas(32) uint16_t cast[numbers];
  alignas(32) float pack[numbers];
  alignas(32) double norm[2];
  alignas(32) double workspace[2 * norm_blocks(numbers) + 4];
  alignas(64) unsigned char message[message_bytes(block, wire_bits)];
  float wide[block], sum[block];
};

struct Output {
  const char* op;
  size_t begin, bytes;
};
constexpr Output outputs[] = {
    {CastArgs::op, offsetof(Trial, cast), sizeof(Trial::cast)},
    {PackArgs::op, offsetof(Trial, pack), sizeof(Trial::pack)},
    {NormArgs::op, offsetof(Trial, norm), sizeof(Trial::norm)},
    {FlatAdamArgs::op, offsetof(Trial, master), offsetof(Trial, lion_master) - offsetof(Trial, master)},
    {FlatLionArgs::op, offsetof(Trial, lion_master), offsetof(Trial, cast) - offsetof(Trial, lion_master)},
    {QuantizeArgs::op, offsetof(Trial, message), sizeof(Trial::message)},
    {DequantizeSumArgs::op, offsetof(Trial, sum), sizeof(Trial::sum)},
};

void fill(Trial& trial) {
  std::memset(&trial, unwritten, sizeof trial);
  for (int i = 0; i < numbers; ++i) {
    trial.given[i] = static_cast<float>(i % 2 ? -(1 << i) : 1 << i);
    trial.lion_master[i] = 1, trial.lion_exp_avg[i] = 0;
    trial.master[i] = 1, trial.exp_avg[i] = trial.exp_avg_sq[i] = 0;
  }
  for (int64_t i = 0; i < block; ++i) trial.wide[i] = static_cast<float>(i % 15 - 7);
}

// Every op on a Trial that lies at `at`, which is memory of `device`: run(Args).
template <class Run>
void run_all(Trial* at, Device device, const Run& run) {
  const auto view = [&](void* data, int64_t count, Dtype dtype) { return View{data, count, dtype, device}; };
  const View given = view(at->given, numbers, Dtype::f32);
  run(CastArgs{given, view(at->cast, numbers, Dtype::bf16), Rounding::nearest, 0, 0});
  const PackPart packed{at->given, at->pack, numbers, 0, Dtype::f32, Dtype::f32};
  run(PackArgs{&packed, 1, numbers, 0.5F, nullptr, true, false});
  run(NormArgs{given, view(at->norm, 2, Dtype::f64), view(at->workspace, std::size(at->workspace), Dtype::f64), nullptr,
               1.0F});
  // Adam's quotient is 1 or -1 here, for gradients that are powers of two.
  const FlatAdamGroup group{0.5F, 0.5F, 0.75F, 0.25F, 0, 0, 1, 0.25F, 0.5F, false, false, false, 1, -1};
  const FlatAdamPart part{at->master, nullptr,    {{at->exp_avg, nullptr}, {at->exp_avg_sq, nullptr}, {}},
                          at->given,  nullptr,    numbers,
                          0,          0,          0,
                          0,          Dtype::f32, Dtype::f32,
                          Dtype::f32, Dtype::bf16};
  run(FlatAdamArgs{&part, 1, numbers, &group, nullptr, nullptr, nullptr, 0});
  const FlatLionGroup of_lion{0.5F, 0.5F, 0.75F, 0.25F, 1, 0.25F, false, 1, -1};
  FlatLionPart lion = {};
  lion.master = at->lion_master, lion.moments[0] = {at->lion_exp_avg, nullptr}, lion.grad = at->given;
  lion.count = numbers, lion.low_dtype = Dtype::bf16;
  run(FlatLionArgs{&lion, 1, numbers, &of_lion, nullptr, nullptr, nullptr, 0});
  const View message = view(at->message, sizeof at->message, Dtype::u8);
  run(QuantizeArgs{view(at->wide, block, Dtype::f32), message, nullptr, 1, wire_bits});
  run(DequantizeSumArgs{message, view(at->sum, block, Dtype::f32), 1, 1, wire_bits, false});
}

struct OnDevice {
  Stream stream;
  int cores;
  Launcher& launcher;

  void operator()(const CastArgs& args) const { launch_cast(args, stream, cores, launcher); }
  void operator()(const DequantizeSumArgs& args) const { launch_dequantize_sum(args, stream, cores, launcher); }
  void operator()(const FlatAdamArgs& args) const { launch_flat_adam(args, stream, cores, launcher); }
  void operator()(const FlatLionArgs& args) const { launch_flat_lion(args, stream, cores, launcher); }
  void operator()(const NormArgs& args) const { launch_norm(args, stream, cores, launcher); }
  void operator()(const PackArgs& args) const { launch_pack(args, stream, cores, launcher); }
  void operator()(const QuantizeArgs& args) const { launch_quantize(args, stream, cores, launcher); }
};

// The device's results, in `host`, which is pinned; what the stream's work failed by, or "".
std::string compute(Trial* host, Trial* there, const OnDevice& run) {
  const AscendCl& acl = ascendcl();
  void* stream = reinterpret_cast<void*>(run.stream);
  check(acl.aclrtMemcpyAsync(there, sizeof *there, host, sizeof *host, host_to_device, stream), "aclrtMemcpyAsync");
  run_all(there, Device::npu, run);
  check(acl.aclrtMemcpyAsync(host, sizeof *host, there, sizeof *there, device_to_host, stream), "aclrtMemcpyAsync");
  const int result = acl.aclrtSynchronizeStream(stream);
  if (result == 0) return "";
  const char* text = acl.aclGetRecentErrMsg();
  return "error " + std::to_string(result) + (text ? std::string(": ") + text : "");
}

std::string compare(const Trial& found, const Trial& given, const Trial& expected) {
  std::string told;
  const auto bytes = [](const Trial& trial, const Output& output) {
    return reinterpret_cast<const unsigned char*>(&trial) + output.begin;
  };
  for (const Output& output : outputs) {
    const unsigned char* mine = bytes(found, output);
    if (std::memcmp(mine, bytes(expected, output), output.bytes) == 0) continue;
    const bool same = std::memcmp(mine, bytes(given, output), output.bytes) == 0;
    told += (told.empty() ? "" : "; ") + std::string(output.op) + (same ? " wrote nothing" : " wrote other numbers");
  }
  return told;
}

}  // namespace

void check_first_use(const std::string& library, Stream stream, int cores, Launcher& launcher) {
  const AscendCl& acl = ascendcl();
  Trial given, expected;
  fill(given);
  expected = given;
  run_all(&expected, Device::cpu, [](const auto& args) { run_kernel(Device::cpu, args, 0); });
  const auto take = [](auto& memory, auto& allocate, const char* call, auto... policy) {
    void* found = nullptr;
    check(allocate(&found, sizeof(Trial), policy...), call);
    memory.reset(static_cast<Trial*>(found));
  };
  std::unique_ptr<Trial, int (*)(void*)> host(nullptr, acl.aclrtFreeHost), there(nullptr, acl.aclrtFree);
  take(host, acl.aclrtMallocHost, "aclrtMallocHost");
  take(there, acl.aclrtMalloc, "aclrtMalloc", huge_pages_first);
  *host = given;
  std::string wrong = compute(host.get(), there.get(), {stream, cores, launcher});
  if (wrong.empty()) wrong = compare(*host, given, expected);
  if (wrong.empty()) return;
  throw Error(Error::Kind::KernelUnavailable, "the npu kernels in " + library,
              "the CPU's results, of each op on a few numbers at first use", wrong,
              "Build the kernels anew, `npuzero build-npu`, with the CANN that runs them; where a kernel wrote nothing "
              "it was not registered, and the device's log under ~/ascend/log says why.");
}

}  // namespace npuzero::npu

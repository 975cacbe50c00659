// From Args to tables. What is written by whom is decided in tiling.h; a table's layout is in table.h.
#include "npu/launch.h"

#include <cstring>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/random.h"
#include "npu/tiling.h"

namespace npuzero::npu {
namespace {

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

template <class T>
void append(std::vector<char>& bytes, const T* items, size_t count) {
  const auto* from = reinterpret_cast<const char*>(items);
  bytes.insert(bytes.end(), from, from + count * sizeof(T));
}

// The columns of draws under a seed, as table.h has them; kept, since many launches have one seed.
const std::vector<int32_t>* columns_of(uint64_t seed) {
  static_assert(kDrawColumns == draw_columns);
  thread_local std::vector<int32_t> columns;
  thread_local uint64_t made_of = 0;
  if (columns.empty() || made_of != seed) {
    columns.assign(2 * kDrawTable, 0);
    int32_t* factors = &columns[kDrawTable - kDrawColumns];
    for (int32_t i = 0; i < kDrawColumns; i += 4) {
      uint32_t words[4];
      column_words(i / 4, seed, words);
      for (int32_t k = 0; k < 4; ++k) {
        const DrawShare share = DrawShare::of_column(words[k]);
        factors[i + k] = share.squared;
        factors[i + k + kDrawTable] = draw(share, {});
      }
    }
    made_of = seed;
  }
  return &columns;
}

// One launch: a head, a share for each core, a row for each part, groups, columns where anything is drawn.
template <class TableHead, class Row, class Group = char>
void launch(const char* kernel, TableHead head, const std::vector<LinePart>& parts, std::vector<Row> rows, int cores,
            Stream stream, Launcher& launcher, const std::vector<int32_t>* columns = nullptr,
            const std::vector<Group>& groups = {}) {
  if (parts.empty()) return;
  const int64_t total = parts.back().line + parts.back().count;
  int64_t tile = rows[0].piece.tile;
  for (size_t i = 0; i < parts.size(); ++i) {
    rows[i].piece.count = parts[i].count;
    rows[i].piece.line = parts[i].line;
    rows[i].piece.lead = lead(parts[i]);
    tile = std::min<int64_t>(tile, rows[i].piece.tile);
  }
  const std::vector<Share> shares = cut(parts, total, cores, tile);
  const size_t before =
      sizeof head + shares.size() * sizeof(Share) + rows.size() * sizeof(Row) + groups.size() * sizeof(Group);
  head.head = {static_cast<int32_t>(shares.size()), static_cast<int32_t>(parts.size()),
               columns ? static_cast<int64_t>(before) : 0};
  std::vector<char> table;
  append(table, &head, 1);
  append(table, shares.data(), shares.size());
  append(table, rows.data(), rows.size());
  append(table, groups.data(), groups.size());
  if (columns) append(table, columns->data(), columns->size());
  const uint64_t at = launcher.table(table.data(), static_cast<int64_t>(table.size()), stream);
  launcher.launch(kernel, static_cast<int>(shares.size()), at, stream);
}

// The indices of the parts that have elements, by the address of `first`, and their line.
template <class Part, class First>
std::vector<int64_t> in_order(const Part* parts, int64_t count, const First& first) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < count; ++i) {
    if (parts[i].count) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return first(parts[a]) < first(parts[b]); });
  return order;
}

static_assert(kCodeBlock == moment_block && kU8 == static_cast<int32_t>(Dtype::u8));

PackRow row_of(const void* source, Dtype source_dtype, const void* target, Dtype target_dtype) {
  PackRow row = {};
  row.piece.tile = tile_of(std::max(itemsize(source_dtype), itemsize(target_dtype)));
  row.source = address(source);
  row.target = address(target);
  row.source_dtype = static_cast<int32_t>(source_dtype);
  row.target_dtype = static_cast<int32_t>(target_dtype);
  return row;
}

FlatMoment moment_of(const Moment& moment, Dtype dtype) {
  return {address(moment.values), dtype == Dtype::u8 ? address(moment.exponents) : 0};
}

LinePart part_of(int64_t count, int64_t line, const void* target, Dtype dtype) {
  return {count, line, {{{address(target), itemsize(dtype)}}}, 1};
}

Wire wire_of(Dtype dtype, int bits, int64_t widest_itemsize) {
  return {static_cast<int32_t>(dtype), bits, static_cast<int32_t>(wire_block(bits)), tile_of(widest_itemsize)};
}

// Piece i of `values`, and its message among those that begin at `messages`.
WireRow row_of(const View& values, const View& messages, int64_t pieces, int64_t i, const Wire& wire) {
  const int64_t count = values.count / pieces;
  WireRow row = {};
  row.piece.tile = wire.tile;
  row.values = address(values.data) + i * count * itemsize(values.dtype);
  row.codes = address(messages.data) + i * message_bytes(count, wire.bits);
  row.scales = row.codes + code_bytes(count, wire.bits);
  return row;
}

AdamGroup table_of(const FlatAdamGroup& group) {
  return {group.beta1,
          group.one_minus_beta1,
          group.beta2,
          group.one_minus_beta2,
          group.eps,
          group.weight_decay,
          group.decay,
          group.step_size,
          group.bias2_sqrt,
          group.l2,
          group.maximize,
          group.amsgrad,
          static_cast<int32_t>(group.row),
          group.step};
}

LionGroup table_of(const FlatLionGroup& group) {
  return {group.beta1, group.one_minus_beta1, group.beta2,    group.one_minus_beta2,
          group.decay, group.step_size,       group.maximize, static_cast<int32_t>(group.row),
          group.step};
}

// One launch of an update of core/flat.h, whose formula needs so many `rooms` of scratch.
template <class Args>
void launch_update(const char* kernel, int rooms, const Args& args, Stream stream, int cores, Launcher& launcher) {
  const std::vector<int64_t> order =
      in_order(args.parts, args.part_count, [](const typename Args::Part& part) { return part.master; });
  FlatHead head = {};
  head.grad_scale = address(args.grad_scale);
  head.skip = address(args.skip);
  head.dynamic = address(args.dynamic);
  head.seed = args.seed;
  head.rooms = rooms;
  int64_t last_group = -1;
  bool drawn = false;
  for (const int64_t i : order) {
    const typename Args::Part& part = args.parts[i];
    last_group = std::max(last_group, part.group);
    head.moments = std::max(head.moments, args.groups[part.group].used());
    const bool moments = part.moment_dtype != Dtype::f32, master = part.master_dtype != Dtype::f32;
    if (moments || master) head.rooms = 2;
    drawn |= moments || (master && !part.remainder);
    head.coded |= part.moment_dtype == Dtype::u8;
  }
  head.tile = flat_tile(head.moments, head.rooms, drawn, head.coded);
  std::vector<decltype(table_of(*args.groups))> groups;
  for (int64_t i = 0; i <= last_group; ++i) groups.push_back(table_of(args.groups[i]));
  std::vector<LinePart> parts;
  std::vector<FlatRow> rows;
  int64_t line = 0;
  for (const int64_t i : order) {
    const typename Args::Part& part = args.parts[i];
    FlatRow row = {};
    row.piece.tile = head.tile;
    row.master = address(part.master);
    row.remainder = address(part.remainder);
    row.grad = address(part.grad);
    row.low = address(part.low);
    row.place = static_cast<uint64_t>(part.place);
    row.master_dtype = static_cast<int32_t>(part.master_dtype);
    row.moment_dtype = static_cast<int32_t>(part.moment_dtype);
    row.grad_dtype = static_cast<int32_t>(part.grad_dtype);
    row.low_dtype = static_cast<int32_t>(part.low_dtype);
    row.group = static_cast<int32_t>(part.group);
    row.stream = part.stream;
    LinePart range{part.count, line, {}, 0};
    const auto writes = [&](uint64_t at, int64_t size, int64_t elements = 1) {
      if (at) range.written[range.written_count++] = {at, size, elements};
    };
    writes(row.master, itemsize(part.master_dtype));
    for (int k = 0; k < args.groups[part.group].used(); ++k) {
      const FlatMoment moment = row.moments[k] = moment_of(part.moments[k], part.moment_dtype);
      writes(moment.values, itemsize(part.moment_dtype));
      writes(moment.exponents, 1, kCodeBlock);
    }
    writes(row.remainder, 2);
    writes(row.low, 2);
    rows.push_back(row);
    parts.push_back(range);
    line += part.count;
  }
  launch(kernel, head, parts, rows, cores, stream, launcher, drawn ? columns_of(args.seed) : nullptr, groups);
}

}  // namespace

void launch_cast(const CastArgs& args, Stream stream, int cores, Launcher& launcher) {
  if (args.source.count == 0) return;
  CastHead head = {};
  head.seed_low = static_cast<uint32_t>(args.seed);
  head.seed_high = static_cast<uint32_t>(args.seed >> 32);
  head.offset = args.offset;
  head.rounding = static_cast<int32_t>(args.rounding);
  const std::vector<PackRow> rows = {row_of(args.source.data, args.source.dtype, args.target.data, args.target.dtype)};
  launch("npuzero_cast", head, {part_of(args.source.count, 0, args.target.data, args.target.dtype)}, rows, cores,
         stream, launcher, args.rounding == Rounding::stochastic ? columns_of(args.seed) : nullptr);
}

void launch_dequantize_sum(const DequantizeSumArgs& args, Stream stream, int cores, Launcher& launcher) {
  const int64_t count = args.out.count / args.pieces;
  if (count == 0) return;
  DequantizeHead head = {};
  head.wire = wire_of(args.out.dtype, args.bits, 2);
  head.row_bytes = args.pieces * message_bytes(count, args.bits);
  head.rows = static_cast<int32_t>(args.rows);
  head.accumulate = args.accumulate;
  std::vector<LinePart> parts;
  std::vector<WireRow> rows;
  for (int64_t i = 0; i < args.pieces; ++i) {
    rows.push_back(row_of(args.out, args.messages, args.pieces, i, head.wire));
    parts.push_back({count, i * count, {{{rows[i].values, itemsize(args.out.dtype)}}}, 1, head.wire.block});
  }
  launch("npuzero_dequantize_sum", head, parts, rows, cores, stream, launcher);
}

void launch_flat_adam(const FlatAdamArgs& args, Stream stream, int cores, Launcher& launcher) {
  launch_update("npuzero_flat_adam", 1, args, stream, cores, launcher);
}

void launch_flat_lion(const FlatLionArgs& args, Stream stream, int cores, Launcher& launcher) {
  launch_update("npuzero_flat_lion", 2, args, stream, cores, launcher);
}

void launch_norm(const NormArgs& args, Stream stream, int cores, Launcher& launcher) {
  NormHead head = {};
  head.x = address(args.x.data);
  head.out = address(args.out.data);
  // Every core's sums begin a 32-byte line; what rounding up takes is less than the rest of its bytes.
  head.workspace = (address(args.workspace.data) + line_bytes - 1) / line_bytes * line_bytes;
  head.x_dtype = static_cast<int32_t>(args.x.dtype);
  if (args.addend) {
    head.addend = address(args.addend->data);
    head.addend_dtype = static_cast<int32_t>(args.addend->dtype);
    head.scale = args.scale;
  }
  const std::vector<Share> shares = cut_norm(args.x.count, args.addend && head.x % line_bytes != 0 ? 1 : cores);
  head.head = {static_cast<int32_t>(shares.size()), 1, 0};
  std::vector<char> table;
  append(table, &head, 1);
  append(table, shares.data(), shares.size());
  const uint64_t at = launcher.table(table.data(), static_cast<int64_t>(table.size()), stream);
  launcher.launch("npuzero_norm", static_cast<int>(shares.size()), at, stream);
  if (shares.size() > 1) launcher.launch("npuzero_norm_finish", 1, at, stream);
}

void launch_pack(const PackArgs& args, Stream stream, int cores, Launcher& launcher) {
  PackHead head = {};
  head.scale_at = address(args.scale_at);
  head.factor = args.factor;
  head.scaled = args.scaled;
  head.accumulate = args.accumulate;
  std::vector<LinePart> parts;
  std::vector<PackRow> rows;
  int64_t line = 0;
  for (const int64_t i : in_order(args.parts, args.part_count, [](const PackPart& part) { return part.target; })) {
    const PackPart& part = args.parts[i];
    parts.push_back(part_of(part.count, line, part.target, part.target_dtype));
    rows.push_back(row_of(part.source, part.source_dtype, part.target, part.target_dtype));
    line += part.count;
  }
  launch("npuzero_pack", head, parts, rows, cores, stream, launcher);
}

void launch_quantize(const QuantizeArgs& args, Stream stream, int cores, Launcher& launcher) {
  const int64_t count = args.source.count / args.pieces;
  if (count == 0) return;
  QuantizeHead head = {};
  head.wire = wire_of(args.source.dtype, args.bits, args.residual ? 4 : itemsize(args.source.dtype));
  head.inverse = 1.0f / wire_largest(args.bits);
  head.residual = args.residual != nullptr;
  std::vector<LinePart> parts;
  std::vector<WireRow> rows;
  for (int64_t i = 0; i < args.pieces; ++i) {
    WireRow row = row_of(args.source, args.message, args.pieces, i, head.wire);
    LinePart part{count, i * count, {}, 2, head.wire.block};
    part.written[0] = {row.codes, 1, 8 / args.bits};
    part.written[1] = {row.scales, 2, head.wire.block};
    if (args.residual) {
      row.residual = address(args.residual + i * count);
      part.written[part.written_count++] = {row.residual, 4};
    }
    parts.push_back(part);
    rows.push_back(row);
  }
  launch("npuzero_quantize", head, parts, rows, cores, stream, launcher);
}

}  // namespace npuzero::npu


// Embedding bags on rows in int8. Follows `int8.cpp`.
namespace ipex::int8 {
namespace {

enum Mode : int64_t { SUM, MEAN, MAX };

struct Bags {
  int64_t bags, count, rows, columns, mode, includes_last, padding, index_bytes, result_number;
  const int8_t* table;
  const float *scales, *sample_weights;
  const void *indices, *offsets;

  // Element of a tensor of indices.
  int64_t element(const void* from, int64_t at) const {
    return index_bytes == 8 ? static_cast<const int64_t*>(from)[at] : static_cast<const int32_t*>(from)[at];
  }
  int64_t begin(int64_t bag) const { return element(offsets, bag); }
  int64_t end(int64_t bag) const { return bag + 1 < bags + includes_last ? begin(bag + 1) : count; }

  // Whether the bag lies in the indices, and its rows in the table.
  bool is_valid(int64_t bag) const {
    const int64_t first = begin(bag), last = end(bag);
    if (first < 0 || first > last || last > count || (bag == 0 && first != 0)) return false;
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = element(indices, i);
      if (row < 0 || row >= rows) return false;
    }
    return true;
  }
};

// One bag. `totals` has room for whole vectors of its columns.
void reduce_bag(const Bags& b, int64_t bag, float* totals) {
  constexpr int64_t AHEAD = 4;  // rows that are fetched before they are read
  const int64_t begin = b.begin(bag), end = b.end(bag), columns = b.columns;
  int64_t used = 0;
  std::fill_n(totals, columns, 0.f);
  for (int64_t i = begin; i < end; ++i) {
    if (i + AHEAD < end) __builtin_prefetch(b.table + b.element(b.indices, i + AHEAD) * columns);
    const int64_t row = b.element(b.indices, i);
    if (row == b.padding) continue;
    const int8_t* from = b.table + row * columns;
    const Vector scale = all(b.scales[row]), weight = all(b.sample_weights ? b.sample_weights[i] : 1.f);
    for (int64_t j = 0; j < columns; j += WIDE) {
      const int64_t some = std::min(WIDE, columns - j);
      const Vector value = read(from + j, some) * scale;
      const Vector total = read(totals + j);
      const bool is_larger = b.mode == MAX && used > 0;
      write(totals + j, b.mode != MAX ? fused(value, weight, total) : is_larger ? maximum(total, value) : value);
    }
    ++used;
  }
  if (b.mode == MEAN && used > 1)
    for (int64_t j = 0; j < columns; ++j) totals[j] /= static_cast<float>(used);
}

// Returns whether all bags are valid: others are not read.
template <typename Result>
bool reduce_bags(const Bags& b, Result* result) {
  bool are_valid = true;
#pragma omp parallel if (b.count > 1) reduction(&& : are_valid)
  {
    std::vector<float> totals(b.columns + WIDE);
#pragma omp for schedule(static)
    for (int64_t bag = 0; bag < b.bags; ++bag) {
      if (!b.is_valid(bag)) {
        are_valid = false;
        continue;
      }
      reduce_bag(b, bag, totals.data());
      for (int64_t j = 0; j < b.columns; j += WIDE)
        write(result + bag * b.columns + j, read(totals.data() + j), std::min(WIDE, b.columns - j));
    }
  }
  return are_valid;
}

}  // namespace
}  // namespace ipex::int8

// `numbers`: those of `Bags`. Returns 1 if an index of a bag or an offset is out of range, or if offsets
// decrease: such a bag is not read.
extern "C" int64_t int8_embedding_bag(const int64_t* numbers, const void* table, const void* scales,
                                      const void* indices, const void* offsets,
                                      const void* sample_weights, void* result) {
  ipex::int8::Bags b;
  std::memcpy(&b, numbers, 9 * sizeof(int64_t));
  b.table = static_cast<const int8_t*>(table);
  b.scales = static_cast<const float*>(scales);
  b.sample_weights = static_cast<const float*>(sample_weights);
  b.indices = indices, b.offsets = offsets;
  const bool are_valid =
      b.result_number == ipex::int8::BFLOAT16
          ? ipex::int8::reduce_bags(b, static_cast<c10::BFloat16*>(result))
          : ipex::int8::reduce_bags(b, static_cast<float*>(result));
  return are_valid ? 0 : 1;
}

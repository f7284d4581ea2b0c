// Attention over few keys: a head's scores of some queries fit the cache, so each row is normalised
// whole. Products are torch's micro-kernel's, but for few queries. Follows `vectors.cpp`.

#include <limits>
#include <vector>

namespace ipex {
namespace {

constexpr int64_t QUERIES = 32;  // of a head at once
constexpr int64_t ALONE = 4;     // queries up to which each is attended by itself
constexpr Ints LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// As `ipex_inductor.templates.short_attention` fills it in. Strides are of elements.
struct Sizes {
  int64_t batch, heads, queries, keys, width, causal;
  int64_t q[3], k[3], v[3], out[3];  // of batch, heads, rows
  int64_t mask[4];                   // and columns
};

template <typename T>
struct Head {
  const T *q, *k, *v, *mask;
  T* out;
};

template <typename T>
struct Scratch {
  std::vector<float> scores, sums;
  std::vector<T> keys, values, shares;
};

// Columns up to whole vectors.
inline int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }

// Keys that the query `row` sees.
inline int64_t seen(const Sizes& s, int64_t row) {
  return s.causal ? std::min(s.keys, row + 1) : s.keys;
}

template <typename T>
const T* mask_of(const Sizes& s, const Head<T>& head, int64_t row) {
  return head.mask ? head.mask + row * s.mask[2] : nullptr;
}

// Shares exp(score - largest) of a row's `count` keys, zeros behind them; returns one by their sum,
// 0 where every key is masked. `shares` may be `scores`.
template <typename T, typename Share>
float normalised(const Sizes& s, float scale, const T* mask, int64_t visible, int64_t count,
                 float* scores, Share* shares) {
  const float none = -std::numeric_limits<float>::infinity();
  Vector largest = all(none);
  for (int64_t j = 0; j < visible; j += WIDE) {
    const int64_t left = visible - j;
    Vector score = read(scores + j) * scale;
    if (mask) score += s.mask[3] ? read(mask + j, left) : all(read(mask, 1)[0]);
    if (left < WIDE) score = LANES < static_cast<int32_t>(left) ? score : all(none);
    write(scores + j, score);
    largest = maximum(largest, score);
  }
  float peak = none;
  for (int64_t i = 0; i < WIDE; ++i)
    if (largest[i] > peak || largest[i] != largest[i]) peak = largest[i];
  Vector sum{};
  for (int64_t j = 0; j < padded(count); j += WIDE) {
    Vector share{};
    if (j < visible && peak != none) share = exp(read(scores + j) - peak);
    sum += share;
    write(shares + j, share);
  }
  const float whole = total(sum);
  return whole == 0 ? 0 : 1 / whole;
}

// One row, where packing keys and values would take longer than using them once.
template <typename T>
void attend_row(const Sizes& s, float scale, const Head<T>& head, Scratch<T>& scratch,
                int64_t row) {
  float *scores = scratch.scores.data(), *sums = scratch.sums.data();
  const T* query = head.q + row * s.q[2];
  const int64_t visible = seen(s, row);
  for (int64_t j = 0; j < visible; ++j) {
    Vector sum{};
    for (int64_t d = 0; d < s.width; d += WIDE)
      sum = fused(read(query + d), read(head.k + j * s.k[2] + d), sum);
    scores[j] = total(sum);
  }
  const T* mask = mask_of(s, head, row);
  const float by = normalised(s, scale, mask, visible, visible, scores, scores);
  std::fill_n(sums, s.width, 0.f);
  for (int64_t j = 0; j < visible; ++j)
    for (int64_t d = 0; d < s.width; d += WIDE)
      write(sums + d, fused(all(scores[j]), read(head.v + j * s.v[2] + d), read(sums + d)));
  for (int64_t d = 0; d < s.width; d += WIDE)
    write(head.out + row * s.out[2] + d, read(sums + d) * by);
}

// Keys [keys, width] as [width / 2, keys, 2], values [keys, width] as [keys / 2, width, 2].
inline void pack(const Sizes& s, const Head<c10::BFloat16>& head, Scratch<c10::BFloat16>& to) {
  transpose(reinterpret_cast<const float*>(head.k), s.k[2] / 2, s.keys, s.width / 2,
            reinterpret_cast<float*>(to.keys.data()), padded(s.keys));
  for (int64_t j = 0; j < s.keys; j += 2) {
    const c10::BFloat16 *first = head.v + j * s.v[2], *second = first + s.v[2];
    c10::BFloat16* pairs = to.values.data() + j * s.width;
    const bool both = j + 1 < s.keys;
    for (int64_t d = 0; d < s.width; ++d) {
      pairs[2 * d] = first[d];
      pairs[2 * d + 1] = both ? second[d] : c10::BFloat16{};
    }
  }
}

inline void pack(const Sizes& s, const Head<float>& head, Scratch<float>& to) {
  transpose(head.k, s.k[2], s.keys, s.width, to.keys.data(), padded(s.keys));
  for (int64_t j = 0; j < s.keys; ++j)
    std::copy_n(head.v + j * s.v[2], s.width, to.values.data() + j * s.width);
}

// Rows from `row` on, keys and values packed.
template <typename T>
void attend_rows(const Sizes& s, float scale, const Head<T>& head, Scratch<T>& scratch,
                 int64_t row, int64_t rows) {
  constexpr bool PAIRED = sizeof(T) == 2;
  const int64_t line = padded(s.keys), count = seen(s, row + rows - 1);
  const int64_t depth = PAIRED ? (count + 1) / 2 * 2 : count;
  float *scores = scratch.scores.data(), *sums = scratch.sums.data(), by[QUERIES];
  at::native::cpublas::brgemm(rows, count, s.width, s.q[2], line, line, false,
                              head.q + row * s.q[2], scratch.keys.data(), scores, PAIRED);
  for (int64_t i = 0; i < rows; ++i)
    by[i] = normalised(s, scale, mask_of(s, head, row + i), seen(s, row + i), count,
                       scores + i * line, scratch.shares.data() + i * line);
  at::native::cpublas::brgemm(rows, s.width, depth, line, s.width, s.width, false,
                              scratch.shares.data(), scratch.values.data(), sums, PAIRED);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < s.width; d += WIDE)
      write(head.out + (row + i) * s.out[2] + d, read(sums + i * s.width + d) * by[i]);
}

template <typename T>
void attend(const Sizes& s, float scale, const Head<T>& all) {
  const bool alone = s.queries <= ALONE || !has_micro_kernel;
  const int64_t parts = (s.queries + QUERIES - 1) / QUERIES, line = padded(s.keys);
  const int64_t rows = alone ? 1 : QUERIES, packed = alone ? 0 : line * s.width;
#pragma omp parallel
  {
    thread_local Scratch<T> scratch;  // grows to the largest that came, at most some megabytes
    const auto grown = [](auto& part, int64_t size) {
      if (static_cast<int64_t>(part.size()) < size) part.resize(size);
    };
    grown(scratch.scores, rows * line);
    grown(scratch.sums, rows * s.width);
    grown(scratch.keys, packed);
    grown(scratch.values, packed);
    grown(scratch.shares, alone ? 0 : rows * line);
    int64_t at_hand = -1;  // the head whose keys and values are packed
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < s.batch * s.heads * parts; ++unit) {
      const int64_t which = unit / parts, row = unit % parts * QUERIES;
      const int64_t b = which / s.heads, h = which % s.heads;
      const Head<T> head{all.q + b * s.q[0] + h * s.q[1], all.k + b * s.k[0] + h * s.k[1],
                         all.v + b * s.v[0] + h * s.v[1],
                         all.mask ? all.mask + b * s.mask[0] + h * s.mask[1] : nullptr,
                         all.out + b * s.out[0] + h * s.out[1]};
      const int64_t end = std::min(s.queries, row + QUERIES);
      if (alone) {
        for (int64_t i = row; i < end; ++i) attend_row(s, scale, head, scratch, i);
        continue;
      }
      if (at_hand != which) pack(s, head, scratch);
      at_hand = which;
      try {
        attend_rows(s, scale, head, scratch, row, end - row);
      } catch (...) {  // the micro-kernel does not take such sizes on this CPU
        for (int64_t i = row; i < end; ++i) attend_row(s, scale, head, scratch, i);
      }
    }
    if (!alone) at::native::cpublas::brgemm_release(sizeof(T) == 2);
  }
}

}  // namespace
}  // namespace ipex

#define ATTENTION(name, T)                                                                     \
  extern "C" void name(const int64_t* sizes, float scale, const void* q, const void* k,        \
                       const void* v, const void* mask, void* out) {                           \
    ipex::attend(*reinterpret_cast<const ipex::Sizes*>(sizes), scale,                          \
                 ipex::Head<T>{(const T*)q, (const T*)k, (const T*)v, (const T*)mask, (T*)out}); \
  }

ATTENTION(attention_bfloat16, c10::BFloat16)
ATTENTION(attention_float32, float)
#if BF16_PRODUCTS
#pragma GCC pop_options
#endif

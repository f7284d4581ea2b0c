// Attention over few keys: a head's scores of some queries fit the cache, so each row is normalised
// whole. Products are torch's micro-kernel's with AVX-512, without it those of fp32 are our own; few
// queries are attended one by one. Follows `attention_parts.cpp`.

namespace ipex {
namespace {

constexpr int64_t QUERIES = 32;  // of a head at once
#ifdef __AVX512F__
constexpr bool OURS = false;  // products of fp32
constexpr int64_t ALONE = 4;  // queries up to which each is attended by itself
#else
constexpr bool OURS = true;
constexpr int64_t ALONE = 6;
#endif

constexpr int64_t PANEL = 16;  // columns that our product reads together
constexpr int64_t TALL = 6;    // and rows: twelve registers of sums on AVX2

// As `ipex_inductor.templates.cpu.short_attention` fills it in. Strides are of elements.
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
  Vector peaks = all(none);
  for (int64_t j = 0; j < visible; j += WIDE) {
    const int64_t left = visible - j;
    Vector score = read(scores + j) * scale;
    if (mask) score += s.mask[3] ? read(mask + j, left) : all(read(mask, 1)[0]);
    if (left < WIDE) score = lanes() < static_cast<int32_t>(left) ? score : all(none);
    write(scores + j, score);
    peaks = maximum(score, peaks);
  }
  float peak = largest(peaks);  // a score that is no number spoils the sum below
  if (peak == none) peak = 0;
  Vector sum{};
  for (int64_t j = 0; j < visible; j += WIDE) {
    const Vector share = exp(read(scores + j) - peak);
    sum += share;
    write(shares + j, share);
  }
  for (int64_t j = padded<WIDE>(visible); j < padded(count); j += WIDE) write(shares + j, Vector{});
  const float whole = total(sum);
  return whole == 0 ? 0 : 1 / whole;
}

// The result of `rows` rows from `row` on: their sums, each by its number.
template <typename T>
void finish(const Sizes& s, const Head<T>& head, const float* sums, const float* by, int64_t row,
            int64_t rows) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < s.width; d += WIDE)
      write(head.out + (row + i) * s.out[2] + d, read(sums + i * s.width + d) * by[i]);
}

// Few rows, where packing keys and values would take longer than using them as they lie.
template <typename T>
void attend_few(const Sizes& s, float scale, const Head<T>& head, Scratch<T>& scratch, int64_t row,
                int64_t rows) {
  const int64_t line = padded(s.keys), count = seen(s, row + rows - 1);
  const int64_t block = rows > 2 ? FIT : count;
  float *scores = scratch.scores.data(), *sums = scratch.sums.data(), by[QUERIES];
  const T* queries = head.q + row * s.q[2];
  for (int64_t j = 0; j < count; j += block) {
    const int64_t some = std::min(block, count - j);
    const Rows<T> keys{head.k + j * s.k[2], s.k[2]};
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2)
      score<2>(queries + i * s.q[2], s.q[2], keys, some, s.width, scores + i * line + j, line);
    if (i < rows)
      score<1>(queries + i * s.q[2], s.q[2], keys, some, s.width, scores + i * line + j, line);
  }
  for (int64_t i = 0; i < rows; ++i)
    by[i] = normalised(s, scale, mask_of(s, head, row + i), seen(s, row + i), count,
                       scores + i * line, scores + i * line);
  std::fill_n(sums, rows * s.width, 0.f);
  for (int64_t j = 0; j < count; j += block) {
    const int64_t some = std::min(block, count - j);
    const Rows<T> values{head.v + j * s.v[2], s.v[2]};
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2)
      average<2>(scores + i * line + j, line, values, some, s.width, sums + i * s.width);
    if (i < rows)
      average<1>(scores + i * line + j, line, values, some, s.width, sums + i * s.width);
  }
  finish(s, head, sums, by, row, rows);
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

// In panels of 16 columns, one below the other, where products are ours.
inline void pack(const Sizes& s, const Head<float>& head, Scratch<float>& to) {
  const int64_t across = OURS ? PANEL : padded(s.keys);
  for (int64_t j = 0; j < s.keys; j += across)
    transpose(head.k + j * s.k[2], s.k[2], std::min(across, s.keys - j), s.width,
              to.keys.data() + j * s.width, across);
  if (OURS && s.queries <= QUERIES) return;
  const int64_t wide = OURS ? PANEL : s.width;
  for (int64_t d = 0; d < s.width; d += wide)
    for (int64_t j = 0; j < s.keys; ++j)
      std::copy_n(head.v + j * s.v[2] + d, wide, to.values.data() + d * s.keys + j * wide);
}

template <int64_t COUNT>
void tile(const float* a, int64_t of_a, const float* b, int64_t of_b, int64_t depth, float* c,
          int64_t of_c) {
  const float* columns[PANEL / WIDE];
  for (int64_t j = 0; j < PANEL / WIDE; ++j) columns[j] = b + j * WIDE;
  add_up<COUNT, PANEL / WIDE>(a, of_a, columns, of_b, depth, c, of_c);
}

constexpr decltype(&tile<1>) TILES[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// c [rows, columns] = a [rows, depth] @ b [depth, columns], which lies in lines of `of_b` numbers,
// and its panels `apart`.
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t of_a,
                     const float* b, int64_t of_b, int64_t apart, float* c, int64_t of_c) {
  const int64_t parts = (rows + TALL - 1) / TALL;  // as even as may be
  for (int64_t n = 0; n < columns; n += PANEL, b += apart)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t row = part * rows / parts, count = (part + 1) * rows / parts - row;
      TILES[count - 1](a + row * of_a, of_a, b, of_b, depth, c + row * of_c + n, of_c);
    }
}

// Rows from `row` on, keys and values packed.
template <typename T>
void attend_rows(const Sizes& s, float scale, const Head<T>& head, Scratch<T>& scratch,
                 int64_t row, int64_t rows) {
  constexpr bool PAIRED = sizeof(T) == 2;
  const int64_t line = padded(s.keys), count = seen(s, row + rows - 1);
  const int64_t depth = PAIRED ? (count + 1) / 2 * 2 : count;
  float *scores = scratch.scores.data(), *sums = scratch.sums.data(), by[QUERIES];
  const T *queries = head.q + row * s.q[2], *keys = scratch.keys.data();
  const T* values = scratch.values.data();
  if constexpr (OURS && !PAIRED)
    multiply(rows, count, s.width, queries, s.q[2], keys, PANEL, s.width * PANEL, scores, line);
  else
    at::native::cpublas::brgemm(rows, count, s.width, s.q[2], line, line, false, queries, keys,
                                scores, PAIRED);
  T* shares = scratch.shares.data();
  for (int64_t i = 0; i < rows; ++i)
    by[i] = normalised(s, scale, mask_of(s, head, row + i), seen(s, row + i), count,
                       scores + i * line, shares + i * line);
  if constexpr (OURS && !PAIRED) {
    if (s.queries <= QUERIES)
      multiply(rows, s.width, depth, shares, line, head.v, s.v[2], PANEL, sums, s.width);
    else
      multiply(rows, s.width, depth, shares, line, values, PANEL, s.keys * PANEL, sums, s.width);
  } else
    at::native::cpublas::brgemm(rows, s.width, depth, line, s.width, s.width, false, shares, values,
                                sums, PAIRED);
  finish(s, head, sums, by, row, rows);
}

template <typename T>
void attend(const Sizes& s, float scale, const Head<T>& all) {
  const bool packs = (OURS && sizeof(T) == 4) || has_micro_kernel<T>;
  const bool alone = s.queries <= ALONE || !packs;
  const int64_t parts = (s.queries + QUERIES - 1) / QUERIES, line = padded(s.keys);
  const int64_t rows = QUERIES, packed = alone ? 0 : line * s.width;
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
        attend_few(s, scale, head, scratch, row, end - row);
        continue;
      }
      if (at_hand != which) pack(s, head, scratch);
      at_hand = which;
      try {
        attend_rows(s, scale, head, scratch, row, end - row);
      } catch (...) {  // the micro-kernel does not take such sizes on this CPU
        attend_few(s, scale, head, scratch, row, end - row);
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

// What our kernels for CPUs have in common: vectors of floats as wide as the CPU's registers (wider
// ones GCC keeps in memory), and torch's micro-kernel.
//
// No header of torch is read, as those took three of five seconds to compile: its micro-kernel is
// declared here as its library has it. `cpu_library.py` writes above: BF16_PRODUCTS, whether the
// CPU multiplies pairs of bf16, AMX_TILES, whether it has AMX, and BESIDE_TORCH, whether code of
// Inductor's with torch's headers is around this. All headers are read here: GCC 13 to 15 do not inline what they read behind the
// pragma below into the destructors that they make at the end, and refuse `std::vector`.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>
#include <omp.h>
#include <unistd.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#if BESIDE_TORCH
#include <c10/util/BFloat16.h>
#else
namespace c10 {
struct BFloat16 {
  uint16_t bits;
};
}  // namespace c10
#endif
namespace ipex {
struct Half {  // fp16
  uint16_t bits;
};
}  // namespace ipex
#if BF16_PRODUCTS
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#endif

namespace at::native::cpublas {
// `c` [m, n] = a [m, k] @ b [k, n], whose rows lie in pairs if `paired`; `add`: to what is in `c`.
void brgemm(int64_t m, int64_t n, int64_t k, int64_t of_a, int64_t of_b, int64_t of_c, bool add,
            const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool paired);
void brgemm(int64_t m, int64_t n, int64_t k, int64_t of_a, int64_t of_b, int64_t of_c, bool add,
            const float* a, const float* b, float* c, bool paired);
void brgemm_release(bool paired);
}  // namespace at::native::cpublas

// What is an instruction or two: a compiler that has inlined much already makes calls of them.
#define SHORT inline __attribute__((always_inline))

namespace ipex {
namespace {

#if AMX_TILES
// Linux lets a process use tiles once it asked for them.
const bool HAS_TILES = [] {
  constexpr long ARCH_PRCTL = 158, REQUEST = 0x1023, TILE_DATA = 18;
  return syscall(ARCH_PRCTL, REQUEST, TILE_DATA) == 0;
}();

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sets sizes of tiles: 0, 1 and 4 have `above` rows, 2, 3 and 5 have `below`, 6 and 7 have 16; all
// rows have 64 bytes. Sums are in tiles 0 to 3, A in 4 and 5, weights in 6 and 7.
__attribute__((target("amx-tile"))) void configure_tiles(int64_t above, int64_t below) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = 16;
  for (int i : {0, 1, 4}) config.rows[i] = static_cast<uint8_t>(above);
  for (int i : {2, 3, 5}) config.rows[i] = static_cast<uint8_t>(below);
  asm volatile("" : : "r"(&config) : "memory");  // GCC believes that the next line reads 8 bytes
  _tile_loadconfig(&config);
}

__attribute__((target("amx-tile"))) void release_tiles() { _tile_release(); }
#endif

#if defined(__AVX512F__)
constexpr int64_t WIDE = 16;
#elif defined(__AVX__)
constexpr int64_t WIDE = 8;
#else
constexpr int64_t WIDE = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * WIDE)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDE)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));

SHORT Vector all(float value) { return value - Vector{}; }  // -0 too, so nothing is subtracted

inline Ints lanes() {  // 0, 1, 2, ...
  Ints result{};
  for (int32_t i = 0; i < WIDE; ++i) result[i] = i;
  return result;
}

// a b + c, rounded once where the CPU can; Inductor's flags do not let compilers do it.
SHORT Vector fused(Vector a, Vector b, Vector c) {
#ifdef __AVX512F__
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Numbers of a weight that lie together for one instruction.
template <typename T>
constexpr int64_t PAIR = 1;
template <>
constexpr int64_t PAIR<c10::BFloat16> = 2;

// The first `count` of a vector's numbers; all of them is one instruction, and no call.
template <typename To, typename From>
SHORT void stored(To* to, const From& values, int64_t count) {
  if (count >= WIDE)
    std::memcpy(to, &values, sizeof values);
  else
    std::memcpy(to, &values, count * sizeof(To));
}

// The first `count` numbers from there on, zeros behind them; all of a vector where there are more.
// What is written in bf16 is rounded to nearest, ties to even.
#ifdef __AVX512F__
SHORT __mmask16 first(int64_t count) {
  return count >= WIDE ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

SHORT Vector read(const float* from, int64_t count = WIDE) {
  return (Vector)_mm512_maskz_loadu_ps(first(count), from);
}

SHORT Vector read(const c10::BFloat16* from, int64_t count = WIDE) {
  const __m256i halves = _mm256_maskz_loadu_epi16(first(count), from);
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

SHORT Vector read(const Half* from, int64_t count = WIDE) {
  return (Vector)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), from));
}

SHORT void write(float* to, Vector value, int64_t count = WIDE) {
  _mm512_mask_storeu_ps(to, first(count), (__m512)value);
}

SHORT void write(Half* to, Vector value, int64_t count = WIDE) {
  const __m256i halves = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(to, first(count), halves);
}
#else
template <typename To, typename From>
SHORT To loaded(const From* from, int64_t count) {
  To result{};
  if (count >= WIDE)
    std::memcpy(&result, from, sizeof result);
  else
    std::memcpy(&result, from, count * sizeof(From));
  return result;
}

SHORT Vector read(const float* from, int64_t count = WIDE) { return loaded<Vector>(from, count); }

SHORT Vector read(const c10::BFloat16* from, int64_t count = WIDE) {
  return (Vector)(__builtin_convertvector(loaded<Halves>(from, count), Words) << 16);
}

SHORT void write(float* to, Vector value, int64_t count = WIDE) {
  stored(to, value, count);
}

#ifdef __F16C__
SHORT Vector read(const Half* from, int64_t count = WIDE) {
  return (Vector)_mm256_cvtph_ps(loaded<__m128i>(from, count));
}

SHORT void write(Half* to, Vector value, int64_t count = WIDE) {
  stored(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT), count);
}
#endif
#endif

SHORT void write(c10::BFloat16* to, Vector value, int64_t count = WIDE) {
#if BF16_PRODUCTS
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)value);
  _mm256_mask_storeu_epi16(to, first(count), (__m256i)halves);
#else
  const Words bits = (Words)value, rounded = bits + 0x7fff + (bits >> 16 & 1);
  const Words kept = value == value ? rounded : bits | 0x400000;  // NaN stays one
  const Halves halves = __builtin_convertvector(kept >> 16, Halves);
  stored(to, halves, count);
#endif
}

SHORT Vector maximum(Vector a, Vector b) {  // b where one is no number
#if defined(__AVX512F__)
  return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// One number of all: of each with the one half as far as the last time, until all are the same.
template <int64_t APART = WIDE / 2, typename Both>
inline float folded(Vector vector, Both both) {
  const Vector result = both(vector, __builtin_shuffle(vector, lanes() ^ int32_t{APART}));
  if constexpr (APART > 1) return folded<APART / 2>(result, both);
  return result[0];
}

inline float total(Vector vector) {
  return folded(vector, [](Vector a, Vector b) { return a + b; });
}

inline float largest(Vector vector) { return folded(vector, maximum); }

SHORT Vector limited(Vector x, float least, float most) {  // NaN stays one
#ifdef __AVX512F__
  const __m512 above = _mm512_max_ps((__m512)all(least), (__m512)x);
  return (Vector)_mm512_min_ps((__m512)all(most), above);
#elif defined(__AVX__)
  const __m256 above = _mm256_max_ps((__m256)all(least), (__m256)x);
  return (Vector)_mm256_min_ps((__m256)all(most), above);
#else
  return x < least ? all(least) : x > most ? all(most) : x;
#endif
}

// 2^n (1 + r + ...), |r| <= ln(2) / 2, the rest in Chebyshev's points to degree 6: within 2 units of
// the last place; 0 and infinity where a float cannot hold it.
inline Vector exp(Vector x) {
  constexpr float NEAREST = 12582912;  // 1.5 * 2^23: a sum with it has no fraction
  x = limited(x, -104, 89);
  const Vector shifted = fused(x, all(1.44269504f), all(NEAREST)), n = shifted - NEAREST;
  Vector r = fused(n, all(-0.693359375f), x);  // ln(2) in two parts
  r = fused(n, all(2.12194440e-4f), r);
  // Not one term after the other: a processor waits for each.
  const Vector square = r * r;
  const Vector middle = fused(r, all(0.166665769f), all(0.5f));
  Vector high = fused(r, all(0.00836318626f), all(0.0416665546f));
  high = fused(square, all(0.00139261926f), high);
  const Vector sum = fused(square, fused(square, high, middle), r + 1.f);
#ifdef __AVX512F__
  return (Vector)_mm512_scalef_ps((__m512)sum, (__m512)n);
#else  // by 2^(n-1), as 2^n itself may be no float; what is below 2^-125 is 0
  const Ints power = (Ints)shifted - (Ints)all(NEAREST) + 126;
  return (sum + sum) * (Vector)((power > 0 ? power : 0) << 23);
#endif
}

// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7.
inline Vector erf(Vector x) {
  const Vector size = x < 0.f ? -x : x, t = 1.f / (1.f + 0.3275911f * size);
  Vector sum = fused(t, all(1.061405429f), all(-1.453152027f));
  sum = fused(sum, t, all(1.421413741f));
  sum = fused(sum, t, all(-0.284496736f));
  sum = fused(sum, t, all(0.254829592f));
  const Vector result = 1.f - sum * t * exp(-size * size);
  return x < 0.f ? -result : result;
}

// Near zero by the fifth convergent of its continued fraction: there 1 - far has no digits left.
inline Vector tanh(Vector x) {
  const Vector size = x < 0.f ? -x : x, square = x * x;
  const Vector near = x * (945.f + square * (105.f + square)) /
                      (945.f + square * (420.f + square * 15.f));
  const Vector far = 1.f - 2.f / (exp(2.f * size) + 1.f);
  return size < 0.6f ? near : x < 0.f ? -far : far;
}

inline Vector sigmoid(Vector x) { return 1.f / (1.f + exp(-x)); }

#ifdef __AVX512F__
// A function that falls from 0 on and is 0 from 5.6 on, piece by piece: four numbers are looked up and
// a cubic taken, a third of what an exponential and a division take. The cubics meet it in Chebyshev's
// points: within 2e-7, and a rounding, where the fourth derivative is at most 0.55, as of the normal
// distribution.
class Pieces {
 public:
  template <typename Function>
  explicit Pieces(Function of) {
    const double a = std::cos(M_PI / 8) / 2, b = std::sin(M_PI / 8) / 2;  // points are +-a, +-b
    for (int i = 0; i < COUNT - 1; ++i) {
      const auto even = [&](double r) { return (of((i + r) / SCALE) + of((i - r) / SCALE)) / 2; };
      const auto odd = [&](double r) { return (of((i + r) / SCALE) - of((i - r) / SCALE)) / (2 * r); };
      const auto fit = [&](int power, auto f) {
        const double slope = (f(a) - f(b)) / (a * a - b * b);
        factors[power + 2][i] = slope;
        factors[power][i] = f(a) - slope * a * a;
      };
      fit(0, even);
      fit(1, odd);
    }
  }

  SHORT Vector operator()(Vector x) const {  // of x's size
    constexpr float NEAREST = 12582912;  // as of `exp`
    const __m512 size = _mm512_min_ps(_mm512_abs_ps((__m512)x), (__m512)all((COUNT - 1) / SCALE));
    const Vector shifted = fused((Vector)size, all(SCALE), all(NEAREST)), i = shifted - NEAREST;
    const Vector r = fused((Vector)size, all(SCALE), -i);
    Vector sum = factor(3, shifted);
    for (int power = 2; power >= 0; --power) sum = fused(sum, r, factor(power, shifted));
    return sum;
  }

 private:
  static constexpr int COUNT = 32;        // of the last nothing is left
  static constexpr float SCALE = 5.5;     // pieces in one
  alignas(64) float factors[4][COUNT]{};  // of each power, around a piece's middle

  SHORT Vector factor(int power, Vector piece) const {  // by its lowest bits
    const __m512 low = _mm512_load_ps(factors[power]), high = _mm512_load_ps(factors[power] + 16);
    return (Vector)_mm512_permutex2var_ps(low, (__m512i)piece, high);
  }
};

const Pieces above_normal([](double x) { return std::erfc(x * M_SQRT1_2) / 2; });
const Pieces above_tanh([](double x) {  // its likeness of GELU's
  return 1 / (1 + std::exp(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)));
});

SHORT Vector weighted(Vector x, const Pieces& above) {
  const Vector share = above(x);
  return x * (x < 0.f ? share : 1.f - share);
}

inline Vector gelu(Vector x) { return weighted(x, above_normal); }
inline Vector gelu_tanh(Vector x) { return weighted(x, above_tanh); }
#else
inline Vector gelu(Vector x) { return 0.5f * x * (1.f + erf(x * 0.70710678f)); }

inline Vector gelu_tanh(Vector x) {
  return 0.5f * x * (1.f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
}
#endif

// A pair of rows with columns exchanged that differ in the bit STEP: first those without it.
template <int STEP>
inline std::pair<Vector, Vector> exchanged(Vector first, Vector second) {
  Ints low{}, high{};
  for (int j = 0; j < WIDE; ++j) {
    low[j] = j & STEP ? j - STEP + WIDE : j;
    high[j] = j & STEP ? j + WIDE : j + STEP;
  }
  return {__builtin_shuffle(first, second, low), __builtin_shuffle(first, second, high)};
}

// Transposes `rows`, from the bit STEP of their numbers on.
template <int STEP = 1>
inline void exchange(Vector (&rows)[WIDE]) {
#pragma GCC unroll 16
  for (int i = 0; i < WIDE; ++i)
    if (!(i & STEP)) std::tie(rows[i], rows[i + STEP]) = exchanged<STEP>(rows[i], rows[i + STEP]);
  if constexpr (2 * STEP < WIDE) exchange<2 * STEP>(rows);
}

// The total of each of the rows.
template <int STEP = 1>
inline Vector totals(Vector (&rows)[WIDE]) {
#pragma GCC unroll 16
  for (int i = 0; i < WIDE; i += 2 * STEP) {
    const auto [low, high] = exchanged<STEP>(rows[i], rows[i + STEP]);
    rows[i] = low + high;
  }
  if constexpr (2 * STEP < WIDE) return totals<2 * STEP>(rows);
  return rows[0];
}

// `to` [width, height] of `from` [height, width], of at most a vector's numbers each; WHOLE: of so
// many. Its lines are whole vectors.
template <bool WHOLE>
inline void transpose_tile(const float* from, int64_t line, int64_t height, int64_t width,
                           float* to, int64_t of_to) {
  Vector rows[WIDE] = {};
#pragma GCC unroll 16
  for (int64_t n = 0; n < (WHOLE ? WIDE : height); ++n)
    rows[n] = read(from + n * line, WHOLE ? WIDE : width);
  exchange(rows);
#pragma GCC unroll 16
  for (int64_t n = 0; n < (WHOLE ? WIDE : width); ++n) write(to + n * of_to, rows[n]);
}

// `to` [columns, height], in lines of whole vectors, is the transpose of `from` [height, columns].
inline void transpose(const float* from, int64_t line, int64_t height, int64_t columns, float* to,
                      int64_t of_to) {
  for (int64_t i = 0; i < height; i += WIDE)
    for (int64_t j = 0; j < columns; j += WIDE) {
      const int64_t tall = std::min(WIDE, height - i), wide = std::min(WIDE, columns - j);
      const float* tile = from + i * line + j;
      if (tall == WIDE && wide == WIDE)
        transpose_tile<true>(tile, line, tall, wide, to + j * of_to + i, of_to);
      else
        transpose_tile<false>(tile, line, tall, wide, to + j * of_to + i, of_to);
    }
}

// `sums` and the products of one value of x, or a pair of them, with 16 columns.
SHORT Vector added(Vector sums, const float* x, const float* weight) {
  return fused(all(*x), read(weight), sums);
}

#ifdef __F16C__
SHORT Vector added(Vector sums, const Half* x, const Half* weight) {
  return fused(all(_cvtsh_ss(x->bits)), read(weight), sums);
}
#endif

// A vector's pairs of bf16 from there on.
SHORT Words pairs(const c10::BFloat16* from) {
  Words both;
  std::memcpy(&both, from, sizeof both);
  return both;
}

// The pair that is there, for all lanes: by a load, as scalars take long to get into vectors.
SHORT Words one_pair(const c10::BFloat16* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  typedef float Any __attribute__((may_alias, aligned(2)));
  return (Words)_mm256_castps_si256(_mm256_broadcast_ss((const float*)(const Any*)from));
#else
  uint32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return Words{} + pair;
#endif
}

SHORT Vector added(Vector sums, const c10::BFloat16* x, const c10::BFloat16* weight) {
#if BF16_PRODUCTS
  return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)one_pair(x), (__m512bh)pairs(weight));
#else
  const Words factors = pairs(weight), values = one_pair(x);
  sums = fused((Vector)(values << 16), (Vector)(factors << 16), sums);
  return fused((Vector)(values & 0xffff0000), (Vector)(factors & 0xffff0000), sums);
#endif
}

// `sums`, in lines of `of_sums`, of COUNT rows of x and of PARTS vectors of columns, all in registers:
// `weights` is where those begin, and `line` how far their numbers of one row, or pair of rows, of
// the weight are apart, a number.
template <int64_t COUNT, int64_t PARTS, typename T>
inline void add_up(const T* x, int64_t of_x, const T* const (&weights)[PARTS], int64_t line,
                   int64_t depth, float* sums, int64_t of_sums) {
  Vector totals[COUNT][PARTS];
#pragma GCC unroll 6
  for (int64_t i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
    for (int64_t j = 0; j < PARTS; ++j) totals[i][j] = Vector{};
  for (int64_t k = 0; k < depth; k += PAIR<T>) {
    if constexpr (PAIR<T> == 2 && !BF16_PRODUCTS) {
      // What of a pair is first for all rows, then what is second: registers hold one of them.
      const auto half = [&](auto widened) __attribute__((always_inline)) {
        Vector factors[PARTS];
#pragma GCC unroll 8
        for (int64_t j = 0; j < PARTS; ++j) factors[j] = widened(pairs(weights[j] + k * line));
#pragma GCC unroll 6
        for (int64_t i = 0; i < COUNT; ++i) {
          const Vector value = widened(one_pair(x + i * of_x + k));
#pragma GCC unroll 8
          for (int64_t j = 0; j < PARTS; ++j) totals[i][j] = fused(value, factors[j], totals[i][j]);
        }
      };
      half([](Words both) { return (Vector)(both << 16); });
      asm volatile("" ::: "memory");  // or all pairs are kept, and sums go to memory instead
      half([](Words both) { return (Vector)(both & 0xffff0000); });
      continue;
    }
#pragma GCC unroll 6
    for (int64_t i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
      for (int64_t j = 0; j < PARTS; ++j)
        totals[i][j] = added(totals[i][j], x + i * of_x + k, weights[j] + k * line);
  }
#pragma GCC unroll 6
  for (int64_t i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
    for (int64_t j = 0; j < PARTS; ++j) write(sums + i * of_sums + j * WIDE, totals[i][j]);
}

// Whether torch's micro-kernel takes such numbers here (bf16 in pairs, with AVX-512 alone); else it
// would raise, in a thread.
template <typename T>
bool tried() {
  T x[2], block[2 * 16];
  float sums[16];
  for (int64_t i = 0; i < 2; ++i) write(x + i, all(1.f + i), 1);
  for (int64_t i = 0; i < 2 * 16; ++i) write(block + i, all(1), 1);
  try {
    constexpr bool PAIRED = PAIR<T> == 2;
    at::native::cpublas::brgemm(1, 16, 2, 2, 16, 16, false, x, block, sums, PAIRED);
    at::native::cpublas::brgemm_release(PAIRED);
    return sums[0] == 3 && sums[16 - 1] == 3;
  } catch (...) {
    return false;
  }
}

template <typename T>
const bool has_micro_kernel = tried<T>();  // when this is loaded

}  // namespace
}  // namespace ipex

// What our kernels for CPUs have in common: vectors of sixteen floats, and torch's micro-kernel.
//
// No header of torch is read, as those took three of five seconds to compile: its micro-kernel is
// declared here as its library has it. `cpu_library.py` writes above: BF16_PRODUCTS, whether the
// CPU multiplies pairs of bf16, and BESIDE_TORCH, whether code of Inductor's with torch's headers
// is around this.
#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
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

namespace ipex {
namespace {

constexpr int64_t WIDE = 16;
typedef float Vector __attribute__((vector_size(4 * WIDE)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDE)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));

inline Vector all(float value) { return Vector{} + value; }

// a b + c, rounded once where the CPU can; Inductor's flags do not let compilers do it.
inline Vector fused(Vector a, Vector b, Vector c) {
#ifdef __AVX512F__
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// The first `count` numbers from there on, zeros behind them; all of a vector where there are more.
// What is written in bf16 is rounded to nearest, ties to even.
#ifdef __AVX512F__
inline __mmask16 first(int64_t count) {
  return count >= WIDE ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

inline Vector read(const float* from, int64_t count = WIDE) {
  return (Vector)_mm512_maskz_loadu_ps(first(count), from);
}

inline Vector read(const c10::BFloat16* from, int64_t count = WIDE) {
  const __m256i halves = _mm256_maskz_loadu_epi16(first(count), from);
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

inline void write(float* to, Vector value, int64_t count = WIDE) {
  _mm512_mask_storeu_ps(to, first(count), (__m512)value);
}
#else
template <typename To, typename From>
inline To loaded(const From* from, int64_t count) {
  To result{};
  std::memcpy(&result, from, std::min(count, WIDE) * sizeof(From));
  return result;
}

inline Vector read(const float* from, int64_t count = WIDE) { return loaded<Vector>(from, count); }

inline Vector read(const c10::BFloat16* from, int64_t count = WIDE) {
  return (Vector)(__builtin_convertvector(loaded<Halves>(from, count), Words) << 16);
}

inline void write(float* to, Vector value, int64_t count = WIDE) {
  std::memcpy(to, &value, std::min(count, WIDE) * sizeof(float));
}
#endif

inline void write(c10::BFloat16* to, Vector value, int64_t count = WIDE) {
#if BF16_PRODUCTS
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)value);
  _mm256_mask_storeu_epi16(to, first(count), (__m256i)halves);
#else
  const Words bits = (Words)value, rounded = bits + 0x7fff + (bits >> 16 & 1);
  const Words kept = value == value ? rounded : bits | 0x400000;  // NaN stays one
  const Halves halves = __builtin_convertvector(kept >> 16, Halves);
  std::memcpy(to, &halves, std::min(count, WIDE) * sizeof(uint16_t));
#endif
}

inline Vector maximum(Vector a, Vector b) { return a > b || a != a ? a : b; }  // NaN wins

inline float total(Vector vector) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)vector);
#else
  float sum = 0;
  for (int64_t i = 0; i < WIDE; ++i) sum += vector[i];
  return sum;
#endif
}

inline Vector limited(Vector x, float least, float most) {  // NaN stays one
#ifdef __AVX512F__
  const __m512 above = _mm512_max_ps((__m512)all(least), (__m512)x);
  return (Vector)_mm512_min_ps((__m512)all(most), above);
#else
  return x < least ? all(least) : x > most ? all(most) : x;
#endif
}

// 2^n (1 + r + ...), |r| <= ln(2) / 2, by Taylor's polynomial of degree 7: within 2 units of the
// last place; 0 and infinity where a float cannot hold it.
inline Vector exp(Vector x) {
  constexpr float NEAREST = 12582912;  // 1.5 * 2^23: a sum with it has no fraction
  x = limited(x, -104, 89);
  const Vector shifted = fused(x, all(1.44269504f), all(NEAREST)), n = shifted - NEAREST;
  Vector r = fused(n, all(-0.693359375f), x);  // ln(2) in two parts
  r = fused(n, all(2.12194440e-4f), r);
  Vector sum = fused(r, all(1 / 5040.f), all(1 / 720.f));
  sum = fused(sum, r, all(1 / 120.f));
  sum = fused(sum, r, all(1 / 24.f));
  sum = fused(sum, r, all(1 / 6.f));
  sum = fused(sum, r, all(1 / 2.f));
  sum = fused(sum, r, all(1));
  sum = fused(sum, r, all(1));
#ifdef __AVX512F__
  return (Vector)_mm512_scalef_ps((__m512)sum, (__m512)n);
#else  // in two steps: 2^n itself may be no float
  const Ints whole = (Ints)shifted - (Ints)all(NEAREST), half = whole >> 1;
  return sum * (Vector)((half + 127) << 23) * (Vector)((whole - half + 127) << 23);
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

// Exchanges columns of `rows` that differ in the bit STEP with rows that do.
template <int STEP>
inline void exchange(Vector (&rows)[WIDE]) {
  Ints low{}, high{};
  for (int j = 0; j < WIDE; ++j) {
    low[j] = j & STEP ? j - STEP + WIDE : j;
    high[j] = j & STEP ? j + WIDE : j + STEP;
  }
  for (int i = 0; i < WIDE; ++i) {
    if (i & STEP) continue;
    const Vector first = rows[i], second = rows[i + STEP];
    rows[i] = __builtin_shuffle(first, second, low);
    rows[i + STEP] = __builtin_shuffle(first, second, high);
  }
}

// `to` [columns, height], in lines of whole vectors, is the transpose of `from` [height, columns].
inline void transpose(const float* from, int64_t line, int64_t height, int64_t columns, float* to,
                      int64_t of_to) {
  for (int64_t i = 0; i < height; i += WIDE)
    for (int64_t j = 0; j < columns; j += WIDE) {
      Vector rows[WIDE] = {};
      for (int64_t n = 0; n < std::min(WIDE, height - i); ++n)
        rows[n] = read(from + (i + n) * line + j, columns - j);
      exchange<1>(rows), exchange<2>(rows), exchange<4>(rows), exchange<8>(rows);
      for (int64_t n = 0; n < std::min(WIDE, columns - j); ++n)
        write(to + (j + n) * of_to + i, rows[n]);
    }
}

// Whether torch's micro-kernel takes pairs here; in another form it would raise, in a thread.
inline bool tried() {
  c10::BFloat16 x[2], blocks[2 * 16];
  float wide[2] = {1, 2}, plain[2 * 16], sums[16];
  std::fill_n(plain, 2 * 16, 1.f);
  for (int64_t i = 0; i < 2; ++i) write(x + i, all(wide[i]), 1);
  for (int64_t i = 0; i < 2 * 16; ++i) write(blocks + i, all(1), 1);
  try {
    at::native::cpublas::brgemm(1, 16, 2, 2, 16, 16, false, x, blocks, sums, true);
    const bool right = sums[0] == 3 && sums[16 - 1] == 3;
    at::native::cpublas::brgemm(1, 16, 2, 2, 16, 16, false, wide, plain, sums, false);
    at::native::cpublas::brgemm_release(true);
    return right && sums[0] == 3 && sums[16 - 1] == 3;
  } catch (...) {
    return false;
  }
}

const bool has_micro_kernel = tried();  // when this is loaded

}  // namespace
}  // namespace ipex

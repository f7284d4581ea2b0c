// What our kernels for CPUs have in common: vectors of floats, and torch's micro-kernel.
//
// BF16_PRODUCTS, which `cpu_library.py` writes above: whether the CPU multiplies pairs of bf16.
#if defined(__AVX512F__)
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#elif defined(__AVX2__)
#define CPU_CAPABILITY AVX2
#define CPU_CAPABILITY_AVX2
#else
#define CPU_CAPABILITY DEFAULT
#define CPU_CAPABILITY_DEFAULT
#endif
#if BF16_PRODUCTS
#pragma GCC target("avx512bf16")
#endif

#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

using Vector = at::vec::Vectorized<float>;
constexpr int64_t WIDE = Vector::size();

inline float total(Vector vector) {
#if defined(__AVX2__)
  return vector.reduce_add();
#else  // torch's own does not compile
  float lanes[WIDE], sum = 0;
  vector.store(lanes);
  for (float lane : lanes) sum += lane;
  return sum;
#endif
}

inline Vector read(const float* from, int64_t count) {
  return count >= WIDE ? Vector::loadu(from) : Vector::loadu(from, count);
}

inline void write(float* to, Vector value, int64_t count) {
  value.store(to, static_cast<int>(std::min(count, WIDE)));
}

#if BF16_PRODUCTS
inline __mmask16 first(int64_t count) {
  return count >= WIDE ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

inline Vector read(const c10::BFloat16* from, int64_t count) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void write(c10::BFloat16* to, Vector value, int64_t count) {
  _mm256_mask_storeu_epi16(to, first(count), (__m256i)_mm512_cvtneps_pbh(value));
}
#else
inline Vector read(const c10::BFloat16* from, int64_t count) {
  float wide[WIDE] = {};
  std::copy_n(from, std::min(count, WIDE), wide);
  return Vector::loadu(wide);
}

inline void write(c10::BFloat16* to, Vector value, int64_t count) {
  float wide[WIDE];
  value.store(wide);
  std::copy_n(wide, std::min(count, WIDE), to);
}
#endif

bool has_micro_kernel = false;

}  // namespace

// Whether torch's micro-kernel takes pairs here; in another form it would raise, in a thread.
extern "C" int32_t ready() {
  c10::BFloat16 x[2] = {1, 2}, blocks[2 * 16];
  float wide[2] = {1, 2}, plain[2 * 16], sums[16];
  std::fill_n(blocks, 2 * 16, c10::BFloat16(1));
  std::fill_n(plain, 2 * 16, 1.f);
  try {
    at::native::cpublas::brgemm(1, 16, 2, 2, 16, 16, false, x, blocks, sums, true);
    bool right = sums[0] == 3 && sums[16 - 1] == 3;
    at::native::cpublas::brgemm(1, 16, 2, 2, 16, 16, false, wide, plain, sums, false);
    at::native::cpublas::brgemm_release(true);
    has_micro_kernel = right && sums[0] == 3 && sums[16 - 1] == 3;
  } catch (...) {
  }
  return has_micro_kernel;
}

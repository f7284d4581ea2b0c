// A matrix product on a weight in blocks of 64 columns, with what follows it: one pass over the result.
//
// What multiplies is oneDNN's micro-kernel, as torch has it (at::native::cpublas::brgemm); what is
// saved against oneDNN's own products is their set-up at each call, and the order of the work.
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#pragma GCC target("avx512bf16")

#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <algorithm>
#include <cstdint>

namespace {

using Vector = at::vec::Vectorized<float>;
constexpr int64_t WIDE = 16;     // floats in a vector
constexpr int64_t COLUMNS = 64;  // of a block of the weight
constexpr int64_t ROWS = 64;     // at once: their sums stay in the first cache

// As `ipex_inductor.templates.blocked` numbers them.
enum Binary : int32_t { NO_BINARY, ADD, MUL };
enum Unary : int32_t { NO_UNARY, RELU, GELU, GELU_TANH, SILU, SIGMOID, TANH };

inline __mmask16 first(int64_t count) {
  return count >= WIDE ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

inline Vector read(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

inline Vector read(const c10::BFloat16* from, __mmask16 mask) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void write(float* to, Vector value, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, value); }

inline void write(c10::BFloat16* to, Vector value, __mmask16 mask) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

inline Vector sigmoid(Vector x) { return Vector(1) / (Vector(1) + x.neg().exp()); }

template <int32_t unary>
inline Vector activated(Vector x) {
  const Vector half(0.5f), one(1);
  if constexpr (unary == RELU) return at::vec::clamp_min(x, Vector(0));
  if constexpr (unary == GELU) return half * x * (one + (x * Vector(0.70710678118654752f)).erf());
  if constexpr (unary == GELU_TANH) {
    const Vector inner = x + Vector(0.044715f) * x * x * x;
    return half * x * (one + (Vector(0.79788456080286536f) * inner).tanh());
  }
  if constexpr (unary == SILU) return x * sigmoid(x);
  if constexpr (unary == SIGMOID) return sigmoid(x);
  if constexpr (unary == TANH) return x.tanh();
  return x;
}

template <typename T>
struct Product {
  int64_t rows, depth, columns;
  const T *x, *blocks, *bias, *other;
  T* result;
};

// What follows the sums of `rows` rows from `row` on and of the columns of one block.
template <int32_t unary, typename T>
void finish(const Product<T>& p, int32_t binary, const float* sums, int64_t row, int64_t rows,
            int64_t column) {
  const int64_t width = std::min(COLUMNS, p.columns - column);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t start = (row + i) * p.columns + column;
    for (int64_t j = 0; j < width; j += WIDE) {
      const __mmask16 mask = first(width - j);
      Vector value = Vector::loadu(sums + i * COLUMNS + j);
      if (p.bias) value = value + read(p.bias + column + j, mask);
      if (binary == ADD) value = value + read(p.other + start + j, mask);
      if (binary == MUL) value = value * read(p.other + start + j, mask);
      write(p.result + start + j, activated<unary>(value), mask);
    }
  }
}

template <int32_t unary, typename T>
void multiply(const Product<T>& p, int32_t binary) {
  constexpr bool PAIRED = sizeof(T) == 2;  // rows of the weight lie in pairs
  const int64_t tall = (p.rows + ROWS - 1) / ROWS, wide = (p.columns + COLUMNS - 1) / COLUMNS;
#pragma omp parallel
  {
    alignas(64) float sums[ROWS * COLUMNS];
#pragma omp for collapse(2) schedule(static)
    for (int64_t m = 0; m < tall; ++m) {
      for (int64_t n = 0; n < wide; ++n) {
        const int64_t row = m * ROWS, rows = std::min(ROWS, p.rows - row);
        at::native::cpublas::brgemm(rows, COLUMNS, p.depth, p.depth, COLUMNS, COLUMNS, false,
                                    p.x + row * p.depth, p.blocks + n * COLUMNS * p.depth, sums,
                                    PAIRED);
        finish<unary>(p, binary, sums, row, rows, n * COLUMNS);
      }
    }
    at::native::cpublas::brgemm_release(PAIRED);
  }
}

template <typename T>
void multiply(const Product<T>& p, int32_t binary, int32_t unary) {
  switch (unary) {
    case RELU: return multiply<RELU>(p, binary);
    case GELU: return multiply<GELU>(p, binary);
    case GELU_TANH: return multiply<GELU_TANH>(p, binary);
    case SILU: return multiply<SILU>(p, binary);
    case SIGMOID: return multiply<SIGMOID>(p, binary);
    case TANH: return multiply<TANH>(p, binary);
    default: return multiply<NO_UNARY>(p, binary);
  }
}

}  // namespace

#define PRODUCT(name, T)                                                                       \
  extern "C" void name(int64_t rows, int64_t depth, int64_t columns, const T* x,               \
                       const T* blocks, const T* bias, const T* other, T* result,              \
                       int32_t binary, int32_t unary) {                                        \
    multiply(Product<T>{rows, depth, columns, x, blocks, bias, other, result}, binary, unary); \
  }

PRODUCT(bfloat16, c10::BFloat16)
PRODUCT(float32, float)

// Whether torch's micro-kernel takes pairs here; in another form it would raise, in a thread.
extern "C" int32_t works() {
  c10::BFloat16 x[2] = {1, 2}, blocks[2 * COLUMNS];
  float wide[2] = {1, 2}, plain[2 * COLUMNS], sums[COLUMNS];
  std::fill_n(blocks, 2 * COLUMNS, c10::BFloat16(1));
  std::fill_n(plain, 2 * COLUMNS, 1.f);
  try {
    at::native::cpublas::brgemm(1, COLUMNS, 2, 2, COLUMNS, COLUMNS, false, x, blocks, sums, true);
    bool right = sums[0] == 3 && sums[COLUMNS - 1] == 3;
    at::native::cpublas::brgemm(1, COLUMNS, 2, 2, COLUMNS, COLUMNS, false, wide, plain, sums, false);
    at::native::cpublas::brgemm_release(true);
    return right && sums[0] == 3 && sums[COLUMNS - 1] == 3;
  } catch (...) {
    return 0;
  }
}

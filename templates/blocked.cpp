// A matrix product on a weight in blocks of 64 columns, with what follows it: one pass over the
// result.
//
// Few rows are multiplied here: such a product does little more than read its weight once, from
// beginning to end. More rows are multiplied by oneDNN's micro-kernel, as torch has it
// (at::native::cpublas::brgemm); what is saved against oneDNN's own products is their set-up at
// each call, and the order of the work.
// Follows `vectors.cpp`.

namespace ipex {
namespace {

constexpr int64_t COLUMNS = 64;  // of a block of the weight
constexpr int64_t ROWS = 64;     // at once: their sums stay in the first cache
constexpr int64_t FEW = 16;      // rows up to which a product is bound by reading its weight

// As `ipex_inductor.templates.blocked` numbers them.
enum Binary : int32_t { NO_BINARY, ADD, MUL };
enum Unary : int32_t { NO_UNARY, RELU, GELU, GELU_TANH, SILU, SIGMOID, TANH };

template <int32_t unary>
inline Vector activated(Vector x) {
  switch (unary) {
    case RELU: return x < 0.f ? Vector{} : x;
    case GELU: return 0.5f * x * (1.f + erf(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1.f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    case SILU: return x * sigmoid(x);
    case SIGMOID: return sigmoid(x);
    case TANH: return tanh(x);
    default: return x;
  }
}

template <typename T>
struct Product {
  int64_t rows, depth, columns;
  const T *x, *blocks, *bias, *other;
  T* result;
  int32_t binary, unary;
};

// What follows the sums of `rows` rows from `row` on and of the columns of one block.
template <int32_t unary, typename T>
void finish(const Product<T>& p, const float* sums, int64_t row, int64_t rows, int64_t column) {
  const int64_t width = std::min(COLUMNS, p.columns - column);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t start = (row + i) * p.columns + column;
    for (int64_t j = 0; j < width; j += WIDE) {
      const int64_t count = width - j;
      Vector value = read(sums + i * COLUMNS + j);
      if (p.bias) value += read(p.bias + column + j, count);
      if (p.binary == ADD) value += read(p.other + start + j, count);
      if (p.binary == MUL) value *= read(p.other + start + j, count);
      write(p.result + start + j, activated<unary>(value), count);
    }
  }
}

template <typename T>
using Finish = decltype(&finish<NO_UNARY, T>);

template <typename T>  // by their numbers
constexpr Finish<T> FINISH[] = {
    finish<NO_UNARY, T>, finish<RELU, T>,    finish<GELU, T>, finish<GELU_TANH, T>,
    finish<SILU, T>,     finish<SIGMOID, T>, finish<TANH, T>,
};

constexpr int64_t AT_ONCE = 6;  // rows
// Vectors of a block's columns that so many rows take together: their sums stay in registers.
#ifdef __AVX512F__
template <int64_t ROWS>
constexpr int64_t TOGETHER = COLUMNS / WIDE;
#else
template <int64_t ROWS>
constexpr int64_t TOGETHER = ROWS == 1 ? 8 : ROWS <= 3 ? 4 : 2;
#endif

// `sums` and the products of one value of x, or a pair of them, with 16 columns.
inline Vector added(Vector sums, const float* x, const float* weight) {
  return fused(all(*x), read(weight), sums);
}

inline Vector added(Vector sums, const c10::BFloat16* x, const c10::BFloat16* weight) {
  uint32_t pair;
  std::memcpy(&pair, x, sizeof pair);
#if BF16_PRODUCTS
  return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)),
                                  (__m512bh)_mm512_loadu_si512(weight));
#else
  Words both;
  std::memcpy(&both, weight, sizeof both);
  const Words even = Words{} + (pair << 16), odd = Words{} + (pair & 0xffff0000);
  sums = fused((Vector)even, (Vector)(both << 16), sums);
  return fused((Vector)odd, (Vector)(both & 0xffff0000), sums);
#endif
}

template <int64_t COUNT, typename T>
void add_up(const T* x, const T* block, int64_t depth, float* sums) {
  constexpr int64_t PAIR = sizeof(T) == 2 ? 2 : 1, PARTS = TOGETHER<COUNT>;
  for (int64_t column = 0; column < COLUMNS; column += PARTS * WIDE) {
    const T* weight = block + column * PAIR;
    Vector totals[COUNT][PARTS];
#pragma GCC unroll 6
    for (int64_t i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
      for (int64_t j = 0; j < PARTS; ++j) totals[i][j] = Vector{};
    for (int64_t k = 0; k < depth; k += PAIR, weight += COLUMNS * PAIR)
#pragma GCC unroll 6
      for (int64_t i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
        for (int64_t j = 0; j < PARTS; ++j)
          totals[i][j] = added(totals[i][j], x + i * depth + k, weight + j * WIDE * PAIR);
#pragma GCC unroll 6
    for (int64_t i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
      for (int64_t j = 0; j < PARTS; ++j)
        write(sums + i * COLUMNS + column + j * WIDE, totals[i][j]);
  }
}

template <typename T>  // by the number of rows, from one on
constexpr decltype(&add_up<1, T>) ADD_UP[] = {
    add_up<1, T>, add_up<2, T>, add_up<3, T>, add_up<4, T>, add_up<5, T>, add_up<6, T>,
};

// The sums of some rows and the columns of a block.
template <typename T>
void add_up(const T* x, const T* block, int64_t depth, int64_t rows, float* sums) {
  for (int64_t i = 0; i < rows; i += AT_ONCE, x += AT_ONCE * depth, sums += AT_ONCE * COLUMNS)
    ADD_UP<T>[std::min(rows - i, AT_ONCE) - 1](x, block, depth, sums);
}

// The same by torch's micro-kernel; false where it does not take such sizes on this CPU.
template <typename T>
bool is_multiplied(const T* x, const T* block, int64_t depth, int64_t rows, float* sums) {
  try {
    at::native::cpublas::brgemm(rows, COLUMNS, depth, depth, COLUMNS, COLUMNS, false, x, block,
                                sums, sizeof(T) == 2);  // rows of the weight lie in pairs
    return true;
  } catch (...) {  // which may not leave OpenMP's region
    return false;
  }
}

template <typename T>
void multiply(const Product<T>& p) {
  const Finish<T> finish = FINISH<T>[p.unary];
  const bool few = p.rows <= FEW || !has_micro_kernel<T>;
  const int64_t tall = (p.rows + ROWS - 1) / ROWS, wide = (p.columns + COLUMNS - 1) / COLUMNS;
#pragma omp parallel
  {
    alignas(64) float sums[ROWS * COLUMNS];
#pragma omp for collapse(2) schedule(static)
    for (int64_t m = 0; m < tall; ++m) {
      for (int64_t n = 0; n < wide; ++n) {
        const int64_t row = m * ROWS, rows = std::min(ROWS, p.rows - row);
        const T *x = p.x + row * p.depth, *block = p.blocks + n * COLUMNS * p.depth;
        if (few || !is_multiplied(x, block, p.depth, rows, sums))
          add_up(x, block, p.depth, rows, sums);
        finish(p, sums, row, rows, n * COLUMNS);
      }
    }
    if (!few) at::native::cpublas::brgemm_release(sizeof(T) == 2);
  }
}

}  // namespace
}  // namespace ipex

#define PRODUCT(name, T)                                                                        \
  extern "C" void name(int64_t rows, int64_t depth, int64_t columns, const void* x,             \
                       const void* blocks, const void* bias, const void* other, void* result,   \
                       int32_t binary, int32_t unary) {                                         \
    ipex::multiply(ipex::Product<T>{rows, depth, columns, (const T*)x, (const T*)blocks,        \
                                    (const T*)bias, (const T*)other, (T*)result, binary, unary}); \
  }

PRODUCT(product_bfloat16, c10::BFloat16)
PRODUCT(product_float32, float)

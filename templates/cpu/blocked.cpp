// A matrix product on a weight in blocks of 64 columns, with what follows it: one pass over the
// result.
//
// A product of few rows does little more than read its weight once, from beginning to end. What is
// saved against oneDNN's own products is their set-up at each call, and the order of the work. Blocks
// lie in panels, one behind the other, each as wide as registers have room for.
// Follows `vectors.cpp`.

namespace ipex {
namespace {

constexpr int64_t COLUMNS = 64;  // of a block of the weight
constexpr int64_t ROWS = 64;     // of a tile, at most: of x they stay in the second cache

// As `ipex_inductor.templates.cpu.blocked` numbers them.
enum Binary : int32_t { NO_BINARY, ADD, MUL };
enum Unary : int32_t { NO_UNARY, RELU, GELU, GELU_TANH, SILU, SIGMOID, TANH };

template <int32_t unary>
inline Vector activated(Vector x) {
  switch (unary) {
    case RELU: return x < 0.f ? Vector{} : x;
    case GELU: return gelu(x);
    case GELU_TANH: return gelu_tanh(x);
    case SILU: return x * sigmoid(x);
    case SIGMOID: return sigmoid(x);
    case TANH: return tanh(x);
    default: return x;
  }
}

template <typename T>
struct Product {
  int64_t rows, depth, columns, panel;  // columns of a block that lie together, a power of 2
  const T *x, *blocks, *bias, *other;
  T* result;
  int32_t binary, unary;
};

// What follows the sums of `rows` rows from `row` on, and of `width` columns, which lie in lines of as
// many.
template <int32_t unary, typename T>
void finish(const Product<T>& p, const float* sums, int64_t width, int64_t row, int64_t rows,
            int64_t column) {
  const int64_t line = p.columns, some = std::min(width, line - column);
  const int64_t start = row * line + column;
  const T* bias = p.bias ? p.bias + column : nullptr;
  const T* addend = p.binary == ADD ? p.other + start : nullptr;
  const T* factor = p.binary == MUL ? p.other + start : nullptr;
  T* result = p.result + start;
  const auto vector = [=](int64_t i, int64_t j, int64_t count) __attribute__((always_inline)) {
    const int64_t to = i * line + j;
    Vector value = read(sums + i * width + j);
    if (bias) value += read(bias + j, count);
    if (addend) value += read(addend + to, count);
    if (factor) value *= read(factor + to, count);
    write(result + to, activated<unary>(value), count);
  };
  for (int64_t i = 0; i < rows; ++i) {
    int64_t j = 0;
    for (; j + WIDE <= some; j += WIDE) vector(i, j, WIDE);
    if (j < some) vector(i, j, some - j);
  }
}

template <typename T>
using Finish = decltype(&finish<NO_UNARY, T>);

template <typename T>  // by their numbers
constexpr Finish<T> FINISH[] = {
    finish<NO_UNARY, T>, finish<RELU, T>,    finish<GELU, T>, finish<GELU_TANH, T>,
    finish<SILU, T>,     finish<SIGMOID, T>, finish<TANH, T>,
};

// Rows at once, at most: those for whose sums there are registers, beside pairs of bf16 made wide.
template <typename T>
constexpr int64_t AT_ONCE = PAIR<T> == 2 && WIDE == 8 && !BF16_PRODUCTS ? 5 : 6;
// Vectors of a block's columns that so many rows take together: their sums stay in registers.
#ifdef __AVX512F__
template <int64_t ROWS>
constexpr int64_t TOGETHER = COLUMNS / WIDE;
#else
template <int64_t ROWS>
constexpr int64_t TOGETHER = ROWS == 1 ? 8 : ROWS <= 3 ? 4 : 2;
#endif

// Asks for what `finish` reads and writes of `rows` rows and `width` columns: pieces of lines, which no
// processor foresees, and which memory brings while their sums are added up.
template <typename T>
SHORT void ask_for(const Product<T>& p, int64_t width, int64_t row, int64_t rows, int64_t column) {
  constexpr int64_t LINE = 64 / sizeof(T);  // of the caches
  width = std::min(width, p.columns - column);
  const int64_t start = row * p.columns + column;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < width; j += LINE) {
      if (p.other) __builtin_prefetch(p.other + start + i * p.columns + j);
      __builtin_prefetch(p.result + start + i * p.columns + j, 1);
    }
}

// COUNT rows, and a block's columns some at a time: what follows finds their sums in the first cache.
// Columns beyond the last are not added up, but for those of its vectors.
template <int64_t COUNT, int64_t PARTS, typename T>
void multiply(const Product<T>& p, Finish<T> finish, const T* block, int64_t row, int64_t column) {
  constexpr int64_t WIDTH = PARTS * WIDE;
  alignas(64) float sums[COUNT * WIDTH];
  for (int64_t some = 0; some < COLUMNS && column + some < p.columns; some += WIDTH) {
    const T* weights[PARTS];  // where the columns of each vector begin
#pragma GCC unroll 8
    for (int64_t j = 0; j < PARTS; ++j) {
      const int64_t first = some + j * WIDE;
      weights[j] = block + (first & -p.panel) * p.depth + (first & (p.panel - 1)) * PAIR<T>;
    }
    ask_for(p, WIDTH, row, COUNT, column + some);
    add_up<COUNT, PARTS>(p.x + row * p.depth, p.depth, weights, p.panel, p.depth, sums, WIDTH);
    finish(p, sums, WIDTH, row, COUNT, column + some);
  }
}

template <int64_t ROWS, int64_t MOST>  // vectors, where a block has no more columns
constexpr int64_t PARTS = std::min(TOGETHER<ROWS>, MOST);

template <int64_t MOST, typename T>  // by the number of rows, from one on
constexpr decltype(&multiply<1, 1, T>) MULTIPLY[] = {
    multiply<1, PARTS<1, MOST>, T>, multiply<2, PARTS<2, MOST>, T>, multiply<3, PARTS<3, MOST>, T>,
    multiply<4, PARTS<4, MOST>, T>, multiply<5, PARTS<5, MOST>, T>, multiply<6, PARTS<6, MOST>, T>,
};

#if AMX_TILES
constexpr int64_t DEPTH = 32;                  // of K in a row of a tile
constexpr int64_t TOGETHER_BYTES = 512 << 10;  // of the second cache, for blocks that are read often

// Whether tiles compute it: they read whole rows of K, and weights in one panel.
SHORT bool fits_tiles(const Product<c10::BFloat16>& p) {
  return HAS_TILES && p.depth % DEPTH == 0 && p.panel == COLUMNS;
}
template <typename T>
SHORT bool fits_tiles(const Product<T>&) {
  return false;
}

// `above` and `below` rows from `row` on, at most 16 each, and 32 columns of a block.
__attribute__((target("amx-tile,amx-bf16"))) void multiply_tiles(
    const c10::BFloat16* x, int64_t depth, const c10::BFloat16* block, int64_t above, bool tall,
    float* sums) {
  constexpr int64_t LINE = COLUMNS * 2 * sizeof(c10::BFloat16), SUMS = 32 * sizeof(float);
  const int64_t row = depth * sizeof(c10::BFloat16);
  const c10::BFloat16* below = x + above * depth;
  _tile_zero(0);
  _tile_zero(1);
  if (tall) {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += DEPTH) {
      const c10::BFloat16* weights = block + k * COLUMNS;
      _tile_loadd(4, x + k, row);
      _tile_loadd(6, weights, LINE);
      _tile_loadd(5, below + k, row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + 32, LINE);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums + above * 32, SUMS);
    _tile_stored(3, sums + above * 32 + 16, SUMS);
  } else {
    for (int64_t k = 0; k < depth; k += DEPTH) {
      const c10::BFloat16* weights = block + k * COLUMNS;
      _tile_loadd(4, x + k, row);
      _tile_loadd(6, weights, LINE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + 32, LINE);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, sums, SUMS);
  _tile_stored(1, sums + 16, SUMS);
}

// `rows` rows from `row` on of a block of columns, on tiles.
void multiply_by_tiles(const Product<c10::BFloat16>& p, Finish<c10::BFloat16> finish, int64_t row,
                       int64_t rows, int64_t column) {
  constexpr int64_t MOST = 32, WIDTH = 32;
  alignas(64) float sums[MOST * WIDTH];
  const int64_t parts = (rows + MOST - 1) / MOST;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = row + part * rows / parts, count = row + (part + 1) * rows / parts - from;
    const int64_t above = std::min<int64_t>(count, 16);
    configure_tiles(above, std::max<int64_t>(count - above, 1));
    for (int64_t some = 0; some < COLUMNS && column + some < p.columns; some += WIDTH) {
      const c10::BFloat16* block = p.blocks + column * p.depth + some * 2;
      ask_for(p, WIDTH, from, count, column + some);
      multiply_tiles(p.x + from * p.depth, p.depth, block, above, count > above, sums);
      finish(p, sums, WIDTH, from, count, column + some);
    }
  }
  release_tiles();
}
#endif

template <typename T>
void multiply(const Product<T>& p) {
  const Finish<T> finish = FINISH<T>[p.unary];
  const int64_t tall = (p.rows + ROWS - 1) / ROWS, wide = (p.columns + COLUMNS - 1) / COLUMNS;
  const bool across = p.columns > p.rows;  // what is larger is read once
  const int64_t outer = across ? wide : tall, inner = across ? tall : wide;
  int64_t together = 1;  // blocks of what is larger that a sweep over the other one works on
#if AMX_TILES
  const bool by_tiles = fits_tiles(p);
  if (by_tiles) together = std::clamp<int64_t>(TOGETHER_BYTES / (COLUMNS * p.depth * sizeof(T)), 1, outer);
#endif
#pragma omp parallel for schedule(static)
  for (int64_t tile = 0; tile < tall * wide; ++tile) {
    const int64_t first = tile / (inner * together) * together, rest = tile - first * inner;
    const int64_t some_blocks = std::min(together, outer - first);
    const int64_t i = first + rest % some_blocks, j = rest / some_blocks;
    const int64_t m = across ? j : i, n = across ? i : j;
    const int64_t row = m * p.rows / tall, end = (m + 1) * p.rows / tall, column = n * COLUMNS;
#if AMX_TILES
    if constexpr (PAIR<T> == 2)
      if (by_tiles) {
        multiply_by_tiles(p, finish, row, end - row, column);
        continue;
      }
#endif
    const int64_t parts = (end - row + AT_ONCE<T> - 1) / AT_ONCE<T>, some = p.columns - column;
    const auto* multiply = some <= WIDE ? MULTIPLY<1, T> : some <= 2 * WIDE ? MULTIPLY<2, T>
                                                                          : MULTIPLY<8, T>;
    for (int64_t part = 0; part < parts; ++part) {  // as even as may be
      const int64_t from = row + part * (end - row) / parts;
      const int64_t count = row + (part + 1) * (end - row) / parts - from;
      multiply[count - 1](p, finish, p.blocks + column * p.depth, from, column);
    }
  }
}

}  // namespace
}  // namespace ipex

#define PRODUCT(name, T)                                                                        \
  extern "C" void name(int64_t rows, int64_t depth, int64_t columns, int64_t panel,             \
                       const void* x, const void* blocks, const void* bias, const void* other,  \
                       void* result, int32_t binary, int32_t unary) {                           \
    ipex::multiply(ipex::Product<T>{rows, depth, columns, panel, (const T*)x, (const T*)blocks, \
                                    (const T*)bias, (const T*)other, (T*)result, binary, unary}); \
  }

PRODUCT(product_bfloat16, c10::BFloat16)
PRODUCT(product_float32, float)
#ifdef __F16C__
PRODUCT(product_float16, ipex::Half)
#endif


// Convolutions and matrix products of 8-bit integers, with their epilogue and requantization.
//
// A convolution is an implicit GEMM: M counts output pixels, N output channels, K the elements under
// the kernel. Rows of A lie in the activation itself where the kernel is one pixel, else they are
// gathered into a panel that stays in the second cache. The weight lies in panels of 16 output
// channels, [K / 4, 16, 4], which one instruction of VNNI or one tile of AMX reads. CPUs without
// either multiply in 16 bits, whose sums of pairs do not saturate.
// Follows `vectors.cpp`. `int8.py` writes above: INT8_VNNI, 1 for AVX-512 VNNI and 2 for AVX-VNNI; and
// INT8_AMX.
#if INT8_VNNI == 1
#pragma GCC push_options
#pragma GCC target("avx512vnni")
#elif INT8_VNNI == 2
#pragma GCC push_options
#pragma GCC target("avxvnni")
#endif

namespace ipex::int8 {
namespace {

using ipex::read;
using ipex::write;

constexpr int64_t PANEL = 16;  // output channels that lie together in the weight
// Rows of a block, a multiple of 32 and of 6: the weight is read once for each block. Blocks of a
// large weight have as many rows as stay in the second cache.
constexpr int64_t ROWS = 96;
constexpr int64_t LARGE = 1 << 18;   // bytes of a weight
constexpr int64_t CACHED = 3 << 17;  // bytes of the rows of a block
constexpr int64_t PANELS = 4;  // whose sums are computed before their epilogue
constexpr int64_t UNIT = 64;   // K of a panel is a multiple of it: the bytes of a tile's row

// As `ipex_inductor.templates.cpu.int8` numbers them.
enum Number : int32_t { NOTHING, UINT8, INT8, FLOAT, BFLOAT16 };
enum Binary : int32_t { NO_BINARY, ADD, MUL, SUB };
enum Unary : int32_t {
  NO_UNARY, RELU, GELU, GELU_TANH, SILU, SIGMOID, TANH,
  ABS, ELU, EXP, HARDSIGMOID, HARDSWISH, HARDTANH, LEAKY_RELU, SQRT, SQUARE, UNARIES
};

struct Geometry {
  int64_t batch, channels, size[3], out_channels, out[3], window[3], stride[3], padding[3],
      dilation[3], groups;

  int64_t pixels() const { return out[0] * out[1] * out[2]; }
  int64_t rows() const { return batch * pixels(); }
  int64_t taps() const { return window[0] * window[1] * window[2]; }
  int64_t group_channels() const { return channels / groups; }
  int64_t group_outs() const { return out_channels / groups; }
  int64_t depth() const { return taps() * group_channels(); }
  int64_t padded_depth() const { return (depth() + UNIT - 1) / UNIT * UNIT; }
  int64_t panels() const { return (group_outs() + PANEL - 1) / PANEL; }

  bool is_gemm() const {  // rows of A lie in the activation, one behind the other
    bool plain = groups == 1 && taps() == 1;
    for (int i = 0; i < 3; ++i) plain &= stride[i] == 1 && padding[i] == 0;
    return plain;
  }
};

// The scales of tensors, in the order in which `ipex::int8_scales` returns them.
struct Scales {
  float x_zero_point, other_scale, other_zero_point, inverse_scale, zero_point, least, most;
};

struct Call {
  Geometry g;
  const uint8_t* x;
  const int8_t* weight;
  const float* factors;  // of each output channel, then as many offsets
  const Scales* scales;
  const void* other;
  void* result;
  int32_t x_number, other_number, result_number, binary, unary;
  float scalars[2];
  // Of dynamic quantization: a scale of each row. Factors have a third line then, of biases.
  const float* row_scales = nullptr;
  const int32_t* row_shifts = nullptr;  // subtracted from the sums of each row
  // Zero points of output channels of the weight, and the sums of the rows of x, which they multiply.
  const float* weight_zeros = nullptr;
  const int32_t* row_sums = nullptr;
  bool has_odd = false;  // whether a factor or an offset is infinite or NaN: a result may be NaN

  bool is_limit() const { return unary == NO_UNARY || unary == RELU || unary == HARDTANH; }
  bool is_plain() const {
    return is_limit() && binary <= ADD && !row_scales && !row_shifts && !row_sums && !has_odd;
  }
};

typedef uint8_t Bytes __attribute__((vector_size(WIDE)));
typedef int8_t Chars __attribute__((vector_size(WIDE)));

SHORT Vector as_floats(Ints values) { return __builtin_convertvector(values, Vector); }

#ifdef __AVX512F__
SHORT __m128i read_bytes(const void* from, int64_t count) {
  return _mm_maskz_loadu_epi8(first(count), from);
}

SHORT Vector read(const uint8_t* from, int64_t count) {
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(read_bytes(from, count)));
}

SHORT Vector read(const int8_t* from, int64_t count) {
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read_bytes(from, count)));
}

SHORT Ints rounded(Vector value) { return (Ints)_mm512_cvtps_epi32((__m512)value); }

SHORT void write_bytes(void* to, Ints values, int64_t count) {
  _mm_mask_storeu_epi8(to, first(count), _mm512_cvtepi32_epi8((__m512i)values));
}
#else
SHORT Vector read(const uint8_t* from, int64_t count) {
  return as_floats(__builtin_convertvector(loaded<Bytes>(from, count), Ints));
}

SHORT Vector read(const int8_t* from, int64_t count) {
  return as_floats(__builtin_convertvector(loaded<Chars>(from, count), Ints));
}

SHORT Ints rounded(Vector value) {  // to nearest, ties to even
#ifdef __AVX__
  return (Ints)_mm256_cvtps_epi32((__m256)value);
#else
  constexpr float NEAREST = 12582912;  // 1.5 * 2^23: a sum with it has no fraction
  return __builtin_convertvector((value + NEAREST) - NEAREST, Ints);
#endif
}

SHORT void write_bytes(void* to, Ints values, int64_t count) {
  const Bytes bytes = __builtin_convertvector(values, Bytes);
  stored((uint8_t*)to, bytes, count);
}
#endif

template <int32_t unary>
SHORT Vector activated(Vector x, const float* scalars) {
  switch (unary) {
    case RELU: return maximum(Vector{}, x);  // NaN stays one
    case GELU: return gelu(x);
    case GELU_TANH: return gelu_tanh(x);
    case SILU: return x * sigmoid(x);
    case SIGMOID: return sigmoid(x);
    case TANH: return tanh(x);
    case ABS: return x < 0.f ? -x : x;
    case ELU: return x < 0.f ? (exp(x) - 1.f) * scalars[0] : x;
    case EXP: return exp(x);
    case HARDSIGMOID: return limited(x + 3.f, 0, 6) / 6.f;
    case HARDSWISH: return x * limited(x + 3.f, 0, 6) / 6.f;
    case HARDTANH: return limited(x, scalars[0], scalars[1]);
    case SQUARE: return x * x;
    case SQRT:
      for (int64_t i = 0; i < WIDE; ++i) x[i] = std::sqrt(x[i]);
      return x;
    case LEAKY_RELU: return x < 0.f ? x * scalars[0] : x;
    default: return x;
  }
}

// Numbers of an addend as floats. Stores of bytes may change anything, so what is read for each vector
// lies in registers.
struct Nothing {};

template <typename Other>
struct Addend {
  const Other* from;
  Vector scale, shift;

  explicit Addend(const Call& c)
      : from(static_cast<const Other*>(c.other)), scale(all(c.scales->other_scale)),
        shift(all(-c.scales->other_zero_point)) {}

  SHORT Vector operator()(int64_t at, int64_t count) const {
    if constexpr (sizeof(Other) == 1)
      return (read(from + at, count) + shift) * scale;
    else
      return read(from + at, count);
  }
};

template <>
struct Addend<Nothing> {
  explicit Addend(const Call&) {}
  SHORT Vector operator()(int64_t, int64_t) const { return Vector{}; }
};

// Writes values: floats as they are, or in steps of the result's scale. Steps or floats are within
// limits, which also are those of ReLU and its like. CHECKED: a value may be no number, which eager
// quantizes to the integer 0.
template <typename Result, bool CHECKED>
struct Writer {
  static constexpr bool STEPS = sizeof(Result) == 1;
  Result* to;
  Vector inverse_scale;
  Ints zero_point;
  float least = -std::numeric_limits<float>::infinity(), most = -least;

  explicit Writer(const Call& c)
      : to(static_cast<Result*>(c.result)), inverse_scale(all(c.scales->inverse_scale)),
        zero_point(Ints{} + static_cast<int32_t>(c.scales->zero_point)) {
    if (STEPS) least = c.scales->least, most = c.scales->most;
    const float scale = STEPS ? c.scales->inverse_scale : 1;
    if (c.unary == RELU) least = std::max(least, 0.f);
    if (c.unary == HARDTANH) {
      least = std::clamp(c.scalars[0] * scale, least, most);
      most = std::clamp(c.scalars[1] * scale, least, most);
    }
  }

  SHORT void operator()(int64_t at, Vector value, int64_t count) const {
    if constexpr (STEPS) {
      const Vector steps = limited(value * inverse_scale, least, most);
      Ints integers = rounded(steps) + zero_point;
      if constexpr (CHECKED) integers &= (Ints)(steps == steps);
      write_bytes(to + at, integers, count);
    } else {
      write(to + at, limited(value, least, most), count);
    }
  }
};

using Activate = Vector (*)(Vector, const float*);
template <int32_t unary>
Vector activate(Vector x, const float* scalars) {
  return activated<unary>(x, scalars);
}
template <size_t... N>
constexpr std::array<Activate, sizeof...(N)> activations(std::index_sequence<N...>) {
  return {activate<N>...};
}
constexpr auto ACTIVATE = activations(std::make_index_sequence<UNARIES>{});  // by their numbers

// Epilogue of `rows` rows from `row` on, and `columns` output channels from `channel` on. `sums` has
// lines of `line` integers. PLAIN: without an activation but limits, an addend that is no summand, or
// scales of rows.
template <bool PLAIN, typename Other, typename Result>
void finish_rows(const Call& c, const int32_t* sums, int64_t line, int64_t row, int64_t rows,
                 int64_t channel, int64_t columns) {
  const float *factors = c.factors + channel, *offsets = factors + c.g.out_channels;
  const Addend<Other> addend(c);
  constexpr bool FLOATS = std::is_same_v<Other, float> || std::is_same_v<Other, c10::BFloat16>;
  const Writer<Result, !PLAIN || FLOATS> put(c);
  const int64_t outs = c.g.out_channels;
  const int32_t binary = c.binary;
  const float scalars[] = {c.scalars[0], c.scalars[1]}, *biases = offsets + outs;
  const Activate activate = ACTIVATE[c.unary];
  const float* const row_scales = c.row_scales;
  const int32_t *const row_shifts = c.row_shifts, *const row_sums = c.row_sums;
  const float* const zeros = c.weight_zeros + channel;
  const auto vector = [&](int64_t i, int64_t j, int64_t count) __attribute__((always_inline)) {
    Ints integers;
    std::memcpy(&integers, sums + i * line + j, sizeof integers);
    const int64_t at = (row + i) * outs + channel + j;
    if (!PLAIN && row_shifts) integers -= row_shifts[row + i];
    if (!PLAIN && row_sums) integers -= rounded(read(zeros + j, count)) * row_sums[row + i];
    Vector value = fused(as_floats(integers), read(factors + j, count), read(offsets + j, count));
    if (!PLAIN && row_scales) value = fused(value, all(row_scales[row + i]), read(biases + j, count));
    if constexpr (!std::is_same_v<Other, Nothing>) {
      const Vector other = addend(at, count);
      value = PLAIN || binary == ADD ? value + other : binary == MUL ? value * other : value - other;
    }
    put(at, PLAIN ? value : activate(value, scalars), count);
  };
  for (int64_t i = 0; i < rows; ++i) {
    int64_t j = 0;
    for (; j + WIDE <= columns; j += WIDE) vector(i, j, WIDE);
    if (j < columns) vector(i, j, columns - j);
  }
}

// Calls `work` with values of the types of a call's addend and result.
template <typename Work>
auto by_types(const Call& c, Work work) {
  const auto by_result = [&](auto other) {
    switch (c.result_number) {
      case FLOAT: return work(other, float{});
      case BFLOAT16: return work(other, c10::BFloat16{});
      default: return work(other, uint8_t{});
    }
  };
  switch (c.other_number) {
    case UINT8: return by_result(uint8_t{});
    case INT8: return by_result(int8_t{});
    case FLOAT: return by_result(float{});
    case BFLOAT16: return by_result(c10::BFloat16{});
    default: return by_result(Nothing{});
  }
}

using Finish = decltype(&finish_rows<true, Nothing, float>);

// Sums of 4 products each: unsigned bytes of `x` in all lanes times signed bytes of the weight.
// TALL rows and PARTS vectors of columns have their sums in registers.
#if INT8_VNNI == 1
constexpr int64_t TALL = 6, PARTS = 4;
SHORT Ints dot(Ints sums, Ints x, const int8_t* weight) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, _mm512_loadu_si512(weight));
}
#elif INT8_VNNI == 2
constexpr int64_t TALL = 6, PARTS = 2;
SHORT Ints dot(Ints sums, Ints x, const int8_t* weight) {
  const __m256i w = _mm256_loadu_si256((const __m256i*)weight);
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)x, w);
}
#elif defined(__AVX512F__)
constexpr int64_t TALL = 6, PARTS = 2;
SHORT Ints dot(Ints sums, Ints x, const int8_t* weight) {
  const __m512i even = _mm512_set1_epi16(0xff), w = _mm512_loadu_si512(weight);
  const __m512i low = _mm512_madd_epi16(_mm512_and_si512((__m512i)x, even),
                                        _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8));
  const __m512i high = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)x, 8), _mm512_srai_epi16(w, 8));
  return sums + (Ints)low + (Ints)high;
}
#elif defined(__AVX2__)
constexpr int64_t TALL = 4, PARTS = 2;
SHORT Ints dot(Ints sums, Ints x, const int8_t* weight) {
  const __m256i even = _mm256_set1_epi16(0xff), w = _mm256_loadu_si256((const __m256i*)weight);
  const __m256i low = _mm256_madd_epi16(_mm256_and_si256((__m256i)x, even),
                                        _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
  const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)x, 8), _mm256_srai_epi16(w, 8));
  return sums + (Ints)low + (Ints)high;
}
#else
constexpr int64_t TALL = 2, PARTS = 2;
SHORT Ints dot(Ints sums, Ints x, const int8_t* weight) {
  const uint8_t* bytes = (const uint8_t*)&x;
  for (int64_t i = 0; i < WIDE; ++i)
    for (int64_t k = 0; k < 4; ++k) sums[i] += bytes[4 * i + k] * weight[4 * i + k];
  return sums;
}
#endif

// `sums`, in lines of `of_sums`: COUNT rows of A, in lines of `line` bytes, times VECTORS vectors of
// columns; `weights` is where each begins.
template <int64_t COUNT, int64_t VECTORS>
SHORT void multiply_rows(const uint8_t* a, int64_t line, const int8_t* const (&weights)[VECTORS],
                         int64_t depth, int32_t* sums, int64_t of_sums) {
  Ints totals[COUNT][VECTORS];
#pragma GCC unroll 8
  for (int64_t i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
    for (int64_t j = 0; j < VECTORS; ++j) totals[i][j] = Ints{};
  for (int64_t k = 0; k < depth; k += 4) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < COUNT; ++i) {
      int32_t four;
      std::memcpy(&four, a + i * line + k, sizeof four);
      const Ints x = Ints{} + four;
#pragma GCC unroll 8
      for (int64_t j = 0; j < VECTORS; ++j)
        totals[i][j] = dot(totals[i][j], x, weights[j] + k * PANEL);
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
    for (int64_t j = 0; j < VECTORS; ++j)
      std::memcpy(sums + i * of_sums + j * WIDE, &totals[i][j], sizeof(Ints));
}

template <int64_t COUNT>
void multiply_block(const uint8_t* a, int64_t line, const int8_t* weight, int64_t of_panel,
                    int64_t vectors, int64_t depth, int32_t* sums, int64_t of_sums) {
  constexpr int64_t OF_PANEL = PANEL / WIDE;  // vectors
  const auto begin = [&](int64_t vector) {
    return weight + vector / OF_PANEL * of_panel + vector % OF_PANEL * WIDE * 4;
  };
  int64_t v = 0;
  for (; v + PARTS <= vectors; v += PARTS) {
    const int8_t* weights[PARTS];
    for (int64_t j = 0; j < PARTS; ++j) weights[j] = begin(v + j);
    multiply_rows<COUNT, PARTS>(a, line, weights, depth, sums + v * WIDE, of_sums);
  }
  for (; v < vectors; ++v) {
    const int8_t* weights[1] = {begin(v)};
    multiply_rows<COUNT, 1>(a, line, weights, depth, sums + v * WIDE, of_sums);
  }
}

using MultiplyBlock = decltype(&multiply_block<1>);
template <size_t... N>
constexpr std::array<MultiplyBlock, sizeof...(N)> by_height(std::index_sequence<N...>) {
  return {multiply_block<N + 1>...};
}
constexpr auto MULTIPLY = by_height(std::make_index_sequence<TALL>{});  // by the number of rows less 1

#if INT8_AMX
// Tiles 0 to 3 hold sums of 32 rows and 32 columns, 4 and 5 rows of A, 6 and 7 panels of the weight.
// `sums`, in lines of 32, of 32 rows of A and one or two panels.
__attribute__((target("amx-tile,amx-int8"))) void multiply_tiles(
    const uint8_t* a, int64_t line, const int8_t* weight, int64_t of_panel, bool both,
    bool tall, int64_t depth, int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const uint8_t* below = a + 16 * line;
  const int8_t* next = weight + of_panel;
  if (both && tall) {
    for (int64_t k = 0; k < depth; k += UNIT) {
      _tile_loadd(4, a + k, line);
      _tile_loadd(6, weight + k * PANEL, 64);
      _tile_loadd(5, below + k, line);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(7, next + k * PANEL, 64);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(1, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
  } else {
    for (int64_t k = 0; k < depth; k += UNIT) {
      _tile_loadd(4, a + k, line);
      _tile_loadd(6, weight + k * PANEL, 64);
      _tile_dpbusd(0, 4, 6);
      if (tall) {
        _tile_loadd(5, below + k, line);
        _tile_dpbusd(2, 5, 6);
      }
      if (both) {
        _tile_loadd(7, next + k * PANEL, 64);
        _tile_dpbusd(1, 4, 7);
      }
    }
  }
  constexpr int64_t BYTES = 2 * PANEL * 4;
  _tile_stored(0, sums, BYTES);
  if (both) _tile_stored(1, sums + PANEL, BYTES);
  if (tall) _tile_stored(2, sums + 32 * PANEL, BYTES);
  if (both && tall) _tile_stored(3, sums + 33 * PANEL, BYTES);
}
#endif

// Copies some tens of bytes, which calls of memcpy take long for.
SHORT void copy_bytes(uint8_t* to, const uint8_t* from, int64_t count) {
#ifdef __AVX512F__
  if (count <= 0) return;
  for (; count > 64; count -= 64, to += 64, from += 64)
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
  const __mmask64 rest = ~uint64_t{0} >> (64 - count);
  _mm512_mask_storeu_epi8(to, rest, _mm512_maskz_loadu_epi8(rest, from));
#else
  std::memcpy(to, from, count);
#endif
}

// An output pixel; `next` moves on without divisions, which cost more than a pixel's copies.
struct Pixel {
  int64_t n, d, h, w;

  Pixel(const Geometry& g, int64_t row)
      : n(row / g.pixels()), d(row % g.pixels() / (g.out[1] * g.out[2])),
        h(row / g.out[2] % g.out[1]), w(row % g.out[2]) {}

  SHORT void next(const Geometry& g) {
    if (++w < g.out[2]) return;
    w = 0;
    if (++h < g.out[1]) return;
    h = 0;
    if (++d < g.out[0]) return;
    d = 0, ++n;
  }
};

// Copies the elements under the kernel of `rows` output pixels from `row` on to lines of `line` bytes.
void gather(const Call& c, int64_t group, int64_t row, int64_t rows, uint8_t* panel, int64_t line) {
  const Geometry g = c.g;
  const int64_t some = g.group_channels(), depth = g.depth(), width = g.window[2] * some;
  const auto padding = static_cast<uint8_t>(static_cast<int32_t>(c.scales->x_zero_point));
  const bool joined = g.groups == 1 && g.dilation[2] == 1;  // a line of the kernel lies together
  const uint8_t* const x = c.x + group * some;
  Pixel pixel(g, row);
  for (int64_t i = 0; i < rows; ++i, pixel.next(g)) {
    uint8_t *const start = panel + i * line, *to = start;
    const int64_t left = pixel.w * g.stride[2] - g.padding[2];
    const bool within = joined && left >= 0 && left + g.window[2] <= g.size[2];
    for (int64_t a = 0; a < g.window[0]; ++a) {
      const int64_t d = pixel.d * g.stride[0] - g.padding[0] + a * g.dilation[0];
      for (int64_t b = 0; b < g.window[1]; ++b) {
        const int64_t h = pixel.h * g.stride[1] - g.padding[1] + b * g.dilation[1];
        if (d < 0 || d >= g.size[0] || h < 0 || h >= g.size[1]) {
          std::memset(to, padding, width);
          to += width;
          continue;
        }
        const uint8_t* from = x + (((pixel.n * g.size[0] + d) * g.size[1] + h) * g.size[2]) * g.channels;
        if (within) {
          copy_bytes(to, from + left * g.channels, width);
          to += width;
          continue;
        }
        for (int64_t e = 0; e < g.window[2]; ++e, to += some) {
          const int64_t w = left + e * g.dilation[2];
          if (w < 0 || w >= g.size[2])
            std::memset(to, padding, some);
          else
            copy_bytes(to, from + w * g.channels, some);
        }
      }
    }
    if (c.x_number == INT8)
      for (uint8_t* byte = start; byte < start + depth; ++byte) *byte ^= 0x80;
    if (line > depth) std::memset(start + depth, 0, line - depth);
  }
}

// A block of rows, panels `from` to `to` of the weight: products, and their epilogue.
void multiply_by_vectors(const Call& c, Finish finish, const uint8_t* a, int64_t line, int64_t group,
                         int64_t row, int64_t rows, int64_t from, int64_t to) {
  constexpr int64_t COLUMNS = PANELS * PANEL;
  alignas(64) int32_t sums[TALL * COLUMNS];
  const Geometry& g = c.g;
  const int64_t of_panel = g.padded_depth() * PANEL, depth = (g.depth() + 3) / 4 * 4;
  const int8_t* weight = c.weight + group * g.panels() * of_panel;
  const int64_t parts = (rows + TALL - 1) / TALL;
  for (int64_t p = from; p < to; p += PANELS) {
    const int64_t panels = std::min(PANELS, to - p);
    const int64_t columns = std::min(panels * PANEL, g.group_outs() - p * PANEL);
    const int64_t vectors = (columns + WIDE - 1) / WIDE;
    for (int64_t part = 0; part < parts; ++part) {  // as even as may be
      const int64_t i = part * rows / parts, count = (part + 1) * rows / parts - i;
      MULTIPLY[count - 1](a + i * line, line, weight + p * of_panel, of_panel, vectors, depth, sums,
                          COLUMNS);
      finish(c, sums, COLUMNS, row + i, count, group * g.group_outs() + p * PANEL, columns);
    }
  }
}

#if INT8_AMX
void multiply_by_tiles(const Call& c, Finish finish, const uint8_t* a, int64_t line, int64_t group,
                       int64_t row, int64_t rows, int64_t from, int64_t to) {
  constexpr int64_t LINE = 2 * PANEL;
  alignas(64) int32_t sums[32 * LINE];
  const Geometry& g = c.g;
  const int64_t depth = g.padded_depth(), of_panel = depth * PANEL;
  const int8_t* weight = c.weight + group * g.panels() * of_panel;
  for (int64_t p = from; p < to; p += 2) {  // both stay in the first cache
    const int64_t panels = std::min<int64_t>(2, to - p);
    const int64_t columns = std::min(panels * PANEL, g.group_outs() - p * PANEL);
    for (int64_t i = 0; i < rows; i += 32) {
      const int64_t count = std::min<int64_t>(32, rows - i);
      multiply_tiles(a + i * line, line, weight + p * of_panel, of_panel, panels == 2, count > 16, depth,
                     sums);
      finish(c, sums, LINE, row + i, count, group * g.group_outs() + p * PANEL, columns);
    }
  }
}
#endif

// Whether the rows of a block can be read where they are: no more bytes than those of the rows.
bool lies_in_place(const Call& c, int64_t rows, bool by_tiles) {
  const Geometry& g = c.g;
  if (!g.is_gemm() || c.x_number == INT8) return false;
  return by_tiles ? g.channels % UNIT == 0 && rows % 16 == 0 : g.channels % 4 == 0;
}

// One task: `rows` rows of a group times some panels. `at_hand`: what the panel of rows holds.
void multiply_part(const Call& c, Finish finish, int64_t group, int64_t row, int64_t rows, int64_t from,
                   int64_t to, bool is_at_hand, bool by_tiles) {
  thread_local std::vector<uint8_t> panel;  // as large as the largest that came
  const Geometry& g = c.g;
  const uint8_t* a = c.x + row * g.channels;
  int64_t line = g.channels;
  if (!lies_in_place(c, rows, by_tiles)) {
    line = g.padded_depth();
    const int64_t size = (rows + 15) / 16 * 16 * line;  // tiles have 16 rows
    if (static_cast<int64_t>(panel.size()) < size) panel.resize(size);
    if (!is_at_hand) gather(c, group, row, rows, panel.data(), line);
    a = panel.data();
  }
  Call own = c;
  if (c.weight_zeros) {
    thread_local std::vector<int32_t> sums;
    sums.resize(rows);
    for (int64_t i = 0; i < rows; ++i) sums[i] = std::accumulate(a + i * line, a + i * line + g.depth(), 0);
    own.row_sums = sums.data() - row;
  }
#if INT8_AMX
  if (by_tiles) return multiply_by_tiles(own, finish, a, line, group, row, rows, from, to);
#endif
  multiply_by_vectors(own, finish, a, line, group, row, rows, from, to);
}

void multiply(const Call& c) {
  constexpr int64_t FEW = 4;  // rows, of which tiles would compute 16
  const Geometry& g = c.g;
  const Finish finish = by_types(c, [&](auto other, auto result) -> Finish {
    using Other = decltype(other);
    using Result = decltype(result);
    return c.is_plain() && !c.weight_zeros ? finish_rows<true, Other, Result> : finish_rows<false, Other, Result>;
  });
  const int64_t rows = g.rows(), threads = omp_get_max_threads();
  if (rows == 0) return;
  const bool is_large = g.group_outs() * g.depth() > LARGE;
  const int64_t tall = is_large ? std::max(ROWS, CACHED / g.padded_depth()) : ROWS;
  const int64_t blocks = (rows + tall - 1) / tall;
  const int64_t wanted = std::max<int64_t>(1, 4 * threads / (blocks * g.groups));
  const int64_t most = (g.panels() + PANELS - 1) / PANELS;
  const int64_t parts = threads == 1 ? 1 : std::min(wanted, most);
  const int64_t tasks = blocks * g.groups * parts;
#if INT8_AMX
  const bool by_tiles = HAS_TILES && rows > FEW;
#else
  const bool by_tiles = false;
#endif
#pragma omp parallel if (tasks > 1)
  {
#if INT8_AMX
    if (by_tiles) configure_tiles(16, 16);
#endif
    int64_t at_hand = -1;  // the block and group whose rows are gathered
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t block = task / (parts * g.groups), group = task / parts % g.groups;
      const int64_t part = task % parts;
      const auto row = [&](int64_t n) { return n == blocks ? rows : n * rows / blocks / 32 * 32; };
      const auto panel = [&](int64_t n) { return std::min(g.panels(), n * most / parts * PANELS); };
      multiply_part(c, finish, group, row(block), row(block + 1) - row(block), panel(part),
                    panel(part + 1), at_hand == task / parts, by_tiles);
      at_hand = task / parts;
    }
#if INT8_AMX
    if (by_tiles) release_tiles();
#endif
  }
}

// Products of matrices [batch, M, K] @ [batch, K, N] of activations, with zero points of both.
struct MatrixProduct {
  int64_t batch, rows, depth, columns;
  const uint8_t *a, *b;
  int32_t a_number, b_number, result_number;
  float factor;         // of both scales and what is multiplied behind
  int32_t a_zero_point, b_zero_point;  // of the numbers as they are
  const Scales* scales;
  void* result;
};

// Rearranges b [K, N] as a weight; `totals` are the sums of its columns. Unsigned numbers become
// signed by a shift of 128.
void arrange(const uint8_t* b, bool is_signed, int64_t depth, int64_t columns, int64_t padded,
             int8_t* weight, int32_t* totals) {
  const uint8_t flip = is_signed ? 0 : 0x80;
  const int64_t panels = (columns + PANEL - 1) / PANEL;
  std::fill_n(totals, columns, 0);
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t some = std::min(PANEL, columns - p * PANEL);
    int8_t* panel = weight + p * padded * PANEL;
    if (some < PANEL || depth < padded) std::memset(panel, 0, padded * PANEL);
    for (int64_t k = 0; k < depth; ++k) {
      const uint8_t* from = b + k * columns + p * PANEL;
      int8_t* to = panel + k / 4 * 4 * PANEL + k % 4;
      for (int64_t j = 0; j < some; ++j) {
        const auto value = static_cast<int8_t>(from[j] ^ flip);
        to[4 * j] = value;
        totals[p * PANEL + j] += value;
      }
    }
  }
}

// K from which sums, and what zero points add to them, may overflow 32 bits.
constexpr int64_t EXACT_DEPTH = (int64_t{1} << 31) / (2 * 256 * 128);

// Products whose sums need 64 bits, one after the other.
template <typename Result>
void multiply_wide(const MatrixProduct& m, const Call& call) {
  const Writer<Result, true> put(call);
  const auto value = [](const uint8_t* from, int64_t at, int32_t number, int32_t zero_point) {
    return int64_t{number == INT8 ? (int32_t)(int8_t)from[at] : (int32_t)from[at]} - zero_point;
  };
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t n = 0; n < m.batch; ++n)
    for (int64_t i = 0; i < m.rows; ++i)
      for (int64_t j = 0; j < m.columns; ++j) {
        int64_t sum = 0;
        for (int64_t k = 0; k < m.depth; ++k)
          sum += value(m.a, (n * m.rows + i) * m.depth + k, m.a_number, m.a_zero_point) *
                 value(m.b, (n * m.depth + k) * m.columns + j, m.b_number, m.b_zero_point);
        const auto result = static_cast<float>(static_cast<double>(sum) * m.factor);
        put((n * m.rows + i) * m.columns + j, all(result), 1);
      }
}

void multiply_matrices(const MatrixProduct& m) {
  const int32_t a_zero = m.a_zero_point + (m.a_number == INT8 ? 128 : 0);
  const int32_t b_zero = m.b_zero_point - (m.b_number == INT8 ? 0 : 128);
  Call call{};
  Geometry& g = call.g;
  g.batch = m.rows, g.channels = m.depth, g.out_channels = m.columns, g.groups = 1;
  for (int i = 0; i < 3; ++i)
    g.size[i] = g.out[i] = g.window[i] = g.stride[i] = g.dilation[i] = 1, g.padding[i] = 0;
  call.scales = m.scales;
  call.x_number = m.a_number, call.result_number = m.result_number;
  call.result = m.result;
  if (m.depth >= EXACT_DEPTH)
    return by_types(call, [&](auto, auto result) { multiply_wide<decltype(result)>(m, call); });
  const Finish finish = by_types(call, [](auto other, auto result) -> Finish {
    return finish_rows<false, decltype(other), decltype(result)>;
  });
  const int64_t size = m.result_number == FLOAT ? 4 : m.result_number == BFLOAT16 ? 2 : 1;
  const int64_t padded = g.padded_depth();
#if INT8_AMX
  const bool by_tiles = HAS_TILES;
#else
  const bool by_tiles = false;
#endif
#pragma omp parallel if (m.batch > 1)
  {
    thread_local std::vector<int8_t> weight;
    thread_local std::vector<int32_t> totals;
    thread_local std::vector<float> factors;
    weight.resize(g.panels() * PANEL * padded);
    totals.resize(m.rows + m.columns);
    factors.resize(2 * m.columns);
#if INT8_AMX
    if (by_tiles) configure_tiles(16, 16);
#endif
#pragma omp for schedule(static)
    for (int64_t n = 0; n < m.batch; ++n) {
      Call own = call;
      own.x = m.a + n * m.rows * m.depth;
      own.result = static_cast<char*>(m.result) + n * m.rows * m.columns * size;
      int32_t *of_rows = totals.data(), *of_columns = of_rows + m.rows;
      arrange(m.b + n * m.depth * m.columns, m.b_number == INT8, m.depth, m.columns, padded,
              weight.data(), of_columns);
      for (int64_t j = 0; j < m.columns; ++j) {
        const int64_t shift = int64_t{m.depth} * a_zero * b_zero - int64_t{a_zero} * of_columns[j];
        factors[j] = m.factor, factors[m.columns + j] = m.factor * shift;
      }
      const uint8_t flip = m.a_number == INT8 ? 0x80 : 0;
      for (int64_t i = 0; i < m.rows; ++i) {
        int32_t total = 0;
        for (int64_t k = 0; k < m.depth; ++k) total += own.x[i * m.depth + k] ^ flip;
        of_rows[i] = total * b_zero;
      }
      own.weight = weight.data(), own.factors = factors.data(), own.row_shifts = of_rows;
      for (int64_t row = 0; row < m.rows; row += ROWS)
        multiply_part(own, finish, 0, row, std::min(ROWS, m.rows - row), 0, g.panels(), false, by_tiles);
    }
#if INT8_AMX
    if (by_tiles) release_tiles();
#endif
  }
}

// One channel a group: vectors of channels, tap by tap, in floats, which hold the sums of some rows of
// a kernel exactly.
template <typename Other, typename Result>
void convolve_depthwise(const Call& c) {
  const Geometry g = c.g;
  const int64_t lines = g.batch * g.out[0] * g.out[1], outs = g.out_channels, many = g.group_outs();
  const Vector zero = all(c.scales->x_zero_point);
  const bool is_signed = c.x_number == INT8;
  constexpr int64_t EXACT = 128;  // taps, whose sum is less than 2^22: `rounded` is exact up to that
  const bool is_long = g.taps() > EXACT;
  const Finish finish = c.is_plain() ? finish_rows<true, Other, Result> : finish_rows<false, Other, Result>;
  const uint8_t* x = c.x;
  const int8_t* weight = c.weight;
  const float* zeros = c.weight_zeros;
  const auto numbers = [=](int64_t at, int64_t count) __attribute__((always_inline)) {
    return is_signed ? read((const int8_t*)x + at, count) : read(x + at, count);
  };
#pragma omp parallel
  {
  thread_local std::vector<int32_t> sums;  // of a pixel
  if (static_cast<int64_t>(sums.size()) < outs + WIDE) sums.resize(outs + WIDE);
#pragma omp for schedule(static)
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t n = line / (g.out[0] * g.out[1]), od = line / g.out[1] % g.out[0];
    const int64_t oh = line % g.out[1];
    for (int64_t ow = 0; ow < g.out[2]; ++ow) {
      for (int64_t o = 0; o < outs; o += WIDE) {
        const int64_t count = std::min(WIDE, outs - o);
        Vector sum{};
        Ints total{};
        for (int64_t a = 0; a < g.window[0]; ++a)
          for (int64_t b = 0; b < g.window[1]; ++b) {
            const int64_t d = od * g.stride[0] - g.padding[0] + a * g.dilation[0];
            const int64_t h = oh * g.stride[1] - g.padding[1] + b * g.dilation[1];
            if (d < 0 || d >= g.size[0] || h < 0 || h >= g.size[1]) continue;
            const int64_t start = ((n * g.size[0] + d) * g.size[1] + h) * g.size[2];
            const int8_t* taps = weight + (a * g.window[1] + b) * g.window[2] * outs + o;
            for (int64_t e = 0; e < g.window[2]; ++e) {
              const int64_t w = ow * g.stride[2] - g.padding[2] + e * g.dilation[2];
              if (w < 0 || w >= g.size[2]) continue;
              const int64_t at = (start + w) * g.channels;
              Vector values;
              if (many == 1)
                values = numbers(at + o, count);
              else
                for (int64_t i = 0; i < WIDE; ++i)
                  values[i] = numbers(at + (o + std::min(i, count - 1)) / many, 1)[0];
              Vector factors = read(taps + e * outs, count);
              if (zeros) factors -= read(zeros + o, count);
              sum = fused(values - zero, factors, sum);
            }
            if (is_long) total += rounded(sum), sum = Vector{};
          }
        total += rounded(sum);
        std::memcpy(sums.data() + o, &total, sizeof total);
      }
      finish(c, sums.data(), 0, line * g.out[2] + ow, 1, 0, outs);
    }
  }
  }
}

// Maxima of windows, channel by channel.
template <typename T>
void pool(const Geometry& g, const T* x, T* result) {
  const int64_t rows = g.rows(), pixels = g.pixels(), channels = g.channels;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t n = row / pixels, oh = row % pixels / g.out[2], ow = row % g.out[2];
    T* to = result + row * channels;
    std::fill_n(to, channels, std::numeric_limits<T>::min());
    for (int64_t b = 0; b < g.window[1]; ++b)
      for (int64_t e = 0; e < g.window[2]; ++e) {
        const int64_t h = oh * g.stride[1] - g.padding[1] + b * g.dilation[1];
        const int64_t w = ow * g.stride[2] - g.padding[2] + e * g.dilation[2];
        if (h < 0 || h >= g.size[1] || w < 0 || w >= g.size[2]) continue;
        const T* from = x + ((n * g.size[1] + h) * g.size[2] + w) * channels;
        for (int64_t c = 0; c < channels; ++c) to[c] = to[c] < from[c] ? from[c] : to[c];
      }
  }
}

}  // namespace
}  // namespace ipex::int8

// `numbers`: batch, M, K, N, and the numbers of a, b and the result. `scales`: of `ipex::int8_bmm_scales`.
extern "C" void int8_multiply(const int64_t* numbers, float factor, const void* a, const void* b,
                              const void* scales, void* result) {
  const auto* s = static_cast<const float*>(scales);
  const float a_scale = s[0], b_scale = s[1];
  ipex::int8::Scales own{0, 0, 0, s[4], s[5], s[6], s[7]};
  ipex::int8::multiply_matrices({numbers[0], numbers[1], numbers[2], numbers[3],
                           static_cast<const uint8_t*>(a), static_cast<const uint8_t*>(b),
                           static_cast<int32_t>(numbers[4]), static_cast<int32_t>(numbers[5]),
                           static_cast<int32_t>(numbers[6]), a_scale * b_scale * factor,
                           static_cast<int32_t>(s[2]), static_cast<int32_t>(s[3]), &own, result});
}

extern "C" void int8_max_pool(const int64_t* numbers, int32_t is_signed, const void* x, void* result) {
  ipex::int8::Geometry g;
  std::memcpy(&g, numbers, sizeof g);
  if (is_signed)
    ipex::int8::pool(g, static_cast<const int8_t*>(x), static_cast<int8_t*>(result));
  else
    ipex::int8::pool(g, static_cast<const uint8_t*>(x), static_cast<uint8_t*>(result));
}

// `numbers`: geometry; the numbers of x, other and result; binary and unary; 1 if depthwise; 1 if factors
// have a third line of zero points of the weight.
extern "C" void int8_convolve(const int64_t* numbers, const float* scalars, const void* x,
                              const void* weight, const void* factors, const void* scales,
                              const void* other, const void* row_scales, void* result) {
  ipex::int8::Call call;
  std::memcpy(&call.g, numbers, sizeof call.g);
  const int64_t* rest = numbers + sizeof(call.g) / sizeof(int64_t);
  call.x = static_cast<const uint8_t*>(x);
  call.weight = static_cast<const int8_t*>(weight);
  call.factors = static_cast<const float*>(factors);
  call.scales = static_cast<const ipex::int8::Scales*>(scales);
  call.other = other;
  call.result = result;
  call.x_number = rest[0], call.other_number = rest[1], call.result_number = rest[2];
  call.binary = rest[3], call.unary = rest[4];
  call.scalars[0] = scalars[0], call.scalars[1] = scalars[1];
  call.row_scales = static_cast<const float*>(row_scales);
  const float *zeros = call.factors + 2 * call.g.out_channels, *end = zeros + call.g.out_channels;
  const bool has_zeros = rest[6] && std::any_of(zeros, end, [](float zero) { return zero != 0; });
  call.weight_zeros = has_zeros ? zeros : nullptr;
  call.has_odd = std::any_of(call.factors, zeros, [](float number) { return !std::isfinite(number); });
  if (rest[5])
    ipex::int8::by_types(call, [&](auto other, auto result) {
      ipex::int8::convolve_depthwise<decltype(other), decltype(result)>(call);
    });
  else
    ipex::int8::multiply(call);
}

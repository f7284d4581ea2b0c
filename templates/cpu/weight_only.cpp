
// Linear layers on quantized weights, which lie row by row as checkpoints have them.
//
// A call with few rows reads the weight once, from beginning to end, and little else, so instructions
// are spent where bytes are saved: elements of the weight are unpacked in registers, and activations
// are laid out once for each call as that needs it. Lanes of a vector are elements along K, so sums of
// lanes are added up at the end of each row of the weight.
// With many rows, blocks of the weight are dequantized into the second cache and multiplied from there.
// Follows `vectors.cpp`. `weight_only.py` writes above: WOQ_VNNI, 1 for AVX-512 VNNI and 2 for AVX-VNNI.
#if WOQ_VNNI == 1
#pragma GCC push_options
#pragma GCC target("avx512vnni")
#elif WOQ_VNNI == 2
#pragma GCC push_options
#pragma GCC target("avxvnni")
#endif

namespace ipex::weight_only {
namespace {

using ipex::read;
using ipex::write;

// As `ipex_inductor.templates.cpu.weight_only` numbers them.
enum Number : int32_t { NOTHING, FLOAT, BFLOAT16, HALF };
enum Format : int32_t { INT8, INT4, NF4, FP8 };
enum Compute : int32_t { IN_FLOAT, IN_BFLOAT16, IN_HALF, IN_INT8 };

constexpr float NF4_VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
constexpr float MOST = 127;                      // largest magnitude of a quantized activation
constexpr float SMALLEST = 1.5046327690525280e-36f;  // 2^-119, as of `ops/quant/weight_only.py`
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t UNIT = 128;  // K of laid out activations is a multiple of it
constexpr int64_t AT_ONCE = 4;  // rows of x whose sums are in registers, at most
constexpr int64_t ROOM = 1 << 24;  // bytes of laid out activations; more rows are computed in turns

constexpr int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
constexpr bool is_nibbles(int32_t format) { return format == INT4 || format == NF4; }

struct Call {
  int64_t rows, depth, columns, group_size;  // M, K, N
  int32_t x_number, scale_number, bias_number, format, compute;
  const void* x;
  const uint8_t* weight;
  const void *scales, *zeros;
  const int32_t* order;
  const void* bias;
  void* result;

  int64_t groups() const { return (depth + group_size - 1) / group_size; }
  int64_t line() const { return is_nibbles(format) ? (depth + 1) / 2 : depth; }  // bytes
  int64_t padded_depth() const { return padded(depth, UNIT); }
};

// A buffer that grows and is kept by its thread. What grew is not initialized again.
template <typename T>
struct Buffer {
  std::vector<T> numbers;
  T* at_least(int64_t count) {
    if (static_cast<int64_t>(numbers.size()) < count) numbers.resize(count);
    return numbers.data();
  }
};

// Scalars, for ends of lines and CPUs without vector instructions for them.
inline float as_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, size = half & 0x7fff;
  float value;
  if (size >= 0x7c00) {
    const uint32_t bits = sign | 0x7f800000 | (size & 0x3ff) << 13;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  const uint32_t bits = size << 13;
  std::memcpy(&value, &bits, sizeof value);
  value *= 5.192296858534828e33f;  // 2^112: subnormal numbers too are exact
  return sign ? -value : value;
}

inline uint16_t as_half(float value) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // a subnormal number: the sum with 0.5 has its bits last
    float size, sum;
    std::memcpy(&size, &bits, sizeof size);
    sum = size + 0.5f;
    std::memcpy(&bits, &sum, sizeof bits);
    return sign | (bits - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1);
  return sign | (bits - 0x38000000) >> 13;
}

SHORT Vector read_half(const Half* from, int64_t count) {
#ifdef __F16C__
  return read(from, count);
#else
  Vector result{};
  for (int64_t i = 0; i < std::min(count, WIDE); ++i) result[i] = as_float(from[i].bits);
  return result;
#endif
}

SHORT void write_half(Half* to, Vector value, int64_t count) {
#ifdef __F16C__
  write(to, value, count);
#else
  for (int64_t i = 0; i < std::min(count, WIDE); ++i) to[i].bits = as_half(value[i]);
#endif
}

// Elements of a tensor whose dtype is known at run time.
SHORT Vector read_number(const void* from, int32_t number, int64_t at, int64_t count) {
  if (number == FLOAT) return read(static_cast<const float*>(from) + at, count);
  if (number == BFLOAT16) return read(static_cast<const c10::BFloat16*>(from) + at, count);
  return read_half(static_cast<const Half*>(from) + at, count);
}

SHORT void write_number(void* to, int32_t number, int64_t at, Vector value, int64_t count) {
  if (number == FLOAT)
    write(static_cast<float*>(to) + at, value, count);
  else if (number == BFLOAT16)
    write(static_cast<c10::BFloat16*>(to) + at, value, count);
  else
    write_half(static_cast<Half*>(to) + at, value, count);
}

typedef uint8_t Bytes __attribute__((vector_size(WIDE)));
typedef int8_t Chars __attribute__((vector_size(WIDE)));

SHORT Vector as_floats(Ints values) { return __builtin_convertvector(values, Vector); }

// The first `count` bytes from there on as floats, zeros behind them.
template <bool SIGNED>
SHORT Vector read_bytes(const uint8_t* from, int64_t count) {
#ifdef __AVX512F__
  const __m128i bytes = _mm_maskz_loadu_epi8(first(count), from);
  return (Vector)_mm512_cvtepi32_ps(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
  if constexpr (SIGNED)
    return as_floats(__builtin_convertvector(loaded<Chars>((const int8_t*)from, count), Ints));
  return as_floats(__builtin_convertvector(loaded<Bytes>(from, count), Ints));
#endif
}

// E4M3 moved by 7 bits is the same number in fp16, times 2^-8.
inline float fp8_value(uint8_t byte) {
  if ((byte & 0x7f) == 0x7f) return NOT_A_NUMBER;
  return as_float((byte & 0x80) << 8 | (byte & 0x7f) << 7) * 256;
}

inline float zero_point(const Call& c, int64_t row, int64_t group) {
  const int64_t at = row * c.groups() + group;
  if (c.format == INT4) return c.zeros ? static_cast<const uint8_t*>(c.zeros)[at] : 8;
  return c.zeros ? static_cast<const int8_t*>(c.zeros)[at] : 0;
}

// One element of a row of the weight, without its scale.
inline float element(const Call& c, const uint8_t* row, int64_t k, float zero) {
  switch (c.format) {
    case INT8: return static_cast<int8_t>(row[k]) - zero;
    case FP8: return fp8_value(row[k]);
    default: {
      const int32_t nibble = row[k / 2] >> (k % 2 * 4) & 15;
      return c.format == NF4 ? NF4_VALUES[nibble] : nibble - zero;
    }
  }
}

// Scales of a row in fp32, zeros behind them up to a whole vector.
inline void read_scales(const Call& c, int64_t row, float* to) {
  const int64_t groups = c.groups();
  for (int64_t g = 0; g < groups; g += WIDE)
    write(to + g, read_number(c.scales, c.scale_number, row * groups + g, groups - g));
}

// ---- Weights in fp32 ----

// Unpacks WIDE elements of a row of the weight at a time, for one group. ORDERED: lane l has element l;
// else the element that `lane_of` says, as is cheaper to unpack.
constexpr int64_t element_of_lane(int32_t format, int64_t lane) {
  return is_nibbles(format) && WIDE == 16 ? lane % 2 * 8 + lane / 2 : lane;
}

template <int32_t FORMAT>
struct Unpacker {
  static constexpr int64_t BYTES = is_nibbles(FORMAT) ? WIDE / 2 : WIDE;
  Vector scale, zero;  // with AVX-512 `scale` is a table of nibbles
#ifdef __AVX2__
  Vector high;
#endif

  SHORT void begin(float factor, float zero_point) {
    if constexpr (FORMAT == FP8) factor *= 256;
    scale = all(factor), zero = all(zero_point);
#if defined(__AVX512F__)
    if constexpr (FORMAT == INT4) scale *= as_floats(lanes()) - zero;
    if constexpr (FORMAT == NF4) scale *= read(NF4_VALUES);
#elif defined(__AVX2__)
    if constexpr (FORMAT == NF4) high = scale * read(NF4_VALUES + 8), scale *= read(NF4_VALUES);
#endif
  }

  SHORT Vector operator()(const uint8_t* from) const {
#if defined(__AVX512F__)
    if constexpr (is_nibbles(FORMAT)) {
      int64_t bytes;
      std::memcpy(&bytes, from, sizeof bytes);
      const __m512i shifts = _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
      const __m512i nibbles = _mm512_srlv_epi32(_mm512_set1_epi64(bytes), shifts);
      return (Vector)_mm512_permutexvar_ps(nibbles, (__m512)scale);  // by their lowest bits
    } else if constexpr (FORMAT == INT8) {
      const __m512i values = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
      return ((Vector)_mm512_cvtepi32_ps(values) - zero) * scale;
    } else {
      const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
      const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(-0x4080));
      const __mmask16 missing =
          _mm256_cmpeq_epi16_mask(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
      const __m512 value = _mm512_cvtph_ps(_mm256_mask_mov_epi16(halves, missing, _mm256_set1_epi16(0x7e00)));
      return (Vector)value * scale;
    }
#elif defined(__AVX2__)
    if constexpr (is_nibbles(FORMAT)) {
      int32_t bytes;
      std::memcpy(&bytes, from, sizeof bytes);
      const __m256i shifts = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
      const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(bytes), shifts);
      if constexpr (FORMAT == INT4)
        return (as_floats((Ints)_mm256_and_si256(nibbles, _mm256_set1_epi32(15))) - zero) * scale;
      const __m256 low = _mm256_permutevar8x32_ps((__m256)scale, nibbles);
      const __m256 above = _mm256_permutevar8x32_ps((__m256)high, nibbles);
      return (Vector)_mm256_blendv_ps(low, above, (__m256)_mm256_slli_epi32(nibbles, 28));
    } else if constexpr (FORMAT == INT8) {
      const __m256i values = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
      return (as_floats((Ints)values) - zero) * scale;
    } else {
      const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from));
      const __m128i halves = _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(-0x4080));
      const __m128i size = _mm_and_si128(words, _mm_set1_epi16(0x7f));
      const __m128i missing = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
      const __m128i whole = _mm_or_si128(halves, _mm_and_si128(missing, _mm_set1_epi16(0x7e00)));
      return (Vector)_mm256_cvtph_ps(whole) * scale;
    }
#else
    Vector result;
    for (int64_t l = 0; l < WIDE; ++l) {
      const uint8_t byte = from[is_nibbles(FORMAT) ? l / 2 : l];
      const int32_t nibble = byte >> (l % 2 * 4) & 15;
      if constexpr (FORMAT == INT8) result[l] = static_cast<int8_t>(byte) - zero[0];
      if constexpr (FORMAT == INT4) result[l] = nibble - zero[0];
      if constexpr (FORMAT == NF4) result[l] = NF4_VALUES[nibble];
      if constexpr (FORMAT == FP8) result[l] = fp8_value(byte) * (1.f / 256);
    }
    return result * scale;
#endif
  }
};

// ---- Activations, laid out for each call ----

// Row `row` of x in fp32 as the computation reads it: in `order`, rounded, zeros behind it. An index
// outside of x gives NaN.
void read_row(const Call& c, int64_t row, float* to) {
  const int64_t depth = c.depth, start = row * depth, end = c.padded_depth();
  if (c.order) {
    for (int64_t k = 0; k < depth; ++k) {
      const int64_t from = c.order[k];
      to[k] = from < 0 || from >= depth ? NOT_A_NUMBER : read_number(c.x, c.x_number, start + from, 1)[0];
    }
  } else {
    for (int64_t k = 0; k < depth; k += WIDE)
      write(to + k, read_number(c.x, c.x_number, start + k, depth - k));
  }
  std::fill(to + depth, to + end, 0.f);
  const int32_t rounded = c.compute == IN_BFLOAT16 ? BFLOAT16 : c.compute == IN_HALF ? HALF : FLOAT;
  if (rounded == FLOAT || rounded == c.x_number) return;
  alignas(64) uint16_t low[WIDE];
  for (int64_t k = 0; k < depth; k += WIDE) {
    write_number(low, rounded, 0, read(to + k), WIDE);
    write(to + k, read_number(low, rounded, 0, WIDE));
  }
}

// Elements of each vector in the order of `Unpacker`.
void arrange_floats(int32_t format, const float* row, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += WIDE)
    for (int64_t l = 0; l < WIDE; ++l) to[k + l] = row[k + element_of_lane(format, l)];
}

// One row of x in integers.
struct Quantized {
  int8_t* steps;  // arranged
  float *scales, *sums;  // of each group; sums are those of the integers times the scale
};

// A product is rounded before it becomes an integer, so no compiler may fuse both.
SHORT Ints rounded(Vector value) {  // to nearest, ties to even
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)value);
#elif defined(__AVX__)
  return (Ints)_mm256_cvtps_epi32((__m256)value);
#else
  constexpr float NEAREST = 12582912;  // 1.5 * 2^23: a sum with it has no fraction
  asm("" : "+m"(value));
  return __builtin_convertvector((value + NEAREST) - NEAREST, Ints);
#endif
}

void quantize(const Call& c, const float* row, int8_t* plain, const Quantized& to) {
  const int64_t groups = c.groups();
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * c.group_size, end = std::min(c.depth, begin + c.group_size);
    Ints sizes{}, sums{};  // bits of positive floats are in their order, infinity and NaN last
    for (int64_t k = begin; k < end; k += WIDE) {
      const Ints bits = (Ints)read(row + k, end - k) & 0x7fffffff;
      sizes = bits > sizes ? bits : sizes;
    }
    int32_t most = 0;
    for (int64_t l = 0; l < WIDE; ++l) most = std::max(most, sizes[l]);
    float amax;
    std::memcpy(&amax, &most, sizeof amax);
    const bool is_finite = most < 0x7f800000;
    amax = is_finite ? std::max(amax, SMALLEST) : 1;
    const Vector inverse = all(MOST / amax);
    for (int64_t k = begin; k < end; k += WIDE) {
      Ints steps{};
      if (is_finite) steps = rounded(read(row + k, end - k) * inverse);
      sums += steps;
      const Chars bytes = __builtin_convertvector(steps, Chars);
      stored(plain + k, bytes, end - k);
    }
    int32_t sum = 0;
    for (int64_t l = 0; l < WIDE; ++l) sum += sums[l];
    to.scales[g] = is_finite ? amax / MOST : NOT_A_NUMBER;
    to.sums[g] = to.scales[g] * sum;
  }
  for (int64_t g = groups; g < padded(groups, WIDE); ++g) to.scales[g] = to.sums[g] = 0;
  std::memset(plain + c.depth, 0, c.padded_depth() - c.depth);
  if (c.format == INT8) {
    std::memcpy(to.steps, plain, c.padded_depth());
    return;
  }
  constexpr int64_t BLOCK = 4 * WIDE;  // bytes: even elements, then odd ones
  for (int64_t k = 0; k < c.padded_depth(); k += 2 * BLOCK)
    for (int64_t i = 0; i < BLOCK; ++i) {
      to.steps[k + i] = plain[k + 2 * i];
      to.steps[k + BLOCK + i] = plain[k + 2 * i + 1];
    }
}

// ---- Few rows ----

// The sums of some rows of x and of the weight: `sums` in lines of WIDE.
struct Task {
  const Call& c;
  const void* x;           // laid out, the first of the rows
  int64_t x_line;          // its elements a row
  const float *x_scales, *x_sums;  // of quantized rows
  int64_t x_groups;        // padded
  const int32_t* lane_groups;      // of blocks of which not all lanes have one group
  int64_t row;             // of the weight
  int64_t some;            // rows of the weight that are wanted, at most as many as are computed
  const float* scales;     // of these rows, padded to `x_groups`
  float* sums;
  int64_t ahead;           // bytes from what is read to what is asked for meanwhile
};

using Multiply = void (*)(const Task&);

constexpr int64_t LINE = 64;  // bytes of the caches
// Bytes that memory brings while others are computed with. A processor's own prefetchers follow each of
// some rows, but begin anew at every row and page.
constexpr int64_t AHEAD = 1 << 13;

template <int64_t N>
SHORT void ask_for(const uint8_t* const (&rows)[N], int64_t at) {
#pragma GCC unroll 4
  for (int64_t j = 0; j < N; ++j) __builtin_prefetch(rows[j] + at);
}

// Rows of the weight together: their sums are in registers.
#if defined(__AVX512F__)
constexpr int64_t weight_rows(int64_t count, bool is_integer) { return is_integer && count > 1 ? 2 : 4; }
#elif defined(__AVX2__)
constexpr int64_t weight_rows(int64_t count, bool) { return count <= 2 ? 4 : 2; }
#else
constexpr int64_t weight_rows(int64_t, bool) { return 2; }
#endif

template <int64_t N, int64_t M>
SHORT void write_sums(const Task& t, Vector (&totals)[N][M]) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int64_t j = 0; j < N; ++j) t.sums[i * WIDE + j] = total(totals[j][i]);
}

template <int32_t FORMAT, int64_t M>
void multiply_floats(const Task& t) {
  constexpr int64_t N = weight_rows(M, false), BYTES = Unpacker<FORMAT>::BYTES;
  const Call& c = t.c;
  const int64_t groups = c.groups(), line = c.line();
  const float* const x = static_cast<const float*>(t.x);
  const uint8_t* rows[N];
  for (int64_t j = 0; j < N; ++j) rows[j] = c.weight + (t.row + std::min(j, t.some - 1)) * line;
  Vector totals[N][M];
#pragma GCC unroll 4
  for (int64_t j = 0; j < N; ++j)
#pragma GCC unroll 4
    for (int64_t i = 0; i < M; ++i) totals[j][i] = Vector{};
  for (int64_t g = 0; g < groups; ++g) {
    Unpacker<FORMAT> unpack[N];
    for (int64_t j = 0; j < N; ++j) {
      const int64_t at = std::min(j, t.some - 1);
      unpack[j].begin(t.scales[at * t.x_groups + g], zero_point(c, t.row + at, g));
    }
    const int64_t begin = g * c.group_size, end = std::min(c.depth, begin + c.group_size);
    int64_t k = begin;
    const auto step = [&](const uint8_t* const (&from)[N]) __attribute__((always_inline)) {
      Vector values[M];
#pragma GCC unroll 4
      for (int64_t i = 0; i < M; ++i) values[i] = read(x + i * t.x_line + k);
#pragma GCC unroll 4
      for (int64_t j = 0; j < N; ++j) {
        const Vector factors = unpack[j](from[j]);
#pragma GCC unroll 4
        for (int64_t i = 0; i < M; ++i) totals[j][i] = fused(factors, values[i], totals[j][i]);
      }
    };
    while (k + WIDE <= end) {
      ask_for(rows, k / WIDE * BYTES + t.ahead);
      const int64_t stop = std::min(end - WIDE, k + LINE / BYTES * WIDE - 1);
      for (; k <= stop; k += WIDE) {
        const uint8_t* from[N];
#pragma GCC unroll 4
        for (int64_t j = 0; j < N; ++j) from[j] = rows[j] + k / WIDE * BYTES;
        step(from);
      }
    }
    if (k < end) {
      uint8_t rest[N][BYTES] = {};
      const uint8_t* from[N];
      for (int64_t j = 0; j < N; ++j) {
        const int64_t at = k / WIDE * BYTES;
        std::memcpy(rest[j], rows[j] + at, line - at);
        from[j] = rest[j];
      }
      step(from);
    }
  }
  write_sums(t, totals);
}

#if BF16_PRODUCTS
// Nibbles as pairs of bf16: 32 elements of 16 bytes. A word has four nibbles; the n-th lane of 128 bits
// has the n-th of each of 8 words.
constexpr int64_t PAIRS = 32;

SHORT __m512i nibble_table(int32_t format, float scale, float zero) {
  const Vector plain = format == NF4 ? read(NF4_VALUES) : as_floats(lanes()) - zero;
  const __m256i low = (__m256i)_mm512_cvtneps_pbh((__m512)(plain * scale));
  return _mm512_broadcast_i64x4(low);
}

SHORT __m512i unpack_pairs(const uint8_t* from, __m512i table) {
  const __m512i shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008,
                                          0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
  return _mm512_permutexvar_epi16(_mm512_srlv_epi16(bytes, shifts), table);  // by their lowest bits
}

void arrange_pairs(const float* row, int64_t count, c10::BFloat16* to) {
  alignas(64) float some[PAIRS];
  for (int64_t k = 0; k < count; k += PAIRS) {
    for (int64_t l = 0; l < PAIRS; ++l) some[l] = row[k + l % 8 * 4 + l / 8];
    write(to + k, read(some));
    write(to + k + WIDE, read(some + WIDE));
  }
}

template <int32_t FORMAT, int64_t M>
void multiply_pairs(const Task& t) {
  constexpr int64_t N = weight_rows(M, false), BYTES = PAIRS / 2;
  const Call& c = t.c;
  const int64_t groups = c.groups(), line = c.line();
  const auto* const x = static_cast<const c10::BFloat16*>(t.x);
  const uint8_t* rows[N];
  for (int64_t j = 0; j < N; ++j) rows[j] = c.weight + (t.row + std::min(j, t.some - 1)) * line;
  Vector totals[N][M];
#pragma GCC unroll 4
  for (int64_t j = 0; j < N; ++j)
#pragma GCC unroll 4
    for (int64_t i = 0; i < M; ++i) totals[j][i] = Vector{};
  for (int64_t g = 0; g < groups; ++g) {
    __m512i tables[N];
    for (int64_t j = 0; j < N; ++j) {
      const int64_t at = std::min(j, t.some - 1);
      tables[j] = nibble_table(FORMAT, t.scales[at * t.x_groups + g], zero_point(c, t.row + at, g));
    }
    const int64_t begin = g * c.group_size, end = std::min(c.depth, begin + c.group_size);
    int64_t k = begin;
    const auto step = [&](const uint8_t* const (&from)[N]) __attribute__((always_inline)) {
      Words values[M];
#pragma GCC unroll 4
      for (int64_t i = 0; i < M; ++i) values[i] = pairs(x + i * t.x_line + k);
#pragma GCC unroll 4
      for (int64_t j = 0; j < N; ++j) {
        const __m512i factors = unpack_pairs(from[j], tables[j]);
#pragma GCC unroll 4
        for (int64_t i = 0; i < M; ++i)
          totals[j][i] = (Vector)_mm512_dpbf16_ps((__m512)totals[j][i], (__m512bh)factors, (__m512bh)values[i]);
      }
    };
    while (k + PAIRS <= end) {
      ask_for(rows, k / 2 + t.ahead);
      const int64_t stop = std::min(end - PAIRS, k + 2 * LINE - 1);
      for (; k <= stop; k += PAIRS) {
        const uint8_t* from[N];
#pragma GCC unroll 4
        for (int64_t j = 0; j < N; ++j) from[j] = rows[j] + k / 2;
        step(from);
      }
    }
    if (k < end) {
      uint8_t rest[N][BYTES] = {};
      const uint8_t* from[N];
      for (int64_t j = 0; j < N; ++j) {
        std::memcpy(rest[j], rows[j] + k / 2, line - k / 2);
        from[j] = rest[j];
      }
      step(from);
    }
  }
  write_sums(t, totals);
}
#endif

// Integers of the weight as unsigned bytes: OFFSET is what was added to int8. Without VNNI sums of pairs
// are in 16 bits, which hold 2 * 127 * 128: int8 is read as a size there, and its sign moves to x.
#if WOQ_VNNI
constexpr float OFFSET = 128;
#else
constexpr float OFFSET = 0;
#endif
constexpr int64_t BLOCK = 4 * WIDE;  // bytes
template <int32_t FORMAT>
constexpr int64_t BLOCK_DEPTH = FORMAT == INT4 ? 2 * BLOCK : BLOCK;
template <int32_t FORMAT>
constexpr int64_t LANE_DEPTH = BLOCK_DEPTH<FORMAT> / WIDE;  // elements along K of a lane

#if defined(__AVX512F__)
typedef __m512i Block;
SHORT Block load_block(const void* from) { return _mm512_loadu_si512(from); }
SHORT Block low_nibbles(Block bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
SHORT Block high_nibbles(Block bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }
SHORT Ints dot_unsigned(Ints sums, Block w, Block x) {
#if WOQ_VNNI == 1
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, w, x);
#else
  return sums + (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
#endif
}
// Nibbles leave room in 16 bits for the sum of both halves: 4 * 15 * 127.
SHORT Ints dot_nibbles(Ints sums, Block w, Block x, Block next_x) {
#if WOQ_VNNI == 1
  return dot_unsigned(dot_unsigned(sums, low_nibbles(w), x), high_nibbles(w), next_x);
#else
  const Block low = _mm512_maddubs_epi16(low_nibbles(w), x), high = _mm512_maddubs_epi16(high_nibbles(w), next_x);
  return sums + (Ints)_mm512_madd_epi16(_mm512_add_epi16(low, high), _mm512_set1_epi16(1));
#endif
}
struct Signed {
#if WOQ_VNNI == 1
  Block bytes;
  SHORT explicit Signed(Block w) : bytes(_mm512_xor_si512(w, _mm512_set1_epi8(-128))) {}
  SHORT Ints dot(Ints sums, Block x) const { return dot_unsigned(sums, bytes, x); }
#else
  Block bytes;
  __mmask64 negative;
  SHORT explicit Signed(Block w) : bytes(_mm512_abs_epi8(w)), negative(_mm512_movepi8_mask(w)) {}
  SHORT Ints dot(Ints sums, Block x) const {
    return dot_unsigned(sums, bytes, _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x));
  }
#endif
};
SHORT Vector pick(const float* from, const int32_t* which) {
  return (Vector)_mm512_permutexvar_ps(_mm512_loadu_si512(which), _mm512_loadu_ps(from));
}
#elif defined(__AVX2__)
typedef __m256i Block;
SHORT Block load_block(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
SHORT Block low_nibbles(Block bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
SHORT Block high_nibbles(Block bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }
SHORT Ints dot_unsigned(Ints sums, Block w, Block x) {
#if WOQ_VNNI == 2
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, w, x);
#else
  return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
#endif
}
// Nibbles leave room in 16 bits for the sum of both halves: 4 * 15 * 127.
SHORT Ints dot_nibbles(Ints sums, Block w, Block x, Block next_x) {
#if WOQ_VNNI == 2
  return dot_unsigned(dot_unsigned(sums, low_nibbles(w), x), high_nibbles(w), next_x);
#else
  const Block low = _mm256_maddubs_epi16(low_nibbles(w), x), high = _mm256_maddubs_epi16(high_nibbles(w), next_x);
  return sums + (Ints)_mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1));
#endif
}
struct Signed {
#if WOQ_VNNI == 2
  Block bytes;
  SHORT explicit Signed(Block w) : bytes(_mm256_xor_si256(w, _mm256_set1_epi8(-128))) {}
  SHORT Ints dot(Ints sums, Block x) const { return dot_unsigned(sums, bytes, x); }
#else
  Block bytes, sign;
  SHORT explicit Signed(Block w) : bytes(_mm256_abs_epi8(w)), sign(w) {}
  SHORT Ints dot(Ints sums, Block x) const {
    return dot_unsigned(sums, bytes, _mm256_sign_epi8(x, sign));
  }
#endif
};
SHORT Vector pick(const float* from, const int32_t* which) {
  return (Vector)_mm256_permutevar8x32_ps(_mm256_loadu_ps(from), _mm256_loadu_si256((const __m256i*)which));
}
#define HALVES_SHARE_GROUPS 1
// The first number in the lower half, the second in the upper one: cheaper than any other choice.
SHORT Vector pick_two(const float* from) {
  double both;
  std::memcpy(&both, from, sizeof both);
  const __m256i halves = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
  return (Vector)_mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(both)), halves);
}
#else
struct Block {
  uint8_t bytes[BLOCK];
};
SHORT Block load_block(const void* from) {
  Block result;
  std::memcpy(&result, from, sizeof result);
  return result;
}
SHORT Block low_nibbles(Block block) {
  for (auto& byte : block.bytes) byte &= 15;
  return block;
}
SHORT Block high_nibbles(Block block) {
  for (auto& byte : block.bytes) byte >>= 4;
  return block;
}
SHORT Ints dot_unsigned(Ints sums, const Block& w, const Block& x) {
  for (int64_t i = 0; i < BLOCK; ++i) sums[i / 4] += w.bytes[i] * static_cast<int8_t>(x.bytes[i]);
  return sums;
}
SHORT Ints dot_nibbles(Ints sums, const Block& w, const Block& x, const Block& next_x) {
  return dot_unsigned(dot_unsigned(sums, low_nibbles(w), x), high_nibbles(w), next_x);
}
struct Signed {
  Block bytes;
  SHORT explicit Signed(const Block& w) : bytes(w) {}
  SHORT Ints dot(Ints sums, const Block& x) const {
    for (int64_t i = 0; i < BLOCK; ++i)
      sums[i / 4] += static_cast<int8_t>(bytes.bytes[i]) * static_cast<int8_t>(x.bytes[i]);
    return sums;
  }
};
SHORT Vector pick(const float* from, const int32_t* which) {
  Vector result;
  for (int64_t i = 0; i < WIDE; ++i) result[i] = from[which[i]];
  return result;
}
#endif

// For each block the group of each of its lanes, counted from the group of its first lane.
template <int32_t FORMAT>
void number_lanes(const Call& c, Buffer<int32_t>& numbers) {
  const int64_t blocks = padded(c.depth, BLOCK_DEPTH<FORMAT>) / BLOCK_DEPTH<FORMAT>;
  int32_t* to = numbers.at_least(blocks * WIDE);
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t l = 0; l < WIDE; ++l) {
      const int64_t first = b * BLOCK_DEPTH<FORMAT>, k = first + l * LANE_DEPTH<FORMAT>;
      to[b * WIDE + l] = std::min(k, c.depth - 1) / c.group_size - first / c.group_size;
    }
}

// SPLIT: lanes of a block have several groups; else groups are whole blocks.
template <int32_t FORMAT, bool SPLIT, int64_t M>
void multiply_integers(const Task& t) {
  constexpr int64_t N = weight_rows(M, true), DEPTH = BLOCK_DEPTH<FORMAT>;
  const Call& c = t.c;
  const int64_t groups = c.groups(), line = c.line(), of_scales = t.x_groups;
  const auto* const x = static_cast<const int8_t*>(t.x);
  const uint8_t* rows[N];
  thread_local Buffer<float> buffer;
  float* const factors = buffer.at_least(N * M * of_scales + WIDE);
  Vector totals[N][M];  // less what zero points and offsets add to the sums
  for (int64_t j = 0; j < N; ++j) {
    const int64_t at = std::min(j, t.some - 1);
    rows[j] = c.weight + (t.row + at) * line;
    const float* const scales = t.scales + at * of_scales;
    const float offset = FORMAT == INT8 ? OFFSET : 0;
    const auto* const zeros = static_cast<const uint8_t*>(c.zeros);
    const int64_t of_zeros = (t.row + at) * groups;
    Vector shift[M] = {};
    for (int64_t g = 0; g < groups; g += WIDE) {
      Vector zero = all(FORMAT == INT4 ? 8.f : offset);
      if (zeros) zero = read_bytes<FORMAT == INT8>(zeros + of_zeros + g, groups - g) + offset;
      const Vector scale = read(scales + g), both = scale * zero;
      for (int64_t i = 0; i < M; ++i) {
        write(factors + (j * M + i) * of_scales + g, scale * read(t.x_scales + i * of_scales + g));
        shift[i] = fused(both, read(t.x_sums + i * of_scales + g), shift[i]);
      }
    }
    for (int64_t i = 0; i < M; ++i) totals[j][i] = -shift[i];
  }
  Ints sums[N][M];
  const auto clear = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < N; ++j)
#pragma GCC unroll 4
      for (int64_t i = 0; i < M; ++i) sums[j][i] = Ints{};
  };
  const auto add_block = [&](const uint8_t* const (&from)[N], const int8_t* of_x) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < N; ++j) {
      const Block bytes = load_block(from[j]);
      if constexpr (FORMAT == INT4) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < M; ++i) {
          const int8_t* const own = of_x + i * t.x_line;
          sums[j][i] = dot_nibbles(sums[j][i], bytes, load_block(own), load_block(own + BLOCK));
        }
      } else {
        const Signed w(bytes);
#pragma GCC unroll 4
        for (int64_t i = 0; i < M; ++i) sums[j][i] = w.dot(sums[j][i], load_block(of_x + i * t.x_line));
      }
    }
  };
  [[maybe_unused]] const bool is_halved = c.group_size * 2 == DEPTH;
  const auto factor_of = [&](const float* own, const int32_t* which) __attribute__((always_inline)) {
    if constexpr (!SPLIT) return all(*own);
#ifdef HALVES_SHARE_GROUPS
    if (is_halved) return pick_two(own);
#endif
    return pick(own, which);
  };
  const auto scale = [&](const float* of_group, const int32_t* which) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < N; ++j)
#pragma GCC unroll 4
      for (int64_t i = 0; i < M; ++i) {
        const Vector factor = factor_of(of_group + (j * M + i) * of_scales, which);
        totals[j][i] = fused(as_floats(sums[j][i]), factor, totals[j][i]);
      }
  };
  const int64_t whole = c.depth / DEPTH;  // blocks
  const int64_t of_group = SPLIT ? 1 : std::max<int64_t>(1, std::min(c.group_size, c.depth) / DEPTH);
  int64_t group = 0;
  for (int64_t b = 0; b < whole;) {
    const int64_t end = std::min(whole, b + of_group), begin = b;
    if (SPLIT) group = b * DEPTH / c.group_size;
    clear();
    for (; b < end; ++b) {
      if (b * BLOCK % LINE == 0) ask_for(rows, b * BLOCK + t.ahead);
      const uint8_t* from[N];
#pragma GCC unroll 4
      for (int64_t j = 0; j < N; ++j) from[j] = rows[j] + b * BLOCK;
      add_block(from, x + b * DEPTH);
    }
    scale(factors + group++, t.lane_groups + begin * WIDE);
  }
  if (whole * DEPTH < c.depth) {
    uint8_t rest[N][BLOCK] = {};
    const uint8_t* from[N];
    for (int64_t j = 0; j < N; ++j) {
      std::memcpy(rest[j], rows[j] + whole * BLOCK, line - whole * BLOCK);
      from[j] = rest[j];
    }
    clear();
    add_block(from, x + whole * DEPTH);
    scale(factors + whole * DEPTH / c.group_size, t.lane_groups + whole * WIDE);
  }
  write_sums(t, totals);
}

// Groups of any size: a row of the weight is dequantized element by element.
void multiply_plain(const Task& t, int64_t count) {
  const Call& c = t.c;
  thread_local Buffer<float> buffer;
  float* const plain = buffer.at_least(c.padded_depth());
  const auto* const x = static_cast<const float*>(t.x);
  for (int64_t j = 0; j < t.some; ++j) {
    const uint8_t* const row = c.weight + (t.row + j) * c.line();
    for (int64_t g = 0, k = 0; g < c.groups(); ++g) {
      const float scale = t.scales[j * t.x_groups + g], zero = zero_point(c, t.row + j, g);
      for (const int64_t end = std::min(c.depth, k + c.group_size); k < end; ++k)
        plain[k] = element(c, row, k, zero) * scale;
    }
    std::fill(plain + c.depth, plain + c.padded_depth(), 0.f);
    for (int64_t i = 0; i < count; ++i) {
      Vector sum{};
      for (int64_t k = 0; k < c.padded_depth(); k += WIDE)
        sum = fused(read(plain + k), read(x + i * t.x_line + k), sum);
      t.sums[i * WIDE + j] = total(sum);
    }
  }
}

template <int64_t COUNT>
void multiply_plain(const Task& t) { multiply_plain(t, COUNT); }

// A way to compute a call: how activations are laid out, and kernels by the number of rows.
enum Layout { FLOATS, PLAIN_FLOATS, PAIRS_OF_BF16, PLAIN_BF16, BYTES };
struct Way {
  Layout layout;
  int64_t weight_rows;  // with one row of x, the most that are computed at once
  std::array<Multiply, AT_ONCE> kernels;
  std::array<int64_t, AT_ONCE> heights;  // rows of the weight of each kernel
};

constexpr std::array<int64_t, AT_ONCE> heights(bool is_integer) {
  return {weight_rows(1, is_integer), weight_rows(2, is_integer), weight_rows(3, is_integer),
          weight_rows(4, is_integer)};
}

template <int32_t F>
constexpr Way BY_FLOATS{FLOATS, weight_rows(1, false),
                        {multiply_floats<F, 1>, multiply_floats<F, 2>, multiply_floats<F, 3>, multiply_floats<F, 4>},
                        heights(false)};
#if BF16_PRODUCTS
template <int32_t F>
constexpr Way BY_PAIRS{PAIRS_OF_BF16, weight_rows(1, false),
                       {multiply_pairs<F, 1>, multiply_pairs<F, 2>, multiply_pairs<F, 3>, multiply_pairs<F, 4>},
                       heights(false)};
#endif
template <int32_t F, bool S>
constexpr Way BY_INTEGERS{
    BYTES, weight_rows(1, true),
    {multiply_integers<F, S, 1>, multiply_integers<F, S, 2>, multiply_integers<F, S, 3>, multiply_integers<F, S, 4>},
    heights(true)};
constexpr Way ANY_GROUP{PLAIN_FLOATS, 4,
                        {multiply_plain<1>, multiply_plain<2>, multiply_plain<3>, multiply_plain<4>},
                        {4, 4, 4, 4}};

bool has_groups_of(const Call& c, int64_t unit) { return c.group_size % unit == 0 || c.groups() == 1; }

template <int32_t FORMAT>
const Way& integer_way(const Call& c) {
  if (has_groups_of(c, BLOCK_DEPTH<FORMAT>)) return BY_INTEGERS<FORMAT, false>;
  if (c.group_size % LANE_DEPTH<FORMAT> == 0) return BY_INTEGERS<FORMAT, true>;
  return ANY_GROUP;
}

const Way& way_of(const Call& c) {
  if (c.compute == IN_INT8) return c.format == INT4 ? integer_way<INT4>(c) : integer_way<INT8>(c);
#if BF16_PRODUCTS
  if (c.compute == IN_BFLOAT16 && is_nibbles(c.format) && has_groups_of(c, PAIRS))
    return c.format == INT4 ? BY_PAIRS<INT4> : BY_PAIRS<NF4>;
#endif
  if (!has_groups_of(c, WIDE)) return ANY_GROUP;
  constexpr const Way* WAYS[] = {&BY_FLOATS<INT8>, &BY_FLOATS<INT4>, &BY_FLOATS<NF4>, &BY_FLOATS<FP8>};
  return *WAYS[c.format];
}

// Activations of some rows of x.
struct Rows {
  Layout layout;
  int64_t line, groups;
  uint8_t* numbers;
  float *scales, *sums;

  int64_t size() const { return layout == BYTES ? 1 : layout == PAIRS_OF_BF16 || layout == PLAIN_BF16 ? 2 : 4; }
};

void lay_out_row(const Call& c, const Rows& rows, int64_t row, int64_t at) {
  thread_local Buffer<float> buffer;
  thread_local Buffer<int8_t> bytes;
  float* const plain = buffer.at_least(rows.line);
  void* const to = rows.numbers + at * rows.line * rows.size();
  read_row(c, row, plain);
  const Quantized own{static_cast<int8_t*>(to), rows.scales + at * rows.groups, rows.sums + at * rows.groups};
  if (rows.layout == BYTES) return quantize(c, plain, bytes.at_least(rows.line), own);
  if (c.compute == IN_INT8) {
    int8_t* const steps = bytes.at_least(2 * rows.line);
    quantize(c, plain, steps, {steps + rows.line, own.scales, own.sums});
    for (int64_t k = 0; k < c.depth; ++k) plain[k] = steps[k];
    if (rows.layout == PLAIN_FLOATS)
      for (int64_t k = 0; k < c.depth; ++k) plain[k] *= own.scales[k / c.group_size];
  }
  switch (rows.layout) {
    case FLOATS: return arrange_floats(c.format, plain, rows.line, static_cast<float*>(to));
#if BF16_PRODUCTS
    case PAIRS_OF_BF16: return arrange_pairs(plain, rows.line, static_cast<c10::BFloat16*>(to));
#endif
    case PLAIN_BF16:
      for (int64_t k = 0; k < rows.line; k += WIDE)
        write(static_cast<c10::BFloat16*>(to) + k, read(plain + k));
      return;
    default: std::memcpy(to, plain, rows.line * sizeof(float));
  }
}

// Asks for scales and zero points of rows of the weight that are computed `later` rows after these.
void ask_for_scales(const Call& c, int64_t row, int64_t rows, int64_t later) {
  const int64_t groups = c.groups(), size = c.scale_number == FLOAT ? 4 : 2;
  const auto* const scales = static_cast<const char*>(c.scales) + (row + later) * groups * size;
  for (int64_t at = 0; at < rows * groups * size; at += LINE) __builtin_prefetch(scales + at);
  if (!c.zeros) return;
  const auto* const zeros = static_cast<const char*>(c.zeros) + (row + later) * groups;
  for (int64_t at = 0; at < rows * groups; at += LINE) __builtin_prefetch(zeros + at);
}

// `many` rows from `row` on, by kernels of few rows: each part of the weight is read once.
void multiply_few(const Call& c, const Way& way, const Rows& x, int64_t row, int64_t many,
                  const int32_t* lane_groups) {
  const int64_t most = std::min(AT_ONCE, many), height = way.weight_rows;
  const int64_t tiles = (c.columns + height - 1) / height, line = c.line();
  const int64_t tile_bytes = std::max<int64_t>(1, height * line), ahead = padded(AHEAD, tile_bytes);
#pragma omp parallel
  {
    thread_local Buffer<float> scales;
    float* const factors = scales.at_least(height * x.groups);
    alignas(64) float sums[AT_ONCE * WIDE] = {};
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = tile * height, some = std::min(height, c.columns - first);
      for (int64_t j = 0; j < some; ++j) read_scales(c, first + j, factors + j * x.groups);
      ask_for_scales(c, first, height, ahead / tile_bytes * height);
      const int64_t parts = (many + most - 1) / most;
      for (int64_t part = 0; part < parts; ++part) {  // as even as may be
        const int64_t from = part * many / parts, count = (part + 1) * many / parts - from;
        const int64_t tall = way.heights[count - 1];
        for (int64_t j = 0; j < some; j += tall) {
          const int64_t wide = std::min(tall, some - j), n = first + j;
          way.kernels[count - 1]({c, x.numbers + from * x.line * x.size(), x.line, x.scales + from * x.groups,
                                  x.sums + from * x.groups, x.groups, lane_groups, n, wide,
                                  factors + j * x.groups, sums, part ? 0 : ahead});
          for (int64_t i = 0; i < count; ++i) {
            Vector value = read(sums + i * WIDE);
            if (c.bias) value += read_number(c.bias, c.bias_number, n, wide);
            write_number(c.result, c.x_number, (row + from + i) * c.columns + n, value, wide);
          }
        }
      }
    }
  }
}

// ---- Many rows ----

constexpr int64_t COLUMNS = 64;  // of a block of the dequantized weight
constexpr int64_t DEEP = 512;    // its elements along K
constexpr int64_t TALL = 1024;   // rows of x whose sums are in the second cache

// Calls `work` for runs of elements that share a group, from `k` to `end`.
template <typename Work>
SHORT void by_groups(const Call& c, int64_t k, int64_t end, Work work) {
  while (k < end) {
    const int64_t group = k / c.group_size, stop = std::min(end, (group + 1) * c.group_size);
    work(group, k, stop);
    k = stop;
  }
}

// Elements of a row of the weight from `k` on; those of the last bytes of a row are copied first.
template <int64_t BYTES>
struct Source {
  uint8_t rest[BYTES];
  const uint8_t* from;
  SHORT Source(const Call& c, int64_t row, int64_t at) : from(c.weight + row * c.line() + at) {
    if (const int64_t left = c.line() - at; left < BYTES) {
      std::memset(rest, 0, BYTES);
      std::memcpy(rest, from, left);
      from = rest;
    }
  }
};

// Dequantizes `some` columns from `column` on, K from `k` to `end`: panels of WIDE columns, each in
// lines of WIDE.
template <int32_t FORMAT>
void fill_floats(const Call& c, const float* scales, int64_t of_scales, int64_t column, int64_t some,
                 int64_t begin, int64_t end, float* block) {
  constexpr int64_t BYTES = Unpacker<FORMAT>::BYTES;
  for (int64_t n = 0; n < some; n += WIDE) {
    const int64_t count = std::min(WIDE, some - n);
    float* const panel = block + n * DEEP;
    by_groups(c, begin, end, [&](int64_t group, int64_t k, int64_t stop) {
      Unpacker<FORMAT> unpack[WIDE];
      for (int64_t j = 0; j < count; ++j)
        unpack[j].begin(scales[(n + j) * of_scales + group], zero_point(c, column + n + j, group));
      for (; k < stop; k += WIDE) {
        Vector rows[WIDE] = {};
        for (int64_t j = 0; j < count; ++j) {
          const Source<BYTES> source(c, column + n + j, k / WIDE * BYTES);
          rows[j] = unpack[j](source.from);
        }
        exchange(rows);
        for (int64_t i = 0; i < WIDE; ++i) write(panel + (k - begin + i) * WIDE, rows[i]);
      }
    });
  }
}

template <int64_t COUNT>
void add_floats(const float* x, int64_t line, const float* block, int64_t depth, float* sums, bool add) {
  constexpr int64_t PARTS = WIDE == 16 ? 4 : 2, WIDTH = PARTS * WIDE;
  alignas(64) float totals[COUNT * WIDTH];
  for (int64_t n = 0; n < COLUMNS; n += WIDTH) {
    const float* weights[PARTS];
    for (int64_t j = 0; j < PARTS; ++j) weights[j] = block + (n + j * WIDE) * DEEP;
    add_up<COUNT, PARTS>(x, line, weights, WIDE, depth, totals, WIDTH);
    for (int64_t i = 0; i < COUNT; ++i)
      for (int64_t j = 0; j < WIDTH; j += WIDE) {
        Vector sum = read(totals + i * WIDTH + j);
        if (add) sum += read(sums + i * COLUMNS + n + j);
        write(sums + i * COLUMNS + n + j, sum);
      }
  }
}

using AddFloats = decltype(&add_floats<1>);
constexpr AddFloats ADD_FLOATS[] = {add_floats<1>, add_floats<2>, add_floats<3>,
                                    add_floats<4>, add_floats<5>, add_floats<6>};

void multiply_block(const float* x, int64_t line, const float* block, int64_t rows, int64_t depth,
                    float* sums, bool add) {
  constexpr int64_t MOST_ROWS = 6;
  const int64_t parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = part * rows / parts, count = (part + 1) * rows / parts - from;
    ADD_FLOATS[count - 1](x + from * line, line, block, depth, sums + from * COLUMNS, add);
  }
}

#if BF16_PRODUCTS
// The same in bf16, in pairs of K: [K / 2, 64, 2], as torch's micro-kernel reads it. PLAIN: without
// scales, integers that bf16 has exactly.
template <int32_t FORMAT, bool PLAIN>
void fill_pairs(const Call& c, const float* scales, int64_t of_scales, int64_t column, int64_t some,
                int64_t begin, int64_t end, c10::BFloat16* block) {
  for (int64_t n = 0; n < COLUMNS; n += WIDE) {
    const int64_t count = std::clamp<int64_t>(some - n, 0, WIDE);
    by_groups(c, begin, end, [&](int64_t group, int64_t k, int64_t stop) {
      __m512i tables[WIDE];
      Unpacker<FORMAT> unpack[WIDE];
      for (int64_t j = 0; j < count; ++j) {
        const float scale = PLAIN ? 1 : scales[(n + j) * of_scales + group];
        const float zero = zero_point(c, column + n + j, group);
        if constexpr (is_nibbles(FORMAT))
          tables[j] = nibble_table(FORMAT, scale, zero);
        else
          unpack[j].begin(scale, zero);
      }
      for (; k < stop; k += PAIRS) {
        Vector rows[WIDE] = {};
        for (int64_t j = 0; j < count; ++j) {
          if constexpr (is_nibbles(FORMAT)) {
            const Source<PAIRS / 2> source(c, column + n + j, k / 2);
            rows[j] = (Vector)unpack_pairs(source.from, tables[j]);
          } else {
            const Source<PAIRS> source(c, column + n + j, k);
            const Vector low = unpack[j](source.from), high = unpack[j](source.from + WIDE);
            rows[j] = (Vector)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
          }
        }
        exchange(rows);
        float* const to = reinterpret_cast<float*>(block) + (k - begin) / 2 * COLUMNS + n;
        for (int64_t i = 0; i < WIDE; ++i) write(to + i * COLUMNS, rows[i]);
      }
    });
  }
}

void multiply_block(const c10::BFloat16* x, int64_t line, const c10::BFloat16* block, int64_t rows,
                    int64_t depth, float* sums, bool add) {
  constexpr int64_t HEIGHT = 128;
  for (int64_t i = 0; i < rows; i += HEIGHT)
    at::native::cpublas::brgemm(std::min(HEIGHT, rows - i), COLUMNS, depth, line, COLUMNS, COLUMNS, add,
                                x + i * line, block, sums + i * COLUMNS, true);
}
#endif

// Writes sums of a tile of 64 columns, with the bias.
void finish_tile(const Call& c, const float* sums, int64_t row, int64_t many, int64_t column) {
  const int64_t some = std::min(COLUMNS, c.columns - column);
  for (int64_t i = 0; i < many; ++i)
    for (int64_t j = 0; j < some; j += WIDE) {
      const int64_t count = std::min(WIDE, some - j);
      Vector value = read(sums + i * COLUMNS + j);
      if (c.bias) value += read_number(c.bias, c.bias_number, column + j, count);
      write_number(c.result, c.x_number, (row + i) * c.columns + column + j, value, count);
    }
}

template <typename T>
using Fill = void (*)(const Call&, const float*, int64_t, int64_t, int64_t, int64_t, int64_t, T*);

// Blocks of tiles of 64 columns that are multiplied by rows of x while these are in the second cache.
constexpr int64_t MOST_TILES = 4, WIDE_ROWS = 192;

template <typename T>
void multiply_many(const Call& c, Fill<T> fill, const Rows& x, int64_t row, int64_t many, int64_t unit) {
  const int64_t tiles = (c.columns + COLUMNS - 1) / COLUMNS;
  const int64_t most = many < WIDE_ROWS ? 1 : MOST_TILES, tasks = (tiles + most - 1) / most;
  constexpr int64_t BLOCK_SIZE = COLUMNS * DEEP, HEIGHT = 128;
#pragma omp parallel
  {
    thread_local Buffer<float> scales, totals;
    thread_local Buffer<T> blocks;
    float* const factors = scales.at_least(most * COLUMNS * x.groups);
    float* const sums = totals.at_least(most * many * COLUMNS);
    T* const block = blocks.at_least(most * BLOCK_SIZE);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t first = task * tiles / tasks, count = (task + 1) * tiles / tasks - first;
      const int64_t start = first * COLUMNS, columns = std::min(count * COLUMNS, c.columns - start);
      for (int64_t j = 0; j < columns; ++j) read_scales(c, start + j, factors + j * x.groups);
      if (c.depth == 0) std::fill_n(sums, count * many * COLUMNS, 0.f);
      for (int64_t k = 0; k < c.depth; k += DEEP) {
        const int64_t end = std::min(c.depth, k + DEEP), depth = padded(end - k, unit);
        for (int64_t t = 0; t < count; ++t)
          fill(c, factors + t * COLUMNS * x.groups, x.groups, start + t * COLUMNS,
               std::min(COLUMNS, columns - t * COLUMNS), k, end, block + t * BLOCK_SIZE);
        for (int64_t i = 0; i < many; i += HEIGHT)
          for (int64_t t = 0; t < count; ++t)
            multiply_block(reinterpret_cast<const T*>(x.numbers) + i * x.line + k, x.line,
                           block + t * BLOCK_SIZE, std::min(HEIGHT, many - i), depth,
                           sums + (t * many + i) * COLUMNS, k > 0);
      }
      for (int64_t t = 0; t < count; ++t)
        finish_tile(c, sums + t * many * COLUMNS, row, many, start + t * COLUMNS);
    }
#if BF16_PRODUCTS
    if constexpr (sizeof(T) == 2) at::native::cpublas::brgemm_release(true);
#endif
  }
}

#if BF16_PRODUCTS
// Integers of quantized activations and of the weight. bf16 has both exactly, and fp32 their sums over
// at most DEEP elements of a group, 512 * 127 * 255 < 2^24, which scales multiply.
void multiply_many_integers(const Call& c, Fill<c10::BFloat16> fill, const Rows& x, int64_t row, int64_t many) {
  const int64_t tiles = (c.columns + COLUMNS - 1) / COLUMNS;
#pragma omp parallel
  {
    thread_local Buffer<float> scales, totals, parts;
    thread_local Buffer<c10::BFloat16> blocks;
    float* const factors = scales.at_least(COLUMNS * x.groups);
    float *const sums = totals.at_least(many * COLUMNS), *const part = parts.at_least(many * COLUMNS);
    c10::BFloat16* const block = blocks.at_least(COLUMNS * DEEP);
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t column = tile * COLUMNS, some = std::min(COLUMNS, c.columns - column);
      for (int64_t j = 0; j < some; ++j) read_scales(c, column + j, factors + j * x.groups);
      std::fill_n(sums, many * COLUMNS, 0.f);
      for (int64_t k = 0; k < c.depth; k += DEEP) {
        const int64_t last = std::min(c.depth, k + DEEP);
        fill(c, factors, x.groups, column, some, k, last, block);
        by_groups(c, k, last, [&](int64_t group, int64_t begin, int64_t end) {
          multiply_block(reinterpret_cast<const c10::BFloat16*>(x.numbers) + begin, x.line,
                         block + (begin - k) * COLUMNS, many, padded(end - begin, PAIRS), part, false);
          alignas(64) float own[COLUMNS] = {};
          for (int64_t j = 0; j < some; ++j) own[j] = factors[j * x.groups + group];
          for (int64_t i = 0; i < many; ++i) {
            const Vector scale = all(x.scales[i * x.groups + group]);
#pragma GCC unroll 4
            for (int64_t j = 0; j < COLUMNS; j += WIDE) {
              float* const to = sums + i * COLUMNS + j;
              write(to, fused(read(part + i * COLUMNS + j) * scale, read(own + j), read(to)));
            }
          }
        });
      }
      finish_tile(c, sums, row, many, column);
    }
    at::native::cpublas::brgemm_release(true);
  }
}
#endif

// Rows from which dequantized blocks are faster than kernels of few rows: measured with one thread on
// a Xeon with AMX and a weight of [2048, 4096]. The last are for int8 and int4.
constexpr int64_t MANY_FLOATS = 28, MANY_PAIRS = 8, MANY_INTEGERS[] = {48, 20};

// How many rows are computed by dequantized blocks: lays activations out and multiplies.
struct Blocks {
  Layout layout;
  void (*multiply)(const Call&, const Rows&, int64_t, int64_t);
};

template <int32_t FORMAT>
constexpr Blocks IN_FLOATS{FLOATS, [](const Call& c, const Rows& x, int64_t row, int64_t many) {
                             multiply_many<float>(c, fill_floats<FORMAT>, x, row, many, WIDE);
                           }};
#if BF16_PRODUCTS
template <int32_t FORMAT>
constexpr Blocks IN_PAIRS{is_nibbles(FORMAT) ? PAIRS_OF_BF16 : PLAIN_BF16,
                          [](const Call& c, const Rows& x, int64_t row, int64_t many) {
                            multiply_many<c10::BFloat16>(c, fill_pairs<FORMAT, false>, x, row, many, PAIRS);
                          }};
template <int32_t FORMAT>
constexpr Blocks IN_INTEGERS{IN_PAIRS<FORMAT>.layout, [](const Call& c, const Rows& x, int64_t row, int64_t many) {
                               multiply_many_integers(c, fill_pairs<FORMAT, true>, x, row, many);
                             }};
#endif

// The blocks for a call with many rows, null for kernels of few rows.
const Blocks* blocks_of(const Call& c) {
#if BF16_PRODUCTS
  if (c.compute == IN_INT8 && c.rows >= MANY_INTEGERS[c.format] && has_groups_of(c, PAIRS) && has_micro_kernel<c10::BFloat16>)
    return c.format == INT4 ? &IN_INTEGERS<INT4> : &IN_INTEGERS<INT8>;
#endif
  if (c.compute == IN_INT8) return nullptr;
#if BF16_PRODUCTS
  constexpr const Blocks* PAIRED[] = {&IN_PAIRS<INT8>, &IN_PAIRS<INT4>, &IN_PAIRS<NF4>, &IN_PAIRS<FP8>};
  if (c.compute == IN_BFLOAT16 && has_groups_of(c, PAIRS) && has_micro_kernel<c10::BFloat16>)
    return c.rows < MANY_PAIRS ? nullptr : PAIRED[c.format];
#endif
  constexpr const Blocks* SINGLE[] = {&IN_FLOATS<INT8>, &IN_FLOATS<INT4>, &IN_FLOATS<NF4>, &IN_FLOATS<FP8>};
  return c.rows < MANY_FLOATS || !has_groups_of(c, WIDE) ? nullptr : SINGLE[c.format];
}

void multiply(const Call& c) {
  if (c.rows == 0 || c.columns == 0) return;
  const Way& way = way_of(c);
  const Blocks* const blocks = blocks_of(c);
  thread_local Buffer<uint8_t> numbers;
  thread_local Buffer<float> scales;
  thread_local Buffer<int32_t> lane_groups;
  Rows x{blocks ? blocks->layout : way.layout, c.padded_depth(), padded(c.groups(), WIDE) + WIDE, nullptr, nullptr, nullptr};
  const int64_t bytes = std::max<int64_t>(1, x.line * x.size());
  const int64_t most = std::min({c.rows, TALL, std::max<int64_t>(64, ROOM / bytes)});
  x.numbers = numbers.at_least(most * bytes + UNIT);
  x.scales = scales.at_least(2 * most * x.groups), x.sums = x.scales + most * x.groups;
  if (c.compute == IN_INT8) c.format == INT4 ? number_lanes<INT4>(c, lane_groups) : number_lanes<INT8>(c, lane_groups);
  for (int64_t row = 0; row < c.rows; row += most) {
    const int64_t many = std::min(most, c.rows - row);
#pragma omp parallel for schedule(static) if (many > 1)
    for (int64_t i = 0; i < many; ++i) lay_out_row(c, x, row + i, i);
    if (blocks)
      blocks->multiply(c, x, row, many);
    else
      multiply_few(c, way, x, row, many, lane_groups.numbers.data());
  }
}

}  // namespace
}  // namespace ipex::weight_only

// `numbers`: M, K, N, group size, the numbers of the dtypes of x, scales and bias, of the format and of
// the compute dtype. `zeros`, `order` and `bias` may be null.
extern "C" void weight_only_linear(const int64_t* numbers, const void* x, const void* weight,
                                   const void* scales, const void* zeros, const void* order,
                                   const void* bias, void* result) {
  const auto number = [&](int i) { return static_cast<int32_t>(numbers[i]); };
  ipex::weight_only::multiply({numbers[0], numbers[1], numbers[2], numbers[3], number(4), number(5),
                               number(6), number(7), number(8), x, static_cast<const uint8_t*>(weight),
                               scales, zeros, static_cast<const int32_t*>(order), bias, result});
}
#if WOQ_VNNI
#pragma GCC pop_options
#endif

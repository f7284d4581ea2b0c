// Convolutions of 3 x 3 pixels by Winograd's way (Lavin and Gray, "Fast Algorithms for Convolutional
// Neural Networks", 2015): by F(2 x 2, 3 x 3) in fp32, where four pixels of the result take 16
// products of each pair of channels, not 36; by F(4 x 4, 3 x 3) in bf16, where 16 pixels take 36, not
// 144, and what that loses of fp32's digits is far behind bf16's. Both multiply in fp32. Some tiles
// are transformed together, so that they fit the second cache where channels are few, and multiplied
// by panels of 16 channels of the weight.
// Follows `blocked.cpp`, whose words these are, and `short_attention.cpp` for the sizes of panels.

namespace ipex {
namespace {

constexpr int64_t CACHED = 192 << 10;   // bytes of transformed tiles, about
constexpr int64_t LEAST_TILES = 18, MOST_TILES = 30;  // of a block, in whole groups

// As `ipex_inductor.templates.cpu.winograd` fills it in. Channels, and those made, are whole panels.
struct Plane {
  int64_t batch, channels, height, width, made, padding[2], out[2];
};

template <typename T>
struct Convolution {
  static constexpr int64_t TILE = sizeof(T) == 2 ? 4 : 2;  // pixels of its side
  static constexpr int64_t SIDE = TILE + 2, SPOTS = SIDE * SIDE;  // of the tile transformed
  Plane plane;
  const T* x;
  const float* weight;  // transformed, in panels
  const T *bias, *other;
  T* result;
  int32_t unary;

  int64_t across() const { return (plane.out[1] + TILE - 1) / TILE; }
  int64_t down() const { return (plane.out[0] + TILE - 1) / TILE; }
  int64_t tiles() const { return plane.batch * down() * across(); }
};

// Where a tile of the result begins.
struct Corner {
  int64_t image, row, column;

  template <typename T>
  Corner(const Convolution<T>& c, int64_t tile)
      : image(tile / (c.down() * c.across())), row(tile / c.across() % c.down() * c.TILE),
        column(tile % c.across() * c.TILE) {}
};

// What the transforms of images and of sums do along one axis, of tiles of two and of four.
SHORT void spread(const Vector (&d)[4], Vector (&to)[4]) {
  to[0] = d[0] - d[2];
  to[1] = d[1] + d[2];
  to[2] = d[2] - d[1];
  to[3] = d[1] - d[3];
}

SHORT void spread(const Vector (&d)[6], Vector (&to)[6]) {
  const Vector even = fused(all(-4), d[2], d[4]), odd = fused(all(-4), d[1], d[3]);
  const Vector near = d[4] - d[2], far = 2.f * (d[3] - d[1]);
  to[0] = fused(all(4), d[0], fused(all(-5), d[2], d[4]));
  to[1] = even + odd;
  to[2] = even - odd;
  to[3] = near + far;
  to[4] = near - far;
  to[5] = fused(all(4), d[1], fused(all(-5), d[3], d[5]));
}

SHORT void gather(const Vector (&m)[4], Vector (&to)[2]) {
  to[0] = m[0] + m[1] + m[2];
  to[1] = m[1] - m[2] - m[3];
}

SHORT void gather(const Vector (&m)[6], Vector (&to)[4]) {
  const Vector even = m[1] + m[2], odd = m[1] - m[2], more = m[3] + m[4], less = m[3] - m[4];
  to[0] = m[0] + even + more;
  to[1] = fused(all(2), less, odd);
  to[2] = fused(all(4), more, even);
  to[3] = fused(all(8), less, odd) + m[5];
}

// Numbers of the window from a line of the weight transformed along one axis.
template <int64_t SIDE, typename Spot>
Vector undone(int64_t i, Spot spot) {
  if constexpr (SIDE == 4) return i == 1 ? spot(1) - spot(2) : spot(i == 0 ? 0 : 3);
  return i == 0 ? 4.f * spot(0) : i == 1 ? 3.f * (spot(2) - spot(1)) : spot(5);
}

// The pixels that a tile reads, zeros beside the image.
template <typename T, int64_t SIDE>
void pixels(const Convolution<T>& c, const Corner& at, const T* zeros,
            const T* (&found)[SIDE][SIDE]) {
  const Plane& p = c.plane;
  for (int64_t i = 0; i < SIDE; ++i)
    for (int64_t j = 0; j < SIDE; ++j) {
      const int64_t row = at.row + i - p.padding[0], column = at.column + j - p.padding[1];
      const bool inside = row >= 0 && row < p.height && column >= 0 && column < p.width;
      found[i][j] =
          inside ? c.x + ((at.image * p.height + row) * p.width + column) * p.channels : zeros;
    }
}

// Tiles of a block, in groups that are multiplied together: as even as may be.
struct Groups {
  int64_t tiles, count;

  explicit Groups(int64_t tiles) : tiles(tiles), count((tiles + TALL - 1) / TALL) {}
  int64_t begin(int64_t group) const { return group * tiles / count; }
};

// Numbers from one spot to the next; seldom a power of two, whose lines would share a place in caches.
inline int64_t apart(int64_t tiles, int64_t channels) { return tiles * channels + 16; }

// `to` [SPOTS, groups, channels / WIDE, tiles of a group, WIDE] of tiles from `tile` on.
template <typename T>
void transform(const Convolution<T>& c, int64_t tile, const Groups& groups, const T* zeros,
               float* to) {
  constexpr int64_t SIDE = Convolution<T>::SIDE;
  const int64_t channels = c.plane.channels, line = apart(groups.tiles, channels);
  for (int64_t group = 0; group < groups.count; ++group) {
    const int64_t begin = groups.begin(group), size = groups.begin(group + 1) - begin;
    for (int64_t t = 0; t < size; ++t) {
      const T* from[SIDE][SIDE];
      pixels(c, Corner(c, tile + begin + t), zeros, from);
      float* put = to + begin * channels + t * WIDE;
      for (int64_t k = 0; k < channels; k += WIDE, put += size * WIDE) {
        Vector rows[SIDE][SIDE];
#pragma GCC unroll 6
        for (int64_t i = 0; i < SIDE; ++i) {
          Vector d[SIDE];
#pragma GCC unroll 6
          for (int64_t j = 0; j < SIDE; ++j) d[j] = read(from[i][j] + k);
          spread(d, rows[i]);
        }
#pragma GCC unroll 6
        for (int64_t j = 0; j < SIDE; ++j) {
          Vector column[SIDE], spots[SIDE];
#pragma GCC unroll 6
          for (int64_t i = 0; i < SIDE; ++i) column[i] = rows[i][j];
          spread(column, spots);
#pragma GCC unroll 6
          for (int64_t i = 0; i < SIDE; ++i) write(put + (i * SIDE + j) * line, spots[i]);
        }
      }
    }
  }
}

// `sums` [SIZE, PANEL] = a group of tiles, transformed, by a panel [channels, PANEL]. Meanwhile of
// what lies `ahead` so many lines a vector of channels are brought nearer.
template <int64_t SIZE>
void products(const float* tiles, const float* panel, int64_t channels, const float* ahead,
              int64_t lines, float* sums) {
  constexpr int64_t PARTS = PANEL / WIDE;
  Vector totals[SIZE][PARTS];
#pragma GCC unroll 6
  for (int64_t i = 0; i < SIZE; ++i)
#pragma GCC unroll 4
    for (int64_t j = 0; j < PARTS; ++j) totals[i][j] = Vector{};
  for (int64_t k = 0; k < channels; k += WIDE, tiles += SIZE * WIDE, panel += WIDE * PANEL) {
    for (int64_t n = 0; n < lines; ++n, ahead += PANEL) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 16
    for (int64_t n = 0; n < WIDE; ++n) {
      Vector weight[PARTS];
#pragma GCC unroll 4
      for (int64_t j = 0; j < PARTS; ++j) weight[j] = read(panel + n * PANEL + j * WIDE);
#pragma GCC unroll 6
      for (int64_t i = 0; i < SIZE; ++i)
#pragma GCC unroll 4
        for (int64_t j = 0; j < PARTS; ++j)
          totals[i][j] = fused(all(tiles[i * WIDE + n]), weight[j], totals[i][j]);
    }
  }
#pragma GCC unroll 6
  for (int64_t i = 0; i < SIZE; ++i)
#pragma GCC unroll 4
    for (int64_t j = 0; j < PARTS; ++j) write(sums + i * PANEL + j * WIDE, totals[i][j]);
}

constexpr decltype(&products<1>) PRODUCTS[] = {products<1>, products<2>, products<3>,
                                               products<4>, products<5>, products<6>};

// The result of a tile and of channels of a panel, whose sums are in `made`: with what follows.
template <int32_t unary, typename T, int64_t COUNT>
void put(const Convolution<T>& c, const Corner& at, int64_t channel,
         const float (&made)[COUNT][PANEL]) {
  constexpr int64_t TILE = Convolution<T>::TILE;
  const Plane& p = c.plane;
  for (int64_t n = 0; n < PANEL; n += WIDE) {
    const Vector bias = c.bias ? read(c.bias + channel + n) : Vector{};
#pragma GCC unroll 4
    for (int64_t i = 0; i < TILE; ++i)
#pragma GCC unroll 4
      for (int64_t j = 0; j < TILE; ++j) {
        if (at.row + i >= p.out[0] || at.column + j >= p.out[1]) continue;
        const int64_t pixel = (at.image * p.out[0] + at.row + i) * p.out[1] + at.column + j;
        const int64_t place = pixel * p.made + channel + n;
        Vector value = read(made[i * TILE + j] + n) + bias;
        if (c.other) value += read(c.other + place);
        write(c.result + place, activated<unary>(value));
      }
  }
}

template <typename T, int64_t COUNT = Convolution<T>::TILE * Convolution<T>::TILE>
constexpr decltype(&put<NO_UNARY, T, COUNT>) PUT[] = {  // by their numbers
    put<NO_UNARY, T, COUNT>, put<RELU, T, COUNT>,    put<GELU, T, COUNT>, put<GELU_TANH, T, COUNT>,
    put<SILU, T, COUNT>,     put<SIGMOID, T, COUNT>, put<TANH, T, COUNT>,
};

// What a tile's sums make, from its place in `sums` [SPOTS, tiles, PANEL] on, a spot every `line`.
// False where one is infinite or no number: its neighbours in the tile may be so by it alone.
template <int64_t SIDE, int64_t COUNT>
bool combine(const float* sums, int64_t line, float (&made)[COUNT][PANEL]) {
  constexpr int64_t TILE = SIDE - 2;
  Vector nothing{};
#pragma GCC unroll 4
  for (int64_t n = 0; n < PANEL; n += WIDE) {
    Vector rows[SIDE][TILE];
#pragma GCC unroll 6
    for (int64_t i = 0; i < SIDE; ++i) {
      Vector m[SIDE];
#pragma GCC unroll 6
      for (int64_t j = 0; j < SIDE; ++j) m[j] = read(sums + (i * SIDE + j) * line + n);
      gather(m, rows[i]);
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < TILE; ++j) {
      Vector column[SIDE], pixels[TILE];
#pragma GCC unroll 6
      for (int64_t i = 0; i < SIDE; ++i) column[i] = rows[i][j];
      gather(column, pixels);
#pragma GCC unroll 4
      for (int64_t i = 0; i < TILE; ++i) {
        nothing = fused(pixels[i], Vector{}, nothing);
        write(made[i * TILE + j] + n, pixels[i]);
      }
    }
  }
  return total(nothing) == 0;
}

// The same sums one after the other, by the weight as it was before its transform.
template <typename T, int64_t COUNT>
void directly(const Convolution<T>& c, const Corner& at, const float* panel,
              float (&made)[COUNT][PANEL]) {
  constexpr int64_t TILE = Convolution<T>::TILE, SIDE = Convolution<T>::SIDE;
  const Plane& p = c.plane;
  const T* from[SIDE][SIDE];
  pixels<T, SIDE>(c, at, nullptr, from);
  for (int64_t unit = 0; unit < COUNT * PANEL; unit += WIDE) {
    const int64_t pixel = unit / PANEL, n = unit % PANEL;
    Vector sum{};
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t j = 0; j < 3; ++j) {
        const T* x = from[pixel / TILE + i][pixel % TILE + j];
        for (int64_t k = 0; x && k < p.channels; ++k) {
          const auto along = [&](int64_t a) {
            return undone<SIDE>(j, [&](int64_t b) {
              return read(panel + ((a * SIDE + b) * p.channels + k) * PANEL + n);
            });
          };
          sum += read(x + k, 1)[0] * undone<SIDE>(i, along);
        }
      }
    write(made[pixel] + n, sum);
  }
}

// `sums` [SPOTS, count, PANEL] of transformed tiles and a panel of the weight.
template <int64_t SPOTS>
void multiply(const Plane& p, const Groups& groups, const float* image, const float* weight,
              float* sums) {
  const int64_t lines = (WIDE + groups.count - 1) / groups.count;  // of the next spot's panel
  const int64_t of_panel = p.channels * PANEL;
  for (int64_t spot = 0; spot < SPOTS; ++spot) {
    const float* ahead = weight + of_panel;
    for (int64_t group = 0; group < groups.count; ++group, ahead += lines * of_panel / WIDE) {
      const int64_t begin = groups.begin(group), size = groups.begin(group + 1) - begin;
      PRODUCTS[size - 1](image + begin * p.channels, weight, p.channels, ahead, lines,
                         sums + begin * PANEL);
    }
    image += apart(groups.tiles, p.channels);
    weight += of_panel;
    sums += apart(groups.tiles, PANEL);
  }
}

template <typename T>
void convolve(const Convolution<T>& c) {
  constexpr int64_t SIDE = Convolution<T>::SIDE, SPOTS = Convolution<T>::SPOTS;
  const Plane& p = c.plane;
  const int64_t fit = CACHED / (SPOTS * static_cast<int64_t>(sizeof(float)) * p.channels);
  const int64_t most = std::clamp(fit / TALL * TALL, LEAST_TILES, MOST_TILES);
  const int64_t tiles = c.tiles(), blocks = (tiles + most - 1) / most;
  const int64_t panels = p.made / PANEL;
#pragma omp parallel
  {
    thread_local std::vector<float> room;  // grows to the largest that came, at most some megabytes
    const int64_t of_image = SPOTS * apart(most, p.channels), of_sums = SPOTS * apart(most, PANEL);
    const int64_t wanted = of_image + of_sums + p.channels;
    if (static_cast<int64_t>(room.size()) < wanted) room.resize(wanted);
    float *image = room.data(), *sums = image + of_image, *zeros = sums + of_sums;
    std::fill_n(zeros, p.channels, 0.f);
    int64_t at_hand = -1;  // the tiles that are transformed
#pragma omp for collapse(2) schedule(static)
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t tile = block * tiles / blocks;
        const int64_t count = (block + 1) * tiles / blocks - tile;  // as even as may be
        const Groups groups(count);
        if (at_hand != block) transform(c, tile, groups, reinterpret_cast<const T*>(zeros), image);
        at_hand = block;
        const float* weight = c.weight + panel * SPOTS * p.channels * PANEL;
        multiply<SPOTS>(p, groups, image, weight, sums);
        for (int64_t t = 0; t < count; ++t) {
          const Corner at(c, tile + t);
          float made[(SIDE - 2) * (SIDE - 2)][PANEL];
          if (!combine<SIDE>(sums + t * PANEL, apart(count, PANEL), made))
            directly(c, at, weight, made);
          PUT<T>[c.unary](c, at, panel * PANEL, made);
        }
      }
  }
}

}  // namespace
}  // namespace ipex

#define CONVOLUTION(name, T)                                                                     \
  extern "C" void name(const int64_t* plane, const void* x, const void* weight, const void* bias, \
                       const void* other, void* result, int32_t unary) {                         \
    ipex::convolve(ipex::Convolution<T>{*reinterpret_cast<const ipex::Plane*>(plane), (const T*)x, \
                                        (const float*)weight, (const T*)bias, (const T*)other,   \
                                        (T*)result, unary});                                     \
  }

CONVOLUTION(winograd_bfloat16, c10::BFloat16)
CONVOLUTION(winograd_float32, float)

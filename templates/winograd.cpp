// Convolutions of 3 x 3 pixels by Winograd's F(2 x 2, 3 x 3) (Lavin and Gray, "Fast Algorithms for
// Convolutional Neural Networks", 2015): four pixels of the result take 16 products of each pair of
// channels, not 36. Some tiles of four pixels are transformed together, so that they fit the second
// cache, and multiplied by panels of 16 channels of the weight.
// Follows `blocked.cpp`, whose words these are, and `short_attention.cpp` for the sizes of panels.

namespace ipex {
namespace {

constexpr int64_t SPOTS = 16;           // of a transformed tile
constexpr int64_t CACHED = 192 << 10;   // bytes of transformed tiles, about
constexpr int64_t LEAST_TILES = 18, MOST_TILES = 30;  // of a block, in whole groups

// As `ipex_inductor.templates.winograd` fills it in. Channels, and those made, are whole panels.
struct Plane {
  int64_t batch, channels, height, width, made, padding[2], out[2];

  int64_t across() const { return (out[1] + 1) / 2; }
  int64_t down() const { return (out[0] + 1) / 2; }
  int64_t tiles() const { return batch * down() * across(); }
};

struct Convolution {
  Plane plane;
  const float *x, *weight, *bias, *other;  // the weight transformed, in panels
  float* result;
  int32_t unary;
};

// Where a tile of the result begins.
struct Corner {
  int64_t image, row, column;

  Corner(const Plane& p, int64_t tile)
      : image(tile / (p.down() * p.across())), row(tile / p.across() % p.down() * 2),
        column(tile % p.across() * 2) {}
};

// What the transforms of images and of sums do to four, along one axis.
inline void spread(const Vector (&d)[4], Vector (&to)[4]) {
  to[0] = d[0] - d[2];
  to[1] = d[1] + d[2];
  to[2] = d[2] - d[1];
  to[3] = d[1] - d[3];
}

inline void gather(const Vector (&m)[4], Vector& first, Vector& second) {
  first = m[0] + m[1] + m[2];
  second = m[1] - m[2] - m[3];
}

// The pixels that a tile reads, zeros beside the image.
inline void pixels(const Convolution& c, const Corner& at, const float* zeros,
                   const float* (&found)[4][4]) {
  const Plane& p = c.plane;
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 4; ++j) {
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

// Numbers from one spot to the next; never a power of two, whose lines would share a place in caches.
inline int64_t apart(int64_t tiles, int64_t channels) { return tiles * channels + 16; }

// `to` [SPOTS, groups, channels / WIDE, tiles of a group, WIDE] of tiles from `tile` on.
inline void transform(const Convolution& c, int64_t tile, const Groups& groups, const float* zeros,
                      float* to) {
  const int64_t channels = c.plane.channels, line = apart(groups.tiles, channels);
  for (int64_t group = 0; group < groups.count; ++group) {
    const int64_t begin = groups.begin(group), size = groups.begin(group + 1) - begin;
    for (int64_t t = 0; t < size; ++t) {
      const float* from[4][4];
      pixels(c, Corner(c.plane, tile + begin + t), zeros, from);
      float* put = to + begin * channels + t * WIDE;
      for (int64_t k = 0; k < channels; k += WIDE, put += size * WIDE) {
        Vector rows[4][4];
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i) {
          Vector d[4];
#pragma GCC unroll 4
          for (int64_t j = 0; j < 4; ++j) d[j] = read(from[i][j] + k);
          spread(d, rows[i]);
        }
#pragma GCC unroll 4
        for (int64_t j = 0; j < 4; ++j) {
          const Vector column[4] = {rows[0][j], rows[1][j], rows[2][j], rows[3][j]};
          Vector spots[4];
          spread(column, spots);
#pragma GCC unroll 4
          for (int64_t i = 0; i < 4; ++i) write(put + (i * 4 + j) * line, spots[i]);
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
template <int32_t unary>
void put(const Convolution& c, const Corner& at, int64_t channel, const float (&made)[4][PANEL]) {
  const Plane& p = c.plane;
  for (int64_t n = 0; n < PANEL; n += WIDE) {
    const Vector bias = c.bias ? read(c.bias + channel + n) : Vector{};
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; ++i)
#pragma GCC unroll 2
      for (int64_t j = 0; j < 2; ++j) {
        if (at.row + i >= p.out[0] || at.column + j >= p.out[1]) continue;
        const int64_t pixel = (at.image * p.out[0] + at.row + i) * p.out[1] + at.column + j;
        const int64_t place = pixel * p.made + channel + n;
        Vector value = read(made[i * 2 + j] + n) + bias;
        if (c.other) value += read(c.other + place);
        write(c.result + place, activated<unary>(value));
      }
  }
}

constexpr decltype(&put<NO_UNARY>) PUT[] = {  // by their numbers
    put<NO_UNARY>, put<RELU>, put<GELU>, put<GELU_TANH>, put<SILU>, put<SIGMOID>, put<TANH>,
};

// What a tile's sums make, from its place in `sums` [SPOTS, tiles, PANEL] on, a spot every `line`.
// False where one is infinite or no number: its neighbours in the tile may be so by it alone.
inline bool combine(const float* sums, int64_t line, float (&made)[4][PANEL]) {
  Vector nothing{};
#pragma GCC unroll 4
  for (int64_t n = 0; n < PANEL; n += WIDE) {
    Vector rows[2][4];
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
      Vector m[4];
#pragma GCC unroll 4
      for (int64_t j = 0; j < 4; ++j) m[j] = read(sums + (i * 4 + j) * line + n);
      gather(m, rows[0][i], rows[1][i]);
    }
#pragma GCC unroll 2
    for (int64_t j = 0; j < 2; ++j) {
      Vector first, second;
      gather(rows[j], first, second);
      nothing += first * 0.f + second * 0.f;
      write(made[j] + n, first);
      write(made[2 + j] + n, second);
    }
  }
  return total(nothing) == 0;
}

// The same sums one after the other, by the weight as it was before its transform.
inline void directly(const Convolution& c, const Corner& at, const float* panel,
                     float (&made)[4][PANEL]) {
  const Plane& p = c.plane;
  const float* from[4][4];
  pixels(c, at, nullptr, from);
  for (int64_t unit = 0; unit < 4 * PANEL; ++unit) {
    const int64_t pixel = unit / PANEL, n = unit % PANEL;
    float sum = 0;
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t j = 0; j < 3; ++j) {
        const float* x = from[pixel / 2 + i][pixel % 2 + j];
        for (int64_t k = 0; x && k < p.channels; ++k) {
          const auto spot = [&](int64_t a, int64_t b) {
            return panel[((a * 4 + b) * p.channels + k) * PANEL + n];
          };
          const auto along = [&](int64_t a) {
            return j == 1 ? spot(a, 1) - spot(a, 2) : spot(a, j == 0 ? 0 : 3);
          };
          sum += x[k] * (i == 1 ? along(1) - along(2) : along(i == 0 ? 0 : 3));
        }
      }
    made[pixel][n] = sum;
  }
}

// `sums` [SPOTS, count, PANEL] of transformed tiles and a panel of the weight.
inline void multiply(const Plane& p, const Groups& groups, const float* image, const float* weight,
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

void convolve(const Convolution& c) {
  const Plane& p = c.plane;
  const int64_t fit = CACHED / (SPOTS * static_cast<int64_t>(sizeof(float)) * p.channels);
  const int64_t most = std::clamp(fit / TALL * TALL, LEAST_TILES, MOST_TILES);
  const int64_t tiles = p.tiles(), blocks = (tiles + most - 1) / most;
  const int64_t panels = p.made / PANEL;
#pragma omp parallel
  {
    thread_local std::vector<float> room;  // grows to the largest that came, some hundred kilobytes
    const int64_t of_image = SPOTS * apart(most, p.channels), of_sums = SPOTS * apart(most, PANEL);
    const int64_t wanted = of_image + of_sums + p.channels;
    if (static_cast<int64_t>(room.size()) < wanted) room.resize(wanted);
    float *image = room.data(), *sums = image + of_image, *zeros = sums + of_sums;
    std::fill_n(zeros, p.channels, 0.f);
    int64_t at_hand = -1;  // the tiles that are transformed
#pragma omp for collapse(2) schedule(static)
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t tile = block * most, count = std::min(most, tiles - tile);
        const Groups groups(count);
        if (at_hand != block) transform(c, tile, groups, zeros, image);
        at_hand = block;
        const float* weight = c.weight + panel * SPOTS * p.channels * PANEL;
        multiply(p, groups, image, weight, sums);
        for (int64_t t = 0; t < count; ++t) {
          const Corner at(p, tile + t);
          float made[4][PANEL];
          if (!combine(sums + t * PANEL, apart(count, PANEL), made)) directly(c, at, weight, made);
          PUT[c.unary](c, at, panel * PANEL, made);
        }
      }
  }
}

}  // namespace
}  // namespace ipex

extern "C" void winograd_float32(const int64_t* plane, const void* x, const void* weight,
                                 const void* bias, const void* other, void* result, int32_t unary) {
  ipex::convolve(ipex::Convolution{*reinterpret_cast<const ipex::Plane*>(plane), (const float*)x,
                                   (const float*)weight, (const float*)bias, (const float*)other,
                                   (float*)result, unary});
}

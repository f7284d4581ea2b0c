// In the place of templates/sycl/engine.cpp, for devices without a matrix engine: the same functions
// on the lanes of a sub-group, of which each has a column of sums and of the second factor.
namespace engine_ {

struct Rows {
  In of[TM][TK];
};
struct Columns {
  In of[TK];
};
struct Tile {
  Sum of[TM];
};

static inline int lane() { return item_::get_sub_group().get_local_linear_id(); }

static inline void clear(Tile &tile) {
  for (int i = 0; i < TM; ++i) tile.of[i] = 0;
}

static inline void load(Rows &rows, const In *from) {
  for (int i = 0; i < TM; ++i)
    for (int k = 0; k < TK; ++k) rows.of[i][k] = from[i * LINE + k];
}

static inline void load(Columns &columns, const In *from) {
  for (int k = 0; k < TK; ++k)
    columns.of[k] = from[k / PACKED * PANEL * PACKED + lane() * PACKED + k % PACKED];
}

static inline void multiply(Tile &sums, const Rows &rows, const Columns &columns) {
  for (int i = 0; i < TM; ++i)
    for (int k = 0; k < TK; ++k) sums.of[i] += number(rows.of[i][k]) * number(columns.of[k]);
}

template <class Fn>
static inline void each(Tile &tile, Fn fn) {
  for (int i = 0; i < TM; ++i) fn(tile.of[i], i, lane());
}

static inline void multiply(Tile &first, const Tile &second) {
  for (int i = 0; i < TM; ++i) first.of[i] *= second.of[i];
}

}  // namespace engine_

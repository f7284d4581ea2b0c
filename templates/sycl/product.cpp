// y = epilogue(rows of x . weight): a work-group makes SGM x SGN blocks of BM x BN sums, one each
// sub-group. A part of its rows is gathered into local memory at a time; the weight is packed in
// panels, so that a lane reads neighbouring terms of its column as one word.
//
// CPU_LANES: the lanes are a vector of the CPU. Its driver makes a kernel twice, the second time masked,
// for what whole vectors leave of a group; that is nothing, which it learns from a return. What it does
// for each lane (a place, an epilogue) takes it long, so that is there once, in a loop.
constexpr int ROWS = TM * MT, COLUMNS = TN * NT, SUB_GROUPS = SGM * SGN;
constexpr int BLOCK = ROWS * SGM;  // rows of a work-group

KERNEL(2, SG, 1, SUB_GROUPS * SG)
void product(
    const In *x, const In *weight, const In *gated, const Out *bias, const Out *gated_bias,
    const float *scale, const Out *other, Out *y, int rows, int columns, int runs, int terms,
    int packed, long other_line, long y_line, float first, float second, GEOMETRY) {
  static Shared<Staged[BLOCK * LINE]> block_;
  static Shared<Place[BLOCK]> places_;
  auto &block = block_.data;
  auto &places = places_.data;

  const auto item = item_::get_nd_item<2>();
  if (CPU_LANES && item.get_local_range(1) != SUB_GROUPS * SG) return;
  const auto lanes = item.get_sub_group();
  const int team = SUB_GROUPS == 1 ? 0 : lanes.get_group_linear_id();
  const int lane = lanes.get_local_linear_id();
  const int begin = item.get_group(1) * BLOCK;
  const int row0 = team / SGN * ROWS;
  const int column0 = (item.get_group(0) * SGN + team % SGN) * COLUMNS;
  const auto wait = [] { group_::barrier(SUB_GROUPS == 1 ? group_::SUB_GROUP : group_::ALL); };

  const int first_place = CPU_LANES ? 0 : item.get_local_linear_id();
  for (int i = first_place; i < BLOCK; i += CPU_LANES ? 1 : SUB_GROUPS * SG) {
    places[i] = begin + i < rows ? PLACE(begin + i) : Place{0, NOWHERE, 0};
  }
  Sums sums, factors;
  clear(lanes, sums);
  if constexpr (GATED) clear(lanes, factors);
  const int whole = (terms + FILLED - 1) / FILLED * FILLED;
  const long from_panel = static_cast<long>(column0 / PANEL) * runs * whole * PANEL + column0 % PANEL * PACKED;
  for (int run = 0; run < runs; ++run) {
    for (int part = 0; part < whole; part += STEP) {
      const int here = math_::min(STEP, whole - part);
      wait();
      for (int i = team; i < BLOCK; i += SUB_GROUPS) {
        const Run found = RUN(places[i], run);
        const int low = found.low - part, high = math_::min(found.high, terms) - part;
        const In *from = x + found.begin + part + lane;
        Staged *to = block + i * LINE + lane;
        if (!CPU_LANES && low <= 0 && high >= STEP) {
#pragma unroll
          for (int k = 0; k < STEP; k += SG) to[k] = staged(from[k]);
        } else if (low <= 0 && high >= here) {
          for (int k = 0; k < here; k += SG) to[k] = staged(from[k]);
        } else {
          for (int k = 0; k < here; k += SG) {
            to[k] = k + lane >= low && k + lane < high ? staged(from[k]) : Staged{};
          }
        }
      }
      wait();
      if (SGN == 1 || column0 < packed) {
        const long at = from_panel + (static_cast<long>(run) * whole + part) * PANEL;
        for (int k = 0; k < here; k += TK) {
          step(lanes, sums, block + row0 * LINE + k, weight + at + k * PANEL);
          if constexpr (GATED) {
            step(lanes, factors, block + row0 * LINE + k, gated + at + k * PANEL);
          }
        }
      }
    }
  }

  const auto inside = [&](int i, int j) { return begin + row0 + i < rows && column0 + j < columns; };
  const auto biased = [&](float sum, const Out *by, int j) { return by ? sum + number(by[column0 + j]) : sum; };
  const auto store = [&](float made, int i, int j) {
    y[(begin + row0 + i) * y_line + column0 + j] = rounded<Out>(made);
  };
  if constexpr (GATED) {
    each(lanes, sums, [&](float &sum, int i, int j) {
      if (inside(i, j)) sum = unary(biased(sum, bias, j), first, second);
    });
    each(lanes, factors, [&](float &sum, int i, int j) {
      if (inside(i, j)) sum = biased(sum, gated_bias, j);
    });
    multiply(lanes, sums, factors);
    each(lanes, sums, [&](float &sum, int i, int j) {
      if (inside(i, j)) store(sum, i, j);
    });
  } else {
    each(lanes, sums, [&](Sum &sum, int i, int j) {
      if (!inside(i, j)) return;
      const float scaled = scale ? sum * scale[column0 + j] : sum;
      const float known = biased(scaled, bias, j);
      const Out *beside = other + (begin + row0 + i) * other_line + column0 + j;
      store(unary(other ? binary(known, number(*beside)) : known, first, second), i, j);
    });
  }
}

// Sums on a CPU that multiplies pairs of bf16. No compiler makes that instruction of SYCL, so its loop
// is written out (`dots.py`: ADD_UP), and its sums lie in memory of the group: one lane has the loop
// run, as the driver would repeat it for each, and all lanes have what comes before and after.
static_assert(!GATED && SGM * SGN == 1, "there is one memory of sums");
static_assert(TM == 1 && TN == 16 && PACKED == 2, "a register has a row's sums, or its terms by twos");

using Staged = In;
static inline Staged staged(In x) { return x; }

using Sums = float *;  // [rows, columns]

static inline void clear(sycl::sub_group lanes, Sums &sums) {
  static Shared<float[TM * MT * NT * TN]> sums_;
  sums = sums_.data + lanes.get_local_linear_id();
#pragma nounroll
  for (int i = 0; i < TM * MT * NT; ++i) sums[i * TN] = 0;
}

static inline void step(sycl::sub_group lanes, Sums &sums, const Staged *rows, const In *weight) {
  if (lanes.get_local_linear_id() != 0) return;
  long pairs = TK / PACKED;
  asm volatile(ADD_UP : "+&r"(rows), "+&r"(weight), "+&r"(pairs) : "r"(sums) : "memory", "cc", CHANGED);
}

template <class Fn>
static inline void each(sycl::sub_group lanes, Sums &sums, Fn fn) {
  group_::barrier(group_::SUB_GROUP);  // the one lane is done
#pragma nounroll
  for (int i = 0; i < TM * MT; ++i) {
#pragma nounroll
    for (int j = 0; j < NT; ++j) {
      fn(sums[(i * NT + j) * TN], i, j * TN + static_cast<int>(lanes.get_local_linear_id()));
    }
  }
}

static inline void multiply(sycl::sub_group, Sums &, Sums &) {}  // of a second product

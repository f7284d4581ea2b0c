// What lines compute with in place of a `Real`: as many fp32 as the CPU's registers hold.
constexpr int64_t WIDE = __BIGGEST_ALIGNMENT__ / sizeof(Real);
// Numbers that loops ask for ahead: on an AVX2 CPU (Zen 1) SGD took a seventh more without.
constexpr int64_t AHEAD = 256;
typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t Chosen __attribute__((vector_size(4 * WIDE)));  // all bits of a lane, or none
typedef uint32_t Words __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(4 * WIDE)));

struct Numbers {
  Floats each;
  Numbers() = default;
  Numbers(Floats x) : each(x) {}
  Numbers(Real x) : each(x - Floats{}) {}  // -0 too, so nothing is subtracted from it
  template <class Fn>
  Numbers by_lanes(Fn fn) const {
    Numbers made;
    for (int lane = 0; lane < WIDE; ++lane) made.each[lane] = fn(each[lane], lane);
    return made;
  }
};
inline Numbers operator+(Numbers a, Numbers b) { return a.each + b.each; }
inline Numbers operator-(Numbers a, Numbers b) { return a.each - b.each; }
inline Numbers operator*(Numbers a, Numbers b) { return a.each * b.each; }
inline Numbers operator/(Numbers a, Numbers b) { return a.each / b.each; }
inline Numbers operator-(Numbers a) { return -a.each; }
inline Chosen operator<(Numbers a, Numbers b) { return a.each < b.each; }
inline Chosen operator!=(Numbers a, Numbers b) { return a.each != b.each; }
inline Numbers where(Chosen chosen, Numbers a, Numbers b) { return chosen ? a.each : b.each; }
inline Words where(Chosen chosen, Words a, Words b) { return chosen ? a : b; }
inline Numbers maximum(Numbers a, Numbers b) {
  return (a.each > b.each) | (a.each != a.each) ? a.each : b.each;
}
inline Numbers sqrt(Numbers x) {
  return x.by_lanes([](Real one, int) { return std::sqrt(one); });
}
inline Numbers pow(Numbers x, Numbers y) {
  return x.by_lanes([&](Real one, int lane) { return std::pow(one, y.each[lane]); });
}

// Of each word these halves, of which the lower ones have nothing above them. One blend, that is.
inline Words halves(Words lower, Words upper) {
#ifdef __clang__
  return lower | (upper & 0xffff0000);
#else  // GCC makes none of masks
  Halves places;
  for (int place = 0; place < 2 * WIDE; ++place) places[place] = place % 2 ? 2 * WIDE + place : place;
  return (Words)__builtin_shuffle((Halves)lower, (Halves)upper, places);
#endif
}

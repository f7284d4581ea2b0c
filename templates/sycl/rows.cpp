// Rows that lie as they are: one run each, of all terms.
struct Place {
  long begin;
  int high, unused;
};
struct Run {
  long begin;
  int low, high;
};
constexpr int NOWHERE = 0;
#define GEOMETRY long x_line
#define PLACE(row) Place{(row) * x_line, terms, 0}
#define RUN(place, run) Run{(place).begin, 0, (place).high}

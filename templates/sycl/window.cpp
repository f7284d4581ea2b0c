// Windows of a channels-last image: a row of the product is a pixel of the result, and a run the
// channels of one pixel below the window, or, where columns lie side by side, of a row of it.
struct Place {
  long image;
  int top, left;
};
struct Run {
  long begin;
  int low, high;
};
constexpr int NOWHERE = -(1 << 30);
#define GEOMETRY                                                                              \
  int height, int width, int channels, int out_height, int out_width, int across, int stride_h, \
      int stride_w, int padding_h, int padding_w, int dilation_h, int dilation_w
#define PLACE(row) place(row, height, width *channels, out_height, out_width, stride_h, stride_w *channels, padding_h, padding_w *channels)
#define RUN(place, run) run_of(place, (run) / across * dilation_h, (run) % across * dilation_w * channels, height, width *channels)

static inline Place place(int row, int height, int line, int out_height, int out_width, int stride_h, int stride, int padding_h, int padding) {
  const int column = row % out_width, above = row / out_width;
  const long image = above / out_height * static_cast<long>(height) * line;
  return {image, above % out_height * stride_h - padding_h, column * stride - padding};
}

static inline Run run_of(Place from, int down, int right, int height, int line) {
  const int at = from.top + down, left = from.left + right;
  const bool there = at >= 0 && at < height;
  return {from.image + static_cast<long>(at) * line + left, -left, there ? line - left : -left};
}

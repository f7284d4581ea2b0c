// A convolution whose channels are in groups, channels last: a lane makes one channel of PIXELS
// neighbours of a row, so weights are read once for all of them.
KERNEL(2, SG, 1, SUB_GROUPS * SG)
void grouped(
    const In *x, const In *weight, const In *bias, const In *other, In *y, int lines, int height,
    int width, int channels, int out_height, int out_width, int made, int window_h, int window_w,
    int stride_h, int stride_w, int padding_h, int padding_w, int dilation_h, int dilation_w,
    int of_each, int to_each, float first, float second) {
  const auto item = item_::get_nd_item<2>();
  if (CPU_LANES && item.get_local_range(1) != SUB_GROUPS * SG) return;  // as in product.cpp
  const auto lanes = item.get_sub_group();
  const int team = SUB_GROUPS == 1 ? 0 : lanes.get_group_linear_id();
  const int block = item.get_group(1) * SUB_GROUPS + team;
  const int blocks = (out_width + PIXELS - 1) / PIXELS;
  const int line = block / blocks, column0 = block % blocks * PIXELS;
  const int channel = item.get_group(0) * SG + static_cast<int>(lanes.get_local_linear_id());
  if (line >= lines || channel >= made) return;
  const int top = line % out_height * stride_h - padding_h, left = column0 * stride_w - padding_w;
  const In *image = x + static_cast<long>(line / out_height) * height * width * channels;
  const In *from = image + channel / to_each * of_each;

  float sums[PIXELS] = {};
  for (int i = 0; i < window_h; ++i) {
    const int row = top + i * dilation_h;
    if (row < 0 || row >= height) continue;
    for (int j = 0; j < window_w; ++j) {
      const int at = left + j * dilation_w;
      const In *factors = weight + static_cast<long>((i * window_w + j) * of_each) * made + channel;
      for (int c = 0; c < of_each; ++c) {
        const float factor = number(factors[static_cast<long>(c) * made]);
#pragma unroll
        for (int p = 0; p < PIXELS; ++p) {
          const int column = at + p * stride_w;
          if (column >= 0 && column < width) {
            sums[p] += factor * number(from[(static_cast<long>(row) * width + column) * channels + c]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int p = 0; p < PIXELS; ++p) {
    if (column0 + p >= out_width) break;
    const long place = (static_cast<long>(line) * out_width + column0 + p) * made + channel;
    const float sum = bias ? sums[p] + number(bias[channel]) : sums[p];
    y[place] = rounded<In>(unary(other ? binary(sum, number(other[place])) : sum, first, second));
  }
}
